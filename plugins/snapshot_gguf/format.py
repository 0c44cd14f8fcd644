"""How GGUF files are recognised: for the library's detection of formats."""

from snapshot.formats.registry import Format

GGUF = Format(
    "gguf",
    80,
    "snapshot_gguf.reader:describe_folder",
    r".*\.gguf",
    "snapshot_gguf.reader:describe_file",
    (b"GGUF",),
)
