"""Hosts as network namespaces: a bridge with an S3 server, and hosts with addresses, names and processes of their own.

On each host runs an agent: a process that has imported torch, and from which ranks and uploaders are forked, which
costs milliseconds. It is the first process of its host, so nothing of the host outlives it, and it ends with the tests.
"""

import asyncio
import contextlib
import ctypes
import faulthandler
import gc
import http.client
import importlib
import json
import os
import pickle
import re
import select
import shutil
import signal
import socket
import struct
import subprocess
import sys
import time
import traceback
import urllib.parse
from pathlib import Path
from types import SimpleNamespace

from tests.helpers.rank_pool import ENVIRONMENT
from tests.helpers.trees import PYTHONPATH

ROOT = Path(__file__).parents[2]
NET = "10.77.0"
HUB, PORT, DEVICE = f"{NET}.1", 5000, "eth0"
BUCKET = "bucket"
LOST = "02:00:00:00:00:99"
"""A hardware address that nothing has: frames to it are lost without an error."""
PADDING = 400
"""Bytes that an agent's command line has to spare, so that a forked uploader can have its own there."""


def is_permitted():
    """Say whether this user may make namespaces here."""
    tools = all(map(shutil.which, ("ip", "nsenter", "unshare")))
    return (
        tools
        and not subprocess.run(
            [*UNSHARE, "ip", "link", "add", "probe", "type", "bridge"], capture_output=True, check=False
        ).returncode
    )


UNSHARE = ["unshare", "--net", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc"]
PDEATHSIG, PRIVATE = 1, 0x44000
"""Numbers of `prctl` and `mount`."""
NEW_NAMESPACES = 0x40000000 | 0x20000000 | 0x04000000 | 0x00020000
"""Flags of `unshare`: network, processes, host name, mounts."""


# Messages


def send(to, value):
    data = pickle.dumps(value)
    to.sendall(struct.pack("!I", len(data)) + data)


def receive(source):
    """Return the next message. Raise EOFError if the other side has ended."""
    [size] = struct.unpack("!I", _read(source, 4))
    return pickle.loads(_read(source, size))


def _read(source, size):
    data = b""
    while len(data) < size:
        try:
            more = source.recv(size - len(data))
        except ConnectionResetError as error:
            raise EOFError from error
        if not more:
            raise EOFError
        data += more
    return data


# This side


class Nursery:
    """The process that has imported torch, and from which the first processes of all hosts are forked."""

    def __init__(self, folder):
        self._control, theirs = socket.socketpair()
        words = [sys.executable, "-m", "tests.soak.namespaces", str(theirs.fileno()), "x" * PADDING]
        environment = os.environ | ENVIRONMENT | {"GLOO_SOCKET_IFNAME": DEVICE, "PYTHONPATH": PYTHONPATH}
        with open(f"{folder}/nursery.log", "ab") as log:
            self._process = subprocess.Popen(
                words,
                pass_fds=[theirs.fileno()],
                cwd=ROOT,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        theirs.close()

    def fork(self, name, folder, control):
        """Fork the first process of a host, with a socket to control it. Return its id."""
        send(self._control, (name, str(folder)))
        socket.send_fds(self._control, [b"f"], [control.fileno()])
        return receive(self._control)

    def close(self):
        self._control.close()
        self._process.kill()
        self._process.wait()


class Agent:
    """The first process of a host."""

    def __init__(self, name, folder, nursery):
        self.name, self.path = name, f"{folder}/{name}.sock"
        self._control, theirs = socket.socketpair()
        with theirs:
            self.pid = nursery.fork(name, folder, theirs)
        assert receive(self._control) == "ready"

    def ip(self, *words, check=True):
        """Run `ip` in the network of this host."""
        command = ["nsenter", "-t", str(self.pid), "-n", "ip", *words]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert not check or not done.returncode, f"{command}: {done.stderr}"

    def ask(self, function, *args):
        """Call a function of the agent's process, with what it can be pickled with."""
        send(self._control, (function, args))
        is_good, found = receive(self._control)
        assert is_good, found
        return found

    def fork(self, log):
        """Fork a process that answers calls. Return its id on the host, and a socket to it."""
        mine, theirs = socket.socketpair()
        with theirs:
            send(self._control, (_fork_rank, (str(log),)))
            socket.send_fds(self._control, [b"f"], [theirs.fileno()])
            is_good, found = receive(self._control)
        assert is_good, found
        return found, mine

    def close(self):
        self._control.close()
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)


class Network:
    """A bridge, with a bucket, and hosts."""

    def __init__(self, count=4):
        self.folder = Path(subprocess.check_output(["mktemp", "-d", "/tmp/namespaces-XXXXXX"], text=True).strip())
        self.nursery, self.hub, self.hosts = Nursery(self.folder), None, []
        try:
            self.hub = Agent("hub", self.folder, self.nursery)
            self.hosts = [Agent(name, self.folder, self.nursery) for name in "abcd"[:count]]
            self._connect()
        except BaseException:
            self.close()
            raise

    def _connect(self):
        self.hub.ip("link", "set", "lo", "up")
        self.hub.ip("link", "add", "bridge", "type", "bridge")
        self.hub.ip("addr", "add", f"{HUB}/24", "dev", "bridge")
        self.hub.ip("link", "set", "bridge", "up")
        for at, each in enumerate(self.hosts):
            port = f"port{at}"
            self.hub.ip("link", "add", port, "type", "veth", "peer", "name", DEVICE, "netns", str(each.pid))
            self.hub.ip("link", "set", port, "master", "bridge", "up")
            each.ip("link", "set", "lo", "up")
            each.ip("addr", "add", f"{self.address(at)}/24", "dev", DEVICE)
            each.ip("link", "set", DEVICE, "up")
        self.bucket = self.hub.ask(start_bucket, str(self.folder))

    def address(self, at):
        return f"{NET}.{at + 10}"

    def cut(self, at, how):
        """Cut a host from all others, or only from the bucket: with errors, or silently."""
        host = self.hosts[at]
        if how == "link":
            host.ip("link", "set", DEVICE, "down")
        elif how == "port":
            self.hub.ip("link", "set", f"port{at}", "down")
        elif how == "route":
            host.ip("route", "replace", "blackhole", f"{HUB}/32")
        else:
            host.ip("neigh", "replace", HUB, "lladdr", LOST, "dev", DEVICE, "nud", "permanent", check=False)

    def heal(self, at):
        host = self.hosts[at]
        self.hub.ip("link", "set", f"port{at}", "up")
        host.ip("link", "set", DEVICE, "up")
        host.ip("route", "del", "blackhole", f"{HUB}/32", check=False)
        host.ip("neigh", "del", HUB, "dev", DEVICE, check=False)

    def close(self, *, keep=False):
        """End all processes, and with them the network. Leave the folder if that is wanted."""
        for each in (*self.hosts, self.hub, self.nursery):
            if each is not None:
                each.close()
        if not keep:
            shutil.rmtree(self.folder, ignore_errors=True)


# Functions of agents


class _Self:
    """What an agent's process has open."""

    control = None
    listening = None
    bucket = None


def _raise_hosts(control):
    """Fork the first processes of hosts, as they are asked for."""
    import snapshot_tiers.__main__
    import snapshot_tiers.storage
    import snapshot_tiers.upload_verb  # noqa: F401
    import tests.soak.real_jobs  # noqa: F401

    _warm_client()
    assert len(os.listdir("/proc/self/task")) == 1, "a process with threads cannot be forked"
    calls = socket.socket(fileno=control)
    while True:
        try:
            name, folder = receive(calls)
        except EOFError:
            return
        _, [theirs], _, _ = socket.recv_fds(calls, 1, 1)
        ours, to_us = os.pipe()
        if not os.fork():
            try:
                _isolate(name, folder, theirs, to_us, calls)
            except Exception:  # noqa: BLE001 - to the log
                traceback.print_exc()
            finally:
                os._exit(1)
        os.close(theirs)
        os.close(to_us)
        with open(ours, "rb") as pid:
            send(calls, int(pid.read()))


def _isolate(name, folder, control, told, calls):
    """Make the namespaces of a host, and become its first process."""
    calls.close()
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(PDEATHSIG, signal.SIGKILL)
    if libc.unshare(NEW_NAMESPACES):
        raise OSError(ctypes.get_errno(), "unshare")
    pid = os.fork()
    if pid:
        os.write(told, str(pid).encode())
        os.close(told)
        os.close(control)
        os.waitpid(pid, 0)
        return
    os.close(told)
    libc.prctl(PDEATHSIG, signal.SIGKILL)
    for target, kind, flags in ((b"/", None, PRIVATE), (b"/proc", b"proc", 0)):
        if libc.mount(b"none", target, kind, flags, None):
            raise OSError(ctypes.get_errno(), "mount")
    log = os.open(f"{folder}/{name}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    _agent(name, control, f"{folder}/{name}.sock")


def _agent(name, control, path):
    socket.sethostname(name)
    _Self.control = socket.socket(fileno=control)
    _Self.listening = socket.socket(socket.AF_UNIX)
    _Self.listening.bind(path)
    _Self.listening.listen(16)
    send(_Self.control, "ready")
    while True:
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        for each in _ready([_Self.control, _Self.listening], 0.03):
            if each is _Self.listening:
                _fork_for_rank()
            else:
                try:
                    function, args = receive(_Self.control)
                except EOFError:
                    os._exit(0)
                send(_Self.control, _outcome(function, args))


def _warm_client():
    """Read the descriptions of S3 once: each process needs some tenths of a second of CPU time for them."""
    from aiobotocore.session import AioSession
    from botocore.loaders import JSONFileLoader

    load, known = JSONFileLoader.load_file, {}

    def load_once(loader, path):
        if path not in known:
            known[path] = load(loader, path)
        return known[path]

    JSONFileLoader.load_file = load_once
    key = {"aws_access_key_id": "a", "aws_secret_access_key": "b", "region_name": "us-east-1"}

    async def create():
        async with AioSession().create_client("s3", **key):
            pass

    asyncio.run(create())
    gc.collect()
    gc.freeze()  # else the first collection of each process copies all pages


def _ready(sources, seconds):
    return select.select(sources, [], [], seconds)[0]


def _outcome(function, args):
    try:
        return True, function(*args)
    except Exception:  # noqa: BLE001 - the tests raise it
        return False, traceback.format_exc()


def start_bucket(folder):
    """Start the S3 server, and return its URL."""
    program = Path(sys.executable).with_name("moto_server")
    log = open(f"{folder}/bucket.log", "ab")  # noqa: SIM115 - the server's
    _Self.bucket = subprocess.Popen([program, "-H", HUB, "-p", str(PORT)], stdout=log, stderr=log)
    end = time.monotonic() + 60
    while True:
        with contextlib.suppress(OSError):
            empty_bucket()
            return f"http://{HUB}:{PORT}"
        assert time.monotonic() < end, "the bucket does not start"
        time.sleep(0.1)


def empty_bucket():
    """Delete all that the server has."""
    assert _request("POST", "/moto-api/reset")[0] == 200
    assert _request("PUT", f"/{BUCKET}")[0] == 200


def signal_bucket(number):
    os.kill(_Self.bucket.pid, number)


def _request(method, path):
    with contextlib.closing(http.client.HTTPConnection(HUB, PORT, timeout=10)) as connection:
        key = {"Authorization": "AWS4-HMAC-SHA256 Credential=testkey/20260101/us-east-1/s3/aws4_request"}
        connection.request(method, path, headers=key)
        answer = connection.getresponse()
        return answer.status, answer.read()


def read_objects(prefix):
    """Return the objects of the bucket below a prefix: the newest fact, and the manifests."""
    status, data = _request("GET", f"/{BUCKET}?list-type=2&prefix={urllib.parse.quote(prefix, safe='')}")
    assert status == 200, data
    keys = [urllib.parse.unquote(each) for each in re.findall(r"<Key>([^<]+)</Key>", data.decode())]
    facts = max((key for key in keys if "/.run/" in key), default=None)
    wanted = [key for key in keys if key == facts or key.endswith("/.snapshot_metadata")]
    return {key.removeprefix(prefix): _request("GET", f"/{BUCKET}/{key}")[1] for key in wanted}


def processes():
    """Return the processes of this host, with their command lines; without the agent, and dead ones."""
    found = {}
    for each in os.listdir("/proc"):
        if each.isdecimal() and int(each) > 1:
            with contextlib.suppress(OSError):
                words = Path(f"/proc/{each}/cmdline").read_bytes().rstrip(b"x\0").split(b"\0")
                state = Path(f"/proc/{each}/stat").read_text().rpartition(")")[2].split()[0]
                if state != "Z":
                    found[int(each)] = [word.decode() for word in words]
    return found


def uploaders():
    """Return the uploaders of this host, each with its folder."""
    found = {}
    for pid, words in processes().items():
        if "snapshot_tiers" in words:
            found[pid] = words[words.index("snapshot_tiers") + 1]
    return found


def signal_uploaders(number):
    """Send a signal to all uploaders of this host. Return their number."""
    found = uploaders()
    for pid in found:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
    return len(found)


def kill(*pids):
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def kill_all():
    """End all processes of this host, and wait until they have."""
    end = time.monotonic() + 10
    while found := processes():
        kill(*found)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        assert time.monotonic() < end, found
        time.sleep(0.01)


# Forks


def _fork_rank(log):
    """Fork a process that answers calls on the socket that is sent next."""
    _, [theirs], _, _ = socket.recv_fds(_Self.control, 1, 1)
    pid = os.fork()
    if pid:
        os.close(theirs)
        return pid
    try:
        path = _Self.listening.getsockname()
        _leave_agent(log)
        _serve(socket.socket(fileno=theirs), path, log)
    finally:
        os._exit(0)


def _leave_agent(log):
    _Self.control.close()
    _Self.listening.close()
    number = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(number, 1)
    os.dup2(number, 2)
    os.close(number)
    sys.stdout.reconfigure(line_buffering=True)


def _serve(calls, path, log):
    stacks = open(f"{log}.stacks", "w")  # noqa: SIM115 - as long as the process lives
    faulthandler.register(signal.SIGUSR1, stacks)
    from snapshot_tiers import uploader_process

    def start(words, **options):
        return Forked(path, words, **options)

    warm = SimpleNamespace(Popen=start, DEVNULL=subprocess.DEVNULL)
    real = uploader_process.subprocess
    while True:
        try:
            function, args = receive(calls)
        except EOFError:
            return
        if function == "fork uploaders":
            uploader_process.subprocess = warm if args else real
            send(calls, (True, None, 0.0))
            continue
        began = time.monotonic()
        try:
            value, is_good = function(*args), True
        except BaseException as error:  # noqa: BLE001 - the tests judge it
            print(traceback.format_exc(), flush=True)
            value, is_good = ([each.__name__ for each in type(error).__mro__], str(error)), False
        send(calls, (is_good, value, time.monotonic() - began))


class Forked:
    """An uploader that the agent forks, instead of a new interpreter, which needs two seconds of CPU time."""

    def __init__(self, path, words, *, stdout, pass_fds, env, **_):
        with socket.socket(socket.AF_UNIX) as asked:
            asked.connect(path)
            send(asked, (words, env))
            socket.send_fds(asked, [b"f"], [stdout.fileno(), *pass_fds])
            self.pid = receive(asked)

    def wait(self):
        while os.path.exists(f"/proc/{self.pid}"):
            time.sleep(0.5)


def _fork_for_rank():
    asked, _ = _Self.listening.accept()
    with asked:
        try:
            words, environment = receive(asked)
            _, files, _, _ = socket.recv_fds(asked, 1, 8)
        except (EOFError, OSError):  # the rank was killed
            return
        pid = os.fork()
        if pid:
            for each in files:
                os.close(each)
            with contextlib.suppress(OSError):
                send(asked, pid)
            return
    try:
        _Self.control.close()
        _Self.listening.close()
        _become_uploader(words, environment, files)
    except Exception:  # noqa: BLE001 - as the interpreter does
        traceback.print_exc()
    finally:
        os._exit(0)


def _become_uploader(words, environment, files):
    os.setsid()
    os.chdir("/")
    os.environ.clear()
    os.environ.update(environment)
    os.dup2(files[0], 1)
    os.dup2(files[0], 2)
    words = [*words[:-1], ",".join(map(str, files[1:]))]
    _name(words)
    from snapshot.cli import main

    os._exit(main(words[3:]) or 0)


def _name(words):
    """Write a command line where `ps` and `/proc` read it."""
    data = b"\0".join(word.encode() for word in words) + b"\0"
    first, last = map(int, Path("/proc/self/stat").read_text().rpartition(")")[2].split()[45:47])
    assert len(data) < last - first, "the command line is too long"
    ctypes.memset(first, 0, last - first)
    ctypes.memmove(first, data, len(data))


def decode_facts(data):
    """Return the published attempts in a file of facts, and its number."""
    found = json.loads(data.partition(b"\n")[0])
    return found.get("published", []), found.get("number", 0)


if __name__ == "__main__":
    here = importlib.import_module("tests.soak.namespaces")  # functions are pickled by this name
    here._raise_hosts(int(sys.argv[1]))
