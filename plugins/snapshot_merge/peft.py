"""Adapters as PEFT saves them: the names of their tensors, and their configuration."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import msgspec

from snapshot.decoding import decode_json
from snapshot.errors import CorruptSnapshotError, UnsupportedFormatError
from snapshot.text import listed

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
PREFIX = "base_model.model."
"""The beginning of all names in a model of PEFT."""
_MAGNITUDE = re.compile(r"(.+)\.lora_magnitude_vector(?:\.weight)?", re.DOTALL)
_LORA = re.compile(r"(?P<module>.+)\.(?:lora_(?P<plain>[AB])\.weight|lora_embedding_(?P<embedding>[AB]))", re.DOTALL)

# The configuration: the scale of each module, and what this library does not merge.

_PLAIN_STARTS = (True, False, None, "gaussian", "eva", "orthogonal")
"""Values of `init_lora_weights` that leave the base model as it is."""
_VARIANTS = (
    "use_qalora",
    "use_bdlora",
    "lora_bias",
    "layer_replication",
    "target_parameters",
    "trainable_token_indices",
    "alora_invocation_tokens",
    "arrow_config",
    "kasa_config",
    "monteclora_config",
    "velora_config",
)
"""Fields that change the arithmetic of LoRA, or the tensors that it has."""
_TOKEN = re.compile(r"(?:[\w-]|\\\.|\.|\\d|\[0-9\])[*+]?", re.ASCII)
_LONGEST_PATTERN = 300


class LoraConfig(msgspec.Struct):
    """The fields of adapter_config.json that a merge needs."""

    peft_type: str
    lora_alpha: float = 8
    alpha_pattern: dict[str, float] | None = None
    use_rslora: bool = False
    fan_in_fan_out: bool = False
    use_dora: bool = False
    init_lora_weights: Any = True

    def scale_of(self, module: str, rank: int) -> float:
        """Return the factor of a module's product, by its name in the base model."""
        alpha = self.lora_alpha
        for pattern, value in (self.alpha_pattern or {}).items():
            if match_pattern(pattern, module):
                alpha = value
                break
        return alpha / (math.sqrt(rank) if self.use_rslora else rank)


def parse_config(data: bytes, where: object) -> LoraConfig:
    """Return the configuration of a LoRA. Raise UnsupportedFormatError for all that a merge would do wrong."""
    fields: dict[str, Any] = decode_json(data, dict[str, Any], where)
    config: LoraConfig = decode_json(data, LoraConfig, where)
    if config.peft_type != "LORA":
        raise UnsupportedFormatError(f"{where}: peft_type must be LORA for a merge, got {config.peft_type[:80]!r}")
    wrong = [f"{name}: {str(fields[name])[:80]}" for name in _VARIANTS if fields.get(name)]
    start = config.init_lora_weights
    if not any(start is each or (isinstance(start, str) and start == each) for each in _PLAIN_STARTS):
        wrong.append(f"init_lora_weights: {str(start)[:80]} (it changes the weights of the base model)")
    for pattern in config.alpha_pattern or {}:
        if _tokens_of(pattern) is None:
            wrong.append(
                f"alpha_pattern: {pattern[:80]!r} (it must be a name, with . and \\d for any character and digit)"
            )
    if wrong:
        raise UnsupportedFormatError(f"{where}: a LoRA with these fields cannot be merged:{listed(wrong)}")
    if not all(map(math.isfinite, [config.lora_alpha, *(config.alpha_pattern or {}).values()])):
        raise CorruptSnapshotError(f"{where}: alpha must be finite")
    return config


def _tokens_of(pattern: str) -> list[str] | None:
    """Return the characters and wildcards of a pattern, each with its repetition; None for any other expression."""
    inner = pattern.removeprefix("^").removesuffix("$")
    tokens = _TOKEN.findall(inner)
    return tokens if inner and "".join(tokens) == inner and len(pattern) <= _LONGEST_PATTERN else None


def match_pattern(pattern: str, name: str) -> bool:
    r"""Return True if a pattern is a name, or its end after a dot. It takes time in proportion to both lengths.

    PEFT matches regular expressions, which could take any time.

    >>> match_pattern(r"layers\.\d+\.q", "model.layers.12.q"), match_pattern("^q", "a.q")
    (True, False)
    """
    tokens = [
        (each[:-1], each[-1]) if each[1:] and each[-1] in "*+" else (each, "") for each in _tokens_of(pattern) or []
    ]
    active: set[int] = set()
    for position, character in enumerate(name):
        if position == 0 or (name[position - 1] == "." and not pattern.startswith("^")):
            active.add(0)
        _skip_optional(tokens, active)
        following: set[int] = set()
        for place in active:
            if place < len(tokens) and _accepts(tokens[place][0], character):
                following.update((place + 1, place) if tokens[place][1] else (place + 1,))
        active = following
    if name.endswith(".") and not pattern.startswith("^"):
        active.add(0)
    _skip_optional(tokens, active)
    return len(tokens) in active and bool(tokens)


def _skip_optional(tokens: Sequence[tuple[str, str]], active: set[int]) -> None:
    """Add the places behind tokens that need no character."""
    for place, (_, repeats) in enumerate(tokens):
        if place in active and repeats == "*":
            active.add(place + 1)


def _accepts(kind: str, character: str) -> bool:
    if kind in ("\\d", "[0-9]"):
        return character.isdecimal()
    return kind == "." or kind.removeprefix("\\") == character


# The names of tensors.


class AdapterPair(NamedTuple):
    """The names of the two factors of a module."""

    a: str
    b: str
    embedding: bool
    magnitude: str | None = None
    """The lengths of DoRA."""
    saved: str | None = None
    """The weight that the product is added to, in place of that of the base. PEFT saves that of embeddings."""


class AdapterNames(NamedTuple):
    """The tensors of an adapter, by the names in the base model."""

    pairs: dict[str, AdapterPair]
    """Module -> its factors."""
    replaced: dict[str, str]
    """Parameter -> the tensor that replaces it: of `modules_to_save`, trained biases, and whole embeddings."""


def sort_names(names: Iterable[str], where: object) -> AdapterNames:
    """Sort the names of an adapter's tensors. Raise UnsupportedFormatError for one that is not of a plain LoRA."""
    found: dict[tuple[str, bool], dict[str, str]] = {}
    made = AdapterNames({}, {})
    magnitudes: dict[str, str] = {}
    odd = []
    for name in names:
        match = _LORA.fullmatch(name)
        if match is not None:
            kind = match["plain"] or match["embedding"]
            found.setdefault((_base_name(match["module"]), match["plain"] is None), {})[kind] = name
        elif (length := _MAGNITUDE.fullmatch(name)) is not None:
            magnitudes[_base_name(length[1])] = name
        elif re.search(r"\.(lora_|token_adapter\.|vera_|ia3_)", name):
            odd.append(name)
        elif re.search(r"\.(original_module|modules_to_save)\.", name):  # written with bias="all", and not loaded
            continue
        elif made.replaced.setdefault(_base_name(name), name) != name:
            odd.append(name)
    for (module, embedding), factors in found.items():
        if factors.keys() != {"A", "B"} or module in made.pairs:
            odd += factors.values()
        else:
            own = magnitudes.pop(module, None), made.replaced.pop(f"{module}.weight", None)
            made.pairs[module] = AdapterPair(factors["A"], factors["B"], embedding, *own)
    odd += magnitudes.values()
    # PEFT loads the weight of the layer below the factors, and no other.
    saved = [pair.saved for pair in made.pairs.values() if pair.saved is not None]
    odd += [name for name in saved if not name.endswith(".base_layer.weight")]
    if odd:
        raise UnsupportedFormatError(f"{where}: these tensors cannot be merged:{listed(sorted(odd))}")
    if not made.pairs:
        raise UnsupportedFormatError(f"{where}: has no tensors of LoRA (lora_A, lora_B)")
    return made


def _base_name(name: str) -> str:
    return name.removeprefix(PREFIX).replace(".base_layer.", ".")


def choose_saved(names: Sequence[str], config: bytes, where: object) -> dict[str, str]:
    """Return the names of tensors that belong to an adapter, with those that PEFT saves them under.

    The names are those of a model of PEFT with the adapter `default`, or saved ones.
    """
    fields: dict[str, Any] = decode_json(config, dict[str, Any], CONFIG)
    if not isinstance(fields.get("peft_type"), str):
        raise CorruptSnapshotError(f"{CONFIG}: must have a peft_type")
    if not any(re.search(r"\.base_layer\.weight$|\.(modules_to_save|lora_\w+)\.default\b", name) for name in names):
        made = {name: name for name in names}
    else:
        found = {name: saved_name(name, "default") for name in names}
        made = {name: saved for name, saved in found.items() if saved is not None}
        bias = fields.get("bias", "none")
        if bias in ("all", "lora_only"):
            made |= {
                name: name
                for name in names
                if name not in made
                and name.endswith(".bias")
                and (bias == "all" or ".base_layer." in name)
                and ".original_module." not in name
            }
    if not any(".lora_" in name for name in made):
        raise UnsupportedFormatError(f"{where}: has no tensors of an adapter (lora_A, lora_B)")
    return made


def saved_name(name: str, adapter: str) -> str | None:
    """Return the name that PEFT saves a tensor of a model under; None if it does not belong to the adapter.

    >>> saved_name("base_model.model.q.lora_A.default.weight", "default")
    'base_model.model.q.lora_A.weight'
    """
    chosen = re.escape(adapter)
    found = re.fullmatch(
        rf"(.+)\.(lora_[AB]|lora_embedding_[AB]|lora_magnitude_vector)(?:\.{chosen})?(\.weight|\.bias)?",
        name,
        re.DOTALL,
    )
    if found is not None:
        end = "" if found[2] == "lora_magnitude_vector" else found[3] or ""
        return f"{found[1]}.{found[2]}{end}"
    found = re.fullmatch(rf"(.+)\.modules_to_save\.{chosen}\.(.+)", name, re.DOTALL)
    return None if found is None else f"{found[1]}.{found[2]}"
