"""Event handlers that tell W&B, MLflow or TensorBoard of each committed snapshot.

The objects of the trackers are the application's, so this module imports none of their packages.
"""

from __future__ import annotations

import atexit
import json
import os
import queue
import re
import threading
import time
from abc import ABC, abstractmethod
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from snapshot.events import Event, log

MOST = 1000
"""Maximum number of snapshots that a tracker has not been told of."""
PATIENCE = 30.0
"""Seconds that the end of the process waits for a tracker."""
_STEP = re.compile(r"step-([0-9]+)")


class Record(NamedTuple):
    """What a tracker is told of a snapshot."""

    url: str
    step: int | None
    """None unless a manager took it, or its folder has a name like those of a manager."""
    digest: str
    """The digest at the end of the manifest, from which every other byte of the snapshot follows."""
    suspect: list[str]
    """Why the snapshot is suspect; empty unless it is."""
    findings: list[str]
    """What else guards have found."""
    bytes: int
    """Bytes that this rank wrote."""
    seconds: float

    @classmethod
    def of(cls, event: Event) -> Record:
        """Return what an event of a committed take says."""
        fields = event.fields
        step = _STEP.fullmatch(event.path.rpartition("/")[2])
        return cls(
            event.path if "://" in event.path else Path(event.path).absolute().as_uri(),
            None if step is None else int(step[1]),
            fields["digest"],
            list(fields["suspect"]),
            list(fields["findings"]),
            fields["bytes"],
            fields["seconds"],
        )

    @property
    def verdict(self) -> str:
        """What guards say of it."""
        return "suspect: " * bool(self.suspect) + ("; ".join([*self.suspect, *self.findings]) or "no findings")

    @property
    def name(self) -> str:
        """A name for it that no other snapshot has."""
        place = "snapshot" if self.step is None else f"step-{self.step}"
        return f"{place}-{self.digest.rpartition(':')[2][:8]}"


class Tracker(ABC):
    """An event handler that tells a tracker of committed snapshots, in a thread of its own.

    So neither training nor a save waits for a server. A tracker that fails is logged, and fails nothing else. The end
    of the process waits up to 30 seconds until all records are sent; `close` does so at once.
    """

    def __init__(self) -> None:
        self._process = os.getpid()
        self._waiting: queue.Queue[Record | None] = queue.Queue(MOST)
        self._thread = threading.Thread(target=self._tell_each, name="snapshot-tracker", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    @abstractmethod
    def tell(self, record: Record) -> None:
        """Tell the tracker of a snapshot."""

    def __call__(self, event: Event) -> None:
        """Note a snapshot that was committed; other events are left alone."""
        if event.name != "committed" or not event.fields.get("digest") or not self._is_alive():
            return
        try:
            self._waiting.put_nowait(Record.of(event))
        except queue.Full:
            log.warning("%s: %s is not told of it: %d others wait", event.path, type(self).__name__, MOST)

    def close(self, timeout: float = PATIENCE) -> None:
        """Wait until the tracker was told of all snapshots so far, and end the thread. Log if that takes too long."""
        atexit.unregister(self.close)
        if not self._is_alive():
            return
        end = time.monotonic() + timeout
        with suppress(queue.Full):
            self._waiting.put(None, timeout=timeout)
        self._thread.join(max(0.0, end - time.monotonic()))
        if self._thread.is_alive():
            log.warning(
                "%s did not answer within %g s: it does not know of all snapshots", type(self).__name__, timeout
            )

    def _is_alive(self) -> bool:
        return os.getpid() == self._process and self._thread.is_alive()  # a fork has no thread

    def _tell_each(self) -> None:
        while (record := self._waiting.get()) is not None:
            try:
                self.tell(record)
            except BaseException as error:  # noqa: BLE001 - neither may the thread end: it is told of later ones
                log.warning("%s: cannot tell %s of it: %s", record.url, type(self).__name__, error)


class WandbTracker(Tracker):
    """Logs each snapshot as an artifact of a W&B run: a reference, and `snapshot.json` with its URL and digest.

    Call `close` before `run.finish()`: W&B ignores what comes after that.

    Args:
        run: What `wandb.init` returned.
        name: Name of the artifact, whose versions the snapshots are.
    """

    def __init__(self, run: Any, name: str = "") -> None:
        self._run = run
        self._name = name or f"snapshot-{run.id}"
        super().__init__()

    def tell(self, record: Record) -> None:
        """Log an artifact."""
        from wandb import Artifact

        known = record._asdict()
        artifact = Artifact(self._name, "model", metadata=known)
        # A version depends on the names of what it refers to, not on their bytes: this file tells snapshots apart.
        with artifact.new_file("snapshot.json") as file:
            json.dump(known, file, indent=2)
        try:
            artifact.add_reference(record.url, name="snapshot", checksum=False, max_objects=1_000_000)
        except Exception as error:  # noqa: BLE001 - such as a scheme whose package is not installed
            log.warning("%s: W&B cannot refer to it: %s; snapshot.json of the artifact has the URL", record.url, error)
        step = [] if record.step is None else [f"step-{record.step}"]
        self._run.log_artifact(artifact, aliases=["latest", *step, *(["suspect"] if record.suspect else [])])


class MLflowTracker(Tracker):
    """Logs each snapshot as a file such as `snapshots/step-100-02035f3c.json`, and the newest one in the run's tags.

    Args:
        client: An `mlflow.MlflowClient`.
        run_id: The run, such as `mlflow.active_run().info.run_id`.
    """

    def __init__(self, client: Any, run_id: str) -> None:
        self._client, self._run_id = client, run_id
        super().__init__()

    def tell(self, record: Record) -> None:
        """Set tags, log metrics, and upload the record."""
        tags = {"url": record.url, "step": record.step, "digest": record.digest, "verdict": record.verdict[:5000]}
        for name, value in tags.items():
            self._client.set_tag(self._run_id, f"snapshot.{name}", value)
        numbers = {"bytes": record.bytes, "seconds": record.seconds} if record.step is not None else {}
        for name, number in numbers.items():
            self._client.log_metric(self._run_id, f"snapshot.{name}", number, step=record.step)
        self._client.log_dict(self._run_id, record._asdict(), f"snapshots/{record.name}.json")


class TensorBoardTracker(Tracker):
    """Writes each snapshot as a text, and its size and duration as scalars.

    Args:
        writer: A `torch.utils.tensorboard.SummaryWriter`.
    """

    def __init__(self, writer: Any) -> None:
        self._writer = writer
        super().__init__()

    def tell(self, record: Record) -> None:
        """Write a text and two numbers."""
        lines = [f"    {name}: {value}" for name, value in (*record._asdict().items(), ("verdict", record.verdict))]
        self._writer.add_text("snapshot", "\n".join(lines), record.step)
        self._writer.add_scalar("snapshot/bytes", record.bytes, record.step)
        self._writer.add_scalar("snapshot/seconds", record.seconds, record.step)
        self._writer.flush()
