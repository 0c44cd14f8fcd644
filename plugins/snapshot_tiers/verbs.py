"""The verbs of this package, for the command: a line of help each, and the module that describes and runs it."""

from snapshot.cli.verb import Verb

UPLOAD = Verb(
    "upload near steps of a run, as its trainer's uploader does",
    "snapshot_tiers.upload_verb",
    order=140,
)
ATTEMPTS = Verb(
    "show the attempts of a run with near folders, and choose one after a fork",
    "snapshot_tiers.attempts_verb",
    order=150,
)
