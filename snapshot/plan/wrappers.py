"""Matching of names that differ only by model wrappers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

WRAPPERS = ("module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
"""Prefixes that wrappers add to names: DistributedDataParallel, DataParallel and AveragedModel, torch.compile, FSDP1,
and activation checkpointing."""
OWN = {"module": "n_averaged"}
"""Wrapper -> name of its own entry next to the wrapped module: AveragedModel's count."""


@dataclass(frozen=True)
class MatchedNames:
    """Mapping from names of a snapshot to names of an application."""

    names: Mapping[str, str] = field(default_factory=dict)
    """Saved name -> the application's name, for each name that differs."""
    wrappers: tuple[str, ...] = ()
    """Wrappers whose names differ."""
    ambiguous: tuple[tuple[tuple[str, ...], tuple[str, ...]], ...] = ()
    """Names of the application with their saved candidates, if the match is not one to one."""
    left_out: tuple[str, ...] = ()
    """Saved names that belong to a wrapper that the application lacks."""
    kept: tuple[str, ...] = ()
    """Names of the application that belong to a wrapper that the snapshot lacks."""


def match_names(saved: Iterable[str], live: Iterable[str]) -> MatchedNames:
    """Match dotted names, either all of them unchanged or all without wrappers.

    >>> match_names(["module.a.w", "module.b"], ["a.w", "b"]).names
    {'module.a.w': 'a.w', 'module.b': 'b'}
    >>> match_names(["a.w"], ["b.w"])
    MatchedNames(names={}, wrappers=(), ambiguous=(), left_out=(), kept=())
    """
    there, here = dict.fromkeys(saved), dict.fromkeys(live)
    exact = there.keys() & here.keys()
    if len(exact) == len(there) == len(here) or not any(map(_has_wrapper, (*there, *here))):
        return MatchedNames()
    plain_there, own = strip_wrappers(there)
    plain_here, own_here = strip_wrappers(here)
    saved_by_plain, live_by_plain = _invert_mapping(plain_there), _invert_mapping(plain_here)
    common = [plain for plain in live_by_plain if plain in saved_by_plain]
    away = tuple(name for name in there if name in own and plain_there[name] not in live_by_plain)
    kept = tuple(name for name in here if name in own_here and plain_here[name] not in saved_by_plain)
    if len(common) <= len(exact):
        bare = {name: ".".join(part for part in name.split(".") if part not in WRAPPERS) for name in (*there, *here)}
        candidates = _invert_mapping({name: bare[name] for name in there if name not in exact})
        left = [name for name in here if name not in exact and len(candidates.get(bare[name], ())) > 1]
        return MatchedNames(
            ambiguous=tuple(((name,), tuple(candidates[bare[name]])) for name in left), left_out=away, kept=kept
        )
    several = [plain for plain in common if len(saved_by_plain[plain]) > 1 or len(live_by_plain[plain]) > 1]
    if several:
        return MatchedNames(ambiguous=tuple((tuple(live_by_plain[one]), tuple(saved_by_plain[one])) for one in several))
    names = {saved_by_plain[plain][0]: live_by_plain[plain][0] for plain in common}
    names = {old: new for old, new in names.items() if old != new}
    wrappers: dict[str, None] = {}
    for old, new in names.items():
        one, other = Counter(old.split(".")), Counter(new.split("."))
        wrappers |= dict.fromkeys([*(one - other), *(other - one)])
    return MatchedNames(names, tuple(wrappers), (), away, kept)


def _has_wrapper(name: str) -> bool:
    return not _PARTS.isdisjoint(name.split("."))


_PARTS = frozenset(WRAPPERS)


def _invert_mapping(plain: Mapping[str, str]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for name, short in plain.items():
        found.setdefault(short, []).append(name)
    return found


def strip_wrappers(names: Iterable[str]) -> tuple[dict[str, str], set[str]]:
    """Return each name without wrappers, and the names that belong to a wrapper itself.

    A component belongs to a wrapper if all names with its prefix continue with it, except the wrapper's own. A
    submodule called `module` has siblings.
    """
    found: dict[str, str] = {}
    own: set[str] = set()
    rest: list[tuple[str, list[tuple[list[str], str]]]] = [("", [(name.split(".")[::-1], name) for name in names])]
    while rest:
        prefix, group = rest.pop()
        heads: dict[str, list[tuple[list[str], str]]] = {}
        for parts, name in group:
            heads.setdefault(parts[-1], []).append((parts, name))
        wrapper = next((head for head in heads if head in WRAPPERS), None)
        mine = OWN.get(wrapper, "") if wrapper else ""
        if wrapper and all(head in (wrapper, mine) for head in heads) and all(len(p) > 1 for p, _ in heads[wrapper]):
            for parts, name in heads.pop(wrapper):
                parts.pop()
                heads.setdefault("", []).append((parts, name))
            rest.append((prefix, heads.pop("")))
            own.update(name for inner in heads.values() for _, name in inner)
        for head, inner in heads.items():
            for parts, _ in inner:
                parts.pop()
            for parts, name in inner:
                if not parts:
                    found[name] = f"{prefix}{head}"
            deeper = [(parts, name) for parts, name in inner if parts]
            if deeper:
                rest.append((f"{prefix}{head}.", deeper))
    return {name: found[name] for name in names}, own
