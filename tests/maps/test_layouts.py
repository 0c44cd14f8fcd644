"""Maps that come with the library, against the models themselves: Megatron-core's, torchtitan's and transformers'."""

import contextlib
import importlib.util
import json
import warnings
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import distributed as dist

from snapshot import RestoreError, RestoreOptions, Snapshot, StateDict, Target, TensorMap

pytestmark = pytest.mark.libraries
transformers = pytest.importorskip("transformers")

SIZES = {
    "vocab_size": 120,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
    "tie_word_embeddings": False,
}
IDS = torch.tensor([[3, 14, 15, 92, 65, 35, 89, 79]])


def hugging_face(kind, **changes):
    """A tiny random model of transformers, whose norms and biases are random, too."""
    torch.manual_seed(0)
    sizes = SIZES | {"num_local_experts": 4, "num_experts": 4, "moe_intermediate_size": 96, "head_dim": 16}
    sizes |= {"num_experts_per_tok": 2, "norm_topk_prob": True} | changes
    config = transformers.AutoConfig.for_model(kind, **sizes)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1:
                parameter.copy_(torch.randn(parameter.shape) * 0.1 + ("norm" in name))
    return model


def logits_of(model):
    with torch.no_grad():
        return model(IDS).logits


@pytest.fixture
def folder(tmp_path):
    """Return a function that saves a model as a folder of Hugging Face."""

    def save(model, name="hf"):
        model.save_pretrained(tmp_path / name)
        return tmp_path / name

    return save


def load_all(folder):
    snapshot = Snapshot(str(folder))
    return {path[2:]: snapshot.read_object(path) for path in snapshot.get_manifest()}


# Megatron-core


@contextlib.contextmanager
def megatron_on_cpu(tmp_path):
    """Megatron-core with one rank, and without CUDA."""
    if importlib.util.find_spec("megatron") is None:
        pytest.skip("megatron-core is not installed")
    with warnings.catch_warnings(action="ignore"):
        from megatron.core import parallel_state
        from megatron.core.models.gpt import gpt_layer_specs  # noqa: F401 - warns of what is not installed
        from megatron.core.tensor_parallel import random
        from megatron.core.transformer.moe import moe_utils

    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        parallel_state.initialize_model_parallel()
        with (
            warnings.catch_warnings(action="ignore"),
            mock.patch.object(torch.cuda, "current_device", return_value="cpu"),
            mock.patch.object(random.CudaRNGStatesTracker, "fork", return_value=contextlib.nullcontext()),
            mock.patch.object(moe_utils, "te_general_gemm", None, create=True),
        ):
            yield
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def megatron_model(config, vocabulary):
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer import TransformerConfig

    experts = 4 if config.model_type in ("mixtral", "qwen3_moe") else None
    norms = config.model_type.startswith("qwen3")
    made = TransformerConfig(
        num_layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        num_attention_heads=config.num_attention_heads,
        num_query_groups=config.num_key_value_heads,
        kv_channels=16,
        ffn_hidden_size=config.intermediate_size,
        moe_ffn_hidden_size=96 if experts else None,
        num_moe_experts=experts,
        moe_router_topk=2,
        moe_router_load_balancing_type="none",
        moe_token_dispatcher_type="allgather",
        use_cpu_initialization=True,
        gated_linear_unit=True,
        activation_func=F.silu,
        normalization="RMSNorm",
        layernorm_epsilon=config.rms_norm_eps,
        qk_layernorm=norms,
        add_bias_linear=False,
        add_qkv_bias=config.model_type == "qwen2",
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        gradient_accumulation_fusion=False,
    )
    spec = get_gpt_layer_local_spec(num_experts=experts, normalization="RMSNorm", qk_layernorm=norms)
    theta = config.rope_parameters["rope_theta"]
    model = GPTModel(
        made,
        spec,
        vocab_size=vocabulary,
        max_sequence_length=32,
        position_embedding_type="rope",
        rotary_base=theta,
        share_embeddings_and_output_weights=config.tie_word_embeddings,
        parallel_output=False,
    )
    return model.eval()


class Tensors:
    """The tensors of a model, without the states of Transformer Engine."""

    def __init__(self, model):
        self.held = {name: each for name, each in model.state_dict().items() if isinstance(each, torch.Tensor)}

    def state_dict(self):
        return dict(self.held)

    def load_state_dict(self, state):
        assert state.keys() == self.held.keys()


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("llama", {}),
        ("llama", {"tie_word_embeddings": True}),
        ("qwen2", {}),
        ("qwen3", {}),
        ("mixtral", {}),
        ("qwen3_moe", {}),
    ],
)
def test_tensor_map_megatron_hf_models_compute_the_same(kind, changes, tmp_path, folder):
    theirs = hugging_face(kind, **changes)
    source = folder(theirs)
    tensor_map = TensorMap.load("megatron-hf", theirs.config.to_dict() | {"transformer_impl": "local"})
    with megatron_on_cpu(tmp_path):
        model = megatron_model(theirs.config, SIZES["vocab_size"])
        Snapshot(str(source)).restore({"model": Tensors(model)}, options=RestoreOptions(map=tensor_map.reversed()))
        mask = torch.ones(1, 1, 8, 8).triu(1).bool()
        with torch.no_grad():
            logits = model(IDS, torch.arange(8)[None], mask)
        torch.testing.assert_close(logits, logits_of(theirs), rtol=1e-4, atol=1e-4)
        taken = Snapshot.take(str(tmp_path / "taken"), {"model": Tensors(model)})
    taken.convert(Target(str(tmp_path / "back"), "safetensors"), map=tensor_map, select=["model/**"])
    (tmp_path / "back/config.json").write_text((source / "config.json").read_text())
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "back")
    assert torch.equal(logits_of(again.eval()), logits_of(theirs))


def test_tensor_map_megatron_hf_cuts_a_padded_vocabulary(tmp_path, folder):
    theirs = hugging_face("llama")
    source = folder(theirs)
    tensor_map = TensorMap.load("megatron-hf", source)
    Snapshot(str(source)).convert(str(tmp_path / "own"), map=tensor_map.reversed())
    state = load_all(tmp_path / "own")
    for name in ("embedding.word_embeddings.weight", "output_layer.weight"):
        state[name] = torch.cat([state[name], torch.full((8, 64), 7.0)])
    taken = Snapshot.take(str(tmp_path / "padded"), {"model": StateDict(**state)})
    taken.convert(Target(str(tmp_path / "back"), "safetensors"), map=tensor_map)
    want, got = load_all(source), load_all(tmp_path / "back")
    assert want.keys() == got.keys()
    assert all(torch.equal(want[name], got[name]) for name in want)


def test_tensor_map_megatron_hf_stacks_layers_of_a_distributed_checkpoint(tmp_path, folder):
    source = folder(hugging_face("mixtral"))
    tensor_map = TensorMap.load("megatron-hf", source)
    Snapshot(str(source)).convert(str(tmp_path / "own"), map=tensor_map.reversed())
    own = load_all(tmp_path / "own")
    stacked = {name: value for name, value in own.items() if ".layers." not in name}
    experts = {}
    for name in (name for name in own if name.startswith("decoder.layers.0.")):
        pair = torch.stack([own[name.replace("layers.0", f"layers.{layer}")] for layer in range(2)])
        short = name.replace("layers.0.", "layers.")
        if "local_experts" in name:
            number = int(short.split("local_experts.")[1].split(".")[0])
            place = short.replace(f"local_experts.{number}", "experts")
            experts.setdefault(place, {})[number] = pair
        else:
            stacked[short] = pair
    for place, found in experts.items():
        stacked[place] = torch.stack([found[number] for number in range(4)], 1)
    taken = Snapshot.take(str(tmp_path / "stacked"), {"model": StateDict(**stacked)})
    taken.convert(Target(str(tmp_path / "back"), "safetensors"), map=tensor_map)
    want, got = load_all(source), load_all(tmp_path / "back")
    assert want.keys() == got.keys()
    assert all(torch.equal(want[name], got[name]) for name in want)


# torchtitan


def titan_logits(state, config):
    """Compute what torchtitan's Llama and Qwen 3 compute with a state: their attention, positions and experts."""
    heads, groups, width = config.num_attention_heads, config.num_key_value_heads, 16
    theta, llama = config.rope_parameters["rope_theta"], config.model_type == "llama"
    frequencies = 1.0 / theta ** (torch.arange(0, width, 2).float() / width)
    angles = torch.outer(torch.arange(IDS.shape[1]).float(), frequencies)

    def norm(value, weight):
        return value * torch.rsqrt(value.pow(2).mean(-1, keepdim=True) + config.rms_norm_eps) * weight

    def rotate(value):  # [token, head, width]
        if llama:  # neighbours are a complex number
            pairs = torch.view_as_complex(value.reshape(*value.shape[:-1], -1, 2))
            turned = pairs * torch.polar(torch.ones_like(angles), angles)[:, None]
            return torch.view_as_real(turned).flatten(-2)
        half = torch.cat([-value[..., width // 2 :], value[..., : width // 2]], -1)
        twice = torch.cat([angles, angles], -1)[:, None]
        return value * twice.cos() + half * twice.sin()

    x = state["tok_embeddings.weight"][IDS[0]]
    for layer in range(config.num_hidden_layers):
        own = {name.split(".", 2)[2]: each for name, each in state.items() if name.startswith(f"layers.{layer}.")}
        y = norm(x, own["attention_norm.weight"])
        q = (y @ own["attention.qkv_linear.wq.weight"].T).view(-1, heads, width)
        k = (y @ own["attention.qkv_linear.wk.weight"].T).view(-1, groups, width)
        v = (y @ own["attention.qkv_linear.wv.weight"].T).view(-1, groups, width)
        if not llama:
            q, k = norm(q, own["attention.q_norm.weight"]), norm(k, own["attention.k_norm.weight"])
        q, k = rotate(q), rotate(k)
        k, v = (each.repeat_interleave(heads // groups, 1) for each in (k, v))
        found = F.scaled_dot_product_attention(*(each.transpose(0, 1) for each in (q, k, v)), is_causal=True)
        x = x + found.transpose(0, 1).flatten(1) @ own["attention.wo.weight"].T
        y = norm(x, own["ffn_norm.weight"])
        if "moe.router.gate.weight" in own:
            scores, chosen = (y @ own["moe.router.gate.weight"].T).softmax(-1).topk(2)
            scores = scores / scores.sum(-1, keepdim=True)
            w1, w2, w3 = (own[f"moe.routed_experts.inner_experts.{each}"] for each in ("w1_EFD", "w2_EDF", "w3_EFD"))
            more = torch.zeros_like(x)
            for token in range(len(y)):
                for score, expert in zip(scores[token], chosen[token], strict=True):
                    inner = F.silu(w1[expert] @ y[token]) * (w3[expert] @ y[token])
                    more[token] += score * (w2[expert] @ inner)
        else:
            w1, w2, w3 = (own[f"feed_forward.w{number}.weight"] for number in (1, 2, 3))
            more = (F.silu(y @ w1.T) * (y @ w3.T)) @ w2.T
        x = x + more
    return norm(x, state["norm.weight"]) @ state["lm_head.weight"].T


@pytest.mark.parametrize(
    ("kind", "changes"),
    [("llama", {}), ("llama", {"tie_word_embeddings": True}), ("qwen3", {}), ("qwen3_moe", {})],
)
def test_tensor_map_torchtitan_hf_models_compute_the_same(kind, changes, tmp_path, folder):
    theirs = hugging_face(kind, **changes)
    source = folder(theirs)
    tensor_map = TensorMap.load("torchtitan-hf", theirs.config)
    Snapshot(str(source)).convert(str(tmp_path / "own"), map=tensor_map.reversed())
    own = load_all(tmp_path / "own")
    torch.testing.assert_close(titan_logits(own, theirs.config), logits_of(theirs)[0], rtol=1e-4, atol=1e-4)
    if changes:
        own["lm_head.weight"] = own["tok_embeddings.weight"]  # tied again, as in the model
    Snapshot.take(str(tmp_path / "taken"), {"model": StateDict(**own)}).convert(
        Target(str(tmp_path / "back"), "safetensors"), map=tensor_map
    )
    (tmp_path / "back/config.json").write_text((source / "config.json").read_text())
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "back")
    assert torch.equal(logits_of(again.eval()), logits_of(theirs))


# Arguments


def test_tensor_map_load_names_the_config_it_needs(tmp_path):
    with pytest.raises(ValueError, match=r"model_type must be one of llama.*got None; pass config="):
        TensorMap.load("torchtitan-hf")
    with pytest.raises(ValueError, match=r"model_type must be one of .*got 'gpt2'"):
        TensorMap.load("megatron-hf", {"model_type": "gpt2"})
    with pytest.raises(ValueError, match="config must have num_attention_heads"):
        TensorMap.load("torchtitan-hf", {"model_type": "llama"})
    with pytest.raises(
        ValueError, match="'nothing': there is no such map; there are gguf-hf, megatron-hf, quantised-hf, torchtitan-hf"
    ):
        TensorMap.load("nothing")
    (tmp_path / "config.json").write_text(json.dumps(SIZES | {"model_type": "llama"}))
    assert TensorMap.load("torchtitan-hf", tmp_path).names() == [
        "gguf-hf",
        "megatron-hf",
        "quantised-hf",
        "torchtitan-hf",
    ]


def test_tensor_map_does_not_tie_a_model_that_is_not_tied(tmp_path, folder):
    source = folder(hugging_face("llama"))
    config = json.loads((source / "config.json").read_text())
    forward = TensorMap.load("torchtitan-hf", config | {"tie_word_embeddings": True})
    Snapshot(str(source)).convert(str(tmp_path / "own"), map=TensorMap.load("torchtitan-hf", config, reverse=True))
    with pytest.raises(RestoreError, match=r"lm_head.weight must equal tok_embeddings.weight"):
        Snapshot(str(tmp_path / "own")).convert(Target(str(tmp_path / "back"), "safetensors"), map=forward)
    assert not (tmp_path / "back").exists()


@pytest.mark.parametrize("name", ["torchtitan-hf", "megatron-hf"])
def test_tensor_map_accepts_tied_weights_stored_twice(name, tmp_path):
    config = SIZES | {"model_type": "qwen3", "tie_word_embeddings": True}
    embed = torch.randn(120, 64)
    state = StateDict({"model.embed_tokens.weight": embed, "lm_head.weight": embed.clone()})
    held = Snapshot.take(str(tmp_path / "taken"), {"model": state})
    got = held.get_state_dict_for_key("model", map=TensorMap.load(name, config, reverse=True))
    assert all(torch.equal(each, embed) for each in got.values())
    assert got.keys() <= {"tok_embeddings.weight", "lm_head.weight", "embedding.word_embeddings.weight"}


def test_tensor_map_refuses_a_folder_without_some_experts(tmp_path):
    config = SIZES | {"model_type": "qwen3_moe", "num_experts": 4}
    state = {f"model.layers.0.mlp.experts.{e}.gate_proj.weight": torch.randn(4, 4) for e in range(3)}
    held = Snapshot.take(str(tmp_path / "taken"), {"model": StateDict(state)})
    with pytest.raises(RestoreError, match=r"experts\.3\.gate_proj\.weight is missing"):
        held.get_state_dict_for_key("model", map=TensorMap.load("torchtitan-hf", config, reverse=True))
