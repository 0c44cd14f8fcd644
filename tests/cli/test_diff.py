"""`snapshot diff`: what a person, a script and a program learn from it."""

import json

import pytest
import torch

from snapshot import Snapshot, StateDict
from snapshot.cli import main


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """Two snapshots that differ in one of each kind."""
    root = tmp_path_factory.mktemp("diff")
    state = {"w": torch.arange(6.0).view(2, 3), "same": torch.ones(4), "old": torch.arange(9), "step": 1, "gone": 2}
    Snapshot.take(root / "a", {"m": StateDict(**state)})
    state["new"] = state.pop("old")
    state["w"] = state["w"] + torch.tensor([[0, 0, 3.0], [0, 4, 0]])
    del state["gone"]
    state |= {"step": 2, "evil\x1b[2J": 5}
    Snapshot.take(root / "b", {"m": StateDict(**state)})
    return str(root / "a"), str(root / "b")


def told(capsys, *words, status=1):
    assert main(["diff", *words, "--json"]) == status
    return json.loads(capsys.readouterr().out)


def test_cli_diff_of_equal_snapshots_exits_0(two, capsys):
    found = told(capsys, two[0], two[0], status=0)
    assert (found["same"], found["equal"], found["entries_read"]) == (True, 5, 0)


def test_cli_diff_prints_a_line_per_difference_and_exits_1(two, capsys):
    assert main(["diff", *two]) == 1
    out, err = capsys.readouterr()
    assert out.splitlines() == [
        "+ m/evil\\x1b[2J: int 5",
        "- m/gone: int 2",
        "> m/old -> m/new",
        "~ m/step: int 1 -> int 2",
        "~ m/w: bytes",
        "1 added, 1 removed, 2 changed, 1 renamed, 1 the same; by the manifests alone, no data was read",
    ]
    assert err == ""


def test_cli_diff_json_is_one_object(two, capsys):
    found = told(capsys, *two, "--values")
    assert (found["same"], found["equal"], found["changed"], found["renamed"]) == (False, 1, 2, 1)
    assert found["entries_read"] == 1
    values = next(each for each in found["changes"] if each["path"] == "m/w")["values"]
    assert (values["differing"], values["largest"], values["norm"]) == (2, 4.0, 5.0)


def test_cli_diff_select_and_rename(two, capsys):
    found = told(capsys, *two, "--select", "m/w", "--memory", "1MiB")
    assert [(change["path"], change["what"]) for change in found["changes"]] == [("m/w", ["bytes"])]
    found = told(capsys, *two, "--rename", "m/gone=m/evil\x1b[2J", "--select", "m/evil*")
    assert [(change["path"], change["detail"]) for change in found["changes"]] == [("m/evil\x1b[2J", "int 2 -> int 5")]
    assert main(["diff", *two, "--exclude", "m/[!s]*", "--exclude", "m/step"]) == 0


def test_cli_diff_on_a_terminal_is_coloured_and_limited(terminal, tmp_path):
    for name, value in (("a", 1), ("b", 2)):
        Snapshot.take(
            tmp_path / name, {"m": StateDict({f"k{chr(97 + i // 26)}{chr(97 + i % 26)}": value for i in range(300)})}
        )
    shown = terminal(80, colours=True)
    assert main(["diff", str(tmp_path / "a"), str(tmp_path / "b")]) == 1
    lines = shown.text().splitlines()
    assert lines[0] == "\x1b[33m~ m/kaa: int 1 -> int 2\x1b[0m"
    assert len([line for line in lines if line.startswith("\x1b[33m~")]) == 200
    assert "100 more: show them with --all" in lines[-2]
    whole = terminal(80)
    assert main(["diff", str(tmp_path / "a"), str(tmp_path / "b"), "--all"]) == 1
    assert whole.text().count("int 1 -> int 2") == 300


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["{a}", "{a}x"], "did you mean"),
        (["{root}", "{a}"], "a folder of 2 snapshots: a, b; name one of them"),
        (["{a}", "{b}", "--select", "x/**"], "matches nothing"),
        (["{a}", "{b}", "--rename", "x=y"], "is not in the checkpoint"),
        (["{a}", "{b}", "--rename", "xy"], "must be OLD=NEW"),
        (["{a}"], "required: B"),
    ],
)
def test_cli_diff_exits_2_if_the_inputs_cannot_be_compared(two, capsys, arguments, said):
    root = two[0].removesuffix("/a")
    assert main(["diff", *(each.format(root=root, a=two[0], b=two[1]) for each in arguments)]) == 2
    assert said in capsys.readouterr().err
