"""`snapshot ls`: what is in a snapshot, and which snapshots are in a folder."""

import copy
import json
import shutil
import subprocess

import pytest
import torch

from snapshot import RNGState, Snapshot, StateDict, TakeOptions
from snapshot.cli import main
from snapshot.cli.listing import ListedItem, folded, heaviest, items
from snapshot.cli.screen import cells
from snapshot.manifest.entries import DTensorEntry, Mesh, NDArrayEntry, Shard, TensorEntry
from snapshot.testing import recording
from tests.helpers.noted import noted
from tests.helpers.versions import newer_adamw


def ls(capsys, *argv):
    assert main(["ls", *map(str, argv)]) == 0
    return capsys.readouterr().out.splitlines()


@newer_adamw
def test_cli_ls_of_a_folder_lists_the_newest_step_first(root, capsys):
    (line,) = ls(capsys, root, "--json")
    found = {each["name"]: each for each in json.loads(line)["snapshots"]}
    assert list(found) == ["model.pt", "step-100", "step-9"]
    assert noted(found["step-100"]["metadata"]) == {"step": 100, "metrics": {"loss": 0.01}}
    assert found["step-9"]["entries"] == 264
    assert found["model.pt"]["format"].startswith("torch.save")


def test_cli_ls_shows_an_unreadable_step_and_exits_1(root, tmp_path, capsys):
    shutil.copytree(root / "step-9", tmp_path / "step-9")
    shutil.copytree(root / "step-9", tmp_path / "step-10")
    manifest = tmp_path / "step-10" / ".snapshot_metadata"
    manifest.write_bytes(manifest.read_bytes()[:-30])
    assert main(["ls", str(tmp_path)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert "cannot be read" in lines[1]
    assert lines[2].startswith("step-9 ")


def test_cli_ls_escapes_names_and_shows_empty_containers(root, capsys):
    lines = ls(capsys, root / "step-100")
    assert "\x1b" not in "".join(lines)
    assert any("a\\x1b[2Jb" in line for line in lines)
    assert any(line.split() == ["progress/nothing", "dict", "empty"] for line in lines)


def test_cli_ls_flat_prints_a_line_per_object_with_its_full_name(root, capsys):
    lines = ls(capsys, root / "step-100", "--flat")
    names = [line.split()[0] for line in lines[1:]]
    assert len(names) == len(set(names))
    assert {"model/0.weight", "progress/losses/0", "progress/step", "progress/nothing"} <= set(names)
    assert "model" not in names


def test_cli_ls_sizes_add_up_and_count_shared_bytes_once(root, capsys):
    (line,) = ls(capsys, root / "step-100", "--json")
    told = json.loads(line)
    found = {each["path"]: each for each in told["items"]}
    assert found["model/13.weight"]["bytes"] == 0
    assert found["model/0.weight"]["bytes"] == 50 * 8 * 4
    assert told["bytes"] == sum(each["bytes"] for each in found.values())
    assert told["keys"]["model"]["bytes"] == 4 * (50 * 8 + 12 * (8 * 8 + 8 + 8 + 8))
    assert found["progress/losses/1"]["value"] == "0.5"


def test_cli_ls_globs_select_names_and_an_unmatched_glob_is_an_error(root, capsys):
    lines = ls(capsys, root / "step-100", "--flat", "progress/*", "model/0.*")
    assert {line.split()[0].partition("/")[0] for line in lines[1:]} == {"progress", "model"}
    assert main(["ls", str(root / "step-100"), "modell/**"]) == 2
    assert "'modell/**' matches nothing" in capsys.readouterr().err


def test_cli_ls_du_prints_the_largest_first(root, capsys):
    lines = ls(capsys, root / "step-100", "--du", "--depth", "1")[3:]
    assert [line.split()[-1] for line in lines] == ["optimizer/", "model/", "progress/"]
    shares = [float(line.split()[2].rstrip("%")) for line in lines]
    assert sum(shares) == pytest.approx(100, abs=0.3)
    assert shares == sorted(shares, reverse=True)


TREE = r"""
name       kind   dtype  shape  size  value
progress/                        0 B  6 entries
  step     int                        100
  losses/                        0 B  2 entries
    0      float                      1.0
    1      float                      0.5
  nothing  dict                       empty
  name     str                        'a\x1b[2Jb'
  data     bytes                      b'\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x...
"""


def test_cli_ls_tree_shows_containers_above_their_items(root, capsys):
    assert ls(capsys, root / "step-100", "--tree", "progress/**")[2:] == TREE.splitlines()[1:]


def test_cli_ls_lists_checkpoints_of_other_formats(root, capsys):
    lines = ls(capsys, root / "model.pt")
    assert lines[0].endswith("written by torch.save")
    assert any(line.startswith("{1..12}.0.weight") and line.endswith("x 12") for line in lines)


def test_cli_ls_folds_thousands_of_names(tmp_path, capsys):
    letters = "abcdefghijklmnopqrstuvwxyz"
    many = {f"{a}{b}": torch.zeros(1) for a in letters for b in letters}
    Snapshot.take(tmp_path / "s", {"m": StateDict(many)}, options=TakeOptions(durable=False))
    lines = ls(capsys, tmp_path / "s")
    assert len(lines) < 50
    assert f"... {26 * 26 - 40} more" in lines[-1]
    assert len(ls(capsys, tmp_path / "s", "--all")) > 26 * 26


@pytest.mark.parametrize("columns", [40, 60, 100])
@pytest.mark.parametrize("shape", [[], ["--tree"], ["--flat"], ["--du"]])
def test_cli_ls_fits_a_narrow_terminal(root, terminal, columns, shape):
    screen = terminal(columns)
    assert main(["ls", str(root / "step-100"), *shape]) == 0
    lines = screen.text().splitlines()
    first = next(i for i, line in enumerate(lines) if "name" in line.split())
    widest = max(map(cells, lines[first:]))
    assert widest <= max(columns, 48)  # name, dtype, shape and size are always there


def test_cli_ls_does_not_fold_names_that_differ_in_a_sign(tmp_path, capsys):
    state = {name: torch.ones(2) for name in ("w#", "w1", "w2", "w##", "#1")}
    Snapshot.take(tmp_path / "s", {"s": StateDict(state)}, options=TakeOptions(durable=False))
    names = [line.split()[0] for line in ls(capsys, tmp_path / "s") if line.startswith("  ")]
    assert names == ["s/w#", "s/w{1..2}", "s/w##", "s/#1"]


def test_cli_ls_opens_no_data_file(root, capsys):
    with recording("recording") as log:
        ls(capsys, f"recording+file://{root / 'step-100'}")
    assert not log.of("read_into", "data/*")
    assert log.of("get")


def tensor(location="data/0123456789ab-0-0.bin", begin=0, shape=(4,), **more):
    return TensorEntry(location, (begin, begin + 4 * shape[0]), "float32", shape, **more)


def test_ls_items_describe_shards_and_replicas_of_ranks():
    shards = [Shard((4 * i,), (4,), tensor(begin=100 * i)) for i in range(2)]
    found = list(
        items(
            {
                "0/a": tensor(begin=1000, replicated=True),
                "0/b": DTensorEntry("float32", (8,), shards, mesh=Mesh(0, (2, 2), (2, 1)), placements=["R", "S(0)"]),
                "0/c": tensor(begin=2000),
                "1/c": tensor(begin=3000),
            },
            4,
        )
    )
    assert [(item.path, item.rank, item.placed) for item in found] == [
        ("a", 0, "replicated"),
        ("b", 0, "sharded over 4"),
        ("c", 0, "rank 0"),
        ("c", 1, "rank 1"),
    ]
    assert found[1].value == "DTensor R, S(0)"
    assert [(fold.name, len(fold.items), fold.nbytes) for fold in folded(found)] == [
        ("a", 1, 16), ("b", 1, 32), ("{0..1}/c", 2, 32)
    ]  # fmt: skip


def test_ls_items_count_the_bytes_of_an_array_with_two_names_once():
    array = NDArrayEntry(tensor(), "<f4", (4,))
    found = list(items({"0/a": array, "0/b": copy.copy(array), "0/c": tensor()}, 1))
    assert [item.nbytes for item in found] == [16, 0, 0]
    assert [item.value for item in found] == ["", "shares the bytes of a", "shares the bytes of a"]


def test_ls_totals_count_bytes_by_the_first_parts_of_names():
    def item(path, nbytes):
        return ListedItem(path, path, 0, "Tensor", "float32", (1,), nbytes, "", "")

    found = [item("m/a.b.c", 1), item("m/a.d", 2), item("m/e", 4), item("n", 8)]
    assert [(name, total.entries, total.nbytes) for name, total in heaviest(found, 2)] == [
        ("n", 1, 8), ("m/e", 1, 4), ("m/a.", 2, 3)
    ]  # fmt: skip


def test_ls_folds_only_numbers_without_a_gap():
    def names(*paths):
        return [fold.name for fold in folded(ListedItem(p, p, 0, "Tensor", "float32", (1,), 4, "", "") for p in paths)]

    assert names("l.0", "l.2", "l.5") == ["l.0", "l.2", "l.5"]
    assert names("l.0", "l.1", "l.2", "l.5", "l.7", "l.8") == ["l.{0..2}", "l.5", "l.{7..8}"]
    assert names("l.10", "l.9", "l.11") == ["l.{9..11}"]
    assert names("l.0", "l.00", "l.01", "l.1") == ["l.{0..1}", "l.00", "l.01"]
    assert names(*(f"a.{i}.b.{j}" for i in range(3) for j in range(2))) == ["a.{0..2}.b.{0..1}"]
    assert names(*(f"a.{i}.b.{j}" for i in range(3) for j in range(2) if (i, j) != (2, 1))) == [
        "a.{0..1}.b.{0..1}", "a.2.b.0"
    ]  # fmt: skip


def test_ls_folded_names_expand_to_the_names_in_the_snapshot(root):
    """A shell makes the names of it: each is in the snapshot, and together they are all that is there."""
    snapshot = Snapshot(root / "step-100")
    found = list(items(snapshot.get_manifest(), 1))
    folds = folded(found)
    script = "\n".join(f"printf '%s\\n' {fold.name}" for fold in folds)
    made = subprocess.run(["bash", "-c", script], check=True, capture_output=True, text=True, timeout=300).stdout
    assert sorted(made.splitlines()) == sorted(item.path for item in found)
    assert len(folds) < len(found) / 3


def test_cli_ls_prints_names_that_read_object_and_show_accept(root, capsys):
    snapshot = Snapshot(root / "step-9")
    lines = ls(capsys, root / "step-9", "--flat")[1:]
    for line in lines:
        snapshot.read_object(line.split()[0])
    for name in ("model/0.weight", "0/model/0.weight", "progress/losses/1", "progress/losses"):
        assert main(["show", str(root / "step-9"), name]) == 0
        shown = capsys.readouterr().out.split()[0]
        assert main(["show", str(root / "step-9"), shown]) == 0
        capsys.readouterr()


def test_cli_ls_names_of_numeric_keys_can_be_read(tmp_path, capsys):
    state = {"0": StateDict(w=torch.ones(1), x=1), "w": StateDict(v=torch.zeros(2)), "1": StateDict()}
    state["w"]["0"] = {"w": 5}
    snapshot = Snapshot.take(tmp_path / "s", {**state, "0/0": StateDict(w=7)}, options=TakeOptions(durable=False))
    values = {}
    for line in ls(capsys, tmp_path / "s", "--flat")[1:]:
        values[line.split()[0]] = snapshot.read_object(line.split()[0])
    assert values["0/0/w"].equal(torch.ones(1))  # "0/w" is what rank 0 has under "w"
    assert values["0/x"] == 1
    assert values["w/v"].equal(torch.zeros(2))
    assert values["0%2F0/w"] == 7
    assert values["w/0/w"] == 5
    clash = Snapshot.take(tmp_path / "c", {"0": StateDict(w=1), "w": StateDict()}, options=TakeOptions(durable=False))
    assert clash.read_object("0/w") == {}
    assert clash.read_object("0/0/w") == 1
    names = [line.split()[0] for line in ls(capsys, tmp_path / "c", "--flat")[1:]]
    assert [clash.read_object(name) for name in names] == [1, {}]


@pytest.mark.parametrize("glob", ["model/0.*", "0/model/0.*"])
def test_cli_ls_globs_match_names_with_and_without_the_rank(root, capsys, glob):
    lines = ls(capsys, root / "step-9", "--flat", glob)
    assert [line.split()[0] for line in lines[1:]] == ["model/0.weight"]


def test_cli_verbs_count_entries_files_and_bytes_alike(root, tmp_path, capsys):
    """One snapshot, as each verb tells of it."""
    snapshot = Snapshot(root / "step-9")

    def told(*argv):
        assert main([*map(str, argv)]) in (0, 1)
        return json.loads(capsys.readouterr().out)

    step = root / "step-9"
    listed, verified = told("ls", step, "--json"), told("verify", step, "--json")
    (folder,) = (each for each in told("ls", root, "--json")["snapshots"] if each["name"] == "step-9")
    copied = told("cp", step, tmp_path / "copy", "--json")
    same = told("diff", step, tmp_path / "copy", "--json")
    quick = snapshot.verify(quick=True)
    entries = [listed["entries"], verified["entries"], folder["entries"], copied["entries"], same["equal"]]
    assert {*entries, quick.entries, snapshot.metadata.entries} == {len(listed["items"])}
    files = [listed["files"], verified["files"], copied["files"], told("rm", step, "--dry-run", "--json")["files"]]
    assert {*files, quick.files} == {1}
    (pruned,) = (
        each for each in told("prune", root, "--keep-latest", 1, "--dry-run", "--json")["steps"] if each["step"] == 9
    )
    sizes = [listed["file_bytes"], verified["bytes_read"], folder["bytes"], copied["nbytes"], pruned["bytes"]]
    assert {*sizes, told("rm", step, "--dry-run", "--json")["bytes"]} == {snapshot.metadata.nbytes}
    assert main(["report", str(step), "-o", str(tmp_path / "r.html")]) == 0
    assert f"{listed['entries']} entries of" in capsys.readouterr().out


def test_cli_ls_of_a_folder_of_only_interrupted_takes_says_so(tmp_path, capsys):
    for step, name in ((5, ".take-0123456789ab"), (10, "data/0123456789ab-0-0.safetensors")):
        place = tmp_path / "run" / f"step-{step}" / name
        place.parent.mkdir(parents=True)
        place.touch()
    assert main(["ls", str(tmp_path / "run")]) == 2
    assert "only interrupted or running takes: step-5, step-10" in capsys.readouterr().err


def _take_in_turns(path):
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(6)))
    plain = StateDict(b=1, a=[{"z": torch.ones(3), "y": 2}, 3])
    Snapshot.take(path, {"rng": RNGState(), "model": model, "plain": plain}, replicated=["model/**", "plain/**"])


def test_cli_ls_of_several_ranks_is_in_the_order_of_the_application(two, tmp_path, capsys):
    two.run(_take_in_turns, tmp_path / "s")
    names = [line.split()[0] for line in ls(capsys, tmp_path / "s", "--flat")[1:]]
    tensors = [name for name in names if name.startswith("model/")]
    assert tensors == [f"model/{n}.{what}" for n in range(6) for what in ("weight", "bias")]
    assert [name for name in names if name.startswith("plain/")] == [
        f"plain/{each}" for each in ("b", "a/0/z", "a/0/y", "a/1")
    ]
    keys = [line.split("/")[0] for line in ls(capsys, tmp_path / "s")[2:] if not line.startswith(" ")]
    assert sorted(keys[:2]) == ["model", "plain"]
    assert keys[2:] == ["rng"]


def test_cli_ls_sorts_keys_and_has_the_generators_last(tmp_path, capsys):
    Snapshot.take(tmp_path / "s", {"rng": RNGState(), "model": torch.nn.Linear(2, 2), "a": StateDict(x=1)})
    keys = [line.split("/")[0] for line in ls(capsys, tmp_path / "s")[2:] if not line.startswith(" ")]
    assert keys == ["a", "model", "rng"]


def test_cli_ls_on_a_narrow_terminal_leaves_out_empty_columns_and_keeps_values(tmp_path, terminal):
    steps = StateDict({"the_number_of_the_last_step_of_this_long_run": 20, "the_name_of_the_schedule": "cosine"})
    Snapshot.take(tmp_path / "s", {"progress": steps})
    screen = terminal(60)
    assert main(["ls", str(tmp_path / "s"), "progress/**"]) == 0
    head, *lines = screen.text().splitlines()[-4:]
    assert head.split() == ["name", "kind", "size", "value"] or head.split() == ["name", "size", "value"]
    assert [line.split()[-1] for line in lines[1:]] == ["20", "'cosine'"]
