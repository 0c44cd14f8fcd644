"""`SnapshotTransport`: what torchft's contract says, with real processes and without torchft."""

import os
import signal
import subprocess
import sys
import threading
from collections import OrderedDict
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from snapshot import CorruptSnapshotError, StorageError
from snapshot_trainers.torchft import SnapshotTransport

SECONDS = timedelta(seconds=20)


@pytest.fixture
def transport(tmp_path):
    made = SnapshotTransport(tmp_path, host="127.0.0.1")
    yield made
    made.shutdown()


def make_state():
    torch.manual_seed(3)
    model = torch.nn.Linear(6, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.rand(2, 6)).sum().backward()
    optimizer.step()
    shared = torch.rand(3, 1000)
    return {
        "user": {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "pair": (shared, shared[1])},
        "torchft": OrderedDict(step=7, batches_committed=14),
    }


def assert_same(one, other):
    assert type(one) is type(other)
    if isinstance(one, dict):
        assert list(one) == list(other)
        for key in one:
            assert_same(one[key], other[key])
    elif isinstance(one, list | tuple):
        assert len(one) == len(other)
        for left, right in zip(one, other, strict=True):
            assert_same(left, right)
    elif isinstance(one, torch.Tensor):
        assert one.dtype == other.dtype
        assert one.equal(other)
    else:
        assert one == other


def test_torchft_recv_checkpoint_returns_an_equal_state(transport):
    state = make_state()
    transport.send_checkpoint([1], 7, state, SECONDS)
    assert_same(transport.recv_checkpoint(0, transport.metadata(), 7, SECONDS), state)


def test_torchft_send_checkpoint_copies_the_state(transport):
    state = {"weight": torch.zeros(1000)}
    transport.send_checkpoint([1, 2], 1, state, SECONDS)
    transport.disallow_checkpoint()
    state["weight"].add_(1)
    assert not transport.recv_checkpoint(0, transport.metadata(), 1, SECONDS)["weight"].any()


def test_torchft_recv_checkpoint_waits_for_its_step(transport):
    transport.send_checkpoint([1], 1, {"step": 1}, SECONDS)
    found = []
    receiver = threading.Thread(
        target=lambda: found.append(transport.recv_checkpoint(0, transport.metadata(), 2, SECONDS))
    )
    receiver.start()
    transport.send_checkpoint([1], 2, {"step": 2}, SECONDS)
    receiver.join(20)
    assert found == [{"step": 2}]
    with pytest.raises(TimeoutError, match="step 1 of rank 0 timed out"):
        transport.recv_checkpoint(0, transport.metadata(), 1, timedelta(milliseconds=10))


def test_torchft_send_checkpoint_of_a_step_again_is_never_mixed(transport):
    """A receiver sees one of the two states, and no mixture."""
    sizes = [(1.0, 400), (2.0, 401)]
    stop = threading.Event()

    def send():
        while not stop.is_set():
            for value, size in sizes:
                transport.send_checkpoint([1], 5, {"a": torch.full((size,), value), "b": [value] * 3}, SECONDS)

    transport.send_checkpoint([1], 5, {"a": torch.full((400,), 1.0), "b": [1.0] * 3}, SECONDS)
    sender = threading.Thread(target=send)
    sender.start()
    try:
        for _ in range(20):
            got = transport.recv_checkpoint(0, transport.metadata(), 5, SECONDS)
            assert got["b"] == [got["a"][0].item()] * 3
            assert (got["a"].eq(got["a"][0])).all()
    finally:
        stop.set()
        sender.join()


def test_torchft_recv_checkpoint_finds_damage(transport, tmp_path):
    transport.send_checkpoint([1], 3, {"weight": torch.rand(5000)}, SECONDS)
    (file,) = tmp_path.glob("*/step-3/data/*.safetensors")
    data = bytearray(file.read_bytes())
    data[-9] ^= 1
    file.write_bytes(data)
    with pytest.raises(CorruptSnapshotError):
        transport.recv_checkpoint(0, transport.metadata(), 3, SECONDS)


def test_torchft_recv_checkpoint_without_the_secret_is_refused(transport):
    transport.send_checkpoint([1], 3, {"weight": torch.rand(5)}, SECONDS)
    address = transport.metadata().partition(" ")[0]
    with pytest.raises(StorageError, match="not signed"):
        transport.recv_checkpoint(0, f"{address} guessed", 3, timedelta(seconds=1))


def test_torchft_objects_that_need_allow_pickle_are_refused(transport, tmp_path):
    state = {"odd": Path}
    with pytest.raises(Exception, match="pickle"):
        transport.send_checkpoint([1], 1, state, SECONDS)
    other = SnapshotTransport(tmp_path, host="127.0.0.1", allow_pickle=True)
    try:
        other.send_checkpoint([1], 1, state, SECONDS)
        assert other.recv_checkpoint(0, other.metadata(), 1, SECONDS) == state
    finally:
        other.shutdown()


def test_torchft_recv_checkpoint_keeps_the_layout_of_a_dtensor(transport, tmp_path):
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    try:
        # the second of two ranks, which the first one need not know of
        mesh = DeviceMesh("cpu", [1, 0], mesh_dim_names=("dp",), _init_backend=False)
        shape, stride = torch.Size((5, 3)), (3, 1)
        sent = DTensor.from_local(torch.rand(2, 3), mesh, [Shard(0)], run_check=False, shape=shape, stride=stride)
        transport.send_checkpoint([1], 1, {"nested": [{"weight": sent}]}, SECONDS)
        got = transport.recv_checkpoint(0, transport.metadata(), 1, SECONDS)["nested"][0]["weight"]
        assert isinstance(got, DTensor)
        assert got._spec == sent._spec
        assert got.to_local().equal(sent.to_local())
    finally:
        dist.destroy_process_group()


SENDER = """
import sys, torch
from datetime import timedelta
from snapshot_trainers.torchft import SnapshotTransport
transport = SnapshotTransport(sys.argv[1], host="127.0.0.1")
transport.send_checkpoint([1], 4, {"weight": torch.arange(1 << 20)}, timedelta(seconds=20))
print(transport.metadata(), flush=True)
sys.stdin.read()
"""


def test_torchft_killed_sender_is_an_error_and_leaves_no_memory(transport, tmp_path):
    with subprocess.Popen(
        [sys.executable, "-c", SENDER, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as sender:
        metadata = sender.stdout.readline().strip()
        assert transport.recv_checkpoint(0, metadata, 4, SECONDS)["weight"].equal(torch.arange(1 << 20))
        os.kill(sender.pid, signal.SIGKILL)
    with pytest.raises(StorageError):
        transport.recv_checkpoint(0, metadata, 4, timedelta(hours=1))  # it does not wait for that
    assert len([*tmp_path.glob("snapshot-torchft-*")]) == 2
    SnapshotTransport(tmp_path, host="127.0.0.1").shutdown()
    assert len([*tmp_path.glob("snapshot-torchft-*")]) == 1
