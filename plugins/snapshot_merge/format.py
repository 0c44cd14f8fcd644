"""What PEFT's adapters are for the library: a format that conversions write."""

from snapshot.formats.registry import Format

PEFT = Format(
    "peft", writes="peft", plan="snapshot_merge.adapter_target:plan", options="snapshot_merge.options:PEFTOptions"
)
