"""Globs over logical paths.

`*` matches within one component, and `**` crosses components. A match of a container covers everything below it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence


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


def matcher(globs: Sequence[str]) -> Callable[[str], bool]:
    """Return a function that returns True for a path that any of the globs matches."""
    expect_globs("globs", globs)
    patterns = [compile_glob(glob) for glob in globs]
    return lambda path: any(each.match(path) for each in patterns)


def find_unmatched(globs: Sequence[str], paths: Iterable[str]) -> list[str]:
    """Return the globs that match none of the paths."""
    paths = list(paths)
    return [glob for glob in globs if not any(map(compile_glob(glob).match, paths))]
