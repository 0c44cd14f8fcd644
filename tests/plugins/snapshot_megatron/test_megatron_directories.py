"""Directories as Megatron-core writes them, read without it: `fully_reshardable` and `dp_reshardable` ones."""

import dataclasses
import itertools
import logging
import re

import pytest
import torch

import snapshot
from snapshot import CorruptSnapshotError, RestoreOptions, Snapshot, StateDict
from snapshot.cli import main
from snapshot.errors import UnsupportedFormatError
from snapshot.formats import registry
from snapshot.manifest.entries import Shard, ShardedTensorEntry, TensorEntry
from snapshot_megatron.main_parameters import are_rounded, find_pairs, group_by_slice
from tests.plugins.snapshot_megatron import bucket_layouts
from tests.plugins.snapshot_megatron.bucket_layouts import STATES, Job
from tests.plugins.snapshot_megatron.torch_dist_directories import Pieces, by_layers, write_directory

LAYERS, EXPERTS = 7, 3
SHAPES = {
    "embedding.word_embeddings.weight": (12, 8),
    "decoder.layers.mlp.linear_fc1.weight": (LAYERS, 16, 8),
    "decoder.layers.mlp.linear_fc1.layer_norm_weight": (LAYERS, 8),
    "decoder.layers.mlp.experts.experts.linear_fc2.weight": (LAYERS, EXPERTS, 4, 8),
    "decoder.final_layernorm.weight": (8,),
}
"""The norms are constant, as before the first step."""


def _axes(key):
    return ("layers" in key) + ("experts" in key)


def _states(scale=1.0):
    """Main parameters and two moments, by the keys of the weights."""
    generator = torch.Generator().manual_seed(5)
    made = {}
    for key, shape in SHAPES.items():
        main = torch.ones(shape) if "norm" in key else torch.randn(shape, generator=generator) * scale
        made[key] = {"param": main, "exp_avg": torch.randn(shape), "exp_avg_sq": torch.rand(shape)}
    return made


def _write(folder, states, *, dtype=torch.bfloat16, weights=None, whole=False, without=(), prefix=""):
    """Write a `fully_reshardable` directory. `weights`: those of other main parameters."""

    def stored(key, tensor, parts):
        return by_layers(tensor, _axes(key), parts) if _axes(key) and not whole else tensor

    models = {key: each["param"].to(dtype) for key, each in (weights or states).items() if key not in without}
    state = {key: stored(key, tensor, 2) for key, tensor in models.items()}
    for key, held in states.items():
        for name, tensor in held.items():
            state[f"{prefix}optimizer.state.{name}.{key}"] = stored(key, tensor, 1)
    write_directory(folder, state, {"optimizer": {"optimizer": {"param_groups": [{"lr": 0.5, "step": 3}]}}})
    return folder


def _shift(states, key, index, by=3):
    """Move the elements of one layer, as those after a gap that was forgotten: the last ones are lost."""
    for tensor in states[key].values():
        flat = tensor[index].view(-1)
        flat.copy_(torch.cat([torch.zeros(by), flat[:-by]]))
    return states


WRONG = (
    r"optimizer\.state\.\*: must not be used.*\(1 of \d+ layers .*, by some of their elements: {}; megatron-core before"
)
LAST = LAYERS - 1
PLACES = [
    *[("decoder.layers.mlp.linear_fc1.weight", (layer,)) for layer in (0, LAYERS // 2, LAST)],
    *[("decoder.layers.mlp.linear_fc1.layer_norm_weight", (layer,)) for layer in (0, LAYERS // 2, LAST)],
    *[("decoder.layers.mlp.experts.experts.linear_fc2.weight", each) for each in ((0, 0), (3, 1), (LAST, EXPERTS - 1))],
    ("embedding.word_embeddings.weight", ()),
    ("decoder.final_layernorm.weight", ()),
]


@pytest.mark.parametrize("key", SHAPES)
def test_main_parameters_of_one_shifted_layer_are_found(tmp_path, key):
    for number, (index, whole) in enumerate(
        itertools.product([at for each, at in PLACES if each == key], (False, True))
    ):
        folder = _write(tmp_path / str(number), _shift(_states(), key, index), weights=_states(), whole=whole)
        shown = key + "".join(f"[{each}]" for each in index)
        opened = Snapshot(folder)
        with pytest.raises(CorruptSnapshotError, match=WRONG.format(re.escape(shown))):
            opened.read_object("optimizer.state.exp_avg.embedding.word_embeddings.weight")
        report = opened.verify()
        assert not report.ok
        assert len(report.faults) == 2
        assert f"optimizer.state.param.{key}: does not round to its weight" in report.faults[1]
        assert report.faults[1].endswith(shown[len(key) :])


def test_main_parameters_of_an_optimizer_in_a_chain_are_compared(tmp_path):
    key = "decoder.layers.mlp.linear_fc1.weight"
    for name, states in (("right", _states()), ("wrong", _shift(_states(), key, (1,)))):
        opened = Snapshot(_write(tmp_path / name, states, weights=_states(), prefix="chained_1."))
        path = f"chained_1.optimizer.state.exp_avg.{key}"
        if name == "right":
            assert torch.equal(opened.read_object(path), states[key]["exp_avg"])
            continue
        with pytest.raises(CorruptSnapshotError, match="must not be used"):
            opened.read_object(path)


def test_main_parameters_that_round_to_the_weights_are_read(tmp_path, caplog):
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        states = _states()
        opened = Snapshot(_write(tmp_path / str(dtype), states, dtype=dtype))
        with caplog.at_level(logging.WARNING, "snapshot"):
            for key, held in states.items():
                for name, tensor in held.items():
                    assert torch.equal(opened.read_object(f"optimizer.state.{name}.{key}"), tensor)
        assert opened.verify().ok
        assert opened.read_object("optimizer/optimizer/param_groups/0/step") == 3
    assert "cannot be checked" not in caplog.text


def test_main_parameters_that_are_shifted_are_refused_before_anything_is_written(tmp_path, capsys):
    key = "decoder.layers.mlp.linear_fc1.weight"
    states, right = _shift(_states(), key, 2), _states()
    folder = _write(tmp_path / "d", states, weights=right)
    opened, name = Snapshot(folder), f"optimizer.state.exp_avg.{key}"
    live = StateDict({each: torch.zeros(shape, dtype=torch.bfloat16) for each, shape in SHAPES.items()})
    for each, held in right.items():
        live |= {f"optimizer.state.{what}.{each}": torch.zeros_like(tensor) for what, tensor in held.items()}
    for call in (
        lambda: opened.read_object(name),
        lambda: opened.read_object(name, box=[slice(0, 1)]),
        lambda: opened.read_object(name, torch.zeros(SHAPES[key])),
        lambda: opened.restore({"s": live}, options=RestoreOptions(exclude=["s/iteration", "s/optimizer"])),
        lambda: opened.convert(tmp_path / "a.safetensors"),
        lambda: opened.convert(tmp_path / "b"),
        lambda: snapshot.load(folder),
        lambda: Snapshot.diff(folder, folder),
    ):
        with pytest.raises(CorruptSnapshotError, match=r"optimizer\.state\.\*: must not be used.*exclude|leave out"):
            call()
    assert not any(tensor.any() for tensor in live.values())
    assert main(["ls", str(folder)]) == 0
    assert name in capsys.readouterr().out
    assert main(["verify", str(folder)]) == 1
    assert "must not be used" in capsys.readouterr().out


def test_main_parameters_that_are_shifted_leave_the_weights_readable(tmp_path):
    right = _states()
    folder = _write(tmp_path / "d", _shift(_states(), "decoder.layers.mlp.linear_fc1.weight", 2), weights=right)
    opened = Snapshot(folder)
    live = StateDict({key: torch.zeros(shape, dtype=torch.bfloat16) for key, shape in SHAPES.items()})
    opened.restore({"s": live}, options=RestoreOptions(select=[f"s/{key}" for key in SHAPES]))
    loaded = snapshot.load(folder, exclude=["optimizer*"])
    opened.convert(tmp_path / "w.safetensors", exclude=["optimizer*"])
    converted = snapshot.load(tmp_path / "w.safetensors")
    for key, held in right.items():
        expected = held["param"].bfloat16()
        for found in (live[key], loaded[key], converted[key], opened.read_object(key)):
            assert torch.equal(found, expected)


@pytest.mark.parametrize("what", ["weights", "constant"])
def test_main_parameters_that_cannot_be_compared_are_read_with_a_warning(tmp_path, caplog, what):
    states = _states()
    if what == "constant":
        for held in states.values():
            held["param"].fill_(0.25)
    folder = _write(tmp_path / "d", states, without=() if what == "constant" else SHAPES)
    opened = Snapshot(folder)
    with caplog.at_level(logging.WARNING, "snapshot"):
        opened.get_manifest()
        assert "cannot be checked" not in caplog.text  # nothing is read yet
        for _ in range(2):
            opened.read_object("optimizer.state.exp_avg.decoder.final_layernorm.weight")
    assert caplog.text.count("optimizer.state.*: cannot be checked") == 1
    assert ("all weights are constant" if what == "constant" else "embedding.word_embeddings.weight") in caplog.text
    assert opened.verify().ok


def test_main_parameters_halfway_between_two_weights_may_be_rounded_to_both():
    main = torch.tensor([1 + 2**-8, 1 + 2**-8, 1 + 2**-8, float("nan"), float("inf"), 1 + 2**-9, -0.0])
    weights = torch.tensor([1.0, 1 + 2**-7, 1 + 2**-6, float("nan"), float("inf"), 1 + 2**-7, 0.0])
    assert are_rounded(main, weights.bfloat16()).tolist() == [True, True, False, True, True, False, True]


def test_main_parameters_of_hostile_pieces_are_grouped_at_once():
    def entry(shape, *boxes):
        shards = [Shard(at, sizes, TensorEntry("f", (0, 8), "float32", sizes)) for at, sizes in boxes]
        return ShardedTensorEntry("float32", shape, shards)

    key, far = "decoder.layers.x", 1 << 40
    for held in (entry((far, 2), ((0, 0), (far, 2))), entry((4, 2), *[((0, 0), (4, 2))] * 20_000)):
        [pair], without = find_pairs({key: held}, {key: held})
        assert without == []
        assert len(group_by_slice(pair)[0]) == 1
    outside = entry((4, 2), ((0, 0), (far, 2)))
    assert find_pairs({key: outside}, {key: outside}) == ([], [])


# dp_reshardable

GROUPS = [{"wd_mult": 1.0, "lr_mult": 1.0, "lr": 0.5, "betas": (0.9, 0.95), "min_lr": None, "step": 3.0}]


def _write_buckets(folder, job, seed=0, change=lambda name, flat: flat, without=(), groups=None):
    """Write a `dp_reshardable` directory of a job. Return the whole tensors by state and key."""
    whole, pieces, buckets = bucket_layouts.make(job, seed)
    state = {}
    for key, those in pieces.items():
        tensor = whole["param"][key].bfloat16()
        cut = {at: tensor[tuple(map(slice, at, map(sum, zip(at, sizes, strict=True))))] for at, sizes in those}
        state[key] = Pieces(tensor.shape, {at: each.contiguous() for at, each in cut.items()})
    for name, flat, ends in buckets:
        held = change(name, flat)
        pairs = itertools.pairwise(ends)
        state[name] = Pieces(flat.shape, {(low,): held[low:high].clone() for low, high in pairs})
        group = name.partition(".gbuf_idx")[0]
        state[f"{group}.optimizer/shard_0_1"] = [{"param_groups": GROUPS} if groups is None else groups]
        state[f"{group}.per_bucket_numel/shard_0_1"] = [[{(torch.bfloat16, torch.float32): [flat.numel()]}]]
    kept = {key: each for key, each in state.items() if key not in without}
    write_directory(folder, kept, {"optimizer": {"param_state_sharding_type": "dp_reshardable"}})
    return whole


JOBS = {
    "both": Job(tensor=2, stages=2, data=4, spans=(2, 1), bucket=1500),
    "tied": Job(stages=2, chunks=2, data=4, spans=(1, 1, 1, 1), tied=True),
    "experts": Job(tensor=2, expert=2, experts=4, data=4, order="name"),
    "ambiguous": bucket_layouts.draw(26),
}


@pytest.mark.parametrize("name", JOBS)
def test_dp_reshardable_directory_is_read_in_the_form_of_the_model(tmp_path, name):
    job = JOBS[name]
    whole = _write_buckets(tmp_path / "d", job)
    opened = Snapshot(tmp_path / "d")
    listed = set(opened.get_manifest())
    assert not [path for path in listed if "distributed" in path]
    assert {f"0/optimizer.state.{state}.{key}" for state in STATES for key in whole[state]} <= listed
    for state in STATES:
        for key, tensor in whole[state].items():
            assert torch.equal(opened.read_object(f"optimizer.state.{state}.{key}"), tensor)
    part = opened.read_object("optimizer.state.exp_avg.decoder.final_layernorm.weight", box=[slice(3, 5)])
    assert torch.equal(part, whole["exp_avg"]["decoder.final_layernorm.weight"][3:5])
    groups = opened.read_object("optimizer/0/optimizer" if job.expert > 1 else "optimizer/optimizer")
    assert groups == {"param_groups": GROUPS}
    report = opened.verify()
    assert report.ok
    assert report.unverifiable == 0


def test_dp_reshardable_directory_is_converted_and_equal_to_the_same_step_in_another_split(tmp_path, capsys):
    job = Job(spans=(3,))
    whole = _write_buckets(tmp_path / "a", job)
    _write_buckets(tmp_path / "b", dataclasses.replace(job, tensor=2, stages=3, data=4, spans=(1, 1, 1), bucket=700))
    assert Snapshot.diff(tmp_path / "a", tmp_path / "b").same
    Snapshot(tmp_path / "a").convert(tmp_path / "s")
    Snapshot(tmp_path / "b").convert(tmp_path / "w.safetensors", select=["optimizer.state.*"])
    assert Snapshot.diff(tmp_path / "s", tmp_path / "b").same
    loaded = snapshot.load(tmp_path / "w.safetensors")
    states = (*STATES, "step")
    assert loaded.keys() == {f"optimizer.state.{state}.{key}" for state in states for key in whole["param"]}
    assert all(torch.equal(loaded[f"optimizer.state.param.{key}"], each) for key, each in whole["param"].items())
    assert main(["ls", str(tmp_path / "b"), "--flat"]) == 0
    assert "optimizer.state.exp_avg_sq.output_layer.weight" in capsys.readouterr().out
    live = StateDict({f"optimizer.state.exp_avg.{key}": torch.zeros_like(each) for key, each in whole["param"].items()})
    Snapshot(tmp_path / "b").restore({"m": live}, options=RestoreOptions(select=["m/optimizer.state.exp_avg.*"]))
    assert all(torch.equal(live[f"optimizer.state.exp_avg.{key}"], each) for key, each in whole["exp_avg"].items())


def test_dp_reshardable_directory_with_another_order_of_parameters_is_refused(tmp_path):
    """Such as of a version that lays out parameters of one shape in another order."""
    key = "optimizer.state.exp_avg.output_layer.weight"
    size = Job().words * Job().hidden

    def swapped(name, flat):
        return torch.cat([flat[:size].flip(0), flat[size:]])  # the output layer is the first one in its bucket

    whole = _write_buckets(tmp_path / "d", Job(), change=swapped)
    opened = Snapshot(tmp_path / "d")
    with pytest.raises(
        CorruptSnapshotError, match=r"output_layer\.weight; the order of parameters .* is not known; load"
    ):
        opened.read_object(key)
    assert torch.equal(opened.read_object("output_layer.weight"), whole["param"]["output_layer.weight"].bfloat16())
    assert not opened.verify().ok


def test_dp_reshardable_directory_whose_layout_does_not_fit_is_refused_by_name(tmp_path, capsys):
    frozen = "decoder.layers.mlp.linear_fc2.bias"
    whole = _write_buckets(tmp_path / "d", JOBS["both"], without=[frozen])
    opened = Snapshot(tmp_path / "d")
    name = "optimizer.state.exp_avg.decoder.layers.mlp.linear_fc2.weight"
    words = (
        r"cannot be brought into the form of the model: no layout fits: with .*; load it with Megatron-core, and save"
    )
    live = StateDict({name: torch.zeros_like(whole["exp_avg"]["decoder.layers.mlp.linear_fc2.weight"])})
    for call in (
        lambda: opened.read_object(name),
        lambda: opened.restore({"m": live}, options=RestoreOptions(select=[f"m/{name}"])),
        lambda: opened.convert(tmp_path / "s"),
        lambda: snapshot.load(tmp_path / "d"),
    ):
        with pytest.raises(UnsupportedFormatError, match=words):
            call()
    assert not live[name].any()
    assert main(["ls", str(tmp_path / "d"), "--flat"]) == 0
    assert name in capsys.readouterr().out
    for key, tensor in whole["param"].items():
        if key != frozen:
            assert torch.equal(opened.read_object(key), tensor.bfloat16())
    flat = next(path for path in opened.get_manifest() if path.endswith("bucket_idx_0.param"))
    assert opened.read_object(flat).dim() == 1  # as DCP opens it


def test_dp_reshardable_directory_without_weights_or_plugin_is_opened_as_by_dcp(tmp_path, caplog, monkeypatch):
    whole = _write_buckets(tmp_path / "a", Job(), without=Job().weights())
    with caplog.at_level(logging.WARNING, "snapshot"):
        assert not [path for path in Snapshot(tmp_path / "a").get_manifest() if "optimizer.state" in path]
    assert "has no weights of the model" in caplog.text
    _write_buckets(tmp_path / "b", Job())
    others = tuple(each for each in registry.formats() if not each.refines)
    monkeypatch.setattr(registry, "formats", lambda: others)
    paths = Snapshot(tmp_path / "b").get_manifest()
    assert not [path for path in paths if "optimizer.state" in path]
    assert [path for path in paths if path.endswith("bucket_idx_0.exp_avg")]
    assert whole


@pytest.mark.parametrize("groups", [[{"lr": torch.ones(3)}], 5, None])
def test_dp_reshardable_directory_whose_groups_are_no_plain_values_is_refused(tmp_path, groups):
    _write_buckets(tmp_path / "d", Job(), groups={"param_groups": groups} if groups else [])
    with pytest.raises(UnsupportedFormatError, match=r"cannot be brought .*: .*(plain|groups)"):
        Snapshot(tmp_path / "d").read_object("optimizer.state.param.output_layer.weight")
