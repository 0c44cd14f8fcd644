"""The verbs of this package, for the command: a line of help each, and the module that describes and runs it."""

from snapshot.cli.verb import Verb

SAMPLES = Verb(
    "tell whether a run has trained on each sample once",
    "snapshot_trainers.samples_verb",
    order=115,
)
