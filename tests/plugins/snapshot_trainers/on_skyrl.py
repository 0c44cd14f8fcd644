"""SkyRL's real `FSDPStrategy` of versions 0.3 and 0.4 over snapshots: python on_skyrl.py."""

import os
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path

from tests.helpers.missing_packages import StandIns, stand_in_for

warnings.simplefilter("ignore")
stand_in_for(
    "ray", "tensordict", "hydra", "codetiming", "zmq", "cachetools", "fastapi", "uvicorn", "starlette", "vllm",
    "wandb", "datasets", "pandas", "qwen_vl_utils", "pydantic", "orjson", "pyarrow", "PIL", "jaxtyping", "loguru",
    "flash_attn", "skyrl_gym", "cloudpathlib", "vllm_router", "httpx", "sqlmodel",
)  # fmt: skip
for unused in ("skyrl.tinker.types", "skyrl.train.config", "skyrl.backends.skyrl_train.workers.model_wrapper"):
    # they need a newer Python, or an accelerator
    sys.modules[unused] = StandIns().create_module(type("Spec", (), {"name": unused}))

import pytest  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from skyrl.backends.skyrl_train.distributed import fsdp_strategy  # noqa: E402
from skyrl.backends.skyrl_train.distributed.fsdp_strategy import FSDPStrategy  # noqa: E402
from torch import nn  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.fsdp import fully_shard  # noqa: E402
from transformers import LlamaConfig, LlamaForCausalLM  # noqa: E402

from snapshot import Snapshot, SnapshotError  # noqa: E402
from snapshot_trainers.skyrl import use_snapshots  # noqa: E402

SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}


class HFModelWrapper(nn.Module):
    """SkyRL's wrapper of a model, by its name: the real one needs an accelerator."""

    def __init__(self, model):
        super().__init__()
        self.model = model


fsdp_strategy.HFModelWrapper = HFModelWrapper


class Run:
    """A model that is trained with dropout, and the strategy."""

    def __init__(self, seed):
        torch.manual_seed(seed)
        config = LlamaConfig(vocab_size=64, max_position_embeddings=16, attention_dropout=0.1, **SIZES)
        config._attn_implementation = "eager"
        model = LlamaForCausalLM(config).train()
        fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
        self.model = HFModelWrapper(model)
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2)
        self.strategy = FSDPStrategy.__new__(FSDPStrategy)  # without an accelerator
        self.strategy.fsdp_strategy, self.strategy.is_lora = "fsdp", False
        self.strategy.world_size = dist.get_world_size()

    def train(self, steps):
        losses = []
        for step in steps:
            tokens = torch.randint(0, 64, (4, 16), generator=torch.Generator().manual_seed(step))
            loss = self.model.model(input_ids=tokens, labels=tokens).loss
            loss.backward()
            self.optimizer.step()
            self.scheduler.step()
            self.optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    def save(self, folder, **more):
        """Save as SkyRL's worker does."""
        given = {"optimizer": self.optimizer, "scheduler": self.scheduler, "node_local_rank": dist.get_rank(), **more}
        self.strategy.save_checkpoint(model=self.model, ckpt_dir=str(folder), tokenizer=None, **given)

    def load(self, folder):
        """Load as SkyRL's worker does."""
        return self.strategy.load_checkpoint(
            model=self.model, optimizer=self.optimizer, scheduler=self.scheduler, ckpt_dir=str(folder),
            load_optimizer_states=True, load_lr_scheduler_states=True,
        )  # fmt: skip


def check_resume(folder):
    run = Run(1)
    run.train([0, 1])
    run.save(folder, client_state={"epoch": 3})
    expected = run.train([2, 3])
    assert (folder / "huggingface" / "config.json").is_file()
    assert not [*folder.glob("*.pt")]
    if dist.get_rank() == 0:
        assert Snapshot(folder / "snapshot").verify()
    resumed = Run(2)
    path, states = resumed.load(folder)
    assert path == str(folder)
    assert states["client_state"] == {"epoch": 3}
    assert states["world_size"] == dist.get_world_size()
    assert resumed.train([2, 3]) == expected


def check_failure(folder):
    """A save that fails leaves the checkpoint before it."""
    run = Run(1)
    run.train([0])
    run.save(folder, tag="first")
    run.scheduler.state_dict = lambda: {"lost": torch.empty(2, device="meta")}
    with pytest.raises(SnapshotError, match="meta"):
        run.save(folder, tag="second")
    assert Run(2).load(folder)[1]["tag"] == "first"


def check_skyrl_s_own(folder, own):
    """SkyRL loads what SkyRL itself wrote."""
    torch.cuda.synchronize = lambda: None
    before = Run(1)
    before.train([0])
    own(before.strategy, before.model, str(folder), 0, before.optimizer, before.scheduler)
    expected = before.train([1])
    after = Run(2)
    after.load(folder)
    assert after.train([1]) == expected


def main(folder, rank, world):
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/ranks{world}", world), rank=rank, world_size=world)
    own = FSDPStrategy.save_checkpoint
    use_snapshots()
    use_snapshots()  # once is enough
    check_resume(folder / f"of-{world}")
    if world == 1:
        other = Run(3)  # on one rank, what two ranks saved
        other.load(folder / "of-2")
        other.train([2])
        check_failure(folder / "failing")
        check_skyrl_s_own(folder / "own", own)
    dist.destroy_process_group()


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
    else:
        with tempfile.TemporaryDirectory() as place:
            for world in (2, 1):
                ranks = [
                    subprocess.Popen([sys.executable, __file__, place, str(rank), str(world)], env=os.environ)
                    for rank in range(world)
                ]
                assert [each.wait(300) for each in ranks] == [0] * world
