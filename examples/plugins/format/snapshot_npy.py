"""The declaration of the format. It is imported whenever formats are listed, so it imports nothing else."""

from snapshot.formats.registry import Format

NPY = Format(
    "npy",
    folder="snapshot_npy_files:describe_folder",
    names=r".*\.npy",
    file="snapshot_npy_files:describe_file",
    heads=(b"\x93NUMPY",),
    writes="npy",
    plan="snapshot_npy_files:plan",
)
