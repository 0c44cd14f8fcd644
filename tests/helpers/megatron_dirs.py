"""Megatron-core's own directories, written by the real library on a host without an accelerator; and sharded state
dicts of a small model in any split, for it and for us to save."""

import contextlib
import multiprocessing
import os
import queue
import warnings
from dataclasses import dataclass
from unittest import mock

import torch
import torch.distributed as dist

LAYERS, HIDDEN, INNER, VOCABULARY = 4, 6, 8, 13


def megatron():
    """`megatron.core.dist_checkpointing`. What it warns of when it is imported concerns nobody here. To be called in a
    process that is not the tests' own."""
    # it hands its fused kernels to the compiler, whose own import takes longer than all tests together
    with mock.patch.dict(os.environ, TORCHDYNAMO_DISABLE="1"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from megatron.core import dist_checkpointing
    return dist_checkpointing


@dataclass(frozen=True)
class Split:
    """How a job of `tensor * pipeline * data` ranks splits the model, and what this rank is in it."""

    tensor: int = 1
    pipeline: int = 1
    data: int = 1
    rank: int = 0
    padded: int = 16
    """The length of the vocabulary, as this split needs it."""

    @property
    def tensor_rank(self):
        return self.rank % self.tensor

    @property
    def data_rank(self):
        return self.rank // self.tensor % self.data

    @property
    def stage(self):
        return self.rank // self.tensor // self.data


def whole(key, *shape):
    """A tensor of the model, in one piece: each key and element has a number of its own."""
    numbers = torch.arange(torch.Size(shape).numel(), dtype=torch.float32).view(shape)
    return numbers + 1000 * (sum(map(ord, key)) % 97)


def cut(tensor, dim, rank, world):
    return tensor.chunk(world, dim)[rank].contiguous()


def sharded(split, *, blank=False, dtype=torch.float32):
    """What a Megatron model would give for `dist_checkpointing.save`: embeddings on the first stage, of which the
    vocabulary is padded; layers that are counted over all stages; a gated layer that a factory splits in two; norms and
    objects that all ranks of tensor parallelism hold; objects that are plain values; and common state. `blank` gives
    what a restore is to fill.

    The tensors that are in it are returned as well, in order.
    """
    megatron()
    from megatron.core.dist_checkpointing.mapping import LocalNonpersistentObject, ShardedObject, ShardedTensor
    from megatron.core.transformer.mlp import apply_swiglu_sharded_factory

    tensor, rank, live = split.tensor, split.tensor_rank, []
    replica = (0, rank, split.data_rank)

    def held(value):
        live.append(torch.full_like(value, -1.0, dtype=dtype) if blank else value.to(dtype))
        return live[-1]

    model = {}
    if split.stage == 0:
        words = torch.nn.functional.pad(whole("words", VOCABULARY, HIDDEN), (0, 0, 0, split.padded - VOCABULARY))
        model["embedding.weight"] = ShardedTensor.from_rank_offsets(
            "embedding.weight", held(cut(words, 0, rank, tensor)), (0, rank, tensor),
            replica_id=(0, 0, split.data_rank), allow_shape_mismatch=True,
        )  # fmt: skip
    own = LAYERS // split.pipeline
    for local in range(own):
        layer = split.stage * own + local
        axis = (0, layer, LAYERS)
        out = held(cut(whole(f"out{layer}", HIDDEN, INNER), 1, rank, tensor))
        norm = held(whole(f"norm{layer}", HIDDEN))
        gate, up = (cut(whole(f"{name}{layer}", INNER, HIDDEN), 0, rank, tensor) for name in ("gate", "up"))
        model[f"layers.{local}.out.weight"] = ShardedTensor.from_rank_offsets(
            "layers.out.weight", out, axis, (2, rank, tensor), replica_id=(0, 0, split.data_rank), prepend_axis_num=1
        )
        model[f"layers.{local}.norm.weight"] = ShardedTensor.from_rank_offsets(
            "layers.norm.weight", norm, axis, replica_id=replica, prepend_axis_num=1
        )
        fused = ShardedTensor.from_rank_offsets(
            "layers.fc1.weight", held(torch.cat([gate, up])), axis, (1, rank, tensor),
            replica_id=(0, 0, split.data_rank), prepend_axis_num=1,
        )  # fmt: skip
        model[f"layers.{local}.fc1.weight"] = apply_swiglu_sharded_factory(fused, (axis,))
        state = {"layer": layer, "amax": torch.full((3,), float(layer))}
        model[f"layers.{local}._extra_state"] = ShardedObject(
            "layers._extra_state", None if blank else state, (LAYERS,), (layer,), replica
        )
    if split.stage == split.pipeline - 1:
        model["final_norm.weight"] = ShardedTensor.from_rank_offsets(
            "final_norm.weight", held(whole("final", HIDDEN)), replica_id=replica
        )
    plain = {"dict": {"a": 1}, "list": [1, 2], "one": [[7]], "int": 5, "none": None}
    objects = {
        name: ShardedObject(
            f"plain.{name}", ["here"] if blank else held, (1,), (0,), (split.stage, rank, split.data_rank)
        )
        for name, held in plain.items()
    }
    optimizer = {
        "param_groups": [{"lr": 0.0 if blank else 0.125, "betas": (0.9, 0.95), "params": [0, 1]}],
        "empty": {},
        "step": torch.tensor(0.0 if blank else 5.0),
        "here": LocalNonpersistentObject(f"of rank {split.rank}"),
    }
    made = {"model": model, "plain": objects, "optimizer": optimizer, "iteration": 0 if blank else 7}
    if not blank:
        made["tokens"] = [3, 4]
    return made, live


@contextlib.contextmanager
def without_cuda():
    """What Megatron asks of an accelerator only to wait for it, or to place one number there; and the processes that
    it starts to write files."""
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    # it would start an interpreter to hold the queue, in which nobody puts anything but this process
    with (
        mock.patch.object(torch.cuda, "synchronize"),
        mock.patch.object(torch.cuda, "current_device", return_value=torch.device("cpu")),
        mock.patch.object(filesystem_async, "_results_queue", queue.Queue()),
        mock.patch.dict(multiprocessing.current_process()._config, daemon=False),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        yield


def save(state, folder, **options):
    """`dist_checkpointing.save`, called by all ranks: what is in `folder` then is what a Megatron job leaves there."""
    checkpointing = megatron()
    if dist.get_rank() == 0:
        os.makedirs(folder, exist_ok=True)
    dist.barrier()
    with without_cuda():
        checkpointing.save(state, str(folder), **options)


def load(state, folder, **options):
    """`dist_checkpointing.load`, called by all ranks."""
    checkpointing = megatron()
    with without_cuda():
        return checkpointing.load(state, str(folder), **options)


def write_directory(folder, tensor=2, pipeline=1, padded=16):
    """Write a directory of the small model, on all ranks of the default process group. For `pool.run`."""
    save(sharded(Split(tensor, pipeline, 1, dist.get_rank(), padded))[0], folder)
    return sorted(os.listdir(folder))
