"""Long parts of a manifest have an index: one entry is found without the others, and every byte is verified."""

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from snapshot import CorruptSnapshotError
from snapshot.manifest import parts
from snapshot.manifest.containers import DictEntry
from snapshot.manifest.document import encode
from snapshot.manifest.parts import (
    IndexSegment,
    ManifestPart,
    NumberedEntries,
    PartIndex,
    decode_index,
    decode_part,
    decode_segment,
    encode_own_part,
)
from snapshot.manifest.values import IntEntry, StrEntry

COMPONENTS = st.sampled_from(("a", "b", "a.b", "0", "-", "é", "\U0001f600", "x" * 40))
PATHS = st.lists(COMPONENTS, min_size=1, max_size=4).map("/".join)
NAMES = st.lists(PATHS, min_size=1, max_size=40, unique=True)


@pytest.fixture(autouse=True)
def short_segments(monkeypatch):
    monkeypatch.setattr(parts, "INDEXED", 0)
    monkeypatch.setattr(parts, "SEGMENT", 300)


def entries(names, ranks=("0",)):
    return {f"{rank}/{name}": IntEntry(str(at)) for rank in ranks for at, name in enumerate(names)}


def found_by_index(encoded, part, names):
    begin, end, _ = part.index
    index = decode_index(encoded.data[begin:end], part, "p")
    held = {}
    for each in index.find(names):
        held |= decode_segment(encoded.data[each.begin : each.end], each, "p")
    return held


@settings(max_examples=150, deadline=None)
@given(NAMES, st.data())
def test_manifest_part_index_finds_each_name_and_all_below_it(names, data):
    held = entries(names, ("0", "10", "3"))
    encoded = encode_own_part(held)
    part = encoded.describe("data/aaaaaaaaaaaa-0.json", [0])
    assert decode_part(encoded.data, part, "p").manifest == held
    for name in [*names, data.draw(st.text(max_size=3))]:
        found = found_by_index(encoded, part, [name])
        for rank in ("0", "10", "3"):
            wanted = {path for path in held if path == f"{rank}/{name}" or path.startswith(f"{rank}/{name}/")}
            assert wanted <= found.keys()


@settings(max_examples=200, deadline=None)
@given(NAMES, st.data())
def test_manifest_part_changed_byte_is_always_found(names, data):
    encoded = encode_own_part(entries(names))
    part = encoded.describe("data/aaaaaaaaaaaa-0.json", [0])
    changed = bytearray(encoded.data)
    at = data.draw(st.integers(0, len(changed) - 1))
    changed[at] ^= data.draw(st.integers(1, 255))
    with pytest.raises(CorruptSnapshotError):
        decode_part(bytes(changed), part, "p")
    begin, end, _ = part.index
    if begin <= at < end:
        with pytest.raises(CorruptSnapshotError, match="index: digest"):
            decode_index(changed[begin:end], part, "p")
    index = decode_index(encoded.data[begin:end], part, "p")
    for each in index.segments:
        if each.begin <= at < each.end:
            with pytest.raises(CorruptSnapshotError, match=r"segment .*: digest"):
                decode_segment(changed[each.begin : each.end], each, "p")


def test_manifest_part_that_is_short_has_no_index(monkeypatch):
    monkeypatch.setattr(parts, "INDEXED", 4 << 20)
    held = entries("abc")
    encoded = encode_own_part(held)
    assert encoded.index is None
    assert encoded.data == encode(ManifestPart(held))


HELD = entries([f"m/w{at:03}" for at in range(40)]) | {"0/m": DictEntry([f"w{at:03}" for at in range(40)])}


def rebuilt(change):
    """A part whose index was changed by someone who makes all digests right."""
    encoded = encode_own_part(HELD)
    decoded = msgspec.json.decode(encoded.data, type=dict)
    del decoded["digest"]
    part = msgspec.convert(decoded, ManifestPart)
    part.index = change(part.index)
    data = encode(part)
    text = msgspec.json.encode(part.index)
    begin = data.rindex(text)
    made = msgspec.structs.replace(encoded, data=data, index=(begin, begin + len(text), parts.digest_range(text)))
    return made, made.describe("data/aaaaaaaaaaaa-0.json", [0])


def _moved(index):
    first, *rest = index.segments
    return PartIndex(index.numbers, [IndexSegment(first.first, first.begin, first.end - 1, first.digest), *rest])


def _dropped(index):
    return PartIndex(index.numbers, index.segments[1:])


def _renamed(index):
    first, *rest = index.segments
    return PartIndex(index.numbers, [IndexSegment("0/another", first.begin, first.end, first.digest), *rest])


def _numbered(index):
    return PartIndex(["1"], index.segments)


def _emptied(index):
    return PartIndex(index.numbers, [])


@pytest.mark.parametrize("change", [_moved, _dropped, _renamed, _numbered, _emptied])
def test_manifest_part_index_that_contradicts_the_part_is_refused(change):
    encoded, part = rebuilt(change)
    with pytest.raises(CorruptSnapshotError, match="index"):
        decode_part(encoded.data, part, "p")


def test_manifest_part_index_must_be_where_the_manifest_says():
    encoded, part = rebuilt(lambda index: index)
    assert decode_part(encoded.data, part, "p").manifest == HELD
    for place in (None, (0, 5, part.index[2]), (part.index[0], part.index[1] - 1, part.index[2])):
        with pytest.raises(CorruptSnapshotError, match="index"):
            decode_part(encoded.data, msgspec.structs.replace(part, index=place), "p")


def test_manifest_part_segments_outside_of_the_part_are_refused():
    encoded, part = rebuilt(lambda index: PartIndex(index.numbers, [IndexSegment("0/a", 0, 1 << 60, "xxh3:0")]))
    begin, end, _ = part.index
    with pytest.raises(CorruptSnapshotError, match="before the index"):
        decode_index(encoded.data[begin:end], part, "p")


def test_manifest_part_with_one_long_entry_is_one_segment():
    held = {"0/a": StrEntry("x" * 5000), "0/b": IntEntry("1")}
    encoded = encode_own_part(held)
    part = encoded.describe("data/aaaaaaaaaaaa-0.json", [0])
    assert found_by_index(encoded, part, ["a"]) == {"0/a": held["0/a"]}


def test_manifest_part_with_many_names_in_a_container_has_long_segments():
    held = {"0/a": DictEntry([f"{number:0300}" for number in range(100)])}
    held |= {f"0/a/{number:0300}": IntEntry(str(number)) for number in range(100)}
    alone = {f"a/{name}": entry for name, entry in held.items() if name != "0/a"}
    assert len(encode_own_part(held).data) > 60_000
    with_container, without = (decoded_index(encode_own_part(each)).segments for each in (held, alone))
    assert len(with_container) == len(without) + 1


def decoded_index(encoded):
    begin, end, _ = encoded.index
    return decode_index(encoded.data[begin:end], encoded.describe("p", [0]), "p")


@given(NAMES)
def test_numbered_entries_are_encoded_like_those_with_the_number(names):
    held = {name: IntEntry(str(number)) for number, name in enumerate(names)}
    numbered = NumberedEntries(12, held)
    whole = {f"12/{name}": entry for name, entry in held.items()}
    assert dict(numbered) == whole == dict(numbered.items())
    assert list(numbered.values()) == list(whole.values())
    assert encode_own_part(numbered) == encode_own_part(whole)
    assert "1/a" not in numbered
