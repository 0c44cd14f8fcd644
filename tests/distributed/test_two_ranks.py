"""What two ranks promise, in short: the smoke tests of the room."""

import dataclasses
import re
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from snapshot import (
    RankError,
    Sharded,
    Snapshot,
    SnapshotError,
    SnapshotExistsError,
    StateDict,
    Target,
    load,
)
from snapshot.errors import StorageError
from snapshot.loading import shared_reads
from snapshot.storages.file import files
from snapshot.storages.file.file_storage import FileStorage
from snapshot.storages.file.files import open_direct
from snapshot.storages.file.page_cache import drop_cache
from snapshot.testing import Fault, tapped
from snapshot_merge import MergeOptions, merge
from tests.helpers.arguments import for_restore


def _state(value, own):
    return {"s": StateDict(shared=torch.full((100_000,), value), own=torch.full((1000,), float(own)), step=int(value))}


def _take_and_restore(path):
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (2,))
    saved = _state(7.0, rank)
    saved["s"]["sharded"] = distribute_tensor(torch.arange(6.0), mesh, [Shard(0)])
    Snapshot.take(path, saved, replicated=["s/shared", "s/step"])
    live = _state(0.0, -1)
    live["s"]["sharded"] = distribute_tensor(torch.zeros(6), mesh, [Shard(0)])
    report = Snapshot(path).restore(live)
    state = live["s"]
    sharded = state["sharded"].to_local().tolist()
    return bool((state["shared"] == 7).all()), state["own"][0].item(), sharded, state["step"], list(map(str, report))


def test_take_and_restore_of_shared_and_own_values_on_two_ranks(two, folder):
    path = f"{folder}/s"
    assert two.run(_take_and_restore, path) == [(True, 0.0, [0, 1, 2], 7, []), (True, 1.0, [3, 4, 5], 7, [])]
    snapshot = Snapshot(path)
    names = set(snapshot.get_manifest())
    assert {name for name in names if "/s/" in name} == {
        "0/s/shared", "0/s/step", "0/s/own", "1/s/own", "0/s/sharded"
    }  # fmt: skip
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


def test_take_failing_on_one_rank_names_it_and_keeps_the_old_snapshot(two, folder):
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


def test_restore_on_ranks_of_a_host_reads_shared_files_through_the_page_cache(two, folder):
    if sum(two.run(_restore_cold, f"{folder}/sharded", True, True)) == 0:
        pytest.skip("no file here is ever cold, or O_DIRECT is not used")
    assert two.run(_restore_cold, f"{folder}/shared", False, False) == [0, 0]
    assert two.run(_restore_cold, f"{folder}/gathered", True, False) == [0, 0], "both ranks read all shards"
    assert sum(two.run(_restore_cold, f"{folder}/scattered", False, True)) > 0, "each rank reads another half"


ROWS = 3000


def _app(value):
    """Return a state with a tensor of both ranks, one of each rank, and some that they share."""
    rank = dist.get_rank()
    sharded = Sharded(torch.full((ROWS, 4), float(value + rank)), global_shape=(2 * ROWS, 4), offsets=(rank * ROWS, 0))
    same = {f"same{at}": torch.full((500 + at,), float(value * at)) for at in range(4)}
    return {"s": StateDict(sharded=sharded, **same, **{f"own{rank}": torch.full((700,), float(value * rank))})}


def _save(path, value):
    Snapshot.take(path, _app(value), replicated=["s/same*"])


WEIGHTS = {"select": ["s/sharded", "s/same*"]}


def _share_work(folder):
    """Let the ranks share all verbs. Return what each says."""
    one, other = f"{folder}/one", f"{folder}/other"
    _save(one, 1)
    _save(other, 3)
    hf = Target(f"{folder}/hf", "safetensors", durable=False, shard_bytes=40_000)
    return [
        Snapshot(one).verify(ranks=True),
        Snapshot(one).copy(f"{folder}/copy", ranks=True),
        Snapshot(one).copy(Target(f"{folder}/some", durable=False), select=["s/own*"], ranks=True),
        Snapshot(one).convert(hf, ranks=True, **WEIGHTS),
        Snapshot(f"{folder}/hf").copy(f"{folder}/hf copy", ranks=True),
        Snapshot(f"{folder}/hf").verify(ranks=True),
        merge(
            [one, other],
            Target(f"{folder}/mean", "snapshot", durable=False),
            options=MergeOptions(ranks=True),
            **WEIGHTS,
        ),
        Snapshot.diff(one, other, values=True, ranks=True),
        Snapshot.diff(one, f"{folder}/copy", ranks=True),
    ]


def _texts(report):
    """Return a report as text, without its times."""
    return re.sub(r" in [0-9.]+ s(, [0-9.]+ [KMG]?i?B/s)?", "", str(report))


def test_copy_verify_convert_merge_and_diff_are_shared_by_two_ranks(two, folder):
    found = two.run(_share_work, folder)
    assert [list(map(_texts, each)) for each in found[1:]] == [list(map(_texts, found[0]))]
    whole, copied, some, converted, copied_hf, whole_hf, merged, differing, same = found[0]
    assert whole.ok
    assert whole_hf.ok
    alone = Snapshot(f"{folder}/one").verify()
    assert (whole.bytes_read, whole.entries) == (alone.bytes_read, alone.entries)
    again = Snapshot(f"{folder}/one").copy(f"{folder}/alone")
    assert (copied.files, copied.nbytes, copied.entries) == (again.files, again.nbytes, again.entries)
    assert Snapshot.diff(f"{folder}/one", f"{folder}/copy").same
    assert Snapshot(f"{folder}/copy").verify().ok
    assert [each for each in Snapshot(f"{folder}/some").get_manifest() if "own" in each] == ["0/s/own0", "1/s/own1"]
    assert some.entries == 2
    sharded = torch.cat([torch.full((ROWS, 4), 1.0), torch.full((ROWS, 4), 2.0)])
    for place, more in (("hf", 0), ("hf copy", 0), ("mean", 1)):
        held = load(f"{folder}/{place}")
        held = {str(name).replace("/", ".").removeprefix("0.").removeprefix("s."): each for name, each in held.items()}
        assert torch.equal(held["sharded"], sharded + more), place
        for at in range(4):
            assert torch.equal(held[f"same{at}"], torch.full((500 + at,), float(at * (1 + more)))), place
    assert len(converted.files) == copied_hf.files == len(list(Path(folder, "hf").glob("*")))
    assert merged.tensors == converted.tensors == 5
    assert same.same
    assert not differing.same
    text = str(differing)
    assert text == str(Snapshot.diff(f"{folder}/one", f"{folder}/other", values=True))
    for name in ("sharded", "same1", "same3", "own1"):
        assert f"s/{name}" in text
    assert "s/own0" not in text
    assert "s/same0" not in text


def _share_badly(folder, what):
    rank, one = dist.get_rank(), f"{folder}/one"
    hf = Target(f"{folder}/bad", "safetensors", durable=False)
    if what == "resume":
        Snapshot(one).verify(ranks=True, resume=f"{folder}/notes")
    elif what == "arguments":
        Snapshot(one).copy(f"{folder}/bad{rank}", ranks=True)
    elif what == "rename":
        Snapshot(one).convert(hf, ranks=True, rename=lambda name: f"{name}{rank}", **WEIGHTS)
    elif what == "host":
        Snapshot(one).copy(f"near://{folder}/bad", ranks=True)
    elif what == "memory":
        Snapshot(one).copy("memory://bad", ranks=True)
    elif what == "exists":
        Snapshot(one).copy(f"{folder}/copy", ranks=True)
    elif what == "exists hf":
        Snapshot(one).convert(Target(f"{folder}/hf", "safetensors", durable=False), ranks=True, **WEIGHTS)


@pytest.mark.parametrize(
    ("what", "error", "message"),
    [
        ("resume", ValueError, "resume must be None if ranks share the work"),
        ("arguments", SnapshotError, "same arguments"),
        ("rename", SnapshotError, "another plan on rank 1"),
        ("host", SnapshotError, "must be a storage that all ranks share"),
        ("memory", SnapshotError, "all ranks must share one storage"),
        ("exists", SnapshotExistsError, "copy"),
        ("exists hf", SnapshotExistsError, "hf"),
    ],
)
def test_copy_verify_and_convert_refuse_what_two_ranks_cannot_share(two, folder, what, error, message):
    two.run(_save, f"{folder}/one", 1)
    if what == "exists":
        Snapshot(f"{folder}/one").copy(f"{folder}/copy")
    if what == "exists hf":
        Snapshot(f"{folder}/one").convert(Target(f"{folder}/hf", "safetensors", durable=False), **WEIGHTS)
    for each in two.outcomes(_share_badly, folder, what):
        assert isinstance(each, error), each
        assert message in str(each)
    assert not list(Path(folder).glob("bad*"))


def _replace_without_renames(folder, fails):
    """Convert again into a folder of a storage that cannot rename. With `fails`, rank 1 fails to write."""
    capabilities = dataclasses.replace(FileStorage.capabilities, renames=False)

    async def fail(*_):
        raise OSError(28, "No space left on device")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FileStorage, "capabilities", capabilities)
        if fails and dist.get_rank() == 1:
            patch.setattr("snapshot.transform.export.Writer.write", fail)
        there = Target(f"{folder}/hf", "safetensors", overwrite=True, durable=False, shard_bytes=40_000)
        Snapshot(f"{folder}/one").convert(there, ranks=True, **WEIGHTS)


def test_convert_without_renames_deletes_the_old_index_first(two, folder):
    two.run(_save, f"{folder}/one", 1)
    two.run(_replace_without_renames, folder, False)
    names = {each.name for each in Path(folder, "hf").iterdir()}
    assert len(names) == 3
    errors = two.outcomes(_replace_without_renames, folder, True)
    assert isinstance(errors[1], OSError)
    assert isinstance(errors[0], RankError)
    assert not Path(folder, "hf", "model.safetensors.index.json").exists()
    two.run(_replace_without_renames, folder, False)
    assert {each.name for each in Path(folder, "hf").iterdir()} == names
    assert len(load(f"{folder}/hf")) == 5


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
            report = Snapshot(f"shaky+file://{path}").restore(
                {"s": live}, **for_restore(**{"read_once": True, **options})
            )
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
