"""Blocks of numbers are compressed and come back bit by bit; damaged ones never take memory or wrong shapes."""

import contextlib
import random
import struct

import numpy as np
import pytest
import torch
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from snapshot.errors import CorruptSnapshotError
from snapshot.tensors.digest import BLOCK
from snapshot.tensors.memory import ITEMSIZE, SAFETENSORS
from snapshot.tensors.packed_files import MOST_TIMES, PAGE, RECORD, TINY, longest_table
from snapshot.tensors.split_zstd import KINDS, ROTATED, BlockCodec, BlockTable, cut_blocks, encode_table, kind_of

CODEC = BlockCodec()
RANDOM = np.random.default_rng(0)


@pytest.fixture(autouse=True)
def _same_numbers():
    """Each test has the same numbers, whichever ran before."""
    RANDOM.bit_generator.state = np.random.default_rng(0).bit_generator.state


def encoded(data, kind):
    out = memoryview(bytearray(len(data)))
    return bytes(out[: CODEC.encode(data, kind, out)])


def decoded(stored, kind, size):
    target = memoryview(bytearray(size))
    CODEC.decode(memoryview(stored), kind, target)
    return bytes(target)


def contents(size):
    """Blocks of many kinds: zeros, one value, noise, numbers, repeated rows, half zeros."""
    yield bytes(size)
    yield b"\xff" * size
    yield RANDOM.bytes(size)
    yield (RANDOM.standard_normal(size // 4 + 1) * 0.02).astype("<f4").tobytes()[:size]
    yield torch.from_numpy(RANDOM.standard_normal(size // 2 + 1)).bfloat16().view(torch.uint8).numpy().tobytes()[:size]
    yield (RANDOM.bytes(96) * (size // 96 + 1))[:size]
    yield RANDOM.bytes(size // 2) + bytes(size - size // 2)
    yield np.full(size // 4 + 1, 0x7FC00001, "<u4").tobytes()[:size]  # NaN with a payload


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("count", [1, 2, 3, 63, 1000, 4097, BLOCK])
def test_split_zstd_blocks_are_exact_and_never_longer(kind, count):
    size = min(count * (kind % ROTATED), BLOCK)
    for data in contents(size):
        stored = encoded(data, kind)
        assert len(stored) <= size
        assert len(stored) * MOST_TIMES >= size
        assert decoded(stored, kind, size) == data


@given(st.sampled_from(KINDS), st.binary(min_size=1, max_size=3000), st.integers(1, 60))
def test_split_zstd_any_bytes_are_exact(kind, piece, times):
    data = (piece * times)[:BLOCK]
    data = data[: len(data) // 8 * 8] or bytes(8)
    assert decoded(encoded(data, kind), kind, len(data)) == data


def test_split_zstd_does_not_depend_on_buffer_addresses():
    data = next(iter(contents(4096)))[:4096] + RANDOM.bytes(4096)
    for shift in range(8):
        source = memoryview(bytearray(shift) + data)[shift:]
        for kind in KINDS:
            stored = encoded(source, kind)
            target = memoryview(bytearray(len(data) + shift))[shift:]
            CODEC.decode(memoryview(b"x" * shift + stored)[shift:], kind, target)
            assert bytes(target) == data


@pytest.mark.parametrize(("dtype", "ratio"), [("bfloat16", 1.45), ("float32", 1.18), ("float16", 1.15)])
def test_split_zstd_ratio_of_weights_per_dtype(dtype, ratio):
    weights = (torch.randn(BLOCK // ITEMSIZE[dtype], generator=torch.Generator().manual_seed(0)) * 0.02).to(
        getattr(torch, dtype)
    )
    assert BLOCK / len(encoded(weights.view(torch.uint8).numpy().tobytes(), kind_of(dtype))) >= ratio


def test_split_zstd_kind_of_every_dtype_fits_its_elements():
    for names in (ITEMSIZE, {theirs: ITEMSIZE[name] for name, theirs in SAFETENSORS.items()}):
        for name, itemsize in names.items():
            kind = kind_of(name)
            assert kind in KINDS
            assert itemsize % (kind % ROTATED) == 0
    assert kind_of("float64") == 8 + ROTATED
    assert kind_of("uint16") == 2
    assert kind_of("C64") == kind_of("complex64") == 4 + ROTATED
    assert kind_of("float8_e5m2") == 1


@pytest.mark.parametrize("kind", KINDS)
def test_split_zstd_damaged_block_is_refused_or_has_its_length(kind):
    chance = random.Random(kind)
    data = (RANDOM.standard_normal(8192) * 0.02).astype("<f4").tobytes()
    stored = encoded(data, kind)
    for _ in range(400):
        spoilt = bytearray(stored)
        for _ in range(chance.randint(1, 3)):
            spoilt[chance.randrange(len(spoilt)) if chance.random() < 0.5 else chance.randrange(64)] = chance.randrange(
                256
            )
        spoilt = spoilt[: chance.choice([len(spoilt), len(spoilt), chance.randrange(len(spoilt))])]
        with contextlib.suppress(CorruptSnapshotError):
            assert len(decoded(bytes(spoilt), kind, len(data))) == len(data)


def test_split_zstd_frame_that_claims_too_much_is_not_decompressed():
    bomb = zstandard.ZstdCompressor(level=19).compress(bytes(1 << 28))
    size = 4 * 65536
    planes = [bomb, *[bytes(65536)] * 3]
    stored = struct.pack("<4I", *map(len, planes)) + b"".join(planes)
    with pytest.raises(CorruptSnapshotError, match="a frame must have 65536 bytes, got 268435456"):
        decoded(stored, 4, size)
    small = zstandard.ZstdCompressor().compress(bytes(65536))
    for wrong in (small[:-1], small + b"x", small + small, b"\0" * 40):
        planes[0] = wrong
        stored = struct.pack("<4I", *map(len, planes)) + b"".join(planes)
        with pytest.raises(CorruptSnapshotError):
            decoded(stored, 4, size)
    unsized = zstandard.ZstdCompressor(write_content_size=False).compress(bytes(65536))
    planes[0] = unsized
    with pytest.raises(CorruptSnapshotError):
        decoded(struct.pack("<4I", *map(len, planes)) + b"".join(planes), 4, size)


# Blocks of a file


@given(
    st.integers(0, 3 * BLOCK),
    st.lists(
        st.tuples(st.one_of(st.integers(0, 5000), st.integers(0, 3 * BLOCK // 8)), st.sampled_from(KINDS)), max_size=30
    ),
)
def test_cut_blocks_covers_a_file_once_with_long_ranges_apart(header, ranges):
    ranges = [(8 * length, kind) for length, kind in ranges]
    blocks = list(cut_blocks(header, ranges))
    assert sum(length for length, _ in blocks) == header + sum(length for length, _ in ranges)
    assert all(0 < length <= BLOCK for length, _ in blocks)
    ends = set(np.cumsum([length for length, _ in blocks]).tolist()) | {0}
    position = header
    for length, _ in ranges:
        if length >= BLOCK:
            assert position in ends
            assert position + length in ends
            assert {position + at for at in range(0, length, BLOCK)} <= ends
        position += length
    kinds = [kind for length, kind in blocks for _ in range(0, length, 8)] if header % 8 == 0 else []
    wanted = [1] * (header // 8) + [kind for length, kind in ranges for _ in range(0, length, 8)]
    tiny = [False] * (header // 8) + [length < TINY for length, _ in ranges for _ in range(0, length, 8)]
    assert all(kind == want or (kind == 1 and small) for kind, want, small in zip(kinds, wanted, tiny, strict=False))
    assert RECORD * (len(blocks) + 1) <= longest_table(sum(length for length, _ in blocks))


def test_cut_blocks_joins_tiny_ranges_of_many_kinds():
    assert list(cut_blocks(0, [(104, KINDS[n % 7]) for n in range(5000)])) == [(262_080, 1), (257_920, 1)]
    mixed = [(200_000, 2), (104, 4), (200_000, 2), (104, 4), (104, 8), (4096, 4)]
    assert list(cut_blocks(0, mixed)) == [(200_000, 2), (104, 4), (200_000, 2), (208, 1), (4096, 4)]


RECORDS = [(PAGE, 0, 0, 1), (BLOCK, BLOCK, 1, 2), (300, 4096, 4 + ROTATED, 3), (16, 4096, 1, 4)]
SIZE, STORED = BLOCK + 8192, PAGE + BLOCK + 316


def test_block_table_finds_each_block():
    table = BlockTable(encode_table(RECORDS), SIZE, STORED)
    assert table.find(0, 1) == range(1, 2)
    assert table.find(BLOCK - 1, BLOCK + 1) == range(1, 3)
    assert table.find(BLOCK, BLOCK + 4096) == range(2, 3)
    assert table.find(0, SIZE) == range(1, 4)
    assert table.places.tolist() == [PAGE, PAGE + BLOCK, PAGE + BLOCK + 300, STORED]


@pytest.mark.parametrize(
    "wrong",
    [
        [],
        RECORDS[:1],
        RECORDS[1:],
        [(PAGE + 1, 0, 0, 1), *RECORDS[1:]],
        [(PAGE, 4, 0, 1), *RECORDS[1:]],
        [*RECORDS[:3], (15, 4096, 1, 4)],  # too short for what it claims
        [*RECORDS[:2], (4097, 4096, 1, 3), RECORDS[3]],  # longer than the block
        [*RECORDS[:2], (300, 4096, 3, 3), RECORDS[3]],  # an unknown kind
        [*RECORDS[:2], (300, 4094, 4 + ROTATED, 3), (16, 4098, 1, 4)],  # half a number
        [*RECORDS[:3], (16, 0, 1, 4), RECORDS[3]],
        [RECORDS[0], (BLOCK, BLOCK + 8192, 1, 2)],
        [RECORDS[0], (BLOCK + 316, SIZE, 1, 2)],
    ],
)
def test_block_table_that_does_not_describe_the_file_is_refused(wrong):
    stored = sum(each[0] for each in wrong)
    with pytest.raises(CorruptSnapshotError):
        BlockTable(encode_table(wrong) if wrong else b"", SIZE, stored)


def test_block_table_for_a_file_of_another_size_is_refused():
    for size, stored in ((SIZE + 1, STORED), (SIZE, STORED - 1)):
        with pytest.raises(CorruptSnapshotError):
            BlockTable(encode_table(RECORDS), size, stored)
