"""Snapshots of what lives on an accelerator. `test_device.py` runs this in a process of its own.

`fakedev` crashes who reads its memory from the host, and shows old bytes to who does not wait for its streams.
"""

import pytest
import torch

from tests.device import fakedev

extension = fakedev.load()

import snapshot  # noqa: E402 - as below
from snapshot import (  # noqa: E402 - the device is there before the library is
    RestoreOptions,
    RNGState,
    Snapshot,
    StateDict,
    TakeOptions,
    Target,
)

MiB = 1 << 20


@pytest.fixture(autouse=True)
def counts():
    """What the device did in this test; nothing may wait in its streams when it ends."""
    torch.accelerator.synchronize()
    extension.reset()
    yield extension.counts
    assert extension.waiting() == 0


@pytest.fixture
def path(tmp_path):
    return str(tmp_path / "run")


def model(seed=0, device="fakedev"):
    torch.manual_seed(seed)
    return torch.nn.Sequential(
        torch.nn.Linear(16, 32), torch.nn.BatchNorm1d(32), torch.nn.ReLU(), torch.nn.Linear(32, 4)
    ).to(device)


def train(network, optimizer, steps=3, seed=0):
    """Some steps; the losses."""
    generator = torch.Generator().manual_seed(seed)
    losses = []
    for _ in range(steps):
        device = next(network.parameters()).device
        batch = torch.randn(8, 16, generator=generator).to(device)
        optimizer.zero_grad()
        loss = (network(batch) - 1).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def on_host(state):
    """A copy of every tensor of a state dict, to compare with."""
    if isinstance(state, dict):
        return {key: on_host(value) for key, value in state.items()}
    if isinstance(state, list):
        return [on_host(value) for value in state]
    return state.detach().cpu().clone() if isinstance(state, torch.Tensor) else state


def assert_same(a, b):
    torch.testing.assert_close(on_host(a), on_host(b), rtol=0, atol=0, equal_nan=True)


# The device itself


def test_fakedev_trains_modules_with_adamw():
    network = model()
    optimizer = torch.optim.AdamW(network.parameters(), lr=0.05)
    losses = train(network, optimizer, steps=20)
    assert losses[-1] < losses[0] / 2
    assert {parameter.device for parameter in network.parameters()} == {torch.device("fakedev:0")}
    state = optimizer.state[network[0].weight]
    assert state["exp_avg"].device == torch.device("fakedev:0")


def test_fakedev_tensors_cannot_be_read_by_the_host():
    tensor = torch.ones(3, device="fakedev")
    with pytest.raises(TypeError, match="can't convert fakedev:0 device type tensor to numpy"):
        tensor.numpy()
    assert not tensor.is_cpu


def test_fakedev_copies_wait_in_their_stream(counts):
    source, target = torch.arange(6.0, device="fakedev"), torch.zeros(6, pin_memory=True)
    side = torch.Stream(device="fakedev")
    with side:
        target.copy_(source, non_blocking=True)
    assert (extension.waiting(), target.sum().item()) == (1, 0)
    done = side.record_event()
    torch.accelerator.current_stream().wait_event(done)
    torch.accelerator.synchronize()
    assert (extension.waiting(), target.tolist()) == (0, [0, 1, 2, 3, 4, 5])
    assert counts()["to_host"] == 1


def test_fakedev_can_refuse_an_allocation():
    extension.refuse_allocation(2)
    torch.empty(1, device="fakedev")
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(1, device="fakedev")
    torch.empty(1, device="fakedev")


# Snapshots of what lives there


def test_restore_of_a_model_and_optimizer_on_a_device(path):
    network = model(seed=1)
    optimizer = torch.optim.AdamW(network.parameters())
    train(network, optimizer)
    Snapshot.take(path, {"model": network, "optim": optimizer})
    saved = on_host({"model": network.state_dict(), "optim": optimizer.state_dict()})
    after = train(network, optimizer, seed=1)

    other = model(seed=2)
    fresh = torch.optim.AdamW(other.parameters())
    before = {name: parameter.data_ptr() for name, parameter in other.named_parameters()}
    Snapshot(path).restore({"model": other, "optim": fresh})
    assert_same({"model": other.state_dict(), "optim": fresh.state_dict()}, saved)
    assert {name: parameter.data_ptr() for name, parameter in other.named_parameters()} == before
    assert fresh.state[other[0].weight]["exp_avg"].device == torch.device("fakedev:0")
    assert train(other, fresh, seed=1) == after


@pytest.mark.parametrize(("taken", "restored"), [("fakedev", "cpu"), ("cpu", "fakedev"), ("fakedev:0", "fakedev:1")])
def test_restore_on_another_device(path, taken, restored):
    network = model(seed=1, device=taken)
    optimizer = torch.optim.AdamW(network.parameters())
    train(network, optimizer)
    Snapshot.take(path, {"model": network, "optim": optimizer})

    other = model(seed=2, device=restored)
    fresh = torch.optim.AdamW(other.parameters())
    Snapshot(path).restore({"model": other, "optim": fresh})
    assert {tensor.device.type for tensor in other.state_dict().values()} == {torch.device(restored).type}
    assert_same(other.state_dict(), network.state_dict())
    assert_same(fresh.state_dict(), optimizer.state_dict())
    train(other, fresh)


TENSORS = {
    "plain": lambda: torch.randn(1000),
    "bfloat16": lambda: torch.randn(64, 3).to(torch.bfloat16),
    "int64": lambda: torch.arange(-5, 5),
    "bool": lambda: torch.tensor([True, False, True]),
    "scalar": lambda: torch.tensor(2.5),
    "empty": lambda: torch.empty(0, 3),
    "transposed": lambda: torch.randn(30, 20).t(),
    "strided": lambda: torch.randn(40, 20)[::2, 1::3],
    "channels_last": lambda: torch.randn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
    "expanded": lambda: torch.randn(1, 7).expand(5, 7),
    "complex": lambda: torch.randn(9, dtype=torch.complex64),
    "conjugate": lambda: torch.randn(9, dtype=torch.complex64).conj(),
    "nan": lambda: torch.tensor([float("nan"), -0.0, float("inf")]),
}


def placed(tensor):
    """The tensor on the device, laid out as it is here."""
    if tensor.is_conj():
        return tensor.conj().to("fakedev").conj()
    base = torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage())
    return base.to("fakedev").as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


@pytest.mark.parametrize("kind", TENSORS)
def test_restore_of_a_device_tensor_of_any_layout_is_exact(path, kind):
    torch.manual_seed(0)
    tensor = TENSORS[kind]()
    there = placed(tensor)
    assert there.stride() == tensor.stride()
    Snapshot.take(path, {"state": StateDict(tensor=there)})
    state = StateDict(tensor=torch.zeros(tensor.shape, dtype=tensor.dtype, device="fakedev"))
    Snapshot(path).restore({"state": state})
    assert state["tensor"].device == torch.device("fakedev:0")
    assert_same(state["tensor"].resolve_conj(), tensor.resolve_conj())


def test_take_of_tensors_of_two_devices_and_the_host(path):
    devices = ["fakedev:0", "fakedev:1", "cpu"]
    Snapshot.take(path, {"state": StateDict({str(i): torch.full((100,), i, device=d) for i, d in enumerate(devices)})})
    state = StateDict({str(i): torch.zeros(100, dtype=torch.int64, device=d) for i, d in enumerate(devices)})
    Snapshot(path).restore({"state": state})
    for i, device in enumerate(devices):
        assert state[str(i)].device == torch.device(device)
        assert state[str(i)].tolist() == [i] * 100


def test_take_copies_tied_weights_of_a_device_once(path, counts):
    weight = torch.randn(256, 256, device="fakedev")
    Snapshot.take(path, {"state": StateDict(a=weight, b=weight)})
    assert weight.nbytes <= counts()["to_host_bytes"] < 1.5 * weight.nbytes


def test_take_and_restore_copy_each_byte_once_and_allocate_no_device_memory(path, counts):
    tensors = {str(i): torch.randn(64, 1024, device="fakedev") for i in range(8)}
    nbytes = sum(tensor.nbytes for tensor in tensors.values())
    extension.reset()
    held = counts()["allocated_bytes"]
    Snapshot.take(path, {"state": StateDict(tensors)})
    assert counts()["to_host_bytes"] == nbytes
    assert counts()["peak_bytes"] == held
    extension.reset()
    Snapshot(path).restore({"state": StateDict(tensors)})
    assert counts()["to_device_bytes"] == nbytes
    assert counts().get("to_host_bytes", 0) == 0
    assert counts()["peak_bytes"] == held


def test_take_and_restore_copy_a_tensor_larger_than_memory_budget_bytes_in_parts(path):
    tensor = torch.randn(10 * MiB, device="fakedev")
    Snapshot.take(path, {"state": StateDict(tensor=tensor)}, options=TakeOptions(memory_budget_bytes=16 * MiB))
    state = StateDict(tensor=torch.zeros_like(tensor))
    Snapshot(path).restore({"state": state}, options=RestoreOptions(memory_budget_bytes=16 * MiB))
    assert_same(state["tensor"], tensor)


def test_read_object_reads_to_the_host_or_into_a_device_tensor(path):
    tensor = torch.randn(100, 10, device="fakedev")
    Snapshot.take(path, {"state": StateDict(tensor=tensor)})
    read = Snapshot(path).read_object("0/state/tensor")
    assert read.device == torch.device("cpu")
    assert_same(read, tensor)
    out = torch.zeros_like(tensor)
    assert Snapshot(path).read_object("0/state/tensor", out) is out
    assert_same(out, tensor)


# Streams


def pending_copy(size=100_000, value=7.0):
    """A tensor that is to be filled, by work that still waits in the current stream."""
    tensor = torch.zeros(size, device="fakedev")
    tensor.copy_(torch.full((size,), value).pin_memory(), non_blocking=True)
    assert extension.waiting() > 0
    return tensor


@pytest.mark.parametrize("how", ["take", "async_take"])
def test_take_waits_for_work_queued_in_the_stream(path, how):
    state = StateDict(tensor=pending_copy())
    taken = getattr(Snapshot, how)(path, {"state": state})
    if how == "async_take":
        taken.wait()
    assert set(Snapshot(path).read_object("0/state/tensor").tolist()) == {7.0}


@pytest.mark.parametrize("how", ["fill", "copy"])
def test_async_take_does_not_include_changes_after_the_call(path, how):
    tensor = torch.full((300_000,), 1.0, device="fakedev")
    other = torch.full((300_000,), 2.0).pin_memory()
    pending = Snapshot.async_take(path, {"state": StateDict(tensor=tensor)})
    if how == "fill":
        tensor.fill_(2.0)
    else:
        tensor.copy_(other, non_blocking=True)
    torch.accelerator.synchronize()
    pending.wait()
    assert set(Snapshot(path).read_object("0/state/tensor").tolist()) == {1.0}
    assert set(tensor.tolist()) == {2.0}


def test_async_take_lets_training_continue(path):
    network = model()
    optimizer = torch.optim.AdamW(network.parameters())
    train(network, optimizer)
    saved = on_host({"model": network.state_dict(), "optim": optimizer.state_dict()})
    pending = Snapshot.async_take(path, {"model": network, "optim": optimizer})
    after = train(network, optimizer, seed=1)
    pending.wait()

    other = model(seed=5)
    fresh = torch.optim.AdamW(other.parameters())
    Snapshot(path).restore({"model": other, "optim": fresh})
    assert_same({"model": other.state_dict(), "optim": fresh.state_dict()}, saved)
    assert train(other, fresh, seed=1) == after


def test_async_take_several_times_at_once(tmp_path):
    tensor = torch.zeros(200_000, device="fakedev")
    pending = []
    for step in range(3):
        tensor.fill_(step)
        pending.append(Snapshot.async_take(str(tmp_path / f"{step}"), {"state": StateDict(tensor=tensor)}))
    for step, each in enumerate(pending):
        assert set(each.wait().read_object("0/state/tensor").tolist()) == {float(step)}


def test_restore_is_complete_when_it_returns(path):
    tensor = torch.randn(300_000, device="fakedev")
    Snapshot.take(path, {"state": StateDict(tensor=tensor)})
    state = StateDict(tensor=torch.zeros_like(tensor))
    with torch.Stream(device="fakedev"):  # work of the caller on any stream sees it
        Snapshot(path).restore({"state": state})
    assert extension.waiting() == 0
    assert_same(state["tensor"], tensor)


def test_take_and_restore_keep_the_current_stream_and_device(path):
    side = torch.Stream(device="fakedev")
    with side:
        Snapshot.take(path, {"state": StateDict(tensor=torch.ones(10, device="fakedev:1"))})
        assert torch.accelerator.current_stream().stream_id == side.stream_id
    assert torch.accelerator.current_device_index() == 0


# What goes wrong


def test_take_and_restore_without_device_memory_raise_and_can_be_repeated(path):
    network = model(seed=1)
    optimizer = torch.optim.AdamW(network.parameters())
    train(network, optimizer)
    Snapshot.take(path, {"model": network, "optim": optimizer})
    other = model(seed=2)
    fresh = torch.optim.AdamW(other.parameters())
    extension.refuse_allocation(1)
    with pytest.raises(Exception, match="out of memory"):
        Snapshot(path).restore({"model": other, "optim": fresh})
    Snapshot(path).restore({"model": other, "optim": fresh})
    assert_same(fresh.state_dict(), optimizer.state_dict())


def test_rng_state_restores_the_random_numbers_of_a_device(path):
    torch.manual_seed(3)
    generators = torch.fakedev.generators
    Snapshot.take(path, {"rng": RNGState()})
    expected = [torch.rand(4, generator=each) for each in generators]
    torch.manual_seed(4)
    Snapshot(path).restore({"rng": RNGState()})
    assert_same([torch.rand(4, generator=each) for each in generators], expected)


@pytest.mark.parametrize("verify", [True, False])
def test_load_reads_whole_tensors_and_parts_to_a_device(path, verify):
    held = {"long": torch.randn(3000, 700), "short": torch.arange(5), "half": torch.randn(64, 9).bfloat16()}
    Snapshot.take(path, {"model": StateDict(held)})
    Snapshot(path).convert(Target(f"{path}.safetensors", "safetensors"))
    for url in (path, f"{path}.safetensors"):
        got = snapshot.load(url, device="fakedev", verify=verify, memory_budget_bytes=4 * MiB)
        assert {each.device.type for each in got.values()} == {"fakedev"}
        assert all(torch.equal(got[name].cpu(), tensor) for name, tensor in held.items())
        plan = {"long": (slice(100, 2900), slice(3, 600)), "half": slice(1, 3), "short": 2}
        got = snapshot.load(url, device="fakedev", verify=verify, parts=plan, dtype=torch.float32)
        for name, tensor in held.items():
            part = tensor[plan[name]]
            assert torch.equal(got[name].cpu(), part.float() if part.is_floating_point() else part)
