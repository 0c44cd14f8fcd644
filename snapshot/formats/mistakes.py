"""What people open by mistake: the name of each file or folder, and what to do with it."""

from __future__ import annotations

import asyncio
import difflib
import heapq
import re
from collections.abc import Callable, Iterable, Sequence

from snapshot.errors import SnapshotError, SnapshotNotFoundError, StorageError, UnsupportedFormatError
from snapshot.formats.foreign import UnknownFormatError
from snapshot.io.storage import Storage
from snapshot.io.url import URL
from snapshot.manifest.document import METADATA

HEAD = 512
"""Number of first bytes that identify a file."""
POINTER = b"version https://git-lfs"
"""First bytes of the file that Git has in place of a large one."""
SHOWN = 5
WAIT = 2.0
"""Seconds to list the folder above a place that has no files."""
COMPARED, LONGER = 64, 16
"""Maximum number of names that a mistyped one is compared with, and by how much they may be longer or shorter."""
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


async def refuse_folder(storage: Storage, open_beside: Callable[[URL], Storage]) -> SnapshotError:
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
    if not names and (beside := await describe_parent(where, open_beside)):
        return SnapshotNotFoundError(f"{missing}: {beside}")
    return SnapshotNotFoundError(
        f"{missing}, or it was never committed ({METADATA} is missing), and no readable checkpoint of another library"
    )


async def describe_parent(place: URL, open_beside: Callable[[URL], Storage]) -> str:
    """Return what is in the folder above a place that has no files; an empty text if that is unknown."""
    above, _, name = place.location.rpartition("/")
    if not above or not name:
        return ""
    parent = URL(place.scheme, above, place.query)
    try:
        names = await asyncio.wait_for(open_beside(parent).list(recursive=False), WAIT)
    except (SnapshotError, ValueError, TimeoutError):
        return ""
    if f"{name}/" in names:
        return "the folder is empty"
    names = [each for each in names if each.isprintable()]
    near = _find_near(name, names)
    alike = sorted((each for each in names if _STEP.fullmatch(each) or _READABLE.fullmatch(each)), key=_in_order)
    has = f"; {parent} has {_few(alike)}" if alike else ""
    return f"nothing exists there{has}{f'; did you mean {parent.join(near)}?' if near else ''}"


def _find_near(name: str, names: Sequence[str]) -> str:
    """Return the name that a mistyped one is most like; an empty text if none is near it."""

    def begins_alike(other: str) -> int:
        return next((at for at, (mine, its) in enumerate(zip(name, other, strict=False)) if mine != its), len(name))

    others = (each.rstrip("/") for each in names)
    others = (each for each in others if each != name and abs(len(each) - len(name)) <= LONGER)
    likely = heapq.nlargest(COMPARED, others, key=begins_alike)
    return next(iter(difflib.get_close_matches(name, likely, n=1)), "")


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
