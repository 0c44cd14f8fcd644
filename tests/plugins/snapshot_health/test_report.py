"""`snapshot report`: one page that needs nothing else, and in which no name can do harm."""

import json
import re

import pytest
import torch

from snapshot import Snapshot, StateDict
from snapshot.cli import main
from snapshot.cli.listing import ListedItem
from snapshot_health.report_verb import TimedSpan, _tree, timeline
from tests.helpers.noted import noted


def page(capsys, tmp_path, *argv, status=0):
    target = tmp_path / "report.html"
    assert main(["report", *map(str, argv), "-o", str(target)]) == status
    text = target.read_text()
    data = re.search(r'<script id="data" type="application/json">(.*?)</script>', text, re.DOTALL)
    return text, json.loads(data[1])


def leaves(node):
    return sum(map(leaves, node["c"])) if node["c"] else node["b"]


def test_cli_report_shows_all_bytes(root, tmp_path, capsys):
    text, data = page(capsys, tmp_path, root / "step-100")
    assert data["bytes"] == data["tree"]["b"] == leaves(data["tree"])
    assert data["bytes"] == sum(nbytes for _, nbytes, _ in data["dtypes"]) == sum(row[5] for row in data["rows"])
    assert data["file_bytes"] == sum(size for _, size in data["files"])
    assert noted(data["metadata"]) == {"step": 100, "metrics": {"loss": 0.01}}
    assert data["digests"][1] == 0
    assert data["digests"][0] > 100
    assert "verified" not in data
    assert re.findall(r"(?:src|href)=|https?://|@import|url\(", text) == []


def test_cli_report_escapes_a_hostile_name(tmp_path, capsys):
    name = "</script><script>alert(1)</script><!--"
    Snapshot.take(tmp_path / "s", {"s": StateDict({name: torch.ones(3)})}, metadata={name: name})
    text, data = page(capsys, tmp_path, tmp_path / "s")
    assert text.count("<script") == 2
    assert "alert(1)" in data["rows"][0][0]


def test_cli_report_verify_shows_the_result(root, tmp_path, capsys):
    _, data = page(capsys, tmp_path, root / "step-100", "--verify")
    assert data["verified"]["ok"]
    Snapshot.take(tmp_path / "s", {"s": StateDict(x=torch.ones(3000))})
    (file,) = (tmp_path / "s" / "data").glob("*.safetensors")
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    _, data = page(capsys, tmp_path, tmp_path / "s", "--verify", status=1)
    assert not data["verified"]["ok"]
    assert data["verified"]["faults"][0].startswith("0/s/x: ")


def test_cli_report_trace_draws_the_timeline_of_a_take(tmp_path, capsys, monkeypatch):
    trace = tmp_path / "trace.json"
    monkeypatch.setenv("SNAPSHOT_TRACE", str(trace))
    Snapshot.take(tmp_path / "s", {"s": StateDict(x=torch.ones(3000))})
    monkeypatch.delenv("SNAPSHOT_TRACE")
    _, data = page(capsys, tmp_path, tmp_path / "s", "--trace", trace)
    assert {"write", "digest", "commit"} <= {span[0] for span in data["spans"]}
    assert min(span[2] for span in data["spans"]) == 0
    whole = [json.loads(line.rstrip(",")) for line in trace.read_text().splitlines()[1:]]
    trace.write_text(json.dumps({"traceEvents": whole}))
    assert page(capsys, tmp_path, tmp_path / "s", "--trace", trace)[1]["spans"] == data["spans"]


def test_cli_report_trace_of_several_takes_draws_that_of_the_snapshot(tmp_path, capsys, monkeypatch):
    trace = tmp_path / "trace.json"
    monkeypatch.setenv("SNAPSHOT_TRACE", str(trace))
    for name in ("a", "b", "c"):
        Snapshot.take(tmp_path / name, {"s": StateDict(x=torch.ones(3000))})
    monkeypatch.delenv("SNAPSHOT_TRACE")
    drawn = {}
    for name in ("a", "b", "c"):
        _, data = page(capsys, tmp_path, tmp_path / name, "--trace", trace)
        assert (data["take"], data["takes_left_out"]) == (data["save_id"], 2)
        assert sorted(span[0] for span in data["spans"]) == ["commit", "digest", "stage", "write"]
        assert all(span[1].startswith("rank 0: ") for span in data["spans"])
        assert min(span[2] for span in data["spans"]) == 0
        assert any(data["save_id"] in span[4] for span in data["spans"] if span[0] == "write")
        assert any(span[4] == f"path {tmp_path / name}" for span in data["spans"] if span[0] == "commit")
        drawn[name] = data
    assert main(["cp", str(tmp_path / "a"), str(tmp_path / "copy")]) == 0  # which no take of the trace wrote
    capsys.readouterr()
    _, data = page(capsys, tmp_path, tmp_path / "copy", "--trace", trace)
    assert data["take"] == ""
    assert len(data["spans"]) == 12
    ids = {each["save_id"] for each in drawn.values()}
    assert {span[1].split(",")[0].removeprefix("take ") for span in data["spans"]} == ids


def test_report_spans_are_labelled_by_rank_and_take():
    def span(name, process, begin, **fields):
        return TimedSpan(name, process, f"{name} 1", begin, 5, fields)

    spans = [
        *(span("stage", p, 0) for p in ("7", "8")),
        span("write", "7", 10, file="data/0a-0-0.safetensors"),
        span("write", "8", 12, file="data/0a-1-0.safetensors"),
        span("commit", "7", 30),
        *(span("stage", p, 100) for p in ("7", "8")),
        span("write", "7", 110, file="data/0b-0-0.safetensors"),
        span("write", "8", 112, file="data/0b-1-0.safetensors"),
        span("commit", "7", 130),
    ]
    for take in ("0a", "0b"):
        told = timeline(spans, take)
        assert [(name, row) for name, row, *_ in told["spans"]] == [
            ("stage", "rank 0: stage 1"),
            ("stage", "rank 1: stage 1"),
            ("write", "rank 0: write 1"),
            ("write", "rank 1: write 1"),
            ("commit", "rank 0: commit 1"),
        ]
        assert [round(begin * 1000) for _, _, begin, *_ in told["spans"]] == [0, 0, 10, 12, 30]
    rows = {row for _, row, *_ in timeline(spans, "0c")["spans"]}
    assert {"take 0a, rank 1: write 1", "take 0b, rank 0: commit 1"} <= rows


@pytest.mark.parametrize(
    "content", ["", "[", "nothing", "[]", "{}", '[{"ph": "X"}]', '[{"ph": "X", "ts": "a"}]', "[1]"]
)
def test_cli_report_trace_that_is_not_a_timeline_is_an_error(root, tmp_path, capsys, content):
    (tmp_path / "t").write_text(content)
    target = tmp_path / "r.html"
    assert main(["report", str(root / "step-9"), "-o", str(target), "--trace", str(tmp_path / "t")]) == 2
    assert "timeline" in capsys.readouterr().err
    assert not target.exists()


def test_cli_report_o_accepts_storage_options_and_the_output_file(root, tmp_path, capsys):
    url = str(root / "step-9")
    assert main(["report", url, "-o", "nonsense=1", "-o", str(tmp_path / "r.html")]) == 2
    assert "nonsense" in capsys.readouterr().err
    assert main(["report", url, "--output", str(tmp_path / "a=b.html")]) == 0
    assert (tmp_path / "a=b.html").exists()
    assert main(["report", url]) == 2
    assert "-o report.html" in capsys.readouterr().err
    assert main(["report", url, "-o", str(tmp_path / "none" / "r.html")]) == 2
    assert sorted(each.name for each in tmp_path.iterdir()) == ["a=b.html"]


def test_cli_report_of_other_formats_and_empty_snapshots(root, tmp_path, capsys):
    _, data = page(capsys, tmp_path, root / "model.pt")
    assert data["format"] == "torch.save"
    assert data["digests"] == [0, data["digests"][1]]
    Snapshot.take(tmp_path / "s", {"s": StateDict()})
    assert page(capsys, tmp_path, tmp_path / "s")[1]["bytes"] == 0


def test_report_tree_draws_very_many_parts_together():
    found = [ListedItem(f"m/{i}", f"m/{i}", 0, "Tensor", "float32", (1,), 1 + i % 3, "", "") for i in range(10_000)]
    tree = _tree(found)
    assert leaves(tree) == sum(item.nbytes for item in found)
    assert len(tree["c"]) <= 301
    assert _tree([]) == {"n": "", "b": 0, "c": []}


def test_report_tree_with_a_name_that_is_a_prefix_of_others():
    found = [
        ListedItem(path, path, 0, "Tensor", "float32", (1,), 8, "", "") for path in ("m/a", "m/a.b", "m/a.b.c", "m")
    ]
    assert leaves(_tree(found)) == 32
