"""The steps under a root: which there are, what is known of each, their pins, and what removal leaves."""

import errno
import os

import pytest
import torch

from snapshot import KeepLatest, Snapshot, SnapshotNotFoundError, StateDict
from snapshot.errors import CorruptSnapshotError, StorageError
from snapshot.io.loop import run
from snapshot.io.storage import FileStat
from snapshot.io.url import URL
from snapshot.manager import root as module
from snapshot.manager.retention import Survey, remove_steps, remove_unkept, survey_steps
from snapshot.manager.root import SUSPECT, Root, steps_of, why_suspect
from snapshot.manifest.document import METADATA, ManifestHead, NotOurs
from snapshot.runs.facts import PINNED, path_of
from snapshot.runs.timeline import Attempt, Facts, Parent, encode_facts, note_of
from snapshot.storages.file.file_storage import FileStorage
from tests.helpers.arguments import for_take


@pytest.fixture
def root(tmp_path):
    return Root(URL.parse(str(tmp_path)), None)


def take(tmp_path, *steps, value=0, **options):
    for step in steps:
        Snapshot.take(
            tmp_path / f"step-{step}", {"s": StateDict(x=torch.full((9,), step + value))}, **for_take(**options)
        )


def take_suspect(tmp_path, step):
    model = torch.nn.Linear(2, 1)
    torch.nn.init.constant_(model.weight, float("nan"))
    app = {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}
    Snapshot.take(tmp_path / f"step-{step}", app)


def committed(root):
    return run(root.folders()).committed


@pytest.mark.parametrize(
    ("names", "steps"),
    [
        (["step-2/", "step-10/", "step-0/"], [0, 2, 10]),
        (["step-007/", "step-1", "step-/", "step--1/", "other/", "step-1x/", "xstep-1/"], []),
        ([f"step-{10**17}/", f"step-{10**18}/"], [10**17]),
    ],
)
def test_steps_of_are_plain_numbers_of_folders(names, steps):
    assert steps_of(names) == steps


def test_root_folders_and_newest_describe_each_step(root, tmp_path, monkeypatch):
    assert committed(root) == {}
    take(tmp_path, 1, 2, 10)
    (tmp_path / "step-5").mkdir()
    found = run(root.folders())
    assert (list(found.committed), found.others, found.unreadable) == ([1, 2, 10], [5], {})
    assert found.committed[2].size == (tmp_path / "step-2" / METADATA).stat().st_size
    monkeypatch.setattr(module, "NEWEST", 2)
    monkeypatch.setattr(module, "MORE", 1)
    searched = []
    before = None
    while (found := run(root.newest(before))).committed or found.others:
        searched.append((list(found.committed), found.others))
        before = min([*found.committed, *found.others])
    assert searched == [([10], [5]), ([2], []), ([1], [])]


def test_root_heads_are_cached_until_the_manifest_changes(root, tmp_path, monkeypatch):
    take(tmp_path, 1, 2, 3, 4)
    data = bytearray((tmp_path / "step-2" / METADATA).read_bytes())
    data[-9] ^= 1
    (tmp_path / "step-2" / METADATA).write_bytes(data)
    (tmp_path / "step-3" / METADATA).write_bytes(b"of another library")
    stats = committed(root)
    heads = run(root.heads(stats))
    assert {step: type(head) for step, head in heads.items()} == {
        1: ManifestHead, 2: CorruptSnapshotError, 3: NotOurs, 4: ManifestHead,
    }  # fmt: skip
    reads = []
    read = module._read_head

    async def count(session, stat):
        reads.append(session.url.location[-1])
        return await read(session, stat)

    monkeypatch.setattr(module, "_read_head", count)
    assert run(root.heads(stats)) == heads
    assert reads == []
    take(tmp_path, 1, overwrite=True)
    (tmp_path / "step-4" / METADATA).unlink()
    changed = run(root.heads({**committed(root), 4: FileStat(1, 0.0, "other")}))
    assert sorted(reads) == ["1", "4"]
    assert sorted(changed) == [1, 2, 3]
    assert changed[1].save_id != heads[1].save_id
    run(root.heads({2: stats[2]}))
    run(root.heads(committed(root)))
    assert sorted(reads) == ["1", "1", "3", "4"]  # those that were left out are forgotten


@pytest.mark.parametrize(("number", "is_passed"), [(errno.EACCES, True), (errno.EIO, False)])
def test_root_passes_over_a_step_that_cannot_be_read(root, tmp_path, monkeypatch, number, is_passed):
    take(tmp_path, 1, 2)
    stats = committed(root)

    def refuse(name):
        real = getattr(FileStorage, name)

        async def refusing(self, path, *given, **options):
            if "step-2" in f"{self.url}/{path}":
                raise _error(number)
            return await real(self, path, *given, **options)

        monkeypatch.setattr(FileStorage, name, refusing)

    for name in ("stat", "get"):
        refuse(name)
    if not is_passed:
        for work in (root.folders(), root.heads(stats)):
            with pytest.raises(StorageError, match="refused"):
                run(work)
        return
    found = run(root.folders())
    assert list(found.committed) == [1]
    assert list(found.unreadable) == [2]
    heads = run(root.heads(stats))
    assert isinstance(heads[1], ManifestHead)
    assert isinstance(heads[2], StorageError)
    fates = survey_steps(root, Survey(policy=KeepLatest(1)))
    assert [(fate.step, fate.what, fate.goes) for fate in fates] == [(1, "snapshot", False), (2, "other", False)]


def _error(number):
    error = StorageError("refused")
    error.errno = number
    return error


def test_root_missing_names_a_file_that_is_gone_or_short(root, tmp_path):
    take(tmp_path, 1, 2, 3)
    stats, heads = committed(root), run(root.heads(committed(root)))
    (name,) = heads[2].sizes()
    size = heads[2].sizes()[name]
    (tmp_path / "step-2" / name).write_bytes(b"x" * (size - 1))
    (lost,) = heads[3].sizes()
    (tmp_path / "step-3" / lost).unlink()
    found = [run(root.missing(step, stats[step], heads[step])) for step in (1, 2, 3)]
    assert found == ["", f"{name} has {size - 1:,} bytes of {size:,}", f"{lost} is missing"]
    (whole,) = heads[1].sizes()
    (tmp_path / "step-1" / whole).unlink()
    assert run(root.missing(1, stats[1], heads[1])) == ""  # its manifest has not changed
    assert run(Root(root.url, None).missing(1, stats[1], heads[1])) == f"{whole} is missing"


def test_root_find_last_taken_is_by_time_and_never_suspect(root, tmp_path):
    assert run(root.find_last_taken()) is None
    take(tmp_path, 3, 1)
    assert run(root.find_last_taken()) == 1
    take_suspect(tmp_path, 2)
    assert run(root.find_last_taken()) == 1
    (tmp_path / "step-9").mkdir()
    (tmp_path / "step-9" / METADATA).write_bytes(b"of another library")
    assert run(root.find_last_taken()) == 1
    assert why_suspect([]) is None
    assert why_suspect(["a", "b"]) == f"{SUSPECT} (a; b); good=False restores it"


def test_root_fault_says_why_a_step_cannot_be_restored(root, tmp_path):
    take(tmp_path, 1, 2)
    take_suspect(tmp_path, 3)
    (tmp_path / "step-2" / METADATA).write_bytes(b"")
    assert run(root.fault(1, good=True)) is None
    assert "step-2" in run(root.fault(2))
    assert "step-9" in run(root.fault(9))
    assert run(root.fault(3)) is None
    assert run(root.fault(3, good=True)).startswith(SUSPECT)
    assert run(root.token(1)) == committed(root)[1].token
    assert run(root.token(9)) is None


def test_root_is_replaceable_if_this_library_wrote_the_damaged_step(root, tmp_path):
    take(tmp_path, 1, 2, 3, 4)
    data = (tmp_path / "step-1" / METADATA).read_bytes()
    (tmp_path / "step-1" / METADATA).write_bytes(data[:-30])
    (tmp_path / "step-2" / METADATA).write_bytes(b"\0" * 30)  # after a power loss
    (tmp_path / "step-3" / METADATA).write_bytes(b"of another library")
    (tmp_path / "step-4" / METADATA).write_bytes(b"")
    for each in (tmp_path / "step-4/data").iterdir():
        each.unlink()
    assert [run(root.is_replaceable(step)) for step in (1, 2, 3, 4, 9)] == [True, True, False, False, False]


def test_root_pin_protects_a_committed_step(root, tmp_path):
    take(tmp_path, 1, 2)
    with pytest.raises(SnapshotNotFoundError, match="no snapshot to pin"):
        run(root.pin(9))
    assert not (tmp_path / "step-9").exists()
    run(root.pin(1))
    assert run(root.pinned([1, 2, 9])) == {1}
    run(root.forget_pin(1))
    assert run(root.pinned([1, 2])) == {1}  # its snapshot exists
    run(root.unpin(1))
    run(root.unpin(2))
    assert run(root.pinned([1, 2])) == set()
    run(root.pin(2))
    (tmp_path / "step-2" / METADATA).unlink()
    run(root.forget_pin(2))
    assert not (tmp_path / "step-2" / PINNED).exists()


def test_root_pin_of_a_step_that_is_removed_meanwhile_leaves_none(root, tmp_path, monkeypatch):
    take(tmp_path, 1)
    settle = FileStorage.settle

    async def remove(self):
        (tmp_path / "step-1" / METADATA).unlink()
        await settle(self)

    monkeypatch.setattr(FileStorage, "settle", remove)
    with pytest.raises(SnapshotNotFoundError, match="was removed while it was being pinned"):
        run(root.pin(1))
    assert not (tmp_path / "step-1" / PINNED).exists()


def test_root_copies_are_the_files_that_a_step_relies_on(root, tmp_path):
    take(tmp_path, 1)
    take(tmp_path, 2, value=-1, base=str(tmp_path / "step-1"))
    (name,) = run(root.heads(committed(root)))[2].sizes()
    assert run(root.copies(2)) == {name}
    assert run(root.copies(1)) == set()
    assert run(root.copies(9)) == set()
    (tmp_path / "step-1" / METADATA).write_bytes(b"damaged")
    assert run(root.copies(1)) == set()


def test_root_copies_with_a_seal_are_those_of_a_manifest_that_passes_it(root, tmp_path):
    class Passing:
        signer = ""

        async def check_manifest(self, storage, save_id, manifest, limit):
            if b"unsigned" in manifest:
                raise CorruptSnapshotError("not signed")

        def wrap(self, storage, save_id, sizes):
            return None

    take(tmp_path, 1)
    take(tmp_path, 2, value=-1, base=str(tmp_path / "step-1"))
    take(tmp_path, 3, value=-2, base=str(tmp_path / "step-1"), metadata={"note": "unsigned"})
    assert len(run(root.copies(2))) == len(run(root.copies(3))) == 1
    assert run(root.copies(2, Passing())) == run(root.copies(2))
    assert run(root.copies(1, Passing())) == run(root.copies(3, Passing())) == run(root.copies(9, Passing())) == set()


def test_root_line_and_counts_follow_the_facts(root, tmp_path):
    first = Attempt("a" * 12, "c" * 12, 1)
    later = Attempt("b" * 12, "c" * 12, 2, Parent(first.name, 1))
    for step, each in ((1, first), (2, first), (3, later)):
        take(tmp_path, step, metadata=note_of(each, 1, replaces=False))
    take(tmp_path, 4)
    assert run(root.on_line(committed(root))) == [1, 2, 3, 4]
    (tmp_path / ".run").mkdir()
    (tmp_path / path_of(2)).write_bytes(encode_facts(Facts(2, (first, later))))
    assert run(root.on_line(committed(root))) == [1, 3, 4]
    assert run(root.line()).cuts.keys() == {first.name, later.name}
    (tmp_path / "step-2" / METADATA).write_bytes(b"damaged")
    assert run(root.on_line(committed(root))) == [1, 2, 3, 4]  # a restore reports it
    fates = survey_steps(root, Survey())
    assert not [fate for fate in fates if fate.goes]


def test_read_head_of_a_long_manifest_reads_its_ends(root, tmp_path, monkeypatch):
    app = {"s": StateDict({f"x{at}": torch.full((3,), at) for at in range(300)})}
    Snapshot.take(tmp_path / "step-1", app)
    whole = run(root.heads(committed(root)))[1]
    monkeypatch.setattr(module, "BEGINNING", 512)
    size, ranges = committed(root)[1].size, []
    read_into = FileStorage.read_into

    async def count(self, path, offset, buffers, **options):
        ranges.append((offset, sum(len(each) for each in buffers)))
        await read_into(self, path, offset, buffers, **options)

    monkeypatch.setattr(FileStorage, "read_into", count)
    found = run(Root(root.url, None).heads(committed(root)))[1]
    assert found.save_id == whole.save_id
    assert found.sizes() == whole.sizes()
    assert ranges[:2] == [(0, 512), (size - module.END, module.END)]
    monkeypatch.setattr(module, "BEGINNING", size)
    ranges.clear()
    assert run(Root(root.url, None).heads(committed(root)))[1].save_id == whole.save_id
    assert ranges == []


# Removal


def test_remove_unkept_returns_the_steps_that_are_left(root, tmp_path):
    take(tmp_path, 1, 2, 3, 4)
    (tmp_path / "step-0/data").mkdir(parents=True)
    old = tmp_path / "step-0/data/0123456789ab-0-0.safetensors"
    old.write_bytes(b"x")
    os.utime(old, (0, 0))
    assert remove_unkept(root, KeepLatest(1), [1, 2]) == {2}
    assert list(committed(root)) == [2, 3, 4]
    assert old.exists()
    run(root.pin(2))
    assert remove_unkept(root, KeepLatest(1), [2, 3, 4], leftovers=True) == {2, 4}
    assert not old.exists()
    assert remove_unkept(root, None, [2, 4]) == {2, 4}


def test_remove_steps_logs_failures_and_removes_the_others(root, tmp_path, monkeypatch):
    take(tmp_path, 1, 2, 3)
    fates = survey_steps(root, Survey(policy=KeepLatest(1)))
    assert [(fate.step, fate.goes) for fate in fates if fate.goes] == [(1, True), (2, True)]
    delete = FileStorage.delete

    async def fail(self, paths):
        if "step-1" in str(self.url):
            raise StorageError("refused")
        await delete(self, paths)

    monkeypatch.setattr(FileStorage, "delete", fail)
    done = run(remove_steps(root, fates))
    assert [fate.step for fate in done.fates] == [2]
    assert [(fate.step, str(error)) for fate, error in done.failed] == [(1, "refused")]
    monkeypatch.undo()
    assert run(remove_steps(root, fates, spared=lambda step, save_id: step == 1)).fates == ()
    assert [fate.step for fate in run(remove_steps(root, fates)).fates] == [1]
    assert list(committed(root)) == [3]
