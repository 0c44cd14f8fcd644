"""An application whose state is never twice the same: what it holds, how it changes, and whether it came back."""

import collections
import copy
import ctypes
import itertools
import math
import random
import struct

import numpy as np
import torch

from snapshot import RNGState, StateDict

DTYPES = [
    torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int8, torch.uint8, torch.int64, torch.bool,
    torch.complex64, torch.float8_e4m3fn,
]  # fmt: skip
SCALARS = [
    0, -1, 1 << 80, True, None, 0.0, -0.0, math.nan, math.inf, 5e-324, 1j, "", "é\ud800/%", "x" * 50, b"\x00\xff",
    torch.float16, torch.Size([1, 2]), torch.device("cpu"),
]  # fmt: skip
KEYS = ["a", "b", "a/b", "%", "[0]", 1, "1", True, None, 2.5, "é"]


def tensor(chance: random.Random):
    """A tensor of any bits: short, empty, strided, or long enough for several parts."""
    dtype = chance.choice(DTYPES)
    shape = chance.choice([(), (0,), (1,), (7,), (3, 0, 2), (33, 5), (64, 64), (300, 17), (1 << chance.randrange(18),)])
    if chance.random() < 0.02:
        shape = (chance.randrange(1 << 20, 3 << 20),)
    numel = math.prod(shape)
    if dtype is torch.bool:
        made = torch.frombuffer(bytearray(chance.randbytes(numel) or b"x"), dtype=torch.uint8)[:numel] > 127
    else:
        size = numel * dtype.itemsize
        made = torch.frombuffer(bytearray(chance.randbytes(size) or bytes(dtype.itemsize)), dtype=dtype)[:numel]
    made = made.reshape(shape).clone()
    return made.t() if len(shape) == 2 and chance.random() < 0.3 else made


def value(chance: random.Random, depth=0):  # noqa: PLR0911 - a kind each
    """Anything that an application may hold."""
    kind = chance.random()
    if kind < 0.4:
        return tensor(chance)
    if kind < 0.65 or depth > 3:
        return chance.choice(SCALARS)
    if kind < 0.7:
        return np.frombuffer(chance.randbytes(48), chance.choice(["<i4", "<f8", "u1"])).reshape(2, -1).copy()
    if kind < 0.72:
        return np.float32(chance.random())
    if kind < 0.74:
        return chance.choice([collections.UserDict(a=chance.randrange(9)), "t" * 20_000, chance.randbytes(9000)])
    below = [value(chance, depth + 1) for _ in range(chance.randrange(5))]
    if kind < 0.8:
        return below
    if kind < 0.84:
        return tuple(below)
    if kind < 0.86:
        return {chance.randrange(9) for _ in below}
    if kind < 0.88:
        return collections.deque(below, 9)
    keys = chance.sample(KEYS, len(below))
    made = zip(keys, below, strict=True)
    return collections.OrderedDict(made) if kind < 0.91 else dict(made)


class Handed(StateDict):
    """Knows whether it was given anything."""

    handed = 0

    def load_state_dict(self, state):
        self.handed += 1
        super().load_state_dict(state)


class App:
    """A model that is trained, and whatever else there is beside it.

    `shared` draws what all ranks have alike, and draws it on all of them; `mine` what this rank alone has.
    """

    def __init__(self, shared: random.Random, mine: random.Random):
        self.shared, self.mine = shared, mine
        self.extra, self.alike = Handed(), Handed()
        self.with_rng = False
        self.build()

    def build(self):
        """Another model."""
        self.widths = tuple(self.shared.choice((3, 8, 40, 200)) for _ in range(self.shared.randrange(2, 5)))
        self.model, self.optimizer = built(self.widths)
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.copy_(torch.tensor([self.shared.gauss() for _ in range(8)]).repeat(
                    -(-parameter.numel() // 8))[: parameter.numel()].view(parameter.shape))  # fmt: skip

    def train(self):
        """A step, the same on all ranks."""
        x = torch.tensor([self.shared.random() for _ in range(self.widths[0])])
        self.optimizer.zero_grad()
        self.model(x.expand(4, -1)).square().sum().backward()
        self.optimizer.step()

    def change(self):
        """Change the structure, and values in place; how many changes those were."""
        count = 0
        for held, chance in ((self.extra, self.mine), (self.alike, self.shared)):
            for _ in range(chance.randrange(4)):
                names = sorted(held)
                if names and (chance.random() < 0.45 or len(names) > 12):
                    del held[chance.choice(names)]
                else:
                    held[f"{chance.choice('abcdefgh')}{chance.randrange(4)}"] = value(chance)
                count += 1
            for each in held.values():
                if isinstance(each, torch.Tensor) and each.numel() and chance.random() < 0.3:
                    each[(0,) * each.dim()] = torch.tensor(chance.randrange(2)).to(each.dtype)
        tensors = [name for name, each in self.extra.items() if isinstance(each, torch.Tensor)]
        if tensors and self.mine.random() < 0.2:
            self.extra["tied"] = self.extra[self.mine.choice(tensors)]
        if self.shared.random() < 0.05:
            self.build()
            count += 1
        self.with_rng = self.shared.random() < 0.3
        return count

    def state(self):
        """What is given to a take."""
        made = {"model": self.model, "optim": self.optimizer, "extra": self.extra, "alike": self.alike}
        return made | ({"rng": RNGState()} if self.with_rng else {})


def built(widths):
    layers = [torch.nn.Linear(a, b) for a, b in itertools.pairwise(widths)]
    model = torch.nn.Sequential(*layers)
    return model, torch.optim.Adam(model.parameters(), lr=0.01)


def frozen(app_state):
    """A copy of all that a take is given, tied where it was."""
    return copy.deepcopy({key: stateful.state_dict() for key, stateful in app_state.items()})


def target(saved, widths, chance: random.Random):
    """An application that a snapshot of `saved` can be restored into: fresh, alike, or of another structure."""
    model, optimizer = built(widths)
    if chance.random() < 0.5:
        model(torch.zeros(1, widths[0])).sum().backward()
        optimizer.step()
    made = {"model": model, "optim": optimizer}
    for key in ("extra", "alike"):
        how = chance.randrange(3)
        if how == 0:
            made[key] = Handed()
        elif how == 1:
            made[key] = Handed(copy.deepcopy(saved[key]))
            for each in made[key].values():
                if isinstance(each, torch.Tensor) and each.is_contiguous():
                    each.zero_()
        else:
            made[key] = Handed({name: value(chance) for name in [*list(saved[key])[::2], "other"]})
    return made | ({"rng": RNGState()} if "rng" in saved else {})


def bits(each):
    whole = each.detach().contiguous()
    return ctypes.string_at(whole.data_ptr(), whole.nbytes) if whole.nbytes else b""


def differs(a, b, at=""):  # noqa: PLR0911 - a kind each
    """Where two values are not the same, bit for bit, types and order included; nothing if they are."""
    if type(a) is not type(b):
        return f"{at}: {type(a).__name__}, {type(b).__name__}"
    if isinstance(a, torch.Tensor):
        if a.dtype != b.dtype or a.shape != b.shape or a.requires_grad != b.requires_grad:
            return f"{at}: {a.dtype}{list(a.shape)}, {b.dtype}{list(b.shape)}"
        return "" if bits(a) == bits(b) else f"{at}: values"
    if isinstance(a, dict):
        if list(map(repr, a)) != list(map(repr, b)):
            return f"{at}: keys {list(a)}, {list(b)}"
        return next((found for key in a if (found := differs(a[key], b[key], f"{at}/{key}"))), "")
    if isinstance(a, (list, tuple, collections.deque)):
        if len(a) != len(b):
            return f"{at}: {len(a)} and {len(b)} long"
        pairs = enumerate(zip(a, b, strict=True))
        return next((found for i, (x, y) in pairs if (found := differs(x, y, f"{at}/{i}"))), "")
    if isinstance(a, (np.ndarray, np.generic)):
        return "" if a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes() else f"{at}: array"
    if isinstance(a, float):
        return "" if struct.pack("d", a) == struct.pack("d", b) else f"{at}: {a!r}, {b!r}"
    return "" if a == b else f"{at}: {a!r:.60}, {b!r:.60}"


def untied(a, b):
    """Names of `a` that are one tensor there, and two in `b`."""
    tensors = [name for name, each in a.items() if isinstance(each, torch.Tensor) and each.numel()]
    return [
        (one, other)
        for one in tensors
        for other in tensors
        if a[one] is a[other] and b[one].data_ptr() != b[other].data_ptr()
    ]
