"""How Megatron's checkpoints before `torch_dist` are recognised: for the library's detection of formats."""

from snapshot.formats.registry import Format

MEGATRON = Format("megatron", 50, "snapshot_megatron.legacy:describe_folder", r"mp_rank_\d.*/")
