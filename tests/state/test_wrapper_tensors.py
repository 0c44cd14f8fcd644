"""Tensors that wrap tensors: stored as their inner tensors, and restored into those of the live one."""

import warnings

import pytest
import torch

from snapshot import RestoreError, RestoreOptions, Snapshot, StateDict, TakeOptions, Target
from snapshot.saved import SavedObject
from tests.helpers.arguments import for_take
from tests.helpers.wrapper_tensors import Layout, Quantised, Rounding, nested, quantised

URL = "memory://wrapped"


def plainly_take(state, url=URL, **options):
    """A take that warns of nothing."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return Snapshot.take(url, state, **for_take(overwrite=True, **options))


def inner(tensor):
    """All plain tensors that a wrapped one is made of."""
    names, _ = tensor.__tensor_flatten__()
    for name in names:
        each = getattr(tensor, name)
        yield from inner(each) if hasattr(each, "__tensor_flatten__") else [each]


def equal_wrapped(a, b):
    return type(a) is type(b) and all(torch.equal(x, y) for x, y in zip(inner(a), inner(b), strict=True))


class Layer(torch.nn.Module):
    def __init__(self, seed):
        super().__init__()
        self.weight = torch.nn.Parameter(quantised(seed), requires_grad=False)
        self.deep = torch.nn.Parameter(nested(seed), requires_grad=False)
        self.register_buffer("kept", quantised(seed + 50))
        self.bias = torch.nn.Parameter(torch.full((4,), float(seed)))


@pytest.mark.parametrize("make", [quantised, nested])
@pytest.mark.parametrize("worker", ["", "thread"])
def test_wrapper_tensor_is_restored_into_the_live_one(make, worker, tmp_path):
    state = {"state": StateDict(deep={"list": [make(1)]})}
    if worker:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            Snapshot.async_take(tmp_path / "s", state, options=TakeOptions(worker=worker)).wait()
        snapshot = Snapshot(tmp_path / "s")
    else:
        snapshot = plainly_take(state)
    live = StateDict(deep={"list": [make(2)]})
    tensor = live["deep"]["list"][0]
    places = [each.data_ptr() for each in inner(tensor)]
    report = snapshot.restore({"state": live})
    assert live["deep"]["list"][0] is tensor
    assert [each.data_ptr() for each in inner(tensor)] == places
    assert equal_wrapped(tensor, make(1))
    assert not report.replaced
    assert snapshot.verify().ok


def test_wrapper_tensor_modules_are_filled_in_place():
    snapshot = plainly_take({"m": Layer(1)})
    live = Layer(2)
    codes = live.weight.codes
    weight = live.weight
    report = snapshot.restore({"m": live})
    assert live.weight is weight
    assert live.weight.codes is codes
    for name in ("weight", "deep", "kept"):
        assert equal_wrapped(getattr(live, name), getattr(Layer(1), name)), name
    assert live.bias[0] == 1
    assert not report.replaced
    assert {entry.dtype for path, entry in snapshot.get_manifest().items() if path.endswith("codes")} == {"int8"}


class Momentum(torch.optim.Optimizer):
    """An optimizer whose state is quantised."""

    def __init__(self, params, scale=1.0):
        super().__init__(params, {"lr": 0.1})
        for group in self.param_groups:
            for parameter in group["params"]:
                codes = torch.full((4, 16), int(scale), dtype=torch.int8)
                self.state[parameter] = {"m": Quantised(codes, torch.full((8,), scale), 8), "step": torch.tensor(scale)}


def test_wrapper_tensor_optimizer_state_is_filled_in_place():
    def parameters():
        return [torch.nn.Parameter(torch.ones(4, 16))]

    snapshot = plainly_take({"o": Momentum(parameters(), 3.0)})
    live = Momentum(parameters(), 1.0)
    snapshot.restore({"o": live})
    (state,) = live.state.values()
    assert type(state["m"]) is Quantised
    assert (state["m"].codes == 3).all()
    assert state["m"].scale[0] == 3
    assert state["step"] == 3


def test_wrapper_tensor_optimizer_state_in_a_fresh_optimizer_names_safe_globals():
    snapshot = plainly_take({"o": Momentum([torch.nn.Parameter(torch.ones(4, 16))], 3.0)})
    live = Momentum([torch.nn.Parameter(torch.ones(4, 16))])
    live.state.clear()
    with pytest.raises(RestoreError, match=r"o/state/0/m.*add_safe_globals"):
        snapshot.restore({"o": live})
    assert not live.state
    with torch.serialization.safe_globals([Quantised, Layout, Rounding]):
        snapshot2 = plainly_take({"o": Momentum([torch.nn.Parameter(torch.ones(4, 16))], 3.0)})
        snapshot2.restore({"o": live})
    (state,) = live.state.values()
    assert type(state["m"]) is Quantised
    assert (state["m"].codes == 3).all()


def test_wrapper_tensor_with_another_context_is_a_mismatch():
    snapshot = plainly_take({"state": StateDict(a=torch.ones(2), w=quantised(1, block=8))})
    others = [
        quantised(2, block=4),
        quantised(2, layout=Layout(32)),
        quantised(2, rounding=Rounding.DOWN),
        quantised(2, rows=8),
        Quantised(quantised(2).codes, quantised(2).scale.double(), 8),
        Quantised(quantised(2).codes, torch.ones(3), 8),
        nested(2),
    ]
    for live in others:
        state = StateDict(a=torch.zeros(2), w=live)
        before = [each.clone() for each in inner(live)]
        with pytest.raises(RestoreError, match="state/w"):
            snapshot.restore({"state": state}, options=RestoreOptions(cast="any"))
        assert all(map(torch.equal, inner(live), before))
        assert not state["a"].any()


def test_wrapper_tensor_context_that_cannot_be_stored_is_kept_from_the_live_one():
    snapshot = plainly_take({"state": StateDict(w=quantised(1, hook=print))})
    hook = object()
    live = StateDict(w=quantised(2, hook=hook))
    report = snapshot.restore({"state": live})
    assert equal_wrapped(live["w"], quantised(1))
    assert live["w"].hook is hook
    assert [(line.kind, line.path) for line in report.lines] == [("kept", "state/w")]


def test_wrapper_tensor_and_plain_tensor_do_not_match():
    class Plain(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(4, 16))

    class Wrapped(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(quantised(1), requires_grad=False)

    for saved, live in ((Plain(), Wrapped()), (Wrapped(), Plain())):
        snapshot = plainly_take({"m": saved})
        before = live.weight.dequantize() if isinstance(live, Wrapped) else live.weight.detach().clone()
        with pytest.raises(RestoreError, match="m/weight: the snapshot has a"):
            snapshot.restore({"m": live})
        after = live.weight.dequantize() if isinstance(live, Wrapped) else live.weight
        assert torch.equal(before, after)


def test_wrapper_tensor_without_a_live_one_is_a_saved_object():
    snapshot = plainly_take({"state": StateDict(w=nested(1))})
    read = snapshot.read_object("0/state/w")
    assert isinstance(read, SavedObject)
    assert read.class_name.endswith("wrapper_tensors.Nested")
    assert torch.equal(read.high, nested(1).high)
    assert torch.equal(read.low.codes, quantised(1).codes)
    assert read.low.shape == (4, 16)
    block, layout, rounding, more = read.low.context
    assert (block, layout.tile, rounding.value, more["dtype"]) == (8, 16, "nearest", torch.float32)
    assert torch.equal(snapshot.read_object("0/state/w/low/codes"), quantised(1).codes)
    live = nested(2)
    assert snapshot.read_object("0/state/w", obj_out=live) is live
    assert equal_wrapped(live, nested(1))
    with pytest.raises(RestoreError, match="0/state/w"):
        snapshot.read_object("0/state/w", obj_out=quantised(2))
    again = plainly_take({"state": StateDict(w=read)}, "memory://wrapped-again")
    assert not Snapshot.diff(URL, again)


def test_wrapper_tensor_of_a_known_or_safe_global_class_is_created():
    snapshot = plainly_take({"state": StateDict(many=[quantised(1), quantised(2)])})
    live = StateDict(many=[quantised(5)])
    assert [line.kind for line in snapshot.restore({"state": live}).lines] == []
    assert equal_wrapped(live["many"][1], quantised(2))
    live = StateDict(many=[])
    with torch.serialization.safe_globals([Quantised, Layout, Rounding]):
        snapshot.restore({"state": live})
    assert equal_wrapped(live["many"][0], quantised(1))
    live = StateDict(many=[])
    snapshot.restore({"state": live})
    assert isinstance(live["many"][0], SavedObject)


def test_wrapper_tensor_inner_tensors_that_are_shared_are_stored_once():
    scale = torch.ones(8)
    held = StateDict(a=Quantised(torch.ones(4, 16, dtype=torch.int8), scale, 8),
                     b=Quantised(torch.zeros(4, 16, dtype=torch.int8), scale, 8), scale=scale)  # fmt: skip
    snapshot = plainly_take({"state": held})
    ranges = {(entry.location, entry.byte_range) for path, entry in snapshot.get_manifest().items() if "scale" in path}
    assert len(ranges) == 1
    scale.zero_()
    snapshot.restore({"state": held})
    assert held["a"].scale is held["b"].scale is held["scale"]
    assert (scale == 1).all()


def test_wrapper_tensor_exclude():
    snapshot = plainly_take({"m": Layer(1), "state": StateDict(w=quantised(1), x=3)})
    live, state = Layer(2), StateDict(w=quantised(2), x=0)
    snapshot.restore(
        {"m": live, "state": state}, options=RestoreOptions(exclude=["m/weight", "m/weight/**", "state/w/**"])
    )
    assert equal_wrapped(live.weight, Layer(2).weight)
    assert equal_wrapped(live.deep, Layer(1).deep)
    assert equal_wrapped(state["w"], quantised(2))
    assert state["x"] == 3
    report = snapshot.restore({"m": live}, select=["m/weight/**"])
    assert equal_wrapped(live.weight, Layer(1).weight)
    assert not report.replaced


def test_wrapper_tensor_restore_strict_false_restores_what_matches():
    class Less(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(quantised(7), requires_grad=False)
            self.extra = torch.nn.Parameter(nested(7), requires_grad=False)

    snapshot = plainly_take({"m": Layer(1)})
    live = Less()
    with pytest.raises(RestoreError, match="m/deep"):
        snapshot.restore({"m": live})
    report = snapshot.restore({"m": live}, strict=False)
    assert equal_wrapped(live.weight, Layer(1).weight)
    assert equal_wrapped(live.extra, nested(7))
    assert {line.path for line in report.missing} == {"m/extra"}
    assert {line.path for line in report.unexpected} == {"m/deep", "m/kept", "m/bias"}


def test_wrapper_tensor_is_not_passed_to_a_prepare_function():
    seen = []

    def prepare(path, tensor, tracing):
        seen.append(path)
        return tensor.bfloat16()

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        snapshot = Snapshot.take(
            URL, {"state": StateDict(w=quantised(1), x=torch.ones(2))}, overwrite=True,
            _custom_tensor_prepare_func=prepare,
        )  # fmt: skip
    assert seen == ["state/x"]
    live = StateDict(w=quantised(2), x=torch.zeros(2, dtype=torch.bfloat16))
    snapshot.restore({"state": live})
    assert equal_wrapped(live["w"], quantised(1))


def test_nested_tensor_is_stored_as_its_parts():
    make = torch.nested.nested_tensor
    saved = make([torch.arange(3.0), torch.arange(5.0)], layout=torch.jagged)
    snapshot = plainly_take({"state": StateDict(n=saved)})
    live = StateDict(n=make([torch.zeros(3), torch.zeros(5)], layout=torch.jagged))
    held = live["n"]
    snapshot.restore({"state": live})
    assert live["n"] is held
    assert torch.equal(held.values(), saved.values())


def test_wrapper_tensor_diff_convert_and_cli(tmp_path, capsys):
    from snapshot.cli import main

    snapshot = Snapshot.take(tmp_path / "a", {"m": Layer(1)})
    Snapshot.take(tmp_path / "b", {"m": Layer(1)})
    assert not Snapshot.diff(tmp_path / "a", tmp_path / "b")
    live = Layer(1)
    live.weight.block = 4
    Snapshot.take(tmp_path / "c", {"m": live})
    (change,) = Snapshot.diff(tmp_path / "a", tmp_path / "c").changes
    assert (change.path, change.what) == ("m/weight", ("context",))
    for verb, *more in (["ls"], ["show", "m/weight"], ["show", "m/weight/codes"]):
        assert main([verb, str(tmp_path / "a"), *more]) == 0
        assert "weight" in capsys.readouterr().out
    snapshot.convert(tmp_path / "again")
    assert not Snapshot.diff(tmp_path / "a", tmp_path / "again")
    report = snapshot.convert(Target(tmp_path / "x.pt", "torch"))
    assert torch.equal(torch.load(tmp_path / "x.pt")["m"]["weight"]["codes"], Layer(1).weight.codes)
    assert any(line.startswith("m/weight: the class") for line in report.left_out)
    assert snapshot.convert(Target(tmp_path / "dcp", "dcp")).tensors == 8
    assert snapshot.convert(Target(tmp_path / "x.safetensors", "safetensors")).tensors == 8


def test_wrapper_tensor_hostile_context_is_refused():
    from snapshot import SnapshotError
    from tests.hostile.hostile_snapshots import document_of, encoded, sign, store

    plainly_take({"state": StateDict(w=quantised(1))}, "memory://wrapped/s")
    good = document_of("wrapped/s")
    for context in (
        {}, {"": {"type": "list", "length": 1 << 50}}, {"": {"type": "tuple", "length": 1}},
        {"": {"type": "set", "length": 1}, "/0": {"type": "list", "length": 0}},
        {"": {"type": "NoneType", "serialized_value": "None"}, "/x": {"type": "int", "serialized_value": "1"}},
        {"": {"type": "dict", "keys": ["a"]}, "/b": {"type": "int", "serialized_value": "1"}},
        {"/" * 0 + "/a" * i: {"type": "dict", "keys": ["a"]} for i in range(200)},
        {"": {"type": "Tensor", "location": "x", "byte_range": [0, 1], "dtype": "uint8", "shape": [1]}},
        {"": {"type": "int", "serialized_value": "x"}},
    ):  # fmt: skip
        document = {**good, "manifest": {**good["manifest"]}}
        document["manifest"]["0/state/w"] = {**good["manifest"]["0/state/w"], "context": context}
        store("wrapped/s/.snapshot_metadata", sign(encoded(document)))
        live = StateDict(w=quantised(2))
        for verb in (
            lambda: Snapshot("memory://wrapped/s").read_object("0/state/w"),
            lambda live=live: Snapshot("memory://wrapped/s").restore({"state": live}),
        ):
            with pytest.raises(SnapshotError):
                verb()
        assert equal_wrapped(live["w"], quantised(2))


def test_wrapper_tensor_torchao_quantised_model():
    pytest.importorskip("torchao")
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    def make(seed):
        torch.manual_seed(seed)
        model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 32))
        quantize_(model, Int8WeightOnlyConfig())
        return model

    snapshot = plainly_take({"m": make(1)})
    live, given = make(2), torch.randn(3, 64)
    assert not torch.equal(live(given), make(1)(given))
    snapshot.restore({"m": live})
    assert torch.equal(live(given), make(1)(given))


def test_wrapper_tensor_torchao_optimizer():
    pytest.importorskip("torchao")
    from torchao.optim import AdamW8bit

    def make(seed, steps):
        torch.manual_seed(seed)
        model = torch.nn.Linear(256, 256)
        optimizer = AdamW8bit(model.parameters())
        for _ in range(steps):
            model(torch.ones(2, 256)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return model, optimizer

    with torch.compiler.set_stance("force_eager"):
        model, optimizer = make(1, 3)
        snapshot = plainly_take({"m": model, "o": optimizer})
        for steps in (0, 1):
            other, live = make(2, steps)
            snapshot.restore({"m": other, "o": live})
            for each, own in ((model, optimizer), (other, live)):
                assert type(next(iter(own.state.values()))["exp_avg"]).__name__ == "OptimState8bit"
                each(torch.ones(2, 256)).square().sum().backward()
            assert torch.equal(other.weight, model.weight)
            before = {name: value.clone() for name, value in model.state_dict().items()}
            live.step()
            saved_again = plainly_take({"m": model, "o": optimizer}, "memory://wrapped-again")
            optimizer.step()
            assert torch.equal(other.weight, model.weight)
            saved_again.restore({"m": model, "o": optimizer})
            assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
            model.zero_grad()


def test_mismatched_skip_leaves_a_wrapper_tensor_of_another_shape():
    def held(rows, value):
        net = torch.nn.Module()
        net.other = torch.nn.Parameter(torch.full((3,), float(value)))
        codes = torch.full((rows, 16), value, dtype=torch.int8)
        net.weight = torch.nn.Parameter(Quantised(codes, torch.full((2 * rows,), float(value)), 8), requires_grad=False)
        return net

    snapshot = plainly_take({"m": held(4, 1)})
    live = held(6, 2)
    with pytest.raises(RestoreError, match=r"m/weight: the snapshot has \[4, 16\], the application \[6, 16\]"):
        snapshot.restore({"m": live})
    report = snapshot.restore({"m": live}, strict=False, options=RestoreOptions(mismatched="skip"))
    assert [line.path for line in report.skipped] == ["m/weight"]
    assert live.other.eq(1).all()
    assert live.weight.codes.eq(2).all()
    assert live.weight.codes.shape == (6, 16)


@pytest.mark.parametrize("warm", [False, True])
def test_wrapper_tensor_optimizer_state_is_created_from_its_parameters(warm):
    from torch.testing._internal.two_tensor import TwoTensor

    def pair(value):
        wrapped = TwoTensor(torch.full((3, 4), value), torch.full((3, 4), value + 1))
        return torch.nn.Parameter(wrapped)

    def stepped(parameter):
        optimizer = torch.optim.SGD([parameter], lr=0.1, momentum=0.9)
        parameter.grad = TwoTensor(torch.ones(3, 4), torch.ones(3, 4) * 2)
        optimizer.step()
        return optimizer

    first = pair(1.0)
    optimizer = stepped(first)
    snapshot = plainly_take({"o": optimizer})
    second = pair(5.0)
    live = stepped(second) if warm else torch.optim.SGD([second], lr=0.1, momentum=0.9)
    snapshot.restore({"o": live})
    found = live.state[second]["momentum_buffer"]
    assert type(found) is TwoTensor
    assert torch.equal(found.a, optimizer.state[first]["momentum_buffer"].a)
    assert torch.equal(found.b, optimizer.state[first]["momentum_buffer"].b)
