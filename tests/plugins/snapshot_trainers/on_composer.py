"""The callback in the real Composer, in one process and on ranks. `test_frameworks.py` runs this."""

import importlib.util
import os
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace

os.environ["CUDA_VISIBLE_DEVICES"] = ""

import pytest
import torch

from tests.helpers.missing_packages import stand_in_for

stand_in_for("torchvision", "mcli", "PIL")  # for images, and for MosaicML's cloud
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from composer import Trainer
    from composer.utils import checkpoint
    from composer.utils import dist as composer_dist
    from torch.utils.data import DataLoader, TensorDataset

from snapshot import Snapshot, SnapshotError, TakeOptions
from snapshot.distributed.group import ranks_of
from snapshot.errors import MissingExtraError
from snapshot_trainers import composer as adapter
from snapshot_trainers.composer import SnapshotSaver
from tests.helpers.forked_ranks import fork_ranks

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(900)]


def _example():
    path = Path(__file__).parents[3] / "examples" / "composer_training.py"
    spec = importlib.util.spec_from_file_location("composer_training", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


example = _example()


def start(saver=None, fail_at=None, dropout=0.1, world=1, load="latest", own=None, **options):
    """Return a Trainer of four batches of eight in each of two epochs, and its losses."""
    torch.manual_seed(0)
    model, data = example.Model(), TensorDataset(torch.randn(32, 16), torch.randn(32, 1))
    model.net[1].p = dropout
    losses = example.Losses(fail_at)
    load_path = saver.latest() if load == "latest" and saver else load if load != "latest" else None
    trainer = Trainer(
        model=model,
        train_dataloader=DataLoader(
            data, batch_size=8 // world, sampler=composer_dist.get_sampler(data, shuffle=world == 1 and dropout > 0)
        ),
        optimizers=torch.optim.AdamW(model.parameters(), lr=1e-2),
        max_duration="2ep", seed=1, callbacks=[losses, *([saver] if saver else [])], load_path=load_path,
        progress_bar=False, device="cpu", save_folder=own, save_interval="2ba", save_overwrite=True, **options,
    )  # fmt: skip
    return trainer, losses


def train(*arguments, **options):
    trainer, losses = start(*arguments, **options)
    try:
        trainer.fit()
    except RuntimeError as error:
        assert str(error) == "a fault"  # noqa: PT017 - the training's own
    finally:
        trainer.close()
    return losses.values


# Before all else, while no thread has been started: what is forked then is sound.


def _save(folder):
    return train(SnapshotSaver(folder, "2ba"), fail_at=5, dropout=0.0, world=2)


def _resume(folder, world):
    losses = train(SnapshotSaver(folder, "2ba"), dropout=0.0, world=world)
    assert world == 1 or not ranks_of(None).connected()[1]._calls  # no call goes on, whose heartbeat is sent
    return losses


def _whole(world):
    return train(dropout=0.0, world=world)


def test_composer_resumes_exactly_and_on_another_world_size(tmp_path):
    whole = fork_ranks(2, tmp_path, _whole, 2)
    fork_ranks(2, tmp_path, _save, tmp_path / "run")
    Snapshot(tmp_path / "run" / "step-4").copy(tmp_path / "other" / "step-4")
    assert fork_ranks(2, tmp_path, _resume, tmp_path / "run", 2) == [each[4:] for each in whole]
    alone = fork_ranks(1, tmp_path, _resume, tmp_path / "other", 1)[0]
    average = [sum(pair) / 2 for pair in zip(*whole, strict=True)][4:]
    assert alone == pytest.approx(average, abs=1e-5)


def _fail(folder, asynchronous):
    trainer, _ = start(SnapshotSaver(folder, "2ba", asynchronous=asynchronous), load=None, dropout=0.0, world=2)
    try:
        trainer.fit()
    except SnapshotError as error:
        message = str(error)
    composer_dist.barrier()  # no rank has ended: the others have learnt of the failure
    return message


@pytest.mark.parametrize("asynchronous", [False, True])
def test_composer_failed_save_is_reported_on_all_ranks(tmp_path, asynchronous):
    (tmp_path / "run" / "step-4").mkdir(parents=True)
    (tmp_path / "run" / "step-4" / "data").write_text("in the way")
    messages = fork_ranks(2, tmp_path, _fail, tmp_path / "run", asynchronous)
    assert all("step-4" in each for each in messages), messages


def test_composer_example_resumes_exactly(tmp_path, capsys):
    example.main(tmp_path)
    assert "bit for bit" in capsys.readouterr().out
    assert sorted(each.name for each in (tmp_path / "broken").glob("step-*")) == ["step-10", "step-12", "step-8"]
    snapshot = Snapshot(tmp_path / "broken" / "step-8")
    assert snapshot.verify().ok
    assert not [each for each in snapshot.get_manifest().values() if getattr(each, "serializer", "") == "torch_save"]


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("at", [3, 4, 5, 7])
def test_composer_resumes_exactly_at_any_batch(tmp_path, at, asynchronous):
    whole = train()
    saver = SnapshotSaver(tmp_path / "run", "1ba", asynchronous=asynchronous, options=TakeOptions(durable=False))
    train(saver, fail_at=at + 1)
    saver = SnapshotSaver(tmp_path / "run", "1ba")
    assert saver.latest() == str(tmp_path / "run" / f"step-{at}")
    assert train(saver) == whole[at:]


def test_composer_failed_save_is_not_the_latest_and_fails_the_next_save(tmp_path):
    saver = SnapshotSaver(tmp_path / "run", "2ba")
    (tmp_path / "run" / "step-4").mkdir(parents=True)
    (tmp_path / "run" / "step-4" / "data").write_text("in the way")
    trainer, losses = start(saver, load=None)
    with pytest.raises(SnapshotError, match="data"):
        trainer.fit()
    trainer.close()
    assert len(losses.values) == 6
    assert saver.latest() == str(tmp_path / "run" / "step-2")


def test_composer_own_checkpoints_and_load_options_still_work(tmp_path):
    whole = train(own=str(tmp_path / "own"))
    saver = SnapshotSaver(tmp_path / "run", "4ba")
    [own] = map(str, (tmp_path / "own").glob("*-ba4-rank0.pt"))
    assert train(saver, load=own) == whole[4:]
    trainer, _ = start(saver, load_weights_only=True)
    trained = trainer.state.model.net[0].weight
    assert torch.equal(trained, Snapshot(saver.latest()).read_object("state/model/net.0.weight"))
    assert trainer.state.timestamp.batch == 0
    trainer.close()
    trainer, _ = start(saver, load_ignore_keys=["state/model/*", "rng"])
    assert not torch.equal(trainer.state.model.net[0].weight, trained)
    assert trainer.state.timestamp.batch == 8
    trainer.close()


def test_composer_keep_keeps_the_newest_snapshots(tmp_path):
    train(SnapshotSaver(tmp_path / "run", "1ba", keep=2))
    assert sorted(each.name for each in (tmp_path / "run").glob("step-*")) == ["step-7", "step-8"]


def test_composer_sharded_models_and_unknown_versions_are_refused(tmp_path, monkeypatch):
    saver = SnapshotSaver(tmp_path)
    with pytest.raises(SnapshotError, match="sharded by FSDP or TP"):
        saver.init(SimpleNamespace(fsdp_config=SimpleNamespace()), None)
    with pytest.raises(SnapshotError, match="folder must be a folder that all ranks share, got s3://bucket"):
        SnapshotSaver("s3://bucket/run")
    monkeypatch.setattr(checkpoint, adapter._LOADER, lambda path: None)
    with pytest.raises(SnapshotError, match=r"has no _torch_load_with_validation\(.*written for Composer 0\.32"):
        SnapshotSaver(tmp_path)


def test_composer_missing_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "composer", None)
    spec = importlib.util.spec_from_file_location("again", adapter.__file__)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    with pytest.raises(MissingExtraError, match="composer cannot be imported"):
        module.SnapshotSaver("run")
