"""A take of what was taken before goes by what is known of it, and is no less exact for it."""

import copy
from collections import OrderedDict

import pytest
import torch
from torch import nn

from snapshot import Snapshot, SnapshotError, StateDict
from snapshot.state import flatten_cache
from snapshot.state.flatten import Flattened

COUNT = 40


def make():
    torch.manual_seed(1)
    tensors = {f"t{i}": torch.randn(3, 5) for i in range(COUNT)}
    odd = {
        "strided": torch.randn(6, 4).t(),
        "channels": torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
        "half": torch.randn(7).to(torch.bfloat16),
        "complex": torch.randn(3, dtype=torch.complex64),
        "conj": torch.randn(3, dtype=torch.complex64).conj(),
        "empty": torch.empty(0, 3),
        "scalar": torch.tensor(2.5),
        "parameter": nn.Parameter(torch.ones(4)),
        "bool": torch.tensor([True, False]),
    }
    tensors["tied"] = tensors["t3"]
    return {
        "tensors": tensors,
        "odd": odd,
        "groups": [{"lr": 0.1, "betas": (0.9, 0.999), "params": [0, 1, 2], "name": "x", "flag": True, "none": None}],
        "ordered": OrderedDict([("a", 1), ("b", torch.ones(2))]),
        "step": 3,
        1: torch.zeros(2),
    }


def flattened(state):
    """What flattening makes of a state, as values that can be compared."""
    flat = Flattened()
    flat.add("s", state)
    leaves = [
        (x.path, x.dtype, x.shape, x.nbytes, "%[" in x.path or x.address, x.plain, x.extra, x.note) for x in flat.leaves
    ]
    seen = sorted((at, [x.path for x in (held if type(held) is list else [held])]) for at, held in flat.seen.items())
    return dict(flat.entries), leaves, dict(flat.ties), seen, [(x.path, x.data) for x in flat.blobs]


@pytest.fixture(autouse=True)
def nothing_is_remembered():
    flatten_cache._templates.get().kept.clear()
    flatten_cache._templates.get().failures.clear()


def anew(state):
    """The same, as if for the first time."""
    kept = dict(flatten_cache._templates.get().kept)
    flatten_cache._templates.get().kept.clear()
    made = flattened(state)
    flatten_cache._templates.get().kept.clear()
    flatten_cache._templates.get().kept.update(kept)
    return made


def follows(state):
    """Whether it is flattened by what is remembered."""
    flat = Flattened()
    return flatten_cache.replay_state("s", state, flat)


def test_flatten_cache_follows_an_equal_structure_with_new_values():
    state = make()
    first = flattened(state)
    assert follows(state)
    assert flattened(state) == first
    fresh = make()
    fresh["step"], fresh["groups"][0]["lr"], fresh["groups"][0]["name"] = 4, -0.0, "renamed"
    assert flattened(fresh) == anew(fresh)
    assert follows(fresh)
    assert flattened(state) == first  # what was remembered did not change


def _set(path, value):
    def change(state):
        *above, last = path
        for key in above:
            state = state[key]
        state[last] = value(state.get(last) if isinstance(state, dict) else state[last])

    return change


def _order(state):
    state["tensors"]["t0"] = state["tensors"].pop("t0")


CHANGES = {
    "dtype": _set(["tensors", "t5"], lambda t: t.double()),
    "same size": _set(["odd", "half"], lambda t: t.to(torch.float16)),
    "shape": _set(["tensors", "t5"], lambda t: t.reshape(5, 3)),
    "transposed": _set(["tensors", "t5"], lambda t: torch.randn(5, 3).t()),
    "contiguous": _set(["odd", "strided"], lambda t: t.contiguous()),
    "strides": _set(["odd", "strided"], lambda t: torch.randn(4, 12)[:, ::2]),
    "memory format": _set(["odd", "channels"], lambda t: torch.randn(2, 4, 4, 3).permute(0, 3, 2, 1)),
    "requires_grad": _set(["tensors", "t5"], lambda t: t.clone().requires_grad_()),
    "parameter": _set(["odd", "parameter"], lambda t: t.detach()),
    "frozen": _set(["odd", "parameter"], lambda t: nn.Parameter(t.detach(), requires_grad=False)),
    "negative": _set(["tensors", "t5"], torch._neg_view),
    "conjugate": _set(["odd", "complex"], lambda t: t.conj()),
    "sparse": _set(["tensors", "t5"], lambda t: t.to_sparse()),
    "quantised": _set(["tensors", "t5"], lambda t: torch.quantize_per_tensor(t, 0.1, 0, torch.qint8)),
    "nested": _set(["tensors", "t5"], lambda t: torch.nested.as_nested_tensor([t, t])),
    "number": _set(["tensors", "t5"], lambda t: 5),
    "list": _set(["tensors", "t5"], lambda t: [t]),
    "tie": _set(["tensors", "t5"], lambda t: None),
    "untied": _set(["tensors", "tied"], lambda t: t.clone()),
    "tied to another": _set(["tensors", "tied"], lambda t: t),
    "view": _set(["odd", "scalar"], lambda t: t),
    "emptied": _set(["tensors", "t5"], lambda t: torch.empty(0, 15)),
    "filled": _set(["odd", "empty"], lambda t: torch.ones(1, 3)),
    "new key": _set(["tensors", "new"], lambda _: torch.ones(3)),
    "key's type": lambda state: state.__setitem__(True, state.pop(1)),
    "order": _order,
    "longer list": lambda state: state["groups"][0]["params"].append(3),
    "tuple": _set(["groups", 0, "betas"], list),
    "boolean": _set(["groups", 0, "flag"], lambda _: 1),
    "float": _set(["step"], lambda _: 3.0),
    "zero": _set(["groups", 0, "lr"], lambda _: 0.0),
    "nan": _set(["groups", 0, "lr"], lambda _: float("nan")),
    "long text": _set(["groups", 0, "name"], lambda _: "x" * 20_000),
    "plain dict": _set(["ordered"], dict),
    "bytes": _set(["step"], lambda _: b"3"),
}


@pytest.mark.filterwarnings("ignore:.*(nested tensors|quantize_per_tensor).*:UserWarning")
@pytest.mark.parametrize("name", CHANGES)
def test_flatten_cache_detects_changes(name):
    flattened(make())
    state = make()
    CHANGES[name](state)
    if name == "tie":
        state["tensors"]["t5"] = state["tensors"]["t6"]
    if name == "tied to another":
        state["tensors"]["tied"] = state["tensors"]["t4"]
    if name == "view":
        state["odd"]["scalar"] = state["tensors"]["t7"][0, 0]
    expected = anew(state)
    assert repr(flattened(state)) == repr(expected)
    assert repr(flattened(state)) == repr(expected)  # and once more, by what was remembered of this one


def test_flatten_cache_detects_memory_shared_with_another_key():
    both = [make(), make()]
    for state in (both, both):
        flat = Flattened()
        flat.add("a", state[0])
        flat.add("b", state[1])
    assert set(flat.ties.values()) == {"a/tensors/t3", "b/tensors/t3"}
    both[1]["tensors"]["t8"] = both[0]["tensors"]["t8"]
    flat = Flattened()
    flat.add("a", both[0])
    flat.add("b", both[1])
    assert flat.ties["b/tensors/t8"] == "a/tensors/t8"


def test_flatten_cache_detects_an_untied_tensor_of_another_key():
    other = {"x": torch.ones(20)}
    state = {f"t{i}": torch.full((10,), float(i)) for i in range(COUNT)} | {"w": other["x"]}
    for value in (1.0, 2.0, 3.0):
        Snapshot.take("memory://untied", {"a": StateDict(other), "b": StateDict(state)}, overwrite=True)
        assert Snapshot("memory://untied").read_object("0/b/w").eq(value).all()
        state["w"] = torch.full((20,), value + 1)


@pytest.mark.parametrize("kinds", [(list, tuple), (tuple, list), (dict, OrderedDict), (OrderedDict, dict)])
def test_flatten_cache_detects_the_outermost_container(kinds):
    tensors = [torch.ones(2) for _ in range(COUNT)]
    for kind in kinds:
        state = kind(tensors) if kind in (list, tuple) else kind((f"t{i}", each) for i, each in enumerate(tensors))
        assert repr(flattened(state)) == repr(anew(state))


def test_flatten_cache_accepts_low_addresses(monkeypatch):
    """As those of the heap are where the interpreter is not built to lie anywhere."""
    monkeypatch.setattr(flatten_cache, "LOW", 1 << 62)
    flattened(make())
    assert follows(make())


def test_flatten_cache_detects_freed_memory():
    state = make()
    flattened(state)
    state["tensors"]["t5"].untyped_storage().resize_(0)
    with pytest.raises(SnapshotError, match="t5: its memory was freed"):
        flattened(state)


def test_flatten_cache_detects_module_versions():
    model = nn.ModuleList(nn.BatchNorm1d(3) for _ in range(10))
    flattened(model.state_dict())
    assert follows(model.state_dict())
    changed = model.state_dict()
    changed._metadata["0"]["version"] = 77
    assert flattened(changed) == anew(changed)


def test_flatten_cache_remembers_changing_structures_more_rarely():
    remembered = []
    for i in range(20):
        flattened({f"t{i}-{k}": torch.ones(2) for k in range(COUNT)})
        remembered.append("s" in flatten_cache._templates.get().kept)
        flatten_cache._templates.get().kept.clear()
    assert [i for i, was in enumerate(remembered, 1) if was] == [1, 2, 4, 8, 16]


def test_flatten_cache_repeated_takes_of_a_training_are_exact(tmp_path):
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(20)))
    optimizer = torch.optim.Adam(model.parameters())
    app = {"model": model, "optim": optimizer, "progress": StateDict(step=0, loss=0.5)}
    for step in range(5):
        model(torch.ones(2, 8)).sum().backward()
        optimizer.step()
        app["progress"].update(step=step, loss=1 / (step + 1))
        if step == 3:
            optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))], "lr": 0.5})
        Snapshot.take(tmp_path / str(step), app)
        expected = copy.deepcopy({key: value.state_dict() for key, value in app.items()})
        for key, value in expected.items():
            back = Snapshot(tmp_path / str(step)).get_state_dict_for_key(key)
            assert repr(dict(back)) == repr(dict(value))
        assert "s" not in flatten_cache._templates.get().kept
        assert "model" in flatten_cache._templates.get().kept
