"""Ray Train v2 with real workers: reports, restarts after failures, and another number of workers.

`test_frameworks.py` runs this in a process of its own, which starts Ray once."""

import os
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parents[3] / "examples"
os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
os.environ["PYTHONPATH"] = os.pathsep.join([*filter(None, sys.path), str(EXAMPLES)])  # for the workers
sys.path.append(str(EXAMPLES))

import pyarrow.fs
import pytest
import ray
import ray_training as example
from ray.train import Checkpoint, FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer
from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer

from snapshot import Snapshot, SnapshotError, StateDict, TakeOptions
from snapshot.errors import MissingExtraError
from snapshot_trainers import ray as adapter

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(900)]


@pytest.fixture(scope="module", autouse=True)
def cluster():
    ray.init(num_cpus=4, include_dashboard=False, object_store_memory=100 * 1024 * 1024, log_to_driver=False)
    yield
    ray.shutdown()


@pytest.mark.slow
def test_ray_example_restarts_with_another_number_of_workers(tmp_path, capsys):
    example.main(tmp_path)
    assert "bit for bit" in capsys.readouterr().out
    for folder in (tmp_path / "whole").glob("checkpoint_2*"):
        assert Snapshot(folder).verify().ok
        assert Snapshot(folder).metadata.world_size == 2
        assert {path.split("/")[0] for path in Snapshot(folder).get_manifest()} == {"0"}  # each value once


def spoiled(config):
    """Train two steps. The second save of the first attempt cannot be written."""
    from ray.train import collective, get_context

    progress = StateDict(step=0, attempts=0)
    adapter.restore({"progress": progress})
    first = progress["step"] == 0
    broadcast, storage = collective.broadcast_from_rank_zero, get_context().get_storage()

    def spoil(name):
        name = broadcast(name)
        if first and progress["step"] == 2 and get_context().get_world_rank() == 0:
            folder = Path(storage.build_checkpoint_path_from_name(name))
            folder.mkdir()
            (folder / "data").write_text("in the way")
        return name

    collective.broadcast_from_rank_zero = spoil
    try:
        while progress["step"] < 3:
            progress["step"] += 1
            progress["attempts"] += 1
            options = TakeOptions(replicated=["**"])
            adapter.report(
                {"step": progress["step"]}, {"progress": progress}, asynchronous=True, options=options
            ).wait()
    finally:
        collective.broadcast_from_rank_zero = broadcast


def test_ray_failed_background_save_is_never_resumed_from(tmp_path):
    trainer = TorchTrainer(
        spoiled,
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig("run", str(tmp_path), failure_config=FailureConfig(max_failures=1)),
    )
    result = trainer.fit()
    assert [each["step"] for _, each in result.best_checkpoints] == [1, 2, 3]
    last = adapter.open_checkpoint(result.checkpoint)
    assert last.get_state_dict_for_key("progress") == {"step": 3, "attempts": 3}  # those of the failure are not there
    committed = [folder for folder in (tmp_path / "run").glob("checkpoint_2*") if Snapshot(folder).exists()]
    assert len(committed) == 3


def alone(config):
    adapter.report({}, {"progress": StateDict(step=0)})


@pytest.mark.slow
def test_ray_workers_without_a_process_group_are_refused(tmp_path):
    trainer = DataParallelTrainer(
        alone, scaling_config=ScalingConfig(num_workers=2), run_config=RunConfig("run", str(tmp_path))
    )
    with pytest.raises(Exception, match="2 workers must form one process group"):
        trainer.fit()


def test_ray_unknown_storages_and_versions_are_refused(tmp_path, monkeypatch):
    files = pyarrow.fs.SubTreeFileSystem(str(tmp_path), pyarrow.fs.LocalFileSystem())
    with pytest.raises(SnapshotError, match="must be a local or shared folder, S3 or GCS, got subtree"):
        adapter.open_checkpoint(Checkpoint("run/checkpoint", files))
    monkeypatch.setattr("snapshot.interop.framework_checks.version", lambda _: "3.0.1")
    with pytest.raises(SnapshotError, match=r"ray must be of version 2, got 3\.0\.1"):
        adapter.restore({})
    monkeypatch.undo()
    monkeypatch.setattr("ray.train.report", lambda metrics, *, checkpoint=None: None)  # that of Train v1
    with pytest.raises(SnapshotError, match=r"without checkpoint_dir_name, .*check RAY_TRAIN_V2_ENABLED"):
        adapter.restore({})


def test_ray_missing_package_is_named(monkeypatch):
    def missing(name):
        raise adapter.expect_version.__globals__["PackageNotFoundError"](name)

    monkeypatch.setattr("snapshot.interop.framework_checks.version", missing)
    with pytest.raises(MissingExtraError, match="needs ray 2, which is not installed"):
        adapter.restore({})
