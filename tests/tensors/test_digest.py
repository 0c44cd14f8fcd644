"""Digests are the same however their bytes come."""

import itertools

import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from snapshot.tensors.digest import BLOCK, SIZE, RunningDigest, count_blocks, digest_bytes


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 3 * BLOCK + 5), st.lists(st.integers(0, 3 * BLOCK), max_size=6))
def test_running_digest_of_pieces_equals_the_digest_of_the_whole(length, cuts):
    data = memoryview(bytes(range(251)) * (length // 251 + 1))[:length]
    running = RunningDigest()
    borders = sorted({0, length, *(min(cut, length) for cut in cuts)})
    for begin, end in itertools.pairwise(borders):
        running.update(data[begin:end])
    digest, table = running.finish()
    assert digest == digest_bytes(data)
    assert len(table) == SIZE * count_blocks(length)
    blocks = [xxhash.xxh3_128_digest(data[at : at + BLOCK]) for at in range(0, length, BLOCK)]
    if table:
        assert table == b"".join(blocks)
        assert digest == "xxh3:" + xxhash.xxh3_128_hexdigest(table)
    else:
        assert digest == "xxh3:" + xxhash.xxh3_128_hexdigest(data)
