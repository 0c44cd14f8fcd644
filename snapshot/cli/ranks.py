"""`--ranks`: the processes that torchrun started share the work of one command.

Without `--ranks`, a command works alone, even in the environment of a job. So a command in a trainer's script never
waits for other ranks.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout, suppress
from datetime import timedelta
from functools import wraps
from typing import Any, TextIO, cast

from snapshot.cli.arguments import Run
from snapshot.cli.screen import ExitStatus, complain
from snapshot.distributed.exchange import call_of
from snapshot.distributed.group import ranks_of
from snapshot.errors import SnapshotError
from snapshot.io.url import URL
from snapshot.settings import Settings

NEEDED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
LAST_WORDS = 10.0
"""Seconds that a rank waits at its end for the others: torchrun stops all ranks as soon as one has failed."""


def on_ranks(run: Run) -> Run:
    """Return a verb's function that joins the job's process group if `--ranks` is given.

    Only rank 0 prints the report. All ranks print their errors, and end together.
    """

    @wraps(run)
    def run_together(arguments: argparse.Namespace) -> int:
        if not arguments.ranks:
            return run(arguments)
        if arguments.memory is not None:
            arguments.memory = max(1, arguments.memory // Settings.processes())
        with _output_of_python() as stdout, _process_group() as rank:
            output = _Output(stdout)
            try:
                with open(os.devnull, "w") as nothing, redirect_stdout(nothing if rank else cast("TextIO", output)):
                    try:
                        status = run(arguments)
                    finally:
                        output.flush()
            except (SnapshotError, OSError, ValueError) as error:
                complain("error" if rank == 0 else f"rank {rank}: error", error)
                status = ExitStatus.FAILED
            ranks_of(None).end_together(LAST_WORDS)
        if output.broken is not None:
            raise output.broken
        return status

    return run_together


class _Output:
    """Rank 0's standard output. If its reader closes it, the command continues with the other ranks."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.broken: BrokenPipeError | None = None

    def write(self, text: str) -> int:
        """Write text, unless the output is closed."""
        if self.broken is None:
            try:
                self._stream.write(text)
            except BrokenPipeError as error:
                self.broken = error
        return len(text)

    def flush(self) -> None:
        """Flush the output, unless it is closed."""
        if self.broken is None:
            try:
                self._stream.flush()
            except BrokenPipeError as error:
                self.broken = error

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def _output_of_python() -> Iterator[TextIO]:
    """Yield the standard output. Meanwhile it is standard error to native code: gloo of torch 2.8 prints lines."""
    try:
        number, errors = sys.stdout.fileno(), sys.stderr.fileno()
    except (AttributeError, OSError, ValueError):  # a caller in this process captures them, or one is closed
        yield sys.stdout
        return
    sys.stdout.flush()
    kept = os.dup(number)
    try:
        os.dup2(errors, number)
        with open(kept, "w", encoding=sys.stdout.encoding, errors=sys.stdout.errors, closefd=False) as stdout:
            try:
                yield stdout
            finally:
                with suppress(BrokenPipeError):
                    stdout.close()
    finally:
        os.dup2(kept, number)
        os.close(kept)


def expect_same_urls(urls: Sequence[str]) -> None:
    """Raise unless all ranks work at the same URLs: one that had more of them would wait for the others."""
    from snapshot.transform.call import open_sources

    with call_of("verify", None, ranks=True) as exchange:
        open_sources(exchange, "verify", {"urls": [URL.parse(url) for url in urls]}, [])


@contextmanager
def _process_group() -> Iterator[int]:
    """Join the process group of the environment, and leave it at the end. Yield this rank's number."""
    import torch.distributed as dist

    missing = [name for name in NEEDED if not os.environ.get(name)]
    if missing:
        raise ValueError(
            f"--ranks needs {', '.join(missing)} in the environment; start the command with `torchrun "
            "--nproc-per-node=N -m snapshot ...`"
        )
    timeout = timedelta(seconds=Settings.current().timeout)
    try:
        dist.init_process_group("gloo", timeout=timeout)
    except (RuntimeError, ValueError) as error:
        raise SnapshotError(f"--ranks: cannot join the process group: {error}") from error
    try:
        yield dist.get_rank()
    finally:
        dist.destroy_process_group()
