"""The backend `snapshot` of vLLM's weight transfer, with the contract in `vllm_contract`: pytest on_vllm.py."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from snapshot import SnapshotError
from tests.plugins.snapshot_publish import vllm_contract as vllm

vllm.install()

from snapshot_publish import vllm_plugin  # noqa: E402

vllm_plugin.register()
vllm_plugin.register()  # vLLM calls it in each process, and may do so again

from snapshot_publish.vllm import SnapshotTrainerInitInfo  # noqa: E402


class Trained(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.q, self.k = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)
        self.out = nn.Linear(16, 8, bias=False)

    def step(self):
        with torch.no_grad():
            self.k.weight[0] += 1
            self.out.weight.mul_(0.5)


class Run:
    def __init__(self, folder, **publish):
        self.store, self.model = folder / "store", Trained()
        self.workers = [vllm.Worker(), vllm.Worker()]
        self.client = vllm.Client(*self.workers)
        info = SnapshotTrainerInitInfo(rank=0, url=str(self.store), folder=str(folder / "memory"), publish=publish)
        self.sender = vllm.trainers.trainer_init(info, client=self.client, source=vllm.ModuleSource(self.model))

    def all_show(self, trained):
        return all(each.model.shows(trained) and not each.model.reloading for each in self.workers)


@pytest.fixture
def run(tmp_path):
    return Run(tmp_path)


def test_vllm_workers_receive_each_version_exactly(run):
    for version in range(1, 5):
        run.sender.send_weights()
        assert run.all_show(run.model)
        assert run.client.version == str(version)
        run.model.step()
        assert not run.all_show(run.model)
    assert {len([*each.glob("*.safetensors")]) for each in run.store.glob("weight_v*")} == {1}
    deltas = [(each / "model.safetensors.index.json").read_text().count("base_version") for each in run.store.iterdir()]
    assert sorted(deltas) == [0, 1, 1, 1], "the first version is complete"


def test_vllm_damaged_version_changes_no_worker(run):
    run.sender.send_weights()
    before = Trained()
    run.model.step()

    def damage(method, given):
        if method == "start_weight_update":
            (file,) = (run.store / "weight_v000002").glob("*.safetensors")
            data = bytearray(file.read_bytes())
            data[-3] ^= 1
            file.write_bytes(data)

    run.client.before = damage
    with pytest.raises(SnapshotError):
        run.sender.send_weights()
    assert run.all_show(before)
    run.client.before = lambda method, given: None
    run.model.step()
    run.sender.send_weights()  # a complete version, since the one before cannot be a base
    assert run.all_show(run.model)


def test_vllm_no_worker_loads_if_one_cannot_pull(run):
    run.sender.send_weights()
    before = Trained()
    run.model.step()
    broken = run.workers[1].engine
    reader, broken._reader = broken._reader, None
    with pytest.raises(SnapshotError, match="not initialized"):
        run.sender.send_weights()
    assert run.all_show(before)
    broken._reader = reader
    run.sender.send_weights()
    assert run.all_show(run.model)


def test_vllm_unpublished_version_is_an_error(run):
    run.sender.send_weights()
    worker = run.workers[0]
    worker.start_weight_update()
    with pytest.raises(SnapshotError, match="no version 7 is published"):
        worker.update_weights({"version": 7})
    assert run.all_show(run.model)


def test_vllm_whole_tensors_are_copied(tmp_path):
    run = Run(tmp_path)
    run.sender.source = vllm.ModuleSource(run.model, local=False)
    run.sender.send_weights()
    assert run.all_show(run.model)


def test_vllm_versions_are_in_memory_until_the_last_worker_closes(tmp_path):
    one, other = vllm.Worker(), vllm.Worker()
    info = SnapshotTrainerInitInfo(rank=0, url=str(tmp_path / "store"))
    client = vllm.Client(one, other)
    model = Trained()
    vllm.trainers.trainer_init(info, client=client, source=vllm.ModuleSource(model)).send_weights()
    assert one.model.shows(model)
    folder = one.engine._reader.current().parent
    assert folder.stat().st_mode & 0o077 == 0
    one.engine.shutdown()
    assert folder.is_dir()
    other.engine.shutdown()
    assert not folder.exists()


def test_vllm_trainer_ranks_publish_their_pieces(tmp_path):
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.plugins.snapshot_publish.on_vllm", str(tmp_path), str(rank)],
            cwd=Path(__file__).parents[3],
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    errors = [each.communicate(timeout=300)[1] for each in ranks]
    assert [each.returncode for each in ranks] == [0, 0], errors


def test_vllm_unknown_version_is_refused():
    script = (
        "from tests.plugins.snapshot_publish import vllm_contract as vllm\n"
        "vllm.WeightTransferEngine.receive_weights = lambda self, info, stream: None\n"
        "vllm.install()\n"
        "import snapshot_publish.vllm"
    )
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert "receive_weights must have the parameters (update_info), got (info, stream)" in ended.stderr
    assert "use vLLM 0.33" in ended.stderr


def trainer(folder, rank):
    """A rank of a trainer with FSDP2: it has pieces of the tensors."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo", store=dist.FileStore(str(folder / "ranks"), 2), rank=rank, world_size=2)
    model, whole = Trained(), Trained()
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    targets = [vllm.Worker()] if rank == 0 else []
    for local in (True, False):
        store = folder / f"store-{local}"
        info = SnapshotTrainerInitInfo(rank=rank, url=str(store), folder=str(folder / f"memory-{local}"))
        client = vllm.Client(*targets)
        sender = vllm.trainers.trainer_init(info, client=client, source=vllm.ModuleSource(model, local))
        sender.send_weights()
        whole.step()
        with torch.no_grad():
            for mine, full in zip(model.parameters(), whole.parameters(), strict=True):
                mine.to_local().copy_(full.chunk(2)[rank])
        client.before = lambda method, given: 1 / 0
        if rank == 0:
            with pytest.raises(ZeroDivisionError):
                sender.send_weights()
        else:
            sender.send_weights()
        client.before = lambda method, given: None
        sender.send_weights()
        assert not targets or targets[0].model.shows(whole)
    dist.destroy_process_group()


if __name__ == "__main__":
    trainer(Path(sys.argv[1]), int(sys.argv[2]))
