"""The lists of the tests that only `.ci/run --all` runs, and of those that the fast tier leaves out."""

import re
from pathlib import Path

import pytest

from tests.conftest import NIGHTLY, SLOW

HERE = Path(__file__).parent


@pytest.mark.parametrize("names", [NIGHTLY, SLOW], ids=["nightly", "slow"])
def test_each_line_begins_the_name_of_a_test(names):
    for line in names:
        module, *classes, name = line.partition("[")[0].split("::") if "::" in line else (line, "")
        source = (HERE / module).read_text()
        indent = "    " * len(classes)
        assert not name or re.search(rf"^{indent}def {re.escape(name)}\(", source, re.MULTILINE), line
