"""Documents of other libraries' formats: generated manifests, files with more bytes than entries use, a storage."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

import msgspec

from snapshot.decoding import decode_json
from snapshot.errors import (
    CorruptSnapshotError,
    StorageConflictError,
    StorageError,
    StorageNotFoundError,
    UnsafeObjectError,
    UnsupportedFormatError,
)
from snapshot.formats.pickled_objects import INLINE
from snapshot.io.storage import Buffer, FileStat, ReadOnlyStorage, Storage, check_path
from snapshot.io.url import URL
from snapshot.manifest.containers import (
    Container,
    CounterEntry,
    DefaultdictEntry,
    DequeEntry,
    DictEntry,
    ListEntry,
    OrderedDictEntry,
    TupleEntry,
)
from snapshot.manifest.document import Document, FileEntry, ForeignFile
from snapshot.manifest.paths import decode_component, encode_key
from snapshot.tensors.digest import digest_range

LINKLESS = ("dcp", "torchsnapshot", "orbax", "torch_checkpointing", "deepspeed", "megatron")
"""Formats with all files in one folder, without links. (Hugging Face's cache consists of links, and a file that the
user names may be one.)"""


class UnknownFormatError(UnsupportedFormatError):
    """A file is not a checkpoint of any known format."""


class Condition(Protocol):
    """What must hold before bytes of some files are used: what their writer promises, and may have failed to do."""

    async def find_faults(self, opened: Any, *, whole: bool) -> Sequence[str]:
        """Return why the bytes must not be used; nothing if they may be.

        `opened` is an `Opened` of the checkpoint. With `whole`, look at all bytes.
        """
        ...


class ForeignDocument(Document, kw_only=True):
    """A checkpoint of another library, described as a manifest of this library."""

    place: URL
    """Folder of its locations."""
    root: Any = None
    """Container of all top-level names, if the format has no statefuls."""
    inline: bytes = b""
    """Content of the location `INLINE`."""
    index: str = ""
    """The file that names all others, if there is one. Its bytes are the token of the save."""
    tokens: dict[str, str] = msgspec.field(default_factory=dict)
    """Tokens of its files, if they are known: reading fails if a file is replaced."""
    derivations: dict[str, Any] = msgspec.field(default_factory=dict)
    """Files that are computed from others, with their `Derivation`."""
    conditions: dict[str, Any] = msgspec.field(default_factory=dict)
    """Files that are used only if a `Condition` holds. Every read looks at it first, and `verify` as a whole."""

    def set_inline(self, content: bytes) -> None:
        """Set the content of the location `INLINE`, if any: bytes that are in no file, such as a part of an index."""
        self.inline = content
        if content:
            self.files[INLINE] = ForeignFile(len(content))


def make_document(
    kind: str,
    version: str,
    place: URL,
    token: bytes,
    *,
    manifest: dict[str, Any],
    files: Mapping[str, FileEntry],
    metadata: Any = None,
    world_size: int = 1,
) -> ForeignDocument:
    """Return the document of one save; `token` distinguishes checkpoints at the same place."""
    return ForeignDocument(
        kind,
        version,
        digest_range(token),
        world_size,
        "1970-01-01T00:00:00+00:00",
        "",
        msgspec.Raw(msgspec.json.encode(metadata or {})),
        dict(files),
        [],
        manifest,
        place=place,
    )


ROOT = "snapshot.root"
"""Metadata key of the container, in a snapshot created from such a document."""
_NAMES: Any = dict[str, msgspec.Raw]
_CONTAINERS = DictEntry | ListEntry | TupleEntry | OrderedDictEntry | DefaultdictEntry | CounterEntry | DequeEntry


def find_root(held: Document) -> Any:
    """Return the container of all top-level names, if the document has no statefuls; None otherwise."""
    if isinstance(held, ForeignDocument):
        return held.root
    if ROOT.encode() not in bytes(held.metadata):
        return None
    try:
        return decode_json(decode_json(held.metadata, _NAMES, ROOT)[ROOT], _CONTAINERS, ROOT)
    except (CorruptSnapshotError, KeyError):  # the user's own value under that name
        return None


def narrow_root(held: Document, names: Iterable[str]) -> Container:
    """Return the container of some top-level names, given as path components.

    It is the document's own container if the names are all of its names.
    """
    root, names = find_root(held), list(names)
    if root is not None and set(root.components()) == set(names):
        return root  # type: ignore[no-any-return]
    return make_dict(map(decode_component, names))


def make_dict(keys: Iterable[Any]) -> DictEntry:
    """Return the container of a dictionary with these keys."""
    return DictEntry([encode_key(key) for key in keys])  # type: ignore[misc]


def add_root(held: Document) -> msgspec.Raw:
    """Return a document's metadata with the root container, for a snapshot created from it."""
    root = held.root if isinstance(held, ForeignDocument) else None
    if not isinstance(root, (DictEntry, ListEntry, TupleEntry, DequeEntry)):
        return held.metadata
    return msgspec.Raw(msgspec.json.encode({**decode_json(held.metadata, _NAMES, ROOT), ROOT: root}))


def is_absence(storage: Storage, error: StorageError) -> bool:
    """Return True if an error means that a file does not exist.

    Web servers that cannot list may respond "forbidden" instead: a signed address is valid for one file only.
    """
    if isinstance(error, StorageNotFoundError) or error.errno == errno.ENOTDIR:
        return True
    return error.errno == errno.EACCES and not storage.capabilities.list


def check_location(path: Any, where: object) -> str:
    """Return a file name from a checkpoint, if it is inside the checkpoint's folder."""
    try:
        if type(path) is str and not path.startswith("/") and "://" not in path and "\\" not in path:
            return check_path(path)
    except ValueError:
        pass
    raise CorruptSnapshotError(f"{where}: a location must be a file name inside the folder, got {str(path)[:200]!r}")


def extend_file(files: dict[str, ForeignFile], location: str, end: int) -> None:
    """Record that a file has at least this length."""
    known = files.get(location)
    if known is None:
        files[location] = ForeignFile(end, exact=False)
    elif not known.exact:
        known.size = max(known.size, end)


class ForeignStorage(ReadOnlyStorage):
    """The files of another library's checkpoint, and bytes that are in no file."""

    def __init__(self, inner: Storage, inline: bytes, *, links: bool) -> None:
        """Wrap a storage; with `links`, files may be links to other folders."""
        super().__init__(inner)
        self._inside: set[str] | None = None if links or inner.url.scheme != "file" else set()
        self._inline = inline
        self._tokens: Mapping[str, str] = {}

    def expect_tokens(self, tokens: Mapping[str, str]) -> None:
        """Raise from now on if a file has another token: it was replaced."""
        self._tokens = tokens

    async def read_into(self, path: str, offset: int, buffers: Sequence[Buffer], *, token: str | None = None) -> None:
        if path != INLINE:
            self._expect_inside(path)
            known = self._tokens.get(path)
            try:
                await self.inner.read_into(path, offset, buffers, token=token or known)
            except StorageConflictError as error:
                raise self._replacement(path) from error
            # other storages compare it with the response; a file may also be changed in place during the read
            if known is not None and self.inner.capabilities.local and (await self.inner.stat(path)).token != known:
                raise self._replacement(path)
            return
        for each in buffers:
            view = memoryview(each).cast("B")
            if offset + len(view) > len(self._inline):
                raise CorruptSnapshotError(f"{self.url}: {INLINE} ends before {offset + len(view)}")
            view[:] = self._inline[offset : offset + len(view)]
            offset += len(view)

    def _replacement(self, path: str) -> StorageConflictError:
        return StorageConflictError(f"{self.inner.url.join(path)}: was replaced while it was read; start again")

    def _expect_inside(self, path: str) -> None:
        """Raise for a link out of the folder: its bytes have no digest, and could be any file's."""
        if self._inside is None or path in self._inside:
            return
        root = os.path.realpath(self.inner.url.location)
        if os.path.commonpath([root, os.path.realpath(os.path.join(root, path))]) != root:
            raise UnsafeObjectError(
                f"{self.inner.url.join(path)}: refusing to follow a link out of the folder, which could be "
                "any file; if it is intended, copy the folder with links followed (cp -rL)"
            )
        self._inside.add(path)

    async def stat(self, path: str) -> FileStat:
        if path == INLINE:
            return FileStat(len(self._inline), 0.0, "")
        found = await self.inner.stat(path)
        if self._tokens.get(path, found.token) != found.token:
            raise self._replacement(path)
        return found

    async def get(self, path: str, *, limit: int | None = None) -> bytes:
        self._expect_inside(path)
        return await self.inner.get(path, limit=limit)

    @property
    def _refusal(self) -> StorageError:
        return StorageError(f"{self.url}: written by another library, so it is read-only")
