"""`snapshot ui`: who may ask, what is answered, and what a real browser shows of it."""

import contextlib
import http.client
import json
import math
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from snapshot import Snapshot, SnapshotManager, StateDict, TakeOptions
from snapshot.cli import main
from snapshot_health import page_server as ui
from snapshot_health.page_server import CHANGES, NAMES, Abandoned, PageServer, RunView
from tests.helpers.servers import request

HOSTILE = "<img src=x onerror=alert(1)><script>alert(2)</script>"


def state(step):
    weight = torch.full((4, 3), float(step))
    weight[0, 0] = math.nan if step == 30 else 1.0
    model = StateDict(weight=weight, bias=torch.tensor([3.0, 4.0]), steps=torch.tensor([step]))
    model["tied"] = model["weight"]
    return {"model": model, "frozen": StateDict({HOSTILE: torch.ones(5, dtype=torch.bfloat16)})}


@pytest.fixture
def root(tmp_path):
    """A root with all that can be there: steps that are whole, pinned, damaged, torn, or of another library."""
    root = tmp_path / "run"
    with SnapshotManager(root, incremental=True, signals=()) as manager:
        for step in (10, 20, 30):
            loss = math.nan if step == 30 else 1 / step
            manager.take(step, state(step), metrics={"loss": loss, HOSTILE: step})
        manager.pin(20)
    (root / "step-40" / "data").mkdir(parents=True)
    (root / "step-5").mkdir()
    (root / "step-5" / ".snapshot_metadata").write_text("{}")
    (root / "notes").mkdir()
    return root


class Client:
    """A client with the cookie of the page, after its first request."""

    def __init__(self, server):
        self.server = server
        self.url = server.address.partition("/?")[0]
        self.headers = {"Cookie": f"other=1; {server.cookie}={server.token}"}

    def get(self, path, status=200, **headers):
        answer = request("GET", self.url + path, headers={**self.headers, **headers})
        assert (answer.status, answer.headers["Content-Type"]) == (status, "application/json; charset=utf-8")
        assert "Access-Control-Allow-Origin" not in answer.headers
        return json.loads(answer.body)


@contextlib.contextmanager
def served(root, **given):
    with PageServer(RunView(str(root), **given), 0) as server:
        thread = threading.Thread(target=server.serve)
        thread.start()
        try:
            yield Client(server)
        finally:
            server.stop()
            thread.join()


@pytest.fixture
def client(root):
    with served(root) as client:
        yield client


# Who may ask


def test_cli_ui_first_address_sets_a_cookie_that_later_requests_need(client):
    answer = request("GET", client.server.address)
    assert answer.status == 200
    cookie, *attributes = answer.headers["Set-Cookie"].split("; ")
    assert attributes == ["Path=/", "HttpOnly", "SameSite=Strict"]
    assert request("GET", client.url, headers={"Cookie": cookie}).status == 200
    assert client.get("/api/steps?most=1", Cookie=cookie)["total"] == 5


@pytest.mark.parametrize("path", ["/", "/api/steps?most=1", "/favicon.ico", "/?token=", "/?token=é", "/?token=%ff%00"])
@pytest.mark.parametrize("cookie", ["", "snapshot-ui=x", "{cookie}=x", "{cookie}", "x={token}"])
def test_cli_ui_answers_nothing_without_the_token(client, path, cookie):
    server = client.server
    with socket.create_connection(server.server_address) as raw:
        cookie = cookie.format(cookie=server.cookie, token=server.token)
        raw.sendall(f"GET {path} HTTP/1.1\r\nHost: localhost\r\nCookie: {cookie}\r\n\r\n".encode())
        answer = http.client.HTTPResponse(raw)
        answer.begin()
        text = answer.read().decode()
    assert answer.status == 403
    assert "token" in json.loads(text)["error"]
    assert "Set-Cookie" not in answer.headers
    assert server.token not in text


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:80", "127.0.0.1.evil.example", "127.0.0.1@evil", "", "0.0.0.0"]
)
def test_cli_ui_refuses_another_host_header(client, host):
    assert "must be for 127.0.0.1" in client.get("/", 403, Host=host)["error"]


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:8000", "127.0.0.1:1", "[::1]:99"])
def test_cli_ui_allows_a_forwarded_port(client, host):
    assert client.get("/api/steps?most=1", Host=host)["total"] == 5


def test_cli_ui_refuses_requests_from_another_site(client):
    for site in ("cross-site", "same-site"):
        assert "another site" in client.get("/api/steps?most=1", 403, **{"Sec-Fetch-Site": site})["error"]
    first = request("GET", client.server.address, headers={"Sec-Fetch-Site": "cross-site"})
    assert first.status == 200  # a link to the first address


@pytest.mark.parametrize("method", ["POST", "PUT", "PATCH", "DELETE", "OPTIONS", "HEAD"])
def test_cli_ui_answers_only_get(client, method):
    assert request(method, client.url, headers=client.headers).status == 405
    assert request(method, client.url).status == 403


def test_cli_ui_answers_an_invalid_request_without_a_traceback(client, capfd):
    for sent in (
        b"nonsense\r\n\r\n",
        b"BREW / HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"GET /" + b"x" * 70_000,
        b"GET / HTTP/9\r\n\r\n",
    ):
        with socket.create_connection(client.server.server_address) as raw:
            raw.sendall(sent)
            raw.shutdown(socket.SHUT_WR)
            with contextlib.suppress(ConnectionResetError), raw.makefile("rb") as answer:
                assert b'{"error": ' in answer.read()
    assert "Traceback" not in capfd.readouterr().err


def test_cli_ui_page_loads_nothing_and_sets_a_content_security_policy(client):
    answers = [request("GET", client.server.address) for _ in range(2)]
    nonces = set()
    for answer in answers:
        text, policy = answer.body.decode(), answer.headers["Content-Security-Policy"]
        (nonce,) = set(re.findall(r"'nonce-([^']+)'", policy))
        nonces.add(nonce)
        assert re.findall(r"<(?:script|style)[^>]*>", text) == [f'<style nonce="{nonce}">', f'<script nonce="{nonce}">']
        assert "unsafe" not in policy
        assert policy.startswith("default-src 'none'; ")
        assert re.findall(r"""\bon\w+=|\bsrc=|innerHTML|insertAdjacentHTML|eval\(|@import|url\(""", text) == []
        assert set(re.findall(r"https?://[^\"]*", text)) == {"http://www.w3.org/2000/svg"}
        assert client.server.token not in text
        assert answer.headers["Referrer-Policy"] == "no-referrer"
        assert answer.headers["Cache-Control"] == "no-store"
    assert len(nonces) == 2


@pytest.mark.parametrize(
    "path",
    [
        "steps",
        "steps?most=-1",
        "check?step=ten",
        "check?step=1234567890123456789",
        "check?step=%D9%A1",
        "diff?a=10",
        "health?step=10",
        "health?step=10&glob=" + "*" * 201,
        "tensors?step=10&glob=[z-a]",
        "steps?" + "&".join(f"a{i}=1" for i in range(20)),
    ],
)
def test_cli_ui_refuses_an_invalid_parameter(client, path):
    assert client.get(f"/api/{path}", 400)["error"]


def test_cli_ui_refuses_an_unknown_path(client):
    for path in ("/api/nothing", "/../etc/passwd", "/api"):
        assert "no such page" in client.get(path, 404)["error"]


# Steps


def test_ui_steps_lists_the_steps_with_their_details(client, root):
    told = client.get("/api/steps?most=200")
    assert (told["url"], told["near"], told["total"]) == (str(root), None, 5)
    steps = {step["step"]: step for step in told["steps"]}
    assert list(steps) == [40, 30, 20, 10, 5]
    assert steps[10]["metrics"] == {"loss": 0.1, HOSTILE: 10.0}
    assert steps[30]["metrics"] == {"loss": "nan", HOSTILE: 30.0}
    assert [step for step in steps if steps[step].get("pinned")] == [20]
    assert steps[20]["bytes"] == Snapshot(root / "step-20").metadata.nbytes
    assert steps[10]["shared"] == 0
    assert "no manifest" in steps[40]["problem"]
    assert "not a manifest" in steps[5]["problem"]
    assert [step["step"] for step in client.get("/api/steps?most=2")["steps"]] == [40, 30]


def test_ui_steps_shared_bytes_are_those_of_an_earlier_step(tmp_path):
    frozen = StateDict(x=torch.randn(1 << 20))
    with SnapshotManager(tmp_path, incremental=True, signals=()) as manager:
        for step in (1, 2, 3, 4):
            manager.take(step, {"frozen": frozen, "progress": StateDict(step=step)})
    shared = [step["shared"] for step in RunView(str(tmp_path)).steps(9)["steps"]]
    assert max(shared) >= 4 << 20
    assert shared[-1] == 0


def test_ui_steps_shows_the_newest_of_thousands_of_steps(tmp_path):
    for step in range(3000):
        (tmp_path / f"step-{step}").mkdir()
    Snapshot.take(tmp_path / "step-2999", state(1))
    told = RunView(str(tmp_path)).steps(100)
    assert (told["total"], len(told["steps"])) == (3000, 100)
    assert [step["step"] for step in told["steps"] if "bytes" in step] == [2999]


def test_ui_steps_of_an_empty_root_is_empty_and_a_missing_root_is_an_error(tmp_path):
    assert RunView(str(tmp_path)).steps(9)["steps"] == []
    assert RunView("memory://nothing/run").steps(9)["total"] == 0
    with served(tmp_path / "nowhere") as client:
        assert "no such folder" in client.get("/api/steps?most=9", 404)["error"]


def test_ui_check_finds_missing_or_removed_data(client, root):
    client.get("/api/steps?most=9")
    assert client.get("/api/check?step=10") == {"step": 10, "fault": ""}
    for file in (root / "step-30" / "data").iterdir():
        file.write_bytes(b"short")
    assert "5 bytes of" in client.get("/api/check?step=30")["fault"]
    shutil.rmtree(root / "step-20")
    assert "was removed or replaced" in client.get("/api/check?step=20", 404)["error"]
    assert "is not in the root" in client.get("/api/check?step=99", 404)["error"]


def test_ui_steps_hides_a_secret_in_the_url():
    view = RunView("memory://key:secret@bucket/run")
    assert view.steps(1)["url"] == "memory://key:***@bucket/run"


def test_cli_ui_writes_nothing(client, root):
    def tree():
        return {path: (path.stat().st_mtime_ns, path.stat().st_ino) for path in [root, *root.rglob("*")]}

    before = tree()
    for path in (
        "steps?most=9",
        "check?step=10",
        "diff?a=10&b=30&values=1",
        "tensors?step=10&glob=**",
        "health?step=30&glob=**",
    ):
        client.get(f"/api/{path}")
    client.get("/api/health?step=40&glob=**", 404)
    assert tree() == before


# Differences


def test_ui_diff_compares_two_steps(client):
    told = client.get("/api/diff?a=10&b=20")
    assert {change["path"]: change["values"] for change in told["changes"]} == dict.fromkeys(
        ("model/weight", "model/tied", "model/steps")
    )
    told = client.get("/api/diff?a=10&b=30&values=1")
    assert told["changes"][0]["path"] in ("model/weight", "model/tied")
    assert told["changes"][0]["values"]["not_numbers"] == 1
    assert told["changes"][0]["values"]["norm"] == pytest.approx(math.sqrt(11) * 20)
    assert told["summary"].startswith("3 changed")
    assert client.get("/api/diff?a=10&b=10")["same"]


def test_ui_diff_of_a_step_that_was_removed_is_an_error(client, root):
    client.get("/api/steps?most=9")
    shutil.rmtree(root / "step-20")
    assert "step-20" in client.get("/api/diff?a=10&b=20", 404)["error"]


def test_ui_diff_with_many_changes_is_cut(tmp_path):
    for step in (1, 2):
        Snapshot.take(tmp_path / f"step-{step}", {"s": StateDict({f"k{i}": i * step for i in range(CHANGES + 50)})})
    told = RunView(str(tmp_path)).diff(1, 2, values=False)
    assert (len(told["changes"]), told["left_out"]) == (CHANGES, 49)


# Health


def test_ui_health_of_a_step(client):
    told = client.get("/api/health?step=20&glob=model/**")
    assert (told["tensors"], told["nan"], told["infinite"], told["worst"]) == (2, 0, 0, [])  # tied ones count once
    assert told["norm"] == pytest.approx(math.sqrt(11 * 400 + 1 + 25))
    assert {each["name"]: each["norm"] for each in told["each"]}["model/bias"] == 5.0
    told = client.get("/api/health?step=30&glob=**")
    assert (told["tensors"], told["nan"]) == (3, 1)
    assert [(each["name"], each["nan"]) for each in told["worst"]] == [("model/weight", 1)]
    assert client.get("/api/health?step=30&glob=nothing")["tensors"] == 0


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.float8_e4m3fn])
def test_ui_health_of_each_dtype_in_many_parts(tmp_path, monkeypatch, dtype):
    monkeypatch.setattr(ui, "AT_ONCE", 64)
    monkeypatch.setattr(ui, "STEP", 5)
    values = torch.randn(7, 13).to(dtype)
    values[3, 5] = math.nan
    if dtype != torch.float8_e4m3fn:  # which has no infinity
        values[0, 0] = -math.inf
    Snapshot.take(tmp_path / "step-1", {"s": StateDict(x=values, scalar=torch.ones((), dtype=dtype))})
    told = RunView(str(tmp_path)).health(1, "**", bool)
    wide = values.to(torch.complex128 if dtype.is_complex else torch.float32)
    assert (told["tensors"], told["nan"]) == (2, 1)
    assert told["infinite"] == int(wide.isinf().sum())
    assert told["norm"] == pytest.approx(math.hypot(1.0, wide[wide.isfinite()].norm().item()), rel=1e-5)


def test_ui_health_of_a_tensor_without_a_finite_value_has_no_norm(tmp_path):
    Snapshot.take(tmp_path / "step-1", {"s": StateDict(x=torch.full((3,), math.nan))})
    assert math.isnan(RunView(str(tmp_path)).health(1, "**", bool)["norm"])


def test_ui_health_is_cached_by_save_id(client, root):
    first = client.get("/api/health?step=30&glob=**")
    for file in (root / "step-30" / "data").iterdir():
        content = bytearray(file.read_bytes())
        content[-1] ^= 1
        file.write_bytes(content)
    assert client.get("/api/health?step=30&glob=**") == first
    assert "step-30" in client.get("/api/health?step=30&glob=**/*", 422)["error"]
    shutil.rmtree(root / "step-30")
    assert "step-30" in client.get("/api/health?step=30&glob=**", 404)["error"]


def take_of_ranks(path):
    mesh = init_device_mesh("cpu", (2,))
    sharded = distribute_tensor(torch.arange(30.0).view(10, 3), mesh, [Shard(0)])
    own, same = torch.full((2,), dist.get_rank() + 3.0), torch.ones(4)
    Snapshot.take(path, {"m": StateDict(own=own, same=same, sharded=sharded)}, replicated=["m/same"])


def test_ui_health_counts_tensors_of_several_ranks_once(two, tmp_path):
    two.run(take_of_ranks, tmp_path / "step-1")
    told = RunView(str(tmp_path)).health(1, "m/*", bool)
    norms = {"m/same": 2.0, "m/sharded": torch.arange(30.0).norm().item(), "0/m/own": 18**0.5, "1/m/own": 32**0.5}
    assert {each["name"]: each["norm"] for each in told["each"]} == pytest.approx(norms)


def test_ui_health_leaves_out_tensors_of_the_base(tmp_path):
    frozen, adapter = nn.Linear(4, 4).requires_grad_(False), nn.Linear(4, 4)
    state = {"frozen": frozen, "adapter": adapter}
    base = Snapshot.take(tmp_path / "step-1", state)
    Snapshot.take(tmp_path / "step-2", state, base=base, options=TakeOptions(only="trainable"))
    view = RunView(str(tmp_path))
    assert [view.health(step, "**", bool)["tensors"] for step in (1, 2)] == [4, 2]


def test_ui_tensors_lists_the_tensors_of_a_step(tmp_path):
    Snapshot.take(tmp_path / "step-1", {"s": StateDict({f"k{i}": torch.ones(2) for i in range(NAMES + 9)}, n=1)})
    told = RunView(str(tmp_path)).tensors(1, "**")
    assert (told["tensors"], told["bytes"], len(told["names"])) == (NAMES + 9, 8 * (NAMES + 9), NAMES)
    assert told["keys"] == ["s"]
    assert RunView(str(tmp_path)).tensors(1, "s/k1")["names"] == ["s/k1"]


def test_ui_health_memory_does_not_grow_with_the_tensor(tmp_path, one_thread):
    for step, elements in ((1, 9), (2, 96 << 20)):
        Snapshot.take(tmp_path / f"step-{step}", {"s": StateDict(x=torch.ones(elements, dtype=torch.bfloat16))})
    view = RunView(str(tmp_path))
    view.health(1, "**", bool)

    def peak():
        with open("/proc/self/status") as file:
            return next(int(line.split()[1]) << 10 for line in file if line.startswith("VmHWM"))

    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")
    before = peak()
    assert view.health(2, "**", bool)["norm"] == pytest.approx(math.sqrt(96 << 20))
    assert peak() - before < 100 << 20


def test_ui_health_is_abandoned_if_its_page_is_closed(client):
    with pytest.raises(Abandoned):
        client.server.view.health(10, "**", lambda: True)
    begun, go_on = threading.Event(), threading.Event()

    def other():
        begun.set()
        go_on.wait()
        return {}

    thread = threading.Thread(target=client.server.compute, args=(other, bool))
    thread.start()
    begun.wait()
    path, cookie = "/api/health?step=10&glob=**", client.headers["Cookie"]
    with socket.create_connection(client.server.server_address) as raw:
        raw.sendall(f"GET {path} HTTP/1.1\r\nHost: localhost\r\nCookie: {cookie}\r\n\r\n".encode())
        raw.shutdown(socket.SHUT_WR)
        assert raw.makefile("rb").read() == b""  # it has ended, although the other one has not
    go_on.set()
    thread.join()
    assert client.get(path)["nan"] == 0


# The command


def test_cli_ui_exits_with_an_error_if_the_run_cannot_be_served(root, tmp_path, capsys):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        for words, text in [
            ([tmp_path / "nowhere"], "no such folder"),
            ([root / "step-10"], "is a snapshot"),
            ([root, "--near", tmp_path], "has no run"),
            ([root, "--port", taken.getsockname()[1]], "choose another --port"),
            ([root, "--port", "70000"], "invalid port"),
        ]:
            assert main(["ui", *map(str, words)]) == 2
            told = capsys.readouterr()
            assert text in told.err
            assert told.out == ""


@contextlib.contextmanager
def command(*words):
    """A process of the command, and the address that it printed."""
    with subprocess.Popen(
        [sys.executable, "-m", "snapshot", "ui", *map(str, words)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            yield process, process.stdout.readline().strip()
        finally:
            process.kill()


@pytest.mark.slow
@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_cli_ui_ends_silently_on_a_signal(root, number, status):
    with command(root) as (process, address):
        assert re.fullmatch(r"http://127\.0\.0\.1:\d+/\?token=[\w-]{43}", address)
        assert request("GET", address).status == 200
        process.send_signal(number)
        assert process.communicate(timeout=300) == ("", "")
        assert process.returncode == status


# In a browser


TEXTS = "return [...document.querySelectorAll(arguments[0])].map(each => each.textContent)"
POINTS = "return [...document.querySelectorAll(arguments[0])].map(each => [each.dataset.step, each.dataset.value])"
ROWS = """
    return document.querySelectorAll("#steps .state .good").length === 3
        && document.getElementById("estimate").textContent
"""


def test_cli_ui_in_a_browser_shows_the_page(root, browser):
    with served(root) as client:
        browser.log()
        browser.open(client.server.address)
        assert browser.until(ROWS) == "2 floating-point tensors, 56 B in step 30"
        assert browser.run("return location.href") == f"{client.url}/"
        assert browser.run("return document.cookie") == ""

        assert browser.run(TEXTS, "#steps tbody th") == ["40", "30", "20", "10", "5"]
        assert browser.run(TEXTS, "#steps thead th")[1:5] == ["State", "Taken (UTC)", "loss", HOSTILE]
        assert browser.run(TEXTS, "#steps tr[data-step='20'] .badge") == ["whole", "pinned"]
        assert browser.run(TEXTS, "#metric-plots h3") == ["loss", HOSTILE]
        assert browser.run(POINTS, "#metric-plots .plot:first-child circle") == [["10", "0.1"], ["20", "0.05"]]
        assert browser.run(POINTS, "#metric-plots .cross") == [["30", None]]  # the loss is NaN there

        browser.run("document.getElementById('diff-a').value = '10'; document.getElementById('diff-b').value = '30'")
        browser.click("#values")
        browser.click("#diff-form button")
        browser.until("return document.querySelectorAll('#diff tbody tr').length === 3")
        assert sorted(browser.run(TEXTS, "#diff td:nth-child(2)")) == ["model/steps", "model/tied", "model/weight"]
        assert browser.run(TEXTS, "#diff td:nth-child(3)")[0].endswith("1 element NaN on one side")

        browser.type("#glob", "**")
        browser.click("#read")
        browser.until("return document.getElementById('health-status').textContent === '3 steps read: **'")
        counts = [["10", "0"], ["20", "0"], ["30", "1"]]
        assert browser.run(POINTS, "#health-plots .plot:last-child circle.s0") == counts
        hostile = f"frozen/{HOSTILE.replace('</', '<%2F')}"  # a path of the manifest
        assert hostile in browser.run(TEXTS, "#health-plots .legend span")
        assert browser.run(TEXTS, "#health tbody tr:first-child td") == ["3", "99.6494", "1", "0", "model/weight (1)"]

        assert browser.run("return [document.images.length, document.scripts.length]") == [0, 1]
        browser.open(f"{client.url}/")  # again, without the token
        browser.until(ROWS)
        assert browser.log() == []


def test_cli_ui_in_a_browser_shows_errors_and_continues(root, browser):
    with served(root) as client:
        browser.open(client.server.address)
        browser.until(ROWS)
        shutil.rmtree(root / "step-20")
        (file,) = (root / "step-10" / "data").iterdir()
        file.unlink()
        browser.click("#read")
        browser.until("return document.getElementById('health-status').textContent === '3 steps read: model/**'")
        assert len(browser.run(TEXTS, "#health .error")) == 2
        assert browser.run(TEXTS, "#health tbody th") == ["30", "20", "10"]
        browser.click("#refresh")
        assert "is missing" in browser.until(
            "return document.querySelector('#steps tr[data-step=\"10\"] .bad')?.textContent"
        )
        browser.type("#glob", "[z-a]")
        browser.click("#read")
        assert "invalid glob" in browser.until("return document.querySelector('#health .error')?.textContent")
        for width in (1280, 390):
            browser.cdp(
                "Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=width < 600
            )
            assert browser.run("return document.documentElement.scrollWidth") <= width
        browser.cdp("Emulation.clearDeviceMetricsOverride")
    browser.click("#refresh")
    assert "may have ended" in browser.until("return document.getElementById('error').textContent")


def test_ui_health_glob_characters_in_a_name_match_one_tensor(tmp_path):
    key = "*a" * 24 + "b"
    weights = {"w[0]": torch.full((2,), math.nan), "w0": torch.ones(2), "h*": torch.ones(3), "hx": torch.ones(9)}
    Snapshot.take(
        tmp_path / "step-1", {"zz": StateDict(weights), key: StateDict(a=torch.ones(1)), "a" * 100: StateDict()}
    )
    with served(tmp_path) as client:
        assert client.get("/api/health?step=1&glob=zz/w[0]")["nan"] == 2
        assert client.get("/api/health?step=1&glob=zz/h*")["tensors"] == 1
        assert key not in client.get("/api/tensors?step=1&glob=**")["keys"]
        assert "wildcards" in client.get(f"/api/tensors?step=1&glob={key}/**", 400)["error"]


def test_ui_health_of_complex_tensors_counts_their_parts(tmp_path):
    values = torch.tensor([complex(math.inf, math.nan), complex(1.7e308, 1.7e308), 3 + 4j], dtype=torch.complex128)
    Snapshot.take(tmp_path / "step-1", {"s": StateDict(a=values, b=values.conj(), c=torch.tensor([3 + 4j]))})
    with served(tmp_path) as client:
        found = {each["name"]: each for each in client.get("/api/health?step=1&glob=**")["each"]}
    assert all((found[name]["nan"], found[name]["infinite"]) == (1, 0) for name in ("s/a", "s/b"))
    assert found["s/c"]["norm"] == 5.0


def test_cli_ui_refuses_a_malformed_url_without_a_traceback(client, capfd):
    with socket.create_connection(("127.0.0.1", client.server.server_port)) as peer:
        peer.sendall(b"GET http://[ HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n")
        assert peer.recv(100).startswith(b"HTTP/1.0 403")
    assert capfd.readouterr().err == ""
