"""The command and the manager on real stores, as a user would call them: each verb, with options from a file."""

import json
import secrets

import pytest
import torch
import yaml

from snapshot import KeepLatest, Snapshot, SnapshotManager, StateDict
from snapshot.cli import main
from snapshot_health.page_server import RunView


def state(step):
    return {"s": StateDict(x=torch.arange(1000.0) + step, step=step)}


STORES = {"moto": "s3", "gcs": "gs", "azurite": "az", "webdav": "webdav"}
"""Server -> the scheme of its URLs."""


@pytest.fixture(params=STORES, ids=STORES.values())
def store(request):
    """A root on a store, and its options."""
    if request.param == "moto":
        moto = request.getfixturevalue("moto")
        options = {"key": moto.key, "secret": moto.secret, "endpoint_url": moto.url}
        options["client_kwargs"] = {"region_name": moto.region}
        return f"s3://{moto.bucket()}/runs/first", options
    if request.param == "gcs":
        gcs = request.getfixturevalue("gcs")
        return f"gs://{gcs.bucket()}/runs/first", {"endpoint_url": gcs.url, "token": "anon", "project": gcs.project}
    if request.param == "azurite":
        azurite = request.getfixturevalue("azurite")
        return f"az://{azurite.container()}/runs/first", {"connection_string": azurite.connection_string}
    return f"webdav://{secrets.token_hex(8)}/run", {"base_url": request.getfixturevalue("webdav").url}


def test_cli_verbs_and_manager_work_on_object_stores(store, tmp_path, capsys, monkeypatch):
    root, options = store
    file = tmp_path / "options.yaml"
    file.write_text(yaml.safe_dump(options))

    def run(*argv, status=0):
        assert main([*map(str, argv), "--options", str(file)]) == status, capsys.readouterr().err
        return capsys.readouterr().out

    with SnapshotManager(root, keep=KeepLatest(2), storage_options=options, signals=()) as manager:
        for step in (1, 2, 3):
            manager.take(step, state(step), metrics={"loss": 1 / step})
    assert manager.steps() == [2, 3]
    live = state(0)
    assert manager.restore_latest(live) == 3
    assert torch.equal(live["s"]["x"], state(3)["s"]["x"])
    assert manager.best("loss", "min") == 3

    assert [line.split()[0] for line in run("ls", root).splitlines()] == ["name", "step-3", "step-2"]
    assert "s/x" in run("ls", f"{root}/step-3", "--flat")
    assert json.loads(run("show", f"{root}/step-3", "s/x", "--json"))["statistics"]["min"] == 3.0
    assert "every byte" in run("verify", f"{root}/step-3")
    assert "s/x" in run("diff", f"{root}/step-2", f"{root}/step-3", status=1)
    view = RunView(root, None, options)
    assert [step["step"] for step in view.steps(9)["steps"]] == [3, 2]
    assert view.check(3)["fault"] == ""
    assert view.health(3, "s/x", bool)["norm"] == pytest.approx(state(3)["s"]["x"].norm().item())
    run("cp", f"{root}/step-3", tmp_path / "copy", status=2)  # of the options the folder knows none
    assert main(["cp", f"{root}/step-3", str(tmp_path / "copy"), "--src-options", str(file)]) == 0
    capsys.readouterr()
    assert Snapshot(tmp_path / "copy").restore(live).lines == ()
    assert main(["cp", str(tmp_path / "copy"), f"{root}/step-9", "--dst-options", str(file)]) == 0
    capsys.readouterr()
    run("report", f"{root}/step-9", "-o", tmp_path / "report.html")
    assert run("prune", root, "--keep-latest", "1", "--yes")
    assert main(["rm", f"{root}/step-9", "--options", str(file)]) == 2  # nobody is asked, and nothing was agreed to
    run("rm", f"{root}/step-9", "--yes")
    assert manager.steps() == []
    capsys.readouterr()
    assert main(["ls", root, "--options", str(file)]) == 2


@pytest.mark.parametrize("store", ["moto"], indirect=True)
def test_cli_doctor_finds_the_settings_of_an_object_store(store, tmp_path, capsys):
    root, options = store
    file = tmp_path / "options.json"
    file.write_text(json.dumps(options))
    argv = ["doctor", root, "--options", str(file), "--size", "1MiB", "--seconds", "1", "--json"]
    assert main(argv) == 0
    told = json.loads(capsys.readouterr().out)
    assert {"write", "read", "list", "delete"} <= {check["check"] for check in told["checks"] if check["ok"]}
    assert told["speeds"]
    assert not any(
        value in json.dumps(told)
        for value in options.values()
        if isinstance(value, str) and len(value) > 12 and value not in root
    )
