"""Whole files through a storage, in parts within its limits: a minimal write engine for tests."""

from __future__ import annotations

import asyncio
import mmap
import random
from collections.abc import Sequence

from snapshot.storage import Limits, Storage


def pattern(size: int, seed: int = 0) -> bytes:
    """Return bytes in which any shift, swap or loss is detected."""
    return random.Random(seed).randbytes(size)  # noqa: S311 - a pattern, not a secret


def aligned(data: bytes, alignment: int = mmap.PAGESIZE) -> memoryview:
    """Return a copy of the bytes at an address that is a multiple of `alignment`, in whole pages of memory."""
    if mmap.PAGESIZE % alignment:
        raise ValueError(f"alignment must divide the page size of {mmap.PAGESIZE}, got {alignment}")
    if not data:
        return memoryview(b"")
    view = memoryview(mmap.mmap(-1, len(data)))
    view[:] = data
    return view


def part_length(limits: Limits, wanted: int) -> int:
    """Return a part length near `wanted` within the limits."""
    length = max(limits.smallest_part, min(wanted, limits.largest_part))
    length += -length % limits.multiple
    if length > limits.largest_part:
        raise ValueError(f"no part fits {limits}")
    return length


def cut(size: int, length: int) -> list[tuple[int, int]]:
    """Return offset and length of each part of a file; only the last one is shorter."""
    return [(offset, min(length, size - offset)) for offset in range(0, size, length)]


async def store(storage: Storage, path: str, data: bytes, *, part: int = 1 << 20, seed: int | None = None) -> None:
    """Write a file: parts concurrently as far as the limits allow, in an order that the seed shuffles.

    Abort the file on a failure, as the write engine would.
    """
    limits = storage.limits
    parts = cut(len(data), part_length(limits, part))
    if seed is not None and not limits.in_order:
        random.Random(seed).shuffle(parts)  # noqa: S311 - an order, not a secret
    free = asyncio.Semaphore(1 if limits.in_order else limits.parallel_parts)
    writer = await storage.create(path, len(data))

    async def write(offset: int, length: int) -> None:
        async with free:
            await writer.write(offset, [aligned(data[offset : offset + length], limits.alignment)])

    try:
        for outcome in await asyncio.gather(*(write(*each) for each in parts), return_exceptions=True):
            if outcome is not None:
                raise outcome
        await writer.finish()
    except BaseException:
        await writer.abort()
        raise


async def fetch(storage: Storage, path: str, offset: int, lengths: Sequence[int], *, token: str | None = None) -> bytes:
    """Read a range into buffers of the given lengths, and return their joined contents."""
    buffers = [memoryview(bytearray(b"\xee" * length)) for length in lengths]
    await storage.read_into(path, offset, buffers, token=token)
    return b"".join(buffers)
