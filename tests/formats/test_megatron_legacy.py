"""Megatron's legacy folders, joined from tensor-parallel ranks and stages of a pipeline.

Its training code cannot run here. The files are stand-ins, cut as Megatron-LM's layers are (core 0.12): columns of
`linear_qkv` and `linear_fc1`, rows of `linear_proj` and `linear_fc2`, and the rest on all ranks.
"""

import argparse

import pytest
import torch
from torch import nn

from snapshot import CorruptSnapshotError, Snapshot, SnapshotError, TensorMap, UnsupportedFormatError
from snapshot import load as load_weights
from tests.formats.test_remote_reads import on_s3

HIDDEN, INNER, LAYERS, WORDS = 6, 8, 4, 10


def _whole(*, gated=True):
    torch.manual_seed(0)
    shapes = {"embedding.word_embeddings.weight": (WORDS, HIDDEN), "embedding.position_embeddings.weight": (5, HIDDEN)}
    for layer in range(LAYERS):
        shapes |= {
            f"decoder.layers.{layer}.self_attention.linear_qkv.weight": (16, HIDDEN),
            f"decoder.layers.{layer}.self_attention.linear_qkv.layer_norm_weight": (HIDDEN,),
            f"decoder.layers.{layer}.self_attention.linear_qkv.bias": (16,),
            f"decoder.layers.{layer}.self_attention.linear_proj.weight": (HIDDEN, 8),
            f"decoder.layers.{layer}.self_attention.linear_proj.bias": (HIDDEN,),
            f"decoder.layers.{layer}.mlp.linear_fc1.weight": (2 * INNER if gated else INNER, HIDDEN),
            f"decoder.layers.{layer}.mlp.linear_fc1.layer_norm_weight": (HIDDEN,),
            f"decoder.layers.{layer}.mlp.linear_fc2.weight": (HIDDEN, INNER),
        }
    shapes |= {"decoder.final_layernorm.weight": (HIDDEN,), "output_layer.weight": (WORDS, HIDDEN)}
    return {name: torch.randn(shape) for name, shape in shapes.items()}


def _cut(name, whole, rank, width, gated):
    if name.endswith(("linear_proj.weight", "linear_fc2.weight")):
        return whole.chunk(width, 1)[rank].contiguous()
    if gated and name.endswith("linear_fc1.weight"):
        return torch.cat([half.chunk(width, 0)[rank] for half in whole.chunk(2, 0)])
    columns = ("word_embeddings.weight", "output_layer.weight", "linear_qkv.weight", "linear_qkv.bias", "fc1.weight")
    return whole.chunk(width, 0)[rank].clone() if name.endswith(columns) else whole


def _write(
    folder, whole, width, stages, *, gated=True, virtual=1, change=lambda state, rank, stage: None, nested=False
):
    own = LAYERS // stages // virtual
    for stage in range(stages):
        for rank in range(width):
            state = {"checkpoint_version": 3.0, "iteration": 100, "rng_state": [{"random": (3, (rank, stage))}]}
            state["args"] = argparse.Namespace(swiglu=gated, num_layers=LAYERS, params_dtype=torch.float32)
            for chunk in range(virtual):
                first = (chunk * stages + stage) * own
                model = {}
                for name, tensor in whole.items():
                    if name.startswith("decoder.layers."):
                        layer, rest = name.removeprefix("decoder.layers.").split(".", 1)
                        if not first <= int(layer) < first + own:
                            continue
                        name = f"decoder.layers.{int(layer) - first}.{rest}"  # noqa: PLW2901 - its number in the stage
                    elif name.startswith("embedding.") != (stage == 0 and chunk == 0):
                        if not (stage == stages - 1 and chunk == virtual - 1):
                            continue
                        if name.startswith("embedding."):
                            continue
                    elif not name.startswith("embedding.") and not (stage == stages - 1 and chunk == virtual - 1):
                        continue
                    model[name] = _cut(name, tensor, rank, width, gated)
                if nested:
                    heads = {"embedding": {}, "decoder": {}, "output_layer": {}}
                    for name, tensor in model.items():
                        heads[name.partition(".")[0]][name.partition(".")[2]] = tensor
                    model = {"language_model": heads}
                state["model" if virtual == 1 else f"model{chunk}"] = model
            change(state, rank, stage)
            path = folder / (f"mp_rank_{rank:02d}_{stage:03d}" if stages > 1 else f"mp_rank_{rank:02d}")
            path.mkdir(parents=True)
            torch.save(state, path / "model_optim_rng.pt")


@pytest.mark.parametrize(("width", "stages", "virtual"), [(1, 1, 1), (2, 1, 1), (1, 2, 1), (2, 2, 1), (2, 2, 2)])
@pytest.mark.parametrize("gated", [True, False])
def test_the_model_is_whole(tmp_path, width, stages, virtual, gated):
    whole = _whole(gated=gated)
    _write(tmp_path / "x", whole, width, stages, gated=gated, virtual=virtual)
    snapshot = Snapshot(tmp_path / "x")
    found = snapshot.read_object("0/model")
    assert found.keys() == whole.keys()
    assert all(torch.equal(found[name], each) for name, each in whole.items())
    assert snapshot.verify()
    assert snapshot.metadata.world_size == width * stages
    assert snapshot.read_object("0/args") == {"swiglu": gated, "num_layers": LAYERS, "params_dtype": torch.float32}
    last = snapshot.read_object(f"{width * stages - 1}/rng_state")
    assert last == [{"random": (3, (width - 1, stages - 1))}]
    part = snapshot.read_object("0/model/decoder.layers.3.mlp.linear_fc2.weight", box=[2, slice(3, 6)])
    assert torch.equal(part, whole["decoder.layers.3.mlp.linear_fc2.weight"][2, 3:6])


def test_nested_names_of_older_versions(tmp_path):
    whole = _whole()
    _write(tmp_path / "x", whole, 2, 2, nested=True)
    found = Snapshot(tmp_path / "x").read_object("0/model")["language_model"]
    for name, each in whole.items():
        head, _, rest = name.partition(".")
        assert torch.equal(found[head][rest], each)


def test_all_verbs(tmp_path, moto):
    whole = _whole()
    _write(tmp_path / "x", whole, 2, 2)
    snapshot = Snapshot(tmp_path / "x")
    assert torch.equal(
        load_weights(tmp_path / "x", select=["model/**"])["output_layer.weight"], whole["output_layer.weight"]
    )
    for target in ("x.safetensors", "x.pt", "again"):
        snapshot.convert(tmp_path / target, select=["model/**"])
        again = Snapshot(tmp_path / target).get_manifest()
        path = next(each for each in again if each.endswith("layers.2.mlp.linear_fc1.weight"))
        read = Snapshot(tmp_path / target).read_object(path)
        assert torch.equal(read, whole["decoder.layers.2.mlp.linear_fc1.weight"])
    snapshot.copy(tmp_path / "copy")
    assert not Snapshot.diff(tmp_path / "x", tmp_path / "copy", values=True)

    class Output(nn.Module):
        def __init__(self):
            super().__init__()
            self.output_layer = nn.Linear(HIDDEN, WORDS, bias=False)

    model = Output()
    snapshot.restore({"model": model}, select=["model/output_layer.weight"], unused="ignore", strict=False)
    assert torch.equal(model.output_layer.weight, whole["output_layer.weight"])


def test_the_map_for_hugging_face_applies_to_the_joined_model(tmp_path):
    whole = {name: each for name, each in _whole().items() if "position" not in name}
    whole = {name: each for name, each in whole.items() if not name.endswith(".bias") or "qkv" in name}
    _write(tmp_path / "x", whole, 2, 2)
    config = {"model_type": "qwen2", "num_key_value_heads": 2, "num_attention_heads": 4, "vocab_size": WORDS - 1}
    to_hugging_face = TensorMap.load("megatron-hf", config | {"tie_word_embeddings": False})
    found = load_weights(tmp_path / "x", select=["model/**"], map=to_hugging_face)
    name = "decoder.layers.3.self_attention.linear_qkv.weight"
    groups = whole[name].view(2, 2 + 1 + 1, -1, HIDDEN)  # two queries, a key and a value each
    assert torch.equal(found["model.layers.3.self_attn.q_proj.weight"], groups[:, :2].reshape(-1, HIDDEN))
    assert torch.equal(found["model.layers.3.self_attn.v_proj.weight"], groups[:, 3].reshape(-1, HIDDEN))
    up = whole["decoder.layers.1.mlp.linear_fc1.weight"][INNER:]
    assert torch.equal(found["model.layers.1.mlp.up_proj.weight"], up)
    assert torch.equal(found["lm_head.weight"], whole["output_layer.weight"][: WORDS - 1])


def test_parts_of_unknown_names_are_refused_if_they_differ(tmp_path):
    def change(state, rank, stage):
        state["model"]["adapter.weight"] = torch.full((2,), float(rank))

    _write(tmp_path / "x", _whole(), 2, 1, change=change)
    with pytest.raises(
        UnsupportedFormatError, match=r"adapter\.weight: the tensor-parallel ranks have different tensors"
    ):
        Snapshot(tmp_path / "x").get_manifest()


def test_equal_parts_of_unknown_names_are_copies(tmp_path):
    def change(state, rank, stage):
        state["model"]["adapter.weight"] = torch.arange(2.0)

    _write(tmp_path / "x", _whole(), 2, 1, change=change)
    assert torch.equal(Snapshot(tmp_path / "x").read_object("0/model/adapter.weight"), torch.arange(2.0))


def test_expert_parallelism_is_refused_by_name(tmp_path):
    def change(state, rank, stage):
        state["args"].expert_model_parallel_size = 2

    _write(tmp_path / "x", _whole(), 2, 1, change=change)
    with pytest.raises(UnsupportedFormatError, match="with expert parallelism is not read"):
        Snapshot(tmp_path / "x").get_manifest()


@pytest.mark.parametrize("lost", ["mp_rank_01_000", "mp_rank_00_001"])
def test_a_missing_part_is_damage(tmp_path, lost):
    _write(tmp_path / "x", _whole(), 2, 2)
    (tmp_path / "x" / lost / "model_optim_rng.pt").unlink()
    (tmp_path / "x" / lost).rmdir()
    with pytest.raises(CorruptSnapshotError, match="the folder of a part is missing"):
        Snapshot(tmp_path / "x").get_manifest()


@pytest.mark.parametrize("what", ["no model", "names", "shape", "value"])
def test_parts_that_do_not_fit_are_refused(tmp_path, what):
    def change(state, rank, stage):
        if what == "no model":
            del state["model"]
        elif what == "value":
            state["model"] = 3
        elif rank == 1 and what == "names":
            del state["model"]["output_layer.weight"]
        elif rank == 1:
            state["model"]["output_layer.weight"] = torch.ones(3, 3)

    _write(tmp_path / "x", _whole(), 2, 1, change=change)
    with pytest.raises(CorruptSnapshotError):
        Snapshot(tmp_path / "x").get_manifest()


def test_a_bucket(tmp_path, moto):
    whole = _whole()
    _write(tmp_path / "x", whole, 2, 1)
    flat = tmp_path / "flat"
    flat.mkdir()
    with on_s3(flat, moto) as (_, url, options):
        import boto3

        client = boto3.client(
            "s3", endpoint_url=moto.url, aws_access_key_id=moto.key, aws_secret_access_key=moto.secret,
            region_name=moto.region,
        )  # fmt: skip
        bucket = url.removeprefix("s3://").partition("/")[0]
        for file in (tmp_path / "x").rglob("*.pt"):
            client.put_object(Bucket=bucket, Key=f"a/{file.relative_to(tmp_path / 'x')}", Body=file.read_bytes())
        client.close()
        found = Snapshot(url, storage_options=options).read_object("0/model/output_layer.weight")
        assert torch.equal(found, whole["output_layer.weight"])


def test_a_folder_without_the_file_is_named(tmp_path):
    (tmp_path / "mp_rank_00").mkdir()
    (tmp_path / "mp_rank_00" / "other.pt").write_bytes(b"x")
    with pytest.raises(SnapshotError, match=r"mp_rank_00/model_optim_rng\.pt"):
        Snapshot(tmp_path).get_manifest()
