"""A pickle takes memory and time in proportion to the bytes that are stored of it; honest ones open."""

import pickle
import warnings
import zipfile

import pytest
import torch
from torch.distributed.checkpoint import metadata as m
from torch.distributed.checkpoint.filesystem import _StorageInfo

from snapshot import CorruptSnapshotError, Snapshot, SnapshotError
from snapshot.formats.pickled_objects import load_object
from tests.helpers.states import expect_equal
from tests.hostile.hostile_snapshots import bounded
from tests.hostile.pickle_opcodes import archive

ROOM = 500 << 20
"""Of address space: threads take some hundred MiB without using them."""
LISTS = {
    "lists": b"]",
    "sets": b"\x8f",
    "dicts": b"}",
    "nones": b"N",
    "ints": b"J\1\2\3\4",
    "tuples": b"N\x85",
    "objects": b"h\0)R",
    "repeated": b"h\1",
}


def listed(what, length):
    """A pickle of a list of one thing, over and over."""
    head = b"\x80\4](ca\nb\nq\0" + (b"](" + b"N" * 1000 + b"eq\1" if what == "repeated" else b"")
    return head + LISTS[what] * (length // len(LISTS[what])) + b"e."


@pytest.mark.parametrize("what", LISTS)
@pytest.mark.parametrize("length", [300_000, 5_000_000, 50_000_000])
def test_pickle_memory_is_bounded_by_compressed_size(tmp_path, what, length):
    (tmp_path / "x.pt").write_bytes(archive(listed(what, length), method=zipfile.ZIP_DEFLATED))
    assert (tmp_path / "x.pt").stat().st_size < 100_000
    with bounded(ROOM):
        assert not Snapshot(tmp_path / "x.pt").exists()
        with pytest.raises(CorruptSnapshotError):
            Snapshot(tmp_path / "x.pt").read_object("0")


@pytest.mark.slow
@pytest.mark.parametrize("what", LISTS)
def test_pickle_memory_is_bounded_by_stored_size(tmp_path, what):
    (tmp_path / "x.pt").write_bytes(archive(listed(what, 400_000)))
    with bounded(ROOM):
        Snapshot(tmp_path / "x.pt").exists()
    (tmp_path / "y.pt").write_bytes(archive(listed("sets", 2_000_000)))
    with bounded(ROOM), pytest.raises(CorruptSnapshotError, match="bytes of memory"):
        Snapshot(tmp_path / "y.pt").read_object("0")


@pytest.mark.parametrize(("length", "stored"), [(2_000_000, 2_000_000), (50_000_000, 5_000)])
def test_pickle_object_memory_is_bounded(length, stored):
    data = bytearray(archive(listed("sets", length)))
    with bounded(ROOM), pytest.raises(CorruptSnapshotError, match=r"memory|inflates"):
        load_object("x", data, "torch_save", "set", allow_pickle=False, stored=stored)


def _tensor(chunks):
    return m.TensorStorageMetadata(m.TensorProperties(dtype=torch.float32), torch.Size([10]), chunks)


def shared_chunks(size):
    """Many tensors that share one long list of chunks."""
    chunks = [m.ChunkStorageMetadata(torch.Size([0]), torch.Size([size]))] * 20_000
    names = [f"n{number}" for number in range(500)]
    offsets, where = torch.Size([0]), _StorageInfo("__0_0.distcp", 0, 100)
    stored = {m.MetadataIndex(name, offsets): where for name in names}
    return m.Metadata({name: _tensor(chunks) for name in names}, {}, stored)


def long_paths(_):
    """Few names, each of which is nested below one long key, hundreds of times."""
    names = [f"n{number}" for number in range(50)]
    where = _StorageInfo("__0_0.distcp", 0, 100)
    paths = {name: (name, *["k" * 10_000] * 390, "x") for name in names}
    stored = {m.MetadataIndex(name): where for name in names}
    return m.Metadata({name: m.BytesStorageMetadata() for name in names}, paths, stored)


@pytest.mark.parametrize(("make", "size"), [(shared_chunks, 0), (shared_chunks, 1), (long_paths, 0)])
def test_dcp_metadata_with_repeated_values_is_refused(tmp_path, make, size):
    (tmp_path / ".metadata").write_bytes(pickle.dumps(make(size)))
    (tmp_path / "__0_0.distcp").write_bytes(bytes(100))
    with bounded(ROOM), pytest.raises(SnapshotError, match="too many repeated values"):
        Snapshot(tmp_path).get_manifest()


@pytest.mark.slow
@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_torch_file_with_a_real_optimizer_state_is_read(tmp_path, method):
    parameters = [torch.nn.Parameter(torch.zeros(1)) for _ in range(5_000)]
    optimizer = torch.optim.Adam(parameters)
    for parameter in parameters:
        parameter.grad = torch.ones(1)
    optimizer.step()
    held = {"optimizer": optimizer.state_dict(), "indices": list(range(100_000)), "flags": [True, None] * 20_000}
    torch.save(held, tmp_path / "a.pt")
    with zipfile.ZipFile(tmp_path / "a.pt") as old, zipfile.ZipFile(tmp_path / "b.pt", "w", method) as new:
        for member in old.infolist():
            new.writestr(member.filename, old.read(member))
    with warnings.catch_warnings(action="ignore"):
        expect_equal(Snapshot(tmp_path / "b.pt").read_object("0"), held)
