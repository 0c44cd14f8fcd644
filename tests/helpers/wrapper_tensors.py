"""Tensors of wrapper classes, as quantisation libraries have them: what the tests save and restore."""

import dataclasses
import enum

import torch
from torch.utils._pytree import tree_map


class Rounding(enum.Enum):
    NEAREST = "nearest"
    DOWN = "down"


@dataclasses.dataclass(frozen=True)
class Layout:
    tile: int = 16


class _Wrapper(torch.Tensor):
    """What both classes have in common: whatever is not about the wrapper itself is done with dense values."""

    names = ()

    def __repr__(self):
        return f"{type(self).__name__}({tuple(self.shape)})"

    def __tensor_flatten__(self):
        return list(self.names), self.context()

    def _map(self, function):
        inner = {name: function(getattr(self, name)) for name in self.names}
        return type(self).__tensor_unflatten__(inner, self.context(), self.shape, self.stride())

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        aten = torch.ops.aten
        same = func is aten.view.default and tuple(args[1]) == tuple(args[0].shape)
        if same or func in (aten.detach.default, aten.alias.default):
            return args[0]._map(torch.detach)
        if func is aten.clone.default:
            return args[0]._map(torch.clone)
        if func is aten._to_copy.default:
            return args[0]._map(lambda inner: inner.clone())
        if func is aten.copy_.default and type(args[0]) is type(args[1]):
            for name in args[0].names:
                getattr(args[0], name).copy_(getattr(args[1], name))
            return args[0]
        dense = lambda each: each.dequantize() if isinstance(each, _Wrapper) else each  # noqa: E731
        return func(*tree_map(dense, args), **tree_map(dense, kwargs))


class Quantised(_Wrapper):
    """Integers with a scale for each block, as a quantised weight."""

    names = ("codes", "scale")

    @staticmethod
    def __new__(cls, codes, scale, block, layout=None, rounding=Rounding.NEAREST, hook=None):
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=scale.dtype, device=codes.device)

    def __init__(self, codes, scale, block, layout=None, rounding=Rounding.NEAREST, hook=None):
        self.codes, self.scale, self.block, self.hook = codes, scale, block, hook
        self.layout_, self.rounding = layout or Layout(), rounding

    def context(self):
        return (self.block, self.layout_, self.rounding, {"dtype": self.dtype, "hook": self.hook})

    @classmethod
    def __tensor_unflatten__(cls, inner, context, outer_size, outer_stride):
        block, layout, rounding, more = context
        return cls(inner["codes"], inner["scale"], block, layout, rounding, more["hook"])

    def dequantize(self):
        blocks = self.codes.reshape(-1, self.block).to(self.scale.dtype)
        return (blocks * self.scale.view(-1, 1)).view(self.shape)


class Nested(_Wrapper):
    """A wrapped tensor beside another one, as what is trained in low precision."""

    names = ("low", "high")

    @staticmethod
    def __new__(cls, low, high):
        return torch.Tensor._make_wrapper_subclass(cls, low.shape, dtype=high.dtype)

    def __init__(self, low, high):
        self.low, self.high = low, high

    def context(self):
        return None

    @classmethod
    def __tensor_unflatten__(cls, inner, context, outer_size, outer_stride):
        return cls(inner["low"], inner["high"])

    def dequantize(self):
        return self.low.dequantize() + self.high


def quantised(seed=0, rows=4, block=8, **options):
    """A weight of random integers."""
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(-128, 127, (rows, 16), dtype=torch.int8, generator=generator)
    return Quantised(codes, torch.rand(rows * 16 // block, generator=generator) + 0.1, block, **options)


def nested(seed=0):
    """A quantised weight with what was rounded off."""
    return Nested(quantised(seed), torch.randn(4, 16, generator=torch.Generator().manual_seed(seed + 100)))
