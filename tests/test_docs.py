"""Documentation that is not run is wrong sooner or later: its code runs here; pytest itself runs the docstrings."""

import doctest
import importlib
import re
import textwrap
from pathlib import Path

import pytest
import torch

import snapshot

ROOT = Path(__file__).parents[1]
PAGES = [
    "README.md",
    "docs/getting-started.md",
    "docs/recipes.md",
    "docs/async.md",
    "docs/changed-run.md",
    "docs/manager.md",
    "docs/interop.md",
    "docs/storage.md",
    "docs/plugins.md",
]


def blocks(page: str) -> list[tuple[int, str]]:
    """The Python code of a page, each block with the line that it begins in."""
    text = (ROOT / page).read_text()
    found = re.finditer(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    return [(text.count("\n", 0, block.start(1)), block[1]) for block in found]


@pytest.mark.parametrize("page", PAGES)
def test_the_code_of_a_page_runs_from_top_to_bottom(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    found = blocks(page)
    assert found
    state = torch.get_rng_state()
    names: dict[str, object] = {"__name__": page}
    try:
        for line, block in found:
            code = compile("\n" * line + textwrap.dedent(block), str(ROOT / page), "exec")
            exec(code, names)
    finally:
        torch.set_rng_state(state)
    capsys.readouterr()


def test_there_are_examples_of_what_users_meet_first() -> None:
    finder = doctest.DocTestFinder()
    shown = [test.name for test in finder.find(snapshot.Snapshot) if test.examples]
    assert "Snapshot" in shown
    assert "Snapshot.async_take" in shown


def test_every_page_is_reached_from_the_index() -> None:
    docs = ROOT / "docs"
    pages = {str(page.relative_to(docs).with_suffix("")) for page in docs.rglob("*.md") if "_build" not in page.parts}
    reached = set(re.findall(r"^([a-z/-]+)$", (docs / "index.md").read_text(), re.MULTILINE))
    inner = re.findall(r"^([a-z-]+)$", (docs / "reference" / "index.md").read_text(), re.MULTILINE)
    verbs = re.findall(r"^([a-z]+)$", (docs / "cli" / "index.md").read_text(), re.MULTILINE)
    assert pages == reached | {f"reference/{page}" for page in inner} | {f"cli/{page}" for page in verbs} | {"index"}


def test_every_setting_and_error_is_in_the_reference() -> None:
    assert "snapshot.options.Settings" in (ROOT / "docs/reference/options.md").read_text()
    assert ".. automodule:: snapshot.errors" in (ROOT / "docs/reference/errors.md").read_text()
    api = (ROOT / "docs/reference/api.md").read_text()
    errors = {name for name in snapshot.__all__ if name in vars(importlib.import_module("snapshot.errors"))}
    assert [
        name for name in snapshot.__all__ if name not in errors and not re.search(rf"\.\. auto\w+:: {name}$", api, re.M)
    ] == []
