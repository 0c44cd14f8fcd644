"""Restores into live tensors that share some elements: all get their own bytes, or none is touched."""

import itertools
import random

import pytest
import torch

from snapshot import RestoreError, RestoreOptions, Snapshot, StateDict
from tests.helpers.arguments import for_restore

URL = "memory://shared"
FLAT = torch.arange(24.0)
SQUARE = torch.arange(64.0).view(8, 8)
OVERLAPPING = {
    "every second, shifted by two": (FLAT[0:12:2], FLAT[2:14:2]),
    "two strides with one common element": (FLAT[0:20:4], FLAT[6:22:6]),
    "windows": (SQUARE[:6, :6], SQUARE[1:7, 1:7]),
    "a column in the other one's columns": (SQUARE[:, :3], SQUARE[2:, 2]),
    "a transposed one": (SQUARE[:3, :3], SQUARE[:3, :3].t()),
    "a row among columns": (SQUARE[:, ::2], SQUARE[3]),
    "a reinterpreted one": (FLAT[0:12:2], FLAT.view(torch.int32)[4:16:4]),
    "parts of elements": (FLAT[0:12:2], FLAT.view(torch.int16)[1:25:4]),
}
INTERLEAVED = {
    "halves": (FLAT[0::2], FLAT[1::2]),
    "thirds": (FLAT[0::3], FLAT[1::3], FLAT[2::3]),
    "columns": (SQUARE[:, :3], SQUARE[:, 3:]),
    "quarters": (SQUARE[:4, :4], SQUARE[:4, 4:], SQUARE[4:, :4], SQUARE[4:, 4:]),
    "chessboard": (SQUARE[::2, ::2], SQUARE[1::2, ::2], SQUARE[::2, 1::2], SQUARE[1::2, 1::2]),
    "transposed": (SQUARE[:, 0:2].t(), SQUARE[:, 2:8].t()),
}


def named(views):
    return StateDict({f"v{number}": view for number, view in enumerate(views)})


def live_views(views):
    """The same views of memory of their own, which holds other values."""
    memory = torch.full((64,), -1.0)
    made = []
    for view in views:
        base = memory.view(view.dtype)
        made.append(base.as_strided(view.shape, view.stride(), view.storage_offset()))
    return memory, made


@pytest.mark.parametrize("options", [{}, {"atomic": True}, {"strict": True}])
@pytest.mark.parametrize("name", OVERLAPPING)
def test_restore_into_overlapping_views_raises_and_changes_nothing(name, options):
    views = OVERLAPPING[name]
    Snapshot.take(URL, {"s": named(view.clone() + number for number, view in enumerate(views))}, overwrite=True)
    memory, live = live_views(views)
    with pytest.raises(RestoreError, match="share memory in the application"):
        Snapshot(URL).restore({"s": named(live)}, **for_restore(**options))
    assert memory.eq(-1).all()


@pytest.mark.parametrize("name", INTERLEAVED)
def test_restore_into_interleaved_views(name):
    views = INTERLEAVED[name]
    Snapshot.take(URL, {"s": named(views)}, overwrite=True)
    memory, live = live_views(views)
    Snapshot(URL).restore({"s": named(live)})
    assert all(map(torch.equal, live, views))
    assert set(memory[sum(view.numel() for view in views) :].tolist()) <= {-1.0}


def test_take_of_overlapping_views_stores_what_each_holds():
    for views in [*OVERLAPPING.values(), *INTERLEAVED.values()]:
        Snapshot.take(URL, {"s": named(views)}, overwrite=True)
        state = StateDict()
        Snapshot(URL).restore({"s": state})
        assert all(map(torch.equal, state.values(), views))


def test_restore_into_overlapping_buffers_raises():
    module = torch.nn.Module()
    memory = torch.zeros(10, 4)
    module.register_buffer("first", memory[:6, :3])
    module.register_buffer("second", memory[4:, 1:])
    Snapshot.take(URL, {"m": module}, overwrite=True)
    with pytest.raises(RestoreError, match="m/first and m/second: share memory"):
        Snapshot(URL).restore({"m": module})


def test_restore_of_tied_tensors_into_overlapping_windows_raises():
    tied = torch.arange(8.0)
    Snapshot.take(URL, {"s": StateDict(a=tied, b=tied)}, overwrite=True)
    memory = torch.zeros(12)
    with pytest.raises(RestoreError, match="s/a and s/b: share memory"):
        Snapshot(URL).restore({"s": StateDict(a=memory[:8], b=memory[4:])})
    assert not memory.any()


def test_restore_with_cast_into_overlapping_tensors_raises():
    def module(a, b):
        made = torch.nn.Module()
        made.register_buffer("a", a)
        made.register_buffer("b", b)
        return made

    Snapshot.take(URL, {"m": module(torch.ones(8), torch.zeros(8))}, overwrite=True)
    memory = torch.full((12,), 7.0, dtype=torch.float64)
    with pytest.raises(RestoreError, match="m/a and m/b: share memory"):
        Snapshot(URL).restore({"m": module(memory[:8], memory[4:])}, options=RestoreOptions(cast="any"))
    assert memory.eq(7).all()


def test_restore_of_equal_bytes_into_one_strided_tensor():
    Snapshot.take(URL, {"s": StateDict(a=FLAT[::2].clone(), b=FLAT[::2].clone())}, overwrite=True)
    live = torch.zeros(24)[::2]
    Snapshot(URL).restore({"s": StateDict(a=live, b=live)})
    assert torch.equal(live, FLAT[::2])


def test_restore_into_views_that_are_slow_to_compare_raises(monkeypatch):
    views = INTERLEAVED["thirds"]
    Snapshot.take(URL, {"s": named(views)}, overwrite=True)
    _, live = live_views(views)
    for name in ("MOST_PAIRS", "MOST_WORK"):
        with monkeypatch.context() as patch:
            patch.setattr("snapshot.loading.shared_memory.MOST_MARKED", 0)
            patch.setattr(f"snapshot.loading.shared_memory.{name}", 0)
            with pytest.raises(RestoreError, match="cannot tell if these strided tensors share memory"):
                Snapshot(URL).restore({"s": named(live)})


def test_restore_into_views_that_numpy_cannot_compare_marks_bytes(monkeypatch):
    monkeypatch.setattr("snapshot.loading.shared_memory.MOST_WORK", 0)
    test_restore_into_interleaved_views("chessboard")
    test_restore_into_overlapping_views_raises_and_changes_nothing("windows", {})


@pytest.mark.parametrize("twice", [False, True])
def test_restore_into_thousands_of_columns_of_one_matrix(twice):
    """They interleave, or one is there twice."""
    values = torch.arange(2500.0).expand(3, -1)
    Snapshot.take(URL, {"s": named(values.T.contiguous())}, overwrite=True)
    memory = torch.zeros(3, 2500)
    state = named([memory[:, 1500 if number == 1501 and twice else number] for number in range(2500)])
    if twice:
        with pytest.raises(RestoreError, match="share memory"):
            Snapshot(URL).restore({"s": state})
        assert not memory.any()
    else:
        Snapshot(URL).restore({"s": state})
        assert torch.equal(memory, values)


def random_view(random, memory):
    """A view of some memory, without overlapping elements."""
    held = memory.view(random.choice([torch.float32, torch.int16, torch.float64]))
    sizes, steps, step = [], [], random.randint(1, 3)
    for _ in range(random.randint(1, 3)):
        size = random.randint(1, 4)
        sizes.append(size)
        steps.append(step)
        step = step * size + random.randint(0, 4)
    order = random.sample(range(len(sizes)), len(sizes))
    reach = sum((size - 1) * each for size, each in zip(sizes, steps, strict=True))
    if reach >= held.numel():
        return random_view(random, memory)
    offset = random.randint(0, held.numel() - reach - 1)
    return held.as_strided([sizes[i] for i in order], [steps[i] for i in order], offset)


def bytes_of(view):
    """The numbers of the bytes that a view has in its memory: the oracle."""
    numbers = torch.arange(view.untyped_storage().nbytes()).view(-1, view.itemsize)
    shape, steps = (*view.shape, view.itemsize), (*(each * view.itemsize for each in view.stride()), 1)
    return set(numbers.reshape(-1).as_strided(shape, steps, view.storage_offset() * view.itemsize).flatten().tolist())


def test_restore_into_random_views_equals_a_byte_by_byte_check():
    chance = random.Random(51)
    outcomes = []
    for number_of_round in range(400):
        memory = torch.zeros(64, dtype=torch.float64)
        live = [random_view(chance, memory) for _ in range(chance.choice([2, 2, 3]))]
        values = [
            torch.full(view.shape, number_of_round + number + 1).to(view.dtype) for number, view in enumerate(live)
        ]
        Snapshot.take(URL, {"s": named(values)}, overwrite=True)
        shared = any(bytes_of(a) & bytes_of(b) for a, b in itertools.combinations(live, 2))
        try:
            Snapshot(URL).restore({"s": named(live)})
        except RestoreError:
            assert shared, [(view.shape, view.stride(), view.storage_offset(), view.dtype) for view in live]
            assert not memory.view(torch.uint8).any()
        else:
            assert not shared
            assert all(map(torch.equal, live, values))
        outcomes.append(shared)
    assert 100 < sum(outcomes) < 300
