"""The uploader of a host: sends near steps to the far root, keeps replicas for partners, and answers its trainer.

It is a process of its own, which outlives the trainer. What it must do follows from the files that are there, so it can
be killed and started again at any time.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable

import msgspec

from snapshot.errors import CorruptSnapshotError, SnapshotError
from snapshot.events import emit, log
from snapshot.runtime.loop import run
from snapshot.runtime.session import Session
from snapshot.storage import Storage
from snapshot.tiers.control import Registration, Request, Status, StepStatus
from snapshot.tiers.far_upload import FarUpload, OtherRun, Outdated, is_begun
from snapshot.tiers.near_steps import NearFolder, NearStep
from snapshot.tiers.replicas import Replicas, heal_step
from snapshot.tiers.run_record import store_record
from snapshot.tiers.throttle import Throttled
from snapshot.tiers.upload_queue import choose_next, dropped_steps, wanted_steps
from snapshot.url import URL

LONGEST_PAUSE = 30.0
"""Seconds between two tries to reach a far root that does not answer."""
OTHERS = 60.0
"""Seconds after which a host also uploads files that another host has not uploaded, if it has replicas of them."""
JOINS = 10.0
"""Seconds between two searches for steps that only other hosts upload."""
BUDGET = 128 << 20
RECENT = 64
"""Attempts that a status names."""
DONE = ("whole", "dropped", "outdated", "damaged", "kept near")


class Uploader:
    """The work of an uploader, in turns: `upload_turn` and `pull_turn` run in two threads."""

    def __init__(self, folder: str, address: str = "") -> None:
        self.folder = NearFolder(folder)
        self.address = address
        self._lock = threading.RLock()
        self._registration: Registration | None = None
        self._states: dict[int, StepStatus] = {}
        self._uploads: dict[int, FarUpload] = {}
        self._sessions: dict[int, tuple[Session, Session]] = {}
        self._asked: set[int] = set()
        self._reset = False
        """True if the far root is reached with other options from now on."""
        self._vain: list[FarUpload] = []
        """Uploads whose files must be deleted."""
        self._unused: list[Session] = []
        self._looked = 0.0
        """Time of the last search for steps that only other hosts have begun."""
        self.jobs: Callable[[], int] = lambda: 0
        self._error = ""
        self._pause = 0.0
        self._root: Session | None = None
        self._waiting_since: dict[int, float] = {}
        self._replicas = Replicas(self.folder)
        self.wake = threading.Event()
        self.on_secret: Callable[[str], None] = lambda _: None

    # Requests

    def handle(self, request: Request) -> Status:
        """Do what the trainer asks for, and return the state."""
        with self._lock:
            if request.verb == "register" and request.registration is not None:
                self.register(request.registration)
            elif request.verb == "want":
                self._asked.add(request.step)
                state = self._states.get(request.step)
                if state is not None and state.far in ("dropped", "kept near", "damaged"):
                    state.far = "queued"
            elif request.verb == "drop":
                self._asked.discard(request.step)
                self._drop(request.step)
            self._refresh()
            if request.verb != "status":
                self.wake.set()
            return self.status()

    def register(self, registration: Registration) -> None:
        """Serve a trainer: the new one, if there was another."""
        with self._lock:
            old = self._registration
            if old is not None and old.record.run == registration.record.run:
                registration.record = registration.record.with_attempts(old.record.attempts)
            changed = old is not None and (old.far, old.options, old.rate, old.compression) != (
                registration.far,
                registration.options,
                registration.rate,
                registration.compression,
            )
            self._registration = registration
            self._replicas.register(registration)
            self.on_secret(registration.secret)
            self._pause = 0.0
            self._reset = self._reset or changed
            store_record(self.folder.path, registration.record)
        self._refresh()

    def status(self) -> Status:
        """Return the state."""
        with self._lock:
            run_id = self._registration.record.run if self._registration is not None else ""
            newest = self._registration.record.attempts[-RECENT:] if self._registration is not None else []
            return Status(run_id, self.address, os.getpid(), dict(self._states), self._error, newest, self.jobs())

    def describe(self) -> bytes:
        """Return the state, for other hosts."""
        self._refresh()
        return msgspec.json.encode(self.status())

    def is_idle(self) -> bool:
        """Return True if nothing is left to upload."""
        self._refresh()
        with self._lock:
            return all(each.far in DONE for each in self._states.values())

    # Steps

    def _refresh(self) -> None:
        """Look at the folder: which steps there are, and which of them are wanted far."""
        with self._lock:
            given = self._registration
            if given is None:
                return
            steps = {}
            for step, near in self.folder.steps_of(given.record.run).items():
                if given.record.is_abandoned(step, near.origin):
                    self._remove_abandoned(near)
                else:
                    steps[step] = near
            for step in list(self._states):
                if step not in steps or self._states[step].save_id != steps[step].save_id:
                    self._forget(step)
            self._asked |= {step for step, near in steps.items() if near.origin.replaces}
            ages = {step: given.record.age(near.origin) for step, near in steps.items()}
            self._newest = max(ages, key=lambda step: ages[step], default=-1)
            wanted = wanted_steps(given.upload, steps, self._asked, self._newest)
            for step, near in steps.items():
                files = self.folder.files(step)
                state = self._states.setdefault(step, StepStatus(near.save_id))
                if step in wanted and state.far == "kept near":
                    state.far = "queued"
                state.files, state.pulled = files, self._replicas.pulled(step, files)
                state.total = sum(size for name, size in files.items() if name not in state.pulled)
                state.replicated = self._replicas.is_complete(step, files)
            states = {step: each.far for step, each in self._states.items()}
            for step in dropped_steps(given.upload, states, self._asked, self._newest):
                self._drop(step, log.info if given.upload == "latest" else log.warning)

    def _remove_abandoned(self, near: NearStep) -> None:
        log.warning("step-%s: removed: a later attempt began with an older step", near.step)
        self._forget(near.step)
        self.folder.remove(near.step, near.save_id)

    def _drop(self, step: int, say: Callable[..., None] = log.warning) -> None:
        """Give up an upload. The newest step is never given up."""
        state = self._states.get(step)
        if state is None or state.far in ("whole", "outdated", "dropped") or step == self._newest:
            return
        say("step-%s: is not uploaded: step-%s is newer", step, self._newest)
        emit("dropped", "upload", self.folder.step_path(step), step=step)
        state.far = "dropped"
        upload = self._uploads.get(step)
        if upload is not None and step != self._current:
            self._end(step, upload)

    _newest = -1
    """The step that was taken last."""
    _current: int | None = None
    """The step that is being uploaded in this moment."""

    def _forget(self, step: int) -> None:
        state = self._states.pop(step, None)
        self._waiting_since.pop(step, None)
        upload = self._uploads.get(step)
        if upload is not None and state is not None and state.far != "whole":
            self._end(step, upload)
        self._release(step)

    def _release(self, step: int) -> None:
        """Let the next turn close what an upload used. This one may still use it."""
        self._uploads.pop(step, None)
        self._unused += self._sessions.pop(step, ())

    def _end(self, step: int, upload: FarUpload) -> None:
        """Let the next turn delete what was uploaded of a step in vain."""
        self._vain.append(upload)
        self._release(step)

    # Upload

    def upload_turn(self) -> float:
        """Advance one upload, if any is wanted. Return the seconds to wait for the next turn."""
        try:
            return self._upload_turn()
        except OtherRun as error:
            self._failed(error)
            self._pause = LONGEST_PAUSE
        except (SnapshotError, OSError) as error:
            self._failed(error)
            self._pause = min(LONGEST_PAUSE, max(0.5, self._pause * 2))
        except Exception as error:  # noqa: BLE001 - the process must outlive any fault of one step
            log.exception("the upload failed unexpectedly, and is tried again")
            self._error, self._pause = str(error) or type(error).__name__, LONGEST_PAUSE
        return self._pause

    def _upload_turn(self) -> float:
        self._refresh()
        with self._lock:
            given = self._registration
            vain, self._vain = self._vain, []
            if self._reset:
                self._reset = False
                self._close_sessions()
            unused, self._unused = self._unused, []
        for upload in vain:
            run(upload.discard())
        for session in unused:
            run(session.close())
        if given is None:
            return 0.5
        chosen = self._choose(given)
        if chosen is None:
            return 1.0
        done = self._advance(chosen, given)
        self._error, self._pause = "", 0.0
        with self._lock:
            since = self._waiting_since.get(chosen)
            if since is not None and not any(each.far == "queued" for each in self._states.values()):
                return min(5.0, 0.2 + (time.monotonic() - since) / 4)
        return 0.0 if done else 0.5

    def _failed(self, error: Exception) -> None:
        if str(error) != self._error:
            log.warning("upload: %s", error)
            emit("failed", "upload", self.folder.path, error=error)
        self._error = str(error) or type(error).__name__

    def _choose(self, given: Registration) -> int | None:
        joins = len(given.hosts) > 1 and time.monotonic() - self._looked > JOINS
        if joins:
            self._looked = time.monotonic()
        with self._lock:
            open_ = {
                step: each
                for step, each in self._states.items()
                if each.far in ("queued", "uploading", "waiting") or (each.far in ("kept near", "dropped") and joins)
            }
        if not open_:
            return None
        root = self._far_root(given)
        begun = [step for step, each in open_.items() if run(is_begun(root, step, each.save_id))]
        with self._lock:  # another host wants what it has begun
            self._asked |= {step for step in begun if open_[step].far in ("kept near", "dropped")}
        begun += [step for step, each in open_.items() if each.far == "waiting" and step not in begun]
        queued = [step for step, each in open_.items() if each.far not in ("kept near", "dropped")]
        self._last = choose_next(queued, begun, self._last)
        return self._last

    _last: int | None = None

    def _far_root(self, given: Registration) -> Storage:
        if self._root is None:
            self._root = Session(URL.parse(given.far), given.options)
        return self._root.storage

    def _advance(self, step: int, given: Registration) -> bool:
        with self._lock:
            state = self._states.get(step)
            near = self.folder.steps().get(step)
            if state is None or near is None or near.save_id != state.save_id:
                return False
            if state.far != "waiting":
                state.far = "uploading"
            self._current = step
        upload = self._uploads.get(step) or self._begin(near, state, given)
        began = time.monotonic()
        try:
            waited = time.monotonic() - self._waiting_since.get(step, began)
            commits = given.index == 0 or waited > 2 + given.index % 64  # the first host, unless it is slow
            here = self._to_send(state, waited)
            live = given.attempt if self.jobs() else ""
            whole = run(upload.advance(given.record, here, live=live, commits=commits))
        except Outdated as error:
            log.warning("%s", error)
            state.far, state.error = "outdated", str(error)
            self._end(step, upload)
            if given.record.is_abandoned(step, near.origin) or upload.record.is_abandoned(step, near.origin):
                self._remove_abandoned(near)
            return True
        except CorruptSnapshotError as error:
            if not self._heal(step, set(state.files)):
                state.far, state.error = "damaged", str(error)
                log.error("step-%s: damaged, and no other host has it whole: %s", step, error)
                emit("damaged", "upload", self.folder.step_path(step), step=step, error=error)
            return False
        finally:
            with self._lock:
                self._current = None
            state.seconds += time.monotonic() - began
        if upload.record.run == given.record.run:
            merged = upload.record.with_attempts(given.record.attempts)
            if not given.record.published or merged.attempts != given.record.attempts:
                given.record.attempts, given.record.published = merged.attempts, True
                store_record(self.folder.path, given.record)
        self._ended(step, near, state, upload, whole=whole)
        return whole

    def _ended(self, step: int, near: NearStep, state: StepStatus, upload: FarUpload, *, whole: bool) -> None:
        """Record the state of an upload after its turn."""
        with self._lock:
            given = self._registration
            if whole:
                state.far, state.sent = "whole", state.total
                log.info("step-%s: uploaded", step)
                self._waiting_since.pop(step, None)
                self._release(step)
            elif state.far == "dropped":
                self._end(step, upload)
            elif given is not None and given.is_alone() and near.head.sizes().keys() - state.files.keys():
                state.far, state.error = "damaged", "this host lacks some of its files"
            else:
                state.far = "waiting"
                self._waiting_since.setdefault(step, time.monotonic())

    def _begin(self, near: NearStep, state: StepStatus, given: Registration) -> FarUpload:
        source = Session(URL("near", self.folder.step_path(near.step)), None, budget=BUDGET)
        if given.rate:
            source.switch_storage(Throttled(source.storage, given.rate))
        far = URL.parse(given.far).join(f"step-{near.step}")
        target = Session(far, given.options, budget=BUDGET, resume=True)

        def progress(nbytes: int) -> None:
            state.sent += nbytes

        upload = FarUpload(self._far_root(given), source, target, near, progress, compress=given.compression == "zstd")
        self._uploads[near.step] = upload
        self._sessions[near.step] = (source, target)
        return upload

    def _to_send(self, state: StepStatus, waited: float) -> list[str]:
        """Return the files to send: this host's own, and later those of a host that does not send them."""
        return [name for name in state.files if waited > OTHERS or name not in state.pulled]

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
        """Close all sessions."""
        with self._lock:
            self._close_sessions()

    def _close_sessions(self) -> None:
        for step in list(self._sessions):
            self._release(step)
        for session in self._unused:
            run(session.close())
        self._unused.clear()
        if self._root is not None:
            run(self._root.close())
            self._root = None
