"""Benchmarks that run in forks of the warm interpreter, and commands that cannot run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tests.helpers.trees import PYTHONPATH
from tests.helpers.warm_interpreter import Warm

ROOT = Path(__file__).parents[3]
IN_A_FORK = """
import os, sys
from importlib import import_module

sys.path.insert(0, os.environ["PYTHONPATH"])  # the warm interpreter has begun without it
module, folder, *arguments = sys.argv[1:]
os.chdir(folder)
raise SystemExit(import_module(module).main(arguments))
"""
Begin = Callable[..., tuple[int, str]]
"""Begins a command in a fork: a module with a `main`, and arguments. Return its pid, and the file that it prints to."""


@pytest.fixture
def begin(tmp_path: Path, warm: Warm) -> Begin:
    """Begin a command in the test's folder, from which nothing is imported by chance."""
    return lambda module, *arguments: warm.start(IN_A_FORK, module, tmp_path, *arguments, PYTHONPATH=PYTHONPATH)


@pytest.fixture
def measured(begin: Begin, warm: Warm) -> Callable[..., str]:
    """What a benchmark of a checkout prints."""
    return lambda *arguments: warm.finish(begin("tests.plugins.snapshot_bench.__main__", *arguments))


@pytest.fixture
def refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., None]:
    """Expect that a command has status 2, says why, and leaves nothing."""

    def expect(main: Callable[[Sequence[str]], int], arguments: Sequence[str], reason: str) -> None:
        monkeypatch.chdir(tmp_path)
        try:
            status = main(arguments)
        except SystemExit as stop:  # argparse's
            status = stop.code
        assert status == 2
        assert reason in capsys.readouterr().err
        assert list(tmp_path.iterdir()) == []

    return expect
