"""The `snapshot` command.

Each verb is a module with `DESCRIPTION`, `EXAMPLES`, `add(parser)` for its arguments, and `run(arguments)`. That makes
values of the flags, calls the library once, prints the result with `emit`, and returns the exit status. A verb is added
by one line: in `arguments.py`, or, in a plugin, an entry point. Only the module of the verb that runs is imported: most
verbs need torch, and the command's help and version do not.
"""

from __future__ import annotations

import argparse
import gc
import io
import logging
import os
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, NoReturn

from snapshot import extensions
from snapshot.cli.arguments import Run, add_verb, list_verbs
from snapshot.cli.screen import ExitStatus, complain, printable
from snapshot.errors import SnapshotError
from snapshot.io.system import unwind_on_signals

if TYPE_CHECKING:
    from snapshot.events import Event


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        if "invalid choice" in message and not extensions.own_points():
            message += f"; {extensions.OWN} is not installed here, so the verbs of its plugins are not known"
        super().error(message)


def parser(described: Collection[str] | None = None) -> argparse.ArgumentParser:
    """Return the command's parser. Arguments of verbs that are not in `described` are left out; None has all."""
    made = _Parser(
        prog="snapshot",
        description="Exact, verified, fast checkpoints of PyTorch applications.",
        epilog="snapshot VERB --help shows the arguments of a verb, with examples. Exit status: 0; 1 if it found a "
        "difference or a fault; 2 if it could not run.",
        allow_abbrev=False,
    )
    made.add_argument("--version", action="store_true", help="print the library's version")
    verbs = made.add_subparsers(metavar="VERB")
    for name, verb in list_verbs().items():
        if described is None or name in described:
            add_verb(verbs, name)
        else:
            verbs.add_parser(name, help=verb.help)
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Return the exit status: 0, 1 (it found a difference or a fault) or 2 (it could not run)."""
    given = sys.argv[1:] if argv is None else argv
    return report_errors(lambda: _flushed(given))


def report_errors(work: Callable[[], int]) -> int:
    """Do the work of a command, and return the exit status. Errors are printed as lines on standard error."""
    try:
        return work()
    except BrokenPipeError:  # the reader of the output, such as `head`, has closed it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + 13  # as shells return after SIGPIPE, which Windows does not have
    except (SnapshotError, OSError, ValueError) as error:
        complain("error", error)
    except KeyboardInterrupt:
        return 130  # as shells return after SIGINT
    except Exception:  # noqa: BLE001 - a bug, not a difference
        traceback.print_exc()
        complain("error", "this is a bug in the command; please report it with the lines above")
    return ExitStatus.FAILED


def _flushed(argv: Sequence[str]) -> int:
    """Run the command, and flush its output, so that a failure to print is raised here and not at exit."""
    try:
        return _run(parser(argv), argv)
    except SystemExit as stop:  # argparse printed help (0) or an error (2), or a signal ended the verb
        return stop.code if isinstance(stop.code, int) else ExitStatus.OK
    finally:
        print(end="", flush=True)


def _run(whole: argparse.ArgumentParser, argv: Sequence[str]) -> int:
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # escape characters that the encoding lacks
            stream.reconfigure(errors="backslashreplace")
    arguments, rest = whole.parse_known_args(argv)
    several = next((each for each in ("globs", "urls") if hasattr(arguments, each)), "")
    if rest and (not several or any(each.startswith("-") for each in rest)):
        names = [printable(each.partition("=")[0]) for each in rest if each.startswith("-")]
        # No values: they may be secret.
        whole.error(f"unrecognized arguments: {', '.join(names)}" if names else "too many arguments")
    if rest:  # argparse accepts a positional list in one place only: `ls URL --flat GLOB`
        getattr(arguments, several).extend(rest)
    if arguments.version:
        from snapshot.text import VERSION  # slow: it looks up installed packages

        print(f"snapshot {VERSION}")
        return ExitStatus.OK
    run: Run | None = getattr(arguments, "run", None)
    if run is None:
        whole.print_help(sys.stderr)
        return ExitStatus.FAILED
    with as_command():
        return run(arguments)


@contextmanager
def as_command() -> Iterator[None]:
    """Let signals unwind the stack, print warnings as lines, and collect garbage rarely."""
    with unwind_on_signals(), _spoken(), _rare_collections():
        yield


@contextmanager
def _rare_collections() -> Iterator[None]:
    """Collect garbage less often: the many objects of a manifest are needed until the command ends."""
    usual = gc.get_threshold()
    gc.set_threshold(200_000, 50, 100)
    try:
        yield
    finally:
        gc.set_threshold(*usual)


@contextmanager
def _spoken() -> Iterator[None]:
    """Print each of the library's warnings as one line on standard error."""
    from snapshot.events import add_handler, remove_handler  # not needed for help

    handler = _Complaints(logging.WARNING)
    log = logging.getLogger("snapshot")
    log.addHandler(handler)
    waiting = _Waiting()
    add_handler(waiting)
    try:
        with warnings.catch_warnings():
            warnings.showwarning = lambda message, *_, **__: complain("warning", message)
            yield
    finally:
        log.removeHandler(handler)
        remove_handler(waiting)


class _Waiting:
    """Event handler that prints a line about retries now and then."""

    def __init__(self) -> None:
        self._next = time.monotonic() + 2.0

    def __call__(self, event: Event) -> None:
        if event.name == "retry" and time.monotonic() >= self._next:
            self._next = time.monotonic() + 10.0
            complain("retry", f"attempt {event.fields['attempt']}: {event.fields['error']}")


class _Complaints(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        complain(record.levelname.lower(), record.getMessage())
