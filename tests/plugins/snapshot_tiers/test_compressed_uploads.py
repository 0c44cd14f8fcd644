"""Uploads that are compressed on their way: near files stay as they are, and both are the same step."""

import json
import os
import shutil

import pytest
import torch
import torch.distributed as dist
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from snapshot import Snapshot, SnapshotManager, StateDict, StorageError, TakeOptions
from snapshot.errors import StorageNotFoundError
from snapshot.formats.derived import DerivedStorage
from snapshot.io.budget import MemoryBudget
from snapshot.io.loop import run
from snapshot.io.session import Session
from snapshot.io.url import URL
from snapshot.loading.decompression import unpacking
from snapshot.loading.open import open_checkpoint
from snapshot.runs.timeline import Facts
from snapshot.tensors.digest import digest_range
from snapshot_tiers import Near
from snapshot_tiers.far_upload import FarStorage, FarUpload, PackedUploads, read_notes
from snapshot_tiers.near_steps import NearFolder, copy_verified, describe_files
from tests.plugins.snapshot_tiers.jobs import data_files, flip_keeping_time, holds, manager_of, rank, stop_uploaders
from tests.plugins.snapshot_tiers.jobs import state as job_state

pytestmark = pytest.mark.slow  # each test starts an uploader


def state(step):
    generator = torch.Generator().manual_seed(max(step, 0))
    weight = (torch.randn(900, 512, generator=generator) * 0.02).bfloat16()
    moment = torch.randn(300, 512, generator=generator)
    if step < 0:
        weight, moment = torch.zeros_like(weight), torch.zeros_like(moment)
    return {
        "s": StateDict(weight=weight, moment=moment, small=torch.full((7,), float(step)), step=step, text="x" * 100)
    }


def holds_step(live, step):
    wanted = state(step)["s"]
    return all(
        torch.equal(live["s"][name], value) if isinstance(value, torch.Tensor) else live["s"][name] == value
        for name, value in wanted.items()
    )


def nbytes(folder):
    return sum(os.path.getsize(path) for path in folder.rglob("*.safetensors"))


def restored(tmp_path, host, **given):
    with manager_of(tmp_path / "far", host, upload_compression="zstd", **given) as manager:
        live = state(-1)
        assert manager.restore_latest(live) == 10
        assert holds_step(live, 10)
        return manager.report.sources


def test_upload_compression_compresses_far_but_not_near(tmp_path, hosts):
    with manager_of(tmp_path / "far", hosts("a"), upload_compression="zstd") as manager:
        manager.async_take(10, state(10)).wait("far", timeout=300)
        (near,) = hosts("a").rglob("step-10")
        assert Snapshot(near).metadata.format == "snapshot/1"
    far = tmp_path / "far" / "step-10"
    assert Snapshot(far).metadata.format == "snapshot/2"
    assert nbytes(near) > 1.1 * nbytes(far)
    assert Snapshot(far).verify()
    assert not Snapshot.diff(near, far)
    assert sorted(f"data/{path.name}" for path in (far / "data").iterdir()) == sorted(Snapshot(far).metadata.files)
    live = state(-1)
    Snapshot(far).restore(live)
    assert holds_step(live, 10)
    with SnapshotManager(str(tmp_path / "far"), signals=()) as plain:
        live = state(-1)
        assert plain.restore_latest(live) == 10
        assert holds_step(live, 10)
    Snapshot(far).delete()
    assert not list((tmp_path / "far").rglob("data"))


def test_upload_compression_restores_from_near_files_and_missing_ones_from_far(tmp_path, hosts):
    with manager_of(tmp_path / "far", hosts("a"), upload_compression="zstd", keep_near=None) as manager:
        manager.take(10, state(10))
    sources = restored(tmp_path, hosts("a"))
    assert sources["near"] > 0
    assert sources["far"] == 0
    assert restored(tmp_path, hosts("b"))["far"] > 0  # a host without near files
    for damage in (flip_keeping_time, os.unlink):
        damaged = next(path for path in data_files(hosts("a"), 10) if path.suffix == ".safetensors")
        good = damaged.read_bytes()
        damage(damaged)
        assert restored(tmp_path, hosts("a"))["far"] > 0
        if damage is flip_keeping_time:
            assert damaged.read_bytes() == good  # healed from the compressed file


def test_upload_compression_far_step_is_readable_without_its_near_manifest(tmp_path, hosts):
    with manager_of(tmp_path / "far", hosts("a"), upload_compression="zstd", keep_near=None) as manager:
        manager.take(10, state(10))
    (near,) = hosts("a").rglob("step-10")
    os.unlink(near / ".snapshot_metadata")
    restored(tmp_path, hosts("a"))


@pytest.mark.parametrize("full", [False, True])
def test_upload_compression_of_a_large_file_uses_a_temporary_file(tmp_path, monkeypatch, full):
    Snapshot.take(tmp_path / "near", state(10))
    near, target = Session(URL("near", str(tmp_path / "near")), None), Session(URL.parse(str(tmp_path / "far")), None)
    packed = PackedUploads(near, target)
    packed._memory = MemoryBudget(1 << 20)
    try:
        document = run(open_checkpoint(near)).document
        (name,) = [name for name in document.files if name.endswith("safetensors")]
        files = run(describe_files(near, document, [name]))
        if full:
            monkeypatch.setattr("os.posix_fallocate", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left")))
            with pytest.raises(StorageError, match=r"near: a temporary file of .* cannot be created: .*No space left"):
                run(copy_verified(near, target, files, pack=packed.pack))
            return
        run(copy_verified(near, target, files, pack=packed.pack))
        (note,) = run(read_notes(target.storage, document.save_id)).values()
        assert note.size == os.path.getsize(tmp_path / "far" / name) < files[0].size
        document.files[name].packed = note.describe(name)
        unpacked = unpacking(document.files)
        read = DerivedStorage(target.storage, unpacked, document.files, MemoryBudget(1 << 20))
        data = bytearray(files[0].size)
        run(read.read_into(name, 0, [data]))
        assert data == (tmp_path / "near" / name).read_bytes()
    finally:
        run(near.close())
        run(target.close())
    assert sorted(path.name for path in (tmp_path / "near").iterdir()) == [".snapshot_metadata", "data"]


def test_upload_compression_sends_a_file_plain_without_room_in_the_near_root(tmp_path, monkeypatch, caplog):
    Snapshot.take(tmp_path / "near", state(10))
    near, target = Session(URL("near", str(tmp_path / "near")), None), Session(URL.parse(str(tmp_path / "far")), None)
    packed = PackedUploads(near, target)
    packed._memory = MemoryBudget(1 << 20)
    monkeypatch.setattr("snapshot_tiers.far_upload._has_room", lambda *_: False)
    try:
        document = run(open_checkpoint(near)).document
        (name,) = [name for name in document.files if name.endswith("safetensors")]
        files = run(describe_files(near, document, [name]))
        run(copy_verified(near, target, files, pack=packed.pack))
    finally:
        run(near.close())
        run(target.close())
    assert (tmp_path / "far" / name).read_bytes() == (tmp_path / "near" / name).read_bytes()
    assert "has no room to compress" in caplog.text
    assert [path.name for path in (tmp_path / "far/data").iterdir()] == [name.partition("/")[2]]


def test_upload_compression_unreadable_far_manifest_is_an_error(tmp_path):
    with SnapshotManager(tmp_path / "far", near=Near(tmp_path / "near", compression="zstd"), signals=()) as manager:
        manager.async_take(10, state(10)).wait("far", timeout=300)
    stop_uploaders(tmp_path / "near")
    far = Snapshot(tmp_path / "far/step-10")
    session = Session(URL.parse(str(tmp_path / "far/step-10")), None)
    (name, file), *_ = [each for each in far._manifest.open().files.items() if each[1].packed]
    get = session.storage.get
    failures = [StorageError("503 slow down"), StorageNotFoundError("not there yet")]

    async def failing(path, **options):
        if failures:
            raise failures.pop(0)
        return await get(path, **options)

    session.storage.get = failing
    far = FarStorage(session.storage)
    try:
        with pytest.raises(StorageError, match="503"):
            run(far.stat(name))
        assert run(far.stat(name)).size == file.packed.size  # without a manifest, nothing is known
        assert run(far.stat(name)).size == file.size
        data = bytearray(file.size)
        run(far.read_into(name, 0, [data]))
        assert digest_range(data[: file.header]) == file.header_digest
        failures.append(StorageError("503 slow down"))
        with pytest.raises(StorageError, match="503"):
            run(FarStorage(session.storage).read_into(name, 0, [data]))
    finally:
        run(session.close())


def test_upload_compression_sends_a_compressed_take_unchanged(tmp_path, hosts):
    with manager_of(tmp_path / "far", hosts("a"), upload_compression="zstd") as manager:
        manager.async_take(10, state(10), options=TakeOptions(compression="zstd")).wait("far", timeout=300)
        (near,) = hosts("a").rglob("step-10")
        assert nbytes(near) == nbytes(tmp_path / "far" / "step-10")
    restored(tmp_path, hosts("a"))
    for damage in (flip_keeping_time, os.unlink):
        for suffix in (".safetensors", ".bin"):
            damaged = next(path for path in data_files(hosts("a"), 10) if path.suffix == suffix)
            good = damaged.read_bytes()
            damage(damaged)
            assert restored(tmp_path, hosts("a"))["far"] > 0
            if damage is flip_keeping_time:
                assert damaged.read_bytes() == good
            damaged.write_bytes(good)
    shutil.rmtree(hosts("a"))
    restored(tmp_path, hosts("a"))


def _take_on_two_hosts(root, near, compressing):
    name = "ab"[rank()]
    with manager_of(root, f"{near}/{name}", upload_compression="zstd" if name in compressing else None) as manager:
        pending = manager.async_take(10, job_state(10, 60_000))
        pending.wait("far", timeout=300)
        dist.barrier()
    return [path.name for path in data_files(f"{near}/{name}", 10) if path.suffix == ".safetensors"]


def _restore_on_two_hosts(root, near):
    live = job_state(-1, 60_000)
    with manager_of(root, f"{near}/{'ab'[rank()]}") as manager:
        step = manager.restore_latest(live)
        dist.barrier()
        return step == 10 and holds(live, 10), manager.report.sources["far"] > 0


@pytest.mark.parametrize("compressing", ["ab", "a", "b"])
def test_upload_compression_may_differ_between_hosts(two, tmp_path, hosts, compressing):
    names = two.run(_take_on_two_hosts, tmp_path / "far", hosts("a").parent, compressing, timeout=300)
    hosts("b")
    far = Snapshot(tmp_path / "far" / "step-10")
    packed = {
        path.removeprefix("data/") for path, file in far._manifest.open().files.items() if file.packed is not None
    }
    assert packed == {name for host, found in zip("ab", names, strict=True) for name in found if host in compressing}
    assert far.verify()
    assert sorted(f"data/{path.name}" for path in (tmp_path / "far/step-10/data").iterdir()) == sorted(
        far.metadata.files
    )
    assert two.run(_restore_on_two_hosts, tmp_path / "far", hosts("a").parent) == [(True, False)] * 2
    stop_uploaders(hosts("a"), hosts("b"))
    for name in "ab":
        shutil.rmtree(hosts(name))
    assert two.run(_restore_on_two_hosts, tmp_path / "far", hosts("a").parent) == [(True, True)] * 2


@pytest.mark.parametrize("first", [True, False])
def test_upload_compression_file_sent_by_two_hosts_is_described_as_stored(tmp_path, monkeypatch, first):
    Snapshot.take(tmp_path / "near/step-10", state(10))
    near = NearFolder(str(tmp_path / "near")).steps()[10]
    facts = Facts()
    root = Session(URL.parse(str(tmp_path / "far")), None)
    sessions = []

    def upload(compress):
        source = Session(URL("near", str(tmp_path / "near/step-10")), None)
        target = Session(URL.parse(str(tmp_path / "far/step-10")), None)
        sessions.extend([source, target])
        return FarUpload(root.storage, source, target, near, lambda _: None, compress=compress)

    here, one, other = list(near.head.sizes()), upload(first), upload(not first)
    forms = []

    async def copy_after_the_other(*given, **options):
        monkeypatch.undo()
        assert await other.advance(facts, here, names=(), commits=True)
        forms.append(json.loads((tmp_path / "far/step-10/.snapshot_metadata").read_bytes())["format"])
        await copy_verified(*given, **options)

    monkeypatch.setattr("snapshot_tiers.far_upload.copy_verified", copy_after_the_other)
    try:
        assert run(one.advance(facts, here, names=(), commits=False))
    finally:
        for session in [root, *sessions]:
            run(session.close())
    far = Snapshot(tmp_path / "far/step-10")
    assert {*forms, far.metadata.format} == {"snapshot/1", "snapshot/2"}
    assert far.verify()
    live = state(-1)
    far.restore(live)
    assert holds_step(live, 10)
    kept = {f"data/{path.name}" for path in (tmp_path / "far/step-10/data").iterdir()}
    assert kept >= set(far.metadata.files)
    assert not [name for name in kept if name.endswith(".json")]


@pytest.mark.parametrize("value", ["auto", "lz4", True])
def test_upload_compression_refuses_unknown_values(tmp_path, value):
    with pytest.raises(ValueError, match="compression must be None or 'zstd'"):
        SnapshotManager(tmp_path / "far", near=Near(tmp_path / "near", compression=value))


@pytest.mark.parametrize("compression", [None, "zstd"])
def test_uploaded_step_can_be_signed(tmp_path, hosts, compression):
    key = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
    with manager_of(tmp_path / "far", hosts("a"), upload_compression=compression) as manager:
        manager.async_take(10, state(10)).wait("far", timeout=300)
        manager.async_take(20, state(20)).wait("far", timeout=300)
        assert Snapshot(tmp_path / "far" / "step-10").sign(key)
        live = state(-1)
        assert manager.restore_latest(live) == 20  # from near, without a key
        assert holds_step(live, 20)
    with SnapshotManager(str(tmp_path / "far"), signals=()) as plain:
        live = state(-1)
        assert plain.restore_latest(live, key=key.public_key()) == 10
        assert holds_step(live, 10)
        Snapshot(tmp_path / "far" / "step-10").delete()
    assert not any(path for path in (tmp_path / "far" / "step-10").rglob("*") if path.is_file())
