"""The upload of one step: files under the same names, then the manifest, by one of the hosts that see all files.

Files that are in the far root already are not sent again. The manifest is put under the condition that the path has not
changed, so that one host commits. An uploaded step is an ordinary snapshot.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress

import msgspec

from snapshot.errors import (
    RunDeletedError,
    RunForkedError,
    SnapshotError,
    StorageConflictError,
    StorageError,
    StorageNotFoundError,
)
from snapshot.events import emit, log
from snapshot.io.aio import gather_limited
from snapshot.io.session import Session
from snapshot.io.storage import ABSENT, ANYTHING, Expect, Storage
from snapshot.manifest.document import (
    METADATA,
    NEWEST_FORMAT,
    Document,
    FileEntry,
    ManifestHead,
    decode_document,
    decode_head,
    encode,
    format_of,
)
from snapshot.save import transaction
from snapshot.save.transaction import claim_path
from snapshot.tiers.facts import sync_facts
from snapshot.tiers.far_packed import Note, PackedUploads, read_notes, remove_notes, table_of
from snapshot.tiers.fetch import copy_verified, describe_files, remove_asides
from snapshot.tiers.near_steps import PINNED, NearStep
from snapshot.tiers.timeline import Facts, Line, Standing, origin_of
from snapshot.tiers.tombstones import is_buried

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
        standing = Line(self.facts).standing(step, self._step.save_id, self._step.origin)
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
        if head is not None and not Line(self.facts).is_newer(
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
        expect = self._replaces
        if os.path.exists(f"{self._near.url.location}/{PINNED}"):
            await storage.put(PINNED, b"", expect=ANYTHING)
        if not storage.capabilities.conditional_put:
            expect = ANYTHING
        try:
            if not storage.capabilities.guarded_commit:
                await storage.stat(claim)  # raises if a clean-up took it
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
    with suppress(StorageNotFoundError):
        await root.stat(f"step-{step}/{claim_path(save_id)}")
        return True
    return False
