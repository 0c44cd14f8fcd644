"""Corners of what a state may hold: ties, exclusions, freed memory, odd dtypes and layouts, other generators."""

import threading
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from snapshot import CorruptSnapshotError, RestoreError, RNGState, Snapshot, SnapshotError, StateDict, TakeOptions
from snapshot.manifest.entries import TensorEntry
from snapshot.state import flatten_cache, leaves
from snapshot.state.changing import OverlapEligible, count_changes
from snapshot.state.flatten import Flattened
from snapshot.state.model_state import ModelState
from snapshot.state.sharded import LocalPiece, Shards
from snapshot.state.stateful import map_modules
from snapshot.tensors import composite, geometry
from snapshot.tensors.geometry import Box, boxes_overlap
from tests.helpers.arguments import for_take

pytestmark = [
    pytest.mark.filterwarnings(f"ignore:{message}:UserWarning")
    for message in (".*quantize_per_tensor", "TypedStorage", ".*beta state")
]

URL = "memory://mended"


def take(state, **options):
    return Snapshot.take(URL, {"s": StateDict(**state)}, **for_take(overwrite=True, **options))


def back(**state):
    return take(state).get_state_dict_for_key("s")


def places(snapshot, *names):
    manifest = snapshot.get_manifest()
    found = [manifest[f"0/s/{name}"] for name in names]
    found = [getattr(each, "data", each) for each in found]
    return {(each.location, each.byte_range) for each in found}


def test_flattened_copies_a_bytearray_at_once():
    held = bytearray(b"before")
    flat = Flattened()
    flat.add("s", {"x": held})
    held[:] = b"behind"
    assert (flat.blobs[0].data, flat.blobs[0].serializer) == (b"before", "bytearray")
    assert flat.blobs[0].obj_type == "builtins.bytearray"


def test_tied_weights_stay_tied_with_a_prepare_function():
    net = torch.nn.Module()
    net.a = net.b = torch.nn.Linear(3, 3, bias=False)
    asked = []

    def half(path, tensor, tracing):
        asked.append(path)
        return tensor.half()

    snapshot = Snapshot.take(URL, {"s": net}, overwrite=True, _custom_tensor_prepare_func=half)
    assert asked == ["s/a.weight"]
    assert len(places(snapshot, "a.weight", "b.weight")) == 1


def test_exclude_of_one_of_three_tied_names_keeps_the_others_tied():
    tensor = torch.ones(4)
    parameter = torch.nn.Parameter(torch.ones(5))
    state = dict.fromkeys("abc", tensor) | dict.fromkeys("xyz", parameter)
    snapshot = take(state, exclude=["s/a", "s/x"])
    assert len(places(snapshot, "b", "c")) == len(places(snapshot, "y", "z")) == 1
    assert list(snapshot.get_state_dict_for_key("s")) == ["b", "c", "y", "z"]


def test_exclude_does_not_examine_excluded_values():
    class Odd:
        pass

    state = {"x": 1, "lock": threading.Lock(), "deep": {"odd": Odd(), 1: torch.ones(2), "1": 3}}
    snapshot = take(state, exclude=["s/lock", "s/deep/odd", "s/deep/1", "**/odd"])
    assert list(snapshot.get_state_dict_for_key("s")) == ["x", "deep"]
    assert list(snapshot.get_state_dict_for_key("s")["deep"]) == [1]
    take(state, exclude=["s/lock", "s/deep", "s/deep/odd"])
    with pytest.warns(UserWarning, match="'s/none' matches nothing"):
        take(state, exclude=["s/lock", "s/deep", "s/none"])


def test_numpy_array_with_two_names_is_stored_once():
    array = np.arange(6.0).reshape(2, 3)
    state = StateDict(a=array, b=array, turned=array.T)
    snapshot = Snapshot.take(URL, {"s": state}, overwrite=True)
    assert len(places(snapshot, "a", "b")) == 1
    assert len(places(snapshot, "a", "turned")) == 2
    array[:] = 0
    snapshot.restore({"s": state})
    assert np.array_equal(state["a"], np.arange(6.0).reshape(2, 3))
    assert np.array_equal(state["b"], state["a"])
    assert np.array_equal(state["turned"], np.arange(6.0).reshape(2, 3).T)


@pytest.mark.parametrize("kind", ["plain", "view", "far", "parameter", "turned", "sparse", "quantised"])
def test_take_of_freed_memory_raises(kind):
    tensor = torch.ones(2, 3)
    freed = tensor
    if kind == "view":
        tensor = tensor[1:]
    elif kind == "far":
        freed = torch.ones(1 << 12, 1 << 12)
        tensor = freed[-1]
    elif kind == "parameter":
        tensor = torch.nn.Parameter(tensor)
    elif kind == "turned":
        tensor = tensor.t()
    elif kind == "sparse":
        tensor = tensor.to_sparse()
        freed = tensor._values()
    elif kind == "quantised":
        tensor = freed = quantised(tensor)
    freed.untyped_storage().resize_(0)
    with pytest.raises(SnapshotError, match=r"s/t.*freed"):
        take({"t": tensor})


@pytest.mark.parametrize("shape", [(4,), (2, 3)])
def test_take_of_a_zero_tensor_of_autograd_raises(shape):
    zeros = torch._efficientzerotensor(shape)
    for _ in range(2):  # the second one finds the first one's plan
        with pytest.raises(SnapshotError, match=r"s/t: is a zero tensor of autograd.*clone"):
            take({"t": zeros})
    with pytest.raises(SnapshotError, match=r"s/t: is a zero tensor of autograd"):
        take({"t": zeros.t()})
    take({"t": torch.zeros(shape)})
    with pytest.raises(SnapshotError, match=r"s/t: is a zero tensor of autograd"):
        take({"t": zeros})
    take({"t": zeros.clone()})


class Tagged(torch.Tensor):
    pass


def test_take_warns_about_lost_tensor_attributes():
    tensor = torch.ones(3).as_subclass(Tagged)
    take({"t": tensor})
    tensor.label = "mine"
    with pytest.warns(UserWarning, match=r"s/t .*Tagged: label"):
        take({"t": tensor})
    parameter = torch.nn.Parameter(torch.ones(3))
    parameter.label = "mine"
    take({"p": parameter, "b": torch.nn.Buffer(torch.ones(3))})


def quantised(tensor, dtype=torch.qint8, axis=None):
    if axis is None:
        return torch.quantize_per_tensor(tensor, 0.1, 1, dtype)
    size = tensor.shape[axis]
    return torch.quantize_per_channel(
        tensor, torch.full((size,), 0.1), torch.zeros(size, dtype=torch.int64), axis, dtype
    )


def test_quantised_tensors_keep_their_memory_format():
    images = torch.randn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last)
    state = {
        "last": quantised(images),
        "turned": quantised(torch.randn(4, 5)).t(),
        "channels": quantised(images, axis=1),
        "plain": quantised(torch.randn(4, 5), axis=0),
    }
    for name, found in back(**state).items():
        assert found.stride() == state[name].stride(), name
        assert torch.equal(found.int_repr(), state[name].int_repr())
        assert torch.equal(found.dequantize(), state[name].dequantize())


def test_quantised_quint4x2_tensors_are_pickled():
    tensor = torch.quantize_per_channel(torch.randn(4, 6), torch.ones(4), torch.zeros(4), 0, torch.quint4x2)
    with pytest.warns(UserWarning, match="stored as pickles"):
        snapshot = take({"t": tensor})
    found = snapshot.get_state_dict_for_key("s")["t"]
    assert found.dtype == torch.quint4x2
    assert torch.equal(found.dequantize(), tensor.dequantize())


@pytest.mark.parametrize("name", [f"{sign}int{bits}" for sign in ("", "u") for bits in range(1, 8)])
def test_dtypes_that_torch_cannot_copy_are_saved_only_in_c_order(name):
    tensor = torch.arange(6, dtype=torch.uint8).view(2, 3).view(getattr(torch, name))
    assert torch.equal(back(t=tensor)["t"].view(torch.uint8), tensor.view(torch.uint8))
    with pytest.raises(SnapshotError, match=r"s/t: .*C order"):
        take({"t": tensor.t()})


@pytest.mark.parametrize("name", ["bits8", "bits16", "bits1x8", "bits2x4", "bits4x2"])
def test_bits_dtypes_are_restored_from_any_order(name):
    tensor = torch.arange(12, dtype=torch.uint8).view(2, 6).view(getattr(torch, name))
    found = back(t=tensor.t())["t"]
    assert found.stride() == tensor.t().stride()
    assert torch.equal(found.t().view(torch.uint8), tensor.view(torch.uint8))


def test_take_and_restore_ignore_a_default_device():
    state = {
        "t": torch.ones(2),
        "empty": np.zeros((0, 2), "U3"),
        "array": np.arange(3),
        "sparse": torch.eye(3).to_sparse(),
        "rows": torch.eye(3).to_sparse_csr(),
        "q": quantised(torch.ones(2)),
    }
    with torch.device("meta"):
        found = back(**state)
    assert all(found[name].device.type == "cpu" for name in ["t", "sparse", "rows", "q"])
    assert found["empty"].shape == (0, 2)
    assert np.array_equal(found["array"], state["array"])
    assert torch.equal(found["sparse"].to_dense(), torch.eye(3))
    assert torch.equal(found["rows"].to_dense(), torch.eye(3))


@pytest.mark.parametrize(
    ("dtype", "shape", "scalar"),
    [
        ("<f8", (-1, -1), False),
        ("<f8", (-1,), False),
        ("<f4", (1,), False),
        ("<V3", (2,), False),
        ("<f8", (0, -3), False),
        ("<f8", (1,), True),
        ("<f8", (1,) * 70, False),
    ],
)
def test_rebuild_array_refuses_a_hostile_array(dtype, shape, scalar):
    with pytest.raises(CorruptSnapshotError, match="s/a"):
        leaves.rebuild_array("s/a", torch.zeros(8, dtype=torch.uint8), dtype, shape, order="C", scalar=scalar)


def test_rebuild_array_of_elements_without_bytes_uses_no_memory():
    made = leaves.rebuild_array("s/a", torch.zeros(0, dtype=torch.uint8), "|V0", (1 << 40,), order="C", scalar=False)
    assert (made.shape, made.itemsize) == ((1 << 40,), 0)


@pytest.mark.parametrize("subclass", [None, "torch.nn.parameter.Parameter"])
def test_restore_class_refuses_an_integer_that_requires_grad(subclass):
    with pytest.raises(CorruptSnapshotError, match="s/t: requires_grad must be False"):
        composite.restore_class("s/t", torch.ones(2, dtype=torch.int64), subclass, True)


@pytest.mark.parametrize("name", ["MT19937", "PCG64", "PCG64DXSM", "Philox", "SFC64"])
@pytest.mark.parametrize("other", [False, True])
def test_rng_state_restores_any_numpy_bit_generator(name, other):
    before = np.random.get_bit_generator()
    try:
        np.random.set_bit_generator(getattr(np.random, name)(7))
        np.random.standard_normal(3)
        snapshot = Snapshot.take(URL, {"rng": RNGState()}, overwrite=True)
        wanted = np.random.standard_normal(5).tolist()
        if other:
            np.random.set_bit_generator(np.random.PCG64(1) if name == "MT19937" else np.random.MT19937(1))
        report = snapshot.restore({"rng": RNGState()})
        assert not report.skipped
        assert np.random.standard_normal(5).tolist() == wanted
    finally:
        np.random.set_bit_generator(before)


def test_rng_state_keeps_generators_that_were_not_saved():
    state = RNGState().state_dict()
    assert RNGState().load_state_dict({}) == []
    assert RNGState().load_state_dict({"numpy": {"bit_generator": "Unknown"}, "python": {}}) == ["numpy", "python"]
    assert RNGState().load_state_dict({"numpy": {"bit_generator": "MT19937"}}) == ["numpy"]
    after = np.random.standard_normal(2).tolist()
    old = np.random.get_state()
    RNGState().load_state_dict(state)
    assert np.random.standard_normal(2).tolist() == after
    legacy = dict(zip(["kind", "keys", "position", "has_gauss", "gauss"], old, strict=True))
    following = np.random.standard_normal(2).tolist()
    RNGState().load_state_dict({"numpy": legacy})
    assert np.random.standard_normal(2).tolist() == following
    snapshot = Snapshot.take(URL, {"rng": RNGState()}, overwrite=True, options=TakeOptions(exclude=["rng/numpy"]))
    snapshot.restore({"rng": RNGState()})


def test_boxes_overlap_compares_few_of_many_boxes(monkeypatch):
    compared = []
    intersect = geometry.intersect
    monkeypatch.setattr(geometry, "intersect", lambda *boxes: compared.append(boxes) or intersect(*boxes))
    strips = [Box((0, i), (9, 1)) for i in range(3000)]
    assert not boxes_overlap(strips)
    assert boxes_overlap([*strips, Box((3, 1500), (1, 1))])
    assert not boxes_overlap([Box((i, j), (1, 1)) for i in range(55) for j in range(55)])
    pinwheel = [Box((0, 0), (1, 2)), Box((0, 2), (2, 1)), Box((2, 1), (1, 2)), Box((1, 0), (2, 1)), Box((1, 1), (1, 1))]
    assert not boxes_overlap(pinwheel)
    assert boxes_overlap([*pinwheel, Box((1, 1), (1, 1))])
    assert len(compared) < 100, "of millions of pairs"


def test_tensor_entry_is_used_for_plain_tensors():
    assert type(take({"t": torch.ones(2)}).get_manifest()["0/s/t"]) is TensorEntry


def _shrunk(offset, turned):
    """A tensor whose storage was shrunk, and has only a part of it."""
    whole = torch.randn(200_064)
    tensor = whole[offset : offset + 64]
    tensor = tensor.view(8, 8).t() if turned else tensor
    whole.untyped_storage().resize_((offset + 10) * 4)
    return tensor


@pytest.mark.parametrize("offset", [0, 200_000])
@pytest.mark.parametrize("turned", [False, True])
def test_take_and_restore_refuse_a_tensor_with_a_shrunk_storage(tmp_path, offset, turned):
    with pytest.raises(SnapshotError, match=r"s/w: its storage was shrunk|s/w: its memory was freed"):
        Snapshot.take(tmp_path / "s", {"s": StateDict(w=_shrunk(offset, turned))})
    whole = torch.randn(8, 8) if turned else torch.randn(64)
    Snapshot.take(tmp_path / "t", {"s": StateDict(w=whole)})
    live = StateDict(w=_shrunk(offset, turned))
    report = Snapshot(tmp_path / "t").restore({"s": live})
    assert live["w"].equal(whole)
    assert [line.path for line in report.replaced] == ["s/w"]
    module = torch.nn.Module()
    module.w = torch.nn.Parameter(_shrunk(offset, turned))
    with pytest.raises(RestoreError, match="less memory than elements"):
        Snapshot(tmp_path / "t").restore({"s": module})


@pytest.mark.parametrize(("version", "local", "count"), [(3, 2, 5), (0, 2, 2), (3, 0, 3)])
def test_count_changes_counts_those_of_a_dtensor_and_of_its_memory(version, local, count):
    assert count_changes(SimpleNamespace(_version=version, _local_tensor=SimpleNamespace(_version=local))) == count
    tensor = torch.zeros(3)
    assert count_changes(tensor) == 0
    tensor.add_(1)
    assert count_changes(tensor) == 1


def shards_of(*tensors, shape=(4, 3), dtype=torch.float32, layout="rows"):
    pieces = [LocalPiece(Box((number, 0), tuple(tensor.shape)), tensor, (0,)) for number, tensor in enumerate(tensors)]
    return Shards("ShardedTensor", dtype, shape, pieces, (0,), None, None, layout, False)


def test_prepare_shards_gives_the_dtype_of_all_pieces():
    seen = []

    def halve(path, tensor, tracing):
        seen.append((path, tuple(tensor.shape), tensor.dtype, tracing))
        return tensor.half()

    made = leaves.prepare_shards(halve, "s/x", shards_of(torch.ones(1, 3), torch.ones(2, 3)))
    assert seen == [("s/x", (1, 3), torch.float32, False), ("s/x", (2, 3), torch.float32, False)]
    assert made.dtype == torch.float16
    assert [(piece.tensor.dtype, tuple(piece.tensor.shape)) for piece in made.pieces] == [
        (torch.float16, (1, 3)), (torch.float16, (2, 3))
    ]  # fmt: skip
    assert made.layout == "rows, stored as torch.float16"
    assert leaves.prepare_shards(halve, "s/x", shards_of(torch.ones(1, 3), layout="")).layout == ""
    seen.clear()
    empty = leaves.prepare_shards(halve, "s/x", shards_of(dtype=torch.bfloat16))
    assert seen == [("s/x", (0, 0), torch.bfloat16, True)], "a rank without pieces must store the same dtype"
    assert (empty.dtype, empty.pieces) == (torch.float16, [])


@pytest.mark.parametrize(
    ("function", "match"),
    [
        (lambda path, tensor, tracing: tensor[:0], r"s/x: .*returned \[0, 3\] for a tensor of shape \[1, 3\]"),
        (lambda path, tensor, tracing: None, "s/x: .*returned NoneType"),
        (lambda path, tensor, tracing: tensor.to_sparse(), "s/x.*plain"),
        (
            lambda path, tensor, tracing: tensor.half() if tensor[0, 0] else tensor,
            "s/x: .*several dtypes.*: torch.float16, torch.float32",
        ),
    ],
)
def test_prepare_shards_refuses_what_cannot_be_one_tensor(function, match):
    with pytest.raises((ValueError, TypeError, SnapshotError), match=match):
        leaves.prepare_shards(function, "s/x", shards_of(torch.zeros(1, 3), torch.ones(1, 3)))


@pytest.mark.parametrize(
    ("numbers", "packed"),
    [
        ([], False), ([5], True), ([3, 4, 5], True), ([0, 2, 9], False), ([0, 2, 1, 3], False), ([0, 1, 3], False),
        ([2, 1, 0], False), ([4, 4], False), ([0, 0, 2], False),
    ],
)  # fmt: skip
def test_pack_numbers_keeps_them_in_little_memory(numbers, packed):
    found = flatten_cache._pack_numbers(numbers)
    assert list(found) == numbers
    assert isinstance(found, range) is packed


def test_overlap_knows_the_parameters_that_optimizers_step_by_their_paths():
    net, other = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    net.bias.requires_grad_(False)
    optimizer = torch.optim.SGD([*net.parameters()])
    plain = OverlapEligible(map_modules({"n/t": net, "other": other, "optim": optimizer}))
    assert {path: id(each) for path, each in plain._parameters.items()} == {"n%2Ft/weight": id(net.weight)}
    assert plain.optimizers == [optimizer]
    named = OverlapEligible(map_modules({"m": ModelState(net, optimizer), "other": other}))
    assert {path: id(each) for path, each in named._parameters.items()} == {"m/model/weight": id(net.weight)}
    assert not OverlapEligible(map_modules({"net": net}))


def test_overlap_watches_no_local_tensor_with_gaps():
    """The version of a `DTensor` does not count what changes a copy of its local tensor."""
    net = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(net.parameters())
    dense, strided = torch.zeros(2, 2), torch.zeros(2, 2)
    dense._local_tensor, strided._local_tensor = torch.zeros(2, 2), torch.zeros(2, 2).t()
    optimizer.state[net.weight] = {"first": dense, "second": strided}
    found = OverlapEligible(map_modules({"net": net, "optim": optimizer}))
    assert list(map(id, found._changing)) == [id(strided._local_tensor)]
    assert [*map(id, found._wrappers.values())] == [id(dense), id(strided)]


class Kept:
    """A state that relies on restores into the tensor that it returns."""

    def __init__(self, before=(), after=()):
        self.tensor, self.before, self.after = torch.zeros(2), dict(before), dict(after)

    def state_dict(self):
        return {"held": {**self.before, "tensor": self.tensor, **self.after}}

    def load_state_dict(self, state):
        pass


@pytest.mark.parametrize(
    "key",
    [(0, 1), float("nan"), 1 << 20_000, (1 << 20_000,), b"x"],
    ids=["tuple", "nan", "long int", "tuple of a long int", "bytes"],
)
def test_restore_fills_tensors_beside_keys_that_no_manifest_has(folder, key):
    saved = Kept()
    saved.tensor.fill_(7)
    Snapshot.take(folder, {"s": saved})
    for live in (Kept(before={key: 1}), Kept(after={key: 1})):
        Snapshot(folder).restore({"s": live})
        assert live.tensor.tolist() == [7, 7]


def test_take_leaves_out_what_holds_itself(folder):
    held = {}
    held["held"] = held
    Snapshot.take(folder, {"s": StateDict(held=held, x=1)}, options=TakeOptions(exclude=["s/held"]))
    with pytest.raises(SnapshotError, match="s: nested deeper than Python's stack allows here, or holds itself"):
        Snapshot(folder).restore({"s": StateDict(held=held, x=0)})


def test_take_refuses_to_leave_out_a_part_of_a_slice(folder):
    with pytest.raises(ValueError, match="s/part/0 cannot be left out, since it is an element of a sequence"):
        Snapshot.take(folder, {"s": StateDict(part=slice(1, 2))}, options=TakeOptions(exclude=["s/part/0"]))
