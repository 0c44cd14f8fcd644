"""The protocol of a run as a small transition system, to be explored exhaustively.

Two hosts, each with an uploader, two trainers, and one root. All state is a value, and each action returns the next
one. `MENDS` can be taken out, one at a time: then the exploration must find a fault.
"""

from collections import deque
from functools import cache
from typing import NamedTuple

STEPS, ATTEMPTS = 3, 4
"""Bounds: the highest step, and the number of attempts in a trace."""
MENDS = {
    "an unreadable root is not empty",
    "a publication is conditional",
    "a lost answer is read again, by name",
    "a registration only adds",
    "all steps are filtered, not only the newest",
    "a deleted root is never created again",
    "an uploader whose run was deleted ends",
    "undecided steps are not uploaded",
    "undecided steps are not deleted",
    "the line is checked again after a commit",
    "a join publishes what hosts could not",
    "a fork is an error",
    "an old number is looked at again after compaction",
    "the root is looked at again after a commit",
    "a root that was rolled back is a fork",
}


class Attempt(NamedTuple):
    """A fact: its parent's index and the step it left it at, and the number after the last one it read."""

    parent: int
    step: int
    number: int


class Host(NamedTuple):
    """A near folder: the facts it knows, and its steps as (step, attempt)."""

    known: tuple = ()
    pending: frozenset = frozenset()
    near: frozenset = frozenset()


class Trainer(NamedTuple):
    """A job on one host. `phase`: off, chosen (an attempt is to be published), run, over (an error was raised)."""

    phase: str = "off"
    host: int = 0
    attempt: int = -1
    last: int = 0
    known: tuple = ()


class Uploader(NamedTuple):
    """The uploader of a host. `phase`: idle, sent, put (to be checked again), end."""

    phase: str = "idle"
    step: tuple = ()
    forked: bool = False


class State(NamedTuple):
    """All that there is."""

    attempts: tuple = ()
    published: tuple = ()
    """The facts in the root, in order."""
    floor: int = 0
    """Files with numbers up to this one were deleted by a compaction."""
    far: frozenset = frozenset()
    junk: bool = False
    """True if files of a deleted run are in the root."""
    is_down: bool = False
    hosts: tuple = (Host(), Host())
    trainers: tuple = (Trainer(), Trainer())
    uploaders: tuple = (Uploader(), Uploader())
    faults: int = 0
    dead: frozenset = frozenset()
    """Attempts of deleted roots. (For invariants only, as all below.)"""
    lost: frozenset = frozenset()
    """Attempts that a root has lost when it was rolled back."""
    truth: tuple = ()
    """The attempts whose publication succeeded, in the order in which that happened."""
    promised: frozenset = frozenset()
    """Steps for which `wait("far")` returned."""
    taken: frozenset = frozenset()
    """Steps for which `wait()` returned, each with its host: those of lost hosts are left out."""


class Wrong(Exception):
    """An invariant does not hold."""


@cache
def ids(known):
    """The attempts in some files of facts: a choice publishes several in one, and a filler none."""
    return tuple(each for file in known for each in (file if isinstance(file, tuple) else (file,)))


def tip_of(known):
    """The attempt that was published last, or -1."""
    return ids(known)[-1] if ids(known) else -1


def line_of(attempts, known, tip=None):
    """The attempts on the line, each with the step at which it was left."""
    at, limit, cuts = tip_of(known) if tip is None else tip, STEPS + 1, {}
    while at >= 0 and at not in cuts:
        cuts[at] = limit
        limit, at = min(limit, attempts[at].step), attempts[at].parent
    return cuts


def standing(cuts, known, step):
    """`on`, `off` or `undecided`."""
    number, attempt = step
    if attempt in cuts:
        return "on" if number <= cuts[attempt] else "off"
    return "off" if attempt in ids(known) else "undecided"


def best_of(cuts, known, steps):
    return max((each for each in steps if standing(cuts, known, each) == "on"), default=None)


def put(items, at, value):
    return (*items[:at], value, *items[at + 1 :])


class Model:
    """The transitions, without one mend if that is given."""

    def __init__(self, without=None, faults=2):
        assert without is None or without in MENDS
        self.without, self.most = without, faults

    def has(self, mend):
        return self.without != mend

    # Publication

    def publish(self, s, attempt, *, lost=False):
        """Put the next fact. Return the state, and whether the party believes that it is published."""
        number = s.attempts[attempt].number
        if attempt in ids(s.published) and self.has("a lost answer is read again, by name"):
            return s, True
        if not self.has("a publication is conditional") and number <= len(s.published):  # the last writer wins
            s = s._replace(published=(*s.published[: number - 1], attempt), truth=(*s.truth, attempt))
            return s, True
        parent = s.attempts[attempt].parent
        if parent not in ids(s.published) and (parent >= 0 or s.published) and self.has("a fork is an error"):
            return s, False
        if number <= s.floor and not self.has("an old number is looked at again after compaction"):
            return s._replace(truth=(*s.truth, attempt)), True  # the file was free again, and nobody reads it
        while len(s.published) + 1 < number:  # what it saw was never published: no other may take that number
            s = s._replace(published=(*s.published, ()), truth=(*s.truth, ()))
        if number <= len(s.published):
            return s, False
        s = s._replace(published=(*s.published, attempt), truth=(*s.truth, attempt))
        return s, self.has("a lost answer is read again, by name") or not lost

    def publish_pending(self, s, h, *, live=True, lost=False):
        """Publish what a host's jobs could not. Return the state, and the attempts in conflict."""
        host, forked = s.hosts[h], set()
        lives = {each.attempt for each in s.trainers if each.phase == "run" and each.host == h and live}
        needed = {attempt for _, attempt in host.near} | lives
        for _ in s.attempts:
            needed |= {s.attempts[each].parent for each in needed & host.pending}
        for attempt in sorted(host.pending & needed, key=lambda each: (s.attempts[each].number, each)):
            s, known = self.publish(s, attempt, lost=lost)
            lost = False
            if not known:
                forked.add(attempt)
        if forked & set(ids(s.published)):
            raise Wrong(f"{forked} were published, and the error says that they are not")
        return s, forked

    def is_deleted(self, s, known):
        return tip_of(known) >= 0 and tip_of(known) not in ids(s.published)

    def was_rolled_back(self, s, known):
        """True if a part of what a host has seen published is left."""
        return self.is_deleted(s, known) and bool(set(ids(known)) & set(ids(s.published)))

    def _is_fork(self, s, known):
        return self.was_rolled_back(s, known) and self.has("a root that was rolled back is a fork")

    def _missing(self, s, host):
        """The attempts that a host knows, and that the root lacks."""
        return (set(ids(host.known)) | host.pending) - set(ids(s.published))

    def without_vain(self, s, host):
        """The pending attempts of a host, by number, without those in conflict that have no steps."""
        kept = {attempt for _, attempt in host.near} & host.pending
        for _ in s.attempts:
            kept |= {s.attempts[each].parent for each in kept} & host.pending
        for each in sorted(host.pending - kept, key=lambda each: (s.attempts[each].number, each)):
            made, numbers = s.attempts[each], {s.attempts[other].number for other in kept}
            begins = made.parent < 0 or made.parent in kept or made.parent in ids(host.known)
            if begins and made.number > len(host.known) and made.number not in numbers:
                kept.add(each)
        return sorted(kept, key=lambda each: (s.attempts[each].number, each))

    # Trainers

    def start(self, s, t, h):  # noqa: PLR0911, PLR0912 - each return is an outcome
        """Join on a host, choose a step, and name the attempt that continues it."""
        trainer, host = s.trainers[t], s.hosts[h]
        if trainer.phase != "off" or len(s.attempts) >= ATTEMPTS:
            return None
        if any(each.phase in ("chosen", "run") for each in s.trainers):
            s = s._replace(faults=s.faults + 1)  # two at a time
        if s.is_down and self.has("an unreadable root is not empty"):
            ordered = self.without_vain(s, host)
            numbers = [s.attempts[each].number for each in ordered]
            if len(set(numbers)) < len(numbers) or (numbers and numbers[0] <= len(host.known)):
                return s._replace(trainers=put(s.trainers, t, Trainer("over", h)))
            tip = ordered[-1] if ordered else tip_of(host.known)
            cuts = line_of(s.attempts, host.known, tip)
            found = best_of(cuts, host.known, host.near)
            number = max([len(host.known), *numbers]) + 1
            return self._go_on(s, t, h, found, tip, number, host.known, "run")
        if s.is_down:  # it invents a run, and finds no step in it
            self._expect_best(s, h, None)
            return self._go_on(s, t, h, None, -1, 1, (), "run")
        if self._is_fork(s, host.known):
            return s._replace(trainers=put(s.trainers, t, Trainer("over", h)))
        if self.is_deleted(s, host.known):
            alone = all(each.host != h or each.phase in ("off", "over") for each in s.trainers)
            if not alone or s.uploaders[h].phase not in ("idle", "end"):
                return None  # each run has its own folder and uploader, and this model has one: the old one ends first
            host = Host()
            s = s._replace(hosts=put(s.hosts, h, host), uploaders=put(s.uploaders, h, Uploader()))
        elif self.has("a join publishes what hosts could not"):
            s, forked = self.publish_pending(s, h, live=False)
            stepped = {attempt for _, attempt in host.near}
            if forked & stepped and self.has("a fork is an error"):
                return s._replace(trainers=put(s.trainers, t, Trainer("over", h)))
        cuts, known = line_of(s.attempts, s.published), s.published
        if self.has("a registration only adds"):
            host = host._replace(known=known, pending=frozenset(host.pending - set(ids(known))))
            s = s._replace(hosts=put(s.hosts, h, host))
        steps = host.near | s.far
        if self.has("all steps are filtered, not only the newest"):
            found = best_of(cuts, known, steps)
        else:  # one rotten bit in the newest good step: the search for abandoned ones has ended there
            newest = best_of(cuts, known, steps)
            below = [each for each in s.far if newest is not None and each < newest]
            found = max(below, default=newest)
        self._expect_best(s, h, found)
        tip = tip_of(known)
        return self._go_on(s, t, h, found, tip, len(known) + 1, known, "chosen")

    def _go_on(self, s, t, h, found, tip, number, known, phase):
        step, parent = found if found is not None else (STEPS + 1, tip)
        made = len(s.attempts)
        s = s._replace(attempts=(*s.attempts, Attempt(parent, step, number)))
        last = found[0] if found is not None else 0
        if parent in s.dead:  # the run was deleted, and this host does not know
            s = s._replace(dead=s.dead | {made})
        return self._join(s, t, Trainer(phase, h, made, last, known))

    def _join(self, s, t, trainer):
        """Leave the facts in the near folder."""
        host = s.hosts[trainer.host]
        if trainer.phase == "run":
            host = self._unite(host, trainer)
        return s._replace(trainers=put(s.trainers, t, trainer), hosts=put(s.hosts, trainer.host, host))

    def _unite(self, host, trainer):
        pending = {trainer.attempt} - set(ids(trainer.known))
        if not self.has("a registration only adds"):
            return host._replace(known=trainer.known, pending=frozenset(pending))
        known = max(host.known, trainer.known, key=len)
        return host._replace(known=known, pending=frozenset((host.pending | pending) - set(ids(known))))

    def publish_own(self, s, t, *, lost=False):
        """Publish the attempt that was chosen. After a conflict choose again."""
        trainer = s.trainers[t]
        if trainer.phase != "chosen":
            return None
        if s.is_down:
            return self._join(s, t, trainer._replace(phase="run"))
        if self.is_deleted(s, s.hosts[trainer.host].known) and not self.is_deleted(s, trainer.known):
            return None  # as above
        if self.is_deleted(s, trainer.known):
            return s._replace(trainers=put(s.trainers, t, Trainer("over", trainer.host)))
        s, known = self.publish(s, trainer.attempt, lost=lost)
        if not known:
            return s._replace(trainers=put(s.trainers, t, Trainer()))
        return self._join(s, t, trainer._replace(phase="run", known=s.published))

    def take(self, s, t):
        """Commit the next step near, unless another job has continued the run, as far as this host knows."""
        trainer = s.trainers[t]
        if trainer.phase != "run" or trainer.last >= STEPS:
            return None
        host, made = s.hosts[trainer.host], s.attempts[trainer.attempt]
        step = (trainer.last + 1, trainer.attempt)
        over = s._replace(trainers=put(s.trainers, t, Trainer("over", trainer.host)))
        if trainer.attempt in ids(host.known):
            if standing(line_of(s.attempts, host.known), host.known, step) == "off":
                return over
        elif self.has("a fork is an error") and made.number <= len(host.known):
            return over
        cuts = line_of(s.attempts, host.known)
        others = {each for each in host.near if each[0] == step[0]}
        left = {each for each in others if standing(cuts, host.known, each) == "off"}
        if others - left:
            return over
        near = frozenset(host.near - left) | {step}
        return s._replace(
            hosts=put(s.hosts, trainer.host, host._replace(near=near)),
            taken=s.taken | {(trainer.host, step)},
            trainers=put(s.trainers, t, trainer._replace(last=step[0])),
        )

    def register(self, s, t):
        """A call of a trainer starts the uploader of its host again, with what the trainer knows."""
        trainer = s.trainers[t]
        if trainer.phase != "run":
            return None
        host = self._unite(s.hosts[trainer.host], trainer)
        return s._replace(hosts=put(s.hosts, trainer.host, host))

    def stop(self, s, t):
        """End a trainer, or kill it."""
        if s.trainers[t].phase == "off":
            return None
        return s._replace(trainers=put(s.trainers, t, Trainer()))

    # Uploaders

    def look(self, s, h, *, lost=False):
        """Read the facts, and publish what is pending."""
        up, host = s.uploaders[h], s.hosts[h]
        if up.phase != "idle" or s.is_down or not (host.known or host.pending):
            return None
        if self._is_fork(s, host.known):
            return s._replace(uploaders=put(s.uploaders, h, up._replace(forked=True)))
        if self.is_deleted(s, host.known) and self.has("a deleted root is never created again"):
            phase = "end" if self.has("an uploader whose run was deleted ends") else "idle"
            return s._replace(uploaders=put(s.uploaders, h, up._replace(phase=phase)))
        if self.is_deleted(s, host.known):  # the record is written again, with all that the host knows
            s = s._replace(published=host.known, junk=True)
        s, forked = self.publish_pending(s, h, lost=lost)
        known = s.published
        host = s.hosts[h]._replace(known=known, pending=frozenset(host.pending - set(ids(known))))
        cuts = line_of(s.attempts, known)
        host = host._replace(near=frozenset(e for e in host.near if standing(cuts, known, e) != "off"))
        forked = forked and self.has("a fork is an error")
        return s._replace(hosts=put(s.hosts, h, host), uploaders=put(s.uploaders, h, up._replace(forked=bool(forked))))

    def _wanted(self, s, h):
        """The newest step that may be uploaded."""
        host = s.hosts[h]
        cuts = line_of(s.attempts, host.known)
        allowed = ("on",) if self.has("undecided steps are not uploaded") else ("on", "undecided")
        open_ = [e for e in host.near if standing(cuts, host.known, e) in allowed]
        newest = max(open_, default=None)
        if newest is None:
            return None
        there = [e for e in s.far if e[0] == newest[0] and standing(cuts, host.known, e) != "off"]
        return None if there else newest

    def send(self, s, h):
        """Send the files of the newest step."""
        up, step = s.uploaders[h], self._wanted(s, h)
        if up.phase != "idle" or s.is_down or step is None or self._gone(s, h):
            return None
        return s._replace(uploaders=put(s.uploaders, h, Uploader("sent", step)))

    def _gone(self, s, h):
        return self.is_deleted(s, s.hosts[h].known) and self.has("a deleted root is never created again")

    def commit(self, s, h):
        """Put the manifest, after a look at the facts."""
        up = s.uploaders[h]
        if up.phase != "sent" or s.is_down:
            return None
        if self._is_fork(s, s.hosts[h].known):
            return s._replace(uploaders=put(s.uploaders, h, Uploader(forked=True)))
        if self._gone(s, h):
            return s._replace(uploaders=put(s.uploaders, h, Uploader("end")))
        cuts = line_of(s.attempts, s.published)
        if standing(cuts, s.published, up.step) != "on" and self.has("undecided steps are not uploaded"):
            return self.look(s._replace(uploaders=put(s.uploaders, h, Uploader())), h)
        return s._replace(uploaders=put(s.uploaders, h, Uploader("ready", up.step)))

    def land(self, s, h):
        """The manifest arrives. Whatever happened since the look, nothing stops it."""
        up = s.uploaders[h]
        if up.phase != "ready" or s.is_down:
            return None
        same = {each for each in s.far if each[0] == up.step[0]}
        cuts = line_of(s.attempts, s.published)
        left = {e for e in same if standing(cuts, s.published, e) == "off"}
        if same - left:
            return s._replace(uploaders=put(s.uploaders, h, Uploader()))
        far = frozenset(s.far - left) | {up.step}
        junk = s.junk or up.step[1] in s.dead
        return s._replace(far=far, junk=junk, uploaders=put(s.uploaders, h, Uploader("put", up.step)))

    def check(self, s, h):
        """Look again, and withdraw what must not be there."""
        up = s.uploaders[h]
        if up.phase != "put" or s.is_down:
            return None
        if self._gone(s, h):
            if self.has("the root is looked at again after a commit"):
                s = s._replace(far=s.far - {up.step}, junk=False)
            forked = self._is_fork(s, s.hosts[h].known)
            ended = Uploader(forked=True) if forked else Uploader("end")
            return s._replace(uploaders=put(s.uploaders, h, ended))
        on = standing(line_of(s.attempts, s.published), s.published, up.step) == "on"
        if not on and self.has("the line is checked again after a commit"):
            return s._replace(far=s.far - {up.step}, uploaders=put(s.uploaders, h, Uploader()))
        if not on:
            raise Wrong(f"step {up.step} was uploaded by a race, and stays")
        return s._replace(promised=s.promised | {up.step}, uploaders=put(s.uploaders, h, Uploader()))

    # Retention

    def prune(self, s, t):
        """Remove near and far steps that newer ones on the line replace: the policy keeps one."""
        trainer = s.trainers[t]
        if trainer.phase != "run" or s.is_down:
            return None
        host = s.hosts[trainer.host]
        own = line_of(s.attempts, host.known, None if trainer.attempt in ids(host.known) else trainer.attempt)
        on = [e for e in host.near if standing(own, host.known, e) == "on"]
        gone = {e for e in on if e < max(on) and (e in s.far or max(on) in s.far)}
        if not self.has("undecided steps are not deleted"):
            gone |= {e for e in host.near if standing(own, host.known, e) == "undecided"}
        s = s._replace(hosts=put(s.hosts, trainer.host, host._replace(near=host.near - gone)))
        if self.is_deleted(s, host.known):
            return s
        cuts = line_of(s.attempts, s.published)
        counted = [e for e in s.far if standing(cuts, s.published, e) == "on"]
        if not self.has("all steps are filtered, not only the newest"):
            counted = list(s.far)
        gone = {e for e in s.far if counted and e != max(counted) and e[0] <= max(counted)[0]}
        gone -= {e for e in s.far if standing(cuts, s.published, e) == "undecided"}
        return s._replace(far=s.far - gone)

    def compact(self, s):
        """Delete the files of old facts: later ones repeat them."""
        if s.is_down or len(s.published) < 2 or s.floor == len(s.published) - 1:
            return None
        return s._replace(floor=len(s.published) - 1)

    def choose(self, s, h):
        """A person decides a fork for the host's last attempt."""
        up, host = s.uploaders[h], s.hosts[h]
        if (
            not up.forked
            or s.is_down
            or not self._missing(s, host)
            or len(s.attempts) >= ATTEMPTS
            or (self.is_deleted(s, host.known) and not self._is_fork(s, host.known))
        ):
            return None
        missing = sorted(self._missing(s, host), key=lambda each: (s.attempts[each].number, each))
        if self._is_fork(s, host.known):  # a number that a host knows must not get another meaning
            filled = ((),) * max(0, len(host.known) - len(s.published))
            s = s._replace(published=(*s.published, *filled), truth=(*s.truth, *filled))
        made = len(s.attempts)
        attempts = (*s.attempts, Attempt(missing[-1], STEPS + 1, len(s.published) + 1))
        file = (*missing, made)
        s = s._replace(attempts=attempts, published=(*s.published, file), truth=(*s.truth, file))
        return s._replace(uploaders=put(s.uploaders, h, Uploader()))

    # Faults

    def go_down(self, s):
        return None if s.is_down else s._replace(is_down=True, faults=s.faults + 1)

    def come_back(self, s):
        return s._replace(is_down=False) if s.is_down else None

    def delete_root(self, s):
        if s.is_down or not (s.published or s.far):
            return None
        # a host that has seen the run published counts its pending attempts to it
        dead = s.dead | set(ids(s.published)).union(*(host.pending for host in s.hosts if host.known))
        for made, each in enumerate(s.attempts):
            dead |= {made} if each.parent in dead else set()
        return s._replace(
            published=(), far=frozenset(), floor=0, faults=s.faults + 1, dead=dead, truth=(), promised=frozenset()
        )

    def roll_back(self, s):
        """Put back a backup of the root: without the last fact, and what was uploaded of it."""
        if s.is_down or len(s.published) - 1 <= s.floor:
            return None
        published = s.published[:-1]
        kept = set(ids(published))
        return s._replace(
            published=published,
            truth=s.truth[:-1],
            far=frozenset(each for each in s.far if each[1] in kept),
            faults=s.faults + 1,
            lost=s.lost | (set(ids(s.published)) - kept),
            promised=frozenset(),
            taken=frozenset((h, each) for h, each in s.taken if each in s.hosts[h].near),
        )

    def lose_host(self, s, h):
        if s.hosts[h] == Host():
            return None
        trainers = tuple(Trainer() if each.host == h else each for each in s.trainers)
        uploaders = put(s.uploaders, h, Uploader())
        s = self._interrupt(s, h)._replace(taken=frozenset(each for each in s.taken if each[0] != h))
        return s._replace(hosts=put(s.hosts, h, Host()), trainers=trainers, uploaders=uploaders, faults=s.faults + 1)

    def _interrupt(self, s, h):
        """A host that dies between a commit and its check cannot withdraw from a root that was deleted meanwhile."""
        up = s.uploaders[h]
        return s._replace(junk=False) if up.phase in ("ready", "put") and up.step[1] in s.dead else s

    def kill_uploader(self, s, h):
        if s.uploaders[h].phase == "idle":
            return None
        s = self._interrupt(s, h)
        return s._replace(uploaders=put(s.uploaders, h, Uploader()), faults=s.faults + 1)

    # Invariants

    def _expect_best(self, s, h, found):
        """A restore returns the newest step on the line, as the publications that succeeded define it."""
        known = s.truth if self.has("a deleted root is never created again") or not s.junk else s.published
        cuts = line_of(s.attempts, known)
        wanted = best_of(cuts, known, s.hosts[h].near | s.far)
        taken = {e for host, e in s.taken if host == h and e[1] not in s.dead}
        left = [e for e in taken if standing(cuts, known, e) == "undecided"]
        if left:
            raise Wrong(f"a restore on host {h} ignores {left}, which were committed")
        newest = best_of(cuts, known, taken)
        if newest is not None and (found is None or found < newest):
            raise Wrong(f"a restore on host {h} chose {found}, and {newest} was committed")
        if found != wanted:
            raise Wrong(f"a restore on host {h} chose {found}, and the run has {wanted}")

    def expect_sound(self, s):
        """Raise Wrong if an invariant does not hold."""
        if s.truth != s.published and not s.junk:
            raise Wrong(f"published {s.published}, but {s.truth} were told that they are")
        if s.junk and all(up.phase not in ("ready", "put") for up in s.uploaders):
            raise Wrong("a deleted root has files of its run again")
        cuts = line_of(s.attempts, s.published)
        newest = best_of(cuts, s.published, s.far)
        for each in s.promised:
            on = standing(cuts, s.published, each) == "on"
            if on and (newest is None or newest[0] < each[0]):
                raise Wrong(f"{each} was promised to be far, and {newest} is")
        for each in s.far:
            if standing(cuts, s.published, each) == "undecided" and not s.junk and each[1] not in s.dead | s.lost:
                raise Wrong(f"{each} is far, and no publication decides about it")

    def expect_ends(self, s):
        """Without further faults, each uploader ends, and each step is far, or an error was raised."""
        s = s._replace(is_down=False)
        for _ in range(12 * len(s.hosts)):
            before = s
            for h in range(2):
                for act in (self.check, self.land, self.commit, self.send, self.look):
                    s = act(s, h) or s
            if s == before:
                break
        else:
            raise Wrong("an uploader never ends")
        for h, host in enumerate(s.hosts):
            up, cuts = s.uploaders[h], line_of(s.attempts, s.published)
            if self.is_deleted(s, host.known) and up.phase != "end" and not up.forked:
                raise Wrong("an uploader never ends: its run was deleted")
            left = [e for e in host.near if standing(cuts, s.published, e) == "undecided" and e[1] not in s.dead]
            if left and not up.forked and up.phase != "end":
                raise Wrong(f"{left} will never be uploaded, and no error says so")
            on = [e for e in host.near if standing(cuts, s.published, e) == "on"]
            newest = best_of(cuts, s.published, s.far)
            taken = on and any(e[0] == max(on)[0] for e in s.far)
            if on and not taken and up.phase == "idle" and not up.forked and (newest is None or newest[0] < max(on)[0]):
                raise Wrong(f"{max(on)} is on the line, and is never uploaded")

    # Exploration

    def actions(self, s):
        """Yield the name and the result of each action that is possible."""
        free = s.faults < self.most
        for t in range(2):
            for name in ("publish_own", "take", "stop", "prune", "register"):
                yield (name, t), getattr(self, name)(s, t)
            for h in range(2):
                made = self.start(s, t, h)
                if made is not None and made.faults <= self.most:
                    yield ("start", t, h), made
        for h in range(2):
            for name in ("look", "send", "commit", "land", "check", "choose"):
                yield (name, h), getattr(self, name)(s, h)
        yield ("compact",), self.compact(s)
        yield ("come_back",), self.come_back(s)
        if free:
            yield ("go_down",), self.go_down(s)
            yield ("delete_root",), self.delete_root(s)
            yield ("roll_back",), self.roll_back(s)
            for h in range(2):
                yield ("lose_host", h), self.lose_host(s, h)
                yield ("kill_uploader", h), self.kill_uploader(s, h)
                for name, act in (("publish_own", self.publish_own), ("look", self.look)):
                    made = act(s, h, lost=True)
                    if made is not None and made.published != s.published:
                        yield (f"{name}, answer lost", h), made._replace(faults=made.faults + 1)


def canonical(s):
    """One of the states that differ only in the names of hosts and trainers."""
    swapped = s._replace(
        hosts=s.hosts[::-1],
        uploaders=s.uploaders[::-1],
        taken=frozenset((1 - host, step) for host, step in s.taken),
        trainers=tuple(each._replace(host=1 - each.host) if each.phase != "off" else each for each in s.trainers),
    )
    found = []
    for each in (s, swapped):
        trainers = tuple(sorted(each.trainers, key=_key_of_trainer))
        found.append(each._replace(trainers=trainers))
    return min(found, key=_key)


def _files(known):
    """Files of facts in a form that can be sorted: a choice publishes several attempts."""
    return tuple(file if isinstance(file, tuple) else (file,) for file in known)


def _key_of_trainer(trainer):
    return trainer._replace(known=_files(trainer.known))


def _key(s):
    hosts = tuple((_files(e.known), tuple(sorted(e.pending)), tuple(sorted(e.near))) for e in s.hosts)
    return hosts, s.uploaders, tuple(map(_key_of_trainer, s.trainers)), tuple(sorted(s.taken))


def explore(model, depth, first=()):
    """Visit all states within a number of actions after the first ones. Return their number, or raise Wrong."""
    s = State()
    for name, *arguments in first:
        s = getattr(model, name)(s, *arguments)
    first = canonical(s)
    before = {first: None}
    queue = deque([(first, 0)])
    while queue:
        s, far = queue.popleft()
        if far == depth:
            continue
        action = ("?",)
        try:
            for action, made in model.actions(s):
                if made is None or made == s:
                    continue
                kept = canonical(made)
                if kept not in before:
                    before[kept] = (s, action)
                    model.expect_sound(kept)
                    model.expect_ends(kept)
                    queue.append((kept, far + 1))
        except Wrong as wrong:
            trace = [action]
            while before[s] is not None:
                s, action = before[s]
                trace.append(action)
            raise Wrong(f"{wrong}; after {trace[::-1]}") from None
    return len(before)
