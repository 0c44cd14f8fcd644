"""Bad input, damage and faults: a clear error of the right class, nothing lost, nothing left behind."""

import errno
import json
import os
import shutil

import msgspec
import pytest
import torch

from snapshot import (
    CorruptSnapshotError,
    RestoreError,
    RestoreOptions,
    Snapshot,
    SnapshotError,
    SnapshotExistsError,
    SnapshotNotFoundError,
    StateDict,
    StorageError,
)
from snapshot.errors import UnsupportedFormatError
from snapshot.manifest.document import METADATA
from snapshot.testing import faulty, recording
from tests.helpers.noted import noted
from tests.helpers.states import flip


def state():
    torch.manual_seed(0)
    return {
        "big": StateDict(x=torch.randn(200_000), y=torch.randn(300, 300)),
        "small": StateDict(**{f"t{i}": torch.full((10,), float(i)) for i in range(20)}, text="é" * 20_000, step=3),
    }


def zeros():
    live = state()
    for part in live.values():
        for value in part.values():
            if isinstance(value, torch.Tensor):
                value.zero_()
    return live


def untouched(live):
    return all(not value.any() for part in live.values() for value in part.values() if isinstance(value, torch.Tensor))


def whole(path):
    live = zeros()
    Snapshot(path).restore(live)
    for key, part in state().items():
        for name, value in part.items():
            same = torch.equal(value, live[key][name]) if isinstance(value, torch.Tensor) else value == live[key][name]
            assert same, (key, name)


def files(path):
    return sorted(
        os.path.relpath(os.path.join(folder, name), path) for folder, _, names in os.walk(path) for name in names
    )


# Bad input


def test_take_refuses_values_that_are_not_stateful(tmp_path):
    for bad in (torch.ones(2), {"x": 1}, 3, StateDict, None):
        with pytest.raises(TypeError, match="'weights'"):
            Snapshot.take(tmp_path / "s", {"ok": StateDict(), "weights": bad})
    with pytest.raises(TypeError, match="StateDict\\(weights="):
        Snapshot.async_take(tmp_path / "s", {"weights": torch.ones(2)})
    with pytest.raises(TypeError, match="must be strings"):
        Snapshot.take(tmp_path / "s", {1: StateDict()})
    with pytest.raises(TypeError, match="must be a dict"):
        Snapshot.take(tmp_path / "s", [StateDict()])
    assert not (tmp_path / "s").exists()


def test_take_raises_snapshot_exists_error_if_the_path_holds_a_snapshot(tmp_path):
    Snapshot.take(tmp_path, state())
    before = files(tmp_path)
    for take in (Snapshot.take, Snapshot.async_take):
        with pytest.raises(SnapshotExistsError, match="overwrite=True"):
            take(tmp_path, {"s": StateDict(x=1)})
        with pytest.raises(FileExistsError):
            take(tmp_path, {"s": StateDict(x=1)})
    assert files(tmp_path) == before
    whole(tmp_path)


def test_take_with_overwrite_replaces_the_snapshot_and_deletes_old_files(tmp_path):
    Snapshot.take(tmp_path, state())
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "data" / "notes.txt").write_text("mine")
    first = set(files(tmp_path))
    Snapshot.take(tmp_path, {"s": StateDict(x=torch.ones(5))}, overwrite=True)
    assert set(files(tmp_path)) & first == {METADATA, "notes.txt", "data/notes.txt"}
    assert Snapshot(tmp_path).verify().ok
    assert list(Snapshot(tmp_path).get_state_dict_for_key("s")) == ["x"]


def test_methods_of_a_missing_snapshot_raise_snapshot_not_found_error(tmp_path):
    for verb in (
        lambda s: s.get_manifest(),
        lambda s: s.metadata,
        lambda s: s.restore({"s": StateDict()}),
        lambda s: s.read_object("0/s"),
        lambda s: s.verify(),
        lambda s: s.delete(),
        lambda s: s.get_state_dict_for_key("s"),
    ):
        with pytest.raises(SnapshotNotFoundError, match="no snapshot"):
            verb(Snapshot(tmp_path / "nothing"))
    assert not (tmp_path / "nothing").exists()


def test_restore_error_for_an_unknown_key_names_the_nearest_one(tmp_path):
    Snapshot.take(tmp_path, state())
    with pytest.raises(RestoreError, match="did you mean '0/big/x'"):
        Snapshot(tmp_path).read_object("0/bigg/x")
    with pytest.raises(RestoreError, match="'small'"):
        Snapshot(tmp_path).get_state_dict_for_key("smal")


def test_impossible_paths_raise_storage_error(tmp_path):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(StorageError, match="file"):
        Snapshot.take(tmp_path / "file" / "below", state())
    with pytest.raises(StorageError):
        Snapshot(tmp_path / "file" / "below").restore(zeros())
    with pytest.raises(StorageError, match="did you mean memory"):
        Snapshot.take("memry://x", state())
    with pytest.raises(ValueError, match="storage_options"):
        Snapshot.take(tmp_path / "s", state(), storage_options={"region": "x"})
    assert files(tmp_path) == ["file"]


@pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user")
def test_take_and_restore_without_file_permission_raise_an_error(tmp_path, warm):
    folder = tmp_path / "theirs"
    folder.mkdir(mode=0o755)
    os.chmod(tmp_path, 0o755)
    for parent in tmp_path.parents:
        if parent.stat().st_uid == 0 and "pytest" in str(parent):
            os.chmod(parent, 0o755)
    script = f"""
import os, sys
from snapshot import Snapshot, StateDict, StorageError
Snapshot.take("memory://imports", {{"s": StateDict(x=1)}})
from snapshot.storages import file
os.setegid(65534); os.seteuid(65534)
try: Snapshot.take({str(folder / "s")!r}, {{"s": StateDict(x=1)}})
except StorageError as error: assert {str(folder)!r} in str(error) and "ermission" in str(error), error
else: sys.exit("no error")
"""
    warm.run(script)
    assert files(tmp_path) == []


def test_take_refuses_metadata_that_is_not_json(tmp_path):
    with pytest.raises(TypeError, match="JSON"):
        Snapshot.take(tmp_path / "s", state(), metadata={"x": object()})
    Snapshot.take(tmp_path / "s", state(), metadata={"loss": 0.5, "tags": ["a", None]})
    assert noted(Snapshot(tmp_path / "s").metadata.metadata) == {"loss": 0.5, "tags": ["a", None]}


def test_take_leaves_no_files_if_state_dict_raises(tmp_path):
    class Bad(StateDict):
        def state_dict(self):
            raise RuntimeError("mine")

    for take in (Snapshot.take, Snapshot.async_take):
        with pytest.raises(RuntimeError, match="mine"):
            take(tmp_path / "s", {"a": StateDict(x=1), "bad": Bad()})
    assert not (tmp_path / "s").exists()


# Damage


def data_files(path):
    return [name for name in files(path) if name.startswith("data/")]


def test_verify_finds_every_flipped_byte(tmp_path):
    small = {"s": StateDict(a=torch.arange(50.0), b=[1, "x", 2.5], t="é" * 17_000)}
    Snapshot.take(tmp_path / "s", small)
    for name in files(tmp_path / "s"):
        path = tmp_path / "s" / name
        content = path.read_bytes()
        for at in sorted({*range(0, len(content), 211), 0, 7, 8, 9, len(content) - 1}):
            path.write_bytes(content[:at] + bytes([content[at] ^ 0x10]) + content[at + 1 :])
            try:
                report = Snapshot(tmp_path / "s").verify()
                assert not report.ok, (name, at)
            except SnapshotError:
                pass
            live = {"s": StateDict(a=torch.zeros(50), b=0, t="")}
            try:
                Snapshot(tmp_path / "s").restore(live)
                assert live["s"]["a"].tolist() == list(range(50))  # the flip was in bytes that nobody needs
                assert live["s"]["b"] == [1, "x", 2.5]
            except SnapshotError:
                assert live["s"]["b"] == 0
        path.write_bytes(content)
    assert Snapshot(tmp_path / "s").verify().ok


def test_corrupt_snapshot_error_names_entry_file_range_and_digests(tmp_path):
    Snapshot.take(tmp_path, state())
    entry = Snapshot(tmp_path).get_manifest()["0/small/t3"]
    flip(tmp_path / entry.location, entry.byte_range[0] + 5)
    live = zeros()
    with pytest.raises(CorruptSnapshotError) as raised:
        Snapshot(tmp_path).restore(live)
    text = str(raised.value)
    assert "small/t3" in text
    assert entry.location in text
    assert entry.digest in text
    assert len(raised.value.faults) == 1
    assert "small/t3" in raised.value.touched
    assert live["small"]["step"] == 3  # as it was before: load_state_dict was not called
    with pytest.raises(ValueError, match="damaged"):
        Snapshot(tmp_path).read_object("0/small/t3")
    Snapshot(tmp_path).read_object("0/small/t4")
    Snapshot(tmp_path).restore({"big": StateDict(x=torch.zeros(200_000), y=torch.zeros(300, 300))})
    Snapshot(tmp_path).restore(zeros(), options=RestoreOptions(verify=False))


def test_restore_does_not_call_load_state_dict_after_damage(tmp_path):
    class Spy(StateDict):
        def load_state_dict(self, state_dict):
            raise AssertionError("was called")

    Snapshot.take(tmp_path, state())
    entry = Snapshot(tmp_path).get_manifest()["0/big/x"]
    flip(tmp_path / entry.location, entry.byte_range[1] - 1)
    live = {key: Spy(value) for key, value in zeros().items()}
    with pytest.raises(CorruptSnapshotError):
        Snapshot(tmp_path).restore(live)


@pytest.mark.parametrize("name", ["0/big/x", "0/small/t3", "0/small/text"])
def test_restore_atomic_changes_nothing_before_every_byte_is_verified(tmp_path, name):
    Snapshot.take(tmp_path, state())
    entry = Snapshot(tmp_path).get_manifest()[name]
    flip(tmp_path / entry.location, entry.byte_range[1] - 1)
    live = zeros()
    with pytest.raises(CorruptSnapshotError) as raised:
        Snapshot(tmp_path).restore(live, options=RestoreOptions(atomic=True))
    assert untouched(live)
    assert raised.value.touched == ()
    flip(tmp_path / entry.location, entry.byte_range[1] - 1)
    report = Snapshot(tmp_path).restore(live, options=RestoreOptions(atomic=True))
    assert report.bytes_read > 2 * 1_160_000
    assert torch.equal(live["big"]["x"], state()["big"]["x"])


def damage_size(path, how):
    content = path.read_bytes()
    if how == "truncated":
        path.write_bytes(content[:-1])
    elif how == "emptied":
        path.write_bytes(b"")
    elif how == "extended":
        path.write_bytes(content + b"x")
    elif how == "missing":
        path.unlink()
    elif how == "a folder":
        path.unlink()
        path.mkdir()


@pytest.mark.parametrize("how", ["truncated", "emptied", "extended", "missing", "a folder"])
def test_restore_changes_nothing_if_a_data_file_has_a_wrong_size(tmp_path, how):
    Snapshot.take(tmp_path / "s", state())
    for name in data_files(tmp_path / "s"):
        shutil.copytree(tmp_path / "s", tmp_path / "t")
        damage_size(tmp_path / "t" / name, how)
        live = zeros()
        with pytest.raises(CorruptSnapshotError, match=name.replace(".", r"\.")):
            Snapshot(tmp_path / "t").restore(live)
        assert untouched(live)
        report = Snapshot(tmp_path / "t").verify()
        assert not report
        assert any(name in fault for fault in report.faults)
        shutil.rmtree(tmp_path / "t")


def test_restore_finds_swapped_data_files(tmp_path):
    for name, value in (("a", 1.0), ("b", 2.0)):
        Snapshot.take(tmp_path / name, {"s": StateDict(x=torch.full((1000,), value))})
    (one,), (two,) = (list((tmp_path / name / "data").iterdir()) for name in "ab")
    shutil.copy(two, one)
    with pytest.raises(CorruptSnapshotError, match="s/x"):
        Snapshot(tmp_path / "a").restore({"s": StateDict(x=torch.zeros(1000))})


@pytest.mark.parametrize("how", ["truncated", "emptied", "extended"])
def test_restore_refuses_a_damaged_manifest(tmp_path, how):
    Snapshot.take(tmp_path, state())
    damage_size(tmp_path / METADATA, how)
    live = zeros()
    with pytest.raises(CorruptSnapshotError):
        Snapshot(tmp_path).restore(live)
    assert untouched(live)


def rewrite(path, change):
    """Change a manifest as its own writer would: with a right digest."""
    from snapshot.tensors.digest import digest_range

    document = json.loads((path / METADATA).read_bytes())
    del document["digest"]
    document = change(document) or document
    body = msgspec.json.encode(document)[:-1] if not isinstance(document, bytes) else document
    (path / METADATA).write_bytes(b'%s,"digest":"%s"}' % (body, digest_range(body).encode()))


def entry_of(document, name="0/big/x"):
    return document["manifest"][name]


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        (lambda d: d.update(format="snapshot/2"), CorruptSnapshotError, "format must be snapshot/1"),
        (lambda d: d.update(format="snapshot/3"), CorruptSnapshotError, "format must be snapshot/1"),
        (lambda d: d.update(format="snapshot/4"), UnsupportedFormatError, "snapshot/4"),
        (lambda d: entry_of(d).update(type="Hologram"), UnsupportedFormatError, "Hologram"),
        (lambda d: entry_of(d).update(colour="red"), UnsupportedFormatError, "colour"),
        (lambda d: entry_of(d).update(dtype="float7"), UnsupportedFormatError, "float7"),
        (lambda d: entry_of(d).update(serializer="zstd"), UnsupportedFormatError, "zstd"),
        (lambda d: entry_of(d).update(shape=[1 << 60]), CorruptSnapshotError, "invalid shape"),
        (lambda d: entry_of(d).update(shape=[-200_000]), CorruptSnapshotError, "big/x"),
        (lambda d: entry_of(d).update(shape=[-1, -200_000]), CorruptSnapshotError, "big/x"),
        (lambda d: entry_of(d).update(byte_range=[0, 800_000]), CorruptSnapshotError, "is outside"),
        (lambda d: entry_of(d).update(byte_range=[1 << 40, (1 << 40) + 800_000]), CorruptSnapshotError, "is outside"),
        (lambda d: entry_of(d).update(location="/etc/passwd"), CorruptSnapshotError, "/etc/passwd"),
        (lambda d: entry_of(d).update(location="../x"), CorruptSnapshotError, "x"),
        (lambda d: d["files"].update({"../../etc/passwd": {"size": 1}}), CorruptSnapshotError, "invalid name of"),
        (lambda d: d["files"].update({"s3://x/y": {"size": 1}}), CorruptSnapshotError, "invalid name of"),
        (lambda d: d.update(world_size=0), CorruptSnapshotError, "world size"),
        (lambda d: d.update(world_size="many"), UnsupportedFormatError, "world_size"),
        (lambda d: b"[]", CorruptSnapshotError, METADATA),
        (lambda d: b'{"a":1', CorruptSnapshotError, METADATA),
        (lambda d: b'{"format":"snapshot/1","x":NaN', UnsupportedFormatError, "unknown field"),
        (lambda d: b'{"format":"snapshot/1","version":NaN', CorruptSnapshotError, METADATA),
        (lambda d: msgspec.json.encode(d)[:-1].replace(b'"0/small/t1"', b'"0/small/t2"'), CorruptSnapshotError,
        "duplicate keys"),
        (lambda d: msgspec.json.format(msgspec.json.encode(d))[:-1].rstrip(), CorruptSnapshotError, "canonical"),
    ],
)  # fmt: skip
def test_restore_refuses_invalid_values_in_a_manifest(tmp_path, change, error, text):
    Snapshot.take(tmp_path, state())
    rewrite(tmp_path, change)
    live = zeros()
    with pytest.raises(error, match=text):
        Snapshot(tmp_path).restore(live)
    assert untouched(live)


# Faults while writing


ENOSPC = OSError(errno.ENOSPC, "No space left on device")


def take_and_wait(*arguments, **options):
    return Snapshot.async_take(*arguments, **options).wait()


STEPS = [
    ("put", 1),
    ("create", 1),
    ("create", 2),
    ("write", 1),
    ("write", 2),
    ("finish", 1),
    ("finish", 2),
    ("commit", 1),
]


@pytest.mark.parametrize(("on", "nth"), STEPS)
@pytest.mark.parametrize("take", [Snapshot.take, take_and_wait])
def test_take_on_a_full_disk_leaves_no_files_and_the_next_take_works(tmp_path, on, nth, take):
    with faulty(on=on, nth=nth, error=StorageError(*ENOSPC.args)), pytest.raises(StorageError, match="No space left"):
        take(f"faulty+file://{tmp_path}/s", state())
    assert not (tmp_path / "s").exists()
    Snapshot.take(tmp_path / "s", state())
    whole(tmp_path / "s")


@pytest.mark.parametrize("on", ["put", "create", "write", "finish", "commit"])
def test_take_with_overwrite_keeps_the_old_snapshot_if_it_fails(tmp_path, on):
    Snapshot.take(tmp_path / "s", state())
    before = files(tmp_path / "s")
    path = f"faulty+file://{tmp_path}/s"
    with faulty(on=on, error=StorageError(*ENOSPC.args)), pytest.raises(StorageError):
        Snapshot.take(path, {"s": StateDict(x=torch.ones(1000))}, overwrite=True)
    assert files(tmp_path / "s") == before
    whole(tmp_path / "s")


def test_take_at_a_file_size_limit_raises_storage_error(tmp_path, warm):
    script = f"""
import signal, resource, torch
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
from snapshot import Snapshot, StateDict, StorageError
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
try: Snapshot.take({str(tmp_path / "s")!r}, {{"s": StateDict(x=torch.ones(1 << 20))}})
except StorageError as error: assert "too large" in str(error), error
else: raise SystemExit("no error")
"""
    warm.run(script)
    assert files(tmp_path) == []


def test_take_succeeds_if_deleting_old_files_fails(tmp_path):
    Snapshot.take(tmp_path / "s", state())
    with faulty(on="delete", error=StorageError("busy")):
        Snapshot.take(f"faulty+file://{tmp_path}/s", {"s": StateDict(x=1)}, overwrite=True)
    assert Snapshot(tmp_path / "s").get_state_dict_for_key("s") == {"x": 1}
    Snapshot.take(tmp_path / "s", {"s": StateDict(x=2)}, overwrite=True)
    assert files(tmp_path / "s") == [METADATA]


def test_restore_names_url_and_cause_of_a_failed_read(tmp_path):
    Snapshot.take(tmp_path / "s", state())
    error = StorageError(errno.EIO, "Input/output error")
    with (
        faulty(on="read_into", path="data/*", times=None, error=error),
        pytest.raises(StorageError, match="Input/output"),
    ):
        Snapshot(f"faulty+file://{tmp_path}/s").restore(zeros())


def test_restore_raises_if_every_read_flips_a_bit(tmp_path):
    Snapshot.take(tmp_path / "s", state())
    with (
        faulty(on="read_into", path="data/*", flip=4000, times=None),
        pytest.raises(CorruptSnapshotError, match="damaged"),
    ):
        Snapshot(f"faulty+file://{tmp_path}/s").restore(zeros())


def test_restore_reads_again_if_one_read_flips_a_bit(tmp_path):
    Snapshot.take(tmp_path / "s", state())
    with faulty(on="read_into", path="data/*", flip=4000):
        whole(f"faulty+file://{tmp_path}/s")


def test_delete_removes_leftover_files_and_nothing_else(tmp_path):
    Snapshot.take(tmp_path / "s", state())
    (tmp_path / "s" / ".take-0123456789ab").touch()
    (tmp_path / "s" / "data" / "0123456789ab-0-0.bin").touch()
    (tmp_path / "s" / "mine").touch()
    Snapshot(tmp_path / "s").delete()
    assert files(tmp_path / "s") == ["mine"]
    os.unlink(tmp_path / "s" / "mine")
    (tmp_path / "s" / "data").mkdir()
    (tmp_path / "s" / "data" / "0123456789ab-0-0.bin").touch()
    Snapshot(tmp_path / "s").delete()
    assert not (tmp_path / "s").exists()


def test_delete_removes_the_manifest_first():
    with recording() as log:
        snapshot = Snapshot.take("recording+memory://first", state())
        log.clear()
        snapshot.delete()
    assert log.of("delete")[0].path == METADATA


def test_take_commits_the_manifest_after_all_data_files():
    with recording() as log:
        Snapshot.take("recording+memory://order", state())
    names = [operation.name for operation in log.of() if operation.name in ("finish", "commit", "put")]
    assert names[0] == "put"
    assert names[-1] == "commit"


def test_take_raises_snapshot_exists_error_if_another_take_committed_first(tmp_path):
    class Meanwhile(StateDict):
        def state_dict(self):
            if not Snapshot(tmp_path / "s").exists():
                Snapshot.take(tmp_path / "s", state())
            return super().state_dict()

    with pytest.raises(SnapshotExistsError, match="committed first"):
        Snapshot.take(tmp_path / "s", {"m": Meanwhile(x=torch.ones(10))})
    whole(tmp_path / "s")
    before = files(tmp_path / "s")
    Snapshot.take(tmp_path / "t", state())
    assert len(files(tmp_path / "t")) == len(before)


def test_take_restore_and_delete_succeed_if_the_storage_fails_to_close(tmp_path, caplog):
    path = f"faulty+file://{tmp_path}/s"
    with faulty(on="close", times=None, error=StorageError("busy")):
        Snapshot.take(path, state())
        Snapshot.async_take(path, state(), overwrite=True).wait()
        whole(path)
        assert Snapshot(path).verify()
    whole(tmp_path / "s")
    assert "cannot close the storage" in caplog.text
