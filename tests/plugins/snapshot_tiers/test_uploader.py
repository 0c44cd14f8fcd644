"""The uploader of a host: its requests, what each turn does, its connections, and the replicas of other hosts."""

import os
import shutil
import signal
import socket
import threading
import time
from types import SimpleNamespace

import pytest

from snapshot import Snapshot, SnapshotError
from snapshot.io.url import URL
from snapshot.manifest.document import METADATA
from snapshot.runs.facts import path_of, tombstone
from snapshot.runs.timeline import NO_ORIGIN, Attempt, Facts, Parent, encode_facts
from snapshot_tiers import control, uploader_process
from snapshot_tiers.control import (
    SERVES,
    ControlClient,
    ControlRequest,
    ControlServer,
    Host,
    Registration,
    Status,
    UploaderError,
    UploaderHungError,
    UploaderLink,
    UploadState,
    far_text,
    has_served,
    hosts_of,
    listen,
    partners,
    pid_in,
)
from snapshot_tiers.facts import store_copy
from snapshot_tiers.near_steps import PULLED, CensusStep, NearFolder
from snapshot_tiers.peers import FAR, NEAR, PEER, PeerPlace, PeerServer, Replicas, StepSources, heal_step, place_of
from snapshot_tiers.uploader import Act, Uploader
from snapshot_tiers.uploader_process import (
    ensure_uploader,
    expect_own_folder,
    find_runs,
    lock_folder,
    run_until_done,
    upload_by_hand,
)
from tests.plugins.snapshot_tiers.noted_steps import RUN, A, take

B = Attempt("b" * 12, RUN, 2, Parent(A.name, 10))
SECRET = "of the job"
ALONE = [Host("a", "a", [0])]
PAIR = [Host("a", "a", [0]), Host("b", "b", [1])]


UNPUBLISHED = Facts(0, (), (A,))


def registration(tmp_path, facts=UNPUBLISHED, attempt=A, **options):
    given = {"upload": "latest", "replicas": 0, "hosts": ALONE, "index": 0, "secret": SECRET, **options}
    return Registration(RUN, facts, attempt and attempt.name, str(tmp_path / "far"), {}, **given)


@pytest.fixture
def folder(tmp_path):
    made = tmp_path / "near" / RUN
    made.mkdir(parents=True)
    return made


@pytest.fixture
def uploader(folder):
    made = Uploader(str(folder))
    made.jobs = lambda: {SECRET}
    yield made
    made.close()


def turns(uploader, most=30):
    """Let the uploader work until it waits, and return what it did."""
    done = []
    for _ in range(most):
        uploader._free = 0.0
        action = uploader.upload_turn()
        done.append(action.act.value if action.act != Act.SEND else action.step)
        if action.act in (Act.WAIT, Act.END):
            break
    return done


def states(uploader):
    return {step: each.far.name.lower() for step, each in uploader.status().steps.items()}


def far_steps(tmp_path):
    return sorted(int(path.parent.name[5:]) for path in (tmp_path / "far").glob(f"step-*/{METADATA}"))


def test_uploader_sends_the_newest_step_and_publishes_its_attempt(tmp_path, folder, uploader):
    take(folder, 10, 20)
    assert uploader.handle(ControlRequest("status")) == Status("", "", os.getpid(), jobs=1)
    uploader.handle(ControlRequest("register", registration(tmp_path)))
    assert states(uploader) == {10: "kept", 20: "queued"}
    assert turns(uploader) == ["look", 20, "tidy", "wait"]
    status = uploader.status()
    assert states(uploader) == {10: "kept", 20: "whole"}
    assert (status.run, status.number, status.jobs, status.error) == (RUN, 1, 1, "")
    each = status.steps[20]
    assert each.sent == each.total == sum(each.files.values()) > 0
    assert far_steps(tmp_path) == [20]
    assert Snapshot(tmp_path / "far/step-20").verify().ok


@pytest.mark.parametrize(
    ("upload", "far"), [("latest", [40]), (1, [10, 20, 30, 40]), (20, [20, 40]), (30, [30]), (None, [])]
)
def test_uploader_sends_the_steps_that_upload_names(tmp_path, folder, uploader, upload, far):
    take(folder, 10, 20, 30, 40)
    uploader.handle(ControlRequest("register", registration(tmp_path, upload=upload)))
    turns(uploader)
    assert far_steps(tmp_path) == far
    assert uploader.is_idle()


def test_uploader_want_and_drop_change_one_step(tmp_path, folder, uploader):
    take(folder, 10, 20, 30)
    uploader.handle(ControlRequest("register", registration(tmp_path, upload=None)))
    assert states(uploader) == {10: "kept", 20: "kept", 30: "kept"}
    uploader.wake.clear()
    uploader.handle(ControlRequest("status"))
    assert not uploader.wake.is_set()
    assert uploader.handle(ControlRequest("want", step=10)).steps[10].far == UploadState.QUEUED
    assert uploader.wake.is_set()
    assert uploader.handle(ControlRequest("want", step=20)).steps[20].far == UploadState.QUEUED
    assert uploader.handle(ControlRequest("want", step=99)).steps.keys() == {10, 20, 30}
    assert uploader.handle(ControlRequest("drop", step=10)).steps[10].far == UploadState.DROPPED
    assert uploader.handle(ControlRequest("drop", step=30)).steps[30].far == UploadState.KEPT  # was not wanted
    turns(uploader)
    assert far_steps(tmp_path) == [20]
    assert uploader.handle(ControlRequest("drop", step=20)).steps[20].far == UploadState.WHOLE
    assert uploader.handle(ControlRequest("want", step=10)).steps[10].far == UploadState.QUEUED
    turns(uploader)
    assert far_steps(tmp_path) == [10, 20]
    assert uploader.handle(ControlRequest("ping")) == Status("", "", os.getpid())


def test_uploader_forgets_a_step_that_was_removed_or_replaced(tmp_path, folder, uploader):
    take(folder, 10, 20)
    uploader.handle(ControlRequest("register", registration(tmp_path)))
    turns(uploader)
    shutil.rmtree(folder / "step-10")
    assert states(uploader) == {10: "kept", 20: "whole"}
    uploader.handle(ControlRequest("status"))
    assert states(uploader) == {20: "whole"}
    shutil.rmtree(folder / "step-20")
    take(folder, 20, order=2, value=1)
    uploader.handle(ControlRequest("status"))
    assert states(uploader) == {20: "queued"}


def test_uploader_removes_steps_off_the_line(tmp_path, folder, uploader):
    take(folder, 10, 20)
    uploader.handle(ControlRequest("register", registration(tmp_path)))
    turns(uploader)
    take(folder, 15, of=B)
    uploader.handle(ControlRequest("register", registration(tmp_path, Facts(2, (A, B)), B)))
    assert states(uploader) == {10: "kept", 15: "queued"}
    assert not (folder / "step-20").exists()
    assert (tmp_path / "far/step-20").exists()  # others remove it


@pytest.mark.parametrize(
    ("far", "state", "message"),
    [
        (Facts(2, (A, Attempt("d" * 12, RUN, 2, Parent(A.name, 5)))), "forked", "forked"),
        (Facts(1, (Attempt("f" * 12, "f" * 12, 1),)), "deleted", "deleted"),
        (Facts(1, (A,)), "queued", ""),
    ],
)
def test_uploader_leaves_steps_that_a_person_must_decide_about(tmp_path, folder, uploader, far, state, message):
    take(folder, 11, of=B)
    (tmp_path / "far/.run").mkdir(parents=True)
    (tmp_path / "far" / path_of(far.number)).write_bytes(encode_facts(far))
    uploader.handle(ControlRequest("register", registration(tmp_path, Facts(1, (A,), (B,)), B)))
    if state == "queued":
        assert turns(uploader) == ["look", 11, "tidy", "wait"]
        assert uploader.status().number == 2
        return
    assert turns(uploader)[0] == "look"
    each = uploader.status().steps[11]
    assert each.far == state
    assert each.far.is_stuck
    assert message in each.error
    assert message in uploader.status().error
    assert far_steps(tmp_path) == []
    chosen = (*far.published, B, Attempt("e" * 12, RUN, 3, Parent(B.name, None))) if state == "forked" else (A, B)
    (tmp_path / "far" / path_of(3)).write_bytes(encode_facts(Facts(3, chosen)))
    uploader.handle(ControlRequest("register", registration(tmp_path, Facts(1, (A,), (B,)), B)))  # they are tried again
    turns(uploader)
    assert far_steps(tmp_path) == [11]


def test_uploader_does_not_send_a_step_that_was_removed_far(tmp_path, folder, uploader):
    take(folder, 10)
    save_id = NearFolder(str(folder)).steps()[10].save_id
    (tmp_path / "far/.pruned").mkdir(parents=True)
    (tmp_path / "far" / tombstone(save_id)).touch()
    uploader.handle(ControlRequest("register", registration(tmp_path)))
    turns(uploader)
    assert states(uploader) == {10: "outdated"}
    assert "was removed from" in uploader.status().steps[10].error
    assert uploader.is_idle()


def test_uploader_pauses_longer_after_each_failure(tmp_path, folder, uploader):
    (tmp_path / "far").write_bytes(b"not a folder")
    take(folder, 10)
    uploader.handle(ControlRequest("register", registration(tmp_path)))
    pauses = []
    for _ in range(9):
        uploader._free = 0.0
        assert uploader.upload_turn().act in (Act.LOOK, Act.SEND)
        pauses.append(uploader._pause)
    assert pauses == [0.5, 1, 2, 4, 8, 16, 30, 30, 30]
    assert "far" in uploader.status().error
    assert uploader.upload_turn().act == Act.WAIT
    (tmp_path / "far").unlink()
    uploader.handle(ControlRequest("want", step=10))
    assert (uploader._pause, uploader._free) == (0.0, 0.0)
    turns(uploader)
    assert far_steps(tmp_path) == [10]
    assert uploader.status().error == ""


@pytest.mark.parametrize("other", [{}, {"rate": 1e6}, {"compression": "zstd"}])
def test_uploader_opens_the_far_root_again_for_a_trainer_with_other_options(tmp_path, folder, uploader, other):
    uploader.handle(ControlRequest("register", registration(tmp_path)))
    assert not uploader._open.reset
    uploader.handle(ControlRequest("register", registration(tmp_path, **other)))
    assert uploader._open.reset == bool(other)


def test_uploader_survives_an_unexpected_error_of_a_turn(tmp_path, folder, uploader, monkeypatch):
    take(folder, 10)
    uploader.handle(ControlRequest("register", registration(tmp_path)))

    def fail():
        raise ZeroDivisionError

    monkeypatch.setattr(uploader, "_look", fail)
    assert uploader.upload_turn().act == Act.LOOK
    assert uploader.status().error == "ZeroDivisionError"
    assert uploader._pause == 30.0


def test_uploader_reports_damage_that_nobody_can_heal(tmp_path, folder, uploader):
    take(folder, 10, 20)
    (path,) = (folder / "step-20/data").iterdir()
    spoil(path)
    uploader.handle(ControlRequest("register", registration(tmp_path)))
    turns(uploader)
    assert states(uploader) == {10: "kept", 20: "damaged"}
    assert far_steps(tmp_path) == []
    assert uploader.is_idle()


def spoil(path):
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.chmod(0o644)
    path.write_bytes(data)


# Connections


@pytest.fixture
def served(folder):
    """Return requests that a control server got, and the server."""
    requests = []

    def handle(request):
        requests.append(request.verb)
        return Status(RUN, "", 7, jobs=len(server.jobs()))

    server = ControlServer(listen(str(folder)), handle)
    yield requests, server
    server.close()


def test_control_server_counts_the_jobs_of_its_connections(tmp_path, folder, served):
    requests, server = served
    first, second = ControlClient(str(folder)), ControlClient(str(folder))
    assert first.ask(ControlRequest("ping")).jobs == 0
    assert first.ask(ControlRequest("register", registration(tmp_path))).jobs == 1
    assert first.ask(ControlRequest("register", registration(tmp_path))).jobs == 1  # the same connection
    assert second.ask(ControlRequest("register", registration(tmp_path, secret="another"))).jobs == 2
    assert server.jobs() == {SECRET, "another"}
    assert first.ask(ControlRequest("close")).jobs == 1
    assert second.ask(ControlRequest("register")).jobs == 1
    second.close()
    wait_until(lambda: server.jobs() == set())
    first.close()
    assert requests == ["ping", "register", "register", "register", "close", "register"]
    assert (folder / control.SOCKET).stat().st_mode & 0o777 == 0o600


def wait_until(done):
    end = time.monotonic() + 60
    while not done():
        assert time.monotonic() < end, "it never happened"
        time.sleep(0.005)


def test_control_client_errors_name_the_folder(folder):
    with pytest.raises(UploaderError, match="cannot be reached"):
        ControlClient(str(folder))
    listening = listen(str(folder))
    client = ControlClient(str(folder), 5)
    with pytest.raises(UploaderHungError, match=r"did not answer within 0\.01 s") as caught:
        client.ask(ControlRequest("ping"), 0.01)
    assert str(folder) in str(caught.value)
    client.close()
    listening.close()


@pytest.mark.parametrize(("answer", "message"), [(b"", "has ended"), (b"{}\n", "not the state of an uploader")])
def test_control_client_refuses_another_answer(folder, answer, message):
    listening = listen(str(folder))

    def serve():
        with listening.accept()[0] as connection:
            connection.recv(1000)
            connection.sendall(answer)

    thread = threading.Thread(target=serve)
    thread.start()
    client = ControlClient(str(folder))
    with pytest.raises(UploaderError, match=message):
        client.ask(ControlRequest("ping"))
    thread.join()
    client.close()
    listening.close()


def test_control_server_ends_a_connection_with_a_wrong_request(folder, served):
    _, server = served
    client = ControlClient(str(folder))
    client._socket.sendall(b"not a request\n")
    assert client._lines.readline() == b""
    client.close()
    assert server.jobs() == set()


class FakeClient:
    """An uploader that fails as often as told."""

    def __init__(self, log, failures):
        self.log, self.failures = log, failures

    def ask(self, request, seconds=None):
        self.log.append(request.verb)
        if self.failures:
            raise self.failures.pop(0)
        return Status(RUN, "", 1)

    def close(self):
        self.log.append("closed")


@pytest.mark.parametrize(
    ("failures", "verbs"),
    [
        ([], ["connect", "register", "status"]),
        ([UploaderError("1")], ["connect", "register", "closed", "connect", "register", "status"]),
    ],
)
def test_uploader_link_connects_again_once(tmp_path, failures, verbs):
    log = []

    def connect(seconds):
        log.append("connect")
        return FakeClient(log, failures)

    link = UploaderLink(str(tmp_path), connect, lambda: registration(tmp_path))
    assert link.ask(ControlRequest("status")).run == RUN
    assert log == verbs
    log.clear()
    assert link.ask(ControlRequest("want", step=3)).run == RUN
    assert log == ["want"]
    assert not link.is_closed
    link.close()
    assert link.is_closed
    assert log == ["want", "close", "closed"]


@pytest.mark.parametrize("error", [UploaderHungError("x"), UploaderError("x"), OSError("x")])
def test_uploader_link_raises_after_two_failures_or_one_that_hangs(tmp_path, error):
    log = []

    def connect(seconds):
        log.append("connect")
        return FakeClient(log, [error] * 3)

    link = UploaderLink(str(tmp_path), connect, lambda: registration(tmp_path))
    hangs = isinstance(error, UploaderHungError)
    with pytest.raises(UploaderHungError if hangs else UploaderError) as caught:
        link.ask(ControlRequest("status"), 7)
    assert log.count("connect") == (1 if hangs else 2)
    if hangs:
        assert "did not answer within 7 s" in str(caught.value)
    else:
        assert str(caught.value) == "x"
        assert type(caught.value) is UploaderError


def test_uploader_link_registers_in_a_thread_and_limits_all_requests(tmp_path, monkeypatch):
    log = []
    link = UploaderLink(str(tmp_path), lambda _: FakeClient(log, []), lambda: registration(tmp_path))
    link.register()
    link.await_registration()
    assert log == ["register", "register"]
    now = [100.0]
    monkeypatch.setattr(control.time, "monotonic", lambda: now[0])
    assert link._limited(5.0) == 5.0
    link.limit(4.0)
    now[0] = 101.0
    assert (link._limited(5.0), link._limited(1.0)) == (3.0, 1.0)
    now[0] = 200.0
    assert link._limited(5.0) == 0.01


@pytest.mark.parametrize(
    ("silent", "pid", "may_end", "is_killed"),
    [(3, 9, True, True), (2, 9, True, False), (3, -1, True, False), (3, 9, False, False)],
)
def test_uploader_link_replaces_a_hung_uploader(tmp_path, monkeypatch, caplog, silent, pid, may_end, is_killed):
    killed, registered = [], []
    monkeypatch.setattr(control, "kill_hung", lambda *given: killed.append(given))
    link = UploaderLink(str(tmp_path), lambda _: None, lambda: None)
    monkeypatch.setattr(link, "register", lambda: registered.append(True))
    link._on_silence(1, pid, may_end=may_end)
    assert "does not answer" in caplog.text
    assert killed == []
    link._on_silence(silent, pid, may_end=may_end)
    assert killed == ([(str(tmp_path), 9)] if is_killed else [])
    assert len(registered) == is_killed
    link._closed.set()
    link._on_silence(3, 9, may_end=True)
    assert len(killed) == is_killed


def test_pid_in_and_has_served_read_the_lock(folder):
    lock = folder / control.LOCK
    assert pid_in(str(folder)) is None
    for text in (b"", b"x", str(os.getpid()).encode(), b"%d %b" % (os.getpid(), SERVES)):
        lock.write_bytes(text)
        assert pid_in(str(folder)) is None  # this process is not an uploader
        assert has_served(str(folder), os.getpid()) == (SERVES in text)
    assert not has_served(str(folder), 1)
    assert control._age_of(os.getpid()) > 0
    assert control._age_of(2**22 + 1) == 0.0


@pytest.mark.parametrize(
    ("index", "count", "replicas", "found"),
    [(0, 1, 1, []), (0, 2, 0, []), (0, 2, 1, [1]), (1, 5, 2, [0, 4]), (3, 6, 2, [1, 5]), (0, 3, 9, [2, 1])],
)
def test_partners_are_the_hosts_before_in_the_clique(index, count, replicas, found):
    assert partners(index, count, replicas) == found


def test_far_text_has_the_share_of_a_running_upload():
    assert far_text(UploadState.UPLOADING, 0, 0) == "uploading 0 %"
    assert far_text(UploadState.UPLOADING, 200, 100) == "uploading 100 %"
    assert far_text(UploadState.QUEUED, 1, 2) == "queued"
    assert [state.is_open for state in (UploadState.QUEUED, UploadState.WAITING, UploadState.WHOLE)] == [1, 1, 0]
    assert hosts_of([("a", "x"), ("b", "y")])[1] == Host("b", "y", [1])


# The process


def test_run_until_done_ends_after_the_last_trainer_and_step(tmp_path, folder):
    take(folder, 10)
    before = signal.getsignal(signal.SIGTERM)
    listening = listen(str(folder))
    uploader = Uploader(str(folder))
    found = []

    def train():
        client = ControlClient(str(folder))
        client.ask(ControlRequest("register", registration(tmp_path)))
        wait_until(lambda: client.ask(ControlRequest("status")).steps[10].far == UploadState.WHOLE)
        found.append(client.ask(ControlRequest("status")).jobs)
        client.ask(ControlRequest("close"))
        client.close()

    trainer = threading.Thread(target=train)
    trainer.start()
    try:
        run_until_done(uploader, listening, linger=300.0)
    finally:
        signal.signal(signal.SIGTERM, before)
    trainer.join()
    assert found == [1]
    assert far_steps(tmp_path) == [10]


def test_lock_folder_is_held_by_one_process(folder):
    lock = lock_folder(str(folder))
    assert lock_folder(str(folder)) is None
    with pytest.raises(SnapshotError, match="its uploader runs"):
        upload_by_hand(str(folder), Facts(), "far", {}, everything=True, rate=None)
    os.close(lock)
    lock = lock_folder(str(folder))
    assert lock is not None
    os.close(lock)


@pytest.mark.parametrize("everything", [False, True])
def test_upload_by_hand_returns_the_state_of_each_wanted_step(tmp_path, folder, everything):
    take(folder, 10, 20)
    far, facts = str(tmp_path / "far"), Facts(0, (), (A,))
    found = upload_by_hand(str(folder), facts, far, None, everything=everything, rate=None)
    assert found == ({10: "whole", 20: "whole"} if everything else {20: "whole"})
    assert far_steps(tmp_path) == sorted(found)
    os.close(lock_folder(str(folder)))


def test_upload_by_hand_raises_if_the_root_cannot_be_reached(tmp_path, folder, monkeypatch):
    monkeypatch.setattr(uploader_process, "time", SimpleNamespace(monotonic=time.monotonic))  # it must not wait
    take(folder, 10)
    (tmp_path / "far").write_bytes(b"not a folder")
    with pytest.raises(SnapshotError, match="far"):
        upload_by_hand(str(folder), Facts(0, (), (A,)), str(tmp_path / "far"), {}, everything=True, rate=None)
    os.close(lock_folder(str(folder)))


def test_find_runs_chooses_by_the_far_root(tmp_path):
    near = tmp_path / "near"
    near.mkdir(mode=0o700)
    assert find_runs(str(near), None) == {}
    for name, far in (("1" * 12, "x"), ("2" * 12, "y")):
        (near / name).mkdir()
        store_copy(str(near / name), Facts(1, (Attempt("a" * 12, name, 1, far=far),)))
        if name[0] == "1":  # a single run may have been uploaded to another place
            assert list(find_runs(str(near), "z")) == [f"{near}/{name}"]
    assert list(find_runs(str(near), "y")) == [f"{near}/{'2' * 12}"]
    assert len(find_runs(str(near), None)) == 2
    assert find_runs(str(near), "z") == {}
    assert list(find_runs(str(near / ("1" * 12)), None)) == [str(near / ("1" * 12))]
    near.chmod(0o722)
    with pytest.raises(PermissionError, match="must be a folder of this user"):
        find_runs(str(near), None)


@pytest.mark.parametrize(("mode", "is_own"), [(0o700, True), (0o755, True), (0o770, False), (0o702, False)])
def test_expect_own_folder_refuses_writers(tmp_path, mode, is_own):
    tmp_path.chmod(mode)
    if is_own:
        expect_own_folder(str(tmp_path))
    else:
        with pytest.raises(PermissionError):
            expect_own_folder(str(tmp_path))
    (tmp_path / "link").symlink_to(tmp_path)
    with pytest.raises(PermissionError):
        expect_own_folder(str(tmp_path / "link"))


def test_ensure_uploader_adopts_one_that_runs_or_gives_up(folder, served, monkeypatch):
    requests, _ = served
    lock = lock_folder(str(folder))
    (folder / uploader_process.OFFERED).write_text("10.0.0.1:5")
    for address in (None, "10.0.0.1"):
        client, offered = ensure_uploader(str(folder), address, 5)
        client.close()
        assert offered == "10.0.0.1:5"
    assert requests == []
    (folder / uploader_process.OFFERED).write_text("127.0.0.1:5")  # others cannot reach it, and it does not end
    monkeypatch.setattr(uploader_process.time, "sleep", lambda _: None)
    with pytest.raises(UploaderError, match="neither answers nor ends"):
        ensure_uploader(str(folder), "10.0.0.1", 0.0)
    wait_until(lambda: requests == ["stop"])
    os.close(lock)


@pytest.mark.parametrize(
    ("last", "is_same"), [("127.0.0.1:{}", True), ("127.0.0.1:x", False), ("10.0.0.1:{}", False), ("", False)]
)
def test_listen_again_uses_the_port_that_other_hosts_know(folder, last, is_same):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    (folder / uploader_process.LISTENED).write_text(last.format(port))
    with uploader_process._listen_again(str(folder), "127.0.0.1") as made:
        assert made.getsockname()[0] == "127.0.0.1"
        assert (made.getsockname()[1] == port) == is_same
    with pytest.raises(PermissionError, match="not all of them"):
        uploader_process._bound("0.0.0.0", 0)


# Replicas


@pytest.fixture
def pair(tmp_path):
    """Return two hosts of a job, whose files the other one can fetch: their folders, uploaders and registrations."""
    folders = [tmp_path / name / RUN for name in "ab"]
    uploaders, servers, hosts = [], [], [Host("a", "a", [0]), Host("b", "b", [1])]
    for at, folder in enumerate(folders):
        folder.mkdir(parents=True)
        made = Uploader(str(folder))
        made.jobs = lambda: {SECRET}
        server = PeerServer(socket.create_server(("127.0.0.1", 0)), str(folder), made.describe)
        made.address = hosts[at].address = server.address
        made.on_secret = server.accept_secret
        uploaders.append(made)
        servers.append(server)
    yield folders, uploaders, hosts
    for made, server in zip(uploaders, servers, strict=True):
        server.close()
        made.close()


def register(tmp_path, uploaders, hosts, **options):
    given = [registration(tmp_path, hosts=hosts, index=at, replicas=1, **options) for at in range(2)]
    for uploader, each in zip(uploaders, given, strict=True):
        uploader.handle(ControlRequest("register", each))
    return given


def test_replicas_fetch_new_files_of_the_partner_once(tmp_path, pair):
    folders, (one, other), hosts = pair
    take(folders[0], 10, 20)
    register(tmp_path, (one, other), hosts, upload=None)
    assert other._replicas._partners() == [hosts[0].address]
    assert not other.status().steps
    assert other.pull_turn() == 0.1
    assert other.pull_turn() == 0.5
    for step in (10, 20):
        names = sorted(path.name for path in (folders[0] / f"step-{step}/data").iterdir())
        assert names == sorted(path.name for path in (folders[1] / f"step-{step}/data").iterdir())
        for path in (METADATA, f"data/{names[0]}"):
            assert (folders[0] / f"step-{step}" / path).read_bytes() == (
                folders[1] / f"step-{step}" / path
            ).read_bytes()
        assert (folders[1] / f"step-{step}" / PULLED).read_text() == f"data/{names[0]}\n"
    found = other.handle(ControlRequest("status")).steps[20]
    assert found.pulled == list(found.files)
    assert found.total == 0  # the partner sends them
    assert found.replicated
    assert one.pull_turn() == 0.5  # replicas are not fetched back
    assert one.handle(ControlRequest("status")).steps[20].replicated


def test_replicas_leave_out_older_and_other_snapshots(tmp_path, pair):
    folders, uploaders, hosts = pair
    take(folders[0], 10, 20, 30)
    take(folders[1], 20, value=1)
    register(tmp_path, uploaders, hosts, upload=None)
    before = (folders[1] / "step-20" / METADATA).read_bytes()
    assert uploaders[1].pull_turn() == 0.1
    assert not (folders[1] / "step-10").exists()  # it was removed here
    assert (folders[1] / "step-30" / METADATA).exists()
    assert (folders[1] / "step-20" / METADATA).read_bytes() == before
    assert not uploaders[1].handle(ControlRequest("status")).steps[20].replicated


def test_replicas_of_a_silent_partner_are_incomplete(tmp_path, pair):
    folders, uploaders, hosts = pair
    take(folders[1], 10)
    replicas = Replicas(NearFolder(str(folders[1])))
    assert replicas.pull() == 0
    assert replicas.is_complete(10, {})  # no job is known
    (given, _) = register(tmp_path, uploaders, [hosts[0], Host("b", "b", [1])], upload=None)
    given.index = 1
    given.hosts[0] = Host("a", "a", [0], "127.0.0.1:1")
    replicas.register(given)
    assert replicas.pull() == 0
    assert not replicas.is_complete(10, {})
    assert replicas.pulled(10, ["data/x"]) == []


def test_heal_step_replaces_damage_by_the_copies_of_others(tmp_path, pair):
    folders, uploaders, hosts = pair
    take(folders[0], 10)
    given = register(tmp_path, uploaders, hosts, upload=None)
    uploaders[1].pull_turn()
    folder = NearFolder(str(folders[0]))
    near, files = folder.steps()[10], list(folder.files(10))
    assert heal_step(folder, near, files, given[0]) == set()
    path, copy = (each / "step-10" / files[0] for each in folders)
    good = path.read_bytes()
    spoil(path)
    assert heal_step(folder, near, files, given[0]) == set()
    assert path.read_bytes() == good
    spoil(path)
    spoil(copy)
    assert heal_step(folder, near, files, given[0]) == set(files)
    uploaders[0].handle(ControlRequest("want", step=10))
    turns(uploaders[0])
    assert states(uploaders[0]) == {10: "damaged"}
    copy.write_bytes(good)
    uploaders[0].handle(ControlRequest("want", step=10))
    turns(uploaders[0])
    assert path.read_bytes() == good
    assert far_steps(tmp_path) == [10]
    path.unlink()
    copy.unlink()
    assert heal_step(folder, near, files, given[0]) == set()  # from the far root
    assert path.read_bytes() == good


def test_step_sources_are_this_host_then_others_then_far(tmp_path, pair):
    folders, uploaders, hosts = pair
    take(folders[0], 10)
    register(tmp_path, uploaders, hosts, upload=None)
    near = NearFolder(str(folders[0])).steps()[10]
    (name,) = near.head.sizes()
    census = CensusStep(10, near.save_id, NO_ORIGIN, {0, 1}, near.head.sizes(), {name: [0, 1]})
    options = {"secret": SECRET, "far": URL.parse(str(tmp_path / "far/step-10")), "options": {}}

    def sources(index, place, hosts=hosts):
        return StepSources(10, place, f"{folders[index]}/step-10", hosts, index, **options)

    for index, kinds in ((0, [NEAR, PEER]), (1, [NEAR, PEER, FAR])):
        made = sources(index, place_of(census, far=kinds[-1] == FAR))
        found = made.places(name)
        assert made.places(name) is found
        assert [each and each.url.scheme for each in found] == [None, "peer", "file"][: len(kinds)]
        assert made.size(name) == near.head.sizes()[name]
        assert made.size("other") is None
        for place, nbytes in zip(found, (1, 20, 300), strict=False):
            made.count(place, nbytes)
        assert made.counts == {NEAR: 1, PEER: 20, FAR: 300 if index else 0}
        assert not made.remote
        made.passed(name, None, "why")
        made.passed(name, found[1], "other")
        assert made.damaged == {name: "why"}
        made.close()
    made = sources(0, PeerPlace(near.save_id, [0], [[1]], False))
    assert [each and each.url.scheme for each in made.places(name)] == ["peer"]
    assert made.places("unknown") == [None]
    assert made.remote
    made.close()
    silent = sources(0, PeerPlace(near.save_id, [1], [[1]], False), [hosts[0], Host("b", "b", [1])])
    assert list(silent.places(name)) in ([], [None])
    silent.close()


def test_place_of_names_some_hosts_of_each_file():
    census = CensusStep(1, "s", NO_ORIGIN, set(range(20)), {"b": 2, "a": 1}, {"b": list(range(12))})
    assert place_of(census, far=True) == PeerPlace("s", list(range(16)), [[], list(range(8))], True)
