"""What the pages show is what the command prints: each is run as a reader would, beside the script of the chapter."""

import os

import pytest

from tests.cli import pages
from tests.helpers.versions import newer_adamw


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pages")
    pages.make(folder)
    return folder


@newer_adamw
@pytest.mark.parametrize("name", [name for name in pages.names() if name not in pages.MACHINES])
def test_docs_page_shows_what_its_commands_print(name, made, monkeypatch):
    monkeypatch.delenv("SNAPSHOT_STORAGE_OPTIONS", raising=False)
    monkeypatch.setenv("NO_COLOR", "1")
    page = (pages.PAGES / f"{name}.md").read_text()
    assert pages.alike(pages.replayed(page, made)).split(". ") == pages.alike(page).split(". ")


CONSOLE = "```console\n$ {command}\n{shown}```\n"


@pytest.mark.parametrize(
    ("command", "shown"),
    [
        ("snapshot ls nowhere", ""),
        ("snapshot diff run/step-100 run/step-200", ""),
        ("snapshot report run/step-200 -o report.html --trace none.json", ""),
        ("snapshot ls nowhere", "$ echo $?\n1\n"),
        ("snapshot ls run/step-100", "$ echo $?\n1\n"),
        ("snapshot ls nowhere", "$ ls\n$ echo $?\n2\n"),
    ],
)
def test_docs_page_cannot_show_a_failed_command_without_marking_it(made, command, shown):
    with pytest.raises(pages.PageError, match="exit status"):
        pages.replayed(CONSOLE.format(command=command, shown=shown), made)
    with pytest.raises(pages.PageError, match="exit status"):
        pages.replayed("% $ snapshot ls nowhere\n", made)


def test_docs_page_shows_a_failed_command_that_is_marked(made):
    page = pages.replayed(CONSOLE.format(command="snapshot ls nowhere", shown="$ echo $?\n2\n"), made)
    assert "there is no snapshot here" in page
    assert page.endswith("$ echo $?\n2\n```\n")


def test_docs_page_script_leaves_three_steps(made):
    assert sorted(os.listdir(made / "run")) == ["step-100", "step-200", "step-300"]
