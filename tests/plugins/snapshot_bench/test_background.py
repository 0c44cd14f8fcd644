"""What saving in the background costs is measured against a real loop, and what was not measured is said."""

import json
import os
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist

from snapshot.io.url import URL
from snapshot_bench.rounds import ChildFailed, Workspace
from snapshot_bench.systems import installed
from snapshot_bench.workloads import CASES
from tests.helpers.warm_interpreter import Failed, Warm
from tests.plugins.snapshot_bench import background
from tests.plugins.snapshot_bench.__main__ import main
from tests.plugins.snapshot_bench.background import Panel, Row, Table, draw, said, saving, training
from tests.plugins.snapshot_bench.background_child import HELD, WAYS, RawCopy, Training, family
from tests.plugins.snapshot_bench.conftest import Begin

pytestmark = pytest.mark.bench

OURS = ["snapshot: blocking, thread", "snapshot: overlapped, thread", "snapshot: overlapped, process"]
SVG = "{http://www.w3.org/2000/svg}"


def test_background_benchmark_measures_traces_and_draws_each_system(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(background, "BUDGETED", ("single",))
    monkeypatch.delitem(WAYS, "raw copy")  # each process takes seconds to start
    where, trace, figure = (str(tmp_path / name) for name in ("where", "trace.json", "steps.svg"))
    Path(trace).write_text("an older one")
    tiny = ["--case", "train", "--scale", "0.001", "--rounds", "1", "--peers", "none"]
    status = main(["background", where, *tiny, "--trace", trace, "--figure", figure])
    shown = capsys.readouterr()
    assert status == 0, shown
    assert not Path(where).exists()

    head, alone, beside, budgets, _ = shown.out.split("\n\n")
    assert "scale 0.001" in head
    rows = {line[:32].strip(): line[32:].split() for line in alone.splitlines()[2:]}
    assert list(rows) == ["Snapshot.take", *OURS]
    for name in OURS:
        first, blocked, _, staged, written, *_, peak, synced, too = rows[name]
        assert 0 < float(blocked) <= float(staged) <= float(written) * 1000 + 0.5
        assert float(first) > 0
        assert float(peak) < 500
        assert (synced, too) == ("files,", "folders")

    rows = {line[:32].strip(): line[32:].split() for line in beside.splitlines()[2:]}
    assert list(rows) == OURS
    for name, (blocked, step, *_, first, costs, exact) in rows.items():
        assert float(blocked) > 0
        assert float(step) > 0
        assert float(costs) > -1
        assert (first == "-") == ("blocking" in name)
        assert exact == "yes"

    assert [line.split()[-6:-4] for line in budgets.splitlines()[2:]] == [["1.0", "MiB"]] * 3

    text = Path(trace).read_text().rstrip()
    assert text.endswith(",")
    spans: list[dict[str, Any]] = json.loads(text[:-1] + "]")
    assert {"stage", "write", "digest", "commit", "process_name"} <= {span["name"] for span in spans}
    named = {span["args"]["name"] for span in spans if span["name"] == "process_name"}
    assert {f"train: {name}" for name in OURS} <= named

    drawn = ET.fromstring(Path(figure).read_text())
    texts = [each.text for each in drawn.iter(f"{SVG}text")]
    assert [text for text in texts if text in OURS] == OURS
    assert len([each for each in drawn.iter(f"{SVG}rect") if each.get("class") == "call"]) == len(OURS) + 1  # a legend


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--case", "train,large"], "unknown case 'large'"),
        (["--scale", "1e9"], "free; pass a smaller --scale"),
        (["--figure", "no/such/folder.svg"], "no/such/folder.svg"),
    ],
)
def test_background_benchmark_exits_2_with_the_reason_if_it_cannot_measure(
    arguments: list[str], reason: str, refused: Callable[..., None]
) -> None:
    refused(main, ["background", *arguments], reason)


def test_background_benchmark_leaves_no_files_or_processes_if_interrupted(
    tmp_path: Path, begin: Begin, warm: Warm
) -> None:
    arguments = ["--case", "train", "--scale", "0.001", "--rounds", "100000", "--peers", "none"]
    pid, printed = running = begin("tests.plugins.snapshot_bench.__main__", "background", *arguments)
    while not (started := psutil.Process(pid).children()):
        assert psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
        time.sleep(0.01)
    assert "snapshot bench" in Path(printed).read_text()
    os.kill(pid, signal.SIGINT)
    with pytest.raises(Failed, match=r"^exit status 130:") as ended:
        warm.finish(running)
    assert "Traceback" not in str(ended.value)
    assert list(tmp_path.iterdir()) == []
    assert not any(child.is_running() for child in started)


@pytest.mark.filterwarnings("ignore")  # peers' own
@pytest.mark.parametrize("name", ["snapshot: blocking, thread", "DCP", "DCP, async staging", "torchsnapshot"])
def test_background_benchmark_systems_restore_what_they_saved(name: str, tmp_path: Path) -> None:
    if WAYS[name].peer and not installed(WAYS[name].peer):
        pytest.skip("not installed")
    payload = HELD["params"].make(0.002)
    system = WAYS[name].make(payload)
    ((row, start),) = system.rows(name).items()
    before = payload.digest()
    started = start(str(tmp_path / "saved"), None)
    if started.staged:
        started.staged()
    started.wait()
    Training(payload, 0.002).step()
    assert row == name
    assert payload.digest() != before
    system.load(str(tmp_path / "saved"))
    assert payload.digest() == before
    assert not dist.is_initialized()


@pytest.mark.parametrize("case", ["train", "params"])
def test_background_training_step_changes_the_payload_and_is_calibrated(case: str) -> None:
    payload = HELD[case].make(0.001)
    before = payload.digest()
    loop = Training(payload, 0.001)
    assert loop.calibrate() in {2**power for power in range(9)}
    assert payload.digest() != before
    waited = []
    loop.step(lambda: waited.append(payload.digest()))
    assert waited[0] != payload.digest()  # it was called before the optimizer changed anything


def test_background_cases_are_as_large_as_they_say() -> None:
    for case in HELD.values():
        assert case.make(0.001).nbytes() == pytest.approx(case.nbytes(0.001), rel=0.1)
    assert "params" not in CASES  # which other operations would measure
    assert len(HELD["params"].make(0.01).tensors) == 400


def repetition(blocked: float, staged: float, done: float, counts: bool = True) -> dict[str, Any]:
    return {"blocked": blocked, "staged": staged, "done": done, "peak": 64 << 20, "counts": counts}


def test_background_table_reports_the_first_save_apart_from_the_others() -> None:
    ready = {"bytes": 1 << 20, "tensors": 1, "synced": "files"}
    table = Table("train")
    table.row("copy", "raw copy", ready | {"kind": "copy"}).saved = [repetition(0.1, 0.1, 0.1)]
    table.row("take", "Snapshot.take", ready | {"kind": "bar"}).saved = [repetition(2.0, 2.0, 2.0)]
    ours = table.row("ours", OURS[0], ready | {"kind": "ours"})
    ours.saved = [repetition(9, 9, 9, counts=False), repetition(0.3, 0.4, 5), repetition(0.2, 0.5, 3)]
    line = next(line for line in saving(table, 2) if line.startswith("  ours"))
    assert line.split() == ["ours", "9000.0", "200.0", "2.00", "400.0", "3.000", "1.50", "2.00", "64", "files"]


def test_background_table_classifies_steps_by_their_time() -> None:
    table = Table("train")
    row = table.row("ours", OURS[1], {"bytes": 1, "tensors": 1, "synced": "files", "kind": "ours"})
    quiet = [(-0.3, -0.2), (-0.2, -0.1), (-0.1, 0.0)]
    first, beside, last, after = (0.05, 0.35), [(0.35, 0.55), (0.55, 0.75)], (0.75, 1.0), (1.0, 1.1)
    measured = {"returned": 0.05, "done": 0.9, "steps": [*quiet, first, *beside, last, after], "exact": True}
    row.trained = [measured | {"waited": True, "counts": True}]
    line = next(line for line in training(table) if line.startswith("  ours"))
    assert line.split() == ["ours", "50.0", "100.0", "200.0", "2.00", "2", "200.0", "0.600", "yes"]
    row.trained = [measured | {"waited": False, "exact": False, "counts": True}]
    line = next(line for line in training(table) if line.startswith("  ours"))
    assert line.split() == ["ours", "50.0", "100.0", "200.0", "2.00", "3", "-", "0.600", "NO"]


def test_background_benchmark_fails_if_snapshot_fails_but_not_if_a_peer_does() -> None:
    class Fails:
        def ask(self, **question: Any) -> dict[str, Any]:
            raise ChildFailed("no luck")

    table = Table("train")
    run = background.Run(Workspace(URL.parse("memory://x"), local=False), 1.0, 1, (), None)
    for name in (OURS[0], "DCP", "DCP"):
        seat = background._Seat(Fails(), Row(name, name))  # type: ignore[arg-type]
        assert not background._repeat(run, table, seat, 1, "save")
    assert list(said(table)) == ["  left out: DCP: no luck", f"  FAILED: {OURS[0]}: no luck"]


def test_background_systems_leaves_out_peers_not_requested_or_without_a_folder() -> None:
    assert [name for name in background.systems((), local=True)[0] if WAYS[name].peer] == []
    chosen, left_out = background.systems(("dcp",), local=False)
    assert [name for name in chosen if WAYS[name].peer] == []
    assert left_out == [f"{name}: needs a file system" for name in ("DCP", "DCP, process", "DCP, async staging")]


def test_background_raw_copy_copies_everything(tmp_path: Path) -> None:
    payload = HELD["single"].make(0.001)
    copy = RawCopy(payload)
    rows = copy.rows("raw copy")
    assert "raw copy, 1 thread" in rows
    for start in rows.values():
        copy.copies[0].zero_()
        start(str(tmp_path), None).wait()
        assert torch.equal(copy.copies[0], payload.tensors["state.tensor"])


def test_background_benchmark_finds_the_child_processes_of_a_process() -> None:
    program = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'print(1, flush=True); input()'])"
    with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout
        child.stdout.readline()
        grandchildren = family(child.pid)
        assert len(grandchildren) == 1
        assert {child.pid, *grandchildren} <= set(family(os.getpid()))
        child.communicate(b"\n")


def test_background_figure_is_valid_svg_for_any_content() -> None:
    for panels in ([], [Panel("<&>", 0.0, 0.0, [])], [Panel("one", 0.5, 1.0, [(-1.0, 0.0), (0.5, 0.9), (1.0, 1.1)])]):
        drawn = ET.fromstring(draw("1 < 2", panels))
        assert "prefers-color-scheme: dark" in "".join(drawn.itertext())
        assert "1 < 2" in [each.text for each in drawn.iter(f"{SVG}text")]
    kinds = {each.get("class"): each.get("d", "").count("M") for each in drawn.iter(f"{SVG}path")}
    assert kinds == {"step": 2, "under": 1}
