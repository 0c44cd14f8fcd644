"""Tensors that are published as they are: the trivial case of a tensor map."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from snapshot.tensors.geometry import Box, Shape, intersect, whole_box


class Spec(NamedTuple):
    """Dtype and shape of a tensor."""

    dtype: str
    shape: Shape


class Grid(NamedTuple):
    """A box of a tensor, at the same place in source and target."""

    box: Box

    @property
    def sizes(self) -> Shape:
        """Number of indices of each dimension."""
        return self.box.sizes

    @property
    def numel(self) -> int:
        """Number of elements."""
        return self.box.numel

    def clip(self, side: str, box: Box) -> list[Grid]:
        """Return the part of the grid that is in a box."""
        if not self.box.sizes:
            return [self]
        found = intersect(self.box, box)
        return [] if found is None else [Grid(found)]

    def view(self, side: str, tensor: torch.Tensor, origin: Shape) -> torch.Tensor:
        """Return the grid's elements in a tensor that holds a box, which begins at `origin`."""
        return tensor[self.box.relative_to(origin).slices()]


class Part(NamedTuple):
    """The elements of a target that come from one source."""

    source: str
    grid: Any


class Target(NamedTuple):
    """A tensor that is published."""

    dtype: str
    shape: Shape
    parts: tuple[Part, ...]

    @staticmethod
    def same(name: str, spec: Spec) -> Target:
        """Return the target that equals a source."""
        return Target(spec.dtype, spec.shape, (Part(name, Grid(whole_box(spec.shape))),))
