"""A server of MLflow, and the record that it gets of each snapshot. `test_trackers.py` runs this."""

import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from contextlib import contextmanager
from pathlib import Path

import mlflow

from snapshot_trackers import MLflowTracker
from tests.plugins.snapshot_trackers.tracked_takes import take_two


@contextmanager
def mlflow_server(folder):
    """Serve MLflow on a free port of loopback, with sqlite; yields its URL."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = f"{sys.executable} -m mlflow server --host 127.0.0.1 --port {port} --workers 1".split()
    stores = ["--backend-store-uri", f"sqlite:///{folder}/runs.db", "--artifacts-destination", folder / "artifacts"]
    log = folder / "server.log"
    with open(log, "wb") as output:  # its workers are in its group
        server = subprocess.Popen([*command, *stores], stdout=output, stderr=output, start_new_session=True)
    try:
        end = time.monotonic() + 300
        url = f"http://127.0.0.1:{port}"
        while True:
            try:
                with urllib.request.urlopen(f"{url}/health", timeout=5):
                    break
            except OSError:
                assert time.monotonic() < end, log.read_text()
                assert server.poll() is None, log.read_text()
                time.sleep(0.1)
        yield url
    finally:
        os.killpg(server.pid, 9)
        server.wait()


def test_mlflow_run_has_a_record_of_each_snapshot_and_reads_none_of_it(tmp_path):
    with mlflow_server(tmp_path) as url:
        client = mlflow.MlflowClient(url)
        run = client.create_run(client.create_experiment("e")).info.run_id
        digests, read = take_two(tmp_path / "run", MLflowTracker(client, run))
        assert read == []
        tags = client.get_run(run).data.tags
        assert tags["snapshot.digest"] == digests[1]
        assert tags["snapshot.url"] == (tmp_path / "run" / "step-200").as_uri()
        assert "nonfinite" in tags["snapshot.verdict"]
        assert [each.step for each in client.get_metric_history(run, "snapshot.bytes")] == [100, 200]
        for step, digest in zip((100, 200), digests, strict=True):
            name = f"step-{step}-{digest.removeprefix('xxh3:')[:8]}"
            path = client.download_artifacts(run, f"snapshots/{name}.json", str(tmp_path))
            known = json.loads(Path(path).read_text())
            assert (known["step"], known["digest"], bool(known["suspect"])) == (step, digest, step == 200)
