"""Several ranks on an object store: one commit, one read of what all want, and one failure for all."""

import torch
import torch.distributed as dist

from snapshot import RankError, Snapshot, SnapshotExistsError, StateDict, TakeOptions, Target, load
from tests.helpers.fault_proxy import FaultProxy

MiB = 1 << 20


def options(server, url):
    return {
        "key": server.key,
        "secret": server.secret,
        "endpoint_url": url,
        "client_kwargs": {"region_name": server.region},
        "part_bytes": 5 * MiB,
        "timeout": 1,
        "deadline": 2,
    }


def state(fill=None):
    shared = torch.arange(2 << 20, dtype=torch.float32)
    own = torch.full((1 << 20,), float(dist.get_rank()))
    made = StateDict(shared=shared, own=own, step=dist.get_rank())
    if fill is not None:
        shared.fill_(fill)
        own.fill_(fill)
        made["step"] = -1
    return {"s": made}


def _there_and_back(url, given):
    Snapshot.take(url, state(), replicated=["s/shared"], storage_options=given)
    live = state(fill=0)
    Snapshot(url, storage_options=given).restore(live)
    for name, value in state()["s"].items():
        assert torch.equal(live["s"][name], value) if isinstance(value, torch.Tensor) else live["s"][name] == value
    try:
        Snapshot.take(url, state(), storage_options=given)
    except SnapshotExistsError as error:
        return str(error)
    return None


def test_s3_take_of_two_ranks_writes_and_reads_replicas_once(two, moto):
    url = f"s3://{moto.bucket()}/run/step-1"
    with FaultProxy(moto.url) as proxy:
        refused = two.run(_there_and_back, url, options(moto, proxy.url) | {"deadline": 30, "timeout": 30})
        assert all(url in text for text in refused)
        written = sum(each.request_bytes for each in proxy.requests if each.method == "PUT")
        read = sum(each.response_bytes for each in proxy.requests if each.method == "GET")
    payload = (8 + 2 * 4) * MiB
    assert payload < written < payload + MiB
    assert payload < read < payload + MiB


def _failing(url, given):
    try:
        Snapshot.take(url, state(), storage_options=given, timeout=20)
    except BaseException as error:  # noqa: BLE001 - what each rank sees is what is tested
        return type(error), str(error)
    return None


def test_s3_take_with_a_failing_store_on_one_rank_stops_the_other(two, moto):
    url = f"s3://{moto.bucket()}/s"
    with FaultProxy(moto.url) as proxy:
        given = options(moto, proxy.url)
        proxy.fault(method="PUT", path="*/data/*-1-*", status=403, times=None)
        first, second = two.run(_failing, url, given)
    assert first[0] is RankError
    assert "rank 1" in first[1]
    assert "403" in second[1]
    assert not Snapshot(url, storage_options=options(moto, moto.url)).exists()


def test_s3_take_retries_a_transient_fault_on_one_rank(two, moto):
    url = f"s3://{moto.bucket()}/s"
    with FaultProxy(moto.url) as proxy:
        proxy.fault(method="PUT", path="*/data/*-1-*", status=503)
        proxy.fault(method="PUT", path="*.snapshot_metadata", lose_answer=True)
        assert two.run(_failing, url, options(moto, proxy.url) | {"deadline": 10}) == [None, None]
    assert Snapshot(url, storage_options=options(moto, moto.url)).verify()


def _share_verbs(folder, url, given):
    """Copy to a bucket, verify there, copy back, and write another format there: twice, since it is replaced."""
    copied = Snapshot(f"{folder}/source").copy(Target(f"{url}/copy", storage_options=given), ranks=True)
    there = Snapshot(f"{url}/copy", storage_options=given)
    report = there.verify(ranks=True)
    there.copy(Target(f"{folder}/back", durable=False), ranks=True)
    for overwrite in (False, True):
        target = Target(f"{url}/hf", "safetensors", shard_bytes=5 * MiB, storage_options=given, overwrite=overwrite)
        there.convert(target, select=["s"], ranks=True)
    return copied.nbytes, report.ok, report.bytes_read


def _take(path):
    Snapshot.take(path, state(), replicated=["s/shared"], options=TakeOptions(durable=False))


def test_s3_copy_and_convert_are_shared_by_ranks(two, moto, folder):
    two.run(_take, f"{folder}/source")
    url, given = f"s3://{moto.bucket()}/run", options(moto, moto.url) | {"deadline": 30, "timeout": 30}
    reports = two.run(_share_verbs, folder, url, given)
    assert reports[0] == reports[1]
    assert reports[0][1]
    assert reports[0][2] == reports[0][0]
    assert Snapshot.diff(f"{folder}/source", f"{folder}/back").same
    assert len(Snapshot(f"{url}/hf", storage_options=given).metadata.files) > 1
    made = load(Snapshot(f"{url}/hf", storage_options=given))
    assert torch.equal(made["shared"], torch.arange(2 << 20, dtype=torch.float32))
