"""Every byte of a small snapshot flipped by itself: `python -m pytest -s tests/soak/test_flips.py`."""

import pytest

from snapshot import Snapshot
from tests.hostile.damaged_snapshot import flipped, look, take_to_memory


@pytest.mark.timeout(600)
@pytest.mark.parametrize("mask", [None, 0xFF])
def test_soak_every_flipped_byte_is_found(mask):
    arrays = take_to_memory("flips")
    snapshot = Snapshot("memory://flips")
    count = met = 0
    for array in arrays.values():
        for at in range(len(array)):
            with flipped(array, at, mask=mask):
                met += look(Snapshot("memory://flips"))
            count += 1
    assert snapshot.verify()
    print(f"{count:,} bytes flipped, all found by verify, {met:,} by restore; the others are of headers")
    assert count - met == sum(file.header for file in snapshot._manifest.open().files.values())
