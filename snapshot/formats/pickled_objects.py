"""Pickled objects: their decoding, and those that only running a pickle creates."""

from __future__ import annotations

import io
import pickle
import warnings
from collections import deque
from collections.abc import Mapping
from typing import Any, NamedTuple

from snapshot.errors import CorruptSnapshotError, RestoreError, UnsafeObjectError, UnsupportedFormatError
from snapshot.formats.pickle_nodes import LimitError, Name, StandIn, Work
from snapshot.formats.safe_pickle import (
    InvalidPickleError,
    PickleLimits,
    UnknownClassError,
    evaluate_pickle,
    expect_stored,
)
from snapshot.formats.zip_archive import ZipArchive
from snapshot.manifest.containers import NEW_SERIALIZERS
from snapshot.manifest.entries import ObjectEntry
from snapshot.manifest.paths import encode_key, find_tagged_keys, key_component
from snapshot.text import with_article

# Decoding of stored objects.
#
# Only pickles that torch's `weights_only` mode accepts are read, unless the caller allows all pickles.

REFUSED = "(not read)"
"""Serializer of objects that only running another library's pickle creates."""
MODULE = "pickled module"
"""Prefix of `obj_type` for a whole `torch.nn.Module`."""
MOST_ARGUMENTS = 20
"""Maximum number of arguments of functions that torch lets a pickle call."""


TRUST = (
    "if you trust its source, open it with allow_pickle=True: Snapshot(path, allow_pickle=True), "
    "SnapshotManager(root, allow_pickle=True)"
)


def load_object(
    path: str, data: bytearray, serializer: str, obj_type: str, *, allow_pickle: bool, stored: int | None = None
) -> Any:
    """Return the object of these bytes; `stored` is their length in a file, if they were decompressed."""
    if serializer == "bytes":
        return bytes(data)
    if serializer == "bytearray":
        return data
    if serializer == "BytesIO":
        return _read_bytes_io(path, data)
    if serializer == "utf8":
        try:
            return data.decode("utf-8", "surrogatepass")
        except UnicodeDecodeError as error:
            raise CorruptSnapshotError(f"{path}: not valid text: {error}") from error
    if serializer in NEW_SERIALIZERS:
        from snapshot.manifest.objects import decode_object  # with NumPy

        return decode_object(path, serializer, obj_type, data)
    if serializer.startswith(REFUSED):
        raise make_refusal(path, obj_type)
    if serializer != "torch_save":
        raise UnsupportedFormatError(f"{path}: unknown serializer {serializer!r}")
    pickles = _read_pickles(path, data)
    stored = len(data) if stored is None else stored
    unsafe = (
        f"{path}: {with_article(obj_type)} stored as a pickle, which may run any code when read; {TRUST}, or "
        "torch.serialization.add_safe_globals([...])"
    )
    if not allow_pickle and not all(_is_modest(path, each, stored) for each in pickles):
        raise UnsafeObjectError(unsafe)
    try:
        return run_pickle(path, data, obj_type, weights_only=not allow_pickle)
    except pickle.UnpicklingError as error:
        raise UnsafeObjectError(unsafe) from error


def run_pickle(path: str, data: bytearray, obj_type: str, *, weights_only: bool = False) -> Any:
    """Return the contents of a torch archive, by torch's own reader.

    Unless `weights_only`, the read can run any code. Raises UnpicklingError for content that `weights_only` refuses.
    """
    import torch  # a listing reads no pickle

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return torch.load(io.BytesIO(data), map_location="cpu", weights_only=weights_only)
    except pickle.UnpicklingError as error:
        if weights_only:
            raise
        raise CorruptSnapshotError(f"{path}: cannot read the pickle: {error}") from error
    except (ImportError, AttributeError) as error:
        raise UnsupportedFormatError(f"{path}: cannot create {with_article(obj_type)} here: {error}") from error
    except Exception as error:  # a foreign pickle may raise anything
        raise CorruptSnapshotError(f"{path}: cannot read the pickle: {type(error).__name__}: {error}") from error


def _read_bytes_io(path: str, data: bytearray) -> io.BytesIO:
    """Return an in-memory file, from its position and contents."""
    position = int.from_bytes(data[:8], "little")
    if len(data) < 8 or position >= 1 << 63:
        raise CorruptSnapshotError(f"{path}: not a BytesIO")
    made = io.BytesIO(memoryview(data)[8:])
    made.seek(position)
    return made


def make_refusal(path: str, obj_type: str) -> UnsafeObjectError:
    """Return the error for an object that only running another library's pickle creates."""
    advice = "; read_object(...) then returns the module; prefer to save model.state_dict()"
    return UnsafeObjectError(
        f"{path}: {with_article(obj_type)} is in this file's pickle; only running the pickle creates it, which may run "
        f"any code; leave it out with exclude=[...], or {TRUST}{advice if obj_type.startswith(MODULE) else ''}"
    )


def _read_pickles(path: str, data: bytearray) -> list[bytes]:
    """Return the pickles of an archive; raise unless it is exactly what torch writes."""
    try:
        archive = ZipArchive.parse_strictly(data)
        # torch finds members by their names in any case
        pickles = [each for each in archive.members if each.name.lower().endswith(".pkl")]
        if [each.name.partition("/")[2] for each in pickles if each.name.lower().endswith("data.pkl")] != ["data.pkl"]:
            raise ValueError("it must have one data.pkl")
        return [archive.read(each, data) for each in pickles]
    except ValueError as error:
        raise CorruptSnapshotError(f"{path}: not a torch archive: {error}") from error


def _is_modest(path: str, data: bytes, stored: int) -> bool:
    """Return True if torch can run an object's pickle without an allocation that its bytes do not account for.

    Raise if the pickle claims more memory than it has bytes.
    """
    try:
        length = expect_stored(len(data), stored, "its pickle")
        limits = PickleLimits.of(length, _RUN_BY_TORCH)
        evaluate_pickle(data, path, limits, lambda _: None, lambda _, name: Name(name, _call_inertly))
    except (InvalidPickleError, UnknownClassError, UnsafeObjectError):
        return False
    except ValueError as error:
        raise error if isinstance(error, CorruptSnapshotError) else CorruptSnapshotError(f"{path}: {error}") from error
    return True


def _call_inertly(work: Work, kind: Name, arguments: tuple[Any, ...]) -> StandIn:
    """Return the stand-in of a call that torch computes; raise if it may create a bytearray of any length.

    A bytearray requires content, since a length alone could exhaust the memory.
    """
    work.spend(arguments)
    if kind.name == "bytearray":
        if not all(isinstance(each, (str, bytes)) or _is_encoded(each) for each in arguments):
            raise LimitError("the pickle creates a bytearray without content")
    elif _names_bytes(arguments):
        raise ValueError("it may create a bytearray of any length")
    return StandIn(kind, arguments)


_OPCODES = b"cRb\x81aesu(t\x85\x86\x87)]}\x8fN\x88\x89JKMGXU\x8aQhjqr\x80."
_RUN_BY_TORCH = bytes(code if code in _OPCODES else 0 for code in range(256))
"""Table of the opcodes that torch's `weights_only` mode has. It runs all opcodes before one that it lacks."""
_ENCODERS = ("encode", "bytes")
"""Names of the functions that old pickles create bytes with, from a text."""


def _is_encoded(value: Any) -> bool:
    return isinstance(value, StandIn) and value.name in _ENCODERS


def _names_bytes(value: Any) -> bool:
    """Return True if an argument list has `bytearray` itself, so that the function could call it."""
    rest, seen = [value], set()
    while rest:
        each = rest.pop()
        if isinstance(each, Name) and each.name == "bytearray":
            return True
        if isinstance(each, (tuple, list)) and len(each) <= MOST_ARGUMENTS and id(each) not in seen:
            seen.add(id(each))
            rest += each
    return False


# Location and creation of objects that only running another library's pickle creates.

INLINE = "(in the pickle)"
"""Location of bytes inside a pickle, which are not a range of a file."""


def make_refused_entry(what: str) -> ObjectEntry:
    """Return the entry of an object of this class or kind, which is only read if pickles are allowed."""
    return ObjectEntry(INLINE, (0, 0), REFUSED, what)


def locate_object(entry: ObjectEntry, file: str, route: str) -> None:
    """Record the torch.save file of a refused object, and the path inside it."""
    entry.location, entry.serializer = file, f"{REFUSED} {route}".rstrip()


def is_refused(entry: Any) -> bool:
    """Return True for an object that is only read if pickles are allowed, with its whole file."""
    return bool(entry.is_object and entry.serializer.startswith(REFUSED))


def expect_no_module(where: object, manifest: Mapping[str, Any], *, allow_pickle: bool) -> None:
    """Raise if there is a pickled module: the application probably expected its state dict."""
    for path, entry in manifest.items():
        if is_refused(entry) and entry.obj_type.startswith(MODULE):
            if not allow_pickle:
                raise make_refusal(path, entry.obj_type)
            raise RestoreError(
                f"{where}: {path} is {with_article(entry.obj_type)}, but restore needs its state dict; "
                f"use Snapshot(..., allow_pickle=True).read_object({path!r}).state_dict()",
                [path],
            )


class SavedFile(NamedTuple):
    """Contents of a torch.save file."""

    value: Any


def find_object(path: str, saved: Any, entry: ObjectEntry) -> Any:
    """Return the object of a refused entry in the saved contents."""
    route = entry.serializer.removeprefix(REFUSED).strip(" ")
    for name in route.split("/") if route else ():
        try:
            saved = _find_child(saved, name)
        except (LookupError, ValueError) as error:
            raise CorruptSnapshotError(f"{path}: running its pickle does not create {route}") from error
    return saved


def _find_child(holder: Any, name: str) -> Any:
    if isinstance(holder, (list, tuple, deque)):
        return holder[int(name)]
    if not isinstance(holder, dict):
        raise LookupError(name)
    keys = list(holder)
    tagged = set(find_tagged_keys(keys))
    for place, key in enumerate(keys):
        encoded = encode_key(key)
        if encoded is not None and key_component(encoded, place in tagged) == name:
            return holder[key]
    raise LookupError(name)
