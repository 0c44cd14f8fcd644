"""Short pickles that would take a reader hours or all memory: each is refused after work in proportion to its bytes."""

import pytest

from snapshot import CorruptSnapshotError
from snapshot.formats import to_entries
from tests.hostile.test_hostile_formats import get, put


def tower(levels, first=0):
    """A frozenset f(k + 1) = {f(k), {f(k)}} in a few bytes for each level, and the place of the last one."""
    made = b"(K\1\x91" + put(first)
    for place in range(first, first + 2 * levels, 2):
        made += b"(" + get(place) + b"\x91" + put(place + 1)
        made += b"(" + get(place) + get(place + 1) + b"\x91" + put(place + 2)
    return made, first + 2 * levels


def frozen_tower(levels):
    held = frozenset([1])
    for _ in range(levels):
        held = frozenset([held, frozenset([held])])
    return held


def entries_of(node, length=1000, *, tuples=True):
    return to_entries.make_entries({"0": node}, "x", None, length, inline=bytearray(), tuples=tuples)


@pytest.mark.timeout(60)
def test_a_set_of_repeated_frozensets_is_counted_each_time():
    with pytest.raises(CorruptSnapshotError, match="too many repeated values"):
        entries_of({frozen_tower(22)})
    deep = frozenset()
    for _ in range(5000):
        deep = frozenset([deep])
    with pytest.raises(CorruptSnapshotError, match="nested more than"):
        entries_of({deep})
    assert len(entries_of({frozen_tower(5), (1, (2, frozenset([3])))})) > 60


def test_containers_that_are_refused_count_too(monkeypatch):
    read = []
    monkeypatch.setattr(
        to_entries, "make_scalar", lambda value, make=to_entries.make_scalar: read.append(0) or make(value)
    )
    with pytest.raises(CorruptSnapshotError, match="too many repeated values"):
        entries_of([{*range(2000), (1,)}] * 2000, tuples=False)
    assert len(read) < 200_000
