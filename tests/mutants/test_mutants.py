"""Mutants: each is a change of one place that is still Python, and the same seed draws the same ones."""

import doctest
from pathlib import Path

import pytest

from tests import costs
from tests.mutants import __main__, drawing

ROOT = Path(__file__).parents[2]
MODULES = ["snapshot/plan/layout.py", "snapshot/text.py"]


@pytest.mark.parametrize("module", [drawing, __main__, costs])
def test_mutants_doctests_pass(module):
    found = doctest.testmod(module)
    assert found.attempted > 0
    assert found.failed == 0


def test_mutants_drawn_change_one_place_and_compile():
    drawn = drawing.draw_mutants(ROOT, MODULES, 40, 7)
    assert len(drawn) == 40
    assert drawn == drawing.draw_mutants(ROOT, MODULES, 40, 7)
    assert len({(each.path, each.begin, each.end) for each in drawn}) == 40
    for each in drawn:
        source = (ROOT / each.path).read_text()
        changed = each.apply(source)
        assert changed != source
        assert drawing.compiles(each, source)
        assert changed.splitlines()[: each.line - 1] == source.splitlines()[: each.line - 1]
