"""CPU time of each test, and the list of the tests that are too slow for the fast tier: tests/slow.txt.

    SNAPSHOT_TEST_COSTS=FILE python -m pytest -p tests.costs      adds a line to FILE for each test
    python -m tests.costs FILE...                                 writes tests/slow.txt

A test is too slow if it takes more than `MOST` seconds of CPU time, with its child processes: the least time, if it was
measured several times. If all cases of a function are too slow, the cheapest one stays if it takes less than `CASE`.
So a run still meets most functions. Wall times say little: they depend on other work.
"""

import json
import os
import resource
import sys
from collections import defaultdict
from pathlib import Path

import pytest

MOST, CASE = 0.15, 0.4
LIST = Path(__file__).with_name("slow.txt")


def _cpu_seconds():
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_protocol(item):
    """Add the CPU seconds of a test to the file."""
    before = _cpu_seconds()
    yield
    with open(os.environ["SNAPSHOT_TEST_COSTS"], "a") as file:
        file.write(json.dumps([item.nodeid, round(_cpu_seconds() - before, 4)]) + "\n")


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
