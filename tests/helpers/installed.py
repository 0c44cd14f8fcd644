"""A fixture that installs a distribution with entry points."""

import sys

import pytest

from snapshot import extensions
from snapshot.cli.arguments import list_verbs
from snapshot.formats import decompressors, registry
from snapshot.save import observers

MODULE = """
from snapshot.cli.verb import Verb

GREET = Verb("greet", "tiny.greet_verb")
number = 7
"""


def forget():
    """List entry points again, and what was made of them."""
    extensions.forget()
    for each in (list_verbs, registry.formats, decompressors.find_decompressor, observers._installed):
        each.cache_clear()


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Installs a distribution with these entry points of one group, as pip would lay it out."""

    def install(group, *lines, module=MODULE):
        (tmp_path / "tiny.py").write_text(module)
        info = tmp_path / "tiny-1.2.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: tiny\nVersion: 1.2\n")
        (info / "entry_points.txt").write_text("\n".join([f"[{group}]", *lines]) + "\n")
        monkeypatch.syspath_prepend(str(tmp_path))
        forget()

    yield install
    sys.modules.pop("tiny", None)
    monkeypatch.undo()
    forget()
