"""What packages add to the library: their entry points, listed once for each process, and loaded on first use."""

from __future__ import annotations

import importlib
import logging
import threading
from collections.abc import Iterator
from dataclasses import MISSING, fields
from functools import cache
from importlib.metadata import (
    Distribution,
    EntryPoint,
    EntryPoints,
    PackageNotFoundError,
    distribution,
    distributions,
    entry_points,
)
from typing import Any, Literal, TypeVar

from snapshot.errors import MissingExtraError, SnapshotError

T = TypeVar("T")
OWN = "snapshot-torch"
"""The distribution of this library, which has plugins of its own."""
Group = Literal[
    "snapshot.storages",
    "snapshot.formats",
    "snapshot.verbs",
    "snapshot.takes",
    "snapshot.steps",
    "snapshot.seals",
    "snapshot.sinks",
    "snapshot.events",
]
RESERVED: dict[tuple[Group, str], str] = {
    ("snapshot.takes", "health"): "snapshot_health",
    ("snapshot.steps", "near"): "snapshot_tiers",
    ("snapshot.seals", "ed25519"): "snapshot_signing",
    ("snapshot.sinks", "process"): "snapshot_worker",
}
"""Names that are values of public arguments -> the package of this library that has them, and no other may."""
CLAIMS = {
    "to='gguf'": "snapshot_gguf",
    "the suffix '.gguf'": "snapshot_gguf",
    "to='peft'": "snapshot_merge",
    "to='deepspeed-universal'": "snapshot_deepspeed",
    "to='torch_checkpointing'": "snapshot_torch_checkpointing",
    "dequantise='awq'": "snapshot_quantised",
    "dequantise='bitsandbytes'": "snapshot_quantised",
    "dequantise='gptq'": "snapshot_quantised",
    "dequantise='gptq_v2'": "snapshot_quantised",
    "the codec 'blosc'": "snapshot_orbax",
}
"""What formats of this library's plugins declare -> the package, beside which no other may declare it."""
NAMES = {
    "CancelledError": "snapshot.errors",
    "ConvertReport": "snapshot.reports",
    "CopyReport": "snapshot.reports",
    "Diff": "snapshot.reports",
    "MissingExtraError": "snapshot.errors",
    "Near": "snapshot_tiers",
    "OtherWriterError": "snapshot.errors",
    "PendingPublish": "snapshot_publish",
    "Progress": "snapshot.progress",
    "Published": "snapshot_publish",
    "Publisher": "snapshot_publish",
    "Reshardable": "snapshot.state.stateful",
    "RestoreReport": "snapshot.reports",
    "RunDeletedError": "snapshot.errors",
    "RunForkedError": "snapshot.errors",
    "SavedObject": "snapshot.saved",
    "SignatureError": "snapshot.errors",
    "SnapshotBusyError": "snapshot.errors",
    "Subscriber": "snapshot_publish",
    "SuspectStateError": "snapshot.errors",
    "TakeReport": "snapshot.reports",
    "UnsafeObjectError": "snapshot.errors",
    "UnsupportedFormatError": "snapshot.errors",
    "VerifyReport": "snapshot.reports",
    "ignore_stop_signals": "snapshot.manager.schedule",
    "merge": "snapshot_merge",
    "merge_lora": "snapshot_merge",
    "release_memory": "snapshot.io.arena",
}
"""Public names beside those of `snapshot` -> where they are."""
ADVICE = {"loader": "snapshot_trainers.torchdata.LoaderState", "zero": "snapshot_deepspeed.adapter"}
"""What error messages of the core recommend."""


@cache
def own_points() -> dict[tuple[str, str], EntryPoint]:
    """Return the entry points of this library's own plugins. That reads one file, in 0.1 ms."""
    try:
        found = distribution(OWN).entry_points
    except PackageNotFoundError:  # a source tree on PYTHONPATH
        return {}
    return {(each.group, each.name): each for each in found if each.group.startswith("snapshot.")}


@cache
def own_packages() -> frozenset[str]:
    """Return the names of this library's packages: the core, and those of its plugins."""
    try:
        listed = distribution(OWN).read_text("top_level.txt") or ""
    except PackageNotFoundError:
        listed = ""
    return frozenset(["snapshot", *listed.split()])


def is_own(module: str) -> bool:
    """Return True if a module is one of this library or of its plugins.

    >>> [is_own(name) for name in ("snapshot.text", "snapshot_mine", "my.snapshot")]
    [True, False, False]
    """
    return module.partition(".")[0] in own_packages()


@cache
def other_points() -> dict[tuple[str, str], EntryPoint]:
    """Return the entry points of all other packages: one scan for all groups, 3 ms for 130 packages."""
    found: dict[tuple[str, str], EntryPoint] = {}
    try:
        every: Any = entry_points()
    except Exception:  # noqa: BLE001 - a file is damaged
        every = EntryPoints(_readable_points())
    for group in every.groups:
        for each in every.select(group=group) if group.startswith("snapshot.") else ():
            key = group, each.name
            if key not in own_points() and key not in RESERVED and not _is_of_another_copy(each):
                found.setdefault(key, each)  # the first one on the path, as for modules
    return found


def _is_of_another_copy(point: EntryPoint) -> bool:
    """Return True for an entry point of this library that is not of the copy in use, as with an old one on the path."""
    try:
        return point.dist is not None and point.dist.name == OWN
    except Exception:  # noqa: BLE001 - its files are damaged
        return False


def _readable_points() -> Iterator[EntryPoint]:
    for each in distributions():
        try:
            yield from each.entry_points
        except Exception as error:  # noqa: BLE001
            logging.getLogger("snapshot").warning("%s: cannot read the entry points: %r", _file_of(each), error)


def _file_of(damaged: Distribution) -> str:
    return str(getattr(damaged, "_path", "a distribution"))


def find(group: Group, name: str) -> EntryPoint | None:
    """Return the entry point with this name: the library's own first, so that its names cost no scan."""
    key = group, name
    return own_points().get(key) or (None if key in RESERVED else other_points().get(key))


def require(group: Group, name: str, what: object) -> Any:
    """Return what an entry point names. Raise `MissingExtraError` if there is none. `what`: a message's start."""
    point = find(group, name)
    if point is None:
        package = RESERVED.get((group, name))
        missing = f"{package} of {OWN} is" if package else f"no package with {group}: {name} is"
        raise MissingExtraError(f"{what}: {missing} not installed")
    return load(point, what)


def points(group: Group) -> list[EntryPoint]:
    """Return all entry points of a group: the library's own first."""
    return [each for each in (*own_points().values(), *other_points().values()) if each.group == group]


def names(group: Group) -> list[str]:
    """Return all names of a group: the library's own first."""
    return [each.name for each in points(group)]


def load(point: EntryPoint, what: object) -> Any:
    """Import what an entry point names. Errors name the distribution. `what`: the start of their message."""
    try:
        return point.load()
    except ImportError as error:
        extra = f"; install the extra '{point.extras[0]}'" if point.extras else ""
        owner = owner_of(point)
        raise MissingExtraError(f"{what}: {point.value} of {owner} cannot be imported: {error}{extra}") from error
    except OSError as error:  # there are no more descriptors, for example
        raise SnapshotError(f"{what}: cannot read {point.value} of {owner_of(point)}: {error}") from error
    except BaseException as error:
        if is_interrupt(error):
            raise
        owner = owner_of(point)
        raise SnapshotError(
            f"{what}: {point.group} has {point.name} = {point.value} of {owner}, which raised "
            f"{type(error).__name__}: {error}; repair or uninstall {owner.partition(' ')[0]}"
        ) from error


def is_interrupt(error: BaseException) -> bool:
    """Return True for Ctrl-C, which reaches the main thread alone. What else a plugin raises is an error of it."""
    return isinstance(error, KeyboardInterrupt) and threading.current_thread() is threading.main_thread()


def load_declared(group: Group, kind: type[T], prefix: str) -> Iterator[tuple[str, T | SnapshotError]]:
    """Yield what a group's entry points name, or why that is not of a type, which is logged. `prefix`: of messages."""
    for point in points(group):
        what = f"{prefix} {point.name}"
        try:
            made = load(point, what)
            if not isinstance(made, kind):
                raise SnapshotError(f"{what}: {point.value} must be a {kind.__name__}, got {type(made).__name__}")
        except SnapshotError as error:
            logging.getLogger("snapshot").warning("%s", error)
            yield point.name, error
        else:
            yield point.name, made


def expect_types(declared: Any) -> None:
    """Raise `TypeError` if a field of a declaration has another type than its default, or is no text without one."""
    for each in fields(declared):
        kind = str if each.default is MISSING else type(each.default)
        value = getattr(declared, each.name)
        if type(value) is not kind:
            raise TypeError(f"{each.name} must be {kind.__name__}, got {value!r}")
        if kind is tuple and not all(isinstance(item, (str, bytes)) and item for item in value):
            raise TypeError(f"{each.name} must be texts or bytes that are not empty, got {value!r}")


def owner_of(point: EntryPoint) -> str:
    """Return the distribution and version of an entry point, which are in a file."""
    try:
        dist = point.dist
        return OWN if dist is None else f"{dist.name or 'a distribution'} {dist.version or ''}".rstrip()
    except Exception:  # noqa: BLE001 - its files are damaged
        return "a distribution"


def forget() -> None:
    """List entry points again: for tests, and after an installation in a running process."""
    importlib.invalidate_caches()
    own_points.cache_clear()
    own_packages.cache_clear()
    other_points.cache_clear()
