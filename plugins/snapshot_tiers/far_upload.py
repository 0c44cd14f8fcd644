"""The upload of near steps to the far root: one step, its packed files, and all that are open."""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import msgspec

from snapshot.decoding import decode_json
from snapshot.errors import (
    CorruptSnapshotError,
    RunDeletedError,
    RunForkedError,
    SnapshotError,
    StorageConflictError,
    StorageError,
    StorageNotFoundError,
)
from snapshot.events import emit, log
from snapshot.formats.derived import DerivedStorage
from snapshot.io.aio import gather_limited, in_thread
from snapshot.io.arena import arena_bytes
from snapshot.io.budget import MemoryBudget
from snapshot.io.loop import run
from snapshot.io.session import Session
from snapshot.io.storage import ABSENT, ANYTHING, Buffer, Expect, FileStat, ReadOnlyStorage, Storage, exists
from snapshot.io.url import URL
from snapshot.loading.decompression import unpacking
from snapshot.manifest.document import (
    METADATA,
    NEWEST_FORMAT,
    Document,
    FileEntry,
    ManifestHead,
    PackedFile,
    decode_document,
    decode_head,
    encode,
    format_of,
)
from snapshot.runs.facts import PINNED, is_buried
from snapshot.runs.timeline import Facts, RunLine, Standing, origin_of
from snapshot.save import transaction
from snapshot.save.compression import Packing
from snapshot.save.transaction import claim_path
from snapshot.tensors.digest import digest_range
from snapshot.tensors.packed_files import CODEC, PAGE, PackedResult
from snapshot.tensors.split_zstd import kind_of
from snapshot.text import size_text
from snapshot.transform.sources import CopiedFile
from snapshot_tiers.control import Registration, StepStatus
from snapshot_tiers.facts import sync_facts
from snapshot_tiers.near_steps import NearFolder, NearStep, copy_verified, describe_files, remove_asides


class Throttled(ReadOnlyStorage):
    """Another storage, for reading only, at no more than `rate` bytes per second."""

    def __init__(self, inner: Storage, rate: float) -> None:
        super().__init__(inner)
        self._rate = rate
        self._lock = threading.Lock()
        self._free = time.monotonic()

    async def read_into(self, path: str, offset: int, buffers: Sequence[Buffer], *, token: str | None = None) -> None:
        """Read when the bytes before and these have had their time."""
        nbytes = sum(memoryview(each).nbytes for each in buffers)
        with self._lock:
            self._free = max(self._free, time.monotonic()) + nbytes / self._rate
            pause = self._free - time.monotonic()
        if pause > 0:
            await in_thread(time.sleep, pause)
        await super().read_into(path, offset, buffers, token=token)


SHORTEST = 64 << 10
"""Minimum bytes of a file that is compressed."""
MEMORY = 64 << 20


class Note(msgspec.Struct, forbid_unknown_fields=True):
    """The stored form of a file that a host compressed."""

    size: int
    table: int
    """Bytes of its table."""
    table_digest: str
    digest: str

    @classmethod
    def of(cls, packed: PackedFile) -> Note:
        """Return the note about a file of a far manifest."""
        _, begin, end = packed.index
        return cls(packed.size, end - begin, packed.index_digest, packed.digest)

    def describe(self, location: str) -> PackedFile:
        """Return the description for the far manifest."""
        return PackedFile(CODEC, self.size, (table_of(location), 0, self.table), self.table_digest, self.digest)


def table_of(location: str) -> str:
    """Return the file with the table of a compressed file. No `.bin` file of a take has the number of another file."""
    return location.removesuffix(".safetensors") + ".bin"


def note_of(location: str) -> str:
    """Return the file that tells the committing host about a compressed file."""
    return location.removesuffix(".safetensors") + ".json"


class PackedUploads:
    """Compresses the files of one step on their way to the far root."""

    def __init__(self, near: Session, target: Session) -> None:
        self._near = near
        self._target = target
        self._memory: MemoryBudget | None = None
        self.made: dict[str, Note] = {}
        """The files that were compressed."""

    async def pack(self, file: CopiedFile) -> Packing | None:
        """Return the compression of a file; None for one that is sent as it is."""
        if not file.location.endswith(".safetensors") or file.size < SHORTEST or file.ranges[0].begin != 0:
            return None
        if not file.ranges[0].plain:  # the take compressed it
            return None
        header = file.ranges[0].end
        ranges = await self._ranges(file, header)
        if self._memory is None:
            self._memory = self._target.budget.set_aside(self._target.budget.total // 2)
        publish, folder = partial(self._publish, file.location), self._near.url.location
        if arena_bytes(PAGE + file.size) > self._memory.limit and not await in_thread(_has_room, folder, file.size):
            log.warning(
                "%s: has no room to compress %s (%s), so it is sent as it is",
                folder,
                file.location,
                size_text(file.size),
            )
            await publish(None)
            return None
        return Packing(self._memory, lambda _: (header, ranges), spill=folder, publish=publish)

    async def _publish(self, location: str, packed: PackedResult | None) -> None:
        """Put the table of a compressed file and a note about it. Delete those of a file that is sent as it is."""
        storage, places = self._target.storage, [note_of(location), table_of(location)]
        if packed is None:
            self.made.pop(location, None)
            await storage.delete(places)
            return
        note = Note(packed.size, len(packed.table), digest_range(packed.table), packed.digest)
        self.made[location] = note
        await storage.put(places[1], packed.table)
        await storage.put(places[0], msgspec.json.encode(note))

    async def _ranges(self, file: CopiedFile, header: int) -> Sequence[tuple[int, int]]:
        """Return the length and the kind of each tensor, by the file's header."""
        data = bytearray(header)
        await self._near.storage.read_into(file.location, 0, [data])
        if digest_range(data) != file.ranges[0].digest:
            raise CorruptSnapshotError(f"{file.location}: its header does not match its digest")
        held: dict[str, Any] = decode_json(bytes(data[8:]), dict[str, Any], file.location)
        items = sorted((item["data_offsets"], item["dtype"]) for name, item in held.items() if name != "__metadata__")
        return [(end - begin, kind_of(dtype)) for (begin, end), dtype in items]


def _has_room(folder: str, nbytes: int) -> bool:
    """Return True if a folder has room for a temporary file, and half as much for other files."""
    return shutil.disk_usage(folder).free > nbytes + nbytes // 2


async def read_notes(storage: Storage, save_id: str) -> dict[str, Note]:
    """Return the notes about compressed files of a save, by their files."""
    listed = await _list_notes(storage, save_id)
    found = await gather_limited(listed, lambda name: _read_note(storage, name))
    places = [name.removesuffix(".json") + ".safetensors" for name in listed]
    return {place: note for place, note in zip(places, found, strict=True) if note is not None}


async def _list_notes(storage: Storage, save_id: str) -> list[str]:
    """Return the names of a save's notes. A rank's part of a manifest has one number less."""
    prefix = f"data/{save_id}-"
    listed = [name for name in await storage.list("data/") if name.startswith(prefix)]
    return [name for name in listed if name.endswith(".json") and name.count("-") == 2]


async def _read_note(storage: Storage, name: str) -> Note | None:
    try:
        note: Note = decode_json(await storage.get(name, limit=1 << 16), Note, f"{storage.url.join(name)}: unreadable")
        return note
    except StorageNotFoundError:
        return None
    except CorruptSnapshotError as error:
        log.info("%s", error)
        return None


async def remove_notes(storage: Storage, save_id: str) -> None:
    """Remove the notes of a committed save, if possible: they only cost space."""
    with suppress(SnapshotError):
        await storage.delete(await _list_notes(storage, save_id))


def _is_of_an_uploader(name: str, file: FileEntry) -> bool:
    """Return True for a file that an uploader compressed. Those of a take are compressed in the near folder, too."""
    return file.packed is not None and file.packed.index[0] == table_of(name)


class FarStorage(ReadOnlyStorage):
    """A far step, whose files are seen as those of the near step: without what an uploader compressed."""

    def __init__(self, inner: Storage) -> None:
        super().__init__(inner)
        self._packed: dict[str, FileEntry] | None = None
        self._decompressing: Storage = inner

    async def read_into(self, path: str, offset: int, buffers: Sequence[Buffer], *, token: str | None = None) -> None:
        """Read a range. The far manifest says how the file is stored."""
        await self._open()
        await self._decompressing.read_into(path, offset, buffers, token=token)

    async def stat(self, path: str) -> FileStat:
        """Return the size that a file has decompressed, if it is whole."""
        found, packed = await super().stat(path), await self._open()
        if path in packed and found.size == packed[path].stored_size:
            return replace(found, size=packed[path].size)
        return found

    async def _open(self) -> Mapping[str, FileEntry]:
        """Return the compressed files. A step whose manifest is not there yet has none."""
        if self._packed is None:
            files: dict[str, FileEntry] = {}
            try:
                files = decode_head(await self.inner.get(METADATA), self.url).files
            except StorageNotFoundError:
                return {}
            except StorageError:
                raise
            except SnapshotError as error:
                log.info("%s: %s", self.url, error)
            packed = {name: file for name, file in files.items() if _is_of_an_uploader(name, file)}
            if packed:
                self._decompressing = DerivedStorage(self.inner, unpacking(packed), packed, MemoryBudget(MEMORY))
            self._packed = packed
        return self._packed


RENEWED = 1800.0
"""Seconds after which a claim is renewed."""


class Outdated(SnapshotError):
    """The step must not be uploaded: it was removed or replaced, or is off the line of the run."""


class Undecided(SnapshotError):
    """The step is not uploaded, since the attempt that took it is not published."""


class FarUpload:
    """The upload of one step by one host. `root`: the far root; `target`: the step's folder there."""

    def __init__(
        self,
        root: Storage,
        near: Session,
        target: Session,
        step: NearStep,
        progress: Callable[[int], None],
        *,
        compress: bool = False,
    ) -> None:
        """With `compress`, files are compressed on their way."""
        self._root = root
        self._near = near
        self._target = target
        self._step = step
        self._progress = progress
        self._renewed = 0.0
        self._names: Collection[str] = ()
        self._put = False
        """True if this host may have put the manifest, and has not looked again since."""
        self._document: Document | None = None
        self._replaces: Expect = ABSENT
        self._packed = PackedUploads(near, target) if compress else None
        self._notes: dict[str, Note] = {}
        """The files that are compressed there."""
        self._wrong: set[str] = set()
        """Files that must be sent again."""
        self.facts = Facts()
        """The facts in the far root, when they were last read."""

    async def advance(self, facts: Facts, here: Sequence[str], *, names: Collection[str], commits: bool) -> bool:
        """Send the files that are here and not there. Commit if all are there. Return True if the step is committed.

        Without `commits`, leave the commit to another host, which then checks all files. `names`: the attempts that
        are published, if they are not yet.

        Raises:
            Outdated: The step must not be uploaded.
            RunForkedError: Another attempt was published instead of the step's.
            Undecided: The step's attempt is not published.
            RunDeletedError: The far root does not have the run any more.
        """
        self._names = names
        if not self._renewed:
            await self._expect_wanted(facts)
        if await self._is_committed():
            return await self._check_commit(facts) if self._put else True
        await self._claim()
        missing = await self._unlisted()
        mine = [each for each in here if each in missing]
        if mine:
            files = await describe_files(self._near, self._load(), mine)
            await copy_verified(
                self._near, self._target, files, self._progress, pack=self._packed.pack if self._packed else None
            )
            self._wrong.difference_update(mine)
            if await self._is_committed():
                return await self._describe_sent(mine, facts)
            missing = await self._unlisted()
        if missing or not commits:
            return False
        self._wrong = await self._find_wrong()
        if self._wrong:
            return False
        await self._expect_wanted(facts)
        return await self._commit(facts)

    def _load(self) -> Document:
        if self._document is None:
            path = f"{self._near.url.location}/{METADATA}"
            with open(path, "rb") as file:
                document = decode_document(file.read(), path)
            if document.save_id != self._step.save_id:
                raise Outdated(f"{path}: was replaced")
            self._document = document
        return self._document

    async def _expect_wanted(self, facts: Facts) -> None:
        """Raise if the step was removed from the far root, or is not on the line of the run."""
        self.facts, fork = await sync_facts(self._root, facts, self._names)
        step = self._step.step
        standing = RunLine(self.facts).standing(step, self._step.save_id, self._step.origin)
        if standing == Standing.OFF:
            raise Outdated(f"step-{step}: is off the line of the run: a later attempt began with an older step")
        if standing != Standing.ON:
            raise fork or Undecided(f"step-{step}: the attempt that took it is not published")
        if await is_buried(self._root, self._step.save_id):
            raise Outdated(f"step-{step}: was removed from {self._root.url}")

    async def _is_committed(self) -> bool:
        """Return True if this step is there. Raise Outdated for a newer snapshot of the step."""
        storage = self._target.storage
        try:
            token = (await storage.stat(METADATA)).token
            head: ManifestHead | None = decode_head(
                await storage.get(METADATA, limit=self._target.settings.manifest_bytes), storage.url.join(METADATA)
            )
        except StorageNotFoundError:
            self._replaces = ABSENT
            return False
        except StorageError:
            raise
        except SnapshotError:  # damaged
            head = None
        if head is not None and head.save_id == self._step.save_id:
            return True
        mine = self._step.save_id, self._step.origin
        if head is not None and not RunLine(self.facts).is_newer(
            self._step.step, mine, (head.save_id, origin_of(head.metadata))
        ):
            raise Outdated(f"step-{self._step.step}: {storage.url} has a newer snapshot of it")
        self._replaces = token
        return False

    async def _claim(self) -> None:
        """Put the claim, and renew it from time to time, so that no clean-up takes the files for leftovers."""
        if time.monotonic() - self._renewed > RENEWED or not self._renewed:
            await self._target.storage.put(claim_path(self._step.save_id), b"", expect=ANYTHING)
            self._renewed = time.monotonic()

    async def _unlisted(self) -> set[str]:
        """Return the files that are not there, or were found with another size."""
        try:
            listed = await self._target.storage.list("data/")
        except StorageNotFoundError:
            listed = []
        return self._step.head.sizes().keys() - set(listed) | self._wrong

    async def _find_wrong(self) -> set[str]:
        """Look at each file, and return those that are missing or do not have their size, compressed or not."""
        storage, sizes = self._target.storage, self._step.head.sizes()
        notes = {**self._notes, **await read_notes(storage, self._step.save_id)}

        async def good(name: str) -> bool:
            with suppress(StorageNotFoundError):
                size = (await storage.stat(name)).size
                if size == sizes[name]:
                    self._notes.pop(name, None)
                    return True
                note = notes.get(name)
                if note is not None and size == note.size:
                    self._notes[name] = note
                    return (await storage.stat(table_of(name))).size == note.table
            return False

        found = await gather_limited(sizes, good)
        return {name for name, is_good in zip(sizes, found, strict=True) if not is_good}

    async def _commit(self, facts: Facts) -> bool:
        """Put the manifest. Afterwards look again for a removal or a later attempt, which may have happened meanwhile.

        Return False if files are missing by then.
        """
        storage, claim = self._target.storage, claim_path(self._step.save_id)
        if os.path.exists(f"{self._near.url.location}/{PINNED}"):
            await storage.put(PINNED, b"", expect=ANYTHING)
        try:
            if not storage.capabilities.guarded_commit:
                await storage.stat(claim)  # raises if a clean-up took it
            expect = await transaction.commit_condition(storage, METADATA, self._replaces)
            self._put = True
            await storage.commit(claim, METADATA, _far_manifest(self._load(), self._notes), expect=expect)
        except (StorageConflictError, StorageNotFoundError):
            self._renewed, self._put = 0.0, False
            return await self._is_committed()
        return await self._check_commit(facts)

    async def _describe_sent(self, sent: Sequence[str], facts: Facts) -> bool:
        """Describe files that were sent while another host committed, if it had them in another form.

        Two hosts send a file if one is slow. One may compress it, or their versions of zstd may differ.
        """
        storage, own = self._target.storage, self._load().files
        self._replaces = (await storage.stat(METADATA)).token
        head = decode_head(await storage.get(METADATA, limit=self._target.settings.manifest_bytes), storage.url)
        described = {
            name: Note.of(file.packed)
            for name, file in head.files.items()
            if file.packed is not None and own[name].packed is None
        }
        made = self._packed.made if self._packed is not None else {}
        true = {name: note for name, note in described.items() if name not in sent}
        true |= {name: made[name] for name in sent if name in made}
        if true == described:
            await remove_notes(storage, self._step.save_id)
            return True
        self._notes, self._renewed = true, 0.0
        await self._claim()  # the other host removed it
        return await self._commit(facts)

    async def _check_commit(self, facts: Facts) -> bool:
        """Look again for a removal, a later attempt, and all files. Withdraw the manifest if it must not be there."""
        storage = self._target.storage
        try:
            await self._expect_wanted(facts)
        except (Outdated, Undecided, RunForkedError, RunDeletedError):
            await self._withdraw()
            raise
        self._wrong = await self._find_wrong()
        if self._wrong:
            await self._withdraw()
            self._renewed = 0.0
            return False
        await remove_asides(storage)
        await remove_notes(storage, self._step.save_id)
        await transaction.clean_after_commit(storage, self._step.save_id)
        self._put = False
        emit("uploaded", "upload", str(storage.url), step=self._step.step, bytes=self._step.head.nbytes)
        return True

    async def _withdraw(self) -> None:
        """Delete the manifest that was just put, if it is still there."""
        storage = self._target.storage
        if await transaction.committed_save_id(storage) == self._step.save_id:
            await storage.delete([METADATA])

    async def discard(self) -> None:
        """Delete the files of an outdated step, unless it is committed."""
        storage = self._target.storage
        try:
            if await transaction.committed_save_id(storage) != self._step.save_id:
                await transaction.delete_save(storage, self._step.save_id)
                await transaction.drop_unfinished_uploads(storage, {self._step.save_id}, 0.0)
                await remove_asides(storage)
        except SnapshotError as error:
            log.info("%s: cannot delete what was uploaded: %s", storage.url, error)


def _far_manifest(document: Document, notes: Mapping[str, Note]) -> bytes:
    """Return the manifest for the far storage, where no file shares its bytes, and some are compressed."""
    files = {
        name: file if file.origin is None else msgspec.structs.replace(file, origin=None, age=0)
        for name, file in document.files.items()
    }
    for name, note in notes.items():
        files[name] = msgspec.structs.replace(files[name], packed=note.describe(name))
        files[table_of(name)] = FileEntry(note.table)
    lowest = format_of(files, document.manifest)
    kept = document.format if document.format == NEWEST_FORMAT else lowest
    return encode(msgspec.structs.replace(document, files=files, format=kept))


async def is_begun(root: Storage, step: int, save_id: str) -> bool:
    """Return True if a host has begun to upload a step, which is not committed."""
    return await exists(root, f"step-{step}/{claim_path(save_id)}")


BUDGET = 128 << 20


class OpenUploads:
    """Begun uploads by step. Requests end them; the thread that uploads closes what they used."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._uploads: dict[int, FarUpload] = {}
        self._sessions: dict[int, tuple[Session, Session]] = {}
        self._vain: list[FarUpload] = []
        """Uploads whose files must be deleted."""
        self._unused: list[Session] = []
        self._root: Session | None = None
        self.reset = False
        """True if the far root is reached with other options from now on."""

    def get(self, step: int) -> FarUpload | None:
        """Return the begun upload of a step."""
        return self._uploads.get(step)

    def root(self, given: Registration) -> Session:
        """Return a session of the far root."""
        if self._root is None:
            self._root = Session(URL.parse(given.far), given.options)
        return self._root

    def begin(self, folder: NearFolder, near: NearStep, state: StepStatus, given: Registration) -> FarUpload:
        slow = partial(Throttled, rate=given.rate) if given.rate else (lambda opened: opened)
        source = Session(URL("near", folder.step_path(near.step)), None, budget=BUDGET, wrap=slow)
        far = URL.parse(given.far).join(f"step-{near.step}")
        target = Session(far, given.options, budget=BUDGET, resume=True)

        def progress(nbytes: int) -> None:
            state.sent += nbytes

        root = self.root(given).storage
        upload = FarUpload(root, source, target, near, progress, compress=given.compression == "zstd")
        with self._lock:
            self._uploads[near.step] = upload
            self._sessions[near.step] = (source, target)
        return upload

    def release(self, step: int) -> None:
        """Let the next turn close what an upload used. This one may still use it."""
        with self._lock:
            self._uploads.pop(step, None)
            self._unused += self._sessions.pop(step, ())

    def end(self, step: int) -> None:
        """Let the next turn delete what was uploaded of a step in vain."""
        with self._lock:
            if step in self._uploads:
                self._vain.append(self._uploads[step])
            self.release(step)

    @property
    def is_tidy(self) -> bool:
        """True if the next turn has nothing to delete or to close."""
        return not (self._vain or self._unused or self.reset)

    def tidy(self) -> None:
        """Delete what was uploaded in vain, and close what is not used any more."""
        with self._lock:
            vain, self._vain = self._vain, []
            if self.reset:
                self.reset = False
                self.close()
            unused, self._unused = self._unused, []
        for upload in vain:
            run(upload.discard())
        for session in unused:
            run(session.close())

    def close(self) -> None:
        with self._lock:
            for step in list(self._sessions):
                self.release(step)
            for session in self._unused:
                run(session.close())
            self._unused.clear()
            if self._root is not None:
                run(self._root.close())
                self._root = None
