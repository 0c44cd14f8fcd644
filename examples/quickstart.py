"""Train, get killed, resume, and end with the same bits as an undisturbed run.

    python examples/quickstart.py

`train` contains all code for checkpoints: an `app_state` with the objects to save, `Snapshot.take` every few steps, and
`Snapshot.restore` at the start. The rest of this file kills a process and compares the results.
"""

import argparse
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from torch import nn

from snapshot import RNGState, Snapshot, StateDict

STEPS = 60
SAVE_EVERY = 10
DIES_AT = 37


class TinyTransformer(nn.Module):
    """Predict the token after 16 tokens. Its dropout draws random numbers in every step."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, 64)
        layer = nn.TransformerEncoderLayer(64, nhead=4, dim_feedforward=128, dropout=0.1, batch_first=True)
        self.encode = nn.TransformerEncoder(layer, num_layers=2, enable_nested_tensor=False)
        self.predict = nn.Linear(64, 32)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.predict(self.encode(self.embed(tokens))[:, -1])


def random_batch() -> tuple[torch.Tensor, torch.Tensor]:
    """Return sequences that count up from a random token, and the token that follows each."""
    first = torch.randint(0, 32, (16, 1))
    tokens = (first + torch.arange(17)) % 32
    return tokens[:, :-1], tokens[:, -1]


def newest_snapshot(folder: Path) -> Snapshot | None:
    """Return the newest committed snapshot. An interrupted save is not committed."""
    folders = sorted(folder.glob("step-*"), key=lambda path: int(path.name.removeprefix("step-")), reverse=True)
    return next((snapshot for snapshot in map(Snapshot, folders) if snapshot.exists()), None)


def train(folder: Path, dies_at: int | None) -> None:
    torch.set_num_threads(1)  # the model is too small for a second thread
    torch.manual_seed(0)
    model = TinyTransformer()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=STEPS)
    progress = StateDict(step=0, losses=[])

    # Everything that the next step depends on. Without the scheduler or random numbers, the resumed run would differ.
    app_state = {
        "model": model,
        "optimizer": optimizer,
        "scheduler": scheduler,
        "progress": progress,
        "rng": RNGState(),
    }

    snapshot = newest_snapshot(folder)
    if snapshot:
        snapshot.restore(app_state)
        print(f"   resumed from {Path(snapshot.path).name}", flush=True)

    while progress["step"] < STEPS:
        tokens, wanted = random_batch()
        loss = nn.functional.cross_entropy(model(tokens), wanted)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        progress["step"] += 1
        progress["losses"].append(loss.item())

        if progress["step"] == dies_at:
            print(f"   step {dies_at}: loss {loss.item():.4f}, then killed by SIGKILL", flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        if progress["step"] % SAVE_EVERY == 0:
            Snapshot.take(folder / f"step-{progress['step']}", app_state)

    print(f"   step {STEPS}: loss {progress['losses'][-1]:.4f}", flush=True)


def run_in_its_own_process(folder: Path, dies_at: int | None = None) -> int:
    """Train in a new process, and return its exit status."""
    command = [sys.executable, __file__, "--train", str(folder)]
    if dies_at:
        command += ["--dies-at", str(dies_at)]
    return subprocess.run(command, check=False).returncode  # noqa: S603  (this very file)


def differences(a: Path, b: Path) -> list[str]:
    """Return the names of everything that differs between two finished runs, even by one bit."""
    one, other = Snapshot(a / f"step-{STEPS}"), Snapshot(b / f"step-{STEPS}")
    found = []
    if one.read_object("0/progress/losses") != other.read_object("0/progress/losses"):
        found.append("the losses")
    weights, others = one.get_state_dict_for_key("model"), other.get_state_dict_for_key("model")
    if weights.keys() != others.keys():
        found.append("the names of the weights")
    found += [name for name in weights if name in others and not torch.equal(weights[name], others[name])]
    return found


def main() -> int:
    with tempfile.TemporaryDirectory() as temporary:
        whole, broken = Path(temporary) / "whole", Path(temporary) / "broken"

        print(f"1. Train {STEPS} steps without an interruption")
        if run_in_its_own_process(whole) != 0:
            return 1

        print(f"2. Train again with a snapshot every {SAVE_EVERY} steps, and kill it in step {DIES_AT}")
        if run_in_its_own_process(broken, dies_at=DIES_AT) != -signal.SIGKILL:
            return 1

        print("3. Run the same command once more")
        if run_in_its_own_process(broken) != 0:
            return 1

        differing = differences(whole, broken)
        if differing:
            print(f"These differ: {', '.join(differing)}")
            return 1
        print(f"All {STEPS} losses and all weights are bit for bit the same.")
        return 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--train", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--dies-at", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.train:
        train(arguments.train, arguments.dies_at)
    else:
        sys.exit(main())
