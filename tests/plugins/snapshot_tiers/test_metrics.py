"""Metrics: what events add up to, the endpoint of an uploader, OpenTelemetry and the dashboard."""

import json
import os
import re
import shutil
import time
import urllib.error
import urllib.request
from pathlib import Path

import msgspec
import pytest
import torch

from snapshot import Snapshot, StateDict
from snapshot.events import (
    COUNTERS,
    DURATION,
    GAUGES,
    PREFIX,
    Event,
    Metrics,
    Readings,
    add_handler,
    as_prometheus,
    changes_of,
    emit,
    remove_handler,
)
from snapshot_tiers.uploader import Uploader
from snapshot_tiers.uploader_process import MetricsServer
from tests.plugins.snapshot_tiers.jobs import flip_keeping_time, manager_of, stop_uploaders

SAMPLE = re.compile(r'([a-z_]+)(?:\{((?:[a-z]+="(?:[^"\\\n]|\\.)*",?)*)\})? (\S+)')
DASHBOARD = Path(__file__).parents[3] / "docs/_static/grafana.json"


def parsed(text):
    """Return the samples of a text in Prometheus' format, and check that each has a type."""
    types, samples = {}, {}
    for line in text.splitlines():
        if line.startswith("# TYPE"):
            _, _, name, kind = line.split()
            assert name not in types
            types[name] = kind
        elif not line.startswith("#"):
            name, labels, value = SAMPLE.fullmatch(line).groups()
            family = re.sub("_(count|sum)$", "", name)
            assert name in types or types.get(family) == "summary", line
            key = name, tuple(re.findall(r'([a-z]+)="((?:[^"\\]|\\.)*)"', labels or ""))
            assert key not in samples
            samples[key] = float(value)
    return samples


@pytest.fixture
def metrics():
    made = Metrics()
    add_handler(made)
    yield made
    remove_handler(made)


class Bad:
    def state_dict(self):
        return 1 / 0

    def load_state_dict(self, state):
        pass


def test_metrics_count_operations_bytes_and_seconds(tmp_path, metrics):
    app = {"s": StateDict(x=torch.ones(1000))}
    Snapshot.take(tmp_path / "a", app)
    Snapshot.async_take(tmp_path / "b", app).wait()
    Snapshot(tmp_path / "a").restore(app)
    Snapshot(tmp_path / "a").verify()
    with pytest.raises(ZeroDivisionError):
        Snapshot.take(tmp_path / "c", {"bad": Bad()})
    held = metrics.read()
    operations = {tuple(value for _, value in labels): count for labels, count in held.counters["operations"]}
    assert operations[("ok", "take")] == operations[("ok", "async_take")] == 1
    assert operations[("failed", "take")] == operations[("ok", "restore")] == operations[("ok", "verify")] == 1
    counted = {tuple(value for _, value in labels): count for labels, count, _ in held.durations}
    assert counted[("blocked", "take")] == 2  # also that of a take that failed
    assert counted[("blocked", "async_take")] == counted[("staged", "async_take")] == counted[("done", "take")] == 1
    sizes = {labels[0][1]: value for labels, value in held.counters["bytes"]}
    assert sizes["take"] >= 4000 <= sizes["restore"]
    assert held.newest is not None
    assert held.lost > 0


def test_metrics_newest_commit_is_as_old_as_its_take():
    metrics = Metrics()
    for verb, seconds in [("take", 1000.0), ("publish", 5.0)]:
        metrics(Event("committed", verb, "", {"seconds": seconds}))
    assert 1000 <= metrics.read().gauges(time.time())["newest_commit_age_seconds"][0][1] < 2000


def test_metrics_gauges_follow_the_time():
    readings = Readings(1, 1000.0, {}, [], 25.0, 1050.0)
    gauges = {name: rows[0][1] for name, rows in readings.gauges(1100.0).items()}
    assert gauges == {"goodput_ratio": 0.75, "newest_commit_age_seconds": 50.0}
    assert Readings(1, 1000.0, {}, [], 0.0, None).gauges(999.0) == {"goodput_ratio": [((), 1.0)]}


def test_metrics_ignore_events_without_counters():
    assert not list(changes_of(Event("start", "take", "x", {"bytes": 5})))
    (change,) = changes_of(Event("healed", "upload", "x", {}))
    assert change == ("incidents", 1, (("event", "healed"),))
    (change,) = changes_of(Event("retry", "read", "x", {}))
    assert change == ("retries", 1, (("verb", "read"),))


@pytest.mark.parametrize(("damaged", "outcome"), [(False, "ok"), (True, "failed")])
def test_metrics_count_a_verify_with_faults_as_failed(tmp_path, damaged, outcome):
    taken = Snapshot.take(str(tmp_path / "snap"), {"s": StateDict(x=torch.arange(1000))})
    if damaged:
        flip_keeping_time(max((tmp_path / "snap").rglob("*"), key=lambda path: path.stat().st_size))
    metrics = Metrics()
    add_handler(metrics)
    try:
        assert taken.verify().ok is not damaged
    finally:
        remove_handler(metrics)
    labels = (("outcome", outcome), ("verb", "verify"))
    assert (labels, 1) in metrics.read().counters["operations"]


def test_metrics_as_prometheus_is_valid_text():
    metrics = Metrics()
    metrics(Event("committed", 'a"b\\c\nd', "x", {"bytes": 7, "seconds": 0.5}))
    metrics(Event("blocked", "take", "x", {"seconds": 0.25}))
    samples = parsed(
        as_prometheus([((("rank", "3"),), metrics.read())], {"newest_step": [((("tier", "far"),), 9.0)]}, 0)
    )
    verb = ("verb", 'a\\"b\\\\c\\nd')
    assert samples["snapshot_operations_total", (("rank", "3"), ("outcome", "ok"), verb)] == 1
    assert samples["snapshot_bytes_total", (("rank", "3"), verb)] == 7
    assert samples["snapshot_seconds_sum", (("rank", "3"), ("phase", "blocked"), ("verb", "take"))] == 0.25
    assert samples["snapshot_newest_step", (("tier", "far"),)] == 9


def scraped(folder):
    (address,) = folder.rglob(".metrics.address")
    with urllib.request.urlopen(f"http://{address.read_text()}/metrics", timeout=10) as answer:
        assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
        return parsed(answer.read().decode())


@pytest.mark.slow
def test_metrics_of_uploader_and_trainer_are_served(tmp_path, hosts, monkeypatch):
    monkeypatch.setenv("SNAPSHOT_METRICS", "127.0.0.1:0")
    app = {"s": StateDict(x=torch.ones(50_000))}
    began = time.time()
    with manager_of(tmp_path / "far", hosts("a"), keep_near=None) as manager:
        manager.async_take(10, app).wait("far", timeout=300)
        samples = scraped(hosts("a"))
        trainer, uploader = (("process", "trainer"), ("rank", "0")), (("process", "uploader"),)
        assert samples["snapshot_operations_total", (*trainer, ("outcome", "ok"), ("verb", "async_take"))] == 1
        assert samples["snapshot_operations_total", (*uploader, ("outcome", "ok"), ("verb", "upload"))] == 1
        assert samples["snapshot_bytes_total", (*uploader, ("verb", "upload"))] >= 200_000
        assert samples["snapshot_seconds_count", (*trainer, ("phase", "blocked"), ("verb", "async_take"))] == 1
        assert 0 <= samples["snapshot_goodput_ratio", trainer] <= 1
        assert samples["snapshot_newest_step", (("tier", "far"),)] == 10
        assert 0 <= samples["snapshot_newest_step_age_seconds", (("tier", "far"),)] <= time.time() - began + 1
        assert samples["snapshot_steps", (("state", "whole"),)] == 1
        assert samples["snapshot_upload_pending_bytes", ()] == 0
        assert str(tmp_path) not in str(samples)
        (address,) = hosts("a").rglob(".metrics.address")
        with pytest.raises(urllib.error.HTTPError, match="404"):
            urllib.request.urlopen(f"http://{address.read_text()}/", timeout=10)
        # the file of a rank that has ended, and a damaged one, are left out
        (mine,) = hosts("a").rglob(".metrics-0.json")
        gone = json.loads(mine.read_bytes()) | {"pid": 2**22 + 1}
        (mine.parent / ".metrics-1.json").write_text(json.dumps(gone))
        (mine.parent / ".metrics-2.json").write_text("{")
        assert {dict(labels).get("rank") for _, labels in scraped(hosts("a"))} == {"0", None}


def test_metrics_age_of_the_far_step_remains_after_near_files_are_gone(tmp_path):
    uploader = Uploader(str(tmp_path))
    server = MetricsServer(uploader, "127.0.0.1:0")
    try:
        for step in (1, 2):
            Snapshot.take(tmp_path / f"step-{step}", {"s": StateDict(x=step)})
        samples = parsed(server.text())
        far = (("tier", "far"),)
        assert ("snapshot_newest_step", far) not in samples
        oldest = samples["snapshot_newest_step_age_seconds", far]
        assert oldest >= samples["snapshot_newest_step_age_seconds", (("tier", "near"),)] >= 0
        emit("uploaded", "upload", "x", step=1, bytes=1)
        shutil.rmtree(tmp_path / "step-1")
        samples = parsed(server.text())
        assert samples["snapshot_newest_step", far] == 1
        assert samples["snapshot_newest_step_age_seconds", far] >= oldest
        os.mkfifo(tmp_path / ".metrics-0.json")
        (tmp_path / ".metrics-1.json").write_bytes(msgspec.json.encode(Readings(1 << 70, 0.0, {}, [], 0.0, None)))
        assert parsed(server.text())
    finally:
        server.close()


@pytest.mark.slow
@pytest.mark.parametrize("address", ["nowhere", "127.0.0.1:99999", "256.0.0.1:1"])
def test_snapshot_metrics_address_that_cannot_be_used_stops_no_upload(tmp_path, hosts, monkeypatch, address):
    monkeypatch.setenv("SNAPSHOT_METRICS", address)
    with manager_of(tmp_path / "far", hosts("a")) as manager:
        manager.async_take(10, {"s": StateDict(x=1)}).wait("far", timeout=300)
    (log,) = hosts("a").rglob(".uploader.log")
    assert f"SNAPSHOT_METRICS={address}: no metrics are offered" in log.read_text()


def test_metrics_opentelemetry_handler_reports_the_same_numbers(tmp_path):
    pytest.importorskip("opentelemetry.sdk")
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import InMemoryMetricReader

    from snapshot_health.otel import OpenTelemetryHandler

    reader = InMemoryMetricReader()
    provider = MeterProvider([reader])
    handler = OpenTelemetryHandler(provider)
    add_handler(handler)
    began = time.time()
    try:
        Snapshot.take(tmp_path / "a", {"s": StateDict(x=torch.ones(1000))})
    finally:
        remove_handler(handler)
    (scope,) = reader.get_metrics_data().resource_metrics[0].scope_metrics
    found = {metric.name: metric.data.data_points for metric in scope.metrics}
    (point,) = found["snapshot.operations"]
    assert (dict(point.attributes), point.value) == ({"outcome": "ok", "verb": "take"}, 1)
    phases = {point.attributes["phase"]: point.count for point in found["snapshot.seconds"]}
    assert phases == {"blocked": 1, "done": 1}
    (goodput,) = found["snapshot.goodput"]
    assert 0 <= goodput.value <= 1
    (age,) = found["snapshot.newest_commit.age"]
    assert 0 <= age.value <= time.time() - began + 1
    provider.shutdown()


def test_metrics_dashboard_uses_existing_metrics():
    dashboard = json.loads(DASHBOARD.read_text())
    known = {f"{PREFIX}{name}_total" for name in COUNTERS} | {f"{PREFIX}{name}" for name in GAUGES}
    known |= {f"{PREFIX}{DURATION}_sum", f"{PREFIX}{DURATION}_count"}
    asked = set()
    for panel in dashboard["panels"]:
        assert panel["title"]
        for target in panel["targets"]:
            names = set(re.findall(r"snapshot_[a-z_]+", target["expr"]))
            assert names <= known, target["expr"]
            asked |= names
    assert asked == known


@pytest.fixture(autouse=True)
def no_uploader_is_left(hosts):
    yield
    stop_uploaders(hosts("a"))
