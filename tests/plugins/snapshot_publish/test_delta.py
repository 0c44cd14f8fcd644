"""The codec of deltas: exact for all sizes, and safe with any input."""

import zlib
from itertools import pairwise

import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from snapshot.errors import CorruptSnapshotError
from snapshot.tensors.digest import BLOCK, digest_bytes
from snapshot_publish.build import WINDOWS, DeltaDecoder, DeltaEncoder, TensorSums, checksum_text, group_by_windows

NOTHING = TensorSums("", b"")


def applied(base, deltas, **expected):
    """The result of deltas on a base, in place."""
    held = bytearray(base)
    view = memoryview(held)

    def read(offset, buffer):
        buffer[:] = view[offset : offset + len(buffer)]

    def write(offset, buffer):
        view[offset : offset + len(buffer)] = buffer

    digest = DeltaDecoder().apply(len(held), read, deltas, write, **expected)
    assert digest == digest_bytes(bytes(held))
    return bytes(held)


def array(data):
    return np.frombuffer(bytearray(data), np.uint8)


def sums_of(data):
    return DeltaEncoder().encode(array(data), array(bytes(len(data))), NOTHING).sums


SIZES = st.sampled_from([0, 1, 7, 8, 100, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK, 3 * BLOCK + 13])


@given(SIZES, st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(1, 255)), max_size=6))
def test_delta_encoder_and_decoder_are_exact(size, changes):
    base = np.random.default_rng(size).integers(0, 256, size, np.uint8)
    new = base.copy()
    for place, value in changes:
        if size:
            new[int(place * size)] ^= value
    found = DeltaEncoder().encode(new, base, sums_of(base.tobytes()))
    if np.array_equal(new, base):
        assert found.compressed == b""
        return
    assert found.checksum == zlib.adler32(new.tobytes())
    assert found.sums.digest == digest_bytes(new.tobytes())
    # an engine decompresses in one call, which needs the size in the frame
    change = zstandard.ZstdDecompressor().decompress(bytes(found.compressed))
    assert np.array_equal(np.frombuffer(change, np.uint8), new ^ base)
    expected = {"checksum": checksum_text(found.checksum), "digest": found.sums.digest}
    assert applied(base.tobytes(), [found.compressed], **expected) == new.tobytes()


def test_delta_decoder_applies_several_deltas_at_once():
    states = [np.random.default_rng(seed).integers(0, 256, 2 * BLOCK + 5, np.uint8) for seed in range(4)]
    encoder = DeltaEncoder()
    sums, deltas = sums_of(states[0].tobytes()), []
    for base, new in pairwise(states):
        found = encoder.encode(new, base, sums)
        sums = found.sums
        deltas.append(found.compressed)
    assert applied(states[0].tobytes(), deltas, digest=sums.digest) == states[-1].tobytes()


@pytest.mark.parametrize(
    ("delta", "message"),
    [
        (b"", "is not a zstd frame"),
        (b"no frame at all", "is not a zstd frame"),
        (zstandard.compress(bytes(99)), "must have 100 bytes, got 99"),
        (zstandard.compress(bytes(1 << 30)), "must have 100 bytes, got 1073741824"),
        (zstandard.compress(bytes(100))[:-3], r"ends before|decompressed"),
        (zstandard.ZstdCompressor(write_content_size=False).compress(bytes(101)), "longer than the tensor"),
        (zstandard.ZstdCompressor(write_content_size=False).compress(bytes(99)), "ends before"),
    ],
)
def test_delta_that_is_invalid_is_refused(delta, message):
    with pytest.raises(CorruptSnapshotError, match=message):
        applied(bytes(100), [delta])


def test_delta_result_with_another_checksum_or_digest_is_refused():
    base, new = bytes(1000), b"\1" * 1000
    found = DeltaEncoder().encode(array(new), array(base), sums_of(base))
    with pytest.raises(CorruptSnapshotError, match="its checksum must be 00000001"):
        applied(base, [found.compressed], checksum="00000001")
    with pytest.raises(CorruptSnapshotError, match="its digest must be xxh3:00"):
        applied(base, [found.compressed], digest="xxh3:00")


def test_delta_of_sparse_changes_is_small():
    """One percent of the elements of a bfloat16 tensor, changed by the last bit, is below 2 % of its bytes."""
    rng = np.random.default_rng(0)
    base = rng.integers(0, 65536, 4 << 20, np.uint16)
    new = base.copy()
    new[rng.integers(0, len(base), len(base) // 100)] ^= 1
    base, new = base.view(np.uint8), new.view(np.uint8)
    found = DeltaEncoder().encode(new, base, sums_of(base.tobytes()))
    assert len(found.compressed) < 0.02 * len(new)


def wide(payload, window_log=26):
    """A frame that asks for a large window."""
    parameters = zstandard.ZstdCompressionParameters(window_log=window_log, enable_ldm=False, write_content_size=False)
    stream = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    return stream.compress(payload) + stream.flush()


def test_delta_large_zstd_windows_are_not_open_together():
    payload = bytes(1 << 20)
    deltas = [wide(payload) for _ in range(64)]
    groups = group_by_windows(deltas, 1 << 30)
    assert [each for group, _ in groups for each in group] == deltas
    assert all(len(group) == 1 for group, _ in groups)
    small = [wide(payload, 20) for _ in range(64)]
    assert max(memory for _, memory in group_by_windows(small, 1 << 30)) <= WINDOWS
    assert len(group_by_windows(small, 1 << 30)) == 4
    assert group_by_windows([], 100) == [([], 0)]
    with pytest.raises(CorruptSnapshotError, match="not a zstd frame"):
        group_by_windows([b"no frame"], 100)


def test_delta_decompressors_with_large_windows_are_not_kept():
    decoder = DeltaDecoder()
    held = bytearray(1 << 21)

    def read(offset, buffer):
        buffer[:] = held[offset : offset + len(buffer)]

    def write(offset, buffer):
        held[offset : offset + len(buffer)] = buffer

    decoder.apply(len(held), read, [wide(bytes(len(held)), 17)], write)
    assert len(decoder._streams) == 1
    decoder.apply(len(held), read, [wide(bytes(len(held)), 26)], write)
    assert not decoder._streams
