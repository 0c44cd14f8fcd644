"""Copies: the same snapshot elsewhere, or nothing; and what is there stays whole until then."""

import os
import shutil
import threading
import time
import warnings

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

from snapshot import (
    CorruptSnapshotError,
    Snapshot,
    SnapshotError,
    SnapshotExistsError,
    SnapshotNotFoundError,
    StateDict,
    Target,
)
from snapshot.errors import UnsupportedFormatError
from snapshot.events import add_handler, remove_handler
from snapshot.io.arena import arena
from snapshot.manifest import document
from snapshot.testing import faulty, recording
from snapshot.testing.storages import Stall, tapped
from tests.helpers.arguments import for_take
from tests.helpers.versions import ALONE


@pytest.fixture(autouse=True)
def all_memory_is_given_back():
    """Whatever happens, no slot of the arena is lost."""
    yield
    assert " 0 in use" in repr(arena())


def state(fill=1.0):
    return {
        "w": torch.full((300, 400), fill),  # longer than a block of digests
        "turned": torch.arange(12.0).view(3, 4).t(),
        "b": torch.arange(5),
        "half": torch.ones(7, dtype=torch.bfloat16),
        "sparse": torch.eye(3).to_sparse(),
        "long": b"x" * 300_000,
        "step": 3,
    }


def take(path, fill=1.0, **options):
    return Snapshot.take(path, {"m": StateDict(**state(fill))}, **for_take(metadata={"run": "first"}, **options))


def saved(folder, held):
    """What torch.distributed.checkpoint writes; it warns that it is alone."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(held, checkpoint_id=folder, **ALONE)


def names(folder):
    return sorted(
        os.path.relpath(os.path.join(above, each), folder) for above, _, files in os.walk(folder) for each in files
    )


def expect_copy(copy, snapshot):
    """The same in all but the names of files."""
    assert copy.verify()
    ours, theirs = copy.metadata, snapshot.metadata
    for name in ("created", "version", "world_size", "structure", "metadata", "entries", "nbytes"):
        assert getattr(ours, name) == getattr(theirs, name), name
    assert ours.save_id != theirs.save_id
    assert Snapshot.diff(copy, snapshot).same
    live = {"m": StateDict()}
    copy.restore(live)
    assert torch.equal(live["m"]["w"], snapshot.read_object("0/m/w"))
    assert live["m"]["long"] == snapshot.read_object("0/m/long")


def test_copy_is_the_same_snapshot_in_its_own_files(tmp_path):
    snapshot = take(tmp_path / "a")
    report = snapshot.copy(tmp_path / "deep" / "b")
    copy = Snapshot(tmp_path / "deep" / "b")
    expect_copy(copy, snapshot)
    assert len(names(tmp_path / "deep" / "b")) == len(names(tmp_path / "a")) == report.files + 1
    assert not set(names(tmp_path / "deep" / "b/data")) & set(names(tmp_path / "a/data"))
    assert (report.format, report.checked, report.entries) == ("snapshot", "digests", copy.metadata.entries)
    assert report.nbytes == sum(copy.metadata.files.values())
    assert "every byte was compared with its digest" in str(report)


@pytest.mark.parametrize("budget", [None, 600_000])
def test_copy_between_storages_of_every_kind(tmp_path, budget):
    snapshot = take(tmp_path / "a")
    with recording() as log:
        snapshot.copy(Target("recording+memory://copy/b", overwrite=True), memory_budget_bytes=budget)
    if budget:
        assert max(each.nbytes for each in log.of("write")) <= 1 << 18, "the shortest part"
    assert [each.name for each in log.operations if each.name in ("put", "write", "commit")][-1] == "commit"
    expect_copy(Snapshot("memory://copy/b"), snapshot)
    Snapshot("memory://copy/b").copy(Target(f"file://{tmp_path}/c", durable=False), memory_budget_bytes=budget)
    expect_copy(Snapshot(tmp_path / "c"), snapshot)
    Snapshot("memory://copy/b").copy(Target("memory://copy/c", overwrite=True), memory_budget_bytes=budget)
    expect_copy(Snapshot("memory://copy/c"), snapshot)


def test_copy_includes_the_parts_of_a_large_manifest(tmp_path, monkeypatch):
    monkeypatch.setattr(document, "IN_ONE", 3)
    snapshot = take(tmp_path / "a")
    assert [each for each in names(tmp_path / "a") if each.endswith(".json")]
    Snapshot(tmp_path / "a").copy(tmp_path / "b")
    expect_copy(Snapshot(tmp_path / "b"), snapshot)


@pytest.mark.filterwarnings("ignore:app_state is empty")
def test_copy_of_an_empty_snapshot(tmp_path):
    Snapshot.take(tmp_path / "a", {}).copy(tmp_path / "b")
    assert Snapshot.diff(tmp_path / "a", tmp_path / "b").same
    assert Snapshot(tmp_path / "b").verify()


def places(snapshot):
    """A byte of everything that is in the data files, and whose it is."""
    for location, file in snapshot._manifest.open().files.items():
        if file.header:
            yield location, 9, location
    for name, entry in snapshot.get_manifest().items():
        for each in [entry] if hasattr(entry, "byte_range") else []:
            yield each.location, each.byte_range[1] - 1, name
            if each.blocks:
                yield each.blocks[0], each.blocks[1] + 3, name


def test_copy_stops_at_a_flipped_bit_and_names_it(tmp_path):
    snapshot = take(tmp_path / "a")
    met = 0
    for location, at, name in places(snapshot):
        file = tmp_path / "a" / location
        good = file.read_bytes()
        file.write_bytes(good[:at] + bytes([good[at] ^ 4]) + good[at + 1 :])
        with pytest.raises(CorruptSnapshotError) as raised:
            snapshot.copy(tmp_path / "b")
        assert name in str(raised.value), location
        assert location in str(raised.value)
        assert not names(tmp_path / "b")
        met += 1
        snapshot.copy(Target(tmp_path / "unverified", overwrite=True), verify=False)
        assert not Snapshot(tmp_path / "unverified").verify()
        file.write_bytes(good)
    assert met > 6
    file.write_bytes(good[:-1])
    with pytest.raises(CorruptSnapshotError, match=r"must have .* bytes, got"):
        snapshot.copy(tmp_path / "b")
    file.unlink()
    with pytest.raises(CorruptSnapshotError, match="is missing"):
        snapshot.copy(tmp_path / "b", verify=False)
    assert not names(tmp_path / "b")


def test_copy_reads_again_what_was_damaged_in_transfer(tmp_path):
    snapshot = take("memory://copy/way", overwrite=True)
    with faulty(on="read_into", path="data/*", flip=77):
        Snapshot("faulty+memory://copy/way").copy(tmp_path / "b")
    expect_copy(Snapshot(tmp_path / "b"), snapshot)
    with faulty(on="read_into", path="data/*", flip=77, times=None), pytest.raises(CorruptSnapshotError, match="xxh3"):
        Snapshot("faulty+memory://copy/way").copy(tmp_path / "c")
    assert not names(tmp_path / "c")


@pytest.mark.parametrize("scheme", ["file", "memory"])
def test_copy_that_fails_keeps_the_old_snapshot_and_leaves_no_files(tmp_path, scheme):
    new = take(tmp_path / "new", fill=2.0)
    target = f"file://{tmp_path}/t" if scheme == "file" else "memory://copy/faults"
    old = take(target, overwrite=True)

    def files():
        return names(tmp_path / "t") if scheme == "file" else None

    before, kept = files(), old.metadata.save_id
    with recording() as log:
        new.copy(Target(f"recording+{target}x", overwrite=True))
    steps = [
        each.name for each in log.operations if each.name in ("create", "write", "finish", "put", "commit", "stat")
    ]
    assert {"create", "write", "finish", "put", "commit"} <= set(steps)
    for name in dict.fromkeys(steps):
        for nth in range(1, steps.count(name) + 1):
            fault = faulty(on=name, nth=nth, error=OSError(28, "No space left on device"), must_happen=False)
            with fault as met, pytest.raises(SnapshotError):
                new.copy(Target(f"faulty+{target}", overwrite=True))
            assert met.hits, (name, nth)
            assert Snapshot(target).metadata.save_id == kept, (name, nth)
            assert files() == before, (name, nth)
    assert Snapshot(target).verify()
    new.copy(Target(target, overwrite=True))
    expect_copy(Snapshot(target), new)


def test_copy_of_an_unreadable_source_leaves_no_files(tmp_path):
    take("memory://copy/unread", overwrite=True)
    for on in ("read_into", "stat", "get"):
        with faulty(on=on, error=OSError(5, "Input/output error"), times=None), pytest.raises(OSError, match="output"):
            Snapshot("faulty+memory://copy/unread").copy(tmp_path / "b")
        assert not names(tmp_path / "b")


KILLED = """
import os, signal, sys
from snapshot import Snapshot, Target
from snapshot.testing.storages import tapped
from snapshot.testing.storages import Tap

class Kill(Tap):
    async def before(self, operation):
        if operation.name == sys.argv[3]:
            os.kill(os.getpid(), signal.SIGKILL)

with tapped("deadly", Kill()):
    Snapshot(sys.argv[1]).copy(Target("deadly+file://" + sys.argv[2], overwrite=True))
"""


@pytest.mark.parametrize("at", ["finish", "commit"])
def test_copy_cleans_up_after_a_killed_copy(tmp_path, warm, at):
    from tests.helpers.warm_interpreter import Failed

    new = take(tmp_path / "new", fill=2.0)
    old = take(tmp_path / "t")
    with pytest.raises(Failed, match="-9"):
        warm.run(KILLED, tmp_path / "new", tmp_path / "t", at)
    assert len(names(tmp_path / "t")) > len(names(tmp_path / "new"))
    assert Snapshot(tmp_path / "t").metadata.save_id == old.metadata.save_id
    assert Snapshot(tmp_path / "t").verify()
    new.copy(Target(tmp_path / "t", overwrite=True))
    assert len(names(tmp_path / "t")) == len(names(tmp_path / "new"))
    expect_copy(Snapshot(tmp_path / "t"), new)


def meanwhile(work):
    raised = []

    def call():
        try:
            work()
        except BaseException as error:  # noqa: BLE001 - looked at below
            raised.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    return thread, raised


def test_copy_raises_if_the_source_is_replaced_during_it(tmp_path):
    take(tmp_path / "a")
    stall = Stall(on="read_into", path="data/*", nth=2)
    with tapped("slow", stall):
        thread, raised = meanwhile(lambda: Snapshot(f"slow+file://{tmp_path}/a").copy(tmp_path / "b"))
        stall.wait_reached()
        take(tmp_path / "a", fill=2.0, overwrite=True)
        stall.release()
        thread.join()
    assert "was replaced while it was copied" in str(raised[0])
    assert not names(tmp_path / "b")


def test_copy_twice_at_once_to_one_path_has_one_winner(tmp_path):
    one, two = take(tmp_path / "1"), take(tmp_path / "2", fill=2.0)
    stall = Stall(on="commit")
    with tapped("slow", stall):
        thread, raised = meanwhile(lambda: one.copy(f"slow+file://{tmp_path}/t"))
        stall.wait_reached()
        two.copy(tmp_path / "t")
        stall.release()
        thread.join()
    assert isinstance(raised[0], SnapshotExistsError)
    expect_copy(Snapshot(tmp_path / "t"), two)
    assert len(names(tmp_path / "t")) == len(names(tmp_path / "2"))


def test_copy_select_is_a_new_snapshot_with_the_same_metadata(tmp_path):
    snapshot = take(tmp_path / "a")
    time.sleep(1.1)  # what `created` resolves
    report = snapshot.copy(tmp_path / "b", select=["m/w", "m/s*"], exclude=["**/sparse"])
    part = Snapshot(tmp_path / "b")
    assert part.verify()
    assert set(part.get_manifest()) == {"0/m", "0/m/w", "0/m/step"}
    assert (report.entries, report.format) == (2, "snapshot")
    assert report.nbytes < snapshot.metadata.nbytes
    assert part.metadata.metadata == snapshot.metadata.metadata
    assert part.metadata.created > snapshot.metadata.created
    assert Snapshot.diff(snapshot, part, select=["m/w", "m/step"]).same
    with pytest.raises(SnapshotError, match="matches nothing"):
        snapshot.copy(tmp_path / "c", select=["nothing"])
    with pytest.raises(TypeError, match="one string"):
        snapshot.copy(tmp_path / "c", select="m")


def test_copy_refuses_invalid_arguments(tmp_path):
    snapshot = take(tmp_path / "a")
    with pytest.raises(SnapshotExistsError):
        take(tmp_path / "b").copy(tmp_path / "a")
    (tmp_path / "link").symlink_to(tmp_path / "a")
    for target in (tmp_path / "a", f"file://{tmp_path}/x/../a", tmp_path / "link"):
        with pytest.raises(ValueError, match="the destination is the source"):
            snapshot.copy(Target(target, overwrite=True))
    with pytest.raises(ValueError, match="is inside the source"):
        snapshot.copy(tmp_path / "a" / "below")
    with pytest.raises(ValueError, match="above 0"):
        snapshot.copy(tmp_path / "c", memory_budget_bytes=0)
    with pytest.raises(SnapshotNotFoundError):
        Snapshot(tmp_path / "none").copy(tmp_path / "c")
    saved(tmp_path / "theirs", {"w": torch.ones(3)})
    with pytest.raises(SnapshotExistsError, match=r"checkpoint of torch\.distributed\.checkpoint"):
        snapshot.copy(Target(tmp_path / "theirs", overwrite=True))


def test_copy_progress_and_event_have_the_copied_bytes(tmp_path, caplog):
    snapshot, seen, events = take(tmp_path / "a"), [], []
    add_handler(events.append)
    try:
        with caplog.at_level("INFO", "snapshot"):
            report = snapshot.copy(tmp_path / "b", progress=seen.append)
    finally:
        remove_handler(events.append)
    assert seen[-1].done == seen[-1].total == report.nbytes
    assert [(each.name, each.fields["bytes"]) for each in events if each.name == "copied"] == [
        ("copied", report.nbytes)
    ]
    assert [line.partition(":")[0] for line in caplog.messages if line.startswith("copy")] == [f"copy {tmp_path}/b"]


# Those of other libraries


def theirs(folder, kind):
    """A checkpoint of somebody's; what it holds."""
    held = {"w": torch.arange(60_000.0), "b": torch.ones(3)}
    if kind == "dcp":
        saved(folder / "x", held)
        return folder / "x"
    folder.mkdir(exist_ok=True)
    if kind == "torch":
        torch.save(held, folder / "x.pt")
        return folder / "x.pt"
    if kind == "file":
        save_file(held, folder / "x.safetensors")
        return folder / "x.safetensors"
    Snapshot.take(folder / "ours", {"m": StateDict(**held)})
    Snapshot(folder / "ours").convert(Target(folder / "x", "safetensors", shard_bytes=100_000))
    (folder / "x" / "config.json").write_text("{}")
    return folder / "x"


@pytest.mark.parametrize("kind", ["dcp", "torch", "file", "folder"])
def test_copy_of_other_formats_is_file_by_file(tmp_path, kind):
    source = theirs(tmp_path / "from", kind)
    target = tmp_path / "to" / source.name
    report = Snapshot(source).copy(target)
    checked = "checksums" if kind in ("dcp", "torch") else "sizes"
    assert (report.checked, report.format) == (checked, Snapshot(source)._manifest.open().format)
    if source.is_dir():
        expected = [each for each in names(source) if each != "config.json"]  # which is none of the checkpoint's files
        assert names(target) == expected
        assert report.files == len(expected)
        for each in expected:
            assert (target / each).read_bytes() == (source / each).read_bytes()
    else:
        assert names(target.parent) == [target.name]
        assert target.read_bytes() == source.read_bytes()
    assert Snapshot.diff(source, target).same
    with pytest.raises(SnapshotExistsError):
        Snapshot(source).copy(target)
    Snapshot(source).copy(Target(target, overwrite=True))
    with pytest.raises(UnsupportedFormatError, match="convert"):
        Snapshot(source).copy(tmp_path / "part", select=["w"])
    with pytest.raises(ValueError, match="the destination is the source"):
        Snapshot(source).copy(Target(source, overwrite=True))
    with recording() as log:
        Snapshot(source).copy(
            Target(f"recording+memory://copy/{kind}{source.suffix}", overwrite=True), memory_budget_bytes=1 << 20
        )
    assert Snapshot.diff(source, f"memory://copy/{kind}{source.suffix}").same
    made = [each.path for each in log.operations if each.name in ("write", "rename", "put")]
    last = {"dcp": ".metadata", "folder": "model.safetensors.index.json"}.get(kind, f"{kind}{source.suffix}")
    assert made[-1] == last, "what makes it one comes last"


def test_copy_of_a_safetensors_index(tmp_path):
    source = theirs(tmp_path / "from", "folder")
    index = Snapshot(source / "model.safetensors.index.json")
    index.copy(tmp_path / "folder")
    assert Snapshot.diff(source, tmp_path / "folder").same
    index.copy(tmp_path / "other" / "my.safetensors.index.json")
    assert Snapshot.diff(source, tmp_path / "other").same
    assert "my.safetensors.index.json" in names(tmp_path / "other")
    index.copy(Target(tmp_path / "folder", overwrite=True))


def test_copy_refuses_a_damaged_archive(tmp_path):
    source = theirs(tmp_path / "from", "dcp")
    file = next(source.glob("*.distcp"))
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    with pytest.raises(CorruptSnapshotError, match="crc32"):
        Snapshot(source).copy(tmp_path / "to")
    assert not names(tmp_path / "to")
    assert Snapshot(source).copy(tmp_path / "to", verify=False).checked == "sizes"
    file.unlink()
    with pytest.raises(CorruptSnapshotError, match="is missing"):
        Snapshot(source).copy(tmp_path / "other")


def test_copy_does_not_overwrite_another_format(tmp_path):
    take(tmp_path / "ours")
    for kind in ("dcp", "folder"):
        with pytest.raises(SnapshotExistsError, match="another format"):
            Snapshot(theirs(tmp_path / kind, kind)).copy(Target(tmp_path / "ours", overwrite=True))
    assert Snapshot(tmp_path / "ours").verify()


def test_copy_of_another_format_raises_if_it_is_replaced_during_it(tmp_path):
    source = theirs(tmp_path / "from", "dcp")
    stall = Stall(on="read_into", path="*.distcp", nth=1)
    with tapped("slow", stall):
        thread, raised = meanwhile(
            lambda: Snapshot(f"slow+file://{source}").copy(tmp_path / "to", verify=False)
        )  # fmt: skip
        stall.wait_reached()
        shutil.rmtree(source)
        saved(source, {"w": torch.zeros(60_000), "b": torch.ones(3)})
        stall.release()
        thread.join()
    assert "was replaced while it was copied" in str(raised[0])
    assert not names(tmp_path / "to")


def test_copy_that_fails_keeps_the_old_checkpoint_of_another_format(tmp_path):
    source, stands = theirs(tmp_path / "from", "dcp"), theirs(tmp_path / "there", "dcp")
    before = {each: (stands / each).read_bytes() for each in names(stands)}
    with faulty(on="write", error=OSError(28, "No space left on device")), pytest.raises(OSError, match="No space"):
        Snapshot(source).copy(Target(f"faulty+file://{stands}", overwrite=True))
    assert {each: (stands / each).read_bytes() for each in names(stands)} == before


def test_copy_of_a_torchsnapshot_snapshot(tmp_path):
    torchsnapshot = pytest.importorskip("torchsnapshot")
    torchsnapshot.Snapshot.take(str(tmp_path / "a"), {"m": torchsnapshot.StateDict(w=torch.ones(1000), x={"y": 1})})
    report = Snapshot(tmp_path / "a").copy(tmp_path / "b")
    assert report.format == "torchsnapshot"
    assert names(tmp_path / "a") == names(tmp_path / "b")
    assert Snapshot.diff(tmp_path / "a", tmp_path / "b").same
    with pytest.raises(SnapshotExistsError):
        Snapshot(tmp_path / "a").copy(Target(tmp_path / "b", overwrite=True))
