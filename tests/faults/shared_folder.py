"""A place in which snapshots are taken, among files that are not ours: what stands there, and what was left there."""

import os
import re
import shutil
from pathlib import Path

import torch

from snapshot import Snapshot, SnapshotNotFoundError, StateDict
from tests.helpers.arguments import for_take

# Written here once more, and not taken from the library: so that a mistake there is not one here, too.
OURS = re.compile(
    r"\.snapshot_metadata|\.take-[0-9a-f]{12}"
    r"|data/[0-9a-f]{12}(-[0-9]+(-[0-9]+\.(safetensors|bin|json)|\.json|\.sha256)|\.signature)(\.[0-9a-f]{12}\.tmp)?"
)
FOREIGN = [
    "notes.txt",
    "data/notes.txt",
    ".take-",
    ".take-run",
    ".take-0123456789ab.part",
    ".take-0123456789abc",
    ".snapshot_metadata.bak",
    "data/train-1.json",
    "data/2026-11-21.json",
    "data/0123456789ab-0-0.safetensors.bak",
    "data/0123456789ab-0-x.bin",
    "data/0123456789ab.signature.bak",
    "data/0123456789ab-0-0.sha256",
    "data/0123456789ab.sha256",
    "data/more/0123456789ab-0-0.bin",
    "more/data/0123456789ab-0-0.bin",
    "more/.take-0123456789ab",
]
BIG = 270_000  # elements: long enough to go around the page cache, where a file system allows it


def state(version):
    """An application. Each value depends on the version, except those of a frozen tower."""
    model = torch.nn.Linear(40, 30)
    optimizer = torch.optim.SGD(model.parameters(), lr=float(version), momentum=0.9)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(version)
            optimizer.state[parameter]["momentum_buffer"] = torch.full_like(parameter, version + 0.5)
    values = StateDict(
        big=torch.arange(BIG, dtype=torch.float32) + version,
        small=torch.full((7,), version, dtype=torch.bfloat16),
        text=f"{version}" * 20_000,
        number=version,
    )
    tower = torch.nn.Linear(200, 100, bias=False).requires_grad_(False)
    tower.weight.fill_(7)
    return {"model": model, "optimizer": optimizer, "values": values, "tower": tower}


def fresh():
    return state(0)


def holds(live, version):
    """Whether every value is of that version."""
    expected = state(version)
    return (
        all(
            torch.equal(one, two)
            for one, two in zip(live["model"].parameters(), expected["model"].parameters(), strict=True)
        )
        and live["optimizer"].param_groups[0]["lr"] == version
        and all(
            torch.equal(each["momentum_buffer"], torch.full_like(each["momentum_buffer"], version + 0.5))
            for each in live["optimizer"].state.values()
        )
        and torch.equal(live["values"]["big"], expected["values"]["big"])
        and torch.equal(live["values"]["small"], expected["values"]["small"])
        and live["values"]["text"] == expected["values"]["text"]
        and live["values"]["number"] == version
        and bool(live["tower"].weight.eq(7).all())
    )


def take(path, version, **options):
    return Snapshot.take(path, state(version), **for_take(metadata={"version": version}, durable=False, **options))


def files(path):
    return sorted(
        os.path.relpath(os.path.join(folder, name), path) for folder, _, names in os.walk(path) for name in names
    )


def _ours(inside):
    return OURS.fullmatch(inside) or inside in (".", "data")


class Place:
    """A folder for snapshots, `path`, with what is somebody else's in it and beside it."""

    def __init__(self, home, name="step-1", *, foreign=True, others=()):
        self.home = home
        self.path = home / name
        self._snapshots = [self.path, *others]
        self.with_foreign = foreign
        if foreign:
            for near in (self.path, home / f"{name}0"):
                for each in FOREIGN:
                    (near / each).parent.mkdir(parents=True, exist_ok=True)
                    (near / each).write_text(f"{each} is mine")
                (near / "empty").mkdir()
            (home / f"{name}0" / ".take-0123456789ab").touch()
            (home / f"{name}0" / ".snapshot_metadata").write_text("{}")
        self._theirs = self._foreign()

    def untouched(self):
        """Whether all that is not ours is as it was, and there is no more of it."""
        return self._foreign() == self._theirs

    def _foreign(self):
        found = {}
        for folder, names, below in os.walk(self.home):
            for name in [*names, *below]:
                full = os.path.join(folder, name)
                if any(_ours(os.path.relpath(full, each)) for each in self._snapshots):
                    continue
                stat = os.lstat(full)
                content = Path(full).read_bytes() if name in below else stat.st_mode
                found[full] = (content, stat.st_ino)
        return found

    def ours(self):
        """What is in the folder, and has a name of ours."""
        return [name for name in files(self.path) if OURS.fullmatch(name)]

    def stands(self):
        """The version of the snapshot that stands here, whole; None if there is none. All else is an error."""
        assert self.untouched(), "what is not ours was touched, or something of another name was left"
        if not Snapshot(self.path).exists():
            live = fresh()
            try:
                Snapshot(self.path).restore(live)
            except SnapshotNotFoundError:
                assert holds(live, 0)
                return None
            raise AssertionError("what is not there was restored")
        snapshot = Snapshot(self.path)
        report = snapshot.verify()
        assert report.ok, report
        version = snapshot.metadata.metadata["version"]
        live = fresh()
        snapshot.restore(live)
        assert holds(live, version)
        return version

    def clean(self, version=None):
        """Nothing but one whole snapshot, which can be restored, or nothing at all, has files here."""
        assert self.stands() == version
        self.alone(version)

    def alone(self, version=None):
        """Nothing but files of one snapshot that verifies, or nothing at all, and what is not ours."""
        assert self.untouched()
        ids = {re.search(r"[0-9a-f]{12}", name)[0] for name in self.ours() if name != ".snapshot_metadata"}
        if version is None:
            assert self.ours() == []
            assert self.path.exists() == self.with_foreign
        else:
            snapshot = Snapshot(self.path)
            assert snapshot.verify().ok
            assert snapshot.metadata.metadata["version"] == version  # beside what the guards find
            assert ids == {snapshot.metadata.save_id}
            assert not [name for name in self.ours() if name.startswith(".take-")]

    def goes_on(self, standing, *, by_delete):
        """What was left is no hindrance: the next take, or a delete, removes it, and the place is as good as new."""
        if by_delete:
            if self.ours():
                Snapshot(self.path).delete()
            else:
                try:
                    Snapshot(self.path).delete()
                except SnapshotNotFoundError:
                    pass
                else:
                    raise AssertionError("what is not there was deleted")
                if not self.with_foreign:
                    shutil.rmtree(self.path, ignore_errors=True)  # folders alone
            assert self.ours() == []
            standing = None
        take(self.path, 99, overwrite=standing is not None)
        self.alone(99)

    def reset(self, version=None):
        """Only this version, for the next round; everything else as it was."""
        if version is not None:
            take(self.path, version, overwrite=True)
        elif self.ours():
            Snapshot(self.path).delete()
