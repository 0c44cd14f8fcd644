"""Weights that a framework writes with safetensors: copied when it does, and written to their files later."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from snapshot.errors import SnapshotError
from snapshot.io.accelerators import await_host_copies
from snapshot.io.system import PerProcess

_WRITERS = ("safetensors.torch", "transformers.modeling_utils", "peft.peft_model")
"""Modules that name safetensors' `save_file`. One that is unknown here writes its files itself, as always."""
_capturing = PerProcess(threading.Lock)
"""Held while `save_file` is replaced: two threads would not put it back in order."""


class _File(NamedTuple):
    path: str
    tensors: dict[str, torch.Tensor]
    metadata: Any


class StagedWeights:
    """Copies of the weights of one save at a time. Their memory is kept for the next one."""

    def __init__(self) -> None:
        self._files: list[_File] = []
        self._memory: dict[tuple[int, str], torch.Tensor] = {}

    @contextmanager
    def capture(self) -> Iterator[None]:
        """Copy the tensors that this thread hands to safetensors' `save_file`, instead of writing them."""
        with _capturing.get():
            yield from self._capture()

    def _capture(self) -> Iterator[None]:
        self._files = []
        own, write = threading.get_ident(), _save_file()

        def stage(tensors: Mapping[str, torch.Tensor], filename: Any, metadata: Any = None) -> None:
            if threading.get_ident() != own:
                write(tensors, filename, metadata)
                return
            number = len(self._files)
            copies = {name: self._copy((number, name), each) for name, each in tensors.items()}
            self._files.append(_File(os.fspath(filename), copies, metadata))

        named = [
            (module, name)
            for module in filter(None, map(sys.modules.get, _WRITERS))
            for name in ("save_file", "safe_save_file")
            if getattr(module, name, None) is write
        ]
        for module, name in named:
            setattr(module, name, stage)
        try:
            yield
        finally:
            for module, name in named:
                setattr(module, name, write)
        await_host_copies(self._memory.values())

    def write(self) -> None:
        """Write the files. Each has its name when it is whole."""
        files, self._files = self._files, []
        for path, tensors, metadata in files:
            try:
                _save_file()(tensors, f"{path}.part", metadata)
                os.replace(f"{path}.part", path)
            except Exception as error:  # safetensors has exceptions of its own
                raise SnapshotError(f"{path}: the weights were not written: {type(error).__name__}: {error}") from error

    def _copy(self, key: tuple[int, str], tensor: torch.Tensor) -> torch.Tensor:
        tensor = tensor.detach()
        if type(tensor) is not torch.Tensor:  # a subclass has memory of its own kind
            return tensor.clone()
        pinned = tensor.device.type == "cuda"
        held = self._memory.get(key)
        if held is None or held.shape != tensor.shape or held.dtype != tensor.dtype:
            held = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=pinned)
            self._memory[key] = held
        return held.copy_(tensor, non_blocking=pinned)


def _save_file() -> Any:
    return sys.modules["safetensors.torch"].save_file
