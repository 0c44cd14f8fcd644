"""Many values of one container: they are flattened together, and the result is that of one by one."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from snapshot import Snapshot, StateDict
from snapshot.errors import SnapshotError
from snapshot.state.flatten import Flattened
from snapshot.state.leaves import AT_ONCE, FEW

SHARED = torch.arange(64.0)


def _with_attribute():
    tensor = torch.ones(2)
    tensor.note = "kept"
    return tensor


KINDS = {
    "plain": lambda: torch.ones(3, 2),
    "bytes": lambda: torch.ones(5, dtype=torch.int8),
    "complex": lambda: torch.ones(2, dtype=torch.complex64),
    "number": lambda: torch.tensor(1.5),
    "empty": lambda: torch.empty(0, 4),
    "strided": lambda: torch.ones(3, 2).t(),
    "negative": lambda: torch.ones(2, dtype=torch.complex64).conj().imag,
    "conjugate": lambda: torch.ones(2, dtype=torch.complex64).conj(),
    "trained": lambda: torch.ones(2, requires_grad=True),
    "parameter": lambda: torch.nn.Parameter(torch.ones(2)),
    "dtype": lambda: torch.bfloat16,
    "device": lambda: torch.device("cpu"),
    "size": lambda: torch.Size([2, 300]),
    "sparse": lambda: torch.eye(2).to_sparse(),
    "attribute": _with_attribute,
    "tied": lambda: SHARED,
    "view": lambda: SHARED[:8],
    "part": lambda: SHARED[8:16],
    "int": lambda: 7,
    "bool": lambda: True,
    "huge": lambda: 1 << 20_000,
    "float": lambda: -0.0,
    "str": lambda: "\ud800 %",
    "long": lambda: "x" * 20_000,
    "bytearray": lambda: bytearray(b"ab"),
    "none": lambda: None,
    "list": lambda: [1, torch.zeros(1), "a"],
    "dict": lambda: {"a/b": 1, "c": torch.zeros(2)},
}
few_kinds = st.lists(st.sampled_from(sorted(KINDS)), min_size=1, max_size=2 * FEW)
runs = st.lists(st.tuples(st.sampled_from(sorted(KINDS)), st.integers(1, AT_ONCE)), min_size=1, max_size=4).map(
    lambda found: [kind for kind, times in found for _ in range(times)]
)


def _describe(flat):
    leaves = [
        (each.path, each.dtype, each.shape, each.nbytes, each.address, each.plain, each.extra, each.note)
        for each in flat.leaves
    ]
    blobs = [(each.path, each.data, each.serializer, each.obj_type) for each in flat.blobs]
    return list(flat.entries.items()), leaves, blobs, flat.ties, flat.lossy, flat.pickled


@given(st.one_of(few_kinds, runs), st.sampled_from(["k{}", "a/{}", "%{}", "ü{}"]))
def test_flattened_dict_is_that_of_its_values_one_by_one(kinds, name):
    value = {name.format(number): KINDS[kind]() for number, kind in enumerate(kinds)}
    together, apart = Flattened(), Flattened()
    together._add_value("s", value, 0)
    apart.entries["s"] = together.entries["s"]
    for path, child in zip(together.entries["s"].components(), value.values(), strict=True):
        apart._add_value(f"s/{path}", child, 1)
    assert _describe(together) == _describe(apart)


@given(st.one_of(few_kinds, runs))
def test_flattened_list_is_that_of_its_values_one_by_one(kinds):
    value = [KINDS[kind]() for kind in kinds]
    together, apart = Flattened(), Flattened()
    together._add_value("s", value, 0)
    apart.entries["s"] = together.entries["s"]
    for number, child in enumerate(value):
        apart._add_value(f"s/{number}", child, 1)
    assert _describe(together) == _describe(apart)


@settings(max_examples=10)
@given(runs)
def test_take_of_many_values_is_restored_exactly(kinds):
    value = {f"k{number}": KINDS[kind]() for number, kind in enumerate(kinds)}
    Snapshot.take("memory://many-values", {"s": StateDict(value)}, overwrite=True)
    held = StateDict()
    Snapshot("memory://many-values").restore({"s": held})
    assert list(held) == list(value)
    for name, saved in value.items():
        _expect_same(held[name], saved)


def _expect_same(made, saved):
    assert type(made) is type(saved)
    if isinstance(saved, torch.Tensor):
        assert (made.dtype, made.layout) == (saved.dtype, saved.layout)
        assert torch.equal(made.detach().to_dense(), saved.detach().to_dense())
    elif isinstance(saved, dict):
        assert list(made) == list(saved)
        for key in saved:
            _expect_same(made[key], saved[key])
    elif isinstance(saved, list):
        for one, other in zip(made, saved, strict=True):
            _expect_same(one, other)
    else:
        assert repr(made) == repr(saved) if not isinstance(saved, int) else made == saved


def test_flattened_freed_tensor_among_many_raises():
    value = {f"k{number}": torch.ones(2) for number in range(AT_ONCE)}
    value["k9"].untyped_storage().resize_(0)
    with pytest.raises(SnapshotError, match="s/k9"):
        Flattened().add("s", value)


def test_values_of_torch_are_restored_as_they_were(tmp_path):
    kinds = {"dtype": torch.float8_e4m3fn, "device": torch.device("meta"), "size": torch.Size([2, 300])}
    Snapshot.take(str(tmp_path / "s"), {"s": StateDict(**kinds, nested={"a": [*kinds.values()]})})
    live = StateDict(dict.fromkeys(kinds), nested=None)
    Snapshot(str(tmp_path / "s")).restore({"s": live})
    assert dict(live) == {**kinds, "nested": {"a": [*kinds.values()]}}
    assert type(live["size"]) is torch.Size


@pytest.mark.parametrize("kind", [list, tuple, lambda items: {"a": items[0]}], ids=["list", "tuple", "dict"])
def test_values_nested_almost_as_deep_as_permitted_are_stored(kind, tmp_path):
    """Flattening takes few frames of Python's stack for each level."""
    value = [torch.ones(1)]
    for _ in range(400):
        value = kind([value])
    Snapshot.take(str(tmp_path / "s"), {"s": StateDict(v=value)})
    found = Snapshot(str(tmp_path / "s")).read_object("s/v")
    for _ in range(400):
        (found,) = found.values() if isinstance(found, dict) else found
    assert torch.equal(found[0], torch.ones(1))
