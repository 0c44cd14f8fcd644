"""The states of the corpus: fixed values, of all kinds that a snapshot can store.

Each function returns the app state of one rank. Nothing in it may change: takes of it must equal the corpus.
"""

import argparse
import collections
import dataclasses
import enum
import fractions
import io
import math
import pathlib
import random
import types
import typing
import uuid
import zoneinfo
from datetime import UTC, date, datetime, time, timedelta, timezone
from decimal import Decimal

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from snapshot import KeepEvery, KeepLatest, ModelState, RNGState, Sharded, StateDict, TensorMap
from snapshot.saved import SavedObject
from tests.helpers.foreign_states import DTYPES, of_dtype
from tests.helpers.versions import distribute
from tests.helpers.wrapper_tensors import Layout, Quantised, Rounding

NEWER_DTYPES = (
    "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn_x2", "complex32",
)  # fmt: skip
"""Dtypes that safetensors or some versions of torch lack."""


class Color(enum.Enum):
    RED = 1
    GREEN = "green"
    NONE = None


class Access(enum.Flag):
    READ = 1
    WRITE = 2


class Level(enum.IntEnum):
    HIGH = 3


@dataclasses.dataclass
class Inner:
    weight: torch.Tensor
    name: str = "inner"


@dataclasses.dataclass(frozen=True)
class Config:
    rate: float
    inner: Inner
    sizes: list
    color: Color = Color.RED


class Words(list):
    """A list of a class of its own, which is pickled."""


def numbers(*shape, dtype=torch.float32, start=0):
    count = torch.Size(shape).numel()
    return (torch.arange(count, dtype=torch.int64) + start).remainder(251).to(dtype).view(shape)


def values():
    """Plain values, containers, objects with their own class."""
    position = io.BytesIO(b"bytes in memory")
    position.seek(3)
    flat = {
        "int": 7, "negative": -1, "wide": 1 << 70, "huge": (1 << 14_000) + 1, "true": True, "false": False,
        "none": None, "float": 0.1, "inf": float("inf"), "minus zero": -0.0,
        "nan": np.frombuffer(bytes.fromhex("7ff8000000000123"), ">f8")[0].item(),
        "complex": complex(1.5, -2.0), "str": "text é 漢", "empty": "", "surrogate": "a\ud800b",
        "long text": "0123456789" * 2000, "bytes": b"\x00\xff", "long bytes": bytes(range(256)) * 80,
        "bytearray": bytearray(b"abc"), "BytesIO": position, "dtype": torch.bfloat16, "device": torch.device("cuda:1"),
        "Size": torch.Size([2, 0, 3]), "slice": slice(1, None, 2), "range": range(10, 0, -3),
    }  # fmt: skip
    typed = {
        "datetime": datetime(2026, 1, 2, 3, 4, 5, 6),
        "aware": datetime(2026, 1, 2, 3, 4, tzinfo=timezone(timedelta(hours=-3, minutes=-30), "half/way")),
        "fold": datetime(2026, 10, 25, 2, 30, fold=1, tzinfo=zoneinfo.ZoneInfo("Europe/Berlin")),
        "date": date(1, 1, 1),
        "time": time(23, 59, 59, 999_999, tzinfo=UTC),
        "timedelta": timedelta(days=-2, seconds=3, microseconds=4),
        "timezone": timezone.utc,  # noqa: UP017 - the name of the type is the point
        "ZoneInfo": zoneinfo.ZoneInfo("Asia/Kathmandu"),
        "Path": pathlib.PurePosixPath("a%b/ü"),
        "windows": pathlib.PureWindowsPath("c:\\x"),
        "UUID": uuid.UUID(int=5),
        "Decimal": Decimal("-1.50E+7"),
        "Fraction": fractions.Fraction(-3, 7),
    }
    containers = {
        "list": [1, [2.5, []]], "tuple": (1, ("a",)), "set": {3}, "frozenset": frozenset({"x"}),
        "deque": collections.deque([1, 2], 5), "unbounded": collections.deque([1]),
        "OrderedDict": collections.OrderedDict([("b", 1), ("a", 2)]),
        "defaultdict": collections.defaultdict(list, {"k": [1]}), "Counter": collections.Counter("aab"),
        "keys": {1: "int", "1": "str", False: "x", 2.5: "float", None: "none"}, "pickled keys": {b"b": 1, (1, 2): 2},
        "odd": {"a/b": 1, "c%d": 2, "": 3, "..": 4, "[x]": 5, "é": 6, "\udcff": 7, "__metadata__": 8},
        "nothing": {}, "no list": [], "no tuple": (),
    }  # fmt: skip
    objects = {
        "Enum": Color.RED, "text": Color.GREEN, "nothing": Color.NONE, "flags": Access.READ | Access.WRITE,
        "IntEnum": Level.HIGH, "dataclass": Config(0.5, Inner(numbers(3)), [1, 2], Color.GREEN),
        "Generator": torch.Generator().manual_seed(11),
    }  # fmt: skip
    return {key: StateDict(**held) for key, held in locals().items() if isinstance(held, dict)}


def tensors():
    """Tensors of all common dtypes, and of all shapes, strides, views and classes."""
    base = numbers(6, 8)
    tied = numbers(5)
    return {
        "dtypes": StateDict({str(dtype).removeprefix("torch."): of_dtype(dtype, 3, 4) for dtype in DTYPES}),
        "shapes": StateDict(
            scalar=torch.tensor(2.5), empty=torch.zeros(0, 4), one=numbers(1), deep=numbers(2, 1, 3, 1, 2),
            transposed=base.t(), rows=base[1:3], columns=base[:, 2:5], step=base[::2],
            expanded=numbers(3, 1).expand(3, 4),
            channels_last=numbers(2, 3, 4, 5).to(memory_format=torch.channels_last),
            conjugate=torch.complex(numbers(3), numbers(3, start=1)).conj(), negative=torch._neg_view(numbers(4)),
        ),
        "classes": StateDict(
            parameter=torch.nn.Parameter(numbers(2, 2)), frozen=torch.nn.Parameter(numbers(2), requires_grad=False),
            buffer=torch.nn.Buffer(numbers(3)), grad=numbers(2).requires_grad_(),
        ),
        "ties": StateDict(a=tied, b=tied, whole=base, part=base[2:4]),
    }  # fmt: skip


def newer_dtypes():
    """Tensors of dtypes that some versions of torch lack."""
    found = {}
    for name in NEWER_DTYPES:
        dtype = getattr(torch, name, None)
        if dtype is not None:
            found[name] = numbers(4 * dtype.itemsize, dtype=torch.uint8).view(dtype)
    return {"dtypes": StateDict(found)}


def composed():
    """Sparse and quantised tensors."""
    dense = torch.eye(4) * numbers(4, 4)
    weights = numbers(4, 4)
    scales, zeros = torch.tensor([0.5, 0.25, 1.0, 2.0], dtype=torch.float64), torch.tensor([0, 1, 2, 3])
    return {
        "sparse": StateDict(
            coo=dense.to_sparse(),
            uncoalesced=torch.sparse_coo_tensor([[0, 0]], [1.0, 2.0], (3,), check_invariants=True),
            csr=dense.to_sparse_csr(), csc=dense.to_sparse_csc(), bsr=dense.to_sparse_bsr((2, 2)),
            bsc=dense.to_sparse_bsc((2, 2)),
        ),
        "quantised": StateDict(
            tensor=torch.quantize_per_tensor(weights, 0.5, 3, torch.quint8),
            channel=torch.quantize_per_channel(weights, scales, zeros, 0, torch.qint8),
            wide=torch.quantize_per_tensor(weights, 0.25, 0, torch.qint32),
        ),
    }  # fmt: skip


def wrappers():
    """Tensors that wrap tensors."""
    codes = numbers(4, 8, dtype=torch.int8)
    nested = torch.nested.nested_tensor([numbers(2, 3), numbers(4, 3)], layout=torch.jagged)
    return {
        "model": StateDict(
            quantised=Quantised(codes, torch.ones(8), 4, Layout(8), Rounding.DOWN),
            opaque=Quantised(codes, torch.ones(8), 4, hook=print),
            nested=nested,
        )
    }


def arrays():
    """NumPy's arrays and scalars."""
    record = np.array([(1, 2.5, b"ab")], dtype=[("a", "<i4"), ("b", "<f8"), ("c", "S2")])
    return {
        "arrays": StateDict(
            plain=np.arange(6, dtype=np.int16).reshape(2, 3), fortran=np.asfortranarray(np.arange(6.0).reshape(2, 3)),
            big=np.arange(3, dtype=">f4"), scalar=np.float32(1.5), zero=np.array(7), empty=np.zeros((0, 2)),
            text=np.array(["a", "bc"]), when=np.array(["2026-01-02"], dtype="datetime64[D]"), record=record,
            row=record[0], scalar_record=record.view(np.recarray)[0], half=np.float16(0.5), flag=np.bool_(True),
            delta=np.timedelta64(5, "ms"), complex=np.array([1 + 2j], dtype=np.complex64),
        )
    }  # fmt: skip


def model_of(width=6):
    model = torch.nn.Sequential(torch.nn.Linear(width, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2))
    with torch.no_grad():
        for at, each in enumerate([*model.parameters(), *(each for each in model.buffers() if each.ndim)]):
            each.copy_(numbers(*each.shape, start=at))
    return model


def optimizer_of(model):
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1, foreach=False)
    for at, each in enumerate(model.parameters()):
        each.grad = numbers(*each.shape, start=at + 5)
    optimizer.step()
    # the result of a step may differ in the last bit elsewhere
    for at, state in enumerate(optimizer.state.values()):
        state["exp_avg"].copy_(numbers(*state["exp_avg"].shape, start=at))
        state["exp_avg_sq"].copy_(numbers(*state["exp_avg_sq"].shape, start=at + 1))
    with torch.no_grad():
        for at, each in enumerate(model.parameters()):
            each.copy_(numbers(*each.shape, start=at + 2))
    return optimizer


class Step(typing.NamedTuple):
    number: int
    weight: torch.Tensor


def known_objects():
    """Named tuples, namespaces, and random number generators of NumPy and Python."""
    kinds = (np.random.MT19937, np.random.PCG64, np.random.PCG64DXSM, np.random.Philox, np.random.SFC64)
    generators = {kind.__name__: np.random.Generator(kind(7)) for kind in kinds}
    generators["PCG64"].spawn(2)
    for each in generators.values():
        each.integers(5, dtype=np.uint32)
    return {
        "tuples": StateDict(one=Step(1, numbers(3)), nested=[Step(2, numbers(0))]),
        "names": StateDict(args=argparse.Namespace(lr=0.5, w=numbers(2)), simple=types.SimpleNamespace(x=[1])),
        "random": StateDict(**generators, old=np.random.RandomState(3), python=random.Random(4)),
    }


def configs():
    """Configurations of OmegaConf."""
    from omegaconf import OmegaConf

    config = OmegaConf.create({"lr": 0.5, "twice": "${lr}", "list": [1, {"x": None}]}, flags={"readonly": True})
    return {"configs": StateDict(dict=config, list=OmegaConf.create([1, "a"]))}


def training():
    """A model, its optimizer and scheduler, a random number generator's state, and progress."""
    model = model_of()
    optimizer = optimizer_of(model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10)
    return {"model": model, "optimizer": optimizer, "scheduler": scheduler, "progress": StateDict(step=3)}


def by_name():
    """A model and its optimizer under the names of parameters."""
    model = model_of()
    torch.manual_seed(1)
    np.random.seed(2)
    random.seed(3)
    return {"train": ModelState(model, optimizer_of(model)), "rng": RNGState()}


def statistics():
    """Tensors whose statistics are stored, too: with NaN and infinity, without elements, complex, and ints."""
    bad = numbers(4, 5)
    bad[1, 2], bad[3, 0] = math.nan, -math.inf
    z = torch.complex(numbers(3), -numbers(3))
    return {"model": StateDict(bad=bad, none=numbers(0, 3), z=z, ints=numbers(7, dtype=torch.int64), n=1)}


def long_tensors():
    """Tensors with tables of digests, and of several boxes."""
    return {"model": StateDict(long=numbers(300, 300, dtype=torch.int64), boxes=numbers(50, 40), short=numbers(3))}


def several_blocks():
    """A tensor whose file has several blocks."""
    return {"model": StateDict(blocks=numbers(200, 400), short=numbers(3))}


def shards():
    """Sharded, replicated and own state of two ranks."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    rank = dist.get_rank()
    return {
        "model": StateDict(
            even=distribute(numbers(8, 3), mesh, [Shard(0)]),
            uneven=distribute(numbers(5, 3), mesh, [Shard(0)]),
            columns=distribute(numbers(3, 4), mesh, [Shard(1)]),
            replicated=distribute(numbers(7), mesh, [Replicate()]),
            single=distribute(numbers(1, 2), mesh, [Shard(0)]),
            by_hand=Sharded(numbers(4, 3)[2 * rank : 2 * rank + 2].clone(), (4, 3), (2 * rank, 0)),
        ),
        "same": StateDict(weight=numbers(9), step=4, names=["a", "b"]),
        "own": StateDict(rank=rank, tensor=numbers(3, start=rank), only={f"key{rank}": rank}),
    }


def meshes():
    """A tensor of four ranks in two dimensions, as FSDP2 over tensor parallelism and HSDP have them."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    dense = numbers(8, 4)
    return {
        "model": StateDict(
            both=distribute(dense, mesh, [Shard(0), Shard(1)]),
            hybrid=distribute(dense, mesh, [Replicate(), Shard(0)]),
            strided=distribute(dense, mesh, [_StridedShard(0, split_factor=2), Shard(0)]),
        )
    }


def frozen_model():
    """A model whose first layer is not trained."""
    model = model_of(5)
    model[0].requires_grad_(False)
    return {"model": model, "progress": StateDict(step=1)}


def tuned_model():
    """A frozen layer of several blocks of digests, with a trained head."""
    layers = [torch.nn.Linear(300, 300), torch.nn.Linear(300, 2)]
    with torch.no_grad():
        for at, each in enumerate(parameter for layer in layers for parameter in layer.parameters()):
            each.copy_(numbers(*each.shape, start=at))
    layers[0].requires_grad_(False)
    return {"model": torch.nn.Sequential(*layers), "progress": StateDict(step=1)}


def compressible():
    """Tensors of all kinds of blocks, some longer than a block."""
    return {
        "model": StateDict(
            wide=numbers(300, 300), half=numbers(500, dtype=torch.bfloat16), bytes=numbers(3000, dtype=torch.uint8),
            doubles=numbers(400, dtype=torch.float64), short=numbers(3), flags=numbers(100, dtype=torch.bool),
        )
    }  # fmt: skip


def newest_compressed():
    """Tensors that are compressed, beside objects of the newest format."""
    return {**compressible(), "names": StateDict(args=argparse.Namespace(w=numbers(200, 300)), python=random.Random(4))}


def plain_trees():
    """Lists and dictionaries of many plain values, as one object each."""
    rows = [{"id": i, "score": i / 7, "name": f"row {i} é/%", "ok": None if i % 3 else True} for i in range(300)]
    odd = {1: (float("nan"), float("-inf"), -0.0), "1": [1 << 80, -(1 << 63), 1e300], None: {"$tuple": [True]}, -5: {}}
    return {"state": StateDict(rows=rows, odd=[odd, list(range(1000))], few=[1, 2], names={"a": 1})}


def pickles():
    """Objects that are pickled, some of which name classes of this library."""
    held = {"state": StateDict(step=1), "keep": [KeepLatest(2), KeepEvery(10) | KeepLatest(1)], "rng": RNGState()}
    tensor_map = TensorMap(["a.{i} -> b.{i}"])
    names = {"map": tensor_map, "saved": SavedObject("dataclass", "app.C", {"x": 1})}
    return {"objects": StateDict(words=Words([1, "two"]), library=Words([held]), more=Words([names]))}
