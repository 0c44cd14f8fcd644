"""The versions in a store: their index files; listed, claimed, committed, and deleted."""

from __future__ import annotations

import json
import re
import time
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any, NamedTuple

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
from snapshot.formats.hugging_face import INDEX, WEIGHTS, check_file_name, read_header
from snapshot.io.loop import in_own_thread
from snapshot.io.storage import ABSENT, ANYTHING, Storage, exists
from snapshot.manager.policies import Policy, Taken, choose_kept, plan_retention
from snapshot.manifest.document import LONGEST_HEADER
from snapshot.save.transaction import DAY, commit_condition
from snapshot.tensors.digest import digest_range

# The index of a published version: which tensors it has, in which files, and which version it is a delta of.
#
# An index comes from a store, so everything in it is checked before it is used.

LONGEST_INDEX = 256 << 20
LAST = 10**12 - 1
"""The highest number of a version."""
CLAIM = ".publishing"
"""Name of the file that reserves a version's number while the version is written."""
CONTRACT = {"delta_encoding": "xor", "compression_format": "zstd", "checksum_format": "adler32"}
"""The encoding of deltas that engines agree on, as an index states it."""
SINGLE = "model.safetensors"
"""The only file with weights of a complete version of another publisher that has no index."""
OWN = "snapshot"
"""The key of this library's details in an index: a text, so that other readers see texts only."""
OWN_FILE = re.compile(r"model-[0-9a-f]{12}-[0-9]{5,}-[0-9]{5,}\.safetensors")
"""Names of the files with weights that this library writes."""
_FOLDER = re.compile(r"weight_v([0-9]{6,12})/?")


class IndexDetails(msgspec.Struct):
    """The details that this library adds to an index."""

    publisher: str = ""
    """Id of the publisher object."""
    step: int | None = None
    time: float = 0.0
    """Seconds since the epoch."""
    base: str = ""
    """Digest of the base's index. Another version with the base's number does not match it."""
    digests: dict[str, str] = {}
    """Digest of each tensor: of all tensors of a full version, of the changed ones of a delta."""
    files: dict[str, tuple[int, str]] = {}
    """Further files of a full version, such as `config.json`: their sizes and digests."""


class VersionIndex(NamedTuple):
    """A committed version."""

    version: int
    base: int | None
    """The version that it is a delta of; None for a full version."""
    files: dict[str, str]
    """The file of each tensor."""
    details: IndexDetails
    digest: str
    """Digest of the index itself."""
    metadata: dict[str, Any]

    def by_file(self) -> dict[str, list[str]]:
        """Return the tensors of each file."""
        found: dict[str, list[str]] = {}
        for name, file in self.files.items():
            found.setdefault(file, []).append(name)
        return found


class _Document(msgspec.Struct):
    weight_map: dict[str, str]
    metadata: dict[str, Any] = {}


def version_name(version: int) -> str:
    """Return the name of a version's folder.

    >>> version_name(12)
    'weight_v000012'
    """
    return f"weight_v{version:06d}"


def version_of(folder: str) -> int | None:
    """Return the number of a version's folder, or None for another name.

    >>> version_of("weight_v000012/"), version_of("weight_v12"), version_of("other")
    (12, None, None)
    """
    found = _FOLDER.fullmatch(folder)
    return None if found is None or version_name(int(found[1])) != folder.rstrip("/") else int(found[1])


def encode_index(
    version: int, base: int | None, files: Mapping[str, str], details: IndexDetails, *, total_size: int = 0
) -> bytes:
    """Return the text of an index."""
    metadata: dict[str, Any] = {"total_size": total_size}
    if base is not None:
        metadata = {"version": f"{version:06d}", "base_version": f"{base:06d}", **CONTRACT}
    metadata[OWN] = msgspec.json.encode(details).decode()
    return json.dumps({"metadata": metadata, "weight_map": dict(sorted(files.items()))}, indent=1).encode()


def decode_index(data: bytes, version: int, where: object) -> VersionIndex:
    """Check and return an index. Raise `CorruptSnapshotError` if it is damaged or hostile."""
    found: _Document = decode_json(data, _Document, f"{where}: not an index of safetensors files")
    for name in {*found.weight_map.values()}:
        check_file_name(name, where)
    if "__metadata__" in found.weight_map:
        raise CorruptSnapshotError(f"{where}: a tensor must not be named '__metadata__'")
    base = None
    if "base_version" in found.metadata:
        base = _decode_base(found.metadata, version, where)
    text = found.metadata.get(OWN, "{}")
    details: IndexDetails = decode_json(text if isinstance(text, str) else "", IndexDetails, f"{where}: invalid {OWN}")
    for name in details.files:
        if check_file_name(name, where) == INDEX or name in found.weight_map.values():
            raise CorruptSnapshotError(f"{where}: names the file {name!r} twice")
    return VersionIndex(version, base, found.weight_map, details, digest_range(data), found.metadata)


def _decode_base(metadata: Mapping[str, Any], version: int, where: object) -> int:
    for key, value in CONTRACT.items():
        if metadata.get(key) != value:
            raise UnsupportedFormatError(f"{where}: {key} must be {value!r}, got {str(metadata.get(key))[:100]!r}")
    numbers = []
    for key in ("version", "base_version"):
        text = str(metadata.get(key))
        if not re.fullmatch("[0-9]{1,12}", text, re.ASCII):
            raise CorruptSnapshotError(f"{where}: {key} must be a number, got {text[:100]!r}")
        numbers.append(int(text))
    if numbers[0] != version:
        raise CorruptSnapshotError(f"{where}: version must be {version}, got {numbers[0]}")
    if numbers[1] >= version:
        raise CorruptSnapshotError(f"{where}: base_version must be below {version}, got {numbers[1]}")
    return numbers[1]


# The versions in a store: listed, claimed, committed, and deleted when newer ones replace them.
#
# The index of a version is written last and only if it is absent. It is deleted first.

LONGEST_CHAIN = 10_000
"""The maximum number of deltas that a reader follows, and a publisher writes after a full version."""


class ClaimFile(msgspec.Struct):
    """The content of the file that reserves a number."""

    publisher: str
    attempt: str


class KnownVersion(NamedTuple):
    """A version that is committed, as retention sees it."""

    base: int | None
    """The version that it is a delta of; None for a complete one."""
    created: float
    """Seconds since the epoch."""


class VersionStore:
    """The versions at a URL."""

    def __init__(self, storage: Storage, known: dict[int, KnownVersion] | None = None) -> None:
        """`known`: the versions that are known to be committed. It is kept up to date."""
        self.storage = storage
        self._known = {} if known is None else known
        self._claims: dict[int, bytes] = {}
        """The contents of the claims of this publisher, by version."""

    async def numbers(self) -> list[int]:
        """Return the numbers of all versions, committed or not, ascending."""
        try:
            names = await self.storage.list(recursive=False)
        except StorageNotFoundError:
            return []
        return sorted(found for each in names if each.endswith("/") and (found := version_of(each)) is not None)

    async def read(self, version: int) -> VersionIndex:
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
            return VersionIndex(version, None, dict.fromkeys(entries, SINGLE), IndexDetails(), digest_range(mark), {})

    async def read_index(self, version: int) -> VersionIndex:
        """Return the index of a version from its file."""
        path = f"{version_name(version)}/{INDEX}"
        data = await self.storage.get(path, limit=LONGEST_INDEX)
        return decode_index(data, version, self.storage.url.join(path))

    async def chain(self, newest: VersionIndex, is_here: Callable[[int, str], bool]) -> list[VersionIndex]:
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
        data = msgspec.json.encode(ClaimFile(publisher, attempt))
        condition = ABSENT if self.storage.capabilities.conditional_put else ANYTHING
        while number <= LAST:
            path = f"{version_name(number)}/{CLAIM}"
            try:
                await self.storage.put(path, data, expect=condition)
            except StorageConflictError:
                number += 1
                continue
            if not await exists(self.storage, f"{version_name(number)}/{INDEX}"):
                self._claims[number] = data
                return number
            await self.storage.delete([path])  # another publisher committed it after the list
            number += 1
        raise SnapshotError(f"{self.storage.url}: has no free version number below {LAST}")

    async def commit(self, version: int, data: bytes, base: int | None) -> None:
        """Store an index, if the number is still free and claimed."""
        folder = version_name(version)
        index = f"{folder}/{INDEX}"
        try:
            await self.storage.settle()
            await self._expect_claim(version)
            condition = await commit_condition(self.storage, index, ABSENT)
            await self.storage.commit(f"{folder}/{CLAIM}", index, data, expect=condition)
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
        self._known[version] = KnownVersion(base, time.time())

    async def _expect_claim(self, version: int) -> None:
        """Raise if another publisher has deleted the claim, and the files as leftovers, since they were too old."""
        if self.storage.capabilities.guarded_commit or version not in self._claims:
            return
        path = f"{version_name(version)}/{CLAIM}"
        try:
            found = await self.storage.get(path, limit=10_000)
        except StorageNotFoundError:
            found = b""
        if found != self._claims[version]:  # another publisher may have the number now
            raise SnapshotExistsError(f"{self.storage.url.join(path)}: was removed by another publisher; publish again")

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

    async def retire(self, keep: Policy | None, publisher: str) -> None:
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
            gone = await in_own_thread(find_retired, self._known, keep, time.time())  # the policy may read
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
        with suppress(StorageNotFoundError, CorruptSnapshotError, UnsupportedFormatError):  # it is left alone
            index = await self.read_index(number)
            created = index.details.time or (await self.storage.stat(f"{version_name(number)}/{INDEX}")).mtime
            self._known[number] = KnownVersion(index.base, created)

    async def _is_leftover(self, number: int, newest: int, publisher: str) -> bool:
        """Return True if a folder without an index belongs to a publisher of this library that has failed."""
        folder = version_name(number)
        names = await self.storage.list(f"{folder}/")
        try:
            data = await self.storage.get(f"{folder}/{CLAIM}", limit=10_000)
            claim: ClaimFile = decode_json(data, ClaimFile, CLAIM)
            if claim.publisher == publisher and number < newest:
                return True
        except (StorageNotFoundError, CorruptSnapshotError):
            weights = [name.rpartition("/")[2] for name in names if name.endswith(WEIGHTS)]
            if not weights or not all(OWN_FILE.fullmatch(name) for name in weights):
                return False
        for name in names:
            if (await self.storage.stat(name)).age < DAY:
                return False
        return not await exists(self.storage, f"{folder}/{INDEX}")

    async def _delete(self, number: int) -> None:
        folder = version_name(number)
        await self.storage.delete([f"{folder}/{CLAIM}"])
        await self.storage.delete([f"{folder}/{INDEX}"])
        await self.storage.delete(await self.storage.list(f"{folder}/"))


def find_retired(versions: Mapping[int, KnownVersion], keep: Policy | None, now: float) -> list[int]:
    """Return the versions that may be deleted, oldest first.

    The policy decides about the complete versions, by their numbers and times. A delta is kept with the complete
    version before it, and all bases of kept versions are kept.

    >>> from snapshot import KeepLatest
    >>> bases = {1: None, 2: 1, 3: None, 4: 3, 5: None}
    >>> find_retired({number: KnownVersion(base, 0) for number, base in bases.items()}, KeepLatest(2), now=0)
    [1, 2]
    """
    full = sorted(number for number, each in versions.items() if each.base is None)
    taken = [Taken(number, versions[number].created) for number in full]
    kept = choose_kept(keep, taken, now)
    held = {
        number: "follows a kept version"
        for number in versions
        if not full or full[max(0, bisect_right(full, number) - 1)] in kept
    }

    def find_bases(removed: list[int]) -> dict[int, str]:
        found: dict[int, str] = {}
        for number in sorted(versions.keys() - set(removed)):
            base = versions[number].base
            while base is not None and base in removed and base not in found:
                found[base] = f"the base of {version_name(number)}"
                base = versions[base].base
        return found

    return plan_retention(kept, versions, held=held, find_needed=find_bases).removed
