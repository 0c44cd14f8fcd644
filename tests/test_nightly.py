"""The list of the tests that only `.ci/run --all` runs."""

import re
from pathlib import Path

from tests.conftest import NIGHTLY

HERE = Path(__file__).parent


def test_each_line_begins_the_name_of_a_test():
    for line in NIGHTLY:
        module, _, name = line.partition("::")
        source = (HERE / module).read_text()
        assert not name or re.search(rf"^def {re.escape(name.partition('[')[0])}\(", source, re.MULTILINE), line
