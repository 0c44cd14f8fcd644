"""What a run must be, from raw files alone: the facts and steps in folders and in a bucket, without code under test."""

import hashlib
import json
import os
import re
import shutil
from dataclasses import dataclass, field
from pathlib import Path

METADATA = ".snapshot_metadata"
_STEP = re.compile(r"step-(\d+)")


class Wrong(Exception):
    """A promise of the documentation does not hold."""


def digest_of(data):
    return hashlib.sha256(data).hexdigest()


def flipped(data):
    return data[:-5] + bytes([data[-5] ^ 1]) + data[-4:]


@dataclass
class Take:
    """A take of a job, and what was promised about it."""

    value: int
    step: int
    options: dict
    attempt: str = ""
    save_id: str = ""
    run: str = ""
    files: dict = field(default_factory=dict)
    """The digest of each data file, once the take is committed."""
    is_near: bool = False
    """True once `wait()` returned."""
    is_far: bool = False
    """True once `wait("far")` returned."""
    was_far: bool = False


@dataclass
class Seen:
    """A snapshot in a folder: its manifest's ids, and its data files."""

    save_id: str = ""
    attempt: str = ""
    run: str = ""
    names: frozenset = frozenset()
    """The files that the manifest names."""
    replaces: bool = False
    """True if the take may replace another snapshot of the step."""


def read_manifest(data):
    """Return the ids in a manifest, or None if it is damaged."""
    try:
        found = json.loads(data)
        origin = found["metadata"].get("snapshot.tiers", {"attempt": "", "run": "", "replaces": False})
        names = frozenset(found["files"])
        return Seen(found["save_id"], origin["attempt"], origin["run"], names, origin["replaces"])
    except (ValueError, KeyError, TypeError):
        return None


def read_facts(data):
    """Return the published attempts in a file of facts, or None if it is damaged."""
    body, _, digest = data.rstrip(b"\n").rpartition(b"\n")
    if digest_of(body).encode() != digest:
        return None
    return json.loads(body).get("published", [])


class Line:
    """The attempts that the last one descends from, each with the step at which the line left it."""

    def __init__(self, attempts, tip):
        """`attempts`: all that are known, by name; `tip`: the name of the last one."""
        self.cuts, limit, save_id = {}, None, ""
        while tip in attempts and tip not in self.cuts:
            self.cuts[tip] = limit, save_id
            parent = attempts[tip].get("parent")
            if not parent:
                break
            save_id = ""
            if parent[1] is not None and (limit is None or parent[1] <= limit):
                limit, save_id = parent[1], parent[2] if len(parent) > 2 else ""
            tip = parent[0]

    def has(self, step, attempt, save_id):
        if attempt not in self.cuts:
            return False
        limit, only = self.cuts[attempt]
        return limit is None or step < limit or (step == limit and only in ("", save_id))


class FolderRoot:
    """A far root that is a folder."""

    def __init__(self, path):
        self.path, self.away = Path(path), Path(path).with_name("away")
        self.url, self.options = str(path), None
        self.is_down = False
        self.path.mkdir(parents=True)
        self._read = {}

    @property
    def _at(self):
        return self.away if self.is_down else self.path

    def go_down(self):
        self.path.mkdir(exist_ok=True)
        self.path.rename(self.away)
        self.path.write_text("down")
        self.is_down = True

    def come_back(self):
        self.path.unlink()
        self.away.rename(self.path)
        self.is_down = False

    def names(self):
        """All files."""
        at = str(self._at)
        return [f"{base}/{name}"[len(at) + 1 :] for base, _, names in os.walk(at) for name in names]

    def read(self, name):
        return (self._at / name).read_bytes()

    def manifest(self, name):
        return cached_manifest(self._at / name, self._read)

    def write(self, name, data):
        path = self._at / name
        path.chmod(0o644)
        path.write_bytes(data)

    def delete(self):
        shutil.rmtree(self.path, ignore_errors=True)

    hits = 0
    arm = None

    def heal(self):
        """Nothing fails by itself."""


class BucketRoot:
    """A far root in a bucket, which jobs reach through a proxy, and the oracle without it."""

    def __init__(self, moto, proxy):
        self.proxy, self.is_down, self._read, self._down, self._faults = proxy, False, {}, None, []
        self.bucket = moto.bucket()
        region = {"region_name": moto.region}
        self.url = f"s3://{self.bucket}/run"
        self.options = {"key": moto.key, "secret": moto.secret, "endpoint_url": proxy.url, "client_kwargs": region}
        self.options |= {"timeout": 3, "deadline": 3}
        self._request = moto.request

    def _ask(self, method, path, body=b""):
        found = self._request(method, f"/{self.bucket}{path}", body)
        return found.status, found.body

    def go_down(self):
        self._down = self.proxy.fault(times=None, must_happen=False, status=403)
        self.is_down = True

    def come_back(self):
        self.proxy.drop(self._down)
        self.is_down = False

    def arm(self, chance):
        """Let one of the next requests fail, or lose its answer."""
        kind = chance.choice(
            [{"status": 503}, {"reset_before": True}, {"lose_answer": "reset"}, {"lose_answer": "reset"}]
        )
        method, path = chance.choice(
            [("PUT", "*.run*"), ("PUT", "*"), ("PUT", f"*{METADATA}"), ("GET", "*"), ("*", "*")]
        )
        times = chance.choice([1, 2, 5])
        self._faults.append(self.proxy.fault(method, path, times=times, must_happen=False, **kind))
        return method, path, times, *kind

    @property
    def hits(self):
        return sum(each.hits for each in self._faults)

    def heal(self):
        for each in self._faults:
            self.proxy.drop(each)

    def _list(self):
        status, found = self._ask("GET", "/?list-type=2&prefix=run/")
        assert status == 200, found
        return re.findall(r"<Key>run/(.*?)</Key>.*?<ETag>(.*?)</ETag>", found.decode(), re.DOTALL)

    def names(self):
        """All files."""
        self._tags = dict(self._list())
        return list(self._tags)

    def read(self, name):
        status, found = self._ask("GET", f"/run/{name}")
        if status != 200:
            raise FileNotFoundError(2, "No such file", name)
        return found

    def manifest(self, name):
        key = name, self._tags[name]
        if key not in self._read:
            self._read[key] = read_manifest(self.read(name))
        return self._read[key]

    def write(self, name, data):
        self._ask("PUT", f"/run/{name}", data)

    def delete(self):
        for name in self.names():
            self._ask("DELETE", f"/run/{name}")


def cached_manifest(path, known):
    """Return what a manifest says, without reading it twice."""
    found = path.stat()
    key = (found.st_ino, found.st_mtime_ns, found.st_size)
    if key not in known:
        known[key] = read_manifest(path.read_bytes())
    return known[key]


def near_steps(near, known):
    """Return what is in a near folder: by run and step, the manifest (None if it is missing or damaged) and files."""
    found = {}
    for run in Path(near).iterdir() if Path(near).is_dir() else ():
        if not run.is_dir():
            continue
        for folder in run.iterdir():
            step = _STEP.fullmatch(folder.name)
            if step:
                head = None
                if (folder / METADATA).exists():
                    head = cached_manifest(folder / METADATA, known)
                names = os.listdir(folder / "data") if (folder / "data").is_dir() else []
                found[run.name, int(step[1])] = head, frozenset(f"data/{each}" for each in names)
    return found


def near_facts(near):
    """Return the facts in each run's folder of a host: the published ones, the pending ones, and the last number."""
    found = {}
    for run in Path(near).iterdir() if Path(near).is_dir() else ():
        published, number, pending = [], 0, {}
        for path in sorted((run / ".run").glob("*.json")) if (run / ".run").is_dir() else ():
            if re.fullmatch(r"\d{8}\.json", path.name):
                facts = read_facts(path.read_bytes())
                if facts is not None:
                    published, number = facts, int(path.name[:8])
            else:
                made = json.loads(path.read_bytes().splitlines()[0])
                pending[made["name"]] = made
        names = {each["name"] for each in published}
        found[run.name] = published, [each for each in pending.values() if each["name"] not in names], number
    return found
