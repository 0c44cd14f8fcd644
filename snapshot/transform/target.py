"""Target: the checkpoint that a verb writes, its place, and its format."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Any, Literal, get_args

from snapshot.distributed.operation import Operation
from snapshot.formats.hugging_face import SHARD
from snapshot.io.session import Session
from snapshot.io.url import URL, Location, expect_mapping
from snapshot.options import expect_positive
from snapshot.save.compression import expect_compression, usual_budget

Format = Literal["snapshot", "safetensors", "torch", "dcp"]
FORMATS: tuple[str, ...] = get_args(Format)
_FORMAT_OF = {".safetensors": "safetensors", ".pt": "torch", ".pth": "torch", "": "snapshot"}
_SUFFIX = re.compile(r"[^/]\.[A-Za-z][A-Za-z0-9_-]*$")
"""Suffix of a file name: `step-1.5` and `.hidden` have none."""


def suffix_of(url: URL) -> str:
    """Return the suffix of a name in lower case, with its dot; empty without one."""
    found = _SUFFIX.search(url.location)
    return "" if found is None else found[0][1:].lower()


def format_by_name(url: URL, choice: str) -> str:
    """Return the format for the suffix of a name. If it is unknown, raise ValueError that names another `choice`."""
    suffix = suffix_of(url)
    if suffix not in _FORMAT_OF:
        raise ValueError(f"{url}: the suffix must be .safetensors, .pt or .pth, got {suffix!r}; or pass {choice}")
    return _FORMAT_OF[suffix]


@dataclass(frozen=True)
class Target:
    """The checkpoint that `Snapshot.convert`, `Snapshot.copy` or `merge` writes. A path stands for `Target(path)`.

    Args:
        url: The destination: a folder. For `"torch"`, and for a name ending in `.safetensors`, a file.
        to: `"snapshot"`; `"safetensors"`: one file, or a folder as Hugging Face has it; `"torch"`: a file as
            torch.save writes it; `"dcp"`: a folder that `torch.distributed.checkpoint.load` reads. By default, the
            suffix of `url` decides: `.safetensors`, `.pt` or `.pth`; without a suffix, a snapshot is written.
        overwrite: Replace an existing checkpoint. An existing snapshot stays whole until the new one is committed.
        compression: `"zstd"`: compress the data files of a snapshot. See docs/compression.md.
        durable: Return only when the result survives a loss of power.
        shard_bytes: The maximum size of each file if there are several.
        storage_options: Options for the storage plugin of `url`.

    >>> from snapshot import Target
    >>> Target("model.safetensors").format
    'safetensors'
    """

    url: str | os.PathLike[str]
    to: Format | None = None
    _: KW_ONLY
    overwrite: bool = False
    compression: Literal["zstd"] | None = None
    durable: bool = True
    shard_bytes: int = SHARD
    storage_options: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.url, (str, os.PathLike)):
            raise TypeError(f"url must be a path or a URL, got {self.url!r}")
        if self.to is not None and self.to not in FORMATS:
            raise ValueError(f"to must be one of {', '.join(map(repr, FORMATS))}, got {self.to!r}")
        expect_positive("shard_bytes", self.shard_bytes)
        expect_mapping(self.storage_options)
        compression: object = self.compression
        if compression == "auto":
            raise ValueError("compression must be None or 'zstd' here, got 'auto': only takes are measured")
        expect_compression(compression)

    @classmethod
    def of(cls, target: str | os.PathLike[str] | Target) -> Target:
        """Return a target; a path becomes one with the defaults."""
        if isinstance(target, Target):
            return target
        if not isinstance(target, (str, os.PathLike)):
            raise TypeError(f"target must be a path, a URL or a Target, got {target!r}")
        return cls(target)

    @property
    def place(self) -> Location:
        """The parsed URL, and the storage options."""
        return Location(URL.parse(os.fspath(self.url)), self.storage_options)

    @property
    def format(self) -> str:
        """The format to write, also if the suffix of the name decides; raise ValueError if it does not."""
        return self.to or format_by_name(self.place.url, f"to=, one of {', '.join(map(repr, FORMATS))}")

    def open(self, operation: Operation, folder: URL, *, default_budget: int | None = None) -> Session:
        """Open the storage of a folder. The caller closes it. Half of the memory is for writing."""
        usual = usual_budget(self.compression) if default_budget is None else default_budget
        return Session(
            folder,
            self.storage_options,
            durable=self.durable,
            budget=operation.part(2),
            default_budget=usual,
        )

    def agreed(self) -> dict[str, object]:
        """Return the arguments that must be the same on all ranks."""
        return {
            "destination": self.place.url,
            "to": self.to,
            "shard_bytes": self.shard_bytes,
            "overwrite": self.overwrite,
            "compression": self.compression,
        }
