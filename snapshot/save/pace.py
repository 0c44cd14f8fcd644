"""The speed of this process's takes by place, which decides whether compression saves time.

The first take to a place is not compressed. Its speed is that of the link. Samples of a take's tensors tell whether
compression can gain anything over this link. If so, each way is measured twice, and the faster one is used.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from snapshot.events import emit, log
from snapshot.io.session import Session
from snapshot.io.system import PerProcess
from snapshot.io.url import URL
from snapshot.plan.layout import MiB
from snapshot.state.leaves import Leaf
from snapshot.tensors.buffers import view_memory
from snapshot.tensors.digest import BLOCK

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
    from snapshot.tensors.split_zstd import kind_of, thread_codec  # only takes that may be compressed need it

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
