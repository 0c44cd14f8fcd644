"""Objects' bytes back to objects. Nothing is unpickled beyond what torch's `weights_only` accepts, unless it was
asked for."""

from __future__ import annotations

import io
import pickle
import warnings
from typing import Any

import torch

from snapshot.errors import CorruptSnapshotError, UnsafeObjectError, UnsupportedFormatError


def load_object(path: str, data: bytearray, serializer: str, obj_type: str, *, allow_pickle: bool) -> Any:
    """The object whose bytes these are."""
    if serializer == "bytes":
        return bytes(data)
    if serializer == "bytearray":
        return data
    if serializer == "utf8":
        try:
            return data.decode("utf-8", "surrogatepass")
        except UnicodeDecodeError as error:
            raise CorruptSnapshotError(f"{path}: is no text: {error}") from error
    if serializer != "torch_save":
        raise UnsupportedFormatError(f"{path}: was stored by {serializer!r}, which this version does not know")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return torch.load(io.BytesIO(data), map_location="cpu", weights_only=not allow_pickle)
    except pickle.UnpicklingError as error:
        if allow_pickle:
            raise CorruptSnapshotError(f"{path}: its pickle cannot be read: {error}") from error
        raise UnsafeObjectError(
            f"{path}: a {obj_type} was stored as a pickle, which may run any code when it is read. If you trust "
            f"whoever wrote this snapshot: Snapshot(path, allow_pickle=True), or "
            f"torch.serialization.add_safe_globals([...])"
        ) from error
    except (RuntimeError, EOFError, ValueError) as error:
        raise CorruptSnapshotError(f"{path}: its pickle cannot be read: {error}") from error
