"""`--ranks`: one command in several processes that torchrun started, with one report and one result."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist

from snapshot import Snapshot, StateDict, TakeOptions, Target
from snapshot.cli import main
from snapshot.manifest.document import METADATA
from tests.helpers.torchrun import rank_environments
from tests.helpers.trees import PYTHONPATH
from tests.helpers.warm_interpreter import Failed

ROOT = Path(__file__).parents[2]
GLOO = re.compile(r"\[Gloo\] Rank \d+ is connected")  # printed by torch 2.8
COMMAND = "import sys\nfrom snapshot.cli import main\nsys.exit(main(sys.argv[1:]))\n"


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A checkpoint in several files, which are dealt to the ranks."""
    folder = tmp_path_factory.mktemp("ranks")
    state = {f"w{n}": torch.randn(300_000 + n) for n in range(6)}
    snapshot = Snapshot.take(folder / "one", {"m": StateDict(**state, step=3)}, options=TakeOptions(durable=False))
    snapshot.convert(Target(folder / "hf", "safetensors", shard_bytes=1_300_000, durable=False))
    return folder


def launch(*command):
    """Start a program with torchrun: two ranks, on any free port."""
    started = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    environment = os.environ | {"PYTHONPATH": PYTHONPATH, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    return subprocess.Popen(
        [*started, *map(str, command)],
        env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def ranks(warm, *arguments, world=2, script=COMMAND, each=None):
    """Run a command as torchrun does, in forks. Return the exit status and the output of each rank."""
    more = {"LOCAL_WORLD_SIZE": str(world), "SNAPSHOT_TIMEOUT": "30"}
    found = []
    with rank_environments(world) as environments:
        started = [
            warm.start(script, *(each[rank] if each else arguments), **environment, **more)
            for rank, environment in enumerate(environments)
        ]
        for each_started in started:
            try:
                found.append((0, warm.finish(each_started)))
            except Failed as error:
                head, _, text = str(error).partition(":\n")
                found.append((int(head.split()[-1]), text))
    return [(status, "".join(line for line in text.splitlines(True) if not GLOO.match(line))) for status, text in found]


@pytest.mark.ranks
@pytest.mark.timeout(120)
def test_cli_ranks_under_torchrun_copy_and_verify_with_one_report(source, tmp_path):
    for arguments, said in (
        (("cp", "--ranks", source / "hf", tmp_path / "copy"), "files of safetensors"),
        (("verify", "--ranks", source / "one"), "every byte matches its digest"),
    ):
        started = launch("-m", "snapshot", *arguments)
        out, err = started.communicate(timeout=300)
        assert started.returncode == 0, err
        assert len(out.splitlines()) == 1, out
        assert said in out
    assert Snapshot.diff(source / "hf", tmp_path / "copy").same


@pytest.mark.ranks
@pytest.mark.timeout(120)
def test_cli_ranks_under_torchrun_all_end_if_one_is_killed(source, tmp_path):
    Snapshot(source / "one").copy(tmp_path / "one")
    script = (
        "import os, sys, asyncio\n"
        "from snapshot.cli import main\n"
        "from snapshot.testing import Stall, tapped\n"
        "stall = Stall(on='read_into', path='data/*.safetensors')\n"
        "async def wait(operation, before=stall.before):\n"
        "    if operation.name == 'read_into':\n"
        f"        open({str(tmp_path / 'here')!r} + os.environ['RANK'], 'w').write(str(os.getpid()))\n"
        "    return await before(operation)\n"
        "stall.before = wait\n"
        "with tapped('stalling', stall):\n"
        "    sys.exit(main(sys.argv[1:]))\n"
    )
    (tmp_path / "command.py").write_text(script)
    arguments = "cp", "--ranks", f"stalling+file://{tmp_path}/one", tmp_path / "t"
    started = launch(tmp_path / "command.py", *arguments)
    pid = None
    while pid is None:
        assert started.poll() is None, started.communicate()
        found = [each for each in tmp_path.glob("here*") if each.read_text()]
        pid = int(found[0].read_text()) if found else None
        time.sleep(0.01)
    psutil.Process(pid).send_signal(signal.SIGKILL)
    _, err = started.communicate(timeout=300)
    assert started.returncode != 0
    assert "SIGKILL" in err or "-9" in err
    assert not (tmp_path / "t" / METADATA).exists()
    assert main(["cp", str(tmp_path / "one"), str(tmp_path / "t")]) == 0


def test_cli_ranks_share_the_exit_status_and_rank_0_prints(source, tmp_path, warm):
    copied = ranks(warm, "cp", "--ranks", source / "one", tmp_path / "copy")
    assert [status for status, _ in copied] == [0, 0]
    assert copied[1][1] == ""
    assert copied[0][1].startswith(f"{tmp_path}/copy: 7 entries")
    (data,) = (each for each in (tmp_path / "copy" / "data").iterdir() if each.suffix == ".safetensors")
    held = bytearray(data.read_bytes())
    held[-9] ^= 1
    data.write_bytes(held)
    found = ranks(warm, "verify", "--ranks", "--json", tmp_path / "copy")
    assert [status for status, _ in found] == [1, 1]
    assert '"ok": false' in found[0][1]
    assert found[1][1] == ""
    failed = ranks(warm, "cp", "--ranks", tmp_path / "copy", tmp_path / "again")
    assert [status for status, _ in failed] == [2, 2]
    assert "digest must be" in failed[0][1]
    assert not (tmp_path / "again").exists() or not list((tmp_path / "again").rglob("*.*"))
    exists = ranks(warm, "cp", "--ranks", source / "one", tmp_path / "copy")
    assert [status for status, _ in exists] == [2, 2]
    assert exists[0][1].startswith("snapshot: error: ")
    assert exists[1][1].startswith("snapshot: rank 1: error: ")


@pytest.mark.parametrize(
    ("arguments", "status"),
    [
        (["convert", "--ranks", "{}/one", "{to}/dcp", "--to", "dcp"], 0),
        (["convert", "--ranks", "{}/one", "{to}/made.pt", "--memory", "8MiB"], 0),
        (["merge", "--ranks", "{}/one", "{}/one", "-o", "{to}/soup"], 0),
        (["diff", "--ranks", "{}/one", "{}/hf", "--rename", "m="], 1),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_cli_ranks_share_the_work_of_convert_and_other_verbs(source, tmp_path, warm, arguments, status):
    given = [each.format(source, to=tmp_path) for each in arguments]
    found = ranks(warm, *given)
    assert [each for each, _ in found] == [status, status], found
    assert found[1][1] == ""
    alone = [each for each in given if each != "--ranks"]
    if status == 0:
        other = [each.replace(str(tmp_path), f"{tmp_path}/alone") for each in alone]
        (tmp_path / "alone").mkdir()
        assert main(other) == 0
        made = next(each for each in given if each.startswith(str(tmp_path)))
        assert Snapshot.diff(made, made.replace(str(tmp_path), f"{tmp_path}/alone")).same


def test_cli_ranks_with_different_command_lines_are_refused(source, tmp_path, warm):
    each = [["cp", "--ranks", source / "one", tmp_path / name] for name in ("a", "b")]
    found = ranks(warm, each=each)
    assert [status for status, _ in found] == [2, 2]
    for _, text in found:
        assert f"destination: {tmp_path}/a on rank 0, {tmp_path}/b on rank 1" in text
    assert not (tmp_path / "a").exists()


def test_cli_ranks_verify_of_different_urls_is_refused_before_any_work(source, tmp_path, warm):
    one, other = source / "one", source / "hf"
    found = ranks(warm, each=[["verify", "--ranks", one], ["verify", "--ranks", one, other]])
    assert [status for status, _ in found] == [2, 2]
    for _, text in found:
        assert f"urls: {one} on rank 0, {one}, {other} on rank 1" in text
        assert "every byte matches" not in text
    # folders with other contents on each rank, as one that is written meanwhile
    script = (
        "import os, sys\nfrom snapshot.cli import main, verify\n"
        "found = verify.snapshots_below\n"
        "verify.snapshots_below = lambda *given: found(*given)[int(os.environ['RANK']):]\n"
        "sys.exit(main(sys.argv[1:]))\n"
    )
    found = ranks(warm, "verify", "--ranks", source, script=script)
    assert [status for status, _ in found] == [2, 2]
    for _, text in found:
        assert "same arguments, got urls:" in text
        assert "every byte matches" not in text
    found = ranks(warm, "verify", "--ranks", source)
    assert [status for status, _ in found] == [0, 0]
    assert found[0][1].count("every byte") >= 1


def test_cli_ranks_end_silently_if_the_output_pipe_is_closed(source, warm):
    script = (
        "import os, sys\nfrom snapshot.cli import main\n"
        "if os.environ['RANK'] == '0':\n"
        "    reading, writing = os.pipe()\n    os.close(reading)\n    os.dup2(writing, 1)\n"
        "    sys.stdout = open(1, 'w', closefd=False)\n"
        "sys.exit(main(sys.argv[1:]))\n"
    )
    found = ranks(warm, "verify", "--ranks", source / "one", source / "hf", script=script)
    assert found[0] == (128 + signal.SIGPIPE, "")
    assert found[1] == (0, "")


def test_cli_ranks_output_has_nothing_that_native_code_prints(source, tmp_path, warm):
    script = (
        "import os, sys\nimport torch.distributed as dist\nfrom snapshot.cli import main\n"
        "join = dist.init_process_group\n"
        "def noisy(*arguments, **options):\n"
        "    join(*arguments, **options)\n    os.write(1, b'[Gloo] is connected')\n"
        "dist.init_process_group = noisy\n"
        f"os.dup2(os.open({str(tmp_path)!r} + '/' + os.environ['RANK'], os.O_CREAT | os.O_WRONLY), 1)\n"
        "status = main(sys.argv[1:])\nos.write(1, b'end')\nsys.exit(status)\n"
    )
    found = ranks(warm, "verify", "--ranks", "--json", source / "one", script=script)
    assert [status for status, _ in found] == [0, 0]
    assert all("[Gloo] is connected" in text for _, text in found)  # on standard error
    assert json.loads((tmp_path / "0").read_text().removesuffix("end"))["ok"]
    assert (tmp_path / "1").read_text() == "end"


def test_cli_ranks_work_with_standard_error_closed(source, warm):
    script = "import os, sys\nos.close(2)\nsys.stderr = None\n" + COMMAND
    assert [status for status, _ in ranks(warm, "verify", "--ranks", source / "one", script=script)] == [0, 0]


def test_cli_ranks_of_a_host_share_the_memory_budget(source, tmp_path, warm):
    script = (
        "import sys\nfrom snapshot.cli import main\nfrom snapshot.io import session\n"
        "seen, made = [], session.MemoryBudget\n"
        "session.MemoryBudget = lambda limit, *more: seen.append(limit) or made(limit, *more)\n"
        "status = main(sys.argv[1:])\nprint(seen)\nsys.exit(status)\n"
    )
    for _, text in ranks(warm, "verify", "--ranks", "--memory", "8MiB", source / "one", script=script):
        assert f"[{4 << 20}]" in text


def test_cli_ranks_without_the_torchrun_environment_explain_what_to_do(source, capsys, monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("RANK", "0")
    assert main(["verify", "--ranks", str(source / "one")]) == 2
    said = capsys.readouterr().err
    assert "--ranks needs WORLD_SIZE, MASTER_ADDR, MASTER_PORT in the environment" in said
    assert "torchrun" in said


def test_cli_without_ranks_works_alone_in_the_environment_of_a_job(source, tmp_path, capsys, monkeypatch):
    for name, value in (("RANK", "1"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "9")):
        monkeypatch.setenv(name, value)
    for arguments in (
        ["cp", source / "one", tmp_path / "copy"],
        ["verify", source / "one"],
        ["convert", source / "one", tmp_path / "made"],
        ["merge", source / "one", source / "one", "-o", tmp_path / "soup"],
        ["diff", source / "one", tmp_path / "copy"],
    ):
        assert main(list(map(str, arguments))) == 0
        assert capsys.readouterr().out
    assert not dist.is_initialized()
