"""`LoaderState` with the real Grain. `test_frameworks.py` runs this in a process of its own."""

import itertools

import grain.python as grain
import pytest
from grain.experimental import ElasticIterator

from snapshot import RestoreError, Snapshot
from snapshot_trainers.torchdata import LoaderState

LENGTH = 48


class Numbers:
    """A data source, whose workers read it in other processes."""

    def __len__(self):
        return LENGTH

    def __getitem__(self, index):
        return index

    def __repr__(self):
        return f"Numbers({LENGTH})"


class Unnamed(Numbers):
    __repr__ = object.__repr__


def loaded(replica, replicas, source=None, **options):
    shard = grain.ShardOptions(replica, replicas, drop_remainder=False)
    sampler = grain.IndexSampler(LENGTH, shard_options=shard, shuffle=True, num_epochs=1, seed=3)
    return iter(
        grain.DataLoader(data_source=source or Numbers(), sampler=sampler, operations=[grain.Batch(4)], **options)
    )


def mapped(replica, replicas):
    return grain.MapDataset.source(Numbers()).seed(3).shuffle()[replica::replicas].batch(4).to_iter_dataset()


def elastic(replica, replicas, batch=4):
    shard = grain.ShardOptions(replica, replicas)
    return ElasticIterator(grain.MapDataset.source(Numbers()).seed(3).shuffle(), batch * replicas, shard)


KINDS = {
    "DataLoader": loaded,
    "MapDataset": lambda *replica: iter(mapped(*replica)),
    "mapped": lambda *replica: iter(mapped(*replica).map(lambda batch: batch + 1)),
    "ElasticIterator": elastic,
    "its iterator": lambda *replica: iter(elastic(*replica)),
}


def rest_of(iterator):
    return [batch.tolist() for batch in iterator]


def seen_by(iterators, batches):
    """Return the first batches of each replica, and the states after them."""
    replicas = len(iterators)
    seen = [rest_of(itertools.islice(each, batches)) for each in iterators]
    states = [
        LoaderState(each, replica=number, replicas=replicas).state_dict() for number, each in enumerate(iterators)
    ]
    return seen, states


@pytest.mark.parametrize("batches", [0, 2, 6])
@pytest.mark.parametrize("kind", KINDS)
def test_grain_iterator_goes_on_with_the_next_batch(tmp_path, kind, batches):
    make = KINDS[kind]
    for replica in range(2):
        whole, began, resumed = (make(replica, 2) for _ in range(3))
        seen = rest_of(itertools.islice(began, batches))
        Snapshot.take(tmp_path / f"{replica}", {"loader": LoaderState(began, replica=replica, replicas=2)})
        state = {"loader": LoaderState(resumed, replica=replica, replicas=2)}
        Snapshot(tmp_path / f"{replica}").restore(state)
        assert seen + rest_of(resumed) == rest_of(whole)


def test_grain_data_loader_with_workers_goes_on_with_the_next_batch(tmp_path):
    whole, began, resumed = (loaded(0, 2, worker_count=1) for _ in range(3))
    seen = rest_of(itertools.islice(began, 2))
    Snapshot.take(tmp_path / "s", {"loader": LoaderState(began)})
    Snapshot(tmp_path / "s").restore({"loader": LoaderState(resumed)})
    assert seen + rest_of(resumed) == rest_of(whole)


@pytest.mark.parametrize(("before", "after"), [(2, 4), (4, 2), (2, 1), (1, 3), (3, 2)])
@pytest.mark.parametrize("batches", [0, 1, 2])
def test_grain_elastic_iterator_on_other_replicas_yields_each_sample_once(before, after, batches):
    seen, states = seen_by([elastic(replica, before) for replica in range(before)], batches)
    found = list(itertools.chain(*itertools.chain(*seen)))
    for replica in range(after):
        resumed = elastic(replica, after, batch=1)
        state = LoaderState(resumed, replica=replica, replicas=after)
        state.load_state_dict(state.reshard_state_dict(states, replica, after))
        found += itertools.chain(*rest_of(resumed))
    assert len(found) == len(set(found))
    assert len(found) > LENGTH - after  # Grain leaves out what is less than a batch of all replicas


@pytest.mark.parametrize("kind", ["DataLoader", "MapDataset"])
def test_grain_iterator_on_other_replicas_is_refused(kind):
    make = KINDS[kind]
    _, states = seen_by([make(replica, 2) for replica in range(2)], 2)
    state = LoaderState(make(0, 1), replica=0, replicas=1)
    with pytest.raises(ValueError, match=r"Grain's \w+Iterator: .* 2 shards .* grain\.experimental\.ElasticIterator"):
        state.reshard_state_dict(states, 0, 1)


def test_grain_elastic_iterators_at_other_batches_are_refused():
    _, states = seen_by([elastic(0, 2), elastic(1, 2)], 1)
    _, later = seen_by([elastic(0, 2), elastic(1, 2)], 2)
    state = LoaderState(elastic(0, 1), replica=0, replicas=1)
    with pytest.raises(ValueError, match="the replicas must be at the same sample, got 8 and 16"):
        state.reshard_state_dict([states[0], later[1]], 0, 1)


def test_grain_data_source_without_a_repr_is_refused():
    with pytest.raises(ValueError, match=r"Grain DataLoader must have a __repr__ of its own"):
        LoaderState(loaded(0, 1, Unnamed()))


@pytest.mark.parametrize("given", [mapped(0, 1), "a DataLoader"])
def test_grain_loader_must_be_an_iterator(given):
    loader = given if given != "a DataLoader" else loaded(0, 1)._data_loader
    with pytest.raises(TypeError, match=r"an iterator of Grain, such as iter\(loader\), got"):
        LoaderState(loader)


def test_grain_changed_sampler_is_refused_by_grain(tmp_path):
    began, resumed = loaded(0, 1), loaded(0, 2)
    next(began)
    Snapshot.take(tmp_path / "s", {"loader": LoaderState(began)})
    with pytest.raises((ValueError, RestoreError), match="Sampler in checkpoint does not match"):
        Snapshot(tmp_path / "s").restore({"loader": LoaderState(resumed)})
