"""Scripts run in forks of an interpreter that has imported torch already: each is up in milliseconds, and not seconds.

All else is as for `python SCRIPT`: it is `__main__`, has its own arguments and environment, and ends as an interpreter
does, with its exit handlers.
"""

import atexit
import contextlib
import ctypes
import gc
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
from multiprocessing.connection import Connection

PATIENCE = 300  # seconds that a script may take on a machine that is busy with something else
PR_SET_PDEATHSIG = 1


class Failed(Exception):
    """A script did not end with status 0; its text is what it printed."""


class Warm:
    """The interpreter that forks."""

    def __init__(self):
        here, there = socket.socketpair()
        self._process = subprocess.Popen(
            [sys.executable, __file__, str(there.fileno()), str(os.getpid())],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            pass_fds=[there.fileno()],
        )
        there.close()
        self._connection = Connection(here.detach())

    def start(self, script, *arguments, **environment):
        """Begin a script, a file's path or text; what `finish` wants to know of it."""
        descriptor, printed = tempfile.mkstemp()
        os.close(descriptor)
        request = str(script), list(map(str, arguments)), {**os.environ, **environment}, printed
        return self._ask("start", request), printed

    def finish(self, started):
        """Wait until a script has ended, and return what it printed, to both of its streams."""
        pid, printed = started
        status = self._ask("wait", pid)
        with open(printed) as file:
            text = file.read()
        os.unlink(printed)
        if status:
            raise Failed(f"exit status {os.waitstatus_to_exitcode(status)}:\n{text}")
        return text

    def run(self, script, *arguments, **environment):
        """What a script prints that ends well."""
        return self.finish(self.start(script, *arguments, **environment))

    def _ask(self, verb, what):
        self._connection.send((verb, what))
        assert self._connection.poll(PATIENCE + 20), "no answer from the interpreter that forks"
        return self._connection.recv()

    def close(self):
        self._connection.close()
        self._process.wait(20)


def serve(connection):
    """The interpreter's whole life: it imports, but starts no thread, and forks. Returns only in a fork: its script."""
    import torch

    torch.set_num_threads(1)
    import torch.distributed.fsdp
    import torch.distributed.tensor

    import snapshot.cli
    import snapshot.testing  # noqa: F401

    weight = torch.nn.Parameter(torch.ones(1))
    weight.grad = torch.ones(1)
    torch.optim.AdamW([weight]).step()  # for which torch imports more
    del weight
    gc.collect()
    gc.freeze()  # what a fork never looks at is never copied
    while True:
        try:
            verb, what = connection.recv()
        except EOFError:
            os._exit(0)  # to take torch down in order takes a second
        if verb == "wait":
            _, status = os.waitpid(what, 0)
            if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGALRM:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(what, signal.SIGKILL)  # what a script forked that hung
            connection.send(status)
            continue
        pid = os.fork()
        if pid == 0:
            connection.close()
            return what
        connection.send(pid)


def become(script, arguments, environment, printed):
    """What `python script arguments` is, from here on."""
    os.setpgid(0, 0)
    signal.alarm(PATIENCE)
    with open(printed, "ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    if "triton" in sys.modules:  # it prints what is never collected at the end
        atexit.register(gc.unfreeze)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = [script, *arguments]
    if "\n" not in script:
        sys.path[0] = os.path.dirname(script)
        runpy.run_path(script, run_name="__main__")
    else:
        sys.argv[0] = "-c"
        exec(compile(script, "<script>", "exec"), vars(sys.modules["__main__"]))


if __name__ == "__main__":
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # it does not outlive the tests
    if os.getppid() == int(sys.argv[2]):
        become(*serve(Connection(int(sys.argv[1]))))
