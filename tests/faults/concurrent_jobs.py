"""Several at one place: jobs in processes or threads of their own, each held at a step, or let run; what each has seen.

Every value of a snapshot tells its version, so that a mixture of two shows.
"""

import asyncio
import atexit
import contextlib
import itertools
import multiprocessing
import os
import signal
import threading
import time
import traceback
from unittest import mock

import torch

from snapshot import Snapshot, SnapshotError, StateDict, TakeOptions
from snapshot.testing import Stall, Tap, tapped
from tests.helpers.arguments import for_restore
from tests.helpers.rank_pool import ENVIRONMENT, PRELOAD

PATIENCE = 300
_numbers = itertools.count()


def state(version):
    """Several files' worth of kinds of values, all of one version."""
    values = {
        "long": torch.full((60_000,), float(version)),
        "table": torch.full((300, 40), version, dtype=torch.int16),
        "short": torch.full((3,), float(version), dtype=torch.bfloat16),
        "number": version,
        "text": str(version),
        "bytes": bytes([version % 256]) * 5000,
    }
    return {"s": Told(values)}


class Told(StateDict):
    """Notes that it was handed something."""

    handed = False

    def load_state_dict(self, state):
        self.handed = True
        super().load_state_dict(state)


def versions(values):
    """Every value's version; None for one that is itself a mixture."""
    found = {}
    for name, value in values.items():
        if isinstance(value, torch.Tensor):
            first = value.reshape(-1)[0].item()
            found[name] = int(first) if value.eq(first).all() else None
        elif isinstance(value, bytes):
            found[name] = value[0] if len(value) == 5000 and len(set(value)) == 1 else None
        else:
            found[name] = int(value)
    return found


class Step(Tap):
    """Holds a job before its n-th step, until it is told to go on; counts its steps."""

    def __init__(self, nth=None, wait=None):
        self.met = []
        self._nth, self._wait = nth, wait

    async def before(self, operation):
        self.met.append(operation.name)
        if len(self.met) == self._nth:
            await asyncio.get_running_loop().run_in_executor(None, self._wait)


# Jobs


def job(verb, url, version, nth=None, wait=None, pause=0.0):
    """Do it, and tell how it ended, what was seen, and how many steps it took."""
    time.sleep(pause)
    scheme, step = f"step{next(_numbers)}", Step(nth, wait)
    place = f"{scheme}+{url}"
    ended, seen = "done", None
    with tapped(scheme, step):
        try:
            seen = VERBS[verb](place, version)
        except SnapshotError as error:
            ended, seen = type(error).__name__, {"text": str(error), **getattr(error, "seen", {})}
    return {"verb": verb, "version": version, "ended": ended, "seen": seen, "steps": len(step.met)}


def _take(place, version):
    Snapshot.take(place, state(version), options=TakeOptions(durable=False))


def _overwrite(place, version):
    Snapshot.take(place, state(version), overwrite=True, options=TakeOptions(durable=False))


def _in_background(place, version):
    Snapshot.async_take(place, state(version), overwrite=True, options=TakeOptions(durable=False)).wait(PATIENCE)


def _delete(place, version):
    Snapshot(place).delete()


def _restore(place, version, **options):
    live = state(0)
    try:
        Snapshot(place).restore(live, **for_restore(**options))
    except SnapshotError as error:
        written = [name for name, version in versions(live["s"]).items() if version != 0]
        told = [path.removeprefix("s/") for path in getattr(error, "touched", ())]
        notes = " ".join(getattr(error, "__notes__", ()))
        told += [name for name in written if f"s/{name}" in notes]
        error.seen = {"written": written, "told": told, "handed": live["s"].handed}
        raise
    return versions(live["s"])


def _restore_atomically(place, version):
    return _restore(place, version, atomic=True)


def _verify(place, version):
    report = Snapshot(place).verify()
    return {"ok": report.ok, "faults": [str(fault) for fault in report.faults]}


def _read(place, version):
    """One object after the other, of a snapshot that is held."""
    snapshot = Snapshot(place)
    return versions({name: snapshot.read_object(f"0/s/{name}") for name in state(0)["s"]})


def _read_all(place, version):
    return versions(Snapshot(place).get_state_dict_for_key("s"))


def _fork(place, own):
    """A pending snapshot is held in the middle; the child takes one, and ends as an interpreter does."""
    url = place.partition("+")[2]
    alone = Step()
    with tapped("alone", alone):
        Snapshot.async_take(f"alone+{url}.alone", state(1), options=TakeOptions(durable=False)).wait(PATIENCE)
    stall, steps = Stall("finish"), Step()
    with tapped("forking", steps, stall):
        pending = Snapshot.async_take(f"forking+{url}", state(1), overwrite=True, options=TakeOptions(durable=False))
        stall.wait_reached()
        child = os.fork()
        if child == 0:
            os._exit(_child(url, own, pending))
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        stall.release()
        try:
            pending.wait(PATIENCE)
            ended = "done"
        except SnapshotError as error:
            ended = type(error).__name__
    until = ["finish", "commit"]  # the same files are written, once each
    count = [[name for name in each.met if name in ("create", "write", *until)] for each in (steps, alone)]
    return {"child": code, "parent": ended, "steps": count[0], "alone": count[1]}


def _child(url, own, pending):
    try:
        with contextlib.suppress(SnapshotError):  # it is the parent's
            pending.wait(1)
            return 1
        mine = f"{url}.child" if own == "elsewhere" else url
        Snapshot.take(mine, state(2), overwrite=True, options=TakeOptions(durable=False))
        Snapshot.async_take(mine, state(2), overwrite=True, options=TakeOptions(durable=False)).wait(PATIENCE)
        live = state(0)
        Snapshot(mine).restore(live)
        threading._shutdown()
        atexit._run_exitfuncs()
        return 0 if set(versions(live["s"]).values()) == {2} else 2
    except BaseException:  # noqa: BLE001 - nothing of this may return into the parent's frames
        traceback.print_exc()
        return 3


VERBS = {
    "take": _take,
    "overwrite": _overwrite,
    "overwrite in the background": _in_background,
    "delete": _delete,
    "restore": _restore,
    "restore atomically": _restore_atomically,
    "verify": _verify,
    "read": _read,
    "read all": _read_all,
    "fork": _fork,
}
WRITERS = ("take", "overwrite", "overwrite in the background")
READERS = ("restore", "restore atomically", "verify", "read", "read all")


# Who does them


class Threads:
    """Does a job in a thread of this process."""

    def start(self, *arguments):
        self._answer = []
        self._thread = threading.Thread(target=lambda: self._answer.append(self._do(*arguments)))
        self._thread.start()

    @staticmethod
    def _do(*arguments):
        try:
            return job(*arguments)
        except BaseException:  # noqa: BLE001 - it is the test's to raise
            return traceback.format_exc()

    def hold(self, verb, url, version, nth):
        """Begin a job, and let it run up to a step. False if it ended before."""
        self._reached, self._go = threading.Event(), threading.Event()

        def wait():
            self._reached.set()
            self._go.wait(PATIENCE)

        self.start(verb, url, version, nth, wait)
        while not self._reached.wait(0.002):
            if not self._thread.is_alive():
                return False
        return True

    def release(self):
        self._go.set()

    def result(self):
        self._thread.join(PATIENCE)
        [answer] = self._answer
        assert isinstance(answer, dict), answer
        return answer

    def close(self):
        pass


class Process:
    """Does jobs in a process of its own, which is forked from one that has imported everything."""

    def __init__(self):
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOAD)
        self._pipe, theirs = context.Pipe()
        with mock.patch.dict(os.environ, ENVIRONMENT):
            self._process = context.Process(target=_serve, args=(theirs, os.getpid()), daemon=True)
            self._process.start()
        theirs.close()

    def start(self, *arguments):
        self._pipe.send(arguments)

    def hold(self, verb, url, version, nth):
        """As of `Threads`."""
        self._pipe.send((verb, url, version, nth, "held"))
        self._early = self._receive()
        return self._early == "reached"

    def release(self):
        if self._early == "reached":
            self._pipe.send("go")

    def result(self):
        early, self._early = getattr(self, "_early", None), None
        answer = early if isinstance(early, dict) else self._receive()
        assert isinstance(answer, dict), answer
        return answer

    def _receive(self):
        assert self._pipe.poll(PATIENCE), "a job hangs"
        return self._pipe.recv()

    @property
    def pid(self):
        return self._process.pid

    def close(self):
        self._process.kill()
        self._process.join(10)
        self._process.close()
        self._pipe.close()


def _serve(pipe, parent):
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)

    def wait():
        pipe.send("reached")
        assert pipe.recv() == "go"

    while True:
        try:
            arguments = pipe.recv()
        except EOFError:
            os._exit(0)
        arguments = [wait if argument == "held" else argument for argument in arguments]
        pipe.send(Threads._do(*arguments))
