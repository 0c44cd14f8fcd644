"""The benchmarks of ranks, planning and stores measure what they say, and leave nothing behind."""

import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from snapshot_bench.workloads import CASES
from tests.helpers.processes import command_line
from tests.helpers.trees import PYTHONPATH
from tests.plugins.snapshot_bench import planning_scale
from tests.plugins.snapshot_bench.__main__ import main

pytestmark = pytest.mark.bench


def cells(line: str) -> list[str]:
    """Return the cells of a row: there are at least two spaces between the name and the rest."""
    return re.split(r"\s{2,}", line.strip())


def test_store_benchmark_measures_the_storage_beside_the_client_alone(
    tmp_path: Path, measured: Callable[..., str]
) -> None:
    shown = measured("store", "--scale", "0.02", "--rounds", "1")
    rows = [cells(line)[0] for line in shown.splitlines() if line.startswith("  ")]
    assert rows.count("the client alone") == 1
    assert rows.count("the client alone, ranges") == rows.count("restore") == 2
    assert "the client alone, whole objects" in rows
    assert {"take", "async_take", "restore, s3fs", "restore, obstore"} <= set(rows)
    assert list(tmp_path.iterdir()) == []


def test_ranks_benchmark_writes_a_replica_together_and_reads_it_once(
    tmp_path: Path, measured: Callable[..., str]
) -> None:
    shown = measured("ranks", "--world", "2", "--scale", "0.01", "--rounds", "1")
    rows = {name: " ".join(rest).split() for line in shown.splitlines() for name, *rest in [cells(line)]}
    model = CASES["train"].nbytes(0.01) / 2**20
    for name, copies in (
        ("take, one rank alone", 1),
        ("take, 2 ranks", 1),
        ("restore, one rank alone", 1),
        ("restore, 2 ranks, read_once=True", 1),
        ("restore, 2 ranks, read_once=False", 2),
    ):
        seconds, ratio, size, unit, moved, *balance = rows[name]
        assert float(seconds) > 0
        assert float(ratio) == 1 or "alone" not in name
        assert unit == "MiB"
        assert float(size) == pytest.approx(copies * model, rel=0.05)
        assert float(moved) == pytest.approx(copies, rel=0.02)
        assert [float(each) for each in balance] == (
            [] if "restore" in name else [pytest.approx(1, abs=0.05 if "2" in name else 0)]
        )
    assert list(tmp_path.iterdir()) == []


def test_ranks_benchmark_ends_if_a_rank_ends(tmp_path: Path) -> None:
    arguments = ["ranks", "--world", "2", "--scale", "0.001", "--rounds", "100000"]
    command = [sys.executable, "-m", "tests.plugins.snapshot_bench", *arguments]
    environment = os.environ | {"PYTHONPATH": PYTHONPATH}
    with subprocess.Popen(
        command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as running:
        try:
            assert running.stdout
            assert "snapshot bench" in running.stdout.readline()
            ranks: list[psutil.Process] = []
            while len(ranks) < 2:  # of the processes that it starts, one watches over shared resources
                assert running.poll() is None
                children = psutil.Process(running.pid).children()
                ranks = [child for child in children if "spawn_main" in command_line(child)]
            ranks[1].kill()
            _, errors = running.communicate(timeout=300)
        finally:
            running.kill()
    assert running.returncode == 2, errors
    assert "ended with exit status -9" in errors
    assert not any(rank.is_running() for rank in ranks)
    assert list(tmp_path.iterdir()) == []


def test_planning_benchmark_prints_a_table(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(planning_scale, "ENTRIES", 50)
    assert main(["planning", "--worlds", "2,4"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert all(line.startswith("|") and line.endswith("|") for line in lines)
    assert len({line.count("|") for line in lines}) == 1
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]
    assert {row[1] for row in rows} == {"2", "4"}
    assert len(rows) == 2 * len({row[0] for row in rows})


def test_scale_benchmark_prints_a_table_of_each_kind(tmp_path: Path, measured: Callable[..., str]) -> None:
    shown = measured("scale", str(tmp_path), "--tensors", "20,40", "--worlds", "2")
    lines = [line for line in shown.splitlines() if line.startswith("|")]
    first = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert {"`take`", "`restore`", "`read_object`", "`diff`"} <= {row[0] for row in first}
    counts = {row[1]: int(row[2]) for row in first if row[0] == "2"}
    assert counts["restore, FSDP"] < counts["take, FSDP"]
    assert [row[2:5] for row in first if row[:2] == ["4,096", "FSDP"]] == [["1", "2", "1"]]
    assert any(row[0].startswith("save: PUTs") for row in first)
    assert list(tmp_path.iterdir()) == []


def test_publish_benchmark_measures_deltas_by_stage_and_in_total(tmp_path: Path, measured: Callable[..., str]) -> None:
    shown = measured("publish", str(tmp_path), "--scale", "0.004", "--rounds", "1")
    for stage in ("XOR", "adler32", "encode: all stages", "apply: all stages", "pull: apply", "copy of the files"):
        assert stage in shown
    assert shown.count(" GB/s ") == 2 * 7 + 4 + 3
    assert list(tmp_path.iterdir()) == []


def test_dcp_benchmark_measures_each_storage(tmp_path: Path, measured: Callable[..., str]) -> None:
    shown = measured("dcp", "--scale", "0.001", "--rounds", "1")
    assert [shown.count(name) for name in ("\n    nothing ", "\n    torch ", "\n    snapshot ")] == [4, 10, 6]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("name", "rows"),
    [
        ("foreign", {"raw read and write", "snapshot", "snapshot, with moments"}),
        ("formats", {"dcp.load", "snapshot, of dcp", "torch.load(mmap)", "snapshot, of torch", "convert to dcp"}),
        (
            "restart",
            {"durable take, auto", "restore after it, auto", "restore after it, always", "raw write, O_DIRECT"},
        ),
        ("load", {"raw read into new memory", "snapshot.load(snapshot)", "safetensors load_file, copied"}),
        ("compression", {"compress", "decompress", "take, zstd", "restore, zstd", "auto"}),
        ("sign", {"raw write", "take(sign=)", "restore with a key", "sign later", "async_take(sign=) and wait"}),
        ("exports", {"alone", "async take", "upload", "export"}),
        ("tiers", {"blocked, with tiers", "while a step is uploaded", "from memory", "from another host"}),
    ],
)
def test_benchmark_prints_its_rows_and_leaves_no_files(
    name: str, rows: set[str], tmp_path: Path, measured: Callable[..., str]
) -> None:
    shown = measured(name, "--scale", "0.001", "--rounds", "1")
    assert rows <= {cells(line)[0] for line in shown.splitlines()}
    assert list(tmp_path.iterdir()) == []


@pytest.mark.libraries
def test_trainer_benchmark_measures_each_way_of_saving(tmp_path: Path, measured: Callable[..., str]) -> None:
    if importlib.util.find_spec("transformers") is None:
        pytest.skip("transformers is not installed")
    shown = measured("trainer", str(tmp_path), "--scale", "0.0001", "--rounds", "1")
    rows = {cells(line)[0]: cells(line)[1:] for line in shown.splitlines()}
    assert rows.keys() >= {"plain", "take", "background"}
    assert all(float(rows[way][0]) > 0 for way in ("plain", "take", "background"))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["ranks", "--world", "1"], "1 is not above 1"),
        (["ranks", "--scale", "1e9"], "free; pass a smaller --scale"),
        (["ranks", "--world", "100000", "--scale", "0.1"], "of memory; give a smaller --scale"),
        (["ranks", "memory://bench"], "ranks need a storage that all of them see"),
        (["planning", "--worlds", "2,few"], "invalid _worlds value"),
    ],
)
def test_benchmarks_exit_2_with_the_reason_if_they_cannot_run(
    arguments: list[str], reason: str, refused: Callable[..., None]
) -> None:
    refused(main, arguments, reason)
