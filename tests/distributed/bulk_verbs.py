"""The work of the ranks in test_bulk_verbs: they share a verb, and a fault may befall one of them."""

import asyncio
import contextlib
import dataclasses
import os
import signal
import threading
from pathlib import Path
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from snapshot import Snapshot, StateDict, TakeOptions, Target, TensorMap
from snapshot.manifest import document
from snapshot.testing import Fault, Log, Tap, tapped
from snapshot.transform import verify
from snapshot_merge import MergeOptions, merge
from tests.helpers.arguments import for_take

SEED = 5


def tensors(count=9, scale=1.0):
    """Tensors of many sizes, and one that is longer than a fair share."""
    torch.manual_seed(SEED)
    made = {f"w{n}": torch.randn(20_000 * (n + 1), 3) * scale for n in range(count)}
    return {**made, "long": torch.randn(700_000, 4) * scale, "ids": torch.arange(5000), "none": torch.empty(0, 3)}


def save(path, scale=1.0, more=0, most=document.IN_ONE, **options):
    """Take with all ranks: own values, replicated ones, shards, objects and ties."""
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    held = tensors(scale=scale)
    shards = distribute_tensor(held["long"][:400_000], mesh, [Shard(0)])
    if more:
        held["zeros"] = torch.zeros(more)
    state = StateDict(**held, shards=shards, tied=held["long"], step=3, words=[b"x" * 400_000, {1, 2}])
    own = StateDict(loads=torch.full((100_000 * (rank + 1),), rank * scale), rank=rank)
    more = StateDict(sparse=torch.eye(300).to_sparse(), array=np.arange(90_000.0), mine=[rank, b"y" * rank])
    app_state = {"s": state, "own": own, "more": more}
    with mock.patch.object(document, "IN_ONE", most):
        Snapshot.take(
            path, app_state, **for_take(replicated=["s", "more/sparse", "more/array"], durable=False, **options)
        )


def save_apart(path, state):
    """Take with all ranks: each has tensors of its own."""
    Snapshot.take(path, {"m": StateDict(**state)}, options=TakeOptions(durable=False))


class Kill(Tap):
    """Kills this process at one of some operations."""

    def __init__(self, on, path, nth):
        self._fault = Fault(on, path, nth=nth, error=OSError())

    async def before(self, operation):
        try:
            await self._fault.before(operation)
        except OSError:
            os.kill(os.getpid(), signal.SIGKILL)


def call(verb, *arguments, tap=None, which=None, timeout=30.0, **options):
    """Let all ranks call a verb through storages with taps. Return the report and this rank's operations."""
    log, taps = Log(), []
    if tap is not None and dist.get_rank() == which:
        taps.append(tap)
    with mock.patch.dict(os.environ, {"SNAPSHOT_TIMEOUT": str(timeout)}), tapped("tapped", log, *taps):
        report = VERBS[verb](*arguments, ranks=True, **options)
    reads = [(each.path, each.offset, each.nbytes) for each in log.of("read_into", "data/*")]
    return report, reads, log.nbytes("write", "data/*")


def _split(target, to, options):
    """Return the target of a call, and its other arguments."""
    names = {each.name for each in dataclasses.fields(Target)}
    own = {name: value for name, value in options.items() if name in names}
    return Target(target, to, durable=False, **own), {name: options[name] for name in options.keys() - own}


def _copy(source, target, **options):
    there, options = _split(target, None, options)
    return Snapshot(source).copy(there, **options)


def _convert(source, target, to="snapshot", **options):
    if options.pop("mapped", False):
        options["map"] = TensorMap(["{n...} -> new.{n...}"], others="keep")
    there, options = _split(target, to, options)
    return Snapshot(source).convert(there, **options)


def _merge(sources, target, to="snapshot", **options):
    there, options = _split(target, to, options)
    named = {each.name for each in dataclasses.fields(MergeOptions)} & options.keys()
    how = MergeOptions(**{name: options.pop(name) for name in named})
    return merge(sources, there, options=how, **options)


VERBS = {
    "copy": _copy,
    "convert": _convert,
    "merge": _merge,
    "verify": lambda url, **options: Snapshot(url).verify(**options),
    "diff": Snapshot.diff,
}


class Replace(Tap):
    """Replaces a snapshot's manifest by another one, just before the manifest is read."""

    def __init__(self, path, manifest):
        self._path, self._manifest = path, manifest

    async def before(self, operation):
        if operation.name == "get" and os.path.exists(self._manifest):
            os.replace(self._manifest, self._path)


class Signal(Tap):
    """Sends this process a signal at one of some operations. `then`: seconds to wait after it."""

    def __init__(self, number, on, path, nth, note, then=0.0):
        self._fault = Fault(on, path, nth=nth, error=OSError())
        self._number, self._note, self._then = number, note, then

    async def before(self, operation):
        try:
            await self._fault.before(operation)
        except OSError:
            Path(self._note).touch()
            if self._number == signal.SIGSTOP:  # another thread may take it later, and this one run on until then
                signal.pthread_kill(threading.get_ident(), self._number)
            else:
                os.kill(os.getpid(), self._number)
            await asyncio.sleep(self._then)


def call_with_signal(verb, *arguments, which, number, on, path="*", nth=1, notes, then=0.0, timeout=2.0, **options):
    """Let all ranks call. One of them gets a signal. Each notes that it has ended."""
    tap = Signal(number, on, path, nth, f"{notes}/sent", then)
    try:
        return call(verb, *arguments, tap=tap, which=which, timeout=timeout, **options)[0]
    except KeyboardInterrupt:
        return "interrupted"
    finally:
        Path(f"{notes}/ended-{dist.get_rank()}").touch()


class FailFirst(Tap):
    """Rank 0 fails to write. Rank 1 waits in its own write until rank 0 has deleted a staged file."""

    def __init__(self, folder):
        self._folder = Path(folder)

    async def before(self, operation):
        if operation.name != "write":
            return
        staged = list(self._folder.glob(".convert-*"))
        if dist.get_rank() == 0:
            while len(staged) < 2:  # rank 1 writes, too
                await asyncio.sleep(0.01)
                staged = list(self._folder.glob(".convert-*"))
            raise OSError(28, "No space left on device")
        while all(each.exists() for each in staged) or len(staged) < 2:
            staged = staged if len(staged) > 1 else list(self._folder.glob(".convert-*"))
            await asyncio.sleep(0.01)


def export_while_the_leader_fails(source, folder):
    with tapped("tapped", FailFirst(folder)):
        return _convert(source, f"tapped+file://{folder}", "safetensors", shard_bytes=3 << 20, select=["m"], ranks=True)


class Swap(Tap):
    """Changes files just before the first long read, or the first other operation of a name."""

    def __init__(self, changes, at):
        self._changes = dict(changes)
        self._at = at

    async def before(self, operation):
        if operation.name == self._at and (self._at != "read_into" or operation.nbytes > 100_000):
            while self._changes:
                path, (other, in_place) = self._changes.popitem()
                if in_place:
                    with open(path, "r+b") as file:  # never shorter: another rank may read it meanwhile
                        file.write(Path(other).read_bytes())
                else:
                    os.replace(other, path)


def call_while_swapped(verb, *arguments, changes, which, at="read_into"):
    """Let all ranks call. Before one of them reads data, files are replaced by others."""
    return call(verb, *arguments, tap=Swap(changes, at), which=which)[0]


def call_while_replaced(verb, *arguments, path, manifest, which):
    """Let all ranks call. Before one of them reads the manifest, it is replaced."""
    return call(verb, *arguments, tap=Replace(path, manifest), which=which)[0]


def call_apart(verb, arguments, **options):
    """Let each rank call with its own arguments."""
    return VERBS[verb](*arguments[dist.get_rank()], ranks=True, **options)


def rename_apart(name):
    """Another name on each rank."""
    return f"{name}-{dist.get_rank()}" if name.endswith("w1") else name


def convert_with_maps(source, target):
    """Convert with another map on each rank: only the axes differ."""
    axes = ["h w -> h w", "h w -> w h"][dist.get_rank()]
    made = TensorMap([{"names": "s.w{i} -> s.v{i}", "axes": axes}], others="keep")
    return Snapshot(source).convert(target, map=made, ranks=True)


def verify_in_pieces(url):
    """Verify with ranges that are cut although they are short."""
    with mock.patch.object(verify, "STRETCH", 1 << 20):
        return call("verify", url)


def call_alone(verb, *arguments, which, **options):
    """Let one rank call without the others."""
    if dist.get_rank() != which:
        return None
    with mock.patch.dict(os.environ, {"SNAPSHOT_TIMEOUT": "5"}):
        return VERBS[verb](*arguments, **options)


def call_with_fault(verb, *arguments, which, fault, timeout=30.0, **options):
    return call(verb, *arguments, tap=Fault(**fault), which=which, timeout=timeout, **options)[0]


def call_and_die(verb, *arguments, which, on, path="*", nth=1, timeout=2.0, **options):
    return call(verb, *arguments, tap=Kill(on, path, nth), which=which, timeout=timeout, **options)[0]


def peak_budget(verb, *arguments, **options):
    """Return the peak of the memory budgets of this rank."""
    from snapshot.io import session

    budgets = []

    class Seen(session.MemoryBudget):
        def __init__(self, *given, **more):
            super().__init__(*given, **more)
            budgets.append(self)

    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(session, "MemoryBudget", Seen))
        VERBS[verb](*arguments, ranks=True, **options)
    return sum(budget.statistics().peak for budget in budgets)
