"""Files that are read in another form than the stored one: their bytes are computed from stored ones, range by range.

Everything above a storage counts the bytes of such a file as it is read. So readers, comparisons and boxes know nothing
of compression, of archives and of quantised weights.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Hashable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from snapshot.errors import CorruptSnapshotError
from snapshot.io.budget import MemoryBudget
from snapshot.io.storage import Buffer, FileStat, Storage, StorageWrapper
from snapshot.manifest.document import FileEntry
from snapshot.manifest.entries import TensorEntry


class Derivation(Protocol):
    """The way from a stored file to the bytes of a derived one."""

    @property
    def sources(self) -> Collection[str]:
        """The stored files, which may include one of the same name."""
        ...

    async def read(
        self, storage: Storage, offset: int, views: Sequence[memoryview], memory: MemoryBudget, token: str | None
    ) -> None:
        """Fill the views with the derived bytes from `offset` on. Stored bytes take memory from the budget.

        There is at least one view, and none is empty.
        """
        ...


class DerivedStorage(StorageWrapper):
    """Another storage, of which some files are derived. All calls but reads and `stat` see the stored files."""

    def __init__(
        self,
        inner: Storage,
        derivations: Mapping[str, Derivation],
        files: Mapping[str, FileEntry],
        memory: MemoryBudget,
    ) -> None:
        super().__init__(inner)
        self._derivations = derivations
        self._files = files
        self._memory = memory

    async def read_into(self, path: str, offset: int, buffers: Sequence[Buffer], *, token: str | None = None) -> None:
        found = self._derivations.get(path)
        if found is None:
            await self.inner.read_into(path, offset, buffers, token=token)
            return
        views = [view for view in (memoryview(each).cast("B") for each in buffers) if len(view)]
        if not views:
            return
        end, file = offset + sum(map(len, views)), self._files.get(path)
        if file is not None and end > file.size:
            raise CorruptSnapshotError(f"{self.url.join(path)}: ends before {end:,}")
        await found.read(self.inner, offset, views, self._memory, token)

    async def stat(self, path: str) -> FileStat:
        """Return size, time and token of the stored file, if there is one of that name.

        Otherwise, time and tokens are those of the sources. Nothing of the file is stored, so its size is 0.
        """
        found = self._derivations.get(path)
        if found is None or path in found.sources:
            return await self.inner.stat(path)
        sources = {name: await self.inner.stat(name) for name in sorted(found.sources)}
        for name, source in sources.items():
            expected, exact = self._files[name].size, getattr(self._files[name], "exact", True)
            if source.size < expected or (exact and source.size != expected):
                raise CorruptSnapshotError(f"{name} must have {expected:,} bytes, got {source.size:,}")
        tokens = [source.token for source in sources.values()]
        return FileStat(0, max(source.mtime for source in sources.values()), " ".join(tokens))


class InOrder(Derivation, Protocol):
    """A derivation that is quick only if its file is read in order, from the first byte on."""

    def forget(self) -> None:
        """Release what a read in order needs to continue."""
        ...


class Located(NamedTuple):
    """Where the elements of a packed tensor are."""

    entry: TensorEntry
    """A tensor whose range has only its elements; its serializer is `array` if they are strided."""
    derivation: InOrder | None
    """The derivation of its file; None if that is the stored one."""


Places = dict[Hashable, Any]
"""What a reader of packed tensors has found out about those that it located."""


ReadPlaces = Callable[[Sequence[tuple[str, int, int]]], Awaitable[Sequence[bytearray]]]
"""A function that reads short ranges, merging nearby ones into one request."""


def place_bytes(view: memoryview, at: int, data: memoryview) -> None:
    """Copy those bytes that are in a view. The first one is `at` bytes after its begin, or before it."""
    low, high = max(0, at), min(len(view), at + len(data))
    if low < high:
        view[low:high] = data[low - at : high - at]
