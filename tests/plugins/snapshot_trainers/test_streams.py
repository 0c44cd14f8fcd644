"""Iterators that keep their place themselves. `on_grain.py` and `on_litdata.py` have those of the libraries."""

import itertools

import pytest
from torch.utils.data import DataLoader

from snapshot import RestoreError, Snapshot
from snapshot_trainers.torchdata import LoaderState


class Counting:
    """An iterator of an application with the methods of Grain's."""

    def __init__(self):
        self.number = 0

    def __iter__(self):
        return self

    def __next__(self):
        if self.number == 10:
            raise StopIteration
        self.number += 1
        return self.number

    def get_state(self):
        return {"number": self.number}

    def set_state(self, state):
        self.number = state["number"]


def test_loader_state_of_an_iterator_with_get_state_goes_on(tmp_path):
    began, resumed = Counting(), Counting()
    assert list(itertools.islice(began, 3)) == [1, 2, 3]
    Snapshot.take(tmp_path / "s", {"loader": LoaderState(began)})
    Snapshot(tmp_path / "s").restore({"loader": LoaderState(resumed)})
    assert list(resumed) == [4, 5, 6, 7, 8, 9, 10]


def test_loader_state_of_an_iterator_with_get_state_on_other_replicas_is_refused():
    states = [LoaderState(Counting(), replica=replica, replicas=2).state_dict() for replica in range(2)]
    for replicas in (1, 3):
        state = LoaderState(Counting(), replica=0, replicas=replicas)
        with pytest.raises(ValueError, match=rf"Counting: .* of 2 shards .* which {replicas} cannot"):
            state.reshard_state_dict(states, 0, replicas)
    same = LoaderState(Counting(), replica=1, replicas=2)
    assert same.reshard_state_dict(states, 1, 2) == states[1]


@pytest.mark.parametrize("turned", [False, True])
def test_loader_state_of_an_iterator_and_that_of_a_loader_are_told_apart(tmp_path, turned):
    states = [{"loader": LoaderState(each)} for each in (Counting(), DataLoader(range(4)))]
    Snapshot.take(tmp_path / "s", states[turned])
    with pytest.raises((ValueError, RestoreError), match="an iterator of Grain"):
        Snapshot(tmp_path / "s").restore(states[not turned])
