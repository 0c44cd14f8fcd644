"""Cost of planning and merging with thousands of ranks: their code runs one by one in one process, without data.

Of more than a thousand ranks only some run. Those between send the records of their neighbour, so the leader has equal
work. Replicated entries differ from rank to rank, so there all ranks run.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import msgspec
import torch

from snapshot.distributed.exchange import Exchange
from snapshot.distributed.group import Ranks
from snapshot.io.storage import Limits
from snapshot.io.system import gc_paused
from snapshot.manifest.document import PartEntry, encode
from snapshot.manifest.parts import ManifestPart, decode_part, encode_own_part
from snapshot.plan.consensus import ConsensusReply, RankRecord, compare_records, settle_details
from snapshot.plan.layout import FilePlan, make_plan, name_data_file
from snapshot.save.describe import RankManifest, build_document, build_entries, encode_for_leader
from snapshot.save.rank_share import RankShare
from snapshot.save.replication import Replication, ReplicationRules, agree_on_replicas, bytes_of
from snapshot.save.writer import WrittenFile
from snapshot.state.flatten import Flattened
from snapshot.state.leaves import Leaf
from snapshot.state.sharded import LocalPiece, Shards
from snapshot.tensors.digest import BLOCK, SIZE, count_blocks, digest_bytes, digest_range
from snapshot.tensors.geometry import Box
from snapshot.text import size_text

ENTRIES = 2000
WORLDS = (8, 128, 1024, 8192)
DIGEST = "xxh3:" + "0" * 32
SAVE = "0" * 12
SAMPLE = 1024
"""Approximate number of ranks that run, if they do not depend on each other."""


class Cost(NamedTuple):
    """Cost of one simulated take."""

    kind: str
    world: int
    entries: int
    """Entries of all ranks."""
    leader: float
    """Seconds on the leader: its own plan, all records and details, and the merge of all parts."""
    rank: float
    """Mean seconds of any other rank to plan its files."""
    again: float
    """Mean seconds of any other rank if the last take had the same structure."""
    document: int
    """Bytes of the manifest that every rank reads."""
    part: int
    """Mean bytes of the part of the manifest that concerns one rank."""


class _Asked(Exception):
    """Raised instead of an exchange, after the record of the rank is known."""


class _Simulated(Exchange):
    """Exchange whose responses are computed in advance."""

    def __init__(self, rank: int, world: int, ranks: Ranks) -> None:
        self.ranks, self.rank, self.world = ranks, rank, world
        self.answers: list[Any] = []
        self.said: list[Any] = []

    @property
    def alone(self) -> bool:
        return False

    def agree(self, mine: Any, lead: Callable[[list[Any]], Any], kind: type[Any], answer: type[Any]) -> Any:
        self.said.append(msgspec.msgpack.decode(msgspec.msgpack.encode(mine), type=kind))
        if not self.answers:
            raise _Asked
        return self.answers.pop(0)


def _weights() -> list[tuple[str, tuple[int, ...]]]:
    """Return the first ENTRIES tensors of a transformer."""
    shapes = {"attention.qkv": (3072, 1024), "attention.out": (1024, 1024), "up": (4096, 1024), "down": (1024, 4096)}
    named: list[tuple[str, tuple[int, ...]]] = [("embedding", (50_000, 1024))]
    layer = 0
    while len(named) < ENTRIES:
        named += [(f"layers.{layer}.{name}.weight", shape) for name, shape in shapes.items()]
        named += [(f"layers.{layer}.{name}.bias", shape[:1]) for name, shape in shapes.items()]
        layer += 1
    return named[:ENTRIES]


def _leaf(flat: Flattened, path: str, shape: tuple[int, ...]) -> None:
    tensor = torch.empty(shape, device="meta")
    flat.entries[path] = None
    flat.leaves.append(Leaf(path, tensor, "float32", shape, tensor.nbytes))


def _replicated(rank: int, world: int) -> Flattened:
    """Return a state that is equal on all ranks."""
    flat = Flattened()
    flat.add("model", {"step": 1})
    for name, shape in _weights():
        _leaf(flat, f"model/{name}", shape)
    return flat


def _sharded(rank: int, world: int) -> Flattened:
    """Return a state whose tensors are split by rows over all ranks."""
    flat = Flattened()
    flat.add("model", {"step": 1})
    ranks = tuple(range(world))
    for name, shape in _weights():
        rows = -(-shape[0] // world)
        begin, end = min(rank * rows, shape[0]), min(rank * rows + rows, shape[0])
        box = Box((begin, *(0,) * (len(shape) - 1)), (end - begin, *shape[1:]))
        pieces = [LocalPiece(box, torch.empty(box.sizes, device="meta"), (rank,))] if end > begin else []
        path = f"model/{name}"
        flat.entries[path] = None
        layout = f"DTensor float32 {shape} {world} S(0)"
        flat.shards[path] = Shards("DTensor", torch.float32, shape, pieces, ranks, None, ["S(0)"], layout, False)
    return flat


def _stages(rank: int, world: int) -> Flattened:
    """Return a stage of a pipeline: no two ranks have the same structure."""
    flat = Flattened()
    flat.add("model", {"step": 1})
    for name, shape in _weights():
        _leaf(flat, f"model/stage{rank}.{name}", shape[-1:])
    return flat


KINDS: dict[str, tuple[Callable[[int, int], Flattened], list[str]]] = {
    "replicated": (_replicated, ["**"]),
    "sharded": (_sharded, []),
    "stages": (_stages, []),
}


def _digest(leaves: Sequence[Leaf]) -> list[str]:
    return [digest_bytes(bytes_of(leaf)) for leaf in leaves]


class _Simulation:
    def __init__(self, kind: str, world: int) -> None:
        self.make, self.globs = KINDS[kind]
        self.kind, self.world = kind, world
        self.step = 1 if kind == "replicated" else max(1, world // SAMPLE)
        self.answers: list[Any] = []
        self.leader = 0.0

    def speak(self, rank: int, ranks: Ranks, answers: list[Any]) -> tuple[Any, Replication | None, Flattened, float]:
        """Return the next record of a rank, given the responses so far."""
        flat = self.make(rank, self.world)
        exchange = _Simulated(rank, self.world, ranks)
        exchange.answers = list(answers)
        shared = None
        began = time.perf_counter()
        with contextlib.suppress(_Asked):
            shared = agree_on_replicas(exchange, flat, ReplicationRules([], self.globs, ranks), _digest)
        return exchange.said[-1], shared, flat, time.perf_counter() - began

    def agree(self, members: tuple[int, ...]) -> None:
        """Run all exchanges."""
        while True:
            said = []
            for rank in members:
                if rank % self.step == 0 or rank == 1:
                    said.append(self.speak(rank, Ranks(rank, members), self.answers)[0])
                elif isinstance(said[-1], RankRecord) and self.kind == "stages":
                    said.append(msgspec.structs.replace(said[-1], candidates=f"{said[-1].candidates}{rank}"))
                else:
                    said.append(said[-1])
            began = time.perf_counter()
            asked = isinstance(said[0], RankRecord)
            answer: Any = compare_records(said) if asked else settle_details(said, self.answers[-1].speakers)
            self.leader += time.perf_counter() - began
            self.answers.append(answer)
            if isinstance(answer, ConsensusReply) and answer.settled:
                return

    def plan(self, rank: int, ranks: Ranks, answers: list[Any]) -> tuple[RankManifest, float]:
        """Return the manifest of a rank, and the seconds to plan it."""
        _, shared, flat, seconds = self.speak(rank, ranks, answers)
        assert shared is not None
        began = time.perf_counter()
        portion = RankShare(_Simulated(rank, self.world, ranks), flat, shared)
        plan = make_plan(portion.leaves, 0, Limits(), 2, staged_bytes=0)
        seconds += time.perf_counter() - began
        written = [
            WrittenFile(file, name_data_file(SAVE, rank, n, "safetensors"), [DIGEST] * len(file.extents), _tables(file))
            for n, file in enumerate(plan.files)
        ]
        return build_entries(
            portion,
            written,
            name_data_file(SAVE, rank, len(written), "bin"),
            structure="",
            metadata=msgspec.Raw(b"{}"),
        ), seconds

    def hear(self, tells: bytes) -> ManifestPart:
        """Decode the part of a rank, as the leader does."""
        began = time.perf_counter()
        part = decode_part(tells, PartEntry("", len(tells), digest_range(tells), [0], -1), "")
        self.leader += time.perf_counter() - began
        return part

    def run(self) -> Cost:
        members = tuple(range(self.world))
        self.agree(members)
        seconds: list[float] = []
        again: list[float] = []
        heard: list[ManifestPart] = []
        sizes: list[int] = []
        entries = 0
        first: RankManifest | None = None
        described: RankManifest | None = None
        tells = b""
        for rank in members:
            if rank % self.step and rank > 1:
                assert described is not None
                sizes.append(sizes[-1])
                entries += len(described.own) + len(described.shared)
                heard.append(self.hear(tells))
                continue
            ranks = Ranks(rank, members)
            described, once = self.plan(rank, ranks, self.answers)
            if rank % max(1, self.world // 8) == 0:
                again.append(self.plan(rank, ranks, self.answers[-1:])[1])
            sizes.append(len(encode_own_part(described.own).data) if described.cut else 0)
            entries += len(described.own) + len(described.shared)
            if first is None:
                first = described
                self.leader += once
                continue
            seconds.append(once)
            tells = encode_for_leader(described)
            heard.append(self.hear(tells))
        assert first is not None
        parts = [PartEntry(f"data/{SAVE}-{rank}.json", size, DIGEST, [rank], size) for rank, size in enumerate(sizes)]
        began = time.perf_counter()
        document = encode(build_document(first, SAVE, parts, heard, newest=False))
        self.leader += time.perf_counter() - began
        mean = sum(seconds) / len(seconds)
        return Cost(
            self.kind, self.world, entries, self.leader, mean, sum(again) / len(again), len(document),
            sum(sizes) // len(sizes),
        )  # fmt: skip


def _tables(file: FilePlan) -> dict[int, bytes]:
    sizes = enumerate(extent.end - extent.begin for extent in file.extents)
    return {number: bytes(SIZE * count_blocks(size)) for number, size in sizes if size > BLOCK}


def simulate(worlds: Sequence[int]) -> Iterator[str]:
    """Yield the lines of a Markdown table with the costs of takes."""
    head = "ranks | entries | leader, s | other ranks, ms | known structure, ms | manifest | part"
    yield f"| {ENTRIES:,} entries a rank | {head} |"
    yield "|---|---|---|---|---|---|---|---|"
    for kind in KINDS:
        for world in worlds:
            with gc_paused():
                cost = _Simulation(kind, world).run()
            yield (
                f"| {kind} | {world:,} | {cost.entries:,} | {cost.leader:.2f} | {cost.rank * 1e3:.0f} | "
                f"{cost.again * 1e3:.0f} | {size_text(cost.document)} | {size_text(cost.part)} |"
            )
