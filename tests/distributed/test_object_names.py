"""Objects of several ranks by their names, with a rank and without."""

import pytest
import torch
import torch.distributed as dist

from snapshot import RestoreError, Sharded, Snapshot, StateDict
from snapshot.cli import main


def _take(path):
    rank = dist.get_rank()
    half = Sharded(torch.full((2,), float(rank)), (4,), (2 * rank,))
    state = StateDict(same=torch.ones(3), own=torch.full((3,), float(rank)), cut=half)
    if rank == 1:
        state["alone"] = torch.arange(2.0)
    both = StateDict(a=torch.zeros(2), b=1)
    Snapshot.take(path, {"s": state, "both": both}, replicated=["s/same", "both/**"])


@pytest.fixture
def taken(two, folder):
    two.run(_take, f"{folder}/s")
    return Snapshot(f"{folder}/s")


def test_read_object_needs_no_rank_for_an_unambiguous_name(taken):
    for prefix in ("", "0/", "1/"):
        assert taken.read_object(f"{prefix}s/same").equal(torch.ones(3))
        assert taken.read_object(f"{prefix}s/cut").equal(torch.tensor([0.0, 0.0, 1.0, 1.0]))
        assert taken.read_object(f"{prefix}both")["a"].equal(torch.zeros(2))
    assert taken.read_object("s/alone").equal(torch.arange(2.0))


def test_read_object_needs_a_rank_for_a_rank_specific_name(taken):
    assert [float(taken.read_object(f"{rank}/s/own")[0]) for rank in (0, 1)] == [0, 1]
    for name in ("s/own", "s"):
        with pytest.raises(RestoreError, match=f"'{name}' needs a rank") as caught:
            taken.read_object(name)
        assert list(caught.value.mismatches) == [f"0/{name}", f"1/{name}"]
        assert f"name one of '0/{name}', '1/{name}'" in str(caught.value)
    with pytest.raises(RestoreError, match="'s/onw' not found; did you mean 's/own'"):
        taken.read_object("s/onw")
    with pytest.raises(RestoreError, match="'0/s/alone' not found"):
        taken.read_object("0/s/alone")


def test_cli_show_and_ls_print_names_that_read_object_accepts(taken, capsys):
    assert main(["ls", taken.path, "--flat"]) == 0
    names = [line.split()[0] for line in capsys.readouterr().out.splitlines()[1:]]
    assert {"s/same", "s/cut", "s/alone", "0/s/own", "1/s/own", "both/a"} <= set(names)
    assert len(names) == len(set(names))
    for name in names:
        taken.read_object(name)
        assert main(["show", taken.path, name]) == 0
    capsys.readouterr()
    assert main(["show", taken.path, "s/own"]) == 2
    assert "name one of '0/s/own', '1/s/own'" in capsys.readouterr().err
    assert main(["show", taken.path, "s/own", "--rank", "1"]) == 0
    assert capsys.readouterr().out.splitlines()[0] == "1/s/own"
    assert main(["ls", taken.path]) == 0
    assert "{0..1}/s/own" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("glob", "names"), [("1/s/*", {"s/same", "s/cut", "s/alone", "1/s/own"}), ("s/own", {"0/s/own", "1/s/own"})]
)
def test_cli_ls_glob_with_a_rank_selects_the_names_of_that_rank(taken, capsys, glob, names):
    assert main(["ls", taken.path, "--flat", glob]) == 0
    assert {line.split()[0] for line in capsys.readouterr().out.splitlines()[1:]} == names
