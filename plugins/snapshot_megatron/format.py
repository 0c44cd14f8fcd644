"""How Megatron's checkpoints are recognised: for the library's detection of formats."""

from snapshot.formats.registry import Format

MEGATRON = Format("megatron", 50, "snapshot_megatron.legacy:describe_folder", r"mp_rank_\d.*/")
CORE = Format("megatron_core", 15, refines="dcp", refine="snapshot_megatron.directories:refine")
"""Directories of Megatron-core's `torch_dist`, which DCP opens."""
