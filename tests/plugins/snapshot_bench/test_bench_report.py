"""`snapshot bench --report` and `--goodput`: figures and pages of a stored result, and the model of lost time."""

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from snapshot.cli import main
from snapshot_bench.results import DAY, Goodput, compute_goodput, draw_case, draw_page, draw_result, find_bars

RESULT = json.loads((Path(__file__).parents[3] / "docs/_static/benchmark.json").read_text())
SVG = "{http://www.w3.org/2000/svg}"


def test_bench_report_figure_has_a_bar_for_each_system_and_the_fastest_raw_row():
    figure = ElementTree.fromstring(draw_case(RESULT, "train"))
    (table,) = [table for table in RESULT["tables"] if table["operation"] == "take"]
    bars = find_bars(table)
    assert bars[0][0] == "raw I/O, nothing else"
    assert {bar[0] for bar in bars[1:]} == {row["system"].replace("dcp", "DCP") for row in table["rows"]} - {"raw"}
    assert [bar[2] for bar in bars[1:]] == sorted(bar[2] for bar in bars[1:])
    texts = [text.text for text in figure.iter(f"{SVG}text")]
    assert all(bar[0] in texts for bar in bars)
    widths = [float(bar.get("width")) for bar in figure.iter(f"{SVG}rect")]
    assert all(width > 0 for width in widths)


def test_bench_report_escapes_hostile_names():
    hostile = json.loads(json.dumps(RESULT).replace("torchsnapshot", "</script><b>&"))
    ElementTree.fromstring(draw_result(hostile))
    page = draw_page(hostile, compute_goodput(hostile, 3600))
    assert "<b>" not in page
    assert "&lt;/script&gt;&lt;b&gt;&amp;" in page


def test_bench_report_page_has_every_table_and_loads_nothing():
    page = draw_page(RESULT, compute_goodput(RESULT, 3600))
    assert page.count("<h3>") == len(RESULT["tables"])
    assert "Training time lost, with a failure every" in page
    assert "http" not in page.replace("http://www.w3.org/2000/svg", "")


@pytest.mark.parametrize(("blocked", "lag", "restore", "mtbf"), [(2.0, 0.0, 1.0, 3600), (0.1, 5.0, 2.0, 600)])
def test_goodput_best_interval_loses_least_time(blocked, lag, restore, mtbf):
    best = Goodput("case", "system", "blocking", blocked, lag, restore, mtbf)

    def lost(interval):
        return DAY * (blocked / interval + (interval / 2 + lag + restore) / mtbf)

    assert best.lost == pytest.approx(lost(best.interval))
    assert all(best.lost <= lost(best.interval * factor) for factor in (0.5, 0.9, 1.1, 2) if factor > 1 or not lag)


def test_goodput_interval_is_not_shorter_than_a_save():
    slow = Goodput("case", "system", "asynchronous", 0.001, 50.0, 1.0, 3600)
    assert slow.interval == pytest.approx(50.001)
    assert Goodput("case", "system", "blocking", 1e6, 0.0, 1.0, 10).lost == DAY, "a day has no more to lose"


def test_goodput_leaves_out_systems_without_a_save_or_restore():
    found = compute_goodput(RESULT, 3600)
    assert {(each.system, each.way) for each in found} >= {("snapshot", "blocking"), ("snapshot", "asynchronous")}
    assert not any(each.system == "raw" for each in found)
    saves = {**RESULT, "tables": [table for table in RESULT["tables"] if table["operation"] == "take"]}
    assert compute_goodput(saves, 3600) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--report", "x.pdf"], "a report must end in .html, .svg, .json, got 'x.pdf'"),
        (["--report", "/nowhere/x.html"], "/nowhere: no such folder"),
        (["--goodput", "3h"], "must be mtbf=TIME, such as mtbf=3h, got '3h'"),
        (["--goodput", "mtbf=soon"], "got 'mtbf=soon'"),
    ],
)
def test_cli_bench_checks_arguments_before_measuring(arguments, message, capsys):
    assert main(["bench", *arguments]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.bench
def test_cli_bench_report_writes_html_svg_and_json(tmp_path, capsys):
    reports = [tmp_path / f"bench.{ending}" for ending in ("html", "svg", "json")]
    options = [each for report in reports for each in ("--report", str(report))]
    only = ["--case", "keys", "--only", "take,restore", "--peers", "none", "--rounds", "1", "--scale", "0.1"]
    assert main(["bench", str(tmp_path), *only, *options, "--goodput", "mtbf=3h"]) == 0
    assert "training time lost, with a failure every 3.0 h" in capsys.readouterr().out
    assert "lost per day" in reports[0].read_text()
    ElementTree.fromstring(reports[1].read_text())
    assert json.loads(reports[2].read_text())["goodput"]["mtbf"] == 10_800


def test_bench_report_bar_shows_the_defaults_and_not_a_faster_variant():
    (table,) = [table for table in RESULT["tables"] if table["operation"] == "restore"]
    variants = {row["name"]: row["min"] for row in table["rows"] if row["system"] == "snapshot"}
    assert variants["snapshot, verify=False"] < variants["snapshot"]
    assert {bar[0]: bar[2] for bar in find_bars(table)}["snapshot"] == variants["snapshot"]


def test_cli_bench_goodput_without_a_save_or_restore_is_refused_before_measuring(capsys, tmp_path):
    assert main(["bench", str(tmp_path), "--only", "durable", "--goodput", "mtbf=3h"]) == 2
    assert "--goodput needs a save and a restore" in capsys.readouterr().err


def test_cli_bench_report_that_cannot_be_written_is_refused(capsys, tmp_path):
    (tmp_path / "x.html").mkdir()
    assert main(["bench", "--report", str(tmp_path / "x.html")]) == 2
    assert "x.html: cannot be written" in capsys.readouterr().err


def test_bench_report_does_not_replace_a_failed_default_with_a_variant():
    (table,) = [table for table in RESULT["tables"] if table["operation"] == "restore"]
    rows = [row for row in table["rows"] if row["name"] != "snapshot"]
    assert "snapshot" not in [bar[0] for bar in find_bars({**table, "rows": rows})]
