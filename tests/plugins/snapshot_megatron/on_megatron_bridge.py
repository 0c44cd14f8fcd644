"""The manager in the real checkpointing of Megatron-Bridge, with real objects of Megatron-core on CPU ranks.

Its module of checkpoints is real; what it imports beside that, such as models and loggers, is a stand-in.
`test_frameworks.py` runs this, with a folder of megatron-bridge on the path."""

import importlib
import importlib.machinery
import os
import sys
import types
import warnings
from pathlib import Path
from types import SimpleNamespace

os.environ["TORCHDYNAMO_DISABLE"] = "1"

import pytest
import torch
import torch.distributed as dist
import yaml

from tests.helpers import missing_packages

_PACKAGES = ("megatron.bridge", "megatron.bridge.training", "megatron.bridge.training.utils", "megatron.bridge.utils")
_REAL = (
    "training.checkpointing", "training.state", "training.callbacks", "training.utils.checkpoint_utils",
    "training.utils.config_utils", "training.utils.log_utils", "utils.common_utils", "utils.import_utils",
    "utils.slurm_utils", "utils.instantiate_utils",
)  # fmt: skip
_ABSENT = ("modelopt", "tensorboard", "omegaconf")


class Bridge(missing_packages.StandIns):
    """Finds stand-ins for what Bridge imports, and lets its packages import nothing themselves."""

    def __init__(self, folder):
        super().__init__(*_ABSENT)
        self.folder = folder

    def find_spec(self, fullname, path=None, target=None):
        own = fullname.startswith(("megatron.bridge.", "torch.utils.tensorboard")) or fullname == "megatron.bridge"
        if fullname in {f"megatron.bridge.{name}" for name in _REAL}:
            return None
        if own or fullname.partition(".")[0] in self.names:
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec):
        return types.ModuleType(spec.name) if spec.name in _PACKAGES else super().create_module(spec)

    def exec_module(self, module):
        if module.__name__ in _PACKAGES:
            module.__path__ = [str(Path(self.folder, *module.__name__.split(".")))]


def _folder():
    spec = importlib.machinery.PathFinder.find_spec("megatron.bridge", [f"{each}/megatron" for each in sys.path])
    assert spec, "megatron-bridge is not on the path"
    return Path(spec.origin).parents[2]


sys.meta_path.insert(0, Bridge(_folder()))
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    checkpointing = importlib.import_module("megatron.bridge.training.checkpointing")
    from megatron.bridge.training.state import TrainState
    from megatron.bridge.utils.instantiate_utils import register_allowed_target_prefix
    from megatron.core.dist_checkpointing.mapping import ShardedObject
    from megatron.core.rerun_state_machine import RerunMode, RerunState, get_rerun_state_machine

from snapshot import Snapshot, SnapshotError, SnapshotExistsError, TakeOptions
from snapshot.saved import SavedObject
from snapshot_megatron import bridge as megatron_bridge
from snapshot_megatron.adapter import MegatronState
from snapshot_megatron.bridge import SnapshotCheckpointManager
from tests.helpers import megatron_dirs
from tests.helpers.forked_ranks import fork_ranks
from tests.helpers.megatron_dirs import Split, sharded
from tests.plugins.snapshot_megatron.megatron_models import STEPS, Layout, build

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(900)]
register_allowed_target_prefix("snapshot_megatron.")  # which versions since 0.5 require


class One:
    """A group of one rank, or of those of data parallelism."""

    def __init__(self, size=1, number=0):
        self._size, self._number = size, number

    def size(self):
        return self._size

    def rank(self):
        return self._number


class Model(torch.nn.Module):
    """A model whose sharded state is that of `megatron_dirs`."""

    def __init__(self, split, blank):
        super().__init__()
        self.state, self.live = sharded(split, blank=blank)
        self.loaded = None

    def sharded_state_dict(self, **options):
        return self.state["model"]

    def load_state_dict(self, state, strict=True):
        self.loaded = state


class Optimizer:
    """An optimizer with state that all ranks share, and an object of each rank."""

    def __init__(self, split, blank):
        self.step, self.split, self.loaded = 0 if blank else 5, split, None

    def sharded_state_dict(self, model_state, **options):
        mine = ShardedObject("optimizer.mine", self.split.rank, (dist.get_world_size(),), (self.split.rank,))
        return {"step": self.step, "betas": (0.9, 0.95), "mine": mine}

    def load_state_dict(self, state):
        self.loaded = state

    def reload_model_params(self, **options):
        pass


class Scheduler:
    def __init__(self):
        self.steps = 0

    def state_dict(self):
        return {"num_steps": self.steps}

    def load_state_dict(self, state):
        self.steps = state["num_steps"]


def start(folder, split, *, blank=False, kind="SnapshotCheckpointManager", **changes):
    """Return Bridge's manager, and the contexts of a save and of a load."""
    checkpoint = SimpleNamespace(
        save=str(folder), load=str(folder), ckpt_format="torch_dist", async_save=False, save_rng=True, load_rng=False,
        save_optim=True, load_optim=True, finetune=False, pretrained_checkpoint=None, non_persistent_ckpt_type=None,
        non_persistent_global_ckpt_dir=None, most_recent_k=-1, fully_parallel_save=False, fully_parallel_load=False,
        ckpt_assume_constant_structure=False, storage_writers_per_rank=1, save_tokenizer_assets=False, ckpt_step=None,
        exit_on_missing_checkpoint=False, async_strategy="mcore", also_save_hf_checkpoint=False,
        dist_ckpt_strictness="assume_ok_unexpected", load_main_params_from_ckpt=False,
        dist_ckpt_optim_fully_reshardable=False, distrib_optim_fully_reshardable_mem_efficient=False,
        custom_manager_class=kind and f"snapshot_megatron.bridge.{kind}",
    )  # fmt: skip
    vars(checkpoint).update(changes)
    sizes = {"tensor_model_parallel_size": split.tensor, "pipeline_model_parallel_size": split.pipeline}
    config = SimpleNamespace(
        checkpoint=checkpoint, optimizer=SimpleNamespace(use_distributed_optimizer=False), peft=None, dataset=None,
        rng=SimpleNamespace(data_parallel_random_init=False), dist=SimpleNamespace(use_decentralized_pg=True),
        model=SimpleNamespace(fp16=False, bf16=False, **sizes),
        logger=SimpleNamespace(log_progress=False, mlflow_log_artifacts=False),
        ddp=SimpleNamespace(use_megatron_fsdp=False), tokenizer=None,
    )  # fmt: skip
    saved = {"model": sizes, "checkpoint": {"save_optim": True, "save_rng": True, "fully_parallel_save": False}}
    config.to_yaml = lambda path: Path(path).write_text(yaml.safe_dump(saved))
    state = SimpleNamespace(
        cfg=config, train_state=TrainState(), async_calls_queue=None, wandb_logger=None, mlflow_logger=None,
        comet_logger=None,
    )  # fmt: skip
    groups = SimpleNamespace(
        dp_cp=One(split.data, split.data_rank), dp=One(split.data, split.data_rank), ep=One(),
        tp=One(split.tensor, split.tensor_rank), pp=One(split.pipeline, split.stage),
    )  # fmt: skip
    checkpointing.get_pg_collection = lambda model: groups
    torch.cuda.get_rng_state = torch.get_rng_state  # there is no accelerator
    checkpointing.update_num_microbatches = lambda **_: None
    model, optimizer, scheduler = Model(split, blank), Optimizer(split, blank), Scheduler()
    parts = {"state": state, "model": [model], "optimizer": optimizer, "opt_param_scheduler": scheduler}
    save = checkpointing.CheckpointSaveContext(**parts, num_floating_point_operations_so_far=12)
    return checkpointing.create_checkpoint_manager(checkpoint), save, checkpointing.CheckpointLoadContext(**parts)


def save(manager, context, step):
    context.state.train_state.step = step
    context.opt_param_scheduler.steps = 10 * step
    manager.save(context, *([None] if hasattr(checkpointing, "CallbackManager") and _takes_callbacks() else []))


def _takes_callbacks():
    return checkpointing.DefaultCheckpointManager.save.__code__.co_argcount > 2


def unwrapped(value):
    if isinstance(value, dict):
        return {key: unwrapped(child) for key, child in value.items()}
    if isinstance(value, torch.Tensor):
        return value
    return getattr(value, "data", value)


def expect_loaded(context, split, step):
    """Raise unless model, optimizer, scheduler and counters are those of the save."""
    model, optimizer = context.model[0], context.optimizer
    expected = unwrapped(sharded(split)[0]["model"])
    assert model.loaded.keys() == expected.keys()
    for name, value in expected.items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(model.loaded[name], value), name
        else:
            assert str(model.loaded[name]) == str(value), name
    assert (optimizer.loaded["step"], optimizer.loaded["betas"]) == (5, (0.9, 0.95))
    assert context.opt_param_scheduler.steps == 10 * step
    assert context.state.train_state.step == step


def _save(folder, split, steps, options):
    split = Split(**split, rank=dist.get_rank())
    manager, context, _ = start(folder, split, **options)
    for step in steps:
        save(manager, context, step)
        manager.finalize_async_saves(context.state)
    manager.finalize_async_saves(context.state, blocking=True, terminate=True)
    return sorted(path.name for path in folder.glob("iter_*"))


def _load(folder, split, step, options):
    split = Split(**split, rank=dist.get_rank())
    manager, _, context = start(folder, split, blank=True, **options)
    assert manager.load(context) == (step, 12)
    expect_loaded(context, split, step)
    return context.optimizer.loaded["mine"]


@pytest.mark.parametrize("asynchronous", [False, True])
def test_megatron_bridge_saves_and_loads_snapshots(tmp_path, asynchronous):
    options = {"async_save": True} if asynchronous else {"most_recent_k": 2}
    saved = fork_ranks(2, tmp_path, _save, tmp_path / "run", {"tensor": 2}, (1, 2, 3), options)
    assert saved == [[f"iter_000000{step}" for step in ((1, 2, 3) if asynchronous else (2, 3))]] * 2
    assert fork_ranks(2, tmp_path, _load, tmp_path / "run", {"tensor": 2}, 3, {}) == [0, 1]
    snapshot = Snapshot(tmp_path / "run" / "iter_0000003")
    assert snapshot.verify().ok
    assert "0/megatron/embedding.weight" in snapshot.get_manifest()
    assert not [each for each in snapshot.get_manifest().values() if getattr(each, "serializer", "") == "torch_save"]


@pytest.mark.parametrize(("world", "split"), [(1, {}), (2, {"pipeline": 2}), (4, {"tensor": 2, "pipeline": 2})])
def test_megatron_bridge_loads_on_another_split_and_world_size(tmp_path, world, split):
    fork_ranks(2, tmp_path, _save, tmp_path / "run", {"tensor": 2, "padded": 16}, (4,), {})
    fork_ranks(world, tmp_path, _load_without_objects, tmp_path / "run", split, 4)


def _load_without_objects(folder, split, step):
    split = Split(**split, rank=dist.get_rank())
    manager, _, context = start(folder, split, blank=True)
    Optimizer.sharded_state_dict = lambda self, state, **_: {"step": 0, "betas": None}
    assert manager.load(context) == (step, 12)
    expect_loaded(context, split, step)


def _fail(folder, asynchronous):
    split = Split(tensor=2, rank=dist.get_rank())
    manager, context, load = start(folder, split, async_save=asynchronous)
    save(manager, context, 1)
    manager.finalize_async_saves(context.state, blocking=True)
    if split.rank == 0:
        (folder / "iter_0000002").mkdir()
        (folder / "iter_0000002" / "data").write_text("in the way")
    dist.barrier()
    with pytest.raises(SnapshotError, match="data"):  # noqa: PT012 - of one call or of the next
        save(manager, context, 2)
        manager.finalize_async_saves(context.state, blocking=True)
    dist.barrier()
    assert (folder / "latest_checkpointed_iteration.txt").read_text() == "1"
    manager, _, load = start(folder, split, blank=True)
    assert manager.load(load) == (1, 12)
    expect_loaded(load, split, 1)
    save(manager, context, 3)  # training can go on after a failure
    manager.finalize_async_saves(context.state, blocking=True)
    dist.barrier()
    assert (folder / "latest_checkpointed_iteration.txt").read_text() == "3"


@pytest.mark.parametrize("asynchronous", [False, True])
def test_megatron_bridge_trackers_never_name_an_uncommitted_checkpoint(tmp_path, asynchronous):
    fork_ranks(2, tmp_path, _fail, tmp_path / "run", asynchronous)


def _wait_together(folder):
    """Hold one rank's write: no rank may finalize before it is committed."""
    split = Split(tensor=2, rank=dist.get_rank())
    manager, context, _ = start(folder, split, async_save=True)
    save(manager, context, 1)
    steps = 0
    while manager._saves:
        manager.finalize_async_saves(context.state)
        steps += 1
    numbers = [None] * 2
    dist.all_gather_object(numbers, steps)
    assert numbers[0] == numbers[1]  # all ranks finalize in one step
    assert (folder / "latest_checkpointed_iteration.txt").read_text() == "1"


def test_megatron_bridge_finalizes_in_the_same_step_on_all_ranks(tmp_path):
    fork_ranks(2, tmp_path, _wait_together, tmp_path / "run")


def _read_own(folder):
    split = Split(tensor=2, rank=dist.get_rank())
    state = {"model": sharded(split)[0]["model"], "checkpoint_version": 3.0, "iteration": 6}
    state |= {"optimizer": Optimizer(split, False).sharded_state_dict({}), "opt_param_scheduler": {"num_steps": 60}}
    megatron_dirs.save(state, folder / "iter_0000006", content_metadata={"kind": "test"})
    manager, _, context = start(folder, split, blank=True)
    if split.rank == 0:
        counters = {**TrainState(step=6).state_dict(), "floating_point_operations_so_far": torch.tensor(12)}
        torch.save(counters, folder / "latest_train_state.pt")
        context.state.cfg.to_yaml(folder / "iter_0000006" / "run_config.yaml")
    dist.barrier()
    with megatron_dirs.without_cuda():
        manager.load(context)
    expect_loaded(context, split, 6)
    with pytest.raises(SnapshotExistsError):  # it would be lost
        save(manager, start(folder, split)[1], 6)


def test_megatron_bridge_own_checkpoints_are_loaded_and_never_replaced(tmp_path):
    (tmp_path / "run").mkdir()
    fork_ranks(2, tmp_path, _read_own, tmp_path / "run")


def _rerun(folder):
    split = Split(rank=0)
    manager, context, _ = start(folder, split)
    machine = get_rerun_state_machine()
    machine.mode, machine.state = RerunMode.VALIDATE_RESULTS, RerunState.RERUNNING_AGAIN_FROM_CHECKPOINT
    save(manager, context, 1)
    common = checkpointing.dist_checkpointing.load_common_state_dict(folder / "iter_0000001")
    assert common["rerun_state_machine"]["state"] is RerunState.RERUNNING_AGAIN_FROM_CHECKPOINT
    assert checkpointing.dist_checkpointing.load_content_metadata(preloaded_state_dict=common) is not None


def test_megatron_bridge_enums_are_restored_as_members(tmp_path):
    fork_ranks(1, tmp_path, _rerun, tmp_path / "run")


def test_megatron_bridge_unknown_classes_are_not_imported(tmp_path):
    storage = megatron_bridge._Storage(None)
    for name, member in (("os.path.Evil", "a"), ("megatron.core.rerun_state_machine.RerunMode", "evil")):
        folder = tmp_path / member
        state = {"a": SavedObject("Enum", name, {"name": member, "value": 1})}
        Snapshot.take(folder, {megatron_bridge.KEY: MegatronState(state)})
        with pytest.raises(SnapshotError, match=rf"/a: .*{name.rpartition('.')[2]}.*{member}"):
            storage.load_common_state_dict(folder)


def _options(folder):
    class Manager(SnapshotCheckpointManager):
        options = TakeOptions(durable=False, replicated=["nothing"])

    megatron_bridge.Own = Manager
    manager, context, _ = start(folder, Split(rank=0), kind="Own")
    save(manager, context, 1)
    with pytest.raises(SnapshotError, match="must be 'torch_dist', got 'fsdp_dtensor'"):
        start(folder, Split(rank=0), ckpt_format="fsdp_dtensor")


def test_megatron_bridge_subclass_may_set_options(tmp_path):
    fork_ranks(1, tmp_path, _options, tmp_path / "run")


def test_megatron_bridge_unknown_version_is_refused(monkeypatch):
    monkeypatch.setattr(checkpointing, "dist_checkpointing", SimpleNamespace(save=lambda state: None))
    with pytest.raises(SnapshotError, match=r"has no save\(sharded_state_dict, .*written for Megatron-Bridge 0\.4"):
        SnapshotCheckpointManager(SimpleNamespace(ckpt_format="torch_dist"))


class JobModel(torch.nn.Module):
    """The model of a job with the distributed optimizer."""

    def __init__(self, job):
        super().__init__()
        self.job = job

    def sharded_state_dict(self, **options):
        return self.job.model_state()["model"]

    def load_state_dict(self, state, strict=True):
        assert state.keys()


def start_job(folder, layout, **changes):
    """Return a job, and what `start` does for it: with a real model, optimizer and scheduler."""
    job = build(layout)
    data = dist.get_world_size() // layout.tensor // layout.pipeline
    split = Split(layout.tensor, layout.pipeline, data, dist.get_rank())
    manager, save, load = start(folder, split, **changes)
    save.state.cfg.optimizer.use_distributed_optimizer = True
    for context in (save, load):
        context.model, context.optimizer, context.opt_param_scheduler = [JobModel(job)], job.optimizer, job.scheduler
    return job, manager, save, load


def _save_job(folder, layout, asynchronous):
    job, manager, context, _ = start_job(folder, layout, async_save=asynchronous)
    job.start()
    job.train()
    context.state.train_state.step = STEPS
    for optimizer in job.optimizers():  # what would gather, or is of one split
        optimizer.sharded_state_dict = optimizer.get_parameter_state_dp_zero = None
    manager.save(context, *([None] if hasattr(checkpointing, "CallbackManager") and _takes_callbacks() else []))
    manager.finalize_async_saves(context.state, blocking=True, terminate=True)


def _load_job(folder, layout):
    job, manager, _, context = start_job(folder, layout)
    assert manager.load(context) == (STEPS, 12)
    job.expect(STEPS)
    assert job.scheduler.num_steps == STEPS
    job.train(1, first=STEPS)
    job.expect(STEPS + 1)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_megatron_bridge_loads_the_distributed_optimizer_in_another_split(tmp_path, asynchronous):
    fork_ranks(2, tmp_path, _save_job, tmp_path / "run", Layout(bucket=3000), asynchronous)
    for world, layout in ((2, Layout()), (2, Layout(tensor=2)), (4, Layout(tensor=2, pipeline=2))):
        fork_ranks(world, tmp_path, _load_job, tmp_path / "run", layout)
    names = Snapshot(tmp_path / "run" / f"iter_{STEPS:07d}").get_manifest()
    assert "0/megatron/optimizer.state.exp_avg.embedding.word_embeddings.weight" in names
