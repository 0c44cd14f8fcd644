"""Every call to the file system of every verb fails, in every way that it may."""

import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
for folder in (HERE.parent / "trust", HERE.parent / "storage"):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
import faults  # noqa: E402 - it is found from here on
from forks import Warm  # noqa: E402


@pytest.mark.timeout(600)
@pytest.mark.parametrize("verb", ["take", "overwrite", "async_overwrite", "delete", "read"])
def test_every_call_fails_in_every_way(tmp_path, verb):
    library = tmp_path / "shim.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", library, faults.SOURCE, "-ldl"], check=True)
    with Warm(LD_PRELOAD=str(library)) as warm:
        tried, survived = faults.fail_everywhere(warm, tmp_path / "here", verb)
        print(f"{verb}: {tried} failures, {survived} of them did not matter")
