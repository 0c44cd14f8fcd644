"""Checkpoints of DeepSpeed in an archive, and a stand-in for one."""

from pathlib import Path

import torch

from tests.helpers.stand_in_pickles import New, save

ARCHIVE = Path(__file__).with_name("deepspeed_files.zip")
STAGES = ["stage1", "stage2", "stage2-float32", "stage3", "stage3-groups"]
UNIVERSAL = ["stage2", "stage3"]
READ = [*STAGES, *(f"{name}-universal" for name in UNIVERSAL)]


def expected_of(files, name):
    return torch.load(files / f"{name.removesuffix('-universal')}.expected.pt")


def write_stand_in(folder, **changes):
    """Write a checkpoint of ZeRO 2 with one rank, and changes of it."""
    shapes = changes.get("shapes", [{"w": torch.Size([2, 3])}])
    flat = changes.get("flat", torch.arange(6.0))
    held = {
        "zero_stage": New("deepspeed.runtime.zero.config ZeroStageEnum", changes.get("stage", 2)),
        "single_partition_of_fp32_groups": changes.get("groups", [flat]),
        "base_optimizer_state": {
            "state": changes.get("state", {0: {"exp_avg": torch.ones(6), "step": 4}}),
            "param_groups": changes.get("param_groups", [{"lr": 0.5, "params": [0]}]),
        },
        "param_alignment_paddings": changes.get("paddings", [[0]]),
    }
    module = changes.get("module", {"w": torch.arange(6.0).view(2, 3)})
    save({"module": module, "param_shapes": shapes, **changes.get("more", {})}, folder / "mp_rank_00_model_states.pt")
    save({"optimizer_state_dict": held}, folder / "zero_pp_rank_0_mp_rank_00_optim_states.pt")
