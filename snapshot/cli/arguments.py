"""Arguments that verbs share, and the verbs by name, so that help can list them without importing any."""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import textwrap
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import cache, partial
from importlib import import_module
from typing import Any

from snapshot import extensions
from snapshot.cli.verb import Verb
from snapshot.errors import MissingExtraError, SnapshotError
from snapshot.io.url import VARIABLE, options_from_environment, read_options
from snapshot.text import parse_duration, parse_size

_BUILT_IN = {
    "ls": (10, "list the contents of a snapshot, or the snapshots in a folder"),
    "show": (20, "show one object: its description, statistics and some of its values"),
    "verify": (30, "read every byte of a snapshot, and compare it with its digest"),
    "diff": (50, "show the differences between two snapshots"),
    "cp": (60, "copy a snapshot from one storage to another"),
    "convert": (70, "write a checkpoint in another format: snapshot, safetensors, torch, dcp"),
    "rm": (120, "remove a snapshot, and leftovers of interrupted takes"),
    "prune": (130, "remove the steps of a folder that a policy does not keep"),
    "doctor": (190, "test which operations work at a URL, how fast, and what would help"),
    "completion": (200, "print a script that completes the command's words in a shell"),
}

GROUP: extensions.Group = "snapshot.verbs"
"""The entry-point group for verbs of plugins: `name = "package.verbs:VERB"`, which is a `Verb`."""
Run = Callable[[argparse.Namespace], int]


@cache
def list_verbs() -> dict[str, Verb]:
    """Return all verbs, in the order of the help. Only the declarations of plugins are imported.

    A declaration of another package that cannot be loaded is logged, and its verb raises when it runs.
    """
    found = {name: Verb(summary, f"snapshot.cli.{name}", order) for name, (order, summary) in _BUILT_IN.items()}
    for name, made in extensions.load_declared(GROUP, Verb, "snapshot"):
        verb = Verb("is not usable", "", fault=str(made)) if isinstance(made, SnapshotError) else made
        found.setdefault(name, verb)
    return dict(sorted(found.items(), key=lambda each: each[1].order))


def add_verb(verbs: Any, name: str) -> None:
    """Add a verb, as its module describes it. Its help ends with the module's examples.

    A verb of a plugin that fails here raises when it runs, so that all others work.
    """
    verb = list_verbs()[name]
    try:
        if verb.fault:
            raise SnapshotError(verb.fault)
        module = import_module(verb.module)
        examples = [(str(command), str(what)) for command, what in module.EXAMPLES]
        description, add, run = _filled(module.DESCRIPTION), module.add, module.run
    except (Exception, SystemExit) as error:  # noqa: BLE001 - raised when the verb runs
        broken = verbs.add_parser(name, help=verb.help, add_help=False)
        broken.add_argument("rest", nargs=argparse.REMAINDER)
        broken.set_defaults(run=partial(_raise_missing, _blame(name, verb, error)))
        return
    widest = max(len(command) for command, _ in examples)
    beside = widest < 50
    lines = [
        f"  snapshot {command:<{widest}}  {what}" if beside else f"  snapshot {command}\n      {what}"
        for command, what in examples
    ]
    parser = verbs.add_parser(
        name,
        help=verb.help,
        description=description,
        epilog="\n".join(["examples:", *lines]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    try:
        add(parser)
        parser.set_defaults(run=run)
    except (Exception, SystemExit) as error:  # noqa: BLE001 - raised when the verb runs
        parser.set_defaults(run=partial(_raise_missing, _blame(name, verb, error)))


def _blame(name: str, verb: Verb, error: BaseException) -> str:
    """Return why a verb's module is not usable. An error of this library's own is raised, but a missing package."""
    if extensions.is_own(verb.module) and not isinstance(error, ImportError):
        raise error
    if verb.fault:
        return verb.fault
    point = extensions.find(GROUP, name)
    owner = f" of {extensions.owner_of(point)}" if point is not None else ""
    why = error if isinstance(error, ImportError) else repr(error)
    return f"snapshot {name}: {verb.module}{owner} cannot be {'imported' if why is error else 'used'}: {why}"


def _raise_missing(message: str, given: argparse.Namespace) -> int:
    raise MissingExtraError(message)


def _filled(text: str) -> str:
    """Return a paragraph wrapped to the terminal: argparse wraps none if it keeps the examples unchanged."""
    return textwrap.fill(text, max(20, min(shutil.get_terminal_size().columns, 100) - 2))


# Arguments of several verbs


def add_storage(parser: argparse.ArgumentParser, *prefixes: str, short: bool = True) -> None:
    """Add `-o` and `--options` for the storage plugin. With prefixes, also add those for one of several URLs.

    If not `short`, `-o` has another meaning: each option must have a prefix, or be in a file.
    """
    group = parser.add_argument_group(
        "storage options",
        _filled(
            "Options for the storage plugin. Also read from SNAPSHOT_STORAGE_OPTIONS in the environment: JSON, or the "
            "name of a JSON file. Put keys and passwords there or in a file: all users of the machine see arguments."
        ),
    )
    for prefix in ("", *prefixes):
        flags = [f"--{prefix}-o"] if prefix else ["-o"]
        which = {"src": " of the source only", "dst": " of the destination only"}.get(prefix, "")
        if prefix or short:
            group.add_argument(
                *flags,
                action="append",
                default=[],
                type=assignment,
                dest=f"{prefix}_o".lstrip("_"),
                metavar="KEY=VALUE",
                help=f"an option{which}; repeatable; a.b=1 is {{a: {{b: 1}}}}; VALUE is JSON if it parses as JSON",
            )
        else:
            parser.set_defaults(o=[])
        flag = f"--{prefix}-options" if prefix else "--options"
        group.add_argument(
            flag, type=options_file, default={}, metavar="FILE", help=f"a file of options{which}: YAML or JSON"
        )


def options_of(arguments: argparse.Namespace, prefix: str = "") -> dict[str, Any]:
    """Return the storage options: from the environment, the file, then `-o`, where later ones override earlier ones.

    With a prefix, add those of one of several URLs.
    """
    made = options_from_environment()
    for each in dict.fromkeys(("", prefix)):
        _merge(made, getattr(arguments, f"{each}_options".lstrip("_")))
        for keys, value in getattr(arguments, f"{each}_o".lstrip("_")):
            for key in reversed(keys):
                value = {key: value}  # noqa: PLW2901 - from the innermost key outwards
            _merge(made, value)
    return made


def handed_on(options: dict[str, Any]) -> AbstractContextManager[None]:
    """Pass these options to child processes by the environment, where no argument shows them."""
    return environment({VARIABLE: json.dumps(options)})


@contextmanager
def environment(values: Mapping[str, str]) -> Iterator[None]:
    """Set variables of the environment, and restore them afterwards."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _merge(into: dict[str, Any], other: dict[str, Any]) -> None:
    for key, value in other.items():
        if isinstance(value, dict):
            into[key] = dict(below) if isinstance(below := into.get(key), dict) else {}
            _merge(into[key], value)
        else:
            into[key] = value


def add_json(parser: argparse.ArgumentParser, what: str = "print a JSON object, and nothing else") -> None:
    """Add `--json`: output for programs."""
    parser.add_argument("--json", action="store_true", help=what)


def add_pickle(parser: argparse.ArgumentParser) -> None:
    """Add `--allow-pickle`: read objects that only running a pickle creates."""
    parser.add_argument(
        "--allow-pickle", action="store_true", help="run pickles, which can run any code: only for trusted sources"
    )


def add_memory(parser: argparse.ArgumentParser) -> None:
    """Add `--memory`: the memory budget."""
    parser.add_argument("--memory", type=size, metavar="SIZE", help="approximate limit of memory, such as 256MiB")


def add_work(parser: argparse.ArgumentParser) -> None:
    """Add `--memory` and `--ranks`: the memory budget, and the processes that share the work."""
    add_memory(parser)
    parser.add_argument(
        "--ranks",
        action="store_true",
        help="share the work with the other processes that torchrun started; --memory is then for each host",
    )


def work_of(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return how much memory the work may use, and if all ranks share it."""
    return {"memory_budget_bytes": arguments.memory, "ranks": arguments.ranks}


def add_selection(parser: argparse.ArgumentParser) -> None:
    """Add `--select` and `--exclude`: globs over logical paths."""
    for flag, what in (("--select", "only matching objects"), ("--exclude", "no matching objects")):
        parser.add_argument(
            flag, action="append", default=[], metavar="GLOB", help=f"{what}, such as 'model/**'; repeatable"
        )


def add_rename(
    parser: argparse.ArgumentParser, what: str = "a path and its new one; repeatable", *, empty: bool = False
) -> None:
    """Add `--rename`: new names of paths. `empty`: the new name may be empty."""

    def pair(text: str) -> tuple[str, str]:
        old, equals, new = text.partition("=")
        if not (old and equals and (new or empty)):
            raise argparse.ArgumentTypeError(f"must be OLD=NEW, got {text!r}")
        return old, new

    parser.add_argument("--rename", action="append", default=[], type=pair, metavar="OLD=NEW", help=what)


def selection_of(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the entries to select and exclude, and their new names if the verb renames."""
    chosen = {"select": arguments.select, "exclude": arguments.exclude}
    return chosen | ({"rename": dict(arguments.rename) or None} if "rename" in arguments else {})


# Types of arguments. Their errors never show a value that may be secret.


def assignment(text: str) -> tuple[list[str], Any]:
    """Return the keys and the value of `a.b=value`. The value is JSON if it parses as JSON, else text."""
    name, equals, value = text.partition("=")
    keys = name.split(".")
    if not equals or not all(keys):
        raise argparse.ArgumentTypeError("an option must be KEY=VALUE; pass several in a file with --options")
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


def size(text: str) -> int:
    """Return a number of bytes."""
    if (made := parse_size(text)) is None:
        raise argparse.ArgumentTypeError(f"invalid size {text!r} (expected e.g. 64MiB)")
    return made


def duration(text: str) -> float:
    """Return a number of seconds.

    >>> duration("7d"), duration("90"), duration("1.5h")
    (604800.0, 90.0, 5400.0)
    """
    text = text.strip().lower()
    seconds = parse_duration(text if text[-1:].isalpha() else f"{text}s")
    if seconds is None:
        raise argparse.ArgumentTypeError(f"invalid duration {text!r} (expected e.g. 90s, 30m, 12h or 7d)")
    return seconds


def count(text: str) -> int:
    """Return a whole number above 0."""
    if not re.fullmatch(r"[0-9]{1,18}", text) or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be an integer above 0, got {text!r}")
    return int(text)
