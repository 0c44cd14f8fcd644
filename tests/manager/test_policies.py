"""What each policy keeps, and what several keep together: as properties, since retention is where data is lost."""

import math
import random
from datetime import timedelta

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from snapshot import KeepBest, KeepEvery, KeepFor, KeepLatest, KeepSpread, KeepWithin
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
    st.builds(KeepSpread),
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


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=300), st.integers(0, 10**6))
@example([1] * 2000, 0)
@example([1000] * 1000, 0)
@example([997] * 500, 123_456)
def test_keep_spread_keeps_few_steps_of_all_ages_and_never_misses_a_removed_one(gaps: list[int], first: int) -> None:
    """After each take, all but the kept steps are removed, and that changes nothing."""
    every, kept = [first], {first}
    for gap in gaps:
        every.append(every[-1] + gap)
        kept = KeepSpread().keep([Taken(step) for step in (*kept, every[-1])], NOW)
    newest, widest = every[-1], max(gaps)
    assert kept == KeepSpread().keep([Taken(step) for step in every], NOW)
    assert {first, newest} <= kept
    assert len(kept) <= 2 * math.log2(len(every) * widest / min(gaps)) + 4
    for step in every:
        age = newest - step
        nearest = [newest - each for each in kept if age / 2.001 - widest <= newest - each <= age * 2.001 + widest]
        assert nearest, (step, sorted(kept))


def test_keep_spread_of_a_thousand_steps_is_about_a_dozen() -> None:
    counts = [len(KeepSpread().keep([Taken(step) for step in range(0, 100 * count, 100)], NOW)) for count in
              (10, 100, 1000, 10_000)]  # fmt: skip
    assert counts == sorted(counts)
    assert counts[2] <= 12
    assert counts[3] <= 18


sizes = st.dictionaries(st.sampled_from("abcdefgh"), st.just(10), max_size=4)
sized = st.lists(
    st.builds(Taken, st.integers(0, 50), st.just(NOW), metrics, st.booleans(), st.none(), sizes, st.booleans()),
    max_size=12,
    unique_by=lambda each: each.step,
)


@given(sized, st.integers(1, 80), st.none() | simple)
def test_keep_within_fits_if_possible_and_no_suspect_step_pushes_a_good_one_out(
    there: list[Taken], limit: int, among: KeepLatest | None
) -> None:
    policy = KeepWithin(limit, among)
    kept = {each.step for each in there if each.step in choose_kept(policy, there, NOW) or each.pinned}

    def nbytes(steps: set[int]) -> int:
        return sum({name: size for each in there if each.step in steps for name, size in each.sizes.items()}.values())

    good = {each.step for each in there if not each.suspect}
    must = {each.step for each in there if each.pinned} | set(sorted(good)[-1:])
    assert must <= kept
    assert nbytes(kept) <= limit or kept == must
    wanted = choose_kept(among, there, NOW)
    assert kept <= must | wanted.keys()
    for step in (good & wanted.keys()) - kept:  # with all newer ones, it would not have fitted
        assert nbytes(must | {each for each in good & wanted.keys() if each >= step}) > limit
        assert not kept & (good - must) or step < min(kept & (good - must))  # the oldest go first
    without = choose_kept(policy, [each for each in there if not each.suspect or each.pinned], NOW)
    assert good & without.keys() == good & choose_kept(policy, there, NOW).keys()


def test_keep_within_and_keep_spread_have_a_description() -> None:
    assert str(KeepWithin("2TiB", KeepLatest(20) | KeepBest("loss", 3))) == "within 2TiB of latest 20 | best 3 by loss"
    assert str(KeepWithin(3 << 20) | KeepSpread()) == "within 3.0 MiB | spread"


def test_checked_policy_without_sizes_refuses_keep_within() -> None:
    for policy in (KeepWithin(1), KeepLatest(1) | KeepWithin(1, 2)):
        with pytest.raises(ValueError, match="without KeepWithin"):
            checked_policy(policy, metrics=False)
    with pytest.raises(ValueError, match="without KeepBest"):
        checked_policy(KeepWithin(1, KeepBest("loss")), metrics=False)


def test_step_with_a_lifetime_takes_no_place_of_one_without() -> None:
    there = [Taken(1, metrics={"loss": 0.5}), Taken(2, metrics={"loss": 0.1}, expires=NOW + 1), Taken(3), Taken(4)]
    assert choose_kept(KeepBest("loss"), there, NOW).keys() == {1, 2, 4}
    assert choose_kept(KeepWithin("1kB", KeepBest("loss")), there, NOW).keys() == {1, 2, 4}


def test_choose_kept_keeps_until_the_lifetime_is_over_and_then_no_longer() -> None:
    there = [Taken(1, expires=NOW + 1), Taken(2, expires=NOW), Taken(3), Taken(4), Taken(5, expires=NOW - 1)]
    kept = choose_kept(KeepLatest(3), there, NOW)
    until = "until 1970-01-12 13:46 UTC"
    assert {step: why[-1] for step, why in kept.items()} == {1: until, 3: "latest 3", 4: "latest 3", 5: "newest"}
    assert choose_kept(None, there, NOW).keys() == {1, 3, 4, 5}
    assert choose_kept(KeepEvery(7), there, NOW).keys() == {1, 5}
    assert KeepWithin(1).keep([Taken(1, expires=NOW + 1, sizes={"a": 9}), Taken(2)], NOW) == {1, 2}


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
