"""Incremental takes: which steps a take is based on, and which steps must stay for their physical copies."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence

from snapshot.errors import StorageError
from snapshot.events import log
from snapshot.io.loop import run
from snapshot.manager.policies import KeepLatest, Policy, parts
from snapshot.manager.root import Root
from snapshot.manifest.document import ManifestHead


def find_bases(root: Root, step: int, damaged: Collection[int]) -> list[int]:
    """Return the newest two committed steps, the newest first.

    Damaged steps, and those that share physical files with them, are left out. Without an answer of the storage, there
    are none.
    """
    try:
        committed = run(root.folders()).committed
        bad = set[str]().union(*(run(root.copies(each)) for each in damaged))
        found: list[int] = []
        for each in sorted(committed, reverse=True):
            if each != step and each not in damaged and not (bad and bad & run(root.copies(each))):
                found.append(each)
            if len(found) == 2:
                break
        return found
    except StorageError as error:
        log.warning("%s: nothing is shared with earlier steps: %s", root.url, error)
        return []


def choose_base(root: Root, policy: Policy | None, steps: list[int]) -> str | list[str]:
    """Return the `base` of a take. A list of steps keeps two physical copies, unless only one step is kept anyway."""
    urls = [root.step_url(step).reveal() for step in steps]
    single = policy is not None and all(each == KeepLatest(1) for each in parts(policy))
    try:
        single = single and not run(root.pinned(steps))
    except StorageError:
        single = False
    return urls[0] if urls and single else urls


def find_needed(heads: Mapping[int, ManifestHead], kept: Collection[int], going: Collection[int]) -> dict[int, str]:
    """Return the steps, of those `going`, that kept steps rely on, each with the reason.

    These are the bases of steps that left something out, and steps with the second physical copy of what several kept
    steps share.
    """
    held: defaultdict[str, list[str]] = defaultdict(list)
    bases: dict[str, int] = {}

    def add(step: int) -> None:
        for content, origin in heads[step].copies().items():
            held[content].append(origin)
        if (base := heads[step].base) is not None:
            bases.setdefault(base.save_id, step)

    for step in kept:
        add(step)
    needed: dict[int, str] = {}
    found = True
    while found:  # a step that stays may rely on another one
        found = False
        for step in sorted(set(going) - needed.keys(), reverse=True):
            head = heads[step]
            if head.save_id in bases:
                needed[step] = f"the base of step-{bases[head.save_id]}"
            elif any(_is_second(origin, held[content]) for content, origin in head.copies().items()):
                needed[step] = "has the second physical copy of data that kept steps share"
            else:
                continue
            add(step)
            found = True
    return needed


def _is_second(origin: str, held: Sequence[str]) -> bool:
    """Return True if several steps hold a content in one physical copy, and this is another one."""
    return len(held) > 1 and set(held) == {held[0]} != {origin}
