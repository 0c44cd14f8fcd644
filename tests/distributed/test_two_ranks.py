"""What two ranks promise, in short: the smoke tests of the room."""

from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from snapshot import Sharded, Snapshot, SnapshotError, StateDict
from snapshot.errors import StorageError
from snapshot.loading import shared_reads
from snapshot.plugins.file import files
from snapshot.plugins.file.files import drop_cache, open_direct
from snapshot.testing import Fault, tapped


def _state(value, own):
    return {"s": StateDict(shared=torch.full((100_000,), value), own=torch.full((1000,), float(own)), step=int(value))}


def _take_and_restore(path):
    rank = dist.get_rank()
    Snapshot.take(path, _state(7.0, rank), replicated=["s/shared", "s/step"])
    live = _state(0.0, -1)
    report = Snapshot(path).restore(live)
    state = live["s"]
    return bool((state["shared"] == 7).all()), state["own"][0].item(), state["step"], list(map(str, report))


def test_two_ranks_restore_what_they_share_and_what_each_owns(two, folder):
    path = f"{folder}/s"
    assert two.run(_take_and_restore, path) == [(True, 0.0, 7, []), (True, 1.0, 7, [])]
    snapshot = Snapshot(path)
    assert snapshot.metadata.world_size == 2
    assert snapshot.verify()
    assert snapshot.read_object("1/s/own")[0] == 1.0
    stored = sum(file.stat().st_size for file in Path(path, "data").iterdir())
    assert 4 * 102_000 <= stored < 4 * 150_000, "the replica is stored once"


class _Broken(StateDict):
    def state_dict(self):
        raise ArithmeticError("of rank 1")


def _take_of_a_rank_that_fails(path):
    broken = {"s": _Broken()} if dist.get_rank() == 1 else _state(9.0, 0)
    Snapshot.async_take(path, broken, overwrite=True).wait()


def test_a_rank_that_fails_is_named_on_both_and_the_old_snapshot_stays(two, folder):
    path = f"{folder}/s"
    two.run(_take_and_restore, path)
    errors = two.outcomes(_take_of_a_rank_that_fails, path)
    assert all(isinstance(error, SnapshotError | ArithmeticError) for error in errors), errors
    assert "rank 1" in str(errors[0])
    assert Snapshot(path).read_object("0/s/step") == 7
    assert Snapshot(path).verify()


def _count_direct_reads(path, value):
    """Return how many files a cold restore opens with O_DIRECT for reading."""
    for file in Path(path, "data").iterdir():
        drop_cache(str(file))
    opened = []

    def count(full, flags, **kwargs):
        opened.append(full)
        return open_direct(full, flags, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, "open_direct", count)
        Snapshot(path).restore({"s": value})
    return len(opened)


def _value(sharded):
    if not sharded:
        return StateDict(x=torch.zeros(2 << 20))
    begin = dist.get_rank() << 20
    return StateDict(x=Sharded(torch.zeros(1 << 20), global_shape=(2 << 20,), offsets=(begin,)))


def _restore_cold(path, saved_sharded, restored_sharded):
    Snapshot.take(path, {"s": _value(saved_sharded)}, replicated=[] if saved_sharded else ["s/x"])
    return _count_direct_reads(path, _value(restored_sharded))


def test_ranks_of_a_host_read_what_they_share_through_the_page_cache(two, folder):
    if sum(two.run(_restore_cold, f"{folder}/sharded", True, True)) == 0:
        pytest.skip("no file here is ever cold, or O_DIRECT is not used")
    assert two.run(_restore_cold, f"{folder}/shared", False, False) == [0, 0]
    assert two.run(_restore_cold, f"{folder}/gathered", True, False) == [0, 0], "both ranks read all shards"
    assert sum(two.run(_restore_cold, f"{folder}/scattered", False, True)) > 0, "each rank reads another half"


# One rank reads what both want, and sends it to the other

NAMES = ("a", "b", "c", "odd")


def _values():
    found = {name: torch.arange(float(90_000)) + at for at, name in enumerate("abc")}
    return found | {"odd": torch.arange(6000.0).reshape(60, 100).t(), "own": torch.full((9,), float(dist.get_rank()))}


def _module(values):
    made = torch.nn.Module()
    for name, value in values.items():
        made.register_buffer(name, value)
    return made


def _save_values(path):
    Snapshot.take(path, {"s": _module(_values())}, replicated=["s/?", "s/odd"])


def _read_once(path, only=((), ()), faults=((), ()), **options):
    """Restore with short parts; return what was read, or the error, and how much of the values changed."""
    names = only[dist.get_rank()] or (*NAMES, "own")
    live = _module({name: torch.zeros_like(value) for name, value in _values().items() if name in names})
    taps = [Fault(on="read_into", path="*.safetensors", **each) for each in faults[dist.get_rank()]]
    with pytest.MonkeyPatch.context() as patch, tapped("shaky", *taps):
        patch.setattr(shared_reads, "PART", 1)
        patch.setattr(shared_reads, "WORTH", options.pop("worth", 1))
        try:
            report = Snapshot(f"shaky+file://{path}").restore({"s": live}, **{"read_once": True, **options})
        except SnapshotError as error:
            return str(error), [name for name, value in live.named_buffers() if value.any()]
    assert [name for name, value in live.named_buffers() if not torch.equal(value, _values()[name])] == []
    return report.bytes_read, report.requests


ONE = 3 * 360_000 + 24_000


def test_read_once_reads_each_byte_on_one_rank(two, folder):
    path = f"{folder}/s"
    two.run(_save_values, path)
    for options in ({}, {"verify": False}, {"memory_budget_bytes": 3 << 20}, {"atomic": True}):
        first, second = two.run(partial(_read_once, path, **options))
        times = 3 if "atomic" in options else 1  # each rank has then looked at all bytes before
        assert times * ONE <= first[0] + second[0] <= times * ONE + 20_000, options
        assert min(first[0], second[0]) > 400_000, "the ranks take turns"
    for options in ({"read_once": False}, {"worth": 2 * ONE}):
        assert all(read >= ONE for read, _ in two.run(partial(_read_once, path, **options)))


def test_read_once_of_ranks_that_want_different_entries(two, folder):
    path = f"{folder}/s"
    two.run(_save_values, path)
    both = partial(_read_once, path, (("a", "b", "own"), ("b", "c", "odd", "own")))
    (first, _), (second, _) = two.run(both)
    assert ONE <= first + second <= ONE + 20_000
    assert 360_000 <= first <= 720_000 + 10_000
    (first, _), (second, _) = two.run(partial(_read_once, path, (("a", "own"), ("c", "own")), strict=False))
    assert 360_000 <= first <= 362_000
    assert 360_000 <= second <= 362_000


def test_read_once_names_what_no_rank_uses(two, folder):
    path = f"{folder}/s"
    two.run(_save_values, path)
    for once in (True, False):
        outcomes = two.run(partial(_read_once, path, (("a", "b", "own"), ("b", "c", "own")), read_once=once))
        for text, changed in outcomes:
            assert "s/odd" in text
            assert "s/a" not in text
            assert changed == []


@pytest.mark.parametrize("failing", [0, 1])
@pytest.mark.parametrize("nth", [1, 2])
def test_read_once_of_a_rank_that_cannot_read_is_an_error_of_all(two, folder, failing, nth):
    path, faults = f"{folder}/s", [(), ()]
    two.run(_save_values, path)
    faults[failing] = [{"nth": nth, "times": None, "error": StorageError("the disk failed")}]
    for text, _ in two.run(partial(_read_once, path, faults=faults)):
        assert "the disk failed" in text


@pytest.mark.parametrize("failing", [0, 1])
def test_read_once_of_damaged_bytes_is_repeated_or_an_error_of_all(two, folder, failing):
    path, faults = f"{folder}/s", [(), ()]
    two.run(_save_values, path)
    faults[failing] = [{"times": None, "flip": 100}]
    for text, changed in two.run(partial(_read_once, path, faults=faults, atomic=True)):
        assert "s/" in text
        assert changed == []
