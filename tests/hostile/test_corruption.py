"""Damage of every kind, at every byte: it is found, no wrong value comes back, and nothing is written to unnoticed."""

import os
import shutil

import pytest
import torch

from snapshot import CorruptSnapshotError, Snapshot, SnapshotError, StateDict, StorageError
from snapshot.manifest.document import METADATA, decode_document
from snapshot.testing import faulty
from tests.hostile.damaged_snapshot import (
    blank,
    files_of,
    flipped,
    is_as_saved,
    look,
    ranges,
    state,
    take_to_memory,
    written,
)


@pytest.fixture(scope="module")
def small():
    """A snapshot in memory, and the arrays that it consists of."""
    return Snapshot("memory://small"), take_to_memory("small")


def test_corruption_test_snapshot_is_small_and_verifies(small):
    snapshot, arrays = small
    assert 16 << 10 <= sum(map(len, arrays.values())) <= 48 << 10
    assert snapshot.verify()
    live = blank()
    snapshot.restore(live)
    assert is_as_saved(live)
    covered = sum(end - begin for _, begin, end, _ in ranges(snapshot))
    assert covered == sum(len(array) for path, array in arrays.items() if path != METADATA)


def test_verify_finds_every_flipped_byte_and_names_only_its_entry(small):
    snapshot, arrays = small
    parts = ranges(snapshot)
    for nth in range(max(end - begin for _, begin, end, _ in parts)):
        hit = [(location, begin + nth, name) for location, begin, end, name in parts if begin + nth < end]
        for location, at, _ in hit:
            arrays[location][at] ^= 1 << nth % 8
        report = snapshot.verify()
        for location, at, _ in hit:
            arrays[location][at] ^= 1 << nth % 8
        found = sorted(fault.split(": ")[0].split("[")[0] for fault in report.faults)
        assert found == sorted(name for _, _, name in hit), nth
    assert snapshot.verify()


def test_verify_and_restore_find_every_flipped_byte_of_the_manifest(small):
    snapshot, arrays = small
    live = blank()
    for at in range(len(arrays[METADATA])):
        with flipped(arrays[METADATA], at):
            with pytest.raises(SnapshotError):  # what every verb reads it by
                decode_document(arrays[METADATA].tobytes(), "here")
            for verb in (snapshot.verify, lambda: snapshot.restore(live)) if at % 16 == 0 else ():
                with pytest.raises(SnapshotError):
                    verb()
    assert not written(live)
    assert not live["s"].given


def test_flipped_data_bytes_are_never_returned_as_values(small):
    snapshot, arrays = small
    for location, begin, end, name in ranges(snapshot):
        if name == location:
            continue  # a header, which no restore reads
        for at in range(begin, end, 1 if end - begin < 500 else 37):
            with flipped(arrays[location], at):
                live = blank()
                with pytest.raises(CorruptSnapshotError, match=name[2:]) as raised:
                    snapshot.restore(live)
            assert not live["s"].given
            assert written(live) <= set(raised.value.touched)
            assert name[2:] in raised.value.touched or name == "0/s/long"


def test_restore_atomic_changes_nothing_if_it_finds_damage(small):
    snapshot, arrays = small
    met = 0
    for location, begin, end, _ in ranges(snapshot):
        for at in {begin, (begin + end) // 2, end - 1}:
            with flipped(arrays[location], at, mask=255):
                met += look(snapshot)
    assert met > 20


def test_read_object_reports_only_its_own_damage(small):
    snapshot, arrays = small
    entry = snapshot.get_manifest()["0/s/t3"]
    with flipped(arrays[entry.location], entry.byte_range[0]):
        with pytest.raises(CorruptSnapshotError, match="0/s/t3"):
            snapshot.read_object("0/s/t3")
        out = torch.zeros(14)
        with pytest.raises(CorruptSnapshotError) as raised:
            snapshot.read_object("0/s/t3", obj_out=out)
        assert raised.value.touched == ("0/s/t3",)
        assert torch.equal(snapshot.read_object("0/s/t4"), state()["s"]["t4"])
        with pytest.raises(CorruptSnapshotError):
            snapshot.get_state_dict_for_key("s")


def test_restore_error_after_a_disk_fault_names_what_was_written_to(tmp_path):
    Snapshot.take(tmp_path / "s", {"s": StateDict(**{f"t{i}": torch.full((1 << 20,), 1.0) for i in range(8)})})
    met = 0
    for nth in (2, 3, 4):
        live = {"s": StateDict(**{f"t{i}": torch.zeros(1 << 20) for i in range(8)})}
        error = StorageError("Input/output error")
        with faulty(on="read_into", path="data/*", nth=nth, error=error), pytest.raises(StorageError) as raised:
            Snapshot(f"faulty+file://{tmp_path}/s").restore(live)
        named = set("".join(getattr(raised.value, "__notes__", ())).partition(": ")[2].split(", "))
        assert written(live) <= named
        met += len(written(live))
    assert met


@pytest.mark.parametrize("where", ["begin", "middle", "end"])
def test_long_tensor_digests_are_verified_block_by_block_and_so_is_their_table(where):
    long = torch.arange(300_000, dtype=torch.int32)  # five blocks of 256 KiB
    Snapshot.take("memory://long", {"s": StateDict(x=long)}, overwrite=True)
    from snapshot.storages import memory

    snapshot = Snapshot("memory://long")
    entry = snapshot.get_manifest()["0/s/x"]
    table, first, last = entry.blocks
    assert last - first == 16 * 5
    for location, begin, end in ((entry.location, *entry.byte_range), (table, first, last)):
        file = memory._tree.get().files[f"long/{location}"]
        memory._tree.get().files[f"long/{location}"] = memory._File(file.content.copy())
        at = {"begin": begin, "middle": (begin + end) // 2, "end": end - 1}[where]
        with flipped(memory._tree.get().files[f"long/{location}"].content, at):
            assert len(snapshot.verify().faults) == 1
            live = {"s": StateDict(x=torch.zeros_like(long))}
            if location == entry.location:
                with pytest.raises(CorruptSnapshotError):
                    snapshot.restore(live)
                index = (at - begin) // 4
                with pytest.raises(CorruptSnapshotError):
                    snapshot.read_object("0/s/x", box=[slice(index, index + 1)])
                other = 0 if where != "begin" else 299_999  # another block: it is not damaged
                assert snapshot.read_object("0/s/x", box=[other]) == other
            else:  # the whole is checked without the table, a part only with it
                snapshot.restore(live)
                assert torch.equal(live["s"]["x"], long)
                with pytest.raises(CorruptSnapshotError, match="table of digests"):
                    snapshot.read_object("0/s/x", box=[0])
    assert snapshot.verify()


# Files


@pytest.fixture(scope="module")
def taken(tmp_path_factory):
    """A snapshot in a folder; copies of it are damaged."""
    folder = tmp_path_factory.mktemp("taken")
    Snapshot.take(folder / "s", state())
    return folder / "s"


def test_truncated_or_extended_files_are_found_before_anything_is_changed(taken):
    snapshot = Snapshot(taken)
    for path in files_of(taken):
        whole = path.read_bytes()
        for length in range(0, len(whole), 97):
            path.write_bytes(whole[:length])
            damaged_in_length(snapshot, path)
        for more in (b"\0", b"x" * 4096):
            path.write_bytes(whole + more)
            damaged_in_length(snapshot, path)
        path.write_bytes(whole)
    assert snapshot.verify()


def damaged_in_length(snapshot, path):
    live = blank()
    with pytest.raises(SnapshotError) as raised:
        snapshot.restore(live)
    assert path.name in str(raised.value)
    assert not written(live)
    assert not live["s"].given
    if path.name == METADATA:
        with pytest.raises(SnapshotError):
            Snapshot(snapshot.path).verify()
    else:
        assert any(path.name in fault for fault in snapshot.verify().faults)


def test_zeroed_sectors_are_found(taken):
    snapshot = Snapshot(taken)
    for path in files_of(taken):
        whole = path.read_bytes()
        for begin in range(0, len(whole), 512):
            zeros = whole[:begin] + bytes(len(whole[begin : begin + 512])) + whole[begin + 512 :]
            if zeros != whole:
                path.write_bytes(zeros)
                look(Snapshot(taken))
        path.write_bytes(whole)
    assert snapshot.verify()


def vanish(path):
    path.unlink()


def become_a_folder(path):
    path.unlink()
    path.mkdir()


def become_a_full_folder(path):
    path.unlink()
    path.mkdir()
    (path / "x").write_bytes(b"x")


def become_a_link_to_nothing(path):
    path.unlink()
    path.symlink_to("nowhere")


def become_a_link_to_itself(path):
    path.unlink()
    path.symlink_to(path.name)


def become_a_link_to_others(path):
    other = path.with_name("other")
    other.write_bytes(os.urandom(path.stat().st_size))
    path.unlink()
    path.symlink_to(other)


def become_a_pipe(path):
    path.unlink()
    os.mkfifo(path)


def become_unlike_itself(path):
    path.write_bytes(os.urandom(path.stat().st_size))


@pytest.mark.parametrize(
    "damage",
    [
        vanish,
        become_a_folder,
        become_a_full_folder,
        become_a_link_to_nothing,
        become_a_link_to_itself,
        become_a_link_to_others,
        become_a_pipe,
        become_unlike_itself,
    ],
)
@pytest.mark.timeout(60)
def test_missing_or_replaced_files_are_found(taken, tmp_path, damage):
    for path in files_of(taken):
        shutil.copytree(taken, tmp_path / "s")
        damage(tmp_path / "s" / path.relative_to(taken))
        met = look(Snapshot(tmp_path / "s"))
        assert met
        shutil.rmtree(tmp_path / "s")


def test_swapped_files_of_equal_length_are_found(tmp_path):
    for name in ("a", "b"):
        torch.manual_seed(ord(name))
        Snapshot.take(tmp_path / name, {"s": StateDict(x=torch.randn(1000), text="é" * 9000)})
    pairs = zip(files_of(tmp_path / "a"), files_of(tmp_path / "b"), strict=True)
    for mine, other in list(pairs)[1:]:
        assert mine.stat().st_size == other.stat().st_size
        kept = mine.read_bytes()
        shutil.copy(other, mine)
        if kept != mine.read_bytes():  # the same text has the same bytes
            assert not Snapshot(tmp_path / "a").verify()
            with pytest.raises(CorruptSnapshotError):
                Snapshot(tmp_path / "a").restore({"s": StateDict(x=torch.zeros(1000), text="")})
        mine.write_bytes(kept)
    assert Snapshot(tmp_path / "a").verify()


def test_manifest_of_another_snapshot_is_refused(taken, tmp_path):
    Snapshot.take(tmp_path / "other", state())
    shutil.copytree(taken, tmp_path / "s")
    shutil.copy(tmp_path / "other" / METADATA, tmp_path / "s" / METADATA)
    assert look(Snapshot(tmp_path / "s"))


def test_verify_and_restore_succeed_after_damage_is_repaired(taken):
    snapshot = Snapshot(taken)
    path = files_of(taken)[1]
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    assert not snapshot.verify()
    path.write_bytes(whole)
    assert snapshot.verify()
    live = blank()
    snapshot.restore(live)
    assert is_as_saved(live)
