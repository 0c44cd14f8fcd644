"""Decompressors of ranges that must be read from their first byte on, by the names of their transforms."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from functools import cache, partial
from typing import Any

from snapshot.errors import CorruptSnapshotError, MissingExtraError
from snapshot.formats import registry, zip_archive


class _Deflate:
    """Decompressor of a deflated member, including its header."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._head = b""
        self._stream = zlib.decompressobj(-zlib.MAX_WBITS)
        self._begun = False

    def __call__(self, data: bytes) -> bytes:
        try:
            if not self._begun:
                self._head += data
                begin = (
                    zip_archive.find_data_begin(self._head)
                    if len(self._head) >= zip_archive.HEADER
                    else len(self._head) + 1
                )
                if begin > len(self._head):
                    return b""
                self._begun, data = True, self._head[begin:]
            return self._stream.decompress(data)
        except (ValueError, zlib.error) as error:
            raise CorruptSnapshotError(f"{self._path}: decompression failed: {error}") from error


class _Zstd:
    """Decompressor of consecutive zstd frames."""

    def __init__(self, path: str) -> None:
        try:
            import zstandard  # slow import, and an optional dependency
        except ImportError as error:
            raise MissingExtraError(f"{path}: compressed with zstd; install the extra 'zstd'") from error
        self._path = path
        self._module = zstandard
        self._stream: Any = None

    def __call__(self, data: bytes) -> bytes:
        made = b""
        try:
            while data:
                if self._stream is None:
                    self._stream = self._module.ZstdDecompressor(max_window_size=1 << 27).decompressobj()
                made += self._stream.decompress(data)
                data = b""
                if self._stream.eof:
                    data, self._stream = self._stream.unused_data, None
        except self._module.ZstdError as error:
            raise CorruptSnapshotError(f"{self._path}: decompression failed: {error}") from error
        return made


class _Inflate:
    """Decompressor of streams of zlib, or of gzip."""

    def __init__(self, path: str, form: int) -> None:
        self._path = path
        self._form = form
        self._stream = zlib.decompressobj(form)

    def __call__(self, data: bytes) -> bytes:
        made = b""
        try:
            while data:
                if self._stream.eof:
                    self._stream = zlib.decompressobj(self._form)
                made += self._stream.decompress(data)
                data = self._stream.unused_data
        except zlib.error as error:
            raise CorruptSnapshotError(f"{self._path}: decompression failed: {error}") from error
        return made


Decompressor = Callable[[bytes], bytes]
"""A function that returns the next bytes, given the next stored ones."""


_BUILT_IN: dict[str, Callable[[str], Decompressor]] = {
    "deflate": _Deflate,
    "zstd": _Zstd,
    "gzip": partial(_Inflate, form=16 + zlib.MAX_WBITS),
    "zlib": partial(_Inflate, form=zlib.MAX_WBITS),
}


@cache
def find_decompressor(codec: str) -> Callable[[str], Decompressor] | None:
    """Return what makes a decompressor for a file, given its path; None if nothing unpacks this codec."""
    return _BUILT_IN.get(codec) or (registry.find_codec(codec) if codec else None)
