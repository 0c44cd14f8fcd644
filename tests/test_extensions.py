"""Entry points: those of this library are found first, and what others declare wrongly is named, or left out."""

import importlib.util
import logging
import sys
import tomllib
from pathlib import Path

import pytest

from snapshot import Snapshot, StateDict, TakeOptions, extensions
from snapshot.cli import main
from snapshot.cli.arguments import list_verbs
from snapshot.errors import MissingExtraError, SnapshotError, StorageError
from snapshot.formats import registry
from snapshot.io.registry import plugin_for
from snapshot.io.storage import URL

ROOT = Path(__file__).parents[1]


def declared():
    found = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    return {
        (group, name): value
        for group, points in found.items()
        if group.startswith("snapshot.")
        for name, value in points.items()
    }


def test_entry_points_of_the_installation_are_those_of_pyproject_toml():
    installed = {key: point.value for key, point in extensions.own_points().items()}
    assert installed == declared(), "run `pip install -e .` again: the installation has other entry points"


def test_entry_points_of_this_library_name_modules_of_its_plugins():
    for point in extensions.own_points().values():
        assert (ROOT / "plugins" / point.module.replace(".", "/")).with_suffix(".py").is_file(), point


def test_reserved_names_are_those_of_our_packages_and_of_no_other(install):
    for (group, name), package in extensions.RESERVED.items():
        point = extensions.find(group, name)
        assert point is not None
        assert point.module.partition(".")[0] == package
    install("snapshot.seals", "ed25519 = tiny:number", "other = tiny:number")
    assert extensions.find("snapshot.seals", "other") is not None


def test_claims_are_what_formats_of_our_plugins_declare():
    own = [each for each in registry.formats() if each not in registry._BUILT_IN]
    declared = {claim: each for each in own for claim in registry._claims_of(each) if not claim.startswith("the name")}
    assert declared.keys() == extensions.CLAIMS.keys()
    for claim, each in declared.items():
        place = each.plan or each.view or each.codec
        assert place.partition(".")[0] == extensions.CLAIMS[claim]


def test_reserved_name_without_its_package_is_an_error_and_never_that_of_another(install, monkeypatch):
    install("snapshot.seals", "ed25519 = tiny:number")
    monkeypatch.setattr(extensions, "own_points", dict)
    assert extensions.find("snapshot.seals", "ed25519") is None
    with pytest.raises(MissingExtraError, match=r"^sign: snapshot_signing of snapshot-torch is not installed$"):
        extensions.require("snapshot.seals", "ed25519", "sign")
    for options in ({"sign": "key.pem"}, {"worker": "process"}):
        with pytest.raises(MissingExtraError, match="is not installed"):
            Snapshot.take("memory://anywhere", {}, options=TakeOptions(**options))
    with pytest.raises(MissingExtraError, match=r"^key: snapshot_signing"):
        Snapshot("memory://anywhere", key="key.pem")


def test_entry_points_of_this_library_are_found_first(install):
    install("snapshot.storages", "s3 = tiny:number", "tiny = tiny:number")
    point = extensions.find("snapshot.storages", "s3")
    assert point is not None
    assert point.module == "snapshot_objectstore.s3"
    assert extensions.names("snapshot.storages").count("s3") == 1
    assert extensions.names("snapshot.storages")[-1] == "tiny"


def test_entry_points_of_another_distribution_that_cannot_be_loaded_are_named(install):
    install("snapshot.storages", "tiny = tiny:number", "lost = tiny:lost", "broken = tiny.no:Storage [extra]")
    with pytest.raises(StorageError, match="tiny = tiny:number must name a subclass of Storage"):
        plugin_for(URL.parse("tiny://a"))
    with pytest.raises(SnapshotError, match=r"lost = tiny:lost of tiny 1\.2, which raised AttributeError"):
        plugin_for(URL.parse("lost://a"))
    with pytest.raises(MissingExtraError, match=r"tiny\.no:Storage .*of tiny 1\.2.*; install the extra 'extra'"):
        plugin_for(URL.parse("broken://a"))


def test_entry_point_whose_module_raises_is_named(install):
    install("snapshot.storages", "tiny = tiny:Storage", module="raise RuntimeError('no device')")
    with pytest.raises(
        SnapshotError, match=r"tiny 1\.2, which raised RuntimeError: no device; repair or uninstall tiny"
    ):
        plugin_for(URL.parse("tiny://a"))


def test_entry_point_whose_module_cannot_be_read_is_an_error_of_the_library(install):
    install("snapshot.storages", "tiny = tiny:Storage", module="raise OSError('too many open files')")
    with pytest.raises(StorageError, match=r"cannot read tiny:Storage of tiny 1\.2: too many open files"):
        plugin_for(URL.parse("tiny://a"))


def test_verbs_of_other_distributions_are_listed_and_broken_ones_raise_when_they_run(install, caplog, capsys):
    install("snapshot.verbs", "greet = tiny:GREET", "bad = tiny:number", "gone = tiny:gone", "ls = tiny:GREET")
    with caplog.at_level(logging.WARNING, "snapshot"):
        verbs = list_verbs()
    assert verbs["greet"].module == "tiny.greet_verb"
    assert verbs["ls"].module == "snapshot.cli.ls"
    assert "must be a Verb, got int" in verbs["bad"].fault
    assert main(["gone", "here"]) == 2
    assert "snapshot gone: snapshot.verbs has gone = tiny:gone of tiny 1.2" in capsys.readouterr().err
    assert [record.getMessage().split(":")[0] for record in caplog.records] == ["snapshot bad", "snapshot gone"]


def test_both_trees_are_those_of_this_checkout():
    for package in sorted(extensions.own_packages()):
        found = importlib.util.find_spec(package)
        assert found is not None, package
        assert Path(found.origin).is_relative_to(ROOT), f"{package} is imported from another checkout"


def test_own_packages_are_those_of_the_trees():
    folders = {path.parent.name for path in (ROOT / "plugins").glob("*/__init__.py")}
    assert extensions.own_packages() == {"snapshot", *folders}, "run `pip install -e .` again"


def test_entry_point_of_two_distributions_is_that_of_the_first_on_the_path(install, tmp_path):
    install("snapshot.storages", "tiny = tiny:first")
    second = tmp_path / "second" / "other-1.0.dist-info"
    second.mkdir(parents=True)
    (second / "METADATA").write_text("Metadata-Version: 2.1\nName: other\nVersion: 1.0\n")
    (second / "entry_points.txt").write_text("[snapshot.storages]\ntiny = tiny:second\n")
    sys.path.append(str(second.parent))
    extensions.forget()
    try:
        assert extensions.find("snapshot.storages", "tiny").value == "tiny:first"
    finally:
        sys.path.remove(str(second.parent))


def test_storage_that_was_installed_after_the_first_look_is_found(install):
    with pytest.raises(StorageError, match="no storage plugin"):
        plugin_for(URL.parse("tiny://a"))
    forget, extensions.forget = extensions.forget, lambda: None
    try:
        install("snapshot.storages", "tiny = tiny:number")
    finally:
        extensions.forget = forget
    with pytest.raises(StorageError, match="must name a subclass of Storage"):
        plugin_for(URL.parse("tiny://a"))


def test_entry_points_of_another_copy_of_this_library_are_passed_over(install, tmp_path):
    other = tmp_path / "old" / "snapshot_torch-0.0.1.dist-info"
    other.mkdir(parents=True)
    (other / "METADATA").write_text("Metadata-Version: 2.1\nName: snapshot-torch\nVersion: 0.0.1\n")
    (other / "entry_points.txt").write_text("[snapshot.storages]\nold = snapshot_old.storage:Old\n")
    sys.path.append(str(other.parent))
    install("snapshot.storages", "tiny = tiny:number")
    try:
        bad = tmp_path / "bad-1.0.dist-info"  # without it, `entry_points` takes the first distribution of each name
        bad.mkdir()
        (bad / "entry_points.txt").write_bytes(b"\xff")
        extensions.forget()
        assert extensions.find("snapshot.storages", "old") is None
        assert extensions.find("snapshot.storages", "tiny") is not None
    finally:
        sys.path.remove(str(other.parent))


def test_damaged_entry_points_of_a_package_are_logged_once_and_those_of_others_found(install, tmp_path, caplog):
    damaged = tmp_path / "bad-1.0.dist-info"
    damaged.mkdir()
    (damaged / "METADATA").write_text("Metadata-Version: 2.1\nName: bad\nVersion: 1.0\n")
    (damaged / "entry_points.txt").write_bytes(b"[snapshot.takes]\n\xff\xfe = 1\n")
    install("snapshot.storages", "tiny = tiny:number")
    with caplog.at_level(logging.WARNING, "snapshot"):
        for name in ("a", "b"):
            Snapshot.take(f"memory://damaged/{name}", {"s": StateDict(x=1)})
        assert extensions.find("snapshot.storages", "tiny").value == "tiny:number"
    assert caplog.text.count("bad-1.0.dist-info: cannot read the entry points: UnicodeDecodeError") == 1


def test_verb_whose_module_cannot_be_imported_names_it_and_others_work(install, capsys):
    install("snapshot.verbs", "greet = tiny:GREET")
    assert main(["--help"]) == 0
    assert "greet" in capsys.readouterr().out
    assert main(["greet", "me", "--loudly"]) == 2
    assert "error: snapshot greet: tiny.greet_verb of tiny 1.2 cannot be imported" in capsys.readouterr().err
    assert main(["--version"]) == 0


@pytest.mark.parametrize(
    "line",
    ["Verb('greet', 'tiny.verb', 'a')", "Verb(5, 'tiny.verb')", "Verb('100 %(x)s', 'tiny')", "Verb('greet', 'json')"],
)
def test_verb_that_is_declared_wrongly_leaves_all_others_usable(install, capsys, line):
    module = f"from snapshot.cli.verb import Verb\nGREET = {line}\nEXAMPLES = [('a', 'b')]\nDESCRIPTION = ''\n"
    install("snapshot.verbs", "greet = tiny:GREET", module=module + "def add(parser): raise ValueError('no')\n")
    assert main(["ls", "--help"]) == 0
    assert main(["--help"]) == 0
    assert "greet" in capsys.readouterr().out
    assert main(["greet"]) == 2
    assert "of tiny 1.2" in capsys.readouterr().err


def test_declaration_that_exits_is_left_out(install, capsys):
    install("snapshot.verbs", "greet = tiny:GREET", module="raise SystemExit(3)")
    assert main(["--version"]) == 0


def test_command_without_an_installation_names_the_cure(monkeypatch, capsys):
    monkeypatch.setattr(extensions, "own_points", dict)
    monkeypatch.setattr(extensions, "other_points", dict)
    list_verbs.cache_clear()
    try:
        assert main(["publish", "--help"]) == 2
    finally:
        list_verbs.cache_clear()
    assert "snapshot-torch is not installed here, so the verbs of its plugins are not known" in capsys.readouterr().err
