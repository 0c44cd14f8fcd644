"""Events reach the handlers that a program adds, and those that installed packages bring; none can fail a snapshot."""

import logging
import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from snapshot import Snapshot, SnapshotExistsError, StateDict, StorageError
from snapshot.events import add_handler, remove_handler
from snapshot.testing import faulty
from tests.helpers.trees import PYTHONPATH

ROOT = Path(__file__).parents[1]
STATE = {"s": StateDict(x=torch.arange(1000.0))}


def test_events_of_async_take_have_bytes_and_seconds(tmp_path, told):
    began = time.perf_counter()
    Snapshot.async_take(tmp_path / "s", STATE).wait()
    longest = time.perf_counter() - began + 0.001  # events round to milliseconds
    named = {event.name: event for event in told}
    assert sorted(named) == ["blocked", "committed", "staged", "start"]
    assert (told[0].name, len(told)) == ("start", 4)
    assert 0 <= named["staged"].fields["seconds"] <= named["committed"].fields["seconds"] <= longest
    assert 0 <= told.pop(told.index(named["blocked"])).fields["seconds"] <= longest
    assert {event.verb for event in told} == {"async_take"}
    assert {event.path for event in told} == {str(tmp_path / "s")}
    assert all(event.fields["bytes"] >= 4000 for event in told)


def test_event_of_a_failed_take_has_the_reason(tmp_path, told):
    fault = faulty(on="create", error=PermissionError(13, "Permission denied"))
    with fault, pytest.raises(StorageError, match="Permission denied") as caught:
        Snapshot.take(f"faulty+file://{tmp_path / 's'}", STATE)
    assert [event.name for event in told] == ["start", "failed", "blocked"]
    assert told[1].fields["error"] is caught.value
    Snapshot.take(tmp_path / "s", STATE)
    del told[:]
    with pytest.raises(SnapshotExistsError) as refused:
        Snapshot.take(tmp_path / "s", STATE)
    assert [(event.name, event.fields.get("error")) for event in told] == [("failed", refused.value), ("blocked", None)]


def test_log_has_one_line_per_operation(tmp_path, caplog):
    with caplog.at_level(logging.INFO, logger="snapshot"):
        snapshot = Snapshot.take(tmp_path / "s", STATE)
        snapshot.restore(STATE)
        snapshot.verify()
        snapshot.delete()
    lines = [record.getMessage() for record in caplog.records if record.levelno == logging.INFO]
    assert [line.split()[0] for line in lines] == ["take", "restore", "verify", "delete"]
    assert all(str(tmp_path / "s") in line for line in lines)


def test_event_handlers_of_installed_packages_are_called_and_cannot_fail_a_take(tmp_path):
    package = tmp_path / "site"
    info = package / "listens-1.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: listens\nVersion: 1\n")
    (info / "entry_points.txt").write_text(
        "[snapshot.events]\ngood = listens:heard\nbad = listens:raises\ngone = nowhere:nothing\n"
    )
    (package / "listens.py").write_text(
        textwrap.dedent("""
            def heard(event):
                print("heard", event.name, flush=True)

            def raises(event):
                raise RuntimeError("of a handler")
        """)
    )
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent("""
            import os, sys
            import torch
            sys.path.insert(0, os.environ["SITE"])
            from snapshot import Snapshot, StateDict
            snapshot = Snapshot.take(os.environ["SITE"] + "/s", {"s": StateDict(x=torch.ones(3))})
            print("there" if snapshot.exists() else "not there")
        """)
    )
    environment = {**os.environ, "PYTHONPATH": PYTHONPATH, "SITE": str(package)}
    shown = subprocess.run(  # handlers are looked for when the library is imported
        [sys.executable, script], env=environment, check=True, capture_output=True, text=True, timeout=300
    ).stdout
    assert shown.splitlines()[-4:] == ["heard start", "heard committed", "heard blocked", "there"], shown
    assert sys.modules.get("listens") is None


def _take_suspect(path):
    told = []
    add_handler(told.append)
    try:
        model = torch.nn.Linear(2, 2)
        if dist.get_rank() == 1:
            model.weight.data.fill_(torch.nan)
        Snapshot.take(path, {"model": model})
    finally:
        remove_handler(told.append)
    return [(each.fields["digest"], each.fields["suspect"]) for each in told if each.name == "committed"]


@pytest.mark.slow
def test_committed_event_has_the_manifests_digest_and_verdict_on_all_ranks(two, tmp_path):
    one, other = two.run(_take_suspect, tmp_path / "a")
    ((digest, suspect),) = one
    assert one == other
    assert (tmp_path / "a" / ".snapshot_metadata").read_text().endswith(f',"digest":"{digest}"}}')
    assert "nonfinite" in suspect[0]
