"""`snapshot merge`: average checkpoints, or add them with weights."""

from __future__ import annotations

import argparse

from snapshot.cli.arguments import add_selection, add_storage, options_of, selection_of, work_of
from snapshot.cli.convert import add_map, add_output, float_dtype, map_of, target_of
from snapshot.cli.locate import explain_missing
from snapshot.cli.ranks import on_ranks
from snapshot.cli.screen import ExitStatus, bar, emit_report
from snapshot.errors import SnapshotNotFoundError
from snapshot.io.url import URL
from snapshot_merge.options import OTHERS, MergeOptions

DESCRIPTION = (
    "Write the average, a weighted sum, or an exponential moving average of checkpoints. They may have different "
    "formats, storages and splits, but need tensors of the same names and shapes. They are read and written part "
    "by part, added in float32 and verified. Values that are not tensors are those of the first source."
)
EXAMPLES = [
    ("merge run/step-100 run/step-200 run/step-300 -o soup", "the average"),
    ("merge a.safetensors b.safetensors -o c.safetensors --weights 0.7,0.3", "a weighted sum"),
    ("merge base-model --lora adapter -o merged", "a LoRA of PEFT into the weights of its base model"),
    (
        "merge base-4bit --lora adapter -o merged --map quantised-hf --map-config base-4bit",
        "the same, with the base's quantised weights computed first",
    ),
    ("merge run/step-* -o ema.safetensors --ema 0.999 --select 'model/**'", "a moving average, oldest first"),
]


def add(parser: argparse.ArgumentParser) -> None:
    """Add the verb's arguments."""
    parser.add_argument(
        "sources", nargs="+", metavar="SOURCE", help="anything that Snapshot(path) opens; at least 2, or 1 with --lora"
    )
    parser.add_argument(
        "-o",
        "--output",
        required=True,
        metavar="OUT",
        help="a folder; a file for torch, and for safetensors with that suffix",
    )
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--average", action="store_true", help="the sum, divided by the number of sources (default)")
    how.add_argument("--weights", type=_numbers, metavar="LIST", help="a factor for each source: 0.5,0.3,0.2")
    how.add_argument("--ema", type=float, metavar="DECAY", help="a moving average over the sources in order of time")
    how.add_argument("--lora", metavar="ADAPTER", help="one source, to which the LoRA in a folder of PEFT is added")
    add_map(parser)
    parser.add_argument(
        "--others",
        choices=OTHERS,
        default=OTHERS[0],
        help="integer, bool, sparse and quantised tensors must be equal in all sources (default), or are those of the "
        "first one",
    )
    add_selection(parser)
    parser.add_argument("--dtype", type=float_dtype, help="dtype of floating point tensors, if not the first source's")
    add_output(parser)
    add_storage(parser, "src", "dst", short=False)


@on_ranks
def run(arguments: argparse.Namespace) -> ExitStatus:
    """Merge, and print the report."""
    from snapshot.snapshot import Snapshot  # these need torch, and the help does not
    from snapshot_merge.lora import merge_lora
    from snapshot_merge.merging import merge

    if arguments.lora is not None and (len(arguments.sources) != 1 or arguments.others != OTHERS[0]):
        raise ValueError("--lora must be used with one source, and without --others")
    if arguments.lora is None and arguments.map is not None:
        raise ValueError("--map must be used with --lora")
    options = options_of(arguments, "src")
    pickles = arguments.allow_pickle
    try:
        opened = [Snapshot(each, storage_options=options, allow_pickle=pickles) for each in arguments.sources]
        lora = arguments.lora and Snapshot(arguments.lora, storage_options=options, allow_pickle=pickles)
        target = target_of(arguments, arguments.output)
        with bar("merge", ranks=arguments.ranks) as show:
            how = MergeOptions(dtype=arguments.dtype, verify=arguments.verify, progress=show, **work_of(arguments))
            shared = {**selection_of(arguments), "options": how}
            if lora is not None:
                report = merge_lora(opened[0], lora, target, map=map_of(arguments), **shared)
            else:
                mix = {"weights": arguments.weights, "ema": arguments.ema, "others": arguments.others}
                report = merge(opened, target, **mix, **shared)
    except SnapshotNotFoundError as error:
        given = [*arguments.sources, *([arguments.lora] if arguments.lora else [])]
        missing = (source for source in given if str(error).startswith(f"{URL.parse(source)}:"))
        with explain_missing(next(missing, arguments.sources[0]), options):
            raise
    emit_report(arguments, arguments.output, report)
    return ExitStatus.OK


def _numbers(text: str) -> list[float]:
    try:
        return [float(each) for each in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be numbers such as 0.5,0.3,0.2, got {text!r}") from None
