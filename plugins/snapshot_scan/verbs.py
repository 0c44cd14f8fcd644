"""The verbs of this package, for the command: a line of help each, and the module that describes and runs it."""

from snapshot.cli.verb import Verb

SCAN = Verb(
    "show what a checkpoint of any format would run, without running it",
    "snapshot_scan.scan_verb",
    order=35,
)
