"""Disks that fail: in a fork, something between Python and the C library lets calls fail; and what comes of it."""

import ctypes
import errno
import gc
import os
import resource
import shutil
import signal
import threading
from dataclasses import dataclass
from pathlib import Path

import torch

from snapshot import Snapshot, SnapshotError, StateDict
from snapshot.testing import Tap, tapped
from tests.faults.killed_jobs import VERBS, call, check, outcome, prepare
from tests.faults.mounted_disks import lose_power
from tests.faults.shared_folder import Place, fresh
from tests.helpers.arguments import for_take

SOURCE = Path(__file__).parent / "failing_calls.c"
FAIL, PART, AFTER, NOTHING, DIE, DIE_HALFWAY = range(6)
COMMITTED = "committed nevertheless"

SPACE = (errno.ENOSPC, errno.EDQUOT)
FAILURES = {
    # what a call may say; reading and writing of a full, broken, locked disk; a process without descriptors
    "create": (*SPACE, errno.EIO, errno.EMFILE, errno.EROFS, errno.EACCES),
    "open": (errno.EIO, errno.EMFILE, errno.ESTALE),
    "open_folder": (errno.EIO, errno.EMFILE),
    "opendir": (errno.EIO, errno.EMFILE),
    "mkdir": (*SPACE, errno.EIO, errno.EROFS),
    "write": (*SPACE, errno.EIO, errno.EFBIG),
    "pwritev": (*SPACE, errno.EIO, errno.EFBIG),
    "ftruncate": (*SPACE, errno.EIO),
    "fsync": (*SPACE, errno.EIO),
    "close": (*SPACE, errno.EIO),
    "utime": (errno.EIO, errno.EROFS),
    "link": (*SPACE, errno.EIO, errno.EROFS),
    "rename": (*SPACE, errno.EIO, errno.EROFS),
    "unlink": (errno.EIO, errno.EROFS, errno.EBUSY),
    "rmdir": (errno.EIO, errno.EROFS, errno.EBUSY),
    "stat": (errno.EIO, errno.ESTALE),
    "read": (errno.EIO,),
    "preadv": (errno.EIO,),
    "flock": (errno.EIO, errno.ENOLCK),
}
INTERRUPTIBLE = ("create", "open", "open_folder", "write", "pwritev", "read", "preadv", "fsync", "ftruncate", "flock")


@dataclass
class Told:
    """What a fork says: what was raised, whether the fault happened, and what is left open in it."""

    hits: int = 0
    calls: tuple = ()
    kind: str = ""
    text: str = ""
    errnos: tuple = ()
    notes: str = ""
    leaks: tuple = ()

    @property
    def committed(self):
        return COMMITTED in self.notes


def open_now():
    """The descriptors below folders that tests use, and the threads that are not the library's."""
    found = []
    for descriptor in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{descriptor}")
        except OSError:
            continue
        found.append(target.partition(":")[0] if target.startswith(("pipe", "socket")) else target)
    threads = [each.name for each in threading.enumerate() if not each.name.startswith(("snapshot-", "Thread-"))]
    return sorted(found) + threads


def told(work):
    """Do it in this fork, and tell what became of it."""
    Snapshot.take("memory://warm", {"s": StateDict(x=1)}, overwrite=True)  # the loop and what it keeps open
    before = open_now()
    result = Told()
    try:
        work(result)
    except (SnapshotError, OSError) as error:
        result.kind, result.text, result.notes = (
            type(error).__name__,
            str(error),
            "; ".join(getattr(error, "__notes__", ())),
        )
        chain = error
        while chain is not None:
            result.errnos += (getattr(chain, "errno", None),)
            chain = chain.__cause__
        del error, chain
    gc.collect()
    after = open_now()
    result.leaks = tuple(each for each in after if after.count(each) > before.count(each))
    return result


def shimmed(verb, path, name, nth, times, error, how):
    """In a fork: a verb, of whose calls some fail; of calls of a name, from the nth on so many."""
    shim = ctypes.CDLL(os.environ["LD_PRELOAD"])
    shim.calls.restype = ctypes.c_char_p
    os.environ.update(SNAPSHOT_IO_THREADS="1", SNAPSHOT_LANES="1")

    def work(result):
        shim.arm(name.encode(), str(path).encode(), nth, times, error, how)
        try:
            call(verb, path)
        finally:
            result.hits = shim.disarm()
            result.calls = tuple(shim.calls().decode().split())

    return told(work)


def calls_of(forker, place, verb):
    """How often a verb makes each call below its place."""
    prepare(place, verb)
    found = forker.run(shimmed, verb, str(place.path), "*", 0, 0, 0, FAIL).returned()
    assert not found.kind, found
    return {name: found.calls.count(name) for name in FAILURES if name in found.calls}


def fail_at(forker, place, verb, name, nth, error, how=FAIL, times=1):
    """Let one call of a verb fail, and look; whether the verb failed."""
    before = VERBS[verb][2]
    prepare(place, verb)
    stood = place.ours()
    found = forker.run(shimmed, verb, str(place.path), name, nth, times, error, how).returned()
    where = (verb, name, nth, errno.errorcode.get(error), how, found)
    assert found.hits, where
    assert not found.leaks, where
    if found.kind:
        assert error in found.errnos or (verb == "read" and os.strerror(error) in found.text), where
        assert str(place.path) in found.text, where
    stands = place.stands()
    if verb == "delete":
        assert stands in (before, None), where
    elif found.kind and not found.committed:
        assert stands == before, where
        if name not in ("unlink", "rmdir"):  # what cannot be removed is left, and is known by its name
            assert place.ours() == stood, where
    else:
        assert stands == outcome(verb), where
    if not found.kind:
        assert stands == outcome(verb), where
    place.goes_on(stands, by_delete=nth % 2 == 0)
    return bool(found.kind)


def fail_everywhere(forker, home, verb, *, every=1):
    """Let each call of a verb fail in each way (or every n-th of all that); how many failures, how many it survived."""
    place = Place(home)
    points = [
        (name, nth, error)
        for name, count in calls_of(forker, place, verb).items()
        for nth in range(1, count + 1)
        for error in FAILURES[name]
    ]
    check(place, verb, False, True)
    failed = [fail_at(forker, place, verb, *point) for point in points[every // 2 :: every]]
    return len(failed), failed.count(False)


# A process that may open no more


def without_descriptors(verb, path, spare, worker):
    """In a fork: a verb with so many descriptors to spare."""

    def work(result):
        top = max(map(int, os.listdir("/proc/self/fd")))
        holding = [os.open("/dev/null", os.O_RDONLY) for _ in range(spare + 3)]
        highest = max(*holding, top)
        resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 1, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
        filled = []
        try:
            while True:
                filled.append(os.open("/dev/null", os.O_RDONLY))
        except OSError:
            pass
        held = holding + filled
        for _ in range(spare):
            os.close(held.pop())
        try:
            options = {"worker": "process"} if worker else {}
            if worker:
                Snapshot.async_take(path, fresh(), **for_take(overwrite=True, **options)).wait()
            else:
                call(verb, path)
        finally:
            for each in held:
                os.close(each)

    return told(work)


# Signals that arrive all the time


def interrupted(verb, path):
    """In a fork: a verb, while a signal with a Python handler arrives every millisecond."""
    met = 0

    def handler(*_):
        nonlocal met
        met += 1

    def work(result):
        nonlocal met
        signal.signal(signal.SIGALRM, handler)
        signal.siginterrupt(signal.SIGALRM, True)
        signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
        try:
            for _ in range(5):
                call(verb, path)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            result.hits = met

    return told(work)


# What others do to the folder meanwhile


class Do(Tap):
    """Calls a function before the n-th operation."""

    def __init__(self, nth, function):
        self.nth = nth
        self.function = function
        self.met = 0

    async def before(self, operation):
        self.met += 1
        if self.met == self.nth:
            self.function()


def removed(verb, path, nth, what):
    """In a fork: a verb, under which its folder, or one in it, is removed."""

    def work(result):
        tap = Do(nth, lambda: shutil.rmtree(os.path.join(path, what), ignore_errors=True))
        try:
            with tapped("windy", tap):
                call(verb, path, "windy+")
        finally:
            result.hits = tap.met

    return told(work)


# A full disk


def filling(path, elements, options):
    """In a fork: a take of so many floats."""

    def work(result):
        Snapshot.take(path, {"s": StateDict(x=torch.ones(elements))}, **for_take(**options))

    return told(work)


def dying(path, mount, nth):
    """In a fork: a take whose disk is gone from its n-th operation on: all that is asked of it fails."""

    def work(result):
        with tapped("dying", Do(nth, lambda: lose_power(mount))):
            call("overwrite", path, "dying+")

    return told(work)
