"""Logical names: globs, renaming, and names that differ only by model wrappers."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from snapshot.errors import RestoreError

# Globs over logical paths.
#
# `*` matches within one component, and `**` crosses components. A match of a container covers everything below it.


def compile_glob(glob: str) -> re.Pattern[str]:
    """Return the regular expression of a glob; it matches a path, or any path below one it matches.

    >>> bool(compile_glob("model/*").match("model/layer.0.weight")), bool(compile_glob("*").match("model/w"))
    (True, True)
    >>> bool(compile_glob("*/weight").match("model/a/weight")), bool(compile_glob("**/weight").match("model/a/weight"))
    (False, True)
    """
    return re.compile(f"(?:{_translate_glob(glob, '(?:')})(?:/.*)?\\Z", re.DOTALL)


def compile_capturing_glob(glob: str) -> re.Pattern[str]:
    """Return the expression of a glob with a group for each wildcard, and one for the path below the match.

    >>> compile_capturing_glob("model/*.w").match("model/a.w").groups()
    ('a', '')
    """
    return re.compile(f"(?:{_translate_glob(glob, '(')})(|/.*)\\Z", re.DOTALL)


WILDCARDS = re.compile(r"\*\*/|\*\*|\*")
"""Wildcards that a glob's groups capture."""


def _translate_glob(glob: str, group: str) -> str:
    """Return the regular expression of a glob, with `group` as the opening of the group around each wildcard."""
    made, i = "", 0
    while i < len(glob):
        if glob.startswith("**/", i):
            made, i = f"{made}{group}(?:[^/]*/)*)", i + 3
        elif glob.startswith("**", i):
            made, i = f"{made}{group}.*)", i + 2
        elif glob[i] == "*":
            made, i = f"{made}{group}[^/]*)", i + 1
        elif glob[i] == "?":
            made, i = made + "[^/]", i + 1
        elif glob[i] == "[" and "]" in glob[i + 2 :]:
            end = glob.index("]", i + 2)
            inner = glob[i + 1 : end].replace("\\", "\\\\")
            made, i = made + "[" + ("^" + inner[1:] if inner[0] == "!" else inner) + "]", end + 1
        else:
            made, i = made + re.escape(glob[i]), i + 1
    return made


def expect_globs(name: str, globs: Sequence[str]) -> None:
    """Raise TypeError if one string was passed instead of a list of globs."""
    if isinstance(globs, str):
        raise TypeError(f"{name} must be a list of globs, got one string; write [{globs!r}]")
    if not isinstance(globs, Collection) or not all(isinstance(glob, str) for glob in globs):
        raise TypeError(f"{name} must be a list of globs, got {globs!r}")


def matcher(globs: Sequence[str]) -> Callable[[str], bool]:
    """Return a function that returns True for a path that any of the globs matches."""
    expect_globs("globs", globs)
    patterns = [compile_glob(glob) for glob in globs]
    return lambda path: any(each.match(path) for each in patterns)


def find_unmatched(globs: Sequence[str], paths: Iterable[str]) -> list[str]:
    """Return the globs that match none of the paths."""
    paths = list(paths)
    return [glob for glob in globs if not any(map(compile_glob(glob).match, paths))]


# Renaming of a snapshot's names to an application's, by paths, prefixes, globs or a function.

Rename = Mapping[str, str] | Callable[[str], str]
"""Names in the snapshot -> names in the application: a dict of paths, prefixes or globs, or a function."""
Change = Callable[[str], str]


def compile_rename(rename: Rename, known: Collection[str]) -> tuple[Change, list[str]]:
    """Return the function that renames a path, and the names in `rename` that match none of the `known` paths.

    A key of the dict is the path of an entry, which is renamed with everything below it. Or it is a prefix that ends at
    a dot, such as a submodule's name. Or it is a glob, whose wildcards stand for the same text in the new name.

    >>> known = ["model", "model/a.weight", "model/layers.0.attn.q"]
    >>> change, unmatched = compile_rename({"model/a": "model/enc", "model/layers.*.attn.*": "model/h.*.att.*"}, known)
    >>> [change(path) for path in known], unmatched
    (['model', 'model/enc.weight', 'model/h.0.att.q'], [])
    """
    if callable(rename):
        return _check_function(rename), []
    if not isinstance(rename, Mapping):
        raise TypeError(f"rename must be a dict or a function, got {type(rename).__name__}")
    paths = known if isinstance(known, (set, frozenset, dict)) else set(known)
    exact: dict[str, str] = {}
    dotted: dict[str, str] = {}
    globs: list[tuple[re.Pattern[str], list[str]]] = []
    unmatched: list[str] = []
    for old, new in rename.items():
        if not isinstance(old, str) or not isinstance(new, str):
            raise TypeError(f"rename must map str to str, got {old!r}: {new!r}")
        if old in paths:
            exact[old] = new
        elif any(path.startswith(f"{old}.") for path in paths):
            dotted[old] = new
        elif WILDCARDS.search(old):
            globs.append(_compile_rename_glob(old, new))
            if not any(map(globs[-1][0].match, paths)):
                unmatched.append(old)
        else:
            unmatched.append(old)
    return _rename_by_mapping(exact, dotted, globs), unmatched


def _check_function(rename: Callable[[str], Any]) -> Change:
    def change(path: str) -> str:
        try:
            name = rename(path)
        except Exception as error:
            raise RestoreError(
                f"rename raised {type(error).__name__} for {path!r}: {error}", [f"{path}: rename raised {error!r}"]
            ) from error
        if not isinstance(name, str):
            raise TypeError(f"rename must return str, got {name!r} for {path!r}")
        return name

    return change


def _compile_rename_glob(old: str, new: str) -> tuple[re.Pattern[str], list[str]]:
    """Return a capturing pattern of a glob, and the texts between the wildcards of the new name."""
    if WILDCARDS.findall(old) != WILDCARDS.findall(new):
        raise ValueError(f"rename: {new!r} must have the same wildcards as {old!r}, in the same order")
    return compile_capturing_glob(old), WILDCARDS.split(new)


def _rename_by_mapping(
    exact: Mapping[str, str], dotted: Mapping[str, str], globs: list[tuple[re.Pattern[str], list[str]]]
) -> Change:
    ends = re.compile(r"[/.]")

    def change(path: str) -> str:
        if path in exact:
            return exact[path]
        for end in [found.start() for found in ends.finditer(path)][::-1]:
            prefix = path[:end]
            new = dotted.get(prefix)
            if new is None and path[end] == "/":
                new = exact.get(prefix)
            if new is not None and prefix in dotted and new.count("/") < prefix.count("/"):
                return f"{new}/{path[end + 1 :]}"  # the rest is a separate name
            if new is not None:
                return new + path[end:]
        for found, texts in globs:
            match = found.match(path)
            if match is not None:
                return "".join(map("".join, zip(texts, match.groups(), strict=True)))  # last: the path below
        return path

    return change


# Matching of names that differ only by model wrappers.

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
