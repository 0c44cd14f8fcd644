"""Options of the files of GGUF that a conversion writes."""

from __future__ import annotations

import os
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from typing import ClassVar, Literal

from snapshot.io.url import URL


@dataclass(frozen=True)
class GGUFOptions:
    """Options of a file for llama.cpp: `Target("model.gguf", format_options=GGUFOptions("base.gguf"))`.

    Args:
        kv_from: A file of GGUF of the same model family. Its key-values, such as those of the tokenizer, are copied to
            the new file. They also tell how names become those of GGUF.
        quantisation: `"Q8_0"`: round matrices to blocks of eight-bit numbers.
    """

    kv_from: str | os.PathLike[str]
    _: KW_ONLY
    quantisation: Literal["Q8_0"] | None = None
    to: ClassVar[str] = "gguf"

    def __post_init__(self) -> None:
        if not isinstance(self.kv_from, (str, os.PathLike)):
            raise TypeError(f"kv_from must be a path or a URL, got {self.kv_from!r}")
        if self.quantisation not in (None, "Q8_0"):
            raise ValueError(f"quantisation must be None or 'Q8_0', got {self.quantisation!r}")

    def agreed(self) -> Mapping[str, object]:
        """Return what must be the same on all ranks."""
        return {"kv_from": URL.parse(os.fspath(self.kv_from)), "quantisation": self.quantisation}

    @classmethod
    def add_flags(cls, parser: ArgumentParser) -> None:
        """Add the flags of the command."""
        parser.add_argument(
            "--kv-from", metavar="FILE", help="for gguf: a file of GGUF whose key-values the new file gets"
        )
        parser.add_argument("--quantisation", choices=("Q8_0",), help="for gguf: round matrices to 8 bits")

    @classmethod
    def of_flags(cls, arguments: Namespace) -> GGUFOptions | None:
        """Return what the flags stand for."""
        if arguments.kv_from is None:
            if arguments.quantisation is not None:
                raise ValueError("--quantisation needs --kv-from")
            return None
        return cls(arguments.kv_from, quantisation=arguments.quantisation)
