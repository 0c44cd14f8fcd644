"""How GGUF files are recognised: for the library's detection of formats."""

from snapshot.formats.registry import Format

GGUF = Format(
    "gguf",
    80,
    "snapshot_gguf.reader:describe_folder",
    r".*\.gguf",
    "snapshot_gguf.reader:describe_file",
    (b"GGUF",),
    writes="gguf",
    plan="snapshot_gguf.export:plan",
    one_file=True,
    suffixes=(".gguf",),
    prepare="snapshot_gguf.export:prepare",
    choose_map="snapshot_gguf.export:choose_map",
    options="snapshot_gguf.options:GGUFOptions",
    needs_options=True,
)
