"""The environment of takes: the entry point `environment` of the group `snapshot.takes`."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from snapshot.decoding import decode_json
from snapshot.events import log
from snapshot.save.findings import ENVIRONMENT as KEY
from snapshot.save.observers import RestoreView, TakeObserver, TakeView
from snapshot_environment.facts import describe, read_variables

NUMBERS_STAY = ("versions.snapshot", "versions.python", "command")
"""What changes no number, and with most restarts: `snapshot diff` shows it, and a restore does not log it."""
PLACES = ("world_size", "mesh", "device")
"""What a restore is made for. It is logged, but not as a warning."""
REDUCES = re.compile(r"policies\.(.+)\.reduce_dtype")


class RecordedTake(TakeObserver):
    """Records the environment of one take, which is that of the leader."""

    def __init__(self, view: TakeView) -> None:
        self._found = describe(view.statefuls, view.world) if view.leads else {}

    def judge(self, told: Sequence[bytes], metadata: msgspec.Raw) -> msgspec.Raw:
        """Add the environment to the metadata, unless it has one."""
        known: dict[str, Any] = decode_json(metadata, dict[str, Any], "the metadata")
        return metadata if KEY in known else msgspec.Raw(msgspec.json.encode({**known, KEY: self._found}))


class Environment:
    """Records what takes were computed with, and tells what has changed since."""

    def observe(self, view: TakeView, options: Mapping[str, Any]) -> RecordedTake:
        """Read the environment of a take."""
        return RecordedTake(view)

    def restored(self, view: RestoreView) -> None:
        """Log what has changed since a step was taken, on the leader, in one line."""
        before = view.metadata.get(KEY)
        if not isinstance(before, dict):
            return
        read_variables.cache_clear()
        changes = dict(_changes(before, describe(view.statefuls, view.world)))
        lines = [text for name, text in changes.items() if not name.startswith(NUMBERS_STAY)]
        if lines:
            warns = not all(name.startswith((*NUMBERS_STAY, *PLACES)) for name in changes)
            (log.warning if warns else log.info)("%s: since this step was taken: %s", view.url, "; ".join(lines))

    def find_changes(self, before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
        """Return what changed between two snapshots, from their metadata. It is empty if one was taken without this."""
        if not isinstance(before.get(KEY), dict) or not isinstance(after.get(KEY), dict):
            return []
        return [text for _, text in _changes(before[KEY], after[KEY])]


def _changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the name and a text of each difference."""
    old, new = dict(_flatten(before)), dict(_flatten(after))
    for name in [*old, *(each for each in new if each not in old)]:
        if old.get(name) != new.get(name) and not _is_elsewhere(name, old, new):
            yield name, _text(name, old.get(name), new.get(name))
    for name, value in new.items():
        policy = REDUCES.fullmatch(name)
        if policy and value is None and name in old and old[name] is None:
            versions = [_version(each.get("versions.torch")) for each in (old, new)]
            if min(versions) < REDUCES_IN_FLOAT32 <= max(versions):
                meaning = "param_dtype until torch 2.14, and float32 since 2.15"
                yield f"{name} ", f"FSDP's reduce_dtype=None of {policy[1]!r} means {meaning}: pass a dtype"


def _is_elsewhere(name: str, old: Mapping[str, Any], new: Mapping[str, Any]) -> bool:
    """Return True for what only one side has: a framework that is imported, or a flag of an optimizer or a policy.

    Also for a flag whose class is another one.
    """
    kind, _, rest = name.partition(".")
    if kind == "versions":
        return name not in old or name not in new
    if kind not in ("optimizers", "policies"):
        return False
    prefix = f"{kind}.{rest.rpartition('.')[0]}."
    one_side = not all(any(each.startswith(prefix) for each in side) for side in (old, new))
    other = old.get(f"{prefix}class") != new.get(f"{prefix}class") and not name.endswith(".class")
    return one_side or other


REDUCES_IN_FLOAT32 = (2, 15)
"""The version of torch since which `MixedPrecisionPolicy(reduce_dtype=None)` reduces in the dtype of gradients."""


def _version(text: Any) -> tuple[int, ...]:
    found = re.match(r"(\d+)\.(\d+)", str(text))
    return (int(found[1]), int(found[2])) if found else (0, 0)


def _flatten(found: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in found.items():
        if isinstance(value, dict):
            yield from _flatten(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _text(name: str, before: Any, after: Any) -> str:
    kind, _, rest = name.partition(".")
    if kind == "command":
        return "the command line differs"
    if kind == "variables":
        verb = "was unset" if after is None else "was set" if before is None else "has another value"
        return f"the variable {rest} {verb}"
    if kind in ("policies", "optimizers"):
        key, _, rest = rest.rpartition(".")
        rest = f"{'mixed precision' if kind == 'policies' else 'optimizer'} of {key!r}: {rest}"
    elif kind == "mesh":
        rest = f"mesh {rest}"
    return f"{rest or kind.replace('_', ' ')} {_shown(before)} -> {_shown(after)}"


def _shown(value: Any) -> str:
    return "none" if value is None else str(value)


ENVIRONMENT = Environment()
