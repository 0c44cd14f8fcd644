"""Mistakes of new users, each named by its error, and what they may expect to work."""

import contextlib
import logging

import pytest
import torch
from torch.optim.swa_utils import AveragedModel

import snapshot
from snapshot import Snapshot


def test_version_attribute_equals_the_package_version():
    assert snapshot.__version__ == snapshot.text.VERSION
    assert "__version__" in dir(snapshot)


METHODS = ["restore", "read_object", "get_state_dict_for_key", "get_manifest", "exists", "verify", "sign", "convert"]
METHODS += ["copy", "delete"]


@pytest.mark.parametrize("name", METHODS)
def test_calling_a_snapshot_method_on_the_class_raises_type_error(name):
    with pytest.raises(TypeError, match=rf"{name}\(\) must be called on a snapshot.*Snapshot\('run/step-1'\)\.{name}"):
        getattr(Snapshot, name)("run/step-1", {"model": torch.nn.Linear(1, 1)})
    with pytest.raises(TypeError, match="on the class"):
        getattr(Snapshot, name)({"model": torch.nn.Linear(1, 1)})


def test_calling_a_snapshot_method_on_the_class_with_keywords_raises_type_error():
    with pytest.raises(TypeError, match="must be called on a snapshot"):
        Snapshot.restore(path="run/step-1", app_state={})
    with pytest.raises(TypeError, match="must be called on a snapshot"):
        Snapshot.exists()


def test_take_and_restore_warn_about_an_empty_app_state(tmp_path):
    with pytest.warns(UserWarning, match="app_state is empty"):
        taken = Snapshot.take(tmp_path / "s", {})
    with pytest.warns(UserWarning, match="app_state is empty"):
        taken.restore({})


def small():
    return torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3))


@pytest.mark.parametrize("key", ["model", "average"])
def test_averaged_model_is_restored_from_a_plain_model(key):
    model = small()
    taken = Snapshot.take("memory://average", {"model": model}, overwrite=True)
    average = AveragedModel(small())
    report = taken.restore({key: average}, rename={"model": key} if key != "model" else None)
    for name, tensor in model.state_dict().items():
        assert average.module.state_dict()[name].equal(tensor)
    assert average.n_averaged == 0
    assert [line.path for line in report.kept] == [f"{key}/n_averaged"]


def test_averaged_model_is_restored_from_an_averaged_model():
    average = AveragedModel(small())
    average.update_parameters(small())
    taken = Snapshot.take("memory://average", {"model": average}, overwrite=True)
    other = AveragedModel(small())
    assert not taken.restore({"model": other}).kept
    assert other.n_averaged == 1


# A server that does not respond


def test_retry_logs_a_silent_server_once_for_all_requests(caplog, monkeypatch):
    """The pauses are shortened, so that the test need not wait."""
    import asyncio

    from snapshot.io import retry
    from snapshot.io.storage import URL

    monkeypatch.setattr(retry, "SILENT", 0.05)
    monkeypatch.setattr(retry, "STILL_SILENT", 1000.0)
    retry._logged.reset()
    url = URL.parse("s3://bucket/run")
    released = []

    async def silent(attempt):
        while not released:
            await asyncio.sleep(0.01)
        return True

    async def busy(attempt):
        while not released:
            attempt.progress()
            await asyncio.sleep(0.01)
        return True

    async def both(*requests):
        released.clear()
        policy = retry.RetryPolicy(60, 60)
        tasks = [asyncio.create_task(retry.retry_request("stat", url, policy, each)) for each in requests]
        while not any(each.levelno == logging.WARNING for each in caplog.records) and not released:
            await asyncio.sleep(0.01)
        released.append(True)
        assert all([await each for each in tasks])

    asyncio.run(both(silent, silent, busy))
    [line] = [each.getMessage() for each in caplog.records if each.levelno == logging.WARNING]
    assert line.startswith("s3://bucket/run: no response to stat for")
    assert "still waiting" in line


def test_retry_does_not_log_a_server_that_answers(caplog, monkeypatch):
    import asyncio

    from snapshot.io import retry
    from snapshot.io.storage import URL

    monkeypatch.setattr(retry, "SILENT", 0.3)
    retry._logged.reset()

    async def busy(attempt):
        for _ in range(60):
            attempt.progress()
            await asyncio.sleep(0.01)

    asyncio.run(retry.retry_request("put", URL.parse("s3://b/x"), retry.RetryPolicy(60, 60), busy))
    assert not [each for each in caplog.records if each.levelno == logging.WARNING]
    with contextlib.suppress(AttributeError):
        retry._logged.reset()
