"""The verbs of this package, for the command: a line of help each, and the module that describes and runs it."""

from snapshot.cli.verb import Verb

REPORT = Verb(
    "draw a snapshot as an HTML page",
    "snapshot_health.report_verb",
    order=90,
)
UI = Verb(
    "show the steps of a run in a browser: metrics, differences, health of tensors",
    "snapshot_health.ui_verb",
    order=100,
)
BISECT = Verb(
    "find the first step of a run with a bad state, such as NaN",
    "snapshot_health.bisect_verb",
    order=110,
)
