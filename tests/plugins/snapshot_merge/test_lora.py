"""A LoRA of PEFT is merged into a base of any format: the bits are those of PEFT, and the memory budget holds."""

import json
import math
import re
import warnings
import zipfile
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import nn

import snapshot
from snapshot import (
    CorruptSnapshotError,
    RestoreError,
    Snapshot,
    SnapshotError,
    SnapshotNotFoundError,
    StateDict,
    Target,
)
from snapshot.cli import main
from snapshot.errors import UnsupportedFormatError
from snapshot_merge import MergeOptions, PEFTOptions, merge_lora
from snapshot_merge.peft import match_pattern, parse_config
from tests.helpers.states import expect_equal
from tests.helpers.versions import ALONE
from tests.plugins.snapshot_merge.adapters import PREFIX, adapter, draw, factors


def base(dtype=torch.float32):
    return {
        "embed.weight": draw(50, 16, dtype=dtype),
        "h.0.q.weight": draw(24, 16, dtype=dtype),
        "h.0.q.bias": draw(24, dtype=dtype),
        "h.0.turned.weight": draw(16, 24, dtype=dtype),
        "h.1.wide.weight": draw(16, 18, dtype=dtype),
        "conv.weight": draw(6, 4, 3, 3, dtype=dtype),
        "norm.weight": draw(16, dtype=dtype),
        "steps": torch.arange(3),
    }


def summed(weight, a, b, scale, *, turned=False):
    """What PEFT computes: the product in float32, and the sum rounded once."""
    product = (b.float() @ a.float()) * scale
    product = product.T if turned else product
    return (weight.float() + product.reshape(weight.shape)).to(weight.dtype)


@pytest.fixture
def files(tmp_path):
    state = base()
    tensors = {
        **factors("h.0.q", 24, 16),
        **factors("h.0.turned", 24, 16, rank=2),
        **factors("h.1.wide", 16, 18),
        "embed.lora_embedding_A": draw(4, 50, seed=3),
        "embed.lora_embedding_B": draw(16, 4, seed=4),
        "conv.lora_A.weight": draw(4, 4, 3, 3, seed=5),
        "conv.lora_B.weight": draw(6, 4, 1, 1, seed=6),
        "norm.weight": draw(16, seed=7),
        "h.0.q.base_layer.bias": draw(24, seed=8),
    }
    folder = adapter(tmp_path / "adapter", tensors, alpha_pattern={r"h\.\d+\.wide": 10, "turned": 3})
    pairs = {name: (tensors[f"{name}.lora_A.weight"], tensors[f"{name}.lora_B.weight"]) for name in
             ("h.0.q", "h.0.turned", "h.1.wide")}  # fmt: skip
    expected = state | {
        "h.0.q.weight": summed(state["h.0.q.weight"], *pairs["h.0.q"], 6 / 4),
        "h.0.turned.weight": summed(state["h.0.turned.weight"], *pairs["h.0.turned"], 3 / 2, turned=True),
        "h.1.wide.weight": summed(state["h.1.wide.weight"], *pairs["h.1.wide"], 10 / 4),
        "embed.weight": summed(
            state["embed.weight"],
            tensors["embed.lora_embedding_A"],
            tensors["embed.lora_embedding_B"],
            6 / 4,
            turned=True,
        ),
        "conv.weight": summed(
            state["conv.weight"],
            tensors["conv.lora_A.weight"].flatten(1),
            tensors["conv.lora_B.weight"].flatten(1),
            6 / 4,
        ),
        "norm.weight": tensors["norm.weight"],
        "h.0.q.bias": tensors["h.0.q.base_layer.bias"],
    }
    return state, folder, expected


def close(found, expected):
    """Equal, up to the last bits of a product: matrices of other shapes are multiplied in another order."""
    assert found.keys() == expected.keys()
    for name, each in expected.items():
        assert found[name].dtype == each.dtype
        torch.testing.assert_close(found[name], each, rtol=1e-5, atol=1e-6)


def write(kind, state, folder):
    if kind == "safetensors":
        save_file(state, folder)
    elif kind == "torch":
        torch.save({"model": state, "epoch": 3}, folder)
    elif kind == "dcp":
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dcp.save({"model": state}, checkpoint_id=folder, **ALONE)
    else:
        Snapshot.take(folder, {"model": StateDict(state)})


@pytest.mark.parametrize("kind", ["safetensors", "torch", "dcp", "snapshot"])
@pytest.mark.parametrize("to", ["safetensors", "torch", "dcp", "snapshot"])
def test_merge_lora_with_a_base_of_any_format_to_any_other(tmp_path, files, kind, to):
    state, folder, expected = files
    source = tmp_path / {"safetensors": "base.safetensors", "torch": "base.pt"}.get(kind, "base")
    write(kind, state, source)
    target = Target(tmp_path / {"safetensors": "out.safetensors", "torch": "out.pt"}.get(to, "out"), to)
    report = merge_lora(source, folder, target, select=["model/**"] if kind == "torch" else ())
    assert report.tensors == len(state)
    close(snapshot.load(target.url), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_merge_lora_does_not_depend_on_parts_and_memory_budget_bytes(tmp_path, dtype):
    state = {"a.weight": draw(3001, 300, dtype=dtype), "b.weight": draw(70, 40_000, dtype=dtype)}
    save_file(state, tmp_path / "base.safetensors")
    tensors = {**factors("a", 3001, 300, rank=16), **factors("b", 70, 40_000)}
    folder = adapter(tmp_path / "adapter", tensors)
    found = []
    for number, budget in enumerate((None, 1 << 20, 7 << 20)):
        path = tmp_path / f"{number}.safetensors"
        merge_lora(tmp_path / "base.safetensors", folder, path, options=MergeOptions(memory_budget_bytes=budget))
        found.append(snapshot.load(path))
    expect_equal(found[1], found[0])
    expect_equal(found[2], found[0])
    wide = torch.promote_types(dtype, torch.float32)
    for name, scale in (("a", 6 / 16), ("b", 6 / 4)):
        product = tensors[f"{name}.lora_B.weight"].to(wide) @ tensors[f"{name}.lora_A.weight"].to(wide) * scale
        expected = (state[f"{name}.weight"].to(wide) + product).to(dtype)
        wrong = (found[0][f"{name}.weight"].to(torch.float64) - expected.to(torch.float64)).abs().max()
        assert wrong <= 2 * torch.finfo(dtype).eps * expected.abs().max()


def test_merge_lora_dtype_casts_after_the_merge(tmp_path, files):
    state, folder, expected = files
    save_file(state, tmp_path / "base.safetensors")
    merge_lora(tmp_path / "base.safetensors", folder, tmp_path / "out", options=MergeOptions(dtype=torch.bfloat16))
    found = snapshot.load(tmp_path / "out")
    for name, each in found.items():
        wanted = expected[name].to(torch.bfloat16) if expected[name].is_floating_point() else expected[name]
        assert each.dtype == wanted.dtype
        torch.testing.assert_close(each, wanted, rtol=1e-2, atol=0)


def test_merge_lora_rslora_divides_by_the_root_of_the_rank(tmp_path):
    tensors = factors("a", 8, 6, rank=9)
    folder = adapter(tmp_path / "adapter", tensors, use_rslora=True)
    state = {"a.weight": draw(8, 6)}
    save_file(state, tmp_path / "base.safetensors")
    merge_lora(tmp_path / "base.safetensors", folder, tmp_path / "out")
    expected = summed(state["a.weight"], *tensors.values(), 6 / 3)
    torch.testing.assert_close(snapshot.load(tmp_path / "out")["a.weight"], expected)


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("others", [("straight", "turned"), ("turned",), ("straight",)])
def test_merge_lora_square_matrix_is_refused_if_another_contradicts_fan_in_fan_out(tmp_path, turned, others):
    shapes = {"straight": (8, 6), "turned": (6, 8)}
    tensors = {**factors("square", 6, 6), **{key: each for name in others for key, each in factors(name, 8, 6).items()}}
    folder = adapter(tmp_path / "adapter", tensors, fan_in_fan_out=turned)
    state = {"square.weight": draw(6, 6), **{f"{name}.weight": draw(*shapes[name]) for name in others}}
    save_file(state, tmp_path / "base.safetensors")
    if others == (("turned",) if turned else ("straight",)):
        merge_lora(tmp_path / "base.safetensors", folder, tmp_path / "out")
        pair = tensors["square.lora_A.weight"], tensors["square.lora_B.weight"]
        expected = summed(state["square.weight"], *pair, 6 / 4, turned=turned)
        torch.testing.assert_close(snapshot.load(tmp_path / "out")["square.weight"], expected)
        return
    with pytest.raises(RestoreError, match=r"square\.weight: is square, .*Split the adapter in two"):
        merge_lora(tmp_path / "base.safetensors", folder, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["embedding", "linear", "dora"])
def test_merge_lora_adds_to_a_saved_base_layer(tmp_path, kind, stored):
    saved = draw(3000, 40, seed=9).to(stored)
    a, b = (draw(4, 3000), draw(40, 4)) if kind == "embedding" else (draw(4, 40), draw(3000, 4))
    names = ("lora_embedding_A", "lora_embedding_B") if kind == "embedding" else ("lora_A.weight", "lora_B.weight")
    tensors = {f"e.{names[0]}": a, f"e.{names[1]}": b, "e.base_layer.weight": saved}
    if kind == "dora":
        tensors["e.lora_magnitude_vector"] = draw(3000).abs()
    folder = adapter(tmp_path / "adapter", tensors, use_dora=kind == "dora")
    save_file({"e.weight": draw(3000, 40)}, tmp_path / "base.safetensors")
    expected = summed(saved.float(), a, b, 6 / 4, turned=kind == "embedding")
    if kind == "dora":
        expected *= (tensors["e.lora_magnitude_vector"] / expected.norm(dim=1))[:, None]
    for budget in (None, 1 << 20):
        target = tmp_path / f"out{budget}"
        merge_lora(tmp_path / "base.safetensors", folder, target, options=MergeOptions(memory_budget_bytes=budget))
        torch.testing.assert_close(snapshot.load(target)["e.weight"], expected, rtol=1e-4, atol=1e-5)


def test_merge_lora_refuses_saved_base_layers_that_do_not_fit(tmp_path):
    save_file({"a.weight": draw(8, 6)}, tmp_path / "base.safetensors")
    folder = adapter(tmp_path / "adapter", {**factors("a", 8, 6), "a.base_layer.weight": draw(9, 6)})
    with pytest.raises(RestoreError, match=r"a\.weight: has shape \[8, 6\], .* the saved base layer float32\[9, 6\]"):
        merge_lora(tmp_path / "base.safetensors", folder, tmp_path / "out")
    adapter(folder, {**factors("a", 8, 6), "a.weight": draw(8, 6)})
    with pytest.raises(UnsupportedFormatError, match=r"cannot be merged:\n.*\.a\.weight"):
        merge_lora(tmp_path / "base.safetensors", folder, tmp_path / "out")
    adapter(folder, {**factors("a", 8, 6), "a.base_layer.weight": draw(8, 6), "a.weight": draw(8, 6)})
    with pytest.raises(UnsupportedFormatError, match=r"cannot be merged:\n.*\.a\.weight"):
        merge_lora(tmp_path / "base.safetensors", folder, tmp_path / "out")


@pytest.mark.parametrize("turned", [False, True])
def test_merge_lora_square_matrix_follows_fan_in_fan_out(tmp_path, turned):
    tensors = factors("a", 6, 6)
    folder = adapter(tmp_path / "adapter", tensors, fan_in_fan_out=turned)
    state = {"a.weight": draw(6, 6)}
    save_file(state, tmp_path / "base.safetensors")
    merge_lora(tmp_path / "base.safetensors", folder, tmp_path / "out")
    expected = summed(state["a.weight"], *tensors.values(), 6 / 4, turned=turned)
    torch.testing.assert_close(snapshot.load(tmp_path / "out")["a.weight"], expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("turned", [False, True])
def test_merge_lora_dora_scales_rows_to_their_magnitudes(tmp_path, dtype, turned):
    weight = draw(900, 700, dtype=dtype)
    save_file({"a.weight": weight}, tmp_path / "base.safetensors")
    rows, columns = (700, 900) if turned else (900, 700)
    magnitude = draw(rows).abs()
    tensors = factors("a", rows, columns)
    folder = adapter(
        tmp_path / "adapter", {**tensors, "a.lora_magnitude_vector": magnitude}, use_dora=True, fan_in_fan_out=turned
    )
    found = []
    for number, budget in enumerate((None, 1 << 20)):
        path = tmp_path / f"{number}.safetensors"
        merge_lora(tmp_path / "base.safetensors", folder, path, options=MergeOptions(memory_budget_bytes=budget))
        found.append(snapshot.load(path))
    expect_equal(found[0], found[1])
    product = tensors["a.lora_B.weight"] @ tensors["a.lora_A.weight"] * 1.5
    total = (weight.float().T if turned else weight.float()) + product
    expected = total * (magnitude / total.norm(dim=1))[:, None]
    expected = (expected.T if turned else expected).to(dtype)
    torch.testing.assert_close(
        found[0]["a.weight"], expected, rtol=1e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-6
    )


def test_merge_lora_refuses_dora_that_does_not_fit(tmp_path):
    save_file({"a.weight": draw(8, 6), "e.weight": draw(8, 6)}, tmp_path / "base.safetensors")
    plain, length = factors("a", 8, 6), {"a.lora_magnitude_vector": draw(8)}
    embedding = {"e.lora_embedding_A": draw(4, 8), "e.lora_embedding_B": draw(6, 4), "e.lora_magnitude_vector": draw(6)}
    for number, (tensors, use, expected) in enumerate((
        (plain, True, "must have a lora_magnitude_vector if, and only if, use_dora is set"),
        (plain | length, False, "must have a lora_magnitude_vector if, and only if, use_dora is set"),
        (plain | {"a.lora_magnitude_vector": draw(7)}, True, "the magnitudes of DoRA must be 8 numbers"),
        (embedding, True, "DoRA of an embedding or a convolution cannot be merged"),
    )):  # fmt: skip
        folder = adapter(tmp_path / str(number), tensors, use_dora=use)
        with pytest.raises(RestoreError, match=expected):
            merge_lora(tmp_path / "base.safetensors", folder, tmp_path / "out")


def test_merge_lora_of_a_tensor_in_another_memory_format(tmp_path):
    state = {"conv.weight": draw(6, 4, 3, 3).contiguous(memory_format=torch.channels_last), "w.weight": draw(8, 6).t()}
    Snapshot.take(tmp_path / "base", {"model": StateDict(state)})
    tensors = {"conv.lora_A.weight": draw(4, 4, 3, 3, seed=5), "conv.lora_B.weight": draw(6, 4, 1, 1, seed=6)}
    tensors |= factors("w", 6, 8)
    folder = adapter(tmp_path / "adapter", tensors)
    report = merge_lora(tmp_path / "base", folder, tmp_path / "out.pt")
    assert "model/conv.weight: the memory layout becomes contiguous" in report.changed
    found = torch.load(tmp_path / "out.pt")["model"]
    expected = summed(
        state["conv.weight"], tensors["conv.lora_A.weight"].flatten(1), tensors["conv.lora_B.weight"].flatten(1), 1.5
    )
    torch.testing.assert_close(found["conv.weight"], expected)
    expected = summed(state["w.weight"], tensors["w.lora_A.weight"], tensors["w.lora_B.weight"], 1.5)
    torch.testing.assert_close(found["w.weight"], expected)


@pytest.mark.parametrize("name", ["nf4-nested", "int8", "gptq-ordered", "awq"])
def test_merge_lora_dequantises_a_quantised_base(tmp_path, name, capsys):
    with zipfile.ZipFile(Path(__file__).parents[1] / "snapshot_quantised" / "quantised_files.zip") as archive:
        archive.extractall(tmp_path)
    folder, module = tmp_path / name, "layers.0.q_proj"
    expected = load_file(folder / "expected.safetensors")
    rows, columns = expected[f"{module}.weight"].shape
    pair = factors(module, rows, columns)
    lora = adapter(tmp_path / "lora", pair)
    expected[f"{module}.weight"] = summed(expected[f"{module}.weight"], *pair.values(), 6 / 4)
    given, to = ["merge", str(folder / "model.safetensors"), "-o"], tmp_path / "merged.safetensors"
    given += [str(to), "--lora", str(lora), "--map", "quantised-hf", "--map-config", str(folder), "--memory", "1MiB"]
    assert main(given) == 0, capsys.readouterr().err
    expect_equal(dict(sorted(load_file(to).items())), dict(sorted(expected.items())))


def test_merge_lora_with_a_tensor_map_of_the_base(tmp_path, files):
    state, lora = base(), adapter(tmp_path / "lora", factors("layers.0.q", 24, 16))
    save_file(state, tmp_path / "base.safetensors")
    rules = [{"names": "h.0.turned.weight -> layers.0.q.weight", "axes": "a b -> b a"}]
    loaded = snapshot.TensorMap(rules, others="keep")
    made = merge_lora(tmp_path / "base.safetensors", lora, tmp_path / "x.safetensors", map=loaded)
    assert made.tensors == len(state)
    expected = summed(state["h.0.turned.weight"].T.contiguous(), *factors("layers.0.q", 24, 16).values(), 6 / 4)
    expect_equal(load_file(tmp_path / "x.safetensors")["layers.0.q.weight"], expected)


def test_merge_lora_keeps_tied_weights_tied(tmp_path):
    weight = draw(10, 6)
    Snapshot.take(tmp_path / "base", {"model": StateDict({"embed.weight": weight, "head.weight": weight})})
    tensors = factors("head", 10, 6)
    merge_lora(tmp_path / "base", adapter(tmp_path / "adapter", tensors), tmp_path / "out")
    found = snapshot.load(tmp_path / "out")
    assert found["embed.weight"].data_ptr() == found["head.weight"].data_ptr()
    torch.testing.assert_close(found["head.weight"], summed(weight, *tensors.values(), 6 / 4))
    both = adapter(tmp_path / "both", {**tensors, "embed.weight": draw(10, 6)})
    with pytest.raises(RestoreError, match=r"embed\.weight: is the same tensor as head\.weight, which is changed, too"):
        merge_lora(tmp_path / "base", both, tmp_path / "again")


def test_merge_lora_lists_all_mismatches_before_writing(tmp_path):
    save_file(base(), tmp_path / "base.safetensors")
    tensors = {
        **factors("h.0.q", 24, 15),
        **factors("h.9.q", 24, 16),
        **factors("steps2", 3, 3),
        "norm.weight": draw(17),
        "conv.lora_A.weight": draw(4, 4, 3, 2),
        "conv.lora_B.weight": draw(6, 4, 1, 1),
        "embed.lora_A.weight": draw(4, 16, dtype=torch.float16),
        "embed.lora_B.weight": draw(50, 4),
    }
    with pytest.raises(RestoreError) as caught:
        merge_lora(tmp_path / "base.safetensors", adapter(tmp_path / "adapter", tensors), tmp_path / "out")
    found = "\n".join(caught.value.mismatches)
    for line in (
        r"h.0.q.weight: has shape [24, 16], but the factors have [4, 15] and [24, 4]",
        r"h.9.q.weight: is missing; ",
        r"steps2.weight: is missing",
        r"norm.weight: has shape [16], but [17] in the adapter",
        r"conv.weight: has shape [6, 4, 3, 3], but the factors have [4, 4, 3, 2] and [6, 4, 1, 1]",
        r"embed.weight: dtypes must be floating point, and the same for both factors: float32, float16, float32",
    ):
        assert line in found
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"lora_bias": True}, "lora_bias: True"),
        ({"layer_replication": [[0, 1]]}, "layer_replication"),
        ({"target_parameters": ["x"]}, "target_parameters"),
        ({"trainable_token_indices": [1]}, "trainable_token_indices"),
        (
            {"init_lora_weights": "pissa_niter_4"},
            r"init_lora_weights: pissa_niter_4 \(it changes the weights of the base",
        ),
        ({"init_lora_weights": 1}, "init_lora_weights: 1"),
        ({"alpha_pattern": {"(a+)+b": 1}}, "alpha_pattern: .*must be a name"),
        ({"alpha_pattern": {"a{3}": 1}}, "alpha_pattern"),
        ({"alpha_pattern": {"a|b": 1}}, "alpha_pattern"),
        ({"alpha_pattern": {"": 1}}, "alpha_pattern"),
        ({"peft_type": "IA3"}, "peft_type must be LORA for a merge, got 'IA3'"),
    ],
)
def test_merge_lora_refuses_unsupported_configurations(tmp_path, config, expected):
    save_file({"a.weight": draw(8, 6)}, tmp_path / "base.safetensors")
    folder = adapter(tmp_path / "adapter", factors("a", 8, 6), **config)
    with pytest.raises(UnsupportedFormatError, match=expected):
        merge_lora(tmp_path / "base.safetensors", folder, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("start", [True, False, None, "gaussian", "eva", "orthogonal"])
def test_merge_lora_accepts_init_lora_weights_that_keep_the_base(start):
    config = parse_config(json.dumps({"peft_type": "LORA", "init_lora_weights": start}).encode(), "x")
    assert config.scale_of("a", 2) == 4


@pytest.mark.parametrize(
    "name", ["a.lora_magnitude_vector", "a.lora_B.bias", "a.lora_A.weight", "a.token_adapter.trainable_tokens_delta"]
)
def test_merge_lora_refuses_unknown_tensors(tmp_path, name):
    save_file({"a.weight": draw(8, 6)}, tmp_path / "base.safetensors")
    tensors = {name: draw(8, 6)} | factors("b", 8, 6)
    with pytest.raises(UnsupportedFormatError, match=rf"these tensors cannot be merged:\n  {PREFIX}{name}"):
        merge_lora(tmp_path / "base.safetensors", adapter(tmp_path / "adapter", tensors), tmp_path / "out")


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b'{"peft_type": 1}', b'{"r": 1}', b'{"peft_type": "LORA", "lora_alpha": 1e999}',
                b'{"peft_type": "LORA", "alpha_pattern": {"a": null}}', b'{"a":' * 2000]
)  # fmt: skip
def test_merge_lora_damaged_adapter_config_is_corrupt(tmp_path, content):
    save_file({"a.weight": draw(8, 6)}, tmp_path / "base.safetensors")
    folder = adapter(tmp_path / "adapter", factors("a", 8, 6))
    (folder / "adapter_config.json").write_bytes(content)
    with pytest.raises(CorruptSnapshotError, match=r"adapter_config\.json"):
        merge_lora(tmp_path / "base.safetensors", folder, tmp_path / "out")


@given(st.text("ab.\\d+*^$[]09(|)?{}", max_size=30), st.text("ab.019", max_size=40))
def test_lora_parse_config_accepts_or_refuses_any_pattern(pattern, name):
    data = json.dumps({"peft_type": "LORA", "alpha_pattern": {pattern: 2.0}}).encode()
    try:
        config = parse_config(data, "x")
    except UnsupportedFormatError:
        return
    assert config.scale_of(name, 1) in (2.0, 8.0)


TOKENS = ["a", "b", ".", "\\.", "\\d", "[0-9]", "1"]


@given(
    st.lists(st.tuples(st.sampled_from(TOKENS), st.sampled_from(["", "", "*", "+"])), min_size=1, max_size=5),
    st.sampled_from(["", "^"]),
    st.text("ab.12", max_size=8),
)
def test_lora_match_pattern_equals_re_fullmatch(tokens, start, name):
    pattern = start + "".join(token + repeat for token, repeat in tokens)
    assert match_pattern(pattern, name) == bool(re.fullmatch(rf"(.*\.)?({pattern})", name) and name)


def test_lora_match_pattern_is_quick_for_long_patterns():
    assert not match_pattern(".*" * 100 + "x", "a." * 5000)


def test_merge_lora_needs_adapter_config_json(tmp_path):
    save_file({"a.weight": draw(8, 6)}, tmp_path / "base.safetensors")
    folder = adapter(tmp_path / "adapter", factors("a", 8, 6))
    (folder / "adapter_config.json").unlink()
    with pytest.raises(SnapshotError, match=r"adapter_config\.json: is missing, so .* is not an adapter of PEFT"):
        merge_lora(tmp_path / "base.safetensors", folder, tmp_path / "out")


def test_merge_lora_refuses_invalid_arguments(tmp_path):
    folder = adapter(tmp_path / "adapter", factors("a", 8, 6))
    save_file({"a.weight": draw(8, 6)}, tmp_path / "base.safetensors")
    path = tmp_path / "base.safetensors"
    for base_model, lora in (([path], folder), (path, None)):
        with pytest.raises(TypeError, match="a checkpoint must be"):
            merge_lora(base_model, lora, tmp_path / "out")
    with pytest.raises(SnapshotNotFoundError):
        merge_lora(path, tmp_path / "nothing", tmp_path / "out")


def test_cli_merge_lora(tmp_path, files, capsys):
    state, folder, expected = files
    save_file(state, tmp_path / "base.safetensors")
    arguments = [
        "merge",
        str(tmp_path / "base.safetensors"),
        "--lora",
        str(folder),
        "-o",
        str(tmp_path / "out"),
        "--json",
    ]
    assert main(arguments) == 0
    assert json.loads(capsys.readouterr().out)["tensors"] == len(state)
    close(snapshot.load(tmp_path / "out"), expected)
    assert main(["merge", str(tmp_path / "base.safetensors"), "--lora", str(tmp_path / "no"), "-o", "x"]) == 2
    assert "no: there is no snapshot here" in capsys.readouterr().err


# PEFT itself


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(97, 64)
        self.q = nn.Linear(64, 160)
        self.k = nn.Linear(160, 48, bias=False)
        self.conv = nn.Conv2d(4, 6, 1)
        self.norm = nn.LayerNorm(64)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_merge_lora_dora_equals_peft(tmp_path, dtype):
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    model = Block().to(dtype)
    save_file(model.state_dict(), tmp_path / "base.safetensors")
    config = peft.LoraConfig(r=8, lora_alpha=24, target_modules=["q", "k"], use_dora=True)
    adapted = peft.get_peft_model(model, config)
    for name, each in adapted.named_parameters():
        if "lora_" in name:
            each.data = torch.randn(each.shape).mul_(0.1) + (2 if "magnitude" in name else 0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        adapted.save_pretrained(tmp_path / "adapter")
        fresh = Block().to(dtype)
        fresh.load_state_dict(snapshot.load(tmp_path / "base.safetensors"))
        merged = peft.PeftModel.from_pretrained(fresh, tmp_path / "adapter").merge_and_unload().state_dict()
    merge_lora(tmp_path / "base.safetensors", tmp_path / "adapter", tmp_path / "out.safetensors")
    expect_equal(dict(sorted(snapshot.load(tmp_path / "out.safetensors").items())), dict(sorted(merged.items())))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rslora", "bias"), [(False, "lora_only"), (True, "all"), (True, "none")])
def test_merge_lora_equals_peft(tmp_path, dtype, stored, rslora, bias):
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    model = Block().to(dtype)
    save_file(model.state_dict(), tmp_path / "base.safetensors")
    config = peft.LoraConfig(
        r=8, lora_alpha=24, target_modules=["q", "k", "embed", "conv"], modules_to_save=["norm"], use_rslora=rslora,
        rank_pattern={"k": 5}, alpha_pattern={"k": 7}, bias=bias,
    )  # fmt: skip
    adapted = peft.get_peft_model(model, config, autocast_adapter_dtype=False)
    for name, each in adapted.named_parameters():
        if "lora_" in name:
            each.data = torch.randn(each.shape).mul_(0.1).to(stored)
        elif "modules_to_save" in name or "bias" in name:
            each.data = torch.randn(each.shape).to(dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        adapted.save_pretrained(tmp_path / "adapter")
        fresh = Block().to(dtype)
        fresh.load_state_dict(snapshot.load(tmp_path / "base.safetensors"))
        merged = peft.PeftModel.from_pretrained(fresh, tmp_path / "adapter").merge_and_unload().state_dict()
    merge_lora(tmp_path / "base.safetensors", tmp_path / "adapter", tmp_path / "out.safetensors")
    found = snapshot.load(tmp_path / "out.safetensors")
    assert found.keys() == merged.keys()
    for name, each in merged.items():
        if (
            name == "embed.weight" and dtype != torch.float32
        ):  # PEFT rounds these factors to the dtype of the base first
            assert (found[name].float() - each.float()).abs().max() <= 4 * torch.finfo(
                dtype
            ).eps * each.float().abs().max()
        else:
            expect_equal(found[name], each)
    assert not math.isclose(found["q.weight"].float().sum().item(), model.q.base_layer.weight.float().sum().item())


# Writing


def test_convert_to_peft_writes_an_adapter_like_peft(tmp_path, files):
    _, folder, _ = files
    saved = snapshot.load(folder)
    Snapshot(folder).convert(tmp_path / "snap")
    with pytest.raises(SnapshotError, match=r"adapter_config\.json: is missing; pass format_options="):
        Snapshot(tmp_path / "snap").convert(Target(tmp_path / "again", "peft"))
    config = folder / "adapter_config.json"
    for source, beside in ((tmp_path / "snap", False), (folder, True)):
        target = Target(
            tmp_path / "again", "peft", format_options=None if beside else PEFTOptions(config), overwrite=beside
        )
        report = Snapshot(source).convert(target)
        assert report.files == ("adapter_model.safetensors", "adapter_config.json")
        assert sorted(each.name for each in (tmp_path / "again").iterdir()) == sorted(report.files)
        expect_equal(dict(sorted(snapshot.load(tmp_path / "again").items())), dict(sorted(saved.items())))
        assert (tmp_path / "again" / "adapter_config.json").read_bytes() == config.read_bytes()
    save_file({"w": draw(2)}, tmp_path / "w.safetensors")
    with pytest.raises(UnsupportedFormatError, match="has no tensors of an adapter"):
        Snapshot(tmp_path / "w.safetensors").convert(
            Target(tmp_path / "no", "peft", format_options=PEFTOptions(config))
        )
    with pytest.raises(ValueError, match="format_options must be those of to='torch'"):
        Target(tmp_path / "no.pt", "torch", format_options=PEFTOptions(config))
    with pytest.raises(TypeError, match="adapter_config must be a path"):
        PEFTOptions({"r": 4})
    arguments = ["--to", "peft", "--adapter-config", str(config)]
    assert main(["convert", str(tmp_path / "snap"), str(tmp_path / "cli"), *arguments]) == 0
    (tmp_path / "bad.json").write_text('{"r": 4}')
    with pytest.raises(CorruptSnapshotError, match=r"adapter_config\.json: must have a peft_type"):
        Snapshot(folder).convert(Target(tmp_path / "no", "peft", format_options=PEFTOptions(tmp_path / "bad.json")))


@pytest.mark.parametrize("bias", ["none", "all", "lora_only"])
@pytest.mark.parametrize("dora", [False, True])
def test_convert_to_peft_writes_a_peft_model_like_peft(tmp_path, bias, dora):
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    config = peft.LoraConfig(
        r=4, target_modules=["q", "k", *([] if dora else ["embed"])], modules_to_save=["norm"], bias=bias, use_dora=dora
    )
    adapted = peft.get_peft_model(Block(), config)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        adapted.save_pretrained(tmp_path / "adapter")
    Snapshot.take(tmp_path / "run", {"model": adapted})
    target = Target(tmp_path / "out", "peft", format_options=PEFTOptions(tmp_path / "adapter" / "adapter_config.json"))
    report = Snapshot(tmp_path / "run").convert(target)
    expected = snapshot.load(tmp_path / "adapter")
    for name in ("modules_to_save", "original_module"):  # with bias="all", PEFT writes names that it does not load
        expected.pop(f"{PREFIX}norm.{name}.bias", None)
    expect_equal(dict(sorted(snapshot.load(tmp_path / "out").items())), dict(sorted(expected.items())))
    assert any("q.base_layer.weight: is not of the adapter" in line for line in report.left_out)
    fresh = peft.PeftModel.from_pretrained(Block(), tmp_path / "out")
    found = {k: v for k, v in fresh.state_dict().items() if "lora_" in k or "modules_to_save" in k}
    expect_equal(found, {k: v for k, v in adapted.state_dict().items() if k in found})
