"""Files of GGUF: every verb reads them, they are written for llama.cpp, and gguf and transformers read those."""

import json
import math
import struct

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import nn

import snapshot
import snapshot_merge
from snapshot import CorruptSnapshotError, RestoreError, RestoreOptions, Snapshot, SnapshotError, Target, TensorMap
from snapshot.cli import main
from snapshot.errors import UnsupportedFormatError
from snapshot_gguf import GGUFOptions
from snapshot_gguf.reader import BLOCK_BYTES, choose_kind, dequantise, parse_header, quantise
from tests.helpers.states import expect_equal
from tests.plugins.snapshot_gguf.gguf_files import blocks_of, file_of, rounded

TEXT, ARRAY, UINT32, FLOAT32 = 8, 9, 4, 6


def text(value):
    return struct.pack("<Q", len(value.encode())) + value.encode()


def pair(key, kind, data):
    return {key: text(key) + struct.pack("<I", kind) + data}


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 40), nn.Linear(40, 8))


@pytest.fixture
def written(tmp_path):
    state = model().state_dict()
    tensors = {"0.weight": (state["0.weight"], "Q8_0"), "1.weight": state["1.weight"].to(torch.float16)}
    tensors |= {name: each for name, each in state.items() if name.endswith("bias")}
    (tmp_path / "m.gguf").write_bytes(file_of(tensors, pair("general.name", TEXT, text("mine"))))
    expected = {**state, "0.weight": rounded(state["0.weight"]), "1.weight": tensors["1.weight"]}
    return tmp_path / "m.gguf", expected


def test_gguf_is_listed_read_restored_and_verified(written):
    path, state = written
    opened = Snapshot(path)
    assert opened.exists()
    assert opened.metadata.format == "gguf"
    assert opened.metadata.metadata["general.name"] == "mine"
    assert opened.metadata.files == {"m.gguf": path.stat().st_size}
    assert opened.metadata.nbytes == path.stat().st_size
    expect_equal(dict(opened.read_object("0")), {name: state[name] for name in opened.read_object("0")})
    for box in ([slice(3, 17), slice(5, 45)], [7], [slice(0, 40), slice(63, 64)], [slice(0, 0)]):
        assert torch.equal(opened.read_object("0/0.weight", box=box), state["0.weight"][tuple(box)])
    live = model().to(torch.bfloat16)
    opened.restore({"net": live}, options=RestoreOptions(cast="same_kind"))
    expect_equal(dict(live.state_dict()), {name: each.to(torch.bfloat16) for name, each in state.items()})
    live = model()
    opened.restore({"net": live}, options=RestoreOptions(cast="same_kind"))
    expect_equal(dict(live.state_dict()), {name: each.float() for name, each in state.items()})
    report = opened.verify()
    assert report
    assert report.unverifiable == 4


def test_gguf_folder_is_converted_compared_merged_and_copied(written, tmp_path):
    path, state = written
    folder = path.parent
    for target, kind in (("a.safetensors", "safetensors"), ("b.pt", "torch"), ("c", "dcp"), ("d", "snapshot")):
        Snapshot(folder).convert(Target(tmp_path / "to" / target, kind))
        expect_equal(dict(sorted(snapshot.load(tmp_path / "to" / target).items())), dict(sorted(state.items())))
        assert not Snapshot.diff(folder, tmp_path / "to" / target)
    snapshot_merge.merge([path, path], tmp_path / "mean")
    expect_equal(dict(sorted(snapshot.load(tmp_path / "mean").items())), dict(sorted(state.items())))
    Snapshot(path).copy(tmp_path / "copy.gguf")
    assert (tmp_path / "copy.gguf").read_bytes() == path.read_bytes()
    assert not Snapshot.diff(path, tmp_path / "copy.gguf")


def test_gguf_long_tensor_is_read_with_a_small_memory_budget_bytes(tmp_path):
    tensor = torch.randn(3000, 320, generator=torch.Generator().manual_seed(1))
    (tmp_path / "m.gguf").write_bytes(file_of({"w": (tensor, "Q8_0")}))
    loaded = snapshot.load(tmp_path / "m.gguf", memory_budget_bytes=1 << 20)["w"]
    assert torch.equal(loaded, rounded(tensor))
    Snapshot(tmp_path / "m.gguf").convert(tmp_path / "out", memory_budget_bytes=1 << 20)
    assert torch.equal(snapshot.load(tmp_path / "out")["w"], rounded(tensor))


def test_gguf_unknown_tensor_types_are_listed_and_refused(tmp_path):
    data = bytearray(file_of({"a": torch.ones(4, 32), "b": torch.ones(2, 256)}))
    place = data.index(text("b")) + len(text("b")) + 4 + 16
    data[place : place + 4] = struct.pack("<I", 15)
    (tmp_path / "m.gguf").write_bytes(data)
    opened = Snapshot(tmp_path / "m.gguf")
    entry = opened.get_manifest()["0/b"]
    assert (entry.dtype, tuple(entry.shape), entry.nbytes) == ("Q8_K", (2, 256), 584)
    for read in (
        lambda: opened.read_object("0/b"),
        lambda: opened.read_object("0"),
        lambda: opened.restore({"s": snapshot.StateDict(a=torch.zeros(4, 32), b=torch.zeros(2, 256))}),
        lambda: opened.convert(tmp_path / "out"),
        lambda: snapshot.load(tmp_path / "m.gguf"),
    ):
        with pytest.raises(UnsupportedFormatError, match=r"b: tensors of type Q8_K are listed, but not read"):
            read()
    assert opened.verify()
    assert torch.equal(snapshot.load(tmp_path / "m.gguf", exclude=["b"])["a"], torch.ones(4, 32))
    (tmp_path / "n.gguf").write_bytes(data)
    assert not Snapshot.diff(tmp_path / "m.gguf", tmp_path / "n.gguf")
    data[opened.get_manifest()["0/b"].byte_range[0]] ^= 1
    (tmp_path / "n.gguf").write_bytes(data)
    assert Snapshot.diff(tmp_path / "m.gguf", tmp_path / "n.gguf")
    assert main(["ls", str(tmp_path / "m.gguf")]) == 0


def test_gguf_split_files_are_one_checkpoint(tmp_path):
    count = pair("sp1it.count", 2, struct.pack("<H", 2))
    parts = [{"a": torch.arange(6.0).view(2, 3)}, {"b": torch.ones(5)}]
    for number, tensors in enumerate(parts, 1):
        (tmp_path / f"m-{number:05d}-of-00002.gguf").write_bytes(file_of(tensors, count))
    for path in (tmp_path, tmp_path / "m-00001-of-00002.gguf", tmp_path / "m-00002-of-00002.gguf"):
        expect_equal(snapshot.load(path), parts[0] | parts[1])
    (tmp_path / "x.gguf").write_bytes(file_of({"c": torch.ones(1)}))
    with pytest.raises(
        UnsupportedFormatError, match=r"has 2 checkpoints of GGUF; open one of them:\n  m-00001-of-0000"
    ):
        Snapshot(tmp_path).get_manifest()
    (tmp_path / "y.gguf").write_bytes(file_of({"c": torch.ones(1)}, count))
    with pytest.raises(
        UnsupportedFormatError, match=r"y\.gguf: is one of 2 parts, so its name must end in -00001-of-000"
    ):
        Snapshot(tmp_path / "y.gguf").get_manifest()
    (tmp_path / "m-00002-of-00002.gguf").write_bytes(file_of({"a": torch.ones(1)}, count))
    with pytest.raises(CorruptSnapshotError, match="'a' is in another part, too"):
        Snapshot(tmp_path / "m-00001-of-00002.gguf").get_manifest()
    (tmp_path / "m-00002-of-00002.gguf").unlink()
    with pytest.raises(CorruptSnapshotError, match=r"its part m-00002-of-00002\.gguf is missing"):
        Snapshot(tmp_path / "m-00001-of-00002.gguf").get_manifest()


def test_gguf_file_that_became_shorter_is_corrupt(written):
    path, _ = written
    opened = Snapshot(path)
    opened.get_manifest()
    path.write_bytes(path.read_bytes()[:-64])
    with pytest.raises(CorruptSnapshotError, match=r"m\.gguf: .*must end within the file"):
        opened.read_object("0/0.weight")


# The arithmetic


floats = st.floats(-1e4, 1e4, width=32)
TINY = st.floats(-(2.0**-100), 2.0**-100, width=32)


@given(st.lists(st.one_of(floats, st.just(0.0), TINY), min_size=32, max_size=32))
def test_gguf_q8_0_blocks_are_rounded_like_ggml(values):
    source = torch.tensor([values], dtype=torch.float32)
    blocks = torch.empty(1, BLOCK_BYTES, dtype=torch.uint8)
    quantise(source, blocks)
    made = torch.empty(1, 32)
    dequantise(blocks, made)
    assert torch.equal(made, rounded(source).nan_to_num())


@pytest.mark.parametrize("value", [math.inf, math.nan, 1e8])
def test_gguf_q8_0_refuses_infinite_nan_and_too_large_values(tmp_path, value):
    with pytest.raises(ValueError, match="too large for Q8_0, or not finite"):
        blocks_of(torch.full((1, 32), value))


# Hostile files


@settings(max_examples=300)
@given(st.data())
def test_gguf_damaged_header_is_refused(tmp_path_factory, data):
    values = pair("general.alignment", UINT32, struct.pack("<I", 32))
    values |= pair("tokens", ARRAY, struct.pack("<IQ", TEXT, 2) + text("a") + text("bc"))
    values |= pair("nested", ARRAY, struct.pack("<IQIQf", ARRAY, 1, FLOAT32, 1, 1.5))
    whole = bytearray(file_of({"q": (torch.ones(2, 64), "Q8_0"), "w": torch.ones(3, 5), "s": torch.ones(())}, values))
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.integers(0, parse_header(bytes(file_of({}))).data + 300))
        kind = data.draw(st.sampled_from(["<B", "<I", "<Q"]))
        number = data.draw(st.one_of(st.integers(0, 40), st.integers(0, 256 ** struct.calcsize(kind) - 1)))
        struct.pack_into(kind, whole, min(place, len(whole) - 8), number)
    path = tmp_path_factory.mktemp("fuzz") / "m.gguf"
    path.write_bytes(whole[: data.draw(st.integers(0, len(whole)))] if data.draw(st.booleans()) else whole)
    try:
        opened = Snapshot(path)
        opened.get_manifest()
        opened.verify()
        found = snapshot.load(path)
    except SnapshotError:
        return
    assert sum(each.nbytes for each in found.values()) <= 4 * len(whole)


def nest(depth):
    return struct.pack("<IQ", ARRAY, 1) * depth + struct.pack("<IQ", TEXT, 0)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (pair("x", ARRAY, nest(100)), "arrays must nest at most 8 deep"),
        (pair("x", ARRAY, struct.pack("<IQ", TEXT, 1 << 62)), "its header would have more than"),
        (pair("x", ARRAY, struct.pack("<IQ", UINT32, 1 << 62)), "its header would have more than"),
        (pair("x", TEXT, struct.pack("<Q", 1 << 63)), "its header would have more than"),
        (pair("x", TEXT, struct.pack("<Q", 1) + b"\xff"), "not a GGUF file: 'utf-8' codec"),
        (pair("x", 99, b""), "unknown type 99 of a value"),
        (pair("general.alignment", UINT32, struct.pack("<I", 0)), "invalid alignment 0"),
        (pair("general.alignment", TEXT, text("8")), "invalid alignment 8"),
    ],
)
def test_gguf_hostile_values_are_refused(tmp_path, change, expected):
    (tmp_path / "m.gguf").write_bytes(file_of({"w": torch.ones(2, 2)}, change))
    with pytest.raises(CorruptSnapshotError, match=expected):
        Snapshot(tmp_path / "m.gguf").get_manifest()


def info(name, shape, kind, offset):
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *reversed(shape), kind, offset)


@pytest.mark.parametrize(
    ("infos", "expected"),
    [
        ([info("w", (2, 2), 0, 0), info("w", (2, 2), 0, 32)], "two tensors have the same name"),
        ([info("w", (64,), 0, 0), info("v", (64,), 0, 32)], "overlaps 'w', or is not aligned"),
        ([info("w", (64,), 8, 0), info("v", (64,), 8, 0)], "overlaps 'w', or is not aligned"),
        ([info("w", (2, 2), 0, 4)], "overlaps '', or is not aligned"),
        ([info("w", (1 << 59,), 0, 0)], "must end within the file"),
        ([info("w", (1 << 40, 1 << 40), 0, 0)], "invalid shape"),
        ([info("w", (1 << 63, 0), 0, 0)], "invalid shape"),
        ([info("w", (2, 31), 8, 0)], "rows of Q8_0 must have multiples of 32 elements"),
        ([text("w") + struct.pack("<I", 5)], "must have at most 4 dimensions, got 5"),
    ],
)
def test_gguf_hostile_tensor_infos_are_refused(tmp_path, infos, expected):
    head = b"GGUF" + struct.pack("<IQQ", 3, len(infos), 0) + b"".join(infos)
    (tmp_path / "m.gguf").write_bytes(head + bytes(-len(head) % 32) + bytes(512))
    with pytest.raises(CorruptSnapshotError, match=expected):
        Snapshot(tmp_path / "m.gguf").get_manifest()


def test_gguf_unknown_versions_and_big_endian_are_named(tmp_path):
    for version, expected in ((b"\1\0\0\0", "of version 1"), (b"\0\0\0\3", "big-endian")):
        (tmp_path / "m.gguf").write_bytes(b"GGUF" + version + bytes(64))
        with pytest.raises(UnsupportedFormatError, match=rf"m\.gguf: a GGUF file {expected}"):
            Snapshot(tmp_path / "m.gguf").get_manifest()
    (tmp_path / "m.gguf").write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
    with pytest.raises(UnsupportedFormatError, match="a Git LFS pointer"):
        Snapshot(tmp_path).get_manifest()


# Writing


CONFIGS = {
    "llama": {"num_attention_heads": 4, "num_key_value_heads": 2},
    "qwen2": {"num_attention_heads": 4, "num_key_value_heads": 2},
    "qwen3": {"num_attention_heads": 4, "num_key_value_heads": 2},
}
"""Architectures in GGUF, with what their key-values say."""


def values_of(kind, experts=0):
    heads = CONFIGS[kind.removesuffix("moe")]
    found = pair("general.architecture", TEXT, text(kind))
    found |= pair(f"{kind}.attention.head_count", UINT32, struct.pack("<I", heads["num_attention_heads"]))
    found |= pair(f"{kind}.attention.head_count_kv", UINT32, struct.pack("<I", heads["num_key_value_heads"]))
    found |= pair("tokenizer.ggml.tokens", ARRAY, struct.pack("<IQ", TEXT, 2) + text("a") + text("b"))
    found |= pair("general.file_type", UINT32, struct.pack("<I", 99))
    return found | (pair(f"{kind}.expert_count", UINT32, struct.pack("<I", experts)) if experts else {})


def hugging_face(kind="llama", experts=""):
    generator = torch.Generator().manual_seed(2)

    def made(*shape):
        return torch.randn(shape, generator=generator)

    layer = "model.layers.0"
    state = {"model.embed_tokens.weight": made(50, 32), "model.norm.weight": made(32), "lm_head.weight": made(50, 32)}
    for name, rows in (("q", 32), ("k", 16), ("v", 16)):
        state[f"{layer}.self_attn.{name}_proj.weight"] = made(rows, 32)
        if kind == "qwen2":
            state[f"{layer}.self_attn.{name}_proj.bias"] = made(rows)
    state[f"{layer}.self_attn.o_proj.weight"] = made(32, 32)
    if kind == "qwen3":
        state |= {f"{layer}.self_attn.{name}_norm.weight": made(8) for name in "qk"}
    state |= {f"{layer}.{name}_layernorm.weight": made(32) for name in ("input", "post_attention")}
    if not experts:
        shapes = {"gate_proj": (48, 32), "up_proj": (48, 32), "down_proj": (32, 48)}
        return state | {f"{layer}.mlp.{name}.weight": made(*shape) for name, shape in shapes.items()}
    names = ("w1", "w3", "w2") if experts == "block_sparse_moe" else ("gate_proj", "up_proj", "down_proj")
    state[f"{layer}.{experts}.gate.weight"] = made(3, 32)
    for number in range(3):
        for name, shape in zip(names, ((64, 32), (64, 32), (32, 64)), strict=True):
            state[f"{layer}.{experts}.experts.{number}.{name}.weight"] = made(*shape)
    return state


def permuted(tensor, heads):
    """The order of the rows that llama.cpp expects: pairs of neighbours instead of halves."""
    return tensor.view(heads, 2, len(tensor) // heads // 2, -1).transpose(1, 2).reshape(tensor.shape)


NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp", "block_sparse_moe.gate": "ffn_gate_inp",
}  # fmt: skip
EXPERTS = {"w1": "gate", "w2": "down", "w3": "up", "gate_proj": "gate", "down_proj": "down", "up_proj": "up"}


def expected_of(state, kind):
    made, stacked = {}, {}
    for name, each in state.items():
        if name in NAMES:
            made[NAMES[name]] = each
            continue
        _, _, rest = name.removeprefix("model.layers.").partition(".")
        stem, _, end = rest.rpartition(".")
        if ".experts." in rest:
            _, _, tail = stem.partition(".experts.")
            stacked.setdefault(f"blk.0.ffn_{EXPERTS[tail.partition('.')[2]]}_exps.weight", []).append(each)
            continue
        if kind == "llama" and stem in ("self_attn.q_proj", "self_attn.k_proj"):
            each = permuted(each, 4 if "q_proj" in stem else 2)  # noqa: PLW2901
        made[f"blk.0.{NAMES[stem]}.{end}"] = each
    return made | {name: torch.stack(parts) for name, parts in stacked.items()}


KINDS = [("llama", "", "llama"), ("qwen2", "", "qwen2"), ("qwen3", "", "qwen3"),
         ("llama", "block_sparse_moe", "llama"), ("qwen3", "mlp", "qwen3moe")]  # fmt: skip


@pytest.mark.parametrize(("kind", "experts", "named"), KINDS, ids=["llama", "qwen2", "qwen3", "mixtral", "qwen3moe"])
def test_gguf_convert_of_a_model_and_back(tmp_path, kind, experts, named):
    state = hugging_face(kind, experts)
    (tmp_path / "kv.gguf").write_bytes(file_of({}, values_of(named, 3 if experts else 0)))
    save_file(state, tmp_path / "model.safetensors")
    target = Target(tmp_path / "m.gguf", format_options=GGUFOptions(tmp_path / "kv.gguf"))
    report = Snapshot(tmp_path / "model.safetensors").convert(target)
    assert report.format == "gguf"
    expected = expected_of(state, kind)
    expect_equal(dict(sorted(snapshot.load(tmp_path / "m.gguf").items())), dict(sorted(expected.items())))
    kept = Snapshot(tmp_path / "m.gguf").metadata.metadata
    assert kept["general.architecture"] == named
    assert kept["general.file_type"] == 0
    assert kept["tokenizer.ggml.tokens"] == "2 values"
    model_type = {"llama": "mixtral" if experts else "mistral", "qwen3moe": "qwen3_moe"}.get(named, named)
    config = {"model_type": model_type, "num_experts": 3, "num_attention_heads": 4, "num_key_value_heads": 2}
    back = snapshot.load(tmp_path / "m.gguf", map=TensorMap.load("gguf-hf", config))
    expect_equal(dict(sorted(back.items())), dict(sorted(state.items())))


@pytest.mark.parametrize("budget", [None, 1 << 20])
def test_gguf_convert_rounds_matrices_to_q8_0_blocks(tmp_path, budget):
    state = hugging_face()
    state["model.embed_tokens.weight"] = torch.randn(7001, 320, generator=torch.Generator().manual_seed(3))
    state["lm_head.weight"] = torch.randn(50, 50)
    save_file(state, tmp_path / "model.safetensors")
    (tmp_path / "kv.gguf").write_bytes(file_of({}, values_of("llama")))
    target = Target(tmp_path / "m.gguf", format_options=GGUFOptions(tmp_path / "kv.gguf", quantisation="Q8_0"))
    Snapshot(tmp_path / "model.safetensors").convert(target, dtype=torch.float16, memory_budget_bytes=budget)
    expected = {
        name: each if each.dim() == 1 else rounded(each) if each.shape[-1] % 32 == 0 else each.to(torch.float16)
        for name, each in expected_of(state, "llama").items()
    }
    expect_equal(dict(sorted(snapshot.load(tmp_path / "m.gguf").items())), dict(sorted(expected.items())))
    kept = Snapshot(tmp_path / "m.gguf").metadata.metadata
    assert (kept["general.file_type"], kept["general.quantization_version"]) == (7, 2)


def test_gguf_convert_copies_tables_of_kv_from_and_expects_its_names(tmp_path):
    state = hugging_face()
    expected = expected_of(state, "llama") | {"rope_freqs.weight": torch.arange(4.0)}
    del expected["output.weight"]
    (tmp_path / "kv.gguf").write_bytes(file_of(expected, values_of("llama")))
    save_file(state, tmp_path / "model.safetensors")
    target = Target(tmp_path / "m.gguf", format_options=GGUFOptions(tmp_path / "kv.gguf"))
    Snapshot(tmp_path / "model.safetensors").convert(target)
    expect_equal(dict(sorted(snapshot.load(tmp_path / "m.gguf").items())), dict(sorted(expected.items())))
    again = Target(tmp_path / "again.gguf", format_options=GGUFOptions(tmp_path / "m.gguf"))
    Snapshot(tmp_path / "m.gguf").convert(again)
    assert (tmp_path / "again.gguf").read_bytes() == (tmp_path / "m.gguf").read_bytes()
    with pytest.raises(RestoreError, match=r"blk\.0\.ffn_up\.weight: is in .*kv\.gguf, and missing") as caught:
        Snapshot(tmp_path / "model.safetensors").convert(
            Target(tmp_path / "n.gguf", format_options=GGUFOptions(tmp_path / "kv.gguf")),
            exclude=["blk.0.ffn_up.weight"],
        )
    assert len(caught.value.mismatches) == 1
    assert not (tmp_path / "n.gguf").exists()


def test_gguf_convert_refuses_tensors_it_cannot_store(tmp_path):
    (tmp_path / "kv.gguf").write_bytes(file_of({}, values_of("llama")))
    for tensors, expected in (
        ({"blk.0.w.weight": torch.ones(2, 2, dtype=torch.float64)}, r"float64\[2, 2\]"),
        ({"blk.0.w.weight": torch.ones(2, 2, dtype=torch.int32)}, r"int32\[2, 2\]"),
        ({"blk.0.w.weight": torch.ones(1, 1, 1, 1, 1)}, r"float32\[1, 1, 1, 1, 1\]"),
    ):
        save_file(tensors, tmp_path / "model.safetensors")
        with pytest.raises(UnsupportedFormatError, match=expected):
            Snapshot(tmp_path / "model.safetensors").convert(
                Target(tmp_path / "m.gguf", format_options=GGUFOptions(tmp_path / "kv.gguf"))
            )
    save_file({"blk.0.w.weight": torch.full((2, 32), math.nan)}, tmp_path / "model.safetensors")
    with pytest.raises(UnsupportedFormatError, match=r"blk\.0\.w\.weight: has values that are too large for Q8_0"):
        Snapshot(tmp_path / "model.safetensors").convert(
            Target(tmp_path / "m.gguf", format_options=GGUFOptions(tmp_path / "kv.gguf", quantisation="Q8_0"))
        )
    assert not (tmp_path / "m.gguf").exists()


def test_gguf_convert_refuses_invalid_arguments(tmp_path):
    save_file({"w": torch.ones(2)}, tmp_path / "model.safetensors")
    opened = Snapshot(tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"format_options must be .*GGUFOptions for to='gguf', got None"):
        opened.convert(tmp_path / "m.gguf")
    with pytest.raises(ValueError, match="format_options must be those of to='torch', got GGUFOptions"):
        Target(tmp_path / "m.pt", "torch", format_options=GGUFOptions("x.gguf"))
    for wrong in (GGUFOptions, "Q8_0", {"kv_from": "x.gguf"}):
        with pytest.raises(TypeError, match="format_options must be options of a format"):
            Target(tmp_path / "m.gguf", format_options=wrong)
    with pytest.raises(TypeError, match="kv_from must be a path"):
        GGUFOptions(None)
    with pytest.raises(ValueError, match="format_options must be None for a copy"):
        opened.copy(Target(tmp_path / "m.gguf", format_options=GGUFOptions("x.gguf")))
    with pytest.raises(ValueError, match="quantisation must be None or 'Q8_0'"):
        GGUFOptions("x.gguf", quantisation="Q4_0")
    (tmp_path / "kv.gguf").write_bytes(file_of({}, pair("general.architecture", TEXT, text("t5"))))
    with pytest.raises(UnsupportedFormatError, match=r"kv\.gguf: the architecture must be one of llama, .* got 't5'"):
        opened.convert(Target(tmp_path / "m.gguf", format_options=GGUFOptions(tmp_path / "kv.gguf")))
    with pytest.raises(UnsupportedFormatError, match="not a checkpoint of any known format"):
        opened.convert(Target(tmp_path / "m.gguf", format_options=GGUFOptions(tmp_path / "model.safetensors")))


def test_gguf_cli_convert(tmp_path, capsys):
    save_file(hugging_face(), tmp_path / "model.safetensors")
    (tmp_path / "kv.gguf").write_bytes(file_of({}, values_of("llama")))
    arguments = ["--kv-from", str(tmp_path / "kv.gguf"), "--quantisation", "Q8_0", "--json"]
    assert main(["convert", str(tmp_path / "model.safetensors"), str(tmp_path / "m.gguf"), *arguments]) == 0
    assert json.loads(capsys.readouterr().out)["format"] == "gguf"
    assert Snapshot(tmp_path / "m.gguf").verify()
    words = ["convert", str(tmp_path / "model.safetensors"), str(tmp_path / "n.gguf")]
    assert main([*words, "--quantisation", "Q8_0"]) == 2
    assert "--quantisation needs --kv-from" in capsys.readouterr().err
    assert main([*words, *arguments, "--adapter-config", "x.json"]) == 2
    assert "must be those of one format, got those of gguf, peft" in capsys.readouterr().err
    assert main([*words, *arguments, "--to", "torch"]) == 2
    assert "must be those of to='torch'" in capsys.readouterr().err
    assert not (tmp_path / "n.gguf").exists()


# The package gguf, and transformers


def test_gguf_files_of_the_gguf_package_are_read(tmp_path):
    gguf = pytest.importorskip("gguf")
    kinds = gguf.GGMLQuantizationType
    writer = gguf.GGUFWriter(str(tmp_path / "m.gguf"), "llama")
    writer.add_array("tokenizer.ggml.tokens", [f"token {number}" for number in range(100_000)])
    writer.add_float32("f", 1.5)
    array = np.random.default_rng(0).standard_normal((64, 320)).astype(np.float32)
    stored = {"q": kinds.Q8_0, "b": kinds.BF16, "old": kinds.Q5_1}
    for name, kind in stored.items():
        writer.add_tensor(name, gguf.quantize(array, kind), raw_dtype=kind)
    plain = {"h": array.astype(np.float16), "f": array[0], "i": np.arange(5, dtype=np.int32)}
    for name, each in plain.items():
        writer.add_tensor(name, each)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    found = snapshot.load(tmp_path / "m.gguf")
    for name, each in plain.items():
        assert np.array_equal(found[name].numpy(), each)
    for name, kind in stored.items():
        expected = gguf.dequantize(gguf.quantize(array, kind), kind)
        assert np.array_equal(found[name].float().numpy(), expected)
    metadata = Snapshot(tmp_path / "m.gguf").metadata.metadata
    assert metadata["f"] == 1.5
    assert metadata["tokenizer.ggml.tokens"] == "100,000 values"


@pytest.mark.parametrize("dtype", [None, torch.float16, torch.bfloat16, "Q8_0"], ids=str)
def test_gguf_and_transformers_read_converted_files(tmp_path, dtype):
    gguf, transformers = pytest.importorskip("gguf"), pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=96, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=8,
        num_key_value_heads=2, tie_word_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(0)
    saved = transformers.LlamaForCausalLM(config)
    saved.save_pretrained(tmp_path / "hf")
    writer = gguf.GGUFWriter(str(tmp_path / "kv.gguf"), "llama")
    for add, value in (
        (writer.add_embedding_length, 64), (writer.add_block_count, 2), (writer.add_feed_forward_length, 128),
        (writer.add_head_count, 8), (writer.add_head_count_kv, 2), (writer.add_layer_norm_rms_eps, 1e-6),
        (writer.add_vocab_size, 96), (writer.add_context_length, 2048), (writer.add_rope_dimension_count, 8),
    ):  # fmt: skip
        add(value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    quantisation = dtype if isinstance(dtype, str) else None
    target = Target(tmp_path / "m.gguf", format_options=GGUFOptions(tmp_path / "kv.gguf", quantisation=quantisation))
    Snapshot(tmp_path / "hf").convert(target, dtype=None if quantisation else dtype)
    kinds = gguf.GGMLQuantizationType
    chosen = {None: kinds.F32, torch.float16: kinds.F16, torch.bfloat16: kinds.BF16, "Q8_0": kinds.Q8_0}[dtype]
    expected = expected_of({k: v for k, v in saved.state_dict().items() if "layers" not in k}, "llama")
    for each in gguf.GGUFReader(tmp_path / "m.gguf").tensors:
        assert each.tensor_type == (chosen if len(each.shape) > 1 else kinds.F32)
        if each.name in expected:
            array = expected[each.name].numpy()
            made = gguf.quantize(array, each.tensor_type)
            assert np.array_equal(np.asarray(each.data).view(made.dtype).reshape(made.shape), made)
    fresh = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="m.gguf")
    for name, each in saved.state_dict().items():
        if quantisation and each.dim() > 1:
            assert (fresh.state_dict()[name] - each).abs().max() <= each.abs().max() / 127
        else:
            expect_equal(fresh.state_dict()[name], each if each.dim() == 1 or dtype is None else each.to(dtype).float())


def test_gguf_vectors_stay_float32():
    assert choose_kind("bfloat16", (32,), "Q8_0") == "float32"
    assert choose_kind("bfloat16", (2, 31), "Q8_0") == "bfloat16"
