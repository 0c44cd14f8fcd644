"""What arguments of several verbs are read by, and how a verb describes itself."""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import textwrap
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from snapshot.cli.verbs import VERBS
from snapshot.durations import parse_duration
from snapshot.storage_options import VARIABLE, options_from_environment, read_options

Verbs = Any
"""What `add_subparsers` returns: argparse has no public name for it."""

Run = Callable[[argparse.Namespace], int]


def verb(
    verbs: Verbs, name: str, description: str, examples: Sequence[tuple[str, str]], run: Run
) -> argparse.ArgumentParser:
    """Add a verb. Its help ends with examples: each a command without `snapshot`, and what it does."""
    widest = max(len(command) for command, _ in examples)
    beside = widest < 50
    lines = [
        f"  snapshot {command:<{widest}}  {what}" if beside else f"  snapshot {command}\n      {what}"
        for command, what in examples
    ]
    parser: argparse.ArgumentParser = verbs.add_parser(
        name,
        help=VERBS[name],
        description=_filled(description),
        epilog="\n".join(["examples:", *lines]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.set_defaults(run=run)
    return parser


def _filled(text: str) -> str:
    """Return a paragraph as wide as the terminal: argparse fills none where it leaves the examples as they are."""
    return textwrap.fill(text, max(20, min(shutil.get_terminal_size().columns, 100) - 2))


# What several verbs take


def add_storage(parser: argparse.ArgumentParser, *prefixes: str) -> None:
    """`-o` and `--options`: what the storage plugin should know. With prefixes also those of one of several URLs."""
    group = parser.add_argument_group(
        "storage options",
        _filled(
            "What the storage plugin should know. Also from the environment's SNAPSHOT_STORAGE_OPTIONS: JSON, or the "
            "name of such a file. Keys and passwords belong there or in a file: anybody on the machine sees arguments."
        ),
    )
    for prefix in ("", *prefixes):
        flags = [f"--{prefix}-o"] if prefix else ["-o"]
        which = {"src": " of the source only", "dst": " of the destination only"}.get(prefix, "")
        group.add_argument(
            *flags,
            action="append",
            default=[],
            type=assignment,
            dest=f"{prefix}_o".lstrip("_"),
            metavar="KEY=VALUE",
            help=f"an option{which}; repeatable, a.b=1 is {{a: {{b: 1}}}}, and what reads as JSON is JSON",
        )
        flag = f"--{prefix}-options" if prefix else "--options"
        group.add_argument(
            flag, type=options_file, default={}, metavar="FILE", help=f"a file of options{which}: YAML or JSON"
        )


def options_of(arguments: argparse.Namespace, prefix: str = "") -> dict[str, Any]:
    """Return the storage options that were given: environment, file, then `-o`, later ones over earlier ones; the same
    again for one of several URLs."""
    made = options_from_environment()
    for each in dict.fromkeys(("", prefix)):
        _merge(made, getattr(arguments, f"{each}_options".lstrip("_")))
        for keys, value in getattr(arguments, f"{each}_o".lstrip("_")):
            for key in reversed(keys):
                value = {key: value}  # noqa: PLW2901 - from the innermost outwards
            _merge(made, value)
    return made


@contextmanager
def handed_on(options: dict[str, Any]) -> Iterator[None]:
    """Within, child processes inherit these options, where no argument of theirs shows them."""
    before = os.environ.get(VARIABLE)
    os.environ[VARIABLE] = json.dumps(options)
    try:
        yield
    finally:
        if before is None:
            del os.environ[VARIABLE]
        else:
            os.environ[VARIABLE] = before


def _merge(into: dict[str, Any], other: dict[str, Any]) -> None:
    for key, value in other.items():
        if isinstance(value, dict):
            into[key] = dict(below) if isinstance(below := into.get(key), dict) else {}
            _merge(into[key], value)
        else:
            into[key] = value


def add_json(parser: argparse.ArgumentParser, what: str = "print a JSON object, and nothing else") -> None:
    """`--json`: for programs."""
    parser.add_argument("--json", action="store_true", help=what)


def add_pickle(parser: argparse.ArgumentParser) -> None:
    """`--allow-pickle`: for objects that only running a pickle makes."""
    parser.add_argument(
        "--allow-pickle", action="store_true", help="run pickles, which can run any code: only for what you trust"
    )


def add_select(parser: argparse.ArgumentParser) -> None:
    """`--select` and `--exclude`: globs over logical paths."""
    for flag, what in (("--select", "only what matches"), ("--exclude", "not what matches")):
        parser.add_argument(
            flag, action="append", default=[], metavar="GLOB", help=f"{what}, as 'model/**'; repeatable"
        )


def add_memory(parser: argparse.ArgumentParser) -> None:
    """`--memory`: the budget."""
    parser.add_argument("--memory", type=size, metavar="SIZE", help="how much memory to use at most, about: 256MiB")


# Types of arguments. What they raise never shows a value that may be a secret.


def assignment(text: str) -> tuple[list[str], Any]:
    """`a.b=value`: the keys and the value, which is JSON if it reads as that, else text."""
    name, equals, value = text.partition("=")
    keys = name.split(".")
    if not equals or not all(keys):
        raise argparse.ArgumentTypeError("an option is KEY=VALUE; the file of --options holds several")
    try:
        return keys, json.loads(value, parse_constant=_no_constant)
    except (ValueError, RecursionError):
        return keys, value


def _no_constant(name: str) -> Any:
    raise ValueError(name)


def options_file(name: str) -> dict[str, Any]:
    """Return the storage options in a file."""
    try:
        return read_options(name)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


_SIZES = {"": 1, "b": 1}
for _power, _letter in enumerate("kmgt", 1):
    _SIZES |= {_letter: 1024**_power, f"{_letter}ib": 1024**_power, f"{_letter}b": 1000**_power}


def size(text: str) -> int:
    """Return a number of bytes.

    >>> size("64MiB"), size("1.5g"), size("2MB"), size("4096")
    (67108864, 1610612736, 2000000, 4096)
    """
    found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*([a-z]*)", text.strip().lower())
    if found is None or found[2] not in _SIZES or (made := int(float(found[1]) * _SIZES[found[2]])) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no size, such as 64MiB")
    return made


def duration(text: str) -> float:
    """Return a number of seconds.

    >>> duration("7d"), duration("90"), duration("1.5h")
    (604800.0, 90.0, 5400.0)
    """
    text = text.strip().lower()
    seconds = parse_duration(text if text[-1:].isalpha() else f"{text}s")
    if seconds is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no duration, such as 90s, 30m, 12h or 7d")
    return seconds


def count(text: str) -> int:
    """Return a whole number above 0."""
    if not re.fullmatch(r"[0-9]{1,18}", text) or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number above 0")
    return int(text)


def pair(text: str) -> tuple[str, str]:
    """`OLD=NEW`."""
    old, equals, new = text.partition("=")
    if not (old and equals and new):
        raise argparse.ArgumentTypeError(f"{text!r} is not OLD=NEW")
    return old, new
