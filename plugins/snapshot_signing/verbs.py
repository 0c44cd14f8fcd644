"""The verbs of this package, for the command: a line of help each, and the module that describes and runs it."""

from snapshot.cli.verb import Verb

SIGN = Verb(
    "sign a snapshot, or create a key for that",
    "snapshot_signing.sign_verb",
    order=40,
)
