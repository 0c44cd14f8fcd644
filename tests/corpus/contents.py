"""The contents of values as JSON, to be compared without the library that reads and writes them."""

import argparse
import collections
import dataclasses
import enum
import hashlib
import io
import random
import re
import struct
import types

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from snapshot import Sharded
from snapshot.saved import SavedObject

PLAIN = (int, str, bool, type(None))


def describe(value):  # noqa: PLR0911, PLR0912 - a table of types
    """Return what must be equal in two values, bit for bit."""
    name = type(value).__name__
    if isinstance(value, torch.Tensor):
        return describe_tensor(value)
    if isinstance(value, Sharded):
        return describe(gather(value))
    if isinstance(value, (np.ndarray, np.generic)):
        array = np.asarray(value)
        return [name, array.dtype.descr if array.dtype.names else array.dtype.str, list(array.shape),
                bool(array.flags.f_contiguous), hashed(array.tobytes())]  # fmt: skip
    if isinstance(value, enum.Enum):
        return describe_saved("Enum", type(value), {"name": value.name, "value": value.value})
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return describe_saved("namedtuple", type(value), value._asdict())
    if type(value) in (argparse.Namespace, types.SimpleNamespace):
        return [name, [[key, describe(each)] for key, each in vars(value).items()]]
    if isinstance(value, np.random.Generator):
        bits = value.bit_generator
        return [name, describe(bits.state), describe(bits.seed_seq.state)]
    if isinstance(value, np.random.RandomState):
        return [name, describe(value.get_state(legacy=False))]
    if type(value) is random.Random:
        return [name, hashed(repr(value.getstate()).encode())]
    if name in ("DictConfig", "ListConfig"):
        return [name, describe(vars(value)["_metadata"].flags), repr(value)]
    if isinstance(value, SavedObject):
        wraps = value.kind == "TensorSubclass"
        held = {key: each for key, each in value.items() if not wraps or isinstance(each, torch.Tensor)}
        return [None if wraps else value.kind, value.class_name, [[key, describe(each)] for key, each in held.items()]]
    if dataclasses.is_dataclass(value) and hasattr(value, "__dict__"):
        return describe_saved("dataclass", type(value), vars(value))
    if isinstance(value, torch.Generator):
        return [name, str(value.device), describe(value.get_state())]
    if isinstance(value, io.BytesIO):
        return [name, value.tell(), value.getvalue().hex()]
    if isinstance(value, dict):
        more = [getattr(value.default_factory, "__name__", None)] if type(value) is collections.defaultdict else []
        return [name, *more, [[describe(key), describe(each)] for key, each in value.items()]]
    if isinstance(value, (set, frozenset)):
        return [name, sorted(map(repr, value))]
    if isinstance(value, (list, tuple, collections.deque)):
        return [name, *([value.maxlen] if isinstance(value, collections.deque) else []), [*map(describe, value)]]
    if type(value) is float:
        return [name, struct.pack(">d", value).hex()]
    if isinstance(value, (bytes, bytearray)):
        return [name, value.hex()] if len(value) < 100 else [name, hashed(bytes(value))]
    if type(value) is int and value.bit_length() > 60:
        return [name, hex(value) if value.bit_length() < 1000 else hashed(hex(value).encode())]
    if type(value) is str and len(value) > 100:
        return [name, hashed(value.encode("utf-8", "surrogatepass"))]
    if type(value) in PLAIN:
        return [name, value if type(value) is not str else ascii(value)]
    return [name, ascii(re.sub(" at 0x[0-9a-f]+", "", repr(value)))]


def gather(shard):
    """Return the whole tensor of a shard of each rank."""
    whole = torch.zeros(tuple(shard.global_shape), dtype=shard.tensor.dtype)
    whole[shard.box().slices()] = shard.tensor
    dist.all_reduce(whole)
    return whole


def describe_saved(kind, own, fields):
    return [kind, f"{own.__module__}.{own.__qualname__}", [[key, describe(each)] for key, each in fields.items()]]


def describe_tensor(tensor):
    kind = type(tensor)
    if isinstance(tensor, DTensor):
        return describe_tensor(tensor.full_tensor())
    if hasattr(kind, "__tensor_flatten__"):
        names = tensor.__tensor_flatten__()[0]
        inner = [[name, describe(getattr(tensor, name))] for name in names]
        return [None, f"{kind.__module__}.{kind.__qualname__}", inner]
    name = kind.__name__
    tensor = tensor.detach() if not tensor.requires_grad else tensor
    if tensor.layout is torch.sparse_coo:
        return [name, "coo", list(tensor.shape), tensor.is_coalesced(),
                describe(tensor._indices()), describe(tensor._values())]  # fmt: skip
    if tensor.layout is not torch.strided:
        by_rows = tensor.layout in (torch.sparse_csr, torch.sparse_bsr)
        rows, columns = (tensor.crow_indices, tensor.col_indices), (tensor.ccol_indices, tensor.row_indices)
        parts = rows if by_rows else columns
        return [name, str(tensor.layout), list(tensor.shape), *[describe(each()) for each in parts],
                describe(tensor.values())]  # fmt: skip
    if tensor.is_quantized:
        channel = tensor.qscheme() in (torch.per_channel_affine, torch.per_channel_affine_float_qparams)
        more = [describe(tensor.q_per_channel_scales()), describe(tensor.q_per_channel_zero_points()),
                tensor.q_per_channel_axis()] if channel else [tensor.q_scale(), tensor.q_zero_point()]  # fmt: skip
        return [name, str(tensor.dtype), describe(tensor.int_repr()), *more]
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    data = plain.view(-1).view(torch.uint8).numpy().tobytes() if plain.numel() else b""
    return [name, str(tensor.dtype), list(tensor.shape), list((tensor if is_dense(tensor) else plain).stride()),
            tensor.requires_grad, hashed(data)]  # fmt: skip


def is_dense(tensor):
    """Return True if the elements fill a range of memory, in any order of the dimensions."""
    reach = 1
    for step, size in sorted(
        (step, size) for step, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1
    ):
        if step != reach:
            return False
        reach *= size
    return tensor.numel() > 0


def hashed(data):
    return hashlib.sha256(data).hexdigest()[:32]
