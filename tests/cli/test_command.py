"""The command as a whole: help, completion, what it says of what is not there, and pipes that close."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from snapshot import Snapshot, SnapshotManager, StateDict, TakeOptions
from snapshot.cli import main, parser
from snapshot.cli.arguments import list_verbs
from tests.helpers.trees import PYTHONPATH

ROOT = Path(__file__).parents[2]
NAMES = list(list_verbs())


def test_cli_has_all_verbs():
    assert {
        "ls",
        "show",
        "verify",
        "sign",
        "diff",
        "cp",
        "convert",
        "merge",
        "rm",
        "prune",
        "bench",
        "doctor",
        "report",
    } <= set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_cli_help_of_each_verb_has_examples_and_a_docs_page(name, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert main([name, "--help"]) == 0
    out = capsys.readouterr().out
    assert "examples:" in out
    assert f"snapshot {name} " in out
    described = out.partition("\n\n")[2].partition("examples:")[0]
    assert max(map(len, described.splitlines())) <= 80
    assert (ROOT / "docs/reference/cli" / f"{name}.md").read_text().startswith(f"# snapshot {name}\n")


@pytest.mark.parametrize("name", [name for name in NAMES if name != "completion"])  # which has no URL
def test_cli_verbs_accept_storage_options(name):
    (verbs,) = (each for each in parser()._actions if each.dest == "==SUPPRESS==" or each.choices)
    flags = {flag for action in verbs.choices[name]._actions for flag in action.option_strings}
    assert {"-o", "--options"} <= flags
    if name in ("cp", "convert", "merge"):
        assert {"--src-o", "--dst-o"} <= flags


def test_cli_without_a_verb_prints_help_and_version_prints_the_version(capsys):
    assert main([]) == 2
    assert "VERB" in capsys.readouterr().err
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("snapshot ")


SCRIPT = Path(sys.executable).with_name("snapshot")
MODULE = [sys.executable, "-m", "snapshot"]


def imports_of(command, *words):
    """The modules that a command imports in a process of its own, without those that are built in."""
    found = subprocess.run(
        [*command, *map(str, words)],
        check=True,
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "PYTHONPATH": PYTHONPATH, "PYTHONPROFILEIMPORTTIME": "1"},
    )
    assert found.stdout
    return {line.rpartition("|")[2].strip() for line in found.stderr.splitlines() if line.startswith("import time:")}


@pytest.mark.parametrize("words", [["--version"], ["--help"], ["completion", "bash"]], ids=" ".join)
@pytest.mark.parametrize("command", [MODULE, [SCRIPT]], ids=["module", "script"])
def test_cli_help_and_completion_do_not_import_torch(command, words):
    if command == [SCRIPT] and not SCRIPT.exists():
        pytest.skip("the script is not installed")
    found = imports_of(command, *words)
    assert "snapshot.cli.arguments" in found
    assert not found & {"torch", "numpy"}


@pytest.mark.parametrize("name", NAMES)
def test_cli_help_of_each_verb_does_not_import_torch(name):
    assert not imports_of(MODULE, name, "--help") & {"torch", "numpy"}


LISTED = [
    ["ls", ""],
    ["ls", "", "--du"],
    ["ls", "step-7"],
    ["ls", "step-7", "--json"],
    ["ls", "step-7", "--tree", "model/**"],
    ["show", "step-7", "progress"],
    ["show", "step-7", "progress/step"],
    ["show", "step-7", "kinds/dtype"],
    ["show", "step-7", "model"],
]


@pytest.mark.parametrize("words", LISTED, ids=" ".join)
def test_cli_ls_and_show_of_a_step_do_not_import_torch(words, tmp_path):
    progress = StateDict(step=7, names=["a", {"b": 1.5}])
    kinds = StateDict(dtype=torch.bfloat16, shape=torch.Size([1, 2]), device=torch.device("cpu"))
    model = StateDict(weight=torch.ones(8, 3), sparse=torch.eye(3).to_sparse())
    with SnapshotManager(tmp_path / "run") as manager:
        manager.take(7, {"model": model, "progress": progress, "kinds": kinds})
    verb, place, *more = words
    found = imports_of(MODULE, verb, tmp_path / "run" / place, *more)
    assert "snapshot.manifest.document" in found
    assert not found & {"torch", "numpy"}


def test_cli_help_lists_all_verbs_with_descriptions(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    assert main(["--help"]) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert " ".join(f"{name} {verb.summary}" for name, verb in list_verbs().items()) in told


@pytest.mark.parametrize(
    "words",
    [
        ["prune", "run", "--keep-lates", "1"],
        ["prune", "run", "--dry", "--keep-latest", "1"],
        ["rm", "run", "--ye"],
        ["cp", "a", "b", "--over"],
        ["convert", "a", "b", "--over"],
        ["verify", "--qui", "run"],
        ["--vers"],
    ],
    ids=" ".join,
)
def test_cli_options_cannot_be_abbreviated(words, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(words) == 2
    shortened = next(each for each in words if each.startswith("--"))
    assert f"unrecognized arguments: {shortened}" in capsys.readouterr().err


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_cli_completion_scripts_are_valid_for_each_shell(shell, capsys):
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert all(name in script for name in NAMES)
    assert "allow-pickle" in script
    if found := shutil.which(shell):
        subprocess.run([found, "-n"], input=script, text=True, check=True, timeout=300)


def test_cli_completion_in_bash_completes_verbs_options_and_files(capsys, tmp_path):
    assert main(["completion", "bash"]) == 0
    script = tmp_path / "completion"
    script.write_text(capsys.readouterr().out)
    (tmp_path / "run").mkdir()
    asks = [("snapshot", "sh"), ("ls", "ru"), ("verify", "--qu")]
    for before, word in asks:
        words = ["snapshot"] + ([] if before == "snapshot" else [before]) + [word]
        script.write_text(
            script.read_text()
            + f"COMP_WORDS=({' '.join(words)}); COMP_CWORD={len(words) - 1}\n"
            + f'_shtab_snapshot snapshot {word} {before}; echo "${{COMPREPLY[@]}}"\n'
        )
    shown = subprocess.run(
        ["bash", script], check=True, capture_output=True, text=True, timeout=300, cwd=tmp_path
    ).stdout.split()
    assert shown == ["show", "run", "--quick"]


def test_cli_completion_without_shtab_names_the_extra_to_install(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "shtab", None)
    assert main(["completion", "bash"]) == 2
    assert "the extra 'cli'" in capsys.readouterr().err


LOOKS = [["ls"], ["show", "x"], ["verify"], ["report", "-o", "r.html"]]


def asked(verb, url):
    return main([verb[0], str(url), *verb[1:]])


@pytest.mark.parametrize("verb", LOOKS, ids=lambda verb: verb[0])
def test_cli_error_for_a_missing_snapshot_says_what_is_at_the_path(root, tmp_path, capsys, monkeypatch, verb):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "file.txt").write_text("not a checkpoint")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "a.txt").write_text("x")
    (tmp_path / "half" / "data").mkdir(parents=True)
    (tmp_path / "half" / ".take-0123456789ab").write_text("")
    places = {
        root / "step-10": "did you mean",
        tmp_path / "empty": "the folder is empty",
        tmp_path / "none" / "at" / "all": "there is no snapshot here",
        tmp_path / "folder": "found a.txt",
        tmp_path / "half": "interrupted",
        "s4://bucket/x": "no storage plugin for the scheme 's4'",
        tmp_path / "file.txt": "",
    }
    for place, words in places.items():
        status = asked(verb, place)
        out, err = capsys.readouterr()
        assert status == 2, place
        assert err.startswith("snapshot: error: ")
        assert len(err.splitlines()) == 1
        assert words in err, (place, err)
        assert out == ""
    if verb[0] not in ("ls", "verify"):
        assert asked(verb, root) == 2
        assert "a folder of 3 snapshots: model.pt, step-9, step-100; name one of them" in capsys.readouterr().err


def test_cli_error_for_an_unknown_option_does_not_print_its_value(capsys):
    for rest in (["--src-o", "key=SECRET"], ["--nonsense=SECRET"], ["-o", "region=eu", "--src-o", "SECRET"]):
        assert main(["show", "run", "path", *rest]) == 2
        out, err = capsys.readouterr()
        assert "SECRET" not in out + err
        assert "unrecognized arguments: --" in err
    assert main(["cp", "run", "copy", "SECRET"]) == 2
    out, err = capsys.readouterr()
    assert "SECRET" not in out + err
    assert err.endswith("error: too many arguments\n")


def test_cli_gives_up_an_unreachable_server_soon(capsys, monkeypatch):
    monkeypatch.setattr("snapshot.cli.locate.SOON", 2.5)
    for verb in (["ls"], ["show", "x"]):
        assert asked(verb, "http://127.0.0.1:1/x") == 2
        err = capsys.readouterr().err.splitlines()
        assert "failed after" in err[-1]
        assert all(line.startswith(("snapshot: retry: ", "snapshot: error: ")) for line in err)


def test_cli_internal_error_exits_2_and_not_1(capsys, monkeypatch):
    def run(arguments):
        raise RuntimeError("of ours")

    monkeypatch.setattr("snapshot.cli.ls.run", run)
    assert main(["ls", "x"]) == 2
    assert "please report it" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "reader"),
    [
        ("ls {url} --flat", "head -n 2"),
        ("ls {url}", "true"),
        ("--help", "true"),
        ("ls --help", "true"),
        ("--version", "true"),
    ],
)
def test_cli_output_pipe_closed_early_is_not_an_error(tmp_path, words, reader):
    Snapshot.take(
        tmp_path / "s",
        {"s": StateDict({f"n{i}": torch.zeros(1) for i in range(20_000)})},
        options=TakeOptions(durable=False),
    )
    command = f"{sys.executable} -m snapshot {words.format(url=tmp_path / 's')} | {reader}; echo ${{PIPESTATUS[0]}}"
    found = subprocess.run(
        ["bash", "-c", command],
        check=True,
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "PYTHONPATH": PYTHONPATH},
    )
    assert found.stderr == ""
    *shown, status = found.stdout.splitlines()
    assert len(shown) == (2 if reader.startswith("head") else 0)
    assert status in ("0", "141")
    assert status == "141" or "--flat" not in words


def test_cli_output_pipe_without_a_reader_exits_141(monkeypatch, root):
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as pipe:
        monkeypatch.setattr("sys.stdout", pipe)
        assert main(["ls", str(root / "step-9")]) == 141
        monkeypatch.undo()


def test_cli_prints_each_warning_and_log_record_on_one_line(capsys, monkeypatch):
    import logging
    import warnings

    from snapshot.cli import ls

    def run(arguments):
        warnings.simplefilter("always")
        warnings.warn("first\nof two lines", stacklevel=1)
        logging.getLogger("snapshot").warning("second \x1b[2J")
        return 0

    monkeypatch.setattr(ls, "run", run)
    assert main(["ls", "x"]) == 0
    assert capsys.readouterr().err.splitlines() == [
        "snapshot: warning: first of two lines", "snapshot: warning: second \\x1b[2J"
    ]  # fmt: skip
