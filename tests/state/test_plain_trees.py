"""Trees of many plain values: one object, exact values, and the paths of the values inside it."""

import json
import math
import struct

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from snapshot import (
    CorruptSnapshotError,
    RestoreError,
    RestoreOptions,
    Snapshot,
    SnapshotError,
    StateDict,
    TakeOptions,
    Target,
)
from snapshot.manifest.plain_tree import DEEPEST_TREE, FEWEST, decode_tree, encode_tree
from tests.helpers.versions import ALONE

KEYS = st.one_of(st.text(max_size=6), st.sampled_from(("$tuple", "$", "$dict")))
ATOMS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(min_value=-(1 << 70), max_value=1 << 70),
    st.floats(),
    st.builds(lambda bits: struct.unpack("d", struct.pack("Q", bits))[0], st.integers(0, (1 << 64) - 1)),
    KEYS,
)
OTHER_KEYS = st.one_of(st.integers(), st.booleans(), st.none(), st.text(max_size=3))
TREES = st.recursive(
    ATOMS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(KEYS, inner, max_size=3),
        st.dictionaries(OTHER_KEYS, inner, max_size=3),
    ),
    max_leaves=20,
)
ROWS = [{"id": i, "name": f"row/{i}", "score": i / 3, "ok": i % 2 == 0, "tags": [None, (i, "a")]} for i in range(500)]


SHARED = [1, 2]


def exact(value):
    """A form that is equal only for values of equal types and bits."""
    if isinstance(value, dict):
        return dict, [(exact(key), exact(each)) for key, each in value.items()]
    if isinstance(value, (list, tuple)):
        return type(value), list(map(exact, value))
    return type(value), struct.pack("d", value) if isinstance(value, float) else value


def big(value):
    return [value, list(range(FEWEST))]


@settings(max_examples=400)
@given(TREES)
def test_plain_tree_is_decoded_with_equal_types_and_bits(value):
    text = encode_tree(big(value))
    if text is not None:  # a string with a lone surrogate
        json.loads(text)
        assert exact(decode_tree("p", text)) == exact(big(value))


@settings(max_examples=300)
@given(TREES, st.data())
def test_plain_tree_changed_text_is_refused_or_another_tree(value, data):
    text = bytearray(encode_tree(big(value)) or b"[]")
    at = data.draw(st.integers(0, min(len(text) - 1, 200)))
    text[at] ^= data.draw(st.integers(1, 255))
    try:
        found = decode_tree("p", bytes(text))
    except CorruptSnapshotError:
        return
    assert encode_tree(found) == bytes(text)


@pytest.mark.parametrize(
    "text",
    [
        b'{"a":%s,"a":%s}' % ((str(list(range(600))).replace(" ", "").encode(),) * 2),
        b"[" * 100_000,
        b'[{"$items":[[[],1]]},%s]' % b",".join([b"1"] * 2000),
        b'[{"$tuple":5},%s]' % b",".join([b"1"] * 2000),
        b'[{"$int":"5"},%s]' % b",".join([b"1"] * 2000),
        b'[{"$float":"zz"},%s]' % b",".join([b"1"] * 2000),
        b'[{"$float":"7ff8"},%s]' % b",".join([b"1"] * 2000),
        b'[{"$dict":null},%s]' % b",".join([b"1"] * 2000),
        b'[{"$other":[]},%s]' % b",".join([b"1"] * 2000),
        b"[1e999,%s]" % b",".join([b"1"] * 2000),
        b"[1 ,%s]" % b",".join([b"1"] * 2000),
        b"[1,2,3]",
        b"\xff",
        b"",
    ],
)
def test_plain_tree_texts_that_no_take_writes_are_refused(text):
    with pytest.raises(CorruptSnapshotError, match="p"):
        decode_tree("p", text)


def deep(levels):
    value = list(range(FEWEST))
    for _ in range(levels):
        value = [value]
    return value


@pytest.mark.parametrize(
    "value",
    [
        list(range(FEWEST - 1)),
        [*range(FEWEST), torch.ones(1)],
        [*range(FEWEST), "\ud800"],
        [*range(FEWEST), "x" * 20_000],
        [*range(FEWEST), {1, 2}],
        [*range(FEWEST), b"bytes"],
        [*range(FEWEST), {"param_groups": [1]}],
        [*range(FEWEST), {0.5: 1}],
        [*range(FEWEST), *[SHARED] * 2],
        deep(DEEPEST_TREE),
    ],
)
def test_plain_tree_is_not_used_for_other_values(value):
    assert encode_tree(value) is None
    Snapshot.take("memory://entries", {"s": StateDict(v=value)}, overwrite=True)
    assert len(Snapshot("memory://entries").get_manifest()) > 2
    found = Snapshot("memory://entries").read_object("0/s/v")
    assert len(found) == len(value)
    assert torch.equal(found[-1], value[-1]) if isinstance(value[-1], torch.Tensor) else found == value


@pytest.fixture
def taken(tmp_path):
    def take(rows, name="a"):
        Snapshot.take(tmp_path / name, {"s": StateDict(rows=rows, step=3, w=torch.ones(4))})
        return Snapshot(tmp_path / name)

    return take


def test_plain_tree_is_one_object_and_restored_whole(taken):
    snapshot = taken(ROWS)
    manifest = snapshot.get_manifest()
    assert set(manifest) == {"0/s", "0/s/rows", "0/s/step", "0/s/w"}
    assert manifest["0/s/rows"].type == "object"
    state = StateDict(rows=[], step=0, w=torch.zeros(4))
    snapshot.restore({"s": state})
    assert exact(state["rows"]) == exact(ROWS)
    assert snapshot.verify().ok


def test_plain_tree_values_are_read_by_their_paths(taken):
    snapshot = taken(ROWS)
    assert snapshot.read_object("0/s/rows/7/name") == "row/7"
    assert snapshot.read_object("s/rows/7") == ROWS[7]
    assert snapshot.read_object("s/rows/7/tags/1") == (7, "a")
    with pytest.raises(RestoreError, match="rows/7/nam"):
        snapshot.read_object("s/rows/7/nam")
    with pytest.raises(RestoreError, match="rowz"):
        snapshot.read_object("s/rowz/7")


def test_plain_tree_select_globs_match_values_inside(taken):
    snapshot = taken(dict(enumerate(ROWS)))
    state = StateDict(rows={i: dict(row, name="live") for i, row in enumerate(ROWS)}, step=9, w=torch.zeros(4))
    snapshot.restore({"s": state}, select=["s/rows/7/*", "s/rows/7/**"])
    assert state["rows"][7] == ROWS[7]
    assert state["rows"][8]["name"] == "live"
    assert state["step"] == 9
    snapshot.restore({"s": state}, options=RestoreOptions(exclude=["s/rows/8/name"]))
    assert state["rows"][8]["name"] == "live"
    assert state["rows"][9] == ROWS[9]


def test_plain_tree_exclude_leaves_out_values_inside(tmp_path):
    rows = dict(enumerate(ROWS))
    Snapshot.take(tmp_path / "s", {"s": StateDict(rows=rows)}, options=TakeOptions(exclude=["s/rows/*/name"]))
    found = Snapshot(tmp_path / "s").read_object("s/rows")
    assert found[5] == {key: value for key, value in ROWS[5].items() if key != "name"}


def test_plain_tree_diff_names_the_values_that_differ(taken):
    one, same = taken(ROWS), taken(ROWS, "b")
    assert not Snapshot.diff(one, same).changes
    changed = [dict(row) for row in ROWS]
    changed[7]["score"] = math.nan
    found = Snapshot.diff(one, taken(changed, "c"))
    assert [change.path for change in found.changes] == ["s/rows/7/score"]


@pytest.mark.parametrize("to", ["snapshot", "torch", "dcp"])
def test_plain_tree_is_converted(taken, tmp_path, to):
    snapshot = taken(ROWS)
    target = tmp_path / ("out.pt" if to == "torch" else "out")
    snapshot.convert(Target(target, to=to))
    assert exact(Snapshot(target).read_object("s/rows" if to != "snapshot" else "0/s/rows")) == exact(ROWS)


def test_plain_tree_select_converts_a_part(taken, tmp_path):
    snapshot = taken(dict(enumerate(ROWS)))
    snapshot.convert(tmp_path / "part", select=["s/rows/7/**"])
    assert Snapshot(tmp_path / "part").read_object("s/rows") == {7: ROWS[7]}


def test_plain_tree_that_is_damaged_is_refused_and_nothing_is_changed(taken, tmp_path):
    snapshot = taken(ROWS)
    [file] = (tmp_path / "a" / "data").glob("*.bin")
    data = bytearray(file.read_bytes())
    data[100] ^= 1
    file.write_bytes(data)
    state = StateDict(rows=[1], step=0, w=torch.zeros(4))
    with pytest.raises(CorruptSnapshotError, match="rows"):
        snapshot.restore({"s": state}, options=RestoreOptions(atomic=True))
    assert state["rows"] == [1]
    assert state["w"].eq(0).all()


def test_plain_tree_is_not_used_for_optimizer_param_groups(tmp_path):
    parameters = [torch.nn.Parameter(torch.ones(1)) for _ in range(FEWEST + 1)]
    optimizer = torch.optim.SGD(parameters, lr=0.5)
    Snapshot.take(tmp_path / "s", {"optim": optimizer})
    other = torch.optim.SGD([torch.nn.Parameter(torch.ones(1)) for _ in range(FEWEST + 1)], lr=0.1)
    Snapshot(tmp_path / "s").restore({"optim": other})
    assert other.param_groups[0]["lr"] == 0.5
    assert f"0/optim/param_groups/0/params/{FEWEST}" in Snapshot(tmp_path / "s").get_manifest()


@pytest.mark.parametrize("link", ["list", "dict"])
def test_container_that_contains_itself_raises_at_once(tmp_path, link):
    held = [*range(2000)] if link == "list" else {"n": 1, "more": list(range(2000))}
    if link == "list":
        held.append([held, held, held])
    else:
        held["parent"] = {"children": [held, held]}
    with pytest.raises(SnapshotError, match="holds itself"):
        Snapshot.take(tmp_path / "s", {"s": StateDict(v=held)})


def test_plain_tree_values_are_loaded_by_dcp(tmp_path):
    import torch.distributed.checkpoint as dcp

    from snapshot.interop.dcp import SnapshotReader

    Snapshot.take(tmp_path / "s", {"n": StateDict(x=[{"i": i} for i in range(1200)])})
    state = {"n": {"x": [{"i": 0} for _ in range(1200)]}}
    dcp.load(state, storage_reader=SnapshotReader(str(tmp_path / "s")), **ALONE)
    assert [each["i"] for each in state["n"]["x"]] == list(range(1200))
