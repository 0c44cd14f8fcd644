"""Signed snapshots of several ranks: each hashes its own files, and the leader signs."""

import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, zeros

from snapshot import RestoreOptions, Snapshot, SnapshotError, SnapshotManager, StateDict, TakeOptions
from snapshot.errors import StorageNotFoundError
from snapshot.testing import Fault, recording, tapped
from tests.helpers.versions import distribute

SHAPE = (1200, 700)
KEY = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))


def _key():
    return Ed25519PrivateKey.from_private_bytes(bytes(range(32)))


def _whole():
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(1))


def _save(path, key="private", base=None):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    state = StateDict(
        sharded=distribute(_whole(), mesh, [Shard(0)]),
        same=torch.arange(90_000.0),
        mine=torch.full((500,), float(dist.get_rank())),
    )
    first = dist.get_rank() == 0
    given = {
        "private": _key,
        "only the leader": lambda: _key() if first else _key().public_key(),
        "public": lambda: _key().public_key(),
        "only rank 0": lambda: _key() if first else None,
        "only rank 1": lambda: None if first else _key(),
        "another on rank 1": lambda: _key() if first else Ed25519PrivateKey.from_private_bytes(bytes(32)),
    }[key]()
    try:
        Snapshot.take(path, {"s": state}, replicated=["s/same"], base=base, options=TakeOptions(sign=given))
    except (SnapshotError, ValueError) as error:
        return str(error)
    return ""


def _save_many(path):
    """A manifest so long that each rank has a part of its own."""
    values = {f"v{number}": number + dist.get_rank() for number in range(120_000)}
    Snapshot.take(path, {"s": StateDict(**values, rank=dist.get_rank())}, options=TakeOptions(sign=_key()))


def _load(path, dim):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    state = StateDict(
        sharded=zeros(SHAPE, dtype=torch.float32, device_mesh=mesh, placements=[Shard(dim)]),
        same=torch.zeros(90_000),
    )
    try:
        Snapshot(path, key=_key().public_key()).restore({"s": state})
    except SnapshotError as error:
        return str(error)
    part = distribute(_whole(), mesh, [Shard(dim)])
    assert torch.equal(state["sharded"].to_local(), part.to_local())
    return ""


def _flip(file, at):
    data = bytearray(file.read_bytes())
    data[at] ^= 1
    file.write_bytes(data)


@pytest.mark.parametrize("key", ["private", "only the leader"])
def test_signed_snapshot_of_ranks_restores_on_another_world_size(four, two, folder, key):
    assert two.run(_save, f"{folder}/s", key) == ["", ""]
    assert Snapshot(f"{folder}/s", key=KEY.public_key()).verify()
    assert four.run(_load, f"{folder}/s", 1) == [""] * 4
    for rank in (0, 1):  # the bytes and the hashes of each rank are covered
        for ending, at in (("-[0-9]+.safetensors", -9), (".sha256", -1)):
            (file, *_) = [
                each
                for each in Path(folder, "s", "data").iterdir()
                if re.fullmatch(f"[0-9a-f]{{12}}-{rank}{ending}", each.name)
            ]
            _flip(file, at)
            assert not Snapshot(f"{folder}/s", key=KEY.public_key()).verify()
            _flip(file, at)
    names = {each.name: each.read_bytes() for each in Path(folder, "s", "data").iterdir()}
    Snapshot(f"{folder}/s").sign(KEY)
    assert names == {each.name: each.read_bytes() for each in Path(folder, "s", "data").iterdir()}


def test_signature_with_a_changed_byte_raises_on_all_ranks(two, folder):
    two.run(_save, f"{folder}/s")
    (signature,) = Path(folder, "s", "data").glob("*.signature")
    _flip(signature, -3)
    errors = two.run(_load, f"{folder}/s", 0)
    assert all("signature" in error for error in errors)


def _load_from_afar(path):
    with recording():
        return _load(f"recording+file://{path}", 0)


def test_signed_remote_snapshot_is_verified_by_each_rank_of_a_host(two, folder):
    two.run(_save, f"{folder}/s")
    assert two.run(_load_from_afar, f"{folder}/s") == ["", ""]


@pytest.mark.parametrize(
    ("key", "error"),
    [
        ("only rank 0", "sign must be the same on all ranks, got ed25519:"),
        ("only rank 1", "sign must be the same on all ranks, got no key on rank 0, ed25519:"),
        ("another on rank 1", "sign must be the same on all ranks, got ed25519:"),
        ("public", "sign must be a private key on rank 0, got a public one"),
    ],
)
def test_sign_must_be_the_same_on_all_ranks(two, folder, key, error):
    assert all(error in found for found in two.run(_save, f"{folder}/s", key))
    assert not any(path for path in Path(folder, "s").rglob("*") if path.is_file())


def test_signature_covers_the_parts_of_a_long_manifest(two, folder):
    two.run(_save_many, f"{folder}/s")
    parts = sorted(Path(folder, "s", "data").glob("*.json"))
    assert len(parts) == 2
    snapshot = Snapshot(f"{folder}/s", key=KEY.public_key())
    assert snapshot.verify()
    assert snapshot.read_object("1/s/rank") == 1
    for part in parts:
        _flip(part, 1_000_000)
        with pytest.raises(SnapshotError, match="not the signed ones"):
            Snapshot(f"{folder}/s", key=KEY.public_key()).verify()
        _flip(part, 1_000_000)
    assert snapshot.verify()


def test_signature_of_ranks_covers_files_shared_with_a_base(two, folder):
    two.run(_save, f"{folder}/s")
    assert two.run(_save, f"{folder}/t", "private", f"{folder}/s") == ["", ""]
    assert all(
        file.origin for name, file in Snapshot(f"{folder}/t")._manifest.open().files.items() if name.endswith("tensors")
    )
    Snapshot(f"{folder}/s").delete()
    assert Snapshot(f"{folder}/t", key=KEY.public_key()).verify()
    assert two.run(_load, f"{folder}/t", 1) == ["", ""]


def _keyed_base(path, base):
    """Give the key of the base on rank 1 only."""
    key = _key().public_key() if dist.get_rank() else None
    try:
        Snapshot.take(path, {"s": StateDict(n=1)}, base=Snapshot(base, key=key), options=TakeOptions(sign=_key()))
    except SnapshotError as error:
        return str(error)
    return ""


def test_key_of_a_base_must_be_the_same_on_all_ranks(two, folder):
    two.run(_save, f"{folder}/s")
    assert all("no key on rank 0" in error for error in two.run(_keyed_base, f"{folder}/t", f"{folder}/s"))
    assert not Path(folder, "t").exists() or not any(Path(folder, "t").rglob("*.safetensors"))


def _load_once(path, keyed, other):
    live = StateDict(w=torch.zeros(4 << 20))
    key = _key() if dist.get_rank() in keyed else Ed25519PrivateKey.from_private_bytes(bytes(32)) if other else None
    try:
        Snapshot(path, key=key and key.public_key()).restore(
            {"m": live}, options=RestoreOptions(verify=False, read_once=True)
        )
    except SnapshotError as error:
        assert not live["w"].any()
        return str(error)
    return ""


def _save_replicated(path):
    Snapshot.take(
        path, {"m": StateDict(w=torch.arange(float(4 << 20)))}, replicated=["**"], options=TakeOptions(sign=_key())
    )


@pytest.mark.parametrize("other", [False, True])
@pytest.mark.parametrize("keyed", [[0], [1]])
def test_key_of_a_restore_must_be_the_same_on_all_ranks(two, folder, keyed, other):
    """Otherwise a rank without the key would read bytes for one that has it, once for all ranks."""
    two.run(_save_replicated, f"{folder}/s")
    file = max(Path(folder, "s", "data").glob("*-0-*.safetensors"), key=lambda each: each.stat().st_size)
    _flip(file, file.stat().st_size // 2)
    errors = two.run(_load_once, f"{folder}/s", keyed, other)
    assert all("key must be the same on all ranks, got " in error for error in errors)


def _latest(root, keys):
    live = StateDict(n=0, mine=torch.zeros(400_000))
    key = {"same": _key, "only rank 0": lambda: None if dist.get_rank() else _key()}[keys]()
    with SnapshotManager(root, signals=()) as manager:
        try:
            return manager.restore_latest({"s": live}, key=key and key.public_key()), live["n"]
        except SnapshotError as error:
            return str(error)


def _take_steps(root):
    with SnapshotManager(root, signals=()) as manager:
        for step in (1, 2):
            mine = torch.full((400_000,), float(step + dist.get_rank()))
            manager.take(step, {"s": StateDict(n=step, mine=mine)}, options=TakeOptions(sign=_key()))


def _latest_hidden(root):
    """Rank 1 does not find the signature of the newest step."""
    (signature,) = Path(root, "step-2", "data").glob("*.signature")
    fault = Fault(on="get", path=f"*{signature.name}", error=StorageNotFoundError("no signature"), times=None)
    with tapped("hidden", *([fault] if dist.get_rank() else [])):
        return _latest(f"hidden+file://{root}", "same")


def test_restore_latest_skips_a_step_that_only_another_rank_finds_unsigned(two, folder):
    two.run(_take_steps, folder)
    assert two.run(_latest, folder, "same") == [(2, 2), (2, 2)]
    assert two.run(_latest_hidden, folder) == [(1, 1), (1, 1)]
    assert all("key must be the same on all ranks" in error for error in two.run(_latest, folder, "only rank 0"))
