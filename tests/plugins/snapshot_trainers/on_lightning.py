"""The plugin and the callback under the real Lightning. `test_lightning.py` runs this in a process of its own, which
imports it once."""

import importlib.util
import multiprocessing
import os
import shutil
import signal
import sys
import warnings
from collections import OrderedDict
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import lightning.pytorch as pl
    from lightning.pytorch.callbacks import ModelCheckpoint
    from lightning.pytorch.plugins.io import TorchCheckpointIO

import snapshot_trainers.lightning as interop
from snapshot import (
    KeepBest,
    KeepLatest,
    KeepSpread,
    KeepWithin,
    RNGState,
    Snapshot,
    SnapshotError,
    SnapshotManager,
    StateDict,
    TakeOptions,
)
from snapshot.errors import CancelledError, MissingExtraError, UnsafeObjectError
from snapshot_trainers.lightning import SnapshotCallback, SnapshotCheckpointIO
from tests.helpers.forked_ranks import die_at, fork_ranks, kill_fork, kill_ranks
from tests.helpers.states import expect_equal

pytestmark = [pytest.mark.filterwarnings("ignore:" + text) for text in (
    "The '.*_dataloader' does not have many workers",
    "Your `val_dataloader`'s sampler has shuffling enabled",
    "You defined a `validation_step` but have no `val_dataloader`",
    "You're resuming from a checkpoint that ended",
    ".*isinstance.treespec, LeafSpec.*",
    "The number of training batches",
    "Checkpoint directory .* exists and is not empty",
    "The dirpath has changed",
    "Be aware that when using `ckpt_path`",
    ".*there is no last checkpoint available",
)]  # fmt: skip
EXAMPLE = Path(__file__).parents[3] / "examples" / "lightning_trainer.py"
spec = importlib.util.spec_from_file_location("lightning_trainer", EXAMPLE)
example = importlib.util.module_from_spec(spec)
spec.loader.exec_module(example)
QUIET = {
    "accelerator": "cpu",
    "logger": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


def _rank(rank, folder, answers):
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "GROUP_RANK": "0",
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "TORCHELASTIC_RUN_ID": "test",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "1",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    warnings.simplefilter("ignore")
    store = dist.FileStore(f"{folder}/store", 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    options = {"strategy": "ddp", "devices": 2, "num_nodes": 1, "use_distributed_sampler": False}

    class Own(example.Model):
        def on_train_start(self):
            if not self.trainer.ckpt_path:
                torch.manual_seed(rank)  # each rank draws batches of its own

    example.Model = Own
    try:
        whole = example.train(folder / "whole", 20, **options)
        for steps in (12, 20):  # the group stays, as it would not in a job
            resumed = example.train(folder / "broken", steps, **options)
        assert resumed.losses == whole.losses[-10:]
        expect_equal(dict(whole.state_dict()), dict(resumed.state_dict()))
        checkpoint = SnapshotCheckpointIO().load_checkpoint(folder / "broken" / "step-20")  # each for itself
        expect_equal(dict(checkpoint["state_dict"]), dict(resumed.state_dict()))
        if rank == 0:  # as Lightning has it
            SnapshotCheckpointIO().save_checkpoint({"epoch": 1}, folder / "alone")
        answers.put((rank, None, resumed.losses))
    except BaseException as error:
        answers.put((rank, repr(error), None))
        raise


def test_lightning_ddp_resumes_exactly_with_random_numbers_per_rank(tmp_path):
    """First of all, while no thread has been started: what is forked then is sound."""
    context = multiprocessing.get_context("fork")
    answers = context.Queue()
    ranks = [context.Process(target=_rank, args=(rank, tmp_path, answers)) for rank in range(2)]
    for each in ranks:
        each.start()
    (_, first, one), (_, second, other) = sorted(answers.get(timeout=300) for _ in ranks)
    for each in ranks:
        each.join(20)
    assert first is None
    assert second is None
    assert one != other
    snapshot = Snapshot(tmp_path / "broken" / "step-20")
    assert snapshot.verify()
    assert {path.split("/")[1] for path in snapshot.get_manifest() if path.startswith("1/")} == {"rng", "loaders"}
    assert Snapshot(tmp_path / "alone").metadata.world_size == 1


def _ranks(folder, steps, doomed=None):
    """On each of two ranks. `doomed`: the one that is killed while step 10 is saved."""
    os.environ |= {"GROUP_RANK": "0", "TORCHELASTIC_RUN_ID": "test", "MASTER_PORT": "1"}
    if doomed == dist.get_rank():
        die_at("open", lambda path, *_: "step-10" in str(path) and "/data/" in str(path))
    torch.manual_seed(0)
    model = example.Model()
    model.on_train_start = lambda: torch.manual_seed(dist.get_rank()) if not model.trainer.ckpt_path else None
    callback = SnapshotCallback(folder, every_n_steps=5, keep=2, options=TakeOptions(timeout=3))
    trainer = pl.Trainer(
        max_steps=steps, max_epochs=-1, callbacks=[callback], plugins=[SnapshotCheckpointIO()],
        enable_checkpointing=False, strategy="ddp", devices=2, num_nodes=1, use_distributed_sampler=False, **QUIET,
    )  # fmt: skip
    trainer.fit(model, ckpt_path=callback.latest())
    return model.losses


@pytest.mark.smoke
def test_lightning_rank_killed_resumes_from_the_snapshot_before(tmp_path):
    whole = fork_ranks(2, tmp_path, _ranks, tmp_path / "whole", 15)
    folder = tmp_path / "run"
    ended = kill_ranks(2, tmp_path, _ranks, folder, 15, 1)
    assert ended[1] == -signal.SIGKILL
    assert ended[0] != 0
    assert [each.parent.name for each in folder.glob("*/.snapshot_metadata")] == ["step-5"]
    assert fork_ranks(2, tmp_path, _ranks, folder, 15) == [each[5:] for each in whole]
    assert steps_in(folder) == ["step-10", "step-15"]
    assert not list(folder.rglob(".take-*"))


class Noting(pl.LightningModule):
    """A model that notes the batches that it is trained on, and a random number in each step."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.noted = []

    def training_step(self, batch):
        batches = batch if isinstance(batch, dict) else {"": batch}
        drawn = torch.rand(()).item()
        self.noted.append((self.current_epoch, {name: each.tolist() for name, each in batches.items()}, drawn))
        return self.layer(next(iter(batches.values())).float().view(-1, 1) / 100).sum()

    def validation_step(self, batch):
        pass

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.01)


def shuffled(**options):
    return torch.utils.data.DataLoader(range(22), **{"batch_size": 2, "shuffle": True, **options})


class Noted:
    """Runs that note their batches, in a folder."""

    def __init__(self, folder, make=shuffled, **options):
        self.folder, self.make = folder, make
        self.options = {"max_epochs": -1, "enable_checkpointing": False, **QUIET, **options}

    def run(self, name, steps, resumed=None, **options):
        """Train up to a step, save there, and return what was noted."""
        torch.manual_seed(0)
        callback = SnapshotCallback(self.folder / name, every_n_steps=steps, **options)
        model, trainer = Noting(), pl.Trainer(
            max_steps=steps, callbacks=[callback], plugins=[SnapshotCheckpointIO()], **self.options
        )  # fmt: skip
        loaders = self.make()
        loaders = loaders if isinstance(loaders, tuple) else (loaders, None)
        trainer.fit(model, *loaders, ckpt_path=resumed and self.folder / name / f"step-{resumed}")
        return model.noted

    def expect_exact(self, *steps):
        """Expect a run that was interrupted at all steps but the last to be the same as one that was not."""
        resumed, noted = None, []
        for each in steps:
            noted += self.run("broken", each, resumed)
            resumed = each
        assert noted == self.run("whole", steps[-1])
        return noted


def validated(**options):
    return shuffled(**options), torch.utils.data.DataLoader(range(4), batch_size=2)


def weighted():
    generator = torch.Generator().manual_seed(3)
    sampler = torch.utils.data.WeightedRandomSampler([1.0] * 22, 22, replacement=False, generator=generator)
    return shuffled(shuffle=False, sampler=sampler)


WITHIN = {
    # how the loaders are made, options of the trainer, the batches of an epoch on one rank and on two
    "plain": (shuffled, {}, (11, 6)),
    "workers": (partial(shuffled, num_workers=1), {}, (11, 6)),
    "limit": (shuffled, {"limit_train_batches": 5}, (5, 5)),
    "weighted": (weighted, {}, (11, 6)),
    "validated": (validated, {"val_check_interval": 2}, (11, 6)),
    "accumulated": (shuffled, {"accumulate_grad_batches": 2}, (6, 3)),
}


def _within(name, folder, **more):
    make, options, batches = WITHIN[name]
    epoch = batches["devices" in more]
    # in the second epoch, once more in it, in the third one, at its end, and in the fifth one
    steps = (epoch + 1, epoch + 2, 2 * epoch + 1, 3 * epoch, 4 * epoch + 2)
    if name == "validated" or "devices" in more:
        steps = steps[1:4] if name == "workers" else steps[:3]
    return Noted(folder / name, make, **options, **more).expect_exact(*steps)


def _within_on_ranks(folder):
    os.environ |= {"GROUP_RANK": "0", "TORCHELASTIC_RUN_ID": "test", "MASTER_PORT": "1"}
    options = {"strategy": "ddp", "devices": 2, "num_nodes": 1}
    return {name: _within(name, folder, **options) for name in ("plain", "workers", "weighted", "accumulated")}


def test_lightning_ddp_within_an_epoch_goes_on_with_the_next_batch(tmp_path):
    one, other = fork_ranks(2, tmp_path, _within_on_ranks, tmp_path)
    for name, noted in one.items():
        first = [sample for epoch, batch, _ in [*noted, *other[name]] if epoch == 0 for sample in batch[""]]
        assert sorted(first) == list(range(22)), name


def _save_on_ranks(folder, steps, resumed=None):
    os.environ |= {"GROUP_RANK": "0", "TORCHELASTIC_RUN_ID": "test", "MASTER_PORT": "1"}
    shuffled_alone = {"strategy": "ddp", "devices": 2, "num_nodes": 1, "use_distributed_sampler": False}
    return Noted(folder, **shuffled_alone).run("ranks", steps, resumed)


def test_lightning_other_ranks_begin_the_epoch_again_with_a_warning(tmp_path, caplog):
    fork_ranks(2, tmp_path, _save_on_ranks, tmp_path, 13)
    Noted(tmp_path).run("ranks", 14, 13)
    assert "training loader 0 begins the epoch again" in caplog.text
    assert "the number of ranks was 2, and is 1 now" in caplog.text


def _keep_last(folder, steps, asynchronous):
    """Train with Lightning's own checkpoints, from the last one on. Return how many steps that took."""

    class Steady(example.Model):
        def training_step(self, batch):
            self.log("score", float(self.global_step))
            return super().training_step(batch)

    keeper = ModelCheckpoint(
        folder, filename="{step}", save_top_k=1, monitor="score", mode="max", save_last=True, every_n_train_steps=1
    )
    plugin = SnapshotCheckpointIO(asynchronous=asynchronous, options=TakeOptions(durable=False))
    return len(fitted(steps, [keeper], [plugin], "last", Steady).losses)


def _die_in(event, part, folder, steps, asynchronous):
    die_at(event, lambda path, *_: part in str(path) and "/data/" in str(path))
    _keep_last(folder, steps, asynchronous)


def test_lightning_checkpoint_io_removes_an_interrupted_checkpoint(tmp_path):
    crashes = [
        # where a crash is, whether saves are asynchronous, steps that are trained again, a checkpoint of the first run
        # that is whole, and that Lightning does not know: it did not save `last` after it
        ("open", "last.ckpt", False, 4, "step=1.ckpt"),
        ("open", "last.ckpt", True, 4, "step=1.ckpt"),
        ("open", "step=1.ckpt", False, 4, None),
        ("open", "step=1.ckpt", True, 4, None),
        ("os.remove", "step=1.ckpt", False, 3, "step=2.ckpt"),
    ]
    for number, (event, part, asynchronous, *_) in enumerate(crashes):  # before this process has threads
        kill_fork(_die_in, event, part, tmp_path / f"{number}", 3, asynchronous)
    for number, (_, _, asynchronous, steps, whole) in enumerate(crashes):
        folder = tmp_path / f"{number}"
        assert _keep_last(folder, 4, asynchronous) == steps
        left = sorted(each.name for each in folder.iterdir())
        assert left == sorted(["last.ckpt", "step=4.ckpt", *([whole] if whole else [])]), folder
        assert all(Snapshot(each).verify().ok for each in folder.iterdir()), folder


@pytest.mark.smoke
def test_lightning_example_resumes_exactly(tmp_path, capsys):
    example.main(tmp_path)
    assert "bit for bit" in capsys.readouterr().out
    assert sorted(path.name for path in (tmp_path / "broken").iterdir() if Snapshot(path).exists()) == [
        "step-15",
        "step-20",
    ]
    snapshot = Snapshot(tmp_path / "broken" / "step-20")
    assert snapshot.verify()
    assert snapshot.read_object("0/hyper_parameters/width") == 32
    assert snapshot.read_object("0/global_step") == 20
    assert "0/state_dict/layers.0.weight" in snapshot.get_manifest()
    assert not [path for path, entry in snapshot.get_manifest().items() if type(entry).__name__ == "ObjectEntry"]


def test_lightning_without_rng_state_would_not_resume_exactly(tmp_path, monkeypatch):
    whole = example.train(tmp_path / "whole", 10)
    monkeypatch.setattr(SnapshotCallback, "on_train_start", lambda *_: None)
    example.train(tmp_path / "broken", 7)
    assert example.train(tmp_path / "broken", 10).losses != whole.losses[-5:]


class Shuffled(example.Model):
    """Whose batches come in an order that is drawn anew for each epoch."""

    def train_dataloader(self):
        data = torch.arange(8 * 16, dtype=torch.float32).view(8, 16) / 100
        return torch.utils.data.DataLoader(data, batch_size=2, shuffle=True)


def fitted(steps, callbacks, plugins, ckpt_path=None, model=Shuffled, **options):
    torch.manual_seed(0)
    made = model()
    options = {"enable_checkpointing": any(isinstance(each, ModelCheckpoint) for each in callbacks), **options}
    trainer = pl.Trainer(max_steps=steps, max_epochs=-1, callbacks=callbacks, plugins=plugins, **QUIET, **options)
    trainer.fit(made, ckpt_path=ckpt_path)
    return made


def test_lightning_resume_at_the_end_of_an_epoch_uses_the_next_order(tmp_path):
    def run(folder, steps):
        callback = SnapshotCallback(folder, every_n_steps=4)
        return fitted(steps, [callback], [SnapshotCheckpointIO()], callback.latest())

    whole = run(tmp_path / "whole", 12)
    run(tmp_path / "broken", 8)
    resumed = run(tmp_path / "broken", 12)
    assert resumed.losses == whole.losses[-4:]
    expect_equal(dict(whole.state_dict()), dict(resumed.state_dict()))


@pytest.mark.smoke
@pytest.mark.parametrize("asynchronous", [False, True])
def test_lightning_checkpoint_io_saves_model_checkpoints_as_snapshots(tmp_path, asynchronous):
    def run(folder, plugin):
        keeper = ModelCheckpoint(folder, filename="{step}", save_top_k=1, monitor=None, every_n_train_steps=4)
        fitted(8, [keeper], [plugin])
        path = folder / "step=8.ckpt"
        assert [each.name for each in folder.iterdir()] == [path.name]
        return fitted(12, [], [plugin], str(path)), path

    ours, path = run(
        tmp_path / "ours", SnapshotCheckpointIO(asynchronous=asynchronous, options=TakeOptions(durable=False))
    )
    theirs, file = run(tmp_path / "theirs", TorchCheckpointIO())
    expect_equal(dict(ours.state_dict()), dict(theirs.state_dict()))
    assert ours.losses == theirs.losses
    assert Snapshot(path).verify()
    one = SnapshotCheckpointIO().load_checkpoint(path)
    other = SnapshotCheckpointIO().load_checkpoint(file)  # which is no snapshot: read as before
    for checkpoint in (one, other):
        checkpoint["callbacks"] = str(checkpoint["callbacks"]).replace("ours", "").replace("theirs", "")
    expect_equal(one, other)
    SnapshotCheckpointIO().remove_checkpoint(file)
    SnapshotCheckpointIO().remove_checkpoint(path)
    assert not file.exists()
    assert not path.exists()


def everything():
    return {
        "epoch": 3,
        "state_dict": OrderedDict([("a/b", torch.ones(3, dtype=torch.bfloat16)), ("b", torch.tensor(2))]),
        "loops": {"fit_loop": {"progress": {"total": 5, "ratio": 0.1, "none": None, "done": False}}},
        "callbacks": {"ModelCheckpoint{'monitor': None}": {"best": torch.tensor(float("inf")), "paths": {}}},
        "optimizer_states": [{"state": {0: {"step": torch.tensor(3.0)}}, "param_groups": [{"betas": (0.9, 0.99)}]}],
        "lr_schedulers": [],
        "hparams_name": "kwargs",
        "array": np.arange(4, dtype=np.int16),
        "size": torch.Size([1, 2]),
        "bytes": b"\0\1",
    }


def test_lightning_checkpoint_io_keeps_the_types_of_a_checkpoint(tmp_path):
    plugin = SnapshotCheckpointIO()
    plugin.save_checkpoint(everything(), tmp_path / "c")
    expect_equal(plugin.load_checkpoint(tmp_path / "c"), everything())
    plugin.save_checkpoint({"epoch": 4}, tmp_path / "c")
    assert plugin.load_checkpoint(tmp_path / "c", map_location="cpu") == {"epoch": 4}
    plugin.remove_checkpoint(tmp_path / "c")
    plugin.remove_checkpoint(tmp_path / "c")  # as Lightning's own
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(FileNotFoundError):
        plugin.load_checkpoint(tmp_path / "c")
    Snapshot.take(tmp_path / "other", {"s": StateDict(x=1)})
    with pytest.raises(SnapshotError, match="not a Lightning checkpoint"):
        plugin.load_checkpoint(tmp_path / "other")


def test_lightning_checkpoint_io_removes_and_replaces_links_only(tmp_path):
    plugin = SnapshotCheckpointIO()
    plugin.save_checkpoint({"epoch": 1}, tmp_path / "one.ckpt")
    link = tmp_path / "last.ckpt"
    link.symlink_to("one.ckpt")
    plugin.save_checkpoint({"epoch": 2}, link)
    assert plugin.load_checkpoint(tmp_path / "one.ckpt") == {"epoch": 1}
    assert plugin.load_checkpoint(link) == {"epoch": 2}
    plugin.remove_checkpoint(link)
    link.symlink_to("one.ckpt")
    plugin.remove_checkpoint(link)
    assert not link.is_symlink()
    assert plugin.load_checkpoint(tmp_path / "one.ckpt") == {"epoch": 1}


def test_lightning_remove_checkpoint_keeps_files_of_others(tmp_path):
    plugin = SnapshotCheckpointIO()
    plugin.save_checkpoint({"epoch": 1}, tmp_path / "one.ckpt")
    (tmp_path / "one.ckpt" / "notes.txt").write_text("mine")
    plugin.remove_checkpoint(tmp_path / "one.ckpt")
    assert [each.name for each in tmp_path.rglob("*")] == ["one.ckpt", "notes.txt"]


def test_lightning_remove_checkpoint_acts_as_soon_as_the_new_one_is_committed(tmp_path):
    plugin = SnapshotCheckpointIO(asynchronous=True)
    plugin.save_checkpoint({"epoch": 1}, tmp_path / "one")
    plugin.save_checkpoint({"state_dict": torch.zeros(8 << 20)}, tmp_path / "two")
    plugin.remove_checkpoint(tmp_path / "one")
    plugin._named.result(60)
    assert sorted(each.name for each in tmp_path.iterdir()) in ([".unfinished", "two"], ["two"])
    plugin.teardown()
    assert [each.name for each in tmp_path.iterdir()] == ["two"]


def test_lightning_callback_removes_leftovers_of_unknown_steps(tmp_path):
    Snapshot.take(tmp_path / "step-1", {"s": StateDict(x=torch.ones(3))})
    (tmp_path / "step-1" / ".snapshot_metadata").unlink()  # as when a removal was interrupted
    callback = SnapshotCallback(tmp_path, every_n_steps=2, keep=1)
    fitted(4, [callback], [SnapshotCheckpointIO()])
    assert [each.name for each in tmp_path.iterdir()] == ["step-4"]


class Odd:
    """What only a pickle can hold."""

    def __eq__(self, other):
        return type(other) is Odd

    __hash__ = None


def test_lightning_checkpoint_io_names_objects_that_need_allow_pickle(tmp_path):
    with pytest.warns(UserWarning, match=r"stored as pickles.*\s+hyper_parameters/odd \(.*Odd\)"):
        SnapshotCheckpointIO().save_checkpoint({"hyper_parameters": {"odd": Odd()}}, tmp_path / "c")
    with pytest.raises(UnsafeObjectError, match="hyper_parameters/odd"):
        SnapshotCheckpointIO().load_checkpoint(tmp_path / "c")
    for plugin, options in (
        (SnapshotCheckpointIO(allow_pickle=True), {}),
        (SnapshotCheckpointIO(), {"weights_only": False}),
    ):
        assert plugin.load_checkpoint(tmp_path / "c", **options) == {"hyper_parameters": {"odd": Odd()}}


def test_lightning_checkpoint_io_asynchronous_failure_keeps_the_old_checkpoint(tmp_path):
    plugin = SnapshotCheckpointIO(asynchronous=True)
    plugin.save_checkpoint({"epoch": 1}, tmp_path / "one")
    plugin.save_checkpoint({"state_dict": torch.zeros(8 << 20)}, tmp_path / "two")
    plugin.remove_checkpoint(tmp_path / "one")
    assert plugin._pending.cancel()  # as any fault in the background would end it
    with pytest.raises(CancelledError):
        plugin.teardown()
    assert SnapshotCheckpointIO().load_checkpoint(tmp_path / "one") == {"epoch": 1}
    assert not Snapshot(tmp_path / "two").exists()


def test_lightning_callback_finishes_a_pending_save_if_training_fails(tmp_path):
    class Fails(Shuffled):
        def training_step(self, batch):
            if self.global_step == 3:
                raise ValueError("a fault of the model's")
            return super().training_step(batch)

    callback = SnapshotCallback(tmp_path, every_n_seconds=0)
    with pytest.raises(ValueError, match="a fault of the model's"):
        fitted(8, [callback], [SnapshotCheckpointIO()], model=Fails)
    assert callback.latest() == str(tmp_path / "step-3")
    assert Snapshot(tmp_path / "step-3").verify()


def test_lightning_callback_latest_ignores_abandoned_and_suspect_steps(tmp_path, caplog):
    callback = SnapshotCallback(tmp_path, every_n_steps=1)
    fitted(4, [callback], [SnapshotCheckpointIO()])
    again = SnapshotCallback(tmp_path, every_n_steps=1)
    shutil.rmtree(tmp_path / "step-3")
    fitted(3, [again], [SnapshotCheckpointIO()], str(tmp_path / "step-2"))
    assert (tmp_path / "step-4").exists()
    assert again.latest() == str(tmp_path / "step-3")
    bad = torch.nn.Linear(2, 2)
    with torch.no_grad():
        bad.weight.fill_(float("nan"))
    Snapshot.take(tmp_path / "step-9", {"m": bad, "o": torch.optim.SGD(bad.parameters(), lr=0.1)})
    assert again.latest() == str(tmp_path / "step-3")
    assert "step-9: passed over: is suspect" in caplog.text


def test_lightning_callback_refuses_invalid_arguments_and_strategies(tmp_path):
    with pytest.raises(ValueError, match="every_n_steps"):
        SnapshotCallback(tmp_path)
    with pytest.raises(ValueError, match="keep must be at least 1"):
        SnapshotCallback(tmp_path, every_n_steps=1, keep=0)
    with pytest.raises(SnapshotError, match=r"plugins=\[SnapshotCheckpointIO"):
        fitted(1, [SnapshotCallback(tmp_path, every_n_steps=1)], [])
    assert SnapshotCallback(tmp_path / "none", every_n_steps=1).latest() is None
    with pytest.raises(SnapshotError, match=r"latest\(\) supports local folders only"):
        SnapshotCallback("s3://bucket/run", every_n_steps=1).latest()

    class FSDPStrategy:
        checkpoint_io = SnapshotCheckpointIO()

    class Trainer:
        strategy = FSDPStrategy()

    with pytest.raises(SnapshotError, match="FSDPStrategy does not hold the whole model"):
        SnapshotCallback(tmp_path, every_n_steps=1).setup(Trainer(), None, "fit")


def test_lightning_callback_does_not_save_during_gradient_accumulation(tmp_path):
    def run(folder, steps):
        callback = SnapshotCallback(folder, every_n_seconds=0)
        options = {"accumulate_grad_batches": 2}
        return fitted(steps, [callback], [SnapshotCheckpointIO()], callback.latest(), example.Model, **options)

    whole = run(tmp_path / "whole", 6)
    assert len(whole.losses) == 12
    assert len(list((tmp_path / "whole").iterdir())) == 6
    run(tmp_path / "broken", 3)
    resumed = run(tmp_path / "broken", 6)
    assert resumed.losses == whole.losses[-6:]
    expect_equal(dict(whole.state_dict()), dict(resumed.state_dict()))


def test_lightning_callback_saves_the_rng_state(tmp_path):
    fitted(4, [SnapshotCallback(tmp_path, every_n_steps=4)], [SnapshotCheckpointIO()])
    expected = torch.rand(3)
    torch.manual_seed(99)
    Snapshot(tmp_path / "step-4").restore({"rng": RNGState()})
    assert torch.rand(3).equal(expected)


def steps_in(folder):
    return sorted(path.name for path in folder.iterdir() if Snapshot(path).exists())


def kept_two(folder, steps, ckpt_path=None):
    callback = SnapshotCallback(folder, every_n_steps=1, keep=2, options=TakeOptions(durable=False))
    fitted(steps, [callback], [SnapshotCheckpointIO()], ckpt_path or callback.latest())


def test_lightning_callback_keep_counts_snapshots_of_resumed_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "run"
    for steps in (4, 7, 9):
        kept_two(folder, steps)
        assert steps_in(folder) == [f"step-{steps - 1}", f"step-{steps}"]
    kept_two(folder, 10, "run/step-8")  # the same folder, in other words; and the step after it is saved again
    assert steps_in(folder) == ["step-10", "step-9"]


@pytest.mark.parametrize("among", [None, KeepLatest(9) | KeepBest("score", mode="max")])
def test_lightning_callback_keep_within_keeps_what_fits(tmp_path, among):
    class Rated(example.Model):
        def training_step(self, batch, index=None):
            loss = super().training_step(batch)
            self.log("score", 1.0)
            return loss

    options = TakeOptions(durable=False)
    first = SnapshotCallback(tmp_path, every_n_steps=1, keep=None, options=options)
    fitted(1, [first], [SnapshotCheckpointIO()], model=Rated)
    one = sum(each.stat().st_size for each in tmp_path.rglob("*") if each.is_file())
    keep = KeepWithin(int(2.5 * one), among)
    callback = SnapshotCallback(tmp_path, every_n_steps=1, keep=keep, options=options)
    fitted(6, [callback], [SnapshotCheckpointIO()], str(tmp_path / "step-1"), model=Rated)
    assert steps_in(tmp_path) == ["step-5", "step-6"]
    assert ("score" in SnapshotManager(tmp_path, signals=()).metrics(6)) == (among is not None)


@pytest.mark.smoke
def test_lightning_callback_keep_policy_keeps_best_and_pinned_snapshots(tmp_path):
    class Rated(example.Model):
        def training_step(self, batch, index=None):
            loss = super().training_step(batch)
            self.log("score", float(-abs(self.trainer.global_step - 2)))
            return loss

    keep = KeepLatest(1) | KeepBest("score", mode="max")
    callback = SnapshotCallback(tmp_path, every_n_steps=1, keep=keep, options=TakeOptions(durable=False))
    fitted(6, [callback], [SnapshotCheckpointIO()], model=Rated)
    assert steps_in(tmp_path) == ["step-3", "step-6"]
    with SnapshotManager(tmp_path, signals=()) as manager:
        assert manager.best("score", "max") == 3
        manager.pin(3)
    callback = SnapshotCallback(tmp_path, every_n_steps=1, keep=1, options=TakeOptions(durable=False))
    fitted(8, [callback], [SnapshotCheckpointIO()], str(tmp_path / "step-6"), model=Rated)
    assert steps_in(tmp_path) == ["step-3", "step-8"]


def test_lightning_callback_resumed_from_another_folder_removes_nothing_there(tmp_path):
    kept_two(tmp_path / "base", 3)
    kept_two(tmp_path / "tuned", 7, str(tmp_path / "base" / "step-3"))
    assert steps_in(tmp_path / "tuned") == ["step-6", "step-7"]
    assert steps_in(tmp_path / "base") == ["step-2", "step-3"]


def test_lightning_callback_keep_in_a_restarted_run_counts_each_snapshot_once(tmp_path):
    callback = SnapshotCallback(tmp_path, every_n_steps=1, keep=3, options=TakeOptions(durable=False))
    for steps in (2, 4):  # the second writes the first's again
        fitted(steps, [callback], [SnapshotCheckpointIO()])
    assert steps_in(tmp_path) == ["step-2", "step-3", "step-4"]


def test_lightning_callback_keep_in_a_shorter_restarted_run_keeps_its_snapshots(tmp_path):
    callback = SnapshotCallback(tmp_path, every_n_steps=1, keep=2, options=TakeOptions(durable=False))
    fitted(6, [callback], [SnapshotCheckpointIO()])
    assert steps_in(tmp_path) == ["step-5", "step-6"]
    fitted(1, [callback], [SnapshotCheckpointIO()])
    assert steps_in(tmp_path) == ["step-1", "step-6"]
    fitted(3, [callback], [SnapshotCheckpointIO()])
    assert steps_in(tmp_path) == ["step-2", "step-3"]


def test_pytorch_lightning_package_is_supported(tmp_path, monkeypatch):
    for name in [name for name in sys.modules if name.partition(".")[0] == "lightning"]:
        monkeypatch.delitem(sys.modules, name)  # as where only the other has been imported
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        other = pytest.importorskip("pytorch_lightning")
    anew = importlib.util.module_from_spec(interop.__spec__)
    interop.__spec__.loader.exec_module(anew)
    plugin, callback = anew.SnapshotCheckpointIO, anew.SnapshotCallback
    assert issubclass(plugin, other.plugins.io.CheckpointIO)
    assert issubclass(callback, other.Callback)

    class Model(other.LightningModule):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(16, 1)

        def training_step(self, batch):
            return self.layer(batch).square().mean()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

        train_dataloader = example.Model.train_dataloader

    trainer = other.Trainer(
        max_steps=4, callbacks=[callback(tmp_path, every_n_steps=2)], plugins=[plugin()], enable_checkpointing=False,
        **QUIET,
    )  # fmt: skip
    trainer.fit(Model())
    assert Snapshot(tmp_path / "step-4").read_object("0/global_step") == 4


def test_lightning_missing_package_is_named(monkeypatch):
    for name in [name for name in sys.modules if name.partition(".")[0] in ("lightning", "pytorch_lightning")]:
        monkeypatch.delitem(sys.modules, name)

    class Missing:
        def find_spec(self, name, path=None, target=None):
            if name in ("lightning", "pytorch_lightning"):
                raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    monkeypatch.setattr(sys, "meta_path", [Missing(), *sys.meta_path])
    anew = importlib.util.module_from_spec(interop.__spec__)
    with pytest.raises(MissingExtraError, match="install the extra 'lightning'"):
        interop.__spec__.loader.exec_module(anew)


@pytest.mark.parametrize("name", WITHIN)
def test_lightning_within_an_epoch_goes_on_with_the_next_batch(tmp_path, name, caplog):
    noted = _within(name, tmp_path)
    first = [sample for epoch, batch, _ in noted if epoch == 0 for sample in batch[""]]
    assert sorted(first) == list(range(22)) or name == "limit"
    assert "again" not in caplog.text


@pytest.mark.parametrize("mode", ["min_size", "max_size_cycle"])
@pytest.mark.smoke
def test_lightning_several_loaders_go_on_with_their_next_batches(tmp_path, mode):
    def make():
        return pl.utilities.CombinedLoader({"long": shuffled(), "short": shuffled(batch_size=4)}, mode)

    epoch = 6 if mode == "min_size" else 11
    Noted(tmp_path, make).expect_exact(epoch + 1, epoch + 5, 2 * epoch, 3 * epoch)


def test_lightning_loader_that_also_validates_goes_on_with_the_next_batch(tmp_path):
    def make():
        loader = shuffled()
        return loader, loader

    Noted(tmp_path, make, val_check_interval=3).expect_exact(13, 16, 33)


def test_lightning_generator_of_a_loader_goes_on_at_the_end_of_an_epoch(tmp_path):
    def make():
        return shuffled(num_workers=1, generator=torch.Generator().manual_seed(3))

    Noted(tmp_path, make).expect_exact(11, 15, 22, 33)


def test_lightning_loader_of_another_batch_size_is_refused_within_an_epoch(tmp_path, caplog):
    Noted(tmp_path).run("run", 11)
    Noted(tmp_path).run("run", 13, 11)
    other = Noted(tmp_path, partial(shuffled, batch_size=1))
    with pytest.raises(SnapshotError, match=r"training loader 0 .* 11 batches, and now has 22; .* data_order=False"):
        other.run("run", 15, 13)
    other.run("run", 15, 13, data_order=False)
    other.run("run", 15, 11)
    assert "again" not in caplog.text  # nothing is lost at the end of an epoch


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter(range(22))


def test_lightning_loader_without_a_known_place_begins_the_epoch_again_with_a_warning(tmp_path, caplog):
    streamed = Noted(tmp_path, lambda: torch.utils.data.DataLoader(Stream(), batch_size=2))
    streamed.run("run", 13)
    assert [batch for _, batch, _ in streamed.run("run", 14, 13)] == [{"": [0, 1]}]
    assert "training loader 0 begins the epoch again" in caplog.text
    assert "its dataset is iterable" in caplog.text


class Keeping(torch.utils.data.DataLoader):
    """A loader that keeps its place itself."""

    place = skipped = 0

    def __iter__(self):
        skipped, self.skipped = self.skipped, 0
        for number, batch in enumerate(super().__iter__()):
            if number >= skipped:
                self.place = number + 1
                yield batch

    def state_dict(self):
        return {"place": self.place}

    def load_state_dict(self, state):
        self.skipped = state["place"]


def test_lightning_loader_with_a_state_is_left_to_lightning(tmp_path, caplog):
    runs = Noted(tmp_path, lambda: Keeping(range(22), batch_size=2))
    noted = runs.run("run", 13) + runs.run("run", 20, 13)
    assert [batch[""][0] for _, batch, _ in noted] == [*range(0, 22, 2), *range(0, 18, 2)]
    assert "again" not in caplog.text


def test_lightning_trainer_is_left_as_it_was_after_a_fit(tmp_path):
    for fails in (False, True):
        callback, model, loader = SnapshotCallback(tmp_path, every_n_steps=1), Noting(), shuffled()
        trainer = pl.Trainer(
            max_steps=1, callbacks=[callback], plugins=[SnapshotCheckpointIO()], enable_checkpointing=False, **QUIET
        )
        before = type(loader), dict(vars(loader))
        if fails:
            model.on_train_end = lambda: 1 / 0
            with pytest.raises(ZeroDivisionError):
                trainer.fit(model, loader)
        else:
            trainer.fit(model, loader)
        assert "process_dataloader" not in vars(trainer.strategy) or fails
        assert (type(loader), dict(vars(loader))) == before


class Few(pl.LightningModule):
    """A model that trains for some steps."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(2, 2)

    def training_step(self, batch, index):
        return self.layer(batch).sum()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)

    def train_dataloader(self):
        return torch.utils.data.DataLoader(torch.ones(4, 2), batch_size=2)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_lightning_checkpoint_io_with_a_memory_root(asynchronous):
    import fsspec

    def trainer():
        plugin = SnapshotCheckpointIO(asynchronous=asynchronous)
        root = f"memory://lightning-{asynchronous}"
        callbacks = [ModelCheckpoint(save_last=True)]
        return pl.Trainer(default_root_dir=root, max_epochs=2, plugins=[plugin], callbacks=callbacks, **QUIET)

    first, model = trainer(), Few()
    first.fit(model)
    saved = first.checkpoint_callback.best_model_path, first.checkpoint_callback.last_model_path
    for path in saved:
        assert path.startswith("memory://")
        assert fsspec.filesystem("memory").exists(path)
        again, other = trainer(), Few()
        again.fit(other, ckpt_path=path)
        assert again.global_step == 4
        assert torch.equal(other.layer.weight, model.layer.weight)
    first.strategy.remove_checkpoint(saved[0])
    assert not fsspec.filesystem("memory").exists(f"{saved[0]}/.snapshot_metadata")


@pytest.mark.parametrize("keep", [KeepWithin("1GB"), KeepWithin("1GB", KeepLatest(3)), KeepSpread()])
def test_lightning_callback_keeps_steps_of_an_earlier_fit_that_a_limit_says_nothing_about(tmp_path, keep):
    model = Few()
    settings = {"plugins": [SnapshotCheckpointIO()], **QUIET, "enable_checkpointing": False}
    callback = SnapshotCallback(str(tmp_path), every_n_steps=1, keep=keep)
    for epochs in (2, 1):  # the steps of the second fit have lower numbers
        pl.Trainer(max_epochs=epochs, callbacks=[callback], **settings).fit(model)
    assert {each.name for each in tmp_path.glob("step-*")} >= {"step-2", "step-3", "step-4"}


def test_lightning_callback_with_a_memory_root():
    callback = SnapshotCallback("memory://lightning-callback", every_n_steps=1)
    settings = {"plugins": [SnapshotCheckpointIO()], "callbacks": [callback], **QUIET, "enable_checkpointing": False}
    model, other = Few(), Few()
    pl.Trainer(max_epochs=1, **settings).fit(model)
    again = pl.Trainer(max_epochs=1, **settings)
    again.fit(other, ckpt_path="memory://lightning-callback/step-2")
    assert again.global_step == 2
    assert torch.equal(other.layer.weight, model.layer.weight)


@pytest.mark.parametrize("wrong", ["how to save", 3, ["a"]])
def test_lightning_checkpoint_io_storage_options_must_be_a_mapping(tmp_path, wrong):
    trainer = pl.Trainer(max_epochs=1, plugins=[SnapshotCheckpointIO()], default_root_dir=tmp_path, **QUIET)
    trainer.fit(Few())
    with pytest.raises(TypeError, match=r"^storage_options must be a mapping, got (a|an) (str|int|list)$"):
        trainer.save_checkpoint(tmp_path / "x.ckpt", storage_options=wrong)
    assert not (tmp_path / "x.ckpt").exists()


def test_lightning_end_threads_ends_all_threads(tmp_path):
    import threading

    from snapshot.testing import end_threads

    end_threads()  # of other tests
    before = set(threading.enumerate())
    for root in (str(tmp_path), "memory://lightning-threads"):
        trainer = pl.Trainer(
            max_epochs=1, plugins=[SnapshotCheckpointIO(asynchronous=True)], default_root_dir=root, **QUIET
        )
        trainer.fit(Few())
        end_threads()
        assert {each.name for each in set(threading.enumerate()) - before if each.name.startswith("snapshot")} == set()
