"""Twenty faults from other projects' runs. With the default options, the library notices each of them."""

import copy
import gc
import itertools
import math
import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from snapshot import KeepBest, Snapshot, SnapshotExistsError, SnapshotManager, StateDict
from snapshot import events as happening
from tests.helpers.arguments import for_take
from tests.helpers.faulty import Cached

GUIDE = Path(__file__).parents[2] / "docs/guides/guards.md"


class Training:
    """A small training with a scheduler, and what its takes and its events reported."""

    def __init__(self, root, kind=torch.optim.AdamW):
        torch.manual_seed(3)
        self.root, self.number = root, itertools.count(1)
        self.model = nn.Sequential(nn.Linear(16, 32), nn.Linear(32, 4))
        self.optimizer = kind(self.model.parameters(), lr=1e-2)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda epoch: 1 / (1 + epoch / 10))
        self.progress = StateDict(step=0)

    def learn(self):
        (self.model(torch.randn(8, 16)) ** 2).mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.scheduler.step()
        self.progress["step"] += 1

    @property
    def app(self):
        return {"m": self.model, "o": self.optimizer, "s": self.scheduler, "p": self.progress}

    def take(self, app, **options):
        path = f"{self.root}/step-{next(self.number)}"
        return [str(each) for each in Snapshot.take(path, app, **for_take(**options)).report.findings]

    def takes(self, app, times=3):
        """Learn and take some times. Return the last findings; the takes before must have none."""
        found = []
        for _ in range(times):
            assert found == []
            self.learn()
            found = self.take(app)
        return found


def saves_that_repeat_the_first(run):
    app = {**run.app, "m": Cached(run.model), "o": Cached(run.optimizer)}
    return run.takes(app), "stale: .* none changed in three takes, not even an optimizer's number of steps"


def moments_that_repeat_the_first(run):
    return run.takes({**run.app, "o": Cached(run.optimizer)}), "unchanged: .* moments did not change in three takes"


def parameters_that_the_model_no_longer_has(run):
    for layer in run.model:
        layer.weight, layer.bias = nn.Parameter(layer.weight.clone()), nn.Parameter(layer.bias.clone())
    return run.takes(run.app, 1), "missing: o: none of its 4 parameters is of a module in the app state"


def another_object_than_the_trained_one(run):
    app = {**run.app, "m": copy.deepcopy(run.model)}
    return run.takes(app, 1), "missing: o: none of its 4 parameters"


def an_optimizer_that_was_never_added(run):
    return run.takes({"m": run.model, "s": run.scheduler, "p": run.progress}), "unsaved: .* has no optimizer"


def optimizers_of_several_networks(run):
    critic = nn.Linear(16, 1)
    second = torch.optim.Adam(critic.parameters())
    learn = run.learn

    def both():
        learn()
        critic(torch.randn(4, 16)).mean().backward()
        second.step()
        second.zero_grad()

    run.learn = both
    return run.takes({"actor": run.model, "critic": critic, "p": run.progress}), "unsaved: .* has no optimizer"


def weights_and_epoch_only(run):
    state = StateDict(epoch=0)
    learn = run.learn
    run.learn = lambda: (learn(), state.update(epoch=state["epoch"] + 1))
    return run.takes({"encoder": run.model[0], "decoder": run.model[1], "e": state}), "unsaved: .* has no optimizer"


def a_scheduler_that_is_left_out(run):
    return run.takes({"m": run.model, "o": run.optimizer, "p": run.progress}), "unsaved: o group 0: its learning rate"


def a_scheduler_of_two_stages(run):
    class TwoStages(torch.optim.lr_scheduler.LRScheduler):
        def get_lr(self):
            return [rate * (0.1 if self.last_epoch < 2 else 1.0 / self.last_epoch) for rate in self.base_lrs]

    run.optimizer = torch.optim.SGD(run.model.parameters(), lr=0.1, momentum=0.9)
    run.scheduler = TwoStages(run.optimizer)
    return run.takes({"m": run.model, "o": run.optimizer}, 3), "unsaved: o group 0: its learning rate"


def a_scheduler_in_no_rank(run):
    app = {"train": StateDict(model=run.model.state_dict()), "o": run.optimizer, "p": run.progress}
    return run.takes(app), "unsaved: o group 0: its learning rate"


def nan_after_an_explosion(run):
    run.learn()
    with torch.no_grad():
        run.model[0].weight.mul_(math.inf)
    return run.take(run.app), "nonfinite: NaN or infinity in m/0.weight"


def a_newest_step_of_nan(run):
    run.takes(run.app, 2)
    loss = (run.model(torch.randn(8, 16)) * math.nan).mean()
    loss.backward()
    run.optimizer.step()
    found = run.take(run.app)
    return found, "nonfinite: NaN or infinity in .*m/0.weight"


def a_metric_that_is_nan(run):
    with SnapshotManager(run.root, keep=KeepBest("loss"), signals=()) as manager:
        for step, loss in ((1, 0.5), (2, math.nan)):
            manager.take(step, run.app, metrics={"loss": loss})
        return [f"best: {manager.best('loss')}"], "best: 1"


def a_count_that_starts_again(run):
    with SnapshotManager(run.root, signals=()) as manager:
        manager.take(200, run.app)
    with SnapshotManager(run.root, signals=()) as manager, pytest.raises(SnapshotExistsError) as error:
        manager.take(200, run.app)
    return [str(error.value)], "step-200"


def a_step_that_is_set_back(run):
    run.takes(run.app, 2)
    run.progress["step"] = 0
    return run.take(run.app), "counter: p/step is 0, and was 2 in the take before"


def a_failed_save_that_nobody_waits_for(run):
    told = []
    happening.add_handler(told.append)
    try:
        (Path(run.root) / "step-1").mkdir(parents=True)
        (Path(run.root) / "step-1" / "data").write_text("in the way")
        pending = Snapshot.async_take(f"{run.root}/step-1", run.app)
        while not pending.done():
            pass
        del pending
        gc.collect()
    finally:
        happening.remove_handler(told.append)
    return [f"{each.name}: {each.fields['error']}" for each in told if each.name == "failed"], "failed: .*data"


def a_training_that_collapses(run):
    run.takes(run.app, 8)
    with torch.no_grad():
        for parameter in run.model.parameters():
            parameter.mul_(40)
    return run.take(run.app), "jump: o group 0: the norm of its parameters is [34].* times that of the last takes"


FAULTS = {
    "NeMo-RL, issue 3312": saves_that_repeat_the_first,
    "NeMo-RL, pull request 4183": moments_that_repeat_the_first,
    "transformers, pull request 4450": parameters_that_the_model_no_longer_has,
    "CodefyUI, pull request 147": another_object_than_the_trained_one,
    "speechbrain, pull request 127": an_optimizer_that_was_never_added,
    "Mava, issue 472": optimizers_of_several_networks,
    "places365, issue 78": weights_and_epoch_only,
    "the_well, issue 77": a_scheduler_that_is_left_out,
    "lightly-train, pull request 301": a_scheduler_of_two_stages,
    "TorchEasyRec, pull request 664": a_scheduler_in_no_rank,
    "micromind, issue 64": nan_after_an_explosion,
    "DeepFilterNet, issue 30": a_newest_step_of_nan,
    "pytorch-lightning, issue 1008": a_metric_that_is_nan,
    "fast-stable-diffusion, issue 1198": a_count_that_starts_again,
    "LLM of The School of AI, pull request 560": a_step_that_is_set_back,
    "orbax, issue 605": a_failed_save_that_nobody_waits_for,
    "fullbatchtraining, issue 2": a_training_that_collapses,
}
WITH_RANKS = ["pytorch, issue 109191", "Megatron-LM, pull request 6920"]
WITH_UPLOADS = ["sagemaker-python-sdk, issue 3062"]
"""Shown in tests/plugins/snapshot_tiers/test_timelines.py, in the test of uploads that do not advance."""


@pytest.mark.parametrize("source", FAULTS)
def test_guards_find_faults_of_other_projects_by_default(tmp_path, source, caplog):
    found, expected = FAULTS[source](Training(str(tmp_path / "run")))
    assert any(re.search(expected, each) for each in found), found


def test_guards_find_nothing_in_a_training_without_a_fault(tmp_path):
    run = Training(str(tmp_path / "run"))
    assert run.takes(run.app, 12) == []


def _differ(path, how):
    rank, run = dist.get_rank(), Training(path)
    replicated = nn.parallel.DistributedDataParallel(run.model)
    torch.manual_seed(rank if how == "gradients" else 1)
    found = []
    for number in range(2):
        run.learn()
        if how == "load" and number == 1 and rank == 1:
            with torch.no_grad():
                run.model[1].weight.add_(1e-3)
        app = {"m": replicated, "p": run.progress}
        found.append([str(each) for each in Snapshot.take(f"{path}/step-{number}", app).report.findings])
    return found


@pytest.mark.parametrize("how", ["gradients", "load"], ids=WITH_RANKS)
def test_guards_find_replicas_that_differ(two, folder, how):
    leader, _ = two.run(_differ, f"{folder}/{how}", how)
    assert any("drift: replicas of rank 1 differ from those of rank 0" in each for each in leader[-1])


def test_guards_docs_page_lists_all_field_faults():
    rows = [row.split("|") for row in GUIDE.read_text().partition("## Faults that runs have had")[2].splitlines()]
    sources = [row[2].strip() for row in rows if len(row) > 3][2:]
    assert sources == [*FAULTS, *WITH_RANKS, *WITH_UPLOADS]
    assert len(sources) == 20
