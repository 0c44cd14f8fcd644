"""Data orders of the real Trainer with the mixin, on 1 and 2 ranks, which are forks."""

import warnings
from collections import Counter

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset, IterableDataset

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from accelerate.state import AcceleratorState, GradientState
    from transformers import Trainer, TrainerCallback, TrainingArguments
    from transformers.utils import logging

from snapshot import Snapshot, SnapshotError
from snapshot.interop.weight_digests import FOLDER
from snapshot_trainers.ledger import hash_ids
from snapshot_trainers.transformers import SnapshotTrainerMixin
from tests.helpers.forked_ranks import fork_ranks

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*pin_memory.*:UserWarning"),
]
logging.disable_progress_bar()
logging.set_verbosity_error()
LENGTH = 72


class OurTrainer(SnapshotTrainerMixin, Trainer):
    pass


class Rows(Dataset):
    def __len__(self):
        return LENGTH

    def __getitem__(self, index):
        if index >= LENGTH:  # the Trainer iterates over it for the lengths
            raise IndexError(index)
        return {"number": torch.tensor(index), "input_ids": torch.zeros(1 + index % 9)}


class Stream(IterableDataset):
    def __iter__(self):
        return iter([Rows()[index] for index in range(LENGTH)])


def collate(rows):
    return {"number": torch.stack([each["number"] for each in rows])}


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(1, 1)
        self.seen = []

    def forward(self, number):
        self.seen.append((number.tolist(), torch.rand(1).item()))
        return {"loss": self.layer(number[:, None] / LENGTH).square().mean()}


class Stop(TrainerCallback):
    def __init__(self, at):
        self.at = at

    def on_step_end(self, args, state, control, **_):
        if state.global_step == self.at:
            control.should_save = control.should_training_stop = True


def train(folder, stop=None, resume=False, streamed=False, kind=OurTrainer, **options):
    """Train, and return what the model saw, the steps, the end of the scheduler, and the last learning rate."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    torch.manual_seed(3)
    model = Model()
    given = {
        "num_train_epochs": 2, "per_device_train_batch_size": 4, "save_strategy": "no", "report_to": [],
        "use_cpu": True, "learning_rate": 1e-3, "seed": 5, "logging_strategy": "no", "remove_unused_columns": False,
    }  # fmt: skip
    arguments = TrainingArguments(str(folder), **{**given, **options})
    callbacks = [Stop(stop)] if stop else []
    rows = Stream() if streamed else Rows()
    trainer = kind(model, arguments, train_dataset=rows, data_collator=collate, callbacks=callbacks)
    trainer.train(resume_from_checkpoint=resume)
    rate = trainer.lr_scheduler.get_last_lr()[0]
    return model.seen, trainer.state.global_step, trainer.state.max_steps, rate, round(trainer.state.epoch, 6)


KINDS = {
    "default": {},
    "global": {"accelerator_config": {"use_seedable_sampler": False}},
    "accumulated": {"gradient_accumulation_steps": 4},
    "grouped": {"train_sampling_strategy": "group_by_length"},
    "workers": {"dataloader_num_workers": 1},
    "split": {"accelerator_config": {"split_batches": True}},
}


@pytest.mark.parametrize("kind", [pytest.param(each, marks=[pytest.mark.smoke][each != "default" :]) for each in KINDS])
@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("stop", [3, 4])
def test_trainer_epoch_goes_on_exactly_on_the_same_ranks(tmp_path, kind, world, stop):
    options = KINDS[kind]
    whole = fork_ranks(world, tmp_path, _whole, tmp_path / "whole", options)
    begun = fork_ranks(world, tmp_path, _begun, tmp_path / "run", options, stop)
    rest = fork_ranks(world, tmp_path, _rest, tmp_path / "run", options)
    for all_of, first, last in zip(whole, begun, rest, strict=True):
        assert all_of[0] == first[0] + last[0]
        assert all_of[1:] == last[1:]


def _whole(folder, options):
    return train(folder, **options)


def _begun(folder, options, stop):
    return train(folder, stop, **options)


def _rest(folder, options):
    return train(folder, resume=True, **options)


def numbers_of(found):
    return [one for each in found for ids, _ in each[0] for one in ids]


@pytest.mark.parametrize("kind", ["default", "accumulated", "split", "at the end", "max_steps"])
@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2)])
def test_trainer_epoch_goes_on_on_other_ranks_with_each_sample_once(tmp_path, kind, before, after):
    options = dict(KINDS.get(kind, {}))
    steps = LENGTH // 4 // before  # of an epoch
    stop = {"at the end": steps, "accumulated": 1}.get(kind, steps + 5 if kind == "max_steps" else steps - 4)
    if kind == "split":
        stop = 11
    if kind == "max_steps":
        options["max_steps"] = stop + 30
    begun = fork_ranks(before, tmp_path, _begun, tmp_path / "run", options, stop)
    rest = fork_ranks(after, tmp_path, _rest, tmp_path / "run", options)
    seen = Counter(numbers_of(begun) + numbers_of(rest))
    assert sorted(seen) == list(range(LENGTH))
    if kind == "max_steps":
        assert rest[0][1] == rest[0][2] == stop + 30
        return
    assert set(seen.values()) == {2}  # two epochs
    _, step, most, rate, epoch = rest[0]
    assert step == most
    assert rate == 0.0  # the scheduler has ended, too
    assert epoch == 2.0
    snapshot = Snapshot(str(tmp_path / "run" / f"checkpoint-{stop}" / FOLDER))
    assert {path.split("/")[1] for path in snapshot.get_manifest()} >= {"loader", "rng"}


def test_trainer_epoch_of_a_checkpoint_without_a_place_is_skipped_by_the_trainer_each_time(tmp_path):
    whole = train(tmp_path / "whole")
    found = train(tmp_path / "run", 4, kind=Trainer)[0]  # 18 steps are an epoch
    found += train(tmp_path / "run", 9, resume=True)[0]
    found += train(tmp_path / "run", 20, resume=True)[0]  # the next epoch has a place
    found += train(tmp_path / "run", resume=True)[0]
    assert [ids for ids, _ in found] == [ids for ids, _ in whole[0]]
    held = [
        "0/loader" in Snapshot(str(path / FOLDER)).get_manifest() for path in sorted((tmp_path / "run").glob("*-*0"))
    ]
    assert held == [True]


@pytest.mark.parametrize("stop", [18, 25])
def test_trainer_second_pass_over_an_iterable_dataset_goes_on(tmp_path, stop):
    options = {"streamed": True, "max_steps": 40}
    whole = train(tmp_path / "whole", **options)
    begun = train(tmp_path / "run", stop, **options)  # an epoch has 18 batches
    rest = train(tmp_path / "run", resume=True, **options)
    assert [ids for ids, _ in begun[0] + rest[0]] == [ids for ids, _ in whole[0]]
    assert rest[1] == 40


def test_trainer_epoch_that_cannot_go_on_is_refused(tmp_path):
    train(tmp_path / "run", 4)
    with pytest.raises(SnapshotError, match=r"cannot go on: .*samplers was.*pass ignore_data_skip=True"):
        train(tmp_path / "run", resume=True, train_sampling_strategy="group_by_length")
    seen, step, *_ = train(
        tmp_path / "run", resume=True, train_sampling_strategy="group_by_length", ignore_data_skip=True
    )
    assert step == 36
    assert hash_ids(sorted(numbers_of([(seen[:18],)]))) == hash_ids(range(LENGTH))
