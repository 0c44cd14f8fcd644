"""Weights between a trainer and the workers of inference engines that take tensors: published, pulled, and handed over.

A worker pulls a version into a folder in the memory of its host, which all workers of the host share. Everything is
verified before the engine gets its first tensor. The tensors are mapped from there, so that nothing is copied again.
"""

from __future__ import annotations

import hashlib
import math
import os
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
import torch

from snapshot.decoding import decode_json
from snapshot.distributed.group import ranks_of
from snapshot.errors import MissingExtraError, SnapshotError, SnapshotNotFoundError, StorageNotFoundError
from snapshot.formats.hugging_face import INDEX
from snapshot.io.loop import run
from snapshot.io.session import Session
from snapshot.io.shared_folder import SharedFolder, delete_abandoned
from snapshot.io.url import URL
from snapshot.state.sharded import Sharded
from snapshot.tensors.geometry import Box
from snapshot_publish.store import VersionStore
from snapshot_publish.subscriber import Subscriber

MEMORY = "/dev/shm"  # noqa: S108 - a folder in it is refused unless this user owns it
FIRST_PAUSE, LONGEST_PAUSE = 0.05, 1.0
"""Seconds between two looks for a version that the trainer has not published yet. A store counts the requests."""


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


class WeightReader:
    """The published versions for one worker of an inference engine.

    Args:
        url: The store of the `Publisher`.
        folder: The local folder, shared by the workers of a host. By default, it is in the host's memory, and the last
            worker deletes it.
        storage_options: Options for the storage plugin.
    """

    def __init__(
        self, url: str, folder: str | None = None, storage_options: Mapping[str, Any] | None = None, keep: int = 1
    ) -> None:
        try:
            from safetensors import safe_open
        except ImportError as error:
            raise MissingExtraError(f"safetensors cannot be imported: {error}; pip install safetensors") from error
        self._open = safe_open
        self._url, self._options = URL.parse(url), dict(storage_options or {})
        self._shared = _share_memory(str(self._url)) if folder is None else None
        path = self._shared.path if self._shared is not None else Path(os.fspath(folder or ""))
        self._subscriber = Subscriber(url, path, keep=keep, storage_options=storage_options)

    @staticmethod
    def newest(url: str, storage_options: Mapping[str, Any] | None = None) -> int:
        """Return the number of the newest version in a store, committed or not; 0 if there is none."""
        with Session(URL.parse(url), dict(storage_options or {})) as session:
            return max(run(VersionStore(session.storage).numbers()), default=0)

    def wait_for(self, step: int | None, after: int, timeout: float) -> int:
        """Return the newest committed version after the version `after`, of a training step. Wait until there is one.

        Raises:
            TimeoutError: The trainer has not published such a version in time.
        """
        deadline, pause = time.monotonic() + timeout, FIRST_PAUSE
        with Session(self._url, self._options) as session:
            store = VersionStore(session.storage)
            while True:
                for number in reversed(run(store.numbers())):
                    if number > after and _has_step(store, number, step):
                        return number
                if time.monotonic() > deadline:
                    raise TimeoutError(
                        f"{self._url}: no version of step {step} after version {after} within {timeout:g} s"
                    )
                time.sleep(pause)
                pause = min(pause * 1.5, LONGEST_PAUSE)

    def pull(self, version: int) -> Path:
        """Pull exactly one version, and verify it. Raise `SnapshotError` if it cannot be used."""
        return self._subscriber.pull(version=version)

    def current(self) -> Path:
        """Return the version that was pulled last."""
        found = self._subscriber.current
        if found is None:
            raise SnapshotNotFoundError(f"{self._url}: no version was pulled yet")
        return found

    def open(self, folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
        """Open all files of a pulled version, and return its tensors one by one, mapped from the files.

        The files are open when this function returns: a later pull may delete the version.
        """
        by_file: dict[str, list[str]] = {}
        index = decode_json((folder / INDEX).read_bytes(), _Index, folder / INDEX)
        for name, file in index.weight_map.items():
            by_file.setdefault(file, []).append(name)
        with ExitStack() as stack:
            opened = [(stack.enter_context(self._open(folder / file, "pt")), by_file[file]) for file in by_file]
            kept = stack.pop_all()

        def tensors() -> Iterator[tuple[str, torch.Tensor]]:
            with kept:
                for file, names in opened:
                    for name in names:
                        yield name, file.get_tensor(name)

        return tensors()

    def close(self) -> None:
        """Leave the folder, and delete it from memory if no other process uses it."""
        if self._shared is not None:
            self._shared.close()


def _has_step(store: VersionStore, number: int, step: int | None) -> bool:
    try:
        found = run(store.read_index(number)).details.step
    except StorageNotFoundError:  # not committed yet, or deleted
        return False
    return step is None or found == step


def _share_memory(url: str) -> SharedFolder:
    parent = MEMORY if os.path.isdir(MEMORY) else tempfile.gettempdir()
    prefix = f"snapshot-weights-{os.getuid()}-"
    delete_abandoned(Path(parent), prefix)
    path = Path(parent) / f"{prefix}{hashlib.sha256(url.encode()).hexdigest()[:16]}"
    try:
        return SharedFolder(path)
    except OSError as error:
        raise SnapshotError(f"{error}; delete it, or pass folder=") from error


class Shares:
    """Chooses a rank for each whole tensor that several ranks have, so that each rank publishes a part of the model.

    All ranks call it for the same tensors, in one order.
    """

    def __init__(self, world: int) -> None:
        self._loads = [0] * world

    def choose(self, nbytes: int, among: Sequence[int] | None = None) -> int:
        """Return the rank with the fewest bytes so far."""
        chosen = min(among or range(len(self._loads)), key=self._loads.__getitem__)
        self._loads[chosen] += nbytes
        return chosen


def box_of(
    rank: int, shape: Sequence[int], owners: Sequence[int], mesh: Sequence[int], dims: Sequence[int | None]
) -> Box | None:
    """Return the box of a rank's piece. Return None if it has none, or a copy of an earlier rank's.

    Each axis of the mesh splits a dimension as `torch.chunk` does, or has copies, which is None.

    >>> box_of(3, (5, 4), (0, 1, 2, 3), (2, 2), (0, 1))
    Box(offsets=(3, 2), sizes=(2, 2))
    >>> box_of(3, (5, 4), (0, 1, 2, 3), (2, 2), (None, 0))
    """
    if rank not in owners:
        return None
    position, place = owners.index(rank), list[int]()
    for size in reversed(mesh):
        position, at = divmod(position, size)
        place.insert(0, at)
    offsets, sizes = [0] * len(shape), list(shape)
    for at, count, dim in zip(place, mesh, dims, strict=True):
        if dim is None and at:
            return None
        if dim is not None:
            chunk = math.ceil(sizes[dim] / count)
            begin = min(at * chunk, sizes[dim])
            offsets[dim] += begin
            sizes[dim] = min(chunk, sizes[dim] - begin)
    return Box(tuple(offsets), tuple(sizes)) if all(sizes) else None


def state_of(source: Any, rank: int) -> dict[str, Any]:
    """Return what a trainer's rank publishes of vLLM's `WeightSource`: its pieces, and its share of whole tensors."""
    local, shares, state = source.implements_iter_local(), Shares(ranks_of(None).world), dict[str, Any]()
    publish: dict[str, tuple[Any, Box | None]] = {}
    for meta in source.metadata:
        if local and meta.owners is not None and meta.placements is not None:
            dims = [getattr(each, "dim", None) for each in meta.placements]  # a copy has none
            box = box_of(rank, meta.shape, meta.owners, meta.mesh_shape, dims)
            publish |= {meta.name: (meta, box)} if box is not None else {}
        elif shares.choose(math.prod(meta.shape) * meta.dtype.itemsize, meta.owners) == rank:
            publish[meta.name] = meta, None
    for name, tensor in source.iter_local() if local else source.iter_full():
        meta, box = publish.get(name, (None, None))
        if box is not None:
            state[name] = Sharded(tensor.detach(), meta.shape, box.offsets)
        elif meta is not None:
            state[name] = tensor.detach() if local else tensor.detach().to("cpu", copy=True)  # it may be reused
    return state
