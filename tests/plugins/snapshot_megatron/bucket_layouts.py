"""Buckets of Megatron-core's distributed optimizer, laid out by its rules for any split, without it.

Parameters are laid out in the reverse order of their modules. Each begins at a multiple of 64, and each bucket at one
of what data parallelism needs. A bucket ends after the parameter that makes it long enough, and around a tied
embedding. Each rank writes its share, cut at the ends of parameters and of gaps.
"""

import dataclasses
import itertools
import math
import random

import torch

from snapshot.manifest.entries import Shard, ShardedTensorEntry, TensorEntry

GATED = "gated"
LAYER = [
    ("self_attention.linear_qkv.layer_norm_weight", lambda h, f: (h,), None),
    ("self_attention.linear_proj.weight", lambda h, f: (h, h), 1),
    ("self_attention.linear_proj.bias", lambda h, f: (h,), None),
    ("self_attention.linear_qkv.weight", lambda h, f: (2 * h, h), 0),
    ("self_attention.linear_qkv.bias", lambda h, f: (2 * h,), 0),
    ("mlp.linear_fc1.weight", lambda h, f: (2 * f, h), GATED),
    ("mlp.linear_fc1.bias", lambda h, f: (2 * f,), GATED),
    ("mlp.linear_fc2.weight", lambda h, f: (h, f), 1),
    ("mlp.linear_fc2.bias", lambda h, f: (h,), None),
]
"""Name, shape and cut of the parameters of a dense layer, in the order of its modules."""
MIXTURE = [
    ("mlp.router.weight", lambda h, f: (4, h), None),
    ("mlp.experts.experts.linear_fc1.weight", lambda h, f: (2 * f, h), GATED),
    ("mlp.experts.experts.linear_fc2.weight", lambda h, f: (h, f), 1),
]
STATES = ("param", "exp_avg", "exp_avg_sq")


@dataclasses.dataclass
class Job:
    tensor: int = 1
    stages: int = 1
    chunks: int = 1
    data: int = 1
    expert: int = 1
    experts: int = 0
    """Number of experts of each layer; 0 for dense layers."""
    order: str = "expert"
    tied: bool = False
    bucket: int | None = None
    spans: tuple = (2,)
    """Number of layers of each part of the pipeline, in the order of the layers."""
    hidden: int = 16
    inner: int = 24
    words: int = 32
    numbered: bool = False
    """Each layer has names of its own, instead of an axis of each tensor."""

    def layer(self):
        return [*LAYER[:5], *MIXTURE] if self.experts else LAYER

    def weights(self):
        """Return key -> (shape without layers and experts, axes before, cut), in the order of the modules."""
        layers, found = sum(self.spans), {"embedding.word_embeddings.weight": ((self.words, self.hidden), (), 0)}
        for number in range(layers) if self.numbered else [None]:
            for name, shape, cut in self.layer():
                key = f"decoder.layers.{name}" if number is None else f"decoder.layers.{number}.{name}"
                axes = (() if self.numbered else (layers,)) + ((self.experts,) if ".experts." in name else ())
                found[key] = shape(self.hidden, self.inner), axes, cut
        found["decoder.final_layernorm.weight"] = (self.hidden,), (), None
        if not self.tied:
            found["output_layer.weight"] = (self.words, self.hidden), (), 0
        return found

    def modules(self, part, expert_rank, kinds):
        """Yield (key, index) of the parameters of one rank, in the order of its modules."""
        begin = sum(self.spans[:part])
        if part == 0 and "dense" in kinds:
            yield "embedding.word_embeddings.weight", ()
        for layer in range(begin, begin + self.spans[part]):
            lead = () if self.numbered else (layer,)
            prefix = f"decoder.layers.{layer}." if self.numbered else "decoder.layers."
            own = self.experts // self.expert
            own = range(expert_rank * own, (expert_rank + 1) * own)
            those = [name for name, _, _ in self.layer() if ".experts." in name]
            pairs = [(name, each) for each in own for name in those]
            if self.order == "name":
                pairs = [(name, each) for name in those for each in own]
            for name, _, _ in self.layer():
                if ".experts." not in name and "dense" in kinds:
                    yield prefix + name, lead
            if "experts" in kinds:
                yield from ((prefix + name, (*lead, each)) for name, each in pairs)
        if part == len(self.spans) - 1 and "dense" in kinds:
            yield "decoder.final_layernorm.weight", ()
            if not self.tied:
                yield "output_layer.weight", ()
            elif self.stages > 1:
                yield "embedding.word_embeddings.weight", ()


def cut(tensor, axis, rank, ranks):
    """Return what a rank of tensor parallelism has: of a gated layer, a share of both halves."""
    if axis is None or ranks == 1:
        return tensor
    if axis != GATED:
        return tensor.chunk(ranks, axis)[rank]
    return torch.cat([half.chunk(ranks, 0)[rank] for half in tensor.chunk(2, 0)])


def boxes(shape, axis, ranks):
    """Return the boxes of a tensor, as its ranks have it."""
    parts = 1 if axis is None else ranks * (2 if axis == GATED else 1)
    axis, found = 0 if axis in (None, GATED) else axis, []
    size = shape[axis] // parts
    for part in range(parts):
        offsets = tuple(part * size if each == axis else 0 for each in range(len(shape)))
        found.append((offsets, tuple(size if each == axis else full for each, full in enumerate(shape))))
    return found


def pad(number, multiple):
    return -(-number // multiple) * multiple


def fill_buffer(parameters, job, ranks):
    """Return the buckets of a buffer: (flat tensor without its padding, ends of parts)."""
    multiple, found, begin, cursor, ends, values = math.lcm(ranks, 128), [], 0, 0, set(), []

    def close(end):
        nonlocal begin, cursor, ends, values
        flat = torch.zeros(end - begin)
        for at, value in values:
            flat[at - begin : at - begin + value.numel()] = value.flatten()
        share = pad(end - begin, multiple) // ranks
        cuts = set(range(0, end - begin, share))
        found.append((flat, sorted({0, end - begin} | cuts | {at - begin for at in ends if at <= end})))
        begin = cursor = begin + pad(end - begin, multiple)
        ends, values = set(), []

    for value, is_shared in reversed(parameters):
        start = pad(cursor, 64)
        if is_shared and values:
            close(start)
            start = begin
        values.append((start, value))
        cursor = start + value.numel()
        ends |= {start, cursor, pad(cursor, 64)}
        if is_shared or (job.bucket and cursor - begin >= job.bucket):
            close(cursor)
    if values:
        close(cursor)
    return found


def make(job, seed=0):
    """Return (whole tensors by state and key, pieces of weights, buckets: (name, flat tensor, ends))."""
    generator = torch.Generator().manual_seed(seed)
    weights = job.weights()
    first = {key: torch.randn((*axes, *shape), generator=generator) for key, (shape, axes, _) in weights.items()}
    whole = {state: {key: tensor + 10 * n for key, tensor in first.items()} for n, state in enumerate(STATES)}
    pieces = {}
    for key, (shape, axes, axis) in weights.items():
        leads = list(torch.cartesian_prod(*map(torch.arange, axes)).view(-1, len(axes)).tolist()) if axes else [[]]
        pieces[key] = [
            ((*lead, *at), ((1,) * len(axes) + size)) for lead in leads for at, size in boxes(shape, axis, job.tensor)
        ]
    buckets = []
    chains = [("chained_0.", ("dense",), 1), ("chained_1.", ("experts",), job.expert)]
    for prefix, kinds, spread in chains if job.expert > 1 else [("", ("dense", "experts"), 1)]:
        for stage in range(job.stages):
            for other in range(spread):
                for rank in range(job.tensor):
                    group = rank + job.tensor * (other + spread * stage)
                    for chunk in range(job.chunks):
                        parameters = []
                        for key, lead in job.modules(chunk * job.stages + stage, other, kinds):
                            shared = job.tied and job.stages > 1 and "word_embeddings" in key
                            parameters.append((cut(first[key][lead], weights[key][2], rank, job.tensor), shared))
                        for number, (flat, ends) in enumerate(fill_buffer(parameters, job, max(1, job.data // spread))):
                            name = (
                                f"{prefix}optimizer.distributed.dp_group_idx_{group}.gbuf_idx_{chunk}."
                                f"dtype_(torch.bfloat16, torch.float32).bucket_idx_{number}."
                            )
                            buckets += [(name + state, flat + 10 * n, ends) for n, state in enumerate(STATES)]
    return whole, pieces, buckets


def entries(job, seed=0):
    """Return (whole tensors, entries of the weights, entries of the buckets, bytes of the buckets by location)."""
    whole, pieces, buckets = make(job, seed)
    models, flats, held = {}, {}, {}
    for key, those in pieces.items():
        shards = [
            Shard(at, sizes, TensorEntry("w", (0, 2 * math.prod(sizes)), "bfloat16", sizes)) for at, sizes in those
        ]
        models[key] = ShardedTensorEntry("bfloat16", tuple(whole["param"][key].shape), shards)
    for name, flat, ends in buckets:
        held[name] = flat
        shards = [
            Shard((low,), (high - low,), TensorEntry(name, (4 * low, 4 * high), "float32", (high - low,)))
            for low, high in itertools.pairwise(ends)
        ]
        flats[name] = ShardedTensorEntry("float32", (flat.numel(),), shards)
    return whole, models, flats, held


def draw(seed):
    """Return any job."""
    numbers = random.Random(seed)
    tensor, stages = numbers.choice([1, 1, 2, 4]), numbers.choice([1, 1, 2, 3, 4])
    chunks = numbers.choice([1, 1, 2, 3]) if stages > 1 else 1
    experts = numbers.choice([0, 0, 4, 8])
    return Job(
        tensor, stages, chunks, numbers.choice([4, 8, 12]), numbers.choice([1, 2, 4]) if experts else 1, experts,
        numbers.choice(["expert", "name"]), numbers.random() < 0.3, numbers.choice([None, 300, 2000, 10000]),
        tuple(numbers.randint(1, 4) for _ in range(stages * chunks)),
        numbers.choice([8, 16, 24]), numbers.choice([16, 24, 40]), numbers.choice([32, 64]), numbers.random() < 0.2,
    )  # fmt: skip
