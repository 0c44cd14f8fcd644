"""Scan of untrusted pickles before they are read.

A pickle may not claim more memory than it has bytes, nor have an opcode that tensors do not need.
"""

from __future__ import annotations

import collections
import pickletools
from typing import NamedTuple

from snapshot.errors import CorruptSnapshotError, UnsafeObjectError, UnsupportedFormatError
from snapshot.manifest.entries import MOST_COMPARISONS
from snapshot.manifest.paths import LONGEST_INT

_KNOWN = [
    "PROTO",
    "FRAME",
    "STOP",
    "MARK",
    "POP",
    "POP_MARK",
    "NONE",
    "NEWTRUE",
    "NEWFALSE",
    "BININT",
    "BININT1",
    "BININT2",
    "LONG1",
    "LONG4",
    "BINFLOAT",
    "BINUNICODE",
    "SHORT_BINUNICODE",
    "BINUNICODE8",
    "BINBYTES",
    "SHORT_BINBYTES",
    "BINBYTES8",
    "BINSTRING",
    "SHORT_BINSTRING",
    "EMPTY_LIST",
    "APPEND",
    "APPENDS",
    "LIST",
    "EMPTY_TUPLE",
    "TUPLE",
    "TUPLE1",
    "TUPLE2",
    "TUPLE3",
    "EMPTY_DICT",
    "DICT",
    "SETITEM",
    "SETITEMS",
    "EMPTY_SET",
    "ADDITEMS",
    "FROZENSET",
    "BINGET",
    "LONG_BINGET",
    "BINPUT",
    "LONG_BINPUT",
    "MEMOIZE",
    "GLOBAL",
    "STACK_GLOBAL",
    "REDUCE",
    "NEWOBJ",
    "BUILD",
    "BINPERSID",
]
_LENGTHS = {"BINUNICODE": 4, "SHORT_BINUNICODE": 1, "BINUNICODE8": 8, "BINBYTES": 4, "SHORT_BINBYTES": 1}
_LENGTHS |= {"BINBYTES8": 8, "BINSTRING": 4, "SHORT_BINSTRING": 1, "LONG1": 1, "LONG4": 4}
_LONG, _TEXTS, _PUT, _STOP, _UNKNOWN, _TUPLE, _GET, _BINPUT, _MEMOIZE, _LEAVES = range(-1, -11, -1)
_WIDTHS = [_UNKNOWN] * 256
"""Length with argument by opcode, or a code for further checks."""
for _opcode in pickletools.opcodes:
    if _opcode.name in _KNOWN:
        _WIDTHS[ord(_opcode.code)] = 1 + (max(_opcode.arg.n, 0) if _opcode.arg is not None else 0)
    if _opcode.name in _LENGTHS:
        _WIDTHS[ord(_opcode.code)] = _LONG
for _codes, _kind in (
    (b"c", _TEXTS),
    (b"r", _PUT),
    (b".", _STOP),
    (b"t\x85\x86\x87", _TUPLE),
    (b"hj", _GET),
    (b"q", _BINPUT),
    (b"\x94", _MEMOIZE),
    (b"beu\x90\x9101", _LEAVES),
):
    for _code in _codes:
        _WIDTHS[_code] = _kind
_WEIGHTS = [8] * 256
"""Approximate memory of the created object by opcode, without bytes copied from the pickle."""
for _codes, _weight in (
    (b"\x8f\x91", 232),
    (b"R\x81Q", 160),
    (b"}d", 80),
    (b"]l", 72),
    (b"t\x85\x86\x87", 64),
    (b"J\x8a\x8bGX\x8c\x8dB\x8eTU", 56),
):
    for _code in _codes:
        _WEIGHTS[_code] = _weight
FREE = 64 << 20
"""Bytes of memory allowed for any pickle, with PER_BYTE more for each of its bytes."""
PER_BYTE = 32
INFLATED = 256 << 10
"""Bytes that any compressed pickle may have, with MOST_TIMES more for each stored byte.
Pickles of state dicts and optimizers compress about fivefold."""
MOST_TIMES = 32
_PUTS = b"qr\x94"
_CONSUMES = b"Rbas\x81Q."
"""Opcodes after a tuple that put it into something other than a tuple or a key."""
_ARGUMENTS = {ord(each.code): _LENGTHS[each.name] for each in pickletools.opcodes if each.name in _LENGTHS}
_INTS = {ord(each.code) for each in pickletools.opcodes if each.name in ("LONG1", "LONG4")}
_MODULUS = (1 << 61) - 1
"""Ints that differ by a multiple of this number have equal hashes."""
LOOSE = 30_000
"""Maximum number of tuples that may be nested or have equal hashes. Ten times as many would overflow the stack, or
take minutes."""
SHARED = 16
"""Maximum number of tuples fetched again, each in the next: hashing them takes at most 2 ** 16 steps."""


class ScanResult(NamedTuple):
    """Result of scanning a pickle."""

    end: int
    careful: bool
    """True if tuples may hash forever, or nest too deeply to be hashed. The interpreter's own unpickler would try
    that, in one step that cannot be interrupted."""


def expect_stored(length: int, stored: int, what: str) -> int:
    """Raise ValueError if a pickle is too long for the `stored` bytes that it was decompressed from.

    Return the length that limits on memory and time are based on.
    """
    if length > INFLATED + MOST_TIMES * stored:
        raise ValueError(f"{what} inflates too far: from {stored:,} stored bytes to {length:,}; store it uncompressed")
    return min(length, MOST_TIMES // 2 * stored)


def scan_pickle(  # noqa: PLR0912, PLR0915 - one fast loop over millions of opcodes
    data: bytes, where: object, length: int | None = None
) -> ScanResult:
    """Raise unless a pickle can be read in memory proportional to its length; see `expect_stored`."""
    widths, weights = _WIDTHS, _WEIGHTS
    counts_as = len(data) if length is None else length
    made = memo = puts = loose = shared = 0
    odd = False
    tuples: set[int] = set()
    position, count, length, ended = 0, 0, len(data), -1
    ints: set[bytes] = set()
    try:
        while True:
            code = data[position]
            width = widths[code]
            count += 1
            made += weights[code]
            if width > 0:
                position += width
            elif width == _LONG:
                size = _ARGUMENTS[code]
                begin = position + 1 + size
                position = begin + int.from_bytes(data[position + 1 : begin], "little")
                if position > length:
                    break
                if code in _INTS and position - begin >= 8:
                    ints.add(data[begin:position])
                    if position - begin > LONGEST_INT // 8:
                        raise UnsupportedFormatError(
                            f"{where}: a number in the pickle must have at most {LONGEST_INT // 8} bytes, got "
                            f"{position - begin:,}"
                        )
            elif width == _BINPUT:
                puts += 1
                position += 2
            elif width == _MEMOIZE:
                memo += 1
                position += 1
            elif width == _TUPLE:
                inner = code == 0x85 and position == ended
                position += 1
                while (following := data[position]) in _PUTS:
                    if following == 0x94:
                        tuples.add(memo)
                        memo += 1
                        position += 1
                    else:
                        stop = position + (2 if following == 0x71 else 5)
                        if (place := int.from_bytes(data[position + 1 : stop], "little")) > count:
                            raise CorruptSnapshotError(f"{where}: the pickle claims memory that it does not use")
                        tuples.add(place)
                        puts += 1
                        position = stop
                loose += following not in _CONSUMES
                if inner and following == 0x52:  # the sizes of a torch.Size, which millions of chunks have
                    loose -= 1
                ended = position
            elif width in (_LEAVES, _GET):
                if width == _GET:
                    stop = position + (2 if code == 0x68 else 5)
                    shared += int.from_bytes(data[position + 1 : stop], "little") in tuples
                    position = stop
                else:
                    odd = odd or code in b"01\x91"
                    position += 1
                odd = odd or data[position] in _PUTS
            elif width == _TEXTS:
                position = data.index(b"\n", data.index(b"\n", position) + 1) + 1
            elif width == _PUT:
                if int.from_bytes(data[position + 1 : position + 5], "little") > count:
                    raise CorruptSnapshotError(f"{where}: the pickle claims memory that it does not use")
                puts += 1
                position += 5
            elif width == _STOP:
                if made > FREE + PER_BYTE * counts_as:
                    raise CorruptSnapshotError(
                        f"{where}: the pickle of {len(data):,} bytes would need {made:,} bytes of memory"
                    )
                _check_hashes(ints, where)
                return ScanResult(
                    position + 1, odd or shared > SHARED or loose > LOOSE or bool(memo and puts and tuples)
                )
            else:
                raise UnsafeObjectError(
                    f"{where}: the pickle has an opcode that tensors do not need, {bytes([code])!r} at {position}; "
                    "refusing to run it"
                )
    except (IndexError, ValueError) as error:
        if isinstance(error, CorruptSnapshotError):
            raise
    raise CorruptSnapshotError(f"{where}: the pickle ends too early")


def _check_hashes(ints: set[bytes], where: object) -> None:
    if len(ints) ** 2 <= MOST_COMPARISONS:
        return
    alike = collections.Counter(int.from_bytes(each, "little", signed=True) % _MODULUS for each in ints)
    if sum(many * many for many in alike.values()) > MOST_COMPARISONS:
        raise CorruptSnapshotError(f"{where}: too many numbers in the pickle have equal hashes; refusing it as hostile")
