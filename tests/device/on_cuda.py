"""Tests that need a GPU: its optimizers, compiled steps, sharding, a full memory. `test_device.py` runs this."""

import pytest
import torch
import torch.distributed as dist

from snapshot import RNGState, Snapshot, StateDict, TakeOptions
from snapshot.io.arena import release_memory
from snapshot_publish import Publisher, Subscriber

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
MiB = 1 << 20


@pytest.fixture(autouse=True)
def clean():
    torch.cuda.synchronize()
    yield
    torch.cuda.synchronize()
    release_memory()
    torch.cuda.empty_cache()


@pytest.fixture
def path(tmp_path):
    return str(tmp_path / "run")


@pytest.fixture
def group(tmp_path):
    """A group of one rank that NCCL and gloo serve, so that fully_shard makes DTensors."""
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("cpu:gloo,cuda:nccl", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def layers(count=6, width=1024):
    """A model with 4 MiB a layer."""
    torch.manual_seed(1)
    return torch.nn.Sequential(*[torch.nn.Linear(width, width, device="cuda") for _ in range(count)])


def full(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def cpu_tensors(state):
    """Return copies of all tensors of a state dict, on the host."""
    return {name: full(value).detach().cpu().clone() for name, value in state.items() if torch.is_tensor(value)}


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name].reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8)), name


# Optimizers whose kernels change parameters in ways of their own, beside a copy that is under way


OPTIMIZERS = {
    "loop": lambda p: torch.optim.AdamW(p, lr=1.0, foreach=False),
    "foreach": lambda p: torch.optim.AdamW(p, lr=1.0, foreach=True),
    "fused": lambda p: torch.optim.AdamW(p, lr=1.0, fused=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=1.0, momentum=0.9, foreach=True),
    "fused sgd": lambda p: torch.optim.SGD(p, lr=1.0, momentum=0.9, fused=True),
}


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("staging", ["blocking", "overlapped"])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_async_take_does_not_include_an_optimizer_step_after_the_call(tmp_path, request, kind, staging, sharded):
    """Steps begin at once after the call, and again before it has ended."""
    if sharded:
        if kind == "fused sgd":
            pytest.skip("torch has none for DTensors")
        request.getfixturevalue("group")
    model = layers()
    if sharded:
        from torch.distributed.fsdp import fully_shard

        for layer in model:
            fully_shard(layer)
        fully_shard(model)
    optimizer = OPTIMIZERS[kind](model.parameters())
    batch = torch.randn(64, 1024, device="cuda")

    def step():
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()

    step()
    for number in range(8):
        expected, moments = cpu_tensors(model.state_dict()), optimizer.state_dict()["state"]
        moments = {i: cpu_tensors(each) for i, each in moments.items()}
        where = str(tmp_path / str(number))
        app = {"model": model, "optim": optimizer}
        pending = Snapshot.async_take(where, app, options=TakeOptions(staging=staging, durable=False))
        step()
        step()
        pending.wait()
        fresh = layers()
        again = OPTIMIZERS[kind](fresh.parameters())
        Snapshot(where).restore({"model": fresh, "optim": again})
        assert_same(cpu_tensors(fresh.state_dict()), expected)
        found = again.state_dict()["state"]
        for index, each in moments.items():
            assert_same(cpu_tensors(found[index]), each)


@pytest.mark.parametrize("offload", [False, True])
def test_restore_of_an_fsdp2_run_continues_bit_for_bit(path, group, offload):
    """FSDP2, with parameters that are freed after the forward pass, or that live in pinned memory of the host."""
    from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

    def build():
        model = layers()
        options = {"offload_policy": CPUOffloadPolicy()} if offload else {}
        for layer in model:
            fully_shard(layer, reshard_after_forward=True, **options)
        fully_shard(model, **options)
        return model, torch.optim.AdamW(model.parameters(), lr=1e-3)

    batches = torch.randn(10, 64, 1024, device="cuda")

    def train(model, optimizer, numbers):
        losses = []
        for number in numbers:
            optimizer.zero_grad()
            loss = model(batches[number]).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses

    model, optimizer = build()
    train(model, optimizer, range(4))
    pending = Snapshot.async_take(path, {"model": model, "optim": optimizer})
    expected = train(model, optimizer, range(4, 10))
    pending.wait()
    model, optimizer = build()
    train(model, optimizer, range(1))
    addresses = [each.to_local().data_ptr() for each in model.parameters()]
    Snapshot(path).restore({"model": model, "optim": optimizer})
    assert [each.to_local().data_ptr() for each in model.parameters()] == addresses
    assert train(model, optimizer, range(4, 10)) == expected


# Compiled steps and graphs hold addresses


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_restore_of_a_compiled_run_continues_bit_for_bit(path, mode):
    model = layers(3, 512)
    compiled = torch.compile(model, mode=mode)
    optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(1e-3, device="cuda"), capturable=True)
    batches = torch.randn(12, 64, 512, device="cuda")

    def train(numbers):
        losses = []
        for number in numbers:
            optimizer.zero_grad()
            loss = compiled(batches[number]).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses

    train(range(5))
    addresses = [each.data_ptr() for each in model.parameters()]
    pending = Snapshot.async_take(
        path, {"model": compiled, "optim": optimizer}, options=TakeOptions(staging="overlapped")
    )
    expected = train(range(5, 12))
    pending.wait()
    for _ in range(2):
        Snapshot(path).restore({"model": compiled, "optim": optimizer})
        assert [each.data_ptr() for each in model.parameters()] == addresses
        assert train(range(5, 12)) == expected


def test_restore_into_the_memory_of_a_cuda_graph_continues(path):
    weight = torch.nn.Parameter(torch.zeros(1 << 20, device="cuda"))
    optimizer = torch.optim.Adam([weight], lr=0.1, capturable=True)
    weight.grad = torch.ones_like(weight)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        optimizer.step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        optimizer.step()
    module = torch.nn.ParameterList([weight])
    for _ in range(3):
        graph.replay()
    Snapshot.take(path, {"model": module, "optim": optimizer})
    for _ in range(3):
        graph.replay()
    expected = weight.detach().clone()
    for _ in range(4):
        graph.replay()
    Snapshot(path).restore({"model": module, "optim": optimizer})
    for _ in range(3):
        graph.replay()
    assert torch.equal(weight, expected)


# Memory of the device


def test_take_and_restore_on_a_full_gpu(path):
    """No more than a few MiB are free: neither a save nor a restore takes memory of the device."""
    state = {str(i): torch.full((64 * MiB // 4,), float(i), device="cuda") for i in range(16)}
    state["strided"] = torch.arange(32 * MiB // 4, device="cuda", dtype=torch.int32).view(2048, -1).t()
    expected = state["strided"].cpu()
    Snapshot.take(path + "-warm", {"state": StateDict(small=torch.ones(10, device="cuda"))})
    torch.cuda.synchronize()
    filled, size = [], 1 << 30
    while size >= 2 * MiB:
        try:
            filled.append(torch.empty(size, dtype=torch.uint8, device="cuda"))
        except torch.OutOfMemoryError:
            size //= 2
    held = torch.cuda.memory_allocated()
    for how in ("take", "async_take"):
        torch.cuda.reset_peak_memory_stats()
        done = getattr(Snapshot, how)(f"{path}-{how}", {"state": StateDict(state)}, options=TakeOptions(durable=False))
        assert torch.cuda.max_memory_allocated() <= held + MiB  # with which digests by the device are tested first
        if how == "async_take":
            done.wait()
        for i in range(16):
            state[str(i)].fill_(-1.0)
        state["strided"].zero_()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        Snapshot(f"{path}-{how}").restore({"state": StateDict(state)})
        assert torch.cuda.max_memory_allocated() <= held + 16 * MiB  # a strided tensor, by parts
        assert all((state[str(i)].min().item(), state[str(i)].max().item()) == (i, i) for i in range(4))
    del filled
    torch.cuda.empty_cache()
    assert torch.equal(state["strided"].cpu(), expected)


@pytest.mark.parametrize(
    "dtype",
    [
        torch.float8_e4m3fn,
        torch.float8_e5m2,
        torch.bfloat16,
        torch.complex64,
        torch.complex128,
        torch.bool,
        torch.int8,
        torch.uint16,
        torch.uint64,
        torch.float64,
    ],
)
def test_restore_in_place_of_every_dtype_on_a_gpu(path, dtype):
    generator = torch.Generator("cuda").manual_seed(3)
    raw = torch.randint(0, 2 if dtype is torch.bool else 256, (4096 * 64,), generator=generator, device="cuda")
    base = raw.to(torch.uint8).view(dtype).view(64, -1)
    state = {"whole": base, "row": base[3], "scalar": base[0, 0], "empty": base[:0], "columns": base[:, ::5]}
    expected = cpu_tensors({name: value.contiguous() for name, value in state.items()})
    Snapshot.take(path, {"state": StateDict({name: value.clone() for name, value in state.items()})})
    live = {name: torch.empty_like(value) for name, value in state.items()}
    wide = torch.zeros(64, base.shape[1] * 2, dtype=dtype, device="cuda")
    live["whole"] = wide[:, ::2]
    Snapshot(path).restore({"state": StateDict(live)})
    found = {name: value.contiguous().cpu() for name, value in live.items()}
    for name, tensor in expected.items():
        left, right = found[name].reshape(-1), tensor.reshape(-1)
        assert torch.equal(left.view(torch.uint8), right.view(torch.uint8)), name


def test_rng_state_restores_the_random_numbers_of_a_gpu(path):
    torch.cuda.manual_seed(5)
    torch.rand(10, device="cuda")
    Snapshot.take(path, {"rng": RNGState()})
    expected = torch.rand(1000, device="cuda")
    Snapshot(path).restore({"rng": RNGState()})
    assert torch.equal(torch.rand(1000, device="cuda"), expected)


def test_grad_scaler_is_restored(path):
    scaler = torch.amp.GradScaler("cuda", init_scale=8.0)
    weight = torch.nn.Parameter(torch.ones(10, device="cuda"))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    scaler.scale((weight * float("inf")).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    Snapshot.take(path, {"scaler": scaler, "optim": optimizer})
    fresh = torch.amp.GradScaler("cuda", init_scale=64.0)
    Snapshot(path).restore({"scaler": fresh, "optim": optimizer})
    assert fresh.state_dict() == scaler.state_dict()
    assert fresh.get_scale() == 4.0


# What else a training process does meanwhile


class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        return torch.full((1000,), index)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # a fork beside threads
def test_async_take_with_forked_data_loader_workers(path):
    state = {str(i): torch.full((16 * MiB,), float(i), device="cuda") for i in range(8)}
    pending = Snapshot.async_take(path, {"state": StateDict(state)}, options=TakeOptions(durable=False))
    loader = torch.utils.data.DataLoader(Rows(), num_workers=3, batch_size=8, pin_memory=True)
    seen = [int(each) for batch in loader for each in batch[:, 0].cuda(non_blocking=True).tolist()]
    pending.wait()
    assert seen == list(range(64))
    assert Snapshot(path).verify()
    assert set(Snapshot(path).read_object("0/state/7")[:1000].tolist()) == {7.0}


@pytest.mark.parametrize("worker", ["thread", "process"])
def test_async_take_of_a_gigabyte_is_exact_with_each_worker(path, worker):
    """Digests of the device, several segments, the writer's shared pinned memory."""
    generator = torch.Generator("cuda").manual_seed(4)
    make = lambda: torch.randint(-(2**31), 2**31, (50_000_003,), generator=generator, device="cuda", dtype=torch.int32)  # noqa: E731
    state = {str(i): make() for i in range(6)}
    Snapshot.async_take(path, {"state": StateDict(state)}, options=TakeOptions(worker=worker, durable=False)).wait()
    live = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    Snapshot(path).restore({"state": StateDict(live)})
    assert all(torch.equal(live[name], tensor) for name, tensor in state.items())
    assert Snapshot(path).verify()


def test_publisher_publishes_the_weights_of_the_moment_of_the_call(tmp_path):
    state = {"weight": torch.zeros(1 << 22, device="cuda")}
    publisher, subscriber = Publisher(str(tmp_path / "w")), Subscriber(str(tmp_path / "w"), str(tmp_path / "local"))
    for number in range(1, 6):
        state["weight"].fill_(float(number))
        published = publisher.publish(number, state)
        state["weight"].fill_(-5.0)
        published.wait()
        assert set(Snapshot(subscriber.pull()).read_object("weight").unique().tolist()) == {float(number)}
