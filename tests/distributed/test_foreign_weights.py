"""GGUF, Orbax and LoRA on several ranks: sharded modules are filled, and shared work has the bits of one process."""

import zipfile
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

import snapshot
import snapshot_merge
from snapshot import Snapshot
from tests.distributed import foreign_weights as ranks
from tests.helpers.states import expect_equal
from tests.plugins.snapshot_gguf.gguf_files import file_of, rounded
from tests.plugins.snapshot_merge.adapters import adapter, draw, factors
from tests.plugins.snapshot_orbax.orbax_items import ARCHIVE, tree
from tests.plugins.snapshot_quantised.quantised_archive import ARCHIVE as QUANTISED_FILES


def test_gguf_restores_into_a_sharded_module(two, folder):
    weight, bias = draw(40, 64), draw(40)
    Path(folder, "m.gguf").write_bytes(file_of({"weight": (weight, "Q8_0"), "bias": bias}))
    for found in two.run(ranks.restore, f"{folder}/m.gguf"):
        expect_equal(found, {"weight": rounded(weight), "bias": bias})
    assert two.run(ranks.verify, f"{folder}/m.gguf") == [True, True]


def test_orbax_restores_into_a_sharded_module(two, folder):
    zipfile.ZipFile(ARCHIVE).extractall(folder)
    dense = tree()["params"]["dense"]
    for name in ("ocdbt", "plain3"):
        for found in two.run(ranks.restore_mapped, f"{folder}/{name}"):
            expect_equal(found, {"weight": dense["kernel"].float().T.contiguous(), "bias": dense["bias"]})


QUANTISED = {"nf4-nested": "bitsandbytes", "int8": "bitsandbytes", "gptq-ordered": "gptq", "awq": "awq"}


@pytest.mark.parametrize("name", QUANTISED)
def test_quantised_weights_restore_into_a_sharded_module(two, folder, name):
    zipfile.ZipFile(QUANTISED_FILES).extractall(folder)
    expected = load_file(f"{folder}/{name}/expected.safetensors")
    weight, bias = (expected[f"layers.0.q_proj.{part}"].float() for part in ("weight", "bias"))
    file = f"{folder}/{name}/model.safetensors"
    for found in two.run(ranks.restore_quantised, file, QUANTISED[name], *weight.shape):
        expect_equal(found, {"weight": weight, "bias": bias})
    for kind in ("snapshot", "safetensors"):
        two.run(ranks.convert, file, f"{folder}/{kind}", kind, QUANTISED[name])
        expect_equal(dict(sorted(snapshot.load(f"{folder}/{kind}").items())), dict(sorted(expected.items())))


@pytest.mark.parametrize("kind", ["snapshot", "safetensors", "dcp", "torch"])
def test_gguf_convert_is_shared_by_ranks(two, folder, kind):
    tensors = {f"w{number}": (draw(300 + number, 320), "Q8_0") for number in range(5)}
    Path(folder, "m.gguf").write_bytes(file_of(tensors))
    two.run(ranks.convert, f"{folder}/m.gguf", f"{folder}/{'out.pt' if kind == 'torch' else 'out'}", kind)
    found = snapshot.load(f"{folder}/{'out.pt' if kind == 'torch' else 'out'}")
    expect_equal(dict(sorted(found.items())), {name: rounded(each) for name, (each, _) in tensors.items()})


@pytest.mark.parametrize("target", ["out", "out.safetensors"])
def test_merge_lora_is_shared_by_ranks(two, folder, target):
    state = {"a.weight": draw(3000, 700), "b.weight": draw(500, 700), "c": draw(9)}
    save_file(state, f"{folder}/base.safetensors")
    lora = adapter(Path(folder, "adapter"), {**factors("a", 3000, 700, rank=16), **factors("b", 500, 700)})
    two.run(ranks.merge, f"{folder}/base.safetensors", str(lora), f"{folder}/{target}")
    snapshot_merge.merge_lora(f"{folder}/base.safetensors", lora, f"{folder}/alone")
    expect_equal(snapshot.load(f"{folder}/{target}"), snapshot.load(f"{folder}/alone"))
    assert not Snapshot.diff(f"{folder}/{target}", f"{folder}/alone")
