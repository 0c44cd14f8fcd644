"""The head of a manifest by its first and last bytes: the same as by all of them, or none."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from snapshot.errors import CorruptSnapshotError
from snapshot.manifest.document import (
    BaseReference,
    Document,
    FileEntry,
    NotOurs,
    decode_head,
    decode_head_of_ends,
    encode,
)
from snapshot.manifest.entries import TensorEntry

SAVE, BASE = "0123456789ab", "ba5e0ba5e0ba"
TEXTS = st.one_of(st.text(max_size=8), st.sampled_from(["manifest", "base", '"},"digest":"', ',"manifest":{', "}"]))
VALUES = st.recursive(st.integers(-9, 9) | TEXTS, lambda inner: st.dictionaries(TEXTS, inner, max_size=3), max_leaves=6)


def file_name(save_id, number=0):
    return f"data/{save_id}-0-{number}.safetensors"


@st.composite
def manifests(draw, *, with_base=None):
    entry = TensorEntry(file_name(SAVE), (0, 4), "float32", [1], "xxh3:" + 32 * "0")
    entries = {f"0/{name}": entry for name in draw(st.lists(TEXTS, max_size=5, unique=True))}
    files = {file_name(SAVE): FileEntry(4), file_name(SAVE, 1): FileEntry(9, content=draw(TEXTS), origin="other")}
    base = None
    if draw(st.booleans()) if with_base is None else with_base:
        base = BaseReference(BASE, draw(TEXTS), draw(st.sampled_from(["", "safetensors"])))
        files[file_name(BASE)] = FileEntry(7, in_base=True, name=draw(TEXTS) if base.format else "")
    metadata = msgspec.Raw(msgspec.json.encode(draw(st.dictionaries(TEXTS, VALUES, max_size=3))))
    created = "2026-01-02T03:04:05+00:00"
    return encode(Document("snapshot/1", "0.1", SAVE, 1, created, "", metadata, files, [], entries, base))


@given(manifests(), st.integers(0, 4000), st.integers(0, 4000))
def test_decode_head_of_ends_equals_decode_head_or_is_none(data, first, last):
    beginning, end = data[: max(first, 80)], data[-max(last, 1) :]
    head = decode_head_of_ends(beginning, end, "here")
    assert head is None or head == decode_head(data, "here")


@given(manifests())
def test_decode_head_of_ends_of_the_whole_manifest_gives_its_head(data):
    assert decode_head_of_ends(data, data, "here") == decode_head(data, "here")


@given(manifests(), st.data())
def test_decode_head_of_ends_finds_a_flipped_bit_in_base_or_save_id(data, draw):
    bit = draw.draw(st.integers(0, 8 * len(data) - 1))
    damaged = bytearray(data)
    damaged[bit // 8] ^= 1 << bit % 8
    try:
        head = decode_head_of_ends(bytes(damaged), bytes(damaged), "here")
    except (CorruptSnapshotError, NotOurs):
        return
    whole = decode_head(data, "here")
    assert head is None or (head.base is None) == (whole.base is None)
    if head is not None and head.base is not None:
        assert head.base.save_id == BASE


@pytest.mark.parametrize("number", [1, 1000])
def test_decode_head_of_ends_takes_no_longer_for_misleading_metadata(number):
    inner = {"x": 1, "manifest": {"y": 2}}
    metadata = msgspec.Raw(msgspec.json.encode({"all": [inner] * number}))
    data = encode(Document("snapshot/1", "0.1", SAVE, 1, "2026-01-02T03:04:05+00:00", "", metadata, {}, [], {}, None))
    head = decode_head_of_ends(data, data, "here")
    assert (head is None) == (number == 1000)  # read as a whole
