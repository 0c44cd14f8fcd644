"""The mixin under the real Trainer, and a loop with accelerate. `test_transformers.py` runs this in a process of its
own, which imports them once."""

import importlib.util
import multiprocessing
import os
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from accelerate.state import AcceleratorState, DistributedType, PartialState
    from peft import LoraConfig, get_peft_model
    from transformers import GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments
    from transformers.utils import logging

from snapshot import Snapshot, SnapshotError, SnapshotNotFoundError
from snapshot.interop.transformers import FOLDER, SnapshotTrainerMixin, _find_last

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*pin_memory.*:UserWarning"),
]
logging.disable_progress_bar()
logging.set_verbosity_error()


def _example(name):
    spec = importlib.util.spec_from_file_location(name, Path(__file__).parents[2] / "examples" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


example = _example("huggingface_trainer")
loop = _example("accelerate_loop")


def same(one, other):
    assert one.keys() == other.keys()
    for name in one:
        assert torch.equal(one[name], other[name]), name


def _trainer(folder):
    whole, weights = example.train(folder / "whole")
    example.train(folder / "broken", stop_at=3)
    resumed, others = example.train(folder / "broken", resume=True)
    assert resumed[-4:] == whole[-4:]
    same(weights, others)


def _rank(run, rank, folder, answers):
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", 2), rank=rank, world_size=2)
    warnings.simplefilter("ignore")
    try:
        run(folder)
        answers.put((rank, None))
    except BaseException as error:
        answers.put((rank, repr(error)))
        raise


def two(run, folder):
    """Run something as two ranks. Before all else, while no thread has been started: what is forked then is sound."""
    context = multiprocessing.get_context("fork")
    answers = context.Queue()
    ranks = [context.Process(target=_rank, args=(run, rank, folder, answers)) for rank in range(2)]
    for each in ranks:
        each.start()
    assert sorted(answers.get(timeout=90) for _ in ranks) == [(0, None), (1, None)]
    for each in ranks:
        each.join(20)


# FSDP2. The ranks have no accelerator, so accelerate must take them for some.


class Background(example.SnapshotTrainer):
    snapshot_in_background = True


def _as_accelerated(make):
    def init(self, *arguments, **options):
        make(self, *arguments, **options)
        if self.distributed_type is DistributedType.MULTI_CPU:
            self.distributed_type = DistributedType.MULTI_GPU

    return init


def sharded(folder, stop_at=None, resume=False, kind=example.SnapshotTrainer, adapter=False, **more):
    """Train eight steps of 12 samples. Return the losses, the weights, and the Trainer."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world > 1 and not hasattr(PartialState.__init__, "__wrapped__"):
        made = _as_accelerated(PartialState.__init__)
        made.__wrapped__ = PartialState.__init__
        PartialState.__init__ = made
    AcceleratorState._reset_state(reset_partial_state=True)
    torch.manual_seed(0)
    texts = [{"input_ids": tokens, "labels": tokens} for tokens in torch.randint(0, 64, (48, 16))]
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=64, max_position_embeddings=16, **sizes))
    if adapter:
        model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))
    if world > 1:
        wrapped = {"version": 2, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]}
        more |= {
            "ddp_backend": "gloo",
            "fsdp": True,
            "fsdp_config": {**wrapped, "state_dict_type": "SHARDED_STATE_DICT"},
        }
    arguments = TrainingArguments(
        str(folder), max_steps=8, save_steps=2, per_device_train_batch_size=12 // world, logging_steps=1,
        learning_rate=1e-2, weight_decay=0.1, report_to=[], use_cpu=True, disable_tqdm=True,
        **{"save_total_limit": 2, **more},
    )  # fmt: skip
    trainer = kind(
        model, arguments, train_dataset=texts, eval_dataset=texts[:12], callbacks=[example.Interrupt(stop_at)]
    )
    trainer.train(resume_from_checkpoint=resume)
    losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    weights = {name: value.detach() for name, value in trainer.model.named_parameters()}
    return losses, {n: v.full_tensor() if hasattr(v, "full_tensor") else v for n, v in weights.items()}, trainer


def _fsdp(folder):
    for number, options in enumerate([{}, {"kind": Background}, {"adapter": True}]):
        root = folder / str(number)
        whole, weights, trainer = sharded(root / "whole", **options)
        assert trainer.is_fsdp_enabled
        sharded(root / "broken", stop_at=5, **options)
        resumed, others, _ = sharded(root / "broken", resume=True, **options)
        assert resumed == whole
        same(weights, others)


def test_ranks_of_fsdp_resume_to_the_same_bits(tmp_path):
    two(_fsdp, tmp_path)
    left = {number: sorted(path.name for path in (tmp_path / number / "broken").iterdir()) for number in "012"}
    assert left == {
        "0": ["checkpoint-6", "checkpoint-8"],
        "1": ["checkpoint-4", "checkpoint-6", "checkpoint-8"],  # one more, while the newest was written
        "2": ["checkpoint-6", "checkpoint-8"],
    }
    snapshot = Snapshot(tmp_path / "0/broken/checkpoint-8" / FOLDER)
    assert snapshot.verify().ok
    assert "0/model/model.embed_tokens.weight" in snapshot.get_manifest()
    held = Snapshot(tmp_path / "2/broken/checkpoint-8" / FOLDER).get_manifest()
    tensors = {path for path, entry in held.items() if path.startswith("0/model/") and hasattr(entry, "shape")}
    assert tensors
    assert all("lora_" in path for path in tensors)


def _stopped(folder):
    sharded(folder / "run", stop_at=5)


def _resumed(folder):
    losses, _, _ = sharded(folder / "run", resume=True)
    torch.save(losses, folder / "losses.pt")


def test_a_run_of_fsdp_resumes_on_one_rank_and_a_run_of_one_rank_with_fsdp(tmp_path):
    (tmp_path / "a").mkdir(), (tmp_path / "b").mkdir()
    two(_stopped, tmp_path / "a")
    context = multiprocessing.get_context("fork")
    for work, folder in ((_resumed, "a"), (_stopped, "b")):
        alone = context.Process(target=work, args=(tmp_path / folder,))
        alone.start()
        alone.join(90)
        assert alone.exitcode == 0
    two(_resumed, tmp_path / "b")
    one, other = (torch.load(tmp_path / name / "losses.pt") for name in "ab")
    assert len(one) == len(other) == 8
    assert one == pytest.approx(other, abs=1e-5)


def _best(folder):
    options = {"eval_strategy": "steps", "eval_steps": 2, "load_best_model_at_end": True, "save_total_limit": 3}
    _, weights, trainer = sharded(folder / "run", metric_for_best_model="loss", greater_is_better=True, **options)
    best = trainer.state.best_model_checkpoint
    saved = Snapshot(f"{best}/{FOLDER}").get_state_dict_for_key("model")
    for name, value in weights.items():
        assert torch.equal(value, saved[name]), name


def test_the_best_model_of_fsdp_is_loaded(tmp_path):
    two(_best, tmp_path)


def test_data_parallel_ranks_resume_to_the_same_bits(tmp_path):
    two(_trainer, tmp_path)
    snapshot = Snapshot(tmp_path / "broken" / "checkpoint-6" / FOLDER)
    assert snapshot.verify()
    assert {path.split("/")[1] for path in snapshot.get_manifest() if path.startswith("1/")} == {"rng"}


def test_ranks_of_accelerate_resume_to_the_same_bits(tmp_path):
    two(loop.main, tmp_path)
    snapshot = Snapshot(tmp_path / "broken" / "step-20")
    assert snapshot.verify()
    own = {path.split("/", 1)[1] for path in snapshot.get_manifest() if path.startswith("1/")}
    assert {path.split("/")[0] for path in own} == {"rng", "progress"}  # the losses are each rank's own


def test_a_loop_with_accelerate_resumes_to_the_same_bits(tmp_path, capsys):
    loop.main(tmp_path)
    assert "bit for bit" in capsys.readouterr().out
    assert Snapshot(tmp_path / "broken" / "step-20").read_object("0/progress/epoch") == 2
    AcceleratorState._reset_state(reset_partial_state=True)  # the Trainer wants one of its own


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """What a run that nobody interrupts comes to."""
    return example.train(tmp_path_factory.mktemp("whole"))


def test_an_interrupted_run_resumes_to_the_same_bits(tmp_path, capsys):
    example.main(tmp_path)
    assert "bit for bit" in capsys.readouterr().out
    left = {file.name for file in (tmp_path / "broken" / "checkpoint-6").iterdir()}
    assert {FOLDER, "model.safetensors", "trainer_state.json"} <= left
    assert not {name for name in left if name.startswith(("optimizer", "scheduler", "scaler", "rng_state"))}
    assert {file.name for file in (tmp_path / "broken").iterdir()} == {"checkpoint-4", "checkpoint-6"}
    snapshot = Snapshot(tmp_path / "broken" / "checkpoint-6" / FOLDER)
    assert snapshot.verify()
    assert snapshot.read_object("0/optimizer/state/0/step") == 6
    GPT2LMHeadModel.from_pretrained(tmp_path / "broken" / "checkpoint-6")


def test_without_the_random_numbers_the_run_would_be_another(tmp_path, whole):
    class Forgets(example.SnapshotTrainer):
        def _load_rng_state(self, checkpoint):
            pass

    example.train(tmp_path, stop_at=3)
    resumed, _ = example.train(tmp_path, resume=True, kind=Forgets)
    assert resumed[-4:] != whole[0][-4:]


def test_a_checkpoint_of_the_trainer_itself_is_read_as_before(tmp_path, whole):
    losses, weights = whole
    example.train(tmp_path / "broken", stop_at=3, kind=Trainer)
    assert (tmp_path / "broken" / "checkpoint-2" / "optimizer.pt").exists()
    resumed, others = example.train(tmp_path / "broken", resume=True)
    assert resumed[-4:] == losses[-4:]
    same(weights, others)
    assert Snapshot(tmp_path / "broken" / "checkpoint-6" / FOLDER).exists()


def test_a_checkpoint_without_the_optimizers_state_is_an_error_not_a_fresh_optimizer(tmp_path):
    example.train(tmp_path, stop_at=3)
    Snapshot(tmp_path / "checkpoint-2" / FOLDER).delete()
    with pytest.raises(SnapshotNotFoundError, match="checkpoint-2: has neither 'trainer_snapshot' nor"):
        example.train(tmp_path, resume=True)


def test_damage_is_found_before_training_goes_on(tmp_path):
    example.train(tmp_path, stop_at=3)
    file = max((tmp_path / "checkpoint-2" / FOLDER / "data").iterdir(), key=lambda each: each.stat().st_size)
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    with pytest.raises(SnapshotError, match="damaged"):
        example.train(tmp_path, resume=True)


def test_options_reach_the_take(tmp_path):
    class Noted(example.SnapshotTrainer):
        snapshot_options = {"durable": False, "metadata": {"by": "a test"}}  # noqa: RUF012

    example.train(tmp_path, stop_at=2, kind=Noted)
    assert Snapshot(tmp_path / "checkpoint-2" / FOLDER).metadata.metadata == {"by": "a test"}


def test_what_saves_in_a_way_of_its_own_is_refused(tmp_path):
    class Sharded(example.SnapshotTrainer):
        def _save_optimizer_and_scheduler(self, output_dir):
            self.is_fsdp_enabled = True
            super()._save_optimizer_and_scheduler(output_dir)

    with pytest.raises(SnapshotError, match="training uses FSDP1, which has its own checkpoint format"):
        example.train(tmp_path, stop_at=3, kind=Sharded)


def test_bases_in_the_wrong_order_and_trainers_of_other_versions_are_told(tmp_path):
    class Backwards(Trainer, SnapshotTrainerMixin):
        pass

    with pytest.raises(TypeError, match=r"write class Backwards\(SnapshotTrainerMixin, Trainer\)"):
        SnapshotTrainerMixin.__init__(Backwards.__new__(Backwards))

    class Old:
        def _save_optimizer_and_scheduler(self, output_dir):
            pass

    class OfOld(SnapshotTrainerMixin, Old):
        pass

    with pytest.raises(SnapshotError, match="has no method _save_checkpoint with 2 arguments"):
        OfOld()


def test_a_checkpoint_that_was_not_committed_is_passed_over(tmp_path, whole, caplog):
    example.train(tmp_path, stop_at=5)
    (tmp_path / "checkpoint-4" / FOLDER / ".snapshot_metadata").unlink()
    resumed, weights = example.train(tmp_path, resume=True)
    assert resumed[-4:] == whole[0][-4:]
    same(weights, whole[1])
    assert "checkpoint-4: is not complete, and is passed over" in caplog.text


def test_a_failed_save_in_the_background_is_an_error_of_the_next_one(tmp_path):
    class Failing(Background):
        def _save_optimizer_and_scheduler(self, output_dir):
            folder = Path(output_dir) / FOLDER
            folder.mkdir(parents=True)
            (folder / "data").write_text("in the way")
            super()._save_optimizer_and_scheduler(output_dir)

    with pytest.raises(SnapshotError, match="data"):
        example.train(tmp_path, kind=Failing)


@pytest.mark.parametrize("only_model", [False, True])
@pytest.mark.parametrize("parent", [example.SnapshotTrainer, Background])
def test_a_checkpoint_that_is_saved_again_never_mixes_old_and_new(tmp_path, parent, only_model):
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
        assert _find_last(str(tmp_path)) == str(again[0])
    assert (again[1] / "model.safetensors").exists()
    assert not Snapshot(again[1] / FOLDER).exists()


def test_incomplete_checkpoints_do_not_displace_the_last_good_one(tmp_path):
    class One(Background):
        def __init__(self, model, arguments, **options):
            arguments.save_total_limit = 1
            super().__init__(model, arguments, **options)

    example.train(tmp_path, stop_at=2)
    (tmp_path / "checkpoint-3" / FOLDER).mkdir(parents=True)  # as a crash left it
    example.train(tmp_path, resume=str(tmp_path / "checkpoint-2"), kind=One, stop_at=4)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["checkpoint-2", "checkpoint-3", "checkpoint-4"]


def test_the_end_of_training_deletes_no_checkpoint_that_is_being_written(tmp_path):
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
