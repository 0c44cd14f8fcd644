"""Writes small directories of Megatron-core's distributed optimizer, each in both layouts, with the version in use:

    python -m tests.plugins.snapshot_megatron.write_megatron_files tests/plugins/snapshot_megatron/megatron_files.zip

The archive has `<name>/<layout>/iter_0000003`, as Megatron itself wrote it, and `<name>/truth.safetensors`: what an
AdamW of torch over whole tensors makes of the same gradients. `megatron_files.zip` is of megatron-core 0.16.1. Do not
write it again with a version that no longer shifts parameters after a padded bucket: tests need wrong directories.
"""

import argparse
import tempfile
import zipfile
from pathlib import Path

from tests.plugins.snapshot_megatron.megatron_models import Layout, write_directories

SMALL = {"layers": 2, "hidden": 8, "inner": 8}
JOBS = {
    "buckets": (2, Layout(bucket=500, **SMALL)),
    "tied": (2, Layout(pipeline=2, tied=True, **SMALL)),
    "experts": (2, Layout(expert=2, experts=True, **SMALL)),
    "both": (4, Layout(tensor=2, pipeline=2, **SMALL)),
}
"""Number of ranks and layout."""


def main():
    options = argparse.ArgumentParser(description="Write the archive of directories that the tests read.")
    options.add_argument("archive", type=Path)
    archive = options.parse_args().archive
    with (
        tempfile.TemporaryDirectory() as made,
        zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as out,
    ):
        for name, (world, layout) in JOBS.items():
            write_directories(Path(made) / name, world, layout)
        for path in sorted(each for each in Path(made).rglob("*") if each.is_file()):
            where = zipfile.ZipInfo(str(path.relative_to(made)))  # without the time
            where.compress_type = zipfile.ZIP_DEFLATED
            out.writestr(where, path.read_bytes())


if __name__ == "__main__":
    main()
