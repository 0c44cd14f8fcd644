"""The power is lost at every step: what jobs do in forks, and what is looked at after the next start."""

import os
import warnings

import torch

from snapshot import (
    CorruptSnapshotError,
    RestoreOptions,
    Snapshot,
    SnapshotError,
    SnapshotNotFoundError,
    StateDict,
    Target,
)
from snapshot.testing import tapped
from tests.faults.failing_calls import Do
from tests.faults.killed_jobs import VERBS, call, check, die, do_take, logged, outcome, prepare
from tests.faults.mounted_disks import lose_power
from tests.faults.shared_folder import Place, fresh, holds


def lost(verb, path, mount, nth, mode):
    """In a fork: a verb in which the power is lost before its n-th operation, or right after it returns."""
    os.environ["SNAPSHOT_FILE_IO" if mode == "portable" else "SNAPSHOT_DIRECT_IO"] = mode
    with tapped("dark", Do(nth, lambda: (lose_power(mount), die()))):
        call(verb, path, "dark+")
    lose_power(mount)
    die()


def decided(verb, operations):
    """From which operation on the new state must be there: the first one after it was made durable."""
    name = "delete" if verb == "delete" else "commit"
    return next(nth for nth, each in enumerate(operations, 1) if each == (name, ".snapshot_metadata")) + 1


def lose_at_operations(forker, disk, verb, *, every=1, mode="auto"):
    """Lose the power at each operation of a verb (or each n-th), and after it; how often that was."""
    place = Place(disk.mount / f"{verb}-{mode}")
    prepare(place, verb)
    operations = forker.run(logged, verb, str(place.path)).returned()
    check(place, verb, False, True)
    decision, last = decided(verb, operations), len(operations) + 1
    points = sorted({*range(1, last, every), decision - 1, decision, last})
    for nth in points:
        prepare(place, verb)
        disk.sync()
        ended = forker.run(lost, verb, str(place.path), str(disk.mount), nth, mode)
        assert ended.killed, ended
        disk.again()
        stands = place.stands()
        assert stands == (outcome(verb) if nth >= decision else VERBS[verb][2]), (verb, nth, operations)
        place.goes_on(stands, by_delete=nth % 2 == 0)
    return len(points)


def lost_after(path, mount, made):
    """In a fork: the folders above a snapshot are new, by us or by the user, and nobody has synced them."""
    if made:
        os.makedirs(path)
    do_take(path)
    lose_power(mount)
    die()


def lost_without_sync(path, mount, manifest_survives):
    """In a fork: a take that is not durable; the manifest may have been written back before all else was."""
    do_take(path, durable=False)
    if manifest_survives:
        for each in (f"{path}/.snapshot_metadata", path):
            descriptor = os.open(each, os.O_RDONLY)
            os.fsync(descriptor)
            os.close(descriptor)
    lose_power(mount)
    die()


def honest(path):
    """What a snapshot that was not made durable is afterwards, by its own account: absent, damaged or whole. A damaged
    one says so before a tensor is touched or, where atomic, before any is used."""
    live = fresh()
    try:
        report = Snapshot(path).verify()
        whole = report.ok
    except SnapshotNotFoundError:
        return "absent"
    except CorruptSnapshotError:
        whole = False
    try:
        Snapshot(path).restore(live, options=RestoreOptions(atomic=True))
    except SnapshotError:
        assert not whole
        assert holds(live, 0)
        return "damaged"
    assert whole
    assert holds(live, 2)
    return "whole"


def lost_after_delete(path, mount):
    """In a fork."""
    Snapshot(path).delete()
    lose_power(mount)
    die()


def numbered_source(folder, version):
    """A snapshot, and a DCP checkpoint of it, outside of the disk that loses its power; every value is `version`."""
    ours, theirs = f"{folder}/ours-{version}", f"{folder}/dcp-{version}"
    Snapshot.take(ours, {"s": StateDict(a=torch.full((3000,), float(version)), b=torch.full((2000,), float(version)))})
    Snapshot(ours).convert(Target(theirs, to="dcp"))
    return ours, theirs


def write_foreign(how, sources, target, overwrite):
    """Write a checkpoint of another format, or through another library's API, to the disk."""
    ours, theirs = sources
    if how == "copy":
        Snapshot(theirs).copy(Target(target, overwrite=overwrite))
    elif how == "dcp.save":
        import torch.distributed.checkpoint as dcp

        from snapshot.interop.dcp import SnapshotWriter

        state = Snapshot(theirs).read_object("0")
        with warnings.catch_warnings(action="ignore"):
            dcp.save(state, storage_writer=SnapshotWriter(target, overwrite=overwrite))
    else:
        shard_bytes = 9000 if how == "safetensors" else 1 << 30
        Snapshot(ours).convert(Target(target, to=how, overwrite=overwrite, shard_bytes=shard_bytes))


def lost_after_foreign(how, sources, target, mount, overwrite):
    """In a fork: the power is lost right after another format's checkpoint was written."""
    write_foreign(how, sources, target, overwrite)
    lose_power(mount)
    die()
