"""Hostile snapshots: a manifest of every kind of entry, ways to spoil it, and all that a user may do with them."""

import collections
import contextlib
import copy
import dataclasses
import datetime
import decimal
import enum
import fractions
import io
import os
import pathlib
import random
import resource
import uuid
import zoneinfo
from typing import get_args

import msgspec
import numpy as np
import torch

from snapshot import Sharded, Snapshot, SnapshotError, StateDict
from snapshot.manifest.document import METADATA
from snapshot.manifest.entries import AnyEntry
from snapshot.storages import memory
from snapshot.tensors.digest import digest_range
from tests.helpers import wrapper_tensors
from tests.helpers.arguments import for_restore

ROOM = 1 << 30
"""Bytes of memory that it may take: far less than what hostile numbers ask for, far more than it needs."""


class Color(enum.Enum):
    """A class of the application."""

    RED = 1
    BLUE = 2


@dataclasses.dataclass
class Config:
    """Another one."""

    lr: float
    weight: torch.Tensor
    color: Color = Color.RED


def typed():
    """A value of each type that stands in the manifest as a text."""
    berlin = zoneinfo.ZoneInfo("Europe/Berlin")
    return {
        "datetime": datetime.datetime(2024, 1, 2, 3, tzinfo=berlin),
        "date": datetime.date(2024, 1, 2),
        "time": datetime.time(1, 2),
        "timedelta": datetime.timedelta(1, 2, 3),
        "timezone": datetime.timezone(datetime.timedelta(hours=1), "x"),
        "zone": berlin,
        "path": pathlib.PurePosixPath("a/b"),
        "uuid": uuid.UUID(int=1),
        "decimal": decimal.Decimal("1.50"),
        "fraction": fractions.Fraction(1, 3),
        "range": range(3),
        "slice": slice(1, None, 2),
    }


class Live(StateDict):
    """Knows whether it was given anything."""

    given = False

    def load_state_dict(self, state):
        self.given = True
        super().load_state_dict(state)


def rich():
    """An app state with an entry of every kind."""
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(5, 3)).sum().backward()
    optimizer.step()
    return {
        "model": model,
        "optimizer": optimizer,
        "state": Live(
            tensor=torch.arange(6.0).view(2, 3),
            lasting=torch.randn(4, 3, 2, 2).to(memory_format=torch.channels_last),
            long=torch.arange(80_000, dtype=torch.int32),
            parameter=torch.nn.Parameter(torch.ones(2)),
            sparse=torch.eye(3).to_sparse(),
            csr=torch.eye(3).to_sparse_csr(),
            quantized=torch.quantize_per_tensor(torch.ones(2, 2), 0.1, 3, torch.qint8),
            sharded=Sharded(torch.arange(8.0), (8,), (0,)),
            array=np.arange(4).reshape(2, 2),
            records=np.zeros(2, np.dtype([("a", "<i4"), ("b", "<f8", (2,))])),
            scalar=np.float32(2.5),
            nothing=torch.empty(0, 3),
            bits=[None, True, 3, 1 << 80, 2.5, float("nan"), 1j, "é\ud800", b"x", torch.float16, torch.Size([1, 2])],
            text="t" * 20_000,
            device=torch.device("cpu"),
            boxes=(1, [2, {3}], frozenset([4]), collections.deque([5], 7)),
            keys={1: "a", "1": "b", None: 2, 2.5: 3, False: 4, 1 << 70: 5},
            more=collections.OrderedDict(a=collections.defaultdict(list, b=[1]), c=collections.Counter("aab")),
            typed=typed(),
            member=Color.BLUE,
            config=Config(0.1, torch.arange(3.0)),
            file=io.BytesIO(b"contents"),
            wrapped=wrapper_tensors.nested(3),
            generator=torch.Generator().manual_seed(1),
            odd=collections.UserDict(a=1),  # what only a pickle can hold
        ),
    }


def zeros():
    """The same application before a restore, and copies of its tensors."""
    live = rich()
    with torch.no_grad():
        for tensor in tensors(live):
            tensor.zero_()
    return live


def tensors(live):
    """The plain tensors that a restore may write to."""
    found = [*live["model"].state_dict().values()]
    found += [v for s in live["optimizer"].state.values() for v in s.values()]
    return found + [live["state"][name] for name in ("tensor", "lasting", "long", "parameter") if name in live["state"]]


def document_of(path):
    """A manifest as plain objects, without its digest."""
    document = msgspec.json.decode(contents()[f"{path}/{METADATA}"])
    del document["digest"]
    return document


def contents():
    """All that lies in memory://."""
    return {path: file.content.tobytes() for path, file in memory._tree.get().files.items()}


def store(path, data):
    """Put a file where the memory plugin finds it."""
    memory._tree.get().files[path] = memory._File(np.frombuffer(bytes(data), np.uint8))


def sign(body):
    """A document with the digest that belongs to it: who writes it by hand can do so too."""
    body = body.rstrip()[:-1]
    return b'%s,"digest":"%s"}' % (body, digest_range(body).encode())


@contextlib.contextmanager
def bounded(room=ROOM):
    """What asks for much more memory fails, and does not take the machine with it."""
    with open("/proc/self/statm") as file:
        now = int(file.read().split()[0]) * os.sysconf("SC_PAGESIZE")
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (now + room, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


_apps = []


def exercise(url, paths=(), note=""):
    """Do with a snapshot what a user may do; how many verbs succeeded. Only our errors come out, soon, and what fails
    hands nothing over."""
    snapshot = Snapshot(url)
    verbs = [
        snapshot.exists, snapshot.verify, snapshot.get_manifest, lambda: snapshot.metadata,
        lambda: snapshot.get_state_dict_for_key("state"), lambda: snapshot.get_state_dict_for_key("model"),
    ]  # fmt: skip
    for path in paths:
        verbs.append(lambda path=path: snapshot.read_object(path))
        verbs.append(lambda path=path: a_row(snapshot, path))
    done = 0
    for verb in verbs:
        with contextlib.suppress(SnapshotError):
            shown(verb())
            done += 1
    for options in ({}, {"strict": False, "cast": "any"}, {"select": ["state/tensor", "state/keys"]}):
        app = _apps.pop() if _apps else zeros()
        try:
            snapshot.restore(app, **for_restore(**options))
            done += 1
        except SnapshotError:
            assert not app["state"].given, f"load_state_dict was called, and then it failed: {note}"
            _apps.append(app)
    return done


def shown(value):
    """Print a value: what came out must be whole. Python itself does not print very long numbers."""
    try:
        return repr(value)
    except (ValueError, RuntimeError) as error:  # also of a Counter of tensors, which compares them
        if "integer string conversion" not in str(error) and "Boolean value of Tensor" not in str(error):
            raise
        return ""


def a_row(snapshot, path):
    """The first row of a tensor; of one without dimensions, none."""
    try:
        return snapshot.read_object(path, box=[slice(0, 1)])
    except ValueError as error:
        if "the box must have at most" not in str(error):
            raise
        return None


def changed(document, base):
    """The entries that are not as they were, some of them."""
    entries = document.get("manifest")
    before = base["manifest"]
    if not isinstance(entries, dict):
        return []
    try:
        return [path for path in entries if path not in before or repr(entries[path]) != repr(before[path])][:4]
    except RecursionError:
        return []


TEXTS = [
    "", "x", "0", "-1", "nan", "/etc/passwd", "../../x", "data/../../x", "file:///etc/passwd", "memory://other/data",
    "%", "%u", "%uD800", "%2F", "int8", "float32", "complex128", "uint8", "float4_e2m1fn_x2", "<f8", "M8[ns]", "utf8",
    "raw", "torch_save", "bytes", "bytearray", "buffer_protocol", "cuda:99", "meta", "torch.nn.parameter.Parameter",
    "os.system", "torch._tensor.Tensor", "sparse_coo", "quantized_per_channel", "é", "\x00",
]  # fmt: skip
NUMBERS = [-1, 0, 1, 2, 7, 255, 1 << 16, 1 << 31, 1 << 32, 1 << 60, 1 << 63, -(1 << 63), 1 << 64, 1 << 200, 1e308, -0.0]
LONG_TEXTS = ["|O", "|V0", "|S1000000000000", "<U99999999999", "a" * 3000, "0x" + "f" * 5000, "9" * 5000, "f" * 16]
LISTS = [[], [[]], [0], [0, 0], [1 << 60], [1 << 40, 1 << 40], [-1, -1], [0] * 300, [["a", "<i4"]], [["a", "|O"]]]
OBJECTS = [{}, {"int": "1"}, {"int": "x"}, {"float": "7ff8000000000001"}, {"list": "1"}]
MESHES = [{"begin": 0, "shape": [1 << 60], "steps": [0]}]
NASTY = [*NUMBERS, None, True, False, *TEXTS, *LONG_TEXTS, *LISTS, *OBJECTS, *MESHES]
NAMES = ["0/state/x", "1/state/tensor", "0", "x", "", "0/" + "a/" * 600, "0//", "-1/a", "0/state/boxes/1/9", "tensor"]
TYPES = [*(kind.__struct_config__.tag for kind in get_args(AnyEntry)), "future"]


def nested(depth):
    """Lists in lists."""
    made = []
    for _ in range(depth):
        made = [made]
    return made


def places(document):
    """Every place in a document, as (container, key)."""
    found, rest = [], [document]
    while rest:
        value = rest.pop()
        keys = value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
        found += [(value, key) for key in keys]
        rest += [value[key] for key in keys]
    return found


def duplicate(value):
    """A copy; None of what is too deep for one."""
    try:
        return copy.deepcopy(value)
    except RecursionError:
        return None


def spoil(document, chance: random.Random):
    """Change a manifest here and there, into something that still is JSON."""
    document = duplicate(document)
    for _ in range(chance.choice((1, 1, 1, 2, 4))):
        container, key = chance.choice(places(document))
        how = chance.choice((0, 1, 2, 2, 2, 2, 2, 3, 4, 5, 6, 7, 8))
        others = places(document)
        if how < 3:
            alike = [value for value in NASTY if type(value) is type(container[key])] if how == 2 else NASTY
            container[key] = duplicate(chance.choice(alike or NASTY))
        elif how == 3:
            other, at = chance.choice(others)
            container[key] = duplicate(other[at])
        elif how == 4:
            del container[key]
        elif how == 5 and isinstance(container[key], dict) and "type" in container[key]:
            container[key]["type"] = chance.choice(TYPES)
        elif how == 6 and isinstance(container, dict):
            other, at = chance.choice(others)
            container[chance.choice(NAMES)] = duplicate(other[at])
        elif how == 7 and isinstance(container[key], (int, float)):
            container[key] += chance.choice((-1, 1, 4096, 1 << 40))
        elif how == 8:
            container[key] = nested(chance.choice((5, 400, 900)))
    return document


def encoded(document):
    """The bytes of a document; numbers that JSON libraries do not take are left to `json`."""
    try:
        return msgspec.json.encode(document)
    except (OverflowError, msgspec.MsgspecError, RecursionError):
        import json

        return json.dumps(document, separators=(",", ":"), ensure_ascii=False).encode("utf-8", "surrogatepass")
