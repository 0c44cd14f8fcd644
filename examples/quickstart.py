"""Train, be killed, resume, and end up with the very same bits as a run that nobody killed.

    python examples/quickstart.py

The whole of checkpointing is in `train`: an `app_state` that names what there is to save, `Snapshot.take` every few
steps, and `Snapshot.restore` at the start. The rest of this file kills a process and compares what came of it.
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
    """Reads 16 tokens and says which of them comes next; its dropout draws random numbers in every step."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, 64)
        layer = nn.TransformerEncoderLayer(64, nhead=4, dim_feedforward=128, dropout=0.1, batch_first=True)
        self.encode = nn.TransformerEncoder(layer, num_layers=2, enable_nested_tensor=False)
        self.predict = nn.Linear(64, 32)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.predict(self.encode(self.embed(tokens))[:, -1])


def random_batch() -> tuple[torch.Tensor, torch.Tensor]:
    """Counting up from a random token: the next one is the last plus one."""
    first = torch.randint(0, 32, (16, 1))
    tokens = (first + torch.arange(17)) % 32
    return tokens[:, :-1], tokens[:, -1]


def newest_snapshot(folder: Path) -> Snapshot | None:
    """The last snapshot that was committed. What was cut off in the middle of a save does not exist, for `exists`."""
    folders = sorted(folder.glob("step-*"), key=lambda path: int(path.name.removeprefix("step-")), reverse=True)
    return next((snapshot for snapshot in map(Snapshot, folders) if snapshot.exists()), None)


def train(folder: Path, dies_at: int | None) -> None:
    torch.set_num_threads(1)  # the model is tiny: a second thread would only be waited for
    torch.manual_seed(0)
    model = TinyTransformer()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=STEPS)
    progress = StateDict(step=0, losses=[])

    # All that the next step depends on. Forget the scheduler or the random numbers, and the resumed run is another run.
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
    """Train in a fresh process, as a job that is started again would; how it ended."""
    command = [sys.executable, __file__, "--train", str(folder)]
    if dies_at:
        command += ["--dies-at", str(dies_at)]
    return subprocess.run(command, check=False).returncode  # noqa: S603  (this very file)


def differences(a: Path, b: Path) -> list[str]:
    """What differs between two finished runs: nothing may, not one bit."""
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

        print(f"1. {STEPS} steps without a break")
        if run_in_its_own_process(whole) != 0:
            return 1

        print(f"2. The same again, with a snapshot every {SAVE_EVERY} steps, killed in step {DIES_AT}")
        if run_in_its_own_process(broken, dies_at=DIES_AT) != -signal.SIGKILL:
            return 1

        print("3. The same command once more")
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
