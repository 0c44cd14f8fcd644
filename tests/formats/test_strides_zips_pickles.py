"""The pieces that others' formats are read with: strides, archives and pickles, against NumPy, zipfile and pickle."""

import io
import math
import pickle
import struct
import zipfile
import zlib

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from snapshot import CorruptSnapshotError, SnapshotError
from snapshot.errors import UnsafeObjectError, UnsupportedFormatError
from snapshot.formats import packed_tensors, torch_save, zip_archive
from snapshot.formats.safe_pickle import evaluate_pickle as load_pickle
from snapshot.manifest.entries import TensorEntry
from snapshot.tensors.memory import contiguous_strides, find_enclosing_tensor, measure_span

SHAPES = st.lists(st.integers(0, 5), max_size=4).map(tuple)
TAKEN = settings(max_examples=150)


@TAKEN
@given(SHAPES)
def test_contiguous_strides_equal_those_of_torch(shape):
    assert contiguous_strides(shape) == torch.empty(shape).stride()


@TAKEN
@given(st.lists(st.tuples(st.integers(1, 4), st.integers(0, 9)), max_size=4))
def test_measure_span_is_the_extent_of_a_view(axes):
    shape, strides = tuple(size for size, _ in axes), tuple(step for _, step in axes)
    reached = [sum(i * s for i, s in zip(index, strides, strict=True)) for index in np.ndindex(shape)]
    assert measure_span(shape, strides) == 1 + max(reached)
    assert measure_span((*shape, 0), (*strides, 3)) == 0


def _boxed(held, shape, strides):
    """What a view is by the tensor around it, which may reach behind the view's end; None where it is no box of one."""
    found = find_enclosing_tensor(shape, strides)
    if found is None:
        return None
    whole = torch.full((math.prod(found.sizes),), -1, dtype=held.dtype)
    count = min(len(whole), measure_span(shape, strides))
    whole[:count] = held[:count]
    whole = whole.view(found.sizes)
    part = whole[(*(slice(0, shape[axis]) for axis in found.order), *([0] * found.padded))]
    return part.permute([found.order.index(axis) for axis in range(len(shape))]) if shape else part


@TAKEN
@given(st.lists(st.tuples(st.integers(1, 4), st.integers(0, 24)), max_size=4))
def test_boxed_view_is_the_requested_view_or_none(axes):
    shape, strides = tuple(size for size, _ in axes), tuple(step for _, step in axes)
    held = torch.arange(measure_span(shape, strides))
    made = _boxed(held, shape, strides)
    if made is not None:
        assert torch.equal(made, held.as_strided(shape, strides))


@TAKEN
@given(st.data())
def test_boxed_view_exists_for_slices_and_permutations(data):
    sizes = data.draw(st.lists(st.integers(1, 5), min_size=1, max_size=4))
    base = torch.arange(math.prod(sizes)).view(sizes)
    lows = [data.draw(st.integers(0, size - 1)) for size in sizes]
    view = base[tuple(slice(low, data.draw(st.integers(low + 1, size))) for low, size in zip(lows, sizes, strict=True))]
    view = view.permute(data.draw(st.permutations(range(view.dim()))))
    held = base.view(-1)[view.storage_offset() :]
    assert torch.equal(_boxed(held, tuple(view.shape), view.stride()), view)


# Archives

NAMES = st.text(st.characters(codec="utf-8", exclude_characters="\0/"), min_size=1, max_size=20)
MEMBERS = st.dictionaries(NAMES, st.binary(max_size=300), min_size=1, max_size=6)


@TAKEN
@given(MEMBERS, st.sampled_from([zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED]))
def test_zip_archive_reads_archives_of_zipfile(members, method):
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w", method) as file:
        for name, data in members.items():
            file.writestr(f"a/{name}", data)
    content = made.getvalue()
    begin, end = zip_archive.find_directory(content[-zip_archive.TAIL :], len(content))
    found = zip_archive.read_members(content[begin:end], begin)
    assert [each.name for each in found] == [f"a/{name}" for name in members]
    for each, data in zip(found, members.values(), strict=True):
        at = each.header + zip_archive.find_data_begin(content[each.header :])
        held = content[at : at + each.packed]
        assert (zip_archive.inflate_member(held, each.size) if each.method == zip_archive.DEFLATED else held) == data
        assert each.crc == zlib.crc32(data)


@TAKEN
@given(MEMBERS, st.booleans())
def test_zip_archive_layout_is_read_by_zipfile(members, late):
    """With checksums that are known at once, or late."""
    sums = {name: zlib.crc32(data) for name, data in members.items()}
    made = [
        torch_save.ArchiveMember(f"a/{name}", len(data), None if late else data, sum=lambda name=name: sums[name])
        for name, data in members.items()
    ]
    frames, size = torch_save.lay_out_archive(made, zlib.crc32)
    held = list(members.values())
    content = b"".join(each.make() if isinstance(each, torch_save.Frame) else held[each] for each in frames)
    assert len(content) == size
    for each, data in zip(made, members.values(), strict=True):
        at = each.header + zip_archive.find_data_begin(content[each.header :])
        assert at % torch_save.ALIGNMENT == 0
        assert content[at : at + len(data)] == data
    with zipfile.ZipFile(io.BytesIO(content)) as file:
        assert file.testzip() is None
        assert {info.filename: file.read(info) for info in file.infolist()} == {
            f"a/{name}": data for name, data in members.items()
        }


@TAKEN
@given(st.binary(max_size=200))
def test_zip_archive_of_any_bytes_is_refused_or_consistent(data):
    for tail in (data, data + b"PK\5\6" + bytes(18), data + b"PK\5\6" + data[:18].ljust(18, b"\1")):
        try:
            begin, end = zip_archive.find_directory(tail, len(tail))
            assert 0 <= begin <= end <= len(tail)
            for each in zip_archive.read_members(tail[begin:end], begin):
                assert each.header + each.packed <= begin
        except ValueError:
            pass


def test_zip_archive_reads_zip64_lengths():
    def item(extra):
        numbers = 0, 0, 0, 0, 0, 0, 7, 0xFFFFFFFF, 0xFFFFFFFF, 1, len(extra), 0, 0, 0, 0, 0xFFFFFFFF
        return struct.pack("<4s6H3L5H2L", b"PK\1\2", *numbers) + b"a" + extra

    long = struct.pack("<2H3Q", 1, 24, 5 << 32, 5 << 32, 3)
    (found,) = zip_archive.read_members(item(struct.pack("<2H", 9, 2) + b"xx" + long), 6 << 32)
    assert (found.size, found.packed, found.header) == (5 << 32, 5 << 32, 3)
    for lie in (b"", long[:-1], long[:4], struct.pack("<2H", 1, 60_000) + long[4:], struct.pack("<2HQ", 1, 8, 1)):
        with pytest.raises(ValueError, match="long member"):
            zip_archive.read_members(item(lie), 6 << 32)


@TAKEN
@given(st.binary(max_size=100))
def test_torch_save_find_layout_accepts_or_refuses_any_bytes(data):
    file = io.BytesIO()
    torch.save(torch.arange(3.0), file)
    good = file.getvalue()
    entry = TensorEntry("x", (0, len(good)), "float32", (3,), serializer="torch_save")
    layout = packed_tensors.find_layout("x", entry, good, good)
    assert good[layout.begin : layout.begin + 12] == torch.arange(3.0).numpy().tobytes()
    for bad in (data, data + good[len(data) :], good[: len(good) - len(data)] + data):
        entry = TensorEntry("x", (0, len(bad)), "float32", (3,), serializer="torch_save")
        try:
            found = packed_tensors.find_layout("x", entry, bad, bad)
        except (SnapshotError, packed_tensors.MoreBytesNeeded):
            continue
        assert 0 <= found.begin <= found.begin + found.nbytes <= len(bad)


# Pickles

BINARY = st.binary(max_size=9)
KEYS = st.one_of(
    st.text(max_size=9), st.integers(), st.booleans(), st.none(), st.floats(allow_nan=False), st.binary(max_size=9)
)
VALUES = st.recursive(
    st.one_of(KEYS, st.complex_numbers(allow_nan=False), st.integers(-(1 << 300), 1 << 300)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(st.one_of(KEYS, st.tuples(KEYS, KEYS)), inner, max_size=4),
        st.sets(KEYS, max_size=4),
        st.frozensets(st.one_of(KEYS, st.tuples(KEYS)), max_size=4),
    ),
    max_leaves=20,
)


@settings(max_examples=300)
@given(VALUES, st.sampled_from([2, 3, 4, 5]))
def test_load_pickle_equals_pickle_for_plain_values(value, protocol):
    data = pickle.dumps([value, value, (value,)], protocol)
    found = load_pickle(data, "here")
    assert found == pickle.loads(data)
    assert repr(found) == repr(pickle.loads(data))
    assert repr(load_pickle(data + b"more", "here")) == repr(found)


@TAKEN
@given(VALUES, st.sampled_from([2, 4]))
def test_load_pickle_equals_pickle_for_shared_values(value, protocol):
    shared = (1, 2)
    data = pickle.dumps([value, [shared] * 40], protocol)
    assert repr(load_pickle(data, "here")) == repr(pickle.loads(data))


@pytest.mark.parametrize("name", ["builtins complex", "builtins set", "torch Size", "collections OrderedDict"])
def test_load_pickle_refuses_known_types_created_without_a_call(name):
    """NEWOBJ creates it without the call that gives it its value."""
    module, kind = name.split()
    with pytest.raises(UnsupportedFormatError, match=f"an object of {module}.{kind} that is created without a call"):
        load_pickle(b"\x80\x02c" + f"{module}\n{kind}\n".encode() + b")\x81.", "here")


@settings(max_examples=300)
@given(st.binary(max_size=60), st.integers(0, 100), VALUES)
def test_load_pickle_of_any_bytes_returns_or_raises_an_error_of_the_library(data, at, value):
    good = pickle.dumps(value, 4)
    at = at % len(good)
    for each in (data, b"\x80\x02" + data + b".", good[:at] + data[:3] + good[at + 1 :]):
        try:
            repr(load_pickle(each, "here"))
        except (CorruptSnapshotError, UnsafeObjectError, UnsupportedFormatError):  # the last: of an unknown class
            pass
        except RecursionError:
            pytest.fail("it nests without end")
