"""Checkpoints of any formats become one: equal to the bit to the arithmetic of torch, in order of the sources."""

import os
import signal
import subprocess
import sys
import warnings

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import nn

import snapshot
from snapshot import CorruptSnapshotError, RestoreError, RNGState, Snapshot, SnapshotExistsError, StateDict, Target
from snapshot.errors import UnsupportedFormatError
from snapshot.events import add_handler, remove_handler
from snapshot.testing import faulty
from snapshot_merge import MergeOptions, merge
from snapshot_merge.merging import Mix
from tests.helpers.states import expect_equal
from tests.helpers.versions import ALONE

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.complex64, torch.float8_e4m3fn]
SIZES = {"a.weight": (300, 1100), "a.bias": (7,), "norm": (), "empty": (0, 3), "experts": (3, 130, 9)}


def weights(seed, dtype=torch.float32):
    torch.manual_seed(seed)
    drawn = torch.complex64 if dtype.is_complex else torch.float32
    return {name: torch.randn(size, dtype=drawn).to(dtype) for name, size in SIZES.items()}


def wide(tensors):
    dtypes = {each.dtype for each in tensors}
    if any(each.is_complex for each in dtypes):
        return torch.complex128 if torch.complex128 in dtypes else torch.complex64
    return torch.float64 if torch.float64 in dtypes else torch.float32


def averaged(states):
    return combined(states, lambda tensors: sum(tensors[1:], tensors[0]) / len(tensors))


def combined(states, combine):
    made = {}
    for name, first in states[0].items():
        tensors = [state[name] for state in states]
        made[name] = combine([each.to(wide(tensors)) for each in tensors]).to(first.dtype)
    return made


def write(state, path, form):
    """Write a state in one of the formats, differently split in each."""
    if form == "safetensors":
        save_file(state, f"{path}.safetensors")
        return f"{path}.safetensors"
    if form == "several":
        save_file(state, f"{path}.all.safetensors")
        Snapshot(f"{path}.all.safetensors").convert(Target(path, "safetensors", shard_bytes=200_000))
    elif form == "torch":
        torch.save(state, f"{path}.pt")
        return f"{path}.pt"
    elif form == "dcp":
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # no process group
            dcp.save(dict(state), checkpoint_id=path, **ALONE)
    else:
        Snapshot.take(path, {"model": StateDict(state)})
    return str(path)


FORMS = ["safetensors", "several", "torch", "dcp", "snapshot"]
TARGETS = {"snapshot": "out", "safetensors": "out.safetensors", "torch": "out.pt", "dcp": "out-dcp"}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("to", TARGETS)
def test_merge_average_equals_torch(tmp_path, dtype, to):
    states = [weights(seed, dtype) for seed in range(3)]
    forms = ["snapshot", "torch", "dcp"] if dtype.is_complex else ["snapshot", "several", "torch"]
    sources = [write(state, tmp_path / f"{i}", form) for i, (state, form) in enumerate(zip(states, forms, strict=True))]
    if dtype.is_complex and to == "safetensors":
        with pytest.raises(UnsupportedFormatError):
            merge(sources, Target(tmp_path / TARGETS[to], to))
        return
    report = merge(sources, Target(tmp_path / TARGETS[to], to))
    assert report.tensors == len(SIZES)
    expect_equal(snapshot.load(tmp_path / TARGETS[to]), averaged(states), ordered=False)
    assert Snapshot(tmp_path / TARGETS[to]).verify()


def test_merge_result_can_be_compressed(tmp_path):
    states = [{"a": torch.randn(1 << 18).bfloat16()} for _ in range(2)]
    sources = [
        write(state, tmp_path / str(i), form) for i, (state, form) in enumerate(zip(states, FORMS, strict=False))
    ]
    merge(sources, tmp_path / "plain")
    merge([tmp_path / "plain", sources[1]], Target(tmp_path / "packed", compression="zstd"), ema=0.0)
    assert Snapshot(tmp_path / "packed").metadata.nbytes < 0.8 * Snapshot(tmp_path / "plain").metadata.nbytes
    expect_equal(snapshot.load(tmp_path / "packed"), states[1], ordered=False)
    merge([tmp_path / "packed", sources[0]], tmp_path / "again", ema=1.0)
    expect_equal(snapshot.load(tmp_path / "again"), states[1], ordered=False)
    with pytest.raises(ValueError, match="compression must be None for to='torch'"):
        merge(sources, Target(tmp_path / "no.pt", "torch", compression="zstd"))


def test_merge_weights_are_used_in_order(tmp_path, caplog):
    states = [weights(seed) for seed in range(3)]
    sources = [write(state, tmp_path / f"{i}", "safetensors") for i, state in enumerate(states)]

    def weighted(factors):
        def combine(tensors):
            total = tensors[0] * factors[0]
            for tensor, factor in zip(tensors[1:], factors[1:], strict=True):
                total = total + tensor * factor
            return total

        return combined(states, combine)

    merge(sources, tmp_path / "right", weights=[0.5, 0.3, 0.2])
    expect_equal(snapshot.load(tmp_path / "right"), weighted([0.5, 0.3, 0.2]), ordered=False)
    assert "add up" not in caplog.text
    merge(sources, tmp_path / "vector", weights=[1, 2, -1.5])
    expect_equal(snapshot.load(tmp_path / "vector"), weighted([1, 2, -1.5]), ordered=False)
    assert "the weights add up to 1.5, not 1" in caplog.text


def test_merge_ema_begins_with_the_first_source(tmp_path):
    states = [weights(seed, torch.bfloat16) for seed in range(4)]
    sources = [write(state, tmp_path / f"{i}", "several") for i, state in enumerate(states)]

    def combine(tensors):
        mean = tensors[0]
        for each in tensors[1:]:
            mean = mean * 0.9 + each * (1 - 0.9)
        return mean

    merge(sources, tmp_path / "ema", ema=0.9)
    expect_equal(snapshot.load(tmp_path / "ema"), combined(states, combine), ordered=False)


def test_merge_of_different_dtypes_and_a_dtype_of_the_result(tmp_path):
    states = [weights(0, torch.bfloat16), weights(1, torch.float32), weights(2, torch.float64)]
    sources = [write(state, tmp_path / f"{i}", "snapshot") for i, state in enumerate(states)]
    merge(sources, tmp_path / "out")
    expect_equal(snapshot.load(tmp_path / "out"), averaged(states), ordered=False)
    merge(sources, tmp_path / "half", options=MergeOptions(dtype=torch.float16))
    expected = combined(states, lambda tensors: sum(tensors[1:], tensors[0]) / 3)
    precise = {n: (sum(s[n].double() for s in states) / 3).half() for n in expected}
    expect_equal(snapshot.load(tmp_path / "half"), precise, ordered=False)


def test_merge_of_nan_and_infinity_follows_arithmetic(tmp_path):
    special = torch.tensor([float("nan"), float("inf"), float("inf"), 3e38, -0.0])
    other = torch.tensor([1.0, float("-inf"), 1.0, 3e38, -0.0])
    sources = [write({"w": each}, tmp_path / f"{i}", "safetensors") for i, each in enumerate((special, other))]
    merge(sources, tmp_path / "out")
    expected = (special + other) / 2
    assert torch.equal(snapshot.load(tmp_path / "out")["w"].nan_to_num(7), expected.nan_to_num(7))


def test_merge_others_first_keeps_other_values_of_the_first_run(tmp_path):
    runs = []
    for seed in range(2):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(30, 40), nn.Linear(40, 30))
        model[1].weight = nn.Parameter(model[0].weight.T.contiguous())
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.randn(3, 30)).sum().backward()
        optimizer.step()
        app = {"model": model, "optimizer": optimizer, "rng": RNGState(), "loop": StateDict(step=100 + seed)}
        Snapshot.take(tmp_path / f"{seed}", app)
        runs.append((model, optimizer))
    with pytest.raises(RestoreError, match="rng/torch: differs"):
        merge([tmp_path / "0", tmp_path / "1"], tmp_path / "out")
    merge([tmp_path / "0", tmp_path / "1"], tmp_path / "out", others="first")
    model = nn.Sequential(nn.Linear(30, 40), nn.Linear(40, 30))
    optimizer, loop = torch.optim.AdamW(model.parameters()), StateDict(step=0)
    Snapshot(tmp_path / "out").restore({"model": model, "optimizer": optimizer, "rng": RNGState(), "loop": loop})
    assert loop["step"] == 100
    for name, value in model.state_dict().items():
        assert torch.equal(value, (runs[0][0].state_dict()[name] + runs[1][0].state_dict()[name]) / 2)
    for number, state in optimizer.state_dict()["state"].items():
        for name in ("exp_avg", "exp_avg_sq"):
            pair = [run[1].state_dict()["state"][number][name] for run in runs]
            assert torch.equal(state[name], (pair[0] + pair[1]) / 2)


def test_merge_matches_names_across_formats(tmp_path):
    states = [weights(seed) for seed in range(2)]
    Snapshot.take(tmp_path / "0", {"model": StateDict({"a": {"weight": states[0]["a.weight"]}})})
    save_file({"a.weight": states[1]["a.weight"]}, tmp_path / "1.safetensors")
    save_file({"model.a.weight": states[1]["a.weight"]}, tmp_path / "2.safetensors")
    expected = {"a.weight": (states[0]["a.weight"] + states[1]["a.weight"]) / 2}
    for other in ("1.safetensors", "2.safetensors"):
        merge([tmp_path / "0", tmp_path / other], Target(tmp_path / "out", overwrite=True))
        expect_equal(snapshot.load(tmp_path / "out"), expected, ordered=False)
    merge([tmp_path / "1.safetensors", tmp_path / "0"], Target(tmp_path / "back.safetensors", "safetensors"))
    expect_equal(load_file(tmp_path / "back.safetensors"), expected, ordered=False)


def test_merge_select_ignores_other_values(tmp_path):
    states = [weights(seed) for seed in range(2)]
    Snapshot.take(tmp_path / "0", {"model": StateDict(states[0]), "more": StateDict(x=torch.ones(3))})
    Snapshot.take(tmp_path / "1", {"model": StateDict(states[1]), "less": StateDict(y=torch.ones(3))})
    with pytest.raises(RestoreError) as raised:
        merge([tmp_path / "0", tmp_path / "1"], tmp_path / "out")
    assert [line.split(":")[0] for line in raised.value.mismatches] == ["more/x", "less/y"]
    merge([tmp_path / "0", tmp_path / "1"], tmp_path / "out", select=["model/**"])
    expect_equal(snapshot.load(tmp_path / "out"), averaged(states), ordered=False)


def test_merge_raises_all_mismatches_and_writes_nothing(tmp_path):
    first = {"same": torch.ones(3), "shape": torch.ones(3), "gone": torch.ones(3), "kind": torch.ones(3)}
    second = {
        "same": torch.ones(3),
        "shape": torch.ones(4),
        "kind": torch.ones(3, dtype=torch.int64),
        "new": torch.ones(1),
    }
    sources = [write(each, tmp_path / f"{i}", "safetensors") for i, each in enumerate((first, second))]
    with pytest.raises(RestoreError) as raised:
        merge(sources, tmp_path / "out")
    assert sorted(line.split(":")[0] for line in raised.value.mismatches) == ["gone", "kind", "new", "shape"]
    assert not (tmp_path / "out").exists()


def test_merge_integers_must_be_equal_or_come_from_the_first(tmp_path):
    sources = []
    for number in range(3):
        state = {"w": torch.full((5,), float(number)), "count": torch.tensor(number), "mask": torch.tensor([True])}
        sources.append(write(state, tmp_path / f"{number}", "snapshot"))
    with pytest.raises(RestoreError, match="others='first'") as raised:
        merge(sources, tmp_path / "out")
    assert len(raised.value.mismatches) == 1
    assert "count" in raised.value.mismatches[0]
    assert not (tmp_path / "out").exists()
    report = merge(sources, tmp_path / "out", others="first")
    assert [line.split(":")[0] for line in report.changed] == ["model/count"]
    got = snapshot.load(tmp_path / "out")
    assert got["count"] == 0
    assert got["w"].eq(1).all()


def test_merge_keeps_tied_weights_tied_if_equal_in_all_sources(tmp_path):
    tied = nn.Parameter(torch.arange(6.0))
    Snapshot.take(tmp_path / "0", {"model": StateDict(a=tied, b=tied)})
    save_file({"a": torch.ones(6), "b": torch.ones(6)}, tmp_path / "1.safetensors")
    save_file({"a": torch.ones(6), "b": torch.zeros(6)}, tmp_path / "2.safetensors")
    merge([tmp_path / "0", tmp_path / "1.safetensors"], tmp_path / "out")
    got = snapshot.load(tmp_path / "out")
    assert got["a"] is got["b"]
    assert torch.equal(got["a"], (torch.arange(6.0) + 1) / 2)
    with pytest.raises(RestoreError, match="one tensor in the first source"):
        merge([tmp_path / "0", tmp_path / "2.safetensors"], tmp_path / "no", others="first")
    assert not (tmp_path / "no").exists()


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")  # torch 2.12 warns even of checked ones
def test_merge_sparse_tensors_must_be_equal(tmp_path):
    for number in range(2):
        sparse = torch.sparse_coo_tensor([[0, 2]], [1.0, 2.0 + number], (4,), check_invariants=True)
        Snapshot.take(tmp_path / f"{number}", {"model": StateDict(w=torch.ones(2), s=sparse)})
    with pytest.raises(RestoreError, match="cannot be averaged"):
        merge([tmp_path / "0", tmp_path / "1"], tmp_path / "out")
    merge([tmp_path / "0", tmp_path / "0"], tmp_path / "out")
    assert torch.equal(Snapshot(tmp_path / "out").read_object("model/s").to_dense(), torch.tensor([1.0, 0, 2.0, 0]))


def test_merge_with_a_damaged_source_keeps_an_existing_target(tmp_path):
    states = [weights(seed) for seed in range(3)]
    sources = [write(state, tmp_path / f"{i}", "snapshot") for i, state in enumerate(states)]
    targets = {"snapshot": tmp_path / "out", "safetensors": tmp_path / "out.safetensors"}
    for to, target in targets.items():
        merge(sources[:2], Target(target, to))
    (file,) = (tmp_path / "2" / "data").glob("*.safetensors")
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    os.chmod(file, 0o644)
    file.write_bytes(content)
    for to, target in targets.items():
        with pytest.raises(CorruptSnapshotError, match="digest"):
            merge(sources, Target(target, to, overwrite=True))
        expect_equal(snapshot.load(target), averaged(states[:2]), ordered=False)
        assert not [name for name in os.listdir(tmp_path) if name.startswith(".convert-")]
        merge(sources, Target(target, to, overwrite=True), options=MergeOptions(verify=False))
    with pytest.raises(SnapshotExistsError):
        merge(sources[:2], tmp_path / "out")


_KILLED = """
import os, signal, sys
from snapshot import Target
from snapshot_merge import MergeOptions, merge
from snapshot_merge.merging import Mix
apply, calls = Mix.apply, []
def dying(self, *arguments):
    calls.append(1)
    if len(calls) == int(sys.argv[1]):
        os.kill(os.getpid(), signal.SIGKILL)
    apply(self, *arguments)
Mix.apply = dying
merge(sys.argv[4:], Target(sys.argv[2], sys.argv[3], overwrite=True), options=MergeOptions(memory_budget_bytes=4 << 20))
"""


@pytest.mark.parametrize(("to", "name"), [("snapshot", "out"), ("safetensors", "out.safetensors"), ("torch", "out.pt")])
def test_merge_that_is_killed_keeps_an_existing_target(tmp_path, to, name):
    states = [weights(seed) for seed in range(3)]
    sources = [write(state, tmp_path / f"{i}", "safetensors") for i, state in enumerate(states)]
    merge(sources[:2], Target(tmp_path / name, to))
    command = [sys.executable, "-c", _KILLED, "2", str(tmp_path / name), to, *sources]
    assert subprocess.run(command, check=False).returncode == -signal.SIGKILL
    expect_equal(snapshot.load(tmp_path / name), averaged(states[:2]), ordered=False)
    merge(sources, Target(tmp_path / name, to, overwrite=True))
    expect_equal(snapshot.load(tmp_path / name), averaged(states), ordered=False)


def test_merge_with_storage_faults_and_sources_in_memory(tmp_path):
    states = [weights(seed) for seed in range(2)]
    Snapshot.take("memory://merge/0", {"model": StateDict(states[0])})
    second = write(states[1], tmp_path / "1", "several")
    merge(["memory://merge/0", Snapshot(second, storage_options={})], "memory://merge/out")
    expect_equal(snapshot.load("memory://merge/out"), averaged(states), ordered=False)
    with faulty(on="read_into", nth=3, error=OSError(5, "bad disk")), pytest.raises(snapshot.SnapshotError):
        merge([f"faulty+file://{second}", second], tmp_path / "out")
    assert not (tmp_path / "out" / ".snapshot_metadata").exists()


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"weights": [1.0]}, ValueError, "weights must be 2 finite numbers"),
        ({"weights": [1.0, float("nan")]}, ValueError, "weights must be 2 finite numbers"),
        ({"ema": 1.5}, ValueError, "ema must be a decay between 0 and 1"),
        ({"ema": float("nan")}, ValueError, "ema must be a decay between 0 and 1"),
        ({"ema": 0.5, "weights": [1, 1]}, ValueError, "weights and ema exclude each other"),
        ({"others": "last"}, ValueError, "others must be one of 'equal', 'first', got 'last'"),
        ({"options": MergeOptions(dtype=torch.int8)}, TypeError, "dtype must be a floating-point dtype"),
        ({"select": ["none/**"]}, RestoreError, "matches nothing"),
        ({"options": {"dtype": torch.float16}}, TypeError, "options must be MergeOptions"),
        ({"dtype": torch.float16}, TypeError, r"pass options=MergeOptions\(dtype=...\)"),
        ({"options": MergeOptions(memory_budget_bytes=0)}, ValueError, "memory_budget_bytes"),
    ],
)
def test_merge_refuses_invalid_arguments(tmp_path, arguments, error, text):
    sources = [write({"w": torch.ones(1)}, tmp_path / f"{i}", "safetensors") for i in range(2)]
    with pytest.raises(error, match=text):
        merge(sources, tmp_path / "out", **arguments)
    assert not (tmp_path / "out").exists()
    for wrong in ([sources[0]], sources[0]):
        with pytest.raises(ValueError, match="at least 2 checkpoints"):
            merge(wrong, tmp_path / "out")
    with pytest.raises(ValueError, match="the destination is the source"):
        merge(sources, Target(sources[1], "safetensors"))


def test_merge_event_and_progress(tmp_path):
    sources = [write(weights(seed), tmp_path / f"{seed}", "snapshot") for seed in range(2)]
    events, seen = [], []
    add_handler(events.append)
    try:
        merge(sources, tmp_path / "out", options=MergeOptions(progress=seen.append))
    finally:
        remove_handler(events.append)
    assert [(each.name, each.verb) for each in events if each.name == "merged"] == [("merged", "merge")]
    assert seen[-1].done == seen[-1].total > 0


@settings(max_examples=25)
@given(st.data())
def test_merge_of_any_formats_dtypes_and_memory_budget_bytes(tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("merged")
    count = data.draw(st.integers(2, 4))
    dtypes = data.draw(st.lists(st.sampled_from(DTYPES[:4]), min_size=count, max_size=count))
    states = [weights(seed, dtype) for seed, dtype in enumerate(dtypes)]
    sources = [
        write(state, folder / f"{number}", data.draw(st.sampled_from(FORMS))) for number, state in enumerate(states)
    ]
    to = data.draw(st.sampled_from(sorted(TARGETS)))
    target = folder / TARGETS[to]
    budget = data.draw(st.sampled_from([None, 1 << 20, 3 << 20, 64 << 20]))
    merge(
        sources,
        Target(target, to, shard_bytes=data.draw(st.integers(1000, 10**6))),
        options=MergeOptions(memory_budget_bytes=budget),
    )
    expect_equal(snapshot.load(target), averaged(states), ordered=False)


@given(
    st.lists(st.floats(-4, 4), min_size=2, max_size=5),
    st.integers(0, 100_000),
    st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_merge_arithmetic_does_not_depend_on_the_split(factors, count, dtype):
    torch.manual_seed(count)
    sources = [torch.randn(count).to(dtype) for _ in factors]
    for mix in (Mix(tuple(factors)), Mix.average(len(factors)), Mix.moving_average(0.25, len(factors))):
        whole, parts = torch.empty(count, dtype=dtype), torch.empty(count, dtype=dtype)
        mix.apply(sources, torch.float32, whole)
        cut = count // 3
        for low, high in ((0, cut), (cut, count)):
            mix.apply([each[low:high] for each in sources], torch.float32, parts[low:high])
        assert torch.equal(whole, parts)


def test_merge_refuses_ambiguous_names(tmp_path):
    whole = Snapshot.take(
        str(tmp_path / "a"), {"model": StateDict(w=torch.zeros(4)), "ema": StateDict(w=torch.full((4,), 10.0))}
    )
    save_file({"w": torch.full((4,), 4.0)}, tmp_path / "b.safetensors")
    sources = [whole.path, str(tmp_path / "b.safetensors")]
    with pytest.raises(RestoreError, match=r"/w: w in .* is matched with (ema|model)/w already"):
        merge(sources, tmp_path / "out")
    with pytest.raises(RestoreError, match="w: may be ema/w or model/w in"):
        merge(sources[::-1], tmp_path / "out", select=["**"])
    assert not (tmp_path / "out").exists()


def test_merge_refuses_a_destination_inside_a_source(tmp_path):
    for name in ("a", "b"):
        Snapshot.take(str(tmp_path / name), {"model": StateDict(w=torch.zeros(4))})
    sources = [str(tmp_path / name) for name in ("a", "b")]
    with pytest.raises(ValueError, match="the destination is inside the source"):
        merge(sources, Target(tmp_path / "a/x.safetensors", "safetensors"))


@pytest.mark.parametrize("given", [{"weights": ["a", "b"]}, {"weights": 0.5}, {"weights": [None, 1]}, {"ema": "x"}])
def test_merge_weights_and_ema_must_be_numbers(given, tmp_path):
    with pytest.raises(ValueError, match=r"weights must be 2 finite|ema must be a decay"):
        merge([tmp_path / "a", tmp_path / "b"], tmp_path / "c", **given)
    for sources in (None, 3, [tmp_path, 3]):
        with pytest.raises(ValueError, match="sources must be"):
            merge(sources, tmp_path / "c")
