"""`save_state` and `load_state` with the real accelerate, on 1 to 3 ranks, which are forks."""

import os
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from accelerate import Accelerator, FullyShardedDataParallelPlugin
    from accelerate.state import AcceleratorState, DistributedType, GradientState, PartialState
    from accelerate.utils import DataLoaderConfiguration
    from torchdata.stateful_dataloader import StatefulDataLoader

from snapshot import PendingSnapshot, Snapshot, SnapshotError, SnapshotNotFoundError
from snapshot_trainers.accelerate import app_state_of, load_state, save_state
from tests.helpers.forked_ranks import fork_ranks

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")

STEPS, CUT, BATCH = 16, 10, 12
"""Batches of a run, the batch after which it is saved and cut, and samples of a batch on all ranks."""


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(8, 24)
        self.norm = nn.LayerNorm(24)
        self.drop = nn.Dropout(0.2)
        self.last = nn.Linear(24, 1)

    def forward(self, x):
        return self.last(self.drop(torch.relu(self.norm(self.first(x)))))


class Counter:
    """A registered object."""

    def __init__(self):
        self.values = torch.zeros(400)

    def state_dict(self):
        return {"values": self.values}

    def load_state_dict(self, state):
        self.values = state["values"]


class Run:
    """A loop with accelerate that accumulates gradients over two batches."""

    def __init__(self, dropout=True, sharded=False, stateful=True, **options):
        self.world = int(os.environ.get("WORLD_SIZE", "1"))
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
        if sharded:  # accelerate has no FSDP without an accelerator, so it takes these ranks for some
            PartialState(cpu=True)
            PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
            options["fsdp_plugin"] = FullyShardedDataParallelPlugin(fsdp_version=2, reshard_after_forward=True)
        data = DataLoaderConfiguration(use_seedable_sampler=True, use_stateful_dataloader=stateful)
        self.accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2, dataloader_config=data, **options)
        torch.manual_seed(0)
        model = Model()
        model.drop.p = 0.2 if dropout else 0.0
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        inputs = torch.randn(BATCH * STEPS, 8)
        rows = TensorDataset(inputs, inputs.sum(-1, keepdim=True))
        self.stateful, kind = stateful, StatefulDataLoader if stateful else DataLoader
        generator = torch.Generator()  # its iterators draw from it, and not from the global one
        loader = kind(rows, batch_size=BATCH // self.world, shuffle=True, generator=generator)
        prepared = self.accelerator.prepare(model, optimizer, schedule, loader)
        self.model, self.optimizer, self.scheduler, self.loader = prepared
        self.counter = Counter()
        self.accelerator.register_for_checkpointing(self.counter)
        torch.manual_seed(1 + self.accelerator.process_index)

    def train(self, stop_at=STEPS):
        """Train up to a batch, or to the end of the epoch. Return the losses."""
        losses, loader = [], self.loader
        if not self.stateful:
            loader = self.accelerator.skip_first_batches(loader, self.accelerator.step)
        for batch, wanted in loader:
            with self.accelerator.accumulate(self.model):
                loss = nn.functional.mse_loss(self.model(batch), wanted)
                self.accelerator.backward(loss)
                self.optimizer.step()
                self.scheduler.step()
                self.optimizer.zero_grad()
            self.counter.values += 1
            losses.append(self.accelerator.reduce(loss.detach(), "mean").item())
            if len(losses) == stop_at:
                break
        return losses

    def weights(self):
        state = self.accelerator.unwrap_model(self.model).state_dict()
        whole = {name: each.full_tensor() if hasattr(each, "full_tensor") else each for name, each in state.items()}
        return {name: each.clone().numpy().tobytes() for name, each in whole.items()}


def _whole(options):
    run = Run(**options)
    return run.train(), run.weights()


def _saved(folder, options, background=False):
    run = Run(**options)
    run.train(CUT)
    saved = save_state(run.accelerator, folder, background=background)
    if background:
        assert isinstance(saved, PendingSnapshot)
        run.train(2)  # changes nothing of what was saved
        saved = saved.wait()
    assert saved.verify().ok
    return run.weights()


def _resumed(folder, options):
    run = Run(**options)
    load_state(run.accelerator, folder)
    assert run.accelerator.step == CUT
    assert run.counter.values.eq(CUT).all()
    assert run.scheduler.get_last_lr()[0] < 1e-2
    return run.train(), run.weights()


# First, while no thread has been started: what is forked then is sound.


def _two(folder, options):
    whole, weights = _whole(options)
    _saved(folder / "saved", options)
    own = {path.split("/")[1] for path in Snapshot(folder / "saved").get_manifest() if path.startswith("1/")}
    assert own == {"rng"}
    losses, others = _resumed(folder / "saved", options)
    assert losses == whole[CUT:]
    assert others == weights
    return _loaded(folder, options)


@pytest.mark.parametrize("sharded", [False, True])
def test_accelerate_load_state_resumes_exactly_and_on_other_world_sizes(tmp_path, sharded):
    saved, other = fork_ranks(2, tmp_path, _two, tmp_path, {"sharded": sharded, "stateful": False})
    assert saved == other
    for world in (1, 3):
        loaded = fork_ranks(world, tmp_path, _loaded, tmp_path, {"sharded": sharded and world > 1, "stateful": False})
        assert loaded == [saved] * world


def _loaded(folder, options):
    run = Run(**options)
    before = torch.get_rng_state()
    load_state(run.accelerator, folder / "saved")
    if run.world != 2:
        assert torch.get_rng_state().equal(before)
    optimizer = run.optimizer.optimizer.state_dict()["state"]
    moments = [each["exp_avg"] for each in optimizer.values()]
    moments = [each.full_tensor() if hasattr(each, "full_tensor") else each for each in moments]
    return run.accelerator.step, run.weights(), [each.numpy().tobytes() for each in moments]


def _with_buffers(folder):
    run = Run()
    model = nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4))
    model = run.accelerator.prepare(model)
    model(torch.randn(8, 2) + dist.get_rank())
    frozen = run.accelerator.prepare_model(nn.Linear(300, 2).requires_grad_(False), evaluation_mode=True)
    assert isinstance(frozen, nn.Linear)
    save_state(run.accelerator, folder)
    snapshot = Snapshot(folder)
    assert not [path for path in snapshot.get_manifest() if path.startswith("1/model")]
    return model.module[1].running_mean.tolist(), snapshot.read_object("0/model_1/model/1.running_mean").tolist()


def test_accelerate_save_state_saves_buffers_of_rank_0_and_frozen_models_once(tmp_path):
    (first, saved), (second, _) = fork_ranks(2, tmp_path, _with_buffers, tmp_path / "saved")
    assert first != second
    assert saved == first


def test_accelerate_load_state_resumes_in_the_middle_of_an_epoch(tmp_path):
    whole, weights = _whole({})
    _saved(tmp_path / "saved", {})
    losses, others = _resumed(tmp_path / "saved", {})
    assert losses == whole[CUT:]
    assert others == weights


def test_accelerate_save_state_in_the_background_saves_the_moment_of_the_call(tmp_path):
    whole, weights = _whole({})
    _saved(tmp_path / "saved", {}, background=True)
    losses, others = _resumed(tmp_path / "saved", {})
    assert (losses, others) == (whole[CUT:], weights)


def test_accelerate_grad_scaler_is_saved_and_restored(tmp_path):
    run = Run()
    run.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    run.accelerator.scaler.scale(torch.ones(()))  # it is created when it is first used
    save_state(run.accelerator, tmp_path / "saved")
    other = Run()
    other.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    load_state(other.accelerator, tmp_path / "saved")
    assert other.accelerator.scaler.get_scale() == 1024.0


def test_accelerate_load_state_of_a_folder_of_accelerate_itself(tmp_path):
    run = Run()
    run.train(CUT)
    run.accelerator.save_state(str(tmp_path / "theirs"))
    other = Run()
    load_state(other.accelerator, tmp_path / "theirs")
    assert other.weights() == run.weights()
    assert other.accelerator.step == CUT


def test_accelerate_load_state_of_an_uncommitted_folder_raises(tmp_path):
    run = Run()
    save_state(run.accelerator, tmp_path / "saved")
    (tmp_path / "saved" / ".snapshot_metadata").unlink()
    for name in ("saved", "nothing"):
        with pytest.raises(SnapshotNotFoundError, match=name):
            load_state(run.accelerator, tmp_path / name)


def test_accelerate_registered_objects_that_are_not_restored_are_logged(tmp_path, caplog):
    run = Run()
    run.accelerator.register_for_checkpointing(Counter())
    save_state(run.accelerator, tmp_path / "saved")
    load_state(run.accelerator, tmp_path / "saved")
    assert "custom_1" not in caplog.text
    load_state(Run().accelerator, tmp_path / "saved")
    assert "custom_1" in caplog.text
    caplog.clear()
    load_state(Run().accelerator, tmp_path / "saved", unused="ignore")
    assert "custom_1" not in caplog.text


def test_accelerate_app_state_of_works_with_take_and_other_verbs(tmp_path):
    run = Run()
    run.train(2)
    state = app_state_of(run.accelerator)
    assert sorted(state) == ["accelerator", "custom", "loader", "model", "optimizer", "rng", "scheduler"]
    Snapshot.take(tmp_path / "saved", state)
    assert Snapshot(tmp_path / "saved").read_object("0/accelerator/step") == 2


@pytest.mark.parametrize("kind", ["FSDP", "DEEPSPEED", "MEGATRON_LM"])
def test_accelerate_with_fsdp1_deepspeed_or_megatron_is_refused(tmp_path, kind):
    run = Run()
    run.accelerator.state.distributed_type = DistributedType[kind]
    named = "FSDP1" if kind == "FSDP" else kind
    with pytest.raises(SnapshotError, match=f"the accelerator uses {named}, which has its own checkpoint format"):
        save_state(run.accelerator, tmp_path / "saved")
    assert not (tmp_path / "saved").exists()
