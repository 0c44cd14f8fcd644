"""Trainings of Lightning, Composer and DeepSpeed that are killed at a call to the file system, and resumed as the
documentation says. `python -m tests.soak.killed_trainings NAME FOLDER EVERY [SECONDS]`, under the library of
failing_calls.c.

Each training is a fork of one process that has imported the framework. What the framework names as its newest
checkpoint must be whole, not older than what stood before, and resume to the same bits. What the killed process left
must be gone in the end.
"""

import contextlib
import ctypes
import gc
import importlib
import json
import logging
import os
import pickle
import random
import shutil
import signal
import sys
import time
import traceback
import warnings
from pathlib import Path

os.environ.update(DS_ACCELERATOR="cpu", DS_BUILD_OPS="0", CUDA_VISIBLE_DEVICES="", OMP_NUM_THREADS="1")
os.environ.update(SNAPSHOT_IO_THREADS="1", SNAPSHOT_LANES="1")
warnings.simplefilter("ignore")

import torch  # noqa: E402 - it reads the environment

from snapshot import Snapshot, TakeOptions  # noqa: E402
from tests.faults.failing_calls import DIE, DIE_HALFWAY  # noqa: E402

CHANGING = {"create", "mkdir", "rmdir", "unlink", "symlink", "rename", "link", "utime", "ftruncate", "fsync", "write"}
CHANGING |= {"pwritev", "close"}
FIRST, LAST, END = 3, 5, 7
"""Steps of the run before the one that is killed, of that one, and of the one that resumes."""
FAST = TakeOptions(durable=False)


def forked(function, *arguments):
    """Call a function in a fork. Return its result, or None if it was killed."""
    ours, theirs = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(ours)
        signal.alarm(100)
        try:
            answer = (function(*arguments), "")
        except BaseException:  # noqa: BLE001 - whatever it is, the campaign is told
            answer = (None, traceback.format_exc())
        with open(theirs, "wb") as file:
            file.write(pickle.dumps(answer))
        os._exit(0)
    os.close(theirs)
    with open(ours, "rb") as file:
        data = file.read()
    _, status = os.waitpid(pid, 0)
    if os.WIFSIGNALED(status):
        assert os.WTERMSIG(status) == signal.SIGKILL, status
        return None
    value, error = pickle.loads(data)
    assert not error, error
    return value


def killed(train, folder, nth, how):
    """In a fork: train, and die at the n-th call. Return the names of the calls."""
    shim = ctypes.CDLL(os.environ["LD_PRELOAD"])
    shim.calls.restype = ctypes.c_char_p
    shim.arm(b"*", str(folder).encode(), nth, 1, 5, how)
    train(folder, LAST)
    shim.disarm()
    return shim.calls().decode().split()


def torn(train, folder, delay):
    """In a fork: train, and die after some seconds."""
    signal.setitimer(signal.ITIMER_REAL, delay)
    signal.signal(signal.SIGALRM, lambda *_: os.kill(os.getpid(), signal.SIGKILL))
    train(folder, LAST)
    return []


# The trainings: (train(folder, steps) -> losses of this process, newest(folder) -> (path of a snapshot, its step))


class Job:
    def is_clean(self, left, expected):
        """Return True if the run that resumed has left nothing more than a run that was not killed."""
        return left == expected


class Lightning(Job):
    def __init__(self, kind):
        from tests.plugins.snapshot_trainers import on_lightning

        self.on, self.kind = on_lightning, kind

    def is_clean(self, left, expected):
        """A whole checkpoint may be more than Lightning knows of: it has saved `last` after that."""
        whole = [each.removesuffix("/.snapshot_metadata") for each in left if each.endswith("/.snapshot_metadata")]
        left = [each for each in left if each in expected or each.split("/")[0] not in whole or ".take" in each]
        return left == expected or (self.kind == "callback" and super().is_clean(left, expected))

    def train(self, folder, steps):
        on = self.on
        if self.kind == "callback":
            callback = on.SnapshotCallback(folder, every_n_steps=1, keep=2, options=FAST)
            return on.fitted(steps, [callback], [on.SnapshotCheckpointIO()], callback.latest(), on.example.Model).losses
        plugin = on.SnapshotCheckpointIO(asynchronous=self.kind != "sync", options=FAST)

        class Model(on.example.Model):
            def train_dataloader(self):
                return torch.utils.data.DataLoader(torch.ones(4, 16), batch_size=2)

            def training_step(self, batch):
                self.layers[2].p = 0.0
                loss = super().training_step(batch)
                self.log("score", float(self.global_step))
                return loss

        keeper = on.ModelCheckpoint(
            folder, filename="{step}", save_top_k=2, monitor="score", mode="max", save_last=True, every_n_train_steps=1
        )
        return on.fitted(steps, [keeper], [plugin], "last", Model).losses

    def newest(self, folder):
        if self.kind == "callback":
            path = self.on.SnapshotCallback(folder, every_n_steps=1).latest()
        else:
            trainer = self.on.pl.Trainer(
                callbacks=[self.on.ModelCheckpoint(folder, filename="{step}", save_last=True)], **self.on.QUIET
            )
            [callback] = trainer.checkpoint_callbacks
            found = callback._find_last_checkpoints(trainer)
            path = max(found, key=os.path.getmtime) if found else None
        return path and (path, Snapshot(path).read_object("0/global_step"))


class Composer(Job):
    def __init__(self, kind):
        from tests.plugins.snapshot_trainers import on_composer

        self.on, self.kind = on_composer, kind

    def train(self, folder, steps):
        saver = self.on.SnapshotSaver(folder, "1ba", keep=2, asynchronous=self.kind == "async")
        return self.on.train(saver, fail_at=steps + 1)[:-1]  # the batch that fails is not saved

    def newest(self, folder):
        path = self.on.SnapshotSaver(folder, "1ba").latest()
        return path and (path, int(path.rpartition("-")[2]))


class DeepSpeed(Job):
    def __init__(self, kind):
        from tests.plugins.snapshot_deepspeed import on_deepspeed

        self.on, self.kind = on_deepspeed, kind

    def is_clean(self, left, expected):
        """A tag that was being saved again has leftovers until it is saved again."""
        return [each for each in left if f"step{LAST}/snapshot/" not in each] == [
            each for each in expected if f"step{LAST}/snapshot/" not in each
        ]

    def train(self, folder, steps):
        on = self.on
        if not torch.distributed.is_initialized():
            os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "GLOO_SOCKET_IFNAME": "lo"}
            store = torch.distributed.HashStore()
            torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
        engine = on.make_engine(1, asynchronous=self.kind == "async", options=FAST)
        engine.load_checkpoint(folder)
        losses = []
        for step in range(engine.global_steps, steps):
            losses += on.train(engine, 1, [step])
            engine.save_checkpoint(folder)
        engine.checkpoint_engine.wait()
        engine.save_checkpoint(folder)  # the same tag again
        engine.checkpoint_engine.wait()
        return losses

    def newest(self, folder):
        tag = (folder / "latest").read_text() if (folder / "latest").exists() else None
        return tag and (folder / tag / self.on.FOLDER, int(tag.removeprefix("global_step")))


JOBS = {
    "lightning-callback": (Lightning, "callback"),
    "lightning-sync": (Lightning, "sync"),
    "lightning-async": (Lightning, "async"),
    "composer-sync": (Composer, "sync"),
    "composer-async": (Composer, "async"),
    "deepspeed-sync": (DeepSpeed, "sync"),
    "deepspeed-async": (DeepSpeed, "async"),
}


def files(folder):
    """The files, without the random part of their names; of the data files how many. A folder may be empty."""
    found = sorted(path.relative_to(folder) for path in folder.rglob("*") if path.is_file() or path.is_symlink())
    data = sorted({path.parent for path in found if path.parent.name == "data"})
    plain = [str(each) for each in found if each.parent not in data]
    return plain + [f"{each}: {len(list((folder / each).iterdir()))} files" for each in data]


def resumed(job, folder, whole):
    """In a fork: what the framework names is whole, and resumes to the same bits. Return what is in the folder then."""
    path, step = job.newest(folder)
    assert step >= FIRST, f"the newest is that of step {step}"
    assert Snapshot(path).verify().ok
    losses = job.train(folder, END)
    assert losses == whole[step:], f"other losses after step {step}"
    assert job.newest(folder)[1] == END
    return files(folder)


def campaign(name, folder, every, seconds=1e9):
    """Kill at each `every`-th call, and after random times. Return how many of each were killed, and the faults.

    `seconds`: begin no kill later than that.
    """
    kind, how = JOBS[name]
    job = kind(how)
    logging.disable(logging.WARNING)
    whole, modules = forked(lambda: (job.train(folder / "whole", END), list(sys.modules)))
    for module in modules:  # once, and not in each fork
        with contextlib.suppress(Exception):
            importlib.import_module(module)
    gc.collect()
    gc.freeze()
    begun, place = folder / "begun", folder / "run"
    forked(job.train, place, FIRST)
    place.rename(begun)

    def prepare():
        shutil.rmtree(place, ignore_errors=True)
        shutil.copytree(begun, place, symlinks=True)

    prepare()
    began = time.monotonic()
    calls = forked(killed, job.train, place, 0, DIE)
    length = time.monotonic() - began
    expected = forked(resumed, job, place, whole)
    points = [("call", nth, how) for nth, call in enumerate(calls, 1) if call in CHANGING for how in (DIE, DIE_HALFWAY)]
    points = points[every // 2 :: every]
    random.seed(0)
    points += [("time", random.uniform(0.0, length), None) for _ in range(len(points) // 4)]
    random.shuffle(points)
    counts, faults, end = {"call": 0, "time": 0}, [], time.monotonic() + seconds
    for what, where, half in points:
        if time.monotonic() > end:
            break
        prepare()
        if what == "call":
            ended = forked(killed, job.train, place, where, half)
        else:
            ended = forked(torn, job.train, place, where)
        counts[what] += ended is None
        label = (what, where, half, calls[where - 1] if what == "call" else "")
        try:
            left = forked(resumed, job, place, whole)
            assert job.is_clean(left, expected), f"left: {sorted(set(left) ^ set(expected))}"
        except Exception as error:  # noqa: BLE001 - all are told at the end
            faults.append((label, str(error)[-1500:]))
    return {"job": name, "calls": len(calls), **counts, "points": len(points), "faults": faults}


if __name__ == "__main__":
    name, folder, every = sys.argv[1:4]
    seconds = float(sys.argv[4]) if len(sys.argv) > 4 else 1e9
    print(json.dumps(campaign(name, Path(folder), int(every), seconds), indent=1))
