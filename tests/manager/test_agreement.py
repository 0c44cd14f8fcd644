"""All ranks act at the same call, whatever the order in which they come: the protocol, on a store that is simulated."""

import random
import threading

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from snapshot.errors import RankError
from snapshot.manager import agreement
from snapshot.manager.agreement import MOST, StepVote


class Store:
    """A store's calls, on a dictionary. Before each, `turn` is called: there another rank may be given its turn."""

    def __init__(self, extended=True, turn=lambda: None):
        self.values = {}
        self.calls = 0
        self._extended = extended
        self._turn = turn

    def _called(self):
        self.calls += 1
        self._turn()

    def set(self, key, value):
        self._called()
        self.values[key] = value

    def get(self, key):
        self._called()
        return self.values[key].encode()  # a real one would wait, which nothing here ever may

    def multi_get(self, keys):
        return [self.get(key) for key in keys]

    def check(self, keys):
        self._called()
        return all(key in self.values for key in keys)

    def compare_set(self, key, expected, new):
        self._called()
        if self.values.get(key, "") == expected:
            self.values[key] = new
        return self.values[key].encode()

    def delete_key(self, key):
        self._called()
        return self.values.pop(key, None) is not None

    def has_extended_api(self):
        return self._extended


class Interleaved:
    """Ranks in threads, of which one goes on at a time, for one call of the store: chance says which."""

    def __init__(self, world, chance, weights, extended):
        self.world, self.chance, self.weights = world, chance, weights
        self.store = Store(extended, self._yield)
        self._back = threading.Semaphore(0)
        self._gates = [threading.Semaphore(0) for _ in range(world)]
        self._local = threading.local()
        self._over = [False] * world
        self.failed = []

    def _yield(self):
        self._back.release()
        self._gates[self._local.rank].acquire()

    def _work(self, rank, body):
        self._local.rank = rank
        self._gates[rank].acquire()
        try:
            body(rank)
        except BaseException as error:  # noqa: BLE001 - the test raises it
            self.failed.append(error)
        self._over[rank] = True
        self._back.release()

    def run(self, body):
        """`body(rank)` on every rank, to its end."""
        threads = [threading.Thread(target=self._work, args=(rank, body)) for rank in range(self.world)]
        for thread in threads:
            thread.start()
        while not all(self._over):
            alive = [rank for rank in range(self.world) if not self._over[rank]]
            self._gates[self.chance.choices(alive, [self.weights[rank] for rank in alive])[0]].release()
            self._back.acquire()
        for thread in threads:
            thread.join()
        if self.failed:
            raise self.failed[0]


class InTurns(StepVote):
    """Talks in its own thread, and goes without a look for as many calls as chance says."""

    chance = random.Random(0)
    longest = MOST

    def _guarded(self, work):
        work()

    def _publish(self, most):
        self._look, self._slowest = 1.0, 1.0 / self.chance.randint(1, self.longest)
        self._block = MOST
        super()._publish(most)


@settings(max_examples=120)
@example(  # what was published before a look for the wish of one time was taken for a promise about the next
    world=3, seed=7, longest=10, weights=[30, 1, 5, 1], acts=3, extended=True, wishers=[3, 7, 1, 1]
)
@given(
    world=st.integers(2, 4),
    seed=st.integers(0, 2**32),
    longest=st.integers(1, MOST),
    weights=st.lists(st.sampled_from([1, 5, 30]), min_size=4, max_size=4),
    acts=st.integers(1, 4),
    extended=st.booleans(),
    wishers=st.lists(st.integers(1, 15), min_size=4, max_size=4),
)
def test_step_vote_all_ranks_act_at_the_same_calls(world, seed, longest, weights, acts, extended, wishers):
    chance = random.Random(seed)
    at_once = Interleaved(world, chance, weights, extended)
    # who wishes in which epoch, and for how many of its calls it has none yet
    plans = [
        {rank: chance.randint(0, 30) for rank in range(world) if wishers[epoch] >> rank & 1} or {0: 5}
        for epoch in range(acts)
    ]
    acted = [[] for _ in range(world)]
    first_wish = [[] for _ in range(acts)]

    def body(rank):
        one = InTurns(at_once.store, "q", rank, world, 60)
        one.chance, one.longest = chance, longest
        since = 0
        while len(acted[rank]) < acts:
            wish = one.calls - since >= plans[len(acted[rank])].get(rank, 10**9)
            if wish:
                first_wish[len(acted[rank])].append(one.calls + 1)
            if one.ask(wish):
                acted[rank].append(one.calls)
                since = one.calls
            assert one.calls < 50_000, "it was never told"

    at_once.run(body)
    assert acted == [acted[0]] * world
    assert acted[0] == sorted(set(acted[0]))
    assert all(first_wish)


def test_step_vote_late_rank_acts_at_the_call_of_the_others():
    store = Store()
    ranks = [StepVote(store, "q", rank, 2, 60) for rank in range(2)]
    at = next(call for call in range(1, 1000) if ranks[0].ask(True))
    answers = [ranks[1].ask(False) for _ in range(at)]
    assert answers == [False] * (at - 1) + [True]


def test_step_vote_uses_the_store_rarely_and_notices_a_request_within_a_bound(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(agreement.time, "monotonic", lambda: now[0])
    store = Store()
    ranks = [StepVote(store, "q", rank, 2, 60) for rank in range(2)]

    def calls(count, seconds):
        before = store.calls
        for _ in range(count):
            now[0] += seconds
            asked = [one.ask(False) for one in ranks]  # every one of them
            assert not any(asked)
        return store.calls - before

    calls(2000, 0.001)
    fast = calls(2000, 0.001)
    assert fast <= 2 * 2 * (2000 / MOST + 1)  # of each rank: that it goes on, and a look
    calls(200, 1.0)
    slow = calls(100, 1.0)
    assert slow == 2 * 2 * 100  # steps that take long are looked at each time
    answers = [[one.ask(rank == 1) for rank, one in enumerate(ranks)] for _ in range(3)]
    assert answers.index([True, True]) <= 2
    assert all(each in ([True, True], [False, False]) for each in answers)


def test_step_vote_keys_do_not_pile_up():
    store = Store()
    ranks = [StepVote(store, "q", rank, 2, 60) for rank in range(2)]
    acted = 0
    for _ in range(6000):
        answers = [one.ask(rank == 0) for rank, one in enumerate(ranks)]
        assert len(set(answers)) == 1
        acted += answers[0]
    assert acted > 50
    assert len(store.values) < 2 + 2 * (2 * MOST + 2)


def test_step_vote_raises_rank_error_if_the_store_is_unreachable():
    class Gone(Store):
        def set(self, key, value):
            raise RuntimeError("Connection reset by peer")

    with pytest.raises(
        RankError, match=r"rank 0: the store .* cannot be reached any more \(Connection reset by peer\)"
    ):
        StepVote(Gone(), "q", 1, 2, 60).ask(False)

    silent = threading.Event()
    store = Store(turn=lambda: silent.wait(60))
    with pytest.raises(RankError, match=r"has not responded for 0\.05 s"):
        StepVote(store, "q", 1, 2, 0.05).ask(False)
    silent.set()
