"""What the options of a take (save/take_options.py) and of a restore (loading/restore_options.py) have in common."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import sys
from collections.abc import Callable, Mapping
from typing import Any, ParamSpec, TypeVar

from snapshot.errors import RankError, RestoreError, SnapshotExistsError, SnapshotNotFoundError

P = ParamSpec("P")
R = TypeVar("R")
Options = TypeVar("Options")


def expect_options(options: object, kind: type) -> None:
    """Raise TypeError unless options are of a kind."""
    if not isinstance(options, kind):
        raise TypeError(f"options must be {kind.__name__}(...), got {options!r}")


def with_given(options: Options, kind: type, given: Mapping[str, Any]) -> Options:
    """Return options with the arguments of a call that are not None, which go before them.

    What is not of the kind is returned as it is: the error must be raised where it can be sent to the other ranks.
    """
    if not isinstance(options, kind):
        return options
    changes = {name: value for name, value in given.items() if value is not None}
    return dataclasses.replace(options, **changes) if changes else options  # type: ignore[type-var]


EXPLAINED = (RankError, RestoreError, SnapshotExistsError, SnapshotNotFoundError)
"""Errors whose messages say all, so that frames of the library are left out of their tracebacks."""


def drop_frames(error: BaseException, outer: BaseException | None) -> None:
    """Drop the frames of the library up to the first one of the application, such as its `load_state_dict`.

    If there is none, also drop the errors that the library handled on the way, but not `outer`, which the application
    was handling at the call.
    """
    frames = error.__traceback__
    while frames is not None and not _is_of_application(frames.tb_frame.f_globals.get("__name__", "")):
        frames = frames.tb_next
    if frames is None:
        error.__context__ = outer
    error.__traceback__ = frames


def _is_of_application(module: str) -> bool:
    root = module.partition(".")[0]
    return root != __name__.partition(".")[0] and root not in sys.stdlib_module_names


def with_options(kind: Any, argument: str = "options") -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Let a function say that an argument is a field of its options: `durable=` is `TakeOptions(durable=...)`."""

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        elsewhere = {field.name for field in dataclasses.fields(kind)} - inspect.signature(function).parameters.keys()

        @functools.wraps(function)
        def checked(*arguments: P.args, **named: P.kwargs) -> R:
            for name in named:
                if name in elsewhere:
                    spelling = f"pass {argument}={kind.__name__}({name}=...)"
                    raise TypeError(f"{function.__name__}() has no argument {name!r}: {spelling}")
            outer = sys.exception()
            try:
                return function(*arguments, **named)
            except EXPLAINED as error:
                drop_frames(error, outer)
                raise

        return checked

    return decorate
