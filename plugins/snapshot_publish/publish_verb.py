"""`snapshot publish`: publish a checkpoint as the next version of weights for inference engines."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from snapshot.cli.arguments import (
    add_json,
    add_pickle,
    add_rename,
    add_selection,
    add_storage,
    count,
    options_of,
    selection_of,
)
from snapshot.cli.convert import add_map, map_of
from snapshot.cli.locate import explain_missing
from snapshot.cli.screen import ExitStatus, bar, emit, printable
from snapshot.errors import CorruptSnapshotError, SnapshotNotFoundError
from snapshot.events import log
from snapshot.io.url import URL

DESCRIPTION = (
    "Publish the tensors of a checkpoint as the next version in a folder of versions, from which `snapshot pull` "
    "and inference engines take them. A version is a folder in Hugging Face's layout. With --delta, it holds only "
    "the changes since the version before."
)
EXAMPLES = [
    ("publish run/step-300 s3://bucket/policy --select 'model/**'", "a complete version"),
    ("publish run/step-400 s3://bucket/policy --select 'model/**' --delta /tmp/base", "the changes"),
    ("publish llama/ policy --step 0", "a folder in Hugging Face's layout"),
]


def add(parser: argparse.ArgumentParser) -> None:
    """Add the verb's arguments."""
    parser.add_argument("source", metavar="FROM", help="the checkpoint: anything that Snapshot(path) opens")
    parser.add_argument("url", metavar="URL", help="the folder of the versions")
    parser.add_argument("--step", type=int, help="the training step; by default from a name such as step-300")
    parser.add_argument(
        "--delta", metavar="FOLDER", help="publish a delta; the version before is pulled into this local folder"
    )
    parser.add_argument("--full-every", type=count, default=50, metavar="N", help="limit of a chain (default: 50)")
    parser.add_argument("--keep", type=count, default=2, metavar="N", help="full versions to keep (default: 2)")
    parser.add_argument(
        "--files", metavar="FOLDER", help="the model's config and tokenizer; by default FROM, if it has a config.json"
    )
    add_selection(parser)
    add_rename(parser)
    add_map(parser)
    parser.add_argument("--notify", action="append", default=[], metavar="URL", help="send a JSON message; repeatable")
    add_pickle(parser)
    add_json(parser)
    add_storage(parser, "src", "dst")


def run(arguments: argparse.Namespace) -> ExitStatus:
    """Publish, and print the version."""
    from snapshot.snapshot import Snapshot  # these need torch, and the help does not
    from snapshot.weights import load
    from snapshot_publish.publisher import Publisher, PublishOptions
    from snapshot_publish.store import version_name
    from snapshot_publish.subscriber import Subscriber

    tensor_map = map_of(arguments)
    options, there = options_of(arguments, "src"), options_of(arguments, "dst")
    publisher = Publisher(
        arguments.url,
        full_every=arguments.full_every,
        keep=arguments.keep,
        storage_options=there,
        options=PublishOptions(
            files=arguments.files or _files_beside(arguments.source),
            notify=arguments.notify,
            memory_budget_bytes=1 << 62,  # the process ends after this version
        ),
    )
    step = _step_of(arguments.source) if arguments.step is None else arguments.step
    with explain_missing(arguments.source, options), bar("publish") as show:
        state = load(
            Snapshot(arguments.source, storage_options=options, allow_pickle=arguments.allow_pickle),
            **selection_of(arguments),
            map=tensor_map,
            progress=show,
        )
    if arguments.delta is not None:
        try:
            publisher.resume_from(Subscriber(arguments.url, arguments.delta, storage_options=there).pull())
        except SnapshotNotFoundError:
            pass  # this is the first version
        except CorruptSnapshotError as error:
            log.warning("the version is complete: %s", error)
    found = publisher.publish(step, state).wait()
    folder = str(URL.parse(arguments.url).join(version_name(found.version)))
    kind = "complete" if found.base is None else f"delta of version {found.base}"
    text = f"{folder}: version {found.version}, step {found.step}, {kind}"
    emit(arguments, {"url": folder, **found._asdict()}, [printable(text)])
    return ExitStatus.OK


def _step_of(source: str) -> int:
    found = re.search(r"step-([0-9]{1,18})/?$", source)
    if found is None:
        raise ValueError(f"--step is missing: the name of {printable(source)} does not end with step-N")
    return int(found[1])


def _files_beside(source: str) -> Path | None:
    folder = Path(source)
    return folder if (folder / "config.json").is_file() else None
