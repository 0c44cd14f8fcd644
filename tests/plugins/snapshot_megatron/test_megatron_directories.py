"""Directories that Megatron-core wrote, read without it: main parameters are compared with the weights beside them."""

import logging

import pytest
import torch

import snapshot
from snapshot import CorruptSnapshotError, RestoreOptions, Snapshot, StateDict
from snapshot.cli import main
from snapshot_megatron.main_parameters import are_rounded
from tests.plugins.snapshot_megatron.torch_dist_directories import by_layers, write_directory

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


def _write(folder, states, *, dtype=torch.bfloat16, weights=None, whole=False, without=()):
    """Write a `fully_reshardable` directory. `weights`: those of other main parameters."""

    def stored(key, tensor, parts):
        return by_layers(tensor, _axes(key), parts) if _axes(key) and not whole else tensor

    models = {key: each["param"].to(dtype) for key, each in (weights or states).items() if key not in without}
    state = {key: stored(key, tensor, 2) for key, tensor in models.items()}
    for key, held in states.items():
        for name, tensor in held.items():
            state[f"optimizer.state.{name}.{key}"] = stored(key, tensor, 1)
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


@pytest.mark.parametrize("whole", [False, True], ids=["pieces", "whole"])
@pytest.mark.parametrize(("key", "index"), PLACES)
def test_main_parameters_of_one_shifted_layer_are_found(tmp_path, key, index, whole):
    folder = _write(tmp_path / "d", _shift(_states(), key, index), weights=_states(), whole=whole)
    shown = key + "".join(f"[{each}]" for each in index)
    opened = Snapshot(folder)
    with pytest.raises(CorruptSnapshotError, match=WRONG.format(shown.replace("[", r"\[").replace("]", r"\]"))):
        opened.read_object("optimizer.state.exp_avg.embedding.word_embeddings.weight")
    report = opened.verify()
    assert not report.ok
    assert len(report.faults) == 2
    assert f"optimizer.state.param.{key}: does not round to its weight" in report.faults[1]
    assert report.faults[1].endswith(shown[len(key) :])


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
