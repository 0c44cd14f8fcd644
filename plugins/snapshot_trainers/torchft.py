"""torchft's transport of a checkpoint to a recovering replica, as a snapshot in host memory. Tested with version 0.2.

    from snapshot_trainers.torchft import SnapshotTransport

    manager = Manager(checkpoint_transport=SnapshotTransport(), ...)

The sender writes a snapshot into its host's memory, and serves it over HTTP. Receivers read it in parallel ranges, and
verify each digest. Nothing is unpickled, in contrast to torchft's own `HTTPTransport`. Requests are signed with a
secret, which torchft passes on with the address.
"""

from __future__ import annotations

import os
import secrets
import shutil
import socket
import sys
import tempfile
import time
import weakref
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.utils._pytree import tree_map, tree_map_only

from snapshot import TakeOptions
from snapshot.distributed.group import group_of_this_rank
from snapshot.errors import CorruptSnapshotError, SnapshotError, SnapshotNotFoundError
from snapshot.interop.framework_checks import expect_parameters
from snapshot.interop.handover import Given
from snapshot.io.shared_folder import SharedFolder, delete_abandoned
from snapshot.snapshot import Snapshot

# DTensors as plain values: the local tensor, and the layout. Other ranks have no part in it.

DTENSOR = "snapshot.dtensor"
"""Key of a DTensor's layout, beside its local tensor."""


def describe_layouts(state: Any) -> Any:
    """Return a state with a plain value in place of each DTensor."""
    return tree_map_only(DTensor, _describe_layout, state)


def _describe_layout(tensor: DTensor) -> dict[str, Any]:
    mesh, placements = tensor.device_mesh, []
    for each in tensor.placements:
        if type(each) is Shard:
            placements.append(["shard", each.dim])
        elif type(each) is Replicate:
            placements.append(["replicate"])
        elif type(each) is Partial:
            placements.append(["partial", each.reduce_op])
        else:
            raise SnapshotError(
                f"a DTensor must have placements that are known (Shard, Replicate, Partial), got {each}"
            )
    layout = {
        "device": mesh.device_type,
        "mesh": mesh.mesh.tolist(),
        "names": list(mesh.mesh_dim_names or ()),
        "placements": placements,
        "shape": list(tensor.shape),
        "stride": list(tensor.stride()),
        "requires_grad": tensor.requires_grad,
    }
    return {DTENSOR: layout, "local": tensor.to_local().detach()}


def restore_layouts(state: Any) -> Any:
    """Return a state with the DTensors again. They have the sender's layout, on a mesh without communication."""
    return tree_map(lambda leaf: _build_dtensor(leaf) if _is_layout(leaf) else leaf, state, is_leaf=_is_layout)


def _is_layout(value: Any) -> bool:
    return isinstance(value, dict) and DTENSOR in value


def _build_dtensor(described: Mapping[str, Any]) -> Any:
    layout, local = described[DTENSOR], described["local"]
    kinds = {"shard": Shard, "replicate": Replicate, "partial": Partial}
    names = tuple(layout["names"]) or None
    mesh = DeviceMesh(layout["device"], layout["mesh"], mesh_dim_names=names, _init_backend=False)
    placements = [kinds[kind](*rest) for kind, *rest in layout["placements"]]
    shape, stride = torch.Size(layout["shape"]), tuple(layout["stride"])
    meta = TensorMeta(shape, stride, local.dtype)
    spec = DTensorSpec(mesh, tuple(placements), tensor_meta=meta)
    # from_local drops the data of a rank without a place in the mesh
    made: Any = DTensor
    return made(local, spec, requires_grad=layout["requires_grad"])


MEMORY = "/dev/shm"  # noqa: S108 - each folder in it is new, and only its owner can read it
PREFIX = "snapshot-torchft-"
PAUSE = 0.02
"""Seconds between two looks for a step that its sender has not written yet."""
METHODS = {
    "metadata": (),
    "send_checkpoint": ("dst_ranks", "step", "state_dict", "timeout"),
    "recv_checkpoint": ("src_rank", "metadata", "step", "timeout"),
    "disallow_checkpoint": (),
    "shutdown": ("wait",),
}
"""The methods of torchft's `CheckpointTransport`, and their parameters."""


class SnapshotTransport:
    """A `CheckpointTransport` of torchft: `Manager(checkpoint_transport=SnapshotTransport())`.

    Args:
        folder: A folder in memory with room for twice the state of this rank. It is `/dev/shm` by default, which
            containers may limit. Folders of processes that were killed are deleted from it.
        host: The name or address of this host for other hosts. By default, it is the name of the host.
        allow_pickle: Send and receive objects that need a pickle, which can run any code.
        timeout: Seconds without a byte after which a sender counts as unreachable.

    A received state has new tensors on the CPU. A DTensor has the layout of its sender.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str] | None = None,
        *,
        host: str | None = None,
        allow_pickle: bool = False,
        timeout: float = 20.0,
    ) -> None:
        if "torchft" in sys.modules:
            from torchft.checkpointing.transport import CheckpointTransport

            expect_parameters(CheckpointTransport, METHODS, "torchft 0.2")
        self._allow_pickle = allow_pickle
        self._patience = timeout
        parent = os.fspath(folder) if folder is not None else MEMORY if os.path.isdir(MEMORY) else tempfile.gettempdir()
        delete_abandoned(Path(parent), PREFIX)  # nothing else frees the memory of processes that were killed
        held = SharedFolder(Path(parent, PREFIX + secrets.token_hex(8)))
        self._folder = held.path
        from snapshot_tiers.peers import PeerServer  # of another plugin, which this adapter needs

        self._server = PeerServer(socket.create_server(("", 0)), str(self._folder), lambda: b"{}")
        secret = secrets.token_hex(16)
        self._server.accept_secret(secret)
        port = self._server.address.rpartition(":")[2]
        self._metadata = f"{host or socket.gethostname()}:{port} {secret}"
        self._close = weakref.finalize(self, _close, self._server, held)

    def metadata(self) -> str:
        """Return the address of this sender, with its secret."""
        return self._metadata

    def send_checkpoint(self, dst_ranks: list[int], step: int, state_dict: Any, timeout: timedelta) -> None:
        """Copy the state into memory, for receivers of this step. Afterwards, the state may change."""
        path = self._folder / f"step-{step}"
        for old in self._folder.glob("step-*"):
            if old != path:
                shutil.rmtree(old, ignore_errors=True)
        Snapshot.take(
            path,
            {"state": Given(describe_layouts(state_dict), "torchft loads what it receives itself")},
            group_of_this_rank(),
            overwrite=True,
            options=TakeOptions(durable=False, allow_pickle=True if self._allow_pickle else "error"),
        )

    def recv_checkpoint(self, src_rank: int, metadata: str, step: int, timeout: timedelta) -> Any:
        """Return the state of a step from its sender, verified. Wait until the sender has written it.

        Raises:
            TimeoutError: The sender has not written the step in time.
            StorageError: The sender cannot be reached.
            CorruptSnapshotError: Bytes differ from those that the sender wrote.
        """
        address, _, secret = metadata.partition(" ")
        deadline = time.monotonic() + timeout.total_seconds()
        options = {"secret": secret, "timeout": max(1.0, min(self._patience, timeout.total_seconds()))}
        before: str | None = None
        while True:
            save_id = ""
            source = Snapshot(f"peer://{address}/step-{step}", None, options, allow_pickle=self._allow_pickle)
            try:
                save_id = source.metadata.save_id
                return restore_layouts(source.get_state_dict_for_key("state", replicate_from_rank0=True))
            except CorruptSnapshotError:  # or the sender has sent the step again meanwhile
                if save_id == before:
                    raise
                before = save_id
            except SnapshotNotFoundError as error:
                if time.monotonic() > deadline:
                    seconds = timeout.total_seconds()
                    raise TimeoutError(f"{address}: step {step} of rank {src_rank} timed out, {seconds:g} s") from error
                time.sleep(PAUSE)

    def disallow_checkpoint(self) -> None:
        """Do nothing: receivers read a copy, which stays until the next one is sent."""

    def shutdown(self, wait: bool = True) -> None:
        """Stop serving, and delete the copy."""
        self._close()


def _close(server: Any, held: SharedFolder) -> None:
    server.close()
    held.close()
