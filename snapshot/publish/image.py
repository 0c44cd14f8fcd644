"""Host memory with the tensors that one rank owns, in one buffer that is used again."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
import torch

from snapshot.maps.recipe import Target
from snapshot.publish.shares import ALIGNMENT, target_bytes
from snapshot.state.leaves import Leaf
from snapshot.tensors.dtypes import BY_NAME


class HostImage:
    """The bytes of a rank's targets. Two images take turns: the last published one is the base of the next."""

    def __init__(self, targets: Mapping[str, Target]) -> None:
        self.targets = dict(targets)
        self._places: dict[str, int] = {}
        position = 0
        for name, target in self.targets.items():
            self._places[name] = position
            position += -(-target_bytes(target) // ALIGNMENT) * ALIGNMENT
        self._buffer = torch.empty(position, dtype=torch.uint8)

    @property
    def nbytes(self) -> int:
        """The bytes of the buffer."""
        return self._buffer.numel()

    def fits(self, targets: Mapping[str, Target]) -> bool:
        """Return True if the image is for targets of these names, dtypes and shapes."""
        return describe_targets(self.targets) == describe_targets(targets)

    def tensor(self, name: str) -> torch.Tensor:
        """Return a view of a target's memory."""
        target = self.targets[name]
        begin = self._places[name]
        flat = self._buffer[begin : begin + target_bytes(target)]
        return flat.view(BY_NAME[target.dtype]).view(target.shape)

    def bytes(self, name: str) -> npt.NDArray[np.uint8]:
        """Return a target's memory as bytes."""
        begin = self._places[name]
        return self._buffer[begin : begin + target_bytes(self.targets[name])].numpy()

    def leaf(self, name: str) -> Leaf:
        """Return a target as a leaf for the writer."""
        target, tensor = self.targets[name], self.tensor(name)
        nbytes = target_bytes(target)
        return Leaf(name, tensor, target.dtype, target.shape, nbytes, tensor.data_ptr() if nbytes else 0, True)


def describe_targets(targets: Mapping[str, Target]) -> list[tuple[str, str, tuple[int, ...]]]:
    """Return the names, dtypes and shapes of targets, in order."""
    return [(name, target.dtype, tuple(target.shape)) for name, target in targets.items()]
