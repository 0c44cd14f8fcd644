"""Killed at every step: the jobs that a fork runs until it dies, and what is looked at afterwards."""

import contextlib
import os
import signal
import subprocess
import threading

from aiofiles.threadpool.binary import AsyncFileIO
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from snapshot import CorruptSnapshotError, Snapshot, SnapshotNotFoundError
from snapshot.testing import Log, Tap, tapped
from tests.faults.shared_folder import OURS, Place, files, fresh, state, take
from tests.helpers.arguments import for_take

KEY = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
SECOND = 2  # the version that a job takes; 1 is what stood there


def die():
    os.kill(os.getpid(), signal.SIGKILL)
    threading.Event().wait()  # another thread may be the one that the signal meets first


class Kill(Tap):
    """Kills this process before the n-th operation; or half-way through it, if it writes: half of its bytes arrive."""

    def __init__(self, nth, half=False):
        self.nth = nth
        self.half = half
        self.met = 0

    async def before(self, operation):
        self.met += 1
        if self.met == self.nth:
            if not self.half:
                die()
            half_a_write()


def half_a_write():
    """The next bytes that are written are cut in the middle, and so is this process's life."""
    vectored, plain = os.pwritev, os.write

    def half(descriptor, buffers, offset):
        data = b"".join(buffers)
        page = 4096 if len(data) > 8192 else 1
        middle = len(data) // 2 // page * page
        if page == 1:
            os.pwrite(descriptor, data[:middle], offset)
        else:  # the buffer's own memory is aligned, a copy's is not
            vectored(descriptor, [memoryview(buffers[0]).cast("B")[:middle]], offset)
        die()

    def half_of_one(descriptor, data):
        plain(descriptor, data[: len(data) // 2])
        die()

    async def half_of_a_file(file, data):
        os.write(file.fileno(), data)

    os.pwritev = half
    os.write = half_of_one
    AsyncFileIO.write = half_of_a_file


# Verbs: each is called in a fork, with a URL of a storage that has taps on it


def do_take(url, version=SECOND, **options):
    Snapshot.take(url, state(version), **for_take(metadata={"version": version}, **options))


def do_async(url, version=SECOND, **options):
    application = state(version)
    pending = Snapshot.async_take(url, application, **for_take(metadata={"version": version}, **options))
    pending.wait()


def do_based(url, version=SECOND, **options):
    """Share the file of the tower with the existing snapshot."""
    snapshot = Snapshot.take(
        url, state(version), **for_take(metadata={"version": version}, base=url, overwrite=True, **options)
    )
    assert snapshot.report.shared_files == 1


def do_based_async(url, version=SECOND, **options):
    metadata = {"version": version}
    Snapshot.async_take(url, state(version), **for_take(metadata=metadata, base=url, overwrite=True, **options)).wait()


def do_delete(url):
    Snapshot(url).delete()


def do_prune(url):
    """What a manager does that keeps the last snapshot: the oldest go first."""
    for number in range(1, PRUNED + 1):
        Snapshot(f"{url[: url.rindex('step-')]}step-{number}").delete()


def do_read(url):
    Snapshot(url).restore(fresh())
    report = Snapshot(url).verify()
    if not report.ok:
        raise CorruptSnapshotError(str(report))


PRUNED = 3
VERBS = {
    # what is done; the version that stands before; those that may stand afterwards, if it is interrupted
    "take": (do_take, {}, None),
    "overwrite": (do_take, {"overwrite": True}, 1),
    "async_take": (do_async, {}, None),
    "async_overwrite": (do_async, {"overwrite": True}, 1),
    "overlapped": (do_async, {"overwrite": True, "staging": "overlapped"}, 1),
    "signed": (do_take, {"overwrite": True, "sign": KEY}, 1),
    "based": (do_based, {}, 1),
    "based_async": (do_based_async, {}, 1),
    "delete": (do_delete, {}, 1),
    "read": (do_read, {}, 1),
}


def outcome(verb):
    """The version that stands when a verb has ended well."""
    return {"delete": None, "read": 1}.get(verb, SECOND)


def call(verb, path, prefix="", durable=True):
    function, options, _ = VERBS[verb]
    if function in (do_take, do_async, do_based, do_based_async):
        options = {**options, "durable": durable}
    function(f"{prefix}file://{path}", **options)


def logged(verb, path):
    """In a fork: the operations of a verb, as (name, path)."""
    log = Log()
    with tapped("deadly", log):
        call(verb, path, "deadly+")
    return [(each.name, each.path) for each in log.operations]


def killed(verb, path, nth, half):
    """In a fork: a verb that does not survive its n-th operation."""
    with tapped("deadly", Kill(nth, half)):
        call(verb, path, "deadly+")


def writes(operation):
    return operation[0] in ("write", "put", "commit")


def prepare(place, verb):
    place.reset(VERBS[verb][2])


def check(place, verb, died, by_delete):
    """After an interruption: old or new, whole; what is left has names of ours, and the place can be used again."""
    before = VERBS[verb][2]
    left = place.stands()
    if died:
        assert left in (before, outcome(verb))
    else:
        assert left == outcome(verb)
    if verb == "signed" and left == SECOND:
        assert Snapshot(place.path, key=KEY.public_key()).verify()
    place.goes_on(left, by_delete=by_delete)
    return left


def kill_at_operations(forker, home, verb, *, every=1, foreign=True):
    """Kill a verb at each of its operations (or each n-th); how many kills that was, and how often the new stood."""
    place = Place(home, foreign=foreign)
    prepare(place, verb)
    operations = forker.run(logged, verb, str(place.path)).returned()
    assert check(place, verb, False, True) == outcome(verb)
    points = [(nth, False) for nth in range(1, len(operations) + 1)]
    points += [(nth, True) for nth, operation in enumerate(operations, 1) if writes(operation)]
    kills, new = 0, 0
    for number, (nth, half) in enumerate(points):
        if number % every:
            continue
        prepare(place, verb)
        ended = forker.run(killed, verb, str(place.path), nth, half)
        assert ended.killed, (verb, nth, half, ended)
        stands = check(place, verb, True, by_delete=bool(number % 2))
        kills, new = kills + 1, new + (stands == outcome(verb) != VERBS[verb][2])
    prepare(place, verb)
    ended = forker.run(killed, verb, str(place.path), len(operations) + 100, False)
    ended.returned()
    check(place, verb, False, True)
    return kills, new


# Deletion of many


def pruned(path, nth):
    """In a fork."""
    with tapped("deadly", Kill(nth)):
        do_prune(f"deadly+file://{path}")


def kill_while_pruning(forker, home, *, every=1):
    """Kill a loop of deletions at each operation; how many kills."""
    steps = [home / f"step-{number}" for number in range(1, PRUNED + 2)]
    place = Place(home, others=steps[1:])
    kills = 0
    for nth in range(1, 1000, every):
        for number, each in enumerate(steps, 1):
            if not Snapshot(each).exists():
                take(each, number)
        ended = forker.run(pruned, str(place.path), nth)
        stands = [Snapshot(each).exists() for each in steps]
        assert stands == sorted(stands), "the oldest go first"
        assert stands[-1]
        assert all(Snapshot(each).verify().ok for each, there in zip(steps, stands, strict=True) if there)
        assert place.untouched()
        if not ended.killed:
            ended.returned()
            assert stands.count(True) == 1
            break
        kills += 1
        for each in steps[:-1]:  # the same again, as a manager does that is started anew
            with contextlib.suppress(SnapshotNotFoundError):
                Snapshot(each).delete()
        assert place.ours() == []
        assert not any(files(each) for each in steps[1:-1] if each.exists())
        assert place.untouched()
    return kills


# System calls

CALLS = (
    "openat", "mkdir", "write", "pwrite64", "pwritev", "pwritev2", "preadv", "pread64", "read", "ftruncate", "fsync",
    "fdatasync", "sync_file_range", "utimensat", "link", "linkat", "rename", "unlink", "rmdir", "flock", "getdents64",
    "newfstatat", "close",
)  # fmt: skip


@contextlib.contextmanager
def traced(pid, *options):
    """A stopped process that strace looks at, and that goes on then."""
    strace = subprocess.Popen(
        ["strace", "-f", "-qq", "-p", str(pid), *options], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    try:
        while True:
            with open(f"/proc/{pid}/status") as file:
                if "TracerPid:\t0" not in file.read():
                    break
            assert strace.poll() is None, strace.stderr.read()
        os.kill(pid, signal.SIGCONT)
        yield
    finally:
        strace.stderr.close()
        strace.wait(60)


def plainly(verb, path):
    """In a fork: a verb as users call it; all calls to the file system by one thread, whose calls strace counts."""
    os.environ.update(SNAPSHOT_IO_THREADS="1", SNAPSHOT_LANES="1")
    call(verb, path)


def under_strace(forker, place, verb, *options):
    """Run a verb in a fork under strace; how it ended."""
    with traced(forker.begin(plainly, verb, str(place.path), stopped=True), *options):
        return forker.end()


def calls_of(forker, place, verb, log):
    """The system calls of a verb in its place: (name, the how-manieth of that name in its thread)."""
    prepare(place, verb)
    under_strace(forker, place, verb, "-y", "-e", f"trace={','.join(CALLS)}", "-o", str(log)).returned()
    counts, found = {}, []
    for line in log.read_text().splitlines():
        thread, rest = line.split(None, 1)
        name = rest.partition("(")[0]
        if name in CALLS:  # and not the rest of one that was interrupted by another thread's
            nth = counts[thread, name] = counts.get((thread, name), 0) + 1
            if str(place.home) in rest:
                found.append((name, nth))
    return found


def kill_at_system_calls(forker, home, verb, log, *, every=1, offset=0):
    """Kill a verb as it enters each of its system calls (or each n-th); how many kills."""
    place = Place(home)
    calls = calls_of(forker, place, verb, log)
    check(place, verb, False, True)
    kills = 0
    for number, (name, nth) in enumerate(calls):
        if number % every != offset:
            continue
        prepare(place, verb)
        inject = ("-e", f"trace={name}", "-e", f"inject={name}:signal=KILL:when={nth}", "-o", "/dev/null")
        ended = under_strace(forker, place, verb, *inject)
        assert ended.killed or not ended.error, ended.error
        check(place, verb, ended.killed, by_delete=bool(kills % 2))
        kills += ended.killed
    return kills, len(calls)


# With a writer process


def killed_with_worker(path, who, nth):
    """In a fork: a take that a writer process writes, where one of the two is killed. If it is the writer: what the
    parent raised, and what was left then; the next take works."""
    from snapshot import SnapshotError
    from snapshot.io.registry import register
    from tests.faults.killing_storage import KillingStorage

    os.environ["KILLING"] = f"{who} {nth} {os.getpid()}"
    register("killing+", KillingStorage)
    url = f"killing+file://{path}"
    try:
        do_async(url, overwrite=True, worker="process")
    except SnapshotError as error:
        left = [name for name in files(path) if OURS.fullmatch(name)]
        do_async(f"file://{path}", SECOND + 1, overwrite=True, worker="process")
        return str(error), left
    return "", []


def kill_with_worker(forker, home, who):
    """Kill the parent, or the writer, at each of its operations; how many kills."""
    place = Place(home)
    for nth in range(1, 100):
        place.reset(1)
        before = place.ours()
        ended = forker.run(killed_with_worker, str(place.path), who, nth)
        if who == "parent":
            stands = place.stands() if ended.killed else SECOND
            assert stands in (1, SECOND)
            if not ended.killed:
                ended.returned()
                return nth - 1
            place.goes_on(stands, by_delete=bool(nth % 2))
        else:
            error, left = ended.returned()
            if not error:
                return nth - 1
            assert "writer process ended" in error
            assert left == before, "nothing of it is left"
            place.clean(SECOND + 1)
    raise AssertionError("it never survived")
