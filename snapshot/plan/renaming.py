"""Renaming of a snapshot's names to an application's, by paths, prefixes, globs or a function."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from typing import Any

from snapshot.errors import RestoreError
from snapshot.plan.globs import WILDCARDS, compile_capturing_glob

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
