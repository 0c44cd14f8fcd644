"""A local version from a store: downloaded files, or the files of a local version with deltas applied."""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from snapshot.errors import CorruptSnapshotError
from snapshot.events import emit
from snapshot.formats.hugging_face import INDEX, LONGEST_FILE, WEIGHTS, check_file_name, read_header
from snapshot.io.aio import gather_limited, in_thread
from snapshot.io.session import Session
from snapshot.io.storage import Buffer, Storage
from snapshot.io.system import CLOEXEC
from snapshot.io.url import URL
from snapshot.manifest.document import LONGEST_HEADER
from snapshot.manifest.entries import TensorEntry
from snapshot.plan.layout import group_in_order
from snapshot.tensors.digest import BLOCK, SIZE, block_digest, digest_bytes, digest_range, digest_table
from snapshot.tensors.split_zstd import load_zstd, new_compressor
from snapshot_publish.store import (
    LONGEST_INDEX,
    IndexDetails,
    VersionIndex,
    decode_index,
    encode_index,
    version_name,
)

# Deltas of tensors: zstd of the XOR of two versions' bytes, with the checksum and the digest of the new bytes.
#
# All stages work on one block at a time while it is in a CPU cache. They release the interpreter lock.

Bytes = npt.NDArray[np.uint8]
LARGEST_WINDOW = 1 << 27
"""Maximum memory that a frame of another publisher may ask for."""
WINDOWS = 1 << 24
"""Maximum memory that the frames of several deltas may ask for together. One that asks for more is applied alone."""
SMALL_WINDOW = 1 << 20
"""Decompressors with larger windows are not kept for the next tensor."""


def checksum_text(checksum: int) -> str:
    """Return an Adler-32 checksum as it is stored."""
    return f"{checksum:08x}"


@dataclass(frozen=True, slots=True)
class TensorSums:
    """The digest of a tensor's bytes, and the digests of its blocks."""

    digest: str
    table: bytes


@dataclass(frozen=True, slots=True)
class EncodedDelta:
    """The result of a comparison of two versions of a tensor."""

    sums: TensorSums
    compressed: bytes | bytearray = b""
    """One zstd frame with its content size. Empty if the tensor is unchanged."""
    checksum: int = 0
    """Adler-32 of the new bytes, if the tensor changed."""


def sum_blocks(table: Sequence[bytes]) -> TensorSums:
    """Return the sums of a tensor from the digests of its blocks. There is at least one."""
    joined = b"".join(table)
    return TensorSums(f"xxh3:{joined.hex()}" if len(table) == 1 else digest_table(joined), joined)


def sum_bytes(data: Bytes) -> TensorSums:
    """Return the sums of a tensor's bytes."""
    view = _view(data)
    return sum_blocks([block_digest(view[begin : begin + BLOCK]) for begin in range(0, max(1, len(view)), BLOCK)])


class DeltaEncoder:
    """Encodes tensors one after the other, with one compressor and one buffer. Each thread has its own."""

    def __init__(self) -> None:
        self._zstd = new_compressor()
        self._changes = np.empty(BLOCK, np.uint8)
        self._zeros = memoryview(bytes(BLOCK))

    def encode(self, new: Bytes, base: Bytes, base_sums: TensorSums) -> EncodedDelta:
        """Compare a tensor's bytes with its base. `base_sums` are those of the base.

        Blocks whose digests are equal count as unchanged, and are not read a second time.
        """
        view, known = _view(new), base_sums.table
        table: list[bytes] = []
        parts: list[bytes] = []
        stream: Any = None
        checksum = 1
        for number, begin in enumerate(range(0, len(new), BLOCK)):
            block = view[begin : begin + BLOCK]
            table.append(block_digest(block))
            unchanged = table[-1] == known[number * SIZE : (number + 1) * SIZE]
            if stream is None:
                if unchanged:
                    continue
                stream = self._zstd.compressobj(size=len(new))
                for _ in range(number):
                    parts.append(stream.compress(self._zeros))
                checksum = zlib.adler32(view[:begin], checksum)
            if unchanged:
                parts.append(stream.compress(self._zeros[: len(block)]))
            else:
                changes = self._changes[: len(block)]
                _xor(new[begin : begin + BLOCK], base[begin : begin + BLOCK], changes)
                parts.append(stream.compress(_view(changes)))
            checksum = zlib.adler32(block, checksum)
        if stream is None:
            return EncodedDelta(base_sums)
        parts.append(stream.flush())
        return EncodedDelta(sum_blocks(table), bytearray().join(parts), checksum)


def _view(data: Bytes) -> memoryview:
    buffer: Buffer = data
    return memoryview(buffer)


def _xor(left: Bytes, right: Bytes, out: Bytes) -> None:
    """Compute the XOR of two arrays, in words if their length allows it."""
    if len(left) % 8 == 0:
        with suppress(ValueError):  # not aligned
            left, right, out = left.view(np.uint64), right.view(np.uint64), out.view(np.uint64)
    np.bitwise_xor(left, right, out=out)


class Source(Protocol):
    """A function that fills a buffer with the bytes from an offset on."""

    def __call__(self, offset: int, buffer: memoryview) -> None: ...


class DeltaDecoder:
    """Applies deltas to tensors, one tensor after the other. Each thread has its own."""

    def __init__(self) -> None:
        self._streams: list[Any] = []
        """A decompressor for each delta of a tensor: a stream occupies its own."""
        self._block = np.empty(BLOCK, np.uint8)
        self._changes = np.empty(BLOCK, np.uint8)

    def apply(
        self,
        nbytes: int,
        read: Source,
        deltas: Sequence[bytes | bytearray | memoryview],
        write: Source,
        *,
        checksum: str | None = None,
        digest: str | None = None,
    ) -> str:
        """Apply deltas to a tensor, block by block. `read` and `write` may use the same memory.

        Return the digest of the result. Raise `CorruptSnapshotError` if a delta has another size, or if the result has
        another checksum or digest than expected.
        """
        while len(self._streams) < len(deltas):
            self._streams.append(load_zstd().ZstdDecompressor(max_window_size=LARGEST_WINDOW))
        streams = [_open_image(zstd, delta, nbytes) for zstd, delta in zip(self._streams, deltas, strict=False)]
        table: list[bytes] = []
        actual = 1
        for begin in range(0, nbytes, BLOCK):
            length = min(BLOCK, nbytes - begin)
            block, changes = self._block[:length], self._changes[:length]
            view = _view(block)
            read(begin, view)
            for stream in streams:
                _fill(stream, _view(changes))
                _xor(block, changes, block)
            if checksum is not None:
                actual = zlib.adler32(view, actual)
            table.append(block_digest(view))
            write(begin, view)
        for stream in streams:
            _expect_end(stream)
        if any(_window_of(delta, nbytes) > SMALL_WINDOW for delta in deltas):
            self._streams.clear()  # each keeps the memory of its largest window
        if checksum is not None and checksum_text(actual) != checksum:
            raise CorruptSnapshotError(f"its checksum must be {checksum}, got {checksum_text(actual)}")
        found = sum_blocks(table).digest if table else digest_range(b"")
        if digest is not None and found != digest:
            raise CorruptSnapshotError(f"its digest must be {digest}, got {found}")
        return found


def group_by_windows(deltas: Sequence[bytes | bytearray], nbytes: int) -> list[tuple[list[bytes | bytearray], int]]:
    """Return the deltas of a tensor in groups that are applied together, each with the memory of its windows."""
    groups: list[tuple[list[bytes | bytearray], int]] = []
    for delta in deltas:
        window = _window_of(delta, nbytes)
        if groups and groups[-1][1] + window <= WINDOWS:
            groups[-1] = [*groups[-1][0], delta], groups[-1][1] + window
        else:
            groups.append(([delta], window))
    return groups or [([], 0)]


def _window_of(delta: bytes | bytearray | memoryview, nbytes: int) -> int:
    """Return the memory that the decompression of a frame takes."""
    window: int = _parameters_of(delta).window_size
    return min(window, max(nbytes, BLOCK))


def _parameters_of(delta: bytes | bytearray | memoryview) -> Any:
    """Return the parameters of a frame, by its header."""
    module = load_zstd()
    try:
        return module.get_frame_parameters(delta)
    except module.ZstdError as error:
        raise CorruptSnapshotError(f"its delta is not a zstd frame: {error}") from error


def _open_image(zstd: Any, delta: bytes | bytearray | memoryview, nbytes: int) -> Any:
    """Return a stream of a frame's contents. Its size is checked first, and more is never decompressed."""
    size = _parameters_of(delta).content_size
    if size not in (nbytes, load_zstd().CONTENTSIZE_UNKNOWN):
        raise CorruptSnapshotError(f"its delta must have {nbytes} bytes, got {size}")
    return zstd.stream_reader(delta, read_size=BLOCK)


def _fill(stream: Any, buffer: memoryview) -> None:
    try:
        while len(buffer):
            count = stream.readinto(buffer)
            if not count:
                raise CorruptSnapshotError("its delta ends before the tensor does")
            buffer = buffer[count:]
    except load_zstd().ZstdError as error:
        raise CorruptSnapshotError(f"its delta cannot be decompressed: {error}") from error


def _expect_end(stream: Any) -> None:
    try:
        longer = stream.read(1)
    except load_zstd().ZstdError as error:
        raise CorruptSnapshotError(f"its delta cannot be decompressed: {error}") from error
    if longer:
        raise CorruptSnapshotError("its delta is longer than the tensor")


# A local version from a store

PIECE = 8 << 20
"""Bytes of each request of a download."""
HEADERS = 16
"""Files whose headers are read at once."""
RUN = 64 << 20
"""Bytes of the deltas of one tensor that are applied at once. A longer delta is applied alone."""
LONGEST_RUN = 64
"""The maximum number of deltas that are applied at once: each needs a decompressor."""


@dataclass(slots=True)
class _Tensor:
    """A tensor of the new version: its place, and the deltas that lead to it."""

    file: str
    begin: int
    end: int
    digest: str | None
    checksum: str | None = None
    deltas: list[tuple[str, int, int]] = field(default_factory=list)
    """The path in the store and the range of each delta."""


@dataclass(slots=True)
class _Shard:
    """A file of the new version."""

    size: int
    data: int
    """Offset of the first tensor, after the header."""


class VersionBuilder:
    """Builds one version in a folder aside."""

    def __init__(self, session: Session, chain: Sequence[VersionIndex], aside: Path, base: Path | None) -> None:
        """`chain`: the versions to apply, in order. Without a local `base`, the first one is complete."""
        self._session, self._storage = session, session.storage
        self._chain, self._aside, self._base = chain, aside, base
        self._tensors: dict[str, _Tensor] = {}
        self._shards: dict[str, _Shard] = {}
        self._digests: dict[str, str] = {}
        self._decoders: SimpleQueue[DeltaDecoder] = SimpleQueue()
        self.received = 0
        """Bytes that were read from the store."""

    async def build(self) -> None:
        """Write all files of the version, and verify them."""
        extra = await (self._describe_remote() if self._base is None else self._describe_local())
        for index in self._chain:
            if index.base is not None:
                await self._add_deltas(index)
        changed = {tensor.file for tensor in self._tensors.values() if tensor.deltas}
        with ExitStack() as stack:
            inputs, outputs = await in_thread(self._create_files, stack, changed)
            if self._base is None:
                await self._download(outputs)
                inputs = outputs
            await self._apply(inputs, outputs)
        await in_thread(self._write_index, extra)

    def _create_files(self, stack: ExitStack, changed: set[str]) -> tuple[dict[str, int], dict[str, int]]:
        """Open the files of the base and the new files, which have their headers. Link the files without changes."""
        inputs: dict[str, int] = {}
        outputs: dict[str, int] = {}
        for name, shard in self._shards.items():
            if self._base is not None and name not in changed:
                with _reading(self._base):
                    _link(self._base / name, self._aside / name)
                continue
            outputs[name] = _open(stack, self._aside / name, os.O_RDWR | os.O_CREAT | os.O_EXCL)
            os.ftruncate(outputs[name], shard.size)
            if self._base is not None:
                with _reading(self._base):
                    inputs[name] = _open(stack, self._base / name, os.O_RDONLY)
                _write_all(outputs[name], 0, memoryview(os.pread(inputs[name], shard.data, 0)))
        return inputs, outputs

    # What the version has

    async def _describe_remote(self) -> dict[str, tuple[int, str]]:
        """Read the headers of a complete version, and fetch its small files."""
        full = self._chain[0]
        folder = version_name(full.version)
        await self._describe(self._storage, f"{folder}/", full)
        files = full.details.files or dict.fromkeys(await self._find_extra(full), (-1, ""))

        async def fetch(name: str) -> tuple[str, tuple[int, str]]:
            data = await self._storage.get(f"{folder}/{name}", limit=LONGEST_INDEX)
            found = len(data), digest_bytes(data)
            if files[name] not in ((-1, ""), found):
                raise CorruptSnapshotError(
                    f"{self._storage.url.join(folder)}/{name}: must be {files[name]}, got {found}"
                )
            self.received += len(data)
            await in_thread((self._aside / name).write_bytes, data)
            return name, found

        return dict(await gather_limited(files, fetch))

    async def _find_extra(self, full: VersionIndex) -> list[str]:
        """Return the small files of a version of another publisher, which its index does not name."""
        folder = version_name(full.version)
        names = [path.removeprefix(f"{folder}/") for path in await self._storage.list(f"{folder}/", recursive=False)]
        weights = {*full.files.values(), INDEX}

        async def choose(name: str) -> str | None:
            if name in weights or name.startswith(".") or name.endswith("/"):
                return None
            size = (await self._storage.stat(f"{folder}/{name}")).size
            if name.endswith(WEIGHTS) or size > LONGEST_FILE:
                emit("left_out", "pull", str(self._storage.url.join(f"{folder}/{name}")), size=size)
                return None
            return check_file_name(name, self._storage.url.join(folder))

        return [name for name in await gather_limited(names, choose, HEADERS) if name is not None]

    async def _describe_local(self) -> dict[str, tuple[int, str]]:
        """Read the headers of the local base, and link its small files."""
        assert self._base is not None
        with _reading(self._base):
            index = await self._read_base(self._base)
            for name in index.details.files:
                _link(self._base / name, self._aside / name)
        self._digests = dict(index.details.digests)
        return index.details.files

    async def _read_base(self, folder: Path) -> VersionIndex:
        async with Session(URL.parse(os.fspath(folder)), None, durable=False) as local:
            index = decode_index(await local.storage.get(INDEX, limit=LONGEST_INDEX), 0, folder / INDEX)
            await self._describe(local.storage, "", index)
        return index

    async def verify(self) -> None:
        """Compare all tensors and small files of the base with their digests. Raise if one differs."""
        assert self._base is not None
        with _reading(self._base):
            await self._verify(self._base)

    async def _verify(self, base: Path) -> None:
        index = await self._read_base(base)
        for name, (_, digest) in index.details.files.items():
            if digest_bytes(await in_thread((base / name).read_bytes)) != digest:
                raise CorruptSnapshotError(f"{base / name}: its digest must be {digest}")
        with ExitStack() as stack:
            inputs = {name: _open(stack, base / name, os.O_RDONLY) for name in self._shards}

            async def check(name: str) -> None:
                await in_thread(self._process, name, inputs[self._tensors[name].file], None, ())

            await gather_limited(self._tensors, check, self._session.settings.thread_count())

    async def _describe(self, storage: Storage, prefix: str, index: VersionIndex) -> None:
        for file, names, entries, _, size in await _read_headers(storage, prefix, index):
            if entries.keys() != set(names):
                raise CorruptSnapshotError(f"{storage.url.join(prefix + file)}: its tensors are not those of the index")
            begin = min((entry.byte_range[0] for entry in entries.values()), default=size)
            self._shards[file] = _Shard(size, begin)
            for name, entry in entries.items():
                digest = index.details.digests.get(name)
                self._tensors[name] = _Tensor(file, *entry.byte_range, digest)

    async def _add_deltas(self, index: VersionIndex) -> None:
        """Read the headers of a delta's files, and check that its tensors fit."""
        folder = version_name(index.version)
        for file, names, entries, checksums, _ in await _read_headers(self._storage, f"{folder}/", index):
            where = self._storage.url.join(f"{folder}/{file}")
            for name in names:
                entry, tensor = entries.get(name), self._tensors.get(name)
                if entry is None or tensor is None:
                    lacking = "the file" if entry is None else "the base"
                    raise CorruptSnapshotError(f"{where}: {name[:200]!r} is missing in {lacking}")
                begin, end = entry.byte_range
                nbytes = tensor.end - tensor.begin
                if entry.dtype != "uint8" or end - begin > nbytes + nbytes // 100 + 1000:
                    raise CorruptSnapshotError(
                        f"{where}: {name[:200]!r}: the delta of {nbytes} bytes must be U8 and not longer, got "
                        f"{entry.dtype} of {end - begin} bytes"
                    )
                try:
                    tensor.checksum = checksum_text(int(checksums[name], 16))
                except (KeyError, ValueError) as error:
                    raise CorruptSnapshotError(f"{where}: {name[:200]!r} has no valid checksum") from error
                tensor.digest = index.details.digests.get(name)
                tensor.deltas.append((f"{folder}/{file}", begin, end))

    # Bytes

    async def _download(self, outputs: Mapping[str, int]) -> None:
        folder = version_name(self._chain[0].version)
        pieces = [
            (name, begin, min(PIECE, shard.size - begin))
            for name, shard in self._shards.items()
            for begin in range(0, shard.size, PIECE)
        ]
        buffers: list[memoryview] = []

        async def fetch(piece: tuple[str, int, int]) -> None:
            name, begin, length = piece
            buffer = buffers.pop() if buffers else memoryview(bytearray(PIECE))
            await self._storage.read_into(f"{folder}/{name}", begin, [buffer[:length]])
            await in_thread(_write_all, outputs[name], begin, buffer[:length])
            self.received += length
            buffers.append(buffer)

        await gather_limited(pieces, fetch, self._storage.limits.parallel_parts)

    async def _apply(self, inputs: Mapping[str, int], outputs: Mapping[str, int]) -> None:
        """Apply the deltas of each tensor, or copy it, and verify it."""
        in_place = self._base is None
        alone, wide = asyncio.Lock(), asyncio.Lock()  # one long delta, and one large window, is in memory at a time
        names = [name for name, tensor in self._tensors.items() if tensor.file in outputs]
        names.sort(key=lambda name: self._tensors[name].begin - self._tensors[name].end)

        async def apply(name: str) -> None:
            tensor = self._tensors[name]
            source, target = inputs[tensor.file], outputs[tensor.file]
            sizes = [max(end - begin, RUN // LONGEST_RUN) for _, begin, end in tensor.deltas]
            runs = group_in_order(sizes, RUN) if sizes else []
            if not runs:
                work = partial(self._process, name, source, None if in_place else target, ())
                self._digests[name] = await in_thread(work)
            for run in runs:
                places = [tensor.deltas[number] for number in run]
                nbytes = sum(end - begin for _, begin, end in places)
                async with alone if nbytes > RUN else nullcontext():
                    deltas = [await self._fetch(*place) for place in places]
                    with self._naming(name):
                        groups = group_by_windows(deltas, tensor.end - tensor.begin)
                    del deltas
                    while groups:
                        group, window = groups.pop(0)
                        last = run is runs[-1] and not groups
                        async with wide if window > WINDOWS else nullcontext():
                            work = partial(self._process, name, source, target, group, last=last)
                            self._digests[name] = await in_thread(work)
                        del group, work
                        source = target

        await gather_limited(names, apply, self._session.settings.thread_count())

    async def _fetch(self, path: str, begin: int, end: int) -> bytearray:
        delta = bytearray(end - begin)
        await self._storage.read_into(path, begin, [delta])
        self.received += len(delta)
        return delta

    @contextmanager
    def _naming(self, name: str) -> Iterator[None]:
        """Name the version and the tensor in an error."""
        try:
            yield
        except CorruptSnapshotError as error:
            where = self._storage.url.join(version_name(self._chain[-1].version)) if self._chain else self._base
            raise CorruptSnapshotError(f"{where}: {name[:200]!r}: {error}") from error

    def _process(
        self, name: str, source: int, target: int | None, deltas: Sequence[bytes | bytearray], *, last: bool = True
    ) -> str:
        """Apply deltas to a tensor. Without deltas, copy it, or only read it. After the last ones, compare its sums."""
        tensor = self._tensors[name]
        checksum, digest = (tensor.checksum, tensor.digest) if last else (None, None)

        def read(offset: int, buffer: memoryview) -> None:
            position = tensor.begin + offset
            while len(buffer):
                try:
                    count = os.preadv(source, [buffer], position)
                except OSError as error:
                    raise CorruptSnapshotError(f"its file cannot be read: {error.strerror}") from error
                if not count:
                    raise CorruptSnapshotError("its file is too short")
                buffer, position = buffer[count:], position + count

        def write(offset: int, buffer: memoryview) -> None:
            if target is not None:
                _write_all(target, tensor.begin + offset, buffer)

        decoder = DeltaDecoder() if self._decoders.empty() else self._decoders.get()
        try:
            with self._naming(name):
                return decoder.apply(tensor.end - tensor.begin, read, deltas, write, checksum=checksum, digest=digest)
        finally:
            self._decoders.put(decoder)

    def _write_index(self, extra: dict[str, tuple[int, str]]) -> None:
        newest = self._chain[-1]
        details = IndexDetails(newest.details.publisher, newest.details.step, newest.details.time)
        details.files = extra
        details.digests = {name: self._digests[name] for name in self._tensors if name in self._digests}
        files = {name: tensor.file for name, tensor in self._tensors.items()}
        total = sum(tensor.end - tensor.begin for tensor in self._tensors.values())
        data = encode_index(newest.version, None, files, details, total_size=total)
        (self._aside / INDEX).write_bytes(data)


async def _read_headers(
    storage: Storage, prefix: str, index: VersionIndex
) -> list[tuple[str, list[str], dict[str, TensorEntry], dict[str, str], int]]:
    """Return each file of a version, with its tensors by the index, its header, the header's metadata, and its size."""
    by_file = index.by_file()

    async def read(file: str) -> tuple[str, list[str], dict[str, TensorEntry], dict[str, str], int]:
        size = (await storage.stat(prefix + file)).size
        entries, metadata = await read_header(storage, prefix + file, size, LONGEST_HEADER)
        return file, by_file[file], entries, metadata, size

    return await gather_limited(by_file, read, HEADERS)


@contextmanager
def _reading(base: Path) -> Iterator[None]:
    """Raise `CorruptSnapshotError` if the local base cannot be read: then the whole version is downloaded."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EMFILE, errno.ENFILE):
            raise
        raise CorruptSnapshotError(f"{base}: cannot be read: {error}") from error


def _open(stack: ExitStack, path: Path, flags: int) -> int:
    descriptor = os.open(path, flags | CLOEXEC, 0o644)
    stack.callback(os.close, descriptor)
    return descriptor


def _write_all(descriptor: int, offset: int, buffer: memoryview) -> None:
    while len(buffer):
        count = os.pwrite(descriptor, buffer, offset)
        buffer, offset = buffer[count:], offset + count


def _link(source: Path, target: Path) -> None:
    """Give a file a second name; copy it if the file system has no hard links."""
    try:
        os.link(source, target)
    except FileNotFoundError:
        raise
    except OSError:
        shutil.copyfile(source, target)
