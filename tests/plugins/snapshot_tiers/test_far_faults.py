"""Broken connections to the bucket, and killed uploaders: training continues, and each step is committed once."""

import signal
from pathlib import Path

import pytest

from snapshot import KeepLatest, Snapshot
from snapshot.errors import BucketNotFoundError, SnapshotError, StorageError
from tests.plugins.snapshot_tiers.jobs import (
    ask,
    data_files,
    holds,
    is_dead,
    manager_of,
    runs_in,
    state,
    stop_uploaders,
    until,
    upload_all,
)

MiB = 1 << 20
LARGE = 5 * MiB  # elements: 20 MiB for each of two tensors
PARTS = "*partNumber=*"
MANIFEST = "*.snapshot_metadata"


@pytest.fixture
def bucket(moto, proxy):
    """The far root, and the options with which it is reached through the proxy."""
    return f"s3://{moto.bucket()}/run", {
        "key": moto.key,
        "secret": moto.secret,
        "endpoint_url": proxy.url,
        "client_kwargs": {"region_name": moto.region},
        "part_bytes": 5 * MiB,
        "timeout": 5,
        "deadline": 5,
    }


def job(bucket, near, **options):
    return manager_of(bucket[0], near, storage_options=bucket[1], **options)


def is_uploaded(bucket, step, value):
    live = state(-1)
    there = Snapshot(f"{bucket[0]}/step-{step}", storage_options=bucket[1])
    assert there.verify()
    there.restore(live)
    return holds(live, value)


def test_uploader_killed_continues_its_multipart_upload(bucket, proxy, hosts):
    live = state(10, LARGE)
    with job(bucket, hosts("a"), rate=8 * MiB) as manager:
        manager.take(10, live)
        size = sum(path.stat().st_size for path in data_files(hosts("a"), 10))
        kills = 0
        while manager.where(10)["far"] != "whole":
            sent = proxy.count("PUT", PARTS)
            if sent >= 2 * (kills + 1) and kills < 2:
                kills += 1
                stop_uploaders(hosts("a"))
        assert kills == 2
        sent = sum(each.request_bytes for each in proxy.requests if each.method == "PUT")
        assert size <= sent <= size + 2 * 4 * 5 * MiB  # the parts that were on their way at each kill
        assert proxy.count("POST", "*?uploads*") <= 2  # one for each file
    big = state(-1, LARGE)
    Snapshot(f"{bucket[0]}/step-10", storage_options=bucket[1]).restore(big)
    assert holds(big, 10)


@pytest.mark.parametrize("how", ["before", "after"])
def test_uploader_killed_around_the_manifest_commits_once(bucket, proxy, hosts, how):
    mishap = {"hang": True} if how == "before" else {"lose_answer": "hang"}
    fault = proxy.fault("PUT", MANIFEST, **mishap)
    with job(bucket, hosts("a")) as manager:
        manager.take(10, state(10))
        until(lambda: fault.hits)
        stop_uploaders(hosts("a"))
        fault.release()
        until(lambda: manager.where(10)["far"] == "whole")
    stored = [each for each in proxy.requests if each.method == "PUT" and each.path.endswith(".snapshot_metadata")]
    assert len(stored) == (2 if how == "before" else 1)  # the answer of the only one was lost
    assert is_uploaded(bucket, 10, 10)


def test_upload_with_a_lost_response_to_the_manifest_commits_once(bucket, proxy, hosts):
    proxy.fault("PUT", MANIFEST, lose_answer="reset")
    with job(bucket, hosts("a")) as manager:
        manager.take(10, state(10))
        until(lambda: manager.where(10)["far"] == "whole")
    assert is_uploaded(bucket, 10, 10)


def test_upload_to_a_bucket_that_is_down_blocks_and_loses_nothing(bucket, proxy, hosts):
    down = proxy.fault(times=None, status=503)
    with job(bucket, hosts("a"), keep_near=KeepLatest(2), grace=0.5) as manager:
        assert manager._steps._set is None
        for step in range(10, 70, 10):
            manager.async_take(step, state(step)).wait()
        with pytest.raises(TimeoutError, match="step-60: not in"):
            manager.async_take(60, state(60)).wait("far", timeout=1)
        assert manager.where(60)["near"] == "whole"
        assert manager.where(70) == {"near": "absent", "replicas": 0, "far": "unknown"}  # no uploader tells of it
    assert len(list(runs_in(hosts("a"))[0].glob("step-*"))) <= 6
    with job(bucket, hosts("a"), grace=0.5) as manager:
        live = state(-1)
        with pytest.raises(StorageError):
            manager.restore_latest(live)
        assert manager.restore_latest(live, offline=True) == 60  # from the near folder alone
        assert holds(live, 60)
        proxy.drop(down)
        until(lambda: manager.where(60)["far"] == "whole")
    assert is_uploaded(bucket, 60, 60)
    names = {path.name for path in runs_in(hosts("a"))[0].glob("step-*")}
    assert "step-60" in names


def test_upload_queue_is_bounded(bucket, proxy, hosts):
    down = proxy.fault(times=None, status=503)
    with job(bucket, hosts("a"), keep_near=KeepLatest(1), grace=0, upload=1) as manager:
        for step in range(1, 21):
            manager.take(step, state(step))
        [folder] = runs_in(hosts("a"))
        until(lambda: ask(folder).steps)
        until(lambda: len(ask(folder).steps) <= 10)  # old ones are removed in the background
        assert max(ask(folder).steps) == 20
        assert manager.where(20)["far"] in ("queued", "uploading")
        proxy.drop(down)
        until(lambda: manager.where(20)["far"] == "whole")
    assert is_uploaded(bucket, 20, 20)


def test_uploader_continues_after_its_trainer_was_killed(bucket, proxy, hosts, fresh_pool):
    pool = fresh_pool(1)
    pool.start(_take_and_wait, bucket, hosts("a"))
    until(lambda: runs_in(hosts("a")) and (runs_in(hosts("a"))[0] / "step-10/.snapshot_metadata").exists())
    pool.kill(0)
    [folder] = runs_in(hosts("a"))
    until(lambda: ask(folder).steps and ask(folder).steps[10].far == "whole")
    assert is_uploaded(bucket, 10, 10)
    pid = ask(folder).pid
    with job(bucket, hosts("a")) as manager:  # and is adopted by the next one
        live = state(-1)
        assert manager.restore_latest(live) == 10
        assert holds(live, 10)
        assert ask(folder).pid == pid
    until(lambda: is_dead(pid))


def _take_and_wait(bucket, near):
    manager = job(bucket, near, rate=MiB)
    manager.take(10, state(10))
    signal.pause()


def test_near_take_killed_at_any_moment_leaves_complete_steps(tmp_path, hosts, fresh_pool):
    for round_ in range(4):
        pool = fresh_pool(1)
        pool.start(_take_for_ever, str(tmp_path / "far"), hosts("a"))
        until(lambda base=round_ * 1000: _newest(hosts("a")) > base + 3)
        pool.kill(0)
        with manager_of(tmp_path / "far", hosts("a"), grace=0) as manager:
            live = state(-1)
            step = manager.restore_latest(live)
            assert step is not None
            assert step >= round_ * 1000
            assert holds(live, step)


def _newest(near):
    found = [int(path.parent.name[5:]) for folder in runs_in(near) for path in folder.glob("step-*/.snapshot_metadata")]
    return max(found, default=-1)


def _take_for_ever(far, near):
    manager = manager_of(far, near)
    restored = manager.restore_latest(state(-1))
    step = 0 if restored is None else (restored // 1000 + 1) * 1000
    while True:
        step += 1
        manager.async_take(step, state(step)) if step % 2 else manager.take(step, state(step))


def test_uploader_arguments_contain_no_secret(bucket, hosts):
    with job(bucket, hosts("a")) as manager:
        manager.take(10, state(10))
        [folder] = runs_in(hosts("a"))
        pid = ask(folder).pid
        arguments = Path(f"/proc/{pid}/cmdline").read_bytes()
        assert bucket[1]["secret"].encode() not in arguments
        texts = [folder / ".uploader.log", folder / ".uploader.address", *(folder / ".run").iterdir()]
        assert len(texts) > 2
        assert not [path for path in texts if bucket[1]["secret"] in path.read_text()]
        assert (folder / ".uploader.sock").stat().st_mode & 0o077 == 0
        assert folder.stat().st_mode & 0o077 == 0


def test_uploader_is_not_started_twice(tmp_path, hosts):
    with manager_of(tmp_path / "far", hosts("a")) as manager:
        manager.take(10, state(10))
        with pytest.raises(SnapshotError, match="its uploader runs"):
            upload_all(hosts("a"), tmp_path / "far")


@pytest.mark.parametrize("first", ["take", "restore_latest"])
def test_far_root_bucket_that_does_not_exist_is_an_error_of_the_first_call(moto, tmp_path, hosts, first):
    options = {"key": moto.key, "secret": moto.secret, "client_kwargs": {"region_name": moto.region}}
    options |= {"endpoint_url": moto.url}
    manager = manager_of("s3://no-such-bucket-here/run", hosts("a"), storage_options=options)
    try:
        with pytest.raises(BucketNotFoundError, match="NoSuchBucket"):
            getattr(manager, first)(*([1] if first == "take" else []), state(1))
    finally:
        manager.close()


DENIED = b"<Error><Code>AccessDenied</Code><Message>read-only</Message></Error>"


@pytest.mark.slow
def test_far_root_that_is_read_only_lets_jobs_restore_and_continue(bucket, proxy, tmp_path, caplog):
    near, other = tmp_path / "near", tmp_path / "other"
    with job(bucket, near, upload="latest") as manager:
        manager.take(1, state(1))
        until(lambda: manager.where(1)["far"] == "whole")
    with proxy.fault("PUT", "*", status=403, body=DENIED, times=None):
        for folder, found in ((near, 1), (other, 1), (near, 2)):
            live = state(-1)
            with job(bucket, folder, upload="latest", grace=0.0) as manager:
                assert manager.restore_latest(live) == found
                assert holds(live, found)
                if folder is near:
                    manager.take(found + 1, state(found + 1))
            stop_uploaders(folder)
    assert "cannot be written, so attempts and uploads wait" in caplog.text
    live = state(-1)
    with job(bucket, near, upload="latest") as manager:
        assert manager.restore_latest(live) == 3
        manager.take(4, state(4))
        until(lambda: manager.where(4)["far"] == "whole")
    assert is_uploaded(bucket, 4, 4)


def test_far_root_is_not_written_directly_if_no_restore_would_find_the_step(bucket, proxy, tmp_path):
    """The near folder cannot be used, and other users' facts cannot be written."""
    near = tmp_path / "near"
    near.touch()
    with job(bucket, near) as manager:
        manager.take(1, state(1))
    with proxy.fault("PUT", "*/.run/*", status=403, body=DENIED, times=None), job(bucket, near) as manager:
        assert manager.restore_latest(state(-1)) == 1
        with pytest.raises(StorageError, match="this job's attempt cannot be published there"):
            manager.take(2, state(2))
    with job(bucket, near) as manager:
        assert manager.restore_latest(state(-1)) == 1
        manager.take(2, state(2))
    with job(bucket, near) as manager:
        assert manager.restore_latest(state(-1)) == 2


@pytest.mark.slow
def test_far_root_that_is_not_yet_writable_starts_a_new_run(bucket, proxy, tmp_path):
    near = tmp_path / "near"
    with proxy.fault("PUT", "*", status=403, body=DENIED, times=None), job(bucket, near, grace=0.0) as manager:
        assert manager.restore_latest(state(-1)) is None
        manager.take(1, state(1))
    stop_uploaders(near)
    with job(bucket, near, upload="latest") as manager:
        assert manager.restore_latest(state(-1)) == 1
        manager.take(2, state(2))
        until(lambda: manager.where(2)["far"] == "whole")
    assert is_uploaded(bucket, 2, 2)
