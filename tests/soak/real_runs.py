"""Random schedules with real jobs, uploaders and networks, and an oracle of its own.

The oracle knows what the jobs were promised, and the raw files: see `real_world`.
"""

import contextlib
import json
import os
import shutil
import sys
import threading
import time
from collections import Counter
from pathlib import Path

from snapshot.errors import SnapshotError
from tests.plugins.snapshot_tiers.jobs import ask
from tests.soak import namespaces, real_jobs
from tests.soak.namespaces import Network
from tests.soak.real_world import HEALS, Job, Taken, World, Wrong, is_on, line_of, read_copies, was_left


class Schedule(World):
    """A random schedule, and its oracle."""

    def is_near(self, taken, hosts):
        """Say whether some hosts must have all of a step that was promised near."""
        if not taken.is_promised:
            return False
        intact = all(self.generation[host] == made for host, made in taken.hosts.items())
        if intact and taken.hosts.keys() <= set(hosts) and (self.keeps_all or self.is_newest(taken)):
            return True
        files, keepers = self.files_of(hosts, taken.step, taken.save_id)
        return bool(keepers) and bool(taken.files) and taken.files.items() <= files.items()

    def is_newest(self, taken):
        """Say whether a step is the last of its hosts on its line: no policy removes that."""
        later = self.descendants_of(taken.attempt)
        return not any(
            each.attempt in later
            and each.value > taken.value
            and each.is_promised
            and (each.attempt == taken.attempt or each.hosts.keys() & taken.hosts.keys())
            for each in self.taken.values()
        )

    def descendants_of(self, attempt):
        """Return the names of the attempts that continue one, and its own, by what all hosts have stored."""
        known = {}
        for host in range(self.count):
            for (published, _), pending in read_copies(self.near(host)).values():
                known |= {each["name"]: each for each in (*published, *pending)}
        return {name for name in known if attempt in line_of([], known[name], known)} | {attempt}

    # Jobs

    def start(self, hosts, per_host=1, **options):
        """Begin a job. Return None if its ranks do not meet."""
        job = Job(self, hosts, per_host)
        self.jobs.append(job)
        world, first = len(job.ranks), self.network.address(hosts[0])
        place = (first, 29500 + job.number) if self.has_tcp else str(self.folder / f"store-{job.number}")

        def words(at):
            own = {"MASTER_ADDR": first}
            if self.names_address:
                own["SNAPSHOT_PEER_ADDRESS"] = self.network.address(job.ranks[at][0])
            return at, world, place, own

        job.call("fork uploaders", self.is_warm)
        if not all(each.is_good for each in job.call(real_jobs.meet, each=words)):
            self.events["jobs that did not meet"] += 1
            self.finish(job)
            return None
        given = {**self.options, "grace": self.chance.choice([0, 0, 2]), **options}
        job.grace = given["grace"]
        job.call(real_jobs.begin, each=lambda at: (self.far, str(self.near(job.ranks[at][0])), given))
        self.events["jobs"] += 1
        return job

    def finish(self, job):
        job.end()
        if job in self.jobs:
            self.jobs.remove(job)

    def judge(self, job, outcomes, began, what):
        """Judge the errors of a call. Return the kind of the first one that matters."""
        failed = [each for each in outcomes if not each.is_good and each.kinds != ["Died"]]
        for each in failed:
            if not {"SnapshotError", "TimeoutError"} & set(each.kinds) or "RunDeletedError" in each.kinds:
                raise Wrong(f"{job}: {what}: {each}")
        kinds = {each.kind() for each in failed}
        if "damaged" in kinds:
            return "damaged"
        for kind in ("forked", "superseded"):
            if kind in kinds:
                self.defer(lambda kind=kind, attempt=job.attempt: self.expect_legitimate(job, kind, attempt))
                return kind
        died = any(each.kinds == ["Died"] for each in outcomes)
        if "failed" in kinds and self.is_calm(began) and not died and not job.is_harmed:
            self.events["failures without a fault"] += 1
            if self.is_unlucky:  # the machine may have been too busy once
                raise Wrong(f"{job}: {what} failed without a fault: {[str(each) for each in outcomes]}")
            self.is_unlucky = True
        return "exists" if "exists" in kinds else "failed"

    is_unlucky = False
    """True after a call that failed without a fault."""

    def expect_legitimate(self, job, kind, attempt):
        """Raise Wrong if a run is said to have forked, or to have been continued, and has not."""
        attempts, _ = self.read_root()
        if kind == "superseded":
            line = line_of(attempts)
            if line.get(attempt) == (None, "") or not any(each["name"] == attempt for each in attempts):
                raise Wrong(f"{job}: is said to be superseded, and its attempt {attempt} is the line's")
            return
        if not self.conflicts(job.hosts, attempts) and not self.forks_seen:
            raise Wrong(f"{job}: is said to have forked, and no pending attempt conflicts")

    forks_seen = False
    """True once two attempts of which only one can be published were seen: a person's choice publishes both."""

    def conflicts(self, hosts, attempts):
        """Return the pending attempts on some hosts that cannot be published any more."""
        names = {each["name"] for each in attempts}
        top = max((each["number"] for each in attempts), default=0)
        found, numbers = {}, Counter()
        for host in hosts:
            for _, (_, pending) in read_copies(self.near(host)).items():
                for each in pending:
                    if each["name"] not in names:
                        found[each["name"]] = each
        for each in found.values():
            numbers[each["number"]] += 1
        wrong = [each for each in found.values() if each["number"] <= top or numbers[each["number"]] > 1]
        self.forks_seen |= bool(wrong)
        return wrong

    def defer(self, check):
        """Check something as soon as the root can be read."""
        if self.is_down and self.is_bucket:
            self.later.append(check)
        else:
            check()

    def check_later(self):
        found, self.later = self.later, []
        for each in found:
            each()

    # Restores

    def restore(self, job, offline=False):
        """Restore, and check what was restored. Return `restored`, or the kind of the error."""
        began, hosts = time.monotonic(), list(job.hosts)
        before = self.read_root()
        copies = [read_copies(self.near(host)) for host in hosts]
        promised = [each for each in self.taken.values() if self.is_near(each, hosts) or each.is_far]
        if before is not None:
            self.conflicts(hosts, before[0])
        unreachable = self.is_down or hosts[0] in self.cuts
        outcomes = job.call(real_jobs.restore, offline)
        unreachable |= self.last_fault > began
        self.events["restores"] += 1
        good = [each.value for each in outcomes if each.is_good]
        for step, value, same, _, sources in good:
            if not same:
                raise Wrong(f"{job}: the tensors are not those of value {value}")
            for tier, count in sources.items():
                self.counters[f"bytes: {tier}"] += count
            taken = self.taken.get(value)
            if (taken is None) != (step is None) or (taken is not None and taken.step != step):
                raise Wrong(f"{job}: restored step {step} with the value {value} of {taken}")
        if len({each[:2] for each in good}) > 1:
            raise Wrong(f"{job}: the ranks restored {good}")
        kind = "restored" if len(good) == len(outcomes) else self.judge(job, outcomes, began, "restore")
        if good or kind == "damaged":
            step, value, _, attempt, _ = good[0] if good else (None, 0, True, "", {})
            if kind == "restored":
                job.attempt, job.step, job.value = attempt, step or 0, value or None
            left = [each for each in promised if each.is_far or self.is_near(each, hosts)]
            lenient = offline and unreachable
            self.events["restores of a step" if step is not None else "restores of nothing"] += 1
            self.events["restores without the root"] += lenient

            def check():
                self.expect_right(job, value, attempt, left, before, copies, is_lenient=lenient)

            self.defer(check)
        return kind

    def expect_right(self, job, value, attempt, promised, before, copies, *, is_lenient):
        """Raise Wrong unless the restored step is on the line, and not older than what was promised."""
        attempts, _ = self.read_root()
        restored = self.taken.get(value)
        at = next((at for at, each in enumerate(attempts) if each["name"] == attempt), None)
        if restored is not None and at is not None:
            parent = attempts[at].get("parent")
            if restored.attempt is None:
                restored.attempt = parent[0]
            if parent is None or parent[0] != restored.attempt or parent[1] != restored.step:
                raise Wrong(f"{job}: restored {restored}, and its attempt begins with {parent}")
        if at is not None and restored is not None:
            lines = [line_of(attempts[:at])]
        else:
            others = [each for each in attempts if each["name"] != attempt]
            lines = [line_of(others), *([line_of(before[0])] if before is not None else [])]
        kept = [each for each in promised if not was_left(attempts if at is None else attempts[:at], each)]
        faults = [self.fault_of(restored, line, kept) for line in lines]
        if is_lenient:
            faults.append(self.offline_fault(job, restored, promised, copies))
        if all(faults):
            raise Wrong(f"{job}: restored {restored}: {'; or '.join(faults)}")
        if not is_lenient:
            published = {each["name"] for each in attempts}
            near = [each for each in promised if each.attempt not in published and self.is_known(each, job.hosts)]
            if near:
                raise Wrong(f"{job}: restored {restored}, and {near} stayed undecided")

    def is_known(self, taken, hosts):
        """Say whether one of the hosts of a take, which know its attempt, is among some hosts."""
        return any(host in hosts and self.generation[host] == made for host, made in taken.hosts.items())

    def fault_of(self, restored, line, promised):
        if restored is not None and not is_on(line, restored):
            return f"it is not on the line {line}"
        best = max((each for each in promised if is_on(line, each)), key=lambda each: each.step, default=None)
        if best is not None and (restored is None or restored.step < best.step):
            return f"{best} was promised, and is on the line {line}"
        return ""

    def offline_fault(self, job, restored, promised, copies):
        """Return why a restore without the root is wrong, by what the hosts knew."""
        if restored is None:
            return "without the root, it is not known that there is no step"
        runs = Counter(run for each in copies for run in each)
        if len(runs) != 1:
            self.events["restores not checked: several runs"] += 1
            return ""
        published, known = ([], 0), {}
        for each in copies:
            for found, pending in each.values():
                published = max(published, found, key=lambda one: one[1])
                known |= {one["name"]: one for one in pending}
        names = {each["name"] for each in published[0]}
        pending = sorted((each for each in known.values() if each["name"] not in names), key=lambda one: one["number"])
        line = line_of([*published[0], *pending], pending[-1] if pending else None)
        return self.fault_of(restored, line, [each for each in promised if self.is_near(each, job.hosts)])

    # Takes

    def take(self, job):
        """Take a step. Return `taken`, or the kind of the error."""
        began = time.monotonic()
        job.step += self.chance.randint(1, 9)
        value = self.next("value")
        hosts = {host: self.generation[host] for host in job.hosts}
        taken = self.taken[value] = Taken(value, job.step, job.attempt, hosts)
        how = self.chance.choice(["async", "async", "take"])
        outcomes = job.call(real_jobs.take, job.step, value, how)
        self.events["takes"] += 1
        good = [each.value for each in outcomes if each.is_good]
        if good:
            taken.save_id, taken.attempt = max(good)
            job.attempt = taken.attempt
            taken.is_promised = True
            found, _ = self.files_of(job.hosts, taken.step, taken.save_id)
            intact = all(self.generation[host] == made for host, made in hosts.items())
            taken.files = found if intact else {}  # else those of a lost host are not known
            if intact and not taken.files:
                attempts, steps = self.read_root() or ([], {})
                if not self.is_off(taken, attempts) and steps.get(taken.step, {}).get("save_id") != taken.save_id:
                    raise Wrong(f"{job}: {taken} was promised, and is nowhere")
        if len(good) == len(outcomes):
            job.last = taken if how == "async" else None
            return "taken"
        if not good and taken.attempt is None:
            self.learn_attempt(job, taken)
        return self.judge(job, outcomes, began, "take")

    def is_off(self, taken, attempts):
        names = {each["name"] for each in attempts}
        return taken.attempt in names and (not is_on(line_of(attempts), taken) or was_left(attempts, taken))

    def learn_attempt(self, job, taken):
        """Find the attempt of a take whose ranks died, in a manifest that it may have left."""
        for host in job.hosts:
            for path in self.near(host).glob(f"*/step-{taken.step}/.snapshot_metadata"):
                with contextlib.suppress(OSError, ValueError):
                    taken.attempt = json.loads(path.read_bytes())["metadata"]["snapshot.tiers"]["attempt"]

    def wait_far(self, job):
        began, timeout = time.monotonic(), self.chance.choices([0.5, 2.0, 5.0, 12.0], [4, 4, 3, 1])[0]
        taken = job.last
        outcomes = job.call(real_jobs.wait_far, timeout, more=timeout)
        self.events["waits for far"] += 1
        if any(each.is_good for each in outcomes):
            taken.is_far = True
            self.events["waits for far that succeeded"] += 1
            self.defer(lambda: self.expect_far(job, taken))
        if all(each.is_good for each in outcomes):
            return "far"
        if all("TimeoutError" in each.kinds or each.is_good for each in outcomes):
            self.events["waits for far that were late without a fault"] += timeout > 10 and self.is_calm(began)
            return "late"
        return self.judge(job, outcomes, began, "wait far")

    def expect_far(self, job, taken):
        attempts, steps = self.read_root()
        if steps.get(taken.step, {}).get("save_id") != taken.save_id and not self.is_off(taken, attempts):
            raise Wrong(f"{job}: {taken} was promised to be far, and is not there")

    # The schedule

    def run_job(self):
        """Restore, take some steps, and end in some way."""
        chance = self.chance
        count = chance.choices([1, self.count, chance.randint(1, self.count)], [5, 3, 2])[0]
        hosts = chance.sample(range(self.count), count)
        if self.taken and chance.random() < 0.4:  # it begins without the root
            if self.is_bucket and chance.random() < 0.75:
                self.cut(hosts[0], "bucket")
            else:
                self.stop_bucket(heals=False)
        job = self.start(hosts, per_host=2 if count < 3 and chance.random() < 0.15 else 1)
        if job is None:
            return
        if chance.random() < 0.15:
            self.after(chance.uniform(0, 0.8), lambda: self.event(job))
        if chance.random() < 0.08:
            job.step = max([0, *(each.step for each in self.taken.values())]) + 10
            self.events["jobs that restore nothing"] += 1
        elif not self.begin_with_restore(job):
            self.finish(job)
            return
        for _ in range(chance.randint(1, 4)):
            if chance.random() < 0.35:
                self.after(chance.uniform(0, 0.4), lambda: self.event(job))
            kind = self.take(job)
            if kind != "taken":
                self.events[f"takes: {kind}"] += 1
                break
            if chance.random() < 0.55 and job.last is not None and self.wait_far(job) == "superseded":
                break
            if job.is_broken:
                break
            self.bother_zombies(job)
        self.end(job)

    def begin_with_restore(self, job):
        """Restore, with what a person does if that fails. Return True if the job goes on."""
        chance = self.chance
        offline = chance.random() < (0.7 if self.is_down or job.hosts[0] in self.cuts else 0.1)
        for _ in range(2):
            kind = self.restore(job, offline)
            if kind == "restored":
                return not job.is_broken
            self.events[f"restores: {kind}"] += 1
            alone = kind == "failed" and offline and not job.is_broken and chance.random() < 0.4
            if job.alive() and (kind == "damaged" or alone):  # the application begins again, after all that was taken
                job.step, job.is_broken = max([0, *(each.step for each in self.taken.values())]) + 10, False
                self.events["jobs that go on without a restore"] += 1
                return True
            if kind == "forked" and chance.random() < 0.6:
                self.choose(job.hosts)
            if len(job.ranks) > 1:
                return False  # another job is started
            offline |= chance.random() < 0.6
        return False

    def choose(self, hosts):
        """Choose one side of a fork on some host, as a person does."""
        root = self.read_root()
        if root is None:
            return
        for host in hosts:
            found = self.conflicts([host], root[0])
            if found and host not in self.cuts and root[0]:
                name = self.chance.choice([root[0][-1]["name"], self.chance.choice(found)["name"]])
                job = Job(self, [host], 1)
                try:
                    job.call(real_jobs.choose, self.far, str(self.near(host)), name, self.storage)
                finally:
                    job.end()
                self.events["choices of a person"] += 1
                root = self.read_root() or root

    def end(self, job):
        """Close the job, kill it, or leave it running although others begin."""
        chance = self.chance
        ways = ["close", "close", "close", "kill", "kill", "leave"]
        way = "kill" if not job.alive() else chance.choice(ways)
        if way == "leave" and not job.is_broken:
            self.events["jobs left running"] += 1
            return
        if way == "close":
            job.call(real_jobs.close, more=job.grace)
        self.finish(job)

    def bother_zombies(self, now):
        """Let jobs that others have followed go on."""
        for job in [each for each in self.jobs if each is not now]:
            kind = self.take(job)
            self.events[f"takes of a job that was left: {kind}"] += 1
            if kind != "taken" or self.chance.random() < 0.3:
                self.finish(job)

    def run(self):
        """Run the schedule."""
        try:
            for _ in range(self.chance.choice([3, 4, 4, 5])):
                self.run_job()
                if self.chance.random() < 0.3:
                    self.event()
                if self.chance.random() < 0.4:
                    self.heal_all()
                elif self.chance.random() < 0.5:
                    self.start_bucket()
                self.pass_time()
            self.end_well()
        finally:
            self.clean_up()

    def end_well(self):
        """Heal all, and expect that the run ends as it must."""
        self.heal_all()
        for job in list(self.jobs):
            self.finish(job)
        everywhere = list(range(self.count))
        job, restored = self.last_job(everywhere, grace=HEALS)
        run = job.call(real_jobs.attempt)[0].value[1]
        job.call(real_jobs.close, more=HEALS)
        self.finish(job)
        self.expect_uploaded(restored)
        self.expect_ended(run)
        self.expect_kept(restored)
        if self.chance.random() < 0.5:
            for host in everywhere:
                self.lose(host)
        job, last = self.last_job(everywhere, grace=5)
        job.call(real_jobs.close, more=5)
        self.finish(job)
        if last != restored:
            raise Wrong(f"the last jobs restored {self.taken.get(restored)}, and then {self.taken.get(last)}")

    def last_job(self, hosts, grace):
        """Restore on all hosts. After forks, a person chooses. Return the job, and the restored value."""
        end = time.monotonic() + HEALS
        while True:
            job = self.start(hosts, grace=grace)
            kind = "did not meet"
            if job is not None:
                job.is_harmed = True  # it is repeated
                kind = self.restore(job)
                if kind in ("restored", "damaged"):
                    return job, job.value
                self.finish(job)
            if kind == "forked":
                self.choose(hosts)
            if time.monotonic() > end:
                raise Wrong(f"no restore on all hosts within {HEALS:.0f} s after all was healed: {kind}")
            self.wait(0.5)

    def expect_uploaded(self, restored):
        """Raise Wrong unless the step on which the run continues is far."""
        if restored is None:
            return
        taken, end = self.taken[restored], time.monotonic() + 20
        while self.read_root()[1].get(taken.step, {}).get("save_id") != self.save_id_of(taken):
            if time.monotonic() > end:
                raise Wrong(f"{taken} is not far, after all was healed")
            self.wait(0.3)

    def save_id_of(self, taken):
        if not taken.save_id:  # the take failed for its job, and was committed
            taken.save_id = self.read_root()[1].get(taken.step, {}).get("save_id", "?")
        return taken.save_id

    def expect_ended(self, run):
        """Raise Wrong unless the uploaders of the run end. One that waits for files of other hosts may stay longer."""
        began, before = time.monotonic(), None
        while True:
            found = [
                folder
                for host in range(self.count)
                for folder in self.network.hosts[host].ask(namespaces.uploaders).values()
                if Path(folder).name == run
            ]
            if not found:
                return
            if time.monotonic() > began + 4:
                states = [state for folder in found for state in self.states_of(folder)]
                if states and set(states) <= {"waiting"}:
                    self.events["runs whose uploaders wait for files of other hosts"] += 1
                    return
                if states != before:  # they go on
                    began, before = time.monotonic() - 4, states
            if time.monotonic() > began + 30:
                raise Wrong(f"the uploaders of {found} do not end: {states}")
            self.wait(0.2)

    def states_of(self, folder):
        """Return the states of the steps that an uploader has not ended with; none if it ends."""
        with contextlib.suppress(SnapshotError):
            return [each.far.value for each in ask(folder).steps.values() if each.far.is_open]
        return []

    def expect_kept(self, restored):
        """Raise Wrong unless all that was promised, and is on the line, is still there."""
        attempts, steps = self.read_root()
        line = line_of(attempts)
        for each in self.taken.values():
            if not is_on(line, each) or was_left(attempts, each):
                continue
            if each.is_far and steps.get(each.step, {}).get("save_id") != each.save_id:
                raise Wrong(f"{each} was promised to be far, is on the line, and is not there")
            intact = all(self.generation[host] == made for host, made in each.hosts.items())
            if self.keeps_all and each.is_promised and intact and each.files:
                files, keepers = self.files_of(each.hosts, each.step, each.save_id)
                if not keepers or not each.files.items() <= files.items():
                    raise Wrong(f"{each} was promised to be near, is on the line, and is not there")

    def clean_up(self):
        """Leave the network as it was."""
        self.timers.clear()
        with contextlib.suppress(OSError):
            self.start_bucket()
        for job in list(self.jobs):
            self.finish(job)
        for host, agent in enumerate(self.network.hosts):
            self.network.heal(host)
            agent.ask(namespaces.kill_all)


def run_schedule(network, seed):
    """Run a schedule. Return its world, whose folder is left if it is wrong."""
    world = Schedule(network, seed)
    try:
        world.run()
    except Exception as error:
        story = "\n".join(world.lines)
        (world.folder / "story").write_text(story)
        raise Wrong(f"seed {seed}: {type(error).__name__}: {error}\n{story}") from error
    if "SOAK_STORIES" in os.environ:
        Path(os.environ["SOAK_STORIES"], f"{seed}").write_text("\n".join(world.lines))
    shutil.rmtree(world.folder, ignore_errors=True)
    return world


def run_schedules(seeds, workers=2):
    """Run schedules, on some networks at once. Return the figures, and the texts of what was wrong."""
    left, totals, wrong = list(reversed(seeds)), Counter(), []
    lock = threading.Lock()

    def work():
        network = None
        try:
            while left:
                seed, began = left.pop(), time.monotonic()
                network = network or Network()
                try:
                    world = run_schedule(network, seed)
                except Wrong as error:
                    print(error, flush=True)
                    wrong.append(str(error))
                    network.close(keep=True)
                    network = None
                    continue
                with lock:
                    totals.update(world.events)
                    totals["schedules"] += 1
                    totals["calls"] += world.calls
                    totals["seconds"] += time.monotonic() - began
                    for tier in ("near", "peer", "far"):
                        totals[f"bytes from {tier}"] += world.counters[f"bytes: {tier}"]
                    for name, seconds in world.longest.items():
                        longest = f"longest {name}, seconds"
                        totals[longest] = max(totals[longest], seconds)
                print(f"seed {seed}: right, {time.monotonic() - began:.1f} s", flush=True)
        finally:
            if network is not None:
                network.close()

    threads = [threading.Thread(target=work) for _ in range(workers)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    return totals, wrong


def describe(figures):
    """Return figures as lines of text."""
    return "\n".join(f"{name:60} {number:12,.0f}" for name, number in sorted(figures.items()))


def main():
    """Run seeds: `python -m tests.soak.real_runs FIRST COUNT`."""
    first, count = map(int, sys.argv[1:3])
    figures, wrong = run_schedules(range(first, first + count), int(os.environ.get("SOAK_NETWORKS", "2")))
    print(describe(figures))
    print(f"seeds {first} to {first + count - 1}: {len(wrong)} wrong")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
