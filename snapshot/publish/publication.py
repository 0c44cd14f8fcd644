"""One publication in the background: claim a number, encode, write, commit, and delete old versions."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple

import msgspec
import torch

from snapshot.distributed.exchange import LEADER, Exchange, OutcomeUnknown
from snapshot.errors import CommitUnknown, SnapshotError, SnapshotExistsError
from snapshot.events import emit
from snapshot.formats.hugging_face import SHARD
from snapshot.io.aio import gather_limited, in_thread, shielded
from snapshot.io.loop import in_own_thread, run
from snapshot.io.session import Session
from snapshot.io.url import URL
from snapshot.manager.policies import Policy
from snapshot.pending import PendingWork
from snapshot.plan.layout import FilePlan, group_in_order, plan_exact_file
from snapshot.publish.build import DeltaEncoder, EncodedDelta, TensorSums, checksum_text
from snapshot.publish.shares import HostImage
from snapshot.publish.store import (
    LONGEST_FILE,
    WEIGHTS,
    Details,
    KnownVersion,
    VersionStore,
    check_file_name,
    encode_index,
    version_name,
)
from snapshot.publish.subscriber import start_hooks
from snapshot.save.staging import Stager
from snapshot.save.writer import Writer, WrittenFile
from snapshot.state.leaves import Leaf
from snapshot.tensors.digest import digest_bytes, digest_range

# A version that is published in the background.


class Published(NamedTuple):
    """A published version."""

    version: int
    step: int
    base: int | None
    """The version that it is a delta of; None for a complete version."""


class PendingPublish(PendingWork[Published]):
    """A version that is published in the background. `wait()` raises its error."""

    _noun = "publication"
    _success = "published"

    def begin(self) -> None:
        """Start the work."""
        self.work.begin()

    def settle(self) -> None:
        """Wait until the work is over, however it ends."""
        self.work.settled()

    def wait(self, timeout: float | None = None) -> Published:
        """Wait until the version is published, and return its number. Raise `SnapshotError` on every rank if it failed.

        Raise `TimeoutError` after `timeout` seconds. The work continues, and can be waited for again.
        """
        if not self.done():
            self._check_process()
        return self._result(timeout)

    def __repr__(self) -> str:
        if not self.done():
            return f"PendingPublish({self.path!r}, running)"
        failed = self.work.cancelled() or self.work.exception() is not None
        return f"PendingPublish({self.path!r}, {'failed' if failed else 'published'})"


# The files of one rank's share of a version: whole tensors, or deltas, encoded by several threads.

GROUP = 256 << 20
"""Bytes of tensors that are compared before what changed is written. A longer tensor is compared alone."""
DELTA_SHARD = 256 << 20
"""Compressed bytes after which a file of deltas is written."""


class RankShare(msgspec.Struct, array_like=True):
    """A rank's report: the file and the digest of each tensor that it has written."""

    files: dict[str, str]
    digests: dict[str, str]
    nbytes: int
    """Bytes of the tensors that it owns."""
    stored: int
    """Bytes of its files."""


class ShareUpload:
    """The upload of one rank's share. `written` names the files, also after a failure."""

    def __init__(self, session: Session, version: int, attempt: str, rank: int, image: HostImage) -> None:
        self._session = session
        self.version = version
        self._folder = version_name(version)
        self._prefix = f"model-{attempt}-{rank:05d}"
        self._image = image
        self.written: list[str] = []
        self.sums: dict[str, TensorSums] = {}
        """The sums of each owned tensor."""
        self.share = RankShare({}, {}, image.nbytes, 0)

    async def write_full(self) -> None:
        """Write all owned tensors."""
        leaves = [self._image.leaf(name) for name in self._image.targets]
        files = [plan_exact_file(leaves, group) for group in group_in_order([leaf.nbytes for leaf in leaves], SHARD)]
        for found in await self._write(leaves, files):
            for index, extent in enumerate(found.file.extents):
                digest = found.digests[index]
                name = leaves[extent.leaf].path
                table = found.tables.get(index, b"")
                self.sums[name] = TensorSums(digest, table or bytes.fromhex(digest.removeprefix("xxh3:")))
                self.share.digests[name] = digest

    async def write_delta(self, base: HostImage, base_sums: Mapping[str, TensorSums]) -> None:
        """Write the changes of the owned tensors."""
        names = list(self._image.targets)
        waiting: dict[str, EncodedDelta] = {}
        for group in group_in_order([len(self._image.bytes(name)) for name in names], GROUP):
            chosen = [names[index] for index in group]
            for name, encoded in zip(chosen, await self._encode(chosen, base, base_sums), strict=True):
                self.sums[name] = encoded.sums
                if encoded.compressed:
                    waiting[name] = encoded
            if sum(len(each.compressed) for each in waiting.values()) >= DELTA_SHARD:
                await self._write_deltas(waiting)
                waiting = {}
        if waiting:
            await self._write_deltas(waiting)

    async def _encode(
        self, names: Sequence[str], base: HostImage, base_sums: Mapping[str, TensorSums]
    ) -> list[EncodedDelta]:
        encoders: SimpleQueue[DeltaEncoder] = SimpleQueue()
        threads = self._session.settings.thread_count()
        for _ in range(threads):
            encoders.put(DeltaEncoder())

        def encode(name: str) -> EncodedDelta:
            encoder = encoders.get()
            try:
                return encoder.encode(self._image.bytes(name), base.bytes(name), base_sums[name])
            finally:
                encoders.put(encoder)

        longest_first = sorted(names, key=lambda name: -len(self._image.bytes(name)))
        found = await gather_limited(longest_first, lambda name: in_thread(encode, name), threads)
        by_name = dict(zip(longest_first, found, strict=True))
        return [by_name[name] for name in names]

    async def _write_deltas(self, deltas: Mapping[str, EncodedDelta]) -> None:
        leaves = []
        for name, delta in deltas.items():
            tensor = torch.frombuffer(delta.compressed, dtype=torch.uint8)
            leaves.append(Leaf(name, tensor, "uint8", (len(tensor),), len(tensor), tensor.data_ptr(), True))
            self.share.digests[name] = delta.sums.digest
        metadata = {name: checksum_text(delta.checksum) for name, delta in deltas.items()}
        await self._write(leaves, [plan_exact_file(leaves, range(len(leaves)), metadata)])

    async def write_extra(self, contents: Mapping[str, bytes]) -> dict[str, tuple[int, str]]:
        """Write small files, after all others. Return their sizes and digests."""
        self.written += contents
        await gather_limited(contents, lambda name: self._session.storage.put(f"{self._folder}/{name}", contents[name]))
        return {name: (len(data), digest_bytes(data)) for name, data in contents.items()}

    async def _write(self, leaves: Sequence[Leaf], files: Sequence[FilePlan]) -> list[WrittenFile]:
        session = self._session
        names = [f"{self._prefix}-{len(self.written) + number:05d}.safetensors" for number in range(len(files))]
        self.written += names
        source = Stager(leaves, copies=session.storage.limits.alignment > 1)
        writer = Writer(
            session.storage, source, session.budget, lambda _: None, wanted_part=session.settings.part_bytes
        )
        found = await writer.write(files, [f"{self._folder}/{name}" for name in names])
        for name, each in zip(names, found, strict=True):
            self.share.stored += each.file.size
            self.share.files.update({leaves[extent.leaf].path: name for extent in each.file.extents})
        return found


def new_attempt() -> str:
    """Return an id for the file names of one attempt to publish."""
    return secrets.token_hex(6)


# One publication in the background: claim a number, encode, write, commit, and delete old versions.
#
# The ranks communicate through the store of their process group, never through its collectives.

SLACK = 1 << 20
"""Maximum bytes of the deltas after a complete version, beyond the bytes of that version."""


@dataclass(frozen=True, slots=True)
class Base:
    """The last published version, as this rank needs it for a delta."""

    version: int
    index: str
    """Digest of its index."""
    image: HostImage
    sums: Mapping[str, TensorSums]
    deltas: int
    """Number of deltas since the last complete version."""
    full: int
    """Bytes of this rank's files of that version."""
    stored: int = 0
    """Bytes of this rank's files of the deltas."""


class ExtraFiles:
    """The small files of a model, such as its config: contents by name, or a local folder that has them."""

    def __init__(self, given: str | os.PathLike[str] | Mapping[str, bytes] | None) -> None:
        self._folder: Path | None = None
        self._contents: dict[str, bytes] = {}
        if given is None:
            return
        if isinstance(given, Mapping):
            for name, data in given.items():
                if not isinstance(name, str) or not isinstance(data, bytes | bytearray | memoryview):
                    raise TypeError(f"files must be bytes by name, got {name!r}: {type(data).__name__}")
                self._contents[check_file_name(name, "files")] = bytes(data)
        else:
            self._folder = Path(given)
            if not self._folder.is_dir():
                raise ValueError(f"files must be a local folder, got {str(given)!r}")
        refused = [name for name in self._contents if name.endswith(WEIGHTS)]
        if refused:
            raise ValueError(f"files must not have weights, got {refused[0]!r}")

    def read(self) -> dict[str, bytes]:
        """Return the contents by name. Weights and hidden files of a folder are left out."""
        found = dict(self._contents)
        if self._folder is not None:
            for path in sorted(self._folder.iterdir()):
                if path.is_file() and not path.name.startswith(".") and not path.name.endswith(WEIGHTS):
                    if path.stat().st_size > LONGEST_FILE:
                        raise SnapshotError(f"{path}: is too large for a file beside the weights")
                    found[path.name] = path.read_bytes()
        return found


class Ready(msgspec.Struct, array_like=True):
    """A rank's state before it encodes."""

    base: int
    """The version that it can encode a delta of; 0 if none."""
    surplus: int
    """Bytes of its deltas since the last complete version, less those of that version."""


class Decision(msgspec.Struct, array_like=True):
    """The leader's decision about the version."""

    version: int
    base: int
    """The version to encode a delta of; 0 for a complete version."""
    attempt: str


class Committed(msgspec.Struct, array_like=True):
    """The leader's answer after the commit: the digest of the index."""

    index: str


class Publication:
    """One rank's part of one publication."""

    def __init__(
        self,
        url: URL,
        options: Mapping[str, Any],
        exchange: Exchange,
        *,
        publisher: str,
        step: int,
        image: HostImage,
        names: Collection[str],
        base: Base | None,
        keeps: bool,
        files: ExtraFiles,
        full_every: int,
        keep: Policy | None,
        notify: Sequence[str],
        known: dict[int, KnownVersion],
    ) -> None:
        self._url, self._options, self._exchange = url, options, exchange
        self._publisher, self._step, self.image = publisher, step, image
        usable = base is not None and base.image.fits(image.targets) and base.deltas + 1 < full_every
        self._base = base if usable else None
        self.keeps = keeps
        self._names = names
        """The tensors of all ranks."""
        self.world = exchange.world
        self._files = files
        self._keep, self._notify = keep, notify
        self._known = known
        self.next_base: Base | None = None

    async def run(self) -> Published:
        """Publish. An error on one rank is raised on all of them, and the files of the attempt are deleted."""
        began = time.monotonic()
        exchange = self._exchange
        session = Session(self._url, self._options)
        store = VersionStore(session.storage, self._known)
        upload: ShareUpload | None = None
        try:
            emit("start", "publish", str(self._url), step=self._step)
            decision = await self._agree(store)
            upload = ShareUpload(session, decision.version, decision.attempt, exchange.rank, self.image)
            if decision.base:
                assert self._base is not None
                await upload.write_delta(self._base.image, self._base.sums)
            else:
                await upload.write_full()
            details = Details(self._publisher, self._step, time.time())
            if exchange.rank == LEADER and not decision.base:
                details.files = await upload.write_extra(await in_thread(self._files.read))
            await session.storage.settle()
            committed = await self._commit(store, decision, upload.share, details)
        except BaseException as error:
            emit("failed", "publish", str(self._url), error=error)
            await shielded(self._abort(error, store, upload))
            raise
        else:
            share = upload.share
            next_base = Base(decision.version, committed.index, self.image, upload.sums, 0, share.stored)
            if decision.base and self._base is not None:
                deltas, stored = self._base.deltas + 1, self._base.stored + share.stored
                next_base = replace(next_base, deltas=deltas, full=self._base.full, stored=stored)
            self.next_base = next_base
            found = Published(decision.version, self._step, decision.base or None)
            emit(
                "committed",
                "publish",
                str(self._url.join(version_name(found.version))),
                bytes=share.nbytes,
                stored=share.stored,
                base=found.base,
                seconds=time.monotonic() - began,
            )
            if exchange.rank == LEADER:
                await store.retire(self._keep, self._publisher)
                self._tell(found)
            return found
        finally:
            await in_own_thread(exchange.close)
            await session.close()

    async def _agree(self, store: VersionStore) -> Decision:
        """Let the leader choose the number, and decide if the version is a delta."""

        def lead(ranks: list[Ready]) -> Decision:
            attempt = new_attempt()
            version = run(store.claim(self._publisher, attempt))
            bases = {ready.base for ready in ranks}
            base = bases.pop() if len(bases) == 1 else 0
            if base and base + 1 != version:  # readers apply deltas one by one, without gaps
                base = 0
            if sum(ready.surplus for ready in ranks) > SLACK:
                base = 0
            return Decision(version, base, attempt)

        base = self._base
        ready = Ready(base.version, base.stored - base.full) if base is not None else Ready(0, 0)
        return await in_own_thread(self._exchange.agree, ready, lead, Ready, Decision)

    async def _commit(self, store: VersionStore, decision: Decision, share: RankShare, details: Details) -> Committed:
        """Wait for all ranks, and let the leader store the index."""
        exchange = self._exchange

        def lead(shares: list[RankShare]) -> Committed:
            files: dict[str, str] = {}
            for each in shares:
                files.update(each.files)
                details.digests.update(each.digests)
            base = decision.base or None
            if (files.keys() != set(self._names)) if base is None else not files.keys() <= set(self._names):
                raise SnapshotError(f"the ranks must write {len(self._names)} tensors, got {len(files)}")
            if base is not None and self._base is not None:
                details.base = self._base.index
            total = sum(each.nbytes for each in shares)
            data = encode_index(decision.version, base, files, details, total_size=total)
            exchange.commit()
            run(shielded(store.commit(decision.version, data, base)))
            return Committed(digest_range(data))

        exchange.note_done()
        try:
            return await in_own_thread(exchange.agree, share, lead, RankShare, Committed)
        except OutcomeUnknown as error:
            folder = self._url.join(version_name(decision.version))
            raise CommitUnknown(f"{folder}: unknown whether it is published: {error}") from error

    async def _abort(self, error: BaseException, store: VersionStore, upload: ShareUpload | None) -> None:
        """Tell the other ranks, and delete the files unless the index may be stored."""
        ruled_out = await in_own_thread(self._exchange.fail, error)
        leads = self._exchange.rank == LEADER
        if upload is not None and not isinstance(error, CommitUnknown) and (ruled_out or leads):
            claim = leads and not isinstance(error, SnapshotExistsError)
            await store.delete_attempt(upload.version, upload.written, claim=claim)

    def _tell(self, found: Published) -> None:
        if self._notify:
            folder = self._url.join(version_name(found.version))
            message = {
                "source_dir": str(self._url),
                "target_version": found.version,
                "version_dir": str(folder),
                "step": found.step,
                "base_version": found.base,
            }
            start_hooks(self._notify, "publish", message)
