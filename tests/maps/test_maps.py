"""Maps at the public surface: restore, read and convert, from every format, in parts, on several ranks."""

import json
import os
import subprocess
import sys
import tracemalloc

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import snapshot
from snapshot import (
    CorruptSnapshotError,
    ModelState,
    RestoreError,
    RestoreOptions,
    Snapshot,
    StateDict,
    Target,
    TensorMap,
)
from snapshot.cli import main
from snapshot.maps.recipe import Spec
from tests.helpers.arguments import for_take
from tests.helpers.rank_pool import Pool

HEADS, GROUPS, WIDTH, COLUMNS, LAYERS = 8, 2, 16, 96, 2
RULES = [
    {
        "names": "layers.{i}.qkv.weight -> m.{i}.q, m.{i}.k, m.{i}.v",
        "axes": "(g (q + 1 + 1) d) c -> (g q d) c, (g d) c, (g d) c",
        "sizes": {"g": GROUPS, "d": WIDTH},
    },
    {"names": "layers.{i}.wq.weight -> m.{i}.turned", "axes": "(h d 2) c -> (h 2 d) c", "sizes": {"h": HEADS}},
    {"names": "layers.{i}.fc.weight -> m.{i}.conv", "axes": "a b -> b a"},
    {"names": "layers.{i}.e.{e}.w1, layers.{i}.e.{e}.w3 -> m.{i}.w13", "axes": "f c, f c -> e (f + f) c"},
    {"names": "layers.{i}.norm -> m.{i}.norm", "dtype": "bfloat16"},
    "emb -> embed, head",
    {"drop": "freqs"},
]
MAP = TensorMap(RULES)


def sources():
    torch.manual_seed(0)
    made = {"emb": torch.randn(50, COLUMNS), "freqs": torch.randn(3)}
    for i in range(LAYERS):
        made[f"layers.{i}.qkv.weight"] = torch.randn(GROUPS * (HEADS // GROUPS + 2) * WIDTH, COLUMNS)
        made[f"layers.{i}.wq.weight"] = torch.randn(HEADS * WIDTH, COLUMNS)
        made[f"layers.{i}.fc.weight"] = torch.randn(300, 700)
        made[f"layers.{i}.norm"] = torch.randn(COLUMNS)
        for expert in range(3):
            made[f"layers.{i}.e.{expert}.w1"] = torch.randn(40, COLUMNS)
            made[f"layers.{i}.e.{expert}.w3"] = torch.randn(40, COLUMNS)
    return made


def targets(source):
    """What the map makes, written with torch."""
    made = {"embed": source["emb"], "head": source["emb"]}
    for i in range(LAYERS):
        fused = source[f"layers.{i}.qkv.weight"].view(GROUPS, HEADS // GROUPS + 2, WIDTH, COLUMNS)
        made[f"m.{i}.q"] = fused[:, :-2].reshape(-1, COLUMNS)
        made[f"m.{i}.k"] = fused[:, -2].reshape(-1, COLUMNS)
        made[f"m.{i}.v"] = fused[:, -1].reshape(-1, COLUMNS)
        heads = source[f"layers.{i}.wq.weight"].view(HEADS, WIDTH // 2, 2, COLUMNS)
        made[f"m.{i}.turned"] = heads.transpose(1, 2).reshape(-1, COLUMNS)
        made[f"m.{i}.conv"] = source[f"layers.{i}.fc.weight"].T.contiguous()
        experts = [torch.cat([source[f"layers.{i}.e.{n}.w1"], source[f"layers.{i}.e.{n}.w3"]]) for n in range(3)]
        made[f"m.{i}.w13"] = torch.stack(experts)
        made[f"m.{i}.norm"] = source[f"layers.{i}.norm"].bfloat16()
    return made


def assert_same(got, want):
    assert got.keys() == want.keys()
    for name, each in want.items():
        assert got[name].dtype == each.dtype, name
        assert torch.equal(got[name], each), name


def taken(folder, **options):
    app = {"model": StateDict(**sources()), "optim": StateDict(moment=torch.ones(3), step=4)}
    return Snapshot.take(str(folder), app, **for_take(**options))


@pytest.fixture(params=["snapshot", "safetensors", "torch", "dcp"])
def checkpoint(request, tmp_path):
    """The sources in a checkpoint of each format."""
    snapshot = taken(tmp_path / "taken")
    if request.param == "snapshot":
        return snapshot
    place = tmp_path / ("made.pt" if request.param == "torch" else "made")
    only = {"select": ["model/**"]} if request.param == "safetensors" else {}
    snapshot.convert(Target(str(place), request.param), **only)
    return Snapshot(str(place))


def test_tensor_map_reads_every_format(checkpoint):
    want = targets(sources())
    live = {name: torch.zeros_like(each) for name, each in want.items()}
    live["head"] = live["embed"]
    held = dict(live)
    app = {"model": StateDict(**live)}
    checkpoint.restore(app, options=RestoreOptions(map=MAP))
    assert_same(dict(app["model"]), want)
    assert all(app["model"][name] is held[name] for name in held)  # in place
    paths = [path for path in checkpoint.get_manifest() if path.endswith("qkv.weight")]
    prefix = "" if paths[0].count("/") == 1 else "model/"
    for name, each in want.items():
        assert torch.equal(checkpoint.read_object(f"{prefix}{name}", map=MAP), each)
    part = checkpoint.read_object(f"{prefix}m.1.turned", map=MAP, box=[slice(5, 77), slice(3, 9)])
    assert torch.equal(part, want["m.1.turned"][5:77, 3:9])


def test_tensor_map_get_state_dict_for_key_returns_new_tensors(tmp_path):
    got = taken(tmp_path / "taken").get_state_dict_for_key("model", map=MAP)
    assert_same(got, targets(sources()))
    assert got["embed"] is got["head"]


@pytest.mark.parametrize("to", ["safetensors", "torch", "dcp", "snapshot"])
@pytest.mark.parametrize("budget", [1 << 20, None])
def test_tensor_map_convert_writes_every_format(to, budget, tmp_path):
    place = str(tmp_path / ("made.pt" if to == "torch" else "made"))
    report = taken(tmp_path / "taken").convert(
        Target(place, to, shard_bytes=1 << 20), map=MAP, select=["model/**"], memory_budget_bytes=budget
    )
    want = targets(sources())
    assert report.tensors == len(want) - (to == "torch")  # one object under two names
    made = Snapshot(place)
    got = {
        path.rpartition("/")[2]: made.read_object(path) for path, entry in made.get_manifest().items() if entry.nbytes
    }
    assert_same(got, want)


def test_tensor_map_reversed_restores_what_was_not_dropped_or_rounded(tmp_path):
    taken(tmp_path / "taken").convert(str(tmp_path / "there"), map=MAP)
    Snapshot(str(tmp_path / "there")).convert(str(tmp_path / "back"), map=MAP.reversed())
    got = Snapshot(str(tmp_path / "back")).get_state_dict_for_key("model")
    want = sources()
    del want["freqs"]
    want = {name: each.bfloat16() if "norm" in name else each for name, each in want.items()}
    assert_same(got, want)
    assert Snapshot(str(tmp_path / "back")).read_object("optim/step") == 4


def test_tensor_map_names_of_one_tensor_must_have_equal_values(tmp_path):
    value = torch.randn(4)
    back = TensorMap(["emb -> a, b"]).reversed()
    same = Snapshot.take(str(tmp_path / "same"), {"model": StateDict(a=value, b=value.clone())})
    assert torch.equal(same.get_state_dict_for_key("model", map=back)["emb"], value)  # equal digests
    other = Snapshot.take(str(tmp_path / "other"), {"model": StateDict(a=value, b=value + 1)})
    with pytest.raises(RestoreError, match=r"b must equal a, since only one of them is used"):
        other.get_state_dict_for_key("model", map=back)
    for taken_there, fits in ((same, True), (other, False)):  # no digests: the values are compared
        taken_there.convert(Target(str(tmp_path / f"dcp-{fits}"), "dcp"))
        foreign = Snapshot(str(tmp_path / f"dcp-{fits}"))
        if fits:
            assert torch.equal(foreign.get_state_dict_for_key("model", map=back)["emb"], value)
        else:
            with pytest.raises(RestoreError, match="b must equal a"):
                foreign.get_state_dict_for_key("model", map=back)
    one = Snapshot.take(str(tmp_path / "one"), {"model": StateDict(b=value)})
    assert torch.equal(one.get_state_dict_for_key("model", map=back)["emb"], value)


def test_tensor_map_that_does_not_fit_is_refused_with_all_reasons(tmp_path):
    source = sources()
    del source["layers.0.e.1.w3"]
    source["layers.1.qkv.weight"] = torch.randn(7, 3)
    source["more"] = torch.randn(1)
    snapshot = Snapshot.take(str(tmp_path / "taken"), {"model": StateDict(**source)})
    live = {name: torch.zeros_like(each) for name, each in targets(sources()).items()}
    with pytest.raises(RestoreError) as caught:
        snapshot.restore({"model": StateDict(**live)}, options=RestoreOptions(map=MAP))
    assert sorted(caught.value.mismatches, reverse=True) == [
        "more: no rule names it",
        "layers.{i}.qkv.weight -> m.{i}.q, m.{i}.k, m.{i}.v: layers.1.qkv.weight: shape [7, 3] does not fit "
        "'(g (q + 1 + 1) d) c -> (g q d) c, (g d) c, (g d) c': no size of q makes an axis of 7, with g=2, d=16",
        "layers.{i}.e.{e}.w1, layers.{i}.e.{e}.w3 -> m.{i}.w13: layers.0.e.1.w3 is missing",
    ]
    assert all(not each.any() for each in live.values())
    with pytest.raises(RestoreError, match="no rule of the tensor map"):
        snapshot.convert(str(tmp_path / "made"), map=TensorMap(["nothing -> x"]))
    assert not (tmp_path / "made").exists()
    with pytest.raises(TypeError, match="map must be a TensorMap, got dict"):
        snapshot.convert(str(tmp_path / "made"), map={"a": "b"})


@pytest.mark.parametrize(("others", "kept"), [("keep", True), ("drop", False)])
def test_tensor_map_others_keeps_or_drops_tensors_without_a_rule(others, kept, tmp_path):
    snapshot = Snapshot.take(str(tmp_path / "taken"), {"model": StateDict(a=torch.ones(2), b=torch.zeros(2), c=5)})
    got = snapshot.get_state_dict_for_key("model", map=TensorMap(["a -> x"], others=others))
    assert got.keys() == ({"x", "b", "c"} if kept else {"x", "c"})


def test_tensor_map_flattens_nested_states(tmp_path):
    state = {"layers": {"0": {"w": torch.ones(2)}, "1": {"w": torch.zeros(2)}}, "step": 3}
    snapshot = Snapshot.take(str(tmp_path / "taken"), {"model": StateDict(**state)})
    got = snapshot.get_state_dict_for_key("model", map=TensorMap(["layers.{i}.w -> h.{i}"]))
    assert got.keys() == {"h.0", "h.1", "step"}
    lists = Snapshot.take(str(tmp_path / "lists"), {"model": StateDict(all=[torch.ones(2), 1])})
    with pytest.raises(RestoreError, match="elements of a sequence"):
        lists.get_state_dict_for_key("model", map=TensorMap(["all.0 -> x"]))


def test_tensor_map_finds_a_damaged_source(tmp_path):
    snapshot = taken(tmp_path / "taken")
    for path in (tmp_path / "taken/data").iterdir():
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
    with pytest.raises(CorruptSnapshotError):
        snapshot.convert(Target(str(tmp_path / "made"), "safetensors"), map=MAP)
    assert not list(tmp_path.glob("made/*.safetensors"))


def test_tensor_map_cast_keeps_the_dtype_of_a_live_tensor(tmp_path):
    snapshot = Snapshot.take(str(tmp_path / "taken"), {"model": StateDict(a=torch.randn(4))})
    live = StateDict(b=torch.zeros(4, dtype=torch.float64))
    tensor_map = TensorMap([{"names": "a -> b", "dtype": "bfloat16"}])
    snapshot.restore({"model": live}, options=RestoreOptions(map=tensor_map))
    assert live["b"].dtype == torch.bfloat16  # a plain value is replaced


@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_tensor_map_parts_of_any_size_are_exact(data, tmp_path_factory):
    """Chunks, budgets and boxes at random: the bytes are those of one big assignment."""
    folder = tmp_path_factory.mktemp("parts")
    torch.manual_seed(0)
    rows, columns = data.draw(st.integers(1, 40)) * 4, data.draw(st.integers(1, 40)) * 2
    value = torch.randn(rows * 20, columns * 10)
    snapshot = Snapshot.take(str(folder / "taken"), {"model": StateDict(w=value)})
    rule = {"names": "w -> a, b", "axes": "(g (p + q) d) (c 2) -> (p g d) (2 c), (d q) g (c 2)"}
    sizes = {"g": 2, "p": 1, "q": 1}
    tensor_map = TensorMap([rule], sizes=sizes)
    whole = value.view(2, 2, -1, columns * 5, 2)
    want_a = whole[:, 0].permute(0, 1, 3, 2).reshape(rows * 10, columns * 10)
    want_b = whole[:, 1].permute(1, 0, 2, 3).reshape(-1, 2, columns * 10)
    begin = data.draw(st.integers(0, want_a.shape[0]))
    end = data.draw(st.integers(begin, want_a.shape[0]))
    got = snapshot.read_object("model/a", map=tensor_map, box=[slice(begin, end)])
    assert torch.equal(got, want_a[begin:end])
    budget = data.draw(st.sampled_from([1 << 20, 4 << 20, None]))
    snapshot.convert(Target(str(folder / "made"), "safetensors"), map=tensor_map, memory_budget_bytes=budget)
    made = Snapshot(str(folder / "made"))
    assert torch.equal(made.read_object("a"), want_a)
    assert torch.equal(made.read_object("b"), want_b)


def test_tensor_map_in_load(checkpoint):
    keys = {path.split("/")[1] for path in checkpoint.get_manifest()}
    got = snapshot.load(checkpoint.path, map=MAP, select=["model/**"] if "model" in keys else ())
    assert_same({name.removeprefix("model."): each for name, each in got.items()}, targets(sources()))


# Ranks


@pytest.fixture(scope="module")
def two():
    with Pool(2) as pool:
        yield pool


def save_sharded(folder):
    mesh = init_device_mesh("cpu", (2,))
    state = {}
    for number, (name, value) in enumerate(sources().items()):
        dimension = number % value.ndim
        even = value.shape[dimension] % 2 == 0
        state[name] = distribute_tensor(value, mesh, [Shard(dimension) if even else Replicate()])
    Snapshot.take(folder, {"model": StateDict(**state), "own": StateDict(rank=dist.get_rank())})


def restore_sharded(folder):
    mesh = init_device_mesh("cpu", (2,))
    want = targets(sources())
    live = {}
    for number, (name, value) in enumerate(want.items()):
        live[name] = distribute_tensor(torch.zeros_like(value), mesh, [Shard(number % value.ndim)])
    app = {"model": StateDict(**live), "own": StateDict(rank=-1)}
    Snapshot(folder).restore(app, options=RestoreOptions(map=MAP))
    assert app["own"]["rank"] == dist.get_rank()
    for name, value in want.items():
        assert isinstance(app["model"][name], DTensor)
        assert torch.equal(app["model"][name].full_tensor(), value), name


def save_stages(folder):
    rank = dist.get_rank()
    own = {name: each for name, each in sources().items() if name.startswith(f"layers.{rank}.")}
    if rank == 0:
        own |= {name: each for name, each in sources().items() if "layers" not in name}
    Snapshot.take(folder, {"model": StateDict(**own)})


def test_tensor_map_reads_shards_into_other_shards(two, tmp_path):
    folder = str(tmp_path / "sharded")
    two.run(save_sharded, folder)
    two.run(restore_sharded, folder)
    Snapshot(folder).convert(Target(str(tmp_path / "made"), "safetensors"), map=MAP, select=["model/**"])
    made = Snapshot(str(tmp_path / "made"))
    assert_same({path[2:]: made.read_object(path) for path in made.get_manifest()}, targets(sources()))


def test_tensor_map_joins_pipeline_stages(two, tmp_path):
    folder = str(tmp_path / "stages")
    two.run(save_stages, folder)
    Snapshot(folder).convert(Target(str(tmp_path / "made"), "safetensors"), map=MAP)
    made = Snapshot(str(tmp_path / "made"))
    assert_same({path[2:]: made.read_object(path) for path in made.get_manifest()}, targets(sources()))


def save_own(folder):
    Snapshot.take(folder, {"model": StateDict(a=torch.full((2,), float(dist.get_rank())))})


def test_tensor_map_refuses_rank_specific_tensors_of_one_name(two, tmp_path):
    folder = str(tmp_path / "own")
    two.run(save_own, folder)
    with pytest.raises(RestoreError, match="model/a: several ranks"):
        Snapshot(folder).convert(Target(str(tmp_path / "made"), "safetensors"), map=TensorMap(["a -> b"]))


# Files and the command


def test_tensor_map_cli_convert_with_a_map_file(tmp_path, capsys):
    taken(tmp_path / "taken")
    (tmp_path / "map.json").write_text(json.dumps({"tensor_map": 1, "rules": RULES}))
    given = ["convert", str(tmp_path / "taken"), str(tmp_path / "made"), "--map", str(tmp_path / "map.json")]
    assert main(given) == 0
    made = Snapshot(str(tmp_path / "made")).get_state_dict_for_key("model")
    assert_same(made, targets(sources()))
    back = ["convert", str(tmp_path / "made"), str(tmp_path / "back"), "--map", str(tmp_path / "map.json")]
    assert main([*back, "--map-reverse"]) == 0
    again = Snapshot(str(tmp_path / "back")).get_state_dict_for_key("model")
    assert again.keys() == sources().keys() - {"freqs"}
    assert main([*given[:2], str(tmp_path / "other"), "--map", "nothing"]) == 2
    assert "there is no such map" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "error"),
    [
        ("[1]", "it must be a mapping with rules"),
        ("{", "not YAML"),
        ("rules: []", "it must have 'tensor_map: 1' and rules"),
        ("tensor_map: 1\nrules: [a]", "a rule must have names of the form 'old -> new'"),
        ("tensor_map: 1\nrules: [{names: a -> b, axis: x}]", "got 'axis'"),
        ("tensor_map: 1\nrules: ['a.{i} -> b']", r"\{i\} must be in the names of both sides"),
        ("tensor_map: 1\nrules: ['a.{ -> b']", "a placeholder must be a name in braces"),
        ("tensor_map: 1\nrules: ['a, -> b']", "an empty name"),
        ("tensor_map: 1\nrules: ['a, b -> c, d']", "one side must have a single name"),
        ("tensor_map: 1\nrules: [{names: a -> b, dtype: int8}]", "dtype must be a floating-point dtype"),
        ("tensor_map: 1\nsizes: {h: 0}\nrules: [a -> b]", "must be a positive int"),
        ("tensor_map: 1\nsizes: {h: heads}\nrules: [a -> b]", "config must have heads"),
        ("tensor_map: 1\nrules: [3]", "a rule must be a text or a mapping, got 3"),
        ("tensor_map: 1\nrules: [{names: a -> b, when: 3}]", "when must be a mapping, got 3"),
        ("tensor_map: 1\nfor: 3\nrules: [a -> b]", "for must be a list of model types, got 3"),
        ("tensor_map: 1\n1: 2\nother: 3\nrules: [a -> b]", "not a tensor map"),
        ("tensor_map: 1\nrules: [{names: a -> b, axes: 3}]", "axes must be a text, got 3"),
        ("tensor_map: 1\nrules: [{names: a -> b, sizes: [3]}]", "sizes must be a mapping"),
        ("tensor_map: 1\nrules: [{names: a -> b, sizes: {a: -1}}]", "must be a positive int, got -1"),
        ("tensor_map: 1\nrules: [{names: a -> b, dtype: [x]}]", "dtype must be a floating-point dtype"),
        ("tensor_map: 1\nrules: [{names: a -> b, dtype: float4_e2m1fn_x2}]", "dtype must be a floating-point dtype"),
    ],
)
def test_tensor_map_load_refuses_an_invalid_file(content, error, tmp_path):
    (tmp_path / "map.yaml").write_text(content)
    with pytest.raises(ValueError, match=error):
        TensorMap.load(tmp_path / "map.yaml")


def test_tensor_map_refuses_two_rules_for_one_tensor(tmp_path):
    snapshot = Snapshot.take(str(tmp_path / "taken"), {"model": StateDict(a=torch.ones(2), b=torch.zeros(2))})
    with pytest.raises(RestoreError, match="x: two rules"):
        snapshot.get_state_dict_for_key("model", map=TensorMap(["a -> x", "b -> x"]))


def test_tensor_map_memory_stays_within_memory_budget_bytes(tmp_path):
    """A tensor of 256 MiB is split, turned and stacked with a budget of 16 MiB."""
    torch.manual_seed(0)
    value = torch.randn(8192, 8192)
    Snapshot.take(str(tmp_path / "taken"), {"model": StateDict(w=value)})
    rules = [{"names": "w -> a, b", "axes": "(h (p + p) 2) c -> (h 2 p) c, (h p 2) c"}]
    (tmp_path / "map.json").write_text(json.dumps({"tensor_map": 1, "sizes": {"h": 32}, "rules": rules}))
    code = (
        "import resource, sys; from snapshot import Snapshot, Target, TensorMap\n"
        "Snapshot(sys.argv[1]).read_object('model/w', box=[slice(0, 1)])\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "Snapshot(sys.argv[1]).convert(Target(sys.argv[2], 'safetensors'), map=TensorMap.load(sys.argv[3]), "
        "memory_budget_bytes=16 << 20)\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)"
    )
    given = [str(tmp_path / each) for each in ("taken", "made", "map.json")]
    done = subprocess.run(
        [sys.executable, "-c", code, *given], capture_output=True, text=True, check=True, env=dict(os.environ)
    )
    assert int(done.stdout) << 10 < (16 << 20) + (64 << 20)
    made = Snapshot(str(tmp_path / "made"))
    parts = value.view(32, 2, 64, 2, 8192)
    assert torch.equal(made.read_object("a"), parts[:, 0].transpose(1, 2).reshape(4096, 8192))
    assert torch.equal(made.read_object("b"), parts[:, 1].reshape(4096, 8192))


def test_tensor_map_unusual_tensors_are_mapped_or_refused(tmp_path):
    value = torch.randn(6, 4)
    state = StateDict(
        bits=torch.arange(24, dtype=torch.int16).view(torch.uint16).view(6, 4),
        turned=value.T,
        complex=torch.complex(value, value),
        empty=torch.empty(0, 4),
        scalar=torch.tensor(3.5),
        parameter=torch.nn.Parameter(value),
        eight=value.to(torch.float8_e4m3fn),
    )
    names = ["bits", "complex", "empty", "parameter", "eight"]
    rules = [{"names": f"{name} -> x.{name}", "axes": "(a 2) b -> b (2 a)"} for name in names]
    tensor_map = TensorMap(
        [*rules, {"names": "turned -> x.turned", "axes": "b (a 2) -> b (2 a)"}, "scalar -> x.scalar"]
    )
    taken_there = Snapshot.take(str(tmp_path / "taken"), {"model": state})
    torch.save({"model": dict(state)}, tmp_path / "made.pt")
    for place in (taken_there.path, str(tmp_path / "made.pt")):
        got = Snapshot(place).get_state_dict_for_key("model", map=tensor_map)
        for name in names:
            each = state[name].detach().view(-1, 2, 4).permute(2, 1, 0).reshape(4, -1)
            assert torch.equal(got[f"x.{name}"].view(torch.uint8), each.contiguous().view(torch.uint8)), name
        assert torch.equal(got["x.turned"], value.T.reshape(4, 3, 2).permute(0, 2, 1).reshape(4, 6))
        assert got["x.scalar"] == 3.5
    sparse = Snapshot.take(str(tmp_path / "sparse"), {"model": StateDict(a=value, b=value.to_sparse())})
    with pytest.raises(RestoreError, match="model/b: a map needs a dense tensor, got a TensorParts"):
        sparse.get_state_dict_for_key("model", map=TensorMap(["a -> x", "b -> y"]))


def test_tensor_map_reversed_leaves_padding_empty(tmp_path):
    held = Snapshot.take(str(tmp_path / "taken"), {"model": StateDict(e2=torch.ones(3, 2))})
    rule = {"names": "e -> e2, -", "axes": "(v + p) c -> v c, p c"}
    for sizes in ({}, {"p": 4}):
        got = held.get_state_dict_for_key("model", map=TensorMap([rule], sizes=sizes).reversed())
        assert torch.equal(got["e"], torch.ones(3, 2))
    for axes in ("(v + 4) c -> v c, 4 c", "(1 + 1) v c -> v c, v c"):
        unfilled = TensorMap([rule | {"axes": axes}]).reversed()
        with pytest.raises(RestoreError, match="nothing fills the part that - stands for"):
            held.get_state_dict_for_key("model", map=unfilled)


def test_tensor_map_stack_has_the_given_size(tmp_path):
    held = Snapshot.take(
        str(tmp_path / "taken"), {"model": StateDict({f"x.{i}.w": torch.full((2,), float(i)) for i in range(3)})}
    )
    rule = {"names": "x.{e}.w -> x", "axes": "c -> e c"}
    assert held.get_state_dict_for_key("model", map=TensorMap([rule]))["x"].shape == (3, 2)
    with pytest.raises(RestoreError, match=r"x\.3\.w is missing"):
        held.get_state_dict_for_key("model", map=TensorMap([rule], sizes={"e": 8}))
    with pytest.raises(RestoreError, match=r"\{e\} must be below 2, got 2"):
        held.get_state_dict_for_key("model", map=TensorMap([rule | {"sizes": {"e": 2}}]))


def test_tensor_map_refuses_ambiguous_names(tmp_path):
    state = StateDict({"a.b": torch.ones(2), "a": {"b": torch.zeros(2)}})
    held = Snapshot.take(str(tmp_path / "taken"), {"model": state})
    with pytest.raises(RestoreError, match=r"would both be named 'a\.b'"):
        snapshot.load(held.path, map=TensorMap(["a.b -> c"]))


@pytest.mark.parametrize("shape", [(0, 4), (1 << 40, 0)])
def test_tensor_map_refuses_to_split_an_axis_into_too_many_tensors(shape, tmp_path):
    file = tmp_path / "made.safetensors"
    header = json.dumps({"a": {"dtype": "F32", "shape": shape, "data_offsets": [0, 0]}}).encode()
    file.write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(RestoreError, match=r"a\.\{e\} would name [0-9,]+ tensors"):
        snapshot.load(file, map=TensorMap([{"names": "a -> a.{e}", "axes": "e c -> c"}]))


@pytest.mark.parametrize("axes", ["a b -> i a b", "a b -> a i b", "a b -> a b i"])
def test_tensor_map_stack_of_many_tensors_reads_each_once(axes, tmp_path):
    state = {f"x.{i}": torch.randn(64, 32) for i in range(200)}
    held = Snapshot.take(str(tmp_path / "taken"), {"model": StateDict(state)})
    there = TensorMap([{"names": "x.{i} -> x", "axes": axes}])
    held.convert(str(tmp_path / "one"), map=there, memory_budget_bytes=1 << 20)
    one = Snapshot(str(tmp_path / "one"))
    want = torch.stack(list(state.values()), axes.split("-> ")[1].split().index("i"))
    assert torch.equal(one.read_object("model/x"), want)
    one.convert(str(tmp_path / "back"), map=there.reversed(), memory_budget_bytes=1 << 20)
    assert_same(Snapshot(str(tmp_path / "back")).get_state_dict_for_key("model"), state)
    live = {name: torch.zeros_like(each) for name, each in state.items()}
    report = one.restore({"model": StateDict(live)}, options=RestoreOptions(map=there.reversed()))
    assert_same(live, state)
    assert report.bytes_read < 2 * want.nbytes


def test_tensor_map_sizes_may_be_config_fields(tmp_path):
    rule = {"names": "x -> y", "axes": "(h d) -> h d", "sizes": {"h": "num_attention_heads"}}
    (tmp_path / "map.json").write_text(json.dumps({"tensor_map": 1, "rules": [rule]}))
    held = Snapshot.take(str(tmp_path / "taken"), {"model": StateDict(x=torch.arange(6.0))})
    tensor_map = TensorMap.load(tmp_path / "map.json", {"num_attention_heads": 2})
    assert torch.equal(held.get_state_dict_for_key("model", map=tensor_map)["y"], torch.arange(6.0).view(2, 3))


def test_tensor_map_large_number_in_a_name_uses_no_memory(tmp_path):
    tracemalloc.start()
    try:
        for sizes, name in (({}, "e.9999999.w"), ({"e": 10**9}, "e.1.w")):
            tensor_map = TensorMap([{"names": "e.{e}.w -> x", "axes": "f c -> e f c"}], sizes=sizes)
            with pytest.raises(RestoreError, match=r"e\.0\.w is missing"):
                tensor_map.plan({name: Spec("float32", (2, 2))})
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_tensor_map_quotient_of_config_fields_must_be_whole(tmp_path):
    (tmp_path / "map.json").write_text(
        json.dumps({"tensor_map": 1, "sizes": {"d": "hidden / heads"}, "rules": ["a -> b"]})
    )
    with pytest.raises(ValueError, match="100 must be a multiple of 3"):
        TensorMap.load(tmp_path / "map.json", {"hidden": 100, "heads": 3})


STATES = {
    "opt.main.{name...}": "main_params/{name}",
    "opt.group.{name...}": None,
    "opt.{state}.{name...}": "optim/state/{name}/{state}",
}


def _stacked_state():
    weights = torch.arange(24.0).view(2, 6, 2)
    return {
        "layers.qk": weights,
        "embed": torch.arange(4.0).view(2, 2),
        "opt.main.layers.qk": weights + 100,
        "opt.exp_avg.layers.qk": weights + 200,
        "opt.step.layers.qk": torch.tensor([3.0, 5.0]),
        "opt.group.layers.qk": torch.zeros(2, 9),
        "opt.exp_avg.embed": torch.ones(2, 2),
        "opt.step.embed": torch.tensor(4.0),
    }


def _unstacked_map(**options):
    rule = {"names": "layers.qk -> {l}.q, {l}.k", "axes": "l (r + r) c -> r c, r c"}
    return TensorMap([rule, "embed -> wte"], states=STATES, **options)


def test_tensor_map_of_states_is_that_of_their_tensors(tmp_path):
    state = _stacked_state()
    held = Snapshot.take(str(tmp_path), {"run": StateDict(state, note="x")})
    weights = held.get_state_dict_for_key("model", map=_unstacked_map())
    assert torch.equal(weights["1.k"], state["layers.qk"][1, 3:])
    main = held.get_state_dict_for_key("main_params", map=_unstacked_map())
    assert torch.equal(main["0.q"], state["layers.qk"][0, :3] + 100)
    optim = held.get_state_dict_for_key("optim", map=_unstacked_map())
    assert optim["param_groups"] == []
    assert optim["state"].keys() == {"0.q", "0.k", "1.q", "1.k", "wte"}
    assert_same(optim["state"]["1.q"], {"exp_avg": state["layers.qk"][1, :3] + 200, "step": torch.tensor(5.0)})
    assert_same(optim["state"]["wte"], {"exp_avg": torch.ones(2, 2), "step": torch.tensor(4.0)})
    assert held.read_object("note", map=_unstacked_map()) == "x"


def test_tensor_map_puts_model_and_optimizer_below_the_only_model_state(tmp_path):
    state = {name: each for name, each in _stacked_state().items() if "embed" in name}
    state |= {"opt.exp_avg_sq.embed": torch.full((2, 2), 7.0)}
    Snapshot.take(str(tmp_path), {"run": StateDict(state)})
    model = torch.nn.Module()
    model.wte = torch.nn.Parameter(torch.zeros(2, 2))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.5)
    options = RestoreOptions(map=TensorMap(["embed -> wte"], states=STATES))
    Snapshot(str(tmp_path)).restore({"train": ModelState(model, optimizer)}, options=options)
    assert torch.equal(model.wte, state["embed"])
    expected = {"step": torch.tensor(4.0), "exp_avg": torch.ones(2, 2), "exp_avg_sq": torch.full((2, 2), 7.0)}
    assert_same(dict(optimizer.state[model.wte]), expected)
    assert optimizer.param_groups[0]["lr"] == 0.5


def test_tensor_map_refuses_states_that_do_not_fit(tmp_path):
    state = _stacked_state() | {"opt.row_var.layers.qk": torch.zeros(2, 6)}
    held = Snapshot.take(str(tmp_path / "rows"), {"run": StateDict(state)})
    with pytest.raises(RestoreError, match=r"opt\.row_var\.layers\.qk.*\[2, 6, 2\], got \[2, 6\]"):
        held.get_state_dict_for_key("model", map=_unstacked_map())
    two = {"a": torch.zeros(2), "b": torch.ones(2), "opt.step.a": torch.tensor(1.0), "opt.step.b": torch.tensor(2.0)}
    held = Snapshot.take(str(tmp_path / "steps"), {"run": StateDict(two)})
    joined = TensorMap([{"names": "a, b -> ab", "axes": "i, i -> (i + i)"}], states=STATES)
    with pytest.raises(RestoreError, match="ab: is made of tensors with steps of their own"):
        held.get_state_dict_for_key("model", map=joined)
    state = _stacked_state()
    held = Snapshot.take(str(tmp_path / "key"), {"run": StateDict(state), "optim": StateDict(x=1)})
    with pytest.raises(RestoreError, match="run/optim would become the key optim, which exists already"):
        held.get_state_dict_for_key("model", map=_unstacked_map())


@pytest.mark.parametrize(
    "states", [{"opt.{state}": "x/{name}"}, {"opt.{name...}": "x"}, {"{name...}.{other}": None}, {"{name...}": 3}, [1]]
)
def test_tensor_map_with_invalid_states_is_refused(states):
    with pytest.raises(ValueError, match="states"):
        TensorMap(["a -> b"], states=states)
