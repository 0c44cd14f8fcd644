"""`snapshot samples` and its report: what a run has seen, lost and seen twice, by the states of its data loaders."""

import json
import random

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, RandomSampler
from torch.utils.data.distributed import DistributedSampler

from snapshot import Snapshot, SnapshotError, SnapshotManager, StateDict
from snapshot.__main__ import main
from snapshot_trainers.ledger import Sum, find_difference, hash_ids, hash_range
from snapshot_trainers.samples import check_samples
from snapshot_trainers.torchdata import LoaderState
from tests.plugins.snapshot_trainers.orders import Numbers

LENGTH = 48


def train(run, epochs=2, saved_every=4, wrong=lambda epoch, ids: ids, make=None):
    """Save every few batches of a loop. `wrong` changes what a sampler gives."""

    class Faulty(RandomSampler):
        epoch = 0

        def __iter__(self):
            yield from wrong(self.epoch, list(super().__iter__()))

    torch.manual_seed(4)
    sampler = Faulty(Numbers(LENGTH)) if make is None else None
    loader = DataLoader(Numbers(LENGTH), batch_size=4, sampler=sampler) if make is None else make()
    state = LoaderState(loader)
    step = 0
    with SnapshotManager(run) as manager:
        for epoch in range(epochs):
            if sampler is not None:
                sampler.epoch = epoch
            for _ in loader:
                step += 1
                if step % saved_every == 0:
                    manager.take(step, {"loader": state, "more": StateDict(step=step)})
        manager.take(step + 1, {"loader": state})
    return state


def lines_of(report):
    return [str(each) for each in report.epochs]


def test_samples_of_a_run_that_has_seen_each_once(tmp_path, capsys):
    train(str(tmp_path / "run"), 3)
    report = check_samples(str(tmp_path / "run"), LENGTH)
    assert report.ok
    assert lines_of(report) == [f"loader: epoch {number}: 48 of 48, 0 lost, 0 twice" for number in range(3)]
    assert check_samples(str(tmp_path / "run")).ok
    assert check_samples(str(tmp_path / "run"), ids=reversed(range(LENGTH))).ok
    assert main(["samples", str(tmp_path / "run"), "--count", "48"]) == 0
    assert "3 epochs in 10 steps, no sample lost, none twice" in capsys.readouterr().out
    (tmp_path / "ids").write_text("".join(f"{each}\n" for each in range(LENGTH)))
    assert main(["samples", str(tmp_path / "run"), "--ids", str(tmp_path / "ids"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["epochs"][2]["samples"] == 48


def swap(epoch, ids):
    return [36 if epoch == 1 and each == 24 else each for each in ids]


def lose(epoch, ids):
    return [each for each in ids if epoch != 1 or each != 24]


def repeat(epoch, ids):
    return [*ids, 36] if epoch == 1 else ids


def scramble(epoch, ids):
    return ids[:-4] + ids[:4] if epoch == 1 else ids


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        (swap, "48 of 48, 1 lost (24), 1 twice (36)"),
        (lose, "47 of 48, 1 lost (24), 0 twice"),
        (repeat, "49 of 48, 0 lost, 1 twice (36)"),
        (scramble, "48 of 48, and not each of them once"),
    ],
)
def test_samples_that_were_lost_or_repeated_are_named(tmp_path, wrong, text, capsys):
    run = str(tmp_path / "run")
    train(run, 3, wrong=wrong)
    report = check_samples(run, LENGTH)
    assert not report.ok
    assert str(report.epochs[1]).startswith(f"loader: epoch 1: {text}; first in step-")
    assert [each.ok for each in report.epochs] == [True, False, True]
    assert [each.ok for each in check_samples(run).epochs] == [True, False, True]  # by comparison with the others
    assert main(["samples", run, "--count", "48"]) == 1
    assert text in capsys.readouterr().out


def known(kind):
    def make():
        generator = torch.Generator().manual_seed(6)
        return {
            "global": lambda: DataLoader(Numbers(LENGTH), batch_size=4, shuffle=True),
            "own": lambda: DataLoader(Numbers(LENGTH), batch_size=4, shuffle=True, generator=generator),
            "in order": lambda: DataLoader(Numbers(LENGTH), batch_size=4),
        }[kind]()

    return make


@pytest.mark.parametrize("kind", ["global", "own", "in order"])
def test_samples_of_a_running_epoch_are_compared_with_its_order(tmp_path, kind):
    run = str(tmp_path / "run")
    state = train(run, 1, make=known(kind))
    order = state.order
    with SnapshotManager(run) as manager:
        for number, _ in enumerate(state.loader, 1):
            if number == 5:
                order._epoch.ledger.add(Sum(0, 1))  # a batch that is not the one that was drawn
            manager.take(100 + number, {"loader": state})
            if number == 7:
                break
    report = check_samples(run, LENGTH)
    text = "loader: epoch 1: 28 samples so far, and they are not those of its order; first in step-105"
    assert lines_of(report) == ["loader: epoch 0: 48 of 48, 0 lost, 0 twice", text]


def test_samples_drawn_with_replacement_are_only_counted(tmp_path):
    loader = DataLoader(Numbers(20), batch_size=4, sampler=RandomSampler(Numbers(20), replacement=True))
    state = LoaderState(loader)
    next(iter(loader))
    Snapshot.take(tmp_path / "s", {"loader": state})
    assert lines_of(check_samples(str(tmp_path / "s"), 20)) == ["loader: epoch 0: 4 samples so far"]


def test_samples_of_one_snapshot_and_of_several_loaders(tmp_path):
    one, other = DataLoader(range(6), batch_size=2), DataLoader(range(5), shuffle=True)
    states = {"one": LoaderState(one), "other": LoaderState(other)}
    list(one), list(other), next(iter(other))
    Snapshot.take(tmp_path / "s", states)
    assert lines_of(check_samples(str(tmp_path / "s"), ids=range(6)))[0] == "one: epoch 0: 6 of 6, 0 lost, 0 twice"
    assert lines_of(check_samples(str(tmp_path / "s")))[1:] == [
        "other: epoch 0: 5 samples, with nothing to compare with",
        "other: epoch 1: 1 samples so far",
    ]


def test_samples_of_nothing_are_an_error(tmp_path, capsys):
    assert main(["samples", str(tmp_path)]) == 2
    assert "has no steps" in capsys.readouterr().err
    Snapshot.take(tmp_path / "s", {"x": StateDict(x=1)})
    with pytest.raises(SnapshotError, match="has no state of a LoaderState of a DataLoader in 1 step"):
        check_samples(str(tmp_path / "s"))
    with pytest.raises(ValueError, match="count or ids, not both"):
        check_samples(str(tmp_path / "s"), 3, ids=[1])
    with pytest.raises(ValueError, match="must not be negative, got -1"):
        check_samples(str(tmp_path / "s"), -1)
    damaged = {"version": 2, "replica": 0, "replicas": 1, "order": {"past": b"123", "evened": {}}}
    damaged["order"] |= {"between": True, "before": b"", "seen": b""}
    Snapshot.take(tmp_path / "damaged", {"loader": StateDict(damaged)})
    with pytest.raises(SnapshotError, match="0/loader/order: not the state of a data loader"):
        check_samples(str(tmp_path / "damaged"))


def _train_on_ranks(path):
    sampler = DistributedSampler(Numbers(50), seed=3)
    loader = DataLoader(Numbers(50), batch_size=4, sampler=sampler)
    state = LoaderState(loader)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for number, _ in enumerate(loader, 1):
            if epoch and number == 2:
                break
    Snapshot.take(path, {"loader": state})
    dist.barrier()
    return lines_of(check_samples(path, 50)), lines_of(state.count_samples(50))


def test_samples_of_several_ranks_are_added(four, folder):
    (found, live), *others = four.run(_train_on_ranks, f"{folder}/s")
    assert found == ["loader: epoch 0: 50 of 50, 0 lost, 0 twice, evened out: 2", "loader: epoch 1: 32 samples so far"]
    assert live == found
    assert others == [(found, live)] * 3


def test_find_difference_names_what_was_lost_and_seen_twice():
    draw = random.Random(7)
    for _ in range(40):
        ids = draw.sample(range(10_000), draw.randint(2, 200)) if draw.random() < 0.5 else range(draw.randint(2, 900))
        expected = hash_ids(ids)
        assert not isinstance(ids, range) or hash_range(len(ids)) == expected
        lost, twice = draw.sample(list(ids), 2)
        left = [each for each in ids if each != lost]
        assert find_difference(hash_ids(left), expected, ids) == ((lost,), ())
        assert find_difference(hash_ids([*ids, twice]), expected, ids) == ((), (twice,))
        assert find_difference(hash_ids([*left, twice]), expected, ids) == ((lost,), (twice,))
        assert find_difference(hash_ids([*ids, twice, lost]), expected, ids) == (None, None)
        assert find_difference(hash_ids([*left, 10_001]), expected, ids) == (None, None)
