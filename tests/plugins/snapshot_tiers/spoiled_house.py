"""Random schedules of a whole run with suspect steps, in which the far root may be put back to an earlier state.

A third of the steps has a parameter that is NaN. The newest good step must be restored, stay until a newer good one is
there, and be far when a job ends. A root that was put back must be reported on each host that has seen more.
"""

import random
import shutil

import torch

from snapshot_tiers.uploader import LOOKS
from tests.plugins.snapshot_tiers.oracle import Wrong, near_facts, read_facts
from tests.plugins.snapshot_tiers.whole_house import NEVER_FAR, House, state

SUSPECT = 0.35


class SpoiledHouse(House):
    """A run with suspect steps, and with `rolls` also with roll-backs of the root."""

    def __init__(self, seed, folder, root=None, *, rolls=False):
        super().__init__(seed, folder, root)
        self.rolls, self.rolled = rolls, 0

    def is_suspect(self, value):
        return value > 0 and random.Random(1000 * self.seed + value).random() < SUSPECT

    def state(self, value):
        model = torch.nn.Linear(4, 1)
        with torch.no_grad():
            model.weight.fill_(float("nan") if self.is_suspect(value) else 0.5)
            model.bias.fill_(0.25)
        return {**state(value), "model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}

    def is_good(self, head, step):
        """Return True if a manifest is of a good take."""
        take = self.takes.get((head.attempt, step))
        return take is not None and not self.is_suspect(take.value)

    # Suspect steps

    def start(self, hosts, **options):
        return super().start(hosts, **{"grace": self.chance.choice([0, 60, 60]), **options})

    def promised(self, take):
        return super().promised(take) and not self.is_suspect(take.value)

    def _expect_newest(self, job, take, before, length, began):
        if take is not None and self.is_suspect(take.value):
            raise Wrong(f"a suspect step was restored: {take}")
        super()._expect_newest(job, take, before, length, began)

    def _expect_near_reason(self, host, run_id, step, head, line, known, before):
        try:
            super()._expect_near_reason(host, run_id, step, head, line, known, before)
        except Wrong:  # a suspect step does not count for retention
            if self.is_good(head, step):
                raise
            self.events["suspect removed"] += 1
        self._expect_newer_good(host, run_id, step, head, line, before)

    def _expect_newer_good(self, host, run_id, step, head, line, before):
        """Raise Wrong if the last good step on the line of a run was removed."""
        if not self.is_good(head, step) or self.rolled or self.deletions:
            return
        now = self.near[host].get((run_id, step), (None,))[0]
        if head.save_id in self.buried or self._was_off(head, step) or (now is not None and now.replaces):
            return
        steps = [*before.items(), *self.near[host].items()]
        newer = [
            each
            for (run, number), (each, _) in steps
            if run == run_id and number > step and each is not None and self.is_good(each, number)
        ]
        newer += [each for number, each in self.far.items() if number >= step and self.is_good(each, number)]
        lines = [line, *map(self._line_of_job, self._workers(host))]
        if not newer and all(each.has(step, head.attempt, head.save_id) for each in lines):
            raise Wrong(f"good step-{step} on host {host} was removed, and no newer good one is there")

    def stop(self, job, *, kill):
        """End a job. Its newest good step must be far then, if it had time and nothing was in the way."""
        checked = not kill and job in self.jobs and job.grace and not self.root.is_down and job.tiers is not None
        checked = checked and self.clock.now - self.chosen > LOOKS  # else the uploader may not have seen the choice
        trouble = self._trouble()
        super().stop(job, kill=kill)
        shared = any({*each.hosts} & {*job.hosts} for each in self.jobs)
        if (
            checked
            and not shared
            and not job.is_alive
            and job.attempt
            and not self.armed
            and trouble == self._trouble()
        ):
            self.look()
            if not self.forks_on(self.hosts):
                self._expect_far_at_end(job)

    def _expect_far_at_end(self, job):
        line = self.line()
        takes = [
            each for each in self.takes.values() if each.attempt == job.attempt and not self.is_suspect(each.value)
        ]
        last = max(takes, key=lambda each: each.step, default=None)
        if last is None or not (last.is_near and last.files and line.has(last.step, last.attempt, last.save_id)):
            return
        heads = [self.near[host].get((last.run, last.step), (None,))[0] for host in job.hosts]
        is_there = any(each is not None and each.save_id == last.save_id for each in heads)
        whole = all(self.is_good_near(last, name, job.hosts) for name in last.files)
        if is_there and whole and all(self._works(host, last.run) for host in job.hosts):
            self.events["good at the end"] += 1
            if last.step not in self.far and last.save_id not in self.buried:
                raise Wrong(f"job {job.name} was closed, and good step-{last.step} is not far: {sorted(self.far)}")

    # Roll-backs

    def lost_on(self, hosts):
        """Return the attempts that hosts have seen published, and that the root, which was put back, lacks."""
        known, found = {each["name"] for each in self.truth}, []
        for host in hosts:
            for published, _, _ in near_facts(self.near_of(host)).values():
                names = [each["name"] for each in published]
                if names and names[-1] not in known and known.intersection(names):
                    found += [each for each in published if each["name"] not in known]
        return found

    def forks_on(self, hosts):
        return super().forks_on(hosts) + self.lost_on(hosts)

    def forked_on(self, host):
        return sorted({*super().forked_on(host), *(each["name"] for each in self.lost_on([host]))})

    def _was_ever_over(self, job, step):
        return bool(self.rolled) or super()._was_ever_over(
            job, step
        )  # an attempt that was lost may have ended its line

    def restore(self, job, *, offline=False):
        lost = [] if offline or self.root.is_down else self.lost_on(job.hosts)
        trouble, before = self._trouble(), self._restored()
        super().restore(job, offline=offline)
        is_quiet = trouble == self._trouble() and not self.armed
        if lost and is_quiet and self.lost_on(job.hosts) and self._restored() > before:
            raise Wrong(f"restored, although {[each['name'] for each in lost]} are lost, as {job.hosts} know")
        self.events["restore with a lost attempt"] += bool(lost)

    def _expect_far_error(self, job, take, error, timeout, trouble):
        if not (isinstance(error, NEVER_FAR) and self.lost_on(job.hosts)):  # nothing is uploaded until a person chooses
            super()._expect_far_error(job, take, error, timeout, trouble)

    def _restored(self):
        return self.events["restored"] + self.events["restored nothing"]

    def roll_back(self):
        """Take back the last publications, mostly with the steps of their attempts."""
        names = sorted(name for name in self.root.names() if name.startswith(".run/") and name.endswith(".json"))
        count = self.chance.randint(1, max(1, min(2, len(names) - 1)))
        old = read_facts(self.root.read(names[-count - 1])) if len(names) > count else None
        if not old:
            return
        self.log[-1] += (count,)
        kept = {each["name"] for each in old}
        for name in names[-count:]:
            (self.root._at / name).unlink()
        lost = {step: head for step, head in self.far.items() if head.attempt not in kept}
        self.lost_far |= {head.save_id for head in lost.values()}
        if self.chance.random() < 0.7:
            for step in [step for step, head in lost.items() if head.attempt]:
                shutil.rmtree(self.root._at / f"step-{step}")
                del self.far[step]
        for take in self.takes.values():
            if take.attempt not in kept:
                take.is_far = take.is_near = take.was_far = False
        self.truth = old
        self.rolled += 1
        self.strikes += 1

    def step(self, only=None):
        may = self.rolls and only is None and not self.depth and not self.root.is_down and len(self.truth) > 1
        if may and self.chance.random() < 0.12:
            self.act("roll back", self.roll_back)
        else:
            super().step(only)
