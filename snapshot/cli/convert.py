"""`snapshot convert`: a checkpoint once more, in another format."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from typing import Any

import torch

from snapshot.cli.arguments import add_options
from snapshot.cli.status import ExitStatus
from snapshot.engine.converting import FORMATS
from snapshot.formats.safetensors import SHARD
from snapshot.snapshot import Snapshot
from snapshot.storage import URL
from snapshot.tensors.dtypes import BY_NAME


def add(verbs: Any) -> None:
    """Describe the verb's arguments."""
    parser: argparse.ArgumentParser = verbs.add_parser(
        "convert",
        help="write a checkpoint in another format: snapshot, safetensors, torch, dcp",
        description="Write a snapshot, or a checkpoint of another library, in another format. It is read and written "
        "part by part, whatever its size, and nothing in it is run.",
        epilog="Examples: snapshot convert old.pt run/step-100; snapshot convert run/step-100 model.safetensors "
        "--to safetensors --select 'model/**' --dtype bfloat16",
    )
    parser.add_argument("source", metavar="FROM", help="what is read: anything that Snapshot(path) opens")
    parser.add_argument("target", metavar="TO", help="a folder; for torch, and safetensors if it ends so, a file")
    parser.add_argument("--to", choices=FORMATS, help="by default what the ending of TO says, else a snapshot")
    parser.add_argument("--select", action="append", default=[], metavar="GLOB", help="only what matches; repeatable")
    parser.add_argument("--exclude", action="append", default=[], metavar="GLOB", help="not what matches; repeatable")
    parser.add_argument(
        "--rename",
        action="append",
        default=[],
        type=_pair,
        metavar="OLD=NEW",
        help="a path and its new one; repeatable",
    )
    parser.add_argument("--dtype", type=_dtype, help="cast floating point tensors to it: bfloat16")
    parser.add_argument("--shard", type=int, default=SHARD, metavar="BYTES", help="how long a file of several may be")
    parser.add_argument("--memory", type=int, metavar="BYTES", help="how much memory to use at most, about")
    parser.add_argument("--overwrite", action="store_true", help="replace what is there")
    parser.add_argument("--no-verify", action="store_true", help="do not compare digests and checksums")
    parser.add_argument("--allow-pickle", action="store_true", help="run pickles: only for what you trust")
    parser.add_argument("--json", action="store_true", help="print a JSON object")
    add_options(parser, "storage_options of FROM")
    add_options(parser, "storage_options of TO", "--target-options")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> ExitStatus:
    """Convert, and say what was done."""
    to = arguments.to or _by_name(arguments.target)
    source = Snapshot(arguments.source, storage_options=arguments.options, allow_pickle=arguments.allow_pickle)
    report = source.convert(
        arguments.target,
        to,
        select=arguments.select,
        exclude=arguments.exclude,
        rename=dict(arguments.rename) or None,
        dtype=arguments.dtype,
        shard_bytes=arguments.shard,
        overwrite=arguments.overwrite,
        verify=not arguments.no_verify,
        storage_options=arguments.target_options,
        memory_budget_bytes=arguments.memory,
    )
    name = str(URL.parse(arguments.target))
    print(json.dumps({"url": name, **asdict(report)}) if arguments.json else f"{name}: {report}")
    return ExitStatus.OK


def _by_name(target: str) -> str:
    path = URL.parse(target).location
    return "safetensors" if path.endswith(".safetensors") else "torch" if path.endswith((".pt", ".pth")) else "snapshot"


def _pair(text: str) -> tuple[str, str]:
    old, equals, new = text.partition("=")
    if not (old and equals and new):
        raise argparse.ArgumentTypeError(f"{text!r} is not OLD=NEW")
    return old, new


def _dtype(text: str) -> torch.dtype:
    found = BY_NAME.get(text.removeprefix("torch."))
    if found is None or not found.is_floating_point:
        raise argparse.ArgumentTypeError(f"{text!r} is no floating point dtype of torch")
    return found
