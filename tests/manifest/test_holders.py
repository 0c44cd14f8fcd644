"""The ranks that may have written a box, by a mesh and placements that anyone may have written."""

import pytest

from snapshot.manifest.entries import DTensorEntry, Mesh
from snapshot.tensors.geometry import Box

BOX = Box((3, 0), (4, 5))


def holders(mesh, placements, shape=(12, 5)):
    return DTensorEntry("float32", shape, [], mesh, placements).find_holders(BOX)


@pytest.mark.parametrize(
    ("mesh", "placements", "expected"),
    [
        (Mesh(0, (4,), (1,)), ["S(0)"], {1, 2}),
        (Mesh(10, (4,), (2,)), ["S(0)"], {12, 14}),
        ([7, 5, 3, 1], ["S(0)"], {5, 3}),
        (Mesh(0, (2, 4), (4, 1)), ["R", "S(0)"], {1, 2, 5, 6}),
        ([[0, 1], [2, 3]], ["S(0)", "S(0)"], {1, 2}),
        (Mesh(0, (2, 2), (2, 1)), ["_S(0,2)", "S(0)"], {1, 2}),
        (Mesh(0, (100_000,), (1,)), ["S(0)"], {3, 4, 5, 6}),
    ],
)
def test_holders_of_a_box(mesh, placements, expected):
    assert holders(mesh, placements) >= expected
    assert len(holders(mesh, placements)) <= 4


@pytest.mark.parametrize(
    "mesh",
    [
        None, [], [[]], [[0, 1], [2]], ["0", "1"], [0.5, 1.5], [None, None], [[0, [1]], 2], {"begin": 0}, 7, True,
        Mesh(0, (), ()), Mesh(0, (0,), (1,)), Mesh(0, (-4,), (1,)), Mesh(0, (-2, -2), (1, 1)),
        Mesh(0, (1 << 62,), (1,)), Mesh(0, (1 << 40, 1 << 40), (1, 1)),
    ],
)  # fmt: skip
def test_holders_of_an_invalid_mesh_are_unknown(mesh):
    for placements in (["S(0)"], ["R"], ["S(0)", "R"]):
        assert holders(mesh, placements) == set()


@pytest.mark.parametrize(
    "placements",
    [
        None, [], ["?"], ["S(9)"], ["S(-1)"], ["S(0)", "S(1)"], ["P"], ["_S(0,0)"], ["_S(0,9999999999)"], ["S(0"],
        ["s(0)"], ["S(999)"],
    ],
)  # fmt: skip
def test_holders_of_invalid_placements_are_unknown(placements):
    assert holders(Mesh(0, (4,), (1,)), placements) == set()


def test_holders_of_a_mesh_with_wrong_steps_are_only_a_wrong_hint():
    assert holders(Mesh(0, (4,), (0,)), ["S(0)"]) == {0}
    assert holders(Mesh(-5, (4,), (-7,)), ["S(0)"]) == {-12, -19}
    assert holders(Mesh(0, (4,), ()), ["S(0)"]) == {0}
