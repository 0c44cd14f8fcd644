"""Digests of the weights in a Trainer's checkpoint folder, and of its state, in the metadata of the snapshot there.

Other libraries write these files, without digests. A changed bit in them would otherwise be trained with.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, NamedTuple

from snapshot.decoding import decode_json_of_python
from snapshot.errors import CorruptSnapshotError, StorageError, StorageNotFoundError
from snapshot.io.aio import gather_limited, in_thread
from snapshot.io.loop import run
from snapshot.io.session import Session
from snapshot.io.storage import Storage
from snapshot.io.url import URL
from snapshot.tensors.digest import RunningDigest

FOLDER = "trainer_snapshot"
"""Folder of the snapshot in a checkpoint folder."""
KEY = "snapshot.weights"
"""Key in the snapshot's metadata: the names of the files next to it, each with its size and digest."""
STATE = "trainer_state.json"
"""The Trainer's own state in a checkpoint folder. The Trainer writes it last."""
STATE_KEY = "snapshot.trainer_state"
"""Key in the snapshot's metadata: the digest of what that file says, but for the states of callbacks."""
STATE_DIGEST = "trainer_state.digest"
"""File in a checkpoint folder with the digest of all that the Trainer's state says. Older checkpoints have none."""
_CALLBACKS = "stateful_callbacks"
"""Part of the state that the Trainer fills in when the snapshot is committed."""
_WEIGHTS = re.compile(r".+\.(safetensors|bin|pt|pth|index\.([^.]+\.)?json)")
NOTICES = ("optimizer.pt", "scheduler.pt")
"""Files that the Trainer alone loads. Without both, it would resume with a new optimizer, and say nothing."""
_NO_WEIGHTS = ("training_args.bin", *NOTICES)
_PIECE = 4 << 20
_AT_ONCE = 4


class Compared(NamedTuple):
    """The result of a comparison of files with their digests."""

    faults: list[str]
    nbytes: int


def digest_weights(checkpoint: str) -> dict[str, Any]:
    """Return metadata with the digests of the weights in a checkpoint folder, and in the folders below it."""
    files = {}
    for folder, folders, names in os.walk(checkpoint):
        folders[:] = sorted(each for each in folders if folder != checkpoint or each != FOLDER)
        for name in sorted(names):
            if _WEIGHTS.fullmatch(name) and name not in _NO_WEIGHTS:
                path = os.path.join(folder, name)
                files[os.path.relpath(path, checkpoint).replace(os.sep, "/")] = _digest_file(path)
    return {KEY: files} if files else {}


def digest_state(state: object) -> dict[str, str]:
    """Return metadata with the digest of a Trainer's state, but for the states of callbacks."""
    digest = _digest_fields(state, but=_CALLBACKS)
    return {STATE_KEY: digest} if digest else {}


def put_state_digest(checkpoint: str, state: object) -> None:
    """Write the digest of a Trainer's state, with the states of callbacks, next to the file of the state."""
    digest = _digest_fields(state)
    if digest:
        with open(os.path.join(checkpoint, STATE_DIGEST), "w", encoding="ascii") as file:
            file.write(digest)


def _digest_fields(state: object, but: str = "") -> str:
    if not dataclasses.is_dataclass(state):
        return ""
    said = {each.name: getattr(state, each.name) for each in dataclasses.fields(state) if each.name != but}
    try:
        return _digest_said(decode_json_of_python(json.dumps(said), STATE))
    except (TypeError, ValueError):  # the Trainer cannot write it either
        return ""


def _digest_said(said: Mapping[str, Any], but: str = "") -> str:
    digest = RunningDigest()
    kept = {name: value for name, value in said.items() if name != but}
    digest.update(memoryview(json.dumps(kept, sort_keys=True).encode()))
    return digest.finish()[0]


def _find_state_fault(data: bytes, wanted: str, whole: str) -> str:
    """Return what is wrong with a file of a Trainer's state, or ''.

    `wanted`: its digest but for the states of callbacks. `whole`: its digest with them; '' if unknown.
    """
    try:
        said = decode_json_of_python(data, STATE)
    except CorruptSnapshotError as error:
        return str(error)
    if not isinstance(said, dict):
        return f"{STATE}: must be a mapping, got a {type(said).__name__}"
    for digest, but in ((wanted, _CALLBACKS), (whole, "")):
        found = _digest_said(said, but)
        if digest and found != digest:
            return f"{STATE}: digest of its values must be {digest} as saved, got {found}"
    return ""


def _digest_file(path: str) -> tuple[int, str]:
    digest, size, piece = RunningDigest(), 0, memoryview(bytearray(_PIECE))
    with open(path, "rb", buffering=0) as file:
        while count := file.readinto(piece):
            digest.update(piece[:count])
            size += count
    return size, digest.finish()[0]


def compare_weights(
    checkpoint: URL, options: Mapping[str, Any] | None, metadata: Mapping[str, Any], *, quick: bool = False
) -> Compared:
    """Compare a checkpoint's weights and state with the digests in its snapshot's metadata. Older ones have none.

    `quick`: compare only their sizes.
    """
    held, state = metadata.get(KEY, {}), metadata.get(STATE_KEY)
    try:
        files = {str(name): (int(size), str(digest)) for name, (size, digest) in held.items()}
    except (AttributeError, TypeError, ValueError) as error:
        raise CorruptSnapshotError(f"{checkpoint}: the digests of its weights are damaged: {error}") from error
    if not files and state is None:
        return Compared([], 0)
    with Session(checkpoint, options) as session:
        found = run(_compare_files(session.storage, files, quick))
        if state is not None:
            found.append(run(_compare_state(session.storage, state)))
    return Compared([line for line in found if line], 0 if quick else sum(size for size, _ in files.values()))


def has_begun(checkpoint: URL, options: Mapping[str, Any] | None) -> bool:
    """Return True if there are files of a snapshot in a checkpoint folder, committed or not."""
    with Session(checkpoint.join(FOLDER), options) as session:
        return bool(run(session.storage.list("", recursive=False)))


async def _compare_state(storage: Storage, wanted: str) -> str:
    whole = ""
    try:
        with suppress(StorageNotFoundError):
            whole = (await storage.get(STATE_DIGEST)).decode("ascii", "replace") or "none"  # an empty file is torn
        return _find_state_fault(await storage.get(STATE), wanted, whole)
    except StorageNotFoundError:
        return f"{STATE}: is missing"
    except StorageError as error:
        return f"{STATE}: cannot be read: {error}"


async def _compare_files(storage: Storage, files: Mapping[str, tuple[int, str]], quick: bool) -> list[str]:
    async def compare(name: str) -> str:
        expected, wanted = files[name]
        try:
            size = (await storage.stat(name)).size
            if size != expected:
                return f"{name}: must have {expected} bytes as saved, got {size}"
            if quick:
                return ""
            digest, piece = RunningDigest(), memoryview(bytearray(min(size, _PIECE)))
            for begin in range(0, size, _PIECE):
                part = piece[: min(_PIECE, size - begin)]
                await storage.read_into(name, begin, [part])
                await in_thread(digest.update, part)
        except StorageNotFoundError:
            return f"{name}: is missing"
        except StorageError as error:
            return f"{name}: cannot be read: {error}"
        found = digest.finish()[0]
        return "" if found == wanted else f"{name}: digest must be {wanted} as saved, got {found}"

    return await gather_limited(files, compare, _AT_ONCE)
