"""The rules of tiers, as functions of values: what is uploaded, who keeps replicas, which steps are abandoned."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as some

from snapshot.runs.timeline import NO_ORIGIN, Attempt, Facts, Parent, RunLine, origin_of
from snapshot_tiers.control import UploadState, hosts_of, job_address, partners
from snapshot_tiers.near_steps import HostView, StepView, take_census
from snapshot_tiers.uploader import MOST_QUEUED, Act, QueueView, choose_next, dropped_steps, next_action, wanted_steps

steps = some.sets(some.integers(0, 50))


@given(some.integers(1, 60), some.integers(0, 5))
def test_replica_partners_keep_files_of_others_equally_often(count, replicas):
    kept = [partners(index, count, replicas) for index in range(count)]
    assert all(index not in held and len(set(held)) == len(held) for index, held in enumerate(kept))
    assert all(len(held) == min(replicas, count - 1) for held in kept)
    times = [sum(index in held for held in kept) for index in range(count)]
    assert set(times) == {min(replicas, count - 1)}


@given(some.integers(4, 60))
def test_replica_partners_are_not_neighbours(count):
    assert all(abs(index - held) > 1 for index in range(count) for held in partners(index, count, 1))


@given(some.lists(some.sampled_from("abc"), min_size=1))
def test_hosts_of_are_in_rank_order(keys):
    found = hosts_of([(key, key) for key in keys])
    assert sorted(rank for host in found for rank in host.ranks) == list(range(len(keys)))
    assert [host.ranks[0] for host in found] == sorted(host.ranks[0] for host in found)
    assert all(keys[rank] == host.key for host in found for rank in host.ranks)


def test_snapshot_peer_address_of_all_interfaces_is_refused(monkeypatch):
    for wrong in ("0.0.0.0", "::"):
        monkeypatch.setenv("SNAPSHOT_PEER_ADDRESS", wrong)
        with pytest.raises(ValueError, match="one address"):
            job_address()
    monkeypatch.setenv("SNAPSHOT_PEER_ADDRESS", "10.1.2.3")
    assert job_address() == "10.1.2.3"
    monkeypatch.delenv("SNAPSHOT_PEER_ADDRESS")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    assert job_address() == "127.0.0.1"


@given(some.one_of(some.none(), some.just("latest"), some.integers(1, 10)), steps, steps)
def test_upload_wanted_steps_are_requested_ones_and_the_newest(upload, near, asked):
    wanted = wanted_steps(upload, near, asked, max(near, default=-1))
    assert set(asked & near) <= set(wanted) <= near
    if upload == "latest" and near:
        assert max(near) in wanted
    if isinstance(upload, int):
        assert all(step in wanted for step in near if step % upload == 0)
    assert (choose_next(wanted, []) is None) == (not wanted)


STATES = some.sampled_from(UploadState)


@given(some.sampled_from(["latest", 1, None]), some.dictionaries(some.integers(0, 50), STATES), steps)
def test_upload_dropped_steps_are_superseded_and_the_queue_is_bounded(upload, states, asked):
    newest = max(states, default=-1)
    dropped = dropped_steps(upload, states, asked, newest)
    open_ = {step for step, state in states.items() if state.is_open or state == "damaged"}
    assert set(dropped) <= open_ - {newest} - asked
    queued = {step for step in open_ - asked - {newest} if states[step] == "queued"}
    assert len(queued - set(dropped)) <= (0 if upload == "latest" else MOST_QUEUED)
    assert upload == "latest" or set(dropped) <= queued  # what is being sent is finished


@pytest.mark.parametrize("note", [{}, {"run": "r"}, {"run": 1, "number": 1, "attempt": "a", "order": 1}, "text", None])
def test_origin_of_foreign_metadata_is_none(note):
    assert origin_of({"snapshot.tiers": note}) == NO_ORIGIN


@given(some.lists(some.sets(some.integers(0, 5)), min_size=1, max_size=5), some.integers(1, 6))
def test_census_step_is_complete_if_the_hosts_together_have_every_file(held, count):
    sizes = {f"f{n}": n for n in range(count)}
    origin = ("r", 1, "a", 1, False)
    views = [
        HostView(
            str(at),
            [StepView(7, "s" if at == 0 else "", origin if at == 0 else tuple(NO_ORIGIN), {f"f{n}": n for n in files})],
        )
        for at, files in enumerate(held)
    ]
    [found] = take_census(views, RunLine(Facts(1, (Attempt("a", "r", 1),))), lambda _: sizes)
    union = set().union(*held)
    assert set(found.missing) == {f"f{n}" for n in range(count) if n not in union}
    if not found.missing:
        assert found.replicas == min(sum(n in files for files in held) for n in range(count)) - 1


def test_census_ignores_a_file_with_another_size():
    view = HostView("a", [StepView(7, "s", ("r", 1, "a", 1, False), {"x": 9})])
    [found] = take_census([view], RunLine(Facts(1, (Attempt("a", "r", 1),))), lambda _: {"x": 10})
    assert found.missing == ["x"]


def test_census_leaves_out_steps_that_are_not_on_the_line():
    line = RunLine(Facts(2, (Attempt("a", "r", 1), Attempt("b", "r", 2, Parent("a", 5)))))
    views = [
        HostView(
            "a",
            [StepView(step, "s", ("r", 1, name, 1, False), {"x": 1}) for step, name in ((4, "a"), (7, "a"), (9, "q"))],
        )
    ]
    assert [each.step for each in take_census(views, line, lambda _: {"x": 1})] == [4]


@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize(
    ("suspect", "good", "chosen"), [("b", True, "a"), ("b", False, "b"), ("ab", True, "b"), ("", True, "b")]
)
def test_census_prefers_a_good_snapshot_of_a_step_to_a_later_suspect_one(suspect, good, chosen, order):
    line = RunLine(Facts(2, (Attempt("a", "r", 1), Attempt("b", "r", 2, Parent("a", None)))))
    views = [
        HostView(name, [StepView(7, name, ("r", 1, name, 1, False), {"x": 1}, ("NaN",) if name in suspect else ())])
        for name in "ab"
    ]
    [found] = take_census(views[::order], line, lambda _: {"x": 1}, good=good)
    assert found.save_id == chosen


VIEWS = some.builds(
    QueueView,
    states=some.dictionaries(some.integers(0, 9), STATES, max_size=4),
    is_registered=some.booleans(),
    is_tidy=some.booleans(),
    has_looked=some.booleans(),
    begun=steps,
    last=some.one_of(some.none(), some.integers(0, 9)),
    is_alone=some.booleans(),
    looked=some.floats(0, 100),
    free=some.floats(0, 100),
    jobs=some.integers(0, 2),
    ends=some.one_of(some.floats(0, 100), some.just(float("inf"))),
)


@given(VIEWS, some.floats(0, 100))
def test_uploader_next_action_follows_from_facts_and_time(view, now):
    begun = {step for step in view.begun if step in view.states and view.states[step].is_open}
    view = replace(view, begun=begun)
    found = next_action(view, now)
    open_ = {step for step, state in view.states.items() if state.is_open}
    assert (found.act == Act.TIDY) == (not view.is_tidy)
    if found.act == Act.END:
        assert not open_
        assert not view.jobs
        assert now > view.ends
    if found.act == Act.SEND:
        assert found.step in open_
        assert view.has_looked
    if found.act in (Act.SEND, Act.LOOK):
        assert view.is_registered
        assert now >= view.free
    if found.act == Act.WAIT:
        assert found.seconds > 0
        assert not (open_ and view.is_registered and now >= view.free)
        assert view.jobs or open_ or now <= view.ends
    if open_ and view.is_tidy and view.is_registered and now >= view.free:
        assert found.act in (Act.SEND, Act.LOOK)
