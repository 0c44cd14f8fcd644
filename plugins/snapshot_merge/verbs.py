"""The verbs of this package, for the command: a line of help each, and the module that describes and runs it."""

from snapshot.cli.verb import Verb

MERGE = Verb(
    "average checkpoints, or add them with weights",
    "snapshot_merge.merge_verb",
    order=80,
)
