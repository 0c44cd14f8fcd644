"""What every entry answers about itself, without a list of the kinds of entries."""

import typing

import msgspec
import pytest
import torch

from snapshot.manifest.containers import DictEntry, ListEntry
from snapshot.manifest.entries import (
    AnyEntry,
    ChunkedTensorEntry,
    DTensorEntry,
    Extra,
    MappedPart,
    MappedTensorEntry,
    NDArrayEntry,
    ObjectEntry,
    Shard,
    ShardedTensorEntry,
    TensorEntry,
    TensorPartsEntry,
)
from snapshot.manifest.values import DeviceEntry, DtypeEntry, IntEntry, SizeEntry, make_plain_entry
from snapshot.tensors.geometry import Grid


def stored(begin, *shape, dtype="uint8"):
    size = 1
    for each in shape:
        size *= each
    return TensorEntry("data/a", (begin, begin + size), dtype, shape, f"xxh3:{begin}")


TENSOR = stored(0, 2, 3)
BOXES = [Shard((0,), (2,), stored(0, 2)), Shard((2,), (3,), stored(2, 3))]
CHUNKED = ChunkedTensorEntry("uint8", (5,), BOXES)
SHARDED = ShardedTensorEntry("uint8", (5,), BOXES, mesh=[0, 1])
ARRAY = NDArrayEntry(stored(8, 4), "|u1", (4,))
PARTS = TensorPartsEntry("coo", {"indices": stored(0, 2), "values": CHUNKED}, {"shape": [9]})
OBJECT = ObjectEntry("data/b", (0, 7), "torch_save", "module.Class", "xxh3:b")
MAPPED = MappedTensorEntry("uint8", (6,), [MappedPart(stored(0, 6), Grid.identity((6,)))])
HOLDERS = [TENSOR, CHUNKED, SHARDED, ARRAY, PARTS]


def test_entries_of_every_kind_have_no_dict_and_answer_what_they_are():
    for kind in typing.get_args(AnyEntry):
        assert not kind.__dictoffset__, kind
        known = [kind.is_value, kind.is_container, kind.is_tensor, kind.is_object]
        assert sum(known) == (0 if kind in (NDArrayEntry, TensorPartsEntry) else 1), kind
        assert kind.is_container or not kind.is_keyed
        assert kind.is_tensor or not (kind.is_sharded or kind.is_mapped)


@pytest.mark.parametrize("entry", [ARRAY, PARTS])
def test_tensors_of_an_entry_make_the_same_entry_again(entry):
    made = entry.with_tensors(dict(entry.tensors()))
    assert (type(made), made) == (type(entry), entry)


@pytest.mark.parametrize("entry", [*HOLDERS, MAPPED])
def test_stored_ranges_of_an_entry_are_those_of_its_tensors(entry):
    assert list(entry.stored()) == [piece for _, tensor in entry.tensors() for _, piece in tensor.pieces()]


def test_stored_and_tensors_of_other_entries_are_none_or_the_entry_itself():
    assert (list(OBJECT.stored()), list(OBJECT.tensors())) == ([OBJECT], [])
    for entry in (IntEntry("3"), DictEntry(["a"]), ListEntry(2)):
        assert (list(entry.stored()), list(entry.tensors()), entry.boxes) == ([], [], None)


def test_tensors_of_parts_have_the_names_of_their_leaves_as_suffixes():
    assert [suffix for suffix, _ in PARTS.tensors()] == ["%[indices]", "%[values]"]
    odd = TensorPartsEntry("coo", {"a]%[b": TENSOR}, {})
    assert odd.with_tensors(dict(odd.tensors())) == odd


def test_boxes_are_the_entrys_own_list_and_with_boxes_has_another():
    for entry in (CHUNKED, SHARDED):
        made = entry.with_boxes(list(entry.boxes))
        assert entry.boxes is BOXES
        assert made == entry
        assert made.boxes is not BOXES
    assert TENSOR.boxes is None


def test_shared_and_whole_entries_say_so():
    assert (SHARDED.is_shared, CHUNKED.is_shared) == (True, False)
    assert msgspec.structs.replace(CHUNKED, replicated=True).is_shared
    assert all(entry.is_whole() for entry in (*HOLDERS, OBJECT, IntEntry("1")))
    assert not SHARDED.with_boxes(BOXES[:1]).is_whole()


def test_form_is_equal_for_entries_that_differ_in_the_place_of_their_bytes_only():
    assert TENSOR.form == stored(50, 2, 3).form != stored(0, 3, 2).form
    assert CHUNKED.form == stored(0, 5).form  # however it is split
    assert TENSOR.form != msgspec.structs.replace(TENSOR, extra=Extra(requires_grad=True)).form
    assert PARTS.form != msgspec.structs.replace(PARTS, params={}).form
    assert IntEntry("3").form != IntEntry("4").form
    assert SHARDED.form is DictEntry([]).form is msgspec.structs.replace(OBJECT, digest=None).form is None


def test_places_of_a_mapped_tensor_include_what_the_map_takes():
    [(grid, *rest)] = MAPPED.places()
    assert (grid, rest) == (MAPPED.parts[0].grid, MAPPED.parts[0].entry.places())
    assert MAPPED.sources() == [MAPPED.parts[0].entry]


def test_descriptions_for_listings_and_differences():
    dtensor = DTensorEntry("uint8", (5,), BOXES, placements=["S(0)"])
    texts = [
        (TENSOR, "Tensor", "", "uint8[2, 3]"),
        (CHUNKED, "Tensor", "", "uint8[5]"),
        (dtensor, "DTensor", "DTensor S(0)", "uint8[5]"),
        (ARRAY, "ndarray", "", "|u1[4]"),
        (PARTS, "coo tensor", "", "coo"),
        (OBJECT, "Class", "a pickle", "module.Class, 7 bytes"),
        (IntEntry("3"), "int", "3", "int 3"),
        (ListEntry(0), "list", "empty", "list"),
    ]
    for entry, *expected in texts:
        assert [*entry.describe(), entry.summarise()] == expected
    assert dtensor.kind == CHUNKED.kind == TENSOR.kind != ARRAY.kind


@pytest.mark.parametrize(
    "value",
    [torch.float32, torch.float8_e4m3fn, torch.qint8]
    + [torch.device(name) for name in ("cpu", "cuda:1", "meta")]
    + [torch.Size(sizes) for sizes in ([], [3], [2, 0, 1 << 40])],
    ids=str,
)
def test_entries_describe_values_of_torch_as_torch_prints_them(value):
    entry = make_plain_entry(value)
    assert entry.describe() == (type(value).__name__, repr(value))
    assert entry.value() == value


@pytest.mark.parametrize(
    "entry",
    [
        DtypeEntry("float99"),
        DtypeEntry(""),
        DeviceEntry("cuda:-1"),
        DeviceEntry(""),
        SizeEntry("1,x"),
        SizeEntry("9" * 30),
    ],
)
def test_entries_describe_invalid_values_of_torch_by_their_texts(entry):
    assert entry.describe() == (entry.type, entry.serialized_value)


def test_entry_of_a_class_that_says_it_is_one_of_torch_is_none():
    fake = type("Size", (tuple,), {"__module__": "torch"})
    assert make_plain_entry(fake((1, 2))) is None
