"""Benchmarks that support claims about this library: `python -m tests.plugins.snapshot_bench NAME`, from a checkout.

`snapshot bench` is for users. These compare ways of saving in the background, ranks, clients and formats.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from snapshot.cli.arguments import add_storage, handed_on, options_of
from snapshot.errors import SnapshotError
from snapshot.io.system import unwind_on_signals
from snapshot_bench.bench_verb import NameList, count, device_name, positive
from snapshot_bench.measuring import header
from snapshot_bench.names import PEERS
from snapshot_bench.rounds import Workspace, describe, place
from tests.plugins.snapshot_bench import (
    background,
    codecs,
    exports,
    formats,
    object_store,
    planning_scale,
    ranks,
    restart,
    scale,
    tiers,
    trainer,
    why,
)
from tests.plugins.snapshot_bench.background_child import TRAINED

Lines = Iterable[str]
AT_A_PLACE: dict[str, tuple[str, Callable[[Workspace, float, int], Lines]]] = {
    "dcp": ("torch.distributed.checkpoint with its own storage and with this library's", formats.compare_dcp),
    "exports": ("steps of a training beside an export, an upload and an async take", exports.compare),
    "formats": ("reads and conversions of other libraries' checkpoints", formats.compare_formats),
    "foreign": ("conversions of trainers' checkpoints, their own tools, and raw I/O", formats.compare_foreign),
    "load": ("tensors of a checkpoint into new memory, by this library and by others", formats.compare_loads),
    "maps": ("exports with tensor maps, and raw reads and writes", formats.compare_maps),
    "merge": ("a merge of three checkpoints, and a raw read of three and a write of one", formats.compare_merges),
    "restart": ("durable takes, the first restore after each, and raw I/O", restart.compare),
    "tiers": ("takes, steps and restores with near folders, and raw transfers", tiers.compare),
    "trainer": (
        "time that saves block Hugging Face's Trainer: its own, and this library's",
        trainer.compare,
    ),
    "compression": ("ratio and speed of compression, over a slow link and to a disk", codecs.compare_compression),
    "sign": ("takes, restores and verifications with signatures, and raw I/O", codecs.compare_signatures),
    "why": ("faults that this library and others meet: a kill, a flipped bit, a pickle, a loss of power", why.compare),
    "publish": ("weights as deltas: each stage, a publish and a pull, and raw copies", codecs.compare_deltas),
}
WITH_RANKS: dict[str, tuple[str, Callable[[Workspace, float, int, int], Lines]]] = {
    "ranks": ("N ranks that save and restore together, and one alone", ranks.compare_replicas),
    "bulk": ("verbs whose work N ranks share, and one rank, and raw copies", ranks.compare_shares),
}


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
        return 130  # as shells do for SIGINT
    return int(failed)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tests.plugins.snapshot_bench", description=__doc__, allow_abbrev=False
    )
    verbs = parser.add_subparsers(metavar="NAME", required=True)

    def add(name: str, what: str, lines: Callable[..., Lines], url: bool = True) -> argparse.ArgumentParser:
        made: argparse.ArgumentParser = verbs.add_parser(name, help=what, description=what, allow_abbrev=False)
        made.set_defaults(lines=lines)
        if url:
            made.add_argument("url", nargs="?", default=".", metavar="URL", help="where to save (default: here)")
            made.add_argument("--scale", type=positive, default=1.0, metavar="F", help="scale the bytes by F")
            made.add_argument("--rounds", type=count, default=5, metavar="N", help="counted repetitions (default: 5)")
            add_storage(made)
        return made

    made = add("background", "the cost of saving in the background for the training meanwhile", _at_place(_background))
    made.add_argument("--case", type=NameList("case", TRAINED), default=tuple(TRAINED), metavar="LIST")
    made.add_argument("--peers", type=NameList("peer", PEERS), default=PEERS, metavar="LIST")
    made.add_argument("--device", type=device_name, default="cpu", metavar="DEVICE", help="where the model is trained")
    made.add_argument("--trace", metavar="FILE", help="a timeline of this library, to open at ui.perfetto.dev")
    made.add_argument("--figure", metavar="FILE.svg", help="draw the time of each training step")
    for name, (what, compare) in WITH_RANKS.items():
        add(name, what, _at_place(_call(compare, "scale", "rounds", "world"))).add_argument(
            "--world", type=_several, default=2, metavar="N"
        )
    add(
        "planning",
        "the cost of planning with up to thousands of simulated ranks",
        lambda given: planning_scale.simulate(given.worlds),
        url=False,
    ).add_argument("--worlds", type=_worlds, default=planning_scale.WORLDS, metavar="LIST")
    made = add(
        "scale",
        "growth with tensors and with ranks, and a model of large jobs",
        _at_place(_call(scale.compare, "tensors", "worlds")),
    )
    made.add_argument("--tensors", type=_counts, default=scale.SIZES, metavar="LIST")
    made.add_argument("--worlds", type=_worlds, default=scale.WORLDS, metavar="LIST")
    add("store", "S3's clients alone and this library over them, on loopback or at an s3:// URL", _store)
    for name, (what, compare_at) in AT_A_PLACE.items():
        add(name, what, _at_place(_call(compare_at, "scale", "rounds")))
    return parser


def _at_place(lines: Callable[[Workspace, argparse.Namespace], Lines]) -> Callable[[argparse.Namespace], Lines]:
    """Return a benchmark in a new place, with the machine's description above its lines."""

    def run(arguments: argparse.Namespace) -> Lines:
        with place(arguments.url) as where:
            yield header(describe(where), arguments.scale, arguments.rounds)
            yield from lines(where, arguments)

    return run


def _call(compare: Callable[..., Lines], *names: str) -> Callable[[Workspace, argparse.Namespace], Lines]:
    """Return a benchmark that receives these arguments of the command."""
    return lambda where, arguments: compare(where, *(getattr(arguments, name) for name in names))


def _background(where: Workspace, arguments: argparse.Namespace) -> Lines:
    trace, figure = (Path(name).absolute() if name else None for name in (arguments.trace, arguments.figure))
    chosen, left_out = background.systems(arguments.peers, where.local)
    yield from (f"left out: {line}" for line in left_out)
    run = background.Run(where, arguments.scale, arguments.rounds, chosen, trace, arguments.device)
    yield from background.compare(run, arguments.case, figure)


def _store(arguments: argparse.Namespace) -> Lines:
    url = None if arguments.url == "." else arguments.url
    return object_store.compare(url, options_of(arguments), arguments.scale, arguments.rounds)


def _several(text: str) -> int:
    value = int(text)
    if value < 2:
        raise argparse.ArgumentTypeError(f"{text} is not above 1")
    return value


def _counts(text: str) -> tuple[int, ...]:
    return tuple(map(count, text.split(",")))


def _worlds(text: str) -> tuple[int, ...]:
    return tuple(map(_several, text.split(",")))


if __name__ == "__main__":
    sys.exit(main())
