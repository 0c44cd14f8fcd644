"""OpenTelemetry: the library's metrics through an application's meter provider."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

from snapshot.errors import MissingExtraError
from snapshot.events import COUNTERS, DURATION, DURATION_HELP, GAUGES, Event, Labels, Metrics, changes_of
from snapshot.text import VERSION


class OpenTelemetryHandler:
    """An event handler that records metrics: `snapshot.events.add_handler(OpenTelemetryHandler())`.

    It creates the counters `snapshot.operations`, `snapshot.bytes`, `snapshot.retries` and `snapshot.incidents`, the
    histogram `snapshot.seconds` and the gauges `snapshot.goodput` and `snapshot.newest_commit.age`.

    Args:
        meter_provider: The provider of meters. The default is the one that the application has set.
    """

    def __init__(self, meter_provider: Any = None) -> None:
        try:
            from opentelemetry import metrics
        except ImportError as error:
            raise MissingExtraError("metrics need OpenTelemetry: install the extra 'otel'") from error
        meter = metrics.get_meter("snapshot", VERSION, meter_provider)
        units = {"bytes": "By"}
        self._counters = {
            name: meter.create_counter(f"snapshot.{name}", units.get(name, "1"), text)
            for name, text in COUNTERS.items()
        }
        self._durations = meter.create_histogram(f"snapshot.{DURATION}", "s", DURATION_HELP)
        self._metrics = Metrics()
        self._observation = metrics.Observation

        def observe(name: str, unit: str, reading: str) -> None:
            meter.create_observable_gauge(name, [lambda _: self._observe(reading)], unit, GAUGES[reading])

        observe("snapshot.goodput", "1", "goodput_ratio")
        observe("snapshot.newest_commit.age", "s", "newest_commit_age_seconds")

    def __call__(self, event: Event) -> None:
        """Record an event."""
        self._metrics(event)
        for name, value, labels in changes_of(event):
            if name == DURATION:
                self._durations.record(value, _attributes(labels))
            else:
                self._counters[name].add(value, _attributes(labels))

    def _observe(self, reading: str) -> Iterable[Any]:
        found = self._metrics.read().gauges(time.time()).get(reading, ())
        return [self._observation(value, _attributes(labels)) for labels, value in found]


def _attributes(labels: Labels) -> dict[str, str]:
    return dict(labels)
