"""A run under watch: what is near and far after each action, and what the raw facts say that it must be."""

import contextlib
import random
import shutil
from collections import Counter
from pathlib import Path

from tests.plugins.snapshot_tiers.one_process import Machines
from tests.plugins.snapshot_tiers.oracle import (
    METADATA,
    FolderRoot,
    Line,
    Wrong,
    digest_of,
    near_facts,
    near_steps,
    read_facts,
)

HOSTS = "abcd"
SLACK = 1.0
"""Seconds that a wait may last longer than its caller said."""
MOST_QUEUED = 8


class WatchedRun:
    """A run with its hosts and jobs, and what was promised about its steps."""

    def __init__(self, seed, folder, root=None):
        """`root`: the far root, by default a folder."""
        self.seed, self.chance = seed, random.Random(seed)
        shutil.rmtree(folder, ignore_errors=True)
        self.folder = Path(folder)
        self.root = root or FolderRoot(self.folder / "far")
        self.machines = Machines()
        self.machines.on_killed = self.killed
        self.clock = self.machines.clock
        self.hosts = HOSTS[: self.chance.choice([2, 2, 2, 3, 3, 4])]
        self.theme = self.chance.choice(["plain", "hosts", "races", "races", "overlap", "forks", "forks"])
        self.jobs, self.ended = [], []
        self.pendings = []
        """Asynchronous takes: the job, the take, and the pending snapshot of each rank."""
        self.takes = {}
        """By attempt and step."""
        self.values = {}
        self.truth, self.attempts = [], {}
        """The facts in the root, and all attempts that ever were seen."""
        self.committed = {}
        """The number of facts when a step's manifest was put last, after what happened in the same moment."""
        self.off_ever = set()
        """Save ids that were off the line of a published run at some time."""
        self.to_withdraw = set()
        """Snapshots off the line that an uploader put, and must look at again."""
        self.left_by_death = set()
        """Snapshots that an uploader put, and was killed before its second look."""
        self.flips_far, self.lost_far = set(), set()
        self.deletions = self.strikes = self.races = 0
        self.armed = None
        self.log, self.events, self.skipped = [], Counter(), Counter()
        self.near, self.far, self._heads = {}, {}, {}
        self.buried = set()
        self.depth = 0
        self.chosen = float("-inf")
        self.aside = 0.0
        """Seconds of the current action in which others acted."""
        self.is_all_damaged = False
        """True if the last restore found damaged steps only."""

    def near_of(self, host):
        return str(self.folder / "hosts" / host)

    def look(self):
        """Compare what is there with what was there. Raise Wrong if something vanished or appeared wrongly."""
        length = len(self.truth)
        self._read_truth()
        near = {host: near_steps(self.near_of(host), self._heads) for host in self.hosts}
        names, far = self.root.names(), {}
        for name in names:
            if name.startswith("step-") and name.endswith(f"/{METADATA}"):
                head = self.root.manifest(name)
                if head is not None:
                    far[int(name.split("/")[0][5:])] = head
        self.buried |= {name.partition("/")[2] for name in names if name.startswith(".pruned/")}
        before, self.near = self.near, near
        before_far, self.far = self.far, far
        line = Line(self.attempts, self.truth[-1]["name"] if self.truth else None)
        known = {each["name"] for each in self.truth}
        for host in self.hosts:
            for (run_id, step), (head, _) in before.get(host, {}).items():
                now = near[host].get((run_id, step), (None, frozenset()))[0]
                if head is not None and head.attempt and (now is None or now.save_id != head.save_id):
                    self._expect_near_reason(host, run_id, step, head, line, known, before[host])
        for step, head in before_far.items():
            if step not in far or far[step].save_id != head.save_id:
                self._expect_far_reason(step, head, line, known, before_far)
        for step, head in far.items():
            if (head.attempt, step) in self.takes:
                self.takes[head.attempt, step].was_far = True
            if step not in before_far or before_far[step].save_id != head.save_id:
                self._expect_arrival(step, head, line, length)

    def _expect_arrival(self, step, head, line, length):
        """Raise Wrong if a step was uploaded that is not on the line. `length`: the number of facts before."""
        if head.attempt and all(head.attempt != each["name"] for each in self.truth):
            raise Wrong(f"step-{step} of {head.attempt} was uploaded, and no publication decides about it")
        first = max(length, self.committed.pop(f"step-{step}", 0))
        lines = [self.line(each) for each in range(first, len(self.truth) + 1)]
        on = not head.attempt or any(each.has(step, head.attempt, head.save_id) for each in lines)
        if not on and head.save_id not in self.left_by_death:
            if not self._may_be_withdrawn(head.save_id):
                raise Wrong(f"step-{step} of {head.attempt} was uploaded, and is off the line {line.cuts}")
            self.to_withdraw.add(head.save_id)

    def _may_be_withdrawn(self, save_id):
        """Say whether an uploader that lives has put it, and must look again."""
        for each in self.machines.processes.values():
            for upload in each.uploader._open._uploads.values() if each.is_alive else ():
                if upload._step.save_id == save_id and (upload._put or each.is_busy):
                    return True
        return False

    def _read_truth(self):
        numbers = sorted(name for name in self.root.names() if name.startswith(".run/") and name.endswith(".json"))
        found = read_facts(self.root.read(numbers[-1])) if numbers else []
        if found is None:
            return  # damaged on purpose
        if found[: len(self.truth)] != self.truth:
            raise Wrong(f"the root had the facts {self.truth}, and has {found}")
        self.truth = found
        for each in found:
            self.attempts[each["name"]] = each
        for host in self.hosts:
            for published, pending, _ in near_facts(self.near_of(host)).values():
                for each in (*published, *pending):
                    self.attempts.setdefault(each["name"], each)

    def line(self, length=None):
        """Return the line of the published facts, or of the first ones."""
        truth = self.truth if length is None else self.truth[:length]
        known = {each["name"]: each for each in truth}
        return Line(known, truth[-1]["name"] if truth else None)

    def _workers(self, host):
        """The jobs that may remove steps of a host."""
        return [job for job in (*self.jobs, *self.ended[-2:]) if host in job.hosts]

    def _line_of_job(self, job):
        """The line that a job follows, as its attempt says."""
        return Line(self.attempts, job.attempt) if job.attempt else self.line()

    def _expect_near_reason(self, host, run_id, step, head, line, known, before):
        what = f"step-{step} of attempt {head.attempt} on host {host}"
        own = [each for each in self._workers(host) if each.near_keep is not None]
        if head.attempt in known and not line.has(step, head.attempt, head.save_id):
            return
        now = self.near[host].get((run_id, step), (None,))[0]
        if self._was_off(head, step) or (now is not None and now.replaces):  # it was passed over as damaged
            return
        for job, mine in [(each, mine) for each in own for mine in (self._line_of_job(each), line)]:
            newer = [
                number
                for (other, number), (each, _) in [*before.items(), *self.near[host].items()]
                if other == run_id
                and each is not None
                and number > step
                and mine.has(number, each.attempt, each.save_id)
            ]
            if mine.has(step, head.attempt, head.save_id) and len(set(newer)) >= job.near_keep:
                take = self.takes.get((head.attempt, step))
                everything = all(each.upload == 1 for each in (*self.jobs, *self.ended) if host in each.hosts)
                if everything and take is not None and not (take.was_far or head.save_id in self.buried):
                    # the first upload of a step stays, also if retention has removed it since
                    other = step in self.far or any(
                        each.was_far for (_, number), each in self.takes.items() if number == step
                    )
                    waiting = [number for _, number in before if number not in self.far]
                    if not other and len(waiting) <= MOST_QUEUED and not self.deletions:
                        raise Wrong(f"{what} was removed, and is wanted far")
                return
        raise Wrong(f"{what} was removed; line {line.cuts}, jobs {[vars(each) for each in own]}")

    def _was_off(self, head, step):
        """Say whether some publication has put a step off the line, also one in a deleted root."""
        return (head.attempt, step, head.save_id) in self.off_ever

    def _expect_far_reason(self, step, head, line, known, before):
        if head.attempt in known and not line.has(step, head.attempt, head.save_id):
            return
        if head.save_id in self.lost_far or self._was_off(head, step):
            return
        jobs = [each for each in (*self.jobs, *self.ended[-2:]) if each.far_keep is not None]
        newer = [number for number in {**before, **self.far} if number > step]
        if head.save_id in self.buried and any(len(newer) >= each.far_keep for each in jobs):
            return
        raise Wrong(
            f"far step-{step} of attempt {head.attempt} vanished; line {line.cuts}, {head.save_id in self.buried}"
        )

    def is_good_far(self, take, name=None):
        """Say whether a file of a take is far with its bytes; without a name, the whole step."""
        if name is None:
            head = self.far.get(take.step)
            if head is None or head.save_id != take.save_id:
                return False
            return all(self.is_good_far(take, each) for each in take.files)
        with contextlib.suppress(OSError, KeyError):
            return digest_of(self.root.read(f"step-{take.step}/{name}")) == take.files[name]
        return False

    def is_good_near(self, take, name, hosts):
        for host in hosts:
            with contextlib.suppress(OSError):
                path = f"{self.near_of(host)}/{take.run}/step-{take.step}/{name}"
                if digest_of(Path(path).read_bytes()) == take.files[name]:
                    return True
        return False

    def is_available(self, take, hosts, *, far):
        heads = [self.near[host].get((take.run, take.step), (None,))[0] for host in hosts]
        if not any(head is not None and head.save_id == take.save_id for head in heads):
            return far and self.is_good_far(take)
        head = self.far.get(take.step)
        if head is None and far and take.save_id in self.buried:
            return False
        return all(
            self.is_good_near(take, name, hosts) or (far and self.is_good_far(take, name)) for name in take.files
        )

    def promised(self, take):
        """Return True if a restore must find a take, or a newer one."""
        return take.files and (take.is_near or take.is_far)

    def required(self, line, hosts, *, far):
        """Return the newest step on a line that was promised, and is available to hosts; -1 if there is none."""
        found = [
            take.step
            for take in self.takes.values()
            if self.promised(take)
            and line.has(take.step, take.attempt, take.save_id)
            and self.is_available(take, hosts, far=far)
        ]
        return max(found, default=-1)

    def _trouble(self):
        return self.root.is_down, self.strikes + self.root.hits, self.deletions, self.races

    def _requirements(self, job):
        """Return what a restore must find, at least, on the lines that it may see."""
        return {
            "line": self.required(self.line(), job.hosts, far=not self.root.is_down),
            "steps": {
                key
                for key, take in self.takes.items()
                if self.promised(take) and self.is_available(take, job.hosts, far=not self.root.is_down)
            },
            "offline": self._offline_line(job.hosts),
        }

    def _expect_newest(self, job, take, before, length, began):
        """Compare a restore with the lines that the root had while it ran. `began`: the attempt that it has begun."""
        names = [each["name"] for each in self.truth]
        lengths = [names.index(began)] if began in names else list(range(min(length, len(names)), len(names) + 1))
        faults = []
        for each in lengths:
            line = self.line(each)
            if take is not None and not line.has(take.step, take.attempt, take.save_id or self._save_id_of(take)):
                faults.append(f"step {take.step} of {take.attempt} is off the line {line.cuts}")
                continue
            steps = [
                other.step
                for key, other in self.takes.items()
                if key in before["steps"]
                and line.has(other.step, other.attempt, other.save_id)
                and self.is_available(other, job.hosts, far=True)
            ]
            wanted = max(steps, default=-1)
            if wanted > (take.step if take is not None else -1):
                faults.append(f"step {wanted} was promised, and is available; line {line.cuts}")
                continue
            return
        raise Wrong(f"restored {take}: {faults}")

    def _save_id_of(self, take):
        """Return the save id of a take that was not waited for."""
        for steps in self.near.values():
            for (_, step), (head, _) in steps.items():
                if head is not None and (head.attempt, step) == (take.attempt, take.step):
                    return head.save_id
        head = self.far.get(take.step)
        return head.save_id if head is not None and head.attempt == take.attempt else ""

    def _offline_line(self, hosts):
        """Return the line that hosts know without the root, if they know one run; else None."""
        copies = [each for host in hosts for each in near_facts(self.near_of(host)).items()]
        copies = [(name, each) for name, each in copies if each[0] or each[1]]
        if len({name for name, _ in copies}) != 1:
            return None
        published, _, number = max((each for _, each in copies), key=lambda each: (each[2], len(each[0])))
        known = {each["name"]: each for each in published}
        pending = {made["name"]: made for _, each in copies for made in each[1] if made["name"] not in known}
        later = [made for made in pending.values() if made["number"] > number]
        last = max(later, key=lambda made: (made["number"], made["name"]), default=None)
        tip = last or (published[-1] if published else None)
        return Line(known | pending, tip["name"]) if tip else None

    def _expect_offline(self, job, take, before, *, is_quiet):
        line = before["offline"]
        if line is None or not is_quiet:
            self.skipped["offline with several runs, or with faults"] += 1
            return
        if take is not None and not line.has(take.step, take.attempt, take.save_id or self._save_id_of(take)):
            raise Wrong(f"offline: step {take.step} of {take.attempt} is off the line {line.cuts}")
        wanted = self.required(line, job.hosts, far=False)
        if wanted > (take.step if take is not None else -1):
            raise Wrong(f"offline: restored {take}, and step {wanted} was promised; line {line.cuts}")

    def forks_on(self, hosts):
        """Return the attempts on hosts that did not see another one with their number or a later one."""
        number = self.number
        found = {}
        for host in hosts:
            for published, pending, _ in near_facts(self.near_of(host)).values():
                known = {each["name"] for each in self.truth}
                if published and published[-1]["name"] not in known:
                    continue  # of a deleted run
                found |= {each["name"]: each for each in pending if each["name"] not in known}
        numbers = Counter(each["number"] for each in found.values())
        return [each for each in found.values() if each["number"] <= number or numbers[each["number"]] > 1]

    def forked_on(self, host):
        """Return the names of the attempts that forked, and are known on a host, beside those of all hosts."""
        forked = {each["name"] for each in self.forks_on(self.hosts)}
        found = near_facts(self.near_of(host)).values()
        return sorted(each["name"] for _, pending, _ in found for each in pending if each["name"] in forked)

    @property
    def number(self):
        numbers = [name[5:13] for name in self.root.names() if name.startswith(".run/") and name.endswith(".json")]
        return max(map(int, numbers), default=0)

    def _expect_time(self, what, began, most):
        passed = self.clock.now - began - (self.aside if not self.depth else 0.0)
        if passed > most + SLACK:
            raise Wrong(f"{what} lasted {passed:.1f} s, and its caller allows {most} s")

    def _knows_that_it_is_over(self, job, step):
        """Say whether the facts on a host of a job say that its line has left it."""
        if not job.attempt:
            return ""
        for host in job.hosts:
            for published, _, _ in near_facts(self.near_of(host)).values():
                known = {each["name"]: each for each in published}
                line = Line(known, published[-1]["name"] if published else None)
                if job.attempt in known and not line.has(step, job.attempt, ""):
                    return f"host {host} knows that the line has left attempt {job.attempt}: {line.cuts}"
        return ""

    def _record(self, take):
        """Record the files of a committed take."""
        for host in self.hosts:
            head, names = self.near[host].get((take.run, take.step), (None, ()))
            if head is not None and head.attempt == take.attempt:
                take.save_id = head.save_id
                for name in head.names & set(names):
                    data = Path(f"{self.near_of(host)}/{take.run}/step-{take.step}/{name}").read_bytes()
                    take.files.setdefault(name, digest_of(data))
        head = self.far.get(take.step)
        if head is not None and head.attempt == take.attempt:
            take.save_id = head.save_id
            for name in head.names:
                take.files.setdefault(name, digest_of(self.root.read(f"step-{take.step}/{name}")))

    def _replaced_far(self, take):
        return take.save_id in self.buried or take.save_id in self.flips_far or take.save_id in self.lost_far

    def _works(self, host, run_id):
        each = self.machines.processes.get(f"{self.near_of(host)}/{run_id}")
        return each is not None and each.is_alive and each.hung_since is None

    def _is_stuck(self, process):
        """Say whether an uploader waits for files that no host has."""
        states = process.uploader.status().steps
        return any(each.far.value == "waiting" for each in states.values())

    def _expect_uploaded(self):
        """The newest step on the line is far, if all of it is near."""
        line = self.line()
        order = {name: at for at, name in enumerate(reversed(list(line.cuts)))}
        found = [
            take
            for take in self.takes.values()
            if take.files
            and line.has(take.step, take.attempt, take.save_id)
            and any((self.near[host].get((take.run, take.step)) or (None,))[0] for host in self.hosts)
        ]
        if not found:
            return
        newest = max(found, key=lambda take: (order[take.attempt], take.step))
        whole = all(self.is_good_near(newest, name, self.hosts) for name in newest.files)
        other = self.far.get(newest.step)
        if whole and newest.save_id not in self.buried and newest.save_id not in self.flips_far:
            if other is None or not line.has(newest.step, other.attempt, other.save_id):
                raise Wrong(f"{newest} is on the line, and is never uploaded")
            self.events["newest is far"] += 1

    def _expect_nothing_off(self):
        line = self.line()
        for step, head in self.far.items():
            off = head.attempt and not line.has(step, head.attempt, head.save_id)
            if off and head.save_id in self.to_withdraw - self.left_by_death:
                raise Wrong(f"far step-{step} of {head.attempt} is off the line, and stays; line {line.cuts}")
            take = self.takes.get((head.attempt, step))
            known = take is not None and take.files and take.save_id == head.save_id
            if known and head.save_id not in self.flips_far and not self.is_good_far(take):
                raise Wrong(f"far step-{step} has other bytes than were saved")
