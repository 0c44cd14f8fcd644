"""Several real ranks on gloo, kept running, so that a test of them costs milliseconds.

Workers are forked from multiprocessing's forkserver, which has imported torch once and has a single thread. They share
its hash seed, as the ranks of a real job don't: `Pool(world, method="spawn")` starts interpreters of their own.
"""

import contextlib
import ctypes
import datetime
import faulthandler
import functools
import importlib.util
import multiprocessing
import multiprocessing.forkserver
import os
import pickle
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from multiprocessing import connection
from pathlib import Path
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist

PRELOAD = ["torch", "torch.distributed", "torch.distributed.tensor", "numpy", "snapshot", "pytest"]
ENVIRONMENT = {
    "GLOO_SOCKET_IFNAME": "lo",
    # a library that starts threads when it is imported would make the forkserver unsafe to fork
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
}


class Died(Exception):
    """The outcome of a rank whose process ended: by `signal`, or with exit status `code` if that is None."""

    def __init__(self, rank, code):
        self.rank, self.code = rank, code
        self.signal = signal.Signals(-code) if code is not None and code < 0 else None
        super().__init__(f"rank {rank} died: {self.signal.name if self.signal else f'exit status {code}'}")


class Remote(Exception):
    """Stands for a rank's exception that cannot be sent; has its `rank` and `faults`, where it had them."""

    def __init__(self, type_name, text, attributes):
        super().__init__(type_name, text, attributes)
        self.type_name, self.text = type_name, text
        self.__dict__.update(attributes)

    def __str__(self):
        return f"{self.type_name}: {self.text}"


class Traces(Exception):
    """The tracebacks of all ranks that failed, as text."""


class Hang(AssertionError):
    """A run passed its timeout: its text holds the Python stacks of the ranks that had not answered."""


class Pool:
    """`world` processes, each a rank of the default process group; call it from one thread.

    After a run, `seconds[rank]` says how long it took there, and `warnings[rank]` lists what it warned of.
    """

    def __init__(self, world, *, store="file", timeout=60, method="forkserver"):
        """`store` is "file" or "tcp", `timeout` that of the group's collectives, in seconds."""
        self.world, self.store, self.timeout, self.method = world, store, timeout, method
        self._open()

    def _open(self):
        self._folder = Path(tempfile.mkdtemp(prefix="pool-"))
        self._processes, self._pipes = [], []
        self._pending, self._stopped = set(), set()
        try:
            self._fork()
            port = None
            if self.store == "tcp":
                self.start(_listen, self.world, self.timeout, ranks=[0])
                [port] = self._values(self.finish(ranks=[0]))
            self.run(_join, self.world, self.timeout, port or str(self._folder / "store"))
        except BaseException:
            self.close()
            raise

    def _fork(self):
        context = multiprocessing.get_context(self.method)
        if self.method == "forkserver":
            context.set_forkserver_preload(PRELOAD)
        with mock.patch.dict(os.environ, ENVIRONMENT):
            for rank in range(self.world):
                ours, theirs = context.Pipe()
                self._pipes.append(ours)
                arguments = (rank, theirs, str(self._folder), dict(os.environ))
                process = context.Process(target=_work, args=arguments, name=f"rank-{rank}", daemon=True)
                process.start()
                theirs.close()
                self._processes.append(process)

    def close(self):
        """Kill the workers; nothing is left of them."""
        for process in self._processes:
            process.kill()  # even those that were stopped
        for process in self._processes:
            process.join(10)
            process.close()
        for pipe in self._pipes:
            pipe.close()
        self._processes, self._pipes = [], []
        shutil.rmtree(self._folder, ignore_errors=True)

    def restart(self):
        """Fresh workers in the place of these."""
        self.close()
        self._open()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def __repr__(self):
        return f"Pool(world={self.world}, store={self.store!r}, pids={self.pids})"

    @property
    def pids(self):
        return [process.pid for process in self._processes]

    def healthy(self):
        """Whether all ranks are there, none is busy or stopped, and they still agree on their collectives."""
        if not self._processes or self._pending or self._stopped:
            return False
        if not all(process.is_alive() for process in self._processes):
            return False
        nonce = time.monotonic_ns()
        with contextlib.suppress(Hang):
            return self.outcomes(_probe, nonce, timeout=5) == [True] * self.world
        return False

    def run(self, function, *args, timeout=300):
        """What `function(*args)` returned on each rank; an exception of any rank is raised here.

        Where several failed, it is the lowest rank's; its `__cause__` is the text of all their tracebacks.
        """
        __tracebackhide__ = True
        return self._values(self.outcomes(function, *args, timeout=timeout))

    def outcomes(self, function, *args, timeout=300):
        """Each rank's value, or the exception that it raised, or `Died`. Raises nothing but `Hang`."""
        __tracebackhide__ = True
        self.start(function, *args)
        return self.finish(timeout)

    def start(self, function, *args, ranks=None):
        """Begin a run on all ranks, or on some; `finish` waits for it.

        `function` is a module's, or a `functools.partial` of one, and finds its rank with `dist.get_rank()`.
        """
        if self._pending:
            raise RuntimeError(f"the run before has not ended on ranks {sorted(self._pending)}: finish it first")
        if not self._processes:  # it was closed in between
            self._open()
        module = sys.modules[(function.func if isinstance(function, functools.partial) else function).__module__]
        file = getattr(module, "__file__", None)
        test = os.environ.get("PYTEST_CURRENT_TEST", "")
        request = pickle.dumps((test, module.__name__, file, pickle.dumps((function, args))))
        self._results = [None] * self.world
        self._traces = {}
        self.seconds = [None] * self.world
        self.warnings = [[] for _ in range(self.world)]
        self._logged = [_size(self._log(rank)) for rank in range(self.world)]
        self._began = time.monotonic()
        for rank in range(self.world) if ranks is None else ranks:
            self._pending.add(rank)
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it died, as will be seen
                self._pipes[rank].send_bytes(request)

    def finish(self, timeout=300, ranks=None, until_death=False):
        """Wait for the run that was started, on all ranks or on some; their outcomes.

        The others' can be had later: of a rank that was stopped, say. With `until_death`, the others of a rank that
        died are not waited for, and have no outcome.
        """
        __tracebackhide__ = True
        wanted = list(range(self.world) if ranks is None else ranks)
        end = time.monotonic() + timeout
        while waiting := self._pending.intersection(wanted):
            sources = {self._pipes[rank]: rank for rank in waiting}
            sources |= {self._processes[rank].sentinel: rank for rank in waiting}
            ready = connection.wait(list(sources), max(0, end - time.monotonic()))
            if not ready:
                raise Hang(self._hang(timeout))
            for rank in {sources[source] for source in ready}:
                self._collect(rank)
            if until_death and any(isinstance(each, Died) for each in self._results):
                break
        return [self._results[rank] for rank in wanted]

    def kill(self, rank):
        self._processes[rank].kill()

    def stop(self, rank):
        """SIGSTOP: the rank stays, and says nothing."""
        self._stopped.add(rank)
        os.kill(self.pids[rank], signal.SIGSTOP)

    def cont(self, rank):
        os.kill(self.pids[rank], signal.SIGCONT)
        self._stopped.discard(rank)

    def output(self, rank):
        """What the rank printed and logged in the last run."""
        with contextlib.suppress(FileNotFoundError):
            return self._log(rank).read_bytes()[self._logged[rank] :].decode(errors="replace")
        return ""

    def _log(self, rank):
        return self._folder / f"log-{rank}"

    def _collect(self, rank):
        try:
            if not self._pipes[rank].poll():
                raise EOFError
            answer = self._pipes[rank].recv_bytes()
        except (EOFError, ConnectionResetError):
            self._processes[rank].join(10)
            self._pending.discard(rank)
            self._results[rank] = Died(rank, self._processes[rank].exitcode)
            self._traces[rank] = str(self._results[rank])
            self.seconds[rank] = time.monotonic() - self._began
            return
        self._pending.discard(rank)
        chain, trace, self.seconds[rank], self.warnings[rank] = pickle.loads(answer)
        outcome, *causes = map(pickle.loads, chain)
        self._results[rank] = outcome
        for cause in causes:
            outcome.__cause__ = cause
            outcome = cause
        if trace:
            self._traces[rank] = trace

    def _values(self, outcomes):
        __tracebackhide__ = True
        if not self._traces:
            return outcomes
        texts = [f"rank {rank}:\n{text}{self._printed(rank)}" for rank, text in sorted(self._traces.items())]
        raise self._results[min(self._traces)] from Traces("\n" + "\n".join(texts))

    def _printed(self, rank):
        text = self.output(rank)[-4000:]
        return f"\nrank {rank} printed:\n{text}" if text else ""

    def _hang(self, timeout):
        """Kill all workers; where they were."""
        for rank in self._pending:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pids[rank], signal.SIGUSR1)
                os.kill(self.pids[rank], signal.SIGCONT)  # one that was stopped tells nothing
        files = {rank: self._folder / f"stack-{rank}" for rank in sorted(self._pending)}
        size, end = None, time.monotonic() + 2
        # a dump is whole when nothing was added to it for a while: it has no end mark
        while time.monotonic() < end and (size is None or 0 in size or size != list(map(_size, files.values()))):
            size = list(map(_size, files.values()))
            time.sleep(0.05)
        stacks = {rank: file.read_text() if file.exists() else "" for rank, file in files.items()}
        for process in self._processes:
            process.kill()
        lines = [f"ranks {sorted(self._pending)} of {self.world} gave no answer within {timeout} s"]
        for rank in range(self.world):
            if rank in stacks:
                lines.append(f"rank {rank} was here:\n{stacks[rank] or '(it told nothing)'}{self._printed(rank)}")
            elif rank in self._traces:
                lines.append(f"rank {rank} failed:\n{self._traces[rank]}{self._printed(rank)}")
            elif self.seconds[rank] is not None:
                lines.append(f"rank {rank} was done after {self.seconds[rank]:.3f} s")
        return "\n".join(lines)


def _size(file):
    return file.stat().st_size if file.exists() else 0


# what follows runs in the workers


class _Self:
    """What a worker knows before it has a process group."""

    rank = None
    store = None


def _work(rank, pipe, folder, environment):
    # no worker outlives the tests, however they end: the forkserver ends with them, unless a worker holds its pipe
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    server = multiprocessing.forkserver._forkserver
    if server._forkserver_alive_fd is not None:
        os.close(server._forkserver_alive_fd)
        server._forkserver_alive_fd = None
    os.environ.clear()
    os.environ.update(environment)  # the forkserver's is as old as the first pool
    log = os.open(f"{folder}/log-{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    sys.stdout.reconfigure(line_buffering=True)
    stacks = open(f"{folder}/stack-{rank}", "w")  # noqa: SIM115 - it is needed as long as the process lives
    faulthandler.register(signal.SIGUSR1, stacks)
    torch.set_num_threads(1)
    np.random.seed()  # forks would draw the same numbers
    _Self.rank = rank
    while True:
        try:
            request = pipe.recv_bytes()
        except EOFError:
            os._exit(0)
        answer = _answer(request)
        if reach := sys.modules.get("tests.mutants.reach"):
            reach.write_child()
        pipe.send_bytes(answer)


def _answer(request):
    """The pickled value, or the exception and its causes; the traceback; the seconds; the warnings."""
    begin = time.perf_counter()
    trace = ""
    told = []
    try:
        os.environ["PYTEST_CURRENT_TEST"], name, file, call = pickle.loads(request)
        _load(name, file)
        function, args = pickle.loads(call)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            begin = time.perf_counter()
            value = function(*args)
        seconds = time.perf_counter() - begin
        chain = [pickle.dumps(value)]
    except BaseException as error:  # noqa: BLE001 - pytest.fail and sys.exit, too, are told to the test
        seconds = time.perf_counter() - begin
        # the plain assert of a worker says nothing of its values: the locals do
        shown = traceback.TracebackException.from_exception(error, capture_locals=isinstance(error, AssertionError))
        trace = "".join(shown.format())
        chain = []
        while error is not None and len(chain) < 10:
            chain.append(_packed(error))
            error = error.__cause__
    return pickle.dumps((chain, trace, seconds, [f"{one.category.__name__}: {one.message}" for one in told]))


def _load(name, file):
    """Import a test module by its file, under the name that pytest gave it: no package holds it."""
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, file)
        module = sys.modules[name] = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[name]
            raise


class _Parts:
    """Makes an exception anew without its `__init__`, whose arguments are not what `args` holds."""

    def __init__(self, error):
        self.error = error

    def __reduce__(self):
        return _rebuilt, (type(self.error), self.error.args, vars(self.error))


def _rebuilt(kind, args, attributes):
    error = kind.__new__(kind, *args)
    error.args = args
    error.__dict__.update(attributes)
    return error


def _packed(error):
    for form in (error, _Parts(error)):
        with contextlib.suppress(Exception):
            data = pickle.dumps(form)
            back = pickle.loads(data)
            if type(back) is type(error) and str(back) == str(error):
                return data
    attributes = {name: getattr(error, name) for name in ("rank", "faults") if hasattr(error, name)}
    return pickle.dumps(Remote(type(error).__qualname__, str(error), attributes))


def _listen(world, timeout):
    wait = datetime.timedelta(seconds=timeout)
    _Self.store = dist.TCPStore("127.0.0.1", 0, world, is_master=True, timeout=wait, wait_for_workers=False)
    return _Self.store.port


def _join(world, timeout, place):
    """Enter the process group, whose store is at a port or in a file."""
    wait = datetime.timedelta(seconds=timeout)
    if isinstance(place, str):
        store = dist.FileStore(place, world)
        store.set_timeout(wait)
    else:
        store = _Self.store or dist.TCPStore("127.0.0.1", place, world, is_master=False, timeout=wait)
    dist.init_process_group("gloo", store=store, rank=_Self.rank, world_size=world, timeout=wait)


def _probe(nonce):
    """What all ranks must agree on: the values of a collective, and how many groups were made."""
    mine = torch.tensor([nonce, dist.distributed_c10d._world.group_count])
    everyone = [torch.zeros_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, mine)
    return [one.tolist() for one in everyone] == [mine.tolist()] * len(everyone)
