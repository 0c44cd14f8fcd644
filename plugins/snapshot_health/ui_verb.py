"""`snapshot ui`: the steps of a run in a browser."""

from __future__ import annotations

import argparse

from snapshot.cli.arguments import add_storage, options_of
from snapshot.cli.locate import list_names, suggest
from snapshot.cli.screen import ExitStatus, mute_torch_warnings
from snapshot.io.url import URL
from snapshot.manifest.document import METADATA

DESCRIPTION = (
    "Show the steps of a run in a browser: metrics, sizes, where each step is, differences between two steps, "
    "norms and NaN counts of tensors. The page is served on 127.0.0.1 only, until Ctrl-C, and needs the token in "
    "the printed address. Nothing is written."
)
EXAMPLES = [
    ("ui run", "print the address of the page, and serve it"),
    ("ui s3://bucket/run --near /nvme/run", "with the near steps of this host"),
    ("ui run --port 8000", "at a fixed port, for example for ssh -L 8000:127.0.0.1:8000"),
]


def add(parser: argparse.ArgumentParser) -> None:
    """Add the verb's arguments."""
    parser.add_argument("url", metavar="ROOT", help="a folder of steps, as SnapshotManager writes them")
    parser.add_argument("--near", metavar="FOLDER", help="the near folder of this host: show where each step is")
    parser.add_argument("--port", type=_port, default=0, metavar="N", help="the port (default: any free one)")
    add_storage(parser)


def _port(text: str) -> int:
    if not text.isascii() or not text.isdecimal() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"invalid port {text!r} (expected 0 to 65535)")
    return int(text)


def run(arguments: argparse.Namespace) -> ExitStatus:
    """Serve the page until a signal."""
    from snapshot_health.page_server import PageServer, RunView  # with torch, which the help does not need

    url = URL.parse(arguments.url)
    options = suggest(url, options_of(arguments))
    view = RunView(arguments.url, arguments.near, options)
    view.steps(1)  # an error here is the command's own
    if METADATA in list_names(url, options):
        raise ValueError(f"{url}: is a snapshot; name the folder of its run")
    with mute_torch_warnings(), PageServer(view, arguments.port) as server:
        print(server.address, flush=True)
        server.serve()
    return ExitStatus.OK
