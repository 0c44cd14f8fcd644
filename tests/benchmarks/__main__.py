"""Benchmarks that prove claims about this library itself: `python -m tests.benchmarks NAME`, from a checkout.

`snapshot bench` is what users run. These compare ways of saving in the background, ranks, clients and formats.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from snapshot.bench.rounds import describe, place
from snapshot.bench.systems import PEERS
from snapshot.cli.arguments import add_storage, handed_on, options_of
from snapshot.cli.bench import NameList, count, device_name, header, positive
from snapshot.errors import SnapshotError
from snapshot.io.process import unwind_on_signals
from tests.benchmarks import (
    background,
    bulk,
    compression,
    dcp,
    formats,
    load,
    maps,
    merge,
    multi_rank,
    object_store,
    planning_scale,
    publish,
    sign,
    tiers,
)
from tests.benchmarks.background_child import TRAINED


def main(argv: Sequence[str] | None = None) -> int:
    """Run one benchmark and print its table. Return 1 if one of the measured ways failed."""
    arguments = _parser().parse_args(argv)
    failed = False
    try:
        with unwind_on_signals(), handed_on(options_of(arguments) if hasattr(arguments, "options") else {}):
            for line in arguments.lines(arguments):
                failed = failed or line.startswith("  FAILED")
                print(line, flush=True)
    except (SnapshotError, ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130  # what shells give for SIGINT
    return int(failed)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks", description=__doc__, allow_abbrev=False)
    verbs = parser.add_subparsers(metavar="NAME", required=True)

    def add(name: str, what: str, lines: Any, url: bool = True) -> argparse.ArgumentParser:
        made: argparse.ArgumentParser = verbs.add_parser(name, help=what, description=what, allow_abbrev=False)
        made.set_defaults(lines=lines)
        if url:
            made.add_argument("url", nargs="?", default=".", metavar="URL", help="where to save (default: here)")
            made.add_argument("--scale", type=positive, default=1.0, metavar="F", help="scale the bytes by F")
            made.add_argument("--rounds", type=count, default=5, metavar="N", help="counted repetitions (default: 5)")
            add_storage(made)
        return made

    made = add("background", "what saving in the background costs the training beside it", _background)
    made.add_argument("--case", type=NameList("case", TRAINED), default=tuple(TRAINED), metavar="LIST")
    made.add_argument("--peers", type=NameList("peer", PEERS), default=PEERS, metavar="LIST")
    made.add_argument("--device", type=device_name, default="cpu", metavar="DEVICE", help="where the model is trained")
    made.add_argument("--trace", metavar="FILE", help="a timeline of this library, to open at ui.perfetto.dev")
    made.add_argument("--figure", metavar="FILE.svg", help="draw the time of each training step")
    add("ranks", "N ranks that save and restore together, beside one alone", _ranks).add_argument(
        "--world", type=_several, default=2, metavar="N"
    )
    add("planning", "what planning costs with up to thousands of simulated ranks", _planning, url=False).add_argument(
        "--worlds", type=_worlds, default=planning_scale.WORLDS, metavar="LIST"
    )
    add("bulk", "verbs whose work N ranks share, beside one rank and raw copies", _bulk).add_argument(
        "--world", type=_several, default=2, metavar="N"
    )
    add("store", "S3's clients alone and this library over them, on loopback or at an s3:// URL", _store)
    add("dcp", "torch.distributed.checkpoint with its own storage and with this library's", _dcp)
    add("formats", "how checkpoints of other libraries are read and converted", _formats)
    add("maps", "exports with tensor maps, beside raw reads and writes", _in_folder(maps.compare))
    add("load", "tensors of a checkpoint into new memory, by this library, safetensors and other loaders", _load)
    add("merge", "three checkpoints become one, beside a raw read of three and a write of one", _merge)
    add("tiers", "takes, steps and restores with near folders, beside raw transfers", _in_folder(tiers.compare))
    add(
        "publish", "weights as deltas: each stage, a publish and a pull, beside raw copies", _in_folder(publish.compare)
    )
    add(
        "compression",
        "ratio and speed of compression, over a slow link and to a disk",
        _in_folder(compression.compare),
    )
    add("sign", "takes, restores and verifications with signatures, beside raw I/O", _in_folder(sign.compare))
    return parser


def _in_folder(compare: Callable[[Path, float, int], Iterable[str]]) -> Callable[[argparse.Namespace], Iterable[str]]:
    """Return a benchmark whose place must be a folder."""

    def lines(arguments: argparse.Namespace) -> Iterable[str]:
        with place(arguments.url) as where:
            yield header(describe(where), arguments.scale, arguments.rounds)
            if not where.local:
                raise ValueError("the place must be a folder")
            yield from compare(Path(where.text()), arguments.scale, arguments.rounds)

    return lines


def _background(arguments: argparse.Namespace) -> Iterable[str]:
    trace, figure = (Path(name).absolute() if name else None for name in (arguments.trace, arguments.figure))
    with place(arguments.url) as where:
        yield header(describe(where), arguments.scale, arguments.rounds)
        chosen, left_out = background.systems(arguments.peers, where.local)
        yield from (f"left out: {line}" for line in left_out)
        run = background.Run(where, arguments.scale, arguments.rounds, chosen, trace, arguments.device)
        yield from background.compare(run, arguments.case, figure)


def _ranks(arguments: argparse.Namespace) -> Iterable[str]:
    with place(arguments.url) as where:
        yield header(describe(where), arguments.scale, arguments.rounds)
        yield from multi_rank.compare(where, arguments.world, arguments.scale, arguments.rounds)


def _bulk(arguments: argparse.Namespace) -> Iterable[str]:
    with place(arguments.url) as where:
        yield header(describe(where), arguments.scale, arguments.rounds)
        if not where.local:
            raise ValueError("the place must be a folder")
        yield from bulk.compare(Path(where.text()), arguments.scale, arguments.rounds, arguments.world)


def _planning(arguments: argparse.Namespace) -> Iterable[str]:
    return planning_scale.simulate(arguments.worlds)


def _store(arguments: argparse.Namespace) -> Iterable[str]:
    url = None if arguments.url == "." else arguments.url
    return object_store.compare(url, options_of(arguments), arguments.scale, arguments.rounds)


def _dcp(arguments: argparse.Namespace) -> Iterable[str]:
    with place(arguments.url) as where:
        yield header(describe(where), arguments.scale, arguments.rounds)
        yield from dcp.compare(where, arguments.scale, arguments.rounds)


def _formats(arguments: argparse.Namespace) -> Iterable[str]:
    with place(arguments.url) as where:
        yield header(describe(where), arguments.scale, arguments.rounds)
        yield from formats.compare(where, arguments.scale, arguments.rounds)


def _load(arguments: argparse.Namespace) -> Iterable[str]:
    with place(arguments.url) as where:
        yield header(describe(where), arguments.scale, arguments.rounds)
        yield from load.compare(where, arguments.scale, arguments.rounds)


def _merge(arguments: argparse.Namespace) -> Iterable[str]:
    with place(arguments.url) as where:
        yield header(describe(where), arguments.scale, arguments.rounds)
        yield from merge.compare(where, arguments.scale, arguments.rounds)


def _several(text: str) -> int:
    value = int(text)
    if value < 2:
        raise argparse.ArgumentTypeError(f"{text} is not above 1")
    return value


def _worlds(text: str) -> tuple[int, ...]:
    return tuple(map(_several, text.split(",")))


if __name__ == "__main__":
    sys.exit(main())
