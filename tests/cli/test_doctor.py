"""`snapshot doctor`: what works at a place, and what does not."""

import json
import os

import pytest

from snapshot.cli import main
from snapshot.plugins.memory import MemoryStorage
from snapshot.registry import register, unregister
from snapshot.testing import faulty


def doctor(capsys, *argv, status=0):
    assert main(["doctor", *map(str, argv), "--size", "1MiB", "--seconds", "1", "--json"]) == status
    told = json.loads(capsys.readouterr().out)
    return told, {check["check"]: check for check in told["checks"]}


def test_a_folder_that_works(tmp_path, capsys):
    told, checks = doctor(capsys, tmp_path / "new" / "run")
    assert told["ok"]
    assert all(checks[name]["ok"] for name in ("write", "read", "list", "condition", "delete"))
    assert told["speeds"][0]["settings"] == "the defaults"
    assert all(each["write"] > 0 and each["read"] > 0 for each in told["speeds"])
    assert told["settings"]
    assert list(tmp_path.iterdir()) == []


def test_without_a_url_it_looks_at_the_machine(capsys):
    told, checks = doctor(capsys)
    assert set(checks) == {"versions", "machine", "extras"}
    assert told["speeds"] == []


def test_people_read_settings_to_paste(tmp_path, capsys):
    assert main(["doctor", str(tmp_path), "--size", "1MiB", "--seconds", "1"]) == 0
    out = capsys.readouterr().out
    assert "ok     write" in out
    assert "Settings to paste:" in out


@pytest.mark.parametrize(
    ("on", "check"), [("put", "write"), ("get", "read"), ("read_into", "read"), ("list", "list"), ("delete", "delete")]
)
def test_what_fails_is_named_and_status_1(capsys, on, check):
    with faulty(on=on, error=PermissionError(13, "Permission denied"), times=None):
        told, checks = doctor(capsys, "faulty+memory://doctor", status=1)
    assert not told["ok"]
    assert checks[check]["ok"] is False
    assert "Permission denied" in checks[check]["text"]
    assert told["speeds"] == []


def test_a_storage_that_lies_about_conditions_is_found_out(capsys):
    class Lying(MemoryStorage):
        async def put(self, path, data, *, expect=None):
            return await super().put(path, data)

    register("lying", Lying)
    try:
        _, checks = doctor(capsys, "lying://doctor", status=1)
    finally:
        unregister("lying")
    assert "overwrite each other" in checks["condition"]["text"]


def test_what_is_for_reading_is_said_to_be(capsys):
    _, checks = doctor(capsys, "https://127.0.0.1:1/x", "-o", "deadline=0.1", status=1)
    assert checks["write"]["ok"] is None
    assert checks["read"]["ok"] is False


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_without_permission(tmp_path, capsys):
    tmp_path.chmod(0o500)
    _, checks = doctor(capsys, tmp_path / "run", status=1)
    assert "Permission denied" in checks["write"]["text"]


def test_a_url_with_a_typo_could_not_be_looked_at(capsys):
    assert main(["doctor", "s4://bucket"]) == 2
    assert "did you mean s3://" in capsys.readouterr().err
