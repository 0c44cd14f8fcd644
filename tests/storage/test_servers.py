"""The servers that plugins are tested against do what those tests rely on, are real processes, and leave nothing."""

import base64
import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.helpers import servers
from tests.helpers.servers import request
from tests.helpers.trees import PYTHONPATH


def test_server_moto_keeps_objects_and_conditions(moto):
    path = f"/{moto.bucket()}/object"
    assert moto.request("PUT", path, b"first", {"If-None-Match": "*"}).status == 200
    assert moto.request("PUT", path, b"other", {"If-None-Match": "*"}).status == 412
    assert moto.request("GET", path, headers={"Range": "bytes=1-3"}).body == b"irs"


def test_server_weed_keeps_objects_and_conditions(weed):
    path = f"/{weed.bucket()}/object"
    assert weed.request("PUT", path, b"first", {"If-None-Match": "*"}).status == 200
    assert weed.request("PUT", path, b"other", {"If-None-Match": "*"}).status == 412
    assert weed.request("GET", path, headers={"Range": "bytes=1-3"}).body == b"irs"


def test_server_weed_has_room_for_many_buckets(weed):
    assert {weed.request("PUT", f"/{weed.bucket()}/object", b"object").status for _ in range(16)} == {200}


def test_server_weed_refuses_wrong_signatures(weed):
    path = f"/{weed.bucket()}/object"
    weed.request("PUT", path, b"object")
    for wrong in [{"secret": "another"}, {"key": "another"}]:
        assert dataclasses.replace(weed, **wrong).request("GET", path).status == 403
    assert request("GET", weed.url + path).status == 403


def test_server_gcs_keeps_objects_and_conditions(gcs):
    upload = f"{gcs.url}/upload/storage/v1/b/{gcs.bucket()}/o?uploadType=multipart&ifGenerationMatch=0"
    parts = [b'Content-Type: application/json\r\n\r\n{"name": "object"}', b"Content-Type: text/plain\r\n\r\nfirst"]
    body = b"".join(b"--part\r\n" + part + b"\r\n" for part in parts) + b"--part--\r\n"
    related = {"Content-Type": "multipart/related; boundary=part"}
    first, other = request("POST", upload, body, related), request("POST", upload, body, related)
    assert (first.status, other.status) == (200, 412)
    assert request("GET", json.loads(first.body)["mediaLink"], None, {"Range": "bytes=1-3"}).body == b"irs"


def test_server_azurite_keeps_blobs(azurite):
    blob = pytest.importorskip("azure.storage.blob")
    with (
        blob.BlobServiceClient.from_connection_string(azurite.connection_string) as client,
        client.get_blob_client(azurite.container(), "blob") as one,
    ):
        one.upload_blob(b"first")
        assert one.download_blob(1, 3).readall() == b"irs"
    assert request("GET", f"{azurite.url}/?comp=list").status == 403


def test_server_nginx_answers_or_ignores_ranges(nginx):
    (nginx.folder / ".file").write_bytes(b"0123456789")
    ranged = {"Range": "bytes=2-4"}
    part, whole = (
        request("GET", f"{nginx.url}/.file", None, ranged),
        request("GET", f"{nginx.whole}/.file", None, ranged),
    )
    assert (part.status, part.body, part.headers["Content-Range"]) == (206, b"234", "bytes 2-4/10")
    assert (whole.status, whole.body) == (200, b"0123456789")
    assert request("GET", f"{nginx.url}/").status == 403  # it lists nothing


def test_server_nginx_has_failing_slow_and_private_locations(nginx):
    (nginx.folder / "file").write_bytes(bytes(50_000))
    assert request("GET", f"{nginx.broken}/file").status == 500
    assert request("GET", f"{nginx.slow}/file").body == bytes(50_000)
    (slow,) = re.findall(r"location /slow/ {[^}]*}", (nginx.folder.parent / "nginx.conf").read_text())
    assert "limit_rate 100k;" in slow
    assert request("GET", f"{nginx.private}/file").status == 401
    token = base64.b64encode(f"{nginx.user}:{nginx.password}".encode()).decode()
    assert request("GET", f"{nginx.private}/file", None, {"Authorization": f"Basic {token}"}).status == 200


def test_server_webdav_keeps_files(webdav):
    assert request("MKCOL", f"{webdav.url}/folder").status == 201
    assert request("PUT", f"{webdav.url}/folder/file", b"first").status == 201
    assert (webdav.folder / "folder/file").read_bytes() == b"first"
    assert request("GET", f"{webdav.url}/folder/file", None, {"Range": "bytes=1-3"}).body == b"irs"


def test_server_sshd_keeps_files_and_requires_the_key(sshd, tmp_path):
    (tmp_path / "file").write_bytes(b"file")
    sshd.sftp(f"put {tmp_path / 'file'} {sshd.folder / 'put'}", f"get {sshd.folder / 'put'} {tmp_path / 'got'}")
    assert (tmp_path / "got").read_bytes() == b"file"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", tmp_path / "other"], check=True)
    with pytest.raises(OSError, match="Permission denied"):
        dataclasses.replace(sshd, client_key=tmp_path / "other").sftp("pwd")


@pytest.mark.parametrize("answer", ["require", ""])
def test_server_tool_that_is_missing_skips_or_fails(monkeypatch, answer):
    monkeypatch.setenv("SNAPSHOT_TEST_SERVERS", answer)
    with pytest.raises(pytest.fail.Exception if answer else pytest.skip.Exception, match="install the tool"):
        servers.tool("no-such-tool", "install the tool")


@pytest.mark.parametrize(
    ("script", "told"), [("echo why; exit 3", "status 3.*why"), ("echo why; sleep 60", "no good.*why")]
)
def test_server_that_does_not_start_says_why(monkeypatch, tmp_path, script, told):
    monkeypatch.setattr(servers, "START", 0.5)
    folder = tmp_path / "server"
    folder.mkdir()
    (folder / "script").write_text(script)
    with pytest.raises(pytest.fail.Exception, match=f"(?s){told}"):  # noqa: SIM117 - what is raised is raised inside
        with servers.running("/bin/sh", "script", lambda: False, folder):
            pass
    assert not folder.exists()


def test_server_ends_with_the_tests(tmp_path):
    tests = (
        "import pathlib, sys, time\n"
        "from tests.helpers import servers\n"
        "with servers.running('/bin/sleep', '60', lambda: True, pathlib.Path(sys.argv[1])) as process:\n"
        "    print(process.pid, flush=True)\n"
        "    time.sleep(60)\n"
    )
    environment = {**os.environ, "PYTHONPATH": PYTHONPATH}
    command = [sys.executable, "-c", tests, str(tmp_path)]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        server = int(process.stdout.readline())
        while Path(f"/proc/{server}/comm").read_text() != "sleep\n":
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
    end = time.monotonic() + 10
    while _runs(server) and time.monotonic() < end:
        time.sleep(0.01)
    assert not _runs(server)


def _runs(pid):
    """Whether a process is there and is no zombie, which it stays where nobody waits for orphans."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
