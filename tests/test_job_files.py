"""The job files of the docs: the shell part of each runs a job of two ranks, which gets the signal of its scheduler."""

import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from snapshot import Snapshot, SnapshotManager
from snapshot.text import seconds_of
from tests.helpers.trees import PYTHONPATH

pytestmark = pytest.mark.examples

ROOT = Path(__file__).parents[1]
JOBS = ROOT / "examples" / "jobs"
SHIMS = {
    "torchrun": f'exec {sys.executable} -m torch.distributed.run "$@" --steps 1000000',  # until it is told to stop
    "srun": 'exec "$@"',
    "scontrol": 'case "$1" in show) echo 127.0.0.1 ;; *) echo "scontrol $*" ;; esac',
}
"""Programs that the machines of a job have, and torchrun with a training that does not end by itself."""


def slurm(port: int) -> tuple[list[str], dict[str, str]]:
    """Return the batch script, and the variables that Slurm sets."""
    return ["bash", str(JOBS / "slurm.sh")], {
        "SLURM_JOB_ID": str(port - 20000 if port < 40000 else port - 20000 + 20000 * 5),
        "SLURM_JOB_NODELIST": "node1",
        "SLURM_JOB_NUM_NODES": "1",
        "SLURM_GPUS_PER_NODE": "2",
    }


def jobset(port: int) -> tuple[list[str], dict[str, str]]:
    [job] = yaml.safe_load((JOBS / "jobset.yaml").read_text())["spec"]["replicatedJobs"]
    [container] = job["template"]["spec"]["template"]["spec"]["containers"]
    given: list[dict[str, Any]] = container["env"]
    variables = {each["name"]: each["value"] for each in given}
    return container["command"], variables | {"NODES": "1", "GPUS": "2", "HEAD": f"127.0.0.1:{port}"}


def skypilot(port: int) -> tuple[list[str], dict[str, str]]:
    task = yaml.safe_load((JOBS / "skypilot.yaml").read_text())
    return ["bash", "-c", task["run"]], task["envs"] | {
        "SKYPILOT_NODE_IPS": "127.0.0.1",
        "SKYPILOT_NUM_NODES": "1",
        "SKYPILOT_NUM_GPUS_PER_NODE": "2",
        "PORT": str(port),
    }


def free_port() -> int:
    """Return a free port from 20000 on, as the batch script of Slurm computes them from the job's number."""
    for port in range(20000 + os.getpid() % 9000, 40000):
        with socket.socket() as tried:
            if tried.connect_ex(("127.0.0.1", port)):
                return port
    raise AssertionError("no free port")


@pytest.mark.parametrize("make", [slurm, jobset, skypilot])
def test_deadline_of_a_job_file_is_before_torchrun_kills_the_ranks(
    make: Callable[[int], tuple[list[str], dict[str, str]]],
) -> None:
    command, variables = make(20000)
    script = command[-1] if make is not slurm else Path(command[-1]).read_text()
    deadline = variables.get("SNAPSHOT_DEADLINE") or re.findall(r"SNAPSHOT_DEADLINE=(\S+)", script)[0]
    [timeout] = re.findall(r"--shutdown-timeout=(\d+)", script)
    assert seconds_of(deadline, "deadline") < int(timeout)


@pytest.mark.parametrize(
    ("make", "number"), [(slurm, signal.SIGUSR1), (jobset, signal.SIGTERM), (skypilot, signal.SIGTERM)]
)
def test_job_saves_its_last_step_when_its_scheduler_stops_it(
    make: Callable[[int], tuple[list[str], dict[str, str]]], number: int, tmp_path: Path
) -> None:
    folder = tmp_path / "bin"
    folder.mkdir()
    for name, text in SHIMS.items():
        (folder / name).write_text(f"#!/bin/sh\n{text}\n")
        (folder / name).chmod(0o755)
    command, variables = make(free_port())
    run = tmp_path / "run"
    environment = {
        **os.environ,
        **variables,
        "RUN": str(run),
        "PATH": f"{folder}:{os.environ['PATH']}",
        "PYTHONPATH": PYTHONPATH,
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
    }
    assert variables.get("SNAPSHOT_DEADLINE") or "SNAPSHOT_DEADLINE" in Path(command[-1]).read_text()
    with subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, process_group=0
    ) as job:
        assert job.stdout is not None
        lines = []
        try:
            for line in job.stdout:
                lines.append(line)
                if line.startswith("step 20:"):
                    os.kill(job.pid, number)  # this process alone, as the scheduler does
        except BaseException:
            os.killpg(job.pid, signal.SIGKILL)
            raise
    text = "".join(lines)
    assert "step 20:" in text, text
    last = int(re.findall(r"^step (\d+):", text, re.MULTILINE)[-1])
    assert Snapshot(run / f"step-{last}").exists(), text
    assert SnapshotManager(run, signals=()).latest() == last, text
    assert f"step {last}: saved whole, " in text, text  # with the time before the deadline that the file declares
    if make is slurm:
        assert "scontrol requeue" in text
        assert job.returncode == 0
