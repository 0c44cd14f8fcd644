"""Weights of bitsandbytes, GPTQ and AWQ, through maps: the bits that the packages compute, in `quantised_files.zip`.

`write_quantised_files.py` wrote them with the packages, which are not needed here. Random layouts are compared with
the public formulas, in NumPy.
"""

import json
import zipfile

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import nn

import snapshot
import snapshot_publish
from snapshot import CorruptSnapshotError, RestoreError, RestoreOptions, Snapshot, StateDict, Target, TensorMap
from snapshot.cli import main
from tests.formats.remote_copies import on_s3
from tests.helpers.states import expect_equal
from tests.plugins.snapshot_quantised.quantised_archive import ARCHIVE

with zipfile.ZipFile(ARCHIVE) as _archive:
    SAMPLES = sorted({name.partition("/")[0] for name in _archive.namelist()})


@pytest.fixture
def samples(tmp_path):
    with zipfile.ZipFile(ARCHIVE) as archive:
        archive.extractall(tmp_path / "samples")
    return tmp_path / "samples"


def by_name(state):
    return dict(sorted(state.items()))


@pytest.mark.parametrize("name", SAMPLES)
def test_dequantise_gives_the_bits_of_the_package_with_every_verb(samples, tmp_path, name, capsys):
    folder, file = samples / name, samples / name / "model.safetensors"
    expected = by_name(load_file(folder / "expected.safetensors"))
    loaded = TensorMap.load("quantised-hf", folder)
    expect_equal(by_name(snapshot.load(file, map=loaded)), expected)
    opened, path = Snapshot(file), "layers.0.q_proj.weight"
    weight = expected[path]
    rows, columns = weight.shape
    for box in ([3], [slice(1, rows, 1), slice(5, 6)], [slice(rows - 3, rows), slice(1, columns - 1)], [slice(0, 0)]):
        for budget in (None, 1 << 14):
            found = opened.read_object(f"0/{path}", box=box, map=loaded, memory_budget_bytes=budget)
            assert torch.equal(found, weight[tuple(box)])
    opened.convert(tmp_path / "whole", map=loaded, memory_budget_bytes=1 << 20)
    expect_equal(by_name(snapshot.load(tmp_path / "whole")), expected)
    assert main(["convert", str(file), str(tmp_path / "x.safetensors"), "--map", "quantised-hf"]) != 0
    assert "pass config=" in capsys.readouterr().err
    arguments = ["convert", str(file), str(tmp_path / "x.safetensors"), "--map", "quantised-hf", "--map-config"]
    assert main([*arguments, str(folder)]) == 0
    expect_equal(by_name(load_file(tmp_path / "x.safetensors")), expected)
    live = nn.Linear(columns, rows)
    rules = TensorMap(["layers.0.q_proj.{rest...} -> {rest...}"], dequantise=loaded.dequantise)
    opened.restore({"net": live}, options=RestoreOptions(map=rules, cast="same_kind"))
    expect_equal(live.weight.data, weight.float())
    expect_equal(live.bias.data, expected["layers.0.q_proj.bias"].float())
    state = StateDict(weight=torch.zeros_like(weight), bias=torch.zeros_like(expected["layers.0.q_proj.bias"]))
    opened.restore({"net": state}, options=RestoreOptions(map=rules, atomic=True))
    expect_equal(state["weight"], weight)


def test_dequantise_then_tensor_map_rules_apply_to_the_weights(samples):
    folder = samples / "gptq"
    weight = load_file(folder / "expected.safetensors")["layers.0.q_proj.weight"]
    rules = [
        {"names": "{i}.weight -> {i}.first, {i}.second", "axes": "(h + k) c -> c h, c k", "sizes": {"h": 24}},
        {"drop": "{i}.bias"},
    ]
    rules = [json.loads(json.dumps(each).replace("{i}", "layers.{i}.q_proj")) for each in rules]
    made = snapshot.load(folder / "model.safetensors", map=TensorMap(rules, dequantise="gptq"))
    first, second = (made[f"layers.0.q_proj.{name}"] for name in ("first", "second"))
    expect_equal(torch.cat([first, second], 1), weight.T.contiguous())
    assert "gptq" in repr(TensorMap(rules, dequantise="gptq"))
    assert "dequantise" not in repr(TensorMap(rules, dequantise="gptq").reversed())


def test_dequantise_with_the_reverse_of_a_shipped_tensor_map(samples, tmp_path):
    names = ["self_attn.q_proj", "mlp.up_proj"]
    state, expected = {}, {}
    for name in names:
        for sample, made in (("model", state), ("expected", expected)):
            found = load_file(samples / "awq" / f"{sample}.safetensors")
            made |= {key.replace("layers.0.q_proj", f"model.layers.0.{name}"): each for key, each in found.items()}
    embedding = torch.randn(100, 64)
    for made in (state, expected):
        made["model.embed_tokens.weight"] = embedding
        for key in [key for key in made if key.endswith(".bias")]:
            del made[key]
    save_file({name: each.contiguous() for name, each in state.items()}, tmp_path / "model.safetensors")
    config = {"model_type": "llama", "num_attention_heads": 6, "num_key_value_heads": 2, "tie_word_embeddings": True}
    config["quantization_config"] = {"quant_method": "awq", "bits": 4}
    (tmp_path / "config.json").write_text(json.dumps(config))
    plain = {**config, "quantization_config": {"quant_method": "fp8"}}
    expected_map, found_map = (TensorMap.load("gguf-hf", each, reverse=True) for each in (plain, tmp_path))
    assert expected_map.dequantise is None
    assert found_map.dequantise == "awq"
    assert TensorMap.load("gguf-hf", tmp_path).dequantise is None
    save_file({name: each.contiguous() for name, each in expected.items()}, tmp_path / "plain.safetensors")
    expect_equal(
        by_name(snapshot.load(tmp_path / "model.safetensors", map=found_map)),
        by_name(snapshot.load(tmp_path / "plain.safetensors", map=expected_map)),
    )


@pytest.mark.parametrize("name", ["nf4-nested", "gptq-ordered"])
def test_dequantise_from_a_bucket(samples, name, moto):
    expected = by_name(load_file(samples / name / "expected.safetensors"))
    (samples / name / "expected.safetensors").unlink()
    loaded = TensorMap.load("quantised-hf", samples / name)
    with on_s3(samples / name, moto) as (_, url, options):
        opened = Snapshot(url, storage_options=options)
        expect_equal(by_name(snapshot.load(opened, map=loaded)), expected)
        row = opened.read_object("0/layers.0.q_proj.weight", box=[5], map=loaded)
        assert torch.equal(row, expected["layers.0.q_proj.weight"][5])


def test_dequantise_puts_a_weight_in_the_place_of_its_main_tensor(tmp_path):
    state = {"a": torch.ones(2, dtype=torch.int32), **groups_of(), "z": torch.ones(2)}
    save_file(state, tmp_path / "m.safetensors")
    stored = list(Snapshot(tmp_path / "m.safetensors").read_object("0"))
    expected = ["m.weight" if each == "m.qweight" else each for each in stored if each in ("a", "m.qweight", "z")]
    assert list(snapshot.load(tmp_path / "m.safetensors", map=TensorMap([], dequantise="gptq"))) == expected


def test_dequantise_reads_parts_of_a_weight_from_several_files(samples, tmp_path):
    state = load_file(samples / "nf4-nested" / "model.safetensors")
    files = {name: f"model-0000{1 + number % 3}-of-00003.safetensors" for number, name in enumerate(sorted(state))}
    for file in set(files.values()):
        save_file({name: state[name] for name in state if files[name] == file}, tmp_path / file)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    expected = by_name(load_file(samples / "nf4-nested" / "expected.safetensors"))
    expect_equal(by_name(snapshot.load(tmp_path, map=TensorMap([], dequantise="bitsandbytes"))), expected)
    largest = max(tmp_path.glob("*-of-*"), key=lambda file: file.stat().st_size)
    largest.write_bytes(largest.read_bytes() + b"\0")
    with pytest.raises(CorruptSnapshotError, match="of-00003"):
        snapshot.load(tmp_path, map=TensorMap([], dequantise="bitsandbytes"))


# Random layouts, against the formulas.


def unpack(words, bits, order=None):
    """The integers of each word in a row of words."""
    words = words.astype(np.uint32)[..., None]
    places = np.arange(32 // bits) if order is None else np.array(order)
    integers = (words >> (places * bits).astype(np.uint32)) & (2**bits - 1)
    return integers.reshape(*words.shape[:-2], -1).astype(np.int64)


def grouped(words, zeros, scales, groups, bits, first):
    """The weight of GPTQ, with NumPy; of AWQ without groups."""
    columns = scales.shape[1]
    if groups is None:
        order = (0, 4, 1, 5, 2, 6, 3, 7)
        integers, own = unpack(words, 4, order), unpack(zeros, 4, order)
        groups = np.arange(len(words)) // (len(words) // len(zeros))
    else:
        own = zeros.view(np.uint32) + np.uint32(first * sum(1 << place for place in range(0, 32, bits)))
        own = unpack(own, bits)
        integers = unpack(words.T, bits).T[: len(groups)]
    difference = (integers - own[groups][:, :columns]).astype(np.float32)
    # a product of a small integer and a half is exact in float32, so this rounds once
    return (difference * scales[groups].astype(np.float32)).astype(scales.dtype).T


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_dequantise_random_groups(tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("random")
    generator = np.random.default_rng(data.draw(st.integers(0, 1 << 30)))
    method = data.draw(st.sampled_from(["gptq", "gptq_v2", "awq"]))
    bits = 4 if method == "awq" else data.draw(st.sampled_from([2, 4, 8]))
    count, per = data.draw(st.integers(1, 5)), 32 // bits
    rows = count * data.draw(st.integers(1, 20)) if method == "awq" else data.draw(st.integers(33, 100))
    columns = data.draw(st.integers(1, 12)) * 8 if method == "awq" else data.draw(st.integers(33, 100))
    shape = (rows, columns // 8) if method == "awq" else (-(-rows // per), columns)
    info = np.iinfo(np.int32)
    words = generator.integers(info.min, info.max, shape, dtype=np.int32)
    zeros = generator.integers(info.min, info.max, (count, -(-columns // per)), dtype=np.int32)
    scales = generator.standard_normal((count, columns)).astype(np.float16)
    groups = None if method == "awq" else generator.integers(0, count, rows).astype(np.int32)
    state = {"m.qweight": words, "m.qzeros": zeros, "m.scales": scales}
    state |= {} if groups is None else {"m.g_idx": groups}
    save_file({name: torch.from_numpy(each) for name, each in state.items()}, folder / "m.safetensors")
    expected = torch.from_numpy(grouped(words, zeros, scales, groups, bits, method == "gptq"))
    opened, loaded = Snapshot(folder / "m.safetensors"), TensorMap([], dequantise=method)
    box = [slice(*sorted(data.draw(st.tuples(st.integers(0, n), st.integers(0, n))))) for n in expected.shape]
    budget = data.draw(st.sampled_from([None, 1 << 10, 1 << 13, 1 << 16]))
    found = opened.read_object("0/m.weight", box=box, map=loaded, memory_budget_bytes=budget)
    assert torch.equal(found, expected[tuple(box)])


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_dequantise_random_blocks(tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("random")
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 1 << 30)))
    shape = data.draw(st.lists(st.integers(1, 40), min_size=1, max_size=3))
    count, block = int(np.prod(shape)), data.draw(st.sampled_from([32, 64, 4096]))
    inner, dtype = data.draw(st.integers(1, 5)), data.draw(st.sampled_from(["float32", "float16", "bfloat16"]))
    packed = torch.randint(0, 256, (-(-count // 2), 1), dtype=torch.uint8, generator=generator)
    factors, table = torch.randn(-(-count // block), generator=generator), torch.randn(16, generator=generator)
    state = {"blocksize": block, "dtype": dtype, "shape": shape, "quant_type": "nf4"}
    tensors = {"w": packed, "w.absmax": factors, "w.quant_map": table}
    if data.draw(st.booleans()):
        codes = torch.randint(0, 256, factors.shape, dtype=torch.uint8, generator=generator)
        own, largest = torch.randn(256, generator=generator), torch.randn(-(-len(codes) // inner), generator=generator)
        state |= {"nested_blocksize": inner, "nested_offset": 0.25, "nested_dtype": "float32"}
        tensors |= {"w.absmax": codes, "w.nested_quant_map": own, "w.nested_absmax": largest}
        factors = own[codes.int()] * largest.repeat_interleave(inner)[: len(codes)] + 0.25
    text = bytearray(json.dumps(state).encode())
    tensors["w.quant_state.bitsandbytes__nf4"] = torch.frombuffer(text, dtype=torch.uint8)
    save_file(tensors, folder / "m.safetensors")
    codes = torch.cat([packed >> 4, packed & 15], 1).view(-1)[:count].int()
    expected = (table[codes] * factors.repeat_interleave(block)[:count]).to(getattr(torch, dtype)).view(shape)
    opened, loaded = Snapshot(folder / "m.safetensors"), TensorMap([], dequantise="bitsandbytes")
    box = [slice(*sorted(data.draw(st.tuples(st.integers(0, n), st.integers(0, n))))) for n in shape]
    budget = data.draw(st.sampled_from([None, 1 << 10, 1 << 13]))
    found = opened.read_object("0/w", box=box, map=loaded, memory_budget_bytes=budget)
    assert torch.equal(found, expected[tuple(box)])


# Input that is wrong, or hostile.


def state_of(**changes):
    """The tensors of a small nested NF4 weight, with changes of its state."""
    state = {"quant_type": "nf4", "blocksize": 64, "dtype": "float16", "shape": [40, 32]}
    state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": 0.5}
    data = json.dumps({**state, **changes}).encode()
    return {
        "w": torch.zeros(640, 1, dtype=torch.uint8),
        "w.absmax": torch.zeros(20, dtype=torch.uint8),
        "w.quant_map": torch.zeros(16),
        "w.nested_absmax": torch.zeros(1),
        "w.nested_quant_map": torch.zeros(256),
        "w.quant_state.bitsandbytes__nf4": torch.frombuffer(bytearray(data), dtype=torch.uint8),
    }


def groups_of(rows=64, columns=32, *, awq=False):
    words = torch.zeros((rows, columns // 8) if awq else (rows // 8, columns), dtype=torch.int32)
    made = {"m.qweight": words, "m.qzeros": torch.zeros(4, columns // 8, dtype=torch.int32)}
    made["m.scales"] = torch.ones(4, columns, dtype=torch.float16)
    return made if awq else {**made, "m.g_idx": torch.zeros(rows, dtype=torch.int32)}


INT8 = {"m.weight": torch.zeros(4, 8, dtype=torch.int8), "m.SCB": torch.zeros(4)}
STATE = "w.quant_state.bitsandbytes__nf4"
WRONG = {
    "negative shape": ("bitsandbytes", state_of(shape=[-40, -32]), "invalid shape"),
    "huge shape": ("bitsandbytes", state_of(shape=[1 << 40, 1 << 40]), "invalid shape"),
    "larger shape": ("bitsandbytes", state_of(shape=[41, 32]), "must have 656 bytes"),
    "many dimensions": ("bitsandbytes", state_of(shape=[1] * 1000 + [1280]), "invalid shape"),
    "empty shape": ("bitsandbytes", state_of(shape=[]), "invalid shape"),
    "no block": ("bitsandbytes", state_of(blocksize=0), "unknown blocks of 0"),
    "odd block": ("bitsandbytes", state_of(blocksize=63), "unknown blocks of 63"),
    "other block": ("bitsandbytes", state_of(blocksize=128), "absmax must have 10 elements"),
    "odd dtype": ("bitsandbytes", state_of(dtype="complex64"), "complex64"),
    "no nested block": ("bitsandbytes", state_of(nested_blocksize=0), "unknown blocks of 0 factors"),
    "nested block": ("bitsandbytes", state_of(nested_blocksize=8), "nested_absmax must have 3 elements"),
    "nested dtype": ("bitsandbytes", state_of(nested_dtype="float16"), "float16"),
    "text": ("bitsandbytes", {**state_of(), STATE: torch.zeros(9, dtype=torch.uint8)}, STATE),
    "long text": ("bitsandbytes", {**state_of(), STATE: torch.zeros(1 << 20, dtype=torch.uint8)}, "at most"),
    "no text": ("bitsandbytes", {**state_of(), STATE: torch.zeros(0, dtype=torch.uint8)}, STATE),
    "short factors": ("bitsandbytes", {**state_of(), "w.absmax": torch.zeros(19, dtype=torch.uint8)}, "20 elements"),
    "wide factors": ("bitsandbytes", {**state_of(), "w.absmax": torch.zeros(20)}, "absmax must be uint8"),
    "short table": ("bitsandbytes", {**state_of(), "w.quant_map": torch.zeros(15)}, "16 elements"),
    "long table": ("bitsandbytes", {**state_of(), "w.nested_quant_map": torch.zeros(257)}, "at most 1024 bytes"),
    "short nested table": ("bitsandbytes", {**state_of(), "w.nested_quant_map": torch.zeros(255)}, "256 elements"),
    "no weight": ("bitsandbytes", {k: v for k, v in state_of().items() if k != "w"}, "w is missing"),
    "half nested": ("bitsandbytes", {k: v for k, v in state_of().items() if k != "w.nested_absmax"}, "is missing"),
    "two kinds": (
        "bitsandbytes",
        {**INT8, **{name.replace("w", "m.weight", 1): each for name, each in state_of().items() if name != "w"}},
        "m.weight is part of two weights",
    ),
    "rows": ("bitsandbytes", {**INT8, "m.SCB": torch.zeros(5)}, "SCB must have 4 elements"),
    "columns": ("bitsandbytes", {**INT8, "m.weight_format": torch.tensor(2, dtype=torch.uint8)}, "stored by rows"),
    "floats": ("bitsandbytes", {**INT8, "m.weight": torch.zeros(4, 8)}, "must be int8"),
    "vector": ("bitsandbytes", {**INT8, "m.weight": torch.zeros(4, dtype=torch.int8)}, "must be a matrix"),
    "nothing": ("bitsandbytes", {"m.weight": torch.zeros(4, 8)}, "has no weights that bitsandbytes"),
    "no groups": ("gptq", {k: v for k, v in groups_of().items() if k != "m.g_idx"}, "m.g_idx is missing"),
    "long groups": ("gptq", {**groups_of(), "m.g_idx": torch.zeros(73, dtype=torch.int32)}, "2, 4 or 8 bits"),
    "wide zeros": ("gptq", {**groups_of(), "m.qzeros": torch.zeros(4, 5, dtype=torch.int32)}, "2, 4 or 8 bits"),
    "more zeros": ("gptq", {**groups_of(), "m.qzeros": torch.zeros(5, 4, dtype=torch.int32)}, "the same groups"),
    "no scales": ("gptq", {**groups_of(), "m.scales": torch.zeros(4, 0, dtype=torch.float16)}, "must be matrices"),
    "int scales": ("gptq", {**groups_of(), "m.scales": torch.zeros(4, 32, dtype=torch.int16)}, "must be float16"),
    "twice": ("gptq", {**groups_of(), "m.weight": torch.zeros(3)}, "m.weight exists, beside m.qweight"),
    "not AWQ": ("awq", groups_of(), "choose gptq"),
    "AWQ by columns": ("awq", {**groups_of(awq=True), "m.qweight": torch.zeros(32, 8, dtype=torch.int32)}, "gemm"),
    "AWQ's rows": ("awq", groups_of(66, awq=True), "gemm"),
}


@pytest.mark.parametrize("case", WRONG)
def test_dequantise_refuses_inconsistent_tensors_before_computing(tmp_path, case):
    method, state, text = WRONG[case]
    save_file(state, tmp_path / "m.safetensors")
    with pytest.raises(RestoreError, match=text):
        snapshot.load(tmp_path / "m.safetensors", map=TensorMap([], dequantise=method))


@pytest.mark.parametrize("wrong", [-1, 4, -(1 << 31), (1 << 31) - 1])
def test_dequantise_g_idx_out_of_range_is_corrupt(tmp_path, wrong):
    state = groups_of()
    state["m.g_idx"][17] = wrong
    save_file(state, tmp_path / "m.safetensors")
    with pytest.raises(CorruptSnapshotError, match=r"m.weight: g_idx must be from 0 to 3"):
        snapshot.load(tmp_path / "m.safetensors", map=TensorMap([], dequantise="gptq"))


def test_dequantise_reads_only_safetensors_files(tmp_path):
    state, loaded = groups_of(), TensorMap([], dequantise="gptq")
    torch.save(state, tmp_path / "m.bin")
    Snapshot.take(tmp_path / "s", {"model": StateDict(state)})
    for name in ("m.bin", "s"):
        with pytest.raises(RestoreError, match="convert all to it first"):
            snapshot.load(tmp_path / name, map=loaded)
        Snapshot(tmp_path / name).convert(Target(tmp_path / f"{name}.safetensors", "safetensors"))
        made = snapshot.load(tmp_path / f"{name}.safetensors", map=loaded)
        expect_equal(made, {"m.weight": torch.full((32, 64), -1.0, dtype=torch.float16)})


def test_dequantise_refuses_too_many_tables(tmp_path, monkeypatch):
    monkeypatch.setattr("snapshot_quantised.dequantising._MOST_TABLES", 3)
    state = {}
    for number in range(3):
        own = {f"{number}.{name}": each.clone() for name, each in state_of().items()}
        own[f"{number}.w.quant_map"] += number
        state |= own
    save_file(state, tmp_path / "m.safetensors")
    with pytest.raises(CorruptSnapshotError, match="more than 3 different tables"):
        snapshot.load(tmp_path / "m.safetensors", map=TensorMap([], dequantise="bitsandbytes"))


CONFIGS = {
    "gptq": ("gptq", {"quant_method": "gptq", "bits": 4}),
    "gptq v2": ("gptq_v2", {"quant_method": "gptq", "checkpoint_format": "gptq_v2"}),
    "awq": ("awq", {"quant_method": "awq", "version": "GEMM"}),
    "old bitsandbytes": ("bitsandbytes", {"load_in_8bit": True}),
    "marlin": (None, {"quant_method": "gptq", "checkpoint_format": "marlin"}),
    "gemv": (None, {"quant_method": "awq", "version": "gemv"}),
    "fp8": (None, {"quant_method": "fp8"}),
    "nothing": (None, {}),
}


@pytest.mark.parametrize("case", CONFIGS)
def test_dequantise_method_is_chosen_by_the_quantization_config(case):
    method, config = CONFIGS[case]
    given = {"quantization_config": config}
    if method is not None:
        assert TensorMap.load("quantised-hf", given).dequantise == method
        return
    with pytest.raises(ValueError, match="must be of awq, bitsandbytes, gptq, gptq_v2, got"):
        TensorMap.load("quantised-hf", given)


def test_dequantise_refuses_invalid_arguments(tmp_path):
    with pytest.raises(ValueError, match="dequantise must be awq"):
        TensorMap([], dequantise="gguf")
    with pytest.raises(ValueError, match="cannot be quantised again"):
        TensorMap.load("quantised-hf", {"quantization_config": {"quant_method": "awq"}}, reverse=True)
    (tmp_path / "own.json").write_text('{"tensor_map": 1, "rules": ["a -> b"], "dequantise": "awq"}')
    assert TensorMap.load(tmp_path / "own.json").dequantise == "awq"
    (tmp_path / "own.json").write_text('{"tensor_map": 1, "rules": ["a -> b"], "dequantise": ["awq"]}')
    with pytest.raises(ValueError, match="dequantise must be"):
        TensorMap.load(tmp_path / "own.json")
    with pytest.raises(ValueError, match="names must not dequantise"):
        snapshot_publish.Publisher(tmp_path / "weights", names=TensorMap([], dequantise="awq"))
