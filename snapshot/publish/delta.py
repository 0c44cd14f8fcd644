"""Deltas of tensors: zstd of the XOR of two versions' bytes, with the checksum and the digest of the new bytes.

All stages work on one block at a time while it is in a CPU cache. They release the interpreter lock.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from snapshot.errors import CorruptSnapshotError
from snapshot.storage import Buffer
from snapshot.tensors.digest import BLOCK, SIZE, block_digest, digest_range, digest_table
from snapshot.tensors.zstd import load_zstd, new_compressor

Bytes = npt.NDArray[np.uint8]
LARGEST_WINDOW = 1 << 27
"""Maximum memory that a frame of another publisher may ask for."""
WINDOWS = 1 << 24
"""Maximum memory that the frames of several deltas may ask for together. One that asks for more is applied alone."""
SMALL_WINDOW = 1 << 20
"""Decompressors with larger windows are not kept for the next tensor."""


def checksum_text(checksum: int) -> str:
    """Return an Adler-32 checksum as it is stored."""
    return f"{checksum:08x}"


@dataclass(frozen=True, slots=True)
class TensorSums:
    """The digest of a tensor's bytes, and the digests of its blocks."""

    digest: str
    table: bytes


@dataclass(frozen=True, slots=True)
class EncodedDelta:
    """The result of a comparison of two versions of a tensor."""

    sums: TensorSums
    compressed: bytes | bytearray = b""
    """One zstd frame with its content size. Empty if the tensor is unchanged."""
    checksum: int = 0
    """Adler-32 of the new bytes, if the tensor changed."""


def sum_blocks(table: Sequence[bytes]) -> TensorSums:
    """Return the sums of a tensor from the digests of its blocks. There is at least one."""
    joined = b"".join(table)
    return TensorSums(f"xxh3:{joined.hex()}" if len(table) == 1 else digest_table(joined), joined)


def sum_bytes(data: Bytes) -> TensorSums:
    """Return the sums of a tensor's bytes."""
    view = _view(data)
    return sum_blocks([block_digest(view[begin : begin + BLOCK]) for begin in range(0, max(1, len(view)), BLOCK)])


class DeltaEncoder:
    """Encodes tensors one after the other, with one compressor and one buffer. Each thread has its own."""

    def __init__(self) -> None:
        self._zstd = new_compressor()
        self._changes = np.empty(BLOCK, np.uint8)
        self._zeros = memoryview(bytes(BLOCK))

    def encode(self, new: Bytes, base: Bytes, base_sums: TensorSums) -> EncodedDelta:
        """Compare a tensor's bytes with its base. `base_sums` are those of the base.

        Blocks whose digests are equal count as unchanged, and are not read a second time.
        """
        view, known = _view(new), base_sums.table
        table: list[bytes] = []
        parts: list[bytes] = []
        stream: Any = None
        checksum = 1
        for number, begin in enumerate(range(0, len(new), BLOCK)):
            block = view[begin : begin + BLOCK]
            table.append(block_digest(block))
            unchanged = table[-1] == known[number * SIZE : (number + 1) * SIZE]
            if stream is None:
                if unchanged:
                    continue
                stream = self._zstd.compressobj(size=len(new))
                for _ in range(number):
                    parts.append(stream.compress(self._zeros))
                checksum = zlib.adler32(view[:begin], checksum)
            if unchanged:
                parts.append(stream.compress(self._zeros[: len(block)]))
            else:
                changes = self._changes[: len(block)]
                _xor(new[begin : begin + BLOCK], base[begin : begin + BLOCK], changes)
                parts.append(stream.compress(_view(changes)))
            checksum = zlib.adler32(block, checksum)
        if stream is None:
            return EncodedDelta(base_sums)
        parts.append(stream.flush())
        return EncodedDelta(sum_blocks(table), bytearray().join(parts), checksum)


def _view(data: Bytes) -> memoryview:
    buffer: Buffer = data
    return memoryview(buffer)


def _xor(left: Bytes, right: Bytes, out: Bytes) -> None:
    """Compute the XOR of two arrays, in words if their length allows it."""
    if len(left) % 8 == 0:
        with suppress(ValueError):  # not aligned
            left, right, out = left.view(np.uint64), right.view(np.uint64), out.view(np.uint64)
    np.bitwise_xor(left, right, out=out)


class Source(Protocol):
    """A function that fills a buffer with the bytes from an offset on."""

    def __call__(self, offset: int, buffer: memoryview) -> None:
        """Fill the buffer."""
        ...


class DeltaDecoder:
    """Applies deltas to tensors, one tensor after the other. Each thread has its own."""

    def __init__(self) -> None:
        self._streams: list[Any] = []
        """A decompressor for each delta of a tensor: a stream occupies its own."""
        self._block = np.empty(BLOCK, np.uint8)
        self._changes = np.empty(BLOCK, np.uint8)

    def apply(
        self,
        nbytes: int,
        read: Source,
        deltas: Sequence[bytes | bytearray | memoryview],
        write: Source,
        *,
        checksum: str | None = None,
        digest: str | None = None,
    ) -> str:
        """Apply deltas to a tensor, block by block. `read` and `write` may use the same memory.

        Return the digest of the result. Raise `CorruptSnapshotError` if a delta has another size, or if the result has
        another checksum or digest than expected.
        """
        while len(self._streams) < len(deltas):
            self._streams.append(load_zstd().ZstdDecompressor(max_window_size=LARGEST_WINDOW))
        streams = [_open(zstd, delta, nbytes) for zstd, delta in zip(self._streams, deltas, strict=False)]
        table: list[bytes] = []
        actual = 1
        for begin in range(0, nbytes, BLOCK):
            length = min(BLOCK, nbytes - begin)
            block, changes = self._block[:length], self._changes[:length]
            view = _view(block)
            read(begin, view)
            for stream in streams:
                _fill(stream, _view(changes))
                _xor(block, changes, block)
            if checksum is not None:
                actual = zlib.adler32(view, actual)
            table.append(block_digest(view))
            write(begin, view)
        for stream in streams:
            _expect_end(stream)
        if any(_window_of(delta, nbytes) > SMALL_WINDOW for delta in deltas):
            self._streams.clear()  # each keeps the memory of its largest window
        if checksum is not None and checksum_text(actual) != checksum:
            raise CorruptSnapshotError(f"its checksum must be {checksum}, got {checksum_text(actual)}")
        found = sum_blocks(table).digest if table else digest_range(b"")
        if digest is not None and found != digest:
            raise CorruptSnapshotError(f"its digest must be {digest}, got {found}")
        return found


def group_by_windows(deltas: Sequence[bytes | bytearray], nbytes: int) -> list[tuple[list[bytes | bytearray], int]]:
    """Return the deltas of a tensor in groups that are applied together, each with the memory of its windows."""
    groups: list[tuple[list[bytes | bytearray], int]] = []
    for delta in deltas:
        window = _window_of(delta, nbytes)
        if groups and groups[-1][1] + window <= WINDOWS:
            groups[-1] = [*groups[-1][0], delta], groups[-1][1] + window
        else:
            groups.append(([delta], window))
    return groups or [([], 0)]


def _window_of(delta: bytes | bytearray | memoryview, nbytes: int) -> int:
    """Return the memory that the decompression of a frame takes."""
    module = load_zstd()
    try:
        window: int = module.get_frame_parameters(delta).window_size
    except module.ZstdError as error:
        raise CorruptSnapshotError(f"its delta is not a zstd frame: {error}") from error
    return min(window, max(nbytes, BLOCK))


def _open(zstd: Any, delta: bytes | bytearray | memoryview, nbytes: int) -> Any:
    """Return a stream of a frame's contents. Its size is checked first, and more is never decompressed."""
    module = load_zstd()
    try:
        size = module.get_frame_parameters(delta).content_size
    except module.ZstdError as error:
        raise CorruptSnapshotError(f"its delta is not a zstd frame: {error}") from error
    if size not in (nbytes, module.CONTENTSIZE_UNKNOWN):
        raise CorruptSnapshotError(f"its delta must have {nbytes} bytes, got {size}")
    return zstd.stream_reader(delta, read_size=BLOCK)


def _fill(stream: Any, buffer: memoryview) -> None:
    try:
        while len(buffer):
            count = stream.readinto(buffer)
            if not count:
                raise CorruptSnapshotError("its delta ends before the tensor does")
            buffer = buffer[count:]
    except load_zstd().ZstdError as error:
        raise CorruptSnapshotError(f"its delta cannot be decompressed: {error}") from error


def _expect_end(stream: Any) -> None:
    try:
        longer = stream.read(1)
    except load_zstd().ZstdError as error:
        raise CorruptSnapshotError(f"its delta cannot be decompressed: {error}") from error
    if longer:
        raise CorruptSnapshotError("its delta is longer than the tensor")
