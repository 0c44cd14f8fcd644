"""Health of tensors: norms, and numbers of values that are not finite, read part by part."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from snapshot.cli.listing import stored_place
from snapshot.cli.statistics import countable, widened
from snapshot.errors import SnapshotError
from snapshot.loading.open import expect_files
from snapshot.loading.read_plan import ReadPlan
from snapshot.loading.stored_ranges import stored_of
from snapshot.manifest import entries as e
from snapshot.manifest.document import Document
from snapshot.manifest.rank_view import is_shared
from snapshot.manifest.validate import check_tensor, find_locations
from snapshot.plan.globs import matcher
from snapshot.runtime.loop import run
from snapshot.runtime.session import Session
from snapshot.tensors.dtypes import BY_NAME, ITEMSIZE
from snapshot.tensors.geometry import Box, split_shape
from snapshot.verbs.diff_stats import STEP, l2_norm

AT_ONCE = 16 << 20
"""Bytes that are read at once."""
EACH = 8
"""Number of tensors whose values are reported one by one."""
WORST = 20
"""Number of tensors with values that are not finite that are reported."""


class Abandoned(SnapshotError):
    """Raised when the caller does not wait for the result any more."""


@dataclass(frozen=True, slots=True)
class TensorHealth:
    """Norm and number of the finite values of a tensor, and the numbers of the others."""

    norm: float = 0.0
    finite: int = 0
    nan: int = 0
    infinite: int = 0

    def __add__(self, other: TensorHealth) -> TensorHealth:
        norm, finite = math.hypot(self.norm, other.norm), self.finite + other.finite
        return TensorHealth(norm, finite, self.nan + other.nan, self.infinite + other.infinite)

    def as_json(self) -> dict[str, Any]:
        return {"norm": self.norm if self.finite else math.nan, "nan": self.nan, "infinite": self.infinite}


def measured_tensors(document: Document, glob: str) -> dict[str, tuple[str, e.AnyTensor]]:
    """Return the floating-point tensors that a glob matches: path in the manifest and entry, by name.

    The name of a tensor means this tensor only, also if it contains a wildcard. Tied tensors appear once. Tensors that
    only the base has are left out.
    """
    exact = any(path.partition("/")[2] == glob for path in document.manifest)
    wanted, in_base = glob.__eq__ if exact else matcher([glob]), document.files.keys() - document.own_files.keys()
    found: dict[str, tuple[str, e.AnyTensor]] = {}
    seen = set[Any]()
    for path, entry in document.manifest.items():
        logical = path.partition("/")[2]
        if not isinstance(entry, e.TENSORS) or not (wanted(logical) and _is_measured(entry)):
            continue
        place = stored_place(entry)
        if place in seen or (in_base and any(each.location in in_base for each in stored_of(entry))):
            continue
        seen.add(place)
        shared = (document.world_size == 1 or is_shared(entry)) and logical not in found
        found[logical if shared else path] = path, entry
    return found


def _is_measured(entry: e.AnyTensor) -> bool:
    dtype = BY_NAME.get(entry.dtype) if entry.nbytes else None
    return dtype is not None and (dtype.is_floating_point or dtype.is_complex) and countable(dtype)


def size_of(tensors: Mapping[str, tuple[str, e.AnyTensor]]) -> int:
    """Return the number of bytes that are read for the health of some tensors."""
    return sum(math.prod(entry.shape) * ITEMSIZE[entry.dtype] for _, entry in tensors.values())


def health(session: Session, document: Document, glob: str, is_over: Callable[[], bool]) -> dict[str, Any]:
    """Return the health of the tensors that a glob matches: of all together, of the first ones, and of the worst ones.

    Raise Abandoned soon after `is_over` returned True.
    """
    tensors = measured_tensors(document, glob)
    entries = dict(tensors.values())
    for path, entry in entries.items():
        check_tensor(path, entry, document.files)
    run(expect_files(session, document, find_locations(entries, document.files)))
    measured = dict.fromkeys(tensors, TensorHealth())
    for batch in _batches(tensors):
        if is_over():
            raise Abandoned
        read_plan = ReadPlan(document.files)
        parts = []
        for name, box in batch:
            path, entry = tensors[name]
            parts.append((name, torch.empty(box.sizes, dtype=BY_NAME[entry.dtype])))
            read_plan.into_box(path, entry, box, parts[-1][1])
        read_plan.execute(session, verify=True)
        for name, part in parts:
            measured[name] += _health_of(part)
    ill = [each for each in measured.items() if each[1].nan or each[1].infinite]
    ill.sort(key=lambda each: -each[1].nan - each[1].infinite)
    return {
        "tensors": len(tensors),
        "bytes": size_of(tensors),
        **sum(measured.values(), TensorHealth()).as_json(),
        "each": [{"name": name, **found.as_json()} for name, found in list(measured.items())[:EACH]],
        "ill": len(ill),
        "worst": [{"name": name, **found.as_json()} for name, found in ill[:WORST]],
    }


def _batches(tensors: Mapping[str, tuple[str, e.AnyTensor]]) -> Iterator[list[tuple[str, Box]]]:
    """Yield the parts of tensors in groups that are read together."""
    batch: list[tuple[str, Box]] = []
    nbytes = 0
    for name, (_, entry) in tensors.items():
        size = ITEMSIZE[entry.dtype]
        for box in split_shape(tuple(entry.shape), max(1, AT_ONCE // size)):
            batch.append((name, box))
            nbytes += box.numel * size
            if nbytes >= AT_ONCE:
                yield batch
                batch, nbytes = [], 0
    if batch:
        yield batch


def _health_of(part: torch.Tensor) -> TensorHealth:
    """Return the health of a part, whose values are widened in small steps, since that needs more memory."""
    total, flat = TensorHealth(), part.detach().reshape(-1)
    for begin in range(0, flat.numel(), STEP):
        step = flat[begin : begin + STEP]
        parts = torch.view_as_real(step.resolve_conj()).reshape(-1, 2) if step.is_complex() else step.reshape(-1, 1)
        values = widened(parts).reshape(parts.shape)
        ill, finite = values.isnan().any(1), values.isfinite().all(1)
        good, nan = values[finite], int(ill.sum())
        total += TensorHealth(l2_norm(good.abs()), len(good), nan, len(values) - len(good) - nan)
    return total
