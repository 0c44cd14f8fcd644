"""Jobs with near folders: each host is a folder, with ranks, an uploader and a port of its own."""

import contextlib
import os
import signal
import time
from pathlib import Path

import torch
import torch.distributed as dist

from snapshot import SnapshotManager, StateDict
from snapshot_tiers import Near
from snapshot_tiers.control import ControlClient, ControlRequest, UploaderError
from snapshot_tiers.uploader_process import find_runs, lock_folder, upload_by_hand

ELEMENTS = 4000
OF_NEAR = {"keep_near", "upload", "replicas", "rate", "upload_compression", "grace", "survives"}


def rank():
    return dist.get_rank() if dist.is_initialized() else 0


def state(value=0, elements=ELEMENTS):
    """An app state: values that differ on each rank, and replicated ones."""
    own = torch.full((elements,), float(value * 10 + rank()))
    return {"own": StateDict(tensor=own, value=value), "same": StateDict(tensor=torch.full((elements,), float(value)))}


def holds(app_state, value):
    """Say whether an app state is the one of a value on this rank."""
    own, same = app_state["own"], app_state["same"]
    return bool(
        own["value"] == value
        and (own["tensor"] == float(value * 10 + rank())).all()
        and (same["tensor"] == float(value)).all()
    )


def manager_of(root, near, **options):
    """A manager with a near folder, with options as for `with_near`."""
    given = {"signals": (), "timeout": 40, "replicas": 0, "grace": 30.0, **options}
    return SnapshotManager(str(root), **with_near(near, given))


def with_near(near, options):
    """The arguments of a manager. `keep_near` and `upload_compression` are `keep` and `compression` of `Near`."""
    names = {"keep_near": "keep", "upload_compression": "compression"}
    of_near = {names.get(name, name): options[name] for name in OF_NEAR & options.keys()}
    return {"near": Near(str(near), **of_near)} | {k: value for k, value in options.items() if k not in OF_NEAR}


def until(done, seconds=80):
    """Wait until something is true, and return it."""
    end = time.monotonic() + seconds
    while not (found := done()):
        assert time.monotonic() < end, "it never happened"
        time.sleep(0.02)
    return found


def runs_in(near):
    """The folders of runs in a near folder."""
    return [path.parent for path in Path(near).glob("*/.uploader.lock")]


def upload_all(near, far):
    """Upload all steps of the only run in a near folder by hand, and return their states."""
    [(folder, copy)] = find_runs(str(near), None).items()
    return upload_by_hand(folder, copy.facts, str(far), {}, everything=True, rate=None)


def ask(folder, verb="status", **fields):
    client = ControlClient(str(folder))
    try:
        return client.ask(ControlRequest(verb, **fields))
    finally:
        client.close()


def stop_uploaders(*nears, how=signal.SIGKILL):
    """Kill the uploaders of near folders, and wait until they have ended."""
    for near in nears:
        for folder in runs_in(near):
            with contextlib.suppress(UploaderError):
                pid = ask(folder).pid
                os.kill(pid, how)
                until(lambda pid=pid: is_dead(pid))
            with contextlib.suppress(AssertionError):  # a trainer may have started another one
                until(lambda folder=folder: is_unlocked(folder), seconds=2)


def is_unlocked(folder):
    """Say whether no uploader runs in a folder of a run: one that ends answers no more, but has its lock yet."""
    lock = lock_folder(str(folder))
    if lock is not None:
        os.close(lock)
    return lock is not None


def is_dead(pid):
    """Say whether a process has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def data_files(near, step):
    """The data files of a step in a near folder."""
    return sorted(path for folder in runs_in(near) for path in (folder / f"step-{step}" / "data").glob("*-*"))


def flip_keeping_time(path, at=-5):
    """Flip a bit of a file, and leave its time as it was."""
    path = Path(path)
    seen = path.stat()
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.chmod(0o644)
    path.write_bytes(data)
    os.utime(path, ns=(seen.st_atime_ns, seen.st_mtime_ns))
