"""The declaration of the verb. It is imported by `snapshot --help`, so it imports nothing else."""

from snapshot.cli.verb import Verb

LARGEST = Verb("show the largest tensors of a checkpoint", "snapshot_largest_verb")
