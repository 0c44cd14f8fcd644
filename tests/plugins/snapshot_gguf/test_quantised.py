"""Tensors of GGUF in blocks of every type: random blocks, read as the package gguf computes them."""

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import snapshot
import snapshot_merge
from snapshot import RestoreOptions, Snapshot, StateDict, Target
from snapshot.errors import UnsupportedFormatError
from snapshot_gguf import quantised

gguf = pytest.importorskip("gguf")
KINDS = gguf.GGMLQuantizationType
NAMES = ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ2_XXS", "IQ2_XS", "IQ2_S"]
NAMES += ["IQ3_XXS", "IQ3_S", "IQ1_S", "IQ1_M", "IQ4_NL", "IQ4_XS", "TQ1_0", "TQ2_0", "MXFP4", "NVFP4"]


def random_rows(kind, shape, seed=0):
    """Return random blocks with finite elements, as rows of bytes, and the elements."""
    elements, nbytes = gguf.GGML_QUANT_SIZES[kind]
    count = int(np.prod(shape)) // elements
    generator = np.random.default_rng(seed)
    blocks = np.empty((0, nbytes), np.uint8)
    while len(blocks) < count:
        more = generator.integers(0, 256, (count, nbytes), np.uint8)
        with np.errstate(all="ignore"):
            finite = np.isfinite(gguf.dequantize(more, kind)).all(1)
        blocks = np.concatenate([blocks, more[finite]])[:count]
    rows = blocks.reshape(*shape[:-1], -1)
    with np.errstate(all="ignore"):
        return rows, torch.from_numpy(gguf.dequantize(rows, kind).reshape(shape))


def write(path, tensors):
    """Write a file with rows of bytes of a type, or plain arrays."""
    writer = gguf.GGUFWriter(str(path), "llama")
    for name, (rows, kind) in tensors.items():
        writer.add_tensor(name, rows, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def bits(tensor):
    return tensor.contiguous().view(torch.int32)


@pytest.fixture
def four(tmp_path):
    """A file with a tensor of each of four types, and what they stand for."""
    tensors, expected = {}, {}
    for number, name in enumerate(("Q4_K", "Q6_K", "IQ4_XS", "MXFP4")):
        rows, expected[name] = random_rows(KINDS[name], (6, 512), number)
        tensors[name] = rows, KINDS[name]
    write(tmp_path / "m.gguf", tensors)
    return tmp_path / "m.gguf", expected


@pytest.mark.parametrize("name", NAMES)
def test_gguf_blocks_of_each_type_have_the_bits_of_the_package(name, tmp_path):
    if not quantised.is_read(KINDS[name]):
        pytest.skip(f"gguf {gguf.__version__ if hasattr(gguf, '__version__') else ''} has no arithmetic for {name}")
    rows, expected = random_rows(KINDS[name], (3, 5, 768))
    write(tmp_path / "m.gguf", {"w": (rows, KINDS[name])})
    opened = Snapshot(tmp_path / "m.gguf")
    assert opened.get_manifest()["0/w"].dtype == "float32"
    assert torch.equal(bits(opened.read_object("w")), bits(expected))
    for box in ([slice(1, 3), slice(2, 4), slice(5, 700)], [2, 4], [0, slice(1, 2), slice(255, 257)], [slice(0, 0)]):
        assert torch.equal(bits(opened.read_object("w", box=box)), bits(expected[tuple(box)]))
    assert torch.equal(bits(snapshot.load(tmp_path / "m.gguf", memory_budget_bytes=1 << 12)["w"]), bits(expected))


def test_gguf_blocks_with_infinite_factors_have_the_bits_of_the_package(tmp_path):
    rows = np.random.default_rng(1).integers(0, 256, (8, 144), np.uint8)
    rows[:, 0:2] = (0, 0x7C)  # an infinite factor
    rows[4:, 0:2] = (1, 0x7C)  # one that is NaN
    with np.errstate(all="ignore"):
        expected = torch.from_numpy(gguf.dequantize(rows, KINDS.Q4_K))
    write(tmp_path / "m.gguf", {"w": (rows, KINDS.Q4_K)})
    found = snapshot.load(tmp_path / "m.gguf")["w"]
    assert torch.equal(found.isnan(), expected.isnan())
    assert torch.equal(found.nan_to_num(), expected.nan_to_num())


def test_gguf_blocks_are_restored_converted_and_compared(four, tmp_path):
    path, expected = four
    live = torch.nn.ParameterDict({name: torch.zeros(6, 512, dtype=torch.bfloat16) for name in expected})
    Snapshot(path).restore({"net": live}, options=RestoreOptions(cast="same_kind"))
    assert all(torch.equal(live[name], each.bfloat16()) for name, each in expected.items())
    Snapshot(path).convert(Target(tmp_path / "half.safetensors"), dtype=torch.float16)
    found = snapshot.load(tmp_path / "half.safetensors")
    assert all(torch.equal(found[name], each.half()) for name, each in expected.items())
    Snapshot(path).convert(tmp_path / "whole")
    assert not Snapshot.diff(path, tmp_path / "whole")
    assert Snapshot(tmp_path / "whole").verify()


def test_gguf_blocks_are_the_base_of_a_lora(tmp_path):
    generator = torch.Generator().manual_seed(0)
    a, b = torch.randn(4, 512, generator=generator), torch.randn(6, 4, generator=generator)
    write(tmp_path / "base.gguf", {"model.q_proj.weight": (random_rows(KINDS.Q4_K, (6, 512))[0], KINDS.Q4_K)})
    weight = snapshot.load(tmp_path / "base.gguf")["model.q_proj.weight"]
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    names = {"lora_A": a, "lora_B": b}
    tensors = {f"base_model.model.model.q_proj.{name}.weight": each for name, each in names.items()}
    save_file(tensors, adapter / "adapter_model.safetensors", {"format": "pt"})
    (adapter / "adapter_config.json").write_text(
        '{"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"], "bias": "none"}'
    )
    snapshot_merge.merge_lora(tmp_path / "base.gguf", adapter, tmp_path / "merged.safetensors")
    merged = snapshot.load(tmp_path / "merged.safetensors")["model.q_proj.weight"]
    assert torch.allclose(merged, weight + (b @ a) * 2, atol=1e-4)
    assert not torch.equal(merged, weight)


@pytest.mark.parametrize("name", ["IQ1_S", "Q2_K"])
def test_gguf_blocks_that_are_many_times_longer_than_their_file_are_read(name, tmp_path):
    """IQ1_S is twenty times shorter than float32."""
    rows, expected = random_rows(KINDS[name], (64, 1 << 14))
    write(tmp_path / "m.gguf", {"w": (rows, KINDS[name])})
    assert torch.equal(bits(snapshot.load(tmp_path / "m.gguf")["w"]), bits(expected))


def test_gguf_blocks_without_the_package_are_listed_and_refused(four, tmp_path, monkeypatch, caplog):
    path, _ = four
    monkeypatch.setattr(quantised, "find_spec", lambda name: None)
    quantised.is_read.cache_clear()
    try:
        assert Snapshot(path).get_manifest()["0/Q4_K"].dtype == "Q4_K"
        assert "tensors of IQ4_XS, MXFP4, Q4_K, Q6_K are listed, but not read: install the extra 'gguf'" in caplog.text
        live = torch.zeros(6, 512)
        with pytest.raises(UnsupportedFormatError, match="tensors of type Q4_K are listed, but not read"):
            Snapshot(path).restore({"s": StateDict(Q4_K=live)}, strict=False)
        assert not live.any()
    finally:
        quantised.is_read.cache_clear()


def test_gguf_rows_that_are_no_whole_blocks_are_refused(tmp_path):
    rows, _ = random_rows(KINDS.Q4_K, (2, 256))
    write(tmp_path / "m.gguf", {"w": (rows, KINDS.Q4_K)})
    data = (tmp_path / "m.gguf").read_bytes()
    place = data.index(b"w" + (2).to_bytes(4, "little") + (256).to_bytes(8, "little")) + 5
    (tmp_path / "m.gguf").write_bytes(data[:place] + (250).to_bytes(8, "little") + data[place + 8 :])
    with pytest.raises(snapshot.CorruptSnapshotError, match="rows of Q4_K must have multiples of 256 elements"):
        Snapshot(tmp_path / "m.gguf").get_manifest()
    (tmp_path / "m.gguf").write_bytes(data[:-64])
    with pytest.raises(snapshot.CorruptSnapshotError, match="must end within the file"):
        Snapshot(tmp_path / "m.gguf").get_manifest()
