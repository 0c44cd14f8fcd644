"""Data files through `aiofiles`, for platforms without the vectored calls of Linux, or if a setting requests it.

Only the bytes of data files are moved here. Files are created, synced, committed and deleted as on Linux.
"""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import aiofiles

from snapshot.io.storage import Buffer, map_exceptions, to_the_end
from snapshot.io.url import URL
from snapshot.storages.file.files import LocalFileWriter, expect_token, open_regular

if TYPE_CHECKING:
    from aiofiles.threadpool.binary import AsyncFileIO

JOINED = 64 << 10
"""Maximum bytes of short buffers that one call moves, through a copy: each call takes a trip to a thread."""


def _groups(buffers: Iterable[Buffer]) -> Iterator[list[memoryview]]:
    """Group buffers that follow each other and have few bytes together."""
    group: list[memoryview] = []
    total = 0
    for buffer in buffers:
        view = memoryview(buffer).cast("B")
        if group and total + view.nbytes > JOINED:
            yield group
            group, total = [], 0
        group.append(view)
        total += view.nbytes
    if group:
        yield group


async def read_file(url: URL, full: str, offset: int, buffers: Sequence[Buffer], token: str | None) -> int:
    """Fill the buffers from a file; return the number of bytes, which is smaller if the file ends before.

    The file is opened for this call only. So calls may be concurrent, and Windows can replace the file afterwards.
    """
    return await to_the_end(_read(url, full, offset, buffers, token))


async def _read(url: URL, full: str, offset: int, buffers: Sequence[Buffer], token: str | None) -> int:
    def open_expected(name: str, _flags: int) -> int:
        descriptor = open_regular(name)
        if token is not None:
            try:
                expect_token(url, descriptor, token)
            except BaseException:
                os.close(descriptor)
                raise
        return descriptor

    got = 0
    async with aiofiles.open(full, "rb", buffering=0, opener=open_expected) as file:
        await file.seek(offset)
        for group in _groups(buffers):
            whole = group[0] if len(group) == 1 else memoryview(bytearray(sum(map(len, group))))
            filled = await _fill(file, whole)
            got += filled
            if len(group) > 1:
                _spread(whole[:filled], group)
            if filled < len(whole):
                break
    return got


async def _fill(file: AsyncFileIO, view: memoryview) -> int:
    done = 0
    while done < len(view):
        step = await file.readinto(view[done:])
        if not step:
            break
        done += step
    return done


def _spread(data: memoryview, targets: Iterable[memoryview]) -> None:
    for target in targets:
        step = min(len(target), len(data))
        target[:step] = data[:step]
        data = data[step:]


class PortableFileWriter(LocalFileWriter):
    """Writer whose parts take turns, since they share the position of one file."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._turn = asyncio.Lock()
        self._file: AsyncFileIO | None = None

    async def write(self, offset: int, buffers: Sequence[Buffer]) -> None:
        with map_exceptions(self._url):
            async with self._turn:
                await to_the_end(self._write_all(offset, buffers))

    async def _write_all(self, offset: int, buffers: Sequence[Buffer]) -> None:
        total = self._expect_room(offset, buffers)
        if self._file is None:
            self._file = await aiofiles.open(self._descriptor, "r+b", buffering=0, closefd=False)
        await self._file.seek(offset)
        done = 0
        for group in _groups(buffers):
            rest = group[0] if len(group) == 1 else memoryview(b"".join(group))
            while rest:
                step = await self._file.write(rest)
                if not step:
                    raise OSError(errno.EIO, f"write failed: {done} of {total} bytes at offset {offset} were written")
                done += step
                rest = rest[step:]
