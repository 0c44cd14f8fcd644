"""Atomic publication of exported files: data files are renamed into place, and the index is written last.

Several ranks share the data files. The leader checks the destination, renames all files, and writes the index. From its
decision to do so, no rank deletes files: the leader may continue after a pause.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

import msgspec

from snapshot.distributed.exchange import LEADER, Exchange
from snapshot.errors import (
    CommitUnknown,
    RankError,
    SnapshotError,
    SnapshotExistsError,
    StorageError,
    StorageNotFoundError,
)
from snapshot.events import log
from snapshot.io.aio import gather_limited, shielded
from snapshot.io.loop import in_own_thread, run
from snapshot.io.storage import Storage, exists
from snapshot.plan.layout import FilePlan
from snapshot.save.commit import commit_together, expect_written, raise_fault_of_another_rank, while_all_go_on
from snapshot.save.transaction import DAY
from snapshot.save.writer import Writer
from snapshot.text import counted
from snapshot.transform.call import AT_ONCE, digest_plan, expect_equal_plans, share_whole

ASIDE = ".convert-"
"""The name prefix of unfinished files, on storages that can rename."""


class _Begun(msgspec.Struct, array_like=True):
    """The leader's view of the destination, before anything is written."""

    identity: str
    standing: dict[str, str]
    """Existing files that are replaced, with their tokens."""


class _Published:
    """The published checkpoint, for ranks that lose the leader meanwhile."""

    def __init__(self, storage: Storage, sizes: Mapping[str, int | None], standing: Mapping[str, str]) -> None:
        self._storage = storage
        self._sizes = sizes
        self._standing = standing

    async def is_committed(self) -> bool:
        """Return True if all files of the checkpoint, its index included, are new."""

        async def is_new(name: str) -> bool:
            found, expected = await self._storage.stat(name), self._sizes[name]
            return found.token != self._standing.get(name) and expected in (found.size, None)

        try:
            return all(await gather_limited(self._sizes, is_new, AT_ONCE))
        except SnapshotError:
            return False

    async def revoke(self) -> bool:
        """Return False: the leader may be renaming files."""
        return False


class StagedFiles:
    """The files of one conversion. Each rank writes a share of them."""

    def __init__(
        self,
        storage: Storage,
        files: Sequence[tuple[str, int]],
        markers: Sequence[str],
        others: Sequence[str],
        more: str,
        *,
        exchange: Exchange,
        contents: str = "",
    ) -> None:
        """`files`: names and sizes. `more`: a pattern for further files that a replaced checkpoint may have.

        `contents`: a digest of what the files will contain, which must be equal on all ranks.
        """
        self._storage = storage
        self._more = re.compile(more)
        self.names = [name for name, _ in files]
        self._sizes = [size for _, size in files]
        self._markers = markers
        self._others = others
        self._exchange = exchange
        self._contents = contents
        self._standing: dict[str, str] = {}
        self._identity = ""
        self._shares = share_whole(exchange, range(len(files)), self._sizes)

    @property
    def share(self) -> list[int]:
        """Numbers of the files that this rank writes."""
        return self._shares[self._exchange.rank]

    async def begin(self, *, overwrite: bool) -> None:
        """Agree on the files. Raise if a checkpoint exists that must not be replaced, or would hide the new one."""

        def lead(plans: list[str]) -> _Begun:
            expect_equal_plans(plans)
            run(self._expect(overwrite=overwrite))
            idle = self._exchange.world - len(self.names)
            if idle > 0:
                what = counted(len(self.names), "file"), counted(idle, "rank has", "ranks have")
                text = "%s: has %s, and a file is written by one rank, so %s nothing to write"
                log.warning(text, self._storage.url, *what)
            return _Begun(secrets.token_hex(6), self._standing)

        if self._exchange.alone:
            await self._expect(overwrite=overwrite)
            self._identity = secrets.token_hex(6)
        else:
            mine = digest_plan([*self.names, *self._sizes, self._contents])
            begun: _Begun = await in_own_thread(self._exchange.agree, mine, lead, str, _Begun)
            self._identity, self._standing = begun.identity, begun.standing

    async def _expect(self, *, overwrite: bool) -> None:
        for name in self._others:
            if await exists(self._storage, name):
                raise SnapshotExistsError(
                    f"{self._storage.url.join(name)}: belongs to a checkpoint of another format, which would be read "
                    "instead; convert to another folder"
                )
        await gather_limited(dict.fromkeys((*self.names, *self._markers)), self._look, AT_ONCE)
        if self._standing and not overwrite:
            first = next(name for name in (*self.names, *self._markers) if name in self._standing)
            raise SnapshotExistsError(f"{self._storage.url.join(first)}: exists already").with_cure(
                "convert to another path, or pass overwrite=True"
            )

    async def _look(self, name: str) -> None:
        with suppress(StorageNotFoundError):
            self._standing[name] = (await self._storage.stat(name)).token

    async def write(
        self,
        writer: Writer,
        files: Sequence[FilePlan],
        last: Callable[[], list[tuple[str, bytes]]],
    ) -> None:
        """Write this rank's files, and publish all files when every rank has written its own.

        If the storage can rename, the old checkpoint stays whole until all new files are. Otherwise its index is
        deleted before its first file is replaced. So a mixture of both never exists.
        """
        storage, renames, exchange = self._storage, self._storage.capabilities.renames, self._exchange
        aside = [f"{ASIDE}{self._identity}-{number}" if renames else name for number, name in enumerate(self.names)]
        own = [aside[number] for number in self.share]
        try:
            if not renames:
                await self._delete_markers_first()
            await while_all_go_on(exchange, writer.write(files, own))
            await storage.settle()
            await self._publish_together(aside, last)
        except CommitUnknown:  # the leader may still publish the files
            raise
        except BaseException as error:
            ruled_out = await shielded(in_own_thread(exchange.fail, error))
            if renames and (ruled_out or exchange.rank == LEADER):
                lost = exchange.rank == LEADER and (isinstance(error, RankError) or not ruled_out)
                await shielded(self._gone(aside if lost else own))  # the leader deletes those of a lost rank, too
            await raise_fault_of_another_rank(exchange, error)
            raise

    async def _delete_markers_first(self) -> None:
        """Let the leader delete the index of the old checkpoint when all ranks are ready, and wait for it."""
        if self._exchange.alone:
            await self._delete_markers()
            return

        def lead(_: list[bool]) -> bool:
            run(self._delete_markers())
            return True

        await in_own_thread(self._exchange.agree, True, lead, bool, bool)

    async def _publish_together(self, aside: Sequence[str], last: Callable[[], list[tuple[str, bytes]]]) -> None:
        """Publish the files when all ranks have written their share. The leader's decision to do so is final."""
        if self._exchange.alone:
            await shielded(self._publish(aside, last))
            return

        async def publish(_: list[bool]) -> bool:
            await self._publish(aside, last)
            return True

        sizes = {**dict(zip(self.names, self._sizes, strict=True)), **dict.fromkeys(name for name, _ in last())}
        published = _Published(self._storage, sizes, self._standing)

        await commit_together(self._storage.url, self._exchange, published, done=True, commit=publish, answer=bool)

    async def _delete_markers(self) -> None:
        markers = [name for name in self._markers if name in self._standing]
        if markers:
            await self._storage.delete(markers)

    async def _publish(self, aside: Sequence[str], last: Callable[[], list[tuple[str, bytes]]]) -> None:
        """Rename the files into place, and write the index."""
        storage = self._storage
        written = [[(aside[number], self._sizes[number]) for number in share] for share in self._shares]
        await expect_written(storage, written)
        await in_own_thread(self._exchange.commit)
        if storage.capabilities.renames:
            await self._delete_markers()
            for made, name in zip(aside, self.names, strict=True):
                await storage.rename(made, name)
            await storage.settle()
        small = last()
        kept = {*self.names, *(name for name, _ in small)}
        in_folders = any("/" in name for name in self.names)
        if in_folders:  # DeepSpeed reads all files in them, so none of the old checkpoint may be left
            await self._clean(kept)
        for name, data in small:
            await storage.put(name, data)
        if small:
            await storage.settle()
        if not in_folders:
            await self._clean(kept)

    async def _clean(self, kept: set[str]) -> None:
        """Delete further files of the replaced checkpoint, and day-old files of killed conversions."""
        storage = self._storage
        if not (storage.capabilities.list and storage.capabilities.delete):
            return
        try:
            found = await storage.list("" if self._markers else ASIDE, recursive=False)
            for folder in {f"{name.partition('/')[0]}/" for name in self.names if "/" in name}:
                found = [*found, *await storage.list(folder)]
            replaced = not set(self._markers).isdisjoint(self._standing)
            gone = [name for name in found if replaced and self._more.fullmatch(name) and name not in kept]
            for name in found:
                if name.startswith(ASIDE) and (await storage.stat(name)).age > DAY:
                    gone.append(name)
            if gone:
                await storage.delete(gone)
        except SnapshotError as error:  # all files are complete: leftovers only cost space
            log.warning("%s: cannot delete leftover files: %s", storage.url, error)

    async def _gone(self, names: Sequence[str]) -> None:
        with suppress(StorageError):
            await self._storage.delete(names)
