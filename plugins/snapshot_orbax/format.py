"""How Orbax checkpoints are recognised: for the library's detection of formats."""

from snapshot.formats.registry import Format

ORBAX = Format(
    "orbax",
    70,
    "snapshot_orbax.checkpoint:describe_folder",
    r"_METADATA|_CHECKPOINT_METADATA|orbax\.checkpoint",
    codec="snapshot_orbax.blosc:Blosc",
    codecs=("blosc",),
    whole_folder=True,
)
