"""The benchmark must not lie, must not leave anything behind, and must say plainly when it cannot run."""

import importlib.metadata
import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from snapshot.cli import main
from snapshot.save.reuse import OLDEST
from snapshot_bench import names, raw_io, workloads
from snapshot_bench.bench_verb import CYCLE
from snapshot_bench.measuring import header
from snapshot_bench.results import compute_goodput, draw_page, draw_result, goodput_title
from snapshot_bench.startup import install_others, startup_text
from snapshot_bench.systems import SYSTEMS
from snapshot_bench.workloads import CASES
from tests.helpers.processes import command_line
from tests.helpers.warm_interpreter import Failed, Warm
from tests.plugins.snapshot_bench.conftest import ROOT, Begin

TINY = ["--case", "small", "--scale", "0.001", "--rounds", "1"]


@pytest.fixture
def bench(begin: Begin, warm: Warm) -> Callable[..., str]:
    """What the command prints."""
    return lambda *arguments: warm.finish(begin("snapshot.cli", "bench", *arguments))


@pytest.mark.bench
def test_cli_bench_json_holds_each_system_and_the_raw_baselines(tmp_path: Path, bench: Callable[..., str]) -> None:
    shown = bench(*TINY, "--only", "take,restore", "--peers", "torch.save", "--json")
    found = json.loads(shown)
    assert set(found) == {"host", "settings", "tables"}
    assert "device" not in found["host"], "only an accelerator is described"
    assert [table["operation"] for table in found["tables"]] == ["take", "restore"]
    for table in found["tables"]:
        assert table["failed"] == []
        assert table["bytes"] == CASES["small"].nbytes(0.001) == 10 * 4096
        assert {row["kind"] for row in table["rows"]} == {"raw", "ours", "peer"}
        assert min(row["ratio"] for row in table["rows"] if row["kind"] == "raw") == 1
        for row in table["rows"]:
            assert len(row["seconds"]) == 1
            assert row["min"] == row["median"] == row["seconds"][0] > 0
            assert row["cpu_seconds"] >= 0
    assert {row["name"] for row in found["tables"][1]["rows"]} >= {"snapshot", "snapshot, verify=False", "torch.save"}
    assert list(tmp_path.iterdir()) == []


@pytest.mark.bench
def test_cli_bench_table_names_the_path_and_the_case(tmp_path: Path, bench: Callable[..., str]) -> None:
    place = tmp_path / "made" / "for it"
    shown = bench(str(place), *TINY, "--only", "take", "--peers", "none")
    assert f"on {place}/snapshot-bench-" in shown
    assert "small: save, not durable (40.0 KiB in 10 tensors)" in shown
    assert "x raw" in shown
    assert "How to read this" in shown
    assert "torch.save" not in shown.split("small:")[1]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_cli_bench_of_a_storage_without_a_file_system_has_no_raw_baselines(
    tmp_path: Path, bench: Callable[..., str]
) -> None:
    shown = bench("memory://bench", *TINY, "--only", "take,cold", "--json")
    (table,) = json.loads(shown)["tables"]
    assert [row["name"] for row in table["rows"]] == ["snapshot"]
    assert table["rows"][0]["ratio"] is None
    assert "raw baselines" in table["left_out"][0]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.bench
@pytest.mark.parametrize(("state", "least", "most"), [("lora", 0.001, 0.02), ("half", 0.45, 0.55), ("full", 1.0, 1.1)])
def test_cli_bench_incremental_compares_takes_with_a_base_with_full_takes(
    tmp_path: Path, bench: Callable[..., str], state: str, least: float, most: float
) -> None:
    options = ["--incremental", state, "--scale", "0.02", "--only", "take", "--rounds", "2"]
    (table,) = json.loads(bench(*options, "--json"))["tables"]
    assert table["failed"] == []
    rows = {row["name"]: row["written_bytes"] for row in table["rows"] if row["kind"] == "ours"}
    assert list(rows) == ["snapshot", "snapshot, one base", "snapshot, two bases"]
    assert all(nbytes >= table["bytes"] for nbytes in rows.pop("snapshot"))
    assert set(table["against_full"]) == set(rows)
    for name, written in rows.items():
        assert all(least < nbytes / table["bytes"] < most for nbytes in written), name
        compared = table["against_full"][name]
        assert compared["written_mean"] == sum(written) / 2 / table["bytes"]
        assert compared["written_most"] == max(written) / table["bytes"]
        assert min(compared[each] for each in ("min", "median", "mean")) > 0
    assert "means are of 2 takes; with one base, a file is linked at most 16 times in a row" in table["notes"][0]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.bench
def test_cli_bench_incremental_has_one_full_take_per_cycle(tmp_path: Path, bench: Callable[..., str]) -> None:
    shown = bench(
        "--incremental", "lora", "--scale", "0.02", "--only", "take", "--report", "r.json", "--report", "r.html"
    )
    assert "17 rounds at scale 0.02" in shown
    assert "written mean" in shown
    (table,) = json.loads((tmp_path / "r.json").read_text())["tables"]
    written = {row["name"]: [each / table["bytes"] > 0.9 for each in row["written_bytes"]] for row in table["rows"]}
    assert "<th>written mean</th>" in (tmp_path / "r.html").read_text()
    assert sum(written["snapshot, one base"]) == 1
    assert sum(written["snapshot, two bases"]) == 0


@pytest.mark.bench
def test_cli_bench_startup_measures_new_processes(tmp_path: Path, bench: Callable[..., str]) -> None:
    found = json.loads(bench(str(tmp_path), "--startup", "--rounds", "1", "--json"))
    assert set(found) == {"first_use", "first_take", "first_take_beside_others", "others"}
    assert all(value > 0 for value in found.values())
    assert not any(tmp_path.iterdir())
    found |= {"first_use": 0.0751, "first_take": 0.01, "first_take_beside_others": 0.0125}
    assert "Snapshot takes 75 ms" in startup_text(found)
    assert "10.0 ms, and +2.5 ms with 600 more distributions" in startup_text(found)


def test_bench_startup_others_are_distributions(tmp_path: Path) -> None:
    install_others(tmp_path, 3)
    found = list(importlib.metadata.distributions(path=[str(tmp_path)]))
    assert sorted(each.name for each in found) == ["other-0", "other-1", "other-2"]
    assert {point.group for each in found for point in each.entry_points} == {"console_scripts"}


@pytest.mark.bench
@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_cli_bench_leaves_no_files_or_processes_if_interrupted(
    tmp_path: Path, begin: Begin, warm: Warm, number: int, status: int
) -> None:
    arguments = ["--case", "small", "--scale", "0.001", "--rounds", "100000", "--only", "take", "--peers", "none"]
    pid, printed = running = begin("snapshot.cli", "bench", *arguments)
    while "snapshot bench" not in Path(printed).read_text():  # from here on the place exists
        assert psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
        time.sleep(0.01)
    os.kill(pid, number)
    with pytest.raises(Failed, match=f"^exit status {status}:") as ended:
        warm.finish(running)
    assert "Traceback" not in str(ended.value)
    assert list(tmp_path.iterdir()) == []
    assert [child for child in psutil.process_iter() if str(tmp_path) in command_line(child)] == []


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--case", "medium"], "unknown case 'medium'"),
        (["--peers", "pickle"], "unknown peer 'pickle'"),
        (["--device", "toaster"], "argument --device: must be one of cpu"),
        (["--device", "cpu:0"], ", got 'cpu:0'"),
        (["--incremental", "some"], "unknown state 'some'"),
        (["--incremental", "lora", "--case", "large"], "not allowed with argument"),
        (["--incremental", "lora", "--only", "restore"], "nothing to measure"),
        (["--scale", "0"], "must be above 0, got 0"),
        (["--rounds", "-1"], "must be an integer above 0, got '-1'"),
        (["--scale", "1e9"], "free; pass a smaller --scale"),
        (["--case", "keys", "--only", "async"], "nothing to measure"),
        (["nowhere://at/all"], "no storage plugin for the scheme 'nowhere'"),
    ],
)
def test_cli_bench_exits_2_with_the_reason_if_it_cannot_run(
    arguments: list[str], reason: str, refused: Callable[..., None]
) -> None:
    refused(main, ["bench", *arguments], reason)


def test_cli_bench_of_a_path_that_is_not_a_folder_prints_one_error_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "file"
    file.write_text("mine")
    assert main(["bench", str(file)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("snapshot: error: ")
    assert str(file) in error
    assert error.count("\n") == 1
    assert file.read_text() == "mine"


def test_cli_without_a_verb_exits_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert main(["--help"]) == 0
    assert "bench" in capsys.readouterr().out


@given(st.lists(st.integers(0, 50), max_size=20), st.integers(1, 5))
def test_raw_io_cut_into_lanes_loses_no_byte(sizes: list[int], lanes: int) -> None:
    total = sum(sizes)
    whole = np.arange(total, dtype=np.uint8)
    buffers = np.split(whole, np.cumsum(sizes)[:-1]) if sizes else []
    runs = raw_io.cut(buffers, lanes)
    assert len(runs) <= lanes
    at = 0
    for offset, run in runs:
        assert offset == at
        at += sum(piece.nbytes for piece in run)
    assert at == total
    joined = [piece for _, run in runs for piece in run]
    assert not joined or np.array_equal(np.concatenate(joined), whole)


@pytest.mark.parametrize("lanes", [1, 2])
def test_raw_io_streams_move_every_byte(tmp_path: Path, lanes: int) -> None:
    tensors = [torch.rand(300) for _ in range(1500)] + [torch.tensor(1.5), torch.rand(3_000_000)]
    wanted = [tensor.clone() for tensor in tensors]
    raw_io.write_streams(tensors, tmp_path, durable=True, lanes=lanes)
    whole = tmp_path / "whole"
    whole.write_bytes(b"".join((tmp_path / f"{lane}.raw").read_bytes() for lane in range(lanes)))
    for tensor in tensors:
        tensor.zero_()
    raw_io.read_streams(tensors, whole, lanes)
    assert all(map(torch.equal, tensors, wanted))


@pytest.mark.parametrize("lanes", [1, 2])
def test_raw_io_copies_copy_everything(lanes: int) -> None:
    tensors = [torch.rand(3), torch.tensor(2.5), torch.rand(1001)]
    by_threads, by_torch = ([torch.zeros_like(tensor) for tensor in tensors] for _ in range(2))
    raw_io.copy_streams(tensors, by_threads, lanes)
    raw_io.copy_foreach(tensors, by_torch)
    assert all(map(torch.equal, tensors, by_threads))
    assert all(map(torch.equal, tensors, by_torch))


def test_raw_io_write_direct_truncates_the_file_to_its_length(tmp_path: Path) -> None:
    tensors = [torch.rand(5), torch.rand(3_000_000), torch.rand(7)]
    try:
        raw_io.write_direct(tensors, tmp_path, durable=False)
    except OSError as error:
        pytest.skip(f"no O_DIRECT here: {error}")
    assert (tmp_path / "0.raw").read_bytes() == b"".join(tensor.numpy().tobytes() for tensor in tensors)
    raw_io.read_direct(tmp_path / "0.raw", lanes=2)


def test_raw_io_drop_evicts_a_file_from_the_page_cache(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(bytes(1 << 20))
    assert raw_io._resident([file]) == 1
    try:
        raw_io.drop(tmp_path)
    except raw_io.StaysCached as error:
        pytest.skip(str(error))
    assert raw_io._resident([file]) < 0.01


def test_bench_cases_are_as_large_as_they_say() -> None:
    for name in ("large", "small", "train"):
        made = CASES[name].make(0.001)
        assert made.nbytes() == pytest.approx(CASES[name].nbytes(0.001), rel=0.1)


def test_bench_payload_digest_changes_after_wipe() -> None:
    made = CASES["keys"].make(0.01)
    before = made.digest()
    made.wipe()
    assert made.digest() != before
    assert CASES["keys"].make(0.01).digest() == before


def test_bench_report_of_an_accelerator_names_the_device_and_link_speed() -> None:
    result = json.loads((ROOT / "docs/_static/benchmark.json").read_text())
    speeds = {"pinned": True, "to_host_gb_per_second": 55.25, "to_device_gb_per_second": 7.0}
    device = {"device": "cuda:1", "name": "NVIDIA <X>", **speeds}
    on_cpu = result["host"] | {"where": "/scratch", "kernel": "6.1"}
    on_device = result | {"host": on_cpu | {"device": device}}
    goodput = compute_goodput(on_device, 10_800)
    text = "cuda:1 (NVIDIA <X>), pinned copies: 55.2 GB/s to the host, 7 GB/s to the device"
    assert header(on_device["host"], 1, 5).endswith(f"\n{text}")
    escaped = text.replace("<X>", "&lt;X&gt;")
    page = draw_page(on_device, goodput)
    assert f"<p>{escaped}.</p>" in page
    assert "<h2>Training time lost on cuda:1 (NVIDIA &lt;X&gt;), with a failure every 3.0 h</h2>" in page
    assert f">{escaped}</text>" in draw_result(on_device)
    assert goodput_title(goodput, result) == "training time lost, with a failure every 3.0 h"
    assert header(on_cpu, 1, 5) == header(on_device["host"], 1, 5).removesuffix(f"\n{text}")


def test_bench_names_in_the_help_are_those_that_are_measured():
    assert list(names.CASES) == list(workloads.CASES)
    assert list(names.INCREMENTAL) == list(workloads.INCREMENTAL)
    assert list(names.PEERS) == [name for name, kind in SYSTEMS.items() if kind.kind == "peer"]
    assert CYCLE == OLDEST + 1
