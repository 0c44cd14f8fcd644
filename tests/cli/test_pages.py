"""What the pages show is what the command prints: each is run as a reader would, beside the script of the chapter."""

import os

import pages
import pytest


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pages")
    pages.make(folder)
    return folder


@pytest.mark.parametrize("name", [name for name in pages.names() if name not in pages.MACHINES])
def test_a_page_shows_what_its_commands_print(name, made, monkeypatch):
    monkeypatch.delenv("SNAPSHOT_STORAGE_OPTIONS", raising=False)
    monkeypatch.setenv("NO_COLOR", "1")
    page = (pages.PAGES / f"{name}.md").read_text()
    assert pages.alike(pages.replayed(page, made)).split(". ") == pages.alike(page).split(". ")


def test_the_script_leaves_three_steps(made):
    assert sorted(os.listdir(made / "run")) == ["step-100", "step-200", "step-300"]
