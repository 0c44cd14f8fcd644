"""Snapshots that are large in one way each: `python -m tests.soak.load_sizes WHAT FOLDER COUNT`.

Each prints, as JSON, what every step took: seconds, and how much memory more than before it at its worst.
"""

import gc
import json
import mmap
import os
import resource
import sys
import time
import warnings
from pathlib import Path

import torch

from snapshot import Snapshot, SnapshotError, StateDict, TakeOptions
from snapshot.io.arena import release_memory
from snapshot.manifest.document import METADATA
from snapshot.tensors.digest import digest_range
from tests.soak.load_leaks import resident

DONE = {}


def step(name, function):
    """Do it, and note what it took."""
    release_memory()
    gc.collect()
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # the peak is counted anew
    before, began = resident(), time.perf_counter()
    made = function()
    DONE[name] = {"seconds": round(time.perf_counter() - began, 2), "MiB": resident("VmHWM") - before}
    return made


def verbs(path, live, name, wanted):
    """All that a user does with a snapshot."""
    step("take", lambda: Snapshot.take(path, {"s": live}, options=TakeOptions(durable=False)))
    step("take again", lambda: Snapshot.take(path, {"s": live}, overwrite=True, options=TakeOptions(durable=False)))
    step(
        "async_take",
        lambda: Snapshot.async_take(path, {"s": live}, overwrite=True, options=TakeOptions(durable=False)).wait(),
    )
    here = Snapshot(path)
    assert step("open", lambda: here.metadata.entries) >= len(live)
    found = step("read_object", lambda: here.read_object(f"0/s/{name}"))
    assert wanted(found), found
    assert step("verify", lambda: Snapshot(path).verify()).ok


def entries(path, count):
    """So many scalars, in dictionaries of a thousand."""

    def made(plus):
        return StateDict(
            {f"group-{i:04}": {f"key-{j:03}": 1000 * i + j + plus for j in range(1000)} for i in range(count // 1000)}
        )

    live = made(0)
    verbs(path, live, "group-0007/key-007", lambda found: found == 7007)
    other = made(1)
    report = step("restore", lambda: Snapshot(path).restore({"s": other}))
    assert report.restored >= count
    assert other == live
    other.clear()
    fresh = StateDict()
    step("restore into nothing", lambda: Snapshot(path).restore({"s": fresh}))
    assert fresh == live


def tensors(path, count):
    """So many tensors of 1 KiB."""
    live = StateDict({f"tensor-{i}": torch.full((256,), float(i)) for i in range(count)})
    verbs(path, live, "tensor-777", lambda found: found.equal(torch.full((256,), 777.0)))
    for each in live.values():
        each.zero_()
    step("restore", lambda: Snapshot(path).restore({"s": live}))
    assert all(bool((live[f"tensor-{i}"] == i).all()) for i in range(count))
    live.clear()
    fresh = StateDict()
    step("restore into nothing", lambda: Snapshot(path).restore({"s": fresh}))
    assert all(bool((fresh[f"tensor-{i}"] == i).all()) for i in range(count))


def huge(path, count):
    """One tensor of so many GiB, of which few pages are ever in memory: its source is a sparse file."""
    source, numel = Path(path).with_name("source"), count << 30
    row = 1 << 20
    with open(source, "wb") as file:
        file.truncate(numel)
        for gib in range(count):
            file.seek((gib << 30) + 12_345_678)
            file.write(b"marked %d" % gib)
    file = os.open(source, os.O_RDONLY)
    mapped = mmap.mmap(file, numel, prot=mmap.PROT_READ, flags=mmap.MAP_SHARED)
    os.close(file)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it cannot be written to
        held = StateDict(huge=torch.frombuffer(mapped, dtype=torch.uint8).view(-1, row), mark=1)
    anonymous = lambda: resident("RssAnon")  # noqa: E731 - pages of the source are the system's to drop
    before = anonymous()
    step("take", lambda: Snapshot.take(path, {"s": held}, options=TakeOptions(durable=False)))
    DONE["take"]["MiB"] = anonymous() - before
    held.clear()
    mapped = None
    source.unlink()
    here = Snapshot(path)
    for gib in (0, count // 2, count - 1):
        at = (gib << 30) + 12_345_678
        number, within = divmod(at, row)
        box = [slice(number, number + 1), slice(within, within + 9)]
        found = step(f"box in GiB {gib}", lambda box=box: here.read_object("0/s/huge", box=box))
        assert bytes(found.flatten().tolist()).rstrip(b"\0") == b"marked %d" % gib, found
    across = step("box over 64 MiB", lambda: here.read_object("0/s/huge", box=[slice(900, 964)]))
    assert across.shape == (64, row)
    assert not across.any()
    del across
    assert step("verify", here.verify).ok


def tiny(path, count):
    """A manifest by hand, with so many entries that say nothing: it is refused, or opened, in bounded memory."""
    Snapshot.take(path, {"s": StateDict(x=1)}, options=TakeOptions(durable=False))
    whole = (Path(path) / METADATA).read_bytes()
    head, _, _ = whole.partition(b'"manifest":{')
    several = 1 << 16
    with open(Path(path) / "body", "wb") as file:
        file.write(head + b'"manifest":{')
        for begin in range(0, count, several):
            numbers = range(begin, min(begin + several, count))
            lines = [b'"0/s/%d":{"type":"int","serialized_value":"1"}' % n for n in numbers]
            file.write((b"," if begin else b"") + b",".join(lines))
        file.write(b"}")
    body = (Path(path) / "body").read_bytes()
    (Path(path) / "body").unlink()
    with open(Path(path) / METADATA, "wb") as file:
        file.write(body)
        file.write(b',"digest":"%s"}' % digest_range(body).encode())
    size = len(body) >> 20
    DONE["manifest"] = {"MiB": size}
    del body
    now = resident("VmSize")
    room = 9 * size + 512
    resource.setrlimit(resource.RLIMIT_AS, ((now + room) << 20, -1))
    told = []
    for name, verb in (
        ("open", lambda: Snapshot(path).metadata),
        ("restore", lambda: Snapshot(path).restore({"s": StateDict()})),
        ("read_object", lambda: Snapshot(path).read_object("0/s/1")),
        ("verify", lambda: Snapshot(path).verify()),
    ):

        def tried(verb=verb):
            try:
                return f"{verb()!r:.80}"
            except SnapshotError as error:
                return f"{type(error).__name__}: {error!s:.120}"

        told.append(f"{name}: {step(name, tried)}")
        DONE[name]["told"] = told[-1]
    worst = max(DONE[name]["MiB"] for name in ("open", "restore", "read_object", "verify"))
    DONE["worst"] = {"times its size": round(worst / size, 1)}


if __name__ == "__main__":
    torch.set_num_threads(1)
    {"entries": entries, "tensors": tensors, "huge": huge, "tiny": tiny}[sys.argv[1]](sys.argv[2], int(sys.argv[3]))
    DONE["bytes"] = sum(file.stat().st_size for file in Path(sys.argv[2]).rglob("*") if file.is_file())
    print(json.dumps(DONE))
