"""One take, step by step: collect, plan, stage, write, commit."""

from __future__ import annotations

import contextlib
import json
import secrets
import time
import warnings
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, wait
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import msgspec

from snapshot.engine import commit
from snapshot.engine.loop import run, start, uninterrupted
from snapshot.engine.operation import Operation
from snapshot.engine.staging import Source
from snapshot.engine.writer import Staging, Writer, Written, write_small
from snapshot.errors import SnapshotError, SnapshotExistsError, StorageConflictError, StorageNotFoundError
from snapshot.events import Meter, emit
from snapshot.manifest import entries as e
from snapshot.manifest.document import FORMAT, METADATA, Document, FileEntry, Part, PartEntry, cut, encode
from snapshot.manifest.paths import component
from snapshot.plan.globs import matcher, unmatched
from snapshot.plan.layout import SavePlan, location, make_plan
from snapshot.report import listed
from snapshot.state.flatten import Flattened, Prepare
from snapshot.state.rng import RNGState
from snapshot.storage import ABSENT, Expect, in_thread
from snapshot.tensors.digest import SIZE, RunningDigest, block_count, of_bytes, of_range

try:
    VERSION = version("snapshot-torch")
except PackageNotFoundError:  # run from a checkout that was never installed
    VERSION = "0+unknown"

RANK, WORLD = 0, 1


def collect(
    app_state: Mapping[str, Any], prepare: Prepare | None, exclude: Sequence[str], replicated: Sequence[str]
) -> Flattened:
    """Call each `state_dict()` and flatten what it gives. The RNG state is captured first, and put back after all."""
    flat = Flattened(prepare, matcher(exclude) if exclude else None)
    rng = {key: value.state_dict() for key, value in app_state.items() if isinstance(value, RNGState)}
    try:
        for key in sorted(app_state):
            state = rng[key] if key in rng else app_state[key].state_dict()
            flat.add(component(key), state)
    finally:
        for key, state in rng.items():
            app_state[key].load_state_dict(state)
    for glob in unmatched(replicated, flat.entries) if replicated else ():
        warnings.warn(f"replicated: the glob {glob!r} matches nothing in the app state", stacklevel=4)
    for glob in unmatched(exclude, [*flat.entries, *flat.excluded]) if exclude else ():
        warnings.warn(f"exclude: the glob {glob!r} matches nothing in the app state", stacklevel=4)
    if flat.pickled:
        warnings.warn(
            f"stored as pickles, since nothing else can hold them; reading them back may need allow_pickle=True:"
            f"{listed(flat.pickled)}",
            stacklevel=4,
        )
    if flat.lossy:
        warnings.warn(
            f"stored without the attributes that Python code gave them; only data and class come back:"
            f"{listed(flat.lossy)}",
            stacklevel=4,
        )
    return flat


def make(flat: Flattened, operation: Operation, *, staged: bool) -> SavePlan:
    """What is written where."""
    blobs = sum(len(blob.data) + SIZE * block_count(len(blob.data)) for blob in flat.blobs)
    limits = operation.storage.limits
    total = sum(leaf.nbytes for leaf in flat.leaves)
    at_once = total if staged else limits.preferred_part * limits.parallel_parts if limits.alignment > 1 else 0
    return make_plan(
        flat.leaves, blobs, limits, operation.settings.lane_count(), min(at_once, operation.budget.limit, total)
    )


class Take:
    """A take under way."""

    def __init__(
        self,
        operation: Operation,
        *,
        verb: str,
        overwrite: bool,
        metadata: Mapping[str, Any] | None,
        replicated: Sequence[str],
        meter: Meter,
    ) -> None:
        self._operation = operation
        self._storage = operation.storage
        self._verb = verb
        self._overwrite = overwrite
        self._replicated = replicated
        self._meter = meter
        self._save_id = secrets.token_hex(6)
        self._began = time.perf_counter()
        try:
            json.dumps(metadata, allow_nan=False)  # JSON has no NaN, and msgspec would make it null
            self._metadata = msgspec.Raw(msgspec.json.encode(dict(metadata or {})))
        except (TypeError, ValueError, OverflowError) as error:
            raise TypeError(f"metadata must be what JSON can hold: {error}") from error
        capabilities = self._storage.capabilities
        if not (capabilities.write and capabilities.atomic_put):
            raise SnapshotError(f"{operation.url}: this storage cannot be written to")
        self._staging: Staging | None = None
        self._writing = False
        self._expect: Expect = ABSENT

    async def check(self) -> None:
        """Refuse to write over a snapshot, before anything is written."""
        try:
            standing = await self._storage.stat(METADATA)
        except StorageNotFoundError:
            return
        if not self._overwrite:
            raise SnapshotExistsError(
                f"{self._operation.url}: holds a snapshot already; take to another path, or with overwrite=True"
            )
        self._expect = standing.token

    def __enter__(self) -> Take:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """What fails before writing began leaves only the storage to be closed."""
        if error is not None and not self._writing:
            self._meter.close()
            run(self._operation.close())

    def prepare(self, flat: Flattened, plan: SavePlan | None, *, stage: bool) -> None:
        """Plan, or check the plan that was given. `stage`: everything will be copied, by the caller's thread."""
        made = make(flat, self._operation, staged=stage)
        if plan is not None and plan.structure != made.structure:
            raise ValueError("the plan was made for other names, shapes or dtypes, or for another storage")
        self._flat = flat
        self._plan = made
        copies = stage or self._storage.limits.alignment > 1
        source = Source(flat.leaves, copies=copies, parallel=stage)
        budget, part_bytes = self._operation.budget, self._operation.settings.part_bytes
        self._writer = Writer(self._storage, source, budget, self._meter.wrote, part_bytes)
        self._meter.begin(made.total_bytes)

    def stage_and_start(self, checked: Future[None]) -> Future[None]:
        """Stage everything, and begin to write: afterwards, or as soon as the budget is used up."""
        staging = Staging(self._writer, self._operation.budget, self._plan.files)
        self._staging = staging
        work: list[Future[None]] = []

        def begin() -> None:
            if not work:
                checked.result()
                self._writing = True
                work.append(start(self.write()))

        staging.begin = begin
        try:
            staging.stage_all()
            begin()
        except BaseException as error:
            staging.stop(error)
            if work:
                work[0].cancel()
                wait(work, timeout=60)
            staging.release()
            raise
        self._meter.staged(self._plan.total_bytes)
        emit("staged", self._verb, str(self._operation.url), bytes=self._plan.total_bytes)
        return work[0]

    async def write(self) -> None:
        """Claim, write, commit, clean; if anything fails, leave nothing.

        From the commit on nothing can be interrupted: a snapshot that is there must not be taken back.
        """
        self._writing = True
        emit("start", self._verb, str(self._operation.url), bytes=self._plan.total_bytes)
        commit.enter(self._save_id)
        claim = commit.claim_path(self._save_id)
        try:
            await self._storage.put(claim, b"", expect=ABSENT)
            data = await self._write_files()
            await uninterrupted(self._commit(claim, data))
            await uninterrupted(commit.clean(self._storage, self._save_id))
        except BaseException as error:
            if await uninterrupted(self._abort()):
                emit("failed", self._verb, str(self._operation.url), error=error)
            else:
                error.add_note("the snapshot was committed all the same, but may not survive a loss of power")
            raise
        finally:
            commit.leave(self._save_id)
            await uninterrupted(self._operation.close())
            self._meter.close()
        seconds = time.perf_counter() - self._began
        emit("committed", self._verb, str(self._operation.url), bytes=self._plan.total_bytes, seconds=round(seconds, 3))

    async def _write_files(self) -> bytes:
        """Write the data files; the manifest that describes them."""
        files = self._plan.files
        locations = [location(self._save_id, RANK, n, "safetensors") for n in range(len(files))]
        written = await self._writer.write(files, locations, self._staging)
        document, chunks = await in_thread(self._describe, written)
        if chunks:
            await write_small(
                self._storage, location(self._save_id, RANK, len(files), "bin"), chunks, self._meter.wrote
            )
        for where, data in await in_thread(self._split, document):
            await write_small(self._storage, where, [data], lambda _: None)
        return await in_thread(encode, document)

    def _describe(self, written: Sequence[Written]) -> tuple[Document, list[bytes | bytearray]]:
        """The manifest, and the content of the `.bin` file that it points into."""
        flat = self._flat
        entries = flat.entries
        binary = location(self._save_id, RANK, len(written), "bin")
        chunks: list[bytes | bytearray] = []
        position = 0

        def append(data: bytes | bytearray) -> tuple[int, int]:
            nonlocal position
            chunks.append(data)
            position += len(data)
            return position - len(data), position

        for blob in flat.blobs:
            data_range = append(blob.data)
            table = _table(blob.data)
            blocks = (binary, *append(table)) if table else None
            digest = of_range(table) if table else of_bytes(blob.data)
            entries[blob.path] = e.ObjectEntry(binary, data_range, blob.serializer, blob.obj_type, digest, blocks)
        boxes: dict[int, list[e.Shard]] = {}
        leaves = flat.leaves
        for each in written:
            where = each.location
            for index, (extent, digest) in enumerate(zip(each.file.extents, each.digests, strict=True)):
                leaf = leaves[extent.leaf]
                table = each.tables.get(index, b"")
                stored = e.TensorEntry(
                    where,
                    (extent.begin, extent.end),
                    leaf.dtype,
                    leaf.shape if extent.box is None else extent.box.sizes,
                    digest,
                    (binary, *append(table)) if table else None,
                )
                if extent.box is not None:
                    boxes.setdefault(extent.leaf, []).append(e.Shard(extent.box.offsets, extent.box.sizes, stored))
                elif leaf.wrap is not None:
                    leaf.wrap(leaf.path, stored)
                else:
                    entries[leaf.path] = stored
        for number, shards in boxes.items():
            leaf = leaves[number]
            shards.sort(key=lambda shard: shard.offsets)
            chunked = e.ChunkedTensorEntry(leaf.dtype, leaf.shape, shards)
            if leaf.wrap is not None:
                leaf.wrap(leaf.path, chunked)
            else:
                entries[leaf.path] = chunked
        for path, owner in flat.ties.items():
            entries[path] = entries[owner]
        self._mark_replicated(entries)
        files = {
            each.location: FileEntry(each.file.size, len(each.file.header), of_range(each.file.header))
            for each in written
        }
        if chunks:
            files[binary] = FileEntry(position)
        manifest: dict[str, Any] = {f"{RANK}/{path}": entry for path, entry in entries.items()}
        created = datetime.now(UTC).isoformat(timespec="seconds")
        return (
            Document(
                FORMAT,
                VERSION,
                self._save_id,
                WORLD,
                created,
                self._plan.structure,
                self._metadata,
                files,
                [],
                manifest,
            ),
            chunks,
        )

    def _mark_replicated(self, entries: Mapping[str, Any]) -> None:
        if self._replicated:
            matches = matcher(self._replicated)
            for path, entry in entries.items():
                if hasattr(entry, "replicated") and matches(path):
                    entry.replicated = True

    def _split(self, document: Document) -> list[tuple[str, bytes]]:
        """Put what each rank alone needs of a large manifest into files of their own."""
        document.manifest, parts = cut(document.manifest, WORLD)
        made = []
        for rank, entries in parts:
            data = encode(Part(entries))
            where = f"data/{self._save_id}-{rank}.json"
            document.parts.append(PartEntry(where, len(data), of_range(data), [rank], len(entries)))
            made.append((where, data))
        return made

    async def _commit(self, claim: str, data: bytes) -> None:
        try:
            await self._storage.commit(claim, METADATA, data, expect=self._expect)
        except StorageConflictError as error:
            raise SnapshotExistsError(
                f"{self._operation.url}: another take was faster, or cleaned this one away; nothing of this one is "
                f"left ({error})"
            ) from error

    async def _abort(self) -> bool:
        """Take back what was written, unless it was committed all the same; whether it was not.

        A fault in that is no more than a leftover, which the next take cleans.
        """
        if await commit.standing(self._storage) == self._save_id:
            return False
        with contextlib.suppress(SnapshotError):
            mine = [path for path in await commit.ours(self._storage) if commit.save_id_of(path) == self._save_id]
            await self._storage.delete([*mine, commit.claim_path(self._save_id)])
        return True


def _table(data: bytes | bytearray) -> bytes:
    """The digests of a blob's blocks; nothing where one is enough."""
    running = RunningDigest()
    running.update(memoryview(data))
    return running.finish()[1]
