"""Options of a merge, and of the folders of PEFT adapters that a conversion writes."""

from __future__ import annotations

import os
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from snapshot.io.url import URL
from snapshot.progress import ProgressArgument

if TYPE_CHECKING:
    import torch


OTHERS = ("equal", "first")
"""What tensors that are not mixed must be: equal in all sources, or those of the first one."""


@dataclass(frozen=True, kw_only=True)
class MergeOptions:
    """The options of `merge` and `merge_lora`: `merge(sources, target, options=MergeOptions(dtype=torch.float16))`."""

    dtype: torch.dtype | None = None
    """Cast floating-point tensors of the result to this dtype, instead of that of the first source or base model."""
    verify: bool = True
    """Verify every digest, and the checksums of other libraries' formats."""
    memory_budget_bytes: int | None = None
    """Host memory: a quarter for reading, a quarter for mixing, and half for writing."""
    progress: ProgressArgument = None
    """True for a progress bar, or a function that is called with `Progress`."""
    ranks: bool = False
    """Share the work with all ranks of the `pg` of the first source or base model, or of the default process group;
    every rank calls. By default this process works alone, even if several ranks run."""


@dataclass(frozen=True)
class PEFTOptions:
    """Options of the folder of an adapter: `Target("adapter", format_options=PEFTOptions("adapter_config.json"))`.

    Args:
        adapter_config: The adapter_config.json to copy. Without these options, it is the one beside the source.
    """

    adapter_config: str | os.PathLike[str]
    to: ClassVar[str] = "peft"

    def __post_init__(self) -> None:
        if not isinstance(self.adapter_config, (str, os.PathLike)):
            raise TypeError(f"adapter_config must be a path or a URL, got {self.adapter_config!r}")

    def agreed(self) -> Mapping[str, object]:
        """Return what must be the same on all ranks."""
        return {"adapter_config": URL.parse(os.fspath(self.adapter_config))}

    @classmethod
    def add_flags(cls, parser: ArgumentParser) -> None:
        """Add the flag of the command."""
        parser.add_argument(
            "--adapter-config", metavar="FILE", help="for peft: the adapter_config.json, if not beside the source"
        )

    @classmethod
    def of_flags(cls, arguments: Namespace) -> PEFTOptions | None:
        """Return what the flag stands for."""
        return None if arguments.adapter_config is None else cls(arguments.adapter_config)
