"""Jobs that save and restore all they have, for tests in any split."""

from snapshot import Snapshot
from snapshot_megatron.adapter import MegatronState
from tests.plugins.snapshot_megatron.megatron_models import STEPS, build


def state_of(job):
    """The whole state of a training, as an application would describe it."""

    def make():
        return {**job.model_state(), "opt_param_scheduler": job.scheduler.state_dict()}

    return MegatronState(
        make, lambda state: job.scheduler.load_state_dict(state["opt_param_scheduler"]), optimizer=job.optimizer
    )


def trained(layout):
    job = build(layout)
    job.start()
    job.train()
    job.expect(STEPS)
    return job


def take(path, layout):
    job = trained(layout)
    Snapshot.take(path, {"megatron": state_of(job)})
    return job


def resume(path, layout):
    """Restore into a new job, and make one more step."""
    job = build(layout)
    report = Snapshot(path).restore({"megatron": state_of(job)})
    assert not [line for line in report.skipped if "optimizer" in line.path], report
    job.expect(STEPS)
    assert job.scheduler.num_steps == STEPS
    job.train(1, first=STEPS)
    job.expect(STEPS + 1)
