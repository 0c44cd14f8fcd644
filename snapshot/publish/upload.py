"""The files of one rank's share of a version: whole tensors, or deltas, encoded by several threads."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from queue import SimpleQueue

import msgspec
import torch

from snapshot.aio import gather_limited, in_thread
from snapshot.formats.hugging_face import SHARD
from snapshot.plan.layout import FilePlan, group_in_order, plan_exact_file
from snapshot.publish.delta import DeltaEncoder, EncodedDelta, TensorSums, checksum_text
from snapshot.publish.image import HostImage
from snapshot.publish.version import version_name
from snapshot.runtime.session import Session
from snapshot.save.staging import Stager
from snapshot.save.writer import Writer, WrittenFile
from snapshot.state.leaves import Leaf

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
