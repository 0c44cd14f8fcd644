"""`snapshot scan` beside picklescan and modelscan: what one of them calls dangerous is found.

    SNAPSHOT_SOAK_SECONDS=600 python -m pytest -s tests/soak/test_scan_peers.py

`SNAPSHOT_SCAN_SAMPLES` may name a folder with more samples, such as a clone of one of these projects: they are read by
all three, and run by none.
"""

import json
import os
import random
import time
from pathlib import Path

import pytest

from snapshot.cli import main
from snapshot_scan.contents import Examination, of_bytes
from snapshot_scan.pickles import LONGEST
from tests.plugins.snapshot_scan.hostile_files import HIDDEN, SAFE, SUSPICIOUS
from tests.plugins.snapshot_scan.hostile_pickles import NAMES, TRICKS, called, headed, named, stacked

SECONDS = int(os.environ.get("SNAPSHOT_SOAK_SECONDS", "60"))
SAMPLES = os.environ.get("SNAPSHOT_SCAN_SAMPLES", "")
CLOSED = (".7z",)
"""Archives that are never opened here: they are named as not examined."""


def by_picklescan(path):
    """The names that picklescan calls dangerous."""
    scanner = pytest.importorskip("picklescan.scanner", reason="pip install picklescan")
    result = scanner.scan_file_path(str(path))
    return {(each.module, each.name) for each in result.globals if each.safety == scanner.SafetyLevel.Dangerous}


def by_modelscan(path):
    """The names that modelscan finds in a file."""
    scanner = pytest.importorskip("modelscan.modelscan", reason="pip install modelscan").ModelScan()
    scanner.scan(str(path))
    return {(each.details.module, each.details.operator) for each in scanner.issues.all_issues}


@pytest.fixture
def samples(tmp_path):
    """A folder with all samples."""
    files = {f"trick-{number}.pkl": data for number, data in enumerate(TRICKS.values())}
    for number, each in enumerate(NAMES):
        files[f"global-{number}.pkl"] = called(named(*each))
        files[f"stacked-{number}.bin"] = called(headed(stacked(*each)))
    files |= HIDDEN | SAFE | {name: data for name, (data, _) in SUSPICIOUS.items() if len(data) < 1 << 20}
    for number, (name, data) in enumerate(files.items()):
        path = tmp_path / "samples" / f"{number}-{name.replace('/', '-')}"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(data)
    if SAMPLES:
        (tmp_path / "samples" / "more").symlink_to(Path(SAMPLES).resolve())
    return tmp_path / "samples"


@pytest.mark.parametrize("peer", [by_picklescan, by_modelscan])
def test_soak_scan_finds_what_other_scanners_find(samples, capsys, peer):
    paths = [each for each in samples.iterdir() if each.is_file()]
    paths += [each for each in (samples / "more").rglob("*") if each.is_file()]
    counts = {"files": len(paths), "theirs": 0, "both": 0, "only ours": 0}
    for path in paths:
        try:
            theirs = peer(path)
        except Exception:  # noqa: BLE001 - they fail with some files
            theirs = set()
        main(["scan", str(path), "--json"])
        found = json.loads(capsys.readouterr().out.splitlines()[-1])
        names = {each["name"] for each in found["findings"] if each["verdict"] == "runs code"}
        runs = bool(found["verdicts"]["runs code"])
        counts["theirs"] += bool(theirs)
        counts["both"] += bool(theirs and runs)
        counts["only ours"] += bool(runs and not theirs)
        if theirs:
            assert not found["ok"], (path, theirs)
            assert runs or path.suffix in CLOSED, (path, theirs)
            certain = {f"{module}.{name}" for module, name in theirs if "unknown" not in module + name}
            certain = {each for each in certain if len(each) < LONGEST}  # others are `(computed)`
            pickled = {each for each in certain if not each.startswith(("Keras.", "Tensorflow."))}
            assert pickled <= names or path.suffix in CLOSED, (path, pickled - names)
    with capsys.disabled():
        print(f"\n{peer.__name__}: {counts}")


@pytest.mark.timeout(SECONDS + 300)
def test_soak_scan_finds_what_picklescan_finds_in_random_pickles(tmp_path, capsys):
    pieces = [bytes([code]) for code in b"(012Ntl]})aesu\x85\x86\x87Rbo\x81\x92\x93\x94."]
    pieces += [b"h\0", b"h\1", b"q\0", b"q\1", b"g1\n", b"p0\n", b"K\5", b"\x80\4", b"\x80\2", b"I1\n", b"\xff", b"\0"]
    pieces += [b"\x8c\2os", b"\x8c\6system", b"Vos\n", b"S'system'\n", b"cos\nsystem\n", b"(iposix\nsystem\n"]
    seed = int(os.environ.get("SNAPSHOT_TEST_SEED", "0")) or random.randrange(1 << 30)
    chance, end, count, dangerous = random.Random(seed), time.monotonic() + SECONDS, 0, 0
    path = tmp_path / "random.pkl"
    while time.monotonic() < end:
        data = b"".join(chance.choices(pieces, k=chance.randrange(1, 20)))
        path.write_bytes(data)
        try:
            theirs = by_picklescan(path)
        except Exception:  # noqa: BLE001 - it fails with some
            continue
        examination = Examination("random.pkl")
        examination.examine(of_bytes(data))
        count += 1
        dangerous += bool(theirs)
        runs = {each.name for each in examination.findings if each.verdict == "runs code"}
        certain = {f"{module}.{name}" for module, name in theirs if "unknown" not in module + name}
        assert not theirs or any(each.verdict != "harmless" for each in examination.findings), (seed, data, theirs)
        # of texts on the stack, it takes the last two before the instruction, which need not be the right ones
        assert certain & {"posix.system"} <= runs, (seed, data, certain)
    with capsys.disabled():
        print(f"\n{count:,} random pickles, {dangerous:,} of them dangerous")
