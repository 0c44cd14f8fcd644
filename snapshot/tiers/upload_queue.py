"""The order of uploads, as pure functions: which steps are wanted far, which one is next, and which are dropped."""

from __future__ import annotations

from collections.abc import Collection, Mapping

MOST_QUEUED = 8
"""Steps that wait for an upload. The oldest of more are dropped, so that a near folder stays bounded."""
Upload = str | int | None
"""`"latest"`, the distance of steps, or None."""


def wanted_steps(upload: Upload, steps: Collection[int], asked: Collection[int]) -> list[int]:
    """Return the near steps that are wanted far, ascending.

    >>> wanted_steps("latest", [10, 20, 30], [10])
    [10, 30]
    >>> wanted_steps(20, [10, 20, 30, 40], [])
    [20, 40]
    >>> wanted_steps(None, [10, 20], [])
    []
    """
    wanted = {step for step in asked if step in steps}
    if upload == "latest" and steps:
        wanted.add(max(steps))
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


def dropped_steps(upload: Upload, states: Mapping[int, str], asked: Collection[int]) -> list[int]:
    """Return the steps that are wanted no more: superseded ones, and the oldest of too many.

    `states`: what an uploader says of each step.

    >>> dropped_steps("latest", {10: "waiting", 20: "queued", 30: "whole", 40: "queued", 50: "queued"}, [])
    [10, 20, 40]
    """
    open_ = sorted(step for step, state in states.items() if state in ("queued", "uploading", "waiting", "damaged"))
    dropped = open_[:-MOST_QUEUED]
    if upload == "latest":
        whole = max((step for step, state in states.items() if state == "whole"), default=-1)
        newest = max(states, default=-1)
        dropped += [step for step in open_ if step < whole and step not in asked]
        dropped += [step for step in open_ if step < newest and states[step] == "queued" and step not in asked]
    return sorted(set(dropped))
