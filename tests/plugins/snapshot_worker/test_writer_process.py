"""The writer process: it writes what a thread would, its death does no harm, and it shares memory in few pieces."""

import asyncio
import contextlib
import gc
import json
import os
import signal
import sys
import threading
from concurrent.futures import CancelledError
from multiprocessing import spawn
from pathlib import Path

import pytest
import torch

from snapshot import CorruptSnapshotError, SnapshotError, StorageError
from snapshot.events import add_handler, remove_handler
from snapshot.io import registry
from snapshot.io.arena import GRAIN, Arena, Segment, arena
from snapshot.io.budget import MemoryBudget
from snapshot.io.loop import run, start
from snapshot.io.session import Session
from snapshot.io.storage import URL
from snapshot.plan.layout import cut_file, make_plan
from snapshot.save.staging import StagedAhead, Stager
from snapshot.save.writer import Writer
from snapshot.state.leaves import Leaf
from snapshot.storages.file.file_storage import FileStorage
from snapshot.tensors.memory import NAMES, is_plain
from snapshot.testing import stalling
from snapshot_worker import client
from snapshot_worker.client import Failed, FileLane, expect_reachable, writer_process
from tests.helpers.held_storage import HeldStorage, held, until
from tests.helpers.leaks import open_files

PART = 1 << 20


class Ahead(StagedAhead):
    """Parts that are staged when they are asked for, in shared memory."""

    def __init__(self, take, *, fails_at=None):
        self._take = take
        self._fails_at = fails_at
        self.error = None

    def take(self, file, part):
        number = self._take.files.index(file)
        if (number, self._take.parts[number].index(part)) == self._fails_at:
            raise MemoryError("no more can be staged")
        held = self._take.budget.hold_blocking(part.end - part.begin, shared=True)
        return self._take.source.stage(file, part, held)

    def stop(self, error):
        self.error = error


class Take:
    """The data files of some tensors, and what is needed to write them."""

    def __init__(self, root, tensors, *, scheme="file", lanes=1):
        leaves = [
            Leaf(f"t{i}", each, NAMES[each.dtype], tuple(each.shape), each.nbytes, is_plain(each))
            for i, each in enumerate(tensors)
        ]
        self.url = URL.parse(f"{scheme}://{root}")
        self.operation = Session(self.url, None, durable=False, budget=1 << 30)
        self.budget = MemoryBudget(1 << 30)
        self.source = Stager(leaves, copies=True)
        self.files = make_plan(leaves, 0, self.operation.storage.limits, lanes, staged_bytes=0).files
        self.locations = [f"data/{n}.safetensors" for n in range(len(self.files))]
        self.parts = [cut_file(file, PART) for file in self.files]
        self.moved = 0

    def _progress(self, nbytes):
        self.moved += nbytes

    async def by_process(self, staging=None, process=None):
        return await (process or writer_process()).write(
            self.operation,
            self.files,
            self.locations,
            staging or Ahead(self),
            parts=self.parts,
            progress=self._progress,
        )

    async def by_thread(self):
        writer = Writer(self.operation.storage, self.source, self.budget, self._progress, wanted_part=PART)
        return await writer.write(self.files, self.locations)

    @property
    def size(self):
        return sum(file.size for file in self.files)


def odd(seed=0):
    """Tensors of which hardly one lies as it will be written."""
    torch.manual_seed(seed)
    return [
        torch.randn(700_003), torch.empty(0), torch.randn(900, 1100).t()[3:], torch.tensor(2.5),
        torch.randn(333_333).to(torch.bfloat16), torch.rand(1001) > 0.5, torch.randint(0, 99, (513, 7, 11))[:, ::2],
        torch.randn(5, dtype=torch.complex64).conj(),
    ]  # fmt: skip


def content(root):
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def descriptors(pid="self"):
    return len(os.listdir(f"/proc/{pid}/fd"))


@pytest.fixture(autouse=True)
def all_memory_is_given_back():
    yield
    assert " 0 in use" in repr(arena())


# What it writes


def test_writer_process_files_and_digests_equal_those_of_a_thread(tmp_path):
    there, here = Take(tmp_path / "process", odd()), Take(tmp_path / "thread", odd())
    by_process, by_thread = run(there.by_process()), run(here.by_thread())
    assert content(tmp_path / "process") == content(tmp_path / "thread")
    assert [(each.location, each.digests, each.tables) for each in by_process] == [
        (each.location, each.digests, each.tables) for each in by_thread
    ]
    assert by_process[0].tables
    assert there.moved == here.moved == there.size


def test_writer_process_several_takes_at_once(tmp_path):
    tensors = [[torch.full((9_000_000,), float(i)), *odd(i)] for i in range(3)]
    takes = [Take(tmp_path / str(i), each, lanes=2) for i, each in enumerate(tensors)]
    assert len(takes[0].files) > 1

    async def all_of_them():
        await asyncio.gather(*(take.by_process() for take in takes))

    run(all_of_them())
    for i, each in enumerate(tensors):
        run(Take(tmp_path / f"thread{i}", each, lanes=2).by_thread())
        assert content(tmp_path / str(i)) == content(tmp_path / f"thread{i}")


def test_writer_process_with_nothing_to_write_or_only_a_header(tmp_path):
    assert run(Take(tmp_path / "none", []).by_process()) == []
    (written,) = run(Take(tmp_path / "empty", [torch.empty(0)]).by_process())
    (expected,) = run(Take(tmp_path / "thread", [torch.empty(0)]).by_thread())
    assert written.digests == expected.digests
    assert content(tmp_path / "empty") == content(tmp_path / "thread")


@pytest.mark.slow
def test_writer_process_descriptors_and_segments_stay_few(tmp_path):
    def take(number):
        run(Take(tmp_path / str(number), odd(number)).by_process())

    take(99)
    gc.collect()
    before, there, segments = descriptors(), descriptors(writer_process().pid), repr(arena())
    for number in range(20):
        take(number)
    gc.collect()
    assert descriptors() <= before  # idle clients of earlier tests may be closed meanwhile
    assert descriptors(writer_process().pid) == there
    assert repr(arena()) == segments
    assert "1 segment" in segments


def test_released_memory_leaves_no_descriptor_of_the_parts_that_were_sent(tmp_path):
    run(Take(tmp_path / "a", odd()).by_process())
    assert arena().release() > 0
    assert not [each for each in open_files().values() if each.startswith("/memfd:snapshot")]


def test_writer_process_maps_released_memory_again(tmp_path):
    run(Take(tmp_path / "a", odd()).by_process())
    assert arena().release() > 0
    run(Take(tmp_path / "b", odd()).by_process())
    assert content(tmp_path / "a") == content(tmp_path / "b")


def test_writer_process_has_a_lower_priority_and_ignores_sigint(tmp_path):
    run(Take(tmp_path / "a", odd()).by_process())
    pid = writer_process().pid
    assert os.getpriority(os.PRIO_PROCESS, pid) == max(10, os.getpriority(os.PRIO_PROCESS, 0))
    assert os.getpgid(pid) != os.getpgid(0)
    os.kill(pid, signal.SIGINT)
    run(Take(tmp_path / "b", odd()).by_process())
    assert writer_process().pid == pid


def test_writer_process_uses_the_current_settings_and_trace(tmp_path, monkeypatch):
    monkeypatch.setenv("SNAPSHOT_TRACE", str(tmp_path / "trace"))
    run(Take(tmp_path / "a", odd()).by_process())
    monkeypatch.delenv("SNAPSHOT_TRACE")
    recorded = (tmp_path / "trace").read_text()
    run(Take(tmp_path / "b", odd()).by_process())
    assert (tmp_path / "trace").read_text() == recorded
    spans = [json.loads(line.rstrip(",")) for line in recorded.splitlines()[1:]]
    assert {"digest", "write"} <= {span["name"] for span in spans if span["pid"] == writer_process().pid}


# What goes wrong


def test_writer_process_errors_equal_those_of_a_thread(tmp_path):
    for name in ("process", "thread"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "data").write_text("in the way")
    there, here = Take(tmp_path / "process", odd()), Take(tmp_path / "thread", odd())
    staging = Ahead(there)
    with pytest.raises(StorageError) as theirs:
        run(there.by_process(staging))
    with pytest.raises(StorageError) as ours:
        run(here.by_thread())
    assert type(theirs.value) is type(ours.value)
    assert str(theirs.value) == str(ours.value).replace("thread", "process")
    assert theirs.value.errno == ours.value.errno
    assert "in the writer process" in str(theirs.value.__cause__)
    assert staging.error is theirs.value
    run(Take(tmp_path / "next", odd()).by_process())


def test_writer_process_staging_error_ends_the_take(tmp_path):
    take = Take(tmp_path / "a", odd())
    with pytest.raises(MemoryError, match="no more"):
        run(take.by_process(Ahead(take, fails_at=(0, 2))))
    assert content(tmp_path) == {}


def test_writer_process_cancel_leaves_no_files(tmp_path):
    with held(tmp_path / "a") as folder:
        take = Take(folder.root, odd(), scheme="held")
        events = []
        add_handler(events.append)
        work = start(take.by_process())
        folder.wait_reached()
        assert folder.files() == ["data/0.safetensors"]
        work.cancel()
        with pytest.raises(CancelledError):
            work.result(60)
        remove_handler(events.append)
        assert folder.files() == []
        assert take.budget.statistics().used == 0
    event = events[0]
    assert (event.name, event.verb, event.path) == ("retry", "write", f"held://{folder.root}")
    assert event.fields == {"attempt": 1, "error": "held", "pause": 0.5}


def test_writer_process_that_dies_is_reported_and_replaced(tmp_path):
    with held(tmp_path / "a") as folder:
        takes = [Take(folder.root, odd(), scheme="held"), Take(tmp_path / "a" / "b", odd(), scheme="held")]
        pid = writer_process().pid
        work = [start(take.by_process()) for take in takes]
        folder.wait_reached()
        os.kill(pid, signal.SIGKILL)
        for each in work:
            with pytest.raises(SnapshotError, match=r"writer process ended with signal SIGKILL.* next one"):
                each.result(60)
        assert not Path(f"/proc/{pid}").exists()
        assert [take.budget.statistics().used for take in takes] == [0, 0]
    run(Take(tmp_path / "next", odd()).by_process())
    assert writer_process().pid != pid


def test_writer_process_that_died_between_takes_is_replaced(tmp_path):
    process = writer_process()
    os.kill(process.pid, signal.SIGTERM)
    until(lambda: not process.alive)
    assert "ended" in repr(process)
    with pytest.raises(SnapshotError, match="SIGTERM"):
        run(Take(tmp_path / "a", odd()).by_process(process=process))
    assert writer_process() is not process
    run(Take(tmp_path / "b", odd()).by_process())


def test_writer_process_that_cannot_start_is_reported(tmp_path, monkeypatch):
    monkeypatch.setattr(client._place.get(), "current", None)
    monkeypatch.setattr(spawn, "get_executable", lambda: "/bin/false")
    with pytest.raises(SnapshotError, match="exit code 1"):
        run(Take(tmp_path / "a", odd()).by_process())


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_writer_process_does_not_exist_in_a_forked_child(tmp_path):
    run(Take(tmp_path / "a", odd()).by_process())
    slot = arena().take(100, shared=True)
    end = client._place.get().current._channel._socket.fileno()
    child = os.fork()
    if not child:
        with contextlib.suppress(BaseException):
            arena().give(slot)
            with contextlib.suppress(OSError):
                os.fstat(end)
                os._exit(2)
            os._exit(0 if client._place.made() is None and "shared" not in repr(arena()) else 3)
        os._exit(4)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    slot.view[0] = 7
    assert slot.view[0] == 7
    arena().give(slot)
    run(Take(tmp_path / "b", odd()).by_process())


def test_writer_process_failed_keeps_class_faults_and_notes_of_an_error():
    error = CorruptSnapshotError("it is torn", faults=["a", "b"])
    error.add_note("look here")
    back = Failed.of(1, error).error()
    assert type(back) is CorruptSnapshotError
    assert (str(back), back.faults, back.__notes__) == ("it is torn", ("a", "b"), ["look here"])

    class Special(StorageError):
        pass

    special = Special("no space")
    special.errno, special.uncertain = 28, True
    back = Failed.of(1, special).error()
    assert (type(back), str(back), back.errno, back.uncertain) == (StorageError, "no space", 28, True)
    back = Failed.of(1, KeyError("x")).error()
    assert (type(back), str(back)) == (SnapshotError, "KeyError: 'x'")


def test_writer_process_file_lane_describes_a_file(tmp_path):
    take = Take(tmp_path, odd())
    for file, parts in zip(take.files, take.parts, strict=True):
        lane = FileLane.of(file, "x", parts)
        assert [(each.begin, each.end) for each in lane.file().extents] == [
            (each.begin, each.end) for each in file.extents
        ]
        assert cut_file(lane.file(), lane.part_bytes) == parts


# What it cannot do


def test_expect_reachable_refuses_storages_of_this_process_only():
    expect_reachable(URL.parse("/tmp/x"), None)
    expect_reachable(URL.parse("s3://bucket/x"), {"endpoint": "http://localhost"})
    for url in ("memory://x", "stalling+memory://x", "simplecache::memory://x"):
        with pytest.raises(ValueError, match=r'memory.*worker="thread"'):
            expect_reachable(URL.parse(url), None)
    with stalling(), pytest.raises(ValueError, match="cannot import"):
        expect_reachable(URL.parse("stalling+file:///tmp/x"), None)
    with pytest.raises(ValueError, match="cannot pickle storage_options"):
        expect_reachable(URL.parse("s3://bucket/x"), {"lock": threading.Lock()})


def test_expect_reachable_refuses_plugins_that_cannot_be_imported(monkeypatch):
    class Local(FileStorage):
        pass

    for plugin, scheme in ((Local, "local"), (Local, "wrap+")):
        registry.register(scheme, plugin)
        try:
            with pytest.raises(ValueError, match="cannot import"):
                expect_reachable(
                    URL.parse(f"{scheme.removesuffix('+')}+file:///x" if "+" in scheme else "local:///x"), None
                )
        finally:
            registry.unregister(scheme)
    with held(Path("/x")) as folder:
        expect_reachable(URL.parse(folder.url), None)
        monkeypatch.setattr(HeldStorage, "__module__", "__main__")
        with pytest.raises(ValueError, match="cannot import"):
            expect_reachable(URL.parse(folder.url), None)


def test_expect_reachable_refuses_storage_options_of_the_main_module(monkeypatch):
    class Credentials:
        pass

    monkeypatch.setattr(sys.modules["__main__"], "Credentials", Credentials, raising=False)
    Credentials.__module__, Credentials.__qualname__ = "__main__", "Credentials"
    with pytest.raises(ValueError, match="__main__"):
        expect_reachable(URL.parse("s3://bucket/x"), {"credentials": Credentials()})


# Shared memory


def resident(segment: Segment) -> int:
    return os.fstat(segment.descriptor).st_blocks * 512


def test_arena_shared_slots_are_reused_and_do_not_overlap():
    own = Arena(keep=64 * GRAIN)
    slots = [own.take(GRAIN + 1, shared=True) for _ in range(5)]
    (segment,) = {slot.segment for slot in slots}
    for number, slot in enumerate(slots):
        assert slot.size == 2 * GRAIN
        assert slot.address % 4096 == 0
        slot.view[:] = bytes([number]) * slot.size
    assert [slot.tensor.unique().tolist() for slot in slots] == [[0], [1], [2], [3], [4]]
    assert all(os.pread(segment.descriptor, 1, slot.offset) == bytes([n]) for n, slot in enumerate(slots))
    own.give(slots[1])
    again = own.take(2 * GRAIN, shared=True)
    assert again.offset == slots[1].offset
    assert resident(segment) == 10 * GRAIN
    for slot in (slots[0], again, *slots[2:]):
        own.give(slot)
    assert own.release() == 10 * GRAIN
    assert segment.closed


def test_arena_shared_memory_beyond_its_limit_is_released_at_once():
    own = Arena(keep=2 * GRAIN)
    slots = [own.take(2 * GRAIN, shared=True) for _ in range(3)]
    segment = slots[0].segment
    for slot in slots[:2]:
        own.give(slot)
    assert resident(segment) == 4 * GRAIN
    assert own.release() == 2 * GRAIN
    assert resident(segment) == 2 * GRAIN
    assert not segment.closed
    own.give(slots[2])
    assert resident(segment) == 2 * GRAIN
    none = Arena(keep=0)
    slot = none.take(1, shared=True)
    none.give(slot)
    assert slot.segment.closed


def test_arena_shared_segments_grow_so_that_they_stay_few(monkeypatch):
    monkeypatch.setattr("snapshot.io.arena.SEGMENT", 4 * GRAIN)
    own = Arena(keep=0)
    slots = [own.take(GRAIN, shared=True) for _ in range(64)]
    assert len({slot.segment for slot in slots}) == 5
    huge = own.take(100 * GRAIN, shared=True)
    assert huge.segment.size >= 100 * GRAIN
    places = {(slot.segment.number, slot.offset) for slot in slots}
    assert len(places) == 64
    for slot in [*slots, huge]:
        own.give(slot)
    assert "segment" not in repr(own)
