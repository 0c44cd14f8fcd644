"""Derived files of packed tensors: any range has the tensor's bytes, and ranges in order read no byte twice."""

import io
import zlib

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from snapshot import CorruptSnapshotError, RestoreOptions, Snapshot, StateDict, TensorMap
from snapshot.formats import packed_tensors
from snapshot.io.aio import in_thread, run_inline
from snapshot.io.budget import MemoryBudget
from snapshot.io.loop import run
from snapshot.manifest.entries import Extra, TensorEntry

TENSOR = torch.arange(5000, dtype=torch.int32) * 77_777
BYTES = TENSOR.numpy().tobytes()
SWAPPED = TENSOR.numpy().byteswap().tobytes()


class Held:
    """A storage of one file, which counts the bytes that are read."""

    def __init__(self, data):
        self.data = data
        self.read = 0

    async def read_into(self, path, offset, buffers, *, token=None):
        for each in buffers:
            each[:] = self.data[offset : offset + len(each)]
            offset += len(each)
            self.read += len(each)


def stream(serializer, data):
    entry = TensorEntry("f", (0, len(data)), "int32", tuple(TENSOR.shape), serializer=serializer)
    layout = packed_tensors.find_layout("x", entry, b"", b"")
    return packed_tensors.Stream("x", entry, layout), Held(data)


def read(file, storage, begin, *lengths):
    held = [bytearray(each) for each in lengths]
    run(file.read(storage, begin, [memoryview(each) for each in held], MemoryBudget(1 << 20), None))
    return b"".join(held)


@pytest.fixture(autouse=True)
def short_pieces(monkeypatch):
    monkeypatch.setattr(packed_tensors, "AT_ONCE", 700)
    monkeypatch.setattr(packed_tensors, "PIECE", 90)


KINDS = {"zlib+array": zlib.compress(BYTES), "swapped+array": SWAPPED, "zlib+swapped+array": zlib.compress(SWAPPED)}
RANGES = st.lists(st.tuples(st.integers(0, 4999), st.lists(st.integers(1, 900), min_size=1, max_size=3)), max_size=6)


@pytest.mark.parametrize("serializer", KINDS)
def test_packed_tensor_ranges_in_any_order_have_its_bytes(serializer):
    @given(RANGES)
    def check(ranges):
        file, storage = stream(serializer, KINDS[serializer])
        for first, counts in ranges:
            end = min(5000, first + sum(counts))
            lengths = [4 * (end - first)] if end == 5000 else [4 * each for each in counts]
            assert read(file, storage, 4 * first, *lengths) == BYTES[4 * first : 4 * end]

    check()


@pytest.mark.parametrize("serializer", KINDS)
def test_packed_tensor_ranges_in_order_read_each_byte_once(serializer):
    file, storage = stream(serializer, KINDS[serializer])
    assert b"".join(read(file, storage, at, 2000) for at in range(0, len(BYTES), 2000)) == BYTES
    assert storage.read <= len(storage.data)
    file.forget()
    before = storage.read
    assert read(file, storage, len(BYTES) - 8, 8) == BYTES[-8:]
    assert storage.read - before >= len(storage.data) - 700


def test_packed_tensor_that_ends_too_early_is_refused():
    file, storage = stream("zlib+array", zlib.compress(BYTES[:-4]))
    assert read(file, storage, 0, 400) == BYTES[:400]
    with pytest.raises(CorruptSnapshotError, match="x: its bytes end too early"):
        read(file, storage, 400, len(BYTES) - 400)


@pytest.mark.parametrize("inline", [False, True], ids=["loop", "thread"])
def test_packed_tensor_in_a_compressed_archive_is_located_on_the_loop_and_in_a_thread(inline):
    archive = io.BytesIO()
    torch.save(TENSOR.view(50, 100).t(), archive)
    data = zlib.compress(archive.getvalue())
    entry = TensorEntry("f", (0, len(data)), "int32", (100, 50), serializer="zlib+torch_save")
    known = {}

    async def read_places(places):
        return [bytearray(data[begin:end]) for _, begin, end in places]

    async def locate():
        return await packed_tensors.locate_tensors([("x", entry)], known, read_places)

    [place] = run(in_thread(run_inline, locate)) if inline else run(locate())
    [again] = run(locate())  # its layout is known: nothing is read, and it has a file of its own
    assert again.entry.location != place.entry.location
    assert len(known) == 1
    assert (place.entry.serializer, place.entry.extra.strides) == ("array", (1, 100))
    begin, end = place.entry.byte_range
    assert read(place.derivation, Held(data), begin, end - begin) == BYTES


def test_views_of_one_storage_with_other_transforms_stay_apart_in_one_mapped_tensor(tmp_path):
    """Both are read under the name of the tensor that the map makes, from the same range."""
    held = torch.complex(torch.arange(200_000.0) + 1, torch.arange(200_000.0) + 2)
    torch.save({"c": held.conj(), "n": torch._neg_view(held)}, tmp_path / "m.pt")
    joined = TensorMap([{"names": "c, n -> x", "axes": "a, a -> (a + a)"}])
    live = StateDict(x=torch.zeros(400_000, dtype=torch.complex64))
    Snapshot(tmp_path / "m.pt").restore({"k": live}, options=RestoreOptions(map=joined))
    assert torch.equal(live["x"], torch.cat([held.conj().resolve_conj(), -held]))


@pytest.mark.parametrize(
    ("strides", "offset", "is_short"), [((1,), 0, True), ((1 << 30,), 0, False), ((1,), 1 << 30, False)]
)
def test_short_streamed_tensors_are_unpacked_in_memory_only_up_to_their_last_element(strides, offset, is_short):
    extra = Extra(strides=strides, storage_offset=offset)
    stored = TensorEntry("f", (0, 1000), "uint8", (2,), serializer="deflate+zip", extra=extra)
    assert packed_tensors.is_short(stored) == is_short
