"""Digests of a device's memory equal those of the host: the kernel compiled, interpreted, and on a real device."""

import importlib.metadata
import logging
import os
import subprocess
import sys
import time
import types
from pathlib import Path

import numpy as np
import pytest
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from snapshot.tensors import device_digest
from snapshot.tensors.buffers import view_memory
from snapshot.tensors.device_digest import DeviceDigests, is_usable, scratch_bytes, supports
from snapshot.tensors.digest import BLOCK, SIZE, RunningDigest

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
DATA = np.random.default_rng(2).integers(0, 256, 4 * BLOCK, dtype=np.uint8)
ADDRESS = DATA.__array_interface__["data"][0]


BESIDE = Path.home() / ".cache/snapshot-tests/triton"
"""Where `.ci/run` installs Triton: beside a CPU build of torch, torch would import it, too."""


def triton_version():
    """The version of Triton, which is not imported here: the interpreter must be chosen before that."""
    found = importlib.metadata.distributions(name="triton", path=[*beside(), *sys.path])
    return next((tuple(int(part) for part in each.version.split(".")[:2]) for each in found), (0, 0))


def beside():
    """Return the folder of that Triton in a list, or an empty list if it is for another version of Python."""
    found = importlib.metadata.distributions(name="triton", path=[str(BESIDE)])
    tag = f"cp{sys.version_info.major}{sys.version_info.minor}-"
    return [str(BESIDE)] if any(tag in (each.read_text("WHEEL") or "") for each in found) else []


def on_host(array):
    running = RunningDigest()
    running.update(memoryview(array))
    return running.finish()


def run_python(*arguments, **environment):
    """Run a process whose Triton is not that of this one."""
    inherited = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    inherited["PYTHONPATH"] = os.pathsep.join(filter(None, [*beside(), inherited.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, check=False, env=inherited | environment
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


class HostKernel:
    """The kernel's contract, fulfilled by the host."""

    def __getitem__(self, grid):
        def run(table, digests, copies, **options):
            assert table.data_ptr() % 16 == digests.data_ptr() % 16 == copies.data_ptr() % 16 == 0
            assert digests.shape == (2 * grid[0],)
            for row in range(grid[0]):
                address, length, slot = table[3 * row : 3 * row + 3].tolist()
                data = view_memory(address, length)
                if length <= 240:
                    copies.numpy()[256 * slot : 256 * slot + length] = np.frombuffer(data, np.uint8)
                    digests[2 * row] = 1
                else:
                    high_low = np.frombuffer(xxhash.xxh3_128_digest(data), ">i8").astype(np.int64)
                    digests[2 * row : 2 * row + 2] = torch.from_numpy(high_low[::-1].copy())

        return run


@pytest.mark.skipif(triton_version() < (3, 7), reason="Triton 3.7 or newer is not installed, to interpret the kernel")
@pytest.mark.timeout(300)  # on a busy machine
@pytest.mark.slow
def test_device_digest_kernel_in_the_triton_interpreter():
    tests = Path(__file__).with_name("on_triton.py")
    output = run_python("-m", "pytest", "-q", "-p", "no:cacheprovider", str(tests), TRITON_INTERPRET="1")
    assert " passed" in output


COMPILE = """
import sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from snapshot.tensors.device_digest import _OPTIONS, _load_kernel

source = ASTSource(_load_kernel(), {"table": "*i64", "digests": "*i64", "copies": "*u8"}, {})
compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=_OPTIONS)
assert ".local" not in compiled.asm["ptx"], "the kernel uses the device's memory"
assert compiled.asm["cubin"]
"""


@pytest.mark.skipif(triton_version() < (3, 2), reason="Triton 3.2 or newer is not installed, to compile the kernel")
@pytest.mark.timeout(300)
@pytest.mark.slow
def test_device_digest_kernel_compiles_without_a_device(tmp_path):
    """The interpreter accepts what the compiler refuses, such as a name with two types."""
    run_python("-W", "error", "-W", "ignore::DeprecationWarning", "-c", COMPILE, TRITON_CACHE_DIR=str(tmp_path))


def test_device_digest_imports_triton_only_if_needed():
    code = """
        import sys, torch
        import snapshot
        from snapshot.tensors.device_digest import is_usable
        assert not is_usable(torch.device("cpu")) and not is_usable(torch.device("meta"))
        assert "triton" not in sys.modules
    """
    run_python("-c", "\n".join(line.strip() for line in code.splitlines()))


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 4 * BLOCK), st.integers(0, 100)), max_size=6), st.integers(0, 40))
def test_device_digest_ranges_become_rows_and_digests(ranges, offset):
    arrays = [DATA[8 * begin :][:length] for length, begin in ranges]
    lengths = [len(array) for array in arrays]
    scratch = torch.empty(offset + scratch_bytes(lengths), dtype=torch.uint8)[offset:]
    digests = DeviceDigests([ADDRESS + 8 * begin for _, begin in ranges], lengths, scratch, CPU)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(device_digest, "_load_kernel", HostKernel)
        digests.launch()
    assert digests.finish() == [on_host(array) for array in arrays]


@pytest.mark.parametrize(("length", "offset"), [(241, 0), (241, 8), (0, 0), (0, 3), (240, 3), (BLOCK + 1, 8)])
def test_device_digest_supports_ranges(length, offset):
    assert supports(ADDRESS + offset, length)


@pytest.mark.parametrize(("length", "offset"), [(241, 4), (BLOCK, 1), (BLOCK + 1, 2)])
def test_device_digest_refuses_unsupported_ranges(length, offset):
    assert not supports(ADDRESS + offset, length)
    scratch = torch.empty(scratch_bytes([8, length]), dtype=torch.uint8)
    with pytest.raises(ValueError, match=rf"the address of {length} bytes must be a multiple of 8, got 0x"):
        DeviceDigests([ADDRESS, ADDRESS + offset], [8, length], scratch, CPU)


def test_device_digest_refuses_too_little_scratch_memory():
    needed = scratch_bytes([BLOCK])
    with pytest.raises(ValueError, match=f"scratch memory must have at least {needed} bytes, got {needed - 1}"):
        DeviceDigests([ADDRESS], [BLOCK], torch.empty(needed - 1, dtype=torch.uint8), CPU)


def test_device_digest_does_not_return_digests_that_were_not_computed():
    """The memory may contain digests of an earlier launch."""
    scratch = torch.full((scratch_bytes([BLOCK]),), 7, dtype=torch.uint8)
    with pytest.raises(RuntimeError, match="has not computed"):
        DeviceDigests([ADDRESS], [BLOCK], scratch, CPU).finish()


def test_device_digest_scratch_memory_is_small():
    assert scratch_bytes([1 << 30]) < (1 << 30) // 5000
    assert scratch_bytes([]) < SIZE + 1


def test_device_digest_is_not_used_on_a_device_that_fails(monkeypatch, caplog):
    """One warning for each device, however often it is asked."""

    def fail(device):
        raise torch.OutOfMemoryError("no memory is left")

    monkeypatch.setattr(device_digest, "_device_context", fail)
    device_digest._verdicts.reset()
    with caplog.at_level(logging.WARNING, "snapshot"):
        assert [is_usable(CUDA) for _ in range(3)] == [False] * 3
        assert not is_usable(torch.device("cuda", 1))
    assert [record.getMessage() for record in caplog.records] == [
        "cuda:0 cannot compute digests, so the host computes them: no memory is left",
        "cuda:1 cannot compute digests, so the host computes them: no memory is left",
    ]
    device_digest._verdicts.reset()


def test_device_digest_speed_check_fails_for_a_slow_device(monkeypatch):
    values = DATA[: 1 << 20].copy()
    expected, pause, now = on_host(values), 0.2, 0.0

    def pass_time(seconds):
        nonlocal now
        now += seconds

    def digest(addresses, lengths, device):
        pass_time(pause)
        return [expected] * len(lengths)

    monkeypatch.setattr(device_digest, "time", types.SimpleNamespace(perf_counter=lambda: now))
    monkeypatch.setattr(device_digest, "_digest_on_device", digest)
    monkeypatch.setattr(device_digest, "_digest_on_host", lambda values: pass_time(0.01) or on_host(values))
    device_digest._check_speed(torch.from_numpy(values), values, CPU)
    pause = 0.4
    with pytest.raises(RuntimeError, match=r"33,554,432 bytes must take at most 0.32\d* s, got 0\.4"):
        device_digest._check_speed(torch.from_numpy(values), values, CPU)
    expected = on_host(values[1:])
    with pytest.raises(RuntimeError, match=r"a digest must be xxh3:\w+, got xxh3:"):
        device_digest._check_speed(torch.from_numpy(values), values, CPU)


# On a real device


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
class TestOnCuda:
    def test_device_digest_is_usable_on_cuda(self, caplog):
        device_digest._verdicts.reset()
        assert is_usable(CUDA), caplog.text

    def test_device_digest_of_ranges_of_random_lengths_on_cuda(self):
        random = np.random.default_rng(0)
        lengths = [0, 1, 240, 241, BLOCK - 1, BLOCK, BLOCK + 1, BLOCK + 240, BLOCK + 241, 64 << 20]
        lengths += [int(2**exponent) for exponent in random.uniform(0, 26, 100)]
        for digests in (self.compute(lengths), self.compute(lengths, torch.cuda.Stream(CUDA))):
            wrong = [length for length, (found, expected) in zip(lengths, digests, strict=True) if found != expected]
            assert wrong == []

    def compute(self, lengths, stream=None):
        """Digest ranges of random bytes, on the device and on the host."""
        data = torch.randint(0, 256, (max(lengths) + 8 * len(lengths),), dtype=torch.uint8, device=CUDA)
        values = data.cpu().numpy()
        offsets = [8 * number for number in range(len(lengths))]
        scratch = torch.empty(scratch_bytes(lengths), dtype=torch.uint8, pin_memory=True)
        before = torch.cuda.memory_allocated(CUDA)
        with torch.cuda.device(CUDA), torch.cuda.stream(stream or torch.cuda.current_stream(CUDA)):
            digests = DeviceDigests([data.data_ptr() + offset for offset in offsets], lengths, scratch, CUDA)
            digests.launch()
            torch.cuda.current_stream(CUDA).synchronize()
        assert torch.cuda.memory_allocated(CUDA) == before
        expected = [on_host(values[at : at + length]) for at, length in zip(offsets, lengths, strict=True)]
        return list(zip(digests.finish(), expected, strict=True))

    def test_device_digest_runs_in_stream_order_on_cuda(self):
        """The kernel reads what the stream wrote before it, without a synchronisation of the host."""
        data = torch.zeros(16 << 20, dtype=torch.uint8, device=CUDA)
        scratch = torch.empty(scratch_bytes([len(data)]), dtype=torch.uint8, pin_memory=True)
        digests = DeviceDigests([data.data_ptr()], [len(data)], scratch, CUDA)
        with torch.cuda.device(CUDA), torch.cuda.stream(torch.cuda.Stream(CUDA)):
            torch.cuda._sleep(50_000_000)
            data.fill_(3)
            digests.launch()
            torch.cuda.current_stream(CUDA).synchronize()
        assert digests.finish() == [on_host(np.full(len(data), 3, np.uint8))]

    def test_device_digest_prints_its_speed_on_cuda(self, capsys):
        stream = torch.cuda.current_stream(CUDA)
        for nbytes, number in ((1 << 20, 1), (32 << 20, 1), (256 << 20, 4), (1 << 10, 4096), (4, 4096)):
            data = torch.zeros(number * max(nbytes, 8), dtype=torch.uint8, device=CUDA)
            addresses = [data.data_ptr() + max(nbytes, 8) * each for each in range(number)]
            scratch = torch.empty(scratch_bytes([nbytes] * number), dtype=torch.uint8, pin_memory=True)
            seconds = []
            for _ in range(5):
                digests = DeviceDigests(addresses, [nbytes] * number, scratch, CUDA)
                begin = time.perf_counter()
                digests.launch()
                stream.synchronize()
                seconds.append(time.perf_counter() - begin)
                digests.finish()
            speed = nbytes * number / min(seconds) / 1e9
            with capsys.disabled():
                print(f"\n{number} ranges of {nbytes:,} bytes: {min(seconds) * 1e3:.3f} ms, {speed:.1f} GB/s")
