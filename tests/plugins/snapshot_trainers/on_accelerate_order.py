"""Data orders of loops with the real accelerate, on 1 and 2 ranks, which are forks."""

import itertools
import os
import warnings

import pytest
import torch
from torch.utils.data import DataLoader

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState
    from accelerate.utils import DataLoaderConfiguration
    from torchdata.stateful_dataloader import StatefulDataLoader

from snapshot import RestoreError, SnapshotError
from snapshot_trainers.accelerate import load_state, save_state, track_loaders
from tests.helpers.forked_ranks import fork_ranks
from tests.plugins.snapshot_trainers.orders import Numbers, ids_of

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
LENGTH = 48
KINDS = {
    "default": {},
    "seedable": {"use_seedable_sampler": True},
    "stateful": {"use_stateful_dataloader": True},
    "stateful and seedable": {"use_stateful_dataloader": True, "use_seedable_sampler": True},
    "split": {"split_batches": True},
    "dispatched": {"dispatch_batches": True},
    "dispatched and split": {"dispatch_batches": True, "split_batches": True},
    "workers": {},
}


def prepared(kind):
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(**KINDS[kind]))
    torch.manual_seed(1)
    made = StatefulDataLoader if "stateful" in kind else DataLoader
    loader = made(Numbers(LENGTH), batch_size=4, shuffle=True, num_workers=int(kind == "workers"))
    loader = accelerator.prepare(loader)
    track_loaders(accelerator)
    return accelerator, loader


def train(loader, until=None):
    found = []
    for number, batch in enumerate(loader, 1):
        found.append((ids_of(batch), torch.rand(1).item()))
        if number == until:
            break
    return found


def _saved(folder, kind, cut):
    """Save in the second epoch, and go on: what an uninterrupted run sees, too."""
    accelerator, loader = prepared(kind)
    torch.manual_seed(5 + accelerator.process_index)
    train(loader)
    found = []
    for number, batch in enumerate(loader, 1):
        found.append((ids_of(batch), torch.rand(1).item()))
        if number == (cut or len(loader)):
            save_state(accelerator, folder)
    return found, train(loader)


def _resumed(folder, kind):
    accelerator, loader = prepared(kind)
    torch.manual_seed(77)
    load_state(accelerator, folder)
    assert loader.iteration == 1
    return train(loader), train(loader)


def _refused(folder, kind):
    accelerator, loader = prepared(kind)
    if kind.startswith("dispatched"):
        with pytest.raises((ValueError, RestoreError), match="restore with as many ranks, or prepare the loader with"):
            load_state(accelerator, folder)
        return True
    load_state(accelerator, folder)
    with pytest.raises(SnapshotError, match="without it"):
        accelerator.skip_first_batches(loader, 2)
    return True


@pytest.mark.parametrize("kind", [pytest.param(each, marks=[pytest.mark.smoke][each != "default" :]) for each in KINDS])
@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("cut", [2, None])
def test_accelerate_loops_go_on_with_each_sample_once(tmp_path, kind, world, cut):
    """They are saved after some batches, or in the last one."""
    whole = fork_ranks(world, tmp_path, _saved, tmp_path / "saved", kind, cut)
    cut = cut or len(whole[0][0])
    again = fork_ranks(world, tmp_path, _resumed, tmp_path / "saved", kind)
    assert [each[0][cut:] for each in whole] == [each[0] for each in again]
    assert [[ids for ids, _ in each[1]] for each in whole] == [[ids for ids, _ in each[1]] for each in again]
    other = 3 - world
    if kind.startswith("dispatched"):
        assert all(fork_ranks(other, tmp_path, _refused, tmp_path / "saved", kind))
        return
    assert all(fork_ranks(world, tmp_path, _refused, tmp_path / "saved", kind))
    rest = fork_ranks(other, tmp_path, _resumed, tmp_path / "saved", kind)
    seen = [one for each in whole for ids, _ in each[0][:cut] for one in ids]
    seen += [one for each in rest for ids, _ in each[0] for one in ids]
    assert sorted(seen) == list(range(LENGTH))
    assert sorted(one for each in rest for ids, _ in each[1] for one in ids) == list(range(LENGTH))


def test_accelerate_loop_that_something_else_reads_is_not_saved(tmp_path):
    accelerator, loader = prepared("default")
    for before in (0, 3, len(loader)):  # batches that the loader itself gave before
        for _ in itertools.islice(loader, before):
            pass
        next(iter(accelerator.skip_first_batches(loader, 2)))
        with pytest.raises(SnapshotError, match="read by something else than the loader, such as skip_first_batches"):
            save_state(accelerator, tmp_path / "saved")
    next(iter(loader))
    save_state(accelerator, tmp_path / "saved")


def test_accelerate_loops_that_are_not_tracked_are_named(tmp_path, caplog):
    accelerator, loader = prepared("default")
    other = accelerator.prepare(DataLoader(Numbers(8)))
    with caplog.at_level("INFO"):
        save_state(accelerator, tmp_path / "saved")
    assert "the order of 1 data loaders is not saved" in caplog.text
    track_loaders(accelerator, other)
    load_state(accelerator, tmp_path / "saved")
    assert "has no place of the data loader 'loader_1', which begins a new epoch" in caplog.text
    assert len(list(loader)) == 12


def test_accelerate_loops_are_as_without_their_places():
    assert os.environ.get("WORLD_SIZE") is None
    _, loader = prepared("default")
    torch.manual_seed(3)
    found = train(loader)
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    torch.manual_seed(1)
    plain = Accelerator(cpu=True).prepare(DataLoader(Numbers(LENGTH), batch_size=4, shuffle=True))
    torch.manual_seed(3)
    assert train(plain) == found
