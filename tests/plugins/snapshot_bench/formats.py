"""Checkpoints of other libraries and of trainers: saved through DCP, read, loaded, merged, converted and exported."""

from __future__ import annotations

import asyncio
import importlib.util
import math
import os
import shutil
import statistics
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.futures import Future

import snapshot
from snapshot import Snapshot, StateDict, Target
from snapshot.interop.dcp import SnapshotReader, SnapshotWriter
from snapshot.io.loop import run
from snapshot.io.session import Session
from snapshot.io.url import URL, options_from_environment
from snapshot.testing import recording
from snapshot.text import size_text
from snapshot_bench.raw_io import StaysCached, drop, read_streams
from snapshot_bench.rounds import Workspace
from snapshot_bench.systems import DCP, TorchSave
from snapshot_bench.workloads import CASES, Payload, plain_payload
from tests.plugins.snapshot_bench.harness import (
    BUFFER,
    Work,
    draw_rows,
    folder_of,
    measure_process,
    quiet,
    start_ranks,
    time_rows,
    transfer,
)

BUDGET = 256 << 20

# `torch.distributed.checkpoint` with torch's storage, with this library's, and with one that does nothing. The last one
# shows the time of planning, which is torch's own with any storage.


class Nothing(StorageWriter):
    """Storage that writes nothing."""

    def reset(self, checkpoint_id: Any = None) -> None: ...

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None: ...

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        done: Future[list[WriteResult]] = Future()
        done.set_result([])
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None: ...

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return True


class DCPWithNothing(DCP):
    """DCP that writes nothing."""

    def writer(self, where: str, durable: bool) -> StorageWriter:
        return Nothing()


class DCPWithSnapshot(DCP):
    """DCP with this library's storage."""

    def writer(self, where: str, durable: bool) -> SnapshotWriter:
        return SnapshotWriter(where, durable=durable)

    def reader(self, where: str) -> SnapshotReader:
        return SnapshotReader(where)


def compare_dcp(where: Workspace, scale: float, rounds: int) -> Iterator[str]:
    folder = folder_of(where)
    for name in ("small", "large"):
        case = CASES[name]
        where.check_room(3 * case.nbytes(scale), f"{name}: dcp.save")
        payload = case.make(scale)
        systems = {"nothing": DCPWithNothing(payload), "torch": DCP(payload), "snapshot": DCPWithSnapshot(payload)}
        yield f"\n{name}: {case.about}, {size_text(payload.nbytes())}"
        with quiet():
            for durable in (True, False):
                rows = {key: partial(each.save, str(folder / "saved"), durable) for key, each in systems.items()}
                seconds = time_rows(rows, rounds, after=lambda _: shutil.rmtree(folder / "saved", ignore_errors=True))
                yield f"  dcp.save{', durable' if durable else ''}"
                yield from _indent(draw_rows(seconds))
                theirs, ours, planning = (statistics.median(seconds[key]) for key in ("torch", "snapshot", "nothing"))
                above = (theirs - planning) / max(ours - planning, 1e-9)
                yield f"    torch takes {theirs / ours:.1f} x as long as snapshot; without planning {above:.1f} x"
            del systems["nothing"]
            for key, each in systems.items():
                each.save(str(folder / key))
            loads: dict[str, Work] = {key: partial(each.load, str(folder / key)) for key, each in systems.items()}
            yield "  dcp.load"
            yield from _indent(draw_rows(_time_restores(loads, payload, rounds)))
        where.empty()


def _indent(lines: Iterator[str]) -> Iterator[str]:
    return (f"  {line}" for line in lines)


def _time_restores(rows: dict[str, Work], payload: Payload, rounds: int) -> dict[str, list[float]]:
    """Time restores into a payload's tensors, and compare each with the saved values."""
    expected = payload.digest()

    def check(name: str) -> None:
        if payload.digest() != expected:
            raise ValueError(f"{name} did not restore the saved values")

    return time_rows(rows, rounds, before=lambda _: payload.wipe(), after=check)


# Checkpoints of other libraries, read by them and by this library: bytes that are read for a list, the time of a
# restore, and the memory of a conversion.


def compare_formats(where: Workspace, scale: float, rounds: int) -> Iterator[str]:
    folder = folder_of(where)
    for name in ("train", "small"):
        case = CASES[name]
        where.check_room(4 * case.nbytes(scale), f"{name}: formats")
        payload = plain_payload("m", case.make(scale).tensors)
        yield f"\n{name}: {case.about}, {size_text(payload.nbytes())}"
        dcp, pt, file = DCP(payload), TorchSave(payload), folder / "torch/state.pt"
        with quiet():
            dcp.save(str(folder / "dcp"))
            pt.save(str(folder / "torch"))
            yield from _list(folder / "dcp", (folder / "dcp/.metadata").stat().st_size)
            yield from _list(file)
            restore = partial(_restore, {"m": StateDict(payload.app_state["m"])})
            rows: dict[str, Work] = {
                "dcp.load": partial(dcp.load, str(folder / "dcp")),
                "snapshot, of dcp": partial(restore, folder / "dcp"),
                "torch.load(mmap)": partial(pt.load, str(folder / "torch")),
                "snapshot, of torch": partial(restore, file),
            }
            yield from draw_rows(_time_restores(rows, payload, rounds), payload.nbytes())
        if name == "train":
            yield from _convert(folder)
        where.empty()


def _restore(state: dict[str, StateDict], path: Path) -> None:
    Snapshot(path).restore(state)


def _list(path: Path, read: int = 0) -> Iterator[str]:
    with recording() as log:
        began = time.perf_counter()
        count = len(Snapshot(f"recording+file://{path}").get_manifest())
        seconds = time.perf_counter() - began
    read += log.nbytes("read_into")
    yield f"  list {path.name}: {count:,} entries in {seconds:.3f} s, {size_text(read)} read"


def _convert(folder: Path) -> Iterator[str]:
    work = "Snapshot(source).convert(Target(target, to, durable=False), memory_budget_bytes=budget)"
    seconds, peaks = {}, {}
    for to, target in (("snapshot", "s"), ("safetensors", "s.safetensors"), ("torch", "t.pt"), ("dcp", "d")):
        source, name = str(folder / "dcp"), f"convert to {to}"
        taken, nbytes = measure_process(work, source=source, target=str(folder / target), to=to, budget=BUDGET)
        seconds[name], peaks[name] = [taken], f"{nbytes >> 20} MiB more memory (budget {BUDGET >> 20} MiB)"
    yield from draw_rows(seconds, more=peaks)


# Tensors of a checkpoint into new memory, by this library and by others. `load_file` of safetensors maps the file, and
# reads nothing until a tensor is used. So it is also measured with each page touched once.

LANES = 2


def model(scale: float, seed: int = 0) -> dict[str, torch.Tensor]:
    """Return the weights of a language model in bfloat16: 1 GiB, times `scale`."""
    generator = torch.Generator().manual_seed(seed)
    width = 64 * round(32 * min(1.0, (8 * scale) ** 0.5)) or 64
    rows = {"q": width, "k": width // 4, "v": width // 4, "o": width}
    rows |= dict.fromkeys(("gate", "up", "down"), 4 * width)
    made = {}
    for layer in range(max(1, round(8 * scale))):
        for name, count in rows.items():
            weight = torch.randn(count, width, generator=generator).bfloat16()
            made[f"model.layers.{layer}.{name}.weight"] = weight
        made[f"model.layers.{layer}.norm.weight"] = torch.ones(width, dtype=torch.bfloat16)
    made["model.embed.weight"] = torch.randn(round(32000 * scale), width, generator=generator).bfloat16()
    return made


def compare_loads(where: Workspace, scale: float, rounds: int) -> Iterator[str]:
    folder = Path(where.text())
    short = {f"adapter.{number}": torch.full((32, 32), float(number)) for number in range(round(20_000 * scale))}
    for title, tensors in (("weights of a language model", model(scale)), ("short tensors", short)):
        nbytes = sum(tensor.nbytes for tensor in tensors.values())
        yield f"\n{title}: {len(tensors):,} tensors, {size_text(nbytes)}"
        if not where.local:
            yield from _time_loads("object store", _remote_loads(where, tensors), nbytes, rounds)
        else:
            rows = _local_loads(folder, tensors)
            yield from _time_loads("warm", rows, nbytes, rounds)
            try:
                drop(folder)
            except StaysCached as error:
                yield f"  cold: left out: {error}"
            else:
                yield from _time_loads("cold", rows, nbytes, max(1, rounds // 2), lambda _: drop(folder))
        where.empty()


def _time_loads(
    state: str, rows: dict[str, Work], nbytes: int, rounds: int, before: Callable[[str], object] | None = None
) -> Iterator[str]:
    failed: dict[str, str] = {}
    seconds = time_rows(rows, rounds, before=before, failed=failed)
    yield f"  {state}"
    yield from _indent(draw_rows(seconds, nbytes, beside=next(iter(rows))))
    yield from (f"    left out: {name}: {reason[:100]}" for name, reason in failed.items())


def _local_loads(folder: Path, tensors: dict[str, torch.Tensor]) -> dict[str, Work]:
    file, saved = folder / "model.safetensors", folder / "snapshot"
    save_file(tensors, file)
    Snapshot(file).convert(saved)

    def new() -> list[torch.Tensor]:
        return [torch.empty(tensor.nbytes, dtype=torch.uint8) for tensor in tensors.values()]

    held = [memory.zero_() for memory in new()]
    return {
        "raw read into resident memory": lambda: read_streams(held, file, LANES),
        "raw read into new memory": lambda: read_streams(new(), file, LANES),
        "snapshot.load(safetensors)": lambda: snapshot.load(file),
        "snapshot.load(snapshot)": lambda: snapshot.load(saved),
        "snapshot.load(snapshot, verify=False)": lambda: snapshot.load(saved, verify=False),
        "safetensors load_file (mapped)": lambda: load_file(file),
        "safetensors load_file, pages touched": lambda: _touch(load_file(file)),
        "safetensors load_file, copied": lambda: {name: each.clone() for name, each in load_file(file).items()},
        **_peers(file),
    }


def _touch(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    for tensor in tensors.values():
        tensor.view(-1).view(torch.uint8)[:: os.sysconf("SC_PAGESIZE")].sum()
    return tensors


def _peers(file: Path) -> dict[str, Work]:
    """Return the loaders of other libraries that are installed, each into its own memory."""
    rows: dict[str, Work] = {}
    if importlib.util.find_spec("fastsafetensors"):
        from fastsafetensors import fastsafe_open  # type: ignore[import-not-found, unused-ignore]

        def fast() -> Any:
            opened = fastsafe_open(filenames=[str(file)], nogds=True, device="cpu")  # it owns the tensors' memory
            return opened, {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 - not a dict

        rows["fastsafetensors"] = fast
    if importlib.util.find_spec("runai_model_streamer"):
        from runai_model_streamer import SafetensorsStreamer  # type: ignore[import-not-found, unused-ignore]

        def streamed() -> Any:
            with SafetensorsStreamer() as streamer:
                streamer.stream_file(str(file))
                return dict(streamer.get_tensors())

        rows["run:ai model streamer"] = streamed
    return rows


def _remote_loads(where: Workspace, tensors: dict[str, torch.Tensor]) -> dict[str, Work]:
    url, options = where.text(), options_from_environment()
    saved, file = f"{url}/snapshot", f"{url}/model.safetensors"
    Snapshot.take(saved, {"model": StateDict(tensors)}, storage_options=options)
    Snapshot(saved, storage_options=options).convert(Target(file, "safetensors", storage_options=options))
    return {
        "raw ranges of the same client": lambda: _read_ranges(where.url, options),
        "snapshot.load(safetensors)": lambda: snapshot.load(Snapshot(file, storage_options=options)),
        "snapshot.load(snapshot)": lambda: snapshot.load(Snapshot(saved, storage_options=options)),
    }


def _read_ranges(url: URL, options: dict[str, Any]) -> list[bytearray]:
    """Read one file in ranges, with the storage alone."""

    async def read() -> list[bytearray]:
        size = (await storage.stat("model.safetensors")).size
        free = asyncio.Semaphore(storage.limits.parallel_parts)

        async def one(begin: int) -> bytearray:
            made = bytearray(min(BUFFER, size - begin))
            async with free:
                await storage.read_into("model.safetensors", begin, [made])
            return made

        return await asyncio.gather(*(one(begin) for begin in range(0, size, BUFFER)))

    with Session(url, options) as session:
        storage = session.storage
        return run(read())


# Three checkpoints that are merged, compared with a raw read of three and a durable write of one.

COUNT = 3
MERGE_BUDGET = 64 << 20
RAW = "raw read and write"


def compare_merges(where: Workspace, scale: float, rounds: int) -> Iterator[str]:
    folder = folder_of(where)
    sources = [folder / f"{number}.safetensors" for number in range(COUNT)]
    for number, file in enumerate(sources):
        save_file(model(scale, seed=number), file)
    nbytes = sources[0].stat().st_size
    Snapshot(sources[-1]).convert(folder / "snapshot")
    sources.pop().unlink()
    files = [*sources, *(folder / "snapshot/data").iterdir()]
    sources.append(folder / "snapshot")
    peaks: dict[str, int] = {}

    def write() -> None:
        buffer = memoryview(bytes(BUFFER))
        with open(folder / "raw", "wb", buffering=0) as file:
            for begin in range(0, nbytes, BUFFER):
                file.write(buffer[: nbytes - begin])
            os.fsync(file.fileno())

    def merge(to: str, target: str) -> float:
        work = "merge(sources, Target(target, to, overwrite=True), options=MergeOptions(memory_budget_bytes=budget))"
        names: dict[str, Any] = {"sources": list(map(str, sources)), "target": str(folder / target)}
        seconds, peak = measure_process(work, **names, to=to, budget=MERGE_BUDGET)
        peaks[f"merge to {to}"] = max(peaks.get(f"merge to {to}", 0), peak)
        return seconds

    rows: dict[str, Work] = {
        "raw read": lambda: transfer(files),
        "raw write": write,
        "merge to safetensors": partial(merge, "safetensors", "out.safetensors"),
        "merge to snapshot": partial(merge, "snapshot", "out"),
    }
    yield f"\n{COUNT} checkpoints of {size_text(nbytes)} in bfloat16, durable, budget {size_text(MERGE_BUDGET)}"
    for state, before in (("warm", None), ("cold", lambda _: drop(folder))):
        peaks.clear()
        try:
            seconds = time_rows(rows, rounds, before=before)
        except StaysCached as error:
            yield f"  cold: left out: {error}"
            return
        seconds = {RAW: [sum(each) for each in zip(seconds["raw read"], seconds["raw write"], strict=True)], **seconds}
        yield f"  {state}"
        more = {name: f"peak {peak >> 20} MiB" for name, peak in peaks.items()}
        yield from _indent(draw_rows(seconds, beside=dict.fromkeys(peaks, RAW), more=more))


# Exports of a sharded state to Hugging Face's layout with a tensor map.

WIDTH, INNER, VOCABULARY = 2048, 5504, 16384
HEADS, GROUPS = 16, 4
CONFIG = {
    "model_type": "llama",
    "num_attention_heads": HEADS,
    "num_key_value_heads": GROUPS,
    "vocab_size": VOCABULARY,
}
EXPORT = "Snapshot(source).convert(Target(target, 'safetensors'), memory_budget_bytes=budget{more})"
EXPORTS = {
    "raw read and write": "transfer(sorted(Path(source, 'data').iterdir()), Path(target), durable=True)",
    "without a map": EXPORT.format(more=""),
    "torchtitan to Hugging Face": EXPORT.format(more=", map=TensorMap.load('torchtitan-hf', config)"),
    "Megatron to Hugging Face": EXPORT.format(more=", map=TensorMap.load('megatron-hf', config)"),
}


def compare_maps(where: Workspace, scale: float, rounds: int) -> Iterator[str]:
    """Save both layouts with two ranks, and yield the lines of their exports."""
    folder = folder_of(where)
    layers = max(1, round(40 * scale))
    with start_ranks(2) as ranks:
        for name in ("titan", "megatron"):
            ranks.run(_save_layout, str(folder / name), layers)
    nbytes = sum(path.stat().st_size for path in (folder / "titan/data").iterdir())
    yield f"two ranks, {layers} layers, {size_text(nbytes)} in bfloat16; a budget of {BUDGET >> 20} MiB"
    target = folder / "made"
    peaks: dict[str, int] = {}

    def export(name: str) -> float:
        source = str(folder / ("megatron" if "Megatron" in name else "titan"))
        small = "Snapshot(source).convert(Target(target + '-small', 'safetensors'), select=['model/*norm.weight'])"
        names: dict[str, Any] = {"source": source, "target": str(target), "config": CONFIG, "budget": BUDGET}
        seconds, peak = measure_process(EXPORTS[name], prepare=small, **names)
        peaks[name] = max(peaks.get(name, 0), peak)
        return seconds

    def remove(_: str) -> None:
        shutil.rmtree(target)
        shutil.rmtree(f"{target}-small")

    rows = {name: partial(export, name) for name in EXPORTS}
    seconds = time_rows(rows, rounds, before=lambda _: drop(folder), after=remove)
    more = {name: f"peak {peak >> 20} MiB, over the budget {(peak - BUDGET) >> 20}" for name, peak in peaks.items()}
    yield from draw_rows(seconds, nbytes, beside="raw read and write", more=more)


def _save_layout(folder: str, layers: int) -> None:
    mesh = init_device_mesh("cpu", (2,))
    state = {name: distribute_tensor(value, mesh, [Shard(0)]) for name, value in _layout(folder, layers)}
    Snapshot.take(folder, {"model": StateDict(**state)})


def _layout(folder: str, layers: int) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of a layout, with random values that do not matter here."""
    head = WIDTH // HEADS
    words, square, norm = (VOCABULARY, WIDTH), (WIDTH, WIDTH), (WIDTH,)
    if folder.endswith("titan"):
        shapes = {"tok_embeddings.weight": words, "lm_head.weight": words, "norm.weight": norm}
        above, layer_shapes = "layers", {
            "attention.qkv_linear.wq": square,
            "attention.qkv_linear.wk": (GROUPS * head, WIDTH),
            "attention.qkv_linear.wv": (GROUPS * head, WIDTH),
            "attention.wo": square,
            "feed_forward.w1": (INNER, WIDTH),
            "feed_forward.w3": (INNER, WIDTH),
            "feed_forward.w2": (WIDTH, INNER),
            "attention_norm": norm,
            "ffn_norm": norm,
        }  # fmt: skip
    else:
        shapes = {"embedding.word_embeddings.weight": words, "output_layer.weight": words}
        shapes["decoder.final_layernorm.weight"] = norm
        above, layer_shapes = "decoder.layers", {
            "self_attention.linear_qkv": ((HEADS + 2 * GROUPS) * head, WIDTH),
            "self_attention.linear_proj": square,
            "mlp.linear_fc1": (2 * INNER, WIDTH),
            "mlp.linear_fc2": (WIDTH, INNER),
            "input_layernorm": norm,
            "pre_mlp_layernorm": norm,
        }  # fmt: skip
    for layer in range(layers):
        shapes |= {f"{above}.{layer}.{name}.weight": shape for name, shape in layer_shapes.items()}
    for name, shape in shapes.items():
        yield name, torch.randn(shape, dtype=torch.float32).bfloat16()


# Checkpoints of trainers: conversions by this library, by the trainer's own tool, and a raw read and write.

RANKS = 4
LAYERS = 24
OURS, THEIRS = "snapshot", "zero_to_fp32"
DEEPSPEED = importlib.util.find_spec("deepspeed") is not None


def make_shapes(scale: float) -> OrderedDict[str, torch.Size]:
    """Return the shapes of a model's parameters: about 400 MiB in float32, times `scale`."""
    width = max(8, round(1024 * math.sqrt(scale)))
    shapes = {"w1": (width, 2 * width), "w2": (2 * width, width), "norm": (width,), "odd": (37, 7)}
    return OrderedDict(
        (f"layers.{layer}.{name}", torch.Size(shape)) for layer in range(LAYERS) for name, shape in shapes.items()
    )


def write_zero(folder: Path, stage: int, scale: float) -> None:
    """Write a checkpoint as DeepSpeed does with ZeRO, with moments of Adam."""
    shapes = make_shapes(scale)
    generator = torch.Generator().manual_seed(0)
    whole = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    module = {name: each.bfloat16() if stage == 2 else torch.empty(0) for name, each in whole.items()}
    head = {"module": OrderedDict(module), "param_shapes": [shapes], "buffer_names": [], "shared_params": {}}
    head |= {"frozen_param_shapes": {}, "frozen_param_fragments": {}, "ds_version": "0.19.8"}
    folder.mkdir(parents=True)
    (folder.parent / "latest").write_text(folder.name)
    if stage == 2:
        torch.save(head, folder / "mp_rank_00_model_states.pt")
        flat = torch.cat([each.flatten() for each in whole.values()])
        parts = [each.clone() for each in flat.split(-(-flat.numel() // RANKS))]
    else:
        pieces: list[list[torch.Tensor]] = [[] for _ in range(RANKS)]
        for each in whole.values():
            step = -(-each.numel() // RANKS)
            padded = torch.cat([each.flatten(), torch.zeros(step * RANKS - each.numel())])
            for rank, held in enumerate(pieces):
                held.append(padded[rank * step : (rank + 1) * step])
        parts = [torch.cat(held) for held in pieces]
        for rank in range(RANKS):
            torch.save(head, folder / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt")
    for rank, part in enumerate(parts):
        inner = {
            "state": {0: {"exp_avg": part / 2, "exp_avg_sq": part.square(), "step": torch.tensor(3.0)}},
            "param_groups": [{"lr": 0.001, "params": [0]}],
        }
        own: dict[str, Any] = {"zero_stage": stage, "partition_count": RANKS if stage == 3 else [RANKS]}
        if stage == 3:
            own |= {"fp32_flat_groups": [part], "optimizer_state_dict": inner}
        else:
            own |= {"single_partition_of_fp32_groups": [part], "base_optimizer_state": inner}
        torch.save({"optimizer_state_dict": own}, folder / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")


def compare_foreign(where: Workspace, scale: float, rounds: int) -> Iterator[str]:
    folder = folder_of(where)
    if not DEEPSPEED:
        yield "  zero_to_fp32 is left out: pip install deepspeed"
    for stage in (2, 3):
        nbytes = sum(map(math.prod, make_shapes(scale).values())) * 4
        where.check_room(8 * nbytes, f"ZeRO {stage}")
        write_zero(folder / "run" / "step", stage, scale)
        sizes = f"{size_text(nbytes)} of weights, and moments; budget {size_text(BUDGET)}"
        yield f"\nZeRO {stage} of {RANKS} ranks: {sizes}"
        yield from _convert_weights(folder, nbytes, rounds)
        where.empty()


def _convert_weights(folder: Path, nbytes: int, rounds: int) -> Iterator[str]:
    source, peaks = folder / "run", dict[str, int]()
    weights = folder / "weights"
    weights.write_bytes(bytes(nbytes))

    def convert(select: list[str], name: str) -> float:
        work = "Snapshot(source).convert(Target(target, durable=False), select=select, memory_budget_bytes=budget)"
        target = folder / ("out.safetensors" if len(select) == 1 else "out")
        names = {"source": str(source), "target": str(target), "select": select, "budget": BUDGET}
        seconds, peaks[name] = measure_process(work, **names)
        return seconds

    def join() -> float:
        work = "with redirect_stdout(sys.stderr): convert(source, target, safe_serialization=True)"
        prepare = (
            "from contextlib import redirect_stdout\nwith redirect_stdout(sys.stderr): "
            "from deepspeed.utils.zero_to_fp32 import convert_zero_checkpoint_to_fp32_state_dict as convert"
        )
        seconds, peaks[THEIRS] = measure_process(
            work, prepare=prepare, source=str(source), target=str(folder / "theirs")
        )
        return seconds

    def clear(_: object) -> None:
        (folder / "out.safetensors").unlink(missing_ok=True)
        for each in ("out", "theirs", "raw"):
            shutil.rmtree(folder / each, ignore_errors=True)

    def clear_cold(name: object) -> None:
        clear(name)
        drop(folder)

    moments = f"{OURS}, with moments"
    rows: dict[str, Work] = {
        RAW: lambda: transfer([weights], folder / "raw"),
        OURS: partial(convert, ["model/**"], OURS),
        moments: partial(convert, ["model/**", "optim/**"], moments),
    }
    if DEEPSPEED:
        rows[THEIRS] = join
    for state, before in (("warm", clear), ("cold", clear_cold)):
        try:
            seconds = time_rows(rows, rounds, before=before)
        except StaysCached as error:
            yield f"  cold: left out: {error}"
            return
        yield f"  {state}"
        more = {name: f"peak {peak >> 20} MiB" for name, peak in peaks.items()}
        yield from (f"  {line}" for line in draw_rows(seconds, beside=dict.fromkeys(peaks, RAW), more=more))
