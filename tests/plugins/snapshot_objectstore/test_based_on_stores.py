"""Takes that are based on a snapshot in an object store: the server copies what did not change."""

import pytest

from snapshot import RestoreOptions, Snapshot, TakeOptions
from snapshot_objectstore.s3 import S3Driver
from tests.helpers.fault_proxy import FaultProxy
from tests.plugins.snapshot_objectstore.s3_options import options
from tests.save.frozen_training import Run, expect_whole

MiB = 1 << 20


@pytest.fixture(params=["moto", "weed"])
def store(request):
    server = request.getfixturevalue(request.param)
    url = f"s3://{server.bucket()}/run"
    with FaultProxy(server.url) as proxy:
        yield proxy, url, options(server, endpoint_url=proxy.url, deadline=20)


def values_of(snapshot):
    return dict(snapshot.read_object("model"))


@pytest.mark.parametrize("verb", ["take", "async_take"])
@pytest.mark.parametrize("largest", [256 * MiB, 5 * MiB])
def test_base_on_s3_copies_frozen_files_on_the_server(store, verb, largest, monkeypatch):
    proxy, url, given = store
    monkeypatch.setattr(S3Driver, "largest_copy", largest)
    run = Run(layers=24)  # 6 MiB
    base = Snapshot.take(f"{url}/a", run.state, storage_options=given)
    run.step()
    proxy.clear()
    made = getattr(Snapshot, verb)(f"{url}/b", run.state, base=base, storage_options=given)
    made = made.wait() if verb == "async_take" else made
    assert made.report.shared_bytes > 6 * MiB
    travelled = sum(each.request_bytes + each.response_bytes for each in proxy.requests)
    assert travelled < 200_000
    values = run.values()
    assert made.verify()
    assert all(value.equal(values[name]) for name, value in values_of(made).items())
    base.delete()
    assert made.verify(), "the server's copy is independent"


def test_base_on_s3_writes_the_bytes_if_the_server_refuses_to_copy(store):
    proxy, url, given = store
    run = Run()
    base = Snapshot.take(f"{url}/a", run.state, storage_options=given)
    proxy.fault("*", lambda request: "x-amz-copy-source" in request.headers, times=None, status=501)
    made = Snapshot.take(f"{url}/b", run.state, base=base, storage_options=given)
    assert made.report.shared_bytes == 0
    assert len(made.report.notes) == 1
    assert made.verify()


def test_base_on_another_storage_is_compared_and_everything_is_written(store, tmp_path):
    _, url, given = store
    run = Run()
    base = Snapshot.take(f"{url}/a", run.state, storage_options=given)
    made = Snapshot.take(tmp_path / "b", run.state, base=base)
    assert made.report.shared_bytes == 0
    expect_whole(tmp_path / "b", run.values())
    left_out = Snapshot.take(tmp_path / "c", run.state, base=base, options=TakeOptions(only="trainable"))
    assert left_out.report.omitted_bytes > 0
    for parameter in run.frozen.parameters():
        parameter.data.zero_()
    left_out.restore(run.state, options=RestoreOptions(base=base))
    assert run.frozen[0].weight.any()
