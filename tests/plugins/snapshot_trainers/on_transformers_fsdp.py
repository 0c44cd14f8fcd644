"""The mixin under the real Trainer with FSDP2: 1 to 4 ranks, which are forks. `test_frameworks.py` runs this."""

import multiprocessing
import os
import shutil
import warnings

import pytest
import torch

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from accelerate.state import AcceleratorState, DistributedType, PartialState
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments
    from transformers.utils import logging

from snapshot import Snapshot
from snapshot.interop.weight_digests import FOLDER
from snapshot_trainers.transformers import SnapshotTrainerMixin
from tests.helpers.forked_ranks import fork_ranks
from tests.helpers.states import expect_equal

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*pin_memory.*:UserWarning"),
]
logging.disable_progress_bar()
logging.set_verbosity_error()


class Plain(SnapshotTrainerMixin, Trainer):
    pass


class Background(Plain):
    snapshot_in_background = True


class Stop(TrainerCallback):
    """Stops after a step, as a crash does."""

    def __init__(self, step):
        self.step = step

    def on_step_end(self, args, state, control, **_):
        control.should_training_stop |= state.global_step == self.step


# The ranks have no accelerator, so accelerate must take them for some.


def _as_accelerated(make):
    def init(self, *arguments, **options):
        make(self, *arguments, **options)
        if self.distributed_type is DistributedType.MULTI_CPU:
            self.distributed_type = DistributedType.MULTI_GPU

    return init


def sharded(folder, stop_at=None, resume=False, kind=Plain, adapter=False, **more):
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
    trainer = kind(model, arguments, train_dataset=texts, eval_dataset=texts[:12], callbacks=[Stop(stop_at)])
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
        expect_equal(weights, others, ordered=False)


def test_trainer_fsdp2_resumes_exactly(tmp_path):
    fork_ranks(2, tmp_path, _fsdp, tmp_path)
    left = {number: sorted(path.name for path in (tmp_path / number / "broken").iterdir()) for number in "012"}
    assert left == {
        "0": ["checkpoint-6", "checkpoint-8"],
        "1": ["checkpoint-6", "checkpoint-8"],
        "2": ["checkpoint-6", "checkpoint-8"],
    }
    snapshot = Snapshot(tmp_path / "0/broken/checkpoint-8" / FOLDER)
    assert snapshot.verify().ok
    assert "0/model/model.embed_tokens.weight" in snapshot.get_manifest()
    held = Snapshot(tmp_path / "2/broken/checkpoint-8" / FOLDER).get_manifest()
    tensors = {path for path, entry in held.items() if path.startswith("0/model/") and hasattr(entry, "shape")}
    assert tensors
    assert all("lora_" in path for path in tensors)


def _losses(folder, options):
    losses, weights, _ = sharded(folder, **options)
    return losses, {name: each.numpy().tobytes() for name, each in weights.items()}


def _alone(folder, options, queue):
    queue.put(_losses(folder, options))


def train_on(world, folder, **options):
    """Train on some ranks, with FSDP2 if they are several. Return the losses, and the bytes of the weights."""
    if world > 1:
        results = fork_ranks(world, folder.parent, _losses, folder, options)
        assert all(each == results[0] for each in results)
        return results[0]
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    process = context.Process(target=_alone, args=(folder, options, queue))
    process.start()
    result = queue.get(timeout=300)
    process.join(20)
    return result


def resume_on(worlds, folder, saved_on, **options):
    """Save on some ranks, and resume on others. Return the results by number of ranks."""
    train_on(saved_on, folder / "saved", stop_at=5, **options)
    results = {}
    for world in worlds:
        shutil.copytree(folder / "saved", folder / str(world))
        results[world] = train_on(world, folder / str(world), resume=True, **options)
        assert len(results[world][0]) == 8
    return results


def test_trainer_fsdp2_resumes_on_one_rank_and_the_reverse(tmp_path):
    (tmp_path / "a").mkdir(), (tmp_path / "b").mkdir()
    one = resume_on([1], tmp_path / "a", 2)[1]
    two = resume_on([2], tmp_path / "b", 1)[2]
    assert one[0] == pytest.approx(two[0], abs=1e-5)


@pytest.mark.parametrize("saved_on", [1, 2])
def test_trainer_fsdp2_resumes_an_adapter(tmp_path, saved_on):
    whole = train_on(saved_on, tmp_path / "whole", adapter=True)
    resumed = resume_on([1, 2], tmp_path, saved_on, adapter=True)
    assert resumed[saved_on] == whole
    assert resumed[3 - saved_on][0] == pytest.approx(whole[0], abs=1e-5)


@pytest.mark.slow
def test_trainer_fsdp2_of_two_ranks_resumes_on_one_to_four(tmp_path):
    losses, weights = train_on(2, tmp_path / "whole")
    resumed = resume_on([1, 2, 3, 4], tmp_path, 2)
    assert resumed[2] == (losses, weights)
    for world in (1, 3, 4):
        assert resumed[world][0] == pytest.approx(losses, abs=1e-5)


def _best(folder):
    options = {"eval_strategy": "steps", "eval_steps": 2, "load_best_model_at_end": True, "save_total_limit": 3}
    _, weights, trainer = sharded(folder / "run", metric_for_best_model="loss", greater_is_better=True, **options)
    best = trainer.state.best_model_checkpoint
    saved = Snapshot(f"{best}/{FOLDER}").get_state_dict_for_key("model")
    for name, value in weights.items():
        assert torch.equal(value, saved[name]), name


def test_trainer_fsdp2_loads_the_best_model(tmp_path):
    fork_ranks(2, tmp_path, _best, tmp_path)
