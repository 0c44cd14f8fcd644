"""Random schedules of the protocol, run against the model and against the code, and compared after every action.

The code is what reads, publishes, unites and judges facts: `facts.py`, `timeline.py` and the check of a trainer before
a take, with real files. Steps are values. A root that is down raises, and a lost answer is a put that had an effect.
"""

import itertools
import random
import shutil
from types import SimpleNamespace

from snapshot.errors import RunDeletedError, RunForkedError, StorageConflictError, StorageError
from snapshot.io.loop import run
from snapshot.io.session import Session
from snapshot.io.url import URL
from snapshot.runs import timeline
from snapshot.runs.facts import FOLDER, read_facts
from snapshot.runs.timeline import Facts, FactsCopy, Origin, Parent, RolledBackError, RunLine, Standing, settle_run
from snapshot_tiers import facts as stored
from snapshot_tiers.facts import choose_attempt, mend_facts, publish_pending, read_copy, store_copy, sync_facts
from snapshot_tiers.tier_set import TierSet
from tests.plugins.snapshot_tiers.model import Model, State, Wrong, ids

RUN, FAR = "0123456789ab", "far"


class Code:
    """The code under the same actions as `Model`: one folder for each host, and one for the root.

    `bucket`: a URL and options of another root. `lose`: lets the next answer of a put be lost there.
    """

    def __init__(self, folder, bucket=None, lose=None):
        self.folder = folder
        shutil.rmtree(folder, ignore_errors=True)
        (folder / "far").mkdir(parents=True)
        url, options = bucket or (str(folder / "far"), None)
        self.session = Session(URL.parse(url), options, durable=False)
        self.lose = lose
        self.is_down, self.lost = False, False
        self.near = [set(), set()]
        self.far = set()
        self.names = []
        """The name of each attempt of the model."""
        self.trainers = [None, None]
        self.phases = ["off", "off"]
        self.uploaders = [SimpleNamespace(phase="idle", step=None, forked=False) for _ in range(2)]
        inner = self.session.storage
        code = self

        class Flaky(type(inner)):
            async def put(self, path, data, **given):
                if code.lost and code.lose is not None:
                    code.lost = False
                    code.lose()
                token = await super().put(path, data, **given)
                if code.lost:
                    code.lost = False
                    raise StorageConflictError("the answer was lost, and the repeated request met its own file")
                return token

            async def list(self, prefix="", **given):
                if code.is_down:
                    raise StorageError("down")
                return await super().list(prefix, **given)

        inner.__class__ = Flaky

    @property
    def root(self):
        return self.session.storage

    def copy_of(self, h):
        return str(self.folder / f"host{h}")

    def known(self, h):
        return read_copy(self.copy_of(h))

    def standing(self, facts, step, tip=None):
        return RunLine(facts, tip).standing(step[0], f"{step[0]}-{step[1]}", Origin(RUN, 1, step[1], step[0]))

    def best(self, facts, steps, tip=None):
        on = [each for each in steps if self.standing(facts, each, tip) == Standing.ON]
        return max(on, key=lambda each: (each[0], self.names.index(each[1])), default=None)

    # Trainers

    def start(self, t, h):
        copy = FactsCopy(RUN, self.known(h), frozenset(name for _, name in self.near[h]))
        try:
            if self.is_down:
                facts = settle_run(None, [[copy]] if copy.facts.last else [], FAR).facts
                found = self.best(facts, self.near[h], facts.last)
                self._go_on(t, h, facts, found, "run")
                return
            root = run(mend_facts(self.root, [copy]))
            if root.lacks(copy.facts) and not root.was_rolled_back(copy):
                shutil.rmtree(self.copy_of(h), ignore_errors=True)
                self.near[h] = set()
                self.uploaders[h] = SimpleNamespace(phase="idle", step=None, forked=False)
            settled = settle_run(root, [[copy]], FAR).facts
            facts = run(publish_pending(self.root, settled, [each.name for each in settled.pending]))
        except RunForkedError:
            self.phases[t], self.trainers[t] = "over", SimpleNamespace(h=h)
            return
        store_copy(self.copy_of(h), self.known(h).unite(facts))
        self._go_on(t, h, facts, self.best(facts, self.near[h] | self.far), "chosen")

    def _go_on(self, t, h, facts, found, phase):
        if found is not None:
            parent = Parent(found[1], found[0], f"{found[0]}-{found[1]}")
        else:
            parent = Parent(facts.last.name, None) if facts.last is not None else None
        attempt = facts.next_attempt(RUN, parent, host=str(h), far=FAR)
        self.names.append(attempt.name)
        self.trainers[t] = SimpleNamespace(h=h, attempt=attempt, last=found[0] if found else 0, facts=facts)
        self.phases[t] = phase
        if phase == "run":
            self.trainers[t].facts = facts.with_pending([attempt])
            self.register(t)

    def publish_own(self, t, *, lost=False):
        trainer = self.trainers[t]
        try:
            root = run(read_facts(self.root))
            if root.lacks(trainer.facts):  # it was deleted, or rolled back
                self.phases[t] = "over"
                return
            self.lost = lost
            facts = run(publish_pending(self.root, root.with_pending([trainer.attempt]), [trainer.attempt.name]))
        except RunForkedError:
            self.phases[t] = "off"
            return
        except StorageError:
            facts = trainer.facts.with_pending([trainer.attempt])
        trainer.facts = Facts(facts.number, facts.published).with_pending([trainer.attempt])
        self.phases[t] = "run"
        self.register(t)

    def register(self, t):
        trainer = self.trainers[t]
        store_copy(self.copy_of(trainer.h), self.known(trainer.h).unite(trainer.facts))

    def take(self, t):
        trainer = self.trainers[t]
        h, step = trainer.h, (trainer.last + 1, trainer.attempt.name)
        tiers = object.__new__(TierSet)
        tiers.member = SimpleNamespace(attempt=trainer.attempt, facts=trainer.facts, fault="", run=RUN)
        tiers.options, tiers.superseded = SimpleNamespace(far=FAR), None
        tiers.folder = SimpleNamespace(path=self.copy_of(h))
        tiers.look_for_later_attempt(step[0])
        if tiers.superseded is not None:
            self.phases[t] = "over"
            return
        same = {each for each in self.near[h] if each[0] == step[0]}
        left = {each for each in same if self.standing(tiers.member.facts, each) == Standing.OFF}
        if same - left:
            self.phases[t] = "over"
            return
        self.near[h] = (self.near[h] - left) | {step}
        trainer.last = step[0]

    def stop(self, t):
        self.phases[t] = "off"

    # Uploaders

    def sync(self, h):
        """Read the facts, as an uploader does. Return None if the run was deleted."""
        live = {
            each.attempt.name
            for each, phase in zip(self.trainers, self.phases, strict=True)
            if phase == "run" and each.h == h
        }
        names = {name for _, name in self.near[h]} | live
        try:
            facts, fork = run(sync_facts(self.root, self.known(h), names))
        except RunDeletedError:
            return None
        except RolledBackError as error:
            return self.known(h), error
        store_copy(self.copy_of(h), self.known(h).unite(facts))
        return facts, fork

    def look(self, h, *, lost=False):
        self.lost, up = lost, self.uploaders[h]
        found = self.sync(h)
        self.lost = False
        if found is None:
            up.phase = "end"
            return
        facts, fork = found
        self.near[h] = {each for each in self.near[h] if self.standing(facts, each) != Standing.OFF}
        up.forked = fork is not None

    def send(self, h):
        facts = self.known(h)
        self.uploaders[h].step = self.best(facts, self.near[h])
        self.uploaders[h].phase = "sent"

    def commit(self, h):
        up = self.uploaders[h]
        found = run(read_facts(self.root))
        if found.was_rolled_back(FactsCopy(RUN, self.known(h))):
            up.phase, up.forked = "idle", True
        elif found.lacks(self.known(h)):
            up.phase = "end"
        elif self.standing(found, up.step) != Standing.ON:
            up.phase = "idle"
            self.look(h)
        else:
            up.phase = "ready"

    def land(self, h):
        up = self.uploaders[h]
        found = run(read_facts(self.root))
        line = RunLine(found)
        same = {each for each in self.far if each[0] == up.step[0]}
        mine = ("", Origin(RUN, 1, up.step[1], up.step[0]))
        there = {each: (f"{each[0]}-{each[1]}", Origin(RUN, 1, each[1], each[0])) for each in same}
        left = {each for each, other in there.items() if line.is_newer(up.step[0], mine, other)}
        if same - left:
            up.phase = "idle"
            return
        self.far = (self.far - left) | {up.step}
        up.phase = "put"

    def check(self, h):
        up = self.uploaders[h]
        found = run(read_facts(self.root))
        if found.lacks(self.known(h)):
            self.far.discard(up.step)
            up.forked = found.was_rolled_back(FactsCopy(RUN, self.known(h)))
            up.phase = "idle" if up.forked else "end"
            return
        if self.standing(found, up.step) != Standing.ON:
            self.far.discard(up.step)
        up.phase = "idle"

    # Others

    def prune(self, t):
        trainer = self.trainers[t]
        h = trainer.h
        facts = self.known(h)
        tip = None if facts.has(trainer.attempt.name) else trainer.attempt
        on = [each for each in self.near[h] if self.standing(facts, each, tip) == Standing.ON]
        newest = self.best(facts, self.near[h], tip)
        gone = {e for e in on if e != newest and (e in self.far or newest in self.far)}
        self.near[h] -= gone
        root = run(read_facts(self.root))
        if root.lacks(facts):
            return
        newest = self.best(root, self.far)
        if newest is not None:
            undecided = {e for e in self.far if self.standing(root, e) in (Standing.UNDECIDED, Standing.FOREIGN)}
            self.far -= {e for e in self.far if e != newest and e[0] <= newest[0]} - undecided

    def compact(self):
        run(self.root.delete(run(self.root.list(f"{FOLDER}/"))[:-1]))

    def choose(self, h):
        facts = self.known(h)
        copy = FactsCopy(RUN, facts)
        root = run(read_facts(self.root))
        pending = root.with_copies([copy]).pending
        last = max(pending, key=lambda each: (each.number, self.names.index(each.name)))
        found = run(choose_attempt(self.root, [copy], last.name, str(h), FAR))
        self.names.append(found.tip.name)
        self.uploaders[h] = SimpleNamespace(phase="idle", step=None, forked=False)

    def go_down(self):
        self.is_down = True

    def come_back(self):
        self.is_down = False

    def delete_root(self):
        run(self.root.delete(run(self.root.list(""))))
        self.far = set()

    def roll_back(self):
        run(self.root.delete(run(self.root.list(f"{FOLDER}/"))[-1:]))
        kept = {each.name for each in run(read_facts(self.root)).published}
        self.far = {each for each in self.far if each[1] in kept}

    def lose_host(self, h):
        shutil.rmtree(self.copy_of(h), ignore_errors=True)
        self.near[h] = set()
        self.uploaders[h] = SimpleNamespace(phase="idle", step=None, forked=False)
        for t, each in enumerate(self.trainers):
            if each is not None and each.h == h:
                self.phases[t] = "off"

    def kill_uploader(self, h):
        self.uploaders[h] = SimpleNamespace(phase="idle", step=None, forked=False)

    def seen(self):
        """All that both must agree on, in terms of the model."""
        index = {name: at for at, name in enumerate(self.names)}

        def steps(found):
            return {(step, index[name]) for step, name in found}

        down, self.is_down = self.is_down, False
        facts = run(read_facts(self.root))
        self.is_down = down
        return {
            "published": sorted(index[each.name] for each in facts.published),
            "number": facts.number,
            "far": steps(self.far),
            "near": [steps(each) for each in self.near],
            "trainers": list(self.phases),
            "uploaders": [each.phase for each in self.uploaders],
            "known": [sorted(index[e.name] for e in self.known(h).published) for h in range(2)],
            "pending": [sorted(index[e.name] for e in self.known(h).pending) for h in range(2)],
        }

    def close(self):
        run(self.session.close())


def seen_in(s):
    """The same of a state of the model."""
    return {
        "published": sorted(ids(s.published)),
        "number": len(s.published),
        "far": set(s.far),
        "near": [set(each.near) for each in s.hosts],
        "trainers": [each.phase for each in s.trainers],
        "uploaders": [each.phase for each in s.uploaders],
        "known": [sorted(ids(each.known)) for each in s.hosts],
        "pending": [sorted(each.pending) for each in s.hosts],
    }


def run_schedule(seed, folder, length=25, first=(), **given):
    """Run one random schedule against both. Raise Wrong if they differ, or if an invariant does not hold.

    `first`: the actions that it begins with.
    """
    chance, model, s = random.Random(seed), Model(faults=4 if first else 2), State()
    begins = iter(first)
    code, done = Code(folder, **given), []
    fresh = (f"{each:012x}" for each in itertools.count())  # in the order of the model: ties are decided by name
    real, timeline.new_name = timeline.new_name, lambda: next(fresh)
    stored.new_name = timeline.new_name
    try:
        for _ in range(length):
            possible = [(action, made) for action, made in model.actions(s) if made is not None and made != s]
            if not possible:
                break
            wanted = next(begins, None)
            if wanted is not None:
                possible = [each for each in possible if each[0] == wanted]
            names = sorted({action[0] for action, _ in possible})
            name = chance.choice(names)
            action, s = chance.choice([each for each in possible if each[0][0] == name])
            done.append(action)
            lost = action[0].endswith(", answer lost")
            getattr(code, action[0].removesuffix(", answer lost"))(*action[1:], **({"lost": True} if lost else {}))
            model.expect_sound(s)
            model.expect_ends(s)
            wanted, found = seen_in(s), code.seen()
            wrong = {key: (value, found[key]) for key, value in wanted.items() if value != found[key]}
            if wrong:
                raise Wrong(f"model and code differ: {wrong}")
    except Exception as error:
        raise Wrong(f"seed {seed}: {error!r}; after {done}") from error
    finally:
        timeline.new_name = stored.new_name = real
        code.close()
    return len(done)
