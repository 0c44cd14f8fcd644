"""Publisher: the weights of a training loop as numbered versions in a store, full or as deltas."""

from __future__ import annotations

import os
import secrets
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from snapshot.distributed.exchange import Exchange
from snapshot.distributed.group import ranks_of
from snapshot.errors import CorruptSnapshotError, SnapshotError
from snapshot.events import emit, log, warn
from snapshot.formats.hugging_face import INDEX, read_header
from snapshot.io.aio import gather_limited, in_thread
from snapshot.io.arena import total_memory
from snapshot.io.loop import refuse_on_loop, run, work_on
from snapshot.io.registry import open_storage
from snapshot.io.session import Session
from snapshot.io.url import URL
from snapshot.manager.policies import Policy, checked_policy
from snapshot.manifest.document import LONGEST_HEADER
from snapshot.maps.recipe import Target
from snapshot.options import Settings, expect_positive, moved_names
from snapshot.publish.build import TensorSums, sum_bytes
from snapshot.publish.publication import Base, ExtraFiles, PendingPublish, Publication
from snapshot.publish.shares import (
    HostImage,
    RankState,
    SharePlan,
    expect_equal,
    find_pieces,
    flatten_tensors,
    gather_pieces,
    plan_shares,
)
from snapshot.publish.store import LONGEST_INDEX, KnownVersion, VersionStore, decode_index, version_of
from snapshot.publish.subscriber import LocalFolder, check_hooks
from snapshot.tensors.digest import digest_bytes, digest_range
from snapshot.tensors.split_zstd import load_zstd
from snapshot.text import size_text

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from snapshot.maps.tensor_map import TensorMap


# The comparison of what the ranks call `publish` with. A version must never mix two steps.


class Call(msgspec.Struct, array_like=True):
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


def compare_calls(ranks: Sequence[Call], known: Sequence[str]) -> Agreed:
    """Compare the calls of all ranks. `known` are the descriptions of the call before.

    >>> one, two = Call(1, 10, "a", 50, ""), Call(2, 20, "a", 50, "")
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


# The base of a restarted publisher: a version in a local folder, where a subscriber has pulled it.


async def load_base(
    url: URL,
    options: Mapping[str, Any],
    folder: Path,
    targets: Mapping[str, Target],
    *,
    names: Collection[str],
    files: Mapping[str, bytes],
) -> Base | None:
    """Return a pulled version as a base for these targets; None if it does not fit. The reason is logged.

    `names`: the tensors of all ranks. `files`: the small files of the new version. Without any, those of
    the base stay.
    """
    session = Session(url, options)
    local = Session(URL.parse(os.fspath(folder)), None, durable=False)
    try:
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
        sums = await _read_tensors(local, here.files, here.details.digests, image)
    except SnapshotError as error:
        log.warning("%s: the next version is complete: %s", url, error)
        return None
    finally:
        await local.close()
        await session.close()
    return Base(marker.version, index.digest, image, sums, deltas, image.nbytes)


async def _read_tensors(
    local: Session, files: Mapping[str, str], digests: Mapping[str, str], image: HostImage
) -> dict[str, TensorSums]:
    """Read and verify the tensors of an image."""
    by_file: dict[str, list[str]] = defaultdict(list)
    for name in image.targets:
        by_file[files[name]].append(name)
    sums: dict[str, TensorSums] = {}
    for file, names in by_file.items():
        size = (await local.storage.stat(file)).size
        entries, _ = await read_header(local.storage, file, size, LONGEST_HEADER)

        async def read(name: str, file: str = file, entries: Mapping[str, Any] = entries) -> None:
            target, entry = image.targets[name], entries.get(name)
            if entry is None or (entry.dtype, tuple(entry.shape)) != (target.dtype, tuple(target.shape)):
                raise SnapshotError(f"{file}: {name} has another dtype or shape than the new version")
            data = image.bytes(name)
            await local.storage.read_into(file, entry.byte_range[0], [data])
            sums[name] = await in_thread(sum_bytes, data)
            if sums[name].digest != digests.get(name, sums[name].digest):
                raise CorruptSnapshotError(f"{file}: {name}: its digest must be {digests[name]}")

        await gather_limited(names, read, local.settings.thread_count())
    return sums


# Publisher: the weights of a training loop as numbered versions in a store, full or as deltas.


class Publisher:
    """Publishes the weights of a training loop in a store, for inference engines.

    Each call of `publish` makes the next version: a folder `weight_v000012` in Hugging Face's layout. It is either
    complete, or holds the changes since the version before. All ranks create a publisher and call `publish`.

    >>> import torch
    >>> from snapshot import Publisher
    >>> model = torch.nn.Linear(4, 2)
    >>> publisher = Publisher("memory://docs/policy")
    >>> publisher.publish(100, model).wait()
    Published(version=1, step=100, base=None)
    >>> with torch.no_grad():
    ...     _ = model.weight.add_(1)
    >>> publisher.publish(200, model).wait()
    Published(version=2, step=200, base=1)
    """

    @moved_names({"keep_full": "keep=..."})
    def __init__(
        self,
        url: str | os.PathLike[str],
        *,
        names: TensorMap | None = None,
        full_every: int = 50,
        keep: Policy | int | None = 2,
        files: str | os.PathLike[str] | Mapping[str, bytes] | None = None,
        notify: Sequence[str] = (),
        memory_budget_bytes: int | None = None,
        pg: ProcessGroup | None = None,
        storage_options: Mapping[str, Any] | None = None,
        timeout: float | None = None,
    ) -> None:
        """Check the arguments. Nothing is read or written.

        Args:
            url: The folder of the versions, in any storage.
            names: A map from the model's tensors to those that are published. By default they are the same.
            full_every: At least every n-th version is complete, so that readers never follow longer chains.
            keep: The number of complete versions to keep, or a policy, which sees their numbers as steps. Deltas are
                kept with the complete version before them. Rank 0 deletes other versions. None keeps all.
            files: A local folder in Hugging Face's layout, or contents by name: its small files, such as `config.json`
                and the tokenizer's, are a part of each complete version.
            notify: URLs to which a JSON message is sent after each version, such as `http://engine:30000/hook`.
            memory_budget_bytes: Host memory of this rank for the published weights. Deltas need twice the bytes that
                the rank owns. By default, it is half of the host's memory, shared by its ranks.
            pg: The ranks that publish. By default, the default process group.
            storage_options: Options for the storage plugin.
            timeout: Seconds without a heartbeat after which a rank counts as dead.

        Raises:
            MissingExtraError: zstandard is not installed, and `full_every` is above 1.
            ValueError: An argument is invalid.
        """
        if not isinstance(full_every, int) or isinstance(full_every, bool) or full_every < 1:
            raise ValueError(f"full_every must be a positive int, got {full_every!r}")
        if memory_budget_bytes is not None:
            expect_positive("memory_budget_bytes", memory_budget_bytes)
        if names is not None and names.dequantise is not None:
            raise ValueError("names must not dequantise: the tensors of a live model are published")
        if full_every > 1:
            load_zstd()
        self._url = URL.parse(os.fspath(url))
        self._options = dict(storage_options or {})
        open_storage(self._url, self._options)  # an unknown scheme or option is an error of this call
        self._names = names
        self._full_every, self._keep = full_every, checked_policy(keep, metrics=False)
        self._files = ExtraFiles(files)
        self._notify = check_hooks(notify)
        self._budget = memory_budget_bytes
        self._pg = pg
        self._timeout = timeout
        self._id = secrets.token_hex(6)
        self._base: Base | None = None
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
                self._base = self._load_base(self._resumed, plan, exchange.rank)
                self._resumed = None
            image = self._take_image(plan, exchange.rank)
            expect_same_plans(exchange, plan_digest)
            self._planned = marks, plan, plan_digest  # on all ranks, or on none
            expect_equal(exchange, plan, held)
            gather_pieces(exchange, plan, held, image)
            publication = Publication(
                self._url,
                self._options,
                exchange,
                publisher=self._id,
                step=step,
                image=image,
                names=plan.targets.keys(),
                base=self._base,
                keeps=self._may_keep(image, exchange),
                files=self._files,
                full_every=self._full_every,
                keep=self._keep,
                notify=self._notify,
                known=self._known,
            )
            pending = PendingPublish(str(self._url), work_on(self._run(publication)))
            pending.begin()
        self._pending = pending
        return pending

    async def _run(self, publication: Publication) -> Any:
        """Publish in the background. Only a committed version becomes the base of the next."""
        before, self._base = self._base, None
        found = await publication.run()
        if publication.keeps:
            self._base, self._spare = publication.next_base, before.image if before is not None else None
        elif publication.image.nbytes <= self._limit(publication.world):
            self._spare = publication.image
        return found

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

    def _load_base(self, folder: Path, plan: SharePlan, rank: int) -> Base | None:
        files = self._files.read() if rank == 0 else {}  # the leader writes them
        return run(
            load_base(self._url, self._options, folder, plan.owned(rank), names=plan.targets.keys(), files=files)
        )

    def _plan(self, exchange: Exchange, step: int, own: RankState) -> tuple[list[str], SharePlan, str]:
        """Agree on the call and the tensors of all ranks. Return the plan of the last call if it fits."""
        mark = digest_range(msgspec.msgpack.encode(own))
        known = self._planned[0] if self._planned is not None else []
        call = Call(self._calls, step, str(self._url), self._full_every, mark)
        agreed = exchange.agree(call, lambda calls: compare_calls(calls, known), Call, Agreed)
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
        del spare
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

    def __repr__(self) -> str:
        base = f", base {self._base.version}" if self._base is not None else ""
        return f"Publisher({str(self._url)!r}{base})"
