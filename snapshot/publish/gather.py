"""The pieces of all ranks are brought into the owners' host memory, through the process group.

This runs in the foreground, in one order on all ranks. A rank that fails tells the others through the store.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from snapshot.distributed.exchange import Exchange
from snapshot.errors import RestoreError, SnapshotError, system_limits
from snapshot.publish.image import HostImage
from snapshot.publish.shares import HeldPiece, SharePlan, Transfer
from snapshot.runtime.accelerators import current_device_index
from snapshot.tensors.dtypes import BY_NAME

ROUND = 256 << 20
"""Maximum bytes that a rank sends and receives before it waits."""
TAGS = 1 << 16
"""Number of different tags of a call. Messages of different calls have different tags, for a call may be broken off."""


def gather_pieces(
    exchange: Exchange, plan: SharePlan, held: Mapping[str, Sequence[HeldPiece]], image: HostImage
) -> None:
    """Fill the image with the tensors that this rank owns, and send what other ranks own."""
    with torch.no_grad():
        pieces = {(name, piece.box): piece.tensor for name, each in held.items() for piece in each}
        remote = []
        for transfer in plan.transfers:
            if transfer.sender != transfer.owner:
                remote.append(transfer)
            elif transfer.owner == exchange.rank:
                local = pieces[transfer.source, transfer.box]
                _target_view(image, transfer).copy_(transfer.grid.view("source", local, transfer.box.offsets))
        if remote:
            link = _Link(exchange)
            for each in _rounds(remote, exchange.world):
                link.exchange(each, pieces, image)


def expect_equal(exchange: Exchange, plan: SharePlan, held: Mapping[str, Sequence[HeldPiece]]) -> None:
    """Raise on all ranks unless tensors that become one tensor have the same bytes."""
    wrong = []
    for first, other, sub_plan in plan.equal:
        image = HostImage(sub_plan.owned(exchange.rank))
        gather_pieces(exchange, sub_plan, held, image)
        if image.targets and not np.array_equal(image.bytes(first), image.bytes(other)):
            wrong.append(f"{other} must equal {first}, since only one of them is used")

    def lead(ranks: list[list[str]]) -> bool:
        found = [each for rank in ranks for each in rank]
        if found:
            raise RestoreError(f"the tensor map does not fit: {'; '.join(found)}", found)
        return True

    if plan.equal:
        exchange.agree(wrong, lead, list[str], bool)


def _target_view(image: HostImage, transfer: Transfer) -> torch.Tensor:
    target = image.tensor(transfer.target)
    return transfer.grid.view("target", target, (0,) * target.dim())


def _rounds(transfers: Sequence[Transfer], world: int) -> Iterator[list[Transfer]]:
    """Split the transfers so that no rank sends and receives much more than `ROUND` bytes at once."""
    loads = [0] * world
    current: list[Transfer] = []
    for transfer in transfers:
        for rank in (transfer.sender, transfer.owner):
            loads[rank] += transfer.nbytes
        current.append(transfer)
        if max(loads[transfer.sender], loads[transfer.owner]) >= ROUND:
            yield current
            loads, current = [0] * world, []
    if current:
        yield current


class _Link:
    """Messages between the ranks of a process group."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        ranks = exchange.ranks
        self._members, self._group = ranks.members, ranks.pg
        devices = ranks.pg._device_types  # type: ignore[union-attr]
        self._device = torch.device("cpu")
        if not any(device.type == "cpu" for device in devices):
            self._device = torch.device(devices[0].type, current_device_index())

    def exchange(self, transfers: Sequence[Transfer], pieces: Mapping[Any, torch.Tensor], image: HostImage) -> None:
        """Send and receive one round, and place what arrives."""
        mine, operations = self._exchange.rank, []
        arriving: list[tuple[Transfer, torch.Tensor]] = []
        for number, transfer in enumerate(transfers):
            if mine == transfer.sender:
                local = pieces[transfer.source, transfer.box]
                view = transfer.grid.view("source", local, transfer.box.offsets)
                message = view.to(self._device).contiguous().view(-1).view(torch.uint8)
                operations.append(self._operation(dist.isend, message, transfer.owner, number))
            elif mine == transfer.owner:
                message = torch.empty(transfer.nbytes, dtype=torch.uint8, device=self._device)
                operations.append(self._operation(dist.irecv, message, transfer.sender, number))
                arriving.append((transfer, message))
        self._exchange.agree(True, all, bool, bool)  # a rank without memory fails before any other rank waits for it
        if operations:
            self._finish(operations)
        for transfer, message in arriving:
            received = message.view(BY_NAME[transfer.dtype]).view(transfer.grid.sizes)
            _target_view(image, transfer).copy_(received)

    def _operation(self, kind: Any, message: torch.Tensor, peer: int, tag: int) -> dist.P2POp:
        tag = (self._exchange.number * TAGS + tag % TAGS) % (1 << 31)
        return dist.P2POp(kind, message, self._members[peer], self._group, tag)

    def _finish(self, operations: list[dist.P2POp]) -> None:
        """Run the operations. Stop waiting when another rank has failed: the group's own timeout may be long."""
        future: Future[None] = Future()

        def run() -> None:
            try:
                for work in dist.batch_isend_irecv(operations):
                    work.wait()
                if self._device.type != "cpu":
                    torch.accelerator.synchronize()
                future.set_result(None)
            except BaseException as error:  # noqa: BLE001 - it is raised below
                future.set_exception(error)

        with system_limits("cannot start a thread"):
            threading.Thread(target=run, name="snapshot-io-gather", daemon=True).start()
        if not self._exchange.together(future.done):
            raise SnapshotError("another rank could not send its tensors")
        try:
            future.result()
        except RuntimeError as error:
            self._exchange.broke_off()
            raise SnapshotError(f"the process group could not send the tensors: {error}") from error
