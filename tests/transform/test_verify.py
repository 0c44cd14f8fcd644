"""Verification in a hurry, after an interruption, and of what cannot be verified."""

import json
import shutil

import pytest
import torch

from snapshot import CorruptSnapshotError, Snapshot, SnapshotNotFoundError, StateDict, StorageError, Target
from snapshot.testing import faulty, recording
from snapshot.transform import verify
from snapshot.transform.sources import stat_files
from tests.helpers.warm_interpreter import Failed

KiB = 1 << 10


def state():
    return {"long": torch.arange(600_000.0), **{f"t{i}": torch.full((30_000,), float(i)) for i in range(10)}}


@pytest.fixture
def taken(tmp_path, monkeypatch):
    """A snapshot whose verification takes several stretches, of which one tensor is several."""
    monkeypatch.setattr(verify, "STRETCH", 512 * KiB)
    return Snapshot.take(tmp_path / "s", {"m": StateDict(**state())})


def damage(snapshot, name="0/m/t3"):
    entry = snapshot.get_manifest()[name]
    with open(f"{snapshot.path}/{entry.location}", "r+b") as file:
        file.seek(entry.byte_range[0])
        byte = file.read(1)[0]
        file.seek(entry.byte_range[0])
        file.write(bytes([byte ^ 1]))
    return entry


def test_verify_quick_checks_files_without_reading_them(taken):
    with recording() as log:
        report = Snapshot(f"recording+file://{taken.path}").verify(quick=True)
    assert report.ok
    assert report.quick
    assert (report.bytes_read, report.entries) == (0, 11)
    assert report.files == len(taken.metadata.files)
    assert not log.of("read_into")
    assert "no byte was compared" in str(report)
    assert "every byte" not in str(report)


def test_verify_quick_finds_missing_and_short_files_and_names_the_entry(taken):
    damage(taken)
    assert taken.verify(quick=True), "it does not look at bytes"
    entry = taken.get_manifest()["0/m/t3"]
    file = f"{taken.path}/{entry.location}"
    with open(file, "r+b") as held:
        held.truncate(100)
    (short,) = taken.verify(quick=True).faults
    assert short.startswith(f"{entry.location} must have ")
    assert "0/m/" in short
    shutil.move(file, file + ".away")
    assert any("is missing (holds 0/m/" in fault for fault in taken.verify(quick=True).faults)


def test_verify_quick_finds_an_inconsistent_manifest(tmp_path):
    from snapshot.manifest import document

    Snapshot.take(tmp_path / "s", {"m": StateDict(x=1)})
    manifest = tmp_path / "s" / ".snapshot_metadata"
    made = document.decode_document(manifest.read_bytes(), "here")
    del made.manifest["0/m/x"]
    manifest.write_bytes(document.encode(made))
    assert not Snapshot(tmp_path / "s").verify(quick=True)
    manifest.write_bytes(manifest.read_bytes()[:-3])
    with pytest.raises(CorruptSnapshotError):
        Snapshot(tmp_path / "s").verify(quick=True)
    manifest.unlink()
    with pytest.raises(SnapshotNotFoundError):
        Snapshot(tmp_path / "s").verify(quick=True)


def test_verify_without_digests_says_structure_only(tmp_path, taken):
    taken.convert(Target(tmp_path / "m.safetensors", "safetensors"))
    report = Snapshot(tmp_path / "m.safetensors").verify()
    assert report.ok
    assert report.unverifiable == 11
    assert "structure only, 11 entries cannot be verified" in str(report)
    taken.convert(Target(tmp_path / "m.pt", "torch"))
    report = Snapshot(tmp_path / "m.pt").verify()
    assert (report.unverifiable, "every byte matches its digest" in str(report)) == (0, True)


def interrupted(path, notes, nth):
    """A verification that ends at the nth read."""
    error = PermissionError(13, "Permission denied")
    with faulty(on="read_into", path="data/*", nth=nth, error=error), pytest.raises(StorageError):
        Snapshot(f"faulty+file://{path}").verify(resume=notes)


def test_verify_resume_continues_after_an_interruption(taken, tmp_path):
    notes = tmp_path / "notes" / "file"
    whole = taken.verify().bytes_read
    url = f"faulty+file://{taken.path}"
    interrupted(taken.path, notes, 8)
    with recording("faulty") as log:
        report = Snapshot(url).verify(resume=notes)
    assert report.ok
    assert report.bytes_before > 512 * KiB
    assert whole <= report.bytes_read + report.bytes_before < whole + 64 * KiB, "a table of digests is read again"
    assert log.nbytes("read_into") == report.bytes_read
    assert "and " in str(report)
    assert not notes.exists(), "all is well"


def test_verify_resume_continues_inside_a_long_tensor(taken, tmp_path):
    interrupted(taken.path, tmp_path / "n", 6)
    noted = [json.loads(line) for line in (tmp_path / "n").read_text().splitlines()[1:]]
    entry = taken.get_manifest()["0/m/long"]
    inside = [
        key for line in noted for key in line["done"] if key[1] == entry.location and key[3] - key[2] == 512 * KiB
    ]
    assert inside


def test_verify_resume_finds_known_faults_again(taken, tmp_path):
    whole = taken.verify().bytes_read
    first, last = "0/m/long", "0/m/t9"
    damage(taken, first)
    damage(taken, last)
    url, notes = f"recording+file://{taken.path}", tmp_path / "n"
    with recording() as log:
        assert len(Snapshot(url).verify(resume=notes).faults) == 2
        assert log.nbytes("read_into") > whole // 2
        log.clear()
        report = Snapshot(url).verify(resume=notes)
        assert log.nbytes("read_into") == 0
    assert sorted(fault.partition(":")[0] for fault in report.faults) == [first, last]
    assert notes.exists()
    damage(taken, first)  # back to what it was: the file was touched, so all is looked at anew
    damage(taken, last)
    with recording():
        report = Snapshot(url).verify(resume=notes)
    assert (report.ok, report.bytes_before) == (True, 0)
    assert not notes.exists()


def test_verify_resume_journal_is_of_one_snapshot(taken, tmp_path):
    notes = tmp_path / "n"
    interrupted(taken.path, notes, 8)
    kept = notes.read_bytes()
    with pytest.raises(ValueError, match="is the journal of"):
        taken.verify(resume=notes)  # the same snapshot, by another URL
    assert notes.read_bytes() == kept
    Snapshot.take(taken.path, {"m": StateDict(**state())}, overwrite=True)
    with recording("faulty"):
        report = Snapshot(f"faulty+file://{taken.path}").verify(resume=notes)
    assert (report.ok, report.bytes_before) == (True, 0)


@pytest.mark.parametrize("content", [b"something", b"{}", b"[1]\n", b'{"snapshot verifyX": 1}\n', b"\0" * 50])
def test_verify_resume_does_not_overwrite_another_file(taken, tmp_path, content):
    notes = tmp_path / "n"
    notes.write_bytes(content)
    with pytest.raises(ValueError, match="must be the journal of a verification"):
        taken.verify(resume=notes)
    assert notes.read_bytes() == content


def test_verify_resume_journal_that_was_truncated_counts_as_far_as_it_is_complete(taken, tmp_path):
    interrupted(taken.path, tmp_path / "whole", 12)
    whole = (tmp_path / "whole").read_bytes()
    ends = [at for at in range(len(whole)) if whole[at : at + 1] == b"\n"]
    cuts = {0, 1, 5, *ends, *(at + 1 for at in ends), *(at + 9 for at in ends), *range(0, len(whole), 97)}
    url = f"faulty+file://{taken.path}"
    known = set()
    for cut in sorted(cuts):
        (tmp_path / "n").write_bytes(whole[:cut])
        with recording("faulty"):
            report = Snapshot(url).verify(resume=tmp_path / "n")
        assert report.ok, cut
        known.add(report.bytes_before)
    assert len(known) == len(ends), "as many states as there are lines"


KILLED = """
import os, signal, sys
from snapshot import Snapshot
from snapshot.transform import verify as stretches
from snapshot.testing.storages import tapped
from snapshot.testing.storages import Tap

class Kill(Tap):
    async def before(self, operation):
        if operation.name == "read_into" and open(sys.argv[2], "rb").read().count(b"\\n") >= 3:  # two stretches
            os.kill(os.getpid(), signal.Signals[sys.argv[3]])

stretches.STRETCH = 512 << 10
with tapped("recording", Kill()):
    Snapshot("recording+file://" + sys.argv[1]).verify(resume=sys.argv[2])
"""


@pytest.mark.parametrize("signal", ["SIGKILL", "SIGINT"])
def test_verify_resume_continues_after_a_killed_process(taken, tmp_path, warm, signal):
    with pytest.raises(Failed):
        warm.run(KILLED, taken.path, tmp_path / "n", signal)
    with recording():
        report = Snapshot(f"recording+file://{taken.path}").verify(resume=tmp_path / "n")
    assert report.ok
    assert report.bytes_before > 512 * KiB


def test_verify_narrows_an_unreadable_range_to_its_entry(taken):
    entry = taken.get_manifest()["0/m/t4"]
    with faulty(on="read_into", path=entry.location, error=OSError(5, "Input/output error"), times=None, nth=2):
        faults = Snapshot(f"faulty+file://{taken.path}").verify().faults
    assert any(each.startswith(f"0/m/t4: {entry.location}[") and "Input/output error" in each for each in faults)
    assert all(": data/" in each or each.startswith("data/") for each in faults)


def test_verify_resume_continues_with_every_format(tmp_path, monkeypatch):
    monkeypatch.setattr(verify, "STRETCH", 64 * KiB)
    snapshot = Snapshot.take(tmp_path / "s", {"m": StateDict(**state())})
    for to in ("dcp", "torch", "safetensors"):
        snapshot.convert(Target(tmp_path / to, to))
        with recording() as log:
            plain = Snapshot(f"recording+file://{tmp_path}/{to}").verify(resume=tmp_path / "n")
        reads = len(log.of("read_into"))
        again = Snapshot(f"recording+file://{tmp_path}/{to}")
        error = faulty("recording", on="read_into", nth=reads - 3, error=PermissionError(13, "Permission denied"))
        with error, pytest.raises(StorageError):
            again.verify(resume=tmp_path / "n")
        with recording():
            report = again.verify(resume=tmp_path / "n")
        assert report.ok, to
        assert report.bytes_before > 0, to
        assert report.unverifiable == plain.unverifiable
        assert not (tmp_path / "n").exists()


@pytest.mark.parametrize("line", [0, 1, 2])
def test_verify_resume_ignores_a_damaged_journal(taken, tmp_path, line):
    notes = tmp_path / "n"
    interrupted(taken.path, notes, 12)
    lines = notes.read_bytes().splitlines(keepends=True)
    assert len(lines) >= 3
    noted = [sum(end - begin for _, _, begin, end in json.loads(each)["done"]) for each in lines[1:]]
    last = max(at for at in range(len(lines[line])) if lines[line][at : at + 1].isdigit() and at < 150)
    held = bytearray(lines[line])
    held[last] = ord("0") + (held[last] - ord("0") + 1) % 10
    lines[line] = bytes(held)
    json.loads(lines[line])
    notes.write_bytes(b"".join(lines))
    with recording("faulty"):
        report = Snapshot(f"faulty+file://{taken.path}").verify(resume=notes)
    assert (report.ok, report.bytes_before) == (True, sum(noted[: max(0, line - 1)]))


def test_verify_resume_starts_again_if_the_storage_has_no_file_versions(taken, tmp_path, monkeypatch):
    async def bare(storage, locations):
        return {name: (size, None) for name, (size, _) in (await stat_files(storage, locations)).items()}

    monkeypatch.setattr(verify, "stat_files", bare)
    notes = tmp_path / "n"
    interrupted(taken.path, notes, 12)
    assert len(notes.read_bytes().splitlines()) > 1
    damage(taken, "0/m/long")
    with recording("faulty"):
        report = Snapshot(f"faulty+file://{taken.path}").verify(resume=notes)
    assert (len(report.faults), report.bytes_before) == (1, 0)


def test_stretches_are_cut_by_the_bytes_of_ranges_and_of_checksums(monkeypatch):
    monkeypatch.setattr(verify, "STRETCH", 10)
    everything = verify.Stretch(sums=[("a", 0, 6), ("a", 6, 12), ("b", 100, 104), ("b", 104, 110)])
    found = [(each.sums, each.nbytes) for each in verify.cut_stretches(everything, {("sum", "b", 100, 104)})]
    assert found == [([("a", 0, 6), ("a", 6, 12)], 12), ([("b", 104, 110)], 6)]
