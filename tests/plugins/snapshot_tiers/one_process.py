"""Hosts, ranks and uploaders of a run with near folders in one process, on a clock that only moves if someone waits.

Each rank is a thread with a manager of its own, and the ranks of a job meet in a dictionary. Uploaders are objects,
whose turns are taken while the clock moves. All else is the library's: files, sockets between hosts, exchanges.
"""

import contextlib
import itertools
import os
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import msgspec

from snapshot import SnapshotManager
from snapshot.distributed import exchange, group
from snapshot.distributed.group import Ranks
from snapshot.extensions import is_own
from snapshot.manager.manager import open_managers
from snapshot.manager.retention import Cleaner
from snapshot.save import take
from snapshot.save.take_slots import TakeSlots
from snapshot.storages.file.file_storage import FileStorage
from snapshot_tiers import control, join, tier_set
from snapshot_tiers.control import SILENT, ControlRequest, UploaderError, UploaderHungError, decode_status
from snapshot_tiers.peers import PeerServer
from snapshot_tiers.uploader import Act, Uploader
from snapshot_tiers.uploader_process import HANGS, LINGER, LISTENED, OFFERED, _known_address, _listen_again
from tests.plugins.snapshot_tiers.jobs import with_near

TURN = 0.01
"""Seconds on the clock that a turn of an uploader takes."""
IDLE = 20.0
"""Seconds between two turns of an uploader that waits for nothing but a request."""
REPLACED = 14.0
"""Seconds after which the watch of a trainer replaces an uploader that hangs."""

TIMED = ("snapshot_tiers", "snapshot.manager", "snapshot.runs", "snapshot.pending")
"""Modules whose time is the clock of the machines."""


class Killed(BaseException):
    """The process ends here: no code of it runs any more."""


class Blocked(BaseException):
    """A thread in the background waits."""


class Meeting:
    """The store of a process group."""

    def __init__(self):
        self.values = {}
        self.change = threading.Condition()
        self.is_dead = False

    @contextlib.contextmanager
    def _changing(self):
        with self.change:
            if self.is_dead:
                raise Killed
            yield
            self.change.notify_all()

    def die(self):
        with self.change:
            self.is_dead = True
            self.change.notify_all()

    def set(self, key, value):
        with self._changing():
            self.values[key] = value if isinstance(value, bytes) else value.encode()

    def get(self, key):
        return self.multi_get([key])[0]

    def multi_get(self, keys):
        with self._changing():
            return [self.values[key] for key in keys]

    def check(self, keys):
        with self._changing():
            return all(key in self.values for key in keys)

    def add(self, key, number):
        with self._changing():
            self.values[key] = str(int(self.values.get(key, b"0")) + number).encode()
            return int(self.values[key])

    def compare_set(self, key, expected, value):
        with self._changing():
            if self.values.get(key, b"") == expected.encode():
                self.values[key] = value.encode()
            return self.values[key]

    def delete_key(self, key):
        with self._changing():
            return self.values.pop(key, None) is not None

    def has_extended_api(self):
        return True


class Member:
    """The process group of one rank."""

    def __init__(self, rank, world, meeting):
        self.ranks = Ranks(rank, tuple(range(world)), meeting)
        heart = SimpleNamespace(begin=lambda _: None, end=lambda _: None)
        self.ranks._connected = meeting, heart


class Clock:
    """A stand-in for the module `time`."""

    perf_counter, time_ns = time.perf_counter, time.time_ns

    def __init__(self, pause):
        self.now, self._pause, self._began = 1000.0, pause, time.time()

    def monotonic(self):
        return self.now

    def time(self):
        return self._began + self.now - 1000

    def sleep(self, seconds):
        self._pause(seconds)


class UploaderProcess:
    """The process of an uploader. It takes turns, and can hang or be killed."""

    numbers = itertools.count(1 << 30)

    def __init__(self, machines, folder, address):
        self.machines, self.folder, self.address = machines, folder, address
        self.pid = next(self.numbers)
        self.uploader = Uploader(folder)
        self.registered = Counter()
        self.uploader.jobs = lambda: set(+self.registered)
        self.is_alive, self.closed, self.is_busy = True, False, False
        self.hung_since = None
        self.quiet, self.seen = 0, -1
        """Turns in which there was nothing to fetch, since something changed."""
        self.upload_at = self.pull_at = machines.clock.now + TURN
        self.server, self.connections = None, []
        self.listen()

    def listen(self):
        """Offer files to other hosts, at the address that they know."""
        offered = ""
        if self.address is not None:
            self.server = server = PeerServer(
                _listen_again(self.folder, self.address), self.folder, self.uploader.describe
            )
            offered = self.uploader.address = server.address
            self.uploader.on_secret = server.accept_secret
            inner, connections = server._server.process_request, self.connections

            def process(request, client):
                connections.append(request)
                inner(request, client)

            server._server.process_request = process
        for name in (OFFERED, *([LISTENED] if offered else [])):
            Path(f"{self.folder}/{name}").write_text(offered, "ascii")

    def stop_listening(self):
        if self.server is not None:
            made = self.server._server
            made._BaseServer__shutdown_request = True
            for each in [made.socket, *self.connections]:
                with contextlib.suppress(OSError):
                    each.shutdown(2)
            self.connections.clear()
            threading.Thread(target=self.server.close, daemon=True).start()
            made.socket.close()
            self.server = None

    def hang(self):
        self.hung_since = self.machines.clock.now
        self.stop_listening()

    def resume(self):
        secrets = [each for each, count in self.registered.items() if count > 0]
        self.hung_since = None
        self.listen()
        for each in secrets:
            self.uploader.on_secret(each)

    def kill(self):
        self.is_alive, self.hung_since = False, None
        self.stop_listening()
        if not self.is_busy:
            with contextlib.suppress(Exception):
                self.uploader.close()

    # Work, as in `run_until_done`

    @property
    def due(self):
        return min(self.upload_at, self.pull_at)

    def turn(self):
        uploader, clock = self.uploader, self.machines.clock
        self.is_busy = True
        try:
            if self.pull_at < self.upload_at:
                given = uploader._registration
                alone = given is None or not uploader._replicas._partners()
                pause = IDLE if alone else uploader.pull_turn()
                self.quiet = 0 if pause == 0.1 or self.seen != self.machines.changes else self.quiet + 1
                self.seen = self.machines.changes
                self.pull_at = clock.now + (pause if pause == 0.1 else 2.0 if self.quiet < 3 else 100.0)
                return
            if uploader.jobs() or not uploader.is_idle() or uploader.ends == float("inf"):
                uploader.ends = clock.now + LINGER
            if self.closed or not os.path.isdir(self.folder):
                uploader.ends = 0.0
            uploader.wake.clear()
            action = uploader.upload_turn()
            self.machines.turns[action.act.value] += 1
            if action.act == Act.END:
                self.kill()
            pause = action.seconds if action.act == Act.WAIT else 0.0
            if action.act == Act.WAIT and uploader.is_idle():  # only a request changes anything
                pause = IDLE if uploader.jobs() or self.closed else 20 * IDLE
            self.upload_at = clock.now + max(TURN, pause)
        except Killed:
            self.kill()
            self.machines.on_killed(self)
        finally:
            self.is_busy = False

    def handle(self, request):
        if request.verb in ("register", "close"):
            self.closed = request.verb == "close"
        found = self.uploader.handle(request)
        if request.verb == "stop":
            self.kill()
        elif request.verb != "status":
            self.upload_at = min(self.upload_at, self.machines.clock.now + TURN)
        return found


class Client:
    """A connection of a trainer to an uploader."""

    def __init__(self, machines, process):
        self._machines, self._process, self._job = machines, process, ""

    def ask(self, request, seconds=30.0):
        process = self._process
        request = msgspec.json.decode(msgspec.json.encode(request), type=ControlRequest)
        if process.is_alive and process.hung_since is not None:
            if getattr(self._machines.here, "background", False):
                raise Blocked
            self._machines.clock.sleep(seconds)
        if not process.is_alive:
            raise UploaderError(f"{process.folder}: its uploader has ended")
        if process.hung_since is not None:
            raise UploaderHungError(f"{process.folder}: its uploader did not answer within {seconds:g} s")
        if request.verb == "register" and request.registration is not None and not self._job:
            self._job = request.registration.secret
            process.registered[self._job] += 1
        if request.verb == "close" and self._job:
            process.registered[self._job] -= 1
            self._job = ""
        return decode_status(msgspec.json.encode(process.handle(request)))

    def close(self):
        if self._job:
            self._process.registered[self._job] -= 1
            self._job = ""


class Machines:
    """All hosts, with one clock."""

    def __init__(self):
        self.clock = Clock(self.pause)
        self.processes = {}
        self.here = threading.local()
        self.starting = threading.Lock()
        self.drivers = {threading.get_ident()}
        self.watching = []
        self.turns = Counter()
        self.changes = 0
        self.undo = []
        self.on_killed = lambda _: None
        self.gate = None
        """Called around each request to a storage of files: storage, function, and its arguments."""

    # The clock

    def pause(self, seconds):
        """Let time pass. The thread of the schedule lets uploaders work meanwhile."""
        end = self.clock.now + seconds
        while threading.get_ident() in self.drivers:
            ready = [
                each
                for each in self.processes.values()
                if each.is_alive and each.hung_since is None and not each.is_busy and each.due <= end
            ]
            hung = [each.hung_since + REPLACED for each in self.processes.values() if each.hung_since is not None]
            first = min(ready, key=lambda each: (each.due, each.pid), default=None)
            at = min([each for each in hung if self.clock.now < each <= end], default=end)
            if first is None or at < first.due:
                self.clock.now = max(self.clock.now, at)
                self.watch()
                if first is None and at == end:
                    break
                continue
            self.clock.now = max(self.clock.now, first.due)
            first.turn()
        self.clock.now = max(self.clock.now, end)
        self.watch()

    def has_changed(self):
        """Let replicas be looked for soon."""
        self.changes += 1
        for each in self.processes.values():
            each.pull_at = min(each.pull_at, self.clock.now + 1.0)

    def watch(self):
        """Replace uploaders that hang, as the trainers of their hosts do."""
        self.watching = [each for each in self.watching if not each._closed.is_set()]
        for link in self.watching:
            process = self.processes.get(link._folder)
            if process is not None and process.hung_since is not None:
                if self.clock.now >= process.hung_since + REPLACED:
                    link._on_silence(SILENT, process.pid, may_end=True)
            elif link._registering is not None and not link._registering.is_over:
                link._registering.start()

    def kill(self, pid, _=None):
        for each in self.processes.values():
            if each.pid == pid and each.is_alive:
                each.kill()
                self.on_killed(each)

    def run_aside(self, work):
        """Do something in the middle of a request of another thread."""

        def act():
            self.drivers.add(threading.get_ident())
            try:
                work()
            except BaseException as error:  # noqa: BLE001 - the waiting thread raises it
                errors.append(error)
            finally:
                self.drivers.discard(threading.get_ident())

        errors = []
        thread = threading.Thread(target=act)
        thread.start()
        thread.join()
        if errors:
            raise errors[0]

    # Uploaders

    def ensure(self, folder, address, seconds=30.0):
        if not os.path.isdir(folder):
            raise FileNotFoundError(2, "No such file or directory", folder)
        process = self.processes.get(folder)
        if process is not None and process.hung_since is not None and process.address is None and address:
            if getattr(self.here, "background", False):
                raise Blocked
            self.clock.sleep(min(seconds, HANGS))
        with self.starting:  # as the lock of the folder
            process = self.processes.get(folder)
            if process is not None and process.is_alive:
                if process.address is not None or address is None:
                    return Client(self, process), _known_address(folder)
                process.kill()  # it was started for a job on a single host
                self.on_killed(process)
            process = self.processes[folder] = UploaderProcess(self, folder, address)
            return Client(self, process), process.uploader.address

    # Patches

    def __enter__(self):
        machines = self

        class Background:
            """A thread of a link: it ends at once, unless the uploader hangs."""

            def __init__(self, target, name, daemon):
                self.target, self.is_watch, self.is_over = target, name == "snapshot-watch", False

            def start(self):
                if self.is_watch:
                    machines.watching.append(self.target.__self__)
                    return
                machines.here.background = True
                try:
                    self.target()
                    self.is_over = True
                except Blocked:
                    pass
                finally:
                    machines.here.background = False

            def join(self, seconds=None):
                end = machines.clock.now + seconds
                while not self.is_over and machines.clock.now < end:
                    machines.clock.sleep(min(1.0, end - machines.clock.now))
                    self.start()

        class Lock:
            """A lock that is waited for on the clock."""

            def __init__(self):
                self.inner = threading.Lock()
                self.release = self.inner.release

            def acquire(self, timeout):
                if self.inner.acquire(blocking=False):
                    return True
                if getattr(machines.here, "background", False):
                    raise Blocked
                machines.clock.sleep(timeout)
                return self.inner.acquire(blocking=False)

        def ranks_of(pg):
            return pg.ranks if isinstance(pg, Member) else real(pg)

        def request(cleaner, upto):
            cleaner._wanted = upto if cleaner._wanted is None else max(upto, cleaner._wanted)

        def guard(_, work, timeout=None):
            return work()

        def wait(exchange_, done, missing, step):
            store = exchange_._store
            end = time.monotonic() + 60
            while not done():
                fault = exchange_._fault()
                if fault is not None:
                    raise fault.error()
                with store.change:
                    if store.is_dead:
                        raise Killed
                    store.change.wait(0.002)
                assert time.monotonic() < end, f"ranks {missing()} never came"

        async def run(storage, path, function, *arguments):
            gate = machines.gate
            if gate is None:
                return await real_run(storage, path, function, *arguments)
            return await real_run(storage, path, gate, storage, path, function, *arguments)

        real, real_run = group.ranks_of, FileStorage._run
        for name, module in list(sys.modules.items()):
            if is_own(name):
                if getattr(module, "ranks_of", None) is real:
                    self._patch(module, "ranks_of", ranks_of)
                if name.startswith(TIMED) and getattr(module, "time", None) is time:
                    self._patch(module, "time", self.clock)
        for module in (join, tier_set):
            self._patch(module, "ensure_uploader", self.ensure)
        threads = SimpleNamespace(Thread=Background, Lock=Lock, Event=threading.Event)
        self._patch(control, "threading", threads)
        self._patch(control, "os", SimpleNamespace(**{**vars(os), "kill": self.kill}))
        self._patch(control, "pid_in", lambda _: None)
        self._patch(Cleaner, "_request", request)
        self._patch(exchange.Exchange, "_guard", guard)
        self._patch(exchange.Exchange, "_wait", wait)
        self._patch(FileStorage, "_run", run)
        self._patch(take, "take_slots", TakeSlots)  # each rank is a process of its own
        self._patch(os, "fsync", lambda _: None)
        return self

    def _patch(self, owner, name, value):
        self.undo.append((owner, name, getattr(owner, name)))
        setattr(owner, name, value)

    def __exit__(self, *_):
        self.gate = None
        for each in self.processes.values():
            if each.is_alive:
                each.kill()
        while self.undo:
            setattr(*self.undo.pop())


class Job:
    """A job: ranks on hosts, each with a manager."""

    def __init__(self, machines, root, nears, **options):
        """`nears`: the near folder of each rank."""
        self.machines = machines
        self.nears = nears
        self.meeting = Meeting()
        given = {"signals": (), "timeout": 40, **options}
        self.managers = [
            SnapshotManager(root, pg=Member(rank, len(nears), self.meeting), **with_near(near, given))
            for rank, near in enumerate(nears)
        ]

    def together(self, work):
        """Call `work(rank, manager)` on each rank. Return the results and the errors."""
        found, errors = [None] * len(self.managers), [None] * len(self.managers)
        self.machines.has_changed()

        def one(rank):
            try:
                found[rank] = work(rank, self.managers[rank])
            except BaseException as error:  # noqa: BLE001 - the caller compares it with what may happen
                errors[rank] = error
                if isinstance(error, Killed):
                    self.meeting.die()

        threads = [threading.Thread(target=one, args=(rank,)) for rank in range(1, len(self.managers))]
        for each in threads:
            each.start()
        helper = threading.Thread(target=one, args=(0,))
        helper.start()
        for each in [helper, *threads]:
            each.join()
        return found, errors

    @property
    def tiers(self):
        """The tiers of the first rank, or None before it has joined."""
        made = self.managers[0]._steps
        return made.joined if made._set is not None else None

    def clean(self):
        """Do the removals that are due, which are done in the background otherwise."""
        for each in self.managers:
            for cleaner in (each._steps.near_cleaner, each._steps.cleaner):
                if cleaner is not None:
                    cleaner._work()

    def settle(self):
        """Wait until no asynchronous take is running."""
        for each in self.managers:
            for pending in list(each._pendings._all.values()):
                pending.work.settled()

    def kill(self):
        """End all ranks without a word."""
        self.meeting.die()
        self.settle()
        for each in self.managers:
            open_managers.discard(each)
            if each._steps._set is not None:
                link = each._steps.joined.link
                link._closed.set()
                if link._client is not None:
                    link._client.close()
                    link._client = None
