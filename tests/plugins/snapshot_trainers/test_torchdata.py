"""Data loaders whose number of replicas changes between a take and a restore."""

import itertools

import pytest

pytest.importorskip("torchdata")

from snapshot import RestoreError, Snapshot, StateDict
from snapshot_trainers.torchdata import LoaderState
from tests.plugins.snapshot_trainers import loaders

pytestmark = pytest.mark.filterwarnings("ignore")  # of torchdata


def flat(lists):
    return list(itertools.chain.from_iterable(lists))


@pytest.mark.parametrize(
    ("workers", "then"),
    [(0, 0), pytest.param(2, 0, marks=pytest.mark.slow), pytest.param(0, 2, marks=pytest.mark.slow)],
)
@pytest.mark.parametrize("stateful", [True, False])
def test_loader_state_on_any_number_of_replicas_yields_each_sample_once(four, two, folder, workers, then, stateful):
    options = {"stateful": stateful, "dataset": loaders.Counted}
    seen = four.run(loaders.begin_map, f"{folder}/s", 2, 96, 4, workers, options, timeout=300)[0]
    assert len(flat(seen)) == 32
    rest, epoch, x = two.run(loaders.continue_map, f"{folder}/s", 96, 3, then, "raise", options, timeout=300)[0]
    assert (epoch, x) == (3, 2)
    assert sorted(flat(seen) + flat(rest)) == list(range(96))
    # the order is that of the epoch on the new number of replicas
    whole = loaders.map_loader(96, 3, replica=(0, 2))
    whole.sampler.set_epoch(3)
    assert rest[0] == loaders.numbers(whole)[16:]


def test_loader_state_on_more_replicas(two, four, folder):
    seen = two.run(loaders.begin_map, f"{folder}/s", 3, 64, 4, 0, {})[0]
    rest, _, _ = four.run(loaders.continue_map, f"{folder}/s", 64, 2, 0, "raise", {})[0]
    assert sorted(flat(seen) + flat(rest)) == list(range(64))


@pytest.mark.parametrize("remainder", ["raise", "repeat", "skip"])
def test_loader_state_remainder_raises_repeats_or_skips(two, four, folder, remainder):
    seen = flat(two.run(loaders.begin_map, f"{folder}/s", 3, 64, 3, 0, {})[0])
    found = four.run(loaders.continue_map, f"{folder}/s", 64, 2, 0, remainder, {})[0]
    if remainder == "raise":
        text, notes, x = found
        assert "18 samples were seen, which 4 replicas cannot share equally; pass remainder='repeat'" in text
        assert notes == ["raised by reshard_state_dict() of app_state['loader']; nothing was touched"]
        assert x == 0
        return
    rest = flat(found[0])
    if remainder == "repeat":
        assert sorted({*seen, *rest}) == list(range(64))
        assert len(seen) + len(rest) == 66
    else:
        assert sorted({*seen, *rest} | (set(range(64)) - {*seen, *rest})) == list(range(64))
        assert len(set(seen) & set(rest)) == 0
        assert len(seen) + len(rest) == 62


def test_loader_state_after_an_epoch_stays_at_its_end(two, four, folder):
    seen = two.run(loaders.begin_map, f"{folder}/s", 8, 64, 4, 0, {})[0]
    assert sorted(flat(seen)) == list(range(64))
    rest, _, _ = four.run(loaders.continue_map, f"{folder}/s", 64, 4, 0, "raise", {})[0]
    assert flat(rest) == []


@pytest.mark.parametrize(("workers", "then"), [(0, 0), (0, 1), pytest.param(2, 0, marks=pytest.mark.slow)])
@pytest.mark.parametrize("batch", [4, None])
@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("stateful", [True, False])
def test_loader_state_after_an_epoch_starts_a_whole_one(workers, then, batch, replicas, stateful):
    """torchdata's own state of a StatefulDistributedSampler without workers skips the next epoch."""
    states = []
    for replica in range(replicas):
        begun = loaders.map_loader(24, batch, workers, stateful=stateful, replica=(replica, replicas))
        loaders.numbers(begun)
        states.append(LoaderState(begun).state_dict())
    again = LoaderState(loaders.map_loader(24, batch, then, stateful=stateful, replica=(0, 1)))
    again.load_state_dict(again.reshard_state_dict(states, 0, 1))
    for _ in range(2):
        assert sorted(loaders.numbers(again.loader)) == list(range(24))


def test_loader_state_after_an_epoch_with_a_foreign_sampler_needs_equal_workers():
    class Own(list):
        """A batch sampler."""

    def loader(workers):
        return loaders.make_loader(loaders.Numbers(4), batch_sampler=Own([[0, 1], [2, 3]]), num_workers=workers)

    begun = loader(0)
    loaders.numbers(begun)
    with pytest.raises(ValueError, match="ended with 0 workers, and the loader has 1"):
        LoaderState(loader(1)).load_state_dict(LoaderState(begun).state_dict())


@pytest.mark.parametrize("change", ["length", "seed"])
def test_loader_state_with_another_length_or_seed_is_refused(two, four, folder, change):
    two.run(loaders.begin_map, f"{folder}/s", 2, 64, 4, 0, {})
    length, options = (60, {}) if change == "length" else (64, {"seed": 6})
    text, _, _ = four.run(loaders.continue_map, f"{folder}/s", length, 4, 0, "raise", options)[0]
    assert f"the order of the samples has changed: the sampler's {change} was" in text


@pytest.mark.parametrize(
    ("workers", "then"),
    [(0, 0), pytest.param(2, 0, marks=pytest.mark.slow), pytest.param(0, 2, marks=pytest.mark.slow)],
)
def test_loader_state_of_an_iterable_dataset_redistributes_its_shards(four, two, folder, workers, then):
    seen = four.run(loaders.begin_stripes, f"{folder}/s", 2, 16, 5, 2, workers, timeout=300)[0]
    rest = two.run(loaders.continue_stripes, f"{folder}/s", 16, 5, 3, then, timeout=300)[0]
    assert sorted(flat(seen) + flat(rest)) == sorted(1000 * s + n for s in range(16) for n in range(5))


def test_loader_state_of_an_iterable_dataset_without_redistribution_is_refused(four, two, folder):
    four.run(loaders.begin_stripes, f"{folder}/s", 2, 16, 5, 2, 0)
    text = two.run(loaders.continue_stripes, f"{folder}/s", 16, 5, 3, 0, loaders.Fixed)[0]
    assert "the data of 4 replicas cannot be redistributed over 2: use a map-style dataset" in text


def test_loader_state_gives_ranks_of_a_group_the_same_data(four, two, folder):
    seen = four.run(loaders.save_groups, f"{folder}/s")[0]
    assert seen[0] == seen[1]
    rest = two.run(loaders.continue_groups, f"{folder}/s")[0]
    assert sorted(seen[0] + seen[2] + flat(rest)) == list(range(48))


def test_data_loader_without_loader_state_on_another_world_size_is_refused(two, four, folder):
    two.run(loaders.save_bare, f"{folder}/s")
    for pool in (four, None):
        found = pool.run(loaders.restore_bare, f"{folder}/s")[0] if pool else loaders.restore_bare(f"{folder}/s")
        assert "loader: is the state of a data loader on each of 2 ranks, and now there are" in found
        assert "snapshot_trainers.torchdata.LoaderState" in found
    assert two.run(loaders.restore_bare, f"{folder}/s") == [0, 0]
    assert "must be one of LoaderState" in four.run(loaders.restore_bare, f"{folder}/s", True)[0]


def test_loader_state_continues_in_one_process(tmp_path):
    loader = loaders.map_loader(40, 4, replica=(0, 1))
    it = iter(loader)
    seen = loaders.numbers([next(it), next(it)])
    Snapshot.take(tmp_path / "s", {"loader": LoaderState(loader)})
    again = loaders.map_loader(40, 4, replica=(0, 1))
    Snapshot(tmp_path / "s").restore({"loader": LoaderState(again)})
    assert sorted(seen + loaders.numbers(again)) == list(range(40))
    other = LoaderState(loaders.map_loader(40, 4, replica=(0, 2)))
    with pytest.raises(ValueError, match="that of replica 0 of 1, and this is replica 0 of 2"):
        other.load_state_dict(LoaderState(loader).state_dict())


@pytest.mark.parametrize(
    ("workers", "then"),
    [(0, 1), pytest.param(2, 0, marks=pytest.mark.slow), pytest.param(2, 3, marks=pytest.mark.slow)],
)
@pytest.mark.parametrize("batch", [4, None])
def test_loader_state_on_another_number_of_workers_keeps_the_order(workers, then, batch):
    def loader(number):
        return loaders.make_loader(loaders.Counted(48), batch_size=batch, shuffle=True, num_workers=number)

    begun = loader(workers)
    it = iter(begun)
    for _ in range(3):
        next(it)
    state = LoaderState(begun).state_dict()
    rest = loaders.numbers(it)
    again, fresh = loader(then), loader(workers)
    for each in (again, fresh):
        LoaderState(each).load_state_dict(state)
    assert loaders.numbers(again) == loaders.numbers(fresh) == rest
    assert len(rest) == 48 - 3 * (batch or 1)


@pytest.mark.parametrize(("workers", "then"), [(0, 1), pytest.param(2, 3, marks=pytest.mark.slow)])
def test_loader_state_of_an_iterable_dataset_on_another_number_of_workers(workers, then):
    begun = loaders.make_loader(loaders.Stripes(6, 4), batch_size=2, num_workers=workers)
    it = iter(begun)
    seen = loaders.numbers([next(it) for _ in range(4)])
    again = loaders.make_loader(loaders.Stripes(6, 4), batch_size=2, num_workers=then)
    LoaderState(again).load_state_dict(LoaderState(begun).state_dict())
    assert sorted(seen + loaders.numbers(again)) == sorted(1000 * stream + n for stream in range(6) for n in range(4))


def test_loader_state_without_redistribution_needs_equal_workers():
    begun = LoaderState(loaders.make_loader(loaders.Fixed(6, 4), batch_size=2))
    again = LoaderState(loaders.make_loader(loaders.Fixed(6, 4), batch_size=2, num_workers=2))
    with pytest.raises(ValueError, match=r"that of 0 workers, and the loader has 2: .* pass num_workers=0"):
        again.load_state_dict(begun.state_dict())


def test_loader_state_with_snapshot_every_n_steps_cannot_change_workers():
    begun = loaders.make_loader(loaders.Numbers(12), batch_size=2, num_workers=1, snapshot_every_n_steps=3)
    it = iter(begun)
    next(it)
    state = LoaderState(begun).state_dict()
    with pytest.raises(ValueError, match="must save its state at each step"):
        LoaderState(loaders.make_loader(loaders.Numbers(12), batch_size=2)).load_state_dict(state)


@pytest.mark.parametrize("batch", [2, None])
def test_loader_state_taken_right_after_a_restore_is_unchanged(tmp_path, batch):
    loader = loaders.map_loader(20, batch, replica=(0, 1))
    it = iter(loader)
    seen = loaders.numbers([next(it), next(it), next(it)])
    for name in "abc":
        Snapshot.take(tmp_path / name, {"loader": LoaderState(loader)})
        loader = loaders.map_loader(20, batch, replica=(0, 1))
        Snapshot(tmp_path / name).restore({"loader": LoaderState(loader)})
    assert sorted(seen + loaders.numbers(loader)) == list(range(20))


@pytest.mark.parametrize("stateful", [True, False])
def test_loader_state_without_batches_is_redistributed(four, two, folder, stateful):
    options = {"stateful": stateful}
    seen = four.run(loaders.begin_map, f"{folder}/s", 3, 48, None, 0, options)[0]
    rest, _, _ = two.run(loaders.continue_map, f"{folder}/s", 48, None, 0, "raise", options)[0]
    assert sorted(flat(seen) + flat(rest)) == list(range(48))


def test_loader_state_with_a_custom_sampler_is_refused(four, two, folder):
    four.run(loaders.begin_map, f"{folder}/s", 2, 48, 3, 0, {"kind": loaders.Chunked})
    text, _, _ = two.run(loaders.continue_map, f"{folder}/s", 48, 3, 0, "raise", {"kind": loaders.Chunked})[0]
    assert "the data of 4 replicas cannot be redistributed over 2" in text


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"replica": 0, "replicas": 2}, "must be those of the sampler, 0 and 1, got 0 and 2"),
        ({"replica": 1}, "replica and replicas must be passed together"),
        ({"replica": 2, "replicas": 2}, "replica must be from 0 to 1, got 2"),
        ({"remainder": "drop"}, "remainder must be one of 'raise', 'repeat', 'skip', got 'drop'"),
    ],
)
def test_loader_state_refuses_invalid_arguments(options, text):
    with pytest.raises(ValueError, match=text):
        LoaderState(loaders.map_loader(4, 1, replica=(0, 1)), **options)


# The protocol


def test_reshardable_redistributes_the_state_of_any_stateful(four, two, folder):
    four.run(loaders.save_own, f"{folder}/s")
    everything = [10 * rank + n for rank in range(4) for n in range(3)]
    assert two.run(loaders.restore_own, f"{folder}/s", {}) == [
        (everything[0::2], [(0, 2, 4)], 1),
        (everything[1::2], [(1, 2, 4)], 1),
    ]
    assert loaders.restore_own(f"{folder}/s", {}) == (everything, [(0, 1, 4)], 1)
    renamed = {"rename": {"own": "new"}, "key": "new"}
    assert loaders.restore_own(f"{folder}/s", renamed) == (everything, [(0, 1, 4)], 1)
    assert loaders.restore_own(f"{folder}/s", {"exclude": ["own", "own/**"]}) == ([0, 1, 2], [], 1)
    assert loaders.restore_own(f"{folder}/s", {"select": ["s/**"]}) == ([0, 1, 2], [], 1)
    assert loaders.restore_own(f"{folder}/s", {"select": ["s/**", "own/**"]}) == (everything, [(0, 1, 4)], 1)
    assert loaders.restore_own(f"{folder}/s", {"exclude": ["own/**"]}) == ([0, 1, 2], [], 1)
    text, x, mine, calls = loaders.restore_own(f"{folder}/s", {"exclude": ["own/mine/1"]})
    assert "so it must be restored as a whole" in text
    assert (x, mine, calls) == (0, [0, 1, 2], [])
    four.run(loaders.restore_own, f"{folder}/s", {})


def test_reshardable_on_the_same_world_size_is_not_redistributed(four, folder):
    four.run(loaders.save_own, f"{folder}/s")
    assert four.run(loaders.restore_own, f"{folder}/s", {})[3] == ([30, 31, 32], [], 1)


def test_reshardable_state_missing_on_one_rank(four, two, folder):
    four.run(loaders.save_own, f"{folder}/s", (0, 1, 3))
    assert two.run(loaders.restore_own, f"{folder}/s", {})[1] == ("one is missing", 0, [10, 11, 12], [(1, 2, 4)])


def test_reshardable_key_that_no_rank_saved_is_an_error(two, folder):
    two.run(loaders.save_own, f"{folder}/s", ())
    with pytest.raises(RestoreError, match="own: the snapshot has no such key"):
        Snapshot(f"{folder}/s").restore({"own": loaders.Own(), "s": StateDict(x=0)})
