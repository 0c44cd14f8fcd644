"""The order of uploads, as pure functions: which steps are wanted far, which one is next, and which are dropped."""

from __future__ import annotations

from collections.abc import Collection, Mapping

MOST_QUEUED = 8
"""Steps that wait for an upload. The oldest of more are dropped, so that a near folder stays bounded."""
Upload = str | int | None
"""`"latest"`, the distance of steps, or None."""


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
    """Return the step to upload next: the newest wanted one, and those that some host has begun, in turns.

    Hosts finish what others have begun, so that all upload the same steps. One that waits for a lost host must not
    hold up a newer one. `last`: the step that had the last turn.

    >>> choose_next([10, 30], [10]), choose_next([10, 30], [10], 30), choose_next([10, 30], [])
    (30, 10, 30)
    """
    turns = {*begun, *([max(wanted)] if wanted else [])}
    return max(turns - {last} or turns, default=None)


def dropped_steps(upload: Upload, states: Mapping[int, str], asked: Collection[int], newest: int) -> list[int]:
    """Return the steps that are wanted no more: superseded ones, and the oldest of too many that wait.

    A step that is being sent is not dropped, except with "latest" for a later one that is whole. `states`: the state of
    each step, as an uploader has it.

    >>> states = {10: "waiting", 20: "queued", 30: "whole", 40: "queued", 50: "queued"}
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
