"""read_object, boxes, state dicts and manifests: reading without a live application."""

import datetime
import itertools
import os
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.lib.stride_tricks import as_strided

from snapshot import RestoreError, Snapshot, SnapshotError, StateDict, TakeOptions
from snapshot.loading import read_requests
from snapshot.loading.read_requests import SharedRanges, add_requests, copy_into
from snapshot.manifest.document import FileEntry, check_shape, check_tensor
from snapshot.manifest.entries import ChunkedTensorEntry, MappedTensorEntry, Shard, TensorEntry
from snapshot.plan import layout
from snapshot.tensors.buffers import view_memory
from snapshot.tensors.digest import BLOCK
from snapshot.tensors.geometry import Box
from snapshot.testing import recording
from tests.helpers.noted import noted

URL = "memory://read"


def take(**values):
    return Snapshot.take(URL, {"s": StateDict(**values)}, overwrite=True)


def test_read_object_of_every_kind():
    snapshot = take(t=torch.arange(6.0).view(2, 3), n=3, text="x", nested={"a": [1, torch.ones(2)]}, none=None)
    assert torch.equal(snapshot.read_object("0/s/t"), torch.arange(6.0).view(2, 3))
    assert snapshot.read_object("0/s/n") == 3
    assert snapshot.read_object("0/s/none") is None
    nested = snapshot.read_object("0/s/nested")
    assert nested["a"][0] == 1
    assert nested["a"][1].tolist() == [1, 1]
    assert list(snapshot.read_object("0/s")) == ["t", "n", "text", "nested", "none"]


def test_read_object_obj_out_is_filled_and_returned():
    snapshot = take(t=torch.arange(6.0).view(2, 3), a=np.arange(4), n=3, h=torch.ones(3))
    for out in (
        torch.zeros(2, 3),
        torch.zeros(3, 2).t(),
        torch.zeros(2, 6)[:, ::2],
        torch.nn.Parameter(torch.zeros(2, 3)),
    ):
        assert snapshot.read_object("0/s/t", out) is out
        assert torch.equal(out.detach(), torch.arange(6.0).view(2, 3))
    array = np.zeros(4, dtype=np.int64)
    assert snapshot.read_object("0/s/a", array) is array
    assert array.tolist() == [0, 1, 2, 3]
    assert snapshot.read_object("0/s/n", torch.zeros(1)) == 3
    for wrong in (torch.zeros(3, 2), torch.zeros(2, 3, dtype=torch.float64)):
        with pytest.raises(RestoreError, match="obj_out"):
            snapshot.read_object("0/s/t", wrong)
        assert wrong.eq(0).all()
    with pytest.raises(RestoreError, match="obj_out"):
        snapshot.read_object("0/s/a", np.zeros(3))


@pytest.mark.parametrize("budget", [1 << 20, 16 << 20, None])
def test_read_object_memory_budget_bytes_keeps_shape_and_value(budget):
    tensor = torch.randn(1000, 1500)
    snapshot = take(t=tensor)
    for out in (None, torch.zeros(1000, 1500), torch.zeros(1500, 1000).t()):
        back = snapshot.read_object("0/s/t", out, memory_budget_bytes=budget)
        assert back.shape == (1000, 1500)
        assert torch.equal(back, tensor)


def test_read_object_leaks_no_file_descriptors(tmp_path):
    snapshot = Snapshot.take(tmp_path / "s", {"s": StateDict(t=torch.ones(1000))})
    snapshot.read_object("0/s/t")
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        snapshot.read_object("0/s/t", memory_budget_bytes=1 << 20)
        Snapshot(tmp_path / "s").get_manifest()
    assert len(os.listdir("/proc/self/fd")) == before


def test_read_object_box_of_one_row_reads_few_bytes():
    tensor = torch.arange(16 << 20, dtype=torch.int32).view(4096, 4096)
    with recording() as log:
        snapshot = Snapshot.take("recording+memory://rows", {"s": StateDict(t=tensor)}, overwrite=True)
        snapshot.get_manifest()
        log.clear()
        row = snapshot.read_object("0/s/t", box=[2500])
        assert torch.equal(row, tensor[2500])
        assert log.nbytes("read_into") <= 1 << 20
        assert len(log.of("read_into")) <= 4
        log.clear()
        snapshot.read_object("0/s/t", box=[2500], verify=False)
        assert log.nbytes("read_into") <= 1 << 20


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_read_object_any_box_of_any_tensor(data):
    shape = tuple(data.draw(st.lists(st.integers(0, 40), max_size=3)))
    tensor = torch.arange(int(np.prod(shape)), dtype=torch.int32).view(shape)
    cut = data.draw(st.sampled_from([None, 64, 1000]))
    original = layout.LARGEST_FILE
    layout.LARGEST_FILE = cut or original
    try:
        snapshot = take(t=tensor)
    finally:
        layout.LARGEST_FILE = original
    box = []
    for size in shape[: data.draw(st.integers(0, len(shape)))]:
        if size and data.draw(st.booleans()):
            box.append(data.draw(st.integers(-size, size - 1)))
        else:
            a, b = (data.draw(st.none() | st.integers(-size - 1, size + 1)) for _ in range(2))
            box.append(slice(a, b))
    expected = tensor[tuple(box)] if box else tensor
    back = snapshot.read_object("0/s/t", box=box)
    assert back.shape == expected.shape
    assert torch.equal(back, expected)
    out = torch.zeros(expected.shape, dtype=torch.int32)
    assert snapshot.read_object("0/s/t", out, box=box) is out
    assert torch.equal(out, expected)


def test_read_object_box_is_verified_by_block(tmp_path):
    tensor = torch.randn(1 << 20)
    snapshot = Snapshot.take(tmp_path, {"s": StateDict(t=tensor)})
    entry = snapshot.get_manifest()["0/s/t"]
    with open(tmp_path / entry.location, "r+b") as file:
        file.seek(entry.byte_range[0] + 3 * (256 << 10) + 17)
        file.write(b"\x55\xaa\x55")
    good = snapshot.read_object("0/s/t", box=[slice(0, 3 * (64 << 10))])
    assert torch.equal(good, tensor[: 3 * (64 << 10)])
    with pytest.raises(ValueError, match="block 3"):
        snapshot.read_object("0/s/t", box=[slice(3 * (64 << 10) + 9, 3 * (64 << 10) + 10)])
    with open(tmp_path / entry.blocks[0], "r+b") as file:
        file.seek(entry.blocks[1])
        file.write(b"\x00\x01")
    with pytest.raises(ValueError, match="table of digests"):
        snapshot.read_object("0/s/t", box=[slice(0, 5)])
    assert any("digests" in fault for fault in snapshot.verify().faults)


def test_read_object_invalid_boxes_raise():
    snapshot = take(t=torch.ones(3, 4), n=3)
    with pytest.raises(ValueError, match="must have step 1"):
        snapshot.read_object("0/s/t", box=[slice(0, 3, 2)])
    with pytest.raises(IndexError, match="index 3"):
        snapshot.read_object("0/s/t", box=[3])
    with pytest.raises(ValueError, match="got 3"):
        snapshot.read_object("0/s/t", box=[0, 0, 0])
    with pytest.raises(RestoreError, match="only a tensor"):
        snapshot.read_object("0/s/n", box=[0])


def test_read_object_of_a_tensor_split_over_files(monkeypatch):
    monkeypatch.setattr(layout, "LARGEST_FILE", 5000)
    tensor = torch.randn(60, 50)
    tied = {"a": tensor, "b": tensor, "p": torch.nn.Parameter(tensor.clone())}
    snapshot = take(**tied)
    assert type(snapshot.get_manifest()["0/s/a"]).__name__ == "ChunkedTensorEntry"
    back = snapshot.get_state_dict_for_key("s")
    assert back["a"] is back["b"]
    assert torch.equal(back["a"], tensor)
    assert type(back["p"]) is torch.nn.Parameter
    for live in (torch.zeros(60, 50), torch.zeros(50, 60).t(), torch.zeros(60, 100)[:, ::2]):
        state = StateDict(a=live, b=live, p=torch.nn.Parameter(torch.zeros(60, 50)))
        report = Snapshot(URL).restore({"s": state})
        assert torch.equal(live, tensor)
        assert torch.equal(state["p"].detach(), tensor)
        assert not report.lines
    assert snapshot.verify().ok


def test_get_manifest_returns_a_copy():
    snapshot = take(t=torch.ones(3))
    first = snapshot.get_manifest()
    first["0/s/t"].dtype = "float64"
    first.clear()
    assert snapshot.get_manifest()["0/s/t"].dtype == "float32"


def test_snapshot_metadata_has_user_metadata_and_world_size():
    snapshot = Snapshot.take(URL, {"s": StateDict(x=1)}, overwrite=True, metadata={"loss": 1.5})
    found = snapshot.metadata
    assert noted(found.metadata) == {"loss": 1.5}
    assert found.world_size == 1
    assert found.format == "snapshot/1"
    assert found.entries == 1  # its container is not counted
    assert found.created.tzinfo is not None


def test_plan_is_a_dry_run_whose_result_take_can_use(tmp_path):
    state = {"s": StateDict(t=torch.ones(1000), u=torch.ones(5, dtype=torch.int8), text="x" * 20_000)}
    plan = Snapshot.plan(state, path=tmp_path / "s")
    assert not (tmp_path / "s").exists()
    assert "0.safetensors" in str(plan)
    Snapshot.take(tmp_path / "s", state, options=TakeOptions(plan=plan))
    stored = sum(file.stat().st_size for file in (tmp_path / "s" / "data").iterdir())
    assert stored == plan.total_bytes == sum(plan.bytes_per_rank)
    assert Snapshot(tmp_path / "s").metadata.structure == plan.structure
    with pytest.raises(ValueError, match="plan must be for"):
        Snapshot.take(tmp_path / "t", {"s": StateDict(t=torch.ones(1001))}, options=TakeOptions(plan=plan))
    assert not (tmp_path / "t").exists()


def test_take_exclude_and_replicated():
    net = torch.nn.Linear(3, 2)
    state = {"net": net, "s": StateDict(a={"x": torch.ones(2), "y": torch.ones(2)}, b=[1, 2], tied=net.weight.detach())}
    snapshot = Snapshot.take(
        URL, state, overwrite=True, replicated=["net"], options=TakeOptions(exclude=["net/weight", "s/a/x"])
    )
    assert list(snapshot.get_state_dict_for_key("net")) == ["bias"]
    back = snapshot.get_state_dict_for_key("s")
    assert list(back["a"]) == ["y"]
    assert torch.equal(back["tied"], net.weight)
    assert snapshot.get_manifest()["0/net/bias"].replicated
    with pytest.raises(ValueError, match="element of a sequence"):
        Snapshot.take(URL, state, overwrite=True, options=TakeOptions(exclude=["s/b/0"]))
    with pytest.warns(UserWarning, match=r"'nett/\*' matches nothing"):
        Snapshot.take(URL, state, overwrite=True, options=TakeOptions(exclude=["nett/*"]))
    with pytest.warns(UserWarning, match="'x' matches nothing"):
        Snapshot.take(URL, state, overwrite=True, replicated=["x"])
    with pytest.raises(TypeError, match="one string"):
        Snapshot.take(URL, state, overwrite=True, options=TakeOptions(exclude="net/weight"))


def test_custom_tensor_prepare_func_result_is_saved():
    seen = []

    def prepare(path, tensor, tracing):
        seen.append((path, tracing))
        return tensor.to(torch.bfloat16)

    weight = torch.randn(3, 4)
    Snapshot.take(URL, {"s": StateDict(w=weight, n=1)}, _custom_tensor_prepare_func=prepare, overwrite=True)
    assert seen == [("s/w", False)]
    assert torch.equal(Snapshot(URL).read_object("0/s/w"), weight.to(torch.bfloat16))
    with pytest.raises(ValueError, match="not the shape"):
        Snapshot.take(URL, {"s": StateDict(w=weight)}, None, None, None, lambda p, t, _: t[:1], overwrite=True)


def _outs(like):
    """Arrays like one in other layouts of memory."""
    shape = like.shape
    yield np.zeros(shape, like.dtype, order="F")
    yield np.zeros((2, 2 * shape[1]), like.dtype)[:, ::2]
    yield np.zeros(shape, like.dtype)[::-1]
    yield np.zeros(shape, like.dtype)[:, ::-1]


@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("dtype", ["i8", "f4", "M8[s]", ">i4", "U3"])
def test_read_object_obj_out_of_any_layout_is_filled(order, dtype):
    array = np.arange(6).reshape(2, 3).astype(dtype).copy(order)
    snapshot = take(a=array, t=torch.ones(2, 3))
    for out in _outs(array):
        assert snapshot.read_object("0/s/a", out) is out
        assert (out == array).all()
    fixed = np.zeros((2, 3), dtype)[::-1]
    fixed.flags.writeable = False
    for wrong, fault in ((np.zeros((3, 2), dtype)[::-1], "obj_out must be"), (fixed, "obj_out must be writable")):
        with pytest.raises(RestoreError, match=fault):
            snapshot.read_object("0/s/a", wrong)


def test_read_object_obj_out_of_another_kind_raises():
    snapshot = take(a=np.arange(4), t=torch.arange(4))
    with pytest.raises(RestoreError, match="s/a: obj_out must be an array, got a Tensor"):
        snapshot.read_object("0/s/a", torch.zeros(4, dtype=torch.int64))
    with pytest.raises(RestoreError, match="s/t: obj_out must be a tensor, got a ndarray"):
        snapshot.read_object("0/s/t", np.zeros(4, np.int64))
    with pytest.raises(RestoreError, match="s/t: obj_out must be a tensor, got a ndarray"):
        snapshot.read_object("0/s/t", np.zeros(2, np.int64), box=[slice(0, 2)])


@pytest.mark.parametrize("strides", [(0, 8), (8, 8), (-8, 8), (4, 8), (16, 4)])
def test_read_object_obj_out_with_overlapping_elements_raises(strides):
    saved = np.arange(6).reshape(3, 2)
    held = as_strided(np.zeros(9, np.int64)[4:], (3, 2), strides)
    live = StateDict(a=held)
    snapshot = take(a=saved)
    with pytest.raises(RestoreError, match="s/a: obj_out must be an array without overlapping elements"):
        snapshot.read_object("0/s/a", held)
    snapshot.restore({"s": live})
    assert (live["a"] == saved).all()


def test_restore_of_a_generator_with_two_names_and_two_saved_states():
    def generator(seed):
        return torch.Generator().manual_seed(seed)

    snapshot = take(a=generator(1), b=generator(2), c=generator(1))
    live = generator(9)
    state = StateDict(a=live, b=live, c=live)
    report = snapshot.restore({"s": state})
    assert state["a"] is state["c"] is live
    for name, seed in (("a", 1), ("b", 2), ("c", 1)):
        assert state[name].get_state().equal(generator(seed).get_state())
    assert [line.path for line in report.replaced] == ["s/b"]


def test_pickled_key_keeps_the_fold_of_a_time():
    day = datetime.datetime(2020, 1, 1, 2, fold=1)
    keys = [datetime.time(1, 2, fold=1), day, day.replace(tzinfo=datetime.UTC, hour=3), datetime.time(5)]
    with pytest.warns(UserWarning, match="stored as pickles"):
        snapshot = take(x=dict.fromkeys(keys, 1))
    found = Snapshot(snapshot.path, allow_pickle=True).read_object("0/s/x")
    assert [(each, each.fold) for each in found] == [(each, each.fold) for each in keys]


# Requests for boxes of stored pieces


def received(stored, requests, data):
    """Do what requests ask for, with the bytes of a file."""
    for request in requests:
        part = data[request.begin : request.end]
        if request.address:
            assert request.place is None
            view_memory(request.address, len(part))[:] = part
            continue
        start = request.begin - stored.byte_range[0]
        for copy in request.place(start, torch.frombuffer(bytearray(part), dtype=torch.uint8)):
            copy_into(*copy)


@pytest.mark.parametrize("digest", [None, "xxh3:0"])
@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize("block", [8, 64, 1 << 18])
def test_add_requests_fill_every_box_from_every_piece(digest, strided, block, monkeypatch):
    monkeypatch.setattr(read_requests, "BLOCK", block)
    monkeypatch.setattr(read_requests, "_GAP", 8)
    whole = torch.arange(1.0, 1 + 6 * 5).view(6, 5)
    starts = [(0, 6), (1, 2), (2, 5)]
    for (top, bottom), (left, right), (low, high), (first, last) in itertools.product(
        starts, [(0, 5), (1, 3)], [(0, 6), (2, 4)], [(0, 5), (2, 5)]
    ):
        piece = Box((top, left), (bottom - top, right - left))
        box = Box((low, first), (high - low, last - first))
        part = whole[top:bottom, left:right].contiguous()
        data = b"before.." + part.numpy().tobytes() + b"after"
        stored = TensorEntry("f", (8, 8 + part.nbytes), "float32", tuple(part.shape), digest)
        target = torch.zeros(box.sizes).t().contiguous().t() if strided else torch.zeros(box.sizes)
        requests = []
        count = add_requests(requests, "x", stored, piece, target=target, box=box, live=True)
        received(stored, requests, data)
        expected = torch.zeros(6, 5)
        expected[top:bottom, left:right] = part
        assert torch.equal(target, expected[low:high, first:last])
        assert count == int((target != 0).sum())
        for request in requests:
            assert (request.name, request.location, request.live, request.device) == ("x", "f", True, None)
            assert stored.byte_range[0] <= request.begin < request.end <= stored.byte_range[1]
            if digest:
                assert (request.begin - 8) % block == 0
                assert request.end == stored.byte_range[1] or (request.end - 8) % block == 0
        if count == 0:
            assert requests == []


def test_add_requests_of_a_whole_piece_go_straight_to_its_memory():
    target = torch.zeros(4, 3)
    stored = TensorEntry("f", (0, 24), "float32", (2, 3), "xxh3:0")
    for box, address in ((Box((0, 0), (4, 3)), 24), (Box((2, 0), (2, 3)), 0)):
        requests, held = [], target if address else target[:2]
        assert add_requests(requests, "x", stored, Box((2, 0), (2, 3)), target=held, box=box, live=False) == 6
        [request] = requests
        assert (request.begin, request.end, request.place) == (0, 24, None)
        assert request.address == target.data_ptr() + address
    for other, shape in ((torch.zeros(4, 3, dtype=torch.float64), (4, 3)), (torch.zeros(3, 4).t(), (4, 3))):
        requests = []
        add_requests(requests, "x", stored, Box((2, 0), (2, 3)), target=other, box=Box((0, 0), shape), live=False)
        assert [(each.address, each.place is None) for each in requests] == [(0, False)]


def test_shared_ranges_become_one_request():
    stored = TensorEntry("f", (0, 16), "float32", (4,), "xxh3:0")
    targets = [torch.zeros(2, 2).t() for _ in range(4)]
    shared, requests = SharedRanges(), []
    square = TensorEntry("f", (0, 16), "float32", (2, 2), "xxh3:0")
    for number, (target, live) in enumerate(zip(targets, (True, True, True, False), strict=True)):
        first = len(requests)
        whole = Box((0, 0), (2, 2))
        add_requests(requests, f"t{number}", square, whole, target=target, box=whole, live=live)
        shared.join(requests, first)
    assert [(each.name, each.also, each.live) for each in requests] == [("t0", ("t1", "t2"), True), ("t3", (), False)]
    data = torch.arange(4.0)
    received(square, requests, data.numpy().tobytes())
    assert all(torch.equal(each, data.view(2, 2)) for each in targets)
    direct = torch.zeros(4)
    for _ in range(2):
        first = len(requests)
        add_requests(requests, "d", stored, Box((0,), (4,)), target=direct, box=Box((0,), (4,)), live=True)
        shared.join(requests, first)
    assert len(requests) == 4, "what goes straight to memory is not joined"


def test_block_check_names_the_first_block_that_differs():
    digests = [bytes([number]) * 16 for number in range(4)]
    check = read_requests.BlockCheck(3 * BLOCK + 1, b"".join(digests))
    check.update(0, digests[0])
    check.update(2 * BLOCK, digests[2] + digests[3])
    assert check.bad is None
    check.update(BLOCK, digests[1] + digests[3])
    assert check.bad.startswith(f"block 2 (bytes {2 * BLOCK} on)")
    assert digests[2].hex() in check.bad.partition("got")[0]
    assert digests[3].hex() in check.bad.partition("got")[2]
    made = read_requests.BlockCheck(3 * BLOCK + 1, None)
    made.update(2 * BLOCK, digests[2] + digests[3])
    made.update(0, digests[0] + digests[1])
    assert made.digests == b"".join(digests)
    assert len(read_requests.BlockCheck(3 * BLOCK, None).digests) == 3 * 16


@pytest.mark.parametrize(
    ("segments", "addresses", "nbytes"),
    [
        ([(0, 5)], [0], 5),
        ([(0, 5)], [9], 0),
        ([(0, 5), (5, 8)], [0, 0], 16 + 3),
        ([(2, 5), (9, 20)], [0, 0], 32 + 11),
        ([(2, 5), (9, 20)], [1, 1], 2 + 4),
        ([(0, 16), (16, 17)], [0, 0], 17),
    ],
)
def test_slot_bytes_are_those_of_places_and_gaps(segments, addresses, nbytes):
    made = [SimpleNamespace(begin=begin, end=end, request=number) for number, (begin, end) in enumerate(segments)]
    part = SimpleNamespace(begin=0, end=segments[-1][1], segments=made)
    assert read_requests.slot_bytes(part, [SimpleNamespace(address=each) for each in addresses]) == nbytes


# What a manifest must be before its tensors are read


def boxed(*boxes, dtype="float32", shape=(4, 2), kind=ChunkedTensorEntry, **more):
    shards = []
    for number, (offsets, sizes) in enumerate(boxes):
        nbytes = 4 * sizes[0] * sizes[1]
        inner = TensorEntry(
            "f", (8 * number, 8 * number + nbytes), more.get("inner", "float32"), more.get("size", sizes)
        )
        shards.append(Shard(offsets, sizes, inner))
    return kind(dtype, shape, shards)


FILES = {"f": FileEntry(64)}


@pytest.mark.parametrize(
    ("entry", "error"),
    [
        (boxed(((0, 0), (2, 2)), ((2, 0), (2, 2))), None),
        (boxed(((0, 0), (4, 2))), None),
        (boxed(((0, 0), (2, 2)), ((2, 0), (2, 2)), dtype="int32"), "does not fit int32"),
        (boxed(((0, 0), (4, 2)), size=(2, 4)), "does not fit"),
        (boxed(((0, 0), (2, 2)), ((3, 0), (2, 2))), "does not fit"),
        (boxed(((0, 0), (2, 2))), "do not fill"),
        (boxed(((0, 0), (2, 2)), ((1, 0), (2, 2))), "overlap"),
        (TensorEntry("f", (0, 32), "float32", (4, 2)), None),
        (TensorEntry("f", (0, 31), "float32", (4, 2)), "does not match its range of 31 bytes"),
        (TensorEntry("f", (40, 72), "float32", (4, 2)), "outside the data of f"),
        (TensorEntry("g", (0, 32), "float32", (4, 2)), "outside the data of g"),
        (TensorEntry("f", (0, 32), "float33", (4, 2)), "unknown dtype 'float33'"),
        (TensorEntry("f", (0, 32), "float32", (4, 2), serializer="new"), "unknown serializer"),
    ],
)
def test_check_tensor_refuses_what_cannot_be_read(entry, error):
    if error is None:
        check_tensor("x", entry, FILES)
        return
    with pytest.raises(SnapshotError, match=error) as caught:
        check_tensor("x", entry, FILES)
    assert str(caught.value).startswith("x: ")


def test_check_tensor_of_a_part_needs_not_the_whole():
    half = boxed(((0, 0), (2, 2)))
    check_tensor("x", half, FILES, partial=True)
    with pytest.raises(SnapshotError, match="do not fill"):
        check_tensor("x", half, FILES, boxes=[Box((0, 0), (2, 2))])


@pytest.mark.parametrize(
    ("shape", "fine"),
    [
        ((), True),
        ((0,), True),
        ((2, 3), True),
        ((2, -1), False),
        ((-1, 2), False),
        ((-1, -2), False),
        ((-1, 0), False),
        ((1 << 30, (1 << 30) - 1), True),
        ((1 << 30, 1 << 30), False),
        ((0, (1 << 60) - 1), True),
        ((0, 1 << 60), False),
    ],
)
def test_check_shape_refuses_what_torch_does_not_have(shape, fine):
    entry = TensorEntry("f", (0, 0), "float32", shape)
    if fine:
        check_shape("x", entry)
        return
    with pytest.raises(SnapshotError, match="x: invalid shape"):
        check_shape("x", entry)


def test_mapped_tensor_has_the_bytes_of_its_shape():
    assert MappedTensorEntry("float32", (3, 5), []).nbytes == 60
    assert MappedTensorEntry("int8", (), []).nbytes == 1
