"""The versions in a store: listed, claimed, committed, and deleted when newer ones replace them.

The index of a version is written last and only if it is absent. It is deleted first.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

import msgspec

from snapshot.decoding import decode_json
from snapshot.errors import (
    CommitUnknown,
    CorruptSnapshotError,
    SnapshotError,
    SnapshotExistsError,
    StorageConflictError,
    StorageError,
    StorageNotFoundError,
    UnsupportedFormatError,
)
from snapshot.events import emit, log
from snapshot.formats.hugging_face import INDEX
from snapshot.formats.safetensors import read_header
from snapshot.manifest.document import LONGEST_HEADER
from snapshot.publish.version import (
    CLAIM,
    LAST,
    LONGEST_INDEX,
    OWN_FILE,
    SINGLE,
    WEIGHTS,
    Details,
    Index,
    decode_index,
    version_name,
    version_of,
)
from snapshot.save.cleanup import DAY
from snapshot.storage import ABSENT, ANYTHING, Expect, Storage
from snapshot.tensors.digest import digest_range

LONGEST_CHAIN = 10_000
"""The maximum number of deltas that a reader follows."""


class Claim(msgspec.Struct):
    """The content of the file that reserves a number."""

    publisher: str
    attempt: str


class VersionStore:
    """The versions at a URL."""

    def __init__(self, storage: Storage, known: dict[int, int | None] | None = None) -> None:
        """`known`: the base of each version that is known to be committed. It is kept up to date."""
        self.storage = storage
        self._known = {} if known is None else known

    async def numbers(self) -> list[int]:
        """Return the numbers of all versions, committed or not, ascending."""
        try:
            names = await self.storage.list(recursive=False)
        except StorageNotFoundError:
            return []
        return sorted(found for each in names if each.endswith("/") and (found := version_of(each)) is not None)

    async def read(self, version: int) -> Index:
        """Return the index of a version. Raise `StorageNotFoundError` if the version is not committed.

        Another publisher's complete version with a single file needs none.
        """
        try:
            return await self.read_index(version)
        except StorageNotFoundError:
            path = f"{version_name(version)}/{SINGLE}"
            found = await self.storage.stat(path)
            entries, _ = await read_header(self.storage, path, found.size, LONGEST_HEADER)
            mark = f"{found.size} {found.mtime} {sorted(entries)}".encode(errors="replace")
            return Index(version, None, dict.fromkeys(entries, SINGLE), Details(), digest_range(mark), {})

    async def read_index(self, version: int) -> Index:
        """Return the index of a version from its file."""
        path = f"{version_name(version)}/{INDEX}"
        data = await self.storage.get(path, limit=LONGEST_INDEX)
        return decode_index(data, version, self.storage.url.join(path))

    async def chain(self, newest: Index, is_here: Callable[[int, str], bool]) -> list[Index]:
        """Return the versions that lead to `newest`, in order, each the base of the next.

        The first one is complete, or its base is already here. `is_here` is called with a number, and with the digest
        that the index of that version must have. The digest is empty if it is unknown.
        """
        links = [newest]
        while (base := links[-1].base) is not None and not is_here(base, links[-1].details.base):
            if len(links) > LONGEST_CHAIN:
                raise CorruptSnapshotError(
                    f"{self.storage.url}: more than {LONGEST_CHAIN} deltas without a full version"
                )
            found = await self.read(base)
            expected = links[-1].details.base
            if expected and expected != found.digest:
                raise CorruptSnapshotError(
                    f"{self.storage.url.join(version_name(base))}: is not the base of version {links[-1].version}: "
                    f"the digest of its index must be {expected}, got {found.digest}"
                )
            links.append(found)
        return links[::-1]

    # Publishing

    async def claim(self, publisher: str, attempt: str) -> int:
        """Reserve the next number, and return it."""
        numbers = await self.numbers()
        number = numbers[-1] + 1 if numbers else 1
        data = msgspec.json.encode(Claim(publisher, attempt))
        condition: Expect = ABSENT if self.storage.capabilities.conditional_put else ANYTHING
        while number <= LAST:
            path = f"{version_name(number)}/{CLAIM}"
            try:
                await self.storage.put(path, data, expect=condition)
            except StorageConflictError:
                number += 1
                continue
            if not await self._exists(f"{version_name(number)}/{INDEX}"):
                return number
            await self.storage.delete([path])  # another publisher committed it after the list
            number += 1
        raise SnapshotError(f"{self.storage.url}: has no free version number below {LAST}")

    async def commit(self, version: int, data: bytes, base: int | None) -> None:
        """Store an index, if the number is still free and claimed."""
        folder = version_name(version)
        condition: Expect = ABSENT if self.storage.capabilities.conditional_put else ANYTHING
        try:
            await self.storage.settle()
            await self.storage.commit(f"{folder}/{CLAIM}", f"{folder}/{INDEX}", data, expect=condition)
        except StorageConflictError as error:
            raise SnapshotExistsError(
                f"{self.storage.url.join(folder)}: another publisher has published this version; publish again"
            ) from error
        except StorageError as error:
            if error.uncertain:
                raise CommitUnknown(
                    f"{self.storage.url.join(folder)}: unknown whether it is published: {error}"
                ) from error
            raise
        self._known[version] = base

    async def delete_attempt(self, version: int, files: Iterable[str], *, claim: bool) -> None:
        """Delete the files of an attempt that failed: the claim first."""
        folder = version_name(version)
        try:
            if claim:
                await self.storage.delete([f"{folder}/{CLAIM}"])
            await self.storage.delete([f"{folder}/{name}" for name in files])
        except StorageError as error:
            log.warning("%s: cannot delete the files of a failed publish: %s", self.storage.url.join(folder), error)

    # Retention

    async def retire(self, keep_full: int, publisher: str) -> None:
        """Delete versions that newer full versions replace, and the leftovers of publishers that were killed."""
        if not (self.storage.capabilities.list and self.storage.capabilities.delete):
            return
        try:
            numbers = await self.numbers()
            for number in numbers:
                if number not in self._known:
                    await self._learn(number)
            for number in self._known.keys() - set(numbers):
                del self._known[number]
            gone = find_retired(self._known, keep_full)
            for number in gone:
                await self._delete(number)
                del self._known[number]
            newest = max(self._known, default=0)
            for number in numbers:
                if (
                    number not in self._known
                    and number not in gone
                    and await self._is_leftover(number, newest, publisher)
                ):
                    await self._delete(number)
                    gone.append(number)
            if gone:
                emit("pruned", "publish", str(self.storage.url), versions=gone)
        except SnapshotError as error:  # the version is published: old ones only cost space
            log.warning("%s: cannot delete old versions: %s", self.storage.url, error)

    async def _learn(self, number: int) -> None:
        try:
            self._known[number] = (await self.read_index(number)).base
        except StorageNotFoundError:
            return
        except (CorruptSnapshotError, UnsupportedFormatError):  # it is left alone
            return

    async def _is_leftover(self, number: int, newest: int, publisher: str) -> bool:
        """Return True if a folder without an index belongs to a publisher of this library that has failed."""
        folder = version_name(number)
        names = await self.storage.list(f"{folder}/")
        try:
            data = await self.storage.get(f"{folder}/{CLAIM}", limit=10_000)
            claim: Claim = decode_json(data, Claim, CLAIM)
            if claim.publisher == publisher and number < newest:
                return True
        except (StorageNotFoundError, CorruptSnapshotError):
            weights = [name.rpartition("/")[2] for name in names if name.endswith(WEIGHTS)]
            if not weights or not all(OWN_FILE.fullmatch(name) for name in weights):
                return False
        oldest = time.time() - DAY
        for name in names:
            if (await self.storage.stat(name)).mtime > oldest:
                return False
        return not await self._exists(f"{folder}/{INDEX}")

    async def _delete(self, number: int) -> None:
        folder = version_name(number)
        await self.storage.delete([f"{folder}/{CLAIM}"])
        await self.storage.delete([f"{folder}/{INDEX}"])
        await self.storage.delete(await self.storage.list(f"{folder}/"))

    async def _exists(self, path: str) -> bool:
        try:
            await self.storage.stat(path)
        except StorageNotFoundError:
            return False
        return True


def find_retired(bases: dict[int, int | None], keep_full: int) -> list[int]:
    """Return the versions that may be deleted, oldest first.

    The newest `keep_full` full versions are kept, with all later versions, and all bases of kept ones.

    >>> find_retired({1: None, 2: 1, 3: None, 4: 3, 5: None}, keep_full=2)
    [1, 2]
    """
    full = sorted((number for number, base in bases.items() if base is None), reverse=True)
    if len(full) <= keep_full:
        return []
    kept = {number for number in bases if number >= full[keep_full - 1]}
    for number in sorted(kept, reverse=True):
        base = bases[number]
        while base is not None and base not in kept:
            kept.add(base)
            base = bases.get(base)
    return sorted(bases.keys() - kept)
