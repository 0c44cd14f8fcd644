"""The real CheckpointManager of a version of torchtitan: saved, found and resumed by snapshots, in every mode. With
`manager` before the mode, it is `SnapshotCheckpointManager`.

python on_torchtitan.py FOLDER MODE
"""

import os
import sys
import warnings
from pathlib import Path

from tests.helpers.missing_packages import stand_in_for

stand_in_for("tyro", "triton", "torchdata", "torchft")
warnings.simplefilter("ignore")

import pytest  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions  # noqa: E402
from torch.distributed.checkpoint.state_dict import (  # noqa: E402
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

try:
    from torchtitan.components import checkpointer as titan
except ImportError:  # before 0.3
    from torchtitan.components import checkpoint as titan

from snapshot import CorruptSnapshotError, Snapshot  # noqa: E402
from snapshot_trainers.torchtitan import use_snapshots  # noqa: E402


class Optimizers:
    """As torchtitan's container: one optimizer, its state under the names of parameters."""

    def __init__(self, model):
        self.model, self.optimizer = model, torch.optim.AdamW(model.parameters(), lr=0.1)

    def state_dict(self):
        options = StateDictOptions(flatten_optimizer_state_dict=True)
        return get_optimizer_state_dict(self.model, self.optimizer, options=options)

    def load_state_dict(self, state):
        options = StateDictOptions(flatten_optimizer_state_dict=True)
        set_optimizer_state_dict(self.model, self.optimizer, optim_state_dict=state, options=options)

    def init_cache_state_dict(self):
        pass


class Counter:
    def __init__(self):
        self.step = 0

    def state_dict(self):
        return {"step": torch.tensor(self.step)}

    def load_state_dict(self, state):
        self.step = int(state["step"])


class Trainer:
    def __init__(self, folder, mode, seed, manager=titan.CheckpointManager, **changes):
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
        self.optimizers, self.counter = Optimizers(self.model), Counter()
        self.noise = 0.0 if manager is titan.CheckpointManager else 1.0
        schedulers = torch.optim.lr_scheduler.StepLR(self.optimizers.optimizer, 2)
        settings = {
            "enable": True, "folder": "checkpoint", "interval": 2, "async_mode": mode, "keep_latest_k": 0,
            "initial_load_path": None, "initial_load_model_only": True, "initial_load_in_hf": False,
            "initial_load_in_hf_quantized": False, "last_save_model_only": False, "last_save_in_hf": False,
            "export_dtype": "float32", "exclude_from_loading": [], "enable_first_step_checkpoint": False,
            "load_only": False, **changes,
        }  # fmt: skip
        rest = {
            "dataloader": Counter(), "model_parts": [self.model], "optimizers": self.optimizers,
            "lr_schedulers": schedulers, "states": {"train_state": self.counter}, "sd_adapter": None,
            "base_folder": folder,
        }  # fmt: skip
        if hasattr(manager, "Config"):  # 0.3
            self.checkpointer = manager.Config(**settings).build(**rest)
        else:
            config = type("Config", (), {"enable_ft_dataloader_checkpoints": False, **settings})
            self.checkpointer = titan.CheckpointManager(checkpoint_config=config, ft_manager=None, **rest)
        if mode == "async_with_pinned_mem":  # pinned memory needs an accelerator; the process does not
            self.checkpointer.stager = DefaultStager(StagingOptions(False, False, True, False))

    def train(self, steps):
        for _ in range(steps):
            self.counter.step += 1
            generator = torch.Generator().manual_seed(self.counter.step)
            self.optimizers.optimizer.zero_grad()
            noise = torch.rand(3, 4) * self.noise
            self.model(torch.randn(3, 4, generator=generator) + noise).square().sum().backward()
            self.checkpointer.maybe_wait_for_staging()
            self.optimizers.optimizer.step()
            self.checkpointer.save(self.counter.step)
        getattr(self.checkpointer, "maybe_wait_for_saving", self.checkpointer._async_wait if _OLD else None)()

    def weights(self):
        return {name: value.tolist() for name, value in self.model.state_dict().items()}


_OLD = not hasattr(titan.CheckpointManager, "maybe_wait_for_saving")


def damage(step):
    """Flip a bit of each byte of the tensors."""
    files = [*step.rglob("*.safetensors")]
    assert files
    for each in files:
        data = bytearray(each.read_bytes())
        begin = 8 + int.from_bytes(data[:8], "little")
        data[begin:] = bytes(byte ^ 1 for byte in data[begin:])
        each.write_bytes(data)


def on_manager(folder, mode):
    """Train with `SnapshotCheckpointManager`, with damage, a failed save, and noise from the global generator."""
    from snapshot_trainers.torchtitan_manager import SnapshotCheckpointManager

    class Noisy(Trainer):
        def __init__(self, folder, seed, **changes):
            super().__init__(folder, mode, seed, SnapshotCheckpointManager, **changes)

    assert isinstance(Noisy(f"{folder}/none", 1).checkpointer, titan.BaseCheckpointManager)
    whole = Noisy(f"{folder}/whole", 1)
    whole.train(8)
    cut = Noisy(folder, 1, keep_latest_k=2)
    cut.train(6)
    path = Path(folder) / "checkpoint"
    cut.checkpointer._removal.result(20)
    committed = sorted(each.parent.name for each in path.glob("*/.snapshot_metadata"))
    assert committed == (["step-4", "step-6"] if mode == "disabled" else ["step-2", "step-4", "step-6"])
    resumed = Noisy(folder, 2)
    assert resumed.checkpointer.load()
    assert resumed.counter.step == 6
    resumed.train(2)
    assert resumed.weights() == whole.weights()
    damage(path / "step-8")
    again = Noisy(folder, 3)
    assert again.checkpointer.load(), "damage is no reason to begin from scratch"
    assert again.counter.step == 6
    again.train(2)
    assert again.weights() == whole.weights()
    plain = Trainer(folder, mode, 7)
    use_snapshots()  # the two read each other's
    assert plain.checkpointer.load()
    assert plain.weights() == whole.weights()
    failing = Noisy(folder, 4)
    assert failing.checkpointer.load()
    assert failing.counter.step == 8
    failing.counter.state_dict = lambda: {"step": torch.tensor(10), "lost": torch.empty(2, device="meta")}
    with pytest.raises(BaseException, match="meta"):
        failing.train(2)
    after = Noisy(folder, 5)
    assert after.checkpointer.load()
    assert after.counter.step == 8
    for each in path.glob("step-*"):
        damage(each)
    with pytest.raises(CorruptSnapshotError, match="all steps are damaged"):
        Noisy(folder, 6).checkpointer.load()


def main(folder, mode):
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store-{mode}", 1), rank=0, world_size=1)
    if mode.startswith("manager"):
        on_manager(folder, mode.removeprefix("manager-"))
        return
    if mode == "dcp":  # what DCP wrote is still found and loaded
        before = Trainer(folder, "disabled", 1)
        before.train(2)
        use_snapshots()
        after = Trainer(folder, "disabled", 2)
        assert after.checkpointer.load()
        assert after.counter.step == 2
        assert after.weights() == before.weights()
        after.train(2)
        assert after.checkpointer._find_load_step() == 4
        assert Snapshot(f"{folder}/checkpoint/step-4").verify()
        return
    use_snapshots()
    use_snapshots()  # once is enough
    whole = Trainer(f"{folder}/whole", mode, 1)
    assert not whole.checkpointer.load()
    whole.train(6)
    cut = Trainer(folder, mode, 1)
    cut.train(4)
    path = Path(folder) / "checkpoint"
    assert sorted(os.listdir(path)) == ["step-2", "step-4"]
    assert Snapshot(path / "step-4").verify()
    resumed = Trainer(folder, mode, 2)
    assert resumed.checkpointer.load()
    assert resumed.counter.step == 4, resumed.counter.step
    resumed.train(2)
    assert resumed.weights() == whole.weights()
    (path / "step-6" / ".snapshot_metadata").unlink()  # never finished
    (path / "step-6" / ".metadata").unlink()
    again = Trainer(folder, mode, 3)
    assert again.checkpointer.load()
    assert again.counter.step == 4


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
