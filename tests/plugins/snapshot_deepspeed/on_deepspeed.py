"""The checkpoint engine in the real DeepSpeed on CPU ranks, resumed to the same bits: ZeRO, a pipeline and experts.

`test_frameworks.py` runs this in a process of its own, which imports DeepSpeed once."""

import dataclasses
import importlib.util
import io
import os
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path

os.environ.update(DS_ACCELERATOR="cpu", DS_BUILD_OPS="0", CUDA_VISIBLE_DEVICES="")

import pytest
import torch
import torch.distributed as dist

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import deepspeed
    from deepspeed.checkpoint import ds_to_universal
    from deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointCommitInfo, CheckpointEngine
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler

# It is optional, and compiled on first use: a rank that is killed meanwhile leaves a lock that others wait for.
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False

from snapshot import (
    CorruptSnapshotError,
    Snapshot,
    SnapshotError,
    SnapshotExistsError,
    SnapshotNotFoundError,
    StateDict,
    TakeOptions,
    Target,
)
from snapshot_deepspeed import adapter
from snapshot_deepspeed.adapter import FOLDER, SnapshotCheckpointEngine, write_files
from tests.helpers.forked_ranks import die_at, fork_ranks, kill_ranks
from tests.plugins.snapshot_deepspeed.write_deepspeed_files import Model, config, make_experts, make_groups

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(900)]
SLOW = pytest.mark.slow
"""Only `tests/soak/test_frameworks.py` runs them."""


def make_pipeline():
    layers = [deepspeed.pipe.LayerSpec(torch.nn.Linear, 4, 4) for _ in range(4)]
    return deepspeed.pipe.PipelineModule(layers, num_stages=2, loss_fn=lambda y, t: (y - t).float().square().sum())


def make_engine(kind, **options):
    """Return an engine of DeepSpeed. `kind`: a stage of ZeRO, "experts" or "pipeline"."""
    deepspeed.init_distributed("gloo")
    torch.manual_seed(dist.get_rank() if kind == "experts" else 0)
    more = {"bf16": kind != 0, **options.pop("config", {})}
    model = {"experts": make_experts, "pipeline": make_pipeline}.get(kind, Model)()
    groups = make_groups(model) if isinstance(model, Model) else model.parameters()
    if kind == "experts":
        from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer

        groups = split_params_into_different_moe_groups_for_optimizer({"params": list(groups), "name": "all"})
    optimizer = torch.optim.AdamW(groups, lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    stage = {"experts": 2, "pipeline": 1}.get(kind, kind)
    made = deepspeed.initialize(model=model, optimizer=optimizer, lr_scheduler=scheduler, config=config(stage, **more))
    engine = made[0]
    if options.pop("adapted", True):
        engine.checkpoint_engine = SnapshotCheckpointEngine(**options)
    return engine


def train(engine, kind, steps):
    """Return the losses. Each rank has data of its own."""
    losses = []
    for step in steps:
        numbers = torch.Generator().manual_seed(10 * step + (0 if kind == "pipeline" else dist.get_rank()))
        if kind == "pipeline":
            batch = torch.randn(2, 4, 4, generator=numbers).bfloat16()
            losses.append(engine.train_batch(iter([(batch[0], batch[1])])).item())
            continue
        if kind == "experts":
            loss = engine(torch.randn(4, 4, generator=numbers).bfloat16()).float().square().sum()
        else:
            loss = engine(torch.randint(0, 6, (4, 4), generator=numbers)).float().square().sum()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def expect_same(one, other, path=""):
    assert type(one) is type(other), (path, type(one), type(other))
    if isinstance(one, torch.Tensor):
        assert one.dtype == other.dtype, path
        assert torch.equal(one, other), path
    elif isinstance(one, dict):
        assert list(one) == list(other), path
        for key in one:
            expect_same(one[key], other[key], f"{path}/{key}")
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other), path
        for at, (left, right) in enumerate(zip(one, other, strict=True)):
            expect_same(left, right, f"{path}/{at}")
    elif adapter.class_name(type(one)) in adapter._SCALERS:
        expect_same(vars(one), vars(other), path)
    else:
        assert one == other, path


def _resume(folder, kind, asynchronous):
    options = {"asynchronous": asynchronous}
    engine = make_engine(kind, **options)
    train(engine, kind, range(3))
    given, add = {}, engine.checkpoint_engine.save

    def save(state_dict, path):
        file = io.BytesIO()
        torch.save(state_dict, file)
        given[path] = file
        add(state_dict, path)

    engine.checkpoint_engine.save = save
    engine.save_checkpoint(folder, client_state={"mine": {"epoch": 1, "pair": (1, None)}})
    whole = train(engine, kind, range(3, 6))
    engine.checkpoint_engine.wait()
    dist.barrier()
    for path, file in given.items():
        file.seek(0)
        expect_same(torch.load(file, weights_only=False), engine.checkpoint_engine.load(path))
    resumed = make_engine(kind, **options)
    path, client = resumed.load_checkpoint(folder)
    assert path is not None
    assert client["mine"] == {"epoch": 1, "pair": (1, None)}
    assert resumed.global_steps == 3
    assert train(resumed, kind, range(3, 6)) == whole
    return len(given)


@pytest.mark.parametrize(
    ("kind", "world", "files"),
    [
        (0, 2, 1),
        (2, 2, 3),
        ("pipeline", 2, None),
        *(pytest.param(*each, marks=SLOW) for each in [(1, 2, 3), (3, 2, 4), (1, 1, 2), (3, 1, 2), ("experts", 2, 7)]),
    ],
)
def test_deepspeed_engine_resumes_exactly(tmp_path, kind, world, files):
    counts = fork_ranks(world, tmp_path, _resume, tmp_path / "run", kind, kind in (1, 3))
    tag = tmp_path / "run" / "global_step3"
    snapshot = Snapshot(tag / FOLDER)
    assert snapshot.verify().ok
    names = {path.split("/")[1] for path in snapshot.get_manifest() if path.count("/") == 1}
    assert names == {file.name for file in tag.glob("*.pt")}
    assert len(names) == sum(counts) == (files or sum(counts))
    held = [entry for entry in snapshot.get_manifest().values() if getattr(entry, "serializer", "") == "torch_save"]
    assert held == []  # pickles
    assert (tmp_path / "run" / "latest").read_text() == "global_step3"


def _fail(folder, asynchronous):
    engine = make_engine(2, asynchronous=asynchronous)
    train(engine, 2, range(1))
    engine.save_checkpoint(folder)
    whole = train(engine, 2, range(1, 3))
    engine.checkpoint_engine.wait()
    dist.barrier()
    if dist.get_rank() == 0:
        (folder / "bad").mkdir()
        (folder / "bad" / FOLDER).mkdir()
        (folder / "bad" / FOLDER / "data").write_text("in the way")
    dist.barrier()
    with pytest.raises(SnapshotError, match="data"):  # noqa: PT012 - of one call or of the next
        engine.save_checkpoint(folder, tag="bad")
        train(engine, 2, range(3, 5))  # nothing is committed in a step
        engine.save_checkpoint(folder, tag="good")
    dist.barrier()
    assert (folder / "latest").read_text() == "global_step1"
    resumed = make_engine(2)
    with pytest.raises(SnapshotNotFoundError, match=r"bad: this checkpoint was not committed; load another tag"):
        resumed.load_checkpoint(folder, tag="bad")
    resumed.load_checkpoint(folder)
    assert train(resumed, 2, range(1, 3)) == whole
    engine.save_checkpoint(folder, tag="good")  # training can go on after a failure
    engine.checkpoint_engine.wait()
    dist.barrier()
    assert (folder / "latest").read_text() == "good"


@pytest.mark.parametrize("asynchronous", [pytest.param(False, marks=SLOW), True])
def test_deepspeed_uncommitted_tag_is_never_latest_and_cannot_be_loaded(tmp_path, asynchronous):
    fork_ranks(2, tmp_path, _fail, tmp_path / "run", asynchronous)


@dataclasses.dataclass
class Note:
    text: str


def _refuse(folder):
    engine = make_engine(1)
    train(engine, 1, range(1))
    engine.save_checkpoint(folder, tag="first")
    for wrong, named in ((Note("x"), "Note"), (object(), "builtins.object"), (lambda: 1, "function")):
        with pytest.raises(SnapshotError, match=rf"(?s)mp_rank_00_model_states\.pt/note.*{named}"):
            engine.save_checkpoint(folder, tag="second", client_state={"note": wrong})
        assert (folder / "latest").read_text() == "first"
        assert not Snapshot(folder / "second" / FOLDER).exists()


def test_deepspeed_objects_that_need_a_pickle_are_refused(tmp_path):
    fork_ranks(1, tmp_path, _refuse, tmp_path / "run")


def _end_in_the_middle(folder):
    engine = make_engine(1, asynchronous=True)
    train(engine, 1, range(1))
    engine.save_checkpoint(folder, tag="first")
    engine.checkpoint_engine.wait()
    optimizer, save = engine.optimizer, engine.optimizer.state_dict
    optimizer.state_dict = lambda: 1 / 0
    with pytest.raises(ZeroDivisionError):
        engine.save_checkpoint(folder, tag="second")
    optimizer.state_dict = save
    train(engine, 1, range(1, 3))  # no step may write the files that were saved before the error
    engine.destroy()
    assert (folder / "latest").read_text() == "first"
    assert not Snapshot(folder / "second" / FOLDER).exists()


def test_deepspeed_save_that_ends_early_is_never_committed(tmp_path):
    fork_ranks(1, tmp_path, _end_in_the_middle, tmp_path / "run")


def _refuse_on_one_rank(folder, asynchronous):
    engine = make_engine(3, asynchronous=asynchronous)
    train(engine, 3, range(1))
    state = {"note": object() if dist.get_rank() == 1 else 1}
    with pytest.raises(SnapshotError, match="note"):
        engine.save_checkpoint(folder, tag="bad", client_state=state)
    train(engine, 3, range(1, 2))
    engine.save_checkpoint(folder, tag="good")
    engine.checkpoint_engine.wait()
    dist.barrier()
    assert (folder / "latest").read_text() == "good"


@pytest.mark.parametrize("asynchronous", [pytest.param(False, marks=SLOW), True])
def test_deepspeed_object_that_one_rank_cannot_store_is_reported_on_all(tmp_path, asynchronous):
    fork_ranks(2, tmp_path, _refuse_on_one_rank, tmp_path / "run", asynchronous)


def _name_late(folder):
    name = adapter._name_latest

    def late(*arguments):
        time.sleep(0.3)  # the wait for the tag ends before this, if it waits for nothing else
        name(*arguments)

    adapter._name_latest = late
    engine = make_engine(1, asynchronous=True)
    train(engine, 1, range(1))
    engine.save_checkpoint(folder, tag="first")
    engine.checkpoint_engine.wait()
    assert (folder / "latest").read_text() == "first"
    engine.destroy()


def test_deepspeed_latest_names_a_tag_after_the_wait_for_it(tmp_path):
    fork_ranks(1, tmp_path, _name_late, tmp_path / "run")


def _die_at_latest(folder, asynchronous):
    engine = make_engine(1, asynchronous=asynchronous)
    train(engine, 1, range(1))
    engine.save_checkpoint(folder, tag="first")
    engine.checkpoint_engine.wait()

    def empties(path, mode, flags):
        if path == str(folder / "latest") and flags & os.O_TRUNC:
            os.truncate(path, 0)  # as the call would, before it returns
            return True
        return False

    die_at("open", empties)
    die_at("os.rename", lambda source, target, *_: target == str(folder / "latest"))
    train(engine, 1, range(1, 2))
    engine.save_checkpoint(folder, tag="second")
    engine.checkpoint_engine.wait()


def _go_on(folder):
    engine = make_engine(1)
    engine.load_checkpoint(folder)
    assert engine.global_steps == 1
    engine.save_checkpoint(folder, tag="third")


@pytest.mark.parametrize("asynchronous", [False, True])
def test_deepspeed_killed_while_latest_is_written_resumes_from_the_tag_before(tmp_path, asynchronous):
    run = tmp_path / "run"
    assert kill_ranks(1, tmp_path, _die_at_latest, run, asynchronous) == [-signal.SIGKILL]
    assert (run / "latest").read_text() == "first"
    fork_ranks(1, tmp_path, _go_on, run)
    assert (run / "latest").read_text() == "third"
    assert not list(run.glob("latest.*"))


def _die_on_one_rank(folder, doomed, event, asynchronous):
    engine = make_engine(2, asynchronous=asynchronous, options=TakeOptions(timeout=3))
    train(engine, 2, range(1))
    engine.save_checkpoint(folder, tag="first")
    engine.checkpoint_engine.wait()
    dist.barrier()
    if dist.get_rank() == doomed:
        die_at(event, lambda path, *_: str(path).startswith(str(folder / "second" / FOLDER)))
    train(engine, 2, range(1, 2))
    engine.save_checkpoint(folder, tag="second")
    engine.checkpoint_engine.wait()
    dist.barrier()


def _go_on_together(folder, whole):
    engine = make_engine(2)
    engine.load_checkpoint(folder)
    losses = train(engine, 2, range(engine.global_steps, 4))
    engine.save_checkpoint(folder, tag="second")
    assert losses == whole[dist.get_rank()][-len(losses) :]
    return len(losses)


def _train_whole():
    return train(make_engine(2), 2, range(4))


@SLOW
@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize(("doomed", "event"), [(0, "open"), (1, "open"), (0, "os.link")])
def test_deepspeed_rank_killed_resumes_from_the_tag_in_latest(tmp_path, doomed, event, asynchronous):
    run = tmp_path / "run"
    ended = kill_ranks(2, tmp_path, _die_on_one_rank, run, doomed, event, asynchronous)
    assert ended[doomed] == -signal.SIGKILL
    assert ended[1 - doomed] != 0
    assert (run / "latest").read_text() == "first"
    whole = fork_ranks(2, tmp_path, _train_whole)
    assert fork_ranks(2, tmp_path, _go_on_together, run, whole) == [3, 3]
    assert Snapshot(run / "second" / FOLDER).verify().ok
    left = [each.name for each in (run / "second" / FOLDER).iterdir()]
    assert sorted(left) == [".snapshot_metadata", "data"]


def _fill_disk_of_one_rank(folder, asynchronous):
    engine = make_engine(3, asynchronous=asynchronous)
    train(engine, 3, range(1))
    write = Path.write_bytes

    def write_bytes(path, content):
        if dist.get_rank() == 1 and path.suffix == ".pt":
            raise OSError("the disk is full")
        return write(path, content)

    Path.write_bytes = write_bytes
    with pytest.raises((OSError, SnapshotError), match="the disk is full"):
        engine.save_checkpoint(folder, tag="bad")
    Path.write_bytes = write
    engine.save_checkpoint(folder, tag="good")
    engine.checkpoint_engine.wait()
    dist.barrier()
    assert (folder / "latest").read_text() == "good"


@SLOW
@pytest.mark.parametrize("asynchronous", [False, True])
def test_deepspeed_rank_that_cannot_write_a_notice_is_reported_on_all(tmp_path, asynchronous):
    fork_ranks(2, tmp_path, _fill_disk_of_one_rank, tmp_path / "run", asynchronous)


def _hold_files_of_deepspeed(folder):
    before = make_engine(2, adapted=False)
    train(before, 2, range(2))
    before.save_checkpoint(folder)
    whole = train(before, 2, range(2, 4))
    engine = make_engine(2)
    engine.load_checkpoint(folder)
    assert train(engine, 2, range(2, 4)) == whole
    with pytest.raises(SnapshotExistsError, match=r"_states\.pt: DeepSpeed itself has saved this tag"):
        engine.save_checkpoint(folder, tag="global_step2")
    engine.save_checkpoint(folder)
    engine.save_16bit_model(folder)


def test_deepspeed_own_checkpoints_are_read_and_never_replaced(tmp_path):
    fork_ranks(1, tmp_path, _hold_files_of_deepspeed, tmp_path / "run")
    assert Snapshot(tmp_path / "run" / "global_step2").exists()  # DeepSpeed's own
    assert sorted(torch.load(tmp_path / "run" / "pytorch_model.bin")) == sorted(Model().state_dict())
    assert not list((tmp_path / "run").rglob("*.partial"))


def _save_both(folder, stage):
    for name, adapted in (("adapted", True), ("plain", False)):
        engine = make_engine(stage, adapted=adapted)
        train(engine, stage, range(3))
        engine.save_checkpoint(folder / name)


def _resume_universal(folder, names, stage):
    made = []
    for name in names:
        engine = make_engine(stage, adapted=False, config={"checkpoint": {"load_universal": True}})
        engine.load_checkpoint(folder / name)
        made.append(train(engine, stage, range(3, 6)))
    return made


@SLOW
@pytest.mark.parametrize("stage", [1, 3])
def test_deepspeed_files_resume_on_another_world_size(tmp_path, stage):
    fork_ranks(2, tmp_path, _save_both, tmp_path, stage)
    write_files(tmp_path / "adapted" / "global_step3", tmp_path / "files" / "global_step3")
    written = {file.name: file for file in (tmp_path / "files" / "global_step3").iterdir()}
    plain = {file.name: file for file in (tmp_path / "plain" / "global_step3").iterdir()}
    assert written.keys() == plain.keys()
    for name in written if stage == 1 else []:  # with ZeRO 3, both have padding that is never written
        expect_same(*(torch.load(each[name], weights_only=False) for each in (written, plain)))
    Snapshot(tmp_path / "files").convert(Target(tmp_path / "by-snapshot", "deepspeed-universal"))
    for name in ("files", "plain"):
        tool = [sys.executable, ds_to_universal.__file__, "--inject_missing_state", "--num_extract_workers", "1"]
        tool += ["--num_merge_workers", "1", "--input_folder", str(tmp_path / name / "global_step3")]
        tool += ["--output_folder", str(tmp_path / f"by-tool-{name}" / "global_step3_universal")]
        subprocess.run(tool, check=True, capture_output=True)
    names = ("by-snapshot", "by-tool-files", "by-tool-plain")
    [losses] = fork_ranks(1, tmp_path, _resume_universal, tmp_path, names, stage)
    assert losses[0] == losses[1] == losses[2]


def test_deepspeed_checkpoint_engine_implements_the_whole_interface():
    needed = {name for name in vars(CheckpointEngine) if not name.startswith("_")}
    assert needed - set(dir(SnapshotCheckpointEngine)) == set()


def test_deepspeed_unknown_version_is_refused(monkeypatch):
    monkeypatch.setattr("snapshot.interop.framework_checks.version", lambda _: "0.20.1")
    with pytest.raises(SnapshotError, match=r"deepspeed must be of version 0\.19, got 0\.20\.1"):
        SnapshotCheckpointEngine()


def save_alone(folder, content):
    """Save one file, as DeepSpeed does."""
    engine = SnapshotCheckpointEngine()
    info = CheckpointCommitInfo("t", str(folder), True)
    engine.create(info)
    engine.makedirs(folder / "t")
    engine.save(content, str(folder / "t" / "a.pt"))
    assert engine.commit(info)
    return engine


def test_deepspeed_dynamic_loss_scaler_is_saved_and_restored(tmp_path):  # DeepSpeed has no float16 on a CPU
    scaler = DynamicLossScaler(2.0**16, 1, 1.0, 2, False)
    scaler.update_scale(False), scaler.update_scale(False)
    loaded = save_alone(tmp_path, {"deep": [({"scaler": scaler},)]}).load(str(tmp_path / "t" / "a.pt"))
    found = loaded["deep"][0][0]["scaler"]
    assert type(found) is DynamicLossScaler
    assert vars(found) == vars(scaler)


def test_deepspeed_damage_is_found_on_load(tmp_path):
    engine = save_alone(tmp_path, {"w": torch.arange(999.0)})
    [file] = (tmp_path / "t" / FOLDER / "data").iterdir()
    data = bytearray(file.read_bytes())
    data[-5] ^= 1
    file.write_bytes(data)
    with pytest.raises(CorruptSnapshotError):
        engine.load(str(tmp_path / "t" / "a.pt"))
    with pytest.raises(SnapshotNotFoundError, match="has no such file"):
        engine.load(str(tmp_path / "t" / "b.pt"))


def test_deepspeed_snapshot_cannot_name_classes_to_import(tmp_path):
    stage, scaler = "deepspeed.runtime.zero.config.ZeroStageEnum", adapter._SCALERS[0]
    wrong = {
        "value": adapter.SavedObject("dataclass", "os.path.Evil", {"a": 1}),
        "member": adapter.SavedObject("Enum", stage, {"name": "evil", "value": 9}),
        "kind": adapter.SavedObject("Enum", scaler, {"name": "evil", "value": 9}),
    }
    for name, value in wrong.items():
        Snapshot.take(tmp_path / name / FOLDER, {"a.pt": StateDict(**{name: value})})
    for name in ("member", "kind"):
        with pytest.raises(
            CorruptSnapshotError, match=rf"a\.pt/{name}: .* is not an object of a class that is known here"
        ):
            SnapshotCheckpointEngine().load(str(tmp_path / name / "a.pt"))
    with pytest.raises(SnapshotError, match=r"a\.pt/value: <os\.path\.Evil a=1> is not an object of a class"):
        SnapshotCheckpointEngine().load(str(tmp_path / "value" / "a.pt"))


def _run_example(folder):
    path = Path(__file__).parents[3] / "examples" / "deepspeed_training.py"
    spec = importlib.util.spec_from_file_location("example", path)
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    deepspeed.init_distributed("gloo")
    example.main(folder)


def test_deepspeed_example_resumes_exactly(tmp_path):
    fork_ranks(2, tmp_path, _run_example, tmp_path / "run")
