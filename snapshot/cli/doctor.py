"""`snapshot doctor`: what works at a place, how fast, and what would help."""

from __future__ import annotations

import argparse
import os
import platform
import resource
import secrets
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from snapshot.cli.arguments import Verbs, add_json, add_storage, count, options_of, size, verb
from snapshot.cli.bench_place import available_memory, file_system
from snapshot.cli.screen import Column, Table, as_json, paint, printable, say
from snapshot.cli.status import ExitStatus
from snapshot.engine.loop import run as wait
from snapshot.errors import SnapshotError, StorageConflictError, StorageNotFoundError
from snapshot.registry import open_storage
from snapshot.report import size_text
from snapshot.snapshot import Snapshot
from snapshot.state.stateful import StateDict
from snapshot.storage import ABSENT, URL, Storage
from snapshot.version import VERSION

MiB = 1 << 20
EXTRAS = {
    "s3": ("s3fs", "aiobotocore", "obstore"),
    "gcs": ("gcsfs", "aiohttp"),
    "azure": ("azure.storage.blob", "azure.identity"),
    "http": ("aiohttp",),
    "fsspec": ("fsspec",),
    "zstd": ("zstandard",),
    "yaml": ("yaml",),
    "cli": ("shtab",),
}
SHARED = "/dev/shm"  # noqa: S108 - where memory is shared between processes
BETTER = 1.15
"""How many times as fast as the defaults other settings are, if they are to be proposed."""


def add(verbs: Verbs) -> None:
    """Describe the verb's arguments."""
    parser = verb(
        verbs,
        "doctor",
        "Find out whether this machine can write, read, list and delete at a URL, how fast with which settings, and "
        "what would help. It works in a fresh folder below the URL, and removes it. Without a URL it looks at this "
        "machine only.",
        [
            ("doctor", "this machine: versions, extras, limits"),
            ("doctor s3://bucket/run", "and a place, with settings to paste"),
            ("doctor /scratch --size 1GiB --seconds 60", "measured more thoroughly"),
        ],
        run,
    )
    parser.add_argument("url", nargs="?", metavar="URL", help="where snapshots are to be")
    parser.add_argument("--size", type=size, default=128 * MiB, metavar="SIZE", help="of what is written (128MiB)")
    parser.add_argument("--seconds", type=count, default=20, metavar="N", help="how long to measure, about (20)")
    add_json(parser)
    add_storage(parser)


@dataclass
class Findings:
    """What was found out, in order."""

    checks: list[dict[str, Any]] = field(default_factory=list)
    speeds: list[dict[str, Any]] = field(default_factory=list)
    advice: list[str] = field(default_factory=list)
    settings: list[str] = field(default_factory=list)

    def note(self, name: str, text: str, ok: bool | None = True) -> None:
        """One thing: good, bad, or (None) neither."""
        self.checks.append({"check": name, "ok": ok, "text": text})

    @property
    def ok(self) -> bool:
        return all(check["ok"] is not False for check in self.checks)


def run(arguments: argparse.Namespace) -> ExitStatus:
    """Look at the machine and the place, and print what was found."""
    findings = Findings()
    options = options_of(arguments)
    _machine(findings)
    if arguments.url:
        url = URL.parse(arguments.url)
        _opens(url, options)  # what is no URL, or an option of none, is an error of its own
        with _as_it_was(url):
            if wait(_abilities(url, options, findings)) and findings.ok:
                _speeds(url, options, arguments.size, arguments.seconds, findings)
    if arguments.json:
        told = {"ok": findings.ok, "checks": findings.checks, "speeds": findings.speeds}
        print(as_json(told | {"advice": findings.advice, "settings": findings.settings}))
    else:
        for line in _lines(findings):
            print(line)
    return ExitStatus.OK if findings.ok else ExitStatus.FOUND


def _lines(findings: Findings) -> Iterator[str]:
    for check in findings.checks:
        mark, style = {True: ("ok", "green"), False: ("FAILED", "red"), None: ("-", "dim")}[check["ok"]]
        yield f"{paint(f'{mark:<7}', style)}{check['check']:<13} {printable(check['text'])}"
    if findings.speeds:
        rows = [(each["settings"], _rate(each["write"]), _rate(each["read"])) for each in findings.speeds]
        columns = [Column("settings", shrinks=True), Column("write", right=True), Column("read", right=True)]
        yield ""
        yield from Table(columns, rows).lines()
    for title, lines in (("What would help:", findings.advice), ("Settings to paste:", findings.settings)):
        if lines:
            yield f"\n{title}"
            yield from (f"  {printable(line)}" for line in lines)


def _rate(nbytes: float) -> str:
    return f"{size_text(nbytes)}/s"


# The machine


def _machine(findings: Findings) -> None:
    devices = f", {torch.cuda.device_count()} CUDA devices" if torch.cuda.is_available() else ""
    system = f"Python {platform.python_version()}, {platform.system()} {platform.release()}"
    findings.note("versions", f"snapshot {VERSION}, torch {torch.__version__}, {system}")
    cores, memory = len(os.sched_getaffinity(0)), available_memory()
    findings.note("machine", f"{cores} cores, {size_text(memory)} of memory free{devices}")
    if memory < 1 << 30:
        findings.advice.append(f"only {size_text(memory)} of memory is free: give takes a memory_budget_bytes")
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < 1024:
        findings.advice.append(f"a process may open {soft} files only: ulimit -n 4096")
    with suppress(OSError):
        free = shutil.disk_usage(SHARED).free
        if free < 256 * MiB:
            findings.advice.append(f"{SHARED} has {size_text(free)} free: too little for worker='process'")
    there = [name for name, modules in EXTRAS.items() if all(map(_installed, modules))]
    missing = [name for name in EXTRAS if name not in there]
    findings.note(
        "extras", f"{', '.join(there) or 'none'}" + (f"; not installed: {', '.join(missing)}" if missing else "")
    )


def _installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # of a package above it
        return False


# The place


@contextmanager
def _as_it_was(url: URL) -> Iterator[None]:
    """Afterwards, folders that were not there are gone again."""
    missing = []
    folder = Path(url.location)
    while url.scheme == "file" and not folder.exists():
        missing.append(folder)
        folder = folder.parent
    try:
        yield
    finally:
        with suppress(OSError):  # somebody else has put something there meanwhile
            for made in missing:
                made.rmdir()


async def _abilities(url: URL, options: Mapping[str, Any], findings: Findings) -> bool:
    """Try each thing that a storage can do; whether it can be written to."""
    below = url.join(f"snapshot-doctor-{secrets.token_hex(6)}")
    storage = open_storage(below, options)
    can = storage.capabilities
    _describe(url, findings)
    try:
        if not can.write:
            await _reading(storage, findings)
            return False
        for name, work in _TRIALS.items():
            began = time.perf_counter()
            try:
                told = await work(storage)
            except (SnapshotError, OSError) as error:
                findings.note(name, f"{error}", ok=False)
                if name == "write":
                    return False
                continue
            if told is not None:
                findings.note(name, f"{told} ({(time.perf_counter() - began) * 1000:.1f} ms)")
    finally:
        with suppress(SnapshotError):
            if can.delete and can.list:
                await storage.delete(await storage.list())
        await storage.close()
    _promises(storage, findings)
    return can.atomic_put


async def _reading(storage: Storage, findings: Findings) -> None:
    findings.note("write", "this storage is for reading only", ok=None)
    began = time.perf_counter()
    try:
        await storage.stat("snapshot-doctor")
    except StorageNotFoundError:
        findings.note("read", f"it answers ({(time.perf_counter() - began) * 1000:.1f} ms)")
    except SnapshotError as error:
        findings.note("read", str(error), ok=False)


async def _write(storage: Storage) -> str:
    await storage.put("small", b"x" * 1000)
    return "a small file was put"


async def _read(storage: Storage) -> str:
    part = bytearray(10)
    await storage.read_into("small", 100, [part])
    if await storage.get("small") != b"x" * 1000 or bytes(part) != b"x" * 10:
        raise SnapshotError("what was read is not what was written")
    return "it came back, whole and in part"


async def _list(storage: Storage) -> str | None:
    if not storage.capabilities.list:
        return None
    names = await storage.list()
    if names != ["small"]:
        raise SnapshotError(f"one file was written, and the listing says {names}")
    return "it is listed"


async def _condition(storage: Storage) -> str | None:
    if not storage.capabilities.conditional_put:
        return None
    try:
        await storage.put("small", b"y", expect=ABSENT)
    except StorageConflictError:
        return "of two writers one wins"
    raise SnapshotError(
        "a put that must not replace a file replaced it: two jobs could overwrite each other's snapshots"
    )


async def _delete(storage: Storage) -> str | None:
    if not storage.capabilities.delete:
        return None
    await storage.delete(["small"])
    try:
        await storage.stat("small")
    except StorageNotFoundError:
        return "it is gone"
    raise SnapshotError("a file was deleted, and is there still")


_TRIALS: dict[str, Callable[[Storage], Any]] = {
    "write": _write, "read": _read, "list": _list, "condition": _condition, "delete": _delete,
}  # fmt: skip


def _describe(url: URL, findings: Findings) -> None:
    if url.scheme != "file":
        findings.note("place", str(url), ok=None)
        return
    folder = _existing(url)
    kind, free = file_system(folder), shutil.disk_usage(folder).free
    findings.note("place", f"{url}: {kind}, {size_text(free)} free", ok=None)
    if kind in ("tmpfs", "ramfs"):
        findings.advice.append(f"{url} is memory ({kind}): nothing there survives a restart")
    if kind == "overlay":
        findings.advice.append(f"{url} is a container's own layer, which is gone with it: mount a volume for snapshots")


def _promises(storage: Storage, findings: Findings) -> None:
    can = storage.capabilities
    if not can.atomic_put:
        findings.advice.append(
            "a file may be seen half written there, so snapshots can be read from it but not taken to it"
        )
    elif not can.conditional_put:
        findings.advice.append("no condition can be set there: let only one job write to a path at a time")
    if not can.durable:
        findings.advice.append("nothing says that what was written there survives a loss of power")


# Speed


def _speeds(url: URL, options: Mapping[str, Any], nbytes: int, seconds: int, findings: Findings) -> None:
    """Take and restore with some settings, the defaults first and last, and propose what is clearly better."""
    if url.scheme == "file" and shutil.disk_usage(_existing(url)).free < 3 * nbytes:
        findings.advice.append("there is too little room to measure: give a smaller --size")
        return
    tensors = {f"t{i}": torch.randint(0, 255, (max(1, nbytes // 8),), dtype=torch.uint8) for i in range(8)}
    trials = list(_trials(url, options))
    best: dict[str, tuple[float, float]] = {}
    ends = time.monotonic() + seconds
    for turn in range(3):
        for name, environment, given in trials:
            if time.monotonic() > ends and len(best) > turn:
                break
            say(f"measuring {name} ...")
            try:
                write, read = _measured(url, {**options, **given}, environment, tensors)
            except SnapshotError as error:
                findings.note("speed", f"{name}: {error}", ok=False)
                say("")
                return
            known = best.get(name, (0.0, 0.0))
            best[name] = max(known[0], write), max(known[1], read)
    say("")
    findings.speeds = [{"settings": name, "write": write, "read": read} for name, (write, read) in best.items()]
    # what was just written to a file is read from memory, which says nothing about its disk
    matters = (0,) if url.scheme == "file" else (0, 1)

    def gains(name: str) -> list[float]:
        return [best[name][each] / best[trials[0][0]][each] for each in matters]

    name, environment, given = max((each for each in trials if each[0] in best), key=lambda each: min(gains(each[0])))
    if min(gains(name)) > 1 / BETTER and max(gains(name)) >= BETTER:
        findings.settings += [f"export {key}={value}" for key, value in environment.items()]
        if given:
            findings.settings.append(f"storage_options={given!r}")
    else:
        findings.settings.append("none: nothing that was tried is clearly better than the defaults")


def _existing(url: URL) -> Path:
    folder = Path(url.location)
    while not folder.exists():
        folder = folder.parent
    return folder


def _trials(url: URL, options: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, str], dict[str, Any]]]:
    """Settings to try: a name, environment variables, storage options."""
    yield "the defaults", {}, {}
    if url.scheme == "file":
        for direct in ("never", "always"):
            for lanes in sorted({1, min(4, max(2, len(os.sched_getaffinity(0))))}):
                given = {"SNAPSHOT_LANES": str(lanes), "SNAPSHOT_DIRECT_IO": direct}
                yield (
                    " ".join(f"{key.removeprefix('SNAPSHOT_').lower()}={each}" for key, each in given.items()),
                    given,
                    {},
                )
        return
    for part in (8 * MiB, 32 * MiB):
        for at_once in (4, 16, 48):
            given_options = {"part_bytes": part, "concurrency": at_once}
            if _accepts(url, {**options, **given_options}):
                yield f"part_bytes={part // MiB}MiB concurrency={at_once}", {}, given_options
        if not _accepts(url, {**options, "part_bytes": part, "concurrency": 4}) and _accepts(
            url, {**options, "part_bytes": part}
        ):
            yield f"part_bytes={part // MiB}MiB", {}, {"part_bytes": part}


def _accepts(url: URL, options: Mapping[str, Any]) -> bool:
    try:
        _opens(url, options)
    except (ValueError, TypeError):
        return False
    return True


def _opens(url: URL, options: Mapping[str, Any]) -> None:
    """Raise what keeps the storage from being opened."""
    wait(open_storage(url, options).close())


def _measured(
    url: URL, options: Mapping[str, Any], environment: Mapping[str, str], tensors: dict[str, torch.Tensor]
) -> tuple[float, float]:
    """Bytes a second of a durable take, and of a restore."""
    nbytes = sum(tensor.numel() for tensor in tensors.values())
    state = {"doctor": StateDict(tensors)}
    place = url.join(f"snapshot-doctor-{secrets.token_hex(6)}").reveal()
    snapshot = Snapshot(place, storage_options=options)
    with _set(environment):
        try:
            began = time.perf_counter()
            Snapshot.take(place, state, storage_options=options)
            taken = time.perf_counter()
            snapshot.restore(state)
            restored = time.perf_counter()
        finally:
            with suppress(SnapshotError):
                snapshot.delete()
    return nbytes / (taken - began), nbytes / (restored - taken)


@contextmanager
def _set(environment: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in environment}
    os.environ.update(environment)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
