"""What was saved comes back equal: value, type, container, key type and order, dtype, shape, memory format."""

import collections
import math
import re
import struct
import warnings

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from snapshot import Snapshot, StateDict
from snapshot.tensors.memory import BY_NAME
from tests.helpers.states import bits, equal

# what torch itself can hold no values of: shells of one to seven bits
STORABLE = sorted(name for name in BY_NAME if not re.fullmatch(r"bits.*|u?int[1-7]", name))


def round_trip(value, path="memory://exact"):
    """What `value` is after it was saved, and read back without a template."""
    Snapshot.take(path, {"state": StateDict(value=value)}, overwrite=True)
    return Snapshot(path).get_state_dict_for_key("state")["value"]


def noise(shape, dtype):
    """A tensor of random bytes; bools are bools."""
    count = math.prod(shape) * dtype.itemsize
    raw = torch.randint(0, 2 if dtype is torch.bool else 256, (count,), dtype=torch.uint8)
    return raw.view(dtype).view(shape) if count else torch.empty(shape, dtype=dtype)


@pytest.mark.parametrize("name", STORABLE)
@pytest.mark.parametrize("shape", [(), (1,), (0,), (3, 0, 2), (5, 7)], ids=str)
def test_every_dtype_and_shape_is_restored_exactly(name, shape):
    tensor = noise(shape, BY_NAME[name])
    back = round_trip(tensor)
    assert equal(tensor, back)


@pytest.mark.parametrize("name", STORABLE)
def test_every_dtype_is_restored_in_place(name):
    state = StateDict(t=noise((5, 7), BY_NAME[name]))
    saved = bits(state["t"])
    Snapshot.take("memory://exact", {"state": state}, overwrite=True)
    live = state["t"]
    live.view(torch.uint8).zero_()
    report = Snapshot("memory://exact").restore({"state": state})
    assert state["t"] is live
    assert bits(live) == saved
    assert not report.lines


@pytest.mark.parametrize("name", [name for name in STORABLE if BY_NAME[name].is_complex])
def test_conjugate_view_of_every_complex_dtype_is_exact_or_raises_torch_s_error(name):
    tensor = noise((5, 2), BY_NAME[name])
    pairs = torch.view_as_real(tensor)
    expected = torch.stack([pairs[..., 0], -pairs[..., 1]], -1)
    try:
        back = round_trip(tensor.conj())
    except NotImplementedError:
        with pytest.raises(NotImplementedError):
            tensor.conj().clone()  # torch 2.15 cannot copy it either
        return
    assert equal(torch.view_as_real(back), expected)


def views():
    base = torch.randn(6, 8)
    z = torch.randn(4, 5, dtype=torch.complex64)
    return {
        "transposed": base.t(),
        "strided": base[::2, 1::3],
        "expanded": torch.randn(4, 1).expand(4, 5),
        "expanded scalar": torch.tensor(3.0).expand(3, 2),
        "row of a larger storage": base[2],
        "flipped": torch.flip(base, (0,)),
        "conjugate": z.conj(),
        "negative": z.conj().imag,
        "negative of one element": z[:1, 0].conj().imag,
        "conjugate of one element": z[:1, 0].conj(),
        "conjugate, transposed": z.conj().t(),
        "channels last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "channels last 3d": torch.randn(2, 3, 4, 5, 2).to(memory_format=torch.channels_last_3d),
        "permuted": torch.randn(2, 3, 4).permute(2, 0, 1),
        "imaginary part": z.imag,
    }


@pytest.mark.parametrize("name", sorted(views()))
def test_strided_views_are_restored_equal(name):
    view = views()[name]
    assert equal(view, round_trip(view))


@pytest.mark.parametrize("name", ["channels last", "channels last 3d", "permuted", "transposed"])
def test_dense_memory_formats_are_kept(name):
    view = views()[name]
    assert round_trip(view).stride() == view.stride()


@pytest.mark.parametrize("name", sorted(set(views()) - {"expanded", "expanded scalar"}))
def test_strided_views_are_restored_in_place(name):
    live = views()[name]
    saved = live.clone()
    state = StateDict(t=live)
    Snapshot.take("memory://exact", {"state": state}, overwrite=True)
    live.zero_()
    Snapshot("memory://exact").restore({"state": state})
    assert state["t"] is live
    assert torch.equal(live, saved)


def test_restore_in_place_of_a_strided_tensor_writes_only_its_own_elements():
    base = torch.zeros(6, 8)
    state = StateDict(t=base[::2, 1::3])
    Snapshot.take("memory://exact", {"state": StateDict(t=torch.ones(3, 3))}, overwrite=True)
    Snapshot("memory://exact").restore({"state": state})
    assert base.sum() == 9
    assert base[::2, 1::3].sum() == 9


def test_restore_replaces_and_reports_an_expanded_tensor():
    state = StateDict(t=torch.zeros(4, 1).expand(4, 5))
    Snapshot.take("memory://exact", {"state": StateDict(t=torch.arange(20.0).view(4, 5))}, overwrite=True)
    report = Snapshot("memory://exact").restore({"state": state})
    assert torch.equal(state["t"], torch.arange(20.0).view(4, 5))
    assert [line.path for line in report.replaced] == ["state/t"]


@pytest.mark.filterwarnings("ignore:.*quant.*:UserWarning", "ignore:.*quant.*:DeprecationWarning")
@pytest.mark.parametrize("dtype", [torch.qint8, torch.quint8, torch.qint32])
def test_quantised_tensors_are_restored_exactly(dtype):
    plain = torch.randn(4, 6)
    for tensor in (
        torch.quantize_per_tensor(plain, 0.1, 3, dtype),
        torch.quantize_per_channel(plain, torch.rand(6) + 0.1, torch.zeros(6, dtype=torch.int64), 1, dtype),
        torch.quantize_per_tensor(torch.empty(0, 3), 0.1, 3, dtype),
    ):
        back = round_trip(tensor)
        assert equal(tensor, back)
        assert torch.equal(tensor.dequantize(), back.dequantize())
        assert tensor.qscheme() == back.qscheme()


@pytest.mark.filterwarnings("ignore:.*beta state.*:UserWarning")
@pytest.mark.parametrize("layout", [torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc])
def test_compressed_sparse_tensors_are_restored_exactly(layout):
    dense = torch.tensor([[0, 1, 0, 2], [3, 0, 0, 0], [0, 0, 0, 0], [4.0, 5, 6, 7]])
    blocks = (2, 2) if layout in (torch.sparse_bsr, torch.sparse_bsc) else None
    tensor = dense.to_sparse(layout=layout, blocksize=blocks)
    back = round_trip(tensor)
    assert back.layout == layout
    assert torch.equal(back.to_dense(), dense)


def test_sparse_coo_tensors_are_restored_coalesced_or_not():
    indices = torch.tensor([[0, 0, 1], [2, 2, 0]])
    loose = torch.sparse_coo_tensor(indices, torch.tensor([1.0, 2, 3]), (2, 3), check_invariants=True)
    for tensor in (loose, loose.coalesce(), torch.sparse_coo_tensor(size=(2, 3), check_invariants=True)):
        back = round_trip(tensor)
        assert back.is_coalesced() == tensor.is_coalesced()
        assert torch.equal(back._indices(), tensor._indices())
        assert torch.equal(back._values(), tensor._values())


def test_parameters_and_buffers_keep_requires_grad():
    for value in (
        torch.nn.Parameter(torch.randn(3)),
        torch.nn.Parameter(torch.arange(3), requires_grad=False),
        torch.randn(3, requires_grad=True),
        torch.nn.Buffer(torch.randn(3)),
    ):
        back = round_trip(value)
        assert equal(value, back)


class Marked(torch.Tensor):
    """A subclass that is plain data."""


def test_plain_tensor_subclasses_keep_their_type():
    value = torch.randn(3).as_subclass(Marked)
    back = round_trip(value)
    assert type(back) is Marked
    assert torch.equal(back.as_subclass(torch.Tensor), value.as_subclass(torch.Tensor))


def test_tied_weights_are_stored_once_and_tied_again():
    weight = torch.randn(1000)
    state = {"a": weight, "b": weight, "c": {"d": weight}, "view": weight[:500], "reshaped": weight.view(10, 100)}
    Snapshot.take("memory://exact", {"state": StateDict(value=state)}, overwrite=True)
    snapshot = Snapshot("memory://exact")
    assert snapshot.metadata.nbytes < 4096 + 4000 + 2000 + 4000 + 1
    back = snapshot.get_state_dict_for_key("state")["value"]
    assert back["a"] is back["b"] is back["c"]["d"]
    assert equal(back, state)


def test_overlapping_views_are_stored_separately():
    base = torch.arange(10.0)
    back = round_trip({"a": base[:6], "b": base[4:]})
    back["a"].zero_()
    assert torch.equal(back["b"], base[4:])


@pytest.mark.parametrize(
    "array",
    [
        np.arange(12.0).reshape(3, 4),
        np.asfortranarray(np.arange(12.0).reshape(3, 4)),
        np.arange(12, dtype=">i4"),
        np.arange(20)[::-3],
        np.array([], dtype=np.float16),
        np.zeros((3, 0)),
        np.array(5.0),
        np.float32(2.5),
        np.bool_(True),
        np.int64(-7),
        np.array(["ab", "c"]),
        np.array([b"x", b"yz"]),
        np.array(["2020-01-01", "NaT"], dtype="datetime64[D]"),
        np.timedelta64(5, "s"),
        np.array([(1, 2.5)], dtype=[("a", "i4"), ("b", "f8")]),
        np.array([(1, [2.5, 1])], dtype=[("a", "i4"), ("b", "f8", (2,))]),
        np.array([1 + 2j]),
        np.array([1, 2], dtype=np.longdouble),
        np.broadcast_to(np.arange(3), (2, 3)),
    ],
    ids=lambda array: f"{array.dtype}{array.shape}",
)
def test_numpy_arrays_and_scalars_are_stored_without_a_pickle(array):
    back = round_trip(array)
    assert equal(array, back)
    if isinstance(array, np.ndarray) and array.ndim > 1 and array.flags.f_contiguous:
        assert back.flags.f_contiguous == array.flags.f_contiguous


def test_numpy_arrays_are_restored_in_place():
    live = np.arange(5.0)
    state = StateDict(a=live)
    Snapshot.take("memory://exact", {"state": state}, overwrite=True)
    live[:] = 0
    Snapshot("memory://exact").restore({"state": state})
    assert state["a"] is live
    assert live.tolist() == [0, 1, 2, 3, 4]


scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=True)
    | st.complex_numbers(allow_nan=True)
    | st.text(st.characters(exclude_categories=()), max_size=20)
    | st.binary(max_size=20)
    | st.sampled_from([torch.float32, torch.device("cpu"), torch.device("cuda", 3), torch.Size([2, 3]), torch.Size([])])
)
keys = (
    st.text(st.characters(exclude_categories=()), max_size=8)
    | st.integers(-(2**70), 2**70)
    | st.booleans()
    | st.none()
    | st.floats(allow_nan=False)
    | st.sampled_from(["", "/", "%", "%2F", "..", ".", "%int:1", "1", "True", "None", "[0]", "[0:1]", "²"])
    | st.sampled_from(["🎉" * 90, "\ud800", "%uD800"])
)  # fmt: skip


def containers(children):
    return (
        st.lists(children, max_size=4)
        | st.lists(children, max_size=4).map(tuple)
        | st.dictionaries(keys, children, max_size=5)
        | st.dictionaries(keys, children, max_size=4).map(collections.OrderedDict)
        | st.lists(children, max_size=3).map(lambda items: collections.deque(items, maxlen=5))
        | st.dictionaries(keys, children, max_size=3).map(lambda items: collections.defaultdict(list, items))
    )


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.recursive(scalars, containers, max_leaves=12))
def test_nested_containers_keep_types_keys_and_order(value):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        back = round_trip(value)
    assert equal(value, back)


@settings(max_examples=100, deadline=None)
@given(st.dictionaries(keys, st.integers(0, 9).map(lambda n: torch.full((n,), n)), min_size=2, max_size=6))
def test_state_dict_keys_never_collide(value):
    assert equal(value, round_trip(value))


def test_sets_counters_deques_and_defaultdicts_are_restored():
    for value in (
        {1, "a", None, (1, 2)},
        frozenset([1, frozenset([2])]),
        collections.Counter("abca"),
        collections.deque([1], maxlen=None),
        collections.defaultdict(None, a=1),
        collections.defaultdict(int, {True: 1}),
    ):
        back = round_trip(value)
        assert equal(value, back)
        if isinstance(value, collections.defaultdict):
            assert back.default_factory is value.default_factory


def test_empty_containers_are_restored():
    assert equal(round_trip({"a": {}, "b": [], "c": (), "d": set()}), {"a": {}, "b": [], "c": (), "d": set()})


def test_long_strings_bytes_and_integers_are_stored_in_data_files():
    value = {"s": "é" * 100_000, "b": bytes(range(256)) * 2000, "a": bytearray(b"x" * 20_000), "big": 7**20_000}
    back = round_trip(value)
    assert equal(back, value)
    assert Snapshot("memory://exact").verify().ok


def test_nan_payloads_and_negative_zero_are_kept():
    odd = struct.unpack("d", struct.pack("Q", 0x7FF8DEADBEEF0001))[0]
    assert equal(round_trip(odd), odd)
    assert equal(round_trip(-0.0), -0.0)


def test_deeply_nested_and_cyclic_containers_are_refused():
    deep = []
    for _ in range(600):
        deep = [deep]
    with pytest.raises(Exception, match="nested more than 500"):
        round_trip(deep)
    loop = []
    loop.append(loop)
    with pytest.raises(Exception, match="holds itself"):
        round_trip(loop)


@pytest.mark.filterwarnings("ignore:Converting a tensor with requires_grad")  # LBFGS of torch 2.8
def test_torch_objects_are_stored_without_a_pickle():
    model = torch.nn.Sequential(
        torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.Flatten(), torch.nn.LazyLinear(2)
    )
    model(torch.randn(2, 3, 8, 8))
    stepped_ones = [stepped(name) for name in optimizers()]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Snapshot.take("memory://exact", {"model": model}, overwrite=True)
        for optimizer in stepped_ones:
            Snapshot.take("memory://exact", {"optimizer": optimizer}, overwrite=True)
        for scheduler in schedulers():
            Snapshot.take("memory://exact", {"scheduler": scheduler}, overwrite=True)


def optimizers():
    return [
        name
        for name in dir(torch.optim)
        if isinstance(getattr(torch.optim, name), type)
        and issubclass(getattr(torch.optim, name), torch.optim.Optimizer)
        and name not in ("Optimizer", "SparseAdam")
    ]


def stepped(name, steps=2, **options):
    """An optimizer that has made a step or two over a small model's parameters."""
    torch.manual_seed(1)
    parameters = [torch.nn.Parameter(torch.randn(4, 3)), torch.nn.Parameter(torch.randn(3, 4))]
    kind = getattr(torch.optim, name)
    optimizer = kind(parameters, **({"lr": 0.01} | options))
    for _ in range(steps):
        step(optimizer)
    return optimizer


def step(optimizer):
    def closure():
        optimizer.zero_grad()
        loss = sum((p**2).sum() for group in optimizer.param_groups for p in group["params"])
        loss.backward()
        return loss

    optimizer.step(closure)


def schedulers():
    s = torch.optim.lr_scheduler

    def fresh():
        return torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))], lr=0.1, momentum=0.9)

    o = fresh()
    made = [
        s.StepLR(fresh(), 2), s.MultiStepLR(fresh(), [2, 4, 4]), s.ConstantLR(fresh()), s.LinearLR(fresh()),
        s.ExponentialLR(fresh(), 0.9), s.CosineAnnealingLR(fresh(), 10), s.PolynomialLR(fresh()),
        s.ReduceLROnPlateau(fresh()), s.CyclicLR(fresh(), 0.1, 0.2), s.OneCycleLR(fresh(), 0.1, total_steps=10),
        s.CosineAnnealingWarmRestarts(fresh(), 3), s.LambdaLR(fresh(), lambda epoch: 0.9**epoch),
        s.MultiplicativeLR(fresh(), lambda epoch: 0.9),
        s.SequentialLR(o, [s.ConstantLR(o), s.ExponentialLR(o, 0.9)], [2]),
    ]  # fmt: skip
    o = fresh()
    return [*made, s.ChainedScheduler([s.ConstantLR(o), s.ExponentialLR(o, 0.9)])]


@pytest.mark.parametrize("name", optimizers())
def test_optimizer_restored_into_a_new_one_continues_bit_identically(name):
    trained = stepped(name)
    weights = StateDict(weights=[p.detach().clone() for p in trained.param_groups[0]["params"]])
    Snapshot.take("memory://exact", {"optimizer": trained}, overwrite=True)
    for _ in range(3):
        step(trained)
    fresh = stepped(name, steps=0)
    with torch.no_grad():
        for parameter, saved in zip(fresh.param_groups[0]["params"], weights["weights"], strict=True):
            parameter.copy_(saved)
    Snapshot("memory://exact").restore({"optimizer": fresh})
    for _ in range(3):
        step(fresh)
    for a, b in zip(trained.param_groups[0]["params"], fresh.param_groups[0]["params"], strict=True):
        assert torch.equal(a, b)


def test_optimizer_state_keeps_its_dtype_if_torch_would_cast_it():
    parameter = torch.nn.Parameter(torch.randn(4, dtype=torch.bfloat16))
    optimizer = torch.optim.SGD([parameter], lr=0.1, momentum=0.9)
    optimizer.state[parameter]["momentum_buffer"] = torch.randn(4, dtype=torch.float32)
    saved = optimizer.state[parameter]["momentum_buffer"].clone()
    Snapshot.take("memory://exact", {"o": optimizer}, overwrite=True)
    fresh = torch.optim.SGD([torch.nn.Parameter(torch.zeros(4, dtype=torch.bfloat16))], lr=0.1, momentum=0.9)
    Snapshot("memory://exact").restore({"o": fresh})
    (state,) = fresh.state.values()
    assert state["momentum_buffer"].dtype == torch.float32
    assert torch.equal(state["momentum_buffer"], saved)


def test_lr_schedulers_are_restored():
    for scheduler in schedulers():
        saved = {k: v for k, v in scheduler.state_dict().items() if k != "lr_lambdas"}
        Snapshot.take("memory://exact", {"s": scheduler}, overwrite=True)
        back = Snapshot("memory://exact").get_state_dict_for_key("s")
        assert equal({k: v for k, v in back.items() if k != "lr_lambdas"}, saved)
        Snapshot("memory://exact").restore({"s": scheduler})


def test_module_state_dict_keeps_its_version_metadata():
    model = torch.nn.BatchNorm1d(3)
    Snapshot.take("memory://exact", {"m": model}, overwrite=True)
    back = Snapshot("memory://exact").get_state_dict_for_key("m")
    assert back._metadata == model.state_dict()._metadata
    assert list(back) == list(model.state_dict())


def test_dicts_with_nan_tuple_or_bytes_keys_are_pickled_with_a_warning():
    for value in ({math.nan: 1}, {(1, 2): torch.ones(2)}, {b"x": 1}):
        with pytest.warns(UserWarning, match="stored as pickles"):
            back = round_trip(value)
        assert [repr(k) for k in back] == [repr(k) for k in value]


Point = collections.namedtuple("Point", "x y")


class Custom:
    def __init__(self):
        self.x = 1


def test_custom_objects_are_pickled_with_a_warning_and_read_only_with_allow_pickle():
    from snapshot.errors import UnsafeObjectError

    state = StateDict(point=Point(1, 2), custom=Custom())
    with pytest.warns(UserWarning, match="state/custom"):
        Snapshot.take("memory://exact", {"state": state}, overwrite=True)
    with pytest.raises(UnsafeObjectError, match="allow_pickle=True"):
        Snapshot("memory://exact").read_object("0/state/custom")
    assert Snapshot("memory://exact").read_object("0/state/point", Point(0, 0)) == Point(1, 2)
    Snapshot("memory://exact", allow_pickle=True).restore({"state": state})
    assert state["custom"].x == 1


def test_optimizer_with_other_state_keys_is_restored():
    class Lookahead(torch.optim.SGD):
        def state_dict(self):
            held = super().state_dict()
            return {"fast_state": held["state"], "slow_state": {0: 1.5}, "param_groups": held["param_groups"]}

        def load_state_dict(self, state_dict):
            self.slow = state_dict["slow_state"]
            super().load_state_dict({"state": state_dict["fast_state"], "param_groups": state_dict["param_groups"]})

    optimizer = Lookahead([torch.nn.Parameter(torch.ones(2))], lr=0.25)
    Snapshot.take("memory://lookahead", {"o": optimizer}, overwrite=True)
    optimizer.param_groups[0]["lr"] = 1.0
    Snapshot("memory://lookahead").restore({"o": optimizer})
    assert optimizer.param_groups[0]["lr"] == 0.25
    assert optimizer.slow == {0: 1.5}


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("make", [torch.Tensor.to_sparse, torch.Tensor.to_sparse_csr])
def test_sparse_parameters_are_restored(make, grad):
    held = torch.nn.Parameter(make(torch.eye(3)), requires_grad=grad)
    Snapshot.take("memory://sparse-parameter", {"s": StateDict(p=held)}, overwrite=True)
    back = Snapshot("memory://sparse-parameter").get_state_dict_for_key("s")["p"]
    assert type(back) is torch.nn.Parameter
    assert back.requires_grad is grad
    assert back.layout is held.layout
    assert torch.equal(back.detach().to_dense(), torch.eye(3))
