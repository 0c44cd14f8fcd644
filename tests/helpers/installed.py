"""A fixture that installs a distribution with entry points."""

import contextlib
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
    for each in (list_verbs, registry._listed, decompressors.find_decompressor, observers._installed):
        each.cache_clear()
    observers._failed.clear()


@contextlib.contextmanager
def installing(folder):
    """Yield a function that installs a distribution with some entry points of a group, as pip would lay it out."""
    folder.mkdir(exist_ok=True)

    def install(group, *lines, module=MODULE):
        (folder / "tiny.py").write_text(module)
        info = folder / "tiny-1.2.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: tiny\nVersion: 1.2\n")
        (info / "entry_points.txt").write_text("\n".join([f"[{group}]", *lines]) + "\n")
        sys.path.insert(0, str(folder))
        forget()

    yield install
    sys.modules.pop("tiny", None)
    if str(folder) in sys.path:
        sys.path.remove(str(folder))
    forget()


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Installs a distribution with these entry points of one group, until the test ends."""
    with installing(tmp_path) as made:
        yield made
        monkeypatch.undo()
