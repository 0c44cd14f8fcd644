"""Parts of files that are read into several buffers."""

from hypothesis import given
from hypothesis import strategies as st

from snapshot.loading.decompression import _Wanted


@given(st.integers(0, 1000), st.lists(st.integers(1, 50), min_size=1, max_size=20), st.data())
def test_wanted_range_is_found_in_several_buffers(begin, lengths, data):
    buffers = [bytearray(length) for length in lengths]
    wanted = _Wanted(begin, [memoryview(each) for each in buffers])
    assert wanted.end == begin + sum(lengths)
    first = data.draw(st.integers(begin, wanted.end))
    last = data.draw(st.integers(first, wanted.end))
    number = 0
    for part in wanted.parts(first, last):
        part[:] = bytes((number + n) % 251 + 1 for n in range(len(part)))
        number += len(part)
    whole = b"".join(buffers)
    expected = bytes(n % 251 + 1 for n in range(last - first))
    assert whole == bytes(first - begin) + expected + bytes(wanted.end - last)
