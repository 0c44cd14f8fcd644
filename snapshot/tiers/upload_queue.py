"""The decisions of an uploader, as pure functions of facts and time: which steps are wanted far, and what is next."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

MOST_QUEUED = 8
"""Steps that wait for an upload. The oldest of more are dropped, so that a near folder stays bounded."""
Upload = str | int | None
"""`"latest"`, the distance of steps, or None."""
JOINS = 10.0
"""Seconds between two searches for steps that only other hosts upload."""
LOOKS = 30.0
"""Seconds between two looks for the choice of a person, while steps are forked."""


class UploadState(StrEnum):
    """The state of a near step on its way to the far root. `where`, `ls`, `ui` and metrics use these words."""

    KEPT = "kept near"
    """It is not wanted far."""
    QUEUED = "queued"
    """It is wanted far, and another step is sent first, or the far root cannot be reached."""
    UPLOADING = "uploading"
    WAITING = "waiting"
    """The files of this host were sent. Those of other hosts are missing."""
    WHOLE = "whole"
    DROPPED = "dropped"
    """A newer step is uploaded instead."""
    OUTDATED = "outdated"
    """It was removed from the far root, or a newer snapshot of the step is there."""
    DAMAGED = "damaged"
    """A file is damaged, and no other host has it undamaged."""
    UNDECIDED = "undecided"
    """The attempt that took it is not known to the far root."""
    FORKED = "forked"
    """Another attempt was published instead of the one that took it. A person must choose."""
    DELETED = "deleted"
    """The far root does not have the run any more."""

    @property
    def is_open(self) -> bool:
        """True if there is work left."""
        return self in (UploadState.QUEUED, UploadState.UPLOADING, UploadState.WAITING)

    @property
    def is_stuck(self) -> bool:
        """True if a person, or a new fact, must change it."""
        return self in (UploadState.UNDECIDED, UploadState.FORKED, UploadState.DELETED)


MEANINGS = {
    UploadState.QUEUED: "wanted far; another step is sent first, or the far root cannot be reached",
    UploadState.WAITING: "the files of this host were sent, and those of other hosts are missing",
    UploadState.DROPPED: "a newer step is uploaded instead of this one",
    UploadState.OUTDATED: "removed from the far root, or another snapshot of the step is there",
    UploadState.DAMAGED: "a file is damaged, and no other host has it undamaged",
    UploadState.UNDECIDED: "the far root does not know the attempt that took the step",
    UploadState.FORKED: "another attempt was published instead; `snapshot attempts` shows both",
    UploadState.DELETED: "the run was deleted in the far root",
}
"""Explanations of the states that do not explain themselves, for people."""


class Act(StrEnum):
    """An action of an uploader."""

    TIDY = "tidy"
    """Delete what was uploaded in vain, and close what is not used any more."""
    LOOK = "look"
    """Read the facts of the far root, and search for steps that a host has begun there."""
    SEND = "send"
    """Advance the upload of a step."""
    WAIT = "wait"
    END = "end"
    """End the process: nothing is left to do, and no trainer is there."""


class Action(NamedTuple):
    """The next action of an uploader."""

    act: Act
    step: int = -1
    seconds: float = 0.0
    """The time to wait, unless a request arrives."""


@dataclass(frozen=True, kw_only=True)
class QueueView:
    """All that decides what an uploader does next. Times are of one monotonic clock."""

    states: Mapping[int, UploadState] = field(default_factory=dict)
    is_registered: bool = True
    is_tidy: bool = True
    has_looked: bool = False
    """True if the far root was read since the last action."""
    begun: Collection[int] = ()
    """Steps that some host has begun in the far root, or that wait for files."""
    last: int | None = None
    """The step that had the last turn."""
    vain: Collection[int] = ()
    """Steps that wait for files of other hosts, which have not sent them for long."""
    is_alone: bool = True
    """True if the job has one host."""
    looked: float = 0.0
    """Time of the last look at steps that are not wanted here."""
    free: float = 0.0
    """Time before which the far root is not tried again."""
    jobs: int = 0
    """The number of jobs with a trainer on this host."""
    ends: float = float("inf")
    """Time after which an uploader without work and without a trainer ends."""


def next_action(view: QueueView, now: float) -> Action:
    """Return what an uploader does next.

    >>> next_action(QueueView(states={10: UploadState.QUEUED}), 1.0).act
    <Act.LOOK: 'look'>
    >>> next_action(QueueView(states={10: UploadState.QUEUED}, has_looked=True), 1.0)
    Action(act=<Act.SEND: 'send'>, step=10, seconds=0.0)
    >>> next_action(QueueView(states={10: UploadState.WHOLE}, ends=0.5), 1.0).act
    <Act.END: 'end'>
    """
    if not view.is_tidy:
        return Action(Act.TIDY)
    states = view.states.values()
    open_ = [step for step, state in view.states.items() if state.is_open]
    if not set(open_).difference(view.vain) and not view.jobs and now > view.ends:
        return Action(Act.END)
    if not view.is_registered or now < view.free:
        return Action(Act.WAIT, seconds=view.free - now if view.is_registered else 0.5)
    if open_ and view.has_looked:
        step = choose_next(open_, view.begun, view.last)
        assert step is not None
        return Action(Act.SEND, step)
    joins = not view.is_alone and (UploadState.KEPT in states or UploadState.DROPPED in states)
    stuck = view.jobs > 0 and any(state.is_stuck for state in states)
    due = (joins and now - view.looked > JOINS) or (stuck and now - view.looked > LOOKS)
    if open_ or (due and not view.has_looked):
        return Action(Act.LOOK)
    return Action(Act.WAIT, seconds=1.0)


def wanted_steps(upload: Upload, steps: Collection[int], asked: Collection[int], newest: int) -> list[int]:
    """Return the near steps that are wanted far, ascending. `newest`: the step that was taken last.

    >>> wanted_steps("latest", [10, 20, 30], [10], 30)
    [10, 30]
    >>> wanted_steps(20, [10, 20, 30, 40], [], 40)
    [20, 40]
    >>> wanted_steps(None, [10, 20], [], 20)
    []
    """
    wanted = {step for step in asked if step in steps}
    if upload == "latest" and newest in steps:
        wanted.add(newest)
    elif isinstance(upload, int):
        wanted |= {step for step in steps if step % upload == 0}
    return sorted(wanted)


def choose_next(wanted: Collection[int], begun: Collection[int], last: int | None = None) -> int | None:
    """Return the step to upload next: those that some host has begun, and the newest wanted other one, in turns.

    Hosts finish what others have begun, so that all upload the same steps. Those that wait for a lost host must not
    hold up others. `last`: the step that had the last turn.

    >>> choose_next([10, 30], [10]), choose_next([10, 30], [10], 30), choose_next([10, 30], [])
    (30, 10, 30)
    >>> choose_next([10, 30], [30]), choose_next([10, 20, 30], [20, 30], 30), choose_next([10, 20, 30], [20, 30], 20)
    (30, 20, 10)
    """
    newest = max(set(wanted).difference(begun), default=-1)
    turns = sorted({*begun, newest} - {-1})
    if not turns:
        return None
    if last is None or (newest == turns[-1] and newest != last):
        return turns[-1]
    return max((step for step in turns if step < last), default=turns[-1])


def dropped_steps(upload: Upload, states: Mapping[int, UploadState], asked: Collection[int], newest: int) -> list[int]:
    """Return the steps that are wanted no more: superseded ones, and the oldest of too many that wait.

    A step that is being sent is not dropped, except with "latest" for a later one that is whole. `states`: the state of
    each step, as an uploader has it.

    >>> words = {10: "waiting", 20: "queued", 30: "whole", 40: "queued", 50: "queued"}
    >>> states = {step: UploadState(word) for step, word in words.items()}
    >>> dropped_steps("latest", states, [], 50)
    [10, 20, 40]
    """
    free = sorted(step for step in states if step not in asked and step != newest)
    queued = [step for step in free if states[step] == "queued"]
    if upload != "latest":
        return queued[:-MOST_QUEUED]
    whole = max((step for step, state in states.items() if state == "whole"), default=-1)
    superseded = [step for step in free if step < whole and states[step] in ("uploading", "waiting", "damaged")]
    return sorted({*queued, *superseded})
