"""The command with near folders: `upload` by hand, `ls --near`, `ui --near` and `doctor --near`."""

import json
import re
import shutil

import pytest

from snapshot import Snapshot, SnapshotManager
from snapshot.cli import main
from snapshot_health.page_server import RunView
from snapshot_tiers.control import MEANINGS, UploadState
from tests.plugins.snapshot_tiers.jobs import ELEMENTS, holds, manager_of, runs_in, state, stop_uploaders

pytestmark = pytest.mark.slow


def run(capsys, *words):
    status = main([str(word) for word in words])
    return status, capsys.readouterr().out


def steps_of(capsys, far, near):
    status, text = run(capsys, "ls", far, "--near", near, "--json")
    assert status == 0
    return {each["step"]: (each["near"], each["far"]) for each in json.loads(text)["steps"]}


def test_cli_upload_and_ls_near_print_where_steps_are(tmp_path, hosts, capsys):
    far, near = tmp_path / "far", hosts("a")
    with manager_of(far, near, upload=None, grace=0, keep_near=None) as manager:
        for step in (10, 20, 30):
            manager.take(step, state(step))
        stop_uploaders(near)
    stop_uploaders(near)
    shutil.rmtree(far / "step-30", ignore_errors=True)  # the end of the job may have sent it
    assert steps_of(capsys, far, near) == dict.fromkeys((10, 20, 30), ("whole", "absent"))
    status, text = run(capsys, "upload", near)
    assert status == 0
    assert re.sub(r"[\d.]+ s$", "# s", text, flags=re.M) == f"step-30: whole\n{runs_in(near)[0]} -> {far}: # s\n"
    assert steps_of(capsys, far, near)[30] == ("whole", "whole")
    assert run(capsys, "upload", near, far, "--all")[0] == 0
    assert set(steps_of(capsys, far, near).values()) == {("whole", "whole")}
    live = state(-1)
    Snapshot(str(far / "step-10")).restore(live)
    assert holds(live, 10)
    status, text = run(capsys, "ls", far, "--near", near)
    assert [line.split() for line in text.splitlines()[2:]] == [
        [str(step), *text.splitlines()[2].split()[1:3], "whole", "whole"] for step in (10, 20, 30)
    ]


def test_cli_ls_near_explains_upload_states(tmp_path, hosts, capsys):
    far, near = tmp_path / "far", hosts("a")
    with manager_of(far, near, upload="latest", grace=30, keep_near=None) as manager:
        for step in (10, 20, 30):
            manager.take(step, state(step))
        manager.async_take(40, state(40)).wait("far", timeout=300)
        status, text = run(capsys, "ls", far, "--near", near)
    assert status == 0
    shown = {line.split()[-1] for line in text.splitlines()[2:6]}
    assert ("dropped: a newer step is uploaded instead of this one" in text) == ("dropped" in shown)
    assert "whole: " not in text


def test_upload_state_meanings_cover_every_state():
    plain = {UploadState.KEPT, UploadState.UPLOADING, UploadState.WHOLE}
    assert set(MEANINGS) == set(UploadState) - plain


def test_cli_ui_near_shows_where_steps_are(tmp_path, hosts):
    far, near = tmp_path / "far", hosts("a")
    with manager_of(far, near, upload=None, grace=0, keep_near=None) as manager:
        for step in (10, 20, 30):
            manager.take(step, state(step), metrics={"loss": 1 / step})
        manager.pin(20)
        stop_uploaders(near)
    stop_uploaders(near)
    for step in (20, 30):
        shutil.rmtree(far / f"step-{step}", ignore_errors=True)  # the end of the job may have sent it
    assert main(["upload", str(near)]) == 0  # the newest one
    view = RunView(str(far), str(near))
    steps = {step["step"]: step for step in view.steps(9)["steps"]}
    assert {step: (each["near"], each["far"]) for step, each in steps.items() if step > 10} == {
        20: ("whole", "absent"),
        30: ("whole", "whole"),
    }
    assert steps[20]["metrics"] == {"loss": 0.05}
    assert [step for step, each in steps.items() if each["pinned"]] == [20]
    assert "problem" not in steps[20]
    assert view.check(30)["fault"] == ""
    changed = [change["path"] for change in view.diff(20, 30, values=True)["changes"]]
    assert changed == ["own/tensor", "same/tensor", "own/value"]
    assert view.health(20, "own/*", bool)["norm"] == 200.0 * ELEMENTS**0.5
    for folder in runs_in(near):
        shutil.rmtree(folder / "step-30" / "data")
    assert view.steps(1)["steps"][0]["near"] == "0 of 1 files"
    assert view.health(30, "own/*", bool)["norm"] == 300.0 * ELEMENTS**0.5  # from the far root


def test_cli_ui_near_reads_a_step_that_another_manager_has_overwritten_from_the_far_root(tmp_path, hosts):
    far, near = tmp_path / "far", hosts("a")
    with manager_of(far, near, upload=1, keep_near=None) as manager:
        manager.async_take(10, state(10)).wait("far", timeout=300)
    view = RunView(str(far), str(near))
    assert [each["step"] for each in view.steps(9)["steps"]] == [10]
    assert view.health(10, "own/*", bool)["norm"] == 100.0 * ELEMENTS**0.5
    with SnapshotManager(far, signals=()) as other:
        other.take(10, state(20), overwrite=True)
    assert view.health(10, "own/*", bool)["norm"] == 200.0 * ELEMENTS**0.5
    shutil.rmtree(far / "step-10")
    assert view.health(10, "own/*", bool)["norm"] == 100.0 * ELEMENTS**0.5  # only the near copy is left


def test_cli_upload_and_ls_near_of_a_missing_run_are_errors(tmp_path, capsys):
    (tmp_path / "near").mkdir()
    assert run(capsys, "upload", tmp_path / "near")[0] == 2
    assert run(capsys, "upload", tmp_path / "missing")[0] == 2
    assert run(capsys, "ls", tmp_path / "far", "--near", tmp_path / "near")[0] == 2


def test_cli_upload_that_cannot_finish_says_so(tmp_path, hosts, capsys):
    far, near = tmp_path / "far", hosts("a")
    with manager_of(far, near, upload=None, grace=0) as manager:
        manager.take(10, state(10))
        stop_uploaders(near)
    stop_uploaders(near)
    shutil.rmtree(far, ignore_errors=True)
    (tmp_path / "file").write_text("")
    assert run(capsys, "upload", near, tmp_path / "file/far")[0] == 2


def test_cli_doctor_near_measures_both_roots(tmp_path, capsys):
    status, text = run(
        capsys, "doctor", tmp_path / "far", "--near", tmp_path / "near", "--size", "1MiB", "--seconds", "1"
    )
    assert status == 0
    assert f"near: {tmp_path / 'near'}" in text
    assert "one GiB is near after" in text
