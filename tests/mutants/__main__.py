"""Which faults the tests find: `python -m tests.mutants`, from a checkout.

    python -m tests.mutants reach FOLDER                     runs the fast tier, and notes which tests reach each line
    python -m tests.mutants reach FOLDER -m "not nightly"    the same for the tests of `.ci/run`
    python -m tests.mutants draw FOLDER --count 200 --seed 1

`draw` changes the code at random places, one at a time, in copies of the tree. It runs the tests that reach the line,
those of the same package and the quickest first, until one fails. A mutant of what a module does when it is imported
meets the tests that reach any line of the module. `draw` prints the mutants that no test found, by file and line. A
line that no test reaches counts, too. Code for accelerators is left out (`LEFT_OUT`), and so are mutants that are
listed in equivalent.txt with the reason why they change nothing. On two idle cores, 200 mutants take half an hour.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import json
import math
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Lock

from tests.mutants.drawing import Mutant, draw_mutants

ROOT = Path(__file__).parents[2]
LEFT_OUT = re.compile(
    r"snapshot/(tensors/device|save/device_copies|io/arena|interop/|cli/|testing/|formats/)"
    r"|plugins/snapshot_(bench|worker|trainers|deepspeed|megatron|orbax|gguf|quantised|torch_checkpointing)/"
    r"|plugins/snapshot_publish/(vllm|verl|weight_sync)|plugins/snapshot_health/otel|plugins/.*_verb"
)
"""Modules that are not changed: they need a GPU, a framework, or a person who looks."""
MOST_COST, MOST_SECONDS = 60, 240
"""The most seconds that the tests of a mutant take without it, and that they may take with it."""
EQUIVALENT = Path(__file__).with_name("equivalent.txt")
STATUSES = (1, 2, 4)
"""Statuses of pytest with which a mutant is found: failed tests, or modules that cannot be imported."""
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
FAST = "fast"
"""File in a folder of `reach` that says that its tests are those of the fast tier."""
FOUND, MISSED, SLOW = "found", "not found", "not found in time"


def modules() -> list[str]:
    """Return the modules that are changed."""
    shown = subprocess.run(
        ["git", "ls-files", "snapshot/*.py", "plugins/*.py"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split()
    return sorted(each for each in shown if not LEFT_OUT.match(each))


def reach(folder: Path, marks: str | None) -> int:
    """Run a tier with the plugin that notes lines."""
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.mutants.reach"]
    command += ["-m", marks, "tests", "snapshot", "plugins"] if marks is not None else []
    (folder / FAST).touch() if marks is None else (folder / FAST).unlink(missing_ok=True)
    environment = {**os.environ, "SNAPSHOT_TEST_REACH": str(folder.resolve())}
    return subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode


def read_reach(folder: Path) -> tuple[dict[str, float], dict[tuple[str, int], list[str]]]:
    """Return the seconds of each test, and the tests that reach each line."""
    seconds: dict[str, float] = {}
    reached: dict[tuple[str, int], list[str]] = defaultdict(list)
    for file in sorted(folder.glob("*.json")):
        times, found = json.loads(file.read_text())
        seconds |= times
        for path, tests in found.items():
            for test, lines in tests.items():
                for line in lines:
                    reached[path, line].append(test)
    return seconds, reached


class Trees:
    """Copies of the checkout, one for each worker."""

    def __init__(self, folder: Path, environment: dict[str, str]) -> None:
        self._folder = folder
        self.environment = environment
        self._free: list[Path] = []
        self._lock = Lock()

    @contextlib.contextmanager
    def with_change(self, mutant: Mutant | None) -> Iterator[Path]:
        """Lend a copy with a mutant, or one without a change if it is None."""
        tree = self._take()
        try:
            if mutant is None:
                yield tree
                return
            path = tree / mutant.path
            source = path.read_text()
            path.write_text(mutant.apply(source))
            try:
                yield tree
            finally:
                path.write_text(source)
        finally:
            with self._lock:
                self._free.append(tree)

    def _take(self) -> Path:
        with self._lock:
            if self._free:
                return self._free.pop()
            made = Path(tempfile.mkdtemp(dir=self._folder)) / "tree"
        subprocess.run(["git", "clone", "-q", str(ROOT), str(made)], check=True)
        return made


def is_in_function(path: str, line: int) -> bool:
    """Return True if a line runs when a function is called, and not when the module is imported."""
    functions = [each for each in ast.walk(ast.parse((ROOT / path).read_text())) if isinstance(each, FUNCTIONS)]
    return any(each.body[0].lineno <= line <= (each.end_lineno or 0) for each in functions)


def choose_tests(mutant: Mutant, seconds: dict[str, float], reached: dict[tuple[str, int], list[str]]) -> list[str]:
    """Return the tests that a mutant meets, in their order."""
    if is_in_function(mutant.path, mutant.line):
        tests = set(reached.get((mutant.path, mutant.line), ()))
    else:
        tests = {test for (path, _), tests in reached.items() if path == mutant.path for test in tests}
    package = "tests/storage/" if mutant.path.startswith("plugins/") else f"tests/{Path(mutant.path).parent.name}/"
    chosen, total = [], 0.0
    for test in sorted(tests, key=lambda each: (not each.startswith(package), seconds.get(each, 0.0), each)):
        total += seconds.get(test, 0.0)
        if chosen and total > MOST_COST:
            break
        chosen.append(test)
    return chosen


def judge(mutant: Mutant, tests: Sequence[str], trees: Trees) -> str:
    """Run tests against a mutant, and say whether one of them finds it. A time-out finds nothing.

    A test that fails without the mutant, too, finds nothing: the others are asked then.
    """
    tests = list(tests)
    while tests:
        verdict, failed = run_tests(mutant, tests, trees)
        if verdict != FOUND or not failed or run_tests(None, [failed], trees)[0] == MISSED:
            return verdict
        tests.remove(failed)
    return MISSED


def run_tests(mutant: Mutant | None, tests: Sequence[str], trees: Trees) -> tuple[str, str]:
    """Run tests until one fails. Return what became of them, and the one that failed."""
    with trees.with_change(mutant) as tree:
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-n", "0", "-p", "no:cacheprovider", "-o", "timeout=100"]
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(tree), str(tree / "plugins")]),
            **trees.environment,
        }
        (tree.parent / "tests").write_text("\n".join(tests))  # they may be too many for a command
        command += [f"@{tree.parent / 'tests'}"]
        try:
            ended = subprocess.run(
                command,
                cwd=tree,
                env=environment,
                capture_output=True,
                text=True,
                timeout=MOST_SECONDS,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return SLOW, ""
    if "ERROR: not found" in ended.stdout + ended.stderr:
        raise RuntimeError(f"tests of {mutant} were not found: {ended.stderr[-2000:]}")
    if ended.returncode == 0:
        return MISSED, ""
    if ended.returncode < 0 and mutant is not None:  # the change crashed the interpreter
        return FOUND, ""
    if ended.returncode not in STATUSES:
        raise RuntimeError(f"pytest ended with {ended.returncode} for {mutant}: {ended.stdout[-2000:]}")
    failed = re.search(r"^(?:FAILED|ERROR) (tests/.*?::.*?)(?: - |$)", ended.stdout, re.MULTILINE)
    late = "Failed: Timeout" in ended.stdout
    return (SLOW if late else FOUND), (failed[1] if failed and failed[1] in tests else "")


def interval(found: int, count: int) -> tuple[float, float]:
    """Return Wilson's 95 % interval of a share.

    >>> [round(each, 2) for each in interval(160, 200)]
    [0.74, 0.85]
    """
    if not count:
        return 0.0, 1.0
    z, share = 1.96, found / count
    middle = (share + z * z / (2 * count)) / (1 + z * z / count)
    half = z * math.sqrt(share * (1 - share) / count + z * z / (4 * count * count)) / (1 + z * z / count)
    return middle - half, middle + half


def draw(folder: Path, count: int, seed: int, workers: int) -> int:
    """Judge random mutants, and print those that were not found."""
    changed = subprocess.run(["git", "status", "--porcelain"], cwd=ROOT, capture_output=True, text=True, check=True)
    if changed.stdout:
        raise SystemExit(
            f"the checkout must have no changes, since copies of its commit are run, got:\n{changed.stdout}"
        )
    seconds, reached = read_reach(folder)
    equivalent = {line.partition("  ")[0] for line in EQUIVALENT.read_text().splitlines() if line and line[0] != "#"}
    drawn = [each for each in draw_mutants(ROOT, modules(), count, seed) if str(each) not in equivalent]
    tally: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as scratch, ThreadPoolExecutor(workers) as pool:
        # as many examples of random searches as in the tier
        trees = Trees(Path(scratch), {"SNAPSHOT_TEST_FEW": "1"} if (folder / FAST).exists() else {})

        def one(mutant: Mutant) -> tuple[Mutant, str, int]:
            tests = choose_tests(mutant, seconds, reached)
            return mutant, judge(mutant, tests, trees), len(tests)

        for mutant, verdict, met in pool.map(one, drawn):
            tally[verdict] += 1
            if verdict != FOUND:
                print(f"{mutant}  ({verdict}, {met} tests)", flush=True)
    low, high = interval(tally[FOUND], sum(tally.values()))
    print(f"{tally[FOUND]} of {sum(tally.values())} found: 95 % interval {low:.0%} to {high:.0%}; {dict(tally)}")
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description="Which faults the tests find.")
    verbs = parser.add_subparsers(dest="verb", required=True)
    for verb in ("reach", "draw"):
        verbs.add_parser(verb).add_argument("folder", type=Path, help="folder with what `reach` has noted")
    verbs.choices["reach"].add_argument("-m", dest="marks", help="marks of the tests; by default the fast tier")
    verbs.choices["draw"].add_argument("--count", type=int, default=200)
    verbs.choices["draw"].add_argument("--seed", type=int, required=True)
    verbs.choices["draw"].add_argument("--workers", type=int, default=2)
    given = parser.parse_args(arguments)
    if given.verb == "reach":
        return reach(given.folder, given.marks)
    return draw(given.folder, given.count, given.seed, given.workers)


if __name__ == "__main__":
    sys.exit(main())
