"""Planning of reads: wanted ranges that are close together are merged, and long ones are split.

Nothing here depends on the purpose of the bytes. A part is one request that serves several ranges of a file.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec

from snapshot.tensors.digest import BLOCK


class ByteRange(Protocol):
    """A range of a file to read."""

    location: str
    begin: int
    end: int


class ReadSegment(msgspec.Struct, gc=False):
    """A part's share of one wanted range, in bytes of the file."""

    request: int
    begin: int
    end: int


class ReadPart(msgspec.Struct, gc=False):
    """One request: a range of a file, and the segments in it. The bytes between segments are discarded."""

    location: str
    begin: int
    end: int
    segments: list[ReadSegment]


def plan_reads(ranges: Sequence[ByteRange], part_bytes: int, gap: int) -> list[ReadPart]:
    """Return the requests that read every wanted range once, in storage order.

    Long ranges are split at multiples of the digest block size, counted from their begin.
    """
    step = max(BLOCK, part_bytes // BLOCK * BLOCK)
    parts: list[ReadPart] = []
    location, end, room = "", -1, 0
    segments: list[ReadSegment] = []
    for index in sorted(range(len(ranges)), key=lambda i: (ranges[i].location, ranges[i].begin)):
        request = ranges[index]
        begin, stop = request.begin, request.end
        if begin == stop:
            continue
        close = request.location == location and 0 <= begin - end <= gap
        if close and stop - end <= room:
            segments.append(ReadSegment(index, begin, stop))
            room -= stop - end
            end = stop
            parts[-1].end = stop
            continue
        location = request.location
        for at in range(begin, stop, step):
            end = min(at + step, stop)
            segments = [ReadSegment(index, at, end)]
            parts.append(ReadPart(location, at, end, segments))
        room = step - (end - parts[-1].begin)
    return parts
