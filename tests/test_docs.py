"""Documentation that is not run is wrong sooner or later: its code runs here; pytest itself runs the docstrings."""

import doctest
import importlib
import inspect
import json
import re
import textwrap
import tomllib
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path

import pytest
import torch

import snapshot
from snapshot import RestoreOptions, Snapshot, TakeOptions
from snapshot.manifest import document
from snapshot.plan import layout
from snapshot_bench.results import draw_case
from snapshot_publish import shares
from snapshot_tiers import control
from tests import search
from tests.helpers.links import broken_links
from tests.helpers.servers import S3
from tests.helpers.trees import PYTHONPATH

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PHRASES = DOCS / "search.toml"
PAGES = [
    "README.md",
    "docs/start/getting-started.md",
    "docs/guides/recipes.md",
    "docs/guides/async.md",
    "docs/guides/changed-run.md",
    "docs/guides/manager.md",
    "docs/integrations/interop.md",
    "docs/guides/publish.md",
    "docs/storage/index.md",
    "docs/storage/plugins.md",
    "docs/guides/performance.md",
    "docs/guides/sizes.md",
    "docs/guides/troubleshooting.md",
    "docs/migrate/from-dcp.md",
    "docs/migrate/from-torch-save.md",
]
WIDEST = 88
"""Columns of a code block. Pages that show the output of commands or the file format are exempt."""
WIDE = {"docs/design.md", "docs/format.md"}


def blocks(page: str, kinds: str = "python") -> list[tuple[int, str]]:
    """Return the code blocks of a page, each with the number of the line above it."""
    text = (ROOT / page).read_text()
    found = re.finditer(rf"^```(?:{kinds})\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    return [(text.count("\n", 0, block.start(1)), block[1]) for block in found]


def outputs(page: str) -> dict[int, str]:
    """Return the output that a page shows directly below a Python block, by the line above that block."""
    text = (ROOT / page).read_text()
    shown = re.finditer(r"^```python\n(?:(?!```).*\n)*```\n\n```text\n((?:(?!```).*\n)*)```$", text, re.MULTILINE)
    return {text.count("\n", 0, found.start()) + 1: found[1] for found in shown}


def without_measures(text: str) -> str:
    """Replace what differs between two runs or two machines: fractions, durations, rates, means of what has ended."""
    return re.sub(
        r"[\d,.]+ (?:µs|ms|s|min|h)\b|\d[\d,]*\.\d+%?|[KMG]iB/s|(?<=every )[\d,]+|(?<=mean of )\d+",
        "#",
        " ".join(text.split()),
    )


def run_page(
    page: str, folder: Path, monkeypatch: pytest.MonkeyPatch, read_output: Callable[[], str] | None = None
) -> None:
    """Run the Python code of a page from top to bottom, in a folder. Compare its output with the page, if it is read.

    "..." in the page matches any text.
    """
    monkeypatch.chdir(folder)
    monkeypatch.setenv("PYTHONPATH", PYTHONPATH)  # for processes that the page starts
    found, expected = blocks(page), outputs(page)
    assert found
    state = torch.get_rng_state()
    names: dict[str, object] = {"__name__": page}
    try:
        for line, block in found:
            code = compile("\n" * line + textwrap.dedent(block), str(ROOT / page), "exec")
            exec(code, names)
            if read_output is None:
                continue
            printed = read_output().replace(str(folder), "/home/me")
            wanted = expected.pop(line, None)
            if wanted is not None:
                pattern = ".*".join(map(re.escape, without_measures(wanted).split("...")))
                assert re.fullmatch(pattern, without_measures(printed)), f"{page}:{line}: {printed}"
        assert read_output is None or expected == {}
    finally:
        torch.set_rng_state(state)


@pytest.mark.parametrize("page", PAGES)
def test_docs_page_code_runs_from_top_to_bottom(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run_page(page, tmp_path, monkeypatch, lambda: capsys.readouterr().out)


@pytest.mark.examples
@pytest.mark.timeout(400)
def test_docs_tutorial_runs_against_a_server(
    moto: S3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    moto.request("PUT", "/tutorial")
    monkeypatch.setenv("AWS_ENDPOINT_URL", moto.url)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", moto.key)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", moto.secret)
    monkeypatch.setenv("AWS_DEFAULT_REGION", moto.region)
    run_page("docs/start/tutorial.md", tmp_path, monkeypatch, lambda: capfd.readouterr().out)
    assert len(outputs("docs/start/tutorial.md")) == 5


def test_docstrings_of_snapshot_have_examples() -> None:
    finder = doctest.DocTestFinder()
    shown = [test.name for test in finder.find(snapshot.Snapshot) if test.examples]
    assert "Snapshot" in shown
    assert "Snapshot.async_take" in shown


def reachable(page: Path) -> set[Path]:
    """Return the pages that a page's toctrees list, directly or through others."""
    found = set()
    for _, tree in blocks(str(page.relative_to(ROOT)), r"\{toctree\}"):
        for line in tree.splitlines():
            name = re.sub(r"^.*<(.*)>$", r"\1", line.strip())
            if name and not name.startswith(":"):
                below = page.parent / f"{name}.md"
                found |= {below, *reachable(below)}
    return found


def test_docs_pages_are_reachable_from_the_index() -> None:
    pages = {page for page in DOCS.rglob("*.md") if "_build" not in page.parts}
    assert reachable(DOCS / "index.md") | {DOCS / "index.md"} == pages


def test_docs_search_is_asked_for_pages_that_exist() -> None:
    questions = search.read_questions()
    assert len(questions) >= 40
    named = {page for pages in questions.values() for page in pages} | set(tomllib.loads(PHRASES.read_text()))
    assert sorted(page for page in named if not (DOCS / f"{page}.md").is_file()) == []


def test_docs_toctree_shows_the_titles_of_pages() -> None:
    trees = [tree for page in DOCS.rglob("*.md") for _, tree in blocks(str(page.relative_to(ROOT)), r"\{toctree\}")]
    assert trees
    assert [line for tree in trees for line in tree.splitlines() if "<" in line] == []


def test_docs_reference_has_every_setting_and_error() -> None:
    assert "snapshot.settings.Settings" in (DOCS / "reference/settings.md").read_text()
    assert ".. automodule:: snapshot.errors" in (DOCS / "reference/errors.md").read_text()
    reference = "\n".join(page.read_text() for page in (DOCS / "reference").glob("*.md"))
    overview = (DOCS / "reference/api.md").read_text()
    errors = {name for name in snapshot.__all__ if name in vars(importlib.import_module("snapshot.errors"))}
    names = [name for name in snapshot.__all__ if name not in errors]
    assert [name for name in names if not re.search(rf"\.\. auto\w+:: {name}$", reference, re.M)] == []
    assert [name for name in names if f"`{name}`" not in overview] == []


def test_docs_reference_pages_list_exceptions() -> None:
    pages = [page for page in (DOCS / "reference").glob("*.md") if "{eval-rst}" in page.read_text()]
    without = {page.stem for page in pages if "\n## Exceptions\n" not in page.read_text()}
    assert without == {"errors", "settings"}


@pytest.mark.parametrize("name", ["Snapshot", "PendingSnapshot", "SnapshotManager"])
def test_docs_reference_lists_the_exceptions_of_every_method(name: str) -> None:
    page = re.sub(r"(?<!^)([A-Z])", r"-\1", name).lower()
    table = (DOCS / "reference" / f"{page}.md").read_text().partition("\n## Exceptions\n")[2].partition("\n## ")[0]
    kind = getattr(snapshot, name)
    methods = [
        method
        for method, value in inspect.getmembers(kind)
        if not method.startswith("_")
        and (inspect.isroutine(value) or isinstance(value, property))
        and method
        not in (
            "restore_with",
            "new_session",
            "location",
            "of",
        )  # which the page leaves out
    ]
    assert [method for method in methods if f"`{method}`" not in table] == []


def test_docs_troubleshooting_names_every_error() -> None:
    text = (DOCS / "guides/troubleshooting.md").read_text()
    errors = importlib.import_module("snapshot.errors")
    names = [
        name for name, value in vars(errors).items() if inspect.isclass(value) and value.__module__ == errors.__name__
    ]
    assert "RankError" in names
    assert [name for name in names if f"`{name}`" not in text] == []


def test_docs_benchmark_figure_shows_the_stored_result() -> None:
    result = json.loads((DOCS / "_static/benchmark.json").read_text())
    assert (DOCS / "_static/benchmark.svg").read_text() == draw_case(result, "train")


def test_docs_code_lines_fit_the_page_width() -> None:
    pages = [
        page
        for page in ("README.md", *(str(path.relative_to(ROOT)) for path in DOCS.rglob("*.md")))
        if page not in WIDE and not page.startswith("docs/reference/cli/") and "_build" not in page
    ]
    assert [
        f"{page}:{begin + number}: {len(line)}"
        for page in pages
        for begin, block in blocks(page, "py|python|console|text|toml|bash|sh")
        for number, line in enumerate(block.splitlines(), 1)
        if len(line) > WIDEST
    ] == []


def test_docs_broken_links_finds_missing_pages_and_anchors(tmp_path: Path) -> None:
    (tmp_path / "a.html").write_text(
        '<p id="here"></p><a href="b.html#there">b</a><a href="#here">a</a><img src="c.svg">'
    )
    (tmp_path / "b.html").write_text('<a href="https://example.com/x">elsewhere</a>')
    assert broken_links(tmp_path) == ["a.html: b.html#there has no such anchor", "a.html: c.svg does not exist"]


@pytest.mark.parametrize(
    ("page", "text", "is_true"),
    [
        ("format.md", "A file is closed at 4 GiB of data", lambda: layout.LARGEST_FILE == 4 << 30),
        ("guides/distributed.md", "Data files have at most 4 GiB", lambda: layout.LARGEST_FILE == 4 << 30),
        ("format.md", "at most 100,000 entries", lambda: document.IN_ONE == 100_000),
        ("guides/publish.md", "256 MiB of others", lambda: shares.GROUP == shares.DELTA_SHARD == 256 << 20),
        (
            "guides/troubleshooting.md",
            "replaced after 15 seconds",
            lambda: control.SILENT * (control.PERIOD + control.PING) == 15,
        ),
    ],
)
def test_limits_in_the_docs_are_those_of_the_code(page, text, is_true):
    assert text in (DOCS / page).read_text()
    assert is_true()


def test_docs_spell_options_as_options() -> None:
    """`take(..., durable=False)` is an error: `TakeOptions(durable=False)` is what a call accepts."""
    found = []
    for verb, kind in (("take", TakeOptions), ("restore", RestoreOptions)):
        elsewhere = {each.name for each in fields(kind)} - inspect.signature(getattr(Snapshot, verb)).parameters.keys()
        call = re.compile(rf"{verb}\((?:[^()]|\([^()]*\))*?\b({'|'.join(sorted(elsewhere))})=")
        for page in (ROOT / "README.md", *DOCS.rglob("*.md")):
            if "_build" not in page.parts:
                found += [f"{page.relative_to(ROOT)}: {match[0]}" for match in call.finditer(page.read_text())]
    assert [each for each in found if "Options(" not in each] == []
