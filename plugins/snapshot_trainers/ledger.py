"""The ledger of a data loader: how many samples an epoch has had, and a sum of hashes that tells which.

The sum of the hashes of several samples is the same in any order, so those of all ranks, and of all parts of an epoch,
are added. Two epochs of the same samples have equal sums, and others have not, but by an accident of 1 in 2**128. This
shows accidents. It is no protection from somebody who chooses the ids of samples.
"""

from __future__ import annotations

import operator
import struct
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import xxhash

_AT_ONCE = 4096
"""The number of ids that are hashed at once. Fewer cost more each."""
_ENOUGH = 8 * _AT_ONCE
_MANY = 256 * _AT_ONCE
_MODULUS = 1 << 128
_RECORD = struct.Struct("<Q16s")
RECORD = _RECORD.size
"""Bytes of a stored sum: the number of samples, and the total."""
_ADD, _FIRST, _SECOND, _THIRD = (
    np.uint64(each) for each in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB, 0xD6E8FEB86659FD93)
)
_30, _27, _31, _32 = (np.uint64(each) for each in (30, 27, 31, 32))


class Sum(NamedTuple):
    """The samples of an epoch, or a part of them."""

    samples: int = 0
    total: int = 0
    """The sum of their 128-bit hashes, modulo 2**128."""

    def __add__(self, other: object) -> Sum:
        """Return the sum of both parts."""
        if not isinstance(other, Sum):
            return NotImplemented
        return Sum(self.samples + other.samples, (self.total + other.total) % _MODULUS)

    def __sub__(self, other: object) -> Sum:
        """Return the sum without a part of it."""
        if not isinstance(other, Sum):
            return NotImplemented
        return Sum(self.samples - other.samples, (self.total - other.total) % _MODULUS)

    def encode(self) -> bytes:
        """Return the sum as `RECORD` bytes."""
        return _RECORD.pack(self.samples, self.total.to_bytes(16, "little"))

    @classmethod
    def decode(cls, data: bytes) -> Sum:
        """Return the sum that `encode` made bytes of."""
        if len(data) != RECORD:
            raise ValueError(f"a sum of samples must have {RECORD} bytes, got {len(data)}")
        samples, total = _RECORD.unpack(data)
        return cls(samples, int.from_bytes(total, "little"))

    @classmethod
    def decode_all(cls, data: bytes) -> list[Sum]:
        """Return the sums whose bytes follow each other."""
        return [cls.decode(data[at : at + RECORD]) for at in range(0, len(data), RECORD)]


def pack_ids(ids: Sequence[Any]) -> bytes | Sum:
    """Return the ids of a batch as 64-bit numbers, which are hashed later; the sum of others, which cannot be."""
    try:
        # The fastest way from a list to 64-bit numbers, and one that refuses what is no integer.
        return _packer(len(ids))(*ids)
    except struct.error:
        return _hash_any(ids)


@lru_cache(64)
def _packer(count: int) -> Callable[..., bytes]:
    """Return what packs some 64-bit numbers. To prepare it costs more than to pack a small batch."""
    return struct.Struct(f"{count}q").pack


def hash_last(packed: bytes | Sum, count: int) -> Sum:
    """Return the sum of the last ids of a batch, as `pack_ids` returns it; of none if they cannot be told apart."""
    if count <= 0 or isinstance(packed, Sum) or len(packed) < 8 * count:
        return Sum()
    last = packed[-8 * count :]
    return Sum(count, _hash_numbers(np.frombuffer(last, dtype=np.uint64)))


def hash_ids(ids: Iterable[Any]) -> Sum:
    """Return the sum of the hashes of some ids. Integers are hashed by their values, whatever their type."""
    held, ledger = ids if isinstance(ids, list) else list(ids), Ledger()
    for begin in range(0, len(held), _AT_ONCE):
        ledger.add(pack_ids(held[begin : begin + _AT_ONCE]))
    return ledger.sum


def hash_range(count: int) -> Sum:
    """Return the sum of the hashes of the numbers from 0."""
    found = Sum()
    for begin in range(0, count, _MANY):
        numbers = np.arange(begin, min(begin + _MANY, count), dtype=np.uint64)
        found += Sum(len(numbers), _hash_numbers(numbers))
    return found


def find_difference(
    found: Sum, expected: Sum, ids: Sequence[Any]
) -> tuple[tuple[Any, ...], tuple[Any, ...]] | tuple[None, None]:
    """Return the ids that were lost, and those that were seen twice, if that is at most one of each.

    `ids`: those that `expected` is the sum of.
    """
    more = found.samples - expected.samples
    if abs(more) > 1:
        return None, None
    difference = (found.total - expected.total) % _MODULUS  # hash of the one seen twice - hash of the one lost
    hashes = _hash_each(ids)
    if more == 1:
        twice = hashes.get(difference)
        return (None, None) if twice is None else ((), (ids[twice],))
    if more == -1:
        lost = hashes.get(-difference % _MODULUS)
        return (None, None) if lost is None else ((ids[lost],), ())
    for each, at in hashes.items():
        lost = hashes.get((each - difference) % _MODULUS)
        if lost is not None:
            return (ids[lost],), (ids[at],)
    return None, None


def _hash_each(ids: Sequence[Any]) -> dict[int, int]:
    """Return the hash of each id -> its position."""
    if isinstance(ids, range):
        low, high = _mix(np.array(ids, dtype=np.int64).view(np.uint64))
        return {(b << 64) | a: at for at, (a, b) in enumerate(zip(low.tolist(), high.tolist(), strict=True))}
    return {hash_ids([each]).total: at for at, each in enumerate(ids)}


def _hash_any(held: Sequence[Any]) -> Sum:
    """As `hash_ids`, for ids of which some are no 64-bit integers."""
    found = Sum()
    for each in held:
        number = _as_number(each)
        if number is None:
            total = xxhash.xxh3_128_intdigest(repr(each).encode("utf-8", "surrogatepass"))
        else:
            total = _hash_numbers(np.array([number], dtype=np.int64).view(np.uint64))
        found += Sum(1, total)
    return found


def _as_number(value: Any) -> int | None:
    """Return an id as a 64-bit integer, such as one in an array or a tensor; None if it is none."""
    try:
        number = operator.index(value)
    except (TypeError, ValueError, RuntimeError):
        return None
    return number if -(1 << 63) <= number < 1 << 63 else None


def _hash_numbers(numbers: Any) -> int:
    """Return the sum of the hashes of 64-bit numbers."""
    low, high = _mix(numbers)
    # The sum of the upper halves may lack its carry, that of the lower ones may not: it is made exact from the sum of
    # their upper 32 bits, since that of the lower 32 bits of fewer than 2**32 numbers fits into 64.
    wrapped, above = int(low.sum()), int((low >> _32).sum())
    exact = (above << 32) + (wrapped - (above << 32)) % (1 << 64)
    return (exact + (int(high.sum()) << 64)) % _MODULUS


def _mix(numbers: Any) -> tuple[Any, Any]:
    """Return both halves of the hash of each 64-bit number, of which the upper one is made from the lower one.

    The lower one is the finaliser of splitmix64, which is a bijection: no two numbers have the same hash.
    """
    low = numbers + _ADD
    low ^= low >> _30
    low *= _FIRST
    low ^= low >> _27
    low *= _SECOND
    low ^= low >> _31
    high = low * _THIRD
    high ^= high >> _32
    high *= _FIRST
    high ^= high >> _27
    return low, high


class Ledger:
    """Adds the samples that a loop gets. Numbers are kept until there are enough to hash at once."""

    def __init__(self, start: Sum = Sum()) -> None:  # noqa: B008 - a tuple, which nobody changes
        self._sum = start
        self._held = bytearray()

    def add(self, packed: bytes | Sum) -> None:
        """Add a batch, as `pack_ids` returns it."""
        if type(packed) is Sum:
            self._sum += packed
            return
        self._held += packed  # type: ignore[arg-type]
        if len(self._held) >= _ENOUGH:
            self._hash()

    def _hash(self) -> None:
        held, self._held = self._held, bytearray()
        self._sum += Sum(len(held) // 8, _hash_numbers(np.frombuffer(held, dtype=np.uint64)))

    @property
    def sum(self) -> Sum:
        """All that was added."""
        if self._held:
            self._hash()
        return self._sum
