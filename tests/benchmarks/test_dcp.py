"""What `snapshot bench --dcp` measures it has checked, and nothing of it is left."""

import pytest

from snapshot.bench.rounds import place
from tests.benchmarks.formats import compare_dcp as compare

pytestmark = pytest.mark.bench


def test_each_storage_is_measured_and_what_is_loaded_is_what_was_saved(tmp_path):
    with place(str(tmp_path)) as where:
        lines = list(compare(where, 0.001, 1))
        assert not any(tmp_path.glob("*/*"))
    text = "\n".join(lines)
    assert [text.count(name) for name in ("\n    nothing ", "\n    torch ", "\n    snapshot ")] == [4, 10, 6]
    assert list(tmp_path.iterdir()) == []
