"""What can go wrong between an accelerator and a snapshot. `test_device.py` runs this in a process of its own.

It runs on CUDA if `SNAPSHOT_TEST_DEVICE` says so, and on the fake accelerator otherwise: that one lets copies wait in
their streams until somebody waits for them, reuses freed memory at once, and counts what is pinned.
"""

import _thread
import contextlib
import ctypes
import gc
import mmap
import os
import threading
import time
import types
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp

from tests.device import fakedev

DEVICE = os.environ.get("SNAPSHOT_TEST_DEVICE", "fakedev")
FAKE = DEVICE == "fakedev"
extension = fakedev.load() if FAKE else None

from snapshot import (  # noqa: E402
    CorruptSnapshotError,
    ModelState,
    RestoreError,
    RestoreOptions,
    Snapshot,
    SnapshotError,
    StateDict,
    TakeOptions,
    TensorMap,
)
from snapshot.io import arena as pins  # noqa: E402
from snapshot.io.accelerators import on_stream  # noqa: E402
from snapshot.io.arena import GRAIN, SPARE, Arena, Pinning, arena, release_memory  # noqa: E402
from snapshot.loading import device_fills  # noqa: E402
from snapshot.loading.reader import Reader  # noqa: E402
from snapshot.save import background_take, digests, staging  # noqa: E402
from snapshot.save.staging import StagedPart, Stager  # noqa: E402
from snapshot.tensors import device_digest  # noqa: E402
from snapshot.tensors.digest import RunningDigest  # noqa: E402

MiB = 1 << 20
only_fake = pytest.mark.skipif(not FAKE, reason="the fake accelerator counts it")
only_cuda = pytest.mark.skipif(FAKE, reason="needs CUDA")


@pytest.fixture(autouse=True)
def clean():
    """Nothing waits in the streams before and after a test, and nothing is pinned before it."""
    torch.accelerator.synchronize()
    release_memory()
    if FAKE:
        extension.reset()
    yield
    if FAKE:
        assert extension.waiting() == 0
        assert extension.counts().get("registered_bytes", 0) == pinned_bytes()


def pinned_bytes():
    return sum(segment.size for segment in arena()._segments if segment.pinned and segment._torch is None)


@pytest.fixture
def path(tmp_path):
    return str(tmp_path / "run")


def lag(tensor, cycles=50_000_000):
    """Work in the current stream that takes long: what comes after it has not happened yet when the host goes on."""
    if not FAKE:
        torch.cuda._sleep(cycles)
    else:
        tensor.copy_(torch.zeros(tensor.shape, dtype=tensor.dtype).pin_memory(), non_blocking=True)


def fill(tensor, value, cycles=50_000_000):
    """Set all elements by work that waits in the current stream."""
    lag(tensor, cycles)
    if FAKE:  # it has no kernels: the host's would run at once
        tensor.copy_(torch.full(tensor.shape, value, dtype=tensor.dtype).pin_memory(), non_blocking=True)
    else:
        tensor.detach().fill_(value)


def read(path, name):
    return Snapshot(path).read_object(f"0/state/{name}")


# 1, 2: changes that no counter shows


@pytest.mark.parametrize("option", [{}, {"capturable": True}])
def test_async_take_copies_state_that_a_cuda_graph_may_change_during_the_call(path, option):
    """SGD on a device, and any optimizer that is capturable: a replayed graph runs no hook and counts nothing."""
    weight = torch.nn.Parameter(torch.ones(300_000, device=DEVICE))
    kind = torch.optim.Adam if option else torch.optim.SGD
    module = torch.nn.Module()
    module.weight = weight
    optimizer = kind([weight], **option)
    pending = Snapshot.async_take(
        path, {"state": module, "optim": optimizer}, options=TakeOptions(staging="overlapped")
    )
    assert pending.staged()
    weight.data.fill_(2.0)
    pending.wait()
    assert set(read(path, "weight").tolist()) == {1.0}


@only_cuda
def test_async_take_during_a_replayed_cuda_graph_is_consistent(path):
    weights = [torch.nn.Parameter(torch.zeros(1 << 22, device=DEVICE)) for _ in range(8)]
    module = torch.nn.ParameterList(weights)
    optimizer = torch.optim.AdamW(weights, lr=1.0, capturable=True, weight_decay=0.0)
    for weight in weights:
        weight.grad = torch.ones_like(weight)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        optimizer.step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        optimizer.step()
    for number in range(20):
        where = f"{path}-{number}"
        pending = Snapshot.async_take(
            where, {"state": module, "optim": optimizer}, options=TakeOptions(staging="overlapped")
        )
        graph.replay()
        graph.replay()
        pending.wait()
        values = {value for name in range(8) for value in read(where, name).unique().tolist()}
        assert len(values) == 1


def test_take_during_cuda_graph_capture_raises(path, monkeypatch):
    state = {"state": StateDict(weight=torch.ones(10, device=DEVICE))}
    if FAKE:
        monkeypatch.setattr(torch.fakedev, "is_current_stream_capturing", lambda: True)
        capture = contextlib.nullcontext()
    else:
        capture = torch.cuda.graph(torch.cuda.CUDAGraph())
    with capture, pytest.raises(SnapshotError, match="while a graph is captured"):
        Snapshot.take(path, state)
    assert not Snapshot(path).exists()


# 3: memory that is freed and reused


def held_up(monkeypatch):
    """An event that lets the copies after the call begin."""
    go_on, begin = threading.Event(), Stager.begin_part

    def late(self, *arguments):
        if threading.current_thread().name == "snapshot-io-stage":
            assert go_on.wait(30)
        return begin(self, *arguments)

    monkeypatch.setattr(Stager, "begin_part", late)
    return go_on


def adam(numel):
    """A module with one weight of ones, and its optimizer, whose state can be copied late."""
    module = torch.nn.Module()
    module.weight = torch.nn.Parameter(torch.ones(numel, device=DEVICE))
    optimizer = torch.optim.AdamW(module.parameters(), lr=1.0)
    module.weight.grad = torch.ones_like(module.weight)
    optimizer.step()
    with torch.no_grad():
        module.weight.fill_(1.0)
    return module, optimizer


def test_overlapped_staging_raises_if_memory_is_freed_before_its_copy(path, monkeypatch):
    go_on = held_up(monkeypatch)
    module, optimizer = adam(300_000)
    pending = Snapshot.async_take(
        path, {"state": module, "optim": optimizer}, options=TakeOptions(staging="overlapped")
    )
    assert not pending.staged()
    nbytes = module.weight.untyped_storage().nbytes()
    module.weight.untyped_storage().resize_(0)
    other = torch.full((300_000,), 2.0, device=DEVICE)
    go_on.set()
    with pytest.raises(SnapshotError, match="changed outside"):
        pending.wait()
    assert not Snapshot(path).exists()
    module.weight.untyped_storage().resize_(nbytes)
    del other


@only_fake
def test_overlapped_staging_memory_freed_during_its_copy_is_not_reused(path, monkeypatch):
    """The copies wait in their stream; the application frees the weight, and allocates as much again."""
    begun, freed, end = threading.Event(), threading.Event(), Stager.end_part

    def late(self, *arguments):
        if threading.current_thread().name == "snapshot-io-stage":
            begun.set()
            assert freed.wait(30)
        return end(self, *arguments)

    monkeypatch.setattr(Stager, "end_part", late)
    module, optimizer = adam(300_000)
    pending = Snapshot.async_take(
        path, {"state": module, "optim": optimizer}, options=TakeOptions(staging="overlapped")
    )
    assert begun.wait(30)
    address = module.weight.data_ptr()
    module.weight.untyped_storage().resize_(0)
    other = torch.full((300_000,), 2.0, device=DEVICE)
    assert other.data_ptr() != address
    freed.set()
    with pytest.raises(SnapshotError, match="changed outside"):
        pending.wait()


def test_take_of_state_that_was_offloaded_and_brought_back_saves_the_new_values(tmp_path):
    """The same names, in other memory, as an offloading trainer leaves them."""
    state = StateDict(weight=torch.full((100_000,), 1.0, device=DEVICE))
    Snapshot.take(str(tmp_path / "1"), {"state": state})
    host = state["weight"].cpu()
    del state["weight"]
    gc.collect()
    other = torch.full((100_000,), 9.0, device=DEVICE)
    state["weight"] = (host + 1).to(DEVICE)
    Snapshot.async_take(str(tmp_path / "2"), {"state": state}).wait()
    assert set(read(str(tmp_path / "2"), "weight").tolist()) == {2.0}
    del other


# 4: streams


def test_take_includes_work_of_another_stream_once_it_is_joined(path):
    tensor = torch.zeros(200_000, device=DEVICE)
    side = torch.Stream(device=DEVICE)
    side.wait_stream(torch.accelerator.current_stream())
    with side:
        fill(tensor, 5.0)
    torch.accelerator.current_stream().wait_stream(side)
    Snapshot.take(path, {"state": StateDict(tensor=tensor)})
    assert set(read(path, "tensor").tolist()) == {5.0}


def test_async_take_on_a_side_stream_includes_the_work_of_that_stream(path):
    tensor = torch.zeros(200_000, device=DEVICE)
    side = torch.Stream(device=DEVICE)
    side.wait_stream(torch.accelerator.current_stream())
    with side:
        fill(tensor, 6.0)
        pending = Snapshot.async_take(path, {"state": StateDict(tensor=tensor)})
        fill(tensor, 7.0)
    pending.wait()
    side.synchronize()
    assert set(read(path, "tensor").tolist()) == {6.0}


@pytest.mark.timeout(600)
def test_async_take_saves_all_tensors_from_one_moment(tmp_path):
    """Each tensor is filled with the step's number; the next step begins at once."""
    tensors = {str(i): torch.zeros(size, device=DEVICE) for i, size in enumerate([5, 1000, 300_000, 2_000_000])}
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1, device=DEVICE))])
    pending = []

    def check(left):
        while len(pending) > left:
            step, take = pending.pop(0)
            take.wait()
            for name in tensors:
                found = read(take.path, name)
                assert found.min() == found.max() == step
            Snapshot(take.path).delete()

    for step in range(1, 13 if FAKE else 1001):
        for tensor in tensors.values():
            fill(tensor, float(step), 1_000_000)
        staging = ("blocking", "overlapped")[step % 2]
        app = {"state": StateDict(tensors), "optim": optimizer}
        take = Snapshot.async_take(str(tmp_path / f"{step}"), app, options=TakeOptions(staging=staging, durable=False))
        pending.append((step, take))
        for tensor in tensors.values():
            fill(tensor, -1.0, 1_000_000)
        check(2)
    check(0)
    torch.accelerator.synchronize()


def test_on_stream_in_several_threads_keeps_the_current_stream_of_each(path):
    """Each enters and leaves it while others are inside."""
    side, wrong = torch.Stream(device=DEVICE), []

    def work():
        own = torch.Stream(device=DEVICE)
        with on_stream(own):
            for _ in range(300):
                with on_stream(side):
                    if torch.accelerator.current_stream().stream_id != side.stream_id:
                        wrong.append("inside")
                if torch.accelerator.current_stream().stream_id != own.stream_id:
                    wrong.append("outside")

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


# 5: pinned memory


def many(total, seed=0):
    """Tensors of odd sizes, small and large."""
    sizes = np.random.default_rng(seed).integers(1, 4 * MiB, size=total // (2 * MiB))
    return {str(i): torch.arange(size // 4 + 1, device=DEVICE, dtype=torch.int32) for i, size in enumerate(sizes)}


@only_fake
@pytest.mark.parametrize("worker", ["thread", "process"])
@pytest.mark.parametrize("budget", [16 * MiB, 64 * MiB])
def test_pinned_memory_stays_within_memory_budget_bytes(path, budget, worker):
    tensors = many(160 * MiB)
    app = {"state": StateDict(tensors)}
    Snapshot.async_take(path, app, options=TakeOptions(memory_budget_bytes=budget, worker=worker, durable=False)).wait()
    restored = {"state": StateDict({name: torch.zeros_like(tensor) for name, tensor in tensors.items()})}
    Snapshot(path).restore(restored, options=RestoreOptions(memory_budget_bytes=budget))
    for name, tensor in tensors.items():
        assert torch.equal(restored["state"][name].cpu(), tensor.cpu())
    counts = extension.counts()
    assert 0 < counts["most_registered_bytes"] <= budget + SPARE
    assert counts.get("pinned_allocations", 0) == 0
    assert counts["registrations"] <= 12
    assert release_memory() > 0
    assert extension.counts()["registered_bytes"] == 0


@only_fake
def test_pinned_memory_is_reused_by_a_second_take(tmp_path):
    app = {"state": StateDict(many(32 * MiB))}
    Snapshot.async_take(str(tmp_path / "1"), app).wait()
    before = extension.counts()["registrations"]
    Snapshot.async_take(str(tmp_path / "2"), app).wait()
    assert extension.counts()["registrations"] == before


@only_fake
@pytest.mark.parametrize("worker", ["thread", "process"])
def test_pinned_memory_refused_by_the_driver_is_logged_and_async_take_still_works(path, worker, caplog):
    extension.refuse_pin()
    tensors = many(8 * MiB)
    Snapshot.async_take(path, {"state": StateDict(tensors)}, options=TakeOptions(worker=worker)).wait()
    assert caplog.text.count("cannot pin") == 1
    assert pinned_bytes() == 0
    for name, tensor in tensors.items():
        assert torch.equal(read(path, name), tensor.cpu())


@only_fake
def test_pinned_memory_of_torch_is_used_without_cuda_host_register(path, monkeypatch):
    monkeypatch.delattr(torch.fakedev, "cudart")
    tensor = torch.randn(100_000, device=DEVICE)
    Snapshot.take(path, {"state": StateDict(tensor=tensor)})
    assert extension.counts()["pinned_allocations"] == 1
    assert torch.equal(read(path, "tensor"), tensor.cpu())
    assert release_memory() >= GRAIN


def test_pinned_memory_is_left_alone_by_a_forked_child(path):
    tensor = torch.randn(100_000, device=DEVICE)
    Snapshot.take(path, {"state": StateDict(tensor=tensor)})
    before = pinned_bytes()
    assert before > 0
    child = os.fork()
    if child == 0:
        code = 1
        with contextlib.suppress(BaseException):
            release_memory()
            gc.collect()
            code = 0 if pinned_bytes() == 0 else 2
        os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    assert pinned_bytes() == before
    Snapshot.take(path, {"state": StateDict(tensor=tensor)}, overwrite=True)
    assert torch.equal(read(path, "tensor"), tensor.cpu())


def test_pinned_memory_released_in_a_forked_child_does_not_unmap_its_own_memory(path):
    """The range of a pinned segment is free in the child, and its own memory may be there."""
    slot = arena().take(8 * MiB, pinning=Pinning(torch.device(DEVICE, 0), 64 * MiB, 64 * MiB))
    assert slot.pinned
    slot.tensor.fill_(1)
    child = os.fork()
    if child == 0:
        if any(slot.view[::4096]):  # it would have a copy of each pinned page
            os._exit(99)
        own = [mmap.mmap(-1, 4 * MiB) for _ in range(64)]
        for each in own:
            each.write(bytes(4 * MiB))
        release_memory()
        del slot
        gc.collect()
        os._exit(sum(each[MiB] for each in own))  # a hole would end it by a signal
    assert os.waitpid(child, 0)[1] == 0
    arena().give(slot)


@only_fake
def test_pinned_memory_is_unregistered_after_an_interrupt(monkeypatch):
    real = torch.fakedev.cudart()

    def slowly(*arguments):
        _thread.interrupt_main()
        time.sleep(0.3)
        return real.cudaHostRegister(*arguments)

    slow = types.SimpleNamespace(cudaHostRegister=slowly, cudaHostUnregister=real.cudaHostUnregister)
    monkeypatch.setattr(torch.fakedev, "cudart", lambda: slow)
    own = Arena(keep=1 << 30)
    with pytest.raises(KeyboardInterrupt):
        own.take(MiB, pinning=Pinning(torch.device(DEVICE, 0), 64 * MiB, 64 * MiB))
    assert extension.counts()["registrations"] == 1
    assert extension.counts()["registered_bytes"] == 0


@only_fake
def test_pinned_memory_is_registered_again_after_a_busy_driver(monkeypatch):
    real, answers = torch.fakedev.cudart(), [900]

    def busy(*arguments):
        return answers.pop() if answers else real.cudaHostRegister(*arguments)

    module = types.SimpleNamespace(cudaHostRegister=busy, cudaHostUnregister=real.cudaHostUnregister)
    monkeypatch.setattr(torch.fakedev, "cudart", lambda: module)
    own, pinning = Arena(keep=1 << 30), Pinning(torch.device(DEVICE, 0), 64 * MiB, 64 * MiB)
    first = own.take(MiB, pinning=pinning)
    second = own.take(MiB, pinning=pinning)
    assert (first.pinned, second.pinned) == (False, True)
    own.give(first)
    own.give(second)
    assert own.release() > 0


@only_fake
def test_pinned_memory_that_cannot_be_unregistered_stays_mapped(monkeypatch):
    real = torch.fakedev.cudart()
    module = types.SimpleNamespace(cudaHostRegister=real.cudaHostRegister, cudaHostUnregister=lambda address: 900)
    monkeypatch.setattr(torch.fakedev, "cudart", lambda: module)
    own = Arena(keep=1 << 30)
    slot = own.take(MiB, pinning=Pinning(torch.device(DEVICE, 0), 16 * MiB, 16 * MiB))
    address = slot.segment._address
    own.give(slot)
    del slot
    assert own.release() > 0
    gc.collect()
    maps = [line.split()[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines()]
    assert any(int(begin, 16) <= address < int(end, 16) for begin, end in maps)
    assert real.cudaHostUnregister(address) == 0


@only_fake
def test_release_memory_stops_pin_ahead(path):
    arena().pin_ahead(False, Pinning(torch.device(DEVICE, 0), 2 << 30, 2 << 30))
    deadline = time.monotonic() + 30
    while not pinned_bytes() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert release_memory() > 0
    assert pinned_bytes() == 0
    assert extension.counts()["registered_bytes"] == 0


@only_fake
def test_pin_ahead_counts_the_segments_that_it_can_use():
    """Others may be in use: those that another process cannot see, for example."""
    own, device = Arena(keep=1 << 40), torch.device(DEVICE, 0)
    private = [own.take(32 * MiB, pinning=Pinning(device, 256 * MiB, 100 * MiB)) for _ in range(3)]
    own.pin_ahead(True, Pinning(device, 256 * MiB, 128 * MiB))
    slots = [own.take(32 * MiB, shared=True, pinning=Pinning(device, 256 * MiB, 128 * MiB)) for _ in range(4)]
    assert sum(slot.pinned for slot in slots) >= 3
    assert extension.counts()["registrations"] <= 6
    for slot in private + slots:
        own.give(slot)
    own.release()
    assert extension.counts()["registered_bytes"] == 0


@only_fake
@pytest.mark.parametrize("how", ["take", "async_take"])
def test_pinned_memory_of_a_small_take_or_restore_is_small(path, how):
    tensor = torch.ones(100, device=DEVICE)
    done = getattr(Snapshot, how)(path, {"state": StateDict(tensor=tensor)})
    if how == "async_take":
        done.wait()
    Snapshot(path).restore({"state": StateDict(tensor=tensor)})
    assert extension.counts()["most_registered_bytes"] <= 2 * MiB


@only_fake
def test_pinned_memory_of_torch_is_used_by_threads_after_a_writer_process_could_not(path, monkeypatch):
    """A writer process cannot see it; later takes of threads can use it."""
    monkeypatch.delattr(torch.fakedev, "cudart")
    state = {"state": StateDict(tensor=torch.randn(100_000, device=DEVICE))}
    Snapshot.async_take(path, state, options=TakeOptions(worker="process")).wait()
    assert extension.counts().get("pinned_allocations", 0) == 0
    Snapshot.take(path, state, overwrite=True)
    assert extension.counts()["pinned_allocations"] == 1


@only_fake
def test_staged_part_that_fails_on_release_does_not_keep_other_slots(path, monkeypatch):
    tensors = {str(i): torch.ones(4 * MiB, device=DEVICE) for i in range(6)}
    failed, arrive = [], StagedPart.arrive

    def fail(self):
        arrive(self)
        failed.append(1)
        raise KeyboardInterrupt

    monkeypatch.setattr(StagedPart, "arrive", fail)
    with pytest.raises(KeyboardInterrupt):
        Snapshot.async_take(path, {"state": StateDict(tensors)})
    assert len(failed) > 2
    assert "0 in use" in repr(arena())


@only_fake
def test_async_take_interrupted_between_two_steps_releases_no_slot_too_early(path, monkeypatch):
    @contextlib.contextmanager
    def interrupted(name, **fields):
        yield
        raise KeyboardInterrupt

    monkeypatch.setattr(background_take, "span", interrupted)
    with pytest.raises(KeyboardInterrupt):
        Snapshot.async_take(path, {"state": StateDict(tensor=torch.ones(100_000, device=DEVICE))})
    assert extension.waiting() == 0
    assert "0 in use" in repr(arena())


def test_pinned_slots_of_any_size_do_not_overlap_and_are_returned():
    own = Arena(keep=1 << 40)
    pinning = Pinning(torch.device(DEVICE, 0), 48 * MiB, 1 << 40)
    generator = np.random.default_rng(1)
    held = []
    for number in range(300):
        if held and generator.random() < 0.5:
            slot, value = held.pop(generator.integers(len(held)))
            assert slot.tensor.min() == slot.tensor.max() == value
            own.give(slot)
        if sum(slot.size for slot, _ in held) < 40 * MiB:
            slot = own.take(int(generator.integers(1, 8 * MiB)), shared=bool(number % 2), pinning=pinning)
            slot.tensor.fill_(number % 251)
            held.append((slot, number % 251))
        assert sum(segment.size for segment in own._segments if segment.pinned) <= 48 * MiB + SPARE
    assert any(slot.pinned and slot.tensor.is_pinned() for slot, _ in held)
    for slot, _ in held:
        own.give(slot)
    assert own.release() > 0
    assert own.kept == 0
    assert not any(segment.pinned for segment in own._segments)


def test_pinned_memory_is_allocated_on_the_numa_node_of_the_device(tmp_path, monkeypatch):
    class Properties:
        pci_domain_id, pci_bus_id, pci_device_id = 0, 0x3B, 0

    node = tmp_path / "0000:3b:00.0" / "numa_node"
    node.parent.mkdir()
    node.write_text("0\n")
    monkeypatch.setattr(pins, "PCI_DEVICES", tmp_path)
    module = torch.get_device_module(DEVICE)
    monkeypatch.setattr(module, "get_device_properties", lambda device: Properties, raising=False)
    assert pins.find_numa_node(torch.device(DEVICE, 0)) == 0
    node.write_text("-1\n")
    assert pins.find_numa_node(torch.device(DEVICE, 0)) == -1
    monkeypatch.delattr(module, "get_device_properties")
    assert pins.find_numa_node(torch.device(DEVICE, 0)) == -1


# 6: collectives


@only_cuda
def test_take_between_running_nccl_collectives(path, tmp_path):
    import torch.distributed as dist

    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("nccl", store=store, rank=0, world_size=1)
    try:
        tensor, other = torch.ones(1 << 24, device=DEVICE), torch.ones(1 << 24, device=DEVICE)
        work = [dist.all_reduce(other, async_op=True) for _ in range(20)]
        pending = Snapshot.async_take(path, {"state": StateDict(tensor=tensor)})
        work += [dist.all_reduce(other, async_op=True) for _ in range(20)]
        pending.wait()
        for each in work:
            each.wait()
    finally:
        dist.destroy_process_group()
    assert set(read(path, "tensor").unique().tolist()) == {1.0}


# 7, 9: no memory of the device is allocated, for any layout


def strange(seed=0):
    """Tensors of all kinds of strides."""
    generator = torch.Generator().manual_seed(seed)
    base = torch.randn(700, 300, generator=generator).to(DEVICE)
    image = torch.randn(4, 6, 20, 30, generator=generator).to(DEVICE)
    wide = torch.randn(60, 50, dtype=torch.complex64, generator=generator).to(DEVICE)
    return {
        "transposed": base.t(),
        "rows": base[::3],
        "columns": base[:, ::7],
        "one column": base[:, 5],
        "inner": base[10:600, 20:200],
        "expanded": base[:1].expand(50, 300),
        "both ways": base[:50, :1].expand(50, 40),
        "channels last": image.to(memory_format=torch.channels_last),
        "permuted": image.permute(3, 0, 2, 1),
        "windows": base.as_strided((6990, 100), (30, 1)),
        "conjugate": wide.conj(),
        "conjugate transposed": wide.conj().t(),
        "imaginary of a conjugate": wide.conj().imag,
        "imaginary": wide.imag,
        "half": base.half().t(),
        "bool": (base > 0).t(),
        "float8": base.to(torch.float8_e4m3fn).view(300, 700).t(),
        "no dimension": base[3, 4],
        "empty": base[:0],
        "one": base[2:3, 3:4],
        "overlapping": torch.arange(1_300_000, device=DEVICE).as_strided((600, 600), (1000, 1000)),
        "large transposed": torch.arange(3_000_000, dtype=torch.int32, device=DEVICE).view(1000, 3000).t(),
        "far columns": torch.arange(3_000_000, dtype=torch.int32, device=DEVICE).view(1000, 3000)[:, ::1500],
    }


def bits(tensor):
    plain = tensor.resolve_conj().resolve_neg().contiguous()
    return plain.view(torch.uint8) if plain.dim() else plain.reshape(1).view(torch.uint8)


@pytest.mark.parametrize("how", ["take", "async_take", "parts"])
def test_take_of_tensors_of_any_layout_is_exact_and_allocates_no_device_memory(path, how):
    tensors = strange()
    # An element of each size before the others, so that tensors begin at odd places, too.
    tensors |= {f"odd {i}": torch.ones(i, dtype=torch.uint8, device=DEVICE) for i in (1, 3, 7)}
    expected = {name: tensor.cpu().clone() for name, tensor in tensors.items()}
    torch.accelerator.synchronize()
    if FAKE:
        extension.reset()
        held = extension.counts()["allocated_bytes"]
        extension.refuse_allocation(1)
    else:
        held = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
    app = {"state": StateDict(tensors)}
    if how == "async_take":
        Snapshot.async_take(path, app).wait()
    else:
        Snapshot.take(path, app, options=TakeOptions(memory_budget_bytes=4 * MiB if how == "parts" else None))
    peak = extension.counts()["peak_bytes"] if FAKE else torch.cuda.max_memory_allocated()
    assert peak == held
    if FAKE:
        extension.reset()
    for name, tensor in expected.items():
        assert torch.equal(bits(read(path, name)), bits(tensor)), name


@only_fake
@pytest.mark.parametrize("how", ["take", "async_take"])
def test_take_copies_small_tensors_in_one_foreach_call(path, monkeypatch, how):
    calls, copy = [], torch._foreach_copy_
    monkeypatch.setattr(torch, "_foreach_copy_", lambda *a, **k: calls.append(len(a[0])) or copy(*a, **k))
    tensors = {str(i): torch.full((i % 50 + 1,), float(i), device=DEVICE) for i in range(2000)}
    tensors |= {f"half {i}": torch.full((7, 3), float(i), device=DEVICE).half() for i in range(500)}
    tensors |= {f"step {i}": torch.tensor(float(i), device=DEVICE) for i in range(500)}
    done = getattr(Snapshot, how)(path, {"state": StateDict(tensors)})
    if how == "async_take":
        done.wait()
    assert sum(calls) == 3000
    assert len(calls) <= 16
    for name in ("0", "17", "1999", "half 0", "half 499", "step 7"):
        assert torch.equal(read(path, name), tensors[name].cpu())


@only_fake
def test_async_take_queues_the_next_copies_while_one_runs(path):
    """Each part is one copy here; the stream must never be empty between two of them."""
    tensor = torch.zeros(24 * MiB, dtype=torch.uint8, device=DEVICE)
    Snapshot.async_take(
        path, {"state": StateDict(tensor=tensor)}, options=TakeOptions(memory_budget_bytes=64 * MiB)
    ).wait()
    assert extension.counts()["most_waiting"] >= 2


# Digests on the device


class HostDigests(device_digest.DeviceDigests):
    """Digests of the fake accelerator's memory, which Triton cannot reach."""

    def launch(self):
        torch.accelerator.current_stream().synchronize()
        self.found = []
        for address, nbytes in zip(self.addresses, self.lengths, strict=True):
            running = RunningDigest()
            running.update(memoryview(ctypes.string_at(address & ~(1 << 62), nbytes)))
            self.found.append(running.finish())

    def __init__(self, addresses, lengths, scratch, device):
        assert scratch.is_pinned()
        assert scratch.numel() >= device_digest.scratch_bytes(lengths)
        self.addresses, self.lengths = addresses, lengths

    def finish(self):
        return self.found


@pytest.fixture
def digesting(monkeypatch):
    """The accelerator digests tensors of any size. What it digests is counted."""
    extents = []

    class Counted(HostDigests if FAKE else device_digest.DeviceDigests):
        def __init__(self, addresses, lengths, scratch, device):
            super().__init__(addresses, lengths, scratch, device)
            extents.extend(lengths)

    monkeypatch.setattr(staging, "WORTH", 1)
    for module in (digests, device_fills):
        monkeypatch.setattr(module, "WORTH", 1)
    monkeypatch.setattr(device_digest, "DeviceDigests", Counted)
    if FAKE:
        monkeypatch.setattr(device_digest, "is_usable", lambda device: True)
    return extents


def mixed():
    """Tensors that the device can digest, and some that it cannot."""
    tensors = {str(i): torch.randn(size, device=DEVICE) for i, size in enumerate([0, 1, 60, 61, 70_000, 3_000_000])}
    tensors["strided"] = torch.randn(300, 200, device=DEVICE).t()
    tensors["host"] = torch.randn(1000)
    tensors["odd"] = torch.arange(300, dtype=torch.int16, device=DEVICE)[1:]
    return tensors


@pytest.mark.parametrize("budget", [None, 8 * MiB])
@pytest.mark.parametrize("how", ["take", "async_take"])
def test_device_digests_are_computed_by_take(path, digesting, how, budget):
    tensors = mixed()
    fill(tensors["5"], 4.0)
    done = getattr(Snapshot, how)(path, {"state": StateDict(tensors)}, options=TakeOptions(memory_budget_bytes=budget))
    for tensor in tensors.values():
        tensor.fill_(0)
    if how == "async_take":
        done.wait()
    assert len(digesting) >= 6
    assert 12_000_000 <= sum(digesting) <= 12_300_000
    assert Snapshot(path).verify()
    assert set(read(path, "5").unique().tolist()) == {4.0}
    release_memory()


def damage(path, at):
    """Change a byte in the middle of the longest data file."""
    file = max(Path(path).glob("data/*.safetensors"), key=lambda each: each.stat().st_size)
    with file.open("r+b") as opened:
        opened.seek(int(file.stat().st_size * at))
        byte = opened.read(1)
        opened.seek(-1, os.SEEK_CUR)
        opened.write(bytes([byte[0] ^ 1]))


@pytest.mark.parametrize("budget", [None, 2 * MiB])
def test_device_digests_verify_a_restore(path, digesting, budget):
    tensors = mixed()
    fill(tensors["5"], 4.0)
    Snapshot.take(path, {"state": StateDict(tensors)})
    digesting.clear()
    live = StateDict({name: torch.zeros_like(tensor) for name, tensor in tensors.items()})
    Snapshot(path).restore({"state": live}, options=RestoreOptions(memory_budget_bytes=budget))
    assert 12_000_000 <= sum(digesting) <= 12_600_000
    for name, tensor in tensors.items():
        assert torch.equal(live[name].cpu(), tensor.cpu()), name
    damage(path, 0.5)
    with pytest.raises(CorruptSnapshotError, match=r"state/5: .*digest must be xxh3:\w+, got xxh3:"):
        Snapshot(path).restore({"state": live}, options=RestoreOptions(memory_budget_bytes=budget))
    release_memory()


@only_fake
@pytest.mark.parametrize("where", ["launch", "finish"])
def test_device_digests_that_fail_in_a_restore_fall_back_to_the_host(path, digesting, monkeypatch, caplog, where):
    tensors = mixed()
    fill(tensors["5"], 4.0)
    Snapshot.take(path, {"state": StateDict(tensors)})

    def fail(self):
        raise RuntimeError("no")

    monkeypatch.setattr(HostDigests, where, fail)
    live = StateDict({name: torch.zeros_like(tensor) for name, tensor in tensors.items()})
    Snapshot(path).restore({"state": live})
    assert "the host computes the digests: no" in caplog.text
    assert all(torch.equal(live[name].cpu(), tensor.cpu()) for name, tensor in tensors.items())
    damage(path, 0.5)
    with pytest.raises(CorruptSnapshotError, match="state/5"):
        Snapshot(path).restore({"state": live})


@only_fake
def test_device_digests_find_a_byte_changed_on_the_way_to_the_host(path, digesting, monkeypatch):
    tensor = torch.zeros(1_000_000, device=DEVICE)
    end = Stager.end_part

    def flip(self, file, part, staged):
        end(self, file, part, staged)
        memoryview(staged.shares(file, part)[0]).cast("B")[99] ^= 1

    monkeypatch.setattr(Stager, "end_part", flip)
    Snapshot.take(path, {"state": StateDict(tensor=tensor)})
    assert not Snapshot(path).verify()


@only_fake
@pytest.mark.parametrize("how", ["take", "async_take"])
def test_device_digests_memory_is_released_if_take_fails(path, digesting, monkeypatch, how):
    def fail(*arguments):
        raise RuntimeError("in the middle")

    monkeypatch.setattr(Stager, "begin_part", fail)
    with pytest.raises(Exception, match="in the middle"):
        getattr(Snapshot, how)(path, {"state": StateDict(mixed())})
    assert digesting
    assert "0 in use" in repr(arena())


@only_fake
@pytest.mark.parametrize("where", ["launch", "finish"])
def test_device_digests_that_fail_in_a_take_fall_back_to_the_host(path, digesting, monkeypatch, caplog, where):
    def fail(self):
        raise RuntimeError("no")

    monkeypatch.setattr(HostDigests, where, fail)
    Snapshot.take(path, {"state": StateDict(mixed())})
    assert "the host computes the digests: no" in caplog.text
    assert Snapshot(path).verify()


# 8: restore in place


def rated(rate, *, capturable=True, betas=(0.5, 0.75)):
    """An optimizer with a learning rate that is a tensor, and its model."""
    model = torch.nn.Module()
    model.weight = torch.nn.Parameter(torch.ones(4, device=DEVICE))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, capturable=capturable, foreach=False)
    optimizer.param_groups[0] |= {"lr": rate, "betas": betas}
    return model, optimizer


@pytest.mark.parametrize("wrap", [lambda model, optimizer: {"o": optimizer}, lambda *both: {"o": ModelState(*both)}])
def test_restore_of_optimizer_options_that_are_tensors_keeps_their_memory(path, wrap):
    """A captured graph reads the learning rate from there, and a scheduler writes to it."""
    rate, beta = torch.tensor(0.25, device=DEVICE), torch.tensor(0.5, device=DEVICE)
    both = rated(rate, betas=(beta, 0.75))
    Snapshot.take(path, wrap(*both))
    rate.fill_(0.125)
    beta.fill_(0.1)
    Snapshot(path).restore(wrap(*both))
    group = both[1].param_groups[0]
    assert group["lr"] is rate
    assert group["betas"][0] is beta
    assert (rate.item(), beta.item(), group["betas"][1]) == (0.25, 0.5, 0.75)


@pytest.mark.parametrize("capturable", [False, True])
def test_restore_of_optimizer_options_that_shared_memory_gives_each_its_value(path, capturable):
    rates = [torch.tensor(value, device=DEVICE) for value in (0.25, 0.5)]
    saved = [rated(rate, capturable=capturable)[1] for rate in rates]
    Snapshot.take(path, dict(zip("ab", saved, strict=True)))
    rate = torch.tensor(0.75, device=DEVICE)
    live = [rated(rate, capturable=capturable)[1] for _ in range(2)]
    Snapshot(path).restore(dict(zip("ab", live, strict=True)))
    found = [each.param_groups[0]["lr"] for each in live]
    assert [each.item() for each in found] == [0.25, 0.5]
    assert all(each.device.type == DEVICE for each in found)
    assert (found[0] is rate) is capturable


def test_restore_of_an_optimizer_option_that_is_a_parameter_does_not_overwrite_it(path):
    model, optimizer = rated(torch.tensor(0.25, device=DEVICE))
    optimizer.param_groups[0]["anchor"] = torch.full((4,), 5.0, device=DEVICE)
    Snapshot.take(path, {"m": model, "o": optimizer})
    model.weight.data.fill_(9.0)
    optimizer.param_groups[0]["anchor"] = model.weight.detach()
    Snapshot(path).restore({"m": model, "o": optimizer})
    assert set(model.weight.tolist()) == {1.0}
    assert set(optimizer.param_groups[0]["anchor"].tolist()) == {5.0}


@pytest.mark.parametrize("view", [torch.conj, torch._neg_view])
def test_restore_into_a_conj_or_neg_view(path, view):
    values = torch.randn(300, dtype=torch.complex64)
    Snapshot.take(path, {"state": StateDict(x=values, y=torch.ones(3))})
    live = StateDict(x=view(torch.zeros(300, dtype=torch.complex64, device=DEVICE)), y=torch.zeros(3, device=DEVICE))
    Snapshot(path).restore({"state": live})
    assert torch.equal(live["x"].resolve_conj().resolve_neg().cpu(), values)
    assert set(live["y"].tolist()) == {1.0}


def test_restore_refuses_tensors_that_share_memory(path):
    values = torch.arange(1000.0)
    Snapshot.take(path, {"state": StateDict(x=values, y=torch.ones(1000), z=values.clone())})
    memory = torch.zeros(1500, device=DEVICE)
    with pytest.raises(RestoreError, match="share memory in the application"):
        Snapshot(path).restore({"state": StateDict(x=memory[:1000], y=memory[500:], z=torch.zeros(1000))})
    assert not memory.any()
    live = StateDict(x=memory[:1000], y=torch.zeros(1000, device=DEVICE), z=memory[:1000])
    Snapshot(path).restore({"state": live})  # these have the same bytes
    assert torch.equal(live["z"].cpu(), values)


def test_restore_refuses_strided_tensors_that_share_some_elements(path):
    Snapshot.take(path, {"state": StateDict(x=torch.ones(6, 6), y=torch.zeros(6, 6))})
    memory = torch.full((8, 12), 7.0, device=DEVICE)
    for view in (memory[1:7, 1:7], memory.t()[:6, :6], memory[:6, 1::2]):
        with pytest.raises(RestoreError, match="share memory in the application"):
            Snapshot(path).restore({"state": StateDict(x=memory[:6, :6], y=view)}, options=RestoreOptions(atomic=True))
    assert set(memory.flatten().tolist()) == {7.0}
    for x, y in [(memory[:6, 0::2], memory[:6, 1::2]), (memory[:6, :6], memory[:6, 6:])]:
        memory.fill_(7.0)
        Snapshot(path).restore({"state": StateDict(x=x, y=y)})
        assert (set(x.flatten().tolist()), set(y.flatten().tolist())) == ({1.0}, {0.0})


def test_restore_of_a_single_element_of_any_stride(path):
    Snapshot.take(path, {"state": StateDict(x=torch.full((1,), 2.0))})
    live = StateDict(x=torch.zeros(4, 3, device=DEVICE)[0:1, 0])
    Snapshot(path).restore({"state": live})
    assert live["x"].tolist() == [2.0]


@pytest.mark.parametrize("budget", [MiB, None])
def test_read_object_with_a_tensor_map_that_skips_whole_parts_copies_none_of_them(path, budget):
    whole = torch.arange(16 << 18, dtype=torch.int32).view(16, -1)
    Snapshot.take(path, {"state": StateDict(whole=whole)})
    rule = {"names": "whole -> a, b", "axes": "(n (p + q)) c -> (n p) c, (n q) c"}
    half = TensorMap([rule], sizes={"p": 1, "q": 1})
    out = torch.zeros(8, 8, dtype=torch.int32, device=DEVICE)
    box = [slice(0, 8), slice(0, 8)]
    Snapshot(path).read_object("0/state/a", out, box=box, map=half, memory_budget_bytes=budget)
    assert torch.equal(out.cpu(), whole[::2, :8])


@pytest.mark.parametrize("dtype", [torch.float32, torch.int16])
def test_take_of_an_empty_device_tensor_beside_host_tensors(path, dtype):
    state = StateDict(a=torch.arange(43, dtype=torch.uint8), b=torch.empty(0, 3, dtype=dtype, device=DEVICE))
    Snapshot.take(path, {"state": state})
    assert read(path, "b").shape == (0, 3)
    assert torch.equal(read(path, "a"), state["a"])


def test_restore_keeps_data_pointers_and_stream_order(path):
    tensor = torch.randn(3_000_000, device=DEVICE)
    expected = tensor.cpu()
    Snapshot.take(path, {"state": StateDict(tensor=tensor)})
    address = tensor.data_ptr()
    side = torch.Stream(device=DEVICE)
    side.wait_stream(torch.accelerator.current_stream())
    with side:
        fill(tensor, 1.0)  # still waits when the restore begins
        Snapshot(path).restore({"state": StateDict(tensor=tensor)})
        copied = torch.empty(tensor.shape).pin_memory()
        copied.copy_(tensor, non_blocking=True)
        side.synchronize()
    assert tensor.data_ptr() == address
    assert torch.equal(copied, expected)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("size", [1000, 300_000])
def test_restore_from_dcp_files_waits_for_queued_device_work(path, size, own):
    """Each tensor is an archive in DCP's files: its place is known once the archive was opened."""
    dcp.save(
        {"state": {"w": torch.full((size,), 3.0), "v": torch.full((size,), 4.0)}}, checkpoint_id=path, no_dist=True
    )
    state = StateDict(w=torch.zeros(size, device=DEVICE), v=torch.zeros(size, device=DEVICE))
    side = torch.Stream(device=DEVICE)
    side.wait_stream(torch.accelerator.current_stream())
    with on_stream(side) if own else contextlib.nullcontext():
        for tensor in state.values():
            fill(tensor, -1.0)
        Snapshot(path).restore({"state": state})
    torch.accelerator.synchronize()
    assert {name: set(tensor.unique().tolist()) for name, tensor in state.items()} == {"w": {3.0}, "v": {4.0}}


@only_fake
def test_restore_uses_pinned_memory_and_copies_while_reading(path):
    tensors = {str(i): torch.randn(MiB, device=DEVICE) for i in range(8)}
    Snapshot.take(path, {"state": StateDict(tensors)})
    release_memory()
    extension.reset()
    restored = {"state": StateDict({name: torch.zeros_like(tensor) for name, tensor in tensors.items()})}
    extension.reset()
    Snapshot(path).restore(restored)
    counts = extension.counts()
    assert counts["most_registered_bytes"] > 0
    assert counts["to_device_bytes"] == 8 * 4 * MiB
    assert counts["most_waiting"] >= 1  # they were queued, not made by the host
    for name, tensor in tensors.items():
        assert torch.equal(restored["state"][name].cpu(), tensor.cpu())


def test_restore_that_fails_leaves_no_copy_running(path, monkeypatch):
    """The slot of a part is used again: none of its copies may still run."""
    tensors = {str(i): torch.randn(MiB, device=DEVICE) for i in range(16)}
    Snapshot.take(path, {"state": StateDict(tensors)})
    arrived, count = Reader._arrived, []

    def fail(self, *arguments):
        arrived(self, *arguments)
        count.append(1)
        if len(count) == 3:
            raise RuntimeError("in the middle")

    monkeypatch.setattr(Reader, "_arrived", fail)
    with pytest.raises(RuntimeError, match="in the middle"):
        Snapshot(path).restore({"state": StateDict(tensors)})


# 10: host memory that an accelerator still writes to


@pytest.mark.parametrize("how", ["take", "async_take"])
def test_take_waits_for_the_copy_of_an_offloaded_tensor(path, how):
    """CPU offloading copies on a stream that the current one does not wait for."""
    source = torch.zeros(1_000_000, device=DEVICE)
    offloaded = torch.full((1_000_000,), -1.0).pin_memory()
    side = torch.Stream(device=DEVICE)
    side.wait_stream(torch.accelerator.current_stream())
    with side:
        fill(source, 3.0)
        offloaded.copy_(source, non_blocking=True)
    done = getattr(Snapshot, how)(path, {"state": StateDict(offloaded=offloaded)})
    if how == "async_take":
        done.wait()
    assert set(read(path, "offloaded").unique().tolist()) == {3.0}


@pytest.mark.skipif(not FAKE and torch.cuda.device_count() < 2, reason="needs two devices")
def test_take_of_an_offloaded_tensor_of_another_device_than_the_current_one(path):
    other = torch.device(DEVICE, 1)
    source = torch.full((1_000_000,), 3.0, device=other)
    offloaded = torch.full((1_000_000,), -1.0).pin_memory()
    with torch.Stream(device=other):
        offloaded.copy_(source, non_blocking=True)
    Snapshot.take(path, {"state": StateDict(offloaded=offloaded)})
    assert set(read(path, "offloaded").unique().tolist()) == {3.0}


def test_restore_waits_for_a_running_copy_into_a_tied_tensor(path):
    weight = torch.full((300_000,), 3.0)
    Snapshot.take(path, {"state": StateDict(a=weight, b=weight)})
    a, b = torch.zeros(300_000), torch.zeros(300_000).pin_memory()
    source = torch.zeros(300_000, device=DEVICE)
    side = torch.Stream(device=DEVICE)
    side.wait_stream(torch.accelerator.current_stream())
    with on_stream(side):
        fill(source, -1.0)
        b.copy_(source, non_blocking=True)
    Snapshot(path).restore({"state": StateDict(a=a, b=b)})
    torch.accelerator.synchronize()
    assert set(b.unique().tolist()) == {3.0}


@pytest.mark.parametrize("how", ["restore", "read_object"])
def test_restore_waits_for_a_running_copy_into_its_target(path, how):
    live = torch.full((1_000_000,), 7.0).pin_memory()
    Snapshot.take(path, {"state": StateDict(live=live)})
    source = torch.zeros(1_000_000, device=DEVICE)
    side = torch.Stream(device=DEVICE)
    side.wait_stream(torch.accelerator.current_stream())
    with side:
        fill(source, 5.0)
        live.copy_(source, non_blocking=True)
    if how == "restore":
        Snapshot(path).restore({"state": StateDict(live=live)})
    else:
        Snapshot(path).read_object("0/state/live", live)
    torch.accelerator.synchronize()
    assert set(live.unique().tolist()) == {7.0}


def adapted():
    """Frozen layers on the device, a strided one among them, and a head that changes."""
    model = torch.nn.Module()
    model.long = torch.nn.Parameter(torch.randn(700, 600, device=DEVICE), requires_grad=False)
    model.strided = torch.nn.Parameter(torch.randn(300, 200, device=DEVICE).t(), requires_grad=False)
    model.short = torch.nn.Parameter(torch.randn(60, device=DEVICE), requires_grad=False)
    model.head = torch.nn.Parameter(torch.randn(100, device=DEVICE))
    return model


@pytest.mark.parametrize("device_digests", [False, True])
@pytest.mark.parametrize("how", ["take", "async_take"])
def test_base_shares_frozen_tensors_of_a_device(path, request, how, device_digests):
    counted = request.getfixturevalue("digesting") if device_digests else None
    model = adapted()
    base = Snapshot.take(f"{path}/a", {"m": model})
    fill(model.head.data, 3.0)
    if counted is not None:
        counted.clear()
    made = getattr(Snapshot, how)(f"{path}/b", {"m": model}, base=base)
    made = made.wait() if how == "async_take" else made
    assert made.report.shared_bytes >= model.long.nbytes
    assert made.report.written_bytes < 10_000
    if counted is not None:
        assert model.long.nbytes in counted
    assert set(made.read_object("m/head").unique().tolist()) == {3.0}
    assert made.verify()
    fill(model.long.data, 5.0)  # work under way that has not ended when the next take compares
    later = getattr(Snapshot, how)(f"{path}/c", {"m": model}, base=made)
    later = later.wait() if how == "async_take" else later
    assert later.report.shared_bytes == 0
    assert set(later.read_object("m/long").unique().tolist()) == {5.0}
    release_memory()


def test_base_with_only_trainable_omits_and_compares_frozen_tensors_of_a_device(path):
    model = adapted()
    base = Snapshot.take(f"{path}/a", {"m": model})
    made = Snapshot.take(f"{path}/b", {"m": model}, base=base, options=TakeOptions(only="trainable"))
    assert made.report.omitted_bytes == model.long.nbytes + model.strided.nbytes + model.short.nbytes
    made.restore({"m": model})
    model.strided.data[0, 0] += 1
    with pytest.raises(SnapshotError, match="strided"):
        made.restore({"m": model}, strict=False)
    fill(model.strided.data, 1.0)
    made.restore({"m": model}, options=RestoreOptions(base=base))
    made.restore({"m": model})
