"""Short pickles that would take a reader hours or all memory: each is refused after work in proportion to its bytes."""

import collections
import io
import struct
import tracemalloc
import zipfile

import pytest
import torch

from snapshot import CorruptSnapshotError, Snapshot
from snapshot.formats import pickle_nodes, to_entries
from snapshot.formats.packed_tensors import read_tensor
from snapshot.formats.pickled_objects import _is_modest, is_refused, load_object
from snapshot.formats.safe_pickle import evaluate_pickle
from tests.hostile.pickle_opcodes import PROTO, doubling, get, name_of, put, text


def tower(levels, first=0):
    """A frozenset f(k + 1) = {f(k), {f(k)}} in a few bytes for each level, and the place of the last one."""
    made = b"(K\1\x91" + put(first)
    for place in range(first, first + 2 * levels, 2):
        made += b"(" + get(place) + b"\x91" + put(place + 1)
        made += b"(" + get(place) + get(place + 1) + b"\x91" + put(place + 2)
    return made, first + 2 * levels


def frozen_tower(levels):
    held = frozenset([1])
    for _ in range(levels):
        held = frozenset([held, frozenset([held])])
    return held


def entries_of(node, length=1000, *, plain=True):
    return to_entries.make_entries({"0": node}, "x", None, length, inline=bytearray(), plain=plain)


@pytest.mark.timeout(60)
def test_pickle_set_of_repeated_frozensets_is_refused():
    with pytest.raises(CorruptSnapshotError, match="too many repeated values"):
        entries_of({frozen_tower(22)})
    deep = frozenset()
    for _ in range(5000):
        deep = frozenset([deep])
    with pytest.raises(CorruptSnapshotError, match="nested more than"):
        entries_of({deep})
    assert len(entries_of({frozen_tower(5), (1, (2, frozenset([3])))})) > 60


def test_pickle_containers_that_are_refused_count_too(monkeypatch):
    read = []
    monkeypatch.setattr(
        to_entries, "make_scalar", lambda value, make=to_entries.make_scalar: read.append(0) or make(value)
    )
    with pytest.raises(CorruptSnapshotError, match="too many repeated values"):
        entries_of([{*range(2000), (1,)}] * 2000, plain=False)
    assert len(read) < 200_000


GOOD = PROTO + b"K\1."
BAD = PROTO + name_of("builtins", "bytearray") + b"J" + struct.pack("<i", 1 << 20) + b"\x85R."


@pytest.mark.parametrize(
    "members",
    [
        {"archive/DATA.PKL": BAD},
        {"archive/data.pkl": GOOD, "archive/DATA.PKL": BAD},
        {"archive/x": b"", "archive/DATA.pkl": BAD},
        {"b/x": b"", "a/data.pkl": GOOD, "B/Data.pkl": BAD},
        {"archive/version": b"3"},
    ],
)
def test_torch_file_pickle_members_in_another_case_are_refused(members):
    held = io.BytesIO()
    with zipfile.ZipFile(held, "w") as file:
        for name, data in {**members, "archive/byteorder": b"little"}.items():
            file.writestr(name, data)
    with pytest.raises(CorruptSnapshotError, match="not a torch archive"):
        load_object("x", bytearray(held.getvalue()), "torch_save", "value", allow_pickle=False)


def doubled_lists(last):
    return doubling(b"]", last, lambda got: b"](" + got + got + b"e")


@pytest.mark.timeout(20)
def test_pickle_key_with_a_list_is_refused_without_its_repr():
    with pytest.raises(CorruptSnapshotError, match="a key with a list"):
        evaluate_pickle(PROTO + b"}" + doubled_lists(b"\x85K\1s."), "x")


def test_pickle_keys_that_share_a_long_text_use_little_memory():
    keys = b"".join(get(0) + b"M" + struct.pack("<H", index) + b"\x86K\1s" for index in range(300))
    content = PROTO + b"}" + text("x" * 200_000) + put(0) + keys + b"."
    tracemalloc.start()
    try:
        assert len(evaluate_pickle(content, "x")) == 300
        assert tracemalloc.get_traced_memory()[1] < 5 << 20
    finally:
        tracemalloc.stop()


def test_pickle_keys_that_are_hashed_again_count_again():
    key = b"(" + b"K\1" * 10_000 + b"tK\1s"
    again = (get(1) + get(0) + b"\x85R") * 100
    content = PROTO + b"}" + key + put(0) + name_of("collections", "OrderedDict") + put(1) + b"](" + again + b"e."
    with pytest.raises(CorruptSnapshotError, match="too many repeated values"):
        evaluate_pickle(content, "x")


@pytest.mark.timeout(20)
def test_pickle_encode_of_a_list_of_lists_has_a_short_error():
    content = PROTO + name_of("_codecs", "encode") + text("a") + doubled_lists(b"\x86R.")
    with pytest.raises(CorruptSnapshotError, match="encodes a text in a list"):
        evaluate_pickle(content, "x")


@pytest.mark.timeout(60)
def test_pickle_frozensets_with_repetitions_are_not_compared():
    one, first = tower(16)
    other, second = tower(16, first + 1)
    content = PROTO + one + other + b"(" + get(first) + get(second) + b"\x91."
    with pytest.raises(CorruptSnapshotError, match="too many repeated values"):
        evaluate_pickle(content, "x")
    one, first = tower(4)
    assert evaluate_pickle(PROTO + one + get(first) + b".", "x") == frozen_tower(4)


def state_dict(versions):
    made = collections.OrderedDict()
    made._metadata = versions
    return made


def test_pickle_module_versions_shared_by_state_dicts_count_for_each():
    versions = {f"m{number}": {"version": 1} for number in range(400)}
    assert len(entries_of([state_dict(versions) for _ in range(5)])) == 6
    with pytest.raises(CorruptSnapshotError, match="too many repeated values"):
        entries_of([state_dict(versions) for _ in range(400)])
    long = {name: {"version": "x" * 10_000} for name in versions}
    assert to_entries.make_container(state_dict(versions))[0].module_versions == versions
    assert to_entries.make_container(state_dict(long))[0].module_versions is None


def test_pickle_open_marks_count_as_lists():
    with pytest.raises(CorruptSnapshotError, match="bytes of memory"):
        evaluate_pickle(PROTO + b"(" * 3_000_000 + b"N.", "x")


def test_pickle_record_fields_that_are_set_again_count_again():
    fields = b"}(" + b"".join(text(f"k{number}") + b"K\1" for number in range(3000)) + b"u" + put(0)
    record = name_of("torch.distributed.checkpoint.metadata", "Metadata") + b")\x81"
    assert len(evaluate_pickle(PROTO + fields + record + (get(0) + b"b") * 10 + b".", "x").state) == 3000
    with pytest.raises(CorruptSnapshotError, match="too many repeated values"):
        evaluate_pickle(PROTO + fields + record + (get(0) + b"b") * 3000 + b".", "x")
    with pytest.raises(CorruptSnapshotError, match="texts as names"):
        evaluate_pickle(PROTO + record + b"}K\1K\1sb.", "x")


def test_pickle_attributes_shared_by_objects_are_not_copied():
    first, second = {"a": 1, "b": 1}, {"b": 2}
    fields = pickle_nodes.read_fields(pickle_nodes.StandIn(pickle_nodes.Name("a.b"), (), (first, second)))
    assert dict(fields) == {"a": 1, "b": 2}
    first["later"] = 3
    assert fields["later"] == 3


def test_pickle_that_calls_the_result_of_a_call_is_not_given_to_torch():
    called = name_of("a", "b") + b")R"
    content = PROTO + called + name_of("builtins", "bytearray") + b"\x85R."
    assert not _is_modest("x", content, len(content))
    content = PROTO + called + b"."
    assert _is_modest("x", content, len(content))


def test_pickle_parameter_in_a_parameter_is_refused():
    function = name_of("torch._utils", "_rebuild_parameter") + put(0)
    with pytest.raises(CorruptSnapshotError, match="a parameter in a parameter"):
        read_tensor(PROTO + function + get(0) * 3000 + b"K\1" + b"\x89}\x87R" * 3000 + b".")


def test_torch_file_overlapping_members_are_named(tmp_path):
    torch.save({"a": torch.ones(3)}, tmp_path / "x.pt")
    data = bytearray((tmp_path / "x.pt").read_bytes())
    first = data.index(b"PK\1\2")
    second = data.index(b"PK\1\2", first + 4)
    (header,) = struct.unpack_from("<L", data, first + 42)
    struct.pack_into("<L", data, second + 42, header + 4)
    (tmp_path / "x.pt").write_bytes(data)
    with pytest.raises(CorruptSnapshotError, match=r"data\.pkl: another member begins in it"):
        Snapshot(tmp_path / "x.pt").get_manifest()


@pytest.mark.parametrize(
    ("name", "plain", "refused"),
    [
        ("collections.OrderedDict", True, True),
        ("collections.OrderedDict", False, False),
        ("builtins.list", True, False),
        ("a.None", True, True),
        ("a.None", False, True),
    ],
)
def test_pickle_default_dict_factories_are_plain_or_refused(name, plain, refused):
    made = pickle_nodes.DefaultDict(a=1)
    made.factory = pickle_nodes.Name(name)
    assert is_refused(entries_of(made, plain=plain)["0"]) == refused
