"""The uploader of a host: sends near steps to the far root, keeps replicas for partners, and answers its trainer.

It is a process of its own, which outlives the trainer. What it must do follows from the files that are there, so it can
be killed and started again at any time.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

import msgspec

from snapshot.errors import CorruptSnapshotError, RunDeletedError, RunForkedError, SnapshotError
from snapshot.events import emit, log
from snapshot.io.loop import run
from snapshot.runs.timeline import Attempt, Facts, RolledBackError, RunLine, Standing
from snapshot_tiers.control import ControlRequest, Registration, Status, StepStatus, Upload, UploadState
from snapshot_tiers.facts import read_copy, store_copy, sync_facts
from snapshot_tiers.far_upload import FarUpload, OpenUploads, Outdated, Undecided, is_begun
from snapshot_tiers.near_steps import NearFolder, NearStep
from snapshot_tiers.peers import Replicas, heal_step

# What an uploader does next, as pure functions of facts and time.

MOST_QUEUED = 8
"""Steps that wait for an upload. The oldest of more are dropped, so that a near folder stays bounded."""
JOINS = 10.0
"""Seconds between two searches for steps that only other hosts upload."""
LOOKS = 30.0
"""Seconds between two looks for the choice of a person, while steps are forked."""


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


# The work itself.

LONGEST_PAUSE = 30.0
"""Seconds between two tries to reach a far root that does not answer."""
OTHERS = 60.0
"""Seconds after which a host also uploads files that another host has not uploaded, if it has replicas of them."""

VAIN = 120.0
"""Seconds after which a host that has sent all its files does not stay for those of others."""


class Uploader:
    """The work of an uploader, in turns: `upload_turn` and `pull_turn` run in two threads."""

    def __init__(self, folder: str, address: str = "") -> None:
        self.folder = NearFolder(folder)
        self.address = address
        self._lock = threading.RLock()
        self._registration: Registration | None = None
        self._facts = Facts()
        self._lives: dict[str, Registration] = {}
        """The last registration with an attempt of each job, by the job's secret."""
        self._states: dict[int, StepStatus] = {}
        self._open = OpenUploads()
        self._asked: set[int] = set()
        self._looked = 0.0
        """Time of the last look at the far root."""
        self._has_looked = False
        self._begun: list[int] = []
        self._newest = -1
        """The step that was taken last."""
        self._current: int | None = None
        """The step that is being uploaded in this moment."""
        self._last: int | None = None
        self._free = 0.0
        """Time before which the far root is not tried again."""
        self.ends = float("inf")
        """Time after which the process ends, without work and without a trainer."""
        self.jobs: Callable[[], set[str]] = set
        self._error = ""
        self._pause = 0.0
        self._waiting_since: dict[int, float] = {}
        self._vain: set[int] = set()
        """Steps that wait for files that no host sends. One that has them may have been lost, or have dropped them."""
        self._replicas = Replicas(self.folder)
        self.wake = threading.Event()
        self.on_secret: Callable[[str], None] = lambda _: None

    # Requests

    def handle(self, request: ControlRequest) -> Status:
        """Do what the trainer asks for, and return the state."""
        with self._lock:
            if request.verb == "ping":
                return Status("", self.address, os.getpid())
            if request.verb == "register" and request.registration is not None:
                self.register(request.registration)
            elif request.verb == "want":
                self._free = self._pause = 0.0  # the caller waits
                self._asked.add(request.step)
                state = self._states.get(request.step)
                if state is not None and state.far in (UploadState.DROPPED, UploadState.KEPT, UploadState.DAMAGED):
                    state.far = UploadState.QUEUED
            elif request.verb == "drop":
                self._asked.discard(request.step)
                self._drop(request.step)
            self._refresh()
            if request.verb != "status":
                self.wake.set()
            return self.status()

    def register(self, registration: Registration) -> None:
        """Serve a trainer: the new one, if there was another.

        A job that a later one has followed may register again, when this uploader is new. It does not take precedence.
        """
        with self._lock:
            old = self._registration
            self._learn(registration.facts.unite(read_copy(self.folder.path)))
            if registration.attempt:
                self._lives.pop(registration.secret, None)
                self._lives = dict([*self._lives.items()][-15:]) | {registration.secret: registration}
            live = self._live()
            if old is not None and registration.attempt and live is not None and live.name != registration.attempt:
                self.on_secret(registration.secret)
                return
            changed = old is not None and (old.far, old.options, old.rate, old.compression) != (
                registration.far,
                registration.options,
                registration.rate,
                registration.compression,
            )
            self._registration = registration
            self._replicas.register(registration)
            self.on_secret(registration.secret)
            self._pause = self._free = 0.0
            self._vain.clear()
            self._open.reset |= changed
            for state in self._states.values():
                if state.far.is_stuck:
                    state.far, state.error = UploadState.KEPT, ""
        self._refresh()

    def _learn(self, facts: Facts) -> None:
        """Add facts to those that are known, and store them. Nothing is forgotten."""
        with self._lock:
            found = self._facts.unite(facts)
            if found != self._facts:
                for state in self._states.values():  # what replaced a step may be off the line now
                    if state.far == UploadState.OUTDATED and found.number > self._facts.number:
                        state.far, state.error = UploadState.KEPT, ""
                self._facts = found
                store_copy(self.folder.path, found)

    def status(self) -> Status:
        with self._lock:
            run_id = self._registration.run if self._registration is not None else ""
            states, number = dict(self._states), self._facts.number
            return Status(run_id, self.address, os.getpid(), states, self._error, number, len(self.jobs()))

    def describe(self) -> bytes:
        """Return the state, for other hosts."""
        self._refresh()
        return msgspec.json.encode(self.status())

    def is_idle(self) -> bool:
        """Return True if nothing is left to upload that this host has."""
        self._refresh()
        with self._lock:
            return not any(each.far.is_open for step, each in self._states.items() if step not in self._vain)

    # Steps

    def _refresh(self) -> None:
        """Look at the folder: which steps there are, and which of them are wanted far."""
        with self._lock:
            given = self._registration
            if given is None:
                return
            steps, line = {}, RunLine(self._facts)
            for step, near in self.folder.steps_of(given.run).items():
                if line.standing(step, near.save_id, near.origin) != Standing.OFF:
                    steps[step] = near
                elif not near.suspect:  # a suspect one stays until the trainer takes a later step
                    log.warning("step-%s: removed: a later attempt began with an older step", step)
                    self._forget(step)
                    self.folder.remove(step, near.save_id)
            for step in list(self._states):
                if step not in steps or self._states[step].save_id != steps[step].save_id:
                    self._forget(step)
            self._asked |= {step for step, near in steps.items() if near.origin.replaces}
            view = RunLine(self._facts, self._live())
            ages = {step: view.age(near.origin) for step, near in steps.items()}
            self._newest = max(ages, key=lambda step: ages[step], default=-1)
            asked = set(self._asked)
            if self._newest >= 0 and steps[self._newest].suspect:  # it supersedes none
                among = steps if given.upload == "latest" else wanted_steps(given.upload, steps, asked, self._newest)
                good = [step for step in among if not steps[step].suspect]
                asked |= {max(good, key=lambda step: ages[step])} if good else set()
            wanted = wanted_steps(given.upload, steps, asked, self._newest)
            for step, near in steps.items():
                files = self.folder.files(step)
                state = self._states.setdefault(step, StepStatus(near.save_id))
                given_up = state.far == UploadState.DROPPED and step == self._newest  # the run went back to it
                if step in wanted and (given_up or state.far == UploadState.KEPT):
                    state.far = UploadState.QUEUED
                state.files, state.pulled = files, self._replicas.pulled(step, files)
                state.total = sum(size for name, size in files.items() if name not in state.pulled)
                state.replicated = self._replicas.is_complete(step, files)
            states = {step: each.far for step, each in self._states.items()}
            for step in dropped_steps(given.upload, states, asked, self._newest):
                self._drop(step, log.info if given.upload == "latest" else log.warning)

    def _live(self) -> Attempt | None:
        """Return the latest attempt of the trainers, or the last one that is known.

        The order in which they register tells nothing: a new uploader hears from all of them at once.
        """
        names = self._live_attempts() or [each.attempt for each in self._lives.values()]
        found = [each for name in names if (each := self._facts.find(name)) is not None]
        return max(found, key=lambda each: each.number, default=self._facts.last)

    def _live_attempts(self) -> list[str]:
        """Return the attempts of the jobs that are connected."""
        jobs = self.jobs()
        return [each.attempt for secret, each in self._lives.items() if secret in jobs]

    def _took_alone(self, near: NearStep) -> bool:
        """Return True if no other host can have files of a step, by the job that took it, else by the one served."""
        took = [each for each in self._lives.values() if each.attempt == near.origin.attempt]
        given = took[-1] if took else self._registration
        return given is not None and given.is_alone()

    def _drop(self, step: int, say: Callable[..., None] = log.warning) -> None:
        """Give up an upload. The newest step is never given up."""
        state = self._states.get(step)
        if state is None or not (state.far.is_open or state.far == UploadState.DAMAGED) or step == self._newest:
            return
        say("step-%s: is not uploaded: step-%s is newer", step, self._newest)
        emit("dropped", "upload", self.folder.step_path(step), step=step)
        state.far = UploadState.DROPPED
        upload = self._open.get(step)
        if upload is not None and step != self._current:
            self._open.end(step)

    def _forget(self, step: int) -> None:
        state = self._states.pop(step, None)
        self._waiting_since.pop(step, None)
        self._vain.discard(step)
        upload = self._open.get(step)
        if upload is not None and state is not None and state.far != UploadState.WHOLE:
            self._open.end(step)
        self._open.release(step)

    # Upload

    def view(self) -> QueueView:
        """Return all that decides what is next."""
        self._refresh()
        with self._lock:
            given = self._registration
            states = {step: each.far for step, each in self._states.items()}
            waiting = [step for step, state in states.items() if state == UploadState.WAITING]
            return QueueView(
                states=states,
                is_registered=given is not None,
                is_tidy=self._open.is_tidy,
                has_looked=self._has_looked,
                begun={*self._begun, *waiting},
                last=self._last,
                vain=set(self._vain),
                is_alone=given is None or len(given.hosts) == 1,
                looked=self._looked,
                free=self._free,
                jobs=len(self.jobs()),
                ends=self.ends,
            )

    def upload_turn(self) -> Action:
        """Do what is next, and return it. The caller waits, or ends."""
        action = next_action(self.view(), time.monotonic())
        try:
            if action.act == Act.TIDY:
                self._open.tidy()
            elif action.act == Act.LOOK:
                self._look()
            else:
                self._has_looked = False
                if action.act == Act.SEND:
                    self._send(action.step)
        except (SnapshotError, OSError) as error:
            self._failed(error, min(LONGEST_PAUSE, max(0.5, self._pause * 2)))
        except Exception as error:  # noqa: BLE001 - the process must outlive any fault of one step
            log.exception("the upload failed unexpectedly, and is tried again")
            self._failed(error, LONGEST_PAUSE)
        return action

    def _failed(self, error: Exception, pause: float) -> None:
        if str(error) != self._error:
            log.warning("upload: %s", error)
            emit("failed", "upload", self.folder.path, error=error)
        self._error, self._pause = str(error) or type(error).__name__, pause
        self._free = time.monotonic() + pause

    def _look(self) -> None:
        """Read the facts, publish what is pending, and find the steps that a host has begun to upload."""
        given = self._registration
        assert given is not None
        self._looked, self._has_looked = time.monotonic(), True
        root = self._open.root(given).storage
        try:
            facts, fork = run(sync_facts(root, self._facts, self._names()))
        except RunDeletedError as error:
            self._stick(UploadState.DELETED, error)
            return
        except RolledBackError as error:
            self._stick(UploadState.FORKED, error)
            return
        self._learn(facts)
        with self._lock:
            line = RunLine(self._facts)
            near = self.folder.steps()
            stuck = [step for step, each in self._states.items() if each.far.is_stuck and step in near]
            for step in stuck:
                if line.standing(step, near[step].save_id, near[step].origin) == Standing.ON:
                    self._states[step].far, self._states[step].error = UploadState.KEPT, ""
        if fork is not None:
            self._stick(UploadState.FORKED, fork)
        with self._lock:
            looked = (UploadState.KEPT, UploadState.DROPPED) if len(given.hosts) > 1 else ()
            states = {step: each for step, each in self._states.items() if each.far.is_open or each.far in looked}
        begun = [step for step, each in states.items() if run(is_begun(root, step, each.save_id))]
        with self._lock:  # another host wants what it has begun
            for step in begun:
                if states[step].far in looked:
                    self._asked.add(step)
                    states[step].far = UploadState.QUEUED
            self._begun = begun

    def _names(self) -> set[str]:
        """Return the attempts that must be published: those that have steps here, and those of trainers."""
        near = self.folder.steps().values()
        return {each.origin.attempt for each in near} | set(self._live_attempts())

    def _stick(self, state: UploadState, error: SnapshotError) -> None:
        """Leave the steps that cannot be uploaded, until a person or a new fact decides."""
        if str(error) != self._error:
            log.warning("upload: %s", error)
        self._error = str(error)
        with self._lock:
            line, near = RunLine(self._facts), self.folder.steps()
            for step, each in self._states.items():
                found = near.get(step)
                on = found is not None and line.standing(step, found.save_id, found.origin) == Standing.ON
                if isinstance(error, (RunDeletedError, RolledBackError)) or not on:
                    each.far, each.error = state, str(error)
                    self._open.end(step)

    def _send(self, step: int) -> None:
        with self._lock:
            given, state, near = self._registration, self._states.get(step), self.folder.steps().get(step)
            if given is None or state is None or near is None or near.save_id != state.save_id:
                return
            if state.far != UploadState.WAITING:
                state.far = UploadState.UPLOADING
            self._current = self._last = step
        upload = self._open.get(step) or self._open.begin(self.folder, near, state, given)
        began = time.monotonic()
        try:
            waited = time.monotonic() - self._waiting_since.get(step, began)
            commits = given.index == 0 or waited > 2 + given.index % 64  # the first host, unless it is slow
            # this host's own files, and later those of a host that does not send them
            here = [name for name in state.files if waited > OTHERS or name not in state.pulled]
            whole = run(upload.advance(self._facts, here, names=self._names(), commits=commits))
        except Outdated as error:
            log.warning("%s", error)
            state.far, state.error = UploadState.OUTDATED, str(error)
            self._open.end(step)
            self._learn(upload.facts)
            return
        except (RunForkedError, Undecided) as error:
            self._open.end(step)
            self._learn(upload.facts)
            self._stick(UploadState.FORKED if isinstance(error, RunForkedError) else UploadState.UNDECIDED, error)
            return
        except RunDeletedError as error:
            self._open.end(step)
            self._stick(UploadState.DELETED, error)
            return
        except CorruptSnapshotError as error:
            if not self._heal(step, set(state.files)):
                state.far, state.error = UploadState.DAMAGED, str(error)
                log.error("step-%s: damaged, and no other host has it whole: %s", step, error)
                emit("damaged", "upload", self.folder.step_path(step), step=step, error=error)
            return
        finally:
            with self._lock:
                self._current = None
            state.seconds += time.monotonic() - began
        self._learn(upload.facts)
        self._ended(step, near, state, upload, whole=whole)
        self._error, self._pause = "", 0.0
        self._free = time.monotonic() + (0.0 if whole else self._patience(step))

    def _patience(self, step: int) -> float:
        """Return the seconds until a step is tried again that waits for files of other hosts."""
        with self._lock:
            since = self._waiting_since.get(step)
            if since is None or any(each.far == UploadState.QUEUED for each in self._states.values()):
                return 0.5
            return min(5.0, 0.2 + (time.monotonic() - since) / 4)

    def _ended(self, step: int, near: NearStep, state: StepStatus, upload: FarUpload, *, whole: bool) -> None:
        """Record the state of an upload after its turn."""
        with self._lock:
            if whole:
                state.far, state.sent = UploadState.WHOLE, state.total
                log.info("step-%s: uploaded", step)
                self._waiting_since.pop(step, None)
                self._open.release(step)
            elif state.far == UploadState.DROPPED:
                self._open.end(step)
            elif self._took_alone(near) and near.head.sizes().keys() - state.files.keys():
                state.far, state.error = UploadState.DAMAGED, "this host lacks some of its files"
            else:
                state.far, now = UploadState.WAITING, time.monotonic()
                if now - self._waiting_since.setdefault(step, now) > VAIN:
                    self._vain.add(step)

    def _heal(self, step: int, files: set[str]) -> bool:
        """Replace damaged files by the copies of other hosts or of the far step. Return True if none is left."""
        near, given = self.folder.steps().get(step), self._registration
        if near is None or given is None:
            return False
        try:
            return not heal_step(self.folder, near, files, given)
        except (SnapshotError, OSError) as error:
            log.warning("step-%s: cannot be healed: %s", step, error)
            return False

    # Replicas

    def pull_turn(self) -> float:
        """Fetch new files of the partners. Return the seconds to wait for the next turn."""
        try:
            return 0.1 if self._replicas.pull() else 0.5
        except (SnapshotError, OSError) as error:
            log.info("replicas: %s", error)
        except Exception:  # noqa: BLE001 - as above
            log.exception("fetching replicas failed unexpectedly, and is tried again")
        return 2.0

    def close(self) -> None:
        self._open.close()
