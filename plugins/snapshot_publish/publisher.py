"""Publisher: the weights of a training loop as numbered versions in a store, full or as deltas."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from snapshot.distributed.exchange import LEADER, Exchange, OutcomeUnknown
from snapshot.distributed.group import ranks_of
from snapshot.errors import CommitUnknown, CorruptSnapshotError, SnapshotError, SnapshotExistsError
from snapshot.events import emit, log, warn
from snapshot.formats.hugging_face import INDEX, ExtraFiles, read_header
from snapshot.io.aio import gather_limited, in_thread, shielded
from snapshot.io.host_memory import total_memory
from snapshot.io.loop import in_own_thread, refuse_on_loop, run, work_on
from snapshot.io.registry import open_storage
from snapshot.io.session import Session
from snapshot.io.url import URL
from snapshot.manager.policies import Policy, checked_policy
from snapshot.manifest.document import LONGEST_HEADER
from snapshot.maps.recipe import RecipeTarget
from snapshot.options import expect_options, with_options
from snapshot.pending import PendingWork
from snapshot.settings import Settings, expect_positive
from snapshot.tensors.digest import digest_bytes, digest_range
from snapshot.tensors.split_zstd import load_zstd
from snapshot.text import size_text
from snapshot_publish.build import TensorSums, sum_bytes
from snapshot_publish.shares import (
    HostImage,
    RankState,
    SharePlan,
    ShareUpload,
    WrittenShare,
    expect_equal,
    find_pieces,
    flatten_tensors,
    gather_pieces,
    plan_shares,
)
from snapshot_publish.store import (
    LONGEST_CHAIN,
    LONGEST_INDEX,
    IndexDetails,
    KnownVersion,
    VersionIndex,
    VersionStore,
    decode_index,
    encode_index,
    version_name,
    version_of,
)
from snapshot_publish.subscriber import LocalFolder, check_hooks, start_hooks

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from snapshot.maps.tensor_map import TensorMap


# The comparison of what the ranks call `publish` with. A version must never mix two steps.


class PublishCall(msgspec.Struct, array_like=True):
    """A rank's call."""

    calls: int
    """Number of its calls so far."""
    step: int
    url: str
    full_every: int
    state: str
    """Digest of the description of its tensors."""


class Agreed(msgspec.Struct, array_like=True):
    """The leader's reply to the calls of all ranks."""

    calls: int
    """The highest number of calls of a rank."""
    known: bool
    """True if all ranks have the tensors of the call before."""
    wrong: str = ""
    """The difference, if the calls do not fit together."""
    steps_differ: bool = False
    """True if a rank with fewer calls was late, rather than absent from a call."""


def compare_calls(ranks: Sequence[PublishCall], known: Sequence[str]) -> Agreed:
    """Compare the calls of all ranks. `known` are the descriptions of the call before.

    >>> one, two = PublishCall(1, 10, "a", 50, ""), PublishCall(2, 20, "a", 50, "")
    >>> compare_calls([one, two], []).wrong
    'step: 10 on rank 0, 20 on rank 1; calls: 1 on rank 0, 2 on rank 1'
    """
    wrong = []
    for field in ("step", "url", "full_every", "calls"):
        values = [getattr(rank, field) for rank in ranks]
        other = next((rank for rank, value in enumerate(values) if value != values[0]), None)
        if other is not None:
            wrong.append(f"{field}: {values[0]} on rank 0, {values[other]} on rank {other}")
    steps_differ = len({rank.step for rank in ranks}) > 1
    same = [rank.state for rank in ranks] == list(known)
    return Agreed(max(rank.calls for rank in ranks), same, "; ".join(wrong), steps_differ)


def expect_same_plans(exchange: Exchange, plan: str) -> None:
    """Raise on all ranks unless all of them have the same plan, given by its digest, and the memory for it."""

    def lead(plans: list[str]) -> bool:
        other = next((rank for rank, each in enumerate(plans) if each != plans[0]), None)
        if other is not None:
            raise SnapshotError(f"names must be the same map on all ranks, got another one on rank {other}")
        return True

    if not exchange.alone:
        exchange.agree(plan, lead, str, bool)


# A version that is published in the background.

SLACK = 1 << 20
"""Maximum bytes of the deltas after a complete version, beyond the bytes of that version."""


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


@dataclass(frozen=True, slots=True)
class BaseVersion:
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


class ReadyToEncode(msgspec.Struct, array_like=True):
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


class PublishedIndex(msgspec.Struct, array_like=True):
    """The leader's answer after the commit: the digest of the index."""

    index: str


class Publication(NamedTuple):
    """One rank's part of one publication."""

    exchange: Exchange
    step: int
    image: HostImage
    names: Collection[str]
    """The tensors of all ranks."""
    base: BaseVersion | None
    """The version that this rank can encode a delta of."""
    keeps: bool
    """True if the image may stay in memory, as the base of the next version."""


# The base of a restarted publisher: a version in a local folder, where a subscriber has pulled it.


async def load_base(
    url: URL,
    options: Mapping[str, Any],
    folder: Path,
    targets: Mapping[str, RecipeTarget],
    *,
    names: Collection[str],
    files: Mapping[str, bytes],
) -> BaseVersion | None:
    """Return a pulled version as a base for these targets; None if it does not fit. The reason is logged.

    `names`: the tensors of all ranks. `files`: the small files of the new version. Without any, those of
    the base stay.
    """
    try:
        async with (
            Session(url, options) as session,
            Session(URL.parse(os.fspath(folder)), None, durable=False) as local,
        ):
            version = version_of(folder.name)
            marker = LocalFolder(folder.parent, str(url)).marker(version) if version is not None else None
            if marker is None:
                raise SnapshotError(f"{folder}: not a version that was pulled from {url}")
            store = VersionStore(session.storage)
            index = await store.read(marker.version)
            if index.digest != marker.index:
                raise SnapshotError(f"{folder}: the store has another version {marker.version} now")
            deltas = len(await store.chain(index, lambda *_: False)) - 1
            here = decode_index(await local.storage.get(INDEX, limit=LONGEST_INDEX), 0, folder / INDEX)
            if set(names) != here.files.keys():
                raise SnapshotError(f"{folder}: has other tensors than the new version")
            given = {name: (len(data), digest_bytes(data)) for name, data in files.items()}
            if given and given != {name: tuple(found) for name, found in here.details.files.items()}:
                raise SnapshotError(f"{folder}: has other files beside the weights than the new version")
            image = HostImage(targets)
            sums = await _read_tensors(local, here, image)
    except SnapshotError as error:
        log.warning("%s: the next version is complete: %s", url, error)
        return None
    return BaseVersion(marker.version, index.digest, image, sums, deltas, image.nbytes)


async def _read_tensors(local: Session, index: VersionIndex, image: HostImage) -> dict[str, TensorSums]:
    """Read and verify the tensors of an image."""
    sums: dict[str, TensorSums] = {}
    for file, in_file in index.by_file().items():
        names = [name for name in in_file if name in image.targets]
        if not names:
            continue
        size = (await local.storage.stat(file)).size
        entries, _ = await read_header(local.storage, file, size, LONGEST_HEADER)

        async def read(name: str, file: str = file, entries: Mapping[str, Any] = entries) -> None:
            target, entry = image.targets[name], entries.get(name)
            if entry is None or (entry.dtype, tuple(entry.shape)) != (target.dtype, tuple(target.shape)):
                raise SnapshotError(f"{file}: {name} has another dtype or shape than the new version")
            data = image.bytes(name)
            await local.storage.read_into(file, entry.byte_range[0], [data])
            sums[name] = await in_thread(sum_bytes, data)
            expected = index.details.digests.get(name, sums[name].digest)
            if sums[name].digest != expected:
                raise CorruptSnapshotError(f"{file}: {name}: its digest must be {expected}")

        await gather_limited(names, read, local.settings.thread_count())
    return sums


# The publisher, with one publication at a time in the background.


@dataclass(frozen=True, kw_only=True)
class PublishOptions:
    """The options of a `Publisher`: `Publisher(url, options=PublishOptions(files="model"))`."""

    files: str | os.PathLike[str] | Mapping[str, bytes] | None = None
    """A local folder in Hugging Face's layout, or contents by name: its small files, such as `config.json` and the
    tokenizer's, are a part of each complete version."""
    notify: Sequence[str] = ()
    """URLs to which a JSON message is sent after each version, such as `http://engine:30000/hook`."""
    memory_budget_bytes: int | None = None
    """Host memory of this rank for the published weights. Deltas need twice the bytes that the rank owns. By default,
    it is half of the host's memory, shared by its ranks."""


class Publisher:
    """Publishes the weights of a training loop in a store, for inference engines.

    Each call of `publish` makes the next version: a folder `weight_v000012` in Hugging Face's layout. It is either
    complete, or holds the changes since the version before. All ranks create a publisher and call `publish`.

    >>> import torch
    >>> from snapshot_publish import Publisher
    >>> model = torch.nn.Linear(4, 2)
    >>> publisher = Publisher("memory://docs/policy")
    >>> publisher.publish(100, model).wait()
    Published(version=1, step=100, base=None)
    >>> with torch.no_grad():
    ...     _ = model.weight.add_(1)
    >>> publisher.publish(200, model).wait()
    Published(version=2, step=200, base=1)
    """

    @with_options(PublishOptions)
    def __init__(
        self,
        url: str | os.PathLike[str],
        *,
        names: TensorMap | None = None,
        full_every: int = 50,
        keep: Policy | int | None = 2,
        pg: ProcessGroup | None = None,
        storage_options: Mapping[str, Any] | None = None,
        timeout: float | None = None,
        options: PublishOptions | None = None,
    ) -> None:
        """Check the arguments. Nothing is read or written.

        Args:
            url: The folder of the versions, in any storage.
            names: A map from the model's tensors to those that are published. By default they are the same.
            full_every: At least every n-th version is complete, so that readers never follow longer chains.
            keep: The number of complete versions to keep, or a policy, which sees their numbers as steps. Deltas are
                kept with the complete version before them. Rank 0 deletes other versions. None keeps all.
            pg: The ranks that publish. By default, the default process group.
            storage_options: Options for the storage plugin.
            timeout: Seconds without a heartbeat after which a rank counts as dead.
            options: The files beside the weights, notified URLs and memory, as `PublishOptions`.

        Raises:
            MissingExtraError: zstandard is not installed, and `full_every` is above 1.
            ValueError: An argument is invalid.
        """
        whole = isinstance(full_every, int) and not isinstance(full_every, bool)
        if not whole or not 1 <= full_every <= LONGEST_CHAIN:
            raise ValueError(f"full_every must be an int from 1 to {LONGEST_CHAIN}, got {full_every!r}")
        options = options or PublishOptions()
        expect_options(options, PublishOptions)
        if options.memory_budget_bytes is not None:
            expect_positive("memory_budget_bytes", options.memory_budget_bytes)
        if names is not None and names.dequantise is not None:
            raise ValueError("names must not dequantise: the tensors of a live model are published")
        if full_every > 1:
            load_zstd()
        self._url = URL.parse(os.fspath(url))
        self._options = dict(storage_options or {})
        open_storage(self._url, self._options)  # an unknown scheme or option is an error of this call
        self._names = names
        self._full_every, self._keep = full_every, checked_policy(keep, metrics=False)
        self._files = ExtraFiles(options.files)
        self._notify = check_hooks(options.notify)
        self._budget = options.memory_budget_bytes
        self._pg = pg
        self._timeout = timeout
        self._id = secrets.token_hex(6)
        self._base: BaseVersion | None = None
        self._spare: HostImage | None = None
        """The image before the last one: its memory is used again."""
        self._planned: tuple[list[str], SharePlan, str] | None = None
        """The plan of the last call, with the digests of the states and of the plan."""
        self._pending: PendingPublish | None = None
        self._known: dict[int, KnownVersion] = {}
        self._warned = False
        self._resumed: Path | None = None
        self._process = os.getpid()
        self._calls = 0
        self._owed = 0
        """Number of the next calls that the other ranks have given up before."""

    @classmethod
    def of_config(cls, url: str, config: Mapping[str, Any], **given: Any) -> Publisher:
        """Return a publisher whose arguments, and fields of its options, are in a dict of a configuration."""
        named = {each.name for each in fields(PublishOptions)} & config.keys()
        rest = {name: value for name, value in config.items() if name not in named}
        return cls(url, options=PublishOptions(**{name: config[name] for name in named}), **given, **rest)

    def resume_from(self, folder: str | os.PathLike[str]) -> None:
        """Let the next version be a delta of a version that a `Subscriber` has pulled into a local folder.

        Otherwise, the first version of a publisher is complete. All ranks must have the folder, and it must be the
        newest version then. If it does not fit, the next version is complete, and the log says why.
        """
        self._resumed = Path(os.path.realpath(folder))

    def publish(self, step: int, state: Any) -> PendingPublish:
        """Publish a model or a state dict as the next version. All ranks call it.

        When it returns, the weights are in host memory and training may change them. They are compared, compressed and
        written in the background. A call first waits for the publication before.

        Args:
            step: The training step, for readers that ask for one. A step can be published again.
            state: A module, or a state dict: nested, with tensors on any device, DTensors or ShardedTensors. Tensors
                that several ranks hold are published once. Values that are not tensors are left out.

        Raises:
            SnapshotError: The tensors of the ranks do not form whole tensors, the ranks publish different steps, or
                another rank failed.
        """
        refuse_on_loop()
        self._prepare()
        with Exchange(ranks_of(self._pg), "publish", self._timeout) as exchange:
            if not isinstance(step, int) or isinstance(step, bool) or not 0 <= step < 1 << 63:
                raise ValueError(f"step must be an int of at least 0 and below 2**63, got {step!r}")
            own, held = find_pieces(flatten_tensors(state))
            marks, plan, plan_digest = self._plan(exchange, step, own)
            if self._resumed is not None:
                files = self._files.read() if exchange.rank == LEADER else {}  # the leader writes them
                owned, names = plan.owned(exchange.rank), plan.targets.keys()
                self._base = run(load_base(self._url, self._options, self._resumed, owned, names=names, files=files))
                self._resumed = None
            image = self._take_image(plan, exchange.rank)
            expect_same_plans(exchange, plan_digest)
            self._planned = marks, plan, plan_digest  # on all ranks, or on none
            expect_equal(exchange, plan, held)
            gather_pieces(exchange, plan, held, image)
            base = self._base
            if base is not None and not (base.image.fits(image.targets) and base.deltas + 1 < self._full_every):
                base = None
            keeps = self._may_keep(image, exchange)
            publication = Publication(exchange, step, image, plan.targets.keys(), base, keeps)
            pending = PendingPublish(str(self._url), work_on(self._run(publication)))
            pending.begin()
        self._pending = pending
        return pending

    def _prepare(self) -> None:
        """Wait for the publication before. Raise for a call that the other ranks have given up."""
        if self._process != os.getpid():  # the threads and images of a forked child are its parent's
            self._process, self._id = os.getpid(), secrets.token_hex(6)
            self._base = self._spare = self._pending = None
            self._known = {}
        if self._pending is not None:
            self._pending.settle()
        if self._owed:
            self._owed -= 1
            raise SnapshotError(f"{self._url}: the other ranks have given up this call: this rank was too late")
        self._calls += 1

    def _plan(self, exchange: Exchange, step: int, own: RankState) -> tuple[list[str], SharePlan, str]:
        """Agree on the call and the tensors of all ranks. Return the plan of the last call if it fits."""
        mark = digest_range(msgspec.msgpack.encode(own))
        known = self._planned[0] if self._planned is not None else []
        call = PublishCall(self._calls, step, str(self._url), self._full_every, mark)
        agreed = exchange.agree(call, lambda calls: compare_calls(calls, known), PublishCall, Agreed)
        if agreed.wrong:
            if agreed.steps_differ:
                self._owed = agreed.calls - self._calls
            self._calls = agreed.calls
            exchange.close()
            raise SnapshotError(f"{self._url}: the ranks must publish the same version: {agreed.wrong}")
        if agreed.known and self._planned is not None:
            return self._planned
        states = exchange.agree(own, lambda all_: all_, RankState, list[RankState])
        plan = plan_shares(states, self._names)
        marks = [digest_range(msgspec.msgpack.encode(each)) for each in states]
        digest = "" if exchange.alone else digest_range(repr(plan).encode(errors="replace"))
        return marks, plan, digest

    def _take_image(self, plan: SharePlan, rank: int) -> HostImage:
        targets = plan.owned(rank)
        spare, self._spare = self._spare, None
        if spare is not None and spare.fits(targets):
            return spare
        del spare  # its memory is free for the new image
        return HostImage(targets)

    def _may_keep(self, image: HostImage, exchange: Exchange) -> bool:
        """Return True if this version and the next one fit into the budget together."""
        if self._full_every == 1:
            return False
        limit = self._limit(exchange.world)
        if 2 * image.nbytes <= limit:
            return True
        if not self._warned:
            self._warned = True
            emit("full_only", "publish", str(self._url), needed=2 * image.nbytes, budget=limit)
            warn(
                f"{self._url}: all versions are complete ones: deltas need {size_text(2 * image.nbytes)} of host "
                f"memory on rank {exchange.rank}, and its budget is {size_text(limit)}; raise memory_budget_bytes"
            )
        return False

    def _limit(self, world: int) -> int:
        """Return the host memory for published weights."""
        if self._budget is not None:
            return self._budget
        return total_memory() // 2 // (Settings.processes() if "LOCAL_WORLD_SIZE" in os.environ else world)

    # In the background: claim a number, encode, write, commit, and delete old versions. The ranks communicate through
    # the store of their process group, never through its collectives.

    async def _run(self, publication: Publication) -> Published:
        """Publish. Only a committed version becomes the base of the next.

        An error on one rank is raised on all of them, and the files of the attempt are deleted.
        """
        began = time.monotonic()
        exchange, _, image, _, base, keeps = publication
        before, self._base = self._base, None
        session = Session(self._url, self._options)
        store = VersionStore(session.storage, self._known)
        upload: ShareUpload | None = None
        try:
            emit("start", "publish", str(self._url), step=publication.step)
            decision = await self._agree(publication, store)
            upload = ShareUpload(session, decision.version, decision.attempt, exchange.rank, image)
            if decision.base:
                assert base is not None
                await upload.write_delta(base.image, base.sums)
            else:
                await upload.write_full()
            details = IndexDetails(self._id, publication.step, time.time())
            if exchange.rank == LEADER and not decision.base:
                details.files = await upload.write_extra(await in_thread(self._files.read))
            await session.storage.settle()
            committed = await self._commit(publication, store, decision, upload.share, details)
        except BaseException as error:
            emit("failed", "publish", str(self._url), error=error)
            await shielded(_abort(exchange, error, store, upload))
            raise
        else:
            share, found = upload.share, Published(decision.version, publication.step, decision.base or None)
            folder = str(self._url.join(version_name(found.version)))
            emit(
                "committed",
                "publish",
                folder,
                bytes=share.nbytes,
                stored=share.stored,
                base=found.base,
                seconds=time.monotonic() - began,
            )
            if exchange.rank == LEADER:
                await store.retire(self._keep, self._id)
                if self._notify:
                    message = {
                        "source_dir": str(self._url),
                        "target_version": found.version,
                        "version_dir": folder,
                        "step": found.step,
                        "base_version": found.base,
                    }
                    start_hooks(self._notify, "publish", message)
        finally:
            await in_own_thread(exchange.close)
            await session.close()
        if keeps:
            self._base = BaseVersion(found.version, committed.index, image, upload.sums, 0, share.stored)
            if decision.base and base is not None:
                deltas, stored = base.deltas + 1, base.stored + share.stored
                self._base = replace(self._base, deltas=deltas, full=base.full, stored=stored)
            self._spare = before.image if before is not None else None
        elif image.nbytes <= self._limit(exchange.world):
            self._spare = image
        return found

    async def _agree(self, publication: Publication, store: VersionStore) -> Decision:
        """Let the leader choose the number, and decide if the version is a delta."""

        def lead(ranks: list[ReadyToEncode]) -> Decision:
            attempt = secrets.token_hex(6)
            version = run(store.claim(self._id, attempt))
            bases = {ready.base for ready in ranks}
            base = bases.pop() if len(bases) == 1 else 0
            if base and base + 1 != version:  # readers apply deltas one by one, without gaps
                base = 0
            if sum(ready.surplus for ready in ranks) > SLACK:
                base = 0
            return Decision(version, base, attempt)

        base = publication.base
        ready = ReadyToEncode(base.version, base.stored - base.full) if base is not None else ReadyToEncode(0, 0)
        return await in_own_thread(publication.exchange.agree, ready, lead, ReadyToEncode, Decision)

    async def _commit(
        self,
        publication: Publication,
        store: VersionStore,
        decision: Decision,
        share: WrittenShare,
        details: IndexDetails,
    ) -> PublishedIndex:
        """Wait for all ranks, and let the leader store the index."""
        exchange, names = publication.exchange, set(publication.names)

        def lead(shares: list[WrittenShare]) -> PublishedIndex:
            files: dict[str, str] = {}
            for each in shares:
                files.update(each.files)
                details.digests.update(each.digests)
            base = decision.base or None
            if (files.keys() != names) if base is None else not files.keys() <= names:
                raise SnapshotError(f"the ranks must write {len(names)} tensors, got {len(files)}")
            if base is not None and publication.base is not None:
                details.base = publication.base.index
            total = sum(each.nbytes for each in shares)
            data = encode_index(decision.version, base, files, details, total_size=total)
            exchange.commit()
            run(shielded(store.commit(decision.version, data, base)))
            return PublishedIndex(digest_range(data))

        exchange.note_done()
        try:
            return await in_own_thread(exchange.agree, share, lead, WrittenShare, PublishedIndex)
        except OutcomeUnknown as error:
            folder = self._url.join(version_name(decision.version))
            raise CommitUnknown(f"{folder}: unknown whether it is published: {error}") from error

    def __repr__(self) -> str:
        base = f", base {self._base.version}" if self._base is not None else ""
        return f"Publisher({str(self._url)!r}{base})"


async def _abort(exchange: Exchange, error: BaseException, store: VersionStore, upload: ShareUpload | None) -> None:
    """Tell the other ranks, and delete the files unless the index may be stored."""
    ruled_out = await in_own_thread(exchange.fail, error)
    leads = exchange.rank == LEADER
    if upload is not None and not isinstance(error, CommitUnknown) and (ruled_out or leads):
        claim = leads and not isinstance(error, SnapshotExistsError)
        await store.delete_attempt(upload.version, upload.written, claim=claim)
