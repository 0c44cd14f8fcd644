"""Writer of one file, under its final name, with O_DIRECT if that is faster."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Sequence

from snapshot.errors import StorageError
from snapshot.plugins.file import direct_io
from snapshot.plugins.file.descriptors import buffer_length, transfer_vectored
from snapshot.plugins.file.folders import Folders
from snapshot.storage import URL, Buffer, FileWriter, in_thread, map_exceptions
from snapshot.system_calls import remove_file, sync_file, write_at

MiB = 1 << 20


class LocalFileWriter(FileWriter):
    """Writer of parts at any offset, through an open descriptor."""

    def __init__(
        self, url: URL, full: str, descriptor: int, size: int, folders: Folders, *, around_cache: bool, durable: bool
    ) -> None:
        self._url = url
        self._full = full
        self._descriptor = descriptor
        self._size = size
        self._folders = folders
        self._around_cache = around_cache
        self._durable = durable
        self._closed = False

    async def write(self, offset: int, buffers: Sequence[Buffer]) -> None:
        with map_exceptions(self._url):
            await in_thread(self._write, offset, buffers)

    def _write(self, offset: int, buffers: Sequence[Buffer]) -> None:
        if self._closed:
            raise ValueError("the file is already finished or aborted")
        total = sum(map(buffer_length, buffers))
        if offset < 0 or offset + total > self._size:
            raise StorageError(f"{self._url}: bytes {offset}-{offset + total} do not fit a file of {self._size}")
        whole = total % direct_io.PAGE == 0 or offset + total == self._size
        if self._around_cache and whole and direct_io.write_aligned(self._descriptor, offset, buffers, total):
            return
        if self._around_cache:
            direct_io.stop_direct(self._descriptor)
            self._around_cache = False
        end = transfer_vectored(write_at, self._descriptor, buffers, offset, total)
        if end < offset + total:
            raise OSError(errno.EIO, f"write failed: {end - offset} of {total} bytes at offset {offset} were written")
        if self._durable and total >= MiB:
            direct_io.start_writeback(self._descriptor, offset, end - offset)

    async def finish(self) -> None:
        with map_exceptions(self._url):
            await in_thread(self._finish)

    def _finish(self) -> None:
        os.ftruncate(self._descriptor, self._size)
        if self._durable:
            sync_file(self._descriptor)
        self._close()
        self._folders.mark_finished(self._full)

    async def abort(self) -> None:
        with map_exceptions(self._url):
            await in_thread(self._abort)

    def _abort(self) -> None:
        with contextlib.suppress(OSError):  # the bytes are discarded anyway
            self._close()
        self._folders.mark_removed(self._full)
        with contextlib.suppress(FileNotFoundError):
            remove_file(self._full)
        self._folders.remove_empty({os.path.dirname(self._full)})

    def _close(self) -> None:
        if not self._closed:
            self._closed = True
            os.close(self._descriptor)
