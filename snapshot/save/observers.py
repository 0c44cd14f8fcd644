"""Observers of a take: plugins that look at the state, store files beside it, and judge it before the commit."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cache, partial
from operator import methodcaller
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import msgspec

from snapshot import extensions
from snapshot.decoding import decode_json
from snapshot.errors import CorruptSnapshotError, SnapshotError
from snapshot.events import log
from snapshot.io.url import URL
from snapshot.manifest.document import decode_metadata, encode_metadata
from snapshot.save.findings import Finding
from snapshot.state.leaves import FlatState, Leaf
from snapshot.state.model_state import ModuleMap

GROUP: extensions.Group = "snapshot.takes"
"""The entry-point group of observers: `name = "package.module:OBSERVER"`."""
MOST_ADDED = 1 << 20
"""Bytes that an observer of another distribution may add to the metadata, which each reader loads."""
HEALTH = "health"
"""The observer of this library, which guards takes and measures tensors."""


class TakeView(NamedTuple):
    """What an observer sees of a take on this rank, before the first byte is written."""

    statefuls: Sequence[ModuleMap]
    """The objects of the app state, with their modules and optimizers."""
    flat: FlatState
    leaves: Sequence[Leaf]
    """The leaves that this rank writes."""
    replicas: frozenset[str]
    """Paths of values that all ranks have."""
    url: URL
    verb: str
    turn: int
    """A number that all ranks share, and that differs from take to take."""
    world: int
    leads: bool
    """True on the rank that commits."""

    @property
    def alone(self) -> bool:
        """True if there is no other rank."""
        return self.world == 1

    @property
    def app_state(self) -> dict[str, Any]:
        """The app state that is taken."""
        return {each.key: each.stateful for each in self.statefuls}


class RestoreView(NamedTuple):
    """What an observer sees of a restore, when it has succeeded."""

    url: URL
    metadata: Mapping[str, Any]
    statefuls: Sequence[ModuleMap]
    """The objects of the app state, with their modules and optimizers."""
    world: int


class TakeObserver(Protocol):
    """An observer during one take, on one rank. A class that inherits from this one does nothing by default."""

    findings: Sequence[Finding] = ()
    """What it has found, for the report."""
    suffixes: Sequence[str] = ()
    """The ends of the names of the files that it stores. They are part of the format, which has `.stats` alone."""

    def files(self) -> Mapping[str, bytes]:
        """Return the files to store beside the data, by suffix."""
        return {}

    def described(self, entries: Mapping[str, Any]) -> None:
        """See the entries of this rank, whose digests are known now."""
        return

    def tell(self) -> bytes:
        """Return what the leader's observer must know of this rank."""
        return b""

    def judge(self, told: Sequence[bytes], metadata: msgspec.Raw) -> msgspec.Raw:
        """Return the metadata to commit, on the leader. Raise to refuse. `told`: what each rank's observer tells."""
        return metadata

    def committed(self) -> None:
        """See that the take is committed."""
        return

    def forget(self) -> None:
        """Release the application's objects."""
        return


class Observer(Protocol):
    """A plugin that observes takes.

    It may have two more methods. `restored(view: RestoreView)` is called on the leader after a restore.
    `find_changes(before, after)` gets the metadata of two snapshots, and returns lines for `snapshot diff`.
    """

    def observe(self, view: TakeView, options: Mapping[str, Any]) -> TakeObserver | None:
        """Begin to observe a take; None if there is nothing to do. `options`: `guards` and `statistics` of the take."""
        ...


@cache
def _installed() -> tuple[tuple[str, Observer], ...]:
    """Return all observers by name. One of another distribution that cannot be loaded is logged and left out."""
    found = []
    for point in extensions.points(GROUP):
        try:
            found.append((point.name, extensions.load(point, f"the observer {point.name}")))
        except SnapshotError as error:  # of ours, `expect_observed` raises it if a caller asks for it
            log.warning("%s", error)
    if HEALTH not in dict(found):
        log.warning("%s is not installed: takes are not guarded", extensions.RESERVED[GROUP, HEALTH])
    return tuple(found)


def observe_restore(url: URL, metadata: msgspec.Raw, app_state: Mapping[str, Any], world: int) -> None:
    """Show a restore to the observers. One that has succeeded must not fail by what is beside the state."""
    with suppress(CorruptSnapshotError):  # who asks for the metadata is told
        maps = [ModuleMap(*each) for each in app_state.items()]
        _call_each("restored", RestoreView(url, decode_metadata(metadata), maps, world))


def find_changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """Return what observers find to have changed between two snapshots, from their metadata."""
    return [str(line) for lines in _call_each("find_changes", before, after) for line in lines]


def _call_each(method: str, *given: Any) -> list[Any]:
    """Return what each observer that has a method returns. One that fails is logged."""
    found = []
    for name, each in _installed():
        if hasattr(each, method):
            try:
                found.append(getattr(each, method)(*given))
            except Exception:  # noqa: BLE001 - a restore must not fail by what another package looks at
                log.exception("the observer %s failed", name)
    return found


def expect_observed(options: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
    """Raise `MissingExtraError` if options other than the defaults need an observer that is not installed."""
    asked = [name for name, value in options.items() if value != defaults[name] and value != "off"]
    if asked:
        extensions.require(GROUP, HEALTH, f"{asked[0]}={options[asked[0]]!r}")


_failed: set[str] = set()
"""The observers whose failure was logged."""


class Observers:
    """All observers of one take on this rank. Those of other distributions cannot fail it."""

    def __init__(self, view: TakeView | None = None, options: Mapping[str, Any] | None = None) -> None:
        self._all: dict[str, TakeObserver] = {}
        options = options or {}
        self._asked = options.get("guards") == "refuse" or bool(options.get("statistics"))
        """True if the caller asked for what only the observer of this library has."""
        off = options.get("guards") == "off" and not self._asked
        for name, each in _installed() if view is not None else ():
            if off and _is_own(name):
                continue
            made = self._call(name, None, partial(methodcaller("observe", view, options), each))
            if made is not None:
                self._all[name] = made

    def _call(self, name: str, default: Any, work: Callable[[], Any]) -> Any:
        """Call an observer. One that fails is dropped, but for ours if the caller asked for it. That is logged once."""
        try:
            return work()
        except BaseException as error:
            if extensions.is_interrupt(error) or (_is_own(name) and (self._asked or isinstance(error, SnapshotError))):
                raise
            # A take of weeks must not fail by what another package looks at.
            self._drop(name, "failed", with_trace=True)
            return default

    def _drop(self, name: str, why: str, *, with_trace: bool = False) -> None:
        dropped = self._all.pop(name, None)
        if dropped is not None:
            with suppress(BaseException):  # it has failed before
                dropped.forget()
        if name not in _failed:
            _failed.add(name)
            point = extensions.find(GROUP, name)
            owner = "" if point is None else f" of {extensions.owner_of(point)}"
            log.error("the observer %s%s %s, and the take continues without it", name, owner, why, exc_info=with_trace)

    def _each(self, default: Any, work: Callable[[TakeObserver], Any]) -> list[tuple[str, Any]]:
        """Call all observers. Return what those that did not fail return, by name."""
        made = [(name, self._call(name, default, partial(work, each))) for name, each in list(self._all.items())]
        return [(name, value) for name, value in made if name in self._all]

    @property
    def findings(self) -> Sequence[Finding]:
        """What the observers have found. Of a pending take, some come later."""
        if list(self._all) == [HEALTH]:
            return self._all[HEALTH].findings
        return [
            each for _, found in self._each([], lambda observer: _only(Finding, observer.findings)) for each in found
        ]

    @property
    def suffixes(self) -> list[str]:
        """The ends of the names of the files that may be stored."""
        return [suffix for name, each in self._all.items() if _is_own(name) for suffix in each.suffixes]

    def files(self) -> dict[str, bytes]:
        """Return the files to store beside the data, by suffix. Readers refuse names that the format does not have."""
        own = [each for name, each in self._all.items() if _is_own(name)]
        return {suffix: content for each in own for suffix, content in each.files().items()}

    def described(self, entries: Mapping[str, Any]) -> None:
        """Show the entries of this rank."""
        seen = MappingProxyType(entries)
        self._each(None, lambda observer: observer.described(seen))

    def tell(self) -> dict[str, bytes]:
        """Return what the leader must know of this rank, by observer."""
        return dict(self._each(b"", lambda observer: _only(bytes, [observer.tell()])[0]))

    def judge(self, told: Sequence[Mapping[str, bytes]], metadata: msgspec.Raw) -> tuple[msgspec.Raw, list[str]]:
        """Return the metadata to commit, on the leader, and the observers that no rank has dropped."""
        for name, each in list(self._all.items()):
            without = [number for number, rank in enumerate(told) if name not in rank]
            own = _is_own(name)
            if not without or own:
                known = [rank[name] for rank in told if name in rank]
                metadata = self._call(name, metadata, partial(_judge if own else _extend, each, known, metadata))
                if without:
                    log.warning("ranks without %s are not guarded: %s", extensions.RESERVED[GROUP, name], without[:20])
            else:
                self._drop(name, "failed on another rank, or is not installed there")
        return metadata, list(self._all)

    def keep(self, names: Sequence[str]) -> None:
        """Drop the observers that the leader, or another rank, does not have any more."""
        for name in [each for each in self._all if each not in names and not _is_own(each)]:
            self._drop(name, "failed on another rank, or is not installed there")

    def committed(self) -> None:
        """Tell that the take is committed."""
        self._each(None, lambda observer: observer.committed())

    def forget(self) -> None:
        """Release the application's objects."""
        self._each(None, lambda observer: observer.forget())


def _only(kind: type, values: Sequence[Any]) -> list[Any]:
    """Return the values, all of which must be of a type."""
    for each in values:
        if not isinstance(each, kind):
            raise TypeError(f"an observer must return {kind.__name__}, got {type(each).__name__}")
    return list(values)


def _is_own(name: str) -> bool:
    return (GROUP, name) in extensions.RESERVED


def _judge(observer: TakeObserver, told: Sequence[bytes], metadata: msgspec.Raw) -> msgspec.Raw:
    return observer.judge(told, metadata)


def _extend(observer: TakeObserver, told: Sequence[bytes], metadata: msgspec.Raw) -> msgspec.Raw:
    """Return the metadata with what an observer of another distribution adds. It may not change what is there."""
    judged = observer.judge(told, metadata)
    if judged is metadata:
        return metadata
    if not isinstance(judged, msgspec.Raw):
        raise TypeError(f"judge must return msgspec.Raw, got {type(judged).__name__}")
    before: dict[str, Any] = decode_json(bytes(metadata), dict[str, Any], "the metadata")
    after: dict[str, Any] = decode_json(bytes(judged), dict[str, Any], "the metadata of an observer")
    changed = [key for key, value in before.items() if key not in after or after[key] != value]
    if changed:
        raise ValueError(f"judge must keep what the metadata has, got another {changed[0]!r}")
    encoded = encode_metadata(before | after)
    if len(encoded) > len(metadata) + MOST_ADDED:
        raise ValueError(f"judge must add at most {MOST_ADDED:,} bytes, got {len(encoded) - len(metadata):,}")
    return encoded
