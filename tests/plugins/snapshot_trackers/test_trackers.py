"""Trackers know of each snapshot by its URL and digest, and read none of its bytes."""

import subprocess
import sys
import threading
import time

import pytest

from snapshot import Snapshot, TakeOptions
from snapshot_trackers import TensorBoardTracker, WandbTracker, trackers
from snapshot_trackers.trackers import Record, Tracker
from tests.helpers.framework_scripts import run_script
from tests.plugins.snapshot_trackers.tracked_takes import digest_of, handling, state, take_two

pytestmark = pytest.mark.slow


@pytest.mark.libraries
def test_wandb_run_has_an_artifact_for_each_snapshot_and_reads_none_of_it(tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb")
    made = []
    for name, value in {"WANDB_MODE": "offline", "WANDB_DIR": tmp_path, "WANDB_SILENT": "true"}.items():
        monkeypatch.setenv(name, str(value))
    with wandb.init(project="p") as run:
        log_artifact = run.log_artifact
        monkeypatch.setattr(run, "log_artifact", lambda *given, **named: made.append((given[0], named["aliases"]))
                            or log_artifact(*given, **named))  # fmt: skip
        digests, read = take_two(tmp_path / "a run", WandbTracker(run))
    assert read == []
    for (artifact, aliases), step, digest, verdict in zip(made, (100, 200), digests, ([], ["suspect"]), strict=True):
        url = (tmp_path / "a run" / f"step-{step}").as_uri()
        assert (artifact.type, artifact.metadata["url"], artifact.metadata["digest"]) == ("model", url, digest)
        assert aliases == ["latest", f"step-{step}", *verdict]
        entries = artifact.manifest.entries
        assert {each.ref for name, each in entries.items() if name != "snapshot.json"} == {
            f"{url}/{path.relative_to(tmp_path / 'a run' / f'step-{step}')}"
            for path in (tmp_path / "a run" / f"step-{step}").rglob("*")
            if path.is_file()
        }
    assert "nonfinite" in made[1][0].metadata["suspect"][0]
    (stored,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    end = time.monotonic() + 60
    while not all(digest.encode() in stored.read_bytes() for digest in digests):  # W&B writes it in another process
        assert time.monotonic() < end, stored.read_bytes()
        time.sleep(0.05)


@pytest.mark.libraries
def test_wandb_artifact_of_a_step_that_was_taken_again_is_another_version(tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb")
    digests = []
    monkeypatch.setattr(wandb.Artifact, "add_reference", None)  # it fails, and snapshot.json remains

    class Run:
        id = "r"

        def log_artifact(self, artifact, aliases):
            digests.append(artifact.manifest.digest())

    tracker = WandbTracker(Run())
    for digest in ("xxh3:0", "xxh3:0", "xxh3:1"):
        tracker.tell(Record("file:///a/step-1", 1, digest, [], [], 10, 1.0))
    tracker.close()
    assert digests[0] == digests[1] != digests[2]


@pytest.mark.libraries
def test_tensorboard_shows_each_snapshot_and_reads_none_of_it(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(tmp_path / "logs") as writer:
        digests, read = take_two(tmp_path / "run", TensorBoardTracker(writer))
    assert read == []
    found = EventAccumulator(str(tmp_path / "logs")).Reload()
    texts = found.Tensors("snapshot/text_summary")
    assert [each.step for each in texts] == [100, 200]
    for text, digest, verdict in zip(texts, digests, ("no findings", "suspect: nonfinite"), strict=True):
        shown = text.tensor_proto.string_val[0].decode()
        assert digest in shown
        assert verdict in shown
    assert [each.step for each in found.Scalars("snapshot/bytes")] == [100, 200]


@pytest.mark.libraries
def test_mlflow_run_has_a_record_of_each_snapshot_and_reads_none_of_it():
    run_script("on_mlflow.py", "")


class Told(Tracker):
    """A tracker that a test holds up."""

    def __init__(self):
        self.records, self.free, self.begun = [], threading.Event(), threading.Event()
        super().__init__()

    def tell(self, record):
        self.begun.set()
        assert self.free.wait(300)
        self.records.append(record)
        raise SystemExit("the server said no")


def test_tracker_that_hangs_and_then_fails_holds_up_no_take(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(trackers, "MOST", 2)
    tracker = Told()
    with handling(tracker):
        for number in range(4):
            Snapshot.take(tmp_path / f"step-{number}", state())
            assert tracker.begun.wait(300)
        assert tracker.records == []
        assert "step-3: Told is not told of it: 2 others wait" in caplog.text
        tracker.free.set()
    assert [each.step for each in tracker.records] == [0, 1, 2]
    assert caplog.text.count("cannot tell Told of it: the server said no") == 3


def test_end_waits_only_so_long_for_a_tracker(tmp_path, caplog):
    tracker = Told()
    with handling(tracker):
        Snapshot.take(tmp_path / "a", state())
        tracker.close(0.01)
        assert "Told did not answer within 0.01 s" in caplog.text
        tracker.free.set()
    assert [each.step for each in tracker.records] == [None]


def test_record_names_a_url_for_a_relative_path_and_another_storage(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tracker = Told()
    tracker.free.set()
    with handling(tracker):
        Snapshot.take("a b/step-07", state())
        Snapshot.take("memory://tracked/step-9", state())
    assert [(each.url, each.step) for each in tracker.records] == [
        ((tmp_path / "a b" / "step-07").as_uri(), 7),
        ("memory://tracked/step-9", 9),
    ]


def test_verdict_has_findings_of_a_snapshot_that_is_not_suspect(tmp_path):
    tracker = Told()
    tracker.free.set()
    with handling(tracker):
        Snapshot.take(tmp_path / "a", state())
        Snapshot.take(tmp_path / "b", state(bad=True), options=TakeOptions(guards="report"))
        Snapshot.take(tmp_path / "c", state(bad=True), options=TakeOptions(guards="off"))
    whole, reported, off = (each.verdict for each in tracker.records)
    assert whole == off == "no findings"
    assert reported.startswith("nonfinite: ")
    assert len({each.name for each in tracker.records}) == 3


SCRIPT = """
import sys, torch
from snapshot import Snapshot, StateDict
from snapshot.events import add_handler
from snapshot_trackers.trackers import Tracker
class Slow(Tracker):
    def tell(self, record):
        import time
        time.sleep(0.2)
        print(record.digest, flush=True)
add_handler(Slow())
Snapshot.take(sys.argv[1], {"s": StateDict(x=1)})
"""


def test_process_that_ends_has_told_its_tracker(tmp_path):
    ended = subprocess.run([sys.executable, "-c", SCRIPT, tmp_path / "a"], stdout=subprocess.PIPE, check=True)
    assert ended.stdout.decode().strip() == digest_of(tmp_path / "a")
