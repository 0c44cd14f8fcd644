"""The index of a published version: which tensors it has, in which files, and which version it is a delta of.

An index comes from a store, so everything in it is checked before it is used.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec

from snapshot.decoding import decode_json
from snapshot.errors import CorruptSnapshotError, UnsupportedFormatError
from snapshot.formats.hugging_face import INDEX
from snapshot.tensors.digest import digest_range

LONGEST_INDEX = 256 << 20
LAST = 10**12 - 1
"""The highest number of a version."""
CLAIM = ".publishing"
"""Name of the file that reserves a version's number while the version is written."""
CONTRACT = {"delta_encoding": "xor", "compression_format": "zstd", "checksum_format": "adler32"}
"""The encoding of deltas that engines agree on, as an index states it."""
SINGLE = "model.safetensors"
"""The only file with weights of a complete version of another publisher that has no index."""
WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".gguf", ".onnx", ".index.json")
"""Name endings of files that are not beside the weights, but weights themselves."""
LONGEST_FILE = 256 << 20
"""Maximum size of each further file, such as a tokenizer's."""
OWN = "snapshot"
"""The key of this library's details in an index: a text, so that other readers see texts only."""
OWN_FILE = re.compile(r"model-[0-9a-f]{12}-[0-9]{5,}-[0-9]{5,}\.safetensors")
"""Names of the files with weights that this library writes."""
_FOLDER = re.compile(r"weight_v([0-9]{6,12})/?")


class Details(msgspec.Struct):
    """The details that this library adds to an index."""

    publisher: str = ""
    """Id of the publisher object."""
    step: int | None = None
    time: float = 0.0
    """Seconds since the epoch."""
    base: str = ""
    """Digest of the base's index. Another version with the base's number does not match it."""
    digests: dict[str, str] = {}
    """Digest of each tensor: of all tensors of a full version, of the changed ones of a delta."""
    files: dict[str, tuple[int, str]] = {}
    """Further files of a full version, such as `config.json`: their sizes and digests."""


class Index(NamedTuple):
    """A committed version."""

    version: int
    base: int | None
    """The version that it is a delta of; None for a full version."""
    files: dict[str, str]
    """The file of each tensor."""
    details: Details
    digest: str
    """Digest of the index itself."""
    metadata: dict[str, Any]


class _Document(msgspec.Struct):
    weight_map: dict[str, str]
    metadata: dict[str, Any] = {}


def version_name(version: int) -> str:
    """Return the name of a version's folder.

    >>> version_name(12)
    'weight_v000012'
    """
    return f"weight_v{version:06d}"


def version_of(folder: str) -> int | None:
    """Return the number of a version's folder, or None for another name.

    >>> version_of("weight_v000012/"), version_of("weight_v12"), version_of("other")
    (12, None, None)
    """
    found = _FOLDER.fullmatch(folder)
    return None if found is None or version_name(int(found[1])) != folder.rstrip("/") else int(found[1])


def encode_index(
    version: int, base: int | None, files: Mapping[str, str], details: Details, *, total_size: int = 0
) -> bytes:
    """Return the text of an index."""
    metadata: dict[str, Any] = {"total_size": total_size}
    if base is not None:
        metadata = {"version": f"{version:06d}", "base_version": f"{base:06d}", **CONTRACT}
    metadata[OWN] = msgspec.json.encode(details).decode()
    return json.dumps({"metadata": metadata, "weight_map": dict(sorted(files.items()))}, indent=1).encode()


def decode_index(data: bytes, version: int, where: object) -> Index:
    """Check and return an index. Raise `CorruptSnapshotError` if it is damaged or hostile."""
    found: _Document = decode_json(data, _Document, f"{where}: not an index of safetensors files")
    for name in {*found.weight_map.values()}:
        check_file_name(name, where)
    if "__metadata__" in found.weight_map:
        raise CorruptSnapshotError(f"{where}: a tensor must not be named '__metadata__'")
    base = None
    if "base_version" in found.metadata:
        base = _decode_base(found.metadata, version, where)
    text = found.metadata.get(OWN, "{}")
    details: Details = decode_json(text if isinstance(text, str) else "", Details, f"{where}: invalid {OWN}")
    for name in details.files:
        if check_file_name(name, where) == INDEX or name in found.weight_map.values():
            raise CorruptSnapshotError(f"{where}: names the file {name!r} twice")
    return Index(version, base, found.weight_map, details, digest_range(data), found.metadata)


def _decode_base(metadata: Mapping[str, Any], version: int, where: object) -> int:
    for key, value in CONTRACT.items():
        if metadata.get(key) != value:
            raise UnsupportedFormatError(f"{where}: {key} must be {value!r}, got {str(metadata.get(key))[:100]!r}")
    numbers = []
    for key in ("version", "base_version"):
        text = str(metadata.get(key))
        if not re.fullmatch("[0-9]{1,12}", text, re.ASCII):
            raise CorruptSnapshotError(f"{where}: {key} must be a number, got {text[:100]!r}")
        numbers.append(int(text))
    if numbers[0] != version:
        raise CorruptSnapshotError(f"{where}: version must be {version}, got {numbers[0]}")
    if numbers[1] >= version:
        raise CorruptSnapshotError(f"{where}: base_version must be below {version}, got {numbers[1]}")
    return numbers[1]


def check_file_name(name: str, where: object) -> str:
    """Return the name of a file in a version's folder. Raise `CorruptSnapshotError` for any other path."""
    data = name.encode(errors="replace")
    plain = name and not name.startswith(".") and {"/", "\\", "\0"}.isdisjoint(name) and data.decode() == name
    if not plain or len(data) > 200:
        raise CorruptSnapshotError(
            f"{where}: a file name must be a plain name inside the folder, got {str(name)[:200]!r}"
        )
    return name
