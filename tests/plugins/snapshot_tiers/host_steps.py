"""Steps that ranks on several hosts take and restore."""

import torch.distributed as dist

from snapshot import TakeOptions
from snapshot import events as happening
from tests.plugins.snapshot_tiers.jobs import holds, manager_of, rank, state, until


def take_steps(root, near, steps, value=None, **options):
    """Take steps on the host of this rank, and return where the last one is, once it is everywhere."""
    manager = manager_of(root, f"{near}/{'abcd'[rank()]}", **options)
    with manager:
        for step in steps:
            pending = manager.async_take(
                step, state(step if value is None else value), options=TakeOptions(replicated=["same/**"])
            )
            pending.wait()
        if options.get("upload", "latest") is not None:
            pending.wait("far", timeout=300)
        wanted = options.get("replicas", 0)
        until(lambda: manager.where(steps[-1])["replicas"] >= wanted)
        found = manager.where(steps[-1])
        dist.barrier()
        return found


def restore(root, near, names, **options):
    """Restore on hosts of these names, and return the step, its value, and the sources of the bytes."""
    told = []
    happening.add_handler(told.append)
    live = state(-1)
    try:
        with manager_of(root, f"{near}/{names[rank()]}", **options) as manager:
            step = manager.restore_latest(live)
            sources = manager.report.sources if manager.report else None
            healed = [each.path for each in told if each.name == "rerouted"]
            dist.barrier()
            return step, step is not None and holds(live, live["own"]["value"]), live["own"]["value"], sources, healed
    finally:
        happening.remove_handler(told.append)
