"""Heartbeats and requests to the store of a process group, of ranks that are threads here."""

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from snapshot.distributed import exchange as exchange_module
from snapshot.distributed import group as group_module
from snapshot.distributed.exchange import (
    LEADER,
    Exchange,
    Hello,
    OutcomeUnknown,
    RankFault,
    agreed_url,
    call_of,
    expect_same_keys,
    expect_same_verb,
    solo_exchange,
)
from snapshot.distributed.group import (
    SOLO,
    WAKERS,
    Heartbeat,
    Liveness,
    Ranks,
    Waker,
    group_of_this_rank,
    interval,
    ranks_of,
)
from snapshot.distributed.known_replication import KnownReplication, remember_replication, replication_memory
from snapshot.errors import RankError, RestoreError, SnapshotError, StorageError
from snapshot.io.url import PER_HOST, URL


def test_heartbeat_thread_ends_with_its_process_group():
    """One thread for each group that was ever destroyed would go on sending to its store."""
    heart = Heartbeat(dist.HashStore(), 0, 2)
    heart.begin(60)
    thread = heart._thread
    assert thread.name == "snapshot-heart"
    assert thread.is_alive()
    heart.end(60)
    heart.stop()
    thread.join(60)
    assert not thread.is_alive()


def test_store_timeout_is_not_reported_as_a_silent_rank():
    """The store's own error says more than that it did not respond."""
    store, met = dist.HashStore(), threading.Barrier(2)

    def fail():
        raise TimeoutError("wait timeout after 3 s")

    def call(rank):
        ranks = Ranks(rank, (0, 1), store)
        try:
            with Exchange(ranks, "take", 60) as exchange:
                met.wait(60)
                with pytest.raises(TimeoutError, match="wait timeout after 3 s"):
                    exchange._guard(fail)
                exchange.close()
        finally:
            met.wait(60)  # the other one may still wait for this one
            ranks.stop()

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(call, range(2)))


# Calls of two ranks


def call_on_threads(*works, store=None, seconds=60.0):
    """Run each work as a rank with its `Ranks`, and return what it returned or raised."""
    store, found = dist.HashStore() if store is None else store, {}
    every = [Ranks(rank, tuple(range(len(works))), store) for rank in range(len(works))]

    def run(rank):
        try:
            found[rank] = works[rank](every[rank])
        except Exception as error:  # noqa: BLE001 - it is the outcome
            found[rank] = error

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(len(works))]
    for each in threads:
        each.start()
    for each in threads:
        each.join(seconds)
    for each in every:
        each.stop()
    assert len(found) == len(works), f"a rank hangs: {found}"
    return [found[rank] for rank in range(len(works))]


def taking(work, timeout=60.0):
    """Return a function that calls `work(exchange)` inside a call of all ranks."""

    def run(ranks):
        with Exchange(ranks, "take", timeout) as exchange:
            found = work(exchange)
        exchange.close()
        return found

    return run


def test_agree_gives_the_leader_all_values_in_order_and_all_ranks_its_reply():
    def steps(exchange):
        first = exchange.agree(f"r{exchange.rank}", lambda all_: [*all_, "!"], str, list[str])
        return first, [exchange.agree(exchange.rank + n, sum, int, int) for n in range(3)], exchange.number

    found = call_on_threads(*[taking(steps)] * 3)
    assert found == [(["r0", "r1", "r2", "!"], [3, 6, 9], 0)] * 3
    alone = solo_exchange("take")
    with alone:
        assert alone.agree(4, lambda all_: [*all_, 5], int, list[int]) == [4, 5]
        assert alone.alone
        assert alone.given_up() is None
        assert alone.fail(ValueError("x"))
        alone.commit()
    alone.close()


@pytest.mark.parametrize(
    ("error", "kind", "text"),
    [
        (SnapshotError("no\nfit"), SnapshotError, "no\nfit"),
        (RestoreError("does not fit", []), RestoreError, "does not fit"),
        (StorageError("disk"), RankError, "rank 0 failed: StorageError: disk"),
        (ValueError("wrong"), RankError, "rank 0 failed: ValueError: wrong"),
        (RankError("rank 1 is late", rank=1), RankError, "rank 0 failed: RankError: rank 1 is late"),
    ],
)
def test_agree_raises_an_error_of_the_leader_on_all_ranks(error, kind, text):
    def lead(_):
        raise error

    for before_commit in (True, False):

        def work(exchange, before_commit=before_commit):
            if not before_commit:
                if exchange.rank == LEADER:
                    exchange.commit()
                exchange.agree(0, sum, int, int)
            return exchange.agree(0, lead, int, int)

        own, other = call_on_threads(taking(work), taking(work))
        assert own is error
        assert type(other) is kind
        assert str(other) == text
        if kind is RankError:
            assert (other.rank, other.kind) == (0, type(error).__name__)


def test_agree_refuses_a_message_of_another_version():
    def work(exchange):
        return exchange.agree("text" if exchange.rank else 1, sum, int, int)

    own, other = call_on_threads(taking(work), taking(work))
    assert isinstance(own, SnapshotError)
    assert "another version" in str(own)
    assert isinstance(other, SnapshotError)


@pytest.mark.parametrize("failing", [0, 1])
def test_fail_is_raised_on_the_other_ranks_with_its_notes(failing):
    def work(exchange):
        exchange.agree(0, sum, int, int)
        if exchange.rank == failing:
            error = ValueError("broken")
            error.add_note("a note")
            raise error
        return exchange.agree(0, sum, int, int)

    found = call_on_threads(taking(work), taking(work))
    assert isinstance(found[failing], ValueError)
    other = found[1 - failing]
    assert type(other) is RankError
    assert str(other) == f"rank {failing} failed: ValueError: broken\na note"
    assert (other.rank, other.kind) == (failing, "ValueError")


def test_commit_is_decided_once_and_a_failure_before_it_rules_it_out():
    met = threading.Barrier(2)

    def work(first):
        def run(exchange):
            met.wait(60)
            if exchange.rank == first:
                found = exchange.commit() if first == LEADER else exchange.fail(ValueError("late"))
                met.wait(60)
                return found, exchange.given_up()
            met.wait(60)
            exchange.note_done()
            if exchange.rank != LEADER:
                return exchange.fail(ValueError("late")), exchange.given_up()
            with pytest.raises(RankError, match="rank 1 failed: ValueError: late"):
                exchange.commit()
            return str(exchange.given_up()), exchange.fail(KeyError("own"))

        return taking(run)

    assert call_on_threads(work(LEADER), work(LEADER)) == [(None, None), (False, None)]
    own, (fault, ruled_out) = reversed(call_on_threads(work(1), work(1)))
    assert own[0] is True
    assert str(own[1]) == fault == "rank 1 failed: ValueError: late"
    assert ruled_out


@pytest.mark.parametrize("failing", [False, True])
def test_close_of_the_last_rank_deletes_the_keys_of_the_call(failing):
    store, counts, met = dist.HashStore(), [], threading.Barrier(2)

    def run(ranks):
        for _ in range(3):
            with suppress(ValueError, RankError), Exchange(ranks, "take", 600) as exchange:
                exchange.agree(0, sum, int, int)
                if failing and ranks.rank:
                    raise ValueError
                exchange.agree(0, sum, int, int)
                exchange.broke_off() if failing else None
            exchange.close()
            exchange.close()  # again
            met.wait(60)
            keys = store.num_keys() - sum(ranks.connected()[0].check([f"beat/{rank}"]) for rank in range(2))
            counts.append(keys)
            met.wait(60)

    call_on_threads(run, run, store=store)
    assert len(counts) == 6
    assert set(counts) == {2}, "only the numbers of their sessions remain"


def test_rank_that_did_not_call_is_named_and_skips_that_call_later():
    late = threading.Event()

    def first(ranks):
        with pytest.raises(RankError, match=r"rank 1 did not call within 1 s \(take\)") as caught:
            taking(lambda exchange: exchange.agree(0, sum, int, int), 1.0)(ranks)
        assert caught.value.rank == 1
        late.set()
        return taking(lambda exchange: (exchange.number, exchange.agree(1, sum, int, int)))(ranks)

    def second(ranks):
        late.wait(60)
        return taking(lambda exchange: (exchange.number, exchange.agree(2, sum, int, int)))(ranks)

    assert call_on_threads(first, second) == [(1, 3), (1, 3)]


@pytest.mark.parametrize("silent", [0, 1])
def test_rank_without_a_heartbeat_is_named(silent):
    over = threading.Event()

    def work(exchange):
        exchange.agree(0, sum, int, int)
        if exchange.rank == silent:
            exchange.ranks.connected()[1].stop()
            over.wait(60)
            return exchange.given_up()
        try:
            return exchange.agree(0, sum, int, int)
        finally:
            over.set()

    found = call_on_threads(taking(work, 1.0), taking(work, 1.0))
    text = f"rank {silent} sent no heartbeat for 1 s (take)"
    assert [type(each) for each in found] == [RankError, RankError]
    assert [str(each) for each in found] == [text, text]
    assert found[1 - silent].rank == silent


def test_together_waits_for_all_and_ends_for_all_when_one_broke_off():
    met, done = threading.Barrier(2), threading.Event()

    def work(exchange):
        met.wait(60)
        if exchange.rank:
            done.set()
        first = exchange.together(done.is_set)
        met.wait(60)
        if exchange.rank:
            exchange.broke_off()
            return first, exchange.together(lambda: True)
        return first, exchange.together(lambda: False)

    assert call_on_threads(taking(work), taking(work)) == [(True, False), (True, True)]


@pytest.mark.parametrize("posted", [False, True])
@pytest.mark.parametrize("how", ["unreachable", "silent"])
def test_store_that_fails_blames_the_rank_that_serves_it(how, posted):
    over, met = threading.Event(), threading.Barrier(2)

    def fail():
        if how == "silent":
            over.wait(60)
        raise RuntimeError("Connection reset")

    def work(exchange):
        if exchange.rank:
            met.wait(60)
            return None
        if posted:
            exchange.note_done()
        try:
            exchange._guard(fail, 0.2)
        except (RankError, OutcomeUnknown) as error:
            return error, exchange.fail(KeyError("own"))
        finally:
            over.set()
            met.wait(60)

    error, ruled_out = call_on_threads(taking(work), taking(work))[0]
    assert type(error) is (OutcomeUnknown if posted else RankError)
    assert ("unreachable (Connection reset)" if how == "unreachable" else "did not respond for 0.2 s") in str(error)
    assert posted or error.rank == LEADER
    assert ruled_out  # the store answers again


def test_store_over_tcp_wakes_the_ranks_that_wait(monkeypatch):
    """A wake-up that is lost would take as long as the next look."""
    monkeypatch.setattr(exchange_module, "LOOK", 1000.0)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    waits = {rank: threading.Event() for rank in range(2)}

    def begun(waker, key, begin=Waker.begin):
        begin(waker, key)
        waits[LEADER if key.endswith("full") else 1].set()

    monkeypatch.setattr(Waker, "begin", begun)

    def work(exchange):
        first = exchange.agree(1, lambda all_: waits[1].wait(60) and sum(all_), int, int)
        if exchange.rank:
            waits[LEADER].wait(60)
        second = exchange.agree(2, sum, int, int)
        waits[1].clear()
        exchange.agree(0, sum, int, int)
        if exchange.rank == LEADER:
            waits[1].wait(60)
            raise ValueError("broken")
        return first, second, exchange.agree(0, sum, int, int)

    own, other = call_on_threads(taking(work, 1e5), taking(work, 1e5), store=store)
    assert isinstance(own, ValueError)
    assert str(other) == "rank 0 failed: ValueError: broken"


# What ranks send to each other


@pytest.mark.parametrize(
    ("fault", "kind", "text"),
    [
        (RankFault(3, "ValueError", "wrong"), RankError, "rank 3 failed: ValueError: wrong"),
        (RankFault(3, "", "is late"), RankError, "rank 3 is late"),
        (RankFault(0, "RestoreError", "no fit", shared=True), RestoreError, "no fit"),
        (RankFault(0, "RestoreError", "no fit"), RankError, "rank 0 failed: RestoreError: no fit"),
        (RankFault(0, "RankError", "x", shared=True), RankError, "rank 0 failed: RankError: x"),
        (RankFault(0, "ValueError", "x", shared=True), RankError, "rank 0 failed: ValueError: x"),
        (RankFault(0, "annotations", "x", shared=True), RankError, "rank 0 failed: annotations: x"),
    ],
)
def test_rank_fault_gives_the_error_of_the_other_ranks(fault, kind, text):
    error = fault.error()
    assert type(error) is kind
    assert str(error) == text
    if kind is RankError:
        assert (error.rank, error.kind) == (fault.rank, fault.kind)


class Unprintable(Exception):
    def __str__(self):
        raise KeyError


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (ValueError("x" * 9000), "x" * 8000),
        (ValueError("a\ud800b"), "a?b"),
        (Unprintable(), "(an error that cannot be printed)"),
    ],
)
def test_error_texts_are_cut_and_can_be_sent(error, text):
    fault = solo_exchange("take")._fault_of(error, shared=True)
    assert (fault.rank, fault.kind, fault.text, fault.shared) == (0, type(error).__name__, text, False)


@pytest.mark.parametrize(
    ("error", "shared", "expected"),
    [
        (SnapshotError("x"), True, True),
        (SnapshotError("x"), False, False),
        (StorageError("x"), True, False),
        (ValueError("x"), True, False),
    ],
)
def test_error_of_the_leader_is_of_all_ranks_unless_it_is_of_its_storage(error, shared, expected):
    assert solo_exchange("take")._fault_of(error, shared=shared).shared is expected


def test_expect_same_verb_names_each_verb_and_a_rank():
    expect_same_verb([Hello("take", "a"), Hello("take", "b")])
    with pytest.raises(SnapshotError, match=r"take on rank 2, restore on rank 1$"):
        expect_same_verb([Hello("take", "a"), Hello("restore", "a"), Hello("take", "a")])


def test_expect_same_keys_names_the_rank_that_differs():
    expect_same_keys("key", [["a", ""], ["a", ""]])
    expect_same_keys("key", [])
    with pytest.raises(SnapshotError, match=r"^key must .* got a and no key on rank 0, no key on rank 1$"):
        expect_same_keys("key", [["a", ""], [], ["b"]])
    with pytest.raises(SnapshotError, match=r"got a on rank 0, b on rank 2$"):
        expect_same_keys("key", [["a"], ["a"], ["b"]])
    with pytest.raises(SnapshotError, match=r"^base must .* got 1 base on rank 0, 0 on rank 1$"):
        expect_same_keys("sign", [["", ""], [""]])


def test_agreed_url_is_the_leaders_unless_each_host_has_its_own():
    here, own = URL.parse("s3://me:word@bucket/a"), URL.parse(f"{PER_HOST}://host/a")
    assert agreed_url(here, here.reveal()) is here
    assert agreed_url(own, f"{PER_HOST}://host/b") is own
    for mine, leaders in ((here, "s3://bucket/a"), (own, "s3://bucket/a"), (here, own.reveal())):
        with pytest.warns(UserWarning, match="path") as warned:
            assert agreed_url(mine, leaders).reveal() == leaders
        text = str(warned[0].message)
        assert 0 < text.index(repr(str(mine))) < text.index(repr(leaders))


def test_call_of_this_process_alone_has_one_rank():
    with call_of("take", None, ranks=True) as exchange:
        assert (exchange.rank, exchange.world, exchange.alone) == (0, 1, True)
    with pytest.raises(ValueError, match="timeout"), call_of("take", None, ranks=False, timeout=0):
        pass


# Heartbeats and the ranks of a group


@pytest.mark.parametrize(
    ("timeout", "world", "seconds"),
    [(60, 2, 1.0), (5, 2, 1.0), (4, 2, 0.8), (0.05, 2, 0.02), (600, 1000, 1.0), (600, 3000, 3.0), (10, 3000, 2.0)],
)
def test_interval_of_heartbeats(timeout, world, seconds):
    assert interval(timeout, world) == pytest.approx(seconds)


def test_heartbeats_are_counted_while_a_call_is_open():
    store = dist.HashStore()
    heart = Heartbeat(store, 3, 2)
    heart.begin(0.1)
    store.wait(["beat/3"], timedelta(seconds=60))
    first = int(store.get("beat/3"))
    while int(store.get("beat/3")) < first + 2:
        threading.Event().wait(0.005)
    heart.begin(0.2)
    heart.end(0.1)
    heart.end(0.2)
    assert heart._calls == []
    with pytest.raises(ValueError, match="remove"):
        heart.end(0.1)
    heart.stop()
    heart._thread.join(60)
    assert not heart._thread.is_alive()


def test_liveness_names_the_rank_whose_beat_does_not_change(monkeypatch):
    store, now = dist.HashStore(), [0.0]
    monkeypatch.setattr(group_module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    watch, asked = Liveness(store, 10.0, 2), []

    def silent(at, *missing):
        now[0] = at
        return watch.silent(lambda: asked.append(at) or missing)

    assert silent(0.5, 1) is None
    assert asked == [], "it looks once in a second"
    assert silent(1.0, 1) is None
    store.set("beat/2", "1")
    assert silent(9.0, 1, 2) is None
    assert silent(10.0, 1) is None
    assert silent(11.0) is None
    assert silent(12.0, 1, 2) == 1, "it has never sent one"
    store.set("beat/1", "1")
    assert silent(13.0, 1) is None
    store.set("beat/2", "2")
    assert silent(18.0, 2) is None
    assert silent(23.0, 1) is None, "exactly as long as the timeout"
    assert silent(24.0, 2, 1) == 1
    assert silent(28.0, 2) is None
    assert silent(29.0, 2) == 2
    assert asked == [1.0, 9.0, 10.0, 11.0, 12.0, 13.0, 18.0, 23.0, 24.0, 28.0, 29.0]


def test_waker_ends_a_wait_when_the_key_is_set():
    store = dist.HashStore()
    waker = Waker(store)
    for key in ("a", "b"):
        waker.begin(key)
        assert not waker.wait(0.001)
        store.set(key, "")
        assert waker.wait(60)
        assert waker.wait(0)
    waker.stop()


def test_wakers_are_lent_a_few_times_and_again_after_their_return():
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ranks = Ranks(0, (0, 1), dist.PrefixStore("x", store))
    connected, heart = ranks.connected()
    assert ranks.connected()[0] is connected
    lent = [ranks.borrow_waker() for _ in range(WAKERS + 2)]
    assert [each is None for each in lent] == [False] * WAKERS + [True] * 2
    lent[1].begin("key")
    connected.set("key", "")
    assert lent[1].wait(60)
    ranks.return_waker(lent[1])
    assert ranks.borrow_waker() is lent[1]
    assert ranks.borrow_waker() is None
    for each in lent[:WAKERS]:
        ranks.return_waker(each)
    ranks.stop()
    heart.stop()
    plain = Ranks(0, (0, 1), dist.HashStore())
    assert plain.borrow_waker() is None, "a wait would block the other users of the store"
    assert plain._free_wakers == 0


def test_numbers_of_members_in_a_group():
    ranks = Ranks(1, (4, 2, 7))
    outer = (7, 9, 4)
    assert ranks.numbers(outer) == (0, 2)
    assert not ranks.among(outer)
    assert ranks.numbers((2,)) == (1,)
    assert ranks.among((9, 2))
    assert [ranks.number(member) for member in (4, 2, 7, 9)] == [0, 1, 2, None]
    kept = [(each,) for each in range(1100)]
    assert [ranks.numbers(each) for each in kept[:5]] == [(), (), (1,), (), (0,)]
    for each in kept:
        ranks.numbers(each)
    assert len(ranks._of_meshes) <= 1001


def test_end_together_waits_for_all_ranks():
    store, ended = dist.HashStore(), []

    def run(ranks):
        if ranks.rank:
            threading.Event().wait(0.05)
            ended.append("slow")
        ranks.end_together(60)
        ended.append("all")

    call_on_threads(run, run, store=store)
    assert ended == ["slow", "all", "all"]
    Ranks(0, (0, 1), dist.HashStore()).end_together(0.01)
    SOLO.end_together(1000)


def test_ranks_of_a_process_without_a_group():
    assert ranks_of(None) is SOLO
    assert (SOLO.rank, SOLO.world, SOLO.members, SOLO.pg) == (0, 1, (0,), None)
    assert group_of_this_rank() is None
    with pytest.raises(SnapshotError, match="initialised"):
        ranks_of(object())


def test_known_replication_keeps_the_newest_plans():
    memory = replication_memory(SOLO)
    assert replication_memory(SOLO) is memory
    ranks = Ranks(0, (0, 1))
    assert replication_memory(ranks) is not memory
    plans = [KnownReplication(str(number), frozenset()) for number in range(10)]
    for number in (*range(8), 0, 8, 9):
        remember_replication(ranks, str(number), plans[number])
    memory = replication_memory(ranks)
    assert [memory.find(str(number)) is not None for number in range(10)] == [True, False, False, *[True] * 7]
    assert memory.find("9") is plans[9]
    remember_replication(ranks, "", plans[1])
    assert memory.find("") is None
    remember_replication(SOLO, "1", plans[1])
    assert replication_memory(SOLO).find("1") is None
    assert memory.restored is None
    memory.keep_restored(plans[2])
    assert memory.restored is plans[2]
