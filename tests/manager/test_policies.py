"""What each policy keeps, and what several keep together: as properties, since retention is where data is lost."""

import math
import random
from datetime import timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from snapshot import KeepBest, KeepEvery, KeepFor, KeepLatest
from snapshot.manager.policies import Taken, checked_policy, choose_kept, plan_retention, split_policy

NOW = 1_000_000.0
numbers = st.floats(allow_nan=True, allow_infinity=True, width=16)
metrics = st.dictionaries(st.sampled_from(["loss", "f1"]), numbers)
taken = st.lists(
    st.builds(Taken, st.integers(0, 50), st.floats(NOW - 1000, NOW), metrics),
    max_size=12,
    unique_by=lambda each: each.step,
)
simple = st.one_of(
    st.builds(KeepLatest, st.integers(1, 5)),
    st.builds(KeepBest, st.sampled_from(["loss", "f1"]), st.integers(1, 4), st.sampled_from(["min", "max"])),
    st.builds(KeepEvery, st.integers(1, 20)),
    st.builds(KeepFor, st.floats(1, 1000)),
)


@given(taken, simple, simple)
def test_policy_union_keeps_what_either_keeps_in_any_order(
    there: list[Taken], first: KeepLatest, second: KeepLatest
) -> None:
    union = (first | second).keep(there, NOW)
    assert union == first.keep(there, NOW) | second.keep(there, NOW) == (second | first).keep(there, NOW)
    shuffled = random.Random(1).sample(there, len(there))
    assert (first | second).keep(shuffled, NOW) == union
    assert union <= {each.step for each in there}


@given(taken, simple)
def test_choose_kept_always_keeps_the_newest(there: list[Taken], policy: KeepLatest) -> None:
    kept = choose_kept(policy, there, NOW)
    assert set(kept) - policy.keep(there, NOW) <= {max((each.step for each in there), default=-1)}
    assert not there or max(each.step for each in there) in kept
    assert all(kept.values())


@given(taken, st.integers(1, 5), st.sampled_from(["min", "max"]))
def test_keep_best_keeps_the_best_and_never_nan(there: list[Taken], n: int, mode: str) -> None:
    kept = KeepBest("loss", n, mode).keep(there, NOW)
    values = {each.step: each.metrics["loss"] for each in there if "loss" in each.metrics}
    real = {step: value for step, value in values.items() if not math.isnan(value)}
    assert kept <= set(real)
    assert len(kept) == min(n, len(real))
    for step in set(real) - kept:
        assert all(real[step] >= real[best] if mode == "min" else real[step] <= real[best] for best in kept)


@given(taken, st.integers(1, 5))
def test_keep_latest_keeps_the_highest_steps(there: list[Taken], n: int) -> None:
    assert KeepLatest(n).keep(there, NOW) == set(sorted(each.step for each in there)[-n:])


@given(taken, simple, st.sets(st.integers(0, 60)), st.dictionaries(st.integers(0, 60), st.just("pinned")), st.data())
def test_retention_plan_removes_nothing_that_is_kept_held_or_a_base(
    there: list[Taken], policy: KeepLatest, others: set[int], held: dict[int, str], data: st.DataObject
) -> None:
    steps = {each.step for each in there} | others
    bases = {step: data.draw(st.none() | st.integers(0, step)) for step in steps}

    def find_needed(removed: list[int]) -> dict[int, str]:
        found: dict[int, str] = {}
        left = sorted(steps - set(removed), reverse=True)
        while left:
            base = bases[left.pop()]
            if base in removed and base not in found:
                found[base] = "a base"
                left.append(base)
        return found

    chosen = choose_kept(policy, there, NOW)
    plan = plan_retention(chosen, steps, held=held, find_needed=find_needed)
    assert set(chosen) <= set(plan.kept)
    assert steps & held.keys() <= set(plan.kept)
    assert all(bases[step] in (plan.kept.keys() | {None}) for step in plan.kept if bases[step] in steps)
    assert plan.removed == sorted(steps - set(plan.kept))


def test_checked_policy_turns_a_number_into_keep_latest() -> None:
    assert checked_policy(3) == KeepLatest(3) == checked_policy(KeepLatest(3))
    assert checked_policy(None) is None
    with pytest.raises(ValueError, match="without KeepBest, since versions have no metrics"):
        checked_policy(KeepLatest(1) | KeepBest("loss"), metrics=False)


def test_keep_best_prefers_the_later_of_equal_steps() -> None:
    there = [Taken(step, 0, {"loss": 1.0}) for step in (3, 1, 2)]
    assert KeepBest("loss").keep(there, NOW) == {3}
    assert KeepBest("loss", mode="max").keep(there, NOW) == {3}


def test_keep_for_counts_from_the_time_of_the_take() -> None:
    there = [Taken(1, NOW - 7200), Taken(2, NOW - 3600), Taken(3, NOW)]
    assert KeepFor("1h").keep(there, NOW) == {2, 3} == KeepFor(timedelta(hours=1)).keep(there, NOW)
    assert KeepFor(10).keep(there, NOW) == {3}


def test_policy_union_is_flat_and_has_a_description() -> None:
    policy = KeepLatest(3) | (KeepBest("loss", 2) | KeepEvery(1000)) | KeepFor("7d")
    assert [type(each) for each in split_policy(policy)] == [KeepLatest, KeepBest, KeepEvery, KeepFor]
    assert str(policy) == "latest 3 | best 2 by loss | every 1,000 | within 7.0 d"


@pytest.mark.parametrize(
    "made",
    [
        lambda: KeepLatest(0),
        lambda: KeepLatest(True),
        lambda: KeepLatest("3"),
        lambda: KeepEvery(0),
        lambda: KeepBest("loss", 0),
        lambda: KeepBest("loss", mode="least"),
        lambda: KeepBest(""),
        lambda: KeepFor(0),
        lambda: KeepFor("soon"),
        lambda: KeepFor(math.nan),
        lambda: KeepLatest(1) | 3,
    ],
)
def test_policies_refuse_invalid_arguments(made: object) -> None:
    with pytest.raises((ValueError, TypeError)):
        made()  # type: ignore[operator]
