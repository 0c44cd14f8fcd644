"""The ranks of real jobs on hosts that are namespaces: what `real_runs` lets them do."""

import contextlib
import datetime
import json
import os

import torch
import torch.distributed as dist

from snapshot import SnapshotManager, SnapshotNotFoundError, StateDict, TakeOptions
from tests.plugins.snapshot_tiers.jobs import with_near

TENSORS, ELEMENTS = 6, 400


class _Self:
    """This rank's manager."""

    manager = None


def contents(value):
    """The tensors of a value. All ranks have them, and each writes a part of them."""
    made = torch.Generator().manual_seed(value + 1)
    return [torch.rand(ELEMENTS, generator=made) for _ in range(TENSORS)]


def state(value):
    tensors = {f"t{at}": each for at, each in enumerate(contents(value))}
    return {"same": StateDict(value=value, **tensors)}


def meet(rank, world, place, environment):
    """Join the other ranks, whose store is at an address, or in a file."""
    os.environ.update(environment)
    torch.set_num_threads(1)
    if world == 1:
        return
    seconds = datetime.timedelta(seconds=8)
    if isinstance(place, str):
        store = dist.FileStore(place, world)
        store.set_timeout(seconds)
    else:
        store = dist.TCPStore(*place, world, rank == 0, timeout=seconds, wait_for_workers=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=seconds)


def begin(far, near, options):
    _Self.manager = SnapshotManager(far, signals=(), **with_near(near, options))


def attempt():
    """The name of this job's attempt, and its run."""
    tiers = _Self.manager._steps
    if tiers._set is None:
        return None, None
    member = tiers.joined.member
    return (member.attempt.name if member.attempt is not None else None), member.run


def restore(offline):
    live = state(0)
    step = _Self.manager.restore_latest(live, offline=offline)
    value = live["same"]["value"]
    same = all(map(torch.equal, contents(value), (live["same"][f"t{at}"] for at in range(TENSORS))))
    report = _Self.manager.report
    return step, value, same, attempt()[0], report.sources if report is not None else {}


def take(step, value, how):
    """Take a step. Return its save id and its attempt, once it is committed near."""
    app_state = state(value)
    if how == "take":
        snapshot = _Self.manager.take(step, app_state, options=TakeOptions(replicated=["same/**"]))
        with contextlib.suppress(SnapshotNotFoundError):  # another rank of this host stores the manifest in a moment
            return snapshot.metadata.save_id, attempt()[0]
        return "", attempt()[0]
    pending = _Self.manager.async_take(step, app_state, options=TakeOptions(replicated=["same/**"]))
    for tensor in (each for each in app_state["same"].values() if isinstance(each, torch.Tensor)):
        tensor.zero_()  # as training does
    _Self.pending = pending
    pending.wait()
    return pending.save_id, attempt()[0]


def wait_far(timeout):
    _Self.pending.wait("far", timeout=timeout)


def where(step):
    return _Self.manager.where(step)


def close():
    _Self.manager.close()
    if dist.is_initialized():
        with contextlib.suppress(Exception):
            dist.destroy_process_group()


def choose(far, near, name, options):
    """Choose an attempt, as a person does."""
    from snapshot.cli import main

    os.environ["SNAPSHOT_STORAGE_OPTIONS"] = json.dumps(options)
    return main(["attempts", far, "--near", near, "--choose", name])
