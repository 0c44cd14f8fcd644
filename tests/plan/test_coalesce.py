"""Reads: every wanted byte fetched once, close ranges together, long ones cut at blocks."""

from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from snapshot.plan.layout import plan_reads
from snapshot.tensors.digest import BLOCK


@dataclass
class Wanted:
    location: str
    begin: int
    end: int


@st.composite
def wants(draw):
    made = []
    for location in draw(st.sampled_from(["a", "ab"])):
        position = 0
        for _ in range(draw(st.integers(0, 12))):
            position += draw(st.sampled_from([0, 0, 1, 100, 5000]))
            length = draw(st.sampled_from([0, 1, 50, 4000, BLOCK, 3 * BLOCK + 7]))
            made.append(Wanted(location, position, position + length))
            position += length
    return draw(st.permutations(made))


@given(wants(), st.sampled_from([1, BLOCK, 2 * BLOCK, 8 << 20]), st.sampled_from([0, 100, 10_000]))
def test_plan_reads_fetches_every_wanted_byte_once(found, part_bytes, gap):
    parts = plan_reads(found, part_bytes, gap)
    got = dict.fromkeys(range(len(found)), 0)
    for part in parts:
        position = part.begin
        assert part.segments[0].begin == part.begin
        assert part.segments[-1].end == part.end
        assert part.end - part.begin <= max(BLOCK, part_bytes) + gap * len(part.segments)
        for segment in part.segments:
            want = found[segment.request]
            assert want.location == part.location
            assert 0 <= segment.begin - position <= gap
            assert want.begin <= segment.begin < segment.end <= want.end
            assert (segment.begin - want.begin) % BLOCK == 0
            got[segment.request] += segment.end - segment.begin
            position = segment.end
    assert got == {i: want.end - want.begin for i, want in enumerate(found)}


def test_plan_reads_joins_close_ranges():
    found = [Wanted("a", i * 100, i * 100 + 90) for i in range(1000)]
    assert len(plan_reads(found, 8 << 20, 10)) == 1
    assert len(plan_reads(found, 8 << 20, 9)) == 1000
