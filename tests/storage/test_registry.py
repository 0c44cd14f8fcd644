"""A scheme finds its plugin: registered here, installed by a third party, or built in."""

import sys
from collections.abc import Iterator

import pytest

from snapshot import Snapshot, SnapshotManager, StateDict, extensions
from snapshot.errors import MissingExtraError, StorageError
from snapshot.io.registry import open_storage, plugin_for, register, schemes, unregister
from snapshot.io.storage import URL, Context
from snapshot.storages.file.file_storage import FileStorage
from snapshot.storages.memory import MemoryStorage

THIRD_PARTY = """
from snapshot.storages.memory import MemoryStorage

class TinyStorage(MemoryStorage):
    pass

def not_a_storage(): ...
"""


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Installs a distribution whose entry points are the given lines, as pip would lay it out."""

    def install(*lines):
        (tmp_path / "tiny_storage.py").write_text(THIRD_PARTY)
        info = tmp_path / "tiny_storage-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: tiny-storage\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text("\n".join(["[snapshot.storages]", *lines]) + "\n")
        monkeypatch.syspath_prepend(str(tmp_path))
        extensions.forget()

    yield install
    sys.modules.pop("tiny_storage", None)
    monkeypatch.undo()
    extensions.forget()


@pytest.fixture
def mine() -> Iterator[type[MemoryStorage]]:
    class Mine(MemoryStorage):
        pass

    yield Mine
    for scheme in ["mine", "file", "tiny", "wrap+"]:
        unregister(scheme)


@pytest.mark.parametrize(("text", "plugin"), [("/tmp/run", FileStorage), ("memory://run", MemoryStorage)])
def test_plugin_for_built_in_schemes(text, plugin):
    url = URL.parse(text)
    assert plugin_for(url) is plugin
    assert url.scheme in schemes()


def test_open_storage_passes_url_options_and_context(mine):
    register("mine", mine)
    context = Context(durable=False)
    storage = open_storage(URL.parse("mine://run"), {}, context)
    assert type(storage) is mine
    assert (storage.url, storage.options, storage.context) == (URL.parse("mine://run"), {}, context)


def test_plugin_for_finds_an_installed_plugin_by_its_entry_point(install):
    install("tiny = tiny_storage:TinyStorage")
    assert plugin_for(URL.parse("tiny://run")).__name__ == "TinyStorage"
    assert "tiny" in schemes()


def test_plugin_for_never_replaces_a_built_in_plugin_by_an_installed_one(install):
    install("memory = tiny_storage:TinyStorage")
    assert plugin_for(URL.parse("memory://run")).__name__ == "MemoryStorage"


def test_register_takes_precedence_over_other_plugins(install, mine):
    install("tiny = tiny_storage:TinyStorage")
    before = plugin_for(URL.parse("tiny://run"))
    register("tiny", mine)
    assert plugin_for(URL.parse("tiny://run")) is mine
    unregister("tiny")
    assert plugin_for(URL.parse("tiny://run")) is before


@pytest.mark.parametrize("scheme", ["file", "memory", "s3", "near", "fsspec+"])
def test_register_refuses_the_schemes_of_this_library(mine, scheme):
    with pytest.raises(ValueError, match="must be one that this library does not open itself"):
        register(scheme, mine)


def test_unregister_of_an_unknown_scheme_is_harmless():
    unregister("never")


def test_register_scheme_ending_in_plus_matches_prefixed_urls(mine):
    register("wrap+", mine)
    for text in ["wrap+file:///tmp/run", "wrap+s3://bucket", "wrap+wrap+memory://run"]:
        assert plugin_for(URL.parse(text)) is mine
    assert "wrap+" not in schemes()
    with pytest.raises(StorageError, match="no storage plugin for the scheme 'wrap'"):
        plugin_for(URL.parse("wrap://run"))


def test_plugin_for_a_plugin_with_a_missing_package_raises_missing_extra_error(install):
    install("tiny = tiny_storage_that_needs_more:TinyStorage")
    with pytest.raises(MissingExtraError, match="tiny_storage_that_needs_more") as caught:
        plugin_for(URL.parse("tiny://user:secret@run"))
    assert isinstance(caught.value.__cause__, ImportError)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("name", ["not_a_storage", "THIRD"])
def test_plugin_for_an_entry_point_that_is_no_storage_is_refused(install, name):
    install(f"tiny = tiny_storage:{name}")
    with pytest.raises(StorageError, match=f"tiny = tiny_storage:{name} "):
        plugin_for(URL.parse("tiny://run"))


def test_plugin_for_a_plugin_without_its_extra_names_the_extra(install):
    install("cloud = no_such_client:CloudStorage [cloud]")
    with pytest.raises(MissingExtraError, match="install the extra 'cloud'") as caught:
        plugin_for(URL.parse("cloud://bucket"))
    assert isinstance(caught.value, ImportError)
    assert isinstance(caught.value.__cause__, ModuleNotFoundError)


@pytest.mark.parametrize(("text", "hint"), [("fil:///tmp/x", "file://"), ("memroy://run", "memory://")])
def test_plugin_for_an_unknown_scheme_suggests_the_nearest(text, hint):
    with pytest.raises(StorageError, match=f"did you mean {hint}\\?"):
        plugin_for(URL.parse(text))


def test_plugin_for_a_scheme_of_a_plugin_without_an_installation_names_the_cure(monkeypatch):
    monkeypatch.setattr(extensions, "own_points", dict)
    monkeypatch.setattr(extensions, "other_points", dict)
    monkeypatch.setattr(extensions, "forget", list)
    with pytest.raises(StorageError, match="snapshot-torch is not installed here, so its plugins are not known"):
        plugin_for(URL.parse("s3://bucket"))


def test_plugin_for_an_unknown_scheme_lists_the_known_schemes():
    with pytest.raises(StorageError, match="no storage plugin for the scheme 'zzzzzz'") as caught:
        plugin_for(URL.parse("zzzzzz://run"))
    assert "did you mean" not in str(caught.value)
    assert str(caught.value).endswith(f"known schemes: {', '.join(schemes())}")


@pytest.mark.parametrize("wrong", ["key=secret", b"x", 3, ["key"], [("key", "secret")]])
def test_storage_options_that_are_not_a_mapping_are_refused_without_their_value(tmp_path, wrong):
    kind = type(wrong).__name__
    for call in (
        lambda: Snapshot(tmp_path / "s", storage_options=wrong),
        lambda: Snapshot.take(tmp_path / "s", {"s": StateDict(a=1)}, storage_options=wrong),
        lambda: Snapshot.async_take(tmp_path / "s", {"s": StateDict(a=1)}, storage_options=wrong),
        lambda: SnapshotManager(tmp_path / "r", storage_options=wrong).steps(),
    ):
        with pytest.raises(TypeError, match=f"^storage_options must be a mapping, got an? {kind}$"):
            call()
    assert not list(tmp_path.iterdir())
