"""Compression of data files in memory, and the measured speeds that decide whether it saves time."""

from __future__ import annotations

import mmap
import os
import tempfile
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import msgspec
import torch

from snapshot.errors import StorageError
from snapshot.events import emit, log
from snapshot.io.aio import in_thread
from snapshot.io.arena import arena_bytes
from snapshot.io.budget import MemoryBudget
from snapshot.io.session import Session
from snapshot.io.storage import Buffer
from snapshot.io.system import PerProcess, allocate
from snapshot.io.url import URL
from snapshot.plan.layout import FilePlan, MiB
from snapshot.state.leaves import Leaf
from snapshot.tensors.digest import BLOCK, block_digest, digest_range, digest_table
from snapshot.tensors.memory import view_memory
from snapshot.tensors.split_zstd import (
    CODEC,
    PAGE,
    RECORD,
    cut_blocks,
    encode_table,
    kind_of,
    load_zstd,
    sum_stored,
    thread_codec,
)
from snapshot.text import size_text

# Pace: the speed of this process's takes by place, which decides whether compression saves time.
#
# The first take to a place is not compressed. Its speed is that of the link. Samples of a take's tensors tell whether
# compression can gain anything over this link. If so, each way is measured twice, and the faster one is used.

SHORTEST = 32 * MiB
"""Minimum bytes of a take that shows a speed: shorter ones show the delays of requests."""
SAMPLES = 8
TRIES = 2
"""Measurements of each way before they are compared: one alone may be that of a stall."""
KEPT = 3
"""Number of last measurements of a way. The fastest one counts."""
FASTER = 1.5
"""Ratio of a compressed take's speed to those before it from which the link counts as faster."""
OVERHEAD = 2
"""Seconds that a take needs to compress, as a multiple of those of its samples, which are in a CPU cache."""
GAIN = 0.97
"""Maximum share of the seconds without compression that compression may be expected to need."""


@dataclass
class _Place:
    """Measured speeds."""

    speeds: dict[bool, deque[float]] = field(default_factory=lambda: {way: deque(maxlen=KEPT) for way in (False, True)})
    """Bytes of tensors per second, by way: True is with compression."""
    links: deque[float] = field(default_factory=lambda: deque(maxlen=4 * KEPT))
    """Stored bytes per second, in both ways. The link is at least as fast as the fastest one."""
    lock: threading.Lock = field(default_factory=threading.Lock)
    takes: int = 0
    changed: bool = False
    """True if a compressed take was much faster than those before it: the link may be faster now."""

    def choose(self) -> bool:
        """Return True if the next take is to be compressed. The slower way is tried again ever less often."""
        with self.lock:
            self.takes += 1
            if self.takes < 2 * TRIES:  # one take before was not compressed
                return self.takes % 2 == 1
            raw, packed = (max(self.speeds[way], default=0.0) for way in (False, True))
            again = self.changed or (self.takes >= 2 * TRIES + 4 and self.takes.bit_count() == 1)
            self.changed = False
            return packed > 0 and (packed > raw) != again

    def note(self, speed: float, link: float, *, packed: bool) -> None:
        """Remember the speeds of a take."""
        with self.lock:
            known = self.speeds[packed]
            self.changed = packed and bool(known) and speed > FASTER * max(known)
            known.append(speed)
            self.links.append(link)

    def link(self) -> float:
        """Return the speed of the link; 0 if no take was measured."""
        with self.lock:
            return max(self.links, default=0.0)


@dataclass(frozen=True, slots=True)
class SampledSpeed:
    """The result of compressing samples of the tensors."""

    ratio: float
    speed: float
    """Bytes per second of one thread."""


_places: PerProcess[dict[tuple[str, str], _Place]] = PerProcess(dict)


def compression_pays(session: Session, leaves: Sequence[Leaf]) -> bool:
    """Return True if a take of these leaves is expected to end sooner with compression."""
    place = _places.get().get(_key(session.url))
    nbytes = sum(leaf.nbytes for leaf in leaves)
    link = 0.0 if place is None else place.link()
    if place is None or not link or nbytes < SHORTEST:
        return False
    found = sample(leaves)
    raw = 1 / link
    packed = OVERHEAD / (found.speed * session.settings.lane_count()) + raw / found.ratio if found.speed else raw
    pays = packed <= GAIN * raw and place.choose()
    log.debug("%s: %.0f MB/s without compression, %.0f with it", session.url, 1e-6 / raw, 1e-6 / packed)
    emit("compression", "take", str(session.url), chosen=pays, raw=round(1 / raw), compressed=round(1 / packed))
    return pays


def note_speed(session: Session, nbytes: int, seconds: float, *, stored: int, packed: bool) -> None:
    """Remember the speed of a take: its bytes before compression and as stored, and the seconds to write them."""
    if nbytes < SHORTEST or seconds <= 0:
        return
    place = _places.get().setdefault(_key(session.url), _Place())
    place.note(nbytes / seconds, stored / seconds, packed=packed)


def sample(leaves: Sequence[Leaf]) -> SampledSpeed:
    """Compress blocks of the longest tensors, chosen evenly over their bytes."""
    codec, out = thread_codec(), memoryview(bytearray(BLOCK))
    total = sum(leaf.nbytes for leaf in leaves)
    wanted = [total * (2 * number + 1) // (2 * SAMPLES) for number in range(SAMPLES)]
    position = nbytes = stored = 0
    seconds = 0.0
    for leaf in leaves:
        while wanted and wanted[0] < position + leaf.nbytes:
            data = _block_of(leaf, wanted.pop(0) - position)
            if data is None:
                continue
            kind = kind_of(leaf.dtype)
            if not nbytes:
                codec.encode(data, kind, out)  # its tables and pages are warm from now on
            began = time.perf_counter()
            stored += codec.encode(data, kind, out)
            seconds += time.perf_counter() - began
            nbytes += len(data)
        position += leaf.nbytes
    return SampledSpeed(nbytes / stored, nbytes / seconds) if nbytes else SampledSpeed(1.0, 0.0)


def _block_of(leaf: Leaf, offset: int) -> memoryview | None:
    """Return up to a block of a tensor from about an offset on, or None if its bytes are not contiguous."""
    itemsize = leaf.tensor.itemsize
    begin = max(0, min(offset, leaf.nbytes - BLOCK)) // itemsize * itemsize
    length = min(BLOCK, leaf.nbytes)
    if leaf.plain:
        return memoryview(bytes(view_memory(leaf.address + begin, length)))
    if not leaf.tensor.is_contiguous():
        return None
    part = leaf.tensor.detach().view(-1)[begin // itemsize : (begin + length) // itemsize].cpu()
    return memoryview(part.view(torch.uint8).numpy().tobytes())


def _key(url: URL) -> tuple[str, str]:
    """Return the place of a URL: the device of a local folder, or a bucket or host."""
    if url.scheme not in ("file", "near"):
        return url.scheme, url.location.lstrip("/").partition("/")[0]
    path = os.path.abspath(url.location)
    while not os.path.exists(path) and os.path.dirname(path) != path:
        path = os.path.dirname(path)
    try:
        return "file", str(os.stat(path).st_dev)
    except OSError:
        return "file", path


# Packing: a data file is compressed in memory before it is created, since a storage must know its size first.

LARGEST_PACKED = 256 * MiB
SMALLEST_PACKED = MiB
"""Bounds of a compressed file's length before compression."""
WORTH_A_FILE = 32 * MiB
FILES = 32
"""Number of files from which on they may be longer than WORTH_A_FILE."""
USUAL_BUDGET = 512 * MiB
"""Default budget if files are compressed: they are long, and several are compressed at once."""
ARGUMENT = (None, "zstd", "auto")
"""Values of the argument `compression`."""
NOTICE = "compressed; restore it, or convert it with `snapshot convert`"
_JSON = msgspec.json.Encoder()
Layout = Callable[[FilePlan], tuple[int, Iterable[tuple[int, int]]]]
"""A function that returns the length of a file's header, and the length and the kind of each range after it."""
Publish = Callable[["PackedResult | None"], Coroutine[Any, Any, None]]
"""A function that gets the stored form of a file before it is written; None for one that is not compressed."""


@dataclass(frozen=True, slots=True)
class PackedResult:
    """A compressed file, as the manifest describes it."""

    size: int
    """Bytes of the stored file."""
    table: bytes
    digest: str


def expect_compression(value: object) -> None:
    """Raise `ValueError` for a wrong value of the argument, and `MissingExtraError` if zstd is not installed."""
    if value not in ARGUMENT:
        raise ValueError(f"compression must be None, 'zstd' or 'auto', got {value!r}")
    if value is not None:
        load_zstd()


@dataclass(frozen=True, slots=True)
class Packing:
    """The compression of an operation's data files."""

    memory: MemoryBudget
    """Memory of the files that are compressed or written. It is apart from the budget of staged parts, which wait for
    it."""
    layout: Layout
    at_once: int = 4
    """Maximum number of files that are compressed at once; others are written meanwhile."""
    spill: str = ""
    """A folder for temporary files, for files that are longer than the memory."""
    publish: Publish | None = None

    def kinds(self, file: FilePlan) -> bytes:
        """Return the kind of each range of a file."""
        return bytes(kind for _, kind in self.layout(file)[1])

    @asynccontextmanager
    async def room(self, nbytes: int) -> AsyncIterator[memoryview]:
        """Yield room for a file: memory of the budget, or for a long one a temporary file."""
        if self.spill and arena_bytes(nbytes) > self.memory.limit:
            with tempfile.TemporaryFile(prefix=".packing-", dir=self.spill) as file:
                try:
                    await in_thread(allocate, file.fileno(), nbytes)  # a full disk is an error only here
                except OSError as error:
                    raise StorageError(
                        f"{self.spill}: a temporary file of {size_text(nbytes)} cannot be created: {error}"
                    ) from error
                memory = mmap.mmap(file.fileno(), nbytes)  # stays mapped until the end
                yield memoryview(memory)
            return
        async with self.memory.slot(arena_bytes(nbytes)) as slot:
            yield slot.view


def choose_packing(compression: str | None, session: Session, leaves: Sequence[Leaf]) -> MemoryBudget | None:
    """Return the memory for compression, half of the budget; None if files are not to be compressed."""
    if compression is None or (compression == "auto" and not compression_pays(session, leaves)):
        return None
    return session.budget.set_aside(session.budget.total // 2)


def usual_budget(compression: str | None) -> int:
    """Return the default budget of an operation that compresses; 0 for the usual one."""
    return USUAL_BUDGET if compression is not None else 0


def longest_file(memory: MemoryBudget, lanes: int, total: int) -> int:
    """Return the length of files that are compressed in this memory, each on a core, while one is written.

    Files of a short state are shorter: a link waits until the first one is compressed.
    """
    room = memory.limit // (lanes + 1) // MiB * MiB
    return max(SMALLEST_PACKED, min(LARGEST_PACKED, room, max(WORTH_A_FILE, total // FILES // MiB * MiB)))


class FilePacker:
    """Compresses a file whose bytes arrive in order."""

    def __init__(self, header: int, ranges: Iterable[tuple[int, int]], out: memoryview) -> None:
        """`header`: bytes before the first range. `out` has room for the whole file and a page."""
        self._blocks = iter(cut_blocks(header, ranges))
        self._header = header
        self._out = out
        self._used = PAGE
        self._size = 0
        self._records: list[tuple[int, int, int, int]] = [(PAGE, 0, 0, 0)]
        self._digests: list[bytes] = []
        self._digested = 0
        self._open = bytearray(BLOCK)
        self._filled = 0
        self._length, self._kind = next(self._blocks, (0, 1))

    def feed(self, buffers: Sequence[Buffer]) -> None:
        """Add the next bytes, in pieces of any length."""
        for buffer in buffers:
            view = memoryview(buffer).cast("B")
            position = 0
            while position < len(view):
                if not self._filled and len(view) - position >= self._length:
                    self._add(view[position : position + self._length])
                    position += self._records[-1][1]
                    continue
                taken = min(self._length - self._filled, len(view) - position)
                self._open[self._filled : self._filled + taken] = view[position : position + taken]
                self._filled += taken
                position += taken
                if self._filled == self._length:
                    self._filled = 0
                    self._add(memoryview(self._open)[: self._length])

    def _add(self, block: memoryview) -> None:
        length, begin = len(block), self._used
        if self._size < self._header:  # the header is never compressed
            self._out[begin : begin + length] = block
            stored = length
        else:
            stored = thread_codec().encode(block, self._kind, self._out[begin : begin + length])
        self._used += stored
        self._digest_blocks()
        self._size += length
        self._records.append((stored, length, self._kind, sum_stored(self._out[begin : begin + stored])))
        self._length, self._kind = next(self._blocks, (0, 1))

    def finish(self) -> PackedResult | None:
        """Complete the stored file in `out`. Return None if nothing is gained: then the file is there after a page."""
        if self._used + RECORD * len(self._records) >= self._size:
            self._unpack()
            return None
        data = self._used - PAGE
        text = _JSON.encode(
            {
                "__metadata__": {"format": CODEC, "snapshot": NOTICE},
                f"data[{CODEC}]": {"dtype": "U8", "shape": [data], "data_offsets": [0, data]},
            }
        )
        page = (PAGE - 8).to_bytes(8, "little") + text.ljust(PAGE - 8)
        self._out[:PAGE] = page
        self._records[0] = (PAGE, 0, 0, sum_stored(page))
        return PackedResult(self._used, encode_table(self._records), self._finish_digest())

    def _unpack(self) -> None:
        """Decompress all blocks in place. The last one is first, since each moves towards the end."""
        stored, begin = self._used, PAGE + self._size
        for length, size, kind, _ in reversed(self._records[1:]):
            stored, begin = stored - length, begin - size
            target = self._out[begin : begin + size]
            if length == size:
                self._open[:size] = self._out[stored : stored + length]
            else:
                thread_codec().decode(self._out[stored : stored + length], kind, memoryview(self._open)[:size])
            target[:] = memoryview(self._open)[:size]

    def _digest_blocks(self) -> None:
        """Digest stored bytes while they are in a CPU cache; the first block waits for its header."""
        while self._used - self._digested >= BLOCK:
            begin = self._digested
            self._digests.append(block_digest(self._out[begin : begin + BLOCK]) if begin else b"")
            self._digested += BLOCK

    def _finish_digest(self) -> str:
        if not self._digests:
            return digest_range(self._out[: self._used])
        self._digests[0] = block_digest(self._out[:BLOCK])
        if self._digested < self._used:
            self._digests.append(block_digest(self._out[self._digested : self._used]))
        return digest_table(b"".join(self._digests)) if len(self._digests) > 1 else digest_range(self._out[:BLOCK])


def layout_of_leaves(leaves: Sequence[Leaf]) -> Layout:
    """Return a function that returns the layout of a planned file with some of these leaves."""

    def ranges(file: FilePlan) -> Iterable[tuple[int, int]]:
        kinds: dict[str, int] = {}
        for extent in file.extents:
            dtype = leaves[extent.leaf].dtype
            if dtype not in kinds:
                kinds[dtype] = kind_of(dtype)
            yield extent.end - extent.begin, kinds[dtype]

    return lambda file: (len(file.header), ranges(file))
