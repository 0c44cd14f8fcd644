"""Faults that other checkpoint libraries were shown to have, each as a test of ours.

Those that concern one process and have no better place; the rest stand beside what they are about.
"""

import os

import pytest
import torch

from snapshot import RestoreError, Snapshot, StateDict
from snapshot.testing import recording


def test_restore_of_many_keys_reads_each_byte_once():
    state = {f"key{i}": StateDict(x=torch.full((5000,), float(i))) for i in range(8)}
    with recording() as log:
        Snapshot.take("recording+memory://keys", state, overwrite=True)
        log.clear()
        Snapshot("recording+memory://keys").restore(state)
        assert log.nbytes("read_into") <= 8 * 20_000 + 4096
        assert len(log.of("get")) == 1


@pytest.mark.timeout(60, func_only=True)  # a peer takes minutes
def test_take_and_restore_of_many_keys_with_small_tensors_are_quick():
    state = {f"key{i}": StateDict(**{f"t{j}": torch.ones(4) for j in range(50)}) for i in range(100)}
    with recording() as log:
        for _ in range(3):
            Snapshot.take("recording+memory://quick", state, overwrite=True)
            log.clear()
            Snapshot("recording+memory://quick").restore(state)
        assert len(log.of("get")) == 1
        assert len(log.of("read_into")) <= 2, "requests for each key, or for each tensor"


def test_data_files_of_keys_that_look_like_chunk_names_do_not_collide(monkeypatch, tmp_path):
    from snapshot.plan import layout

    monkeypatch.setattr(layout, "LARGEST_FILE", 4000)
    values = {
        "a": torch.randn(3000),
        "a_0": torch.randn(3000),
        "a_1000": torch.randn(3000),
        "a[0:1000]": torch.randn(1000),
    }
    Snapshot.take(tmp_path, {"s": StateDict(**values)})
    back = Snapshot(tmp_path).get_state_dict_for_key("s")
    assert all(torch.equal(back[name], value) for name, value in values.items())


def test_async_take_with_overwrite_reuses_a_path(tmp_path):
    for i in range(3):
        Snapshot.async_take(tmp_path / "s", {"s": StateDict(x=torch.full((10,), i))}, overwrite=True).wait()
        assert Snapshot(tmp_path / "s").read_object("0/s/x").eq(i).all()
        assert len(os.listdir(tmp_path / "s" / "data")) == 1


def test_restore_never_casts_a_dtype_silently():
    Snapshot.take("memory://cast", {"m": torch.nn.Linear(2, 2)}, overwrite=True)
    with pytest.raises(RestoreError, match="bfloat16"):
        Snapshot("memory://cast").restore({"m": torch.nn.Linear(2, 2, dtype=torch.bfloat16)})


def test_take_stores_an_int_in_few_bytes():
    small = Snapshot.take("memory://small", {"s": StateDict(a=1)}, overwrite=True)
    with recording() as log:
        Snapshot.take("recording+memory://ints", {"s": StateDict(**{f"k{i}": i for i in range(101)})}, overwrite=True)
        assert log.nbytes("commit") < 101 * 100 + 1000
    assert small.metadata.nbytes == 0


def test_restore_of_bfloat16_and_zero_element_tensors():
    values = {"b": torch.randn(5).bfloat16(), "e": torch.empty(0), "e2": torch.empty(2, 0, dtype=torch.bool)}
    Snapshot.take("memory://bf16", {"s": StateDict(**values)}, overwrite=True)
    live = StateDict(b=torch.zeros(5).bfloat16(), e=torch.empty(0), e2=torch.empty(2, 0, dtype=torch.bool))
    report = Snapshot("memory://bf16").restore({"s": live})
    assert torch.equal(live["b"], values["b"])
    assert not report.lines


def test_tied_weights_take_their_bytes_once(tmp_path):
    embedding = torch.nn.Embedding(1000, 100)
    head = torch.nn.Linear(100, 1000, bias=False)
    head.weight = embedding.weight
    Snapshot.take(tmp_path, {"model": torch.nn.ModuleList([embedding, head])})
    assert sum(file.stat().st_size for file in (tmp_path / "data").iterdir()) < 400_000 + 3 * 4096


def test_storage_options_reach_the_plugin():
    with pytest.raises(ValueError, match="colour"):
        Snapshot.take("memory://options", {"s": StateDict(x=1)}, storage_options={"colour": "red"})
    with pytest.raises(ValueError, match="colour"):
        Snapshot("memory://options", None, {"colour": "red"}).exists()


def test_snapshot_attributes_known_from_torchsnapshot_exist():
    snapshot = Snapshot.take(
        "memory://names", {"s": StateDict(w=torch.ones(2), n=1, f=0.5, t="x", b=b"y", l=[None])}, overwrite=True
    )
    manifest = snapshot.metadata.manifest
    assert manifest == snapshot.get_manifest()
    assert {path: entry.type for path, entry in manifest.items()} == {
        "0/s": "dict",
        "0/s/w": "Tensor",
        "0/s/n": "int",
        "0/s/f": "float",
        "0/s/t": "str",
        "0/s/b": "bytes",
        "0/s/l": "list",
        "0/s/l/0": "NoneType",
    }
    assert snapshot.pg is None
    assert snapshot.path == "memory://names"
