"""`snapshot convert`: write a checkpoint in another format."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from typing import Any

import torch

from snapshot.cli.arguments import (
    Verbs,
    add_json,
    add_memory,
    add_pickle,
    add_select,
    add_storage,
    options_of,
    pair,
    size,
    verb,
)
from snapshot.cli.locate import explain_missing
from snapshot.cli.ranks import add_ranks, on_ranks
from snapshot.cli.screen import ExitStatus, as_json, bar, name_overwrite, printable, wrapped
from snapshot.formats.hugging_face import SHARD
from snapshot.io.url import URL
from snapshot.maps.tensor_map import TensorMap
from snapshot.reports import ConvertReport
from snapshot.snapshot import Snapshot
from snapshot.tensors.memory import BY_NAME, is_castable
from snapshot.transform.target import FORMATS, Target, format_by_name


def add(verbs: Verbs) -> None:
    """Describe the verb's arguments."""
    parser = verb(
        verbs,
        "convert",
        "Write a snapshot, or a checkpoint of another library, in another format. It is read and written part by part, "
        "so it may be larger than memory, and no code in it is run.",
        [
            ("convert old.pt run/step-100", "a file of torch.save to a snapshot"),
            ("convert run/step-100 model.safetensors --select 'model/**' --dtype bfloat16", "only the weights"),
            ("convert run/step-100 run-dcp --to dcp", "for torch.distributed.checkpoint"),
        ],
        on_ranks(run),
    )
    parser.add_argument("source", metavar="FROM", help="the source: anything that Snapshot(path) opens")
    parser.add_argument("target", metavar="TO", help="a folder; a file for torch, and for safetensors with that suffix")
    add_select(parser)
    parser.add_argument(
        "--rename",
        action="append",
        default=[],
        type=pair,
        metavar="OLD=NEW",
        help="a path and its new one; repeatable",
    )
    add_map(parser)
    parser.add_argument("--map-reverse", action="store_true", help="use the reverse of the map")
    parser.add_argument("--dtype", type=float_dtype, help="cast floating point tensors to this dtype, such as bfloat16")
    add_output(parser)
    add_storage(parser, "src", "dst")


def run(arguments: argparse.Namespace) -> ExitStatus:
    """Convert, and print the report."""
    options = options_of(arguments, "src")
    tensor_map = None
    if arguments.map is not None:
        tensor_map = TensorMap.load(arguments.map, arguments.map_config, reverse=arguments.map_reverse)
    elif arguments.map_config is not None or arguments.map_reverse:
        raise ValueError("--map-config and --map-reverse need --map")
    source = Snapshot(arguments.source, storage_options=options, allow_pickle=arguments.allow_pickle)
    with name_overwrite(), explain_missing(arguments.source, options), bar("convert", ranks=arguments.ranks) as show:
        report = source.convert(
            target_of(arguments, arguments.target),
            select=arguments.select,
            exclude=arguments.exclude,
            rename=dict(arguments.rename) or None,
            map=tensor_map,
            dtype=arguments.dtype,
            verify=not arguments.no_verify,
            memory_budget_bytes=arguments.memory,
            progress=show,
            ranks=arguments.ranks,
        )
    print_report(arguments.target, report, json=arguments.json)
    return ExitStatus.OK


def add_map(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that choose a tensor map."""
    parser.add_argument(
        "--map", metavar="MAP", help=f"a tensor map: {', '.join(TensorMap.names())}, or a .yaml or .json file"
    )
    parser.add_argument("--map-config", metavar="FILE", help="a config.json of Hugging Face with the sizes of the map")


def add_target(parser: argparse.ArgumentParser, *, converts: bool) -> None:
    """Add the options of the checkpoint that a verb writes. `converts`: its format can be chosen."""
    if converts:
        parser.add_argument("--to", choices=FORMATS, help="default: by the suffix of the name; without one, a snapshot")
        parser.add_argument(
            "--shard", type=size, default=SHARD, metavar="SIZE", help="maximum size of each of several files: 5GB"
        )
    parser.add_argument(
        "--compression", choices=("zstd",), help="compress the data files; only this library reads them"
    )
    parser.add_argument("--overwrite", action="store_true", help="replace an existing target when the new one is whole")


def target_of(arguments: argparse.Namespace, url: str) -> Target:
    """Return the checkpoint to write; raise ValueError if its format is unknown."""
    to: Any = None
    if "to" in arguments:
        to = arguments.to or format_by_name(URL.parse(url), f"--to {{{','.join(FORMATS)}}}")
    return Target(
        url,
        to,
        overwrite=arguments.overwrite,
        compression=arguments.compression,
        shard_bytes=getattr(arguments, "shard", SHARD),
        storage_options=options_of(arguments, "dst"),
    )


def add_output(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of every verb that writes a checkpoint in a format of choice."""
    add_target(parser, converts=True)
    parser.add_argument("--no-verify", action="store_true", help="do not compare digests and checksums")
    add_memory(parser)
    add_ranks(parser)
    add_pickle(parser)
    add_json(parser)


def print_report(target: str, report: ConvertReport, *, json: bool) -> None:
    """Print the report of a written checkpoint."""
    name = str(URL.parse(target))
    if json:
        print(as_json({"url": name, **asdict(report)}))
    else:
        print(*(wrapped(printable(line), "    ") for line in f"{name}: {report}".split("\n")), sep="\n")


def float_dtype(text: str) -> torch.dtype:
    """Return a floating-point dtype by its name."""
    found = BY_NAME.get(text.removeprefix("torch."))
    if found is None or not is_castable(found):
        raise argparse.ArgumentTypeError(f"must be a floating point dtype of torch, got {text!r}")
    return found
