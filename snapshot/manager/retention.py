"""Retention: the fate of each step under a root, and the removal, for the manager and the command.

Survey and decide first, and return values that can be shown. Then remove each step by itself, after a second look
for changes since.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from snapshot.errors import CorruptSnapshotError, OtherWriterError, SnapshotError, StorageError, StorageNotFoundError
from snapshot.events import emit, log
from snapshot.io.aio import gather_limited
from snapshot.io.loop import is_exiting, run
from snapshot.io.storage import FileStat, Storage
from snapshot.manager.policies import (
    KeepBest,
    Policy,
    Taken,
    choose_kept,
    every_policy,
    needs_sizes,
    plan_retention,
    time_text,
)
from snapshot.manager.root import UNREADABLE as CANNOT_READ
from snapshot.manager.root import Root, StepFolders, taken_of
from snapshot.manifest.document import METADATA, ManifestHead, NotOurs
from snapshot.runs.facts import bury
from snapshot.runs.timeline import Standing, origin_of
from snapshot.save import transaction

Spared = Callable[[int, str], bool]
"""Returns True for a step, with its save id, that must stay, with what it relies on."""
Inspect = Callable[[Mapping[int, FileStat], Mapping[int, ManifestHead | SnapshotError]], None]
CLEANER = "snapshot-cleaner"
"""Name of the thread that removes old steps, in which the policy runs."""
PINNED, BUSY, IN_USE = "pinned", "a take may be running there", "in use"
NOT_OURS = "not a snapshot of this library"
UNREADABLE = "its manifest cannot be read"
OFF_LINE = "off the line of the run"
UNDECIDED = "taken by an attempt that is not published"


class UnknownMetric(SnapshotError):
    """No snapshot has a metric that a policy uses."""


@dataclass(frozen=True, slots=True)
class Fate:
    """Decision about one step."""

    step: int
    what: str
    """`snapshot`, `damaged` (a snapshot that is incomplete), `leftovers` (of interrupted takes and removals) or
    `other` (not of this library, or unreadable)."""
    goes: bool
    why: str
    taken: Taken | None = None
    """Set if the manifest was read."""
    nbytes: int | None = None
    """Size on storage, if requested."""
    files: int = 0
    """Number of files, for leftovers."""
    token: str = ""
    """Version token of the manifest that was read. A different token means another snapshot."""
    save_id: str = ""
    """Save id in the manifest that was read."""


@dataclass(frozen=True, kw_only=True)
class Survey:
    """What `survey_steps` looks at."""

    policy: Policy | None = None
    """Policy of the steps to keep; None keeps all."""
    among: Iterable[int] | None = None
    """The steps to look at; by default all under the root, which are listed."""
    upto: int | None = None
    """The step that was just committed. Later ones are ignored. If this one is missing, nothing is removed."""
    damaged: Collection[int] = ()
    """Steps that were found damaged, which policies ignore."""
    older_than: float = transaction.DAY
    """Age in seconds after which an uncommitted take counts as interrupted."""
    thorough: bool = False
    """Examine every folder and size; otherwise only those that may lead to a removal."""
    spared: Spared = lambda step, save_id: False
    """Says what must stay."""
    inspect: Inspect | None = None
    """Called with all committed steps and their manifests. It may raise, and then nothing is decided."""


def survey_steps(root: Root, survey: Survey) -> list[Fate]:
    """Decide about each step, and return the decisions in ascending order. Nothing is changed.

    Raises:
        UnknownMetric: The policy uses a metric that no snapshot has.
        SnapshotError: The policy raised.
    """
    upto, thorough = survey.upto, survey.thorough
    folders = run(root.folders() if survey.among is None else root.examine(sorted(survey.among)))
    if upto is not None:
        if upto not in folders.committed:
            return []
        # Later ones are those of an attempt that the run went back from, or of another writer. They may use files of
        # earlier steps, so they count for what is needed, but not for the policy.
        folders.later = {step: stat for step, stat in folders.committed.items() if step > upto}
        folders.committed = {step: stat for step, stat in folders.committed.items() if step <= upto}
        folders.others = [step for step in folders.others if step < upto]
    every = run(root.heads({**folders.committed, **folders.later}))
    if survey.inspect is not None:
        survey.inspect({**folders.committed, **folders.later}, every)
    fates = _of_snapshots(root, survey, folders, every)
    if not thorough and not folders.committed:
        return fates
    looked = list(folders.others)
    if thorough:
        looked += [fate.step for fate in fates if fate.what in ("snapshot", "damaged") and not fate.goes]
    age, others = survey.older_than, folders.others
    found = run(
        gather_limited(looked, lambda step: _find_leftovers(root, step, age, alone=step in others, thorough=thorough))
    )
    return sorted([*fates, *(fate for fate in found if fate)], key=lambda fate: (fate.step, fate.what != "snapshot"))


def _of_snapshots(
    root: Root, survey: Survey, folders: StepFolders, every: Mapping[int, ManifestHead | SnapshotError]
) -> list[Fate]:
    """Decide about snapshots. Only those of this library count for a policy or may be removed, if undamaged."""
    policy, upto, damaged, thorough = survey.policy, survey.upto, survey.damaged, survey.thorough
    stats = folders.committed
    heads = {step: head for step, head in every.items() if step in stats}
    standings = run(_standings(root, heads))
    left = [step for step, standing in standings.items() if standing == Standing.OFF and step != upto]
    taken, fates = _sort_out(heads, standings, damaged)
    fates += [Fate(step, "other", goes=False, why=str(error)) for step, error in folders.unreadable.items()]
    read_heads = {step: head for step, head in every.items() if isinstance(head, ManifestHead)}
    measured = read_heads if needs_sizes(policy) else {}
    sizes, pinned = physical_sizes(measured, {**stats, **folders.later}), run(root.pinned(measured))
    taken = {step: replace(each, sizes=sizes.get(step, {}), pinned=step in pinned) for step, each in taken.items()}
    good = {step: each for step, each in taken.items() if step not in damaged and step not in left}
    broken: dict[int, str] = {}

    def needed(removed: list[int]) -> dict[int, str]:
        leaving = [step for step in removed if step in read_heads]
        return find_needed(read_heads, read_heads.keys() - {*leaving, *broken, *damaged}, leaving)

    async def fault(step: int) -> str:
        head = heads[step]
        # What was just committed is whole, and to look at all of its files would cost each save that time.
        return await root.missing(step, stats[step], head) if step != upto and isinstance(head, ManifestHead) else ""

    now = time.time()
    # A damaged snapshot must not take the place of a good one. So those that the policy would keep are examined, and it
    # chooses again without the damaged ones. All others go anyway, and their files are not looked at. It runs in this
    # thread and not on the loop, because it may read snapshots.
    while True:
        stay = [each for each in sizes if each not in good and (each not in taken or each in {*broken, *pinned})]
        beside = [Taken(step, sizes=sizes[step], pinned=True, counts=False) for step in stay]
        kept = choose_within(str(root.url), policy, [*good.values(), *beside], now, sizes=sizes, find_needed=needed)
        found = {step: why for step, why in zip(kept, run(gather_limited(kept, fault)), strict=True) if why}
        if not found:
            break
        broken |= found
        good = {step: each for step, each in good.items() if step not in found}
    # without an undamaged snapshot, remove none: a damaged one is better than nothing
    going = [step for step in taken if step not in kept and step not in broken] if good else []
    going = [step for step in going if policy is not None or step not in {*left, *damaged}]
    if policy is not None and (going or thorough):
        expect_metrics(root, policy, taken.values())
    ids = {step: head.save_id for step, head in heads.items() if isinstance(head, ManifestHead)}
    stays = run(gather_limited(going, lambda step: _why_it_stays(root, step, ids.get(step, ""), survey)))
    held = dict(zip(going, stays, strict=True))
    plan = plan_retention(kept, {*good, *going}, held=held, find_needed=needed)
    for step, each in taken.items():
        head = heads[step]
        read = each if isinstance(head, ManifestHead) else None
        size = head.nbytes if thorough and isinstance(head, ManifestHead) else None
        if step in broken or not good:
            why = broken.get(step, "a restore passed over it")
            fates.append(Fate(step, "damaged", goes=False, why=f"damaged: {why}", taken=read, nbytes=size))
            continue
        over = f"its lifetime was over {time_text(each.expires)}" if each.expires and each.expires <= now else ""
        why = plan.kept.get(step, OFF_LINE if step in left else over or "no policy keeps it")
        token, save_id = stats[step].token, ids.get(step, "")
        fates.append(Fate(step, "snapshot", step in plan.removed, why, read, size, token=token, save_id=save_id))
    return fates


def _sort_out(
    heads: Mapping[int, ManifestHead | SnapshotError], standings: Mapping[int, Standing], damaged: Collection[int]
) -> tuple[dict[int, Taken], list[Fate]]:
    """Return the snapshots to decide about, and the fates of the others."""
    taken: dict[int, Taken] = {}
    fates: list[Fate] = []
    for step, head in heads.items():
        if isinstance(head, ManifestHead) and standings[step] != Standing.UNDECIDED:
            taken[step] = taken_of(step, head)
        elif isinstance(head, CorruptSnapshotError) and step in damaged:
            taken[step] = Taken(step)
        else:
            why = UNDECIDED if isinstance(head, ManifestHead) else NOT_OURS if isinstance(head, NotOurs) else UNREADABLE
            fates.append(Fate(step, "other", goes=False, why=why))
    return taken, fates


def physical_sizes(heads: Mapping[int, ManifestHead], stats: Mapping[int, FileStat]) -> dict[int, dict[str, int]]:
    """Return the bytes of each physical file of the steps: data, and the manifest with its parts.

    `stats` are those of the manifests. Steps with one save id are copies that another tool made: they share none.
    """
    found: dict[int, dict[str, int]] = {}
    saves: dict[str, int] = {}
    for step, head in heads.items():
        prefix = "" if saves.setdefault(head.save_id, step) == step else f"step-{step}/"
        files = {f"{prefix}{name}": size for name, size in head.physical_sizes().items()}
        found[step] = files | {f"step-{step}/{METADATA}": stats[step].size}
    return found


def choose_within(
    where: str,
    policy: Policy | None,
    taken: Sequence[Taken],
    now: float,
    *,
    sizes: Mapping[int, Mapping[str, int]],
    find_needed: Callable[[list[int]], Mapping[int, str]],
) -> dict[int, list[str]]:
    """Do as `choose_kept`. A policy that needs sizes is also told those of the steps that the kept ones rely on.

    Which these are follows from its choice. So they are added to the step that a limit removes first, and it chooses
    again. `where`: the root, or '' to settle nothing. `sizes`: the physical files of all steps. `find_needed`: as for
    `plan_retention`.
    """
    known = {each.step: each for each in taken}
    while True:
        chosen = choose_kept(policy, list(known.values()), now)
        if not needs_sizes(policy):
            return chosen
        stay = [each for each in known.values() if each.step in chosen or each.pinned]
        counted = {file for each in stay for file in each.sizes}
        removed = sorted(sizes.keys() - {each.step for each in stay})
        more = {file: size for step in find_needed(removed) for file, size in sizes[step].items()}
        if not stay or more.keys() <= counted:
            break
        newest = max((each.step for each in stay if each.counts and not each.suspect), default=None)
        free = [each for each in stay if not each.pinned and each.step != newest and not each.expires]
        first = min(free or stay, key=lambda each: (not each.suspect, each.step))
        known[first.step] = replace(first, sizes={**more, **first.sizes})
    for one in every_policy(policy) if where else ():
        one.settle(where, stay, now)
    return chosen


async def _standings(root: Root, heads: Mapping[int, object]) -> dict[int, Standing]:
    """Return the relation of each snapshot to the line of the run. Those that the run has left count for no policy."""
    line = await root.line()
    return {
        step: line.standing(step, head.save_id, origin_of(head.metadata))
        for step, head in heads.items()
        if isinstance(head, ManifestHead)
    }


def expect_metrics(root: Root, policy: Policy, taken: Collection[Taken]) -> None:
    """Raise UnknownMetric if no snapshot has the policy's metric. It may be misspelt, and the best would be lost."""
    known = sorted({name for each in taken for name in each.metrics})
    for each in every_policy(policy):
        if isinstance(each, KeepBest) and taken and each.metric not in known:
            there = f"; known metrics: {', '.join(known)}" if known else ", nor any other metric"
            raise UnknownMetric(f"{root.url}: no snapshot has the metric {each.metric!r}{there}; nothing was removed")


async def _why_it_stays(root: Root, step: int, save_id: str, survey: Survey) -> str:
    """Return why a step that no policy keeps must stay, or ''."""
    if survey.spared(step, save_id):
        return IN_USE
    try:
        if await root.pinned([step]):
            return PINNED
        async with root.opened(step) as session:
            return BUSY if await transaction.is_busy(session.storage, survey.older_than) else ""
    except StorageError as error:
        if error.errno not in CANNOT_READ:
            raise
        return str(error)


async def _find_leftovers(root: Root, step: int, older_than: float, *, alone: bool, thorough: bool) -> Fate | None:
    """Return the leftovers of finished takes in a step's folder. `alone`: the folder has no snapshot."""
    async with root.opened(step) as session:
        storage = session.storage
        try:
            files = await transaction.find_leftovers(storage, older_than)
            if files:
                size = await _size_of(storage, files) if thorough else None
                return Fate(step, "leftovers", goes=True, why="an interrupted take", nbytes=size, files=len(files))
            if not (alone and thorough):
                return None
            why = BUSY if await transaction.is_busy(storage, older_than) else NOT_OURS
        except StorageError as error:
            if error.errno not in CANNOT_READ:
                raise
            why = str(error)
        return Fate(step, "other", goes=False, why=why)


async def _size_of(storage: Storage, files: Iterable[str]) -> int:
    total = 0
    for path in files:
        with suppress(StorageNotFoundError):
            total += (await storage.stat(path)).size
    return total


@dataclass(frozen=True, slots=True)
class Removed:
    """Removed steps, and failures."""

    fates: tuple[Fate, ...]
    failed: tuple[tuple[Fate, Exception], ...] = ()


async def remove_steps(
    root: Root,
    fates: Iterable[Fate],
    *,
    older_than: float = transaction.DAY,
    spared: Spared = lambda step, save_id: False,
) -> Removed:
    """Remove the steps whose fate is to go. A failure is logged, and does not prevent other removals."""
    going = [fate for fate in fates if fate.goes]

    async def one(index: int) -> Exception | bool:
        fate = going[index]
        try:
            return await _remove_step(root, fate, older_than, spared)
        except (SnapshotError, OSError) as error:
            emit("failed", "prune", str(root.step_url(fate.step)), error=error)
            return error

    found = await gather_limited(range(len(going)), one)
    gone = tuple(fate for fate, outcome in zip(going, found, strict=True) if outcome is True)
    failed = tuple((fate, each) for fate, each in zip(going, found, strict=True) if isinstance(each, Exception))
    if gone:
        steps = [fate.step for fate in gone if fate.what == "snapshot"]
        leftovers = [fate.step for fate in gone if fate.what == "leftovers"]
        emit("pruned", "prune", str(root.url), steps=steps, leftovers=leftovers)
        log.info("prune %s: removed %s", root.url, _name_steps(steps, leftovers))
    return Removed(gone, failed)


def remove_unkept(
    root: Root,
    policy: Policy | None,
    among: Collection[int],
    ignored: Collection[int] = (),
    *,
    leftovers: bool = False,
) -> set[int]:
    """Remove those of some steps that a policy does not keep, and return the ones that are left.

    `ignored`: steps that the policy does not count, and so does not keep. `leftovers`: also remove those of interrupted
    takes and removals of all other steps. A failure is logged, since the steps only cost space.
    """
    try:
        others = run(_list_uncommitted(root)) if leftovers else []
        fates = survey_steps(root, Survey(policy=policy, among={*among, *others}, damaged=ignored))
        done = run(remove_steps(root, fates))
    except SnapshotError as error:
        log.warning("%s: failed to remove old snapshots: %s", root.url, error)
        return set(among)
    log_failures(root, done)
    return {fate.step for fate in fates if fate.what != "leftovers"} - {
        fate.step for fate in done.fates if fate.what == "snapshot"
    }


async def _list_uncommitted(root: Root) -> list[int]:
    """Return the steps whose folders have no snapshot, if the storage can list them."""
    async with root.opened() as session:
        if not session.storage.capabilities.list:
            return []
    return (await root.examine(await root.numbers())).others


def log_failures(root: Root, done: Removed) -> None:
    """Log the removals that failed."""
    for fate, error in done.failed:
        log.warning("%s: removal failed, and is retried later: %s", root.step_url(fate.step), error)


async def _remove_step(root: Root, fate: Fate, older_than: float, spared: Spared) -> bool:
    """Remove one step. Return False if it is needed now, or already removed."""
    async with root.opened(fate.step) as session:
        if fate.what == "leftovers":
            return bool(await transaction.delete_leftovers(session.storage, older_than))

        async def wanted() -> bool:
            return spared(fate.step, fate.save_id) or bool(await root.pinned([fate.step]))

        try:
            async with root.opened() as above:
                await bury(above.storage, session.storage)
            removed = await transaction.delete_if_unchanged(session.storage, fate.token, older_than, wanted)
        except StorageNotFoundError:
            return False
        if removed:
            await root.forget_pin(fate.step)
        return removed


def _name_steps(steps: Sequence[int], leftovers: Sequence[int]) -> str:
    """Return a text that names steps, and steps with leftovers.

    >>> _name_steps([10, 20], [5])
    'step-10, step-20; leftovers in step-5'
    """
    named = [", ".join(f"step-{step}" for step in steps)] if steps else []
    return "; ".join(
        [*named, *(["leftovers in " + ", ".join(f"step-{step}" for step in leftovers)] if leftovers else [])]
    )


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


class Cleaner:
    """Background removal of the snapshots that a policy does not keep.

    `spared`: what is being taken or read. `damaged()`: the steps that were found damaged.
    """

    def __init__(
        self,
        root: Root,
        policy: Policy | None,
        spared: Spared,
        damaged: Callable[[], set[int]],
        inspect: Inspect | None = None,
    ) -> None:
        self._root = root
        self._policy = policy
        self._spared = spared
        self._damaged = damaged
        self._inspect = inspect
        self.removed: Callable[[list[int]], object] = lambda steps: None
        """Called with steps that were removed."""
        self._change = threading.Condition()
        self._wanted: int | None = None
        """The step after which removals are to begin."""
        self._current: int | None = None
        """The step after which removals are running."""
        self._went_back: dict[int, float] = {}
        """Steps that were taken after a later one, and when: the removals of the later one spare them."""
        self._needed: set[str] = set()
        """Save ids of the snapshots that takes rely on which were committed since the running removals began."""
        self._thread: threading.Thread | None = None
        self._recent: deque[tuple[float, int]] = deque(maxlen=64)
        """The steps of the last commits, and when their takes began."""
        self._said: set[str | int] = set()
        """Warnings that were logged already: the steps that are damaged, and `metric` for an unknown metric."""

    def committed(self, step: int, began: float, base: str = "") -> None:
        """Record a step that is committed and durable. Return at once.

        If a later step was taken since, its removals have spared this one, which was being written. If one was taken
        before, the application went back, and the removals of the later step must spare this one.

        Args:
            step: The step.
            began: The monotonic time when its take began.
            base: Save id of the snapshot that it relies on.
        """
        with self._change:
            upto = max([step, *(other for start, other in self._recent if start > began)])
            if not any(other is not None and other > step for other in (self._wanted, self._current)):
                spared = self._went_back.items()
                self._went_back = {other: start for other, start in spared if other > step or start > began}
            self._went_back |= {other: start for start, other in self._recent if other < step and start > began}
            if any(other > step and start < began for start, other in self._recent):
                self._went_back[step] = began
            if base:
                self._needed.add(base)
            self._recent.append((began, step))
            self._request(upto)

    def look_again(self, upto: int | None = None) -> None:
        """Request the removals of a step that was committed earlier, by default of the last one."""
        with self._change:
            if upto is None and self._recent:
                upto = self._recent[-1][1]
            if upto is not None:
                self._request(upto)

    def _request(self, upto: int) -> None:
        """Request removals. The caller has the lock."""
        self._wanted = upto if self._wanted is None else max(upto, self._wanted)
        if self._thread is None and not is_exiting():
            self._thread = threading.Thread(target=self._work, name=CLEANER, daemon=True)
            try:
                self._thread.start()
            except RuntimeError:  # the interpreter is exiting: `close` does the work
                self._thread = None

    def close(self) -> None:
        """Wait until all requested removals are done."""
        with self._change:
            self._change.wait_for(lambda: self._thread is None)
        self._work()

    def clean_now(self, upto: int) -> None:
        """Remove in this thread. Failures are logged."""
        try:
            self._clean(upto)
        except SnapshotError as error:
            log.warning("%s: failed to remove old snapshots: %s", self._root.url, error)

    def _work(self) -> None:
        while True:
            with self._change:
                upto = self._current = self._wanted
                self._wanted = None
                self._needed.clear()
                if upto is None:
                    self._thread = None
                    self._change.notify_all()
                    return
            try:
                self._clean(upto)
            except Exception as error:  # noqa: BLE001 - training must not fail; the next pass retries
                log.warning("%s: failed to remove old snapshots: %s", self._root.url, error)
                emit("failed", "prune", str(self._root.url), error=error)

    def _clean(self, upto: int) -> None:
        try:
            survey = Survey(
                policy=self._policy, upto=upto, damaged=self._damaged(), spared=self._is_spared, inspect=self._inspect
            )
            fates = survey_steps(self._root, survey)
        except OtherWriterError as other:
            self._say("writer", f"{self._root.url}: {other}")
            return
        except UnknownMetric as unknown:
            self._say("metric", str(unknown))
            return
        for fate in fates:
            if fate.what == "damaged":
                self._say(fate.step, f"{self._root.step_url(fate.step)}: kept, and ignored by policies: {fate.why}")
        if self._policy is None:  # only what has expired
            fates = [fate for fate in fates if fate.what == "snapshot"]
        done = run(remove_steps(self._root, fates, spared=self._is_spared))
        log_failures(self._root, done)
        self.removed([fate.step for fate in done.fates if fate.what == "snapshot"])

    def _is_spared(self, step: int, save_id: str = "") -> bool:
        return step in self._went_back or save_id in self._needed or self._spared(step, save_id)

    def _say(self, about: str | int, what: str) -> None:
        """Log a warning, once for each `about`."""
        if about not in self._said:
            self._said.add(about)
            log.warning("%s", what)
