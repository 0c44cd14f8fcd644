"""verl's real `FSDPCheckpointManager` of version 0.9 over snapshots: python on_verl_manager.py."""

import os
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path

from tests.helpers.missing_packages import stand_in_for

warnings.simplefilter("ignore")
stand_in_for(
    "ray", "tensordict", "hydra", "codetiming", "zmq", "cachetools", "fastapi", "uvicorn", "starlette", "sglang",
    "vllm", "wandb", "datasets", "pandas", "qwen_vl_utils", "pydantic", "orjson", "pyarrow", "PIL",
)  # fmt: skip

import pytest  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from peft import LoraConfig, get_peft_model  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.fsdp import fully_shard  # noqa: E402
from transformers import LlamaConfig, LlamaForCausalLM  # noqa: E402
from verl.utils.checkpoint.fsdp_checkpoint_manager import FSDPCheckpointManager  # noqa: E402

from snapshot import Snapshot, SnapshotError  # noqa: E402
from snapshot_trainers.verl_manager import use_snapshots  # noqa: E402

SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}


class Run:
    """A model that is trained with dropout, and its manager."""

    def __init__(self, seed, adapter=False, **contents):
        torch.manual_seed(seed)
        config = LlamaConfig(vocab_size=64, max_position_embeddings=16, attention_dropout=0.1, **SIZES)
        config._attn_implementation = "eager"
        self.model = LlamaForCausalLM(config)
        if adapter:
            config = LoraConfig(r=128, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
            self.model = get_peft_model(self.model, config)
            torch.manual_seed(9)  # the base comes from elsewhere: it is the same in each run
            with torch.no_grad():
                for each in self.model.parameters():
                    if not each.requires_grad:
                        each.normal_(std=0.02)
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        fully_shard(self.model, mesh=mesh)
        trained = [each for each in self.model.parameters() if each.requires_grad]
        self.model.train()
        self.optimizer = torch.optim.AdamW(trained, lr=0.01)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2)
        config = {"save_lora_only": adapter, **contents}
        self.manager = FSDPCheckpointManager(self.model, self.optimizer, self.scheduler, None, config)

    def gather(self):
        """Return all tensors of the model and the moments, whole."""
        moments = [each for state in self.optimizer.state_dict()["state"].values() for each in state.values()]
        return [
            each.full_tensor() if hasattr(each, "full_tensor") else each
            for each in [*self.model.state_dict().values(), *moments]
        ]

    def train(self, steps):
        losses = []
        for step in steps:
            generator = torch.Generator().manual_seed(step)
            tokens = torch.randint(0, 64, (4, 16), generator=generator)
            loss = self.model(input_ids=tokens, labels=tokens).loss
            loss.backward()
            self.optimizer.step()
            self.scheduler.step()
            self.optimizer.zero_grad()
            losses.append(loss.item())
        return losses


def check_resume(folder, adapter):
    whole = Run(1, adapter)
    expected = whole.train(range(6))
    cut = Run(1, adapter)
    cut.train(range(2))
    cut.manager.save_checkpoint(str(folder / "global_step_2"), None, 2, 1)
    cut.train(range(2, 4))
    cut.manager.save_checkpoint(str(folder / "global_step_4"), None, 4, 1)
    assert not (folder / "global_step_2").exists(), "one checkpoint is kept"
    step = folder / "global_step_4"
    assert not [*step.glob("*.pt")]
    assert (step / "huggingface" / "config.json").is_file()
    assert Snapshot(step / "snapshot").verify()
    resumed = Run(1 if adapter else 2, adapter)
    resumed.manager.load_checkpoint(str(step))
    assert resumed.train(range(4, 6)) == expected[4:]
    if adapter:
        trained = sum(each.numel() * 4 for each in cut.model.parameters() if each.requires_grad)
        assert Snapshot(step / "snapshot").metadata.nbytes < 1.1 * 3 * trained, "the adapter, and two moments"


def check_contents(folder):
    """What the configuration leaves out is neither saved nor restored."""
    run = Run(1, save_contents=["model"], load_contents=["model"])
    run.train([0])
    run.manager.save_checkpoint(str(folder / "a"), None, 1)
    names = Snapshot(folder / "a" / "snapshot").get_manifest()
    assert not [name for name in names if name.startswith("0/optimizer")]
    other = Run(2, load_contents=["model"])
    other.manager.load_checkpoint(str(folder / "a"))
    for one, two in zip(run.model.parameters(), other.model.parameters(), strict=True):
        assert one.to_local().equal(two.to_local())


def check_failure(folder):
    """A save that fails leaves the checkpoint before it, also in the same folder."""
    run = Run(1)
    run.train([0])
    run.manager.save_checkpoint(str(folder / "f"), None, 1, 1)
    run.scheduler.state_dict = lambda: {"lost": torch.empty(2, device="meta")}
    with pytest.raises(SnapshotError, match="meta"):
        run.manager.save_checkpoint(str(folder / "f"), None, 2, 1)
    assert Snapshot(folder / "f" / "snapshot").metadata.metadata["trainer"]["step"] == 1
    Run(2).manager.load_checkpoint(str(folder / "f"))


def check_verl_s_own(folder, own):
    """verl loads what verl itself wrote."""
    before = Run(1)
    before.train([0])
    own(before.manager, str(folder / "own"), None, 1)
    expected = before.train([1])
    after = Run(2)
    after.manager.load_checkpoint(str(folder / "own"))
    assert after.train([1]) == expected


def main(folder, rank, world):
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/ranks{world}", world), rank=rank, world_size=world)
    own = FSDPCheckpointManager.save_checkpoint
    use_snapshots()
    use_snapshots()  # once is enough
    if world == 2:
        run = Run(1)
        run.train([0, 1])
        run.manager.save_checkpoint(str(folder / "two"), None, 2)
        whole = run.gather()
        if rank == 0:
            torch.save(whole, folder / "whole.pt")
        expected = run.train([2, 3])
        resumed = Run(2)
        resumed.manager.load_checkpoint(str(folder / "two"))
        assert resumed.train([2, 3]) == expected
    else:
        resumed = Run(2)  # on one rank, what two ranks saved
        resumed.manager.load_checkpoint(str(folder / "two"))
        for one, two in zip(resumed.gather(), torch.load(folder / "whole.pt"), strict=True):
            assert one.equal(two)
        resumed.train([2])
        check_resume(folder / "whole", adapter=False)
        check_resume(folder / "adapter", adapter=True)
        check_contents(folder)
        check_failure(folder)
        check_verl_s_own(folder, own)
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
