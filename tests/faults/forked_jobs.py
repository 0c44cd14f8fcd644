"""A warm interpreter that forks for each job: what is to be killed is up in milliseconds, and not in seconds."""

import ctypes
import gc
import importlib
import os
import pickle
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection

PATIENCE = 300  # seconds that a job may take on a machine that is busy with something else


@dataclass
class Ended:
    """How a job ended: by its own, with what it returned or raised, or by a signal."""

    status: int
    value: object = None
    error: str = ""

    @property
    def killed(self):
        return os.WIFSIGNALED(self.status) and os.WTERMSIG(self.status) == signal.SIGKILL

    def returned(self):
        assert not self.error, self.error
        assert self.status == 0, f"the job ended with wait status {self.status}"
        return self.value


class Forker:
    """The interpreter; `run(function, ...)` calls a function of a module in a fork of it."""

    def __init__(self, **environment):
        here, there = socket.socketpair()
        self._process = subprocess.Popen(
            [
                sys.executable,
                "-c",
                f"from tests.faults import forked_jobs; forked_jobs.serve({there.fileno()}, {os.getpid()})",
            ],
            env={**os.environ, **environment, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            pass_fds=[there.fileno()],
        )
        there.close()
        self._connection = Connection(here.detach())

    def begin(self, function, *arguments, stopped=False):
        """Start a job; its process id. `stopped`: it waits for SIGCONT."""
        self._connection.send((function.__module__, function.__qualname__, arguments, stopped))
        return self._receive()

    def end(self):
        """Wait for the job."""
        return Ended(*self._receive())

    def run(self, function, *arguments):
        self.begin(function, *arguments)
        return self.end()

    def _receive(self):
        assert self._connection.poll(PATIENCE + 20), "no answer from the interpreter that forks"
        return self._connection.recv()

    def close(self):
        self._connection.close()
        self._process.wait(20)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()


def serve(descriptor, parent):
    """The whole life of the interpreter: imports, but starts no thread; then one fork after the other."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: it does not outlive the tests
    if os.getppid() != parent:
        return
    import torch

    torch.set_num_threads(1)
    import snapshot.save.planned_take
    import snapshot.storages.file
    import snapshot.testing  # noqa: F401
    from tests.faults.shared_folder import state

    state(0)  # torch imports more where an optimizer is made

    gc.collect()
    gc.freeze()  # what a fork never looks at is never copied, and takes no time
    connection = Connection(descriptor)
    while True:
        try:
            module, name, arguments, stopped = connection.recv()
        except EOFError:
            os._exit(0)  # to take torch down in order takes a second
        importlib.import_module(module)
        ours, theirs = os.pipe()
        pid = os.fork()
        if pid == 0:
            connection.close()
            os.close(ours)
            _job(theirs, module, name, arguments, stopped)
        os.close(theirs)
        if stopped:
            os.waitpid(pid, os.WUNTRACED)
        connection.send(pid)
        with open(ours, "rb") as answer:
            data = answer.read()
        _, status = os.waitpid(pid, 0)
        connection.send((status, *(pickle.loads(data) if data else ())))


def _job(answer, module, name, arguments, stopped):
    signal.alarm(PATIENCE)
    os.setpgid(0, 0)
    if stopped:
        os.kill(os.getpid(), signal.SIGSTOP)
    try:
        result = (getattr(importlib.import_module(module), name)(*arguments), "")
    except BaseException:  # noqa: BLE001 - whatever it is, the test is told
        import traceback

        result = (None, traceback.format_exc())
    data = pickle.dumps(result)
    while data:
        data = data[os.write(answer, data) :]
    os._exit(0)


def gone(pid):
    """Wait until a process is no more."""
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
        try:
            with open(f"/proc/{pid}/stat") as file:
                if file.read().rpartition(")")[2].split()[0] in "ZX":
                    return
        except FileNotFoundError:
            return
        time.sleep(0.01)
    raise TimeoutError(f"process {pid} still runs")
