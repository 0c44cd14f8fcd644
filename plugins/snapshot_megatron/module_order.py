"""The order in which Megatron-core's models have their parameters, by their names in a checkpoint.

The metadata of a directory has the names in this order, unless the ranks of data parallelism shared the weights among
them (`--ckpt-fully-parallel-save`). Then, the order is that of the known modules.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

LAYER = re.compile(r"^(.*?layers\.)(?:(\d{1,6})\.)?(.*)$")
"""Prefix of a stack of layers, the number of a layer if it has names of its own, and the name in the layer."""
_ENDS = (
    "embedding.word_embeddings.",
    "embedding.position_embeddings.",
    "embedding.tokentype_embeddings.",
    "embedding.",
)
"""Modules before the layers."""
_LAST = ("decoder.final_layernorm.", "decoder.final_norm.", "mtp.", "output_layer.")
"""Modules after the layers."""
_MODULES = (
    "input_layernorm.",
    "self_attention.core_attention.",
    "self_attention.linear_proj.",
    "self_attention.linear_qkv.",
    "self_attention.linear_q_proj.",
    "self_attention.linear_q_down_proj.",
    "self_attention.linear_q_up_proj.",
    "self_attention.linear_kv_down_proj.",
    "self_attention.linear_kv_up_proj.",
    "self_attention.q_layernorm.",
    "self_attention.k_layernorm.",
    "self_attention.kv_layernorm.",
    "pre_cross_attn_layernorm.",
    "cross_attention.linear_proj.",
    "cross_attention.linear_q.",
    "cross_attention.linear_kv.",
    "pre_mlp_layernorm.",
    "mlp.router.",
    "mlp.experts.",
    "mlp.shared_experts.",
    "mlp.linear_fc1.",
    "mlp.linear_fc2.",
)
"""Modules of a layer."""
_PARAMETERS = ("layer_norm_weight", "layer_norm_bias", "gate_weight", "weight", "bias")
"""Parameters of a module."""
_INNER = ("linear_fc1.", "linear_fc2.", "gate_")
"""Modules in a module, such as those of experts."""


def list_orders(keys: Sequence[str]) -> Iterator[list[str]]:
    """Yield the orders that the names of a model may have, each once: as given, and those of known modules.

    The norm before a layer's attention or MLP is stored with the linear layer that Transformer Engine fuses it with. In
    other layers, it is a module of its own, at the beginning.
    """
    seen: list[list[str]] = []
    numbers = {key: number for number, key in enumerate(keys)}
    for is_fused in (None, False, True):
        order = list(keys)
        if is_fused is not None:
            ranks = {key: _rank(key, is_fused) for key in keys}
            order.sort(key=lambda key: (ranks[key], numbers[key]))
        if order not in seen:
            seen.append(order)
            yield order


def _rank(key: str, is_fused: bool) -> tuple[int, ...]:
    """Return what a name is sorted by: place in the model, layer, module, inner module, parameter."""
    match = LAYER.match(key)
    if match is None:
        first = _find(key, _ENDS)
        if first < len(_ENDS):
            return 0, first, 0, 0, _parameter(key)
        return 2, _find(key, _LAST), 0, 0, _parameter(key)
    if match[1] != "decoder.layers.":
        return (2 if match[1].startswith("mtp.") else 1, _find(key, _LAST), int(match[2] or 0), 0, 0)
    name = match[3]
    module = _find(name, _MODULES)
    if "layer_norm_" in name and not is_fused:
        module = -1 if name.startswith("self_attention.") else _MODULES.index("pre_mlp_layernorm.")
    rest = name[len(_MODULES[module]) :] if 0 <= module < len(_MODULES) else name
    inner = next((number for number, each in enumerate(_INNER) if each in rest), -1)
    return 1, int(match[2] or 0), module, inner, _parameter(name)


def _find(name: str, prefixes: Sequence[str]) -> int:
    return next((number for number, each in enumerate(prefixes) if name.startswith(each)), len(prefixes))


def _parameter(name: str) -> int:
    last = name.rpartition(".")[2]
    return _PARAMETERS.index(last) if last in _PARAMETERS else len(_PARAMETERS)
