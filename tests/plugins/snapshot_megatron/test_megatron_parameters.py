"""A Megatron optimizer's state by the names of other libraries' parameters: into FSDP2 and into a plain process."""

import importlib.util
import subprocess
import sys

import pytest
import torch
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from snapshot import ModelState, RestoreError, RestoreOptions, Snapshot, StateDict, Target, TensorMap
from snapshot import load as load_tensors
from tests.helpers.rank_pool import Pool
from tests.plugins.snapshot_megatron.megatron_jobs import take
from tests.plugins.snapshot_megatron.megatron_models import (
    BETAS,
    DECAY,
    EPSILON,
    HIDDEN,
    INNER,
    RATE,
    ROWS,
    STATES,
    STEPS,
    WORDS,
    Layout,
    truth,
    whole,
)

pytestmark = [pytest.mark.libraries, pytest.mark.timeout(300)]

if importlib.util.find_spec("megatron") is None:
    pytest.skip("megatron-core is not installed", allow_module_level=True)

HEADS, GROUPS, LAYERS = 4, 2, 4
WIDTH = HIDDEN // HEADS
CONFIG = {
    "model_type": "llama", "num_attention_heads": HEADS, "num_key_value_heads": GROUPS, "num_hidden_layers": LAYERS,
    "vocab_size": WORDS, "tie_word_embeddings": False,
}  # fmt: skip
KEYS = {
    "embedding.word_embeddings.weight": (ROWS, HIDDEN),
    "output_layer.weight": (ROWS, HIDDEN),
    "decoder.final_layernorm.weight": (HIDDEN,),
    "decoder.layers.self_attention.linear_qkv.layer_norm_weight": (LAYERS, HIDDEN),
    "decoder.layers.mlp.linear_fc1.layer_norm_weight": (LAYERS, HIDDEN),
    "decoder.layers.self_attention.linear_qkv.weight": (LAYERS, (HEADS + 2 * GROUPS) * WIDTH, HIDDEN),
    "decoder.layers.self_attention.linear_proj.weight": (LAYERS, HIDDEN, HIDDEN),
    "decoder.layers.mlp.linear_fc1.weight": (LAYERS, 2 * INNER, HIDDEN),
    "decoder.layers.mlp.linear_fc2.weight": (LAYERS, HIDDEN, INNER),
}
"""Names and shapes in Megatron's checkpoint. The vocabulary is padded."""


@pytest.fixture(scope="module")
def four():
    with Pool(4) as pool:
        yield pool


@pytest.fixture(scope="module")
def two():
    with Pool(2) as pool:
        yield pool


def _to_hugging_face(read):
    """Return the tensors of Hugging Face's model, by slices of Megatron's: `read(key, shape, dims)`."""
    held = {key: read(key, shape, len(shape) - (".layers." in key)) for key, shape in KEYS.items()}
    made = {
        "model.embed_tokens.weight": held["embedding.word_embeddings.weight"][:WORDS],
        "lm_head.weight": held["output_layer.weight"][:WORDS],
        "model.norm.weight": held["decoder.final_layernorm.weight"],
    }
    for layer in range(LAYERS):
        own = {key.removeprefix("decoder.layers."): each[layer] for key, each in held.items() if ".layers." in key}
        qkv = own["self_attention.linear_qkv.weight"].view(GROUPS, HEADS // GROUPS + 2, WIDTH, HIDDEN)
        gate, up = own["mlp.linear_fc1.weight"].chunk(2)
        parts = {
            "input_layernorm": own["self_attention.linear_qkv.layer_norm_weight"],
            "post_attention_layernorm": own["mlp.linear_fc1.layer_norm_weight"],
            "self_attn.q_proj": qkv[:, :-2].reshape(-1, HIDDEN),
            "self_attn.k_proj": qkv[:, -2].reshape(-1, HIDDEN),
            "self_attn.v_proj": qkv[:, -1].reshape(-1, HIDDEN),
            "self_attn.o_proj": own["self_attention.linear_proj.weight"],
            "mlp.gate_proj": gate,
            "mlp.up_proj": up,
            "mlp.down_proj": own["mlp.linear_fc2.weight"],
        }
        made |= {f"model.layers.{layer}.{name}.weight": each for name, each in parts.items()}
    return {name: each.clone() for name, each in made.items()}


def _expected(what, steps=STEPS):
    return _to_hugging_face(lambda *at: truth(*at, steps)[what])


def _make_model():
    """Return a model with the names and shapes of a Llama of Hugging Face, and its AdamW, as one would train it."""
    model = torch.nn.Module()
    for name, tensor in _expected("param").items():
        *above, last = name.split(".")
        place = model
        for part in above:
            if not hasattr(place, part):
                place.add_module(part, torch.nn.Module())
            place = getattr(place, part)
        place.register_parameter(last, torch.nn.Parameter(torch.zeros(tensor.shape)))
    return model


def _make_optimizer(model):
    every = list(model.parameters())
    groups = [
        {"params": [each for each in every if each.dim() > 1], "weight_decay": DECAY},
        {"params": [each for each in every if each.dim() == 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=RATE, betas=BETAS, eps=EPSILON)


def _full(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _expect(model, optimizer, steps):
    expected = {name: _expected(name, steps) for name in STATES}
    for name, parameter in model.named_parameters():
        state = optimizer.state[parameter]
        assert torch.equal(_full(parameter.detach()), expected["param"][name]), name
        for each in STATES[1:]:
            assert torch.equal(_full(state[each]), expected[each][name]), (name, each)
        assert state["step"].shape == ()
        assert state["step"].item() == steps


def _restore(path, shard):
    model = _make_model()
    if shard:
        for layer in model.model.layers.children():
            fully_shard(layer)
        fully_shard(model)
    optimizer = _make_optimizer(model)
    snapshot, tensor_map = Snapshot(path), TensorMap.load("megatron-hf", CONFIG)
    options = RestoreOptions(map=tensor_map, cast="same_kind")
    snapshot.restore({"train": ModelState(model, optimizer)}, options=options, unused="ignore")
    weights = {name: each.bfloat16().float() for name, each in _expected("param").items()}
    for name, parameter in model.named_parameters():
        assert torch.equal(_full(parameter.detach()), weights[name])
    snapshot.restore({"main_params": model}, options=RestoreOptions(map=tensor_map), unused="ignore")
    _expect(model, optimizer, STEPS)
    gradients = _to_hugging_face(lambda key, shape, _: whole(key, f"grad{STEPS}", shape))
    for name, parameter in model.named_parameters():
        if shard:
            parameter.grad = distribute_tensor(gradients[name], parameter.device_mesh, parameter.placements)
        else:
            parameter.grad = gradients[name]
    optimizer.step()
    _expect(model, optimizer, STEPS + 1)


@pytest.fixture(scope="module")
def saved(four, tmp_path_factory):
    """Snapshots of one model in two splits."""
    folder = tmp_path_factory.mktemp("saved")
    four.run(_take_all, str(folder))
    return folder


def _take_all(folder):
    take(f"{folder}/both", Layout(llama=True, tensor=2, pipeline=2))
    take(f"{folder}/data", Layout(llama=True, bucket=3000))


@pytest.mark.parametrize("split", ["both", "data"])
def test_model_state_goes_on_from_a_megatron_optimizer_by_a_map(four, two, saved, split):
    """With FSDP2 on 4 and on 2 ranks, and in a plain process."""
    four.run(_restore, str(saved / split), True)
    two.run(_restore, str(saved / split), True)
    _restore(str(saved / split), False)


@pytest.fixture(scope="module")
def directories(tmp_path_factory):
    """Directories that Megatron wrote in another process."""
    folder = tmp_path_factory.mktemp("directories")
    program = [sys.executable, "-m", "tests.plugins.snapshot_megatron.megatron_models", folder]
    subprocess.run([*program, "--tensor", "2", "--llama"], check=True, capture_output=True, timeout=250)
    return folder


@pytest.mark.parametrize("kind", ["dp_reshardable", "fully_reshardable"])
def test_model_state_goes_on_from_a_directory_of_megatron(two, directories, kind):
    two.run(_restore, str(directories / kind / "iter_0000003"), True)
    _restore(str(directories / kind / "iter_0000003"), False)


def test_megatron_hf_on_moments_is_the_map_on_weights_with_moments_put_in(saved, tmp_path):
    tensor_map = TensorMap.load("megatron-hf", CONFIG)
    snapshot = Snapshot(saved / "data")
    for name in STATES:
        moments = {key: snapshot.read_object(f"megatron/optimizer.state.{name}.{key}") for key in KEYS}
        Snapshot.take(tmp_path / name, {"megatron": StateDict(moments)})
        expected = Snapshot(tmp_path / name).get_state_dict_for_key("megatron", map=tensor_map)
        if name == "param":
            found = snapshot.get_state_dict_for_key("main_params", map=tensor_map)
        else:
            states = snapshot.read_object("optim/state", map=tensor_map)
            assert {each["step"].item() for each in states.values()} == {STEPS}
            found = {key: each[name] for key, each in states.items()}
        assert found.keys() == expected.keys() == _expected("param").keys()
        assert all(torch.equal(found[key], expected[key]) for key in found)


def test_megatron_hf_converts_the_weights_of_a_snapshot_with_an_optimizer(saved, tmp_path):
    tensor_map = TensorMap.load("megatron-hf", CONFIG)
    Snapshot(saved / "both").convert(Target(tmp_path / "hf", "safetensors"), map=tensor_map, select=["model/**"])
    found = load_tensors(tmp_path / "hf")
    expected = _expected("param")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], each.bfloat16()) for name, each in expected.items())


def test_restore_refuses_states_that_are_not_of_single_elements(tmp_path):
    """Such as those with a number for each row."""
    key = "decoder.layers.self_attention.linear_proj.weight"
    state = StateDict(
        {key: torch.zeros(LAYERS, HIDDEN, HIDDEN), f"optimizer.state.row_var.{key}": torch.zeros(LAYERS, 3)}
    )
    snapshot = Snapshot.take(tmp_path, {"megatron": state})
    with pytest.raises(
        RestoreError, match=r"row_var.*must have the shape of decoder\.layers.*\[4, 24, 24\], got \[4, 3\]"
    ):
        snapshot.read_object("optim/state", map=TensorMap.load("megatron-hf", CONFIG))
