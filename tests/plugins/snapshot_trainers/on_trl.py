"""The mixin under trainers of TRL, which inherit from the Trainer: python on_trl.py."""

import copy
import tempfile
import warnings
from pathlib import Path

warnings.simplefilter("ignore")

import torch  # noqa: E402
from datasets import Dataset  # noqa: E402
from peft import LoraConfig  # noqa: E402
from tokenizers import Tokenizer, models, pre_tokenizers  # noqa: E402
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, TrainerCallback  # noqa: E402
from transformers.utils import logging  # noqa: E402
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer  # noqa: E402

from snapshot import Snapshot  # noqa: E402
from snapshot.interop.weight_digests import FOLDER  # noqa: E402
from snapshot_trainers.transformers import SnapshotTrainerMixin  # noqa: E402

logging.disable_progress_bar()
logging.set_verbosity_error()
WORDS = [f"w{number}" for number in range(60)]
STEPS, CUT = 6, 3


class SFT(SnapshotTrainerMixin, SFTTrainer):
    pass


class DPO(SnapshotTrainerMixin, DPOTrainer):
    pass


class Stop(TrainerCallback):
    """Stops after a step, as a crash does."""

    def on_step_end(self, args, state, control, **more):
        control.should_training_stop = state.global_step >= CUT


def make_tokenizer():
    words = {word: number for number, word in enumerate(["<unk>", "<pad>", "<eos>", *WORDS])}
    made = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=made, unk_token="<unk>", pad_token="<pad>", eos_token="<eos>", model_max_length=32
    )


def make_texts(seed):
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.randint(0, len(WORDS), (24, 10), generator=generator)
    return [" ".join(WORDS[number] for number in row) for row in numbers.tolist()]


def train(kind, folder, adapter=None, stop=False, resume=False):
    """Train with dropout. Return the losses, the trained weights, and the Trainer."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(vocab_size=63, max_position_embeddings=64, attention_dropout=0.1, **sizes)
    config._attn_implementation = "eager"
    config.pad_token_id, config.eos_token_id = 1, 2
    model = LlamaForCausalLM(config)
    # what a run does before it resumes must not matter
    torch.manual_seed(9 if resume else 0)
    settings = {
        "output_dir": str(folder), "max_steps": STEPS, "save_steps": CUT, "logging_steps": 1, "report_to": [],
        "per_device_train_batch_size": 4, "use_cpu": True, "learning_rate": 1e-3, "disable_tqdm": True,
        "gradient_checkpointing": False, "bf16": False, "max_length": 32,
    }  # fmt: skip
    if kind is SFT:
        data = Dataset.from_dict({"text": make_texts(1)})
        settings = SFTConfig(dataset_text_field="text", **settings)
        more = {}
    else:
        more = {} if adapter is not None else {"ref_model": copy.deepcopy(model)}
        data = Dataset.from_dict({"prompt": make_texts(1), "chosen": make_texts(2), "rejected": make_texts(3)})
        settings = DPOConfig(**settings)
    trainer = kind(
        model=model, args=settings, train_dataset=data, processing_class=make_tokenizer(), peft_config=adapter,
        callbacks=[Stop()] if stop else None, **more,
    )  # fmt: skip
    trainer.train(resume_from_checkpoint=resume or None)
    losses = [each["loss"] for each in trainer.state.log_history if "loss" in each]
    weights = {name: each for name, each in trainer.model.named_parameters() if each.requires_grad}
    return losses, weights, trainer


def check(kind, folder, adapter=None):
    """A run that is cut and resumed has the losses and weights of a whole one."""
    whole, weights, _ = train(kind, folder / "whole", adapter)
    assert len(whole) == STEPS
    train(kind, folder / "cut", adapter, stop=True)
    checkpoint = folder / "cut" / f"checkpoint-{CUT}"
    assert Snapshot(checkpoint / FOLDER).verify()
    assert not [*checkpoint.glob("optimizer*"), *checkpoint.glob("rng_state*")]
    resumed, others, _ = train(kind, folder / "cut", adapter, resume=True)
    assert resumed == whole, (resumed, whole)
    assert weights.keys() == others.keys()
    assert all(weights[name].equal(others[name]) for name in weights)
    if adapter is not None:
        trained = sum(each.nbytes for each in weights.values())
        held = Snapshot(checkpoint / FOLDER).metadata.nbytes
        held += sum(each.stat().st_size for each in checkpoint.glob("*.safetensors"))
        assert held < 1.1 * 3 * trained, f"{held} bytes for an adapter of {trained}, and two moments"


def main():
    with tempfile.TemporaryDirectory() as place:
        for kind in (SFT, DPO):
            check(kind, Path(place) / kind.__name__)
            adapter = LoraConfig(r=256, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
            check(kind, Path(place) / f"{kind.__name__}-adapter", adapter)


if __name__ == "__main__":
    main()
