"""Steps and facts of runs that are continued."""

import shutil

from snapshot.runs.timeline import decode_facts
from tests.plugins.snapshot_tiers.jobs import holds, manager_of, state, until


def take_until_far(manager, *steps):
    for step in steps:
        manager.take(step, state(step))
        until(lambda step=step: manager.where(step)["far"] == "whole")


def delete(folder):
    """Delete a folder that an uploader may write to meanwhile."""
    until(lambda: shutil.rmtree(folder, ignore_errors=True) or not folder.exists())


def down(far):
    """Let the far root fail from now on: a file in its place. Return a function that brings it back."""
    away = far.with_name("away")
    far.rename(away)
    far.write_text("down")

    def up():
        far.unlink()
        away.rename(far)

    return up


def facts_in(far):
    newest = max((far / ".run").iterdir())
    return decode_facts(newest.read_bytes(), newest)


def restored(far, near, **options):
    live = state(-1)
    with manager_of(far, near, **options) as manager:
        step = manager.restore_latest(live)
        assert step is None or holds(live, step)
        return step
