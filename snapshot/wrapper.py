"""A storage around another one, for storages that change how files are read."""

from __future__ import annotations

from collections.abc import Sequence

from snapshot.storage import ABSENT, ANYTHING, URL, Buffer, Expect, FileStat, FileWriter, Storage


class StorageWrapper(Storage):
    """A storage whose calls are those of another one, unless a subclass replaces them."""

    def __init__(self, inner: Storage) -> None:
        self.inner = inner
        self.url, self.options, self.context = inner.url, inner.options, inner.context
        self.limits, self.capabilities, self.host = inner.limits, inner.capabilities, inner.host

    async def read_into(self, path: str, offset: int, buffers: Sequence[Buffer], *, token: str | None = None) -> None:
        await self.inner.read_into(path, offset, buffers, token=token)

    async def create(self, path: str, size: int) -> FileWriter:
        return await self.inner.create(path, size)

    async def put(self, path: str, data: bytes, *, expect: Expect = ANYTHING) -> str:
        return await self.inner.put(path, data, expect=expect)

    async def get(self, path: str, *, limit: int | None = None) -> bytes:
        return await self.inner.get(path, limit=limit)

    async def stat(self, path: str) -> FileStat:
        return await self.inner.stat(path)

    async def list(self, prefix: str = "", *, recursive: bool = True) -> list[str]:
        return await self.inner.list(prefix, recursive=recursive)

    async def delete(self, paths: Sequence[str]) -> None:
        await self.inner.delete(paths)

    async def commit(self, claim: str, path: str, data: bytes, *, expect: Expect = ABSENT) -> str:
        return await self.inner.commit(claim, path, data, expect=expect)

    async def settle(self) -> None:
        await self.inner.settle()

    async def drop_caches(self, paths: Sequence[str]) -> None:
        await self.inner.drop_caches(paths)

    def share_reads(self) -> None:
        self.inner.share_reads()

    def switch_source(self, path: str) -> bool:
        return self.inner.switch_source(path)

    async def share(self, source: URL, path: str, *, token: str | None = None) -> None:
        await self.inner.share(source, path, token=token)

    async def rename(self, source: str, path: str) -> None:
        await self.inner.rename(source, path)

    async def sweep(self, prefix: str, older_than: float) -> Sequence[str]:
        return await self.inner.sweep(prefix, older_than)

    async def close(self) -> None:
        await self.inner.close()
