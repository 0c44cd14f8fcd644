"""The uploads of a host that have begun, with the storages that they use."""

from __future__ import annotations

import threading

from snapshot.io.loop import run
from snapshot.io.session import Session
from snapshot.io.url import URL
from snapshot.tiers.control import Registration, StepStatus
from snapshot.tiers.far_upload import FarUpload
from snapshot.tiers.near_steps import NearFolder, NearStep
from snapshot.tiers.throttle import Throttled

BUDGET = 128 << 20


class OpenUploads:
    """Begun uploads by step. Requests end them; the thread that uploads closes what they used."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._uploads: dict[int, FarUpload] = {}
        self._sessions: dict[int, tuple[Session, Session]] = {}
        self._vain: list[FarUpload] = []
        """Uploads whose files must be deleted."""
        self._unused: list[Session] = []
        self._root: Session | None = None
        self.reset = False
        """True if the far root is reached with other options from now on."""

    def get(self, step: int) -> FarUpload | None:
        """Return the begun upload of a step."""
        return self._uploads.get(step)

    def root(self, given: Registration) -> Session:
        """Return a session of the far root."""
        if self._root is None:
            self._root = Session(URL.parse(given.far), given.options)
        return self._root

    def begin(self, folder: NearFolder, near: NearStep, state: StepStatus, given: Registration) -> FarUpload:
        """Begin the upload of a step."""
        source = Session(URL("near", folder.step_path(near.step)), None, budget=BUDGET)
        if given.rate:
            source.switch_storage(Throttled(source.storage, given.rate))
        far = URL.parse(given.far).join(f"step-{near.step}")
        target = Session(far, given.options, budget=BUDGET, resume=True)

        def progress(nbytes: int) -> None:
            state.sent += nbytes

        root = self.root(given).storage
        upload = FarUpload(root, source, target, near, progress, compress=given.compression == "zstd")
        with self._lock:
            self._uploads[near.step] = upload
            self._sessions[near.step] = (source, target)
        return upload

    def release(self, step: int) -> None:
        """Let the next turn close what an upload used. This one may still use it."""
        with self._lock:
            self._uploads.pop(step, None)
            self._unused += self._sessions.pop(step, ())

    def end(self, step: int) -> None:
        """Let the next turn delete what was uploaded of a step in vain."""
        with self._lock:
            if step in self._uploads:
                self._vain.append(self._uploads[step])
            self.release(step)

    @property
    def is_tidy(self) -> bool:
        """True if the next turn has nothing to delete or to close."""
        return not (self._vain or self._unused or self.reset)

    def tidy(self) -> None:
        """Delete what was uploaded in vain, and close what is not used any more."""
        with self._lock:
            vain, self._vain = self._vain, []
            if self.reset:
                self.reset = False
                self.close()
            unused, self._unused = self._unused, []
        for upload in vain:
            run(upload.discard())
        for session in unused:
            run(session.close())

    def close(self) -> None:
        """Close all sessions."""
        with self._lock:
            for step in list(self._sessions):
                self.release(step)
            for session in self._unused:
                run(session.close())
            self._unused.clear()
            if self._root is not None:
                run(self._root.close())
                self._root = None
