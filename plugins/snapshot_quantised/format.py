"""Quantised weights for the library: a view of a checkpoint with plain ones."""

from snapshot.formats.registry import Format

QUANTISED = Format(
    "quantised",
    view="snapshot_quantised.dequantising:dequantise_checkpoint",
    methods=("awq", "bitsandbytes", "gptq", "gptq_v2"),
)
