"""Real jobs on hosts that are namespaces, what happens to them, and the files that they leave.

Files are read as a person would read them, with no function of the library.
"""

import contextlib
import json
import os
import random
import select
import shutil
import signal
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from tests.soak import namespaces
from tests.soak.namespaces import BUCKET, decode_facts, receive, send

TIMEOUT = 4.0
"""The `timeout` of the managers: after it, a silent rank counts as dead."""
LONGEST = {"meet": 15.0, "begin": 5.0, "restore": 75.0, "take": 45.0, "wait_far": 4.0, "close": 30.0, "choose": 60.0}
"""Seconds that a call may take. Those of `wait_far` and `close` come on top of what the caller gave."""
HEALS = 60.0
"""Seconds after which a healed run has its newest step far."""
SETTLED = 12.0
"""Seconds without a fault after which calls succeed."""


TEXTS = {
    "forked": "the run has forked",
    "superseded": "another job has continued this run",
    "exists": "SnapshotExistsError",
    "damaged": "no step can be restored",
}
"""Errors that the documentation explains, and a part of the text of each."""


class Wrong(AssertionError):
    """Something that the documentation excludes."""


@dataclass
class Taken:
    """A take, and what its job was promised."""

    value: int
    step: int
    attempt: str | None
    hosts: dict[int, int]
    """The hosts of its job, each with the generation of its near folder."""
    save_id: str = ""
    files: dict[str, int] = field(default_factory=dict)
    is_promised: bool = False
    is_far: bool = False


@dataclass
class Outcome:
    """The end of a call on one rank."""

    is_good: bool
    value: object = None
    kinds: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def __str__(self):
        return f"{self.value}" if self.is_good else f"{(self.kinds or ['?'])[0]}: {self.value}"

    def kind(self):
        """Return the kind of an error."""
        return next((kind for kind, text in TEXTS.items() if text in str(self)), "failed")


# Facts, as a person reads them


def line_of(attempts, tip=None, known=None):
    """Return the attempts of the line, each with the step and the save id at which it was left; (None, '') at first."""
    known = known or {each["name"]: each for each in attempts}
    at = tip if tip is not None else (attempts[-1] if attempts else None)
    found, limit, save_id = {}, None, ""
    while at is not None and at["name"] not in found:
        found[at["name"]] = limit, save_id
        parent = at.get("parent")
        if parent is None:
            break
        step = parent[1]
        if step is not None and (limit is None or step < limit):
            limit, save_id = step, parent[2] if len(parent) > 2 else ""
        elif step != limit:
            save_id = ""
        at = known.get(parent[0])
    return found


def is_on(line, taken):
    if taken.attempt not in line:
        return False
    limit, save_id = line[taken.attempt]
    return limit is None or taken.step < limit or (taken.step == limit and save_id in ("", taken.save_id))


def states_of(attempts):
    """Return the published attempts after each publication. The choice of a person publishes several at once."""
    top, is_open, found = 0, False, []
    for at, each in enumerate(attempts):
        is_open |= each["number"] <= top  # only a choice publishes an attempt after its number was taken
        is_open &= each.get("parent") is None or each["parent"][1] is not None
        top = max(top, each["number"])
        if not is_open:
            found.append(attempts[: at + 1])
    return found


def was_left(attempts, taken):
    """Say whether the line has ever left a step. It may have been removed then, although it is on the line again."""
    return any(
        taken.attempt in {each["name"] for each in state} and not is_on(line_of(state), taken)
        for state in states_of(attempts)
    )


def read_copies(near):
    """Return what a near folder knows of each run: its published attempts with their number, and the pending ones."""
    found = {}
    for folder in Path(near).glob("*/.run"):
        newest, pending = ([], 0), []
        for path in sorted(folder.glob("*.json")):
            with contextlib.suppress(FileNotFoundError):
                if len(path.stem) == 8:
                    newest = max(newest, decode_facts(path.read_bytes()), key=lambda each: each[1])
                else:
                    pending.append(json.loads(path.read_bytes().splitlines()[0]))
        pending += attempts_of_steps(folder.parent)
        names = {each["name"] for each in newest[0]}
        others = {each["name"]: each for each in pending if each["name"] not in names}
        found[folder.parent.name] = newest, list(others.values())
    return found


def attempts_of_steps(folder):
    """Return the attempts that the metadata of near steps have: a host with a replica knows them, too."""
    found = []
    for path in folder.glob("step-*/.snapshot_metadata"):
        with contextlib.suppress(FileNotFoundError, json.JSONDecodeError):
            note = (json.loads(path.read_bytes()).get("metadata") or {}).get("snapshot.tiers", {})
            found += [note["began"]] if "began" in note else []
    return found


# Jobs


class Job:
    """The ranks of one job, each a process on a host."""

    def __init__(self, world, hosts, per_host):
        self.world, self.number = world, world.next("job")
        self.hosts = hosts
        self.attempt, self.run = None, None
        self.step, self.value, self.is_broken, self.is_harmed = 0, None, False, False
        self.ranks = []
        for host in (each for each in hosts for _ in range(per_host)):
            log = world.folder / f"rank-{self.number}-{len(self.ranks)}.log"
            pid, calls = world.network.hosts[host].fork(log)
            self.ranks.append([host, pid, calls, log])

    def __str__(self):
        return f"job {self.number} on {''.join(self.world.names[host] for host in self.hosts)}"

    def alive(self):
        return [at for at, rank in enumerate(self.ranks) if rank[2] is not None]

    def call(self, function, *args, each=None, more=0.0):
        """Call a function on all ranks that live, and return the outcomes. Events happen meanwhile."""
        name = getattr(function, "__name__", "fork uploaders")
        began, limit = time.monotonic(), LONGEST.get(name, 5.0) + more
        found = {}
        for at in self.alive():
            try:
                send(self.ranks[at][2], (function, each(at) if each is not None else args))
            except OSError:
                self._drop(at, found)
        while waiting := [at for at in self.alive() if at not in found]:
            left = began + limit - time.monotonic()
            if left <= 0 and name == "meet":  # torch's own calls
                self.kill(*waiting)
                limit += 10.0
                continue
            if left <= 0:
                self._hang(name, waiting, limit)
            sources = {self.ranks[at][2]: at for at in waiting}
            ready, _, _ = select.select(list(sources), [], [], min(left, self.world.until_next()))
            for source in ready:
                at = sources[source]
                try:
                    is_good, value, seconds = receive(source)
                except EOFError:
                    self._drop(at, found)
                    continue
                found[at] = (
                    Outcome(is_good, value, [], seconds) if is_good else Outcome(False, value[1], value[0], seconds)
                )
            self.world.pass_time()
        outcomes = [found.get(at, Outcome(False, "died", ["Died"])) for at in range(len(self.ranks))]
        seconds = time.monotonic() - began
        self.world.note_time(name, max(0.0, seconds - more))
        self.world.say(
            f"{self}: {name}{args if each is None else ''} {seconds:.2f} s: {[str(one)[:160] for one in outcomes]}"
        )
        if seconds > 20:
            for _, _, _, log in self.ranks:
                self.world.say(f"{log.name}: {log.read_text()[-1500:]}")
        if not all(one.is_good for one in outcomes):
            self.is_broken = len(self.ranks) > 1 or not self.alive()
        return outcomes

    def _drop(self, at, found):
        self.ranks[at][2].close()
        self.ranks[at][2] = None
        found[at] = Outcome(False, "died", ["Died"])

    def _hang(self, name, waiting, limit):
        for at in waiting:
            host, pid, _, _ = self.ranks[at]
            self.world.network.hosts[host].ask(os.kill, pid, signal.SIGUSR1)
        time.sleep(1)
        stacks = "\n".join(Path(f"{self.ranks[at][3]}.stacks").read_text()[-6000:] for at in waiting)
        raise Wrong(f"{self}: {name} did not return within {limit:.0f} s on ranks {waiting}:\n{stacks}")

    def kill(self, *ranks):
        for at in ranks or self.alive():
            host, pid, calls, _ = self.ranks[at]
            if calls is not None:
                self.world.network.hosts[host].ask(namespaces.kill, pid)

    def end(self):
        """Kill what is left, and forget it."""
        self.kill()
        for rank in self.ranks:
            if rank[2] is not None:
                rank[2].close()
                rank[2] = None


# The world


class World:
    """A run on the hosts of a network, from its first job to its last, with what happens to them."""

    def __init__(self, network, seed):
        self.network, self.seed, self.chance = network, seed, random.Random(seed)
        chance = self.chance
        self.folder = network.folder / f"seed-{seed}"
        self.folder.mkdir()
        self.count = min(len(network.hosts), chance.choices([2, 3, 4], [5, 3, 2])[0])
        self.names = "abcd"
        self.is_bucket = chance.random() < 0.7
        self.is_slow_to_give_up = chance.random() < 0.15
        self.is_warm = chance.random() < 0.95
        self.has_tcp = chance.random() < 0.6
        self.names_address = chance.random() < 0.3
        self.upload = chance.choice(["latest", "latest", 1, None])
        self.keeps_all = chance.random() < 0.6
        self.options = {
            "timeout": TIMEOUT,
            "upload": self.upload,
            "replicas": chance.choice([0, 1, 1]),
            "upload_compression": chance.choice([None, None, None, "zstd"]),
        }
        if self.keeps_all:
            self.options["keep_near"] = None
        if self.is_bucket:
            self.far, self.storage = (
                f"s3://{BUCKET}/run",
                {
                    "key": "testkey",
                    "secret": "testsecret",
                    "endpoint_url": network.bucket,
                    "client_kwargs": {"region_name": "us-east-1"},
                },
            )
            if not self.is_slow_to_give_up:
                self.storage |= {"timeout": 3, "deadline": 5}
            self.options["storage_options"] = self.storage
        else:
            self.far, self.storage = str(self.folder / "far"), {}
        self.counters, self.events, self.longest, self.calls = Counter(), Counter(), {}, 0
        self.lines, self.began = [], time.monotonic()
        self.taken, self.generation = {}, [0] * self.count
        self.cuts, self.stopped, self.is_down = {}, set(), False
        self.last_fault = time.monotonic() - 1000.0
        self.timers, self.later, self.jobs = [], [], []
        (self.folder / "hosts").mkdir()
        if self.is_bucket:
            network.hub.ask(namespaces.empty_bucket)

    # Notes

    def next(self, what):
        self.counters[what] += 1
        return self.counters[what]

    def say(self, text):
        self.lines.append(f"{time.monotonic() - self.began:7.2f}  {text}")

    def note_time(self, name, seconds):
        self.calls += 1
        self.longest[name] = max(self.longest.get(name, 0.0), seconds)

    # Time

    def until_next(self):
        return max(0.0, min([0.5, *(due - time.monotonic() for due, _, _ in self.timers)]))

    def pass_time(self):
        """Let happen what is due."""
        for each in sorted(self.timers, key=lambda each: each[:2]):
            if each[0] <= time.monotonic():
                self.timers.remove(each)
                each[2]()

    def after(self, seconds, work):
        self.timers.append((time.monotonic() + seconds, self.next("timer"), work))

    def wait(self, seconds):
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            time.sleep(min(left, self.until_next()))
            self.pass_time()

    # Events

    def is_calm(self, since):
        """Say whether no fault has been active since some seconds before a time."""
        return not (self.cuts or self.stopped or self.is_down) and self.last_fault < since - SETTLED

    def happen(self, name, text=""):
        self.events[name] += 1
        self.last_fault = time.monotonic()
        self.say(f"-- {name} {text}")

    def near(self, host):
        return self.folder / "hosts" / self.names[host]

    def cut(self, host, what="any"):
        """Cut a host from all others, or from the bucket, until it is healed or for some seconds."""
        if host in self.cuts:
            return
        hows = {"bucket": ["route", "neigh"], "any": ["link", "port", "route", "neigh"]}[what]
        how = self.chance.choice(hows)
        self.network.cut(host, how)
        self.cuts[host] = how
        self.happen(f"cut: {how}", self.names[host])
        if what == "any" and self.chance.random() < 0.7:
            self.after(self.chance.uniform(0.3, 4), lambda: self.heal(host))

    def heal(self, host):
        if self.cuts.pop(host, None) is not None:
            self.network.heal(host)
            self.happen("heal", self.names[host])

    def stop_bucket(self, *, heals=True):
        if self.is_down:
            return
        self.is_down = True
        if self.is_bucket:
            self.network.hub.ask(namespaces.signal_bucket, signal.SIGSTOP)
        else:
            far = Path(self.far)
            if far.exists():
                far.rename(self.folder / "away")
            far.write_text("down")
        self.happen("bucket: stop")
        if heals and self.chance.random() < 0.7:
            self.after(self.chance.uniform(0.3, 4), self.start_bucket)

    def start_bucket(self):
        if not self.is_down:
            return
        self.is_down = False
        if self.is_bucket:
            self.network.hub.ask(namespaces.signal_bucket, signal.SIGCONT)
        else:
            Path(self.far).unlink()
            if (self.folder / "away").exists():
                (self.folder / "away").rename(self.far)
        self.happen("bucket: start")

    def signal_uploaders(self, host, name):
        number = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "continue": signal.SIGCONT}[name]
        if not self.network.hosts[host].ask(namespaces.signal_uploaders, number):
            return
        if name == "stop":
            self.stopped.add(host)
            if self.chance.random() < 0.7:
                self.after(self.chance.uniform(0.3, 6), lambda: self.signal_uploaders(host, "continue"))
        else:
            self.stopped.discard(host)
        self.happen(f"uploader: {name}", self.names[host])

    def lose(self, host):
        self.network.hosts[host].ask(namespaces.kill_all)
        shutil.rmtree(self.near(host), ignore_errors=True)
        self.generation[host] += 1
        for job in self.jobs:
            job.is_harmed |= host in job.hosts
        self.stopped.discard(host)
        self.happen("host: lost", self.names[host])

    def event(self, job=None):
        """Let something happen."""
        host = self.chance.randrange(self.count)
        works = {
            "cut": (6, lambda: self.cut(host)),
            "heal": (3, lambda: self.heal(host)),
            "kill uploader": (5, lambda: self.signal_uploaders(host, "kill")),
            "stop uploader": (1.5, lambda: self.signal_uploaders(host, "stop")),
            "continue uploader": (1, lambda: self.signal_uploaders(host, "continue")),
            "bucket": (3, self.stop_bucket),
            "lose": (1.5, lambda: self.lose(host)),
        }
        if job is not None:
            works["kill rank"] = (1, lambda: self.kill_ranks(job, "rank"))
            works["kill job"] = (1, lambda: self.kill_ranks(job, "job"))
        chosen = self.chance.choices(list(works), [weight for weight, _ in works.values()])[0]
        works[chosen][1]()

    def kill_ranks(self, job, what):
        found = job.alive()
        if found:
            job.kill(*([self.chance.choice(found)] if what == "rank" else found))
            job.is_harmed = True
            self.happen(f"{what}: kill", str(job))

    def heal_all(self):
        self.timers.clear()
        for host in list(self.cuts):
            self.heal(host)
        self.start_bucket()
        for host in list(self.stopped):
            self.signal_uploaders(host, "continue")
        self.stopped.clear()
        self.check_later()

    # What is true

    def read_root(self):
        """Return the published attempts, and the manifests by step. None if the root does not answer."""
        if self.is_bucket:
            if self.is_down:
                return None
            found = self.network.hub.ask(namespaces.read_objects, "run/")
        else:
            far = self.folder / "away" if self.is_down else Path(self.far)
            paths = [*sorted(far.glob(".run/????????.json"))[-1:], *far.glob("step-*/.snapshot_metadata")]
            found = {}
            for path in paths:
                with contextlib.suppress(FileNotFoundError):
                    found[str(path.relative_to(far))] = path.read_bytes()
        attempts, steps = [], {}
        for path, data in found.items():
            if path.startswith(".run/"):
                attempts, _ = decode_facts(data)
            elif path.startswith("step-") and data.startswith(b"{"):
                with contextlib.suppress(json.JSONDecodeError):
                    steps[int(path.partition("/")[0][5:])] = json.loads(data)
        return attempts, steps

    def files_of(self, hosts, step, save_id):
        """Return the data files of a snapshot on some hosts, and the hosts that have its manifest."""
        files, keepers = {}, set()
        for host in hosts:
            for folder in self.near(host).glob(f"*/step-{step}"):
                for path in folder.glob(f"data/{save_id}-*"):
                    with contextlib.suppress(FileNotFoundError):
                        files[path.name] = path.stat().st_size
                with contextlib.suppress(FileNotFoundError):
                    if f'"save_id":"{save_id}"'.encode() in (folder / ".snapshot_metadata").read_bytes()[:400]:
                        keepers.add(host)
        return files, keepers
