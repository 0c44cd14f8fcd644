"""`snapshot doctor`: what works at a place, and what does not."""

import json
import os
import re
import time
from types import SimpleNamespace

import pytest

from snapshot.cli import doctor as doctor_speed
from snapshot.cli import main
from snapshot.io.registry import register, unregister
from snapshot.storages.memory import MemoryStorage
from snapshot.testing import faulty


def doctor(capsys, *argv, status=0):
    assert main(["doctor", *map(str, argv), "--size", "1MiB", "--seconds", "1", "--json"]) == status
    told = json.loads(capsys.readouterr().out)
    return told, {check["check"]: check for check in told["checks"]}


def test_cli_doctor_of_a_working_folder(tmp_path, capsys):
    told, checks = doctor(capsys, tmp_path / "new" / "run")
    assert told["ok"]
    assert all(checks[name]["ok"] for name in ("write", "read", "list", "condition", "delete"))
    assert told["speeds"][0]["settings"] == "the defaults"
    assert all(each["write"] > 0 and each["read"] > 0 for each in told["speeds"])
    assert told["settings"]
    assert list(tmp_path.iterdir()) == []


def test_cli_doctor_without_a_url_checks_the_machine(capsys):
    told, checks = doctor(capsys)
    assert set(checks) == {"versions", "machine", "extras"}
    assert told["speeds"] == []


SCREEN = """\
ok versions #
ok machine #
ok extras #
- place #
ok write a small file was written (#)
ok read it was read, as a whole and in part (#)
ok list it is listed (#)
ok condition a conflicting write was refused (#)
ok delete it was deleted (#)

settings write read
the defaults # #
"""


def test_cli_doctor_prints_a_line_for_each_check_and_settings_to_export(tmp_path, capsys):
    assert main(["doctor", str(tmp_path), "--size", "1MiB", "--seconds", "1"]) == 0
    text = re.sub(r"[\d.]+ (ms|\w+/s)", "#", re.sub(r" +", " ", capsys.readouterr().out))
    text = re.sub(r"(versions|machine|extras|place) .*", r"\1 #", text)
    assert text.startswith(SCREEN)
    assert "\nSettings to paste:\n" in text


@pytest.mark.parametrize(
    ("on", "check"), [("put", "write"), ("get", "read"), ("read_into", "read"), ("list", "list"), ("delete", "delete")]
)
def test_cli_doctor_exits_1_and_names_the_failed_check(capsys, on, check):
    with faulty(on=on, error=PermissionError(13, "Permission denied"), times=None):
        told, checks = doctor(capsys, "faulty+memory://doctor", status=1)
    assert not told["ok"]
    assert checks[check]["ok"] is False
    assert "Permission denied" in checks[check]["text"]
    assert told["speeds"] == []


def test_cli_doctor_finds_a_storage_that_ignores_conditional_puts(capsys):
    class Lying(MemoryStorage):
        async def put(self, path, data, *, expect=None):
            return await super().put(path, data)

    register("lying", Lying)
    try:
        _, checks = doctor(capsys, "lying://doctor", status=1)
    finally:
        unregister("lying")
    assert "overwrite each other" in checks["condition"]["text"]


def test_cli_doctor_reports_a_read_only_storage(capsys):
    _, checks = doctor(capsys, "https://127.0.0.1:1/x", "-o", "deadline=0.1", status=1)
    assert checks["write"]["ok"] is None
    assert checks["read"]["ok"] is False


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_cli_doctor_of_a_folder_without_permission(tmp_path, capsys):
    tmp_path.chmod(0o500)
    _, checks = doctor(capsys, tmp_path / "run", status=1)
    assert "Permission denied" in checks["write"]["text"]


def test_cli_doctor_suggests_the_scheme_for_a_misspelled_url(capsys):
    assert main(["doctor", "s4://bucket"]) == 2
    assert "did you mean s3://" in capsys.readouterr().err


@pytest.fixture
def measured(monkeypatch):
    """Makes each measurement one of a sequence of rates, by the settings; says how many there were of each."""

    def make(rates):
        made = {}

        def measure(url, options, environment, tensors):
            name = " ".join(environment.values()) or "the defaults"
            turns = made.setdefault(name, [])
            turns.append(rates(name, len(turns)))
            return turns[-1]

        monkeypatch.setattr(doctor_speed, "_measured", measure)
        return made

    return make


def lengths(made):
    return {len(turns) for turns in made.values()}


def speeds(capsys, tmp_path):
    assert main(["doctor", str(tmp_path), "--size", "1MiB", "--seconds", "100000", "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_doctor_speed_measures_twice_if_measurements_agree_and_gives_advice(tmp_path, capsys, measured):
    made = measured(lambda name, turn: ((300.0 if name == "1 always" else 200.0) + turn, 50.0))
    told = speeds(capsys, tmp_path)
    assert lengths(made) == {doctor_speed.FEWEST}
    assert told["settings"] == ["export SNAPSHOT_LANES=1", "export SNAPSHOT_DIRECT_IO=always"]
    assert all(each["agrees"] and each["repeats"] == 2 for each in told["speeds"])


def test_doctor_speed_repeats_measurements_that_do_not_agree(tmp_path, capsys, measured):
    made = measured(lambda name, turn: ([90.0, 200.0, 50.0, 195.0][turn] if name == "1 always" else 200.0, 50.0))
    told = speeds(capsys, tmp_path)
    assert {name: len(turns) for name, turns in made.items() if len(turns) != 2} == {"1 always": 4}
    assert told["settings"] == ["none: no tried setting is clearly better than the defaults"]


def test_doctor_speed_gives_no_advice_on_a_noisy_machine(tmp_path, capsys, measured):
    made = measured(lambda name, turn: (100.0 * 1.2**turn * (9 if name == "1 always" else 1), 50.0))
    told = speeds(capsys, tmp_path)
    assert lengths(made) == {doctor_speed.MOST}
    (said,) = told["settings"]
    assert said.startswith("none: this machine is too noisy: the best of 8 measurements of the defaults ")
    assert not any(each["agrees"] for each in told["speeds"])


def test_doctor_speed_gives_no_advice_from_one_measurement(tmp_path, capsys, measured, monkeypatch):
    clock = iter(range(0, 10**9, 60_000))
    monkeypatch.setattr(
        doctor_speed, "time", SimpleNamespace(perf_counter=time.perf_counter, monotonic=lambda: next(clock))
    )
    made = measured(lambda name, turn: (100.0, 50.0))
    told = speeds(capsys, tmp_path)
    assert len(made["the defaults"]) == 1
    assert told["settings"] == ["none: no time to measure twice; pass more --seconds"]


def test_doctor_speed_counts_reads_as_well_as_writes():
    trial = doctor_speed.Trial("x", write=[100.0, 99.0], read=[100.0, 50.0])
    assert not trial.agrees()
    trial.read.append(97.0)
    assert trial.agrees()
    assert not doctor_speed.Trial("y", write=[1.0], read=[1.0]).agrees()


def test_doctor_speed_proposes_nothing_that_makes_reads_slower(tmp_path, capsys, measured):
    measured(lambda name, turn: (200.0, 40.0) if name == "2 never" else (100.0, 50.0))
    told = speeds(capsys, tmp_path)
    assert told["settings"] == ["none: no tried setting is clearly better than the defaults"]
