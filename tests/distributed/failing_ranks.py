"""What the ranks of test_failures do: all of them save or restore, and one of them meets something."""

import asyncio
import json
import os
import signal
import threading
import time
import traceback
from fnmatch import fnmatchcase
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist

from snapshot import RestoreOptions, Snapshot, SnapshotError, StateDict, StorageError, TakeOptions
from snapshot.storages.file.files import Folders
from snapshot.testing import Fault, Log, Stall, Tap, tapped
from tests.helpers.arguments import for_restore, for_take

SHARED = ["s/shared"]
FULL = StorageError(28, "No space left on device")


def state(rank, value=1.0):
    """A rank's own values, and some that all have: enough of them to be worth reading once for all."""
    return StateDict(own=torch.full((30_000,), value + rank), shared=torch.arange(400_000) * value, step=3, mine=rank)


def save(verb, path, app_state, *, durable=False, **options):
    options["durable"] = durable  # a sync of the disk would be most of what these tests take
    made = getattr(Snapshot, verb)(path, app_state, **for_take(replicated=SHARED, **options))
    return made.wait() if verb == "async_take" else made


def round_trip(verb, path, value=2.0, pg=None, **options):
    """Take and restore; what is left to wish for."""
    rank = dist.get_rank()
    save(verb, path, {"s": state(rank, value)}, pg=pg, **options)
    faults = [] if Snapshot(path).exists() else ["the take returned before its commit"]
    live = state(rank, 0.0)
    live["mine"] = -1
    Snapshot(path, pg).restore({"s": live}, timeout=20)
    wanted = state(rank, value)
    faults += [name for name in ("own", "shared") if not live[name].equal(wanted[name])]
    return faults + ([] if live["mine"] == rank else ["mine"])


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def stop():
    # a signal to the process may be taken by another thread, and this one run on for a moment
    signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)


def interrupt():
    os.kill(os.getpid(), signal.SIGINT)


ACTS = {"die": die, "stop": stop, "interrupt": interrupt}


class Acts(StateDict):
    """Does something when it is asked for its state."""

    def __init__(self, act):
        super().__init__(x=1)
        self._act = act

    def state_dict(self):
        self._act()
        return {"x": 1}


class Raises(StateDict):
    """Raises when its state is asked for, or handed back."""

    def __init__(self, verb, error):
        super().__init__(x=1)
        self._verb, self._error = verb, error

    def state_dict(self):
        if self._verb == "state_dict":
            raise self._error
        return {"x": 1}

    def load_state_dict(self, state):
        if self._verb == "load_state_dict":
            raise self._error


class Unspeakable(Exception):
    def __str__(self):
        raise RuntimeError("no words")


class Does(Tap):
    """Does something before the first operation of its kind."""

    def __init__(self, act, on, path="*"):
        self._act, self._on, self._path = act, on, path
        self._lock = threading.Lock()

    async def before(self, operation):
        if operation.name == self._on and fnmatchcase(operation.path, self._path) and self._lock.acquire(False):
            self._act()
            if self._act is interrupt:  # until the thread that is interrupted has noticed it
                await asyncio.sleep(30)


# Takes that one rank lets fail


def _no_state(error):
    return lambda app, options: app.update(z=Raises("state_dict", error))


def _prepare(path, tensor, tracing):
    raise RuntimeError("mine: not prepared")


TAKES = {
    "its state_dict raises": (_no_state(RuntimeError("mine: no state")), RuntimeError, "mine: no state"),
    "it is interrupted": (_no_state(KeyboardInterrupt("mine")), KeyboardInterrupt, "KeyboardInterrupt"),
    "its error's text is no UTF-8": (_no_state(ValueError("mine: \udc80")), ValueError, "mine"),
    "its error has no text": (_no_state(Unspeakable()), RuntimeError, "Unspeakable"),
    "a value is not stateful": (lambda app, options: app.update(z=torch.ones(2)), TypeError, "'z'"),
    "its metadata is no JSON": (lambda app, options: options.update(metadata={"x": object()}), TypeError, "JSON"),
    "its budget is nothing": (lambda app, options: options.update(memory_budget_bytes=0), ValueError, "memory_budget"),
    "its options are unknown": (lambda app, options: options.update(storage_options={"no": 1}), ValueError, "no"),
    "its tensors can't be prepared": (
        lambda app, options: options.update(_custom_tensor_prepare_func=_prepare), RuntimeError, "not prepared"
    ),
}  # fmt: skip
"""What one rank meets -> how it comes to that, the exception that it raises itself, what the others' text says."""


def take_where(which, what, verb, path, timeout):
    """All take; one rank meets something."""
    rank = dist.get_rank()
    app, options = {"s": state(rank)}, {}
    if rank == which:
        TAKES[what][0](app, options)
    try:
        save(verb, path, app, timeout=timeout, **options)
    except Unspeakable:
        raise RuntimeError("Unspeakable") from None  # the pool, too, asks exceptions for their text


def take_with_fault(which, on, verb, path):
    """All take; the storage of one rank fails."""
    rank = dist.get_rank()
    fault = Fault(on, error=FULL) if rank == which else Log()
    returned = False
    with tapped("tapped", fault):
        try:
            made = getattr(Snapshot, verb)(f"tapped+file://{path}", {"s": state(rank)}, replicated=SHARED, timeout=20)
            returned = True
            if verb == "async_take":
                made.wait()
        except Exception as error:
            if verb == "async_take" and not returned and on not in ("put", "stat"):
                raise AssertionError("async_take itself raised what belongs to wait()") from error
            raise


def take_and_act(which, point, act, verb, path, timeout, **options):
    """All take; one rank dies or stops at a point of it."""
    rank = dist.get_rank()
    app, tap = {"s": state(rank)}, Log()
    if rank == which:
        if point == "calling":
            ACTS[act]()
        elif point == "state_dict":
            app["s"] = Acts(ACTS[act])
        else:
            tap = Does(ACTS[act], point)
    with tapped("tapped", tap):
        save(verb, f"tapped+file://{path}", app, timeout=timeout, **options)
    return True


class FullOnce(Fault):
    """Fails when there is a certain file."""

    def __init__(self, file, on):
        super().__init__(on, error=FULL)
        self._file = file

    async def before(self, operation):
        async with asyncio.timeout(10):
            while operation.name == self.on and not os.path.exists(self._file):
                await asyncio.sleep(0.005)
        return await super().before(operation)


def take_bereft(path):
    """The leader's disk is full, and it removes the folder that another rank has just made for its files."""
    made, told = Folders.make, f"{path}.made"

    def and_lose(folders, folder):
        made(folders, folder)
        if os.path.exists(told):
            return
        Path(told).touch()
        end = time.monotonic() + 10
        while os.path.isdir(folder) and time.monotonic() < end:
            time.sleep(0.005)

    tap = Log() if dist.get_rank() else FullOnce(told, "write")
    with tapped("tapped", tap), mock.patch.object(Folders, "make", and_lose if dist.get_rank() else made):
        save("take", f"tapped+file://{path}", {"s": state(dist.get_rank())}, timeout=20)


def slow_take(which, verb, path, timeout, **options):
    """One rank's storage takes longer than the timeout; which snapshot stands at the path just before it is done, and
    on the other rank when the call returns."""
    tap, seen = Log(), []
    if dist.get_rank() == which:

        def look():
            seen.append(json.loads(Path(path, ".snapshot_metadata").read_bytes())["save_id"])

        tap = Does(look, "finish", "*.safetensors")
    stall = Stall("finish", "*.safetensors", seconds=1.5 * timeout) if dist.get_rank() == which else Log()
    with tapped("tapped", stall, tap):
        save(verb, f"tapped+file://{path}", {"s": state(dist.get_rank(), 5.0)}, timeout=timeout, **options)
    if dist.get_rank() != which:
        seen.append(json.loads(Path(path, ".snapshot_metadata").read_bytes())["save_id"])
    return seen


def slow_commit(verb, path, **options):
    """What stands at the path as soon as the call returns: the leader takes its time to commit."""
    tap = Stall("commit", seconds=0.3) if dist.get_rank() == 0 else Log()
    with tapped("tapped", tap):
        save(verb, f"tapped+file://{path}", {"s": state(dist.get_rank())}, timeout=20, **options)
    return Snapshot(path).exists()


def overtaken(verb, path, manifest):
    """Another take to the same path is faster than this one."""
    tap = Does(lambda: Path(path, ".snapshot_metadata").write_bytes(manifest), "commit")
    with tapped("tapped", tap):
        save(verb, f"tapped+file://{path}", {"s": state(dist.get_rank())}, timeout=20)


# Restores that one rank lets fail


def module(rank):
    made = torch.nn.Linear(40, 40)
    with torch.no_grad():
        made.weight.fill_(rank + 1.0)
    return made


def take_all(path):
    rank = dist.get_rank()
    Snapshot.take(path, {"s": state(rank), "m": module(rank)}, replicated=SHARED, timeout=20)


class Watched(StateDict):
    """Notes that it was handed something."""

    handed = False

    def load_state_dict(self, state):
        self.handed = True
        super().load_state_dict(state)


def restore_where(which, what, path, **options):
    """All restore; one rank meets something. Own exception's type, its text and rank; what was touched, handed back."""
    rank = dist.get_rank()
    live = Watched(state(rank, 0.0))
    live["own"].zero_()
    app = {"s": live, "m": module(-1)}
    tap = Log()
    if rank == which:
        if what == "its state_dict raises":
            app["s"] = Raises("state_dict", RuntimeError("mine"))
        elif what == "its load_state_dict raises":
            app["s"] = Raises("load_state_dict", RuntimeError("mine"))
        elif what == "a value is not stateful":
            app["z"] = 3
        elif what == "a shape differs":
            app["m"] = torch.nn.Linear(40, 3)
        elif what == "it has a key too many":
            app["z"] = StateDict(x=1)
        elif what == "its budget is nothing":
            options["memory_budget_bytes"] = 0
        elif what == "it wants to cast somehow":
            options["cast"] = "somehow"
        elif what == "its options are those of a take":
            options = {"strict": False, "options": TakeOptions()}
        elif what == "its disk fails":
            tap = Fault("read_into", times=None, error=StorageError(5, "Input/output error"))
    try:
        with tapped("tapped", tap):
            Snapshot(f"tapped+file://{path}").restore(app, **for_restore(**options))
    except Exception as error:  # noqa: BLE001 - the test looks at it
        touched = [name for name in ("own", "shared") if live[name].any()]
        touched += ["weight"] if what != "a shape differs" and app["m"].weight.any() else []
        return type(error).__name__, getattr(error, "rank", None), str(error), touched, live.handed
    return None


def break_off(which, path, timeout):
    """A connection between two ranks breaks, for one of them alone; all of them live."""
    broadcast, sent = dist.broadcast, []

    def breaks(*arguments, **options):
        sent.append(True)
        if dist.get_rank() == which and len(sent) == 2:
            raise RuntimeError("Connection reset by peer")
        return broadcast(*arguments, **options)

    app = {"s": state(dist.get_rank(), 0.0), "m": module(-1)}
    with mock.patch.object(dist, "broadcast", breaks):
        Snapshot(path).restore(
            app, timeout=timeout, options=RestoreOptions(read_once=True, memory_budget_bytes=4 << 20)
        )


# Takes that go on in the background


def two_at_once(first, second):
    """The first take is written later than the second is committed."""
    rank = dist.get_rank()
    stall = Stall("finish", "*.safetensors", times=None)
    with tapped("stalled", stall):
        one = Snapshot.async_take(f"stalled+file://{first}", {"s": state(rank, 1.0)}, replicated=SHARED, timeout=20)
        two = Snapshot.async_take(second, {"s": state(rank, 2.0)}, replicated=SHARED, timeout=20)
        stall.wait_reached()
        two.wait(20)
        order = Snapshot(first).exists(), Snapshot(second).exists()
        stall.release()
        one.wait(20)
    return order


def cancel_on(which, path):
    """All write, and are held up; one rank gives it up."""
    stall = Stall("finish", "*.safetensors", times=None)
    with tapped("stalled", stall):
        pending = Snapshot.async_take(f"stalled+file://{path}", {"s": state(dist.get_rank())}, timeout=20)
        stall.wait_reached()
        if dist.get_rank() == which:
            assert pending.cancel()
        pending.wait(20)


def cancel_while_waiting(which, path):
    """One rank has written, waits for another that is held up, and gives it up."""
    held = dist.get_rank() != which
    stall = Stall("finish", "*.safetensors", times=None) if held else Log()
    with tapped("stalled", stall):
        pending = Snapshot.async_take(f"stalled+file://{path}", {"s": state(dist.get_rank())}, timeout=20)
        if held:
            stall.wait_reached()
        dist.barrier()
        if dist.get_rank() == which:
            assert pending.cancel()
        pending.wait(20)


# Ranks that do not agree


def different_verbs(verbs, path):
    verb = verbs[dist.get_rank()]
    app = {"s": state(dist.get_rank())}
    if verb == "restore":
        Snapshot(path).restore(app, timeout=20)
    else:
        save(verb, path, app, timeout=20)


def paths_of_their_own(verb, folder):
    made = save(verb, f"{folder}/{dist.get_rank()}", {"s": state(dist.get_rank())}, timeout=20)
    assert made.verify().ok
    return made.path.removeprefix("file://"), made.metadata.world_size


def no_timeout_on(which, path, timeout):
    Snapshot.take(path, {"s": state(dist.get_rank())}, timeout=0 if dist.get_rank() == which else timeout)


def take_if_called(absent, verb, path, timeout):
    if dist.get_rank() not in absent:
        save(verb, path, {"s": state(dist.get_rank())}, timeout=timeout)


# Groups

_groups = {}


def group_of(ranks):
    """A process group that all make, once."""
    if ranks not in _groups:
        _groups[ranks] = dist.new_group(list(ranks))
    return _groups[ranks]


def in_group(ranks, path):
    pg = group_of(ranks)
    if dist.get_rank() in ranks:
        faults = round_trip("take", path, pg=pg, timeout=20)
        faults += round_trip("async_take", path, pg=pg, timeout=20, overwrite=True)
        return faults, Snapshot(path).metadata.world_size
    return None


def fails_in_group(ranks, which, path):
    pg = group_of(ranks)
    if dist.get_rank() in ranks:
        app = {"s": state(dist.get_rank())}
        if dist.get_rank() == which:
            app["s"] = Raises("state_dict", RuntimeError("mine"))
        Snapshot.take(path, app, pg, timeout=20)


def everyone_calls(ranks, path):
    Snapshot.take(path, {"s": state(dist.get_rank())}, group_of(ranks), timeout=20)


def alone_each(folder):
    groups = [group_of((rank,)) for rank in range(dist.get_world_size())]
    rank = dist.get_rank()
    path = f"{folder}/{rank}"
    return round_trip("take", path, pg=groups[rank]), Snapshot(path).metadata.world_size


# Keys in the store


def count_keys(path, takes, *, failing=False):
    """How many keys there are in the store of the process group after so many takes more, and restores."""
    app = {"s": StateDict(x=torch.ones(4), mine=dist.get_rank())}
    for number in range(takes):
        if failing:
            app["z"] = Raises("state_dict", RuntimeError("mine")) if dist.get_rank() else StateDict()
            try:
                Snapshot.take(path, app, overwrite=True, timeout=20)
            except Exception:  # noqa: BLE001 - what the other tests are about
                continue
        verb = "take" if number % 2 else "async_take"
        save(verb, path, app, overwrite=True, timeout=20)
        Snapshot(path).restore(app, timeout=20)
    dist.barrier()
    store = dist.distributed_c10d._get_default_store()
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    keys = store.num_keys()
    dist.barrier()
    return keys


def bad_timeout(timeout, path):
    Snapshot.take(path, {"s": StateDict(x=1)}, timeout=timeout)


def exists_already(path, verb):
    log = Log()
    with tapped("tapped", log):
        try:
            save(verb, f"tapped+file://{path}", {"s": state(dist.get_rank())}, timeout=20)
        finally:
            written = [each for each in log.operations if each.name in ("put", "create", "write", "commit", "delete")]
            assert not written, written


def collective():
    """The group of the user is as good as before."""
    one = torch.ones(1)
    dist.all_reduce(one)
    return one.item()


def restore_unfit(path, layers):
    """Restore a model that fits on all ranks but 0. Return the error, its text, and the frames of its traceback."""

    def model(width):
        return torch.nn.Sequential(*(torch.nn.Linear(2, width) for _ in range(layers)))

    snapshot = Snapshot.take(path, {"m": model(2)})
    try:
        snapshot.restore({"m": model(3 if dist.get_rank() == 0 else 2)})
    except SnapshotError as error:
        return type(error).__name__, str(error), len(traceback.extract_tb(error.__traceback__))
