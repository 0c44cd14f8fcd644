"""NeMo AutoModel's real Checkpointer over snapshots, with FSDP2 on CPU ranks. `test_frameworks.py` runs this."""

import os
import sys
import warnings

os.environ["CUDA_VISIBLE_DEVICES"] = ""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from nemo_automodel.components.checkpoint import checkpointing
    from nemo_automodel.components.checkpoint.config import CheckpointingConfig
    from transformers import LlamaConfig, LlamaForCausalLM

from snapshot import Snapshot, SnapshotError
from snapshot.errors import MissingExtraError
from snapshot_trainers.automodel import use_snapshots
from tests.helpers.forked_ranks import fork_ranks

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(900)]
SIZES = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}


class Run:
    """A model of FSDP2, its optimizer, and AutoModel's checkpointer."""

    def __init__(self, folder, seed, **settings):
        torch.manual_seed(seed)
        self.folder = str(folder)
        self.model = LlamaForCausalLM(LlamaConfig(vocab_size=32, max_position_embeddings=16, **SIZES))
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for layer in self.model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(self.model, mesh=mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        settings = {"model_save_format": "torch_save", "save_consolidated": False, **settings}
        config = CheckpointingConfig(checkpoint_dir=folder, model_repo_id="none", **settings)
        self.checkpointer = config.build(dp_rank=dist.get_rank(), tp_rank=0, pp_rank=0)

    def train(self, steps):
        """Return the losses of a global batch of four."""
        losses, world = [], dist.get_world_size()
        for step in steps:
            tokens = torch.randint(0, 32, (4, 8), generator=torch.Generator().manual_seed(step))[
                dist.get_rank() :: world
            ]
            loss = self.model(input_ids=tokens, labels=tokens).loss
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            total = loss.detach() / world
            dist.all_reduce(total)
            losses.append(total.item())
        return losses

    def save(self):
        self.checkpointer.save_model(self.model, self.folder)
        self.checkpointer.save_optimizer(self.optimizer, self.model, self.folder)
        self.checkpointer.maybe_wait_for_staging()

    def load(self):
        self.checkpointer.load_model(self.model, os.path.join(self.folder, "model"))
        self.checkpointer.load_optimizer(self.optimizer, self.model, self.folder)


def _save(folder, settings):
    if settings.pop("snapshots", True):
        use_snapshots()
        use_snapshots()  # once is enough
    # pinned memory needs an accelerator; the process does not
    checkpointing.DefaultStager = lambda: DefaultStager(StagingOptions(False, False, True, False))
    run = Run(folder, 1, **settings)
    before = run.train(range(2))
    run.save()
    after = run.train(range(2, 5))
    run.checkpointer.finalize()
    return before, after


def _load(folder, settings):
    use_snapshots()
    run = Run(folder, 2, **settings)
    run.load()
    losses = run.train(range(2, 5))
    run.checkpointer.close()
    return losses


@pytest.mark.parametrize("asynchronous", [False, True])
def test_automodel_resumes_exactly_and_on_another_world_size(tmp_path, asynchronous):
    folder = tmp_path / "epoch_0_step_2"
    (_, whole), _ = fork_ranks(2, tmp_path, _save, folder, {"is_async": asynchronous})
    for part in ("model", "optim"):
        assert Snapshot(folder / part).verify().ok
    assert fork_ranks(2, tmp_path, _load, folder, {})[0] == whole
    assert fork_ranks(1, tmp_path, _load, folder, {})[0] == pytest.approx(whole, abs=1e-5)


def test_automodel_with_safetensors_writes_the_model_itself(tmp_path):
    folder = tmp_path / "epoch_0_step_2"
    settings = {"model_save_format": "safetensors"}
    (_, whole), _ = fork_ranks(2, tmp_path, _save, folder, dict(settings))
    assert list((folder / "model").glob("*.safetensors"))
    assert Snapshot(folder / "optim").verify().ok
    assert fork_ranks(2, tmp_path, _load, folder, settings)[0] == whole


def test_automodel_loads_checkpoints_of_dcp(tmp_path):
    folder = tmp_path / "epoch_0_step_2"
    (_, whole), _ = fork_ranks(2, tmp_path, _save, folder, {"snapshots": False})
    assert (folder / "optim" / ".metadata").exists()
    assert fork_ranks(2, tmp_path, _load, folder, {})[0] == whole


def test_automodel_unknown_version_is_refused(monkeypatch):
    class Checkpointer(checkpointing.Checkpointer):
        def _do_load(self, state_dict, path):
            pass

    with pytest.raises(SnapshotError, match=r"has no method _do_load\(self, state_dict, .*written for version 0\.7"):
        use_snapshots(Checkpointer)
    monkeypatch.setitem(sys.modules, "nemo_automodel.components.checkpoint.checkpointing", None)
    with pytest.raises(MissingExtraError, match="nemo_automodel cannot be imported"):
        use_snapshots()
