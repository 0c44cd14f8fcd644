"""The verbs of this package, for the command: a line of help each, and the module that describes and runs it."""

from snapshot.cli.verb import Verb

PUBLISH = Verb(
    "publish a checkpoint as the next version of weights for inference engines",
    "snapshot_publish.publish_verb",
    order=160,
)
PULL = Verb(
    "bring a published version of weights into a local folder",
    "snapshot_publish.pull_verb",
    order=170,
)
