"""The mixin under the real Trainer, and a loop with accelerate. `test_transformers.py` runs this in a process of its
own, which imports them once."""

import importlib.util
import os
import shutil
import tempfile
import threading
import time
import warnings
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from accelerate.state import AcceleratorState
    from peft import LoraConfig, get_peft_model
    from transformers import (
        GPT2LMHeadModel,
        LlamaConfig,
        LlamaForCausalLM,
        MixtralConfig,
        MixtralForCausalLM,
        Trainer,
        TrainerCallback,
        TrainingArguments,
    )
    from transformers.trainer_callback import ExportableState
    from transformers.trainer_utils import rotate_checkpoints
    from transformers.utils import logging

from snapshot import RestoreOptions, Snapshot, SnapshotError, SnapshotNotFoundError, TakeOptions
from snapshot.__main__ import main
from snapshot.distributed.group import ranks_of
from snapshot.interop.weight_digests import FOLDER, KEY, STATE, STATE_DIGEST, STATE_KEY, compare_weights, digest_weights
from snapshot.io.url import URL
from snapshot_trainers import trainer_folders
from snapshot_trainers import transformers as transformers_mixin
from snapshot_trainers.trainer_folders import MARK, delete_old, find_last, put_back, sync_files
from snapshot_trainers.transformers import SnapshotTrainerMixin
from tests.helpers.forked_ranks import fork_ranks
from tests.helpers.states import expect_equal

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*pin_memory.*:UserWarning"),
]
logging.disable_progress_bar()
logging.set_verbosity_error()


def _example(name):
    spec = importlib.util.spec_from_file_location(name, Path(__file__).parents[3] / "examples" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


example = _example("huggingface_trainer")
loop = _example("accelerate_loop")


def _trainer(folder):
    whole, weights = example.train(folder / "whole")
    example.train(folder / "broken", stop_at=3)
    resumed, others = example.train(folder / "broken", resume=True)
    assert resumed[-4:] == whole[-4:]
    expect_equal(weights, others, ordered=False)


class Background(example.SnapshotTrainer):
    snapshot_in_background = True


def test_trainer_ddp_resumes_exactly(tmp_path):
    fork_ranks(2, tmp_path, _trainer, tmp_path)
    snapshot = Snapshot(tmp_path / "broken" / "checkpoint-6" / FOLDER)
    assert snapshot.verify()
    assert {path.split("/")[1] for path in snapshot.get_manifest() if path.startswith("1/")} == {"rng", "loader"}


def _end_at_other_times(folder):
    class Late(Background):
        fails = False

        def _finish(self, *arguments):
            if self.args.process_index == 0:
                time.sleep(0.5)  # the other rank is ready long before
                if self.fails:
                    raise OSError("the disk is full")
            super()._finish(*arguments)

    example.train(folder, kind=Late, stop_at=2)
    assert find_last(str(folder)) == str(folder / "checkpoint-2")
    looked = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transformers_mixin, "find_last", lambda given, **_: looked.append(given) or find_last(given))
        example.train(folder, kind=Late, resume=True)
    assert not ranks_of(None).connected()[1]._calls  # no call goes on, whose heartbeat is sent
    Late.fails = True
    with pytest.raises((OSError, SnapshotError), match="the disk is full"):
        example.train(folder, kind=Late, stop_at=2)
    return len(looked)


def test_trainer_ranks_wait_for_all_files_and_resume_from_the_same_checkpoint(tmp_path):
    assert fork_ranks(2, tmp_path, _end_at_other_times, tmp_path / "run") == [1, 0]


def _fall_back(folder):
    def one_rank(act):
        if torch.distributed.get_rank() == 0:
            act()
        torch.distributed.barrier()

    example.train(folder, stop_at=4)
    one_rank(lambda: flip_middle(folder / "checkpoint-4" / "model.safetensors"))
    with pytest.raises(SnapshotError, match="its weights or its state are damaged"):
        example.train(folder, resume=str(folder / "checkpoint-4"))
    seen = []

    class Noted(example.SnapshotTrainer):
        def _load_from_checkpoint(self, checkpoint, *arguments):
            seen.append(checkpoint)
            super()._load_from_checkpoint(checkpoint, *arguments)

    example.train(folder, resume=True, kind=Noted)
    return seen


def test_trainer_ranks_fall_back_to_the_same_checkpoint(tmp_path):
    assert fork_ranks(2, tmp_path, _fall_back, tmp_path / "run") == [[str(tmp_path / "run" / "checkpoint-2")]] * 2


def test_accelerate_ranks_resume_exactly(tmp_path):
    fork_ranks(2, tmp_path, loop.main, tmp_path)
    snapshot = Snapshot(tmp_path / "broken" / "step-20")
    assert snapshot.verify()
    own = {path.split("/", 1)[1] for path in snapshot.get_manifest() if path.startswith("1/")}
    assert {path.split("/")[0] for path in own} == {"rng", "loader", "progress"}  # the losses are each rank's own


@pytest.mark.smoke
def test_accelerate_loop_resumes_exactly(tmp_path, capsys):
    loop.main(tmp_path)
    assert "bit for bit" in capsys.readouterr().out
    assert Snapshot(tmp_path / "broken" / "step-20").read_object("0/loader/order/epoch") == 2
    AcceleratorState._reset_state(reset_partial_state=True)  # the Trainer wants one of its own


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """What a run that nobody interrupts comes to."""
    return example.train(tmp_path_factory.mktemp("whole"))


@pytest.mark.smoke
def test_trainer_example_resumes_exactly(tmp_path, capsys):
    example.main(tmp_path)
    assert "bit for bit" in capsys.readouterr().out
    left = {file.name for file in (tmp_path / "broken" / "checkpoint-6").iterdir()}
    assert {FOLDER, "model.safetensors", "trainer_state.json"} <= left
    assert not {name for name in left if name.startswith(("scaler", "rng_state"))}
    for notice in ("optimizer.pt", "scheduler.pt"):  # no state: one damaged or lost is no fault
        (tmp_path / "broken" / "checkpoint-6" / notice).write_bytes(b"torn")
    assert find_last(str(tmp_path / "broken")) == str(tmp_path / "broken" / "checkpoint-6")
    assert {file.name for file in (tmp_path / "broken").iterdir()} == {"checkpoint-4", "checkpoint-6"}
    snapshot = Snapshot(tmp_path / "broken" / "checkpoint-6" / FOLDER)
    assert snapshot.verify()
    assert snapshot.read_object("0/optimizer/state/0/step") == 6
    GPT2LMHeadModel.from_pretrained(tmp_path / "broken" / "checkpoint-6")


def test_trainer_without_rng_state_would_not_resume_exactly(tmp_path, whole):
    class Forgets(example.SnapshotTrainer):
        def _load_rng_state(self, checkpoint):
            pass

    example.train(tmp_path, stop_at=3)
    resumed, _ = example.train(tmp_path, resume=True, kind=Forgets)
    assert resumed[-4:] != whole[0][-4:]


def test_trainer_own_checkpoint_is_resumed(tmp_path, whole):
    losses, weights = whole
    example.train(tmp_path / "broken", stop_at=3, kind=Trainer)
    assert (tmp_path / "broken" / "checkpoint-2" / "optimizer.pt").exists()
    resumed, others = example.train(tmp_path / "broken", resume=True)
    assert resumed[-4:] == losses[-4:]
    expect_equal(weights, others, ordered=False)
    assert Snapshot(tmp_path / "broken" / "checkpoint-6" / FOLDER).exists()


def test_trainer_checkpoint_without_optimizer_state_is_refused(tmp_path):
    example.train(tmp_path, stop_at=3)
    Snapshot(tmp_path / "checkpoint-2" / FOLDER).delete()
    with pytest.raises(SnapshotNotFoundError, match="checkpoint-2: has neither 'trainer_snapshot' nor"):
        example.train(tmp_path, resume=True)


@pytest.mark.smoke
def test_trainer_damaged_snapshot_is_found_before_training_continues(tmp_path):
    example.train(tmp_path, stop_at=3)
    file = max((tmp_path / "checkpoint-2" / FOLDER / "data").iterdir(), key=lambda each: each.stat().st_size)
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    with pytest.raises(SnapshotError, match="damaged"):
        example.train(tmp_path, resume=True)


def flip_middle(file):
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def metadata_of(checkpoint):
    return Snapshot(checkpoint / FOLDER).metadata.metadata


@pytest.mark.parametrize("kind", [example.SnapshotTrainer, Background])
def test_trainer_damaged_weights_are_found_and_the_checkpoint_before_is_resumed(tmp_path, whole, caplog, kind):
    losses, weights = whole
    example.train(tmp_path, stop_at=4, kind=kind)
    last = tmp_path / "checkpoint-4"
    assert list(metadata_of(last)[KEY]) == ["model.safetensors"]
    assert main(["verify", str(last)]) == 0
    flip_middle(last / "model.safetensors")
    assert main(["verify", str(last)]) == 1
    assert main(["verify", "--quick", str(last)]) == 0
    with pytest.raises(
        SnapshotError, match=r"(?s)checkpoint-4: its weights or its state are damaged.*model\.safetensors: digest"
    ):
        example.train(tmp_path, resume=str(last), kind=kind)
    resumed, others = example.train(tmp_path, resume=True, kind=kind)
    assert "checkpoint-4: is damaged, and is passed over" in caplog.text
    assert resumed[-4:] == losses[-4:]
    expect_equal(weights, others, ordered=False)
    assert main(["verify", str(tmp_path / "checkpoint-6")]) == 0


def test_trainer_damaged_weights_are_not_loaded_as_best_model(tmp_path):
    class Best(example.SnapshotTrainer):
        def _save_checkpoint(self, *arguments):
            super()._save_checkpoint(*arguments)
            self.state.best_model_checkpoint = str(tmp_path / "checkpoint-6")

        def train(self, *arguments, **options):
            super().train(*arguments, **options)
            self._load_best_model()
            flip_middle(tmp_path / "checkpoint-6" / "model.safetensors")
            self._load_best_model()

    with pytest.raises(SnapshotError, match="checkpoint-6: its weights or its state are damaged"):
        example.train(tmp_path, kind=Best)


def test_trainer_find_last_skips_a_damaged_snapshot(tmp_path):
    example.train(tmp_path, stop_at=4)
    flip_middle(max((tmp_path / "checkpoint-4" / FOLDER / "data").iterdir(), key=lambda each: each.stat().st_size))
    assert find_last(str(tmp_path)) == str(tmp_path / "checkpoint-2")
    flip_middle(tmp_path / "checkpoint-2" / "model.safetensors")
    assert find_last(str(tmp_path)) is None
    with pytest.raises(SnapshotError, match="damaged"):
        example.train(tmp_path, resume=True)


def _tear(file):
    file.write_bytes(file.read_bytes()[:300])


@pytest.mark.parametrize("kind", [example.SnapshotTrainer, Background])
def test_trainer_changed_trainer_state_json_or_missing_snapshot_is_found(tmp_path, whole, kind):
    losses, _ = whole
    example.train(tmp_path / "run", stop_at=4, kind=kind)

    def change(checkpoint):
        text = (checkpoint / STATE).read_text()
        (checkpoint / STATE).write_text(text.replace('"global_step": 4', '"global_step": 5'))

    damages = {
        change: "trainer_state.json: digest of its values",
        lambda checkpoint: _tear(checkpoint / STATE): "trainer_state.json: Unterminated string",
        lambda checkpoint: _tear(checkpoint / "config.json"): None,
        lambda checkpoint: shutil.rmtree(checkpoint / FOLDER): None,
        lambda checkpoint: (checkpoint / FOLDER / ".snapshot_metadata").unlink(): "",
    }
    for number, (damage, named) in enumerate(damages.items()):
        run = tmp_path / str(number)
        shutil.copytree(tmp_path / "run", run)
        assert main(["verify", str(run / "checkpoint-4")]) == 0
        damage(run / "checkpoint-4")
        assert find_last(str(run)) == str(run / "checkpoint-2")
        assert main(["verify", str(run / "checkpoint-4")]) == (0 if named is None else 1)
        if named:
            with pytest.raises(SnapshotError, match=f"(?s)its weights or its state are damaged.*{named}"):
                example.train(run, resume=str(run / "checkpoint-4"), kind=kind)
    assert example.train(tmp_path / "0", resume=True, kind=kind)[0][-4:] == losses[-4:]


def test_trainer_damaged_checkpoint_does_not_count_for_save_total_limit(tmp_path):
    class EndsAfterOne(example.SnapshotTrainer):
        def _save_checkpoint(self, *arguments):
            super()._save_checkpoint(*arguments)
            self.control.should_training_stop = True

    example.train(tmp_path, stop_at=4)
    flip_middle(tmp_path / "checkpoint-4" / "model.safetensors")
    shutil.copytree(tmp_path / "checkpoint-4", tmp_path / "checkpoint-6")
    example.train(tmp_path, resume=True, kind=EndsAfterOne)
    assert {each.name for each in tmp_path.glob("checkpoint-*")} == {"checkpoint-2", "checkpoint-4"}
    assert find_last(str(tmp_path)) == str(tmp_path / "checkpoint-4")


def test_trainer_snapshot_options_metadata_does_not_replace_digests(tmp_path):
    class Same(example.SnapshotTrainer):
        snapshot_metadata = {KEY: {"a": 1}, STATE_KEY: 1, "by": "a test"}  # noqa: RUF012

    example.train(tmp_path, stop_at=2, kind=Same)
    found = metadata_of(tmp_path / "checkpoint-2")
    assert list(found[KEY]) == ["model.safetensors"]
    assert found["by"] == "a test"
    assert find_last(str(tmp_path)) == str(tmp_path / "checkpoint-2")


def test_trainer_snapshot_verify_weights_false_loads_changed_weights(tmp_path):
    class Trusting(example.SnapshotTrainer):
        snapshot_verify_weights = False

    example.train(tmp_path, stop_at=4)
    last = tmp_path / "checkpoint-4"
    held = load_file(last / "model.safetensors")
    save_file({name: each + 1 for name, each in held.items()}, last / "model.safetensors", {"format": "pt"})
    example.train(tmp_path / "other", stop_at=2)
    assert find_last(str(tmp_path), weights=False) == str(last)
    assert find_last(str(tmp_path)) == str(tmp_path / "checkpoint-2")
    losses, _ = example.train(tmp_path, resume=str(last), kind=Trusting)
    assert len(losses) == 6


def test_trainer_checkpoints_without_digests_and_links_are_resumed(tmp_path):
    """As those that were written before the digests."""

    class Older(example.SnapshotTrainer):
        def _metadata_of(self, checkpoint):
            return {}

    example.train(tmp_path / "run", stop_at=4, kind=Older)
    last = tmp_path / "run" / "checkpoint-4"
    flip_middle(last / "model.safetensors")
    assert find_last(str(tmp_path / "run")) == str(last)
    example.train(tmp_path / "newer", stop_at=4)
    (tmp_path / "link").symlink_to(tmp_path / "newer" / "checkpoint-4")
    example.train(tmp_path / "run", resume=str(tmp_path / "link"))
    flip_middle(tmp_path / "newer" / "checkpoint-4" / "model.safetensors")
    with pytest.raises(SnapshotError, match="link: its weights or its state are damaged"):
        example.train(tmp_path / "run", resume=str(tmp_path / "link"))


def test_trainer_digests_cover_files_in_subfolders_and_missing_files(tmp_path):
    names = ["head.pt", "model-00001-of-00002.safetensors", "model.safetensors.index.json"]
    names += ["other/adapter_model.safetensors", "other/model.safetensors.index.fp16.json"]
    for name in [*names, "config.json", "training_args.bin", f"{FOLDER}/data/0.safetensors"]:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(name.encode() * 100_000)
    metadata = digest_weights(str(tmp_path))
    assert sorted(metadata[KEY]) == names
    (tmp_path / names[0]).unlink()
    (tmp_path / names[1]).write_bytes(b"{}")
    for name in names[2:]:
        flip_middle(tmp_path / name)
    faults = compare_weights(URL.parse(str(tmp_path)), None, metadata).faults
    assert [fault.split(":")[0] for fault in faults] == names
    with pytest.raises(SnapshotError, match="the digests of its weights are damaged"):
        compare_weights(URL.parse(str(tmp_path)), None, {KEY: {"a": 1}})


@pytest.mark.smoke
def test_trainer_snapshot_options_are_passed_to_take(tmp_path):
    class Noted(example.SnapshotTrainer):
        snapshot_options = TakeOptions(durable=False, read_back=True)
        snapshot_metadata = {"by": "a test"}  # noqa: RUF012

    example.train(tmp_path, stop_at=2, kind=Noted)
    assert Snapshot(tmp_path / "checkpoint-2" / FOLDER).metadata.metadata["by"] == "a test"


def test_trainer_with_fsdp1_or_other_own_formats_is_refused(tmp_path):
    class Sharded(example.SnapshotTrainer):
        def _save_optimizer_and_scheduler(self, output_dir):
            self.is_fsdp_enabled = True
            super()._save_optimizer_and_scheduler(output_dir)

    with pytest.raises(SnapshotError, match="FSDP1"):
        example.train(tmp_path, stop_at=3, kind=Sharded)


def test_trainer_mixin_wrong_base_order_and_unknown_versions_are_refused(tmp_path):
    class Backwards(Trainer, SnapshotTrainerMixin):
        pass

    with pytest.raises(TypeError, match=r"write class Backwards\(SnapshotTrainerMixin, Trainer\)"):
        SnapshotTrainerMixin.__init__(Backwards.__new__(Backwards))

    class Old:
        def _save_optimizer_and_scheduler(self, output_dir):
            pass

    class OfOld(SnapshotTrainerMixin, Old):
        pass

    with pytest.raises(SnapshotError, match="_save_checkpoint with 2 arguments"):
        OfOld()


@pytest.mark.smoke
def test_trainer_uncommitted_checkpoint_is_skipped(tmp_path, whole, caplog):
    example.train(tmp_path, stop_at=5)
    (tmp_path / "checkpoint-4" / FOLDER / ".snapshot_metadata").unlink()
    resumed, weights = example.train(tmp_path, resume=True)
    assert resumed[-4:] == whole[0][-4:]
    expect_equal(weights, whole[1], ordered=False)
    assert "checkpoint-4: is not complete, and is passed over" in caplog.text


def test_trainer_failed_background_save_is_raised_by_the_next_one(tmp_path):
    class Failing(Background):
        def _save_optimizer_and_scheduler(self, output_dir):
            folder = Path(output_dir) / FOLDER
            folder.mkdir(parents=True)
            (folder / "data").write_text("in the way")
            super()._save_optimizer_and_scheduler(output_dir)

    with pytest.raises(SnapshotError, match="data"):
        example.train(tmp_path, kind=Failing)


@pytest.mark.parametrize("kind", [example.SnapshotTrainer, Background])
def test_trainer_checkpoint_with_a_mark_is_complete_after_it_is_saved_again(tmp_path, kind):
    example.train(tmp_path, stop_at=4)
    (tmp_path / "checkpoint-4" / MARK).touch()  # as a crash left it
    assert find_last(str(tmp_path)) == str(tmp_path / "checkpoint-2")
    example.train(tmp_path, resume=True, kind=kind, stop_at=4)
    assert find_last(str(tmp_path)) == str(tmp_path / "checkpoint-4")


@pytest.mark.parametrize("only_model", [False, True])
@pytest.mark.parametrize("parent", [example.SnapshotTrainer, Background])
def test_trainer_checkpoint_saved_again_never_mixes_old_and_new_files(tmp_path, parent, only_model):
    class Other(parent):
        def _save_checkpoint(self, model, trial):
            self.args.save_only_model = only_model
            super()._save_checkpoint(model, trial)

        def _save_optimizer_and_scheduler(self, output_dir):  # its new weights are there already
            raise OSError("the disk is full")

    example.train(tmp_path, stop_at=5)
    again = [tmp_path / f"checkpoint-{step}" for step in (2, 4)]
    if only_model:
        example.train(tmp_path, resume=str(again[0]), kind=Other, stop_at=4)
    else:
        with pytest.raises(OSError, match="the disk is full"):
            example.train(tmp_path, resume=str(again[0]), kind=Other)
        old = find_last(str(tmp_path))  # also a failure of the only checkpoint must not lose it
        assert old == str(tmp_path / "old-checkpoint-4")
        assert Snapshot(Path(old) / FOLDER).verify()
        example.train(tmp_path, resume=True, kind=parent)
        assert find_last(str(tmp_path)) == str(tmp_path / "checkpoint-6")
        assert not Path(old).exists()
        return
    assert {each.name for each in tmp_path.iterdir()} == {each.name for each in again}
    assert (again[1] / "model.safetensors").exists()
    assert not Snapshot(again[1] / FOLDER).exists()


class One(Background):
    def __init__(self, model, arguments, **options):
        arguments.save_total_limit = 1
        super().__init__(model, arguments, **options)


def test_trainer_incomplete_checkpoints_do_not_displace_the_last_good_one(tmp_path):
    class Failing(One):
        def _save_optimizer_and_scheduler(self, output_dir):
            raise OSError("the disk is full")

    example.train(tmp_path, stop_at=2)
    (tmp_path / "checkpoint-3" / FOLDER).mkdir(parents=True)  # as a crash left it
    with pytest.raises(OSError, match="the disk is full"):
        example.train(tmp_path, resume=str(tmp_path / "checkpoint-2"), kind=Failing, stop_at=4)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["checkpoint-2", "checkpoint-3", "checkpoint-4"]
    example.train(tmp_path, resume=True, kind=One, stop_at=4)
    assert [each.name for each in tmp_path.iterdir()] == ["checkpoint-4"]


@pytest.mark.parametrize("kind", [example.SnapshotTrainer, Background])
def test_trainer_save_total_limit_deletes_like_the_plain_trainer(tmp_path, kind):
    class Best(kind):
        def __init__(self, model, arguments, **options):
            arguments.save_total_limit, arguments.metric_for_best_model = 2, "loss"
            arguments.save_steps, self.limits = 1, []
            super().__init__(model, arguments, **options)

        def _save_checkpoint(self, model, trial):
            self.state.best_global_step = 2
            super()._save_checkpoint(model, trial)
            assert self.args.save_total_limit == 2

    example.train(tmp_path, kind=Best)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["checkpoint-2", "checkpoint-6"]
    written = torch.load(tmp_path / "checkpoint-6" / "training_args.bin", weights_only=False)
    assert written.save_total_limit == 2


@pytest.mark.parametrize("kind", [example.SnapshotTrainer, Background])
def test_trainer_save_total_limit_deletes_after_the_new_checkpoint_is_synced(tmp_path, kind, monkeypatch):
    kept = {}

    def flush(new):
        assert find_last(str(tmp_path)) != new  # a loss of power leaves it incomplete
        kept[Path(new).name] = sorted(each.name for each in tmp_path.iterdir())
        sync_files(new)

    class Durable(kind):
        snapshot_options = TakeOptions()

        def __init__(self, model, arguments, **options):
            arguments.save_total_limit = 1
            super().__init__(model, arguments, **options)

    monkeypatch.setattr(transformers_mixin, "sync_files", flush)
    example.train(tmp_path, kind=Durable, stop_at=4)
    assert kept == {"checkpoint-2": ["checkpoint-2"], "checkpoint-4": ["checkpoint-2", "checkpoint-4"]}
    assert [each.name for each in tmp_path.iterdir()] == ["checkpoint-4"]


@pytest.mark.parametrize("again", ["failed", "complete"])
@pytest.mark.parametrize("named", [None, "checkpoint-4", "old-checkpoint-4"])
def test_trainer_checkpoint_renamed_by_a_crash_gets_its_name_back(tmp_path, named, again):
    """It may be the best one, which later saves keep by its name."""

    class Best(example.SnapshotTrainer):
        def __init__(self, model, arguments, **options):
            arguments.save_total_limit, arguments.metric_for_best_model = 2, "loss"
            arguments.save_steps = 1
            super().__init__(model, arguments, **options)

        def _save_checkpoint(self, model, trial):
            self.state.best_global_step, self.state.best_model_checkpoint = 4, str(tmp_path / "checkpoint-4")
            super()._save_checkpoint(model, trial)

    example.train(tmp_path, stop_at=5)
    aside = tmp_path / "old-checkpoint-4"
    shutil.copytree(tmp_path / "checkpoint-4", aside)
    weights = (aside / "model.safetensors").read_bytes()
    if again == "failed":
        (tmp_path / "checkpoint-4" / MARK).touch()  # as a crash left it
    example.train(tmp_path, resume=str(tmp_path / named) if named else True, kind=Best)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["checkpoint-4", "checkpoint-6"]
    assert (tmp_path / "checkpoint-4" / "model.safetensors").read_bytes() == weights
    assert find_last(str(tmp_path)) == str(tmp_path / "checkpoint-6")


def test_trainer_old_checkpoint_is_kept_until_its_successor_is_read(tmp_path):
    example.train(tmp_path, stop_at=3)
    last, aside = tmp_path / "checkpoint-2", tmp_path / "old-checkpoint-2"
    good = (last / "model.safetensors").read_bytes()
    for damaged, left in (([last], [last]), ([last, aside], [last, aside]), ([], [last])):
        shutil.rmtree(aside, ignore_errors=True)
        shutil.copytree(last, aside)
        for each in damaged:
            flip_middle(each / "model.safetensors")
        put_back(str(tmp_path))
        assert sorted(tmp_path.iterdir()) == left
        assert ((last / "model.safetensors").read_bytes() == good) == (aside not in damaged)
        (last / "model.safetensors").write_bytes(good)


def test_trainer_folders_and_links_named_json_are_not_damage(tmp_path):
    example.train(tmp_path, stop_at=3)
    (tmp_path / "checkpoint-2" / "folder.json").mkdir()
    (tmp_path / "checkpoint-2" / "link.json").symlink_to(tmp_path / "missing")
    assert find_last(str(tmp_path)) == str(tmp_path / "checkpoint-2")


@pytest.mark.parametrize("kind", [example.SnapshotTrainer, Background])
def test_trainer_save_total_limit_removes_links_and_not_their_targets(tmp_path, kind):
    """The links are removed, and what they point to stays."""

    class Limited(kind):
        def __init__(self, model, arguments, **options):
            arguments.save_total_limit = 1
            super().__init__(model, arguments, **options)

    out, elsewhere = tmp_path / "out", tmp_path / "elsewhere"
    example.train(out, stop_at=3)
    (out / "checkpoint-2").rename(elsewhere)
    (out / "checkpoint-2").symlink_to(elsewhere)
    (out / "checkpoint-4").symlink_to(tmp_path / "missing")
    (out / "old-checkpoint-2").symlink_to(elsewhere)
    (out / "old-checkpoint-4").symlink_to(tmp_path / "missing")
    example.train(out, resume=str(elsewhere), kind=Limited, stop_at=4)
    assert [each.name for each in out.iterdir()] == ["checkpoint-4"]
    assert find_last(str(out)) == str(out / "checkpoint-4")
    assert Snapshot(elsewhere / FOLDER).verify()
    (out / "checkpoint-4").rename(tmp_path / "four")
    (out / "checkpoint-4").symlink_to(tmp_path / "four")
    example.train(out, resume=str(elsewhere), kind=Limited, stop_at=4)  # it is saved again
    assert not (out / "checkpoint-4").is_symlink()
    assert [each.name for each in out.iterdir()] == ["checkpoint-4"]
    assert find_last(str(tmp_path / "out")) == str(out / "checkpoint-4")


def test_trainer_mark_is_removed_durably_before_old_checkpoints(tmp_path, monkeypatch):
    """Else a loss of power could leave an incomplete checkpoint, and no other."""
    flushed, real = [], trainer_folders.sync_folder

    def sync_folder(path):
        if os.path.basename(path).startswith("checkpoint-"):
            flushed.append((os.path.basename(path), (Path(path) / MARK).exists()))
        real(path)

    class Durable(One):
        snapshot_options = TakeOptions()

    def delete(new, *arguments):
        assert flushed[-1] == (os.path.basename(new), False)
        delete_old(new, *arguments)

    monkeypatch.setattr(trainer_folders, "sync_folder", sync_folder)
    monkeypatch.setattr(transformers_mixin, "delete_old", delete)
    example.train(tmp_path, kind=Durable, stop_at=4)
    assert [each.name for each in tmp_path.iterdir()] == ["checkpoint-4"]


def test_trainer_without_the_mixin_refuses_to_resume_with_a_new_optimizer(tmp_path):
    """Its error names the mixin. The mixin passes over the files that lead to it."""

    class Plain(Trainer):
        pass

    example.train(tmp_path, stop_at=2)
    with pytest.raises(Exception, match="SnapshotTrainerMixin"):
        example.train(tmp_path, resume=True, kind=Plain)
    shutil.rmtree(tmp_path / "checkpoint-2" / FOLDER)  # then nothing is left to resume with
    assert find_last(str(tmp_path)) is None
    with pytest.raises(SnapshotNotFoundError, match="nor the state of an optimizer"):
        example.train(tmp_path, resume=str(tmp_path / "checkpoint-2"))


NUMBERS = st.lists(st.integers(1, 9), min_size=1, unique=True)


@given(NUMBERS, st.integers(1, 10), st.none() | st.integers(1, 9))
def test_trainer_folders_delete_the_same_checkpoints_as_the_trainer(numbers, limit, best):
    """The numbers are in the order of the saves: a run may begin at an earlier step again."""
    left = []
    for by_trainer in (True, False):
        with tempfile.TemporaryDirectory() as folder:
            for time, number in enumerate(numbers):
                new = Path(folder, f"checkpoint-{number}")
                new.mkdir()
                (new / STATE).touch()
                for each in (new / STATE, new):
                    os.utime(each, (time, time))
            named = f"{folder}/checkpoint-{best}" if best in numbers else None
            if by_trainer:
                rotate_checkpoints(folder, limit, named, use_mtime=True)
            else:
                delete_old(str(new), limit, named)
            left.append({path.name for path in Path(folder).iterdir()})
    assert left[0] == left[1]


# Weights that are written in the background


def read_weights(folder):
    return load_file(folder / "model.safetensors")


class Slow(Background):
    """Writes the weights only when the next step has changed them."""

    changed = threading.Event()

    def _finish(self, *arguments):
        assert self.changed.wait(60)
        super()._finish(*arguments)

    def training_step(self, *arguments, **options):
        loss = super().training_step(*arguments, **options)
        if self.state.global_step in (3, 5):
            self.changed.set()
        return loss

    def _save_checkpoint(self, model, trial):
        self.changed.clear()
        super()._save_checkpoint(model, trial)
        if self.state.global_step == 6:  # the last step
            self.changed.set()
        else:
            checkpoint = Path(self.args.output_dir, f"checkpoint-{self.state.global_step}")
            assert (checkpoint / "config.json").exists()
            assert not (checkpoint / "model.safetensors").exists()
            assert find_last(self.args.output_dir) != str(checkpoint)


@pytest.mark.smoke
def test_trainer_background_weights_are_those_of_the_step(tmp_path):
    example.train(tmp_path / "plain", kind=Trainer)
    example.train(tmp_path / "late", kind=Slow)
    for step in (4, 6):
        plain, late = (tmp_path / name / f"checkpoint-{step}" for name in ("plain", "late"))
        assert {path.name for path in late.iterdir()} >= {
            path.name for path in plain.iterdir() if not path.name.startswith(("optimizer", "scheduler", "rng_state"))
        }
        expect_equal(read_weights(plain), read_weights(late), ordered=False)
        expect_equal(
            GPT2LMHeadModel.from_pretrained(plain).state_dict(),
            GPT2LMHeadModel.from_pretrained(late).state_dict(),
            ordered=False,
        )


@pytest.mark.parametrize("kind", [example.SnapshotTrainer, Background])
@pytest.mark.parametrize("read", [False, True])
def test_trainer_model_with_other_file_names_resumes_exactly(tmp_path, kind, read):
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
    texts = [{"input_ids": tokens, "labels": tokens} for tokens in torch.randint(0, 64, (16, 16))]

    def train(folder, steps, resume=False):
        torch.manual_seed(0)
        model = MixtralForCausalLM(MixtralConfig(vocab_size=64, num_local_experts=2, num_key_value_heads=2, **sizes))
        if read:
            model.save_pretrained(folder / "first")
            model = MixtralForCausalLM.from_pretrained(folder / "first")
        arguments = TrainingArguments(
            str(folder), max_steps=steps, lr_scheduler_type="constant", learning_rate=1e-2, save_steps=2, report_to=[],
            use_cpu=True, disable_tqdm=True,
        )  # fmt: skip
        kind(model, arguments, train_dataset=texts).train(resume_from_checkpoint=resume)
        return model.state_dict()

    whole = train(tmp_path / "whole", 4)
    train(tmp_path / "broken", 2)
    expect_equal(train(tmp_path / "broken", 4, resume=True), whole, ordered=False)
    assert read_weights(tmp_path / "broken" / "checkpoint-4").keys() != whole.keys()
    Snapshot(tmp_path / "broken" / "checkpoint-4" / FOLDER).delete()  # as without the mixin
    with pytest.raises(SnapshotError, match="checkpoint-4: its weights have other names"):
        train(tmp_path / "broken", 4, resume=str(tmp_path / "broken" / "checkpoint-4"))


def test_trainer_adapters_of_a_model_with_other_file_names_are_loaded(tmp_path):
    config = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
    model = MixtralForCausalLM(MixtralConfig(vocab_size=64, num_local_experts=2, num_key_value_heads=2, **sizes))
    model.save_pretrained(tmp_path / "base")
    texts = [{"input_ids": tokens, "labels": tokens} for tokens in torch.randint(0, 64, (16, 16))]

    def train(seed, steps, resume=False):
        torch.manual_seed(seed)
        model = get_peft_model(MixtralForCausalLM.from_pretrained(tmp_path / "base"), config)
        model.add_adapter("frozen", LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False))
        arguments = TrainingArguments(
            str(tmp_path / "run"), max_steps=steps, save_steps=2, report_to=[], use_cpu=True, disable_tqdm=True
        )
        example.SnapshotTrainer(model, arguments, train_dataset=texts).train(resume_from_checkpoint=resume)
        return {name: value for name, value in model.state_dict().items() if ".frozen." in name}

    first = train(0, 2)
    assert first
    expect_equal(train(1, 4, resume=True), first, ordered=False)
    assert "0/model" not in Snapshot(tmp_path / "run" / "checkpoint-4" / FOLDER).get_manifest()


@pytest.mark.parametrize("kind", ["plain", "tied", "shards", "bfloat16", "experts"])
def test_only_trainable_leaves_a_peft_model_to_the_folder_that_it_was_loaded_from(tmp_path, kind):
    """Also the experts, which are stacked in memory alone."""
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    torch.manual_seed(0)
    if kind == "experts":
        model = MixtralForCausalLM(MixtralConfig(vocab_size=64, num_local_experts=2, num_key_value_heads=2, **sizes))
    else:
        model = LlamaForCausalLM(LlamaConfig(vocab_size=64, tie_word_embeddings=kind == "tied", **sizes))
    base = tmp_path / "base"
    model.save_pretrained(base, max_shard_size="20KB" if kind == "shards" else "1GB")

    def load(seed):
        torch.manual_seed(seed)
        dtype = torch.bfloat16 if kind == "bfloat16" else torch.float32
        model = type(full).from_pretrained(base, dtype=dtype)
        return get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))

    full = model
    model = load(1)
    frozen = {name: each for name, each in model.named_parameters() if not each.requires_grad}
    made = Snapshot.take(tmp_path / "s", {"model": model}, options=TakeOptions(base=base, only="trainable"))
    assert any(".mlp.experts." in name for name in frozen) == (kind == "experts")
    if kind == "bfloat16":
        assert made.report.omitted_bytes == 0
        assert "is bfloat16 here, and float32 there" in made.report.notes[0]
    else:
        assert made.report.omitted_bytes == sum(each.nbytes for each in frozen.values())
        assert not made.report.notes
    again = load(2)
    made.restore({"model": again})
    expect_equal(dict(again.state_dict()), dict(model.state_dict()), ordered=False)
    for each in again.parameters():
        each.data.zero_()
    made.restore({"model": again}, options=RestoreOptions(base=None if kind == "bfloat16" else base))
    expect_equal(dict(again.state_dict()), dict(model.state_dict()), ordered=False)


@pytest.mark.parametrize("adapters", [1, 2])
def test_trainer_background_writes_adapters(tmp_path, adapters):
    config = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    texts = [{"input_ids": tokens, "labels": tokens} for tokens in torch.randint(0, 64, (48, 16))]
    written = []
    for kind in (Trainer, Background):
        torch.manual_seed(0)
        model = get_peft_model(LlamaForCausalLM(LlamaConfig(vocab_size=64, **sizes)), config)
        if adapters == 2:
            model.add_adapter("other", config)
        arguments = TrainingArguments(
            str(tmp_path / kind.__name__), max_steps=3, save_steps=2, report_to=[], use_cpu=True, disable_tqdm=True
        )
        kind(model, arguments, train_dataset=texts).train()
        root = tmp_path / kind.__name__ / "checkpoint-2"
        written.append({path.relative_to(root): load_file(path) for path in root.rglob("adapter_model.safetensors")})
    assert len(written[0]) == adapters
    assert written[0].keys() == written[1].keys()
    for name, tensors in written[0].items():
        expect_equal(tensors, written[1][name], ordered=False)


def test_trainer_background_writes_models_without_save_pretrained_or_optimizer(tmp_path):
    class Plain(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(2, 1)

        def forward(self, x):
            return {"loss": self.layer(x).square().mean()}

    arguments = TrainingArguments(
        str(tmp_path), max_steps=2, save_steps=1, save_only_model=True, save_total_limit=1, report_to=[], use_cpu=True,
        disable_tqdm=True,
    )  # fmt: skip
    model = Plain()
    Background(model, arguments, train_dataset=[{"x": torch.ones(2)}] * 8).train()
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-2"]
    expect_equal(read_weights(tmp_path / "checkpoint-2"), dict(model.state_dict()), ordered=False)
    assert not (tmp_path / "checkpoint-2" / MARK).exists()


def test_trainer_background_unwritten_weights_make_the_checkpoint_incomplete(tmp_path):
    class Failing(Background):
        def _finish(self, new, *arguments):
            if new.endswith("4"):
                Path(new, "model.safetensors.part").mkdir()
            super()._finish(new, *arguments)

    with pytest.raises(SnapshotError, match=r"checkpoint-4/model.safetensors: the weights were not written"):
        example.train(tmp_path, kind=Failing)
    assert not Snapshot(tmp_path / "checkpoint-4" / FOLDER).exists()
    assert find_last(str(tmp_path)) == str(tmp_path / "checkpoint-2")
    with pytest.raises(SnapshotNotFoundError, match="checkpoint-4: its weights were not written"):
        example.train(tmp_path, resume=str(tmp_path / "checkpoint-4"))


@pytest.mark.parametrize("durable", [True, False])
def test_trainer_background_syncs_all_files_before_old_checkpoints_are_deleted(tmp_path, monkeypatch, durable):
    class Noted(Background):
        snapshot_options = TakeOptions(durable=durable)

    def sync(path):
        assert (tmp_path / Path(path).parent / MARK).exists()
        flushed.append(str(Path(path).relative_to(tmp_path)))

    flushed = []
    monkeypatch.setattr("snapshot_trainers.trainer_folders.sync_path", sync)
    example.train(tmp_path, kind=Noted, stop_at=2)
    expected = {f"checkpoint-2/{name}" for name in (STATE, "config.json", "model.safetensors", "training_args.bin")}
    assert expected <= {*flushed} if durable else not flushed


def test_trainer_background_interrupted_wait_keeps_the_checkpoint(tmp_path, monkeypatch):
    resume, trainers = threading.Event(), []

    class Held(Background):
        def _finish(self, *arguments):
            trainers.append(self)
            assert resume.wait(60)
            super()._finish(*arguments)

    def interrupt(_):
        monkeypatch.undo()
        raise KeyboardInterrupt

    monkeypatch.setattr(transformers_mixin, "wait", interrupt)
    with pytest.raises(KeyboardInterrupt):
        example.train(tmp_path, kind=Held, stop_at=2)
    assert find_last(str(tmp_path)) is None
    resume.set()
    trainers[0]._wait_for_snapshot()
    assert find_last(str(tmp_path)) == str(tmp_path / "checkpoint-2")


class Scaled(example.SnapshotTrainer):
    """Trains with the scaler of float16, which accelerate creates on accelerators only."""

    def create_accelerator_and_postprocess(self):
        super().create_accelerator_and_postprocess()
        # it doubles after two finite steps, so the scale and its count differ at each step
        self.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=16.0, growth_interval=2)
        self.scales = []

    def training_step(self, *arguments, **options):
        loss = super().training_step(*arguments, **options)
        scaler = self.accelerator.scaler.state_dict()
        self.scales.append((self.state.global_step, scaler["scale"], scaler["_growth_tracker"]))
        return loss


@pytest.mark.parametrize("background", [False, True])
def test_trainer_grad_scaler_is_restored(tmp_path, background):
    seen = []

    class Noted(Scaled):
        snapshot_in_background = background

        def train(self, *arguments, **options):
            result = super().train(*arguments, **options)
            seen.append(self.scales)
            return result

    whole, weights = example.train(tmp_path / "whole", kind=Noted)
    example.train(tmp_path / "broken", stop_at=5, kind=Noted)
    resumed, others = example.train(tmp_path / "broken", resume=True, kind=Noted)
    assert resumed[-2:] == whole[-2:]
    expect_equal(weights, others, ordered=False)
    assert seen[0] == [(0, 16.0, 0), (1, 16.0, 1), (2, 32.0, 0), (3, 32.0, 1), (4, 64.0, 0), (5, 64.0, 1)]
    assert seen[2] == seen[0][4:]
    assert Snapshot(tmp_path / "broken" / "checkpoint-4" / FOLDER).read_object("0/scaler/scale") == 64.0


class Patience(TrainerCallback, ExportableState):
    """A callback with state."""

    def __init__(self, limit):
        self.limit, self.steps = limit, []

    def on_step_end(self, args, state, control, **_):
        self.steps.append(state.global_step)

    def state(self):
        return {"args": {"limit": self.limit}, "attributes": {"steps": self.steps}}


@pytest.mark.parametrize("kind", [example.SnapshotTrainer, Background])
def test_trainer_callbacks_are_restored(tmp_path, kind):
    class Watched(kind):
        def __init__(self, model, arguments, **options):
            arguments.restore_callback_states_from_checkpoint = True
            super().__init__(model, arguments, **options)
            self.add_callback(Patience(7 if not tmp_path.joinpath("checkpoint-2").exists() else 3))

        def train(self, *arguments, **options):
            result = super().train(*arguments, **options)
            (found,) = (each for each in self.callback_handler.callbacks if isinstance(each, Patience))
            seen.append((found.limit, found.steps))
            return result

    seen = []
    example.train(tmp_path, stop_at=3, kind=Watched)
    example.train(tmp_path, resume=True, kind=Watched)
    assert seen == [(7, [1, 2, 3]), (7, [1, 2, 3, 4, 5, 6])]


@pytest.mark.parametrize("kind", [example.SnapshotTrainer, Background])
def test_trainer_changed_callback_states_are_found(tmp_path, kind):
    class Watched(kind):
        def __init__(self, model, arguments, **options):
            super().__init__(model, arguments, **options)
            self.add_callback(Patience(7))

    example.train(tmp_path, stop_at=4, kind=Watched)
    last = tmp_path / "checkpoint-4"
    assert find_last(str(tmp_path)) == str(last)
    text, digest = (last / STATE).read_text(), (last / STATE_DIGEST).read_text()
    (last / STATE_DIGEST).write_text("")
    assert main(["verify", str(last)]) == 1
    (last / STATE_DIGEST).write_text(digest)
    (last / STATE).write_text(text.replace('"limit": 7', '"limit": 3'))
    assert find_last(str(tmp_path)) == str(tmp_path / "checkpoint-2")
    assert main(["verify", str(last)]) == 1
    with pytest.raises(SnapshotError, match=r"trainer_state\.json: digest of its values"):
        example.train(tmp_path, resume=str(last), kind=Watched)
    (last / STATE_DIGEST).unlink()  # as in older checkpoints
    assert find_last(str(tmp_path)) == str(last)


def test_trainer_optimizer_without_a_scheduler_is_not_resumed(tmp_path):
    example.train(tmp_path, stop_at=3, kind=Trainer)
    (tmp_path / "checkpoint-2" / "scheduler.pt").unlink()
    with pytest.raises(SnapshotNotFoundError, match="optimizer and a scheduler"):
        example.train(tmp_path, resume=True)


def test_trainer_background_end_of_training_deletes_no_pending_checkpoint(tmp_path):
    class Best(Background):
        def __init__(self, model, arguments, **options):
            arguments.save_total_limit, arguments.metric_for_best_model = 1, "loss"
            super().__init__(model, arguments, **options)

        def _save_checkpoint(self, model, trial):
            self.state.best_global_step = 2
            super()._save_checkpoint(model, trial)

        def _save_optimizer_and_scheduler(self, output_dir):
            super()._save_optimizer_and_scheduler(output_dir)
            assert self._pending is None

    example.train(tmp_path, kind=Best)
    assert [each.name for each in tmp_path.iterdir()] == ["checkpoint-2"]
