"""Which files stay in the page cache after a durable take, and what leaves it."""

import ctypes
import errno
import mmap
import os
import shutil
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import torch

from snapshot import Snapshot, StorageError, TakeOptions
from snapshot.io import host_memory
from snapshot.io.host_memory import memory_in_use
from snapshot.io.system import libc
from snapshot.storages.file import files, page_cache
from snapshot.storages.file.page_cache import drop_cache
from tests.storage.direct import require_direct

MiB = 1 << 20
TENSOR = 24 * MiB


@pytest.fixture(autouse=True)
def local(tmp_path, monkeypatch):
    require_direct(tmp_path)
    if libc.sync_file_range is None or not files.is_worthwhile(str(tmp_path)):
        pytest.skip("files are never written around the page cache here")
    monkeypatch.setattr(page_cache, "STRIDE", 8 * MiB)
    monkeypatch.delenv("SNAPSHOT_DIRECT_IO", raising=False)
    page_cache.page_cache.reset()


@pytest.fixture
def used(monkeypatch):
    """Percent of the memory that is in use, as told in turn; the last one from then on."""
    told = [20]
    monkeypatch.setattr(
        page_cache, "memory_in_use", lambda: [(100 << 30, (told.pop(0) if len(told) > 1 else told[0]) << 30)]
    )
    return told


class State(dict):
    state_dict = dict.copy
    load_state_dict = dict.update


def tensors(seed=0, count=2):
    generator = torch.Generator().manual_seed(seed)
    return State({f"t{each}": torch.rand(TENSOR // 4, generator=generator) for each in range(count)})


def take(path, seed=0):
    Snapshot.take(str(path), {"model": tensors(seed)})
    return path


def data_files(path):
    return sorted(each for each in (path / "data").iterdir() if each.stat().st_size >= MiB)


def cached_share(file):
    """Return which share of a file's pages is in the page cache, as the kernel tells."""
    with open(file, "rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_COPY) as mapped:
        pages = -(-len(mapped) // mmap.PAGESIZE)
        found = (ctypes.c_ubyte * pages)()
        start = ctypes.c_char.from_buffer(mapped)
        try:
            assert libc.mincore(ctypes.c_void_p(ctypes.addressof(start)), ctypes.c_size_t(len(mapped)), found) == 0
        finally:
            del start
        return sum(each & 1 for each in found) / pages


def shares(path):
    return [cached_share(each) for each in data_files(path)]


def expect_restored(path, seed=0):
    found = State({name: torch.zeros_like(value) for name, value in tensors(seed).items()})
    Snapshot(str(path)).restore({"model": found})
    assert all(torch.equal(found[name], value) for name, value in tensors(seed).items())


def test_durable_take_stays_in_the_page_cache_while_memory_is_ample(tmp_path, used):
    path = take(tmp_path / "a")
    assert set(shares(path)) == {1.0}
    expect_restored(path)
    for each in data_files(path):
        drop_cache(str(each))  # what remains is what reached the disk
    assert set(shares(path)) == {0.0}
    expect_restored(path)


def test_durable_take_goes_around_the_page_cache_while_half_of_the_memory_is_in_use(tmp_path, used):
    used[:] = [51]
    path = take(tmp_path / "a")
    assert set(shares(path)) == {0.0}
    expect_restored(path)


def test_files_leave_the_page_cache_when_memory_gets_short_during_the_take(tmp_path, used):
    used[:] = [20, 20, 20, 76]
    path = take(tmp_path / "a")
    assert set(shares(path)) <= {0.0, 1.0}  # a file stays or leaves as a whole
    assert 0.0 in shares(path)
    expect_restored(path)


def test_files_of_the_last_two_takes_stay_and_older_ones_leave(tmp_path, used):
    paths = [take(tmp_path / f"step-{seed}", seed) for seed in range(5)]
    for path in paths[-2:]:
        assert set(shares(path)) == {1.0}
    for path in paths[:-2]:
        assert max(shares(path)) < 0.5
    for seed, path in enumerate(paths):
        expect_restored(path, seed)


def test_files_of_earlier_takes_leave_before_those_of_a_take_that_runs_out_of_memory(tmp_path, used):
    first = take(tmp_path / "a", 1)
    used[:] = [20, *[76] * 9, 74]  # more than the first take has
    second = take(tmp_path / "b", 2)
    assert max(shares(first)) < 0.5
    assert 0.0 in shares(second)
    used[:] = [20]
    third = take(tmp_path / "c", 3)
    used[:] = [20, 76, 74]
    fourth = take(tmp_path / "d", 4)
    assert min(shares(third)) < 1.0
    assert set(shares(fourth)) == {1.0}
    for seed, path in enumerate((first, second, third, fourth), 1):
        expect_restored(path, seed)


def test_memory_of_earlier_takes_counts_as_free_unless_they_were_deleted(tmp_path, monkeypatch):
    def in_use(nbytes):
        monkeypatch.setattr(page_cache, "memory_in_use", lambda: [(200 * MiB, nbytes)])

    in_use(60 * MiB)
    first = take(tmp_path / "a")
    assert set(shares(first)) == {1.0}
    in_use(130 * MiB)  # 48 MiB of it are those of the first take
    second = take(tmp_path / "b")
    assert set(shares(second)) == {1.0}
    shutil.rmtree(first)
    shutil.rmtree(second)
    assert set(shares(take(tmp_path / "c"))) == {0.0}


@pytest.mark.parametrize(("setting", "share"), [("always", 0.0), ("never", 1.0)])
def test_settings_of_direct_io_do_not_look_at_memory(tmp_path, monkeypatch, setting, share):
    monkeypatch.setenv("SNAPSHOT_DIRECT_IO", setting)
    monkeypatch.setattr(page_cache, "memory_in_use", lambda: pytest.fail("looked at the memory"))
    assert set(shares(take(tmp_path / "a"))) == {share}


def test_layout_does_not_depend_on_free_memory_or_direct_io(tmp_path, monkeypatch, used):
    def layout(path):
        return [(each.name.split("-", 1)[1], each.stat().st_size) for each in data_files(path)]

    found = [layout(take(tmp_path / "ample"))]
    used[:] = [60]
    found.append(layout(take(tmp_path / "short")))
    for setting in ("always", "never"):
        monkeypatch.setenv("SNAPSHOT_DIRECT_IO", setting)
        found.append(layout(take(tmp_path / setting)))
    assert found == [found[0]] * 4


def bytes_from_disk():
    """Return how many bytes this process has read from disk so far, as the kernel counts them."""
    counts = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(counts["read_bytes"])


@pytest.mark.parametrize("read_back", [True, False])
def test_read_back_reads_from_disk_what_was_in_the_page_cache(tmp_path, used, read_back):
    path = tmp_path / "a"
    before = bytes_from_disk()
    Snapshot.take(str(path), {"model": tensors()}, options=TakeOptions(read_back=read_back))
    share = (bytes_from_disk() - before) / sum(each.stat().st_size for each in data_files(path))
    assert share >= 0.95 if read_back else share < 0.5  # imports may read from disk, too
    expect_restored(path)


@pytest.mark.parametrize("used_then", [20, 76], ids=["stays", "leaves"])
def test_failed_writeback_is_an_error_and_leaves_no_snapshot(tmp_path, monkeypatch, used, used_then):
    calls = []

    def sync_file_range(descriptor, offset, length, flags):
        calls.append(flags.value)
        if len(calls) < 4:
            return libc.sync_file_range(descriptor, offset, length, flags)
        ctypes.set_errno(errno.EIO)
        return -1

    used[:] = [20, used_then]
    monkeypatch.setattr(page_cache, "libc", libc._replace(sync_file_range=sync_file_range))
    with pytest.raises(StorageError, match="Input/output error"):
        take(tmp_path / "a")
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.EPERM])
def test_systems_without_early_flushes_still_sync(tmp_path, monkeypatch, used, number):
    def refuse(*_):
        ctypes.set_errno(number)
        return -1

    monkeypatch.setattr(page_cache, "libc", libc._replace(sync_file_range=refuse))
    expect_restored(take(tmp_path / "a"))


# Memory of control groups


def write_group(folder, limit, usage):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.max").write_text(f"{limit}\n")
    (folder / "memory.current").write_text(f"{usage}\n")


def test_memory_in_use_includes_the_control_groups_above(tmp_path, monkeypatch):
    write_group(tmp_path / "job/step", "max", 50 * MiB)
    write_group(tmp_path / "job", 100 * MiB, 60 * MiB)
    write_group(tmp_path, 300 * MiB, 70 * MiB)
    (tmp_path / "job/memory.stat").write_text(f"anon 1\ninactive_file {25 * MiB}\nactive_file 2\n")
    read = host_memory._read
    monkeypatch.setattr(host_memory, "_MOUNTS", (("", str(tmp_path), "memory.max", "memory.current"),))
    monkeypatch.setattr(
        host_memory,
        "_read",
        lambda path: b"3:cpu:/other\n0::/job/step\n" if path == "/proc/self/cgroup" else read(path),
    )
    host_memory._limits.cache_clear()
    assert memory_in_use()[1:] == [(100 * MiB, 60 * MiB), (300 * MiB, 70 * MiB)]
    assert host_memory.available_memory() == 65 * MiB
    host_memory._limits.cache_clear()


GROUPS = Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")
LIMIT = 1024 * MiB


@pytest.fixture
def group():
    """A control group of 1 GiB."""
    for parent, limit in zip(GROUPS, ("memory.limit_in_bytes", "memory.max"), strict=True):
        made = parent / f"snapshot-test-{os.getpid()}"
        try:
            made.mkdir()
            (made / limit).write_text(str(LIMIT))
        except OSError:
            if made.exists():
                made.rmdir()
            continue
        yield made
        while (made / "cgroup.procs").read_text():
            time.sleep(0.01)
        made.rmdir()
        return
    pytest.skip("control groups cannot be created here")


IN_GROUP = """
import importlib, os, sys
from pathlib import Path
open(sys.argv[1] + "/cgroup.procs", "w").write(str(os.getpid()))
this = importlib.import_module(sys.argv[4])

folder, root = Path(sys.argv[2]), Path(sys.argv[3])
assert this.memory_in_use()[1:]
this.page_cache.memory_in_use = lambda: this.memory_in_use()[1:]  # whatever else uses the memory of this host
loaded = folder / "loaded"
loaded.read_bytes()
for step in range(18):
    this.take(root / f"step-{step}", step)
    print(this.cached_share(loaded), *this.shares(root / f"step-{step}"), flush=True)
print(*this.shares(root / "step-0"))
"""


def test_takes_in_a_control_group_do_not_evict_what_a_training_reads(tmp_path, group):
    """The group has room for a few steps. Older ones leave before data that was read once, and earlier."""
    (tmp_path / "loaded").write_bytes(os.urandom(64 * MiB))
    drop_cache(str(tmp_path / "loaded"))
    found = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(IN_GROUP), str(group), str(tmp_path), str(tmp_path / "run"), __name__],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert found.returncode == 0, found.stderr
    *lines, first = [[float(share) for share in line.split()] for line in found.stdout.splitlines()]
    assert min(share for line in lines for share in line) > 0.9
    assert set(first) == {0.0}
