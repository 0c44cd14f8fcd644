"""What the tests of this folder share: its own modules (`from forks import Warm`), a warm interpreter, no leak."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from leaks import no_leak

HERE = Path(__file__).parent
for folder in (HERE, HERE.parent / "storage"):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))

# collecting what is no test would import it a second time, under another name
collect_ignore = [file.name for file in HERE.glob("*.py") if not file.name.startswith("test_")]


@pytest.fixture(scope="session")
def warm(tmp_path_factory):
    """An interpreter that forks for each job; where there is a compiler, with the library that lets calls fail."""
    from forks import Warm

    compiler, environment = shutil.which("cc"), {}
    if compiler:
        library = tmp_path_factory.mktemp("shim") / "shim.so"
        subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", library, HERE / "shim.c", "-ldl"], check=True)
        environment = {"LD_PRELOAD": str(library)}
    with Warm(**environment) as made:
        yield made


@pytest.fixture(scope="session")
def shimmed(warm):
    """The same, for what needs that library."""
    from servers import tool

    tool("cc", "apt-get install gcc")
    return warm


@pytest.fixture(scope="session")
def strace():
    """Strace, which can look at a process here: some containers do not let it."""
    from servers import tool, unavailable

    tool("strace", "apt-get install strace")
    done = subprocess.run(["strace", "-o", "/dev/null", "true"], check=False, capture_output=True, text=True)
    if done.returncode:
        unavailable(f"strace cannot trace here: {done.stderr}")


@pytest.fixture
def one_thread():
    """Torch's threads wait for each other, and on a machine that is busy, long: small tensors need none."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def writer_process(tmp_path_factory):
    """The process that writes is kept, with its channel."""
    import torch

    from snapshot import Snapshot, StateDict

    state = {"s": StateDict(x=torch.ones(1 << 20))}  # some of the memory that it shares is kept, too
    Snapshot.async_take(tmp_path_factory.mktemp("first") / "s", state, worker="process").wait()


@pytest.fixture(autouse=True)
def nothing_leaks():
    """No test leaves a file descriptor open, or a thread that was not there."""
    with no_leak():
        yield
