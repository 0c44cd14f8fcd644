"""Costs of each test, and the list of the tests that are too slow for the fast tier: tests/slow.txt.

    SNAPSHOT_TEST_COSTS=FILE python -m pytest -p tests.costs      adds a line to FILE for each test
    python -m tests.costs FILE...                                 writes tests/slow.txt

The cost of a test is its CPU time, with that of all processes below this one, or a quarter of its time by the clock if
that is more: other tests run while it waits. If it was measured several times, the least cost counts. A test is too
slow if it costs more than `MOST` seconds. If all cases of a function are too slow, the cheapest one stays if it costs
less than `CASE`. So a run still meets most functions.
"""

import json
import os
import sys
import time
from collections import defaultdict
from pathlib import Path

import pytest

MOST, CASE = 0.1, 0.3
WAITING = 0.25
"""Cost of a second of waiting."""
LIST = Path(__file__).with_name("slow.txt")


def _cpu_seconds():
    """Return the CPU time that this process and all below it have used, with children that have ended."""
    found, children = {}, defaultdict(list)
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:  # it has ended
            continue
        found[pid := int(path.parent.name)] = sum(map(int, fields[11:15]))
        children[int(fields[1])].append(pid)
    pending, ticks = [os.getpid()], 0
    while pending:
        pid = pending.pop()
        ticks += found.get(pid, 0)
        pending += children[pid]
    return ticks / os.sysconf("SC_CLK_TCK")


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_protocol(item):
    """Add the cost of a test to the file."""
    before, began = _cpu_seconds(), time.monotonic()
    yield
    used, waited = _cpu_seconds() - before, time.monotonic() - began
    with open(os.environ["SNAPSHOT_TEST_COSTS"], "a") as file:
        file.write(json.dumps([item.nodeid, round(max(used, waited * WAITING), 4)]) + "\n")


def read_costs(files):
    """Return the least cost of each test below this folder, by its name."""
    found = {}
    for line in (line for file in files for line in Path(file).read_text().splitlines()):
        name, cost = json.loads(line)
        if name.startswith("tests/"):
            name = name.removeprefix("tests/")
            found[name] = min(cost, found.get(name, cost))
    return found


def choose_slow(costs):
    """Return the names of functions, or of some of their cases, that are too slow.

    >>> sorted(choose_slow({"a::f": 1, "a::g[1]": 0.2, "a::g[2]": 0.3, "a::h[1]": 0.1, "a::h[2]": 1, "a::i": 0.1}))
    ['a::f', 'a::g[2]', 'a::h[2]']
    """
    cases = defaultdict(dict)
    for name, cost in costs.items():
        cases[name.partition("[")[0]][name] = cost
    slow = set()
    for function, each in cases.items():
        kept = {name for name, cost in each.items() if cost <= MOST}
        cheapest = min(each, key=each.get)
        if not kept and len(each) > 1 and each[cheapest] <= CASE:
            kept = {cheapest}
        slow |= each.keys() - kept if kept else {function}
    return slow


def main(files):
    """Write the list. Tests that were not measured, such as those in it, keep their lines."""
    lines = LIST.read_text().splitlines()
    head = [line for line in lines if not line or line[0] == "#"]
    costs = read_costs(files)
    before = {line for line in lines if line and line[0] != "#" and line not in costs}
    slow = before | choose_slow(costs)
    LIST.write_text("\n".join([*head, *sorted(slow)]) + "\n")
    print(f"{len(slow)} names; {sum(costs.values()):.0f} s of {len(costs)} tests were measured")


if __name__ == "__main__":
    main(sys.argv[1:])
