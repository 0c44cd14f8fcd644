"""Orbax checkpoints, with OCDBT and Zarr, read."""
