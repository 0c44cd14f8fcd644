"""The timeline of a run, as pure functions of facts that are written once: which steps are on its line, and which not.

A fact is an attempt: a time of training that began with a step of an earlier one. The line of a run begins at its last
published attempt, and follows the parents. It leaves each attempt at the step that the next one restored. No clock and
no order of arrival decides anything.
"""

from __future__ import annotations

import hashlib
import re
import secrets
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from enum import StrEnum
from typing import Any, NamedTuple

import msgspec

from snapshot.decoding import decode_json
from snapshot.errors import CorruptSnapshotError, RunForkedError

KEY = "snapshot.tiers"
"""Key in a snapshot's metadata."""
_RUN = re.compile(r"[0-9a-f]{12}")
"""Ids of runs, which are names of folders, and names of attempts, which are names of files."""


class Parent(msgspec.Struct, array_like=True, frozen=True):
    """The place where an attempt left another one."""

    attempt: str
    step: int | None
    """The restored step; None if the attempt began without a restore, so that all steps stay."""
    save_id: str = ""
    """The restored snapshot of that step."""


class Attempt(msgspec.Struct, frozen=True, omit_defaults=True):
    """A time of training without a restore. It is never changed."""

    name: str
    run: str
    number: int
    """One more than the last number that its job had read."""
    parent: Parent | None = None
    host: str = ""
    far: str = ""
    """The far root without secrets. A root elsewhere with this attempt is a copy."""


class Origin(NamedTuple):
    """The origin of a step, as its metadata has it."""

    run: str
    number: int
    """Number of the attempt."""
    attempt: str
    order: int
    """Number of the take in its attempt."""
    replaces: bool = False
    """True if the take may replace another snapshot of the step."""


NO_ORIGIN = Origin("", 0, "", 0)


def origin_of(metadata: Mapping[str, Any]) -> Origin:
    """Return the origin of a step. It is empty if a manager without `near` took the step."""
    match metadata.get(KEY):
        case {
            "run": str(run),
            "number": int(number),
            "attempt": str(attempt),
            "order": int(order),
            "replaces": bool(replaces),
        }:
            return Origin(run, number, attempt, order, replaces)
    return NO_ORIGIN


def note_of(attempt: Attempt, order: int, *, replaces: bool) -> dict[str, Any]:
    """Return the metadata of a take. It has the attempt, too, since the fact may be damaged where it is stored."""
    origin = Origin(attempt.run, attempt.number, attempt.name, order, replaces)
    return {KEY: {**origin._asdict(), "began": msgspec.to_builtins(attempt)}}


def attempt_of(metadata: Mapping[str, Any]) -> Attempt | None:
    """Return the attempt that took a step, if its metadata has it."""
    note = metadata.get(KEY)
    with suppress(msgspec.ValidationError, CorruptSnapshotError):
        found = msgspec.convert(note.get("began") if isinstance(note, dict) else None, Attempt)
        _checked(Facts(0, (), (found,)), KEY)
        return found if found.name == origin_of(metadata).attempt else None
    return None


class Standing(StrEnum):
    """The relation of a step to the line of its run."""

    ON = "on"
    OFF = "off"
    """Its attempt is published, and the line left it before the step."""
    UNDECIDED = "undecided"
    """Its attempt is not published: the step is not uploaded, counted or deleted."""
    FOREIGN = "foreign"
    """The facts do not know its run: the step was copied here, or the facts were deleted."""


class Facts(msgspec.Struct, frozen=True, omit_defaults=True):
    """The facts about a run that one party knows."""

    number: int = 0
    """Number of the last published fact; 0 if there is none."""
    published: tuple[Attempt, ...] = ()
    """The published attempts, in the order of their publication."""
    pending: tuple[Attempt, ...] = ()
    """Attempts that this party has not seen published, by number."""

    @property
    def tip(self) -> Attempt | None:
        """The attempt that was published last."""
        return self.published[-1] if self.published else None

    @property
    def last(self) -> Attempt | None:
        """The last attempt, published or pending. One that another was published instead of is not the last."""
        return self.pending[-1] if self.pending and self.pending[-1].number > self.number else self.tip

    def has(self, name: str) -> bool:
        return any(each.name == name for each in self.published)

    def find(self, name: str) -> Attempt | None:
        """Return a known attempt."""
        return next((each for each in (*self.published, *self.pending) if each.name == name), None)

    def unite(self, other: Facts) -> Facts:
        """Return what two parties know together. Published facts are supersets of earlier ones.

        If the root was rolled back, they are not: what only the party with the lower number has is pending then.
        """
        newest, older = sorted((self, other), key=lambda each: (each.number, len(each.published)), reverse=True)
        return Facts(newest.number, newest.published).with_pending([*self.pending, *other.pending, *older.published])

    def with_pending(self, attempts: Iterable[Attempt]) -> Facts:
        """Return the facts with further attempts that may not be published yet."""
        known = {each.name for each in self.published}
        found = {each.name: each for each in (*self.pending, *attempts) if each.name not in known}
        return Facts(
            self.number, self.published, tuple(sorted(found.values(), key=lambda each: (each.number, each.name)))
        )

    def with_copies(self, copies: Iterable[FactsCopy]) -> Facts:
        """Return the facts of a root with what hosts know. Copies of a run that was deleted there are left out."""
        found = list[Attempt]()
        for each in copies:
            lost = each.facts.published if self.was_rolled_back(each) else ()
            if lost or not self.lacks(each.facts):
                found += (*lost, *each.facts.pending)
        return self.with_pending(found)

    def with_published(self, *attempts: Attempt) -> Facts:
        """Return the facts after the next publication."""
        names = {each.name for each in attempts}
        left = tuple(each for each in self.pending if each.name not in names)
        return Facts(self.number + 1, (*self.published, *attempts), left)

    def next_attempt(self, run: str, parent: Parent | None, *, host: str, far: str) -> Attempt:
        """Return a new attempt, which comes after all that are known."""
        number = 1 + max([self.number, *(each.number for each in self.pending)])
        return Attempt(new_name(), run, number, parent, host, far)

    def conflicts(self) -> list[Attempt]:
        """Return the pending attempts that did not see another one with their number or a later one."""
        numbers = [each.number for each in self.pending]
        return [each for each in self.pending if each.number <= self.number or numbers.count(each.number) > 1]

    def expect_no_fork(self) -> None:
        """Raise RunForkedError if pending attempts conflict with published ones, or with each other."""
        found = self.conflicts()
        if found:
            raise forked_error(found[0], next((each for each in found[1:] if each.number > self.number), self.tip))

    def without_vain(self, stepped: Collection[str]) -> Facts:
        """Return the facts without pending attempts that are in conflict and have no steps, so that no fork is left.

        A job that ended before its first take leaves one. `stepped`: the attempts that have steps.
        """
        kept = self.with_ancestors(stepped)
        names, numbers = {each.name for each in kept}, {each.number for each in kept}
        for each in self.pending:
            begins = each.parent is None or self.has(each.parent.attempt) or each.parent.attempt in names
            if begins and each.number > self.number and each.number not in numbers:
                kept.append(each)
                names.add(each.name)
                numbers.add(each.number)
        return Facts(self.number, self.published).with_pending(kept)

    def lacks(self, copy: Facts) -> bool:
        """Return True if these, the facts of a root, lack what a host has seen published.

        The run was deleted there, or the root was rolled back.
        """
        return copy.tip is not None and not self.has(copy.tip.name)

    def was_rolled_back(self, copy: FactsCopy) -> bool:
        """Return True if these, the facts of a root, are older than a host's copy: the run was not deleted there.

        Other attempts may have been published since, instead of those that are missing.
        """
        return self.lacks(copy.facts) and (copy.left or any(self.has(each.name) for each in copy.facts.published))

    def expect_no_rollback(self, copies: Iterable[FactsCopy], where: object) -> None:
        """Raise RolledBackError if the root `where`, which has these facts, was rolled back.

        Nothing is published again without a person: the root may have been put back on purpose, or is being deleted.
        """
        for each in copies:
            tip = each.facts.tip
            if tip is not None and self.was_rolled_back(each):
                there = f"ends with attempt {self.tip.name}" if self.tip is not None else "has none"
                raise RolledBackError(
                    f"{where}: the root was rolled back: a host has seen attempt {tip.name} of {tip.host or 'a job'} "
                    f"published, and the root {there}; the near steps are kept; choose the attempt that the run "
                    "continues: snapshot attempts FAR --near NEAR --choose NAME"
                )

    def with_ancestors(self, names: Collection[str]) -> list[Attempt]:
        """Return the pending attempts among some names, and their pending ancestors, by number."""
        pending = {each.name: each for each in self.pending}
        found: dict[str, Attempt] = {}
        for name in names:
            at = pending.get(name)
            while at is not None and at.name not in found:
                found[at.name] = at
                at = pending.get(at.parent.attempt) if at.parent is not None else None
        return sorted(found.values(), key=lambda each: (each.number, each.name))


def forked_error(one: Attempt, other: Attempt | None) -> RunForkedError:
    """Return the error that names both sides of a fork."""
    there = f"attempt {other.name} of {other.host or 'another job'}" if other is not None else "another attempt"
    return RunForkedError(
        f"the run has forked: attempt {one.name} of {one.host or 'a host'} continued it without the far root, and so "
        f"did {there}; the near steps are kept; choose one: snapshot attempts FAR --near NEAR --choose NAME"
    )


class RolledBackError(RunForkedError):
    """The far root shows older facts of the run than a host has seen published. A person must choose."""


class Cut(NamedTuple):
    """The step at which the line left an attempt."""

    step: int | None
    """The last step that is on the line; None if all are."""
    save_id: str
    """The only snapshot of that step which is on the line; any if empty."""
    age: int
    """Number of attempts between this one and the end of the line, as a negative number."""


class RunLine:
    """The line of a run: the attempts that its last one descends from, each up to where the line left it."""

    def __init__(self, facts: Facts, tip: Attempt | None = None) -> None:
        """Follow the parents from `tip`, by default the last published attempt."""
        self._known = {each.name for each in facts.published}
        self._runs = {each.run for each in (*facts.published, *facts.pending)}
        self.cuts: dict[str, Cut] = {}
        at, limit, save_id = tip if tip is not None else facts.tip, None, ""
        while at is not None and at.name not in self.cuts:
            self.cuts[at.name] = Cut(limit, save_id, -len(self.cuts))
            parent = at.parent
            if parent is None:
                break
            save_id = ""
            if parent.step is not None and (limit is None or parent.step <= limit):
                limit, save_id = parent.step, parent.save_id
            at = facts.find(parent.attempt)

    def standing(self, step: int, save_id: str, origin: Origin) -> Standing:
        """Return the relation of a snapshot to this line. Those of managers without `near` belong to every line."""
        if not origin.attempt:
            return Standing.ON
        cut = self.cuts.get(origin.attempt)
        if cut is not None:
            same = step == cut.step and cut.save_id in ("", save_id)
            return Standing.ON if cut.step is None or step < cut.step or same else Standing.OFF
        if origin.attempt in self._known:
            return Standing.OFF
        return Standing.UNDECIDED if origin.run in self._runs else Standing.FOREIGN

    def counts(self, step: int, save_id: str, origin: Origin) -> bool:
        """Return True if a snapshot in the root may be restored, and counts for policies."""
        return self.standing(step, save_id, origin) in (Standing.ON, Standing.FOREIGN)

    def age(self, origin: Origin) -> tuple[int, int]:
        """Return a value that is greater for a later take."""
        cut = self.cuts.get(origin.attempt)
        return (cut.age if cut is not None else -len(self.cuts) - 1), origin.order

    def is_newer(self, step: int, one: tuple[str, Origin], other: tuple[str, Origin]) -> bool:
        """Return True if a snapshot of a step, which is on the line, replaces another one of the same step.

        Each is given by its save id and origin. One that is not off the line is replaced only on purpose: a race could
        move the line meanwhile, and then neither of them would be left.
        """
        standing = self.standing(step, *other)
        if standing == Standing.OFF:
            return True
        known = standing == Standing.ON and bool(other[1].attempt)
        return one[1].replaces and (not known or self.age(one[1]) > self.age(other[1]))


class FactsCopy(NamedTuple):
    """The facts in the folder of a run on one host."""

    run: str
    facts: Facts
    stepped: frozenset[str] = frozenset()
    """The attempts that have steps there."""
    used: int = 0
    """A number that is greater for a run that was used later on the host."""
    left: bool = False
    """True if the root has no facts, and steps of the run."""

    @property
    def far(self) -> str:
        known = (*self.facts.published, *self.facts.pending)
        return next((each.far for each in reversed(known) if each.run == self.run), "")


class Settled(NamedTuple):
    """The run of a job, from the facts of the root and of all hosts."""

    run: str
    """Empty if a new run begins."""
    facts: Facts
    """The facts, with the pending ones that must be published."""
    birth: Attempt | None = None
    """The attempt with which a new run begins."""


def settle_run(root: Facts | None, hosts: Sequence[Sequence[FactsCopy]], far: str) -> Settled:
    """Return the run that a job continues. `root`: the facts of the far root; None if it cannot be read.

    Raises:
        RunForkedError: Hosts have steps of attempts that other attempts were published instead of, or the root was
            rolled back.
    """
    if root is None:
        recent = [max(copies, key=lambda each: each.used).run for copies in hosts if copies]
        if not recent:
            return Settled("", Facts())
        run = max(recent, key=recent.count)
        facts, stepped = Facts(), set[str]()
        for each in (copy for copies in hosts for copy in copies if copy.run == run):
            facts = facts.unite(each.facts)
            stepped |= each.stepped
        facts = facts.without_vain(stepped)
        facts.expect_no_fork()
        return Settled(run, facts)
    every = [copy for copies in hosts for copy in copies]
    root.expect_no_rollback(every, far)
    united = root.with_copies(every)
    stepped = set().union(*(each.stepped for each in every if not root.lacks(each.facts)))
    needed = united.with_ancestors(stepped)
    facts = Facts(root.number, root.published).with_pending(needed)
    facts.expect_no_fork()
    last = facts.last
    # the root may be a copy of another one, whose run continues there
    same = last is not None and (bool(needed) or last.far in ("", far))
    return Settled(last.run if same and last is not None else "", facts)


def new_name() -> str:
    """Return a name for a run or an attempt that no other has."""
    return secrets.token_hex(6)


# Files


def encode_facts(facts: Facts) -> bytes:
    """Return the file of the last published fact: it repeats all earlier ones, so that they may be deleted."""
    return _with_digest(msgspec.json.encode(Facts(facts.number, facts.published)))


def encode_attempt(attempt: Attempt) -> bytes:
    """Return the file of an attempt that is not published yet."""
    return _with_digest(msgspec.json.encode(attempt))


def _with_digest(body: bytes) -> bytes:
    return body + b"\n" + hashlib.sha256(body).hexdigest().encode() + b"\n"


def _without_digest(data: bytes, where: object) -> bytes:
    body, _, digest = data.rstrip(b"\n").rpartition(b"\n")
    if hashlib.sha256(body).hexdigest().encode() != digest:
        raise CorruptSnapshotError(f"{where}: not a fact of a run: its digest is wrong")
    return body


def decode_facts(data: bytes, where: object) -> Facts:
    """Return the facts in a file. Raise CorruptSnapshotError if a byte differs."""
    return _checked(_decode(_without_digest(data, where), Facts, where), where)


def decode_attempt(data: bytes, where: object) -> Attempt:
    """Return an attempt that a host has stored. Raise CorruptSnapshotError if a byte differs."""
    found: Attempt = _decode(_without_digest(data, where), Attempt, where)
    _checked(Facts(0, (), (found,)), where)
    return found


def _decode(data: bytes, kind: Any, where: object) -> Any:
    return decode_json(data, kind, f"{where}: not a fact of a run")


def _checked(facts: Facts, where: object) -> Facts:
    for each in (*facts.published, *facts.pending):
        for name in (each.run, each.name):
            if not _RUN.fullmatch(name):
                raise CorruptSnapshotError(f"{where}: not a fact of a run: it has the id {name[:40]!r}")
    return facts


class _OldRecord(msgspec.Struct):
    """The record of a run as earlier versions wrote it: its attempts in order, with the steps that they restored."""

    run: str
    attempts: list[tuple[int, str, int | None]] = []
    far: str = ""
    published: bool = False


def decode_record(data: bytes, where: object) -> Facts:
    """Return the facts in a record of an earlier version. All are pending unless the record was in the far root."""
    record = _decode(data, _OldRecord, where)
    found: list[Attempt] = []
    for number, name, restored in sorted(record.attempts, key=lambda each: each[0]):
        parent = Parent(found[-1].name, restored) if found else None
        found.append(Attempt(name, record.run, number, parent, "", record.far))
    if not found:  # a birth, without a name
        found.append(Attempt(record.run, record.run, 1, None, "", record.far))
    number = max(each.number for each in found)
    facts = Facts(number, tuple(found)) if record.published else Facts(0, (), tuple(found))
    return _checked(facts, where)
