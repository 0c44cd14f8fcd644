"""`snapshot cost`: bytes and objects as they are stored, the requests of saving, and money from a file of prices."""

import json
from collections import Counter
from pathlib import Path

import pytest
import torch

from snapshot import SnapshotManager, StateDict
from snapshot.cli import main
from tests.helpers.storage_calls import PATIENT
from tests.save.frozen_training import Run

NAN = float("nan")
PRICES = {"currency": "EUR", "gib_month": 0.02, "put": 0.005, "get": 0.0004}


@pytest.fixture
def run(tmp_path):
    """A run of three steps that share most of their files."""
    training = Run()
    with SnapshotManager(tmp_path / "run", incremental=True, signals=()) as manager:
        for step in (10, 20, 30):
            training.step()
            manager.take(step, training.state)
    return tmp_path / "run"


def cost(capsys, *argv):
    assert main(["cost", *map(str, argv), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_cost_counts_each_physical_file_once(run, capsys):
    found = cost(capsys, run)
    files = [path.stat() for path in run.rglob("*") if path.is_file()]
    assert found["steps"] == 3
    assert found["objects"] == len(files)
    assert found["bytes"] == sum({each.st_ino: each.st_size for each in files}.values())
    assert found["bytes"] < sum(each.st_size for each in files)
    assert "cost_a_month" not in found


def test_cost_multiplies_requests_by_the_pace_of_the_steps(run, capsys):
    hourly = cost(capsys, run, "--every", "1h")
    assert hourly["takes_a_month"] == 730
    assert hourly["requests_a_month"] == {"put": 730 * 4, "list": 730, "get": 730 * 2}
    for number, step in enumerate((10, 20, 30)):
        path = run / f"step-{step}" / ".snapshot_metadata"
        set_created(path, f"2026-01-01T00:{number * 20:02}:00+00:00")
    assert cost(capsys, run)["every_seconds"] == 1200
    assert cost(capsys, run)["requests_a_month"]["list"] == 730 * 3


def set_created(path, text):
    """Rewrite a manifest with another time."""
    from snapshot.manifest.document import decode_document, encode

    document = decode_document(path.read_bytes(), path)
    document.created = text
    path.write_bytes(encode(document))


def test_cost_of_one_step_has_no_pace(tmp_path, capsys):
    with SnapshotManager(tmp_path / "run", signals=()) as manager:
        manager.take(1, {"s": StateDict(x=torch.zeros(10))})
    found = cost(capsys, tmp_path / "run")
    assert (found["every_seconds"], found["requests_a_month"]) == (None, {"put": 0, "list": 0, "get": 0})
    assert main(["cost", str(tmp_path / "run")]) == 0
    assert "--every" in capsys.readouterr().out


@pytest.mark.parametrize("kind", ["yaml", "json"])
def test_cost_with_prices_shows_money(run, tmp_path, capsys, kind):
    file = tmp_path / f"prices.{kind}"
    lines = "\n".join(f"{key}: {value}" for key, value in PRICES.items())
    file.write_text(json.dumps(PRICES) if kind == "json" else lines)
    found = cost(capsys, run, "--every", "1h", "--prices", file)
    money = found["cost_a_month"]
    assert found["currency"] == "EUR"
    assert money["storage"] == pytest.approx(found["bytes"] / 2**30 * 0.02)
    assert money["put"] == pytest.approx(2.92 * 0.005)
    assert money["list"] == pytest.approx(0.73 * 0.005)
    assert money["get"] == pytest.approx(1.46 * 0.0004)
    assert money["total"] == pytest.approx(sum(money.values()) - money["total"])
    assert main(["cost", str(run), "--every", "1h", "--prices", str(file)]) == 0
    out = capsys.readouterr().out
    assert "EUR" in out
    assert "0.0146" in out
    assert main(["cost", str(run)]) == 0
    assert not {"EUR", "USD", "$", "total"} & set(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"put": -1}, "put must be"), ({"get": None}, "get must be"), ({"gib_month": "cheap"}, "'cheap'"),
        ({"put": NAN}, "nan"), ({"put": True}, "True"), ({"currency": ""}, "currency must be"),
        ({"delete": 1}, "'delete'"), ({"currency": 3}, "got 3"),
    ],
)  # fmt: skip
def test_cost_names_what_is_wrong_in_the_prices(run, tmp_path, capsys, change, named):
    file = tmp_path / "prices.yaml"
    made = PRICES | change
    file.write_text("\n".join(f"{key}: {'.nan' if value is NAN else json.dumps(value)}" for key, value in made.items()))
    assert main(["cost", str(run), "--prices", str(file)]) == 2
    out, err = capsys.readouterr()
    assert named in err
    assert str(file) in err
    assert not out


@pytest.mark.parametrize("text", ["", "- 1", "{", None])
def test_cost_names_a_file_that_has_no_prices(run, tmp_path, capsys, text):
    file = tmp_path / "prices.yaml"
    if text is not None:
        file.write_text(text)
    assert main(["cost", str(run), "--prices", str(file)]) == 2
    assert str(file) in capsys.readouterr().err


def test_cost_of_a_folder_without_steps_and_with_invalid_arguments_exits_2(run, tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    for argv in ([tmp_path / "empty"], [tmp_path / "none"], [run, "--every", "soon"], [run, "--every", "0"], []):
        assert main(["cost", *map(str, argv)]) == 2
        assert capsys.readouterr().err


def test_cost_names_steps_that_cannot_be_read_and_exits_1(run, capsys):
    path = run / "step-20" / ".snapshot_metadata"
    path.write_bytes(path.read_bytes()[:-9])
    assert main(["cost", str(run)]) == 1
    out, err = capsys.readouterr()
    assert "2 steps" in out
    assert "step-20" in err


KINDS = {"HEAD": "get", "PUT": "put"}


def kind_of(request):
    """The kind of a request, as clouds bill it."""
    if request.method == "POST":
        return "delete" if request.path.endswith("?delete") else "put"
    return "list" if "list-type=2" in request.path else KINDS.get(request.method, "get")


@pytest.mark.servers
@pytest.mark.parametrize("nbytes", [400, 20_000_000, 48_000_000])
def test_cost_counts_the_requests_of_a_take_on_s3(moto, proxy, capsys, monkeypatch, nbytes):
    options = {"key": moto.key, "secret": moto.secret, "endpoint_url": proxy.url, **PATIENT}
    options |= {"client_kwargs": {"region_name": moto.region}}
    root = f"s3://{moto.bucket()}/run"
    state = {"s": StateDict(x=torch.zeros(nbytes // 4))}
    with SnapshotManager(root, storage_options=options, signals=()) as manager:
        manager.take(1, state)
        before = len(proxy.requests)
        manager.take(2, state)
    sent = Counter(map(kind_of, proxy.requests[before:]))
    monkeypatch.setenv("SNAPSHOT_STORAGE_OPTIONS", json.dumps(options))
    found = cost(capsys, root, "--every", "730h")["requests_a_month"]
    assert found == {kind: sent[kind] for kind in ("put", "list", "get")}


def _take(root, options):
    import torch.distributed as dist

    with SnapshotManager(root, storage_options=options, signals=()) as manager:
        for step in (1, 2):
            manager.take(step, {"s": StateDict(x=torch.arange(100.0) + dist.get_rank())})


@pytest.mark.servers
@pytest.mark.ranks
def test_cost_counts_the_requests_of_all_ranks_on_s3(two, moto, proxy, capsys, monkeypatch):
    options = {"key": moto.key, "secret": moto.secret, "endpoint_url": proxy.url, **PATIENT}
    options |= {"client_kwargs": {"region_name": moto.region}}
    root = f"s3://{moto.bucket()}/run"
    two.run(_take, root, options)
    sent = Counter(kind_of(each) for each in proxy.requests if "step-2" in each.path)
    monkeypatch.setenv("SNAPSHOT_STORAGE_OPTIONS", json.dumps(options))
    found = cost(capsys, root, "--every", "730h")["requests_a_month"]
    assert found == {kind: sent[kind] for kind in ("put", "list", "get")}


def test_cost_page_names_all_keys_of_the_prices():
    page = (Path(__file__).parents[3] / "docs/reference/cli/cost.md").read_text()
    assert all(f"{key}: " in page for key in PRICES)
