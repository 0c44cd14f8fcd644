"""Random schedules of a whole run: real managers, joins, uploaders, replicas and files, compared with an oracle.

Each schedule follows from its seed. After each action, what is near and far is compared with what was there before, and
each answer of the library with what the raw facts say: see `watched_run.py` and `oracle.py`.
"""

import contextlib
import os
import shutil
from pathlib import Path

import torch

from snapshot import KeepLatest, SnapshotError, StateDict, StorageError, TakeOptions
from snapshot.errors import CorruptSnapshotError, RankError, RunDeletedError, RunForkedError, SnapshotExistsError
from snapshot.io.loop import run
from snapshot.io.session import Session
from snapshot.io.url import URL
from snapshot_tiers.facts import choose_attempt
from snapshot_tiers.tier_set import FarError
from snapshot_tiers.uploader import LOOKS
from snapshot_tiers.uploader_process import find_runs, upload_by_hand
from tests.plugins.snapshot_tiers.one_process import Job, Killed
from tests.plugins.snapshot_tiers.oracle import Take, Wrong, flipped
from tests.plugins.snapshot_tiers.watched_run import WatchedRun

NEVER_FAR = (FarError, RunForkedError, RunDeletedError)
"""Errors that say that a step will not be in the far root."""
GATES = ("_put", "_commit", "_get", "list_files", "stat")
"""Requests to a folder that can fail, or in whose middle something else can happen."""


def state(value):
    tensors = {f"t{at}": torch.full((8,), float(value)) for at in range(4)}
    return {"same": StateDict(**tensors, value=value)}


def value_of(live):
    """Return the value of an app state. Raise Wrong if it is a mixture."""
    same = live["same"]
    if any((same[f"t{at}"] != float(same["value"])).any() for at in range(4)):
        raise Wrong(f"a restore mixed values: {dict(same)}")
    return same["value"]


class House(WatchedRun):
    """A run, and the random actions on it."""

    def state(self, value):
        """Return an app state with a value."""
        return state(value)

    # Actions

    def act(self, name, work, *given):
        """Do something, and look what it has changed."""
        self.log.append((*(["in the middle"] if self.depth else []), name, *given))
        if not self.depth:
            self.aside = 0.0
        self.events[name] += 1
        work()
        self.look()

    def start(self, hosts, *, restore=True, offline=False, **options):
        """Begin a job, and restore."""
        ranks = [host for host in hosts for _ in range(self.chance.choice([1, 1, 1, 2] if len(hosts) < 4 else [1]))]
        upload = self.chance.choice(["latest", "latest", "latest", 1, 1, None])
        near_keep, far_keep = self.chance.choice([None, None, 2, 2, 1]), self.chance.choice([None, None, None, 2, 1])
        given = {
            "upload": upload,
            "replicas": self.chance.choice([0, 1, 1, 2 if len(hosts) > 2 else 1]),
            "keep_near": KeepLatest(near_keep) if near_keep else None,
            "keep": KeepLatest(far_keep) if far_keep else None,
            "grace": self.chance.choice([0, 0, 20]),
            "storage_options": self.root.options,
        } | options
        job = Job(self.machines, self.root.url, [self.near_of(host) for host in ranks], **given)
        job.hosts, job.upload, job.grace = list(dict.fromkeys(ranks)), given["upload"], given["grace"]
        job.near_keep, job.far_keep = [each and each.n for each in (given["keep_near"], given["keep"])]
        job.is_busy = False
        job.attempt, job.last, job.deletions, job.is_alive = "", 0, self.deletions, True
        job.name = len(self.jobs) + len(self.ended)
        kept = [each and each.n for each in (given["keep_near"], given["keep"])]
        self.log[-1] += (f"job {job.name} on {''.join(ranks)}", given["upload"], given["replicas"], *kept)
        self.jobs.append(job)
        if restore:
            self.restore(job, offline=offline)
        elif self.takes:
            job.last = max(step for _, step in self.takes)
        return job

    def restore(self, job, *, offline=False):
        """Restore the newest step, and compare it with what was promised."""
        job.settle()
        self.look()
        before, length, trouble = self._requirements(job), len(self.truth), self._trouble()
        forks, old = self.forks_on(job.hosts), job.attempt
        lives = [self.state(-1) for _ in job.managers]
        began = self.clock.now
        with self.using(job):
            found, errors = job.together(lambda rank, each: each.restore_latest(lives[rank], offline=offline))
        self._expect_time("restore_latest", began, 40.0 * len(job.hosts))
        self._learn_attempt(job)
        self.look()
        if self._is_killed(job, errors):
            return
        error = next((each for each in errors if each is not None), None)
        is_quiet = trouble == self._trouble() and not trouble[0]
        if error is not None:
            if not all(errors):
                raise Wrong(f"some ranks restored, others raised: {errors}")
            self._expect_restore_error(job, errors[0], before, forks, is_quiet=is_quiet)
            self.stop(job, kill=self.chance.random() < 0.5)
            return
        step = found[0]
        if len(set(found)) != 1:
            raise Wrong(f"the ranks restored {found}")
        values = {value_of(live) for live in lives}
        if len(values) != 1 or (step is None) != (values == {-1}):
            raise Wrong(f"step {step} has the values {values}")
        self.events["restored" if step is not None else "restored nothing"] += 1
        if step is None and trouble[0] and self.root.is_down:
            raise Wrong("no step was found, and the root was not read")
        take = self.values.get(values.pop())
        if take is not None and take.step != step:
            raise Wrong(f"step {step} has the value of step {take.step}")
        job.last = step or 0
        if offline and (trouble[0] or not is_quiet):
            self.events["restored offline"] += step is not None
            self._expect_offline(job, take, before, is_quiet=trouble == self._trouble())
            return
        self._expect_newest(job, take, before, length, job.attempt if job.attempt != old else "")

    def _expect_restore_error(self, job, error, before, forks, *, is_quiet):
        """Raise the error, or Wrong, unless the run is in a state that the error is documented for."""
        self.is_all_damaged = isinstance(error, CorruptSnapshotError)
        self.events[f"restore: {type(error).__name__}"] += 1
        if isinstance(error, RunForkedError):
            if is_quiet and not (forks or self.forks_on(job.hosts)):
                raise Wrong(f"no fork is on {job.hosts}") from error
        elif isinstance(error, RunDeletedError):
            if job.deletions == self.deletions:
                raise Wrong("the root was not deleted") from error
        elif isinstance(error, CorruptSnapshotError):
            wanted = min(before["line"], self.required(self.line(), job.hosts, far=True))
            if wanted >= 0 and is_quiet:
                raise Wrong(f"step {wanted} was promised, and is available") from error
        elif not isinstance(error, StorageError) or is_quiet:
            raise error

    def _learn_attempt(self, job):
        if job.tiers is not None and job.tiers.member.attempt is not None:
            job.attempt = job.tiers.member.attempt.name

    def _is_killed(self, job, errors):
        if any(isinstance(each, Killed) for each in errors):
            self.events["job killed in a call"] += 1
            self.stop(job, kill=True)
            return True
        return False

    def take(self, job, *, background=True):
        """Save a step, and record what was promised."""
        step = job.last + self.chance.choice([10, 10, 20])
        take = Take(len(self.values) + 1, step, {})
        self.values[take.value] = take
        trouble, began = self._trouble(), self.clock.now
        superseded = self._knows_that_it_is_over(job, step)
        verb = "async_take" if background else "take"
        self.log[-1] += (f"job {job.name}", verb, step, take.value)
        with self.using(job):
            found, errors = job.together(
                lambda rank, each: getattr(each, verb)(
                    step, self.state(take.value), options=TakeOptions(replicated=["**"])
                )
            )
            job.settle()
        self._learn_attempt(job)
        take.attempt = job.attempt
        if job.tiers is not None:
            take.run = job.tiers.member.run
        self._expect_time("a take", began, 45.0 * len(job.hosts))
        if take.attempt:
            self.takes.setdefault((take.attempt, step), take)
        self.look()
        if self._is_killed(job, errors):
            return
        if any(errors):
            self._expect_take_error(job, step, errors, trouble)
            return
        if superseded:
            raise Wrong(f"the take of step {step} succeeded, although {superseded}")
        job.last = step
        self._record(take)
        if background:
            self.pendings.append((job, take, found))
        else:
            take.is_near = True

    def _expect_take_error(self, job, step, errors, trouble):
        error = next((each for each in errors if each is not None and not isinstance(each, RankError)), errors[0])
        self.events[f"take: {type(error).__name__}"] += 1
        is_quiet = trouble == self._trouble() and not trouble[0]
        line = self.line()
        if isinstance(error, RunForkedError):
            made = self.attempts.get(job.attempt)
            fine = (
                not is_quiet
                or job.deletions != self.deletions
                or self.forks_on(job.hosts)
                or (made is not None and made["number"] <= self.number)
            )
        elif isinstance(error, RunDeletedError):
            fine = job.deletions != self.deletions
        elif isinstance(error, SnapshotExistsError):
            near = [each for host in job.hosts for (_, number), each in self.near[host].items() if number == step]
            fine = near or step in self.far
        elif isinstance(error, StorageError):
            fine = not is_quiet
        elif "another job has continued" in str(error):
            newest = max(
                number for attempt, number in [*self.takes, (job.attempt, step)] if attempt == job.attempt
            )  # once told, always told
            fine = (
                not line.has(newest, job.attempt, "")
                or self._was_ever_over(job, newest)
                or job.deletions != self.deletions
            )
        else:
            fine = False
        if not fine:
            raise error
        if self.chance.random() < 0.5:
            self.stop(job, kill=self.chance.random() < 0.5)

    def _was_ever_over(self, job, step):
        """Say whether some publication has cut the job's line before a step. It may not hear of a later choice."""
        counts = range(1, len(self.truth) + 1)
        known = [count for count in counts if job.attempt in {each["name"] for each in self.truth[:count]}]
        return any(not self.line(count).has(step, job.attempt, "") for count in known)

    @contextlib.contextmanager
    def using(self, job):
        """Let no other action use a job meanwhile."""
        job.is_busy = True
        try:
            yield
        except Killed:
            self.events["job killed in a call"] += 1
            job.is_busy = False
            self.stop(job, kill=True)
        finally:
            job.is_busy = False

    def clean(self, job):
        with self.using(job):
            job.clean()

    def wait(self, which):
        """Return from `wait()`: the take is promised to be near."""
        job, take, pendings = which
        began = self.clock.now
        self.log[-1] += (take.step, f"of job {job.name}")
        for each in pendings:
            each.wait(timeout=30)
        self._expect_time("wait", began, 0)
        take.is_near = True

    def wait_far(self, which, timeout):
        """Wait until a take is far, which is promised then."""
        job, take, pendings = which
        self.log[-1] += (take.step, f"of job {job.name}", timeout)
        self.wait(which)
        trouble, began = self._trouble(), self.clock.now
        for pending in pendings:
            began = self.clock.now
            try:
                with self.using(job):
                    pending.wait("far", timeout=timeout)
            except (TimeoutError, SnapshotError) as error:
                self._expect_time('wait("far")', began, timeout)
                self.look()
                self.events[f"wait far: {type(error).__name__}"] += 1
                self._expect_far_error(job, take, error, timeout, trouble)
                return
            if not job.is_alive:
                return
            self._expect_time('wait("far")', began, timeout)
            self.look()
            if not self.is_good_far(take) and not self._replaced_far(take):
                raise Wrong(f'wait("far") returned, and step-{take.step} is not far: {self.far.get(take.step)}')
            self.events["promised far"] += 1
            take.is_far = True

    def _expect_far_error(self, job, take, error, timeout, trouble):
        """Raise Wrong if a healthy run did not bring a step to the root."""
        is_quiet = trouble == self._trouble() and not trouble[0]
        line = self.line()
        on = line.has(take.step, take.attempt, take.save_id)
        hosts = {host for host in job.hosts if any(n[1] == take.step for n in self.near[host])}
        here = [host for host in hosts if self.near[host].get((take.run, take.step), (None,))[0]]
        names = {name for host in job.hosts for name in self.near[host].get((take.run, take.step), (0, ()))[1]}
        whole = (
            here and all(self.is_good_near(take, name, job.hosts) for name in take.files) and names >= set(take.files)
        )
        works = all(self._works(host, take.run) for host in job.hosts)
        other = self.far.get(take.step)
        mine = other is None or other.save_id == take.save_id
        known = {each["name"] for each in self.truth}
        if take.attempt not in known and (self.forks_on(job.hosts) or job.deletions != self.deletions):
            return
        newest = max((each.step for each in self.takes.values() if each.attempt == take.attempt), default=-1)
        others = [each for each in self.jobs if each.hosts != job.hosts and {*each.hosts} & {*job.hosts}]
        if isinstance(error, (*NEVER_FAR, TimeoutError)) and others:
            self.skipped["wait far beside a job on other hosts"] += 1
            return  # the uploader of a shared host may serve that job
        if isinstance(error, NEVER_FAR) and (take.step < newest or self._replaced_far(take)):
            return  # it may have been given up, or removed
        if isinstance(error, TimeoutError) and timeout < 120:
            return
        if isinstance(error, NEVER_FAR) and self.clock.now - self.chosen < LOOKS:
            return  # the uploader may not have seen the choice yet
        if isinstance(error, (*NEVER_FAR, TimeoutError)):
            if is_quiet and on and whole and works and mine and job.is_alive:
                raise Wrong(f"step-{take.step} is on the line, and is not uploaded: {error}") from error
            return
        if not isinstance(error, StorageError) or is_quiet:
            raise error

    def stop(self, job, *, kill):
        """End a job, or kill it."""
        if job not in self.jobs:
            return
        job.settle()
        if kill:
            self._ended(job)
            job.kill()
            return
        for each in job.managers:
            began = self.clock.now
            with self.using(job):
                each.close()
            if not job.is_alive:
                return
            self._expect_time("close", began, job.grace + 75.0)
        self._ended(job)

    def _ended(self, job):
        self.jobs.remove(job)
        self.ended.append(job)
        job.is_alive = False

    def lose(self, host):
        """Lose a host, with the jobs on it."""
        self.log[-1] += (host,)
        for job in [each for each in self.jobs if host in each.hosts]:
            self.stop(job, kill=True)
        self._end_processes(host)
        shutil.rmtree(self.near_of(host), ignore_errors=True)
        self.near[host] = {}

    def _end_processes(self, host):
        for each in list(self.machines.processes.values()):
            if each.folder.startswith(f"{self.near_of(host)}/") and each.is_alive:
                each.kill()
                self.killed(each)

    def killed(self, process):
        """An uploader that put a manifest, and did not look again, leaves it."""
        for upload in process.uploader._open._uploads.values():
            if upload._put:
                self.left_by_death.add(upload._step.save_id)

    def delete_root(self):
        self.deletions += 1
        for head in self.far.values():
            self.lost_far.add(head.save_id)
        known = {each["name"] for each in self.truth}
        line = self.line()
        for attempt, step in self.takes:
            take = self.takes[attempt, step]
            take.is_far = False
            if attempt in known and not line.has(step, attempt, take.save_id):
                self.off_ever.add((attempt, step, take.save_id))
        self.truth, self.far = [], {}
        self.root.delete()

    def flip(self):
        """Flip a bit of a file, near or far."""
        places = []
        for host in self.hosts:
            for (run_id, step), (_, names) in self.near[host].items():
                places += [(host, f"{self.near_of(host)}/{run_id}/step-{step}/{name}") for name in sorted(names)]
        places = [each for each in sorted(places) if not each[1].endswith((".json", ".aside"))]
        far = sorted(each for each in self.root.names() if "/data/" in each and each.endswith(".safetensors"))
        if far and (not places or self.chance.random() < 0.3):
            name = self.chance.choice(far)
            self.log[-1] += ("far", name)
            self.flips_far.add(name.split("/")[2][:12])
            self.root.write(name, flipped(self.root.read(name)))
        elif places:
            host, path = self.chance.choice(places)
            self.log[-1] += (host, path.rpartition("/hosts/")[2])
            data, found = Path(path).read_bytes(), os.stat(path)
            os.chmod(path, 0o644)
            Path(path).write_bytes(flipped(data))
            os.utime(path, ns=(found.st_atime_ns, found.st_mtime_ns))

    def choose(self, host):
        """Decide a fork, as a person does."""
        pending = self.forked_on(host)
        tip = [self.truth[-1]["name"]] if self.truth else []
        name = self.chance.choice(pending + tip)
        self.log[-1] += (host, name)
        self.chosen = self.clock.now
        far = URL.parse(self.root.url)
        copies = [each for each in find_runs(self.near_of(host), str(far)).values() if each.far == str(far)]
        session = Session(far, self.root.options)
        trouble = self._trouble()
        try:
            run(choose_attempt(session.storage, copies, name, "a person", str(far)))
        except Killed:
            self.events["choice killed"] += 1
        except (StorageError, RunForkedError, RunDeletedError) as error:
            if trouble == self._trouble() and not self.root.is_down:
                raise Wrong("a choice failed") from error
        finally:
            run(session.close())

    def upload_by_hand(self, host):
        self.log[-1] += (host,)
        near = self.near_of(host)
        found = find_runs(near, str(URL.parse(self.root.url))) if os.path.isdir(near) else {}
        for folder, copy in found.items():
            if folder not in self.machines.processes or not self.machines.processes[folder].is_alive:
                with contextlib.suppress(SnapshotError, Killed):
                    url, options = self.root.url, self.root.options
                    upload_by_hand(folder, copy.facts, url, options, everything=False, rate=None)

    # Faults in the middle of requests

    def arm(self):
        """Let one of the next requests to the root fail, or let something happen in its middle."""
        if self.root.arm is not None:
            self.log[-1] += self.root.arm(self.chance)
            return
        what = self.chance.choice(["fail", "lose the answer", "race", "race", "race", "die", "die"])
        op, when = self.chance.choice(GATES[:2] * 3 + GATES), self.chance.choice(["before", "after"])
        if what in ("fail", "lose the answer"):
            when = "before" if what == "fail" else "after"
        self.log[-1] += (what, op, when)
        self.armed = [
            what,
            op,
            when,
            self.chance.randint(1, 2) if what != "race" else 1,
            self.chance.choice([0, 0, 0, 1, 2]),
        ]

    def gate(self, storage, path, function, *arguments):
        """Pass on a request to a storage of files."""
        armed = self.armed
        if not str(storage.url.location).startswith(self.root.url):
            return function(*arguments)
        try:
            return self._pass(armed, path, function, *arguments)
        finally:
            if function.__name__ == "_commit":
                with contextlib.suppress(OSError):
                    self._read_truth()
                self.committed[storage.url.location.rpartition("/")[2]] = len(self.truth)

    def _pass(self, armed, path, function, *arguments):
        if armed is None or function.__name__ != armed[1] or (armed[1] == "_put" and ".run" not in path):
            return function(*arguments)
        if armed[4]:
            armed[4] -= 1
            return function(*arguments)
        armed[3] -= 1
        if not armed[3]:
            self.armed = None
        if armed[2] == "before":
            self._strike(armed[0])
            return function(*arguments)
        found = function(*arguments)
        self._strike(armed[0])
        return found

    def _strike(self, what):
        self.events[f"struck: {what}"] += 1
        self.log.append(("struck", what))
        if what in ("fail", "lose the answer"):
            self.strikes += 1
            raise OSError(5, "Input/output error")
        if what == "die":
            self.strikes += 1
            raise Killed
        self.races += 1
        self.depth += 1
        began = self.clock.now
        try:
            self.machines.run_aside(self.step_aside)
        finally:
            self.depth -= 1
            self.aside += self.clock.now - began

    def step_aside(self):
        """What happens in the middle of a request of another process."""
        if self.chance.random() < 0.7 and len(self.jobs) < 3:
            some = self.some_hosts()
            others = [host for host in self.hosts if not any(host in each.hosts for each in self.jobs)]
            if others and self.chance.random() < 0.7:
                some = [self.chance.choice(others)]
            self.act("start", lambda: self.start(some))
        else:
            self.step(only=("time", "take", "down", "delete", "kill uploader", "clean", "lose"))

    # The schedule

    def some_hosts(self):
        return self.chance.sample(self.hosts, self.chance.choice([1, 1, 2, len(self.hosts)]))

    def step(self, only=None):
        """Choose an action, and do it."""
        chance, jobs = self.chance, self.jobs
        busy = [each for each in self.machines.processes.values() if each.is_alive and not each.is_busy]
        free = [each for each in jobs if not each.is_busy]
        idle = [host for host in self.hosts if not any(each.is_busy and host in each.hosts for each in jobs)]
        waiting = [each for each in self.pendings if each[0].is_alive and not each[0].is_busy]
        forked = [] if self.root.is_down else [host for host in self.hosts if self.forks_on([host])]
        options = [
            ("start", 6 if not jobs else (4 if self.theme == "overlap" else 1.5) if len(jobs) < 2 else 0),
            ("take", 10 if free else 0),
            ("restore again", 0.4 if free else 0),
            ("wait", 3 if waiting else 0),
            ("wait far", 4 if waiting else 0),
            ("stop", 2 if free else 0),
            ("kill", 1.5 if free else 0),
            ("time", 4),
            ("clean", 2 if free else 0),
            ("where", 0.5 if waiting else 0),
            ("kill uploader", 1 if busy else 0),
            ("hang uploader", 0.5 if [each for each in busy if each.hung_since is None] else 0),
            ("resume uploader", 0.5 if [each for each in busy if each.hung_since is not None] else 0),
            ("lose", (0.8 if self.theme == "hosts" else 0.3) if idle else 0),
            ("down", 1.2 if not self.root.is_down else 0),
            ("up", 3 if self.root.is_down else 0),
            ("delete", 0.12 if not self.root.is_down else 0),
            ("flip", 0.35 if not self.root.is_down else 0),
            ("arm", (6 if self.theme == "races" else 2) if self.armed is None and not self.depth else 0),
            ("choose", 2 if forked else 0),
            ("upload by hand", 0.4 if not self.root.is_down else 0),
        ]
        options = [each for each in options if each[1] and (only is None or each[0] in only)]
        if not options:
            return
        name = chance.choices([each for each, _ in options], [weight for _, weight in options])[0]
        some = self.some_hosts()
        works = {
            "start": lambda: self._start_any(some),
            "take": lambda: self.take(chance.choice(free), background=chance.random() < 0.8),
            "restore again": lambda: self.restore(chance.choice(free), offline=chance.random() < 0.3),
            "wait": lambda: self.wait(chance.choice(waiting)),
            "wait far": lambda: self.wait_far(chance.choice(waiting), chance.choice([1, 5, 150, 150])),
            "stop": lambda: self.stop(chance.choice(free), kill=False),
            "kill": lambda: self.stop(chance.choice(free), kill=True),
            "time": lambda: self.clock.sleep(chance.choice([0.02, 0.5, 3, 12, 40])),
            "clean": lambda: self.clean(chance.choice(free)),
            "where": lambda: self.where(chance.choice(waiting)),
            "kill uploader": lambda: self._kill_uploader(chance.choice(busy)),
            "hang uploader": lambda: chance.choice([each for each in busy if each.hung_since is None]).hang(),
            "resume uploader": lambda: chance.choice([each for each in busy if each.hung_since is not None]).resume(),
            "lose": lambda: self.lose(chance.choice(idle)),
            "down": self._go_down,
            "up": self.root.come_back,
            "delete": self.delete_root,
            "flip": self.flip,
            "arm": self.arm,
            "choose": lambda: self.choose(chance.choice(forked)),
            "upload by hand": lambda: self.upload_by_hand(chance.choice(self.hosts)),
        }
        self.act(name, works[name])

    def begin(self):
        """Play what leads to the situation that this seed is about."""
        chance = self.chance
        if self.theme in ("plain", "hosts"):
            return
        first, second = self.chance.sample(self.hosts, 2)
        self.act("start", lambda: self.start([first], restore=chance.random() < 0.5))
        for _ in range(chance.randint(0, 2)):
            self.act("take", lambda: self.take(self.jobs[-1]))
        self.act("time", lambda: self.clock.sleep(3))
        if self.theme == "races":
            self.act("arm", self.arm)
            if self.jobs and chance.random() < 0.5:
                self.act("take", lambda: self.take(self.jobs[-1]))
                self.act("time", lambda: self.clock.sleep(3))
            else:
                self.act("start", lambda: self.start([second]))
            return
        if self.theme == "overlap":
            self.act("start", lambda: self.start([chance.choice([first, second])], restore=chance.random() < 0.6))
            return
        for job in list(self.jobs) if chance.random() < 0.8 else ():
            self.act("stop", lambda job=job: self.stop(job, kill=chance.random() < 0.5))
        self.act("down", self._go_down)
        restore = chance.random() < 0.6
        self.act("start", lambda: self.start([chance.choice([first, second])], restore=restore, offline=restore))
        for _ in range(2):
            if self.jobs:
                self.act("take", lambda: self.take(self.jobs[-1]))
        if chance.random() < 0.5 and self.jobs:
            self.act("kill", lambda: self.stop(self.jobs[-1], kill=True))
        if chance.random() < 0.5:
            self.act("kill uploader", lambda: self._end_processes(first))
            self.act("kill uploader", lambda: self._end_processes(second))
        self.act("up", self.root.come_back)
        self.act("start", lambda: self.start([chance.choice([first, second])], restore=chance.random() < 0.7))
        if self.jobs and chance.random() < 0.8:
            self.act("take", lambda: self.take(self.jobs[-1]))

    def _start_any(self, some):
        if self.jobs and self.chance.random() < 0.5:
            self.log[-1] += ("beside another one",)
        restore = self.chance.random() < 0.88
        self.start(some, restore=restore, offline=restore and self.chance.random() < 0.3)

    def _kill_uploader(self, process):
        process.kill()
        self.killed(process)

    def _go_down(self):
        self.strikes += 1
        self.root.go_down()

    def where(self, which):
        job, take, _ = which
        trouble, began = self._trouble(), self.clock.now
        try:
            job.managers[0].where(take.step)
        except (StorageError, Killed):
            if trouble == self._trouble() and not self.root.is_down:
                raise
        self._expect_time("where", began, 15.0)

    # The end

    def _begin_last(self):
        """Begin a job on all hosts, as a person does who decides forks."""
        hosts, given = list(self.hosts), {"upload": "latest", "keep": None, "keep_near": None, "grace": 0}
        for _ in range(6):
            self.act("start", lambda: self.start(hosts, **given))
            forked = [host for host in hosts if self.forked_on(host)]
            if not self.jobs and forked:
                self.act("choose", lambda forked=forked: self.choose(self.chance.choice(forked)))
            elif not self.jobs and self.is_all_damaged:  # begin without a restore
                self.act("start", lambda: self.start(hosts, restore=False, **given))
            if self.jobs:
                return self.jobs[0]
        raise Wrong("no job can begin")

    def finish(self):
        """Without further faults, everything that was promised is there, and all uploaders end."""
        self.armed = None
        self.root.heal()
        self.events["struck: a request"] += self.root.hits
        if self.root.is_down:
            self.act("up", self.root.come_back)
        for job in list(self.jobs):
            self.act("stop", lambda job=job: self.stop(job, kill=self.chance.random() < 0.3))
        job = self._begin_last()
        self.act("time", lambda: self.clock.sleep(150))
        if job.tiers is None or self.chance.random() < 0.5:
            count = len(self.pendings)
            self.act("take", lambda: self.take(job))
            if len(self.pendings) == count:
                if not self.deletions:  # else a near step of the deleted run may be in the way
                    raise Wrong("no job can take a step")
            else:
                self.act("wait far", lambda: self.wait_far(self.pendings[-1], 200))
                if not self.pendings[-1][1].is_far:
                    raise Wrong(f"step-{self.pendings[-1][1].step} is never uploaded")
        self.act("stop", lambda: self.stop(job, kill=False))
        self.act("time", lambda: self.clock.sleep(60))
        self._expect_ends()
        self._expect_uploaded()
        self._expect_nothing_off()
        fresh = self.chance.choice(self.hosts)
        self.act("lose", lambda: self.lose(fresh))
        self.act("start", lambda: self.start([fresh], upload=None, grace=0, keep=None))
        if self.jobs:
            self.act("stop", lambda: self.stop(self.jobs[0], kill=False))
        elif not self.is_all_damaged:
            raise Wrong("no job can begin on a fresh host")

    def _expect_ends(self):
        """Each uploader has ended, or waits for what is lost, or says why it is stuck."""
        for each in self.machines.processes.values():
            if each.is_alive and (each.hung_since is not None or self._is_stuck(each)):
                self._kill_uploader(each)
        if any(each.is_alive for each in self.machines.processes.values()):
            self.act("time", lambda: self.clock.sleep(4000))
        for each in self.machines.processes.values():
            if each.is_alive and not self._is_stuck(each):
                states = {step: found.far.value for step, found in each.uploader.status().steps.items()}
                raise Wrong(f"the uploader of {each.folder} never ends: {states}, {each.uploader._error}")

    def play(self):
        """Run the schedule. Raise Wrong with the seed and all actions."""
        with self.machines:
            try:
                self.look()
                self.machines.gate = self.gate
                self.begin()
                for _ in range(self.chance.randint(4, 16)):
                    self.step()
                self.finish()
            except BaseException as error:
                actions = "\n  ".join(map(str, self.log))
                raise Wrong(f"seed {self.seed}: {error!r}; after\n  {actions}") from error
            finally:
                self.armed = None
                self.root.heal()
                with contextlib.suppress(Exception):
                    for job in list(self.jobs):
                        job.kill()
        self.events.update({f"turn: {name}": count for name, count in self.machines.turns.items()})
        return self
