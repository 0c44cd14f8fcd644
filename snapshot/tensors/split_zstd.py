"""The codec `split+zstd`: blocks of numbers, losslessly smaller."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from snapshot.errors import CorruptSnapshotError, MissingExtraError
from snapshot.io.storage import Buffer
from snapshot.tensors.digest import BLOCK
from snapshot.tensors.packed_files import MOST_TIMES, PAGE, TINY

# zstd, an optional dependency: the module, and a compressor for bytes of tensors.

WINDOW_LOG = 17
HASH_LOG = 6
"""zstd's tables have few entries, so that a match is always near the end of the last one."""
SHORTEST_MATCH = 7


def load_zstd() -> Any:
    """Return the module `zstandard`."""
    try:
        import zstandard
    except ImportError as error:
        raise MissingExtraError("compression needs zstd: install the extra 'zstd'") from error
    return zstandard


def new_compressor() -> Any:
    """Return a compressor that is little more than an entropy coder: small tables, few matches."""
    zstd = load_zstd()
    return zstd.ZstdCompressor(
        compression_params=zstd.ZstdCompressionParameters(
            window_log=WINDOW_LOG,
            hash_log=HASH_LOG,
            chain_log=HASH_LOG,
            min_match=SHORTEST_MATCH,
            strategy=zstd.STRATEGY_FAST,
            target_length=0,
            write_content_size=True,
        )
    )


# The codec `split+zstd`
#
# The bytes of floating-point numbers look random, but their exponents repeat. So each number is rotated left by one
# bit: then its exponent fills a byte, and the sign is its last bit. The bytes of equal significance of all numbers
# form a plane. Each plane is stored as one zstd frame if that is shorter, otherwise unchanged.

ROTATED = 128
"""Added to an element size: the numbers are rotated."""
KINDS = (1, 2, 4, 8, 2 + ROTATED, 4 + ROTATED, 8 + ROTATED)
"""Element sizes of blocks, rotated or not."""
WORTH = 0.97
"""Maximum ratio of stored bytes: less is not worth the time of reading."""
_RECORD = np.dtype([("stored", "<u4"), ("logical", "<u4"), ("sum", "<u8")])
sum_stored = xxhash.xxh3_64_intdigest
_SAMPLES, _SAMPLE = 4, 1024
_LENGTHS = [np.dtype(f"u{size}") for size in (1, 2, 4, 8)]
_WORDS = {dtype.itemsize: dtype for dtype in _LENGTHS}
_ROTATED_DTYPES = {
    "float16": 2,
    "bfloat16": 2,
    "float32": 4,
    "float64": 8,
    "complex32": 2,
    "bcomplex32": 2,
    "complex64": 4,
    "complex128": 8,
    "F16": 2,
    "BF16": 2,
    "F32": 4,
    "F64": 8,
    "C64": 4,
}
_PLAIN_DTYPES = {
    **{f"{sign}int{8 * size}": size for sign in ("", "u") for size in (2, 4, 8)},
    **{f"{sign}{8 * size}": size for sign in "IU" for size in (2, 4, 8)},
}
Bytes = npt.NDArray[np.uint8]


def kind_of(dtype: str) -> int:
    """Return the kind of blocks of a dtype, by its name in manifests or in safetensors headers.

    >>> kind_of("bfloat16") - ROTATED, kind_of("I64"), kind_of("bool")
    (2, 8, 1)
    """
    if dtype in _ROTATED_DTYPES:
        return _ROTATED_DTYPES[dtype] + ROTATED
    return _PLAIN_DTYPES.get(dtype, 1)


def cut_blocks(header: int, ranges: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Yield the length and the kind of each block of a file: a header, and ranges of a length and a kind.

    A long range has blocks of its own, so that any part of it is in few of them. Short ranges of one kind share blocks.
    Tiny ones of all kinds do so, too.
    """
    for begin in range(0, header, BLOCK):
        yield min(BLOCK, header - begin), 1
    gathered, kind, tiny = 0, 1, True
    for length, each in ranges:
        apart = each != kind and not (tiny and length < TINY)
        if gathered and (length >= BLOCK or apart or gathered + length > BLOCK):
            yield gathered, kind
            gathered = 0
        if length < BLOCK:
            kind = each if not gathered or each == kind else 1
            tiny = length < TINY and (tiny or not gathered)
            gathered += length
            continue
        for begin in range(0, length, BLOCK):
            yield min(BLOCK, length - begin), each
    if gathered:
        yield gathered, kind


class BlockTable:
    """The places of a compressed file's blocks: its first entry is the header of the stored file."""

    def __init__(self, data: Buffer, size: int, stored: int) -> None:
        """Decode a table for a file of `size` bytes that is stored in `stored`. Raise if they differ."""
        held = np.frombuffer(data, _RECORD)
        lengths = (held["logical"] & 0xFFFFFF).astype(np.int64)
        kinds = held["logical"] >> 24
        places = np.cumsum(held["stored"], dtype=np.int64)
        ends = np.cumsum(lengths)
        widths = np.maximum(kinds % ROTATED, 1)
        blocks = held["stored"][1:]
        valid = (
            len(held) > 1
            and (int(held["stored"][0]), int(held["logical"][0])) == (PAGE, 0)
            and (int(ends[-1]), int(places[-1])) == (size, stored)
            and lengths[1:].min() > 0
            and lengths.max() <= BLOCK
            and bool(np.isin(kinds[1:], KINDS).all())
            and not (lengths % widths).any()
            and bool((blocks <= lengths[1:]).all())
            and bool((blocks * np.int64(MOST_TIMES) >= lengths[1:]).all())
        )
        if not valid:
            raise CorruptSnapshotError("its table must describe all blocks of the file, and no others")
        self.ends, self.kinds, self.sums = ends, kinds, held["sum"]
        """For each entry, the file's bytes until its end, its kind, and the checksum of the stored bytes."""
        self.places = places
        """For each entry, the stored bytes until its end."""

    def find(self, begin: int, end: int) -> range:
        """Return the blocks with some of the bytes [begin, end) of the file."""
        first, last = np.searchsorted(self.ends, [begin, end - 1], "right")
        return range(int(first), int(last) + 1)


def encode_table(records: Sequence[tuple[int, int, int, int]]) -> bytes:
    """Encode a table: for each block its stored length, its length, its kind and the checksum of its stored bytes."""
    table = np.empty(len(records), _RECORD)
    stored, lengths, kinds, sums = zip(*records, strict=True)
    table["stored"], table["sum"] = stored, sums
    table["logical"] = np.array(lengths, np.uint32) | (np.array(kinds, np.uint32) << np.uint32(24))
    return table.tobytes()


class BlockCodec:
    """Encodes and decodes blocks with its own buffers. Each thread has its own."""

    def __init__(self) -> None:
        zstd = load_zstd()
        self._error = zstd.ZstdError
        self._frame_size = zstd.frame_content_size
        self._compressor = new_compressor()
        self._decompressor = zstd.ZstdDecompressor(max_window_size=BLOCK)
        self._planes = [np.empty(BLOCK // 2, np.uint8) for _ in range(8)]
        self._first, self._second = np.empty(BLOCK, np.uint8), np.empty(BLOCK, np.uint8)
        self._sample = np.empty(_SAMPLES * _SAMPLE, np.uint8)

    # Encode

    def encode(self, data: Buffer, kind: int, out: memoryview) -> int:
        """Write a block of at most BLOCK bytes to a buffer of its length. Return the bytes used: fewer, or all."""
        source = np.frombuffer(data, np.uint8)
        size, width = len(source), kind % ROTATED
        planes = [source] if width == 1 else self._split(source.view(_WORDS[width]), kind > ROTATED)
        head = 4 * width
        most = int(size * WORTH) - head
        parts: list[Any] = []
        for number, plane in enumerate(planes):
            always = kind > ROTATED and number == width - 1
            parts.append(self._shorter(plane, always))
            most -= len(parts[-1])
        if most < 0:
            out[:size] = data
            return size
        out[:head] = np.fromiter(map(len, parts), "<u4", width).tobytes()
        for part in parts:
            out[head : head + len(part)] = memoryview(part)
            head += len(part)
        least = -(-size // MOST_TIMES)
        if head < least:
            out[head:least] = bytes(least - head)
        return max(head, least)

    def _split(self, words: npt.NDArray[Any], rotated: bool) -> list[Bytes]:
        """Return the planes of words, the least significant first."""
        count, width = len(words), words.itemsize
        first, second = (each[: words.nbytes].view(words.dtype) for each in (self._first, self._second))
        planes = [plane[:count] for plane in self._planes[:width]]
        if rotated and width == 2:
            np.right_shift(words, 7, out=first)
            np.copyto(planes[1], first, casting="unsafe")
            np.left_shift(words, 1, out=first)
            np.right_shift(words, 15, out=second)
            np.bitwise_or(first, second, out=first)
            np.copyto(planes[0], first, casting="unsafe")
            return planes
        if rotated:
            np.left_shift(words, 1, out=first)
            np.right_shift(words, 8 * width - 1, out=second)
            np.bitwise_or(first, second, out=first)
            words = first
        np.copyto(planes[0], words, casting="unsafe")
        for number in range(1, width):
            np.right_shift(words, 8 * number, out=second)
            np.copyto(planes[number], second, casting="unsafe")
        return planes

    def _shorter(self, plane: Bytes, always: bool) -> Any:
        """Return a plane, compressed if that is worth it. Unless `always`, samples decide whether to try."""
        size = len(plane)
        if not always and size >= 4 * len(self._sample):
            step = (size - _SAMPLE) // (_SAMPLES - 1)
            for number in range(_SAMPLES):
                self._sample[number * _SAMPLE : (number + 1) * _SAMPLE] = plane[number * step : number * step + _SAMPLE]
            if len(self._compressor.compress(self._sample.data)) > WORTH * len(self._sample):
                return plane
        made = self._compressor.compress(plane.data)
        return made if len(made) <= WORTH * size else plane

    # Decode

    def decode(self, stored: memoryview, kind: int, target: memoryview) -> None:
        """Fill a target of the block's length. Raise `CorruptSnapshotError` if the stored bytes do not fit."""
        size, width = len(target), kind % ROTATED
        if len(stored) == size:
            target[:] = stored
            return
        head, count = 4 * width, size // width
        lengths = [int(each) for each in np.frombuffer(stored[:head], "<u4")] if len(stored) >= head else []
        used = head + sum(lengths)
        least = -(-size // MOST_TIMES)
        if len(lengths) != width or len(stored) != max(used, least) or any(each > count for each in lengths):
            raise CorruptSnapshotError("its planes must have the lengths that it begins with")
        planes = []
        for length in lengths:
            planes.append(self._plane(stored[head : head + length], count))
            head += length
        if any(stored[head:]):
            raise CorruptSnapshotError("it must end with its planes")
        if width == 1:
            target[:] = planes[0].data
            return
        self._join(planes, kind > ROTATED, np.frombuffer(target, _WORDS[width]))

    def _plane(self, stored: memoryview, count: int) -> Bytes:
        if len(stored) == count:
            return np.frombuffer(stored, np.uint8)
        try:
            if self._frame_size(stored) != count:  # a longer one must not be allocated
                raise CorruptSnapshotError(f"a frame must have {count} bytes, got {self._frame_size(stored)}")
            made = self._decompressor.decompress(stored, max_output_size=count, allow_extra_data=False)
        except self._error as error:
            raise CorruptSnapshotError(f"cannot be decompressed: {error}") from error
        return np.frombuffer(made, np.uint8)

    def _join(self, planes: list[Bytes], rotated: bool, target: npt.NDArray[Any]) -> None:
        width = target.itemsize
        first, second = (each[: target.nbytes].view(target.dtype) for each in (self._first, self._second))
        if rotated and width == 2:
            np.copyto(first, planes[1])
            np.left_shift(first, 7, out=first)
            np.copyto(second, planes[0])
            np.left_shift(second, 15, out=target)
            np.bitwise_or(first, target, out=first)
            np.right_shift(second, 1, out=second)
            np.bitwise_or(first, second, out=target)
            return
        np.copyto(first, planes[-1])
        for plane in planes[-2:0:-1] if rotated else planes[-2::-1]:
            np.left_shift(first, 8, out=first)
            np.copyto(second, plane)
            np.bitwise_or(first, second, out=first)
        if not rotated:
            np.copyto(target, first)
            return
        # the lowest plane: its lowest bit is the sign
        np.left_shift(first, 7, out=first)
        np.copyto(second, planes[0])
        np.left_shift(second, 8 * width - 1, out=target)
        np.bitwise_or(first, target, out=first)
        np.right_shift(second, 1, out=second)
        np.bitwise_or(first, second, out=target)


_local = threading.local()


def thread_codec() -> BlockCodec:
    """Return this thread's codec."""
    codec: BlockCodec | None = getattr(_local, "codec", None)
    if codec is None:
        codec = _local.codec = BlockCodec()
    return codec
