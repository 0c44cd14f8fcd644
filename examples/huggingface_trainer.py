"""Train with Hugging Face's Trainer, interrupt it, and resume to the same bits.

    python examples/huggingface_trainer.py

Only the class differs from other uses of the Trainer. The mixin stores the optimizer, the scheduler and the random
numbers in a snapshot, in the Trainer's own checkpoint folder.
"""

import argparse
import tempfile
from pathlib import Path

import torch
from transformers import GPT2Config, GPT2LMHeadModel, PrinterCallback, Trainer, TrainerCallback, TrainingArguments
from transformers.utils import logging

from snapshot_trainers.transformers import SnapshotTrainerMixin


class SnapshotTrainer(SnapshotTrainerMixin, Trainer):
    pass


class Interrupt(TrainerCallback):
    """Interrupt training at a step."""

    def __init__(self, step: int | None) -> None:
        self.step = step

    def on_step_end(self, args, state, control, **_):
        if state.global_step == self.step:
            control.should_training_stop = True


def train(
    folder: Path, stop_at: int | None = None, resume: bool = False, kind: type[Trainer] = SnapshotTrainer
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Train six steps or fewer on a random text, and return the losses and the weights."""
    torch.manual_seed(0)
    texts = [{"input_ids": tokens, "labels": tokens} for tokens in torch.randint(0, 64, (16, 16))]
    model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=16, n_embd=32, n_layer=2, n_head=2))  # with dropout
    arguments = TrainingArguments(
        str(folder),
        max_steps=6,
        per_device_train_batch_size=4,
        save_steps=2,
        save_total_limit=2,
        logging_steps=1,
        learning_rate=1e-3,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    trainer = kind(model, arguments, train_dataset=texts, callbacks=[Interrupt(stop_at)])
    trainer.remove_callback(PrinterCallback)
    trainer.train(resume_from_checkpoint=resume)
    losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    return losses, model.state_dict()


def main(folder: Path) -> None:
    whole, weights = train(folder / "whole")
    train(folder / "broken", stop_at=3)  # the last checkpoint is of step 2, in the middle of an epoch
    resumed, others = train(folder / "broken", resume=True)
    assert resumed[-4:] == whole[-4:], "the losses differ"
    assert all(torch.equal(weights[name], others[name]) for name in weights), "the weights differ"
    print("Losses and weights of the interrupted run equal those of the other run, bit for bit.")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path, nargs="?")
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # the model is too small for a second thread
    logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as temporary:
        main(arguments.folder or Path(temporary))
