"""Digests of accelerator memory, computed by the accelerator itself with a Triton kernel.

The digests equal those of `RunningDigest`, and no byte of the ranges is copied to the host, except for short blocks.
One launch digests many ranges, with one program per block of 256 KiB. Its input and its output are in memory of the
host that the accelerator can access, so that it allocates no memory of the accelerator.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import threading
import time
import types
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from snapshot.events import log
from snapshot.io.system import PerProcess
from snapshot.tensors.digest import BLOCK, SIZE, RunningDigest, block_digest, digest_table

_SHORT = 240
"""Longest input that XXH3 digests in other ways. The kernel copies such a block, and the host digests the copy."""
_SLOT = 256
"""Bytes of memory for the copy of a short block."""
_ROW = 24
"""Bytes of a row of the kernel's table: a block's address, its length, and the number of its slot if it is short."""
_ALIGNMENT = 16
"""Triton compiles a kernel again for a pointer that is not a multiple of 16."""

Array = np.ndarray[Any, Any]


def supports(address: int, nbytes: int) -> bool:
    """Return True if a range can be digested on the device: it is aligned to 8 bytes, or has at most 240 bytes."""
    return address % 8 == 0 or nbytes <= _SHORT


def scratch_bytes(lengths: Sequence[int]) -> int:
    """Return the length of the scratch memory that `DeviceDigests` needs for ranges of these lengths."""
    nbytes = np.asarray(lengths, dtype=np.int64)
    blocks = _count_blocks(nbytes)
    shorts = np.count_nonzero(nbytes - (blocks - 1) * BLOCK <= _SHORT)
    return int(blocks.sum()) * (SIZE + _ROW) + int(shorts) * _SLOT + _ALIGNMENT


def _count_blocks(nbytes: Array) -> Array:
    """Return the number of blocks of each range; an empty range has one."""
    blocks: Array = np.maximum(1, -(-nbytes // BLOCK))
    return blocks


class DeviceDigests:
    """Digests of several ranges of one device's memory, computed by one launch.

    Args:
        addresses: Addresses of the ranges. Their memory must not change before the launch has ended.
        lengths: Their lengths in bytes.
        scratch: At least `scratch_bytes(lengths)` bytes of the host's memory that the device can access: pinned memory.
            It is used until `finish` returns.
        device: The device.

    Raises:
        ValueError: The scratch memory is too short, or `supports` is False for a range.
    """

    __slots__ = ("_arguments", "_blocks", "_copies", "_device", "_digests", "_shorts")

    def __init__(
        self, addresses: Sequence[int], lengths: Sequence[int], scratch: torch.Tensor, device: torch.device
    ) -> None:
        begins, nbytes = np.asarray(addresses, dtype=np.int64), np.asarray(lengths, dtype=np.int64)
        for at in np.flatnonzero((begins % 8 != 0) & (nbytes > _SHORT)).tolist():
            raise ValueError(f"the address of {lengths[at]} bytes must be a multiple of 8, got {addresses[at]:#x}")
        if scratch.nbytes < (needed := scratch_bytes(lengths)):
            raise ValueError(f"scratch memory must have at least {needed} bytes, got {scratch.nbytes}")
        self._device = device
        self._blocks = _count_blocks(nbytes)
        number = int(self._blocks.sum())
        ranges = np.repeat(np.arange(len(nbytes)), self._blocks)
        offsets = (np.arange(number) - (np.cumsum(self._blocks) - self._blocks)[ranges]) * BLOCK
        sizes = np.minimum(BLOCK, nbytes[ranges] - offsets)
        shorts = np.flatnonzero(sizes <= _SHORT)
        self._shorts: list[tuple[int, int]] = list(zip(shorts.tolist(), sizes[shorts].tolist(), strict=True))
        """The row and the length of each short block."""

        # Torch views memory as integers only at multiples of 8 bytes in its storage, so this has a storage of its own.
        memory = torch.from_numpy(scratch.numpy()[-scratch.data_ptr() % _ALIGNMENT :])
        digests, copies = memory[: number * SIZE].view(torch.int64), memory[number * SIZE :]
        table = copies[len(shorts) * _SLOT :][: number * _ROW].view(torch.int64)
        self._arguments = (table, digests, copies)
        self._digests: Array = digests.numpy().reshape(number, 2)
        self._digests.fill(0)  # this is how `finish` detects that a digest was not computed
        self._copies: Array = copies.numpy()
        rows: Array = table.numpy().reshape(number, 3)
        rows[:, 0] = begins[ranges] + offsets
        rows[:, 1] = sizes
        rows[:, 2] = 0
        rows[shorts, 2] = np.arange(len(shorts))

    def launch(self) -> None:
        """Start the kernel on the device's current stream."""
        if len(self._digests):
            with _device_context(self._device):
                _load_kernel()[(len(self._digests),)](*self._arguments, **_OPTIONS)

    def finish(self) -> list[tuple[str, bytes]]:
        """Return the digest and the table of each range, like `RunningDigest.finish`.

        The caller has synchronised with the stream of the launch.

        Raises:
            RuntimeError: The device has not computed the digests.
        """
        if not self._digests.any(axis=1).all():
            raise RuntimeError("cannot read digests: the device has not computed them; launch and synchronise first")
        joined = bytearray(self._digests[:, ::-1].astype(">i8").tobytes())
        for slot, (row, length) in enumerate(self._shorts):
            joined[row * SIZE : (row + 1) * SIZE] = block_digest(self._copies[slot * _SLOT :][:length].data)
        digests, position = [], 0
        for blocks in self._blocks.tolist():
            table = bytes(joined[position : position + blocks * SIZE])
            position += len(table)
            digests.append((digest_table(table), table) if blocks > 1 else ("xxh3:" + table.hex(), b""))
        return digests


# The test on first use


def is_usable(device: torch.device) -> bool:
    """Return True if this device computes digests, correctly and at least as fast as one core of the host.

    The first call for a device tests it: it compiles the kernel, and waits for the current stream. A failure is logged
    once, as a warning. In Triton's interpreter (`TRITON_INTERPRET=1`), the CPU is a device.
    """
    if device.type == "cuda":
        if device == torch.device("cuda") and torch.cuda.is_available():
            device = torch.device("cuda", torch.cuda.current_device())
        return _verdicts.get().decide(device)
    if device.type == "cpu" and os.environ.get("TRITON_INTERPRET") == "1":
        return _verdicts.get().decide(device)
    return False


class _Verdicts:
    """Results of the tests of all devices."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._usable: dict[torch.device, bool] = {}

    def decide(self, device: torch.device) -> bool:
        usable = self._usable.get(device)
        if usable is None:
            with self._lock:
                usable = self._usable.get(device)
                if usable is None:
                    usable = self._usable[device] = _is_fit(device)
        return usable


_verdicts = PerProcess(_Verdicts)


def _is_fit(device: torch.device) -> bool:
    try:
        with _device_context(device):
            _check_device(device)
    except Exception as error:  # noqa: BLE001 - Triton, its compiler and the driver raise anything
        log.warning("%s cannot compute digests, so the host computes them: %s", device, str(error) or repr(error))
        return False
    return True


_TEST_BYTES = 1 << 20
"""Torch takes 2 MiB of the device's memory for this, and 20 MiB for more."""
_TEST_LENGTHS = (0, 1, _SHORT, _SHORT + 1, 1024, 1025, (64 << 10) + 7, BLOCK, BLOCK + 7, BLOCK + 1000)
_REPEATS = 32
"""The test of the speed digests these bytes several times at once."""


def _check_device(device: torch.device) -> None:
    """Raise an error if the device does not compute digests correctly, or is slower than the host."""
    interpreted = not isinstance(_load_kernel(), importlib.import_module("triton.runtime").JITFunction)
    if interpreted is (device.type == "cuda"):  # the interpreter would read the device's addresses on the host
        raise RuntimeError(f"Triton's interpreter must be {'off' if interpreted else 'on'} for the device {device}")
    # These bytes come from a generator of their own, since users seed NumPy's and torch's.
    values: Array = np.random.default_rng(seed=0).integers(0, 256, _TEST_BYTES, dtype=np.uint8)
    data = torch.from_numpy(values).to(device)
    offsets = [8 * number for number in range(len(_TEST_LENGTHS))]
    expected = [_digest_on_host(values[at : at + n]) for at, n in zip(offsets, _TEST_LENGTHS, strict=True)]
    _compare(_digest_on_device([data.data_ptr() + at for at in offsets], _TEST_LENGTHS, device), expected)
    if not interpreted:
        _check_speed(data, values, device)


def _check_speed(data: torch.Tensor, values: Array, device: torch.device) -> None:
    """Raise an error if the device is slower than one core of the host."""
    ranges = [values.copy() for _ in range(_REPEATS)]  # too many bytes for most caches, like those of a checkpoint
    on_device, on_host = [], []
    for _ in range(5):
        begin = time.perf_counter()
        found = _digest_on_device([data.data_ptr()] * _REPEATS, [_TEST_BYTES] * _REPEATS, device)
        between = time.perf_counter()
        expected = [_digest_on_host(values) for values in ranges]
        on_host.append(time.perf_counter() - between)
        on_device.append(between - begin)
        _compare(found, expected)
    if min(on_device) > min(on_host):
        raise RuntimeError(
            f"{_REPEATS * _TEST_BYTES:,} bytes must take at most {min(on_host):.6f} s, got {min(on_device):.6f} s"
        )


def _digest_on_device(
    addresses: Sequence[int], lengths: Sequence[int], device: torch.device
) -> list[tuple[str, bytes]]:
    pinned = device.type == "cuda"
    scratch = torch.empty(scratch_bytes(lengths), dtype=torch.uint8, device="cpu", pin_memory=pinned)
    digests = DeviceDigests(addresses, lengths, scratch, device)
    digests.launch()
    if pinned:
        torch.cuda.current_stream(device).synchronize()
    return digests.finish()


def _digest_on_host(values: Array) -> tuple[str, bytes]:
    digest = RunningDigest()
    digest.update(values.data)
    return digest.finish()


def _compare(found: Sequence[tuple[str, bytes]], expected: Sequence[tuple[str, bytes]]) -> None:
    for (digest, table), (right, right_table) in zip(found, expected, strict=True):
        if digest != right or table != right_table:
            raise RuntimeError(f"a digest must be {right}, got {digest}")


def _device_context(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


# The kernel
#
# XXH3 has eight accumulators. They are two vectors here, of the four even and the four odd ones, since each word is
# added to its neighbour's accumulator. A group has 16 stripes of 64 bytes. Its sum does not depend on the
# accumulators, so the loads of several groups overlap. Only the scrambles after each group follow each other.

_PRIME32_1 = 0x9E3779B1
_PRIME32_2 = 0x85EBCA77
_PRIME32_3 = 0xC2B2AE3D
_PRIME64_1 = 0x9E3779B185EBCA87
_PRIME64_2 = 0xC2B2AE3D27D4EB4F
_PRIME64_3 = 0x165667B19E3779F9
_PRIME64_4 = 0x85EBCA77C2B2AE63
_PRIME64_5 = 0x27D4EB2F165667C5
_PRIME_MX1 = 0x165667919E3779F9
_LOW = 0xFFFFFFFF
_WORD = 0xFFFFFFFFFFFFFFFF

# Tables of words are long integers in little-endian order: a shift by `8 * n` bits begins at byte `n`.
_SECRET = int.from_bytes(
    bytes.fromhex(
        "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671fcb79e64eccc0e578825ad07dccff7221"
        "b8084674f743248ee03590e6813a264c3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8"
        "a8fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364eac5ac8334d3ebc3c581a0fffa1363eb"
        "170ddd51b7f0da49d316552629d4689e2b16be587d47a1fc8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
    ),
    "little",
)
_SCRAMBLE_SECRET = _SECRET >> 8 * (192 - 64)
_LAST_SECRET = _SECRET >> 8 * (192 - 64 - 7)
_LOW_SECRET = _SECRET >> 8 * 11
_HIGH_SECRET = _SECRET >> 8 * (192 - 64 - 11)
_FIRST = (_PRIME32_3, _PRIME64_1, _PRIME64_2, _PRIME64_3, _PRIME64_4, _PRIME32_2, _PRIME64_5, _PRIME32_1)
_START = sum(word << 64 * number for number, word in enumerate(_FIRST))

_OPTIONS = {"num_warps": 1, "enable_fp_fusion": False}
"""One warp reduces without barriers. There are no floats: Triton 3.9 warns if the choice is left to it."""

tl: Any = None  # triton.language, in the namespace that `_load_kernel` creates


def _pick(words: Any, index: Any, count: Any, step: Any) -> Any:
    """Return every `step`-th of `words`, by index. They become constants of the code, so no table is read."""
    value = tl.zeros_like(index).to(tl.uint64)
    for number in tl.static_range(count):
        value = tl.where(index == number, (words >> (64 * step * number)) & _WORD, value)
    return value


def _mix(word: Any, key: Any, neighbour: Any) -> Any:
    keyed = word ^ key
    return (keyed & _LOW) * (keyed >> 32) + neighbour


def _scramble(accumulators: Any, key: Any) -> Any:
    return (accumulators ^ (accumulators >> 47) ^ key) * _PRIME32_1


def _merge(even: Any, odd: Any, secret: Any, start: Any) -> Any:
    """Return one half of the digest."""
    pair = tl.arange(0, 4)
    left = even ^ _pick(secret, pair, 4, 2)
    right = odd ^ _pick(secret >> 64, pair, 4, 2)
    merged = start + tl.sum((left * right) ^ tl.umulhi(left, right), axis=0)
    merged = (merged ^ (merged >> 37)) * _PRIME_MX1
    return merged ^ (merged >> 32)


def _load_unaligned(address: Any) -> Any:
    """Return every second of eight words at any address."""
    byte = tl.arange(0, 8)[None, :]
    data = tl.load(address + tl.arange(0, 4)[:, None] * 16 + byte).to(tl.uint64)
    return tl.sum(data << (byte * 8).to(tl.uint64), axis=1)


def _digest(address: Any, length: Any) -> Any:
    """Return the low and the high half of the digest of more than 240 bytes."""
    data = address.to(tl.pointer_type(tl.uint64))
    pair = tl.arange(0, 4)
    stripe = tl.arange(0, 16)[:, None]
    words = stripe * 8 + pair[None, :] * 2
    key = stripe + pair[None, :] * 2
    even_key, odd_key = _pick(_SECRET, key, 22, 1), _pick(_SECRET >> 64, key, 22, 1)
    even_scramble, odd_scramble = _pick(_SCRAMBLE_SECRET, pair, 4, 2), _pick(_SCRAMBLE_SECRET >> 64, pair, 4, 2)
    even, odd = _pick(_START, pair, 4, 2), _pick(_START >> 64, pair, 4, 2)

    groups = (length - 1) // 1024
    for _ in range(groups // 4):
        for number in tl.static_range(4):
            evens = tl.load(data + number * 128 + words)
            odds = tl.load(data + number * 128 + words + 1)
            even = _scramble(even + tl.sum(_mix(evens, even_key, odds), axis=0), even_scramble)
            odd = _scramble(odd + tl.sum(_mix(odds, odd_key, evens), axis=0), odd_scramble)
        data += 512
    for _ in range(groups % 4):
        evens = tl.load(data + words)
        odds = tl.load(data + words + 1)
        even = _scramble(even + tl.sum(_mix(evens, even_key, odds), axis=0), even_scramble)
        odd = _scramble(odd + tl.sum(_mix(odds, odd_key, evens), axis=0), odd_scramble)
        data += 128

    # Whole stripes after the last group; the last stripe overlaps them.
    whole = words < (length - 1) % 1024 // 64 * 8
    evens = tl.load(data + words, mask=whole, other=0)
    odds = tl.load(data + words + 1, mask=whole, other=0)
    even += tl.sum(tl.where(whole, _mix(evens, even_key, odds), 0), axis=0)
    odd += tl.sum(tl.where(whole, _mix(odds, odd_key, evens), 0), axis=0)
    last = address.to(tl.pointer_type(tl.uint8)) + length - 64
    evens, odds = _load_unaligned(last), _load_unaligned(last + 8)
    even += _mix(evens, _pick(_LAST_SECRET, pair, 4, 2), odds)
    odd += _mix(odds, _pick(_LAST_SECRET >> 64, pair, 4, 2), evens)

    size = length.to(tl.uint64)
    return (
        _merge(even, odd, _LOW_SECRET, size * _PRIME64_1),
        _merge(even, odd, _HIGH_SECRET, (size * _PRIME64_2) ^ _WORD),
    )


def _copy(address: Any, length: Any, slot: Any) -> None:
    byte = tl.arange(0, _SLOT)
    source = address.to(tl.pointer_type(tl.uint8)) + byte
    tl.store(slot + byte, tl.load(source, mask=byte < length, other=0), mask=byte < length)


def _digest_block(table: Any, digests: Any, copies: Any) -> None:
    """Digest the block of this program's row, or copy it if it is short."""
    row = table + tl.program_id(0) * 3
    result = digests + tl.program_id(0) * 2
    address = tl.load(row)
    length = tl.load(row + 1).to(tl.int32)
    if length <= _SHORT:
        _copy(address, length, copies + tl.load(row + 2) * _SLOT)
        tl.store(result, 1)
    else:
        low, high = _digest(address, length)
        tl.store(result, low)
        tl.store(result + 1, high)


@functools.cache
def _load_kernel() -> Any:
    """Return the kernel. Triton is imported here, since few processes need it and it takes long.

    Triton finds `tl`, constants and other functions among a function's globals. This module's functions are therefore
    copied, with globals that contain them in Triton's form.
    """
    triton: Any = importlib.import_module("triton")
    language: Any = importlib.import_module("triton.language")
    constants = {name: language.constexpr(value) for name, value in globals().items() if type(value) is int}
    namespace = {
        "__name__": __name__,
        "__builtins__": __builtins__,
        "tl": language,
        "Any": language.tensor,  # Triton looks annotations up, and accepts only names of its own
        **constants,
    }
    for function in (_pick, _mix, _scramble, _merge, _load_unaligned, _digest, _copy, _digest_block):
        namespace[function.__name__] = triton.jit(types.FunctionType(function.__code__, namespace))
    return namespace["_digest_block"]
