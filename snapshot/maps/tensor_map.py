"""Tensor maps: recipes from the tensors of one layout to those of another, with their reverse."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from importlib import resources
from typing import Any, Literal, NamedTuple

from snapshot.decoding import decode_json, decode_yaml
from snapshot.errors import CorruptSnapshotError, RestoreError
from snapshot.maps.recipe import Recipe, RecipeTarget, Spec, check_sizes
from snapshot.maps.states import StateRule, parse_states
from snapshot.text import listed

Others = Literal["error", "keep", "drop"]
Found = tuple[int, tuple[str, ...], tuple[int, tuple[str, ...]]] | None
_MOST_NAMES = 1 << 20
_FIELDS = {"tensor_map", "description", "for", "sizes", "rules", "others", "dequantise", "states"}
METHODS = ("awq", "bitsandbytes", "gptq", "gptq_v2")
"""Methods of quantisation, under the names that Hugging Face's `quantization_config` has for them."""
_SUFFIXES = (".yaml", ".yml", ".json")


class MapPlan(NamedTuple):
    """The tensors that a map makes of given ones."""

    targets: dict[str, RecipeTarget]
    ties: dict[str, str]
    """Name -> the target that it is the same tensor as."""
    equal: list[tuple[str, str]]
    """Pairs of sources that must hold the same values. Only the first of each is used."""
    dropped: list[str]
    """Sources that are not in any target."""


class TensorMap:
    """Recipes that turn the tensors of one layout into those of another.

    A rule is a text of the form `old -> new`, or a dict. `names` are the names on both sides, separated by commas.
    Placeholders such as `{i}` stand for one component of a name, and `{rest...}` for several. `axes` describes splits,
    concatenations, stacks, transpositions and reshapes. `sizes` are the sizes of axes that do not follow from the
    shapes. `dtype` casts. `drop` names tensors that have no counterpart. Several names on one side without `axes` are
    the same tensor, such as tied embeddings. Each tensor is used by the first rule that matches its name.

    >>> from snapshot import TensorMap
    >>> qkv = {"names": "{i}.qkv -> {i}.q, {i}.k, {i}.v", "axes": "(h + h + h) c -> h c, h c, h c"}
    >>> tensor_map = TensorMap(["embed -> wte", qkv])
    >>> tensor_map.rename(["embed", "3.qkv"])
    {'embed': ['wte'], '3.qkv': ['3.q', '3.k', '3.v']}
    """

    dequantise: str | None = None
    """An attribute of the class, since maps were pickled before they had it."""
    states: tuple[StateRule, ...] = ()
    """As above."""

    def __init__(
        self,
        rules: Iterable[str | Mapping[str, Any]],
        *,
        sizes: Mapping[str, int] | None = None,
        others: Others = "error",
        dequantise: str | None = None,
        states: Mapping[str, str | None] | None = None,
    ) -> None:
        """Parse the rules.

        Args:
            rules: The rules, in order.
            sizes: Sizes of axes, for all rules.
            others: What happens to tensors that no rule names: an error, or they are kept or dropped.
            dequantise: `"bitsandbytes"`, `"gptq"`, `"gptq_v2"` or `"awq"`: the weights that it has quantised are
                computed first, so the rules name plain weights. Without rules, all tensors keep their names.
            states: Names of what an optimizer keeps of each tensor, with `{name...}` and `{state}` -> their new paths,
                such as `optim/state/{name}/{state}`, or None to drop them. They are mapped as their tensors are.

        Raises:
            ValueError: A rule is invalid.
        """
        if others not in ("error", "keep", "drop"):
            raise ValueError(f"others must be 'error', 'keep' or 'drop', got {others!r}")
        if dequantise is not None and dequantise not in METHODS:
            raise ValueError(f"dequantise must be {', '.join(METHODS)}, got {dequantise!r}")
        given = check_sizes(sizes or {})
        self.others = others
        if dequantise is not None:
            self.dequantise = dequantise
        if states:
            self.states = parse_states(states)
        self.recipes = [Recipe.parse(rule, given) for rule in rules]
        self._found: dict[str, Found] = {}
        """The first rule for each name, as far as that was asked."""

    @staticmethod
    def load(
        name: str | os.PathLike[str],
        config: Mapping[str, Any] | str | os.PathLike[str] | None = None,
        *,
        reverse: bool = False,
    ) -> TensorMap:
        """Load a map that comes with the library, or one from a YAML or JSON file.

        Args:
            name: The name of a map, such as `"torchtitan-hf"`, or a path that ends in .yaml, .yml or .json.
            config: The sizes that the map asks for, under their names in Hugging Face's config.json: that file, its
                folder, a dict, or a config object of transformers.
            reverse: Return the reverse map.

        Raises:
            ValueError: There is no such map, it is invalid, or the config lacks a size.
        """
        text = os.fspath(name)
        found = _read_file(text)
        unknown = sorted(map(str, found.keys() - _FIELDS))
        if unknown or found.get("tensor_map") != 1 or not isinstance(found.get("rules"), list):
            raise ValueError(f"{text}: not a tensor map: it must have 'tensor_map: 1' and rules, and no {unknown}")
        fields = _read_config(config)
        kinds = found.get("for", [])
        if not isinstance(kinds, list):
            raise ValueError(f"{text}: for must be a list of model types, got {kinds!r}")
        if kinds and fields.get("model_type") not in kinds:
            raise ValueError(
                f"{text}: the config's model_type must be one of {', '.join(map(str, kinds))}, got "
                f"{fields.get('model_type')!r}; pass config="
            )
        try:
            sizes = _resolve_sizes(found.get("sizes") or {}, fields)
            rules = [made for rule in found["rules"] if (made := _rule_for(rule, fields)) is not None]
            method = _choose_method(found.get("dequantise"), fields, reverse=reverse)
            others, states = found.get("others", "error"), found.get("states")
            made = TensorMap(rules, sizes=sizes, others=others, dequantise=method, states=states)
        except ValueError as error:
            raise ValueError(f"{text}: {error}") from None
        if reverse:
            made = made.reversed()
            made.dequantise = method
        return made

    @staticmethod
    def names() -> list[str]:
        """Return the names of the maps that come with the library."""
        return sorted(each.name.removesuffix(".yaml") for each in _shipped().iterdir() if each.name.endswith(".yaml"))

    def __repr__(self) -> str:
        more = f", dequantise={self.dequantise!r}" if self.dequantise is not None else ""
        return f"TensorMap({self.recipes}, others={self.others!r}{more})"

    def reversed(self) -> TensorMap:
        """Return the map from the new layout to the old one.

        Dropped tensors do not come back. Casts are not undone: tensors keep their dtype. Of several names of one
        tensor, all must hold the same values. Weights are not quantised again. States of optimizers are not mapped.

        >>> from snapshot import TensorMap
        >>> TensorMap([{"names": "a -> b", "axes": "x y -> y x"}]).reversed().rename(["b"])
        {'b': ['a']}
        """
        made = TensorMap([], others=self.others)
        made.recipes = [recipe.reversed() for recipe in self.recipes]
        return made

    def rename(self, names: Iterable[str]) -> dict[str, list[str]]:
        """Return the names that each tensor becomes a part of, as far as they follow from names alone."""
        made: dict[str, list[str]] = {}
        for name in names:
            found = self._find(name)
            if found is not None:
                recipe = self.recipes[found[0]]
                values = dict(zip(recipe.free, found[1], strict=True))
                values |= {each: f"{{{each}}}" for each in recipe.unstacked}
                made[name] = [each.fill(values) for each in recipe.targets]
        return made

    def matches(self, name: str) -> bool:
        """Return True if a rule uses or drops a tensor of that name."""
        return self._find(name) is not None

    def drops(self, name: str) -> bool:
        """Return True if a rule drops a tensor of that name."""
        found = self._find(name)
        return found is not None and not self.recipes[found[0]].targets

    def _find(self, name: str) -> Found:
        """Return the first rule for a name: its number, its case, and the tensor's place in that."""
        if name not in self._found:
            if len(self._found) > _MOST_NAMES:
                self._found.clear()
            match = None
            for number, recipe in enumerate(self.recipes):
                place = recipe.find(name)
                if place is not None:
                    match = number, *place
                    break
            self._found[name] = match
        return self._found[name]

    def plan(self, specs: Mapping[str, Spec]) -> MapPlan:
        """Return the tensors that the map makes of tensors with these names, dtypes and shapes.

        Raises:
            RestoreError: Tensors do not fit the rules, or no rule names them. The error lists all of them.
        """
        cases: dict[tuple[int, tuple[str, ...]], dict[tuple[int, tuple[str, ...]], str]] = {}
        plan = MapPlan({}, {}, [], [])
        wrong: list[str] = []
        for name, spec in specs.items():
            match = self._find(name)
            if match is not None:
                cases.setdefault(match[:2], {})[match[2]] = name
            elif self.others == "error":
                wrong.append(f"{name}: no rule names it")
            elif self.others == "keep":
                _add(plan, {name: RecipeTarget.same(name, spec)}, {}, wrong)
            else:
                plan.dropped.append(name)
        for (number, case), found in cases.items():
            recipe = self.recipes[number]
            if not recipe.targets:
                plan.dropped.extend(found.values())
                continue
            try:
                made = recipe.make(case, found, specs)
            except ValueError as error:
                wrong.append(f"{recipe}: {error}")
                continue
            _add(plan, made.targets, made.ties, wrong)
            plan.equal.extend(made.equal)
        if not cases and specs:
            some = listed(sorted(specs)[:5])
            raise RestoreError(f"no rule of the tensor map names any of the tensors, such as:{some}", sorted(specs))
        if wrong:
            raise RestoreError(f"the tensor map does not fit:{listed(wrong, 20)}", wrong)
        return plan


def _add(plan: MapPlan, targets: Mapping[str, RecipeTarget], ties: Mapping[str, str], wrong: list[str]) -> None:
    for name in (*targets, *ties):
        if name in plan.targets or name in plan.ties:
            wrong.append(f"{name}: two rules make a tensor of this name")
    plan.targets.update(targets)
    plan.ties.update(ties)


def _shipped() -> Any:
    return resources.files("snapshot.maps") / "layouts"


def _read_file(text: str) -> dict[str, Any]:
    if text.endswith(_SUFFIXES):
        with open(text, encoding="utf-8") as file:
            content = file.read()
    else:
        place = _shipped() / f"{text}.yaml"
        if "/" in text or not place.is_file():
            raise ValueError(
                f"{text!r}: there is no such map; there are {', '.join(TensorMap.names())}, and files whose names end "
                "in .yaml, .yml or .json"
            )
        content = place.read_text(encoding="utf-8")
    try:
        found = decode_yaml(content, text)
    except CorruptSnapshotError as error:
        raise ValueError(str(error)) from error
    if not isinstance(found, dict):
        raise ValueError(f"{text}: not a tensor map: it must be a mapping with rules")
    return found


def _rule_for(rule: Any, fields: Mapping[str, Any]) -> Any:
    """Return a rule for a config, or None if the config does not fulfil its condition: `when: {field: value}`."""
    if not isinstance(rule, dict):
        return rule
    conditions = rule.get("when", {})
    if not isinstance(conditions, dict):
        raise ValueError(f"when must be a mapping, got {conditions!r}")
    for name, wanted in conditions.items():
        value = fields.get(name) or False
        if value not in (wanted if isinstance(wanted, list) else [wanted]):
            return None
    made = {name: value for name, value in rule.items() if name != "when"}
    return made | {"sizes": _resolve_sizes(rule["sizes"], fields)} if "sizes" in rule else made


def _resolve_sizes(asked: Any, fields: Mapping[str, Any]) -> dict[str, int]:
    """Return sizes that are numbers, or names of fields of a config. With None among the choices, one may be absent."""
    if not isinstance(asked, dict):
        raise ValueError(f"sizes must be a mapping, got {asked!r}")
    sizes = {}
    for name, value in asked.items():
        choices: Sequence[Any] = value if isinstance(value, list) else [value]
        for choice in choices:
            size = _evaluate(choice, fields)
            if size is not None:
                sizes[name] = size
                break
        else:
            if None not in choices:
                raise ValueError(f"config must have {' or '.join(map(str, choices))}; pass config=")
    return sizes


def _choose_method(declared: Any, fields: Mapping[str, Any], *, reverse: bool) -> str | None:
    """Return the method that a map takes back, or None.

    `declared`: a method, or "quantization_config" for that of the config. The reverse of a map for a model of Hugging
    Face reads what its config describes, so it also takes back a known method there.
    """
    if declared is None:
        method = _method_in(fields) if reverse else None
        return method if method in METHODS else None
    if reverse:
        raise ValueError("weights cannot be quantised again, so it has no reverse")
    if declared != "quantization_config":
        return declared  # type: ignore[no-any-return]
    method = _method_in(fields)
    if method not in METHODS:
        raise ValueError(f"quantization_config must be of {', '.join(METHODS)}, got {method}; pass config=")
    return method


def _method_in(fields: Mapping[str, Any]) -> str | None:
    """Return the method in a config, with its variant if that has another layout."""
    found = fields.get("quantization_config")
    if not isinstance(found, Mapping):
        return None
    method = str(found.get("quant_method") or "")
    if not method and (found.get("load_in_4bit") or found.get("load_in_8bit")):
        return "bitsandbytes"
    variants = [found.get(name) for name in ("checkpoint_format", "format", "version")]
    variant = next((str(each).lower() for each in variants if isinstance(each, str)), "")
    if (method, variant) == ("gptq", "gptq_v2"):
        return "gptq_v2"
    plain = {"gptq": ("", "gptq", "gemm"), "awq": ("", "gemm")}.get(method)
    return method if plain is None or variant in plain else f"{method} with {variant}"


def _evaluate(choice: Any, fields: Mapping[str, Any]) -> int | None:
    """Return a number, a field of the config, or the quotient of two fields."""
    if not isinstance(choice, str):
        return choice  # type: ignore[no-any-return]
    above, slash, below = choice.partition(" / ")
    found = [fields.get(each) for each in ((above, below) if slash else (above,))]
    if not all(isinstance(each, int) and not isinstance(each, bool) and each > 0 for each in found):
        return None
    if slash and found[0] % found[1]:  # type: ignore[operator]
        raise ValueError(f"{choice}: {found[0]} must be a multiple of {found[1]}")
    return found[0] // found[1] if slash else found[0]  # type: ignore[operator]


def _read_config(config: Any) -> Mapping[str, Any]:
    if config is None:
        return {}
    if hasattr(config, "to_dict"):
        config = config.to_dict()
    if isinstance(config, Mapping):
        return config
    path = os.fspath(config)
    path = os.path.join(path, "config.json") if os.path.isdir(path) else path
    with open(path, "rb") as file:
        found = decode_json(file.read(), Any, path)
    if not isinstance(found, dict):
        raise ValueError(f"{path}: must be a JSON object")
    return found


__all__ = ["MapPlan", "Others", "RecipeTarget", "Spec", "TensorMap"]
