"""Faults on the way to S3 and back: what may pass is waited for, what will not is told, and no wrong byte passes."""

import asyncio
import re

import pytest
import torch

from snapshot import (
    CommitUnknown,
    CorruptSnapshotError,
    Snapshot,
    SnapshotError,
    SnapshotExistsError,
    StateDict,
    StorageError,
    TakeOptions,
)
from snapshot.events import add_handler, remove_handler
from snapshot.io.registry import open_storage
from snapshot.io.storage import URL
from tests.helpers.storage_calls import PATIENT, patience

MiB = 1 << 20
ENGINES = ["s3fs", "obstore"]
PARTS = "*partNumber=*"
MANIFEST = "*.snapshot_metadata"
DATA = "*/data/*"
IMPATIENT = {"timeout": 0.6, "deadline": 1}
SOON = 50
"""Seconds: an end within them was not that of `PATIENT`."""


def impatiently(made, work):
    """Do what is to fail of a fault, with little patience; with more where a busy machine did not come that far."""
    try:
        return work(IMPATIENT)
    except SnapshotError:
        if made.hits:
            raise
    return work({name: 8 * seconds for name, seconds in IMPATIENT.items()})


@pytest.fixture(params=ENGINES)
def engine(request):
    return request.param


one_engine = pytest.mark.parametrize("engine", ["s3fs"], indirect=True)
"""For what is done by s3fs's client, whatever the engine."""


@pytest.fixture
def place(moto, proxy, engine):
    """A URL, and the options with which it is reached through the proxy."""
    options = {
        "key": moto.key,
        "secret": moto.secret,
        "endpoint_url": proxy.url,
        "client_kwargs": {"region_name": moto.region},
        "engine": "s3fs" if engine == "s3fs" else None,  # else obstore reads
        "part_bytes": 5 * MiB,
        **PATIENT,
    }
    return f"s3://{moto.bucket()}/s", options


@pytest.fixture
def retries():
    """The events of requests that are made again."""
    seen = []

    def handler(event):
        if event.name == "retry":
            seen.append(event)

    add_handler(handler)
    yield seen
    remove_handler(handler)


def state(fill=None):
    tensor = torch.arange(3 << 19, dtype=torch.float32)
    return {"s": StateDict(x=tensor if fill is None else torch.full_like(tensor, fill), step=3)}


def clean(moto, options):
    """The same place without the proxy."""
    return {**options, "endpoint_url": moto.url}


def whole(moto, place):
    url, options = place
    live = state(fill=0)
    assert not Snapshot(url, storage_options=clean(moto, options)).restore(live).lines
    assert torch.equal(live["s"]["x"], state()["s"]["x"])
    return True


def left(moto, place):
    """What there is below a snapshot, unfinished uploads too."""

    async def work():
        storage = open_storage(URL.parse(place[0]), clean(moto, place[1]))
        try:
            return await storage.list(), list(await (await storage.driver()).uploads(""))
        finally:
            await storage.close()

    return asyncio.run(work())


# Writing

WRITE_FAULTS = [
    ("PUT", PARTS, {"status": 503, "times": 2}),
    ("PUT", PARTS, {"status": 500}),
    ("PUT", PARTS, {"status": 503, "headers": {"Retry-After": "0"}}),
    ("PUT", PARTS, {"reset_before": True}),
    ("PUT", PARTS, {"reset_upload_at": 500_000}),
    ("PUT", PARTS, {"lose_answer": True}),
    ("POST", "*uploads*", {"status": 503}),
    ("POST", "*uploadId*", {"status": 503}),
    ("POST", "*uploadId*", {"lose_answer": True}),
    ("PUT", "*.take-*", {"lose_answer": True}),
    ("PUT", MANIFEST, {"status": 503, "times": 2}),
    ("PUT", MANIFEST, {"lose_answer": True}),
    ("PUT", MANIFEST, {"lose_answer": "hang"}),
    ("PUT", MANIFEST, {"hang": True}),
    ("PUT", MANIFEST, {"status": 409, "body": b"<Error><Code>ConditionalRequestConflict</Code></Error>"}),
    ("*", "*", {"delay": 0.05, "times": None}),
]


@pytest.mark.parametrize(("method", "path", "fault"), WRITE_FAULTS)
@one_engine
def test_s3_take_retries_transient_faults(moto, proxy, place, retries, method, path, fault):
    url, options = place
    with proxy.fault(method=method, path=path, **fault):
        Snapshot.take(url, state(), storage_options=options | patience(fault))
    assert whole(moto, place)
    if "delay" not in fault:
        assert retries
        assert url.rpartition("/")[0] in retries[0].path
    assert not left(moto, place)[1]


@pytest.mark.parametrize("fault", [{"reset_before": True}, {"lose_answer": True}])
@one_engine
def test_s3_take_survives_a_fault_at_any_request(moto, proxy, place, fault):
    url, options = place
    Snapshot.take(url, state(), storage_options=options)
    requests = len(proxy.requests)
    assert requests > 8
    for nth in range(1, requests + 1):
        with proxy.fault(nth=nth, must_happen=False, **fault) as made:
            Snapshot.take(f"{url}-{nth}", state(), storage_options=options)
        assert made.hits or nth > requests - 2
        assert whole(moto, (f"{url}-{nth}", options))


@one_engine
def test_s3_overwrite_survives_a_lost_response_to_its_commit(moto, proxy, place):
    url, options = place
    Snapshot.take(url, state(fill=1), storage_options=options)
    with proxy.fault(method="PUT", path=MANIFEST, lose_answer=True):
        Snapshot.take(url, state(), storage_options=options, overwrite=True)
    assert whole(moto, place)
    assert len(left(moto, place)[0]) == 3


@one_engine
def test_s3_lost_response_does_not_hide_a_faster_commit(moto, proxy, place):
    """Our own put is recognised by its bytes: somebody else's is not."""
    url, options = place
    direct = clean(moto, options)

    def meanwhile(request):
        if request.method == "PUT" and request.path.endswith(".snapshot_metadata"):
            if not Snapshot(url, storage_options=direct).exists():
                Snapshot.take(url, state(fill=7), storage_options=direct)
            return True
        return False

    with proxy.fault(path=meanwhile, status=503), pytest.raises(SnapshotExistsError):
        Snapshot.take(url, state(), storage_options=options)
    live = state(fill=0)
    Snapshot(url, storage_options=direct).restore(live)
    assert torch.equal(live["s"]["x"], state(fill=7)["s"]["x"])


@pytest.mark.timeout(SOON, func_only=True)
@pytest.mark.parametrize(
    ("path", "fault"),
    [(PARTS, {"status": 503}), (PARTS, {"hang": True}), (PARTS, {"status": 403}), (MANIFEST, {"status": 403})],
)
@one_engine
def test_s3_take_that_fails_leaves_no_objects(moto, proxy, place, path, fault):
    url, options = place
    with proxy.fault(path=path, method="P*", times=None, **fault) as made, pytest.raises(StorageError, match="s3://"):
        impatiently(made, lambda patience: Snapshot.take(url, state(), storage_options=options | patience))
    proxy.heal()
    assert left(moto, place) == ([], [])


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("fault", [{"status": 503}, {"hang": True}])
@one_engine
def test_s3_commit_without_a_response_raises_commit_unknown_and_keeps_its_data(moto, proxy, place, fault, overwrite):
    """The manifest may still arrive, held up by some gateway: data that is not there then would be a lost snapshot."""
    url, options = place
    if overwrite:
        Snapshot.take(url, state(fill=1), storage_options=clean(moto, options))
    arrived = []

    def manifest(request):
        if request.method == "PUT" and request.path.endswith(".snapshot_metadata"):
            arrived.append(request)
        return bool(arrived) and request is arrived[-1]

    def take(patience):
        Snapshot.take(url, state(), storage_options=options | patience, overwrite=overwrite)

    with proxy.fault(path=manifest, times=None, **fault) as made, pytest.raises(CommitUnknown, match="check again"):
        impatiently(made, take)
    assert Snapshot(url, storage_options=clean(moto, options)).exists() == overwrite
    assert sum("data/" in path for path in left(moto, place)[0]) == 2 * (1 + overwrite)
    if overwrite:
        assert Snapshot(url, storage_options=clean(moto, options)).verify()


@one_engine
def test_s3_commit_refused_after_a_lost_response_raises_commit_unknown(moto, proxy, place):
    url, options = place
    with (
        proxy.fault(method="PUT", path=MANIFEST, hang=True),
        proxy.fault(method="PUT", path=MANIFEST, status=403, times=None),
        pytest.raises(CommitUnknown),
    ):
        Snapshot.take(url, state(), storage_options=options | {"timeout": 1})
    assert any("data/" in path for path in left(moto, place)[0])


@pytest.mark.parametrize("look", [{"status": 403}, {"status": 503}, {"hang": True}])
@one_engine
def test_s3_commit_that_succeeded_is_never_undone(moto, proxy, place, look):
    """Its answer is lost, and what stands there cannot be looked at."""
    url, options = place

    def later(request):
        return made.hits > 0 and request.method == "GET"

    with (
        proxy.fault(method="PUT", path=MANIFEST, lose_answer=True) as made,
        proxy.fault(path=later, times=None, **look),
        pytest.raises(CommitUnknown),
    ):
        impatiently(made, lambda patience: Snapshot.take(url, state(), storage_options=options | patience))
    assert whole(moto, place)


@one_engine
def test_s3_claim_that_cannot_be_deleted_is_left(moto, proxy, place):
    url, options = place
    with proxy.fault(path="*delete*", method="POST", status=403, times=None):
        Snapshot.take(url, state(), storage_options=options)
    assert whole(moto, place)


@one_engine
def test_s3_take_that_is_cancelled_leaves_no_objects(moto, proxy, place):
    url, options = place
    fault = proxy.fault(path=PARTS, method="PUT", hang=True, times=None)
    pending = Snapshot.async_take(url, state(), storage_options=options)
    fault.wait_reached(10)
    assert pending.cancel()
    with pytest.raises(Exception, match="cancel"):
        pending.wait(timeout=15)
    assert left(moto, place) == ([], [])


@pytest.mark.timeout(SOON, func_only=True)
@one_engine
def test_s3_unreachable_server_fails_at_the_deadline(place):
    url, options = place
    with pytest.raises(StorageError, match=r"s3://.*failed after \d+ attempts") as caught:
        Snapshot.take(url, state(), storage_options=options | {"endpoint_url": "http://127.0.0.1:9"} | IMPATIENT)
    assert int(re.search(r"after (\d+) attempts", str(caught.value))[1]) > 1, "it was given up before the deadline"


@pytest.mark.timeout(20, func_only=True)
@one_engine
def test_s3_unknown_host_fails_at_once(place):
    url, options = place
    given = options | {"endpoint_url": "http://no-such-host.invalid"}
    with pytest.raises(StorageError, match="s3://"):
        Snapshot.take(url, state(), storage_options=given)


@pytest.fixture
def renewing(tmp_path, monkeypatch, moto):
    """A profile whose credentials a program gives, each time it is asked; it keeps count."""
    count = tmp_path / "count"
    program = tmp_path / "credentials"
    program.write_text(
        f"""#!/bin/sh
echo asked >> {count}
echo '{{"Version": 1, "AccessKeyId": "{moto.key}", "SecretAccessKey": "{moto.secret}",
        "SessionToken": "token", "Expiration": "2099-01-01T00:00:00Z"}}'
"""
    )
    program.chmod(0o755)
    config = tmp_path / "config"
    config.write_text(f"[profile renewing]\ncredential_process = {program}\n")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(config))
    return lambda: len(count.read_text().splitlines())


@pytest.mark.parametrize(("method", "path"), [("PUT", "*.take-*"), ("GET", DATA)])
def test_s3_expired_credentials_are_renewed(proxy, place, renewing, method, path):
    url, options = place
    given = {name: value for name, value in options.items() if name not in ("key", "secret")} | {"profile": "renewing"}
    expired = b"<Error><Code>ExpiredToken</Code><Message>The provided token has expired.</Message></Error>"
    with proxy.fault(method=method, path=path, status=400, body=expired):
        Snapshot.take(url, state(), storage_options=given)
        live = state(fill=0)
        Snapshot(url, storage_options=given).restore(live)
    assert torch.equal(live["s"]["x"], state()["s"]["x"])
    assert renewing() >= 2


@pytest.mark.timeout(15, func_only=True)
@one_engine
def test_s3_credential_process_that_hangs_is_not_waited_for(place, tmp_path, monkeypatch):
    config = tmp_path / "config"
    config.write_text("[profile silent]\ncredential_process = sleep 60\n")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(config))
    url, options = place
    given = {name: value for name, value in options.items() if name not in ("key", "secret")} | {"profile": "silent"}
    with pytest.raises(StorageError, match="no response"):
        Snapshot.take(url, state(), storage_options=given | IMPATIENT)


@pytest.mark.timeout(10, func_only=True)
@one_engine
def test_s3_expired_credentials_that_cannot_be_renewed_fail_at_once(proxy, place):
    url, options = place
    expired = b"<Error><Code>ExpiredToken</Code><Message>The provided token has expired.</Message></Error>"
    with proxy.fault(times=None, status=400, body=expired), pytest.raises(StorageError, match="ExpiredToken"):
        Snapshot.take(url, state(), storage_options=options)


# Reading


@pytest.fixture
def taken(moto, place):
    """A snapshot that is there already."""
    Snapshot.take(place[0], state(), storage_options=clean(moto, place[1]))
    return place


def restored(taken, **more):
    live = state(fill=0)
    report = Snapshot(taken[0], storage_options=taken[1] | more).restore(live)
    assert torch.equal(live["s"]["x"], state()["s"]["x"])
    return report


READ_FAULTS = [
    (DATA, {"status": 503, "times": 2}),
    (DATA, {"reset_before": True}),
    (DATA, {"reset_at": 0}),
    (DATA, {"reset_at": 900_000}),
    (DATA, {"close_at": 600_000, "times": 3}),
    (DATA, {"hang_at": 500_000}),
    (DATA, {"hang": True}),
    (DATA, {"truncate": 100_000}),
    (DATA, {"flip": 2_345_678}),
    (DATA, {"lose_answer": True}),
    (MANIFEST, {"status": 503, "times": 2}),
    (MANIFEST, {"reset_at": 100}),
    (MANIFEST, {"flip": 3000}),
    (MANIFEST, {"hang_at": 100}),
    (MANIFEST, {"truncate": 10}),
]


@pytest.mark.parametrize(("path", "fault"), READ_FAULTS)
def test_s3_restore_retries_transient_faults(proxy, taken, retries, path, fault):
    with proxy.fault(method="GET", path=path, **fault):
        restored(taken, **patience(fault))
    assert retries


def test_s3_restore_does_not_request_received_bytes_again(proxy, taken):
    def long(request):
        begin, _, end = request.headers.get("range", "bytes=0-0").removeprefix("bytes=").partition("-")
        return request.method == "GET" and int(end) - int(begin) > 4_000_000

    with proxy.fault(path=long, reset_at=4_000_000):
        restored(taken)
    assert sum(each.response_bytes for each in proxy.requests if each.method == "GET") < 7 * MiB


def test_s3_restore_with_a_permanent_flipped_bit_is_corrupt(proxy, taken):
    with proxy.fault(method="GET", path=DATA, flip=2_345_678, times=None):
        live = state(fill=0)
        with pytest.raises(CorruptSnapshotError, match="s/x"):
            Snapshot(taken[0], storage_options=taken[1]).restore(live)


def test_s3_restore_from_a_server_that_ignores_ranges_raises(proxy, taken):
    with (
        proxy.fault(method="GET", path=DATA, ignore_range=True, times=None),
        pytest.raises(StorageError, match="must support range requests"),
    ):
        restored(taken)


def test_s3_restore_retries_a_throttling_server(proxy, taken):
    proxy.concurrency = 1
    proxy.bandwidth = 10 * MiB  # requests take long enough to overlap, also on a busy machine
    restored(taken)
    assert proxy.refused


def test_s3_restore_waits_for_a_slow_server(proxy, taken):
    proxy.bandwidth = 3 * MiB
    before = len(proxy.requests)
    restored(taken, timeout=1)
    sent = Snapshot(taken[0], storage_options=taken[1]).metadata.nbytes
    assert sent / proxy.bandwidth > 1.5, "more than an attempt may take without progress"
    read = [each for each in proxy.requests[before:] if "/data/" in each.path]
    assert all(each.status in (200, 206) for each in read)


@pytest.mark.timeout(SOON, func_only=True)
@pytest.mark.parametrize("fault", [{"status": 503}, {"hang": True}, {"status": 403}, {"hang_at": 1000}])
def test_s3_restore_that_fails_raises_storage_error(proxy, taken, fault):
    live = state(fill=0)
    with proxy.fault(path=DATA, method="GET", times=None, **fault) as made, pytest.raises(StorageError, match="s3://"):
        impatiently(made, lambda patience: Snapshot(taken[0], storage_options=taken[1] | patience).restore(live))


@one_engine
def test_s3_read_back_finds_a_bit_flipped_during_the_upload(moto, proxy, place):
    """moto checks nothing that it is sent; where a part flips, the store holds what nobody has written."""
    url, options = place
    with proxy.fault(method="PUT", path=DATA, flip=2_345_678, side="request") as made:
        Snapshot.take(url, state(), storage_options=options)
    assert made.hits
    assert not Snapshot(url, storage_options=options).verify()
    refused = pytest.raises(CorruptSnapshotError, match="nothing was committed")
    with proxy.fault(method="PUT", path=DATA, flip=2_345_678, side="request") as made, refused:
        Snapshot.take(f"{url}-2", state(), storage_options=options, options=TakeOptions(read_back=True))
    assert made.hits
    assert not Snapshot(f"{url}-2", storage_options=options).exists()
    assert left(moto, (f"{url}-2", options)) == ([], [])
    Snapshot.take(f"{url}-2", state(), storage_options=options, options=TakeOptions(read_back=True))
    assert whole(moto, (f"{url}-2", options))
