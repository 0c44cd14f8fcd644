"""The verbs of this package, for the command: a line of help each, and the module that describes and runs it."""

from snapshot.cli.verb import Verb

COST = Verb(
    "show the bytes, objects and requests of a run, and what they cost",
    "snapshot_cost.cost_verb",
    order=135,
)
