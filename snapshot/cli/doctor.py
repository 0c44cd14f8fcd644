"""`snapshot doctor`: test which operations work at a URL, how fast, and what would help."""

from __future__ import annotations

import argparse
import math
import platform
import secrets
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from snapshot.cli.arguments import add_json, add_storage, count, environment, options_of, size
from snapshot.cli.screen import Column, ExitStatus, ScreenTable, emit, paint, printable, say
from snapshot.errors import SnapshotError, StorageConflictError, StorageNotFoundError
from snapshot.io.host_memory import available_memory
from snapshot.io.loop import run as wait
from snapshot.io.registry import open_storage
from snapshot.io.storage import ABSENT, Storage
from snapshot.io.system import count_cores, file_system, resource, without_new_folders
from snapshot.io.url import URL
from snapshot.text import VERSION, counted, size_text

if TYPE_CHECKING:
    import torch

# Findings of `snapshot doctor`, in order.

MiB = 1 << 20


@dataclass
class Findings:
    """Findings, in order."""

    checks: list[dict[str, Any]] = field(default_factory=list)
    speeds: list[dict[str, Any]] = field(default_factory=list)
    advice: list[str] = field(default_factory=list)
    settings: list[str] = field(default_factory=list)

    def note(self, name: str, text: str, ok: bool | None = True) -> None:
        """Add a finding: good, bad, or (None) neither."""
        self.checks.append({"check": name, "ok": ok, "text": text})

    @property
    def ok(self) -> bool:
        return all(check["ok"] is not False for check in self.checks)


def existing_folder(url: URL) -> Path:
    """Return the folder at a URL, or its nearest existing parent."""
    folder = Path(url.location)
    return next(each for each in (folder, *folder.parents) if each.exists())


# Tests of a storage: each operation is tried once.


async def try_abilities(url: URL, options: Mapping[str, Any], findings: Findings) -> bool:
    """Try each operation of the storage. Return True if snapshots can be written to it."""
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
    findings.note("write", "this storage is read-only", ok=None)
    began = time.perf_counter()
    try:
        await storage.stat("snapshot-doctor")
    except StorageNotFoundError:
        findings.note("read", f"it responds ({(time.perf_counter() - began) * 1000:.1f} ms)")
    except SnapshotError as error:
        findings.note("read", str(error), ok=False)


async def _write(storage: Storage) -> str:
    await storage.put("small", b"x" * 1000)
    return "a small file was written"


async def _read(storage: Storage) -> str:
    part = bytearray(10)
    await storage.read_into("small", 100, [part])
    if await storage.get("small") != b"x" * 1000 or bytes(part) != b"x" * 10:
        raise SnapshotError("the bytes read must equal the bytes written")
    return "it was read, as a whole and in part"


async def _list(storage: Storage) -> str | None:
    if not storage.capabilities.list:
        return None
    names = await storage.list()
    if names != ["small"]:
        raise SnapshotError(f"the listing must be ['small'], got {names}")
    return "it is listed"


async def _condition(storage: Storage) -> str | None:
    if not storage.capabilities.conditional_put:
        return None
    try:
        await storage.put("small", b"y", expect=ABSENT)
    except StorageConflictError:
        return "a conflicting write was refused"
    raise SnapshotError("a conditional put replaced an existing file: two jobs could overwrite each other's snapshots")


async def _delete(storage: Storage) -> str | None:
    if not storage.capabilities.delete:
        return None
    await storage.delete(["small"])
    try:
        await storage.stat("small")
    except StorageNotFoundError:
        return "it was deleted"
    raise SnapshotError("a deleted file still exists")


_TRIALS: dict[str, Callable[[Storage], Any]] = {
    "write": _write,
    "read": _read,
    "list": _list,
    "condition": _condition,
    "delete": _delete,
}


def _describe(url: URL, findings: Findings) -> None:
    if url.scheme != "file":
        findings.note("place", str(url), ok=None)
        return
    folder = existing_folder(url)
    kind, free = file_system(folder), shutil.disk_usage(folder).free
    findings.note("place", f"{url}: {kind}, {size_text(free)} free", ok=None)
    if kind in ("tmpfs", "ramfs"):
        findings.advice.append(f"{url} is in memory ({kind}), so its files do not survive a restart")
    if kind == "overlay":
        findings.advice.append(f"{url} is a container's layer, and is deleted with it: mount a volume for snapshots")


def _promises(storage: Storage, findings: Findings) -> None:
    can = storage.capabilities
    if not can.atomic_put:
        findings.advice.append("writes are not atomic there, so snapshots can be read but not taken")
    elif not can.conditional_put:
        findings.advice.append("no conditional writes: let only one job write to a path at a time")
    if not can.durable:
        findings.advice.append("writes are not known to survive a power loss")


# Speed of a storage with different settings, measured until the measurements agree.

BETTER = 1.15
"""Minimum speed-up over the defaults for settings to be proposed."""
AGREEING = 1.1
"""Maximum ratio of the best to the second best measurement of a setting if the two agree."""
FEWEST, MOST = 2, 8
"""Minimum and maximum rounds of measurements: they end when those of each setting agree."""
MATTERS = ("write", "read")
"""Measurements that count."""


@dataclass
class Trial:
    """One choice of settings, with its measurements."""

    name: str
    environment: dict[str, str] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    write: list[float] = field(default_factory=list)
    """Bytes per second, by round."""
    read: list[float] = field(default_factory=list)

    def best(self, what: str) -> float:
        return max(getattr(self, what), default=0.0)

    def spread(self, what: str) -> float:
        """Return the ratio of the best to the second best measurement; infinite before there are two."""
        rates = sorted(getattr(self, what))
        return rates[-1] / rates[-2] if len(rates) >= FEWEST else float("inf")

    def agrees(self) -> bool:
        """Return True if the two best measurements are about equal: noise only ever makes one slower."""
        return all(self.spread(what) <= AGREEING for what in MATTERS)


def measure_speeds(url: URL, options: Mapping[str, Any], nbytes: int, seconds: int, findings: Findings) -> None:
    """Take and restore with some settings, and propose those that are clearly better than the defaults.

    Each setting is measured again until its measurements agree. If they do not, nothing is proposed.
    """
    if url.scheme == "file" and shutil.disk_usage(existing_folder(url)).free < 3 * nbytes:
        findings.advice.append("not enough free space to measure: pass a smaller --size")
        return
    import torch

    tensors = {f"t{i}": torch.randint(0, 255, (max(1, nbytes // 8),), dtype=torch.uint8) for i in range(8)}
    trials = list(_trials(url, options))
    ends = time.monotonic() + seconds
    try:
        for trial in _turns(trials, ends):
            say(f"measuring {trial.name} ...")
            write, read = _measured(url, {**options, **trial.options}, trial.environment, tensors)
            trial.write.append(write)
            trial.read.append(read)
    except SnapshotError as error:
        findings.note("speed", f"{trial.name}: {error}", ok=False)
        return
    finally:
        say("")
    measured = [trial for trial in trials if trial.write]
    findings.speeds = [
        {
            "settings": trial.name,
            "write": trial.best("write"),
            "read": trial.best("read"),
            "repeats": len(trial.write),
            "agrees": trial.agrees(),
        }
        for trial in measured
    ]
    repeated = [trial for trial in measured if len(trial.write) >= FEWEST]
    noisy = [trial for trial in repeated if not trial.agrees()]
    if trials[0] not in repeated:
        findings.settings.append("none: no time to measure twice; pass more --seconds")
    elif noisy:
        findings.settings.append(
            f"none: this machine is too noisy: the best of {counted(len(noisy[0].write), 'measurement')} of "
            f"{noisy[0].name} differ by more than {AGREEING - 1:.0%}; retry when nothing else runs, or with more "
            "--seconds or a larger --size"
        )
    else:
        _propose(repeated, findings)


def _turns(trials: Sequence[Trial], ends: float) -> Iterator[Trial]:
    """Yield settings to measure, in rounds, and again those whose measurements do not agree yet.

    The first round measures the defaults, regardless of the time; later rounds each setting that was measured.
    """
    for turn in range(MOST):
        for trial in [trial for trial in trials if len(trial.write) == turn and not trial.agrees()]:
            if time.monotonic() > ends and trials[0].write:
                return
            yield trial


def _propose(measured: Sequence[Trial], findings: Findings) -> None:
    """Add the settings that are clearly better than the defaults, if any."""
    defaults = measured[0]

    def gains(trial: Trial) -> list[float]:
        return [trial.best(what) / defaults.best(what) for what in MATTERS]

    best = max(
        (trial for trial in measured if min(gains(trial)) > 1 / AGREEING), key=lambda trial: math.prod(gains(trial))
    )
    if max(gains(best)) >= BETTER:
        findings.settings += [f"export {key}={value}" for key, value in best.environment.items()]
        if best.options:
            findings.settings.append(f"storage_options={best.options!r}")
    else:
        findings.settings.append("none: no tried setting is clearly better than the defaults")


def _trials(url: URL, options: Mapping[str, Any]) -> Iterator[Trial]:
    """Yield the settings to try, the defaults first."""
    yield Trial("the defaults")
    if url.scheme == "file":
        for direct in ("never", "always"):
            for lanes in sorted({1, min(4, max(2, count_cores()))}):
                given = {"SNAPSHOT_LANES": str(lanes), "SNAPSHOT_DIRECT_IO": direct}
                name = " ".join(f"{key.removeprefix('SNAPSHOT_').lower()}={each}" for key, each in given.items())
                yield Trial(name, environment=given)
        return
    for part in (8 * MiB, 32 * MiB):
        for at_once in (4, 16, 48):
            given_options = {"part_bytes": part, "concurrency": at_once}
            if _accepts(url, {**options, **given_options}):
                yield Trial(f"part_bytes={part // MiB}MiB concurrency={at_once}", options=given_options)
        if not _accepts(url, {**options, "part_bytes": part, "concurrency": 4}) and _accepts(
            url, {**options, "part_bytes": part}
        ):
            yield Trial(f"part_bytes={part // MiB}MiB", options={"part_bytes": part})


def _accepts(url: URL, options: Mapping[str, Any]) -> bool:
    try:
        open_once(url, options)
    except (ValueError, TypeError):
        return False
    return True


def open_once(url: URL, options: Mapping[str, Any]) -> None:
    """Open and close the storage, to raise errors in the URL or options."""
    wait(open_storage(url, options).close())


def _measured(
    url: URL, options: Mapping[str, Any], variables: Mapping[str, str], tensors: dict[str, torch.Tensor]
) -> tuple[float, float]:
    """Return the bytes per second of a durable take, and of a restore."""
    from snapshot.snapshot import Snapshot
    from snapshot.state.stateful import StateDict

    nbytes = sum(tensor.numel() for tensor in tensors.values())
    state = {"doctor": StateDict(tensors)}
    place = url.join(f"snapshot-doctor-{secrets.token_hex(6)}").reveal()
    snapshot = Snapshot(place, storage_options=options)
    with environment(variables):
        try:
            began = time.perf_counter()
            Snapshot.take(place, state, storage_options=options)
            taken = time.perf_counter()
            with snapshot.new_session(None) as session:  # otherwise, files are read from memory
                wait(session.storage.drop_caches([*snapshot.metadata.files]))
            dropped = time.perf_counter()
            snapshot.restore(state)
            restored = time.perf_counter()
        finally:
            with suppress(SnapshotError):
                snapshot.delete()
    return nbytes / (taken - began), nbytes / (restored - dropped)


# `snapshot doctor`

EXTRAS = {
    "s3": ("s3fs", "aiobotocore", "obstore"),
    "gcs": ("gcsfs", "aiohttp"),
    "azure": ("azure.storage.blob", "azure.identity"),
    "http": ("aiohttp",),
    "zstd": ("zstandard",),
    "otel": ("opentelemetry",),
    "cli": ("shtab",),
}
SHARED = "/dev/shm"  # noqa: S108 - shared memory between processes


DESCRIPTION = (
    "Test if this machine can write, read, list and delete at a URL, how fast with which settings, and what would "
    "help. It uses a new folder below the URL, and removes it. Without a URL it examines this machine only."
)
EXAMPLES = [
    ("doctor", "this machine: versions, extras, limits"),
    ("doctor s3://bucket/run", "and a place, with settings to paste"),
    ("doctor /scratch --size 1GiB --seconds 60", "measured more thoroughly"),
    ("doctor s3://bucket/run --near /nvme/run", "both tiers of a manager with near="),
]


def add(parser: argparse.ArgumentParser) -> None:
    """Add the verb's arguments."""
    parser.add_argument("url", nargs="?", metavar="URL", help="where snapshots will be saved")
    parser.add_argument("--near", metavar="FOLDER", help="also test the near folder of a manager")
    parser.add_argument("--size", type=size, default=128 * MiB, metavar="SIZE", help="bytes to write (128MiB)")
    parser.add_argument("--seconds", type=count, default=20, metavar="N", help="approximate seconds to measure (20)")
    add_json(parser)
    add_storage(parser)


def run(arguments: argparse.Namespace) -> ExitStatus:
    """Examine the machine and the URL, and print the findings."""
    findings = Findings()
    options = options_of(arguments)
    _machine(findings)
    near = Findings()
    if arguments.near is not None:
        _examine(URL.parse(arguments.near), {}, arguments, near)
    if arguments.url:
        _examine(URL.parse(arguments.url), options, arguments, findings)
    content = {"ok": findings.ok and near.ok, **asdict(findings)}
    lines = [*_lines(findings)]
    if arguments.near is not None:
        content["near"] = {"ok": near.ok, **asdict(near)}
        lines += ["", paint(f"near: {printable(arguments.near)}", "bold"), *_lines(near), *_compare(near, findings)]
    emit(arguments, content, lines)
    return ExitStatus.OK if findings.ok and near.ok else ExitStatus.FOUND


def _examine(url: URL, options: Mapping[str, Any], arguments: argparse.Namespace, findings: Findings) -> None:
    """Test one storage."""
    open_once(url, options)  # an invalid URL or option is raised before any test
    with without_new_folders(Path(url.location)) if url.scheme == "file" else nullcontext():
        if wait(try_abilities(url, options, findings)) and findings.ok:
            measure_speeds(url, options, arguments.size, arguments.seconds, findings)


def _compare(near: Findings, far: Findings) -> Iterator[str]:
    """Yield how long one GiB takes on each tier."""
    fastest = [max((each["write"] for each in found.speeds), default=0.0) for found in (near, far)]
    if all(fastest):
        seconds = [(1 << 30) / each for each in fastest]
        yield f"\none GiB is near after {seconds[0]:.2g} s, and far after {seconds[1]:.2g} s more"


def _lines(findings: Findings) -> Iterator[str]:
    for check in findings.checks:
        mark, style = {True: ("ok", "green"), False: ("FAILED", "red"), None: ("-", "dim")}[check["ok"]]
        yield f"{paint(f'{mark:<7}', style)}{check['check']:<13} {printable(check['text'])}"
    if findings.speeds:
        yield ""
        yield from (
            ScreenTable([Column("settings", shrinks=True), *map(_rate_column, MATTERS)]).fill(findings.speeds).lines()
        )
    for title, lines in (("What would help:", findings.advice), ("Settings to paste:", findings.settings)):
        if lines:
            yield f"\n{title}"
            yield from (f"  {printable(line)}" for line in lines)


def _rate_column(what: str) -> Column:
    return Column(what, lambda row: f"{size_text(row[what])}/s", right=True)


# The machine


def _machine(findings: Findings) -> None:
    import torch

    devices = f", {torch.cuda.device_count()} CUDA devices" if torch.cuda.is_available() else ""
    system = f"Python {platform.python_version()}, {platform.system()} {platform.release()}"
    findings.note("versions", f"snapshot {VERSION}, torch {torch.__version__}, {system}")
    cores, memory = count_cores(), available_memory()
    findings.note("machine", f"{cores} cores, {size_text(memory)} of memory free{devices}")
    if memory < 1 << 30:
        findings.advice.append(f"only {size_text(memory)} of memory is free: pass memory_budget_bytes to takes")
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0] if resource else -1
    if 0 <= soft < 1024:
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
    except ModuleNotFoundError:  # raised for a missing parent package
        return False
