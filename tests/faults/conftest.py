"""What tests of faults share: a process that forks for each job, and tools that let calls fail. No test leaks."""

import shutil
import subprocess

import pytest

from tests.faults.failing_calls import SOURCE
from tests.faults.forked_jobs import Forker
from tests.helpers.leaks import nothing_leaks  # noqa: F401 - a fixture
from tests.helpers.servers import tool, unavailable


@pytest.fixture(scope="session")
def preloaded(tmp_path_factory):
    """The environment with the library that lets calls fail, if there is a compiler."""
    compiler = shutil.which("cc")
    if not compiler:
        return {}
    library = tmp_path_factory.mktemp("failing") / "failing_calls.so"
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", library, SOURCE, "-ldl"], check=True)
    return {"LD_PRELOAD": str(library)}


@pytest.fixture(scope="session")
def forker(preloaded):
    """An interpreter that forks for each job."""
    with Forker(**preloaded) as made:
        yield made


@pytest.fixture(scope="session")
def portable_forker(preloaded):
    """The same, with data files through aiofiles."""
    with Forker(**preloaded, SNAPSHOT_FILE_IO="portable") as made:
        yield made


@pytest.fixture(scope="session")
def shimmed(forker):
    """The same, or skip if there is no such library."""
    tool("cc", "apt-get install gcc")
    return forker


@pytest.fixture(scope="session")
def portable_shimmed(portable_forker):
    """The same, with data files through aiofiles."""
    tool("cc", "apt-get install gcc")
    return portable_forker


@pytest.fixture(scope="session")
def strace():
    """Strace, which can look at a process here: some containers do not let it."""
    tool("strace", "apt-get install strace")
    done = subprocess.run(["strace", "-o", "/dev/null", "true"], check=False, capture_output=True, text=True)
    if done.returncode:
        unavailable(f"strace cannot trace here: {done.stderr}")
