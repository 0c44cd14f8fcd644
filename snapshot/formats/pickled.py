"""Pickled objects: their decoding, and those that only running a pickle creates."""

from __future__ import annotations

import io
import pickle
import warnings
import zipfile
from collections import deque
from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple

import torch

from snapshot.errors import CorruptSnapshotError, RestoreError, UnsafeObjectError, UnsupportedFormatError
from snapshot.formats.safe_pickle import expect_stored, scan_pickle
from snapshot.manifest.compounds import NEW_SERIALIZERS, decode_object
from snapshot.manifest.entries import ObjectEntry
from snapshot.manifest.paths import encode_key, find_tagged_keys, key_component
from snapshot.text import counted, with_article

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
    """Return the pickles of an archive; raise unless it is exactly what torch writes.

    Every reader must see the same archive, and members must not be compressed: torch's reader inflates any member.
    """
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            members = archive.infolist()
            if not data.startswith(b"PK\3\4") or archive.comment or archive.start_dir != _find_directory(data):
                raise ValueError("other readers would find a different archive in it")
            if any(each.compress_type != zipfile.ZIP_STORED for each in members):
                raise ValueError("its members are compressed")
            if sum(each.file_size for each in members) > len(data):
                raise ValueError(f"its members claim more than its {counted(len(data), 'byte')}")
            return [_read_member(archive, each) for each in members if each.filename.endswith(".pkl")]
    except Exception as error:  # zipfile raises many kinds of errors for invalid input
        raise CorruptSnapshotError(f"{path}: not a torch archive: {error}") from error


def _read_member(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> bytes:
    """Return a member's bytes without checking its checksum.

    torch can be configured to write no checksums, and the digest of the whole object has been verified.
    """
    with archive.open(member) as file:
        file._expected_crc = None  # type: ignore[attr-defined]
        return file.read()


def _find_directory(data: bytearray) -> int:
    """Return the begin of an archive's directory; raise if its two ends disagree."""
    end = len(data) - 22
    begins: set[int] = {int.from_bytes(data[end + 16 : end + 20], "little")} - {0xFFFFFFFF}
    if data[end - 20 : end - 16] == b"PK\6\7":
        longer = int.from_bytes(data[end - 12 : end - 4], "little")
        begins.add(int.from_bytes(data[longer + 48 : longer + 56], "little"))
    return begins.pop() if len(begins) == 1 else -1


def _is_modest(path: str, data: bytes, stored: int) -> bool:
    """Return True if a dry run can follow an object's pickle without creating anything.

    Raise if the pickle claims more memory than it has bytes.
    """
    try:
        scan_pickle(data, path, expect_stored(len(data), stored, "its pickle"))
    except UnsafeObjectError:
        return False
    except ValueError as error:
        raise error if isinstance(error, CorruptSnapshotError) else CorruptSnapshotError(f"{path}: {error}") from error
    try:
        _DryRun(io.BytesIO(data)).load()
    except CorruptSnapshotError as error:
        raise CorruptSnapshotError(f"{path}: the pickle {error}") from error
    except Exception:  # noqa: BLE001 - a pickle that fails the dry run needs allow_pickle
        return False
    return True


class _Inert:
    """Stand-in for any object of a pickle: it accepts any arguments, and does nothing."""

    def __new__(cls, *arguments: Any, **named: Any) -> Any:
        if _names_bytes(arguments):
            raise ValueError("it may create a bytearray of any length")
        return super().__new__(cls)

    def __setstate__(self, state: Any) -> None: ...
    def __setitem__(self, key: Any, value: Any) -> None: ...
    def append(self, item: Any) -> None: ...
    def extend(self, items: Any) -> None: ...


class _InertEncoded(_Inert):
    """Stand-in for bytes that were encoded from a text, as in old pickles."""


class _InertBytes(_Inert):
    """Stand-in for a bytearray: it requires content, since a length alone could exhaust the memory."""

    def __new__(cls, *arguments: Any, **named: Any) -> Any:
        if not all(isinstance(each, (str, bytes, _InertEncoded)) for each in arguments):
            raise CorruptSnapshotError("creates a bytearray without content")
        return super().__new__(cls)


def _names_bytes(value: Any) -> bool:
    """Return True if an argument list has `bytearray` itself, so that the callee could call it."""
    rest, seen = [value], set()
    while rest:
        each = rest.pop()
        if each is _InertBytes:
            return True
        if isinstance(each, (tuple, list)) and len(each) <= MOST_ARGUMENTS and id(each) not in seen:
            seen.add(id(each))
            rest += each
    return False


_STANDS = {"bytearray": _InertBytes, "encode": _InertEncoded, "bytes": _InertEncoded}


class _DryRun(pickle._Unpickler):
    """torch's restricted unpickler in Python, which allocates no memory in advance."""

    dispatch: ClassVar[dict[int, Any]] = {
        code[0]: pickle._Unpickler.dispatch[code[0]]
        for code in (
            pickle.GLOBAL,
            pickle.NEWOBJ,
            pickle.REDUCE,
            pickle.BUILD,
            pickle.APPEND,
            pickle.APPENDS,
            pickle.SETITEM,
            pickle.SETITEMS,
            pickle.MARK,
            pickle.TUPLE,
            pickle.TUPLE1,
            pickle.TUPLE2,
            pickle.TUPLE3,
            pickle.EMPTY_TUPLE,
            pickle.EMPTY_LIST,
            pickle.EMPTY_DICT,
            pickle.EMPTY_SET,
            pickle.NONE,
            pickle.NEWFALSE,
            pickle.NEWTRUE,
            pickle.BININT,
            pickle.BININT1,
            pickle.BININT2,
            pickle.BINFLOAT,
            pickle.BINUNICODE,
            pickle.SHORT_BINSTRING,
            pickle.BINPERSID,
            pickle.BINGET,
            pickle.LONG_BINGET,
            pickle.BINPUT,
            pickle.LONG_BINPUT,
            pickle.STOP,
            pickle.PROTO,
            pickle.LONG1,
        )
    }

    def find_class(self, module: str, name: str) -> Any:
        return _STANDS.get(name, _Inert)

    def persistent_load(self, pid: Any) -> Any:
        return _Inert()


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
    return isinstance(entry, ObjectEntry) and entry.serializer.startswith(REFUSED)


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
