"""The verbs of this package, for the command: a line of help each, and the module that describes and runs it."""

from snapshot.cli.verb import Verb

BENCH = Verb(
    "measure saving and restoring, compared with raw I/O and other libraries",
    "snapshot_bench.bench_verb",
    order=180,
)
