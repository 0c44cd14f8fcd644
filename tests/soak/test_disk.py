"""Every call to the file system of every verb fails, in every way that it may."""

import subprocess

import pytest

from tests.faults import failing_calls
from tests.faults.forked_jobs import Forker


@pytest.mark.timeout(600)
@pytest.mark.parametrize("verb", ["take", "overwrite", "async_overwrite", "delete", "read"])
def test_soak_every_system_call_fails_in_every_way(tmp_path, verb):
    library = tmp_path / "shim.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", library, failing_calls.SOURCE, "-ldl"], check=True)
    with Forker(LD_PRELOAD=str(library)) as forker:
        tried, survived = failing_calls.fail_everywhere(forker, tmp_path / "here", verb)
        print(f"{verb}: {tried} failures, {survived} of them did not matter")
