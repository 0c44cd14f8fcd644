"""Shared parts of the readers for other libraries' formats, and errors for what people open by mistake."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from snapshot.decoding import decode_json
from snapshot.errors import (
    CorruptSnapshotError,
    SnapshotError,
    SnapshotNotFoundError,
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
from snapshot.manifest.document import METADATA, Document, FileEntry, ForeignFile
from snapshot.manifest.paths import decode_component, encode_key
from snapshot.tensors.digest import digest_range

# What people open by mistake: the name of each, and what to do with it.

HEAD = 512
"""Number of first bytes that identify a file."""
POINTER = b"version https://git-lfs"
"""First bytes of the file that Git has in place of a large one."""
SHOWN = 5
PROBED = 16
"""Maximum number of a run's newest folders in which a manifest is looked for."""

_TRUST = "only running it reads it, which may run any code; if you trust it, load it and save its tensors again"
_PARTS = (
    (r"__\d+_\d+\.distcp|\.metadata", "a part of a DCP checkpoint; open its folder"),
    (re.escape(METADATA), "the manifest of a snapshot; open its folder"),
)
"""Files that are only a part of something, by their names."""
_HEADS = (
    (POINTER, "a Git LFS pointer, not the file itself; run `git lfs pull`"),
    (
        b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19.",
        "a bare pickle, as written by torch.save before torch 1.6 or with _use_new_zipfile_serialization=False: "
        "reading it would run its code; if you trust it, convert it: torch.save(torch.load(file, weights_only=True), "
        "new_file)",
    ),
    *((bytes([0x80, protocol]), f"a bare pickle; {_TRUST}") for protocol in range(2, 6)),
    (b"\x93NUMPY", "a NumPy array (npy); load it with numpy.load"),
    (b"\x89HDF\r\n\x1a\n", "an HDF5 file, as Keras writes it; load it with Keras or h5py"),
    *((head, "compressed as a whole, so no part of it can be read; unpack it") for head in (
        b"\x1f\x8b", b"\x28\xb5\x2f\xfd"
    )),
    *((head, "an HTML page, perhaps a server's error; download the file again") for head in (
        b"<!DOCTYPE html", b"<!doctype html", b"<html"
    )),
)  # fmt: skip
"""Files by their first bytes."""
_ZIPS = (
    (r".*\.npy", "a NumPy archive (npz); load it with numpy.load"),
    (
        r"(.*/)?(archive_format|serialized_exported_program\.json)",
        "a program of torch.export; load it with torch.export.load, and save its state_dict",
    ),
    (r"(.*/)?model\.json", "a TorchScript program, for torch.jit.load only; save its state_dict()"),
)
"""Zip archives by their members."""
_FOLDERS: tuple[tuple[tuple[str, ...], str], ...] = (
    (
        (r"((bf16_|fp16_)?zero_pp_rank_\d+_)?mp_rank_\d+_optim_states\.pt",),
        "a part of a checkpoint of DeepSpeed; its mp_rank_00_model_states.pt is missing",
    ),
    (
        (r"manifest\.ocdbt|ocdbt\.process_\d+/|_sharding",),
        "a part of a checkpoint of Orbax, or one without _METADATA; load it with Orbax, and save it again",
    ),
    (
        (r"metadata\.json", r"common\.pt"),
        "a checkpoint of Megatron-core in zarr; load it with Megatron-core, and save it as torch_dist",
    ),
    (
        (r"consolidated\.0[1-9]\.pth",),
        "the tensor-parallel parts of one of Meta's models; convert them with its tools, or those of transformers",
    ),
)
"""Folders by unique names in them."""
_STEP = re.compile(r"((global_?)?step|checkpoint|ckpt|iter(ation)?|epoch)?[-_=]?\d+([-_=.].*)?/")
_RANKS = {"replicated/", "sharded/", "batched/"}
"""Folders of torchsnapshot, beside those of its ranks."""
_READABLE = re.compile(r"(?!training_args\.bin).*\.(safetensors|pt|pth|bin|ckpt)")
_BELOW = (
    ({"snapshots/", "blobs/"}, "a model in Hugging Face's cache", "snapshots/"),
    ({"model_index.json"}, "a pipeline of diffusers", ""),
)
"""Folders whose subfolders can be opened."""


class UnknownFormatError(UnsupportedFormatError):
    """A file is not a checkpoint of any known format."""


def refuse_file(place: URL, name: str, head: bytes) -> UnsupportedFormatError:
    """Return the error for a file that is not read, from its name and first bytes."""
    where = place.join(name)
    if found := _first(_PARTS, [name]):
        return UnsupportedFormatError(f"{where}: {found}")
    for mark, text in _HEADS:
        if head.startswith(mark):
            return UnsupportedFormatError(f"{where}: {text}")
    if head[257:262] == b"ustar":
        return UnsupportedFormatError(f"{where}: a tar file; unpack it")
    what = "this file is not a checkpoint of any known format"
    if head.lstrip()[:1] in (b"{", b"["):
        what = (
            "this JSON file is not an index of tensors (it has no weight_map); open its folder, or a file with tensors"
        )
    elif not head.strip(b"\0"):
        what = f"not a checkpoint of any known format: the file {'begins with zeros' if head else 'is empty'}"
    elif _READABLE.fullmatch(name):
        what = "not a checkpoint of any known format: it is damaged, or its name is wrong"
    return UnknownFormatError(f"{where}: {what}")


def is_part(name: str) -> bool:
    """Return True for a file that is only a part of something, by its name."""
    return bool(_first(_PARTS, [name]))


def refuse_zip(place: URL, name: str, members: Sequence[str]) -> UnsupportedFormatError:
    """Return the error for a zip archive that torch.save did not write."""
    found = _first(_ZIPS, members)
    return UnsupportedFormatError(f"{place.join(name)}: {found or 'a zip archive, but not of torch.save; unpack it'}")


def _first(known: Iterable[tuple[str, str]], names: Sequence[str]) -> str:
    """Return the text of the first pattern that a name matches; an empty string if there is none."""
    return next((text for pattern, text in known if any(re.fullmatch(pattern, each) for each in names)), "")


async def refuse_folder(storage: Storage) -> SnapshotError:
    """Return the error for a folder without a readable checkpoint, from the names in it.

    It is an `UnsupportedFormatError` for a format that is known but not read, otherwise a `SnapshotNotFoundError`.
    """
    where = storage.url
    try:
        names = await storage.list(recursive=False) if storage.capabilities.list else []
    except StorageError:
        names = []
    for patterns, text in _FOLDERS:
        if all(any(re.fullmatch(pattern, each) for each in names) for pattern in patterns):
            return UnsupportedFormatError(f"{where}: {text}")
    missing = f"{where}: no snapshot found"
    for needed, what, below in _BELOW:
        if needed.issubset(names):
            inside = await _list_folders(storage, below)
            return SnapshotNotFoundError(f"{missing}: the folder is {what}; open one of its folders: {_few(inside)}")
    steps = sorted((each for each in names if _STEP.fullmatch(each)), key=_in_order)
    if steps and _RANKS.isdisjoint(names):
        steps = await _keep_committed(storage, steps)
        return SnapshotNotFoundError(
            f"{missing}: the folder is of a run, with the steps {_few(steps)}; open one of them, such as "
            f"{where.join(steps[-1].rstrip('/'))}"
        )
    if files := sorted((each for each in names if _READABLE.fullmatch(each)), key=_in_order):
        return SnapshotNotFoundError(
            f"{missing}: the folder has the files {_few(files)}, which may be checkpoints by themselves; open one of "
            f"them, such as {where.join(files[-1])}"
        )
    return SnapshotNotFoundError(
        f"{missing}, or it was never committed ({METADATA} is missing), and no readable checkpoint of another library"
    )


async def _list_folders(storage: Storage, below: str) -> list[str]:
    try:
        found = await storage.list(below, recursive=False)
    except StorageError:
        return [below]
    return [each for each in sorted(found) if each.endswith("/")]


async def _keep_committed(storage: Storage, steps: list[str]) -> list[str]:
    """Return the committed snapshots of this library among the newest steps; all steps if there are none."""
    found = []
    for step in steps[-PROBED:]:
        try:
            await storage.stat(f"{step}{METADATA}")
        except StorageError:
            continue
        found.append(step)
    return found or steps


def _in_order(name: str) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdecimal() else (0, part) for part in re.split(r"(\d+)", name)]


def _few(names: Sequence[str]) -> str:
    shown = ", ".join(each.rstrip("/")[:100] for each in names[-SHOWN:])
    return f"{shown} (and {len(names) - SHOWN:,} before)" if len(names) > SHOWN else shown


# Shared parts of the readers for other libraries' formats.
#
# They are generated documents, files with more bytes than the entries use, and a read-only storage.

LINKLESS = ("dcp", "torchsnapshot", "orbax", "torch_checkpointing", "deepspeed", "megatron")
"""Formats with all files in one folder, without links. (Hugging Face's cache consists of links, and a file that the
user names may be one.)"""


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
    root: Any = None,
    inline: bytes = b"",
    index: str = "",
) -> ForeignDocument:
    """Return the document of one save; `token` distinguishes checkpoints at the same place."""
    files = dict(files)
    if inline:
        files[INLINE] = ForeignFile(len(inline))
    return ForeignDocument(
        kind,
        version,
        digest_range(token),
        world_size,
        "1970-01-01T00:00:00+00:00",
        "",
        msgspec.Raw(msgspec.json.encode(metadata or {})),
        files,
        [],
        manifest,
        place=place,
        root=root,
        inline=inline,
        index=index,
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
