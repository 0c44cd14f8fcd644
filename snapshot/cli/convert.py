"""`snapshot convert`: write a checkpoint in another format."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from snapshot.cli.arguments import (
    add_json,
    add_pickle,
    add_rename,
    add_selection,
    add_storage,
    add_work,
    options_of,
    selection_of,
    size,
    work_of,
)
from snapshot.cli.locate import explain_missing
from snapshot.cli.ranks import on_ranks
from snapshot.cli.screen import ExitStatus, bar, emit_report
from snapshot.formats.registry import FormatOptions, add_options, written_formats
from snapshot.io.url import URL
from snapshot.maps.tensor_map import TensorMap

if TYPE_CHECKING:
    import torch

    from snapshot.transform.target import Target

DESCRIPTION = (
    "Write a snapshot, or a checkpoint of another library, in another format. It is read and written part by part, "
    "so it may be larger than memory, and no code in it is run."
)
EXAMPLES = [
    ("convert old.pt run/step-100", "a file of torch.save to a snapshot"),
    ("convert run/step-100 model.safetensors --select 'model/**' --dtype bfloat16", "only the weights"),
    ("convert run/step-100 run-dcp --to dcp", "for torch.distributed.checkpoint"),
    ("convert run/step-100 hf --to safetensors --select 'model/**' --files base", "for from_pretrained"),
    ("convert hf-folder model.gguf --kv-from base.gguf --quantisation Q8_0", "for llama.cpp"),
]


def add(parser: argparse.ArgumentParser) -> None:
    """Add the verb's arguments."""
    parser.add_argument("source", metavar="FROM", help="the source: anything that Snapshot(path) opens")
    parser.add_argument(
        "target", metavar="TO", help="a folder; a file for torch, gguf, and for safetensors with that suffix"
    )
    add_selection(parser)
    add_rename(parser)
    add_map(parser)
    parser.add_argument("--map-reverse", action="store_true", help="use the reverse of the map")
    parser.add_argument("--dtype", type=float_dtype, help="cast floating point tensors to this dtype, such as bfloat16")
    add_output(parser)
    add_storage(parser, "src", "dst")


@on_ranks
def run(arguments: argparse.Namespace) -> ExitStatus:
    """Convert, and print the report."""
    from snapshot.snapshot import Snapshot

    options = options_of(arguments, "src")
    tensor_map = map_of(arguments, reverse=arguments.map_reverse)
    source = Snapshot(arguments.source, storage_options=options, allow_pickle=arguments.allow_pickle)
    with explain_missing(arguments.source, options), bar("convert", ranks=arguments.ranks) as show:
        report = source.convert(
            target_of(arguments, arguments.target),
            **selection_of(arguments),
            **work_of(arguments),
            map=tensor_map,
            dtype=arguments.dtype,
            verify=arguments.verify,
            progress=show,
        )
    emit_report(arguments, arguments.target, report)
    return ExitStatus.OK


def add_map(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that choose a tensor map."""
    parser.add_argument(
        "--map", metavar="MAP", help=f"a tensor map: {', '.join(TensorMap.names())}, or a .yaml or .json file"
    )
    parser.add_argument("--map-config", metavar="FILE", help="a config.json of Hugging Face with the sizes of the map")


def map_of(arguments: argparse.Namespace, *, reverse: bool = False) -> TensorMap | None:
    """Return the tensor map, or None if none was chosen."""
    if arguments.map is not None:
        return TensorMap.load(arguments.map, arguments.map_config, reverse=reverse)
    if arguments.map_config is not None or reverse:
        raise ValueError(f"{'--map-config' if arguments.map_config is not None else '--map-reverse'} needs --map")
    return None


def add_target(parser: argparse.ArgumentParser, *, converts: bool) -> None:
    """Add the options of the checkpoint that a verb writes. `converts`: its format can be chosen."""
    if converts:
        parser.add_argument(
            "--to",
            metavar="FORMAT",
            help=f"{', '.join(written_formats())}; default: by the suffix of the name; without one, a snapshot",
        )
        parser.add_argument(
            "--shard", type=size, metavar="SIZE", help="maximum size of each of several files (default: 5GB)"
        )
        parser.add_argument(
            "--files",
            metavar="FOLDER",
            help="a local folder: its config.json, tokenizer and other small files, which from_pretrained needs",
        )
        parser.set_defaults(format_options=add_options(parser))
    parser.add_argument(
        "--compression", choices=("zstd",), help="compress the data files; only this library reads them"
    )
    parser.add_argument("--overwrite", action="store_true", help="replace an existing target when the new one is whole")
    parser.add_argument("--no-verify", dest="verify", action="store_false", help="do not compare digests and checksums")


def target_of(arguments: argparse.Namespace, url: str) -> Target:
    """Return the checkpoint to write; raise ValueError if its format is unknown."""
    from snapshot.transform.target import Target, format_by_name

    to: Any = None
    options: list[FormatOptions] = []
    if "to" in arguments:
        to = arguments.to or format_by_name(URL.parse(url), f"--to {{{','.join(written_formats())}}}")
        options = [made for each in arguments.format_options if (made := each.of_flags(arguments)) is not None]
    if len(options) > 1:
        raise ValueError(f"flags must be those of one format, got those of {', '.join(each.to for each in options)}")
    return Target(
        url,
        to,
        overwrite=arguments.overwrite,
        compression=arguments.compression,
        **({"shard_bytes": arguments.shard} if getattr(arguments, "shard", None) else {}),
        format_options=options[0] if options else None,
        files=getattr(arguments, "files", None),
        storage_options=options_of(arguments, "dst"),
    )


def add_output(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of every verb that writes a checkpoint in a format of choice."""
    add_target(parser, converts=True)
    add_work(parser)
    add_pickle(parser)
    add_json(parser)


def float_dtype(text: str) -> torch.dtype:
    """Return a floating-point dtype by its name."""
    from snapshot.tensors.memory import BY_NAME, is_castable

    found = BY_NAME.get(text.removeprefix("torch."))
    if found is None or not is_castable(found):
        raise argparse.ArgumentTypeError(f"must be a floating point dtype of torch, got {text!r}")
    return found
