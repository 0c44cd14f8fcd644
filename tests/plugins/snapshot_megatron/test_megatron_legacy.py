"""Megatron's legacy folders, joined from tensor-parallel ranks and stages of a pipeline.

Its training code cannot run here. The files are stand-ins, cut as Megatron-LM's layers are (core 0.12): columns of
`linear_qkv` and `linear_fc1`, rows of `linear_proj` and `linear_fc2`, and the rest on all ranks.
"""

import argparse
import itertools
import re

import pytest
import torch
from torch import nn

from snapshot import CorruptSnapshotError, ModelState, RestoreOptions, Snapshot, SnapshotError, TensorMap
from snapshot import load as load_weights
from snapshot.errors import UnsupportedFormatError
from tests.formats.remote_copies import on_s3
from tests.plugins.snapshot_megatron.megatron_legacy_folders import (
    HIDDEN,
    INNER,
    LAYERS,
    WORDS,
    _buffer,
    _is_vector,
    _moments,
    _whole,
    _write,
    _write_trained,
)


@pytest.mark.parametrize(("width", "stages", "virtual"), [(1, 1, 1), (2, 1, 1), (1, 2, 1), (2, 2, 1), (2, 2, 2)])
@pytest.mark.parametrize("gated", [True, False])
def test_megatron_legacy_parts_form_the_whole_model(tmp_path, width, stages, virtual, gated):
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


def test_megatron_legacy_nested_names_of_older_versions(tmp_path):
    whole = _whole()
    _write(tmp_path / "x", whole, 2, 2, nested=True)
    found = Snapshot(tmp_path / "x").read_object("0/model")["language_model"]
    for name, each in whole.items():
        head, _, rest = name.partition(".")
        assert torch.equal(found[head][rest], each)


def test_megatron_legacy_load_convert_verify_and_copy(tmp_path, moto):
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


def test_megatron_legacy_tensor_map_to_hugging_face(tmp_path):
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


def test_megatron_legacy_parts_with_unknown_names_are_refused_if_they_differ(tmp_path):
    def change(state, rank, stage):
        state["model"]["adapter.weight"] = torch.full((2,), float(rank))

    _write(tmp_path / "x", _whole(), 2, 1, change=change)
    with pytest.raises(
        UnsupportedFormatError, match=r"adapter\.weight: the tensor-parallel ranks have different tensors"
    ):
        Snapshot(tmp_path / "x").get_manifest()


def test_megatron_legacy_equal_parts_with_unknown_names_are_copies(tmp_path):
    def change(state, rank, stage):
        state["model"]["adapter.weight"] = torch.arange(2.0)

    _write(tmp_path / "x", _whole(), 2, 1, change=change)
    assert torch.equal(Snapshot(tmp_path / "x").read_object("0/model/adapter.weight"), torch.arange(2.0))


def _write_parts(folder, parts, args=None, crc=True):
    """Write the models of all tensor-parallel ranks."""
    torch.serialization.set_crc32_options(crc)
    try:
        for rank, model in enumerate(parts):
            path = folder / f"mp_rank_{rank:02d}"
            path.mkdir(parents=True)
            head = {} if args is None else {"args": args}
            torch.save({"checkpoint_version": 3.0, "model": model, **head}, path / "model_optim_rng.pt")
    finally:
        torch.serialization.set_crc32_options(True)
    return folder


SHARDED = {
    "decoder.layers.0.self_attention.linear_q_proj.weight": 0,
    "decoder.layers.0.self_attention.linear_q_up_proj.bias": 0,
    "decoder.layers.0.self_attention.linear_kv_up_proj.bias": 0,
    "decoder.layers.0.cross_attention.linear_kv.bias": 0,
    "decoder.layers.0.self_attention.core_attention.softmax_offset": 0,
    "decoder.layers.0.mixer.D": 0,
    "decoder.layers.0.mixer.A_log": 0,
    "decoder.layers.0.mixer.dt_bias": 0,
    "decoder.layers.0.mixer.norm.weight": 0,
    "decoder.layers.0.mixer.out_proj.weight": 1,
    "mtp.layers.0.eh_proj.weight": 0,
    "word_embeddings_for_head.weight": 0,
    "language_model.encoder.layers.0.self_attention.dense.weight": 1,
    "language_model.encoder.layers.0.mlp.dense_4h_to_h.weight": 1,
    "decoder.layers.0.mlp.shared_experts.linear_fc2.weight": 1,
    "decoder.layers.0.self_attention.linear_proj.bias": None,
    "decoder.layers.0.self_attention.linear_kv_down_proj.weight": None,
    "decoder.layers.0.mlp.linear_fc2.bias": None,
    "lm_head.dense.weight": None,
    "pooler.dense.weight": None,
    "vision_model.linear_proj.weight": None,
}


@pytest.mark.parametrize("crc", [True, False])
def test_megatron_legacy_names_decide_what_is_split_even_if_parts_are_equal(tmp_path, crc):
    made = {
        name: torch.ones(4, 4) if name.endswith("weight") and "norm" not in name else torch.ones(4) for name in SHARDED
    }
    _write_parts(tmp_path / "x", [made, made], crc=crc)
    found = Snapshot(tmp_path / "x").read_object("0/model")
    for name, axis in SHARDED.items():
        expected = made[name] if axis is None else torch.cat([made[name]] * 2, axis)
        assert torch.equal(found[name], expected), name


@pytest.mark.parametrize("equal", [True, False])
@pytest.mark.parametrize("name", ["mixer.in_proj.weight", "mixer.conv1d.bias", "mlp.experts.weight1"])
def test_megatron_legacy_tensors_of_several_pieces_are_refused(tmp_path, name, equal):
    parts = [{f"decoder.layers.0.{name}": torch.full((4, 4), 0.0 if equal else rank)} for rank in range(2)]
    _write_parts(tmp_path / "x", parts)
    with pytest.raises(UnsupportedFormatError, match=rf"{re.escape(name)}: .* has several pieces of it"):
        Snapshot(tmp_path / "x").get_manifest()


@pytest.mark.parametrize("crc", [True, False])
@pytest.mark.parametrize("view", ["own", "of one tensor", "of others", "strided"])
def test_megatron_legacy_values_of_unknown_names_are_compared(tmp_path, crc, view):
    """Also without checksums in the archive, and if a tensor is a part of what is stored."""
    same = torch.arange(6.0).view(2, 3)

    def make(rank, values):
        if view == "own":
            return values.clone()
        if view == "strided":
            return values.T.contiguous().T
        stored = torch.arange(20.0) + (rank if view == "of others" else 0)
        stored[7:13] = values.flatten()
        return stored[7:13].view(2, 3)

    _write_parts(tmp_path / "a", [{"other.weight": make(rank, same)} for rank in range(2)], crc=crc)
    if view == "strided" and not crc:
        with pytest.raises(UnsupportedFormatError, match=r"other\.weight: .* cannot be compared"):
            Snapshot(tmp_path / "a").get_manifest()
    else:
        assert torch.equal(Snapshot(tmp_path / "a").read_object("0/model/other.weight"), same)
    _write_parts(tmp_path / "b", [{"other.weight": make(rank, same + rank)} for rank in range(2)], crc=crc)
    with pytest.raises(UnsupportedFormatError, match=r"other\.weight: .* (different tensors|cannot be compared)"):
        Snapshot(tmp_path / "b").get_manifest()


@pytest.mark.parametrize("first", [0, 1])
def test_megatron_legacy_tensor_on_some_ranks_only_is_refused(tmp_path, first):
    parts = [{"other.weight": torch.ones(3)}, {"other.weight": 3}]
    _write_parts(tmp_path / "x", [parts[first], parts[1 - first]])
    with pytest.raises(UnsupportedFormatError, match=r"other\.weight: it is a tensor on some"):
        Snapshot(tmp_path / "x").get_manifest()


def test_megatron_legacy_parts_of_one_storage_are_not_copies(tmp_path):
    whole = torch.arange(8.0)
    _write_parts(tmp_path / "x", [{"other.weight": each} for each in whole.chunk(2)])
    with pytest.raises(UnsupportedFormatError, match="different tensors"):
        Snapshot(tmp_path / "x").get_manifest()


def _cut_mlp(name, whole, following, rank, gated):
    own = torch.cat([half.chunk(2)[rank] for half in whole.chunk(2)]) if gated else whole.chunk(2)[rank].clone()
    made = {f"{name}.linear_fc1.weight": own, f"{name}.linear_fc1.bias": own[:, 0].clone()}
    return made if following is None else {**made, f"{name}.linear_fc2.weight": following.chunk(2, 1)[rank].clone()}


def test_megatron_legacy_gated_mlp_is_detected_per_layer(tmp_path):
    """The arguments do not matter: they are absent, or of another model."""
    whole = torch.arange(32.0).view(16, 2)
    for number, args in enumerate([None, argparse.Namespace(swiglu=True), argparse.Namespace(swiglu=False)]):
        parts = [
            {
                **_cut_mlp("decoder.layers.0.mlp", whole, torch.ones(2, 8), rank, True),
                **_cut_mlp("vision_model.decoder.layers.0.mlp", whole, torch.ones(2, 16), rank, False),
            }
            for rank in range(2)
        ]
        found = Snapshot(_write_parts(tmp_path / str(number), parts, args)).read_object("0/model")
        for name in ("decoder.layers.0.mlp", "vision_model.decoder.layers.0.mlp"):
            assert torch.equal(found[f"{name}.linear_fc1.weight"], whole)
            assert torch.equal(found[f"{name}.linear_fc1.bias"], whole[:, 0])


@pytest.mark.parametrize(
    ("args", "gated"),
    [
        (argparse.Namespace(swiglu=True), True),
        (argparse.Namespace(swiglu=False, quick_geglu=True), True),
        (argparse.Namespace(swiglu=False), False),
        ({"swiglu": True}, True),
        (argparse.Namespace(num_layers=1), None),
        (None, None),
    ],
)
def test_megatron_legacy_gated_mlp_of_a_single_layer_is_read_from_args(tmp_path, args, gated):
    whole = torch.arange(32.0).view(16, 2)
    for name in ("decoder.layers.0.mlp", "vision_model.decoder.layers.0.mlp"):
        parts = [_cut_mlp(name, whole, None, rank, bool(gated)) for rank in range(2)]
        folder = _write_parts(tmp_path / name, parts, args)
        if gated is None or "vision" in name:
            with pytest.raises(UnsupportedFormatError, match=r"linear_fc1\.weight: neither .* say if it is gated"):
                Snapshot(folder).get_manifest()
        else:
            assert torch.equal(Snapshot(folder).read_object(f"0/model/{name}.linear_fc1.weight"), whole)


HEAD = "decoder.layers.0.mlp"
EXPERTS = {  # the names of an expert's tensors, as Megatron-core has them
    "sequential": "experts.local_experts.{}.linear_fc{}.weight",
    "grouped": "experts.linear_fc{1}.weight{0}",
}


def _write_experts(
    folder, kind, ranks, width, stages=1, *, total=4, change=lambda state, rank, expert: None, trained=None
):
    """Write two layers with experts, on ranks of expert parallelism that also have tensor-parallel ranks and stages."""
    torch.manual_seed(0)
    whole = {f"{HEAD}.router.weight": torch.randn(total, HIDDEN), "output_layer.weight": torch.randn(WORDS, HIDDEN)}
    for number in range(total):
        whole[f"{HEAD}.{EXPERTS[kind].format(number, 1)}"] = torch.randn(INNER, HIDDEN)
        whole[f"{HEAD}.{EXPERTS[kind].format(number, 2)}"] = torch.randn(HIDDEN, INNER)
    above = {name: each for name, each in whole.items() if name.startswith(HEAD)}
    whole |= {name.replace("layers.0", "layers.1"): torch.randn_like(each) for name, each in above.items()}
    local = total // ranks
    moments = _moments(whole)
    for stage, rank, expert in itertools.product(range(stages), range(width), range(ranks)):
        parts = {"param": {}, "exp_avg": {}, "exp_avg_sq": {}}
        for name in whole:
            layer = int(name.startswith("decoder.layers.1"))
            if stages > 1 and layer != stage:
                continue
            own = name.replace("layers.1", "layers.0") if stages > 1 else name
            axis = None if name != "output_layer.weight" else 0
            if ".experts." in name:
                numbers = re.findall("[0-9]+", name.split(".experts.")[1])
                number = int(numbers[0 if kind == "sequential" else 1])
                if number // local != expert:
                    continue
                axis = 0 if "linear_fc1" in name else 1
                pattern = EXPERTS[kind]
                own = own.replace(pattern.format(number, axis + 1), pattern.format(number % local, axis + 1))
            for source, part in parts.items():
                each = whole[name] if source == "param" else moments[source][name]
                part[own] = each if axis is None else each.chunk(width, axis)[rank].contiguous()
        args = {"expert_model_parallel_size": ranks, "num_experts": total, "expert_tensor_parallel_size": width}
        args["pipeline_model_parallel_size"] = stages
        model = {name: each.clone() for name, each in parts["param"].items()}
        state = {"args": argparse.Namespace(**args), "model": model, "checkpoint_version": 3.0}
        name = f"mp_rank_{rank:02d}" + (f"_{stage:03d}" if stages > 1 else "") + f"_{expert:03d}" * (ranks > 1)
        (folder / name).mkdir(parents=True)
        if trained is not None:
            flat = _add_chain(state, parts, trained, first=expert == 0)
            torch.save(flat, folder / name / "distrib_optim.pt")
        change(state, rank, expert)
        torch.save(state, folder / name / "model_optim_rng.pt")
    if trained is not None:
        return whole, moments
    return whole


def _add_chain(state, parts, kind, *, first):
    """Add two optimizers: of experts, and of the rest. Only the first rank has the flat buffers of the rest."""
    chain, flats = [], []
    for experts in (False, True):
        own = {
            source: {name: each for name, each in part.items() if (".experts." in name) == experts}
            for source, part in parts.items()
        }
        group = {"lr": 0.1, "wd_mult": 1.0, "lr_mult": 1.0, "is_expert_parallel": experts}
        if kind == "distributed":
            chain.append({"optimizer": {"param_groups": [{**group, "step": 7}]}})
            world = {source: _buffer(part, None) for source, part in own.items()}
            buffers = {"buckets_coalesced": True, 0: {(torch.float32, torch.float32): world}}
            flats.append(buffers if first or experts else None)
            continue
        states = {
            number: {"step": torch.tensor(7.0), **{key: own[key][name] for key in ("exp_avg", "exp_avg_sq")}}
            for number, name in enumerate(own["param"])
        }
        chain.append({"state": states, "param_groups": [{**group, "params": list(states)}]})
    state["optimizer"] = chain
    return flats


@pytest.mark.parametrize("trained", ["distributed", "half"])
@pytest.mark.parametrize(("ranks", "width", "stages"), [(2, 1, 1), (4, 2, 1), (2, 2, 2)])
@pytest.mark.parametrize("kind", EXPERTS)
def test_megatron_legacy_optimizer_state_of_experts_is_joined(tmp_path, kind, ranks, width, stages, trained):
    whole, moments = _write_experts(tmp_path / "x", kind, ranks, width, stages, trained=trained)
    if trained != "distributed":
        for file in (tmp_path / "x").rglob("distrib_optim.pt"):
            file.unlink()
    found = Snapshot(tmp_path / "x").read_object("0/optim")
    assert sorted(found["state"]) == sorted(whole)
    for name in whole:
        assert float(found["state"][name]["step"]) == 7
        for key, tensors in moments.items():
            assert torch.equal(found["state"][name][key], tensors[name]), (name, key)
    [group] = found["param_groups"]
    assert sorted(group["params"]) == sorted(whole)


def test_megatron_legacy_missing_optimizer_state_of_experts_is_named(tmp_path):
    whole, _ = _write_experts(tmp_path / "x", "grouped", 2, 1, trained="distributed")
    file = tmp_path / "x" / "mp_rank_00_001" / "distrib_optim.pt"
    torch.save([None, None], file)
    assert sorted(Snapshot(tmp_path / "x").read_object("0/model")) == sorted(whole)
    with pytest.raises(UnsupportedFormatError, match=r"mp_rank_00_001.* lacks the state of .*linear_fc1\.weight0"):
        Snapshot(tmp_path / "x").read_object("0/optim/state/output_layer.weight/exp_avg")


@pytest.mark.parametrize("kind", EXPERTS)
@pytest.mark.parametrize(("ranks", "width", "stages"), [(1, 1, 1), (2, 1, 1), (4, 2, 1), (2, 1, 2), (2, 2, 2)])
def test_megatron_legacy_experts_are_numbered_in_the_whole_model(tmp_path, kind, ranks, width, stages):
    whole = _write_experts(tmp_path / "x", kind, ranks, width, stages)
    found = Snapshot(tmp_path / "x").read_object("0/model")
    assert sorted(found) == sorted(whole)
    assert all(torch.equal(found[name], each) for name, each in whole.items())
    assert Snapshot(tmp_path / "x").metadata.world_size == ranks * width * stages


def test_megatron_legacy_ambiguous_experts_are_refused(tmp_path):
    def together(state, rank, expert):
        state["model"][f"{HEAD}.experts.weight1"] = torch.ones(2, 2)

    def narrow(state, rank, expert):
        state["args"].expert_tensor_parallel_size = 1

    def odd(state, rank, expert):
        state["args"].num_experts = 5

    _write_experts(tmp_path / "a", "grouped", 2, 1, change=together)
    with pytest.raises(UnsupportedFormatError, match=r"experts\.weight1: how this tensor of several experts joins"):
        Snapshot(tmp_path / "a").get_manifest()
    _write_experts(tmp_path / "b", "grouped", 1, 2, change=narrow)
    with pytest.raises(UnsupportedFormatError, match="1 tensor-parallel ranks of experts, and 2 of other layers"):
        Snapshot(tmp_path / "b").get_manifest()

    def many(state, rank, expert):
        state["args"].expert_model_parallel_size = 1 << 40

    _write_experts(tmp_path / "d", "grouped", 2, 1, change=many)
    with pytest.raises(CorruptSnapshotError, match="the folder of a part is missing"):
        Snapshot(tmp_path / "d").get_manifest()
    _write_experts(tmp_path / "c", "grouped", 2, 1, change=odd)
    with pytest.raises(CorruptSnapshotError, match="5 experts on 2 ranks"):
        Snapshot(tmp_path / "c").get_manifest()


@pytest.mark.parametrize("lost", ["mp_rank_01_000", "mp_rank_00_001"])
def test_megatron_legacy_missing_part_is_corrupt(tmp_path, lost):
    _write(tmp_path / "x", _whole(), 2, 2)
    (tmp_path / "x" / lost / "model_optim_rng.pt").unlink()
    (tmp_path / "x" / lost).rmdir()
    with pytest.raises(CorruptSnapshotError, match="the folder of a part is missing"):
        Snapshot(tmp_path / "x").get_manifest()


@pytest.mark.parametrize("what", ["no model", "names", "shape", "value"])
def test_megatron_legacy_parts_that_do_not_fit_are_refused(tmp_path, what):
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


def test_megatron_legacy_in_a_bucket(tmp_path, moto):
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


def test_megatron_legacy_folder_without_model_optim_rng_is_named(tmp_path):
    (tmp_path / "mp_rank_00").mkdir()
    (tmp_path / "mp_rank_00" / "other.pt").write_bytes(b"x")
    with pytest.raises(SnapshotError, match=r"mp_rank_00/model_optim_rng\.pt"):
        Snapshot(tmp_path).get_manifest()


# The optimizer: stand-ins that follow Megatron-core's `optimizer.py`, `distrib_optimizer.py` and
# `param_and_grad_buffer.py` (0.16).


PARTS = [(1, 1, 1), (2, 1, 1), (2, 2, 1), (2, 2, 2)]


@pytest.mark.parametrize("kind", ["distributed", "half", "float32"])
@pytest.mark.parametrize(("width", "stages", "virtual"), PARTS)
@pytest.mark.parametrize("groups", [1, 2])
def test_megatron_legacy_optimizer_is_joined_by_name(tmp_path, kind, width, stages, virtual, groups):
    dtype = torch.float32 if kind == "float32" else torch.bfloat16
    given = {"virtual": virtual, "dtype": dtype, "groups": groups}
    main, moments = _write_trained(tmp_path / "x", width, stages, kind, **given)
    snapshot = Snapshot(tmp_path / "x")
    found = snapshot.read_object("0/optim")
    assert found["state"].keys() == main.keys()
    for name in main:
        for key in moments:
            assert torch.equal(found["state"][name][key], moments[key][name]), (name, key)
        assert float(found["state"][name]["step"]) == 7
    listed = [name for group in found["param_groups"] for name in group["params"]]
    assert sorted(listed) == sorted(main)
    assert all(group["lr"] == 0.1 for group in found["param_groups"])
    if groups == 2:
        vectors = [name for name, each in main.items() if _is_vector(name, each)]
        assert sorted(found["param_groups"][1]["params"]) == sorted(vectors)
    if kind != "float32":
        kept = snapshot.read_object("0/main_params")
        assert kept.keys() == main.keys()
        assert all(torch.equal(kept[name], each) for name, each in main.items())
    weights = snapshot.read_object("0/model")
    assert all(torch.equal(weights[name], each.to(dtype)) for name, each in main.items())
    assert snapshot.verify()
    snapshot.convert(tmp_path / "again")
    again = Snapshot(tmp_path / "again").read_object("0/optim/state/output_layer.weight/exp_avg")
    assert torch.equal(again, moments["exp_avg"]["output_layer.weight"])
    if kind == "distributed":
        assert snapshot.read_object("0/grad_scaler") == {"scale": 2.0}


def test_megatron_legacy_bucket_size_does_not_matter_for_multiples_of_64(tmp_path):
    _, moments = _write_trained(tmp_path / "x", 2, 1, "distributed", bucket=10_000)
    found = Snapshot(tmp_path / "x").read_object("0/optim/state")
    for key, tensors in moments.items():
        assert all(torch.equal(found[name][key], each) for name, each in tensors.items())


def _chain(state, rank, stage):
    state["optimizer"] = [state["optimizer"]]


def _old(state, rank, stage):
    state["flat"] = {0: {torch.float32: {"param": [torch.zeros(3)]}}}


def _longer(state, rank, stage):
    for world in state["flat"][0].values():
        for key in ("param", "exp_avg", "exp_avg_sq"):
            world[key] = torch.cat([world[key], torch.zeros(1)])


def _turned(state, rank, stage):
    for world in state["flat"][0].values():
        world["param"] = world["param"].flip(0)


def _other_dtype(state, rank, stage):
    [(_, world)] = state["flat"][0].items()
    state["flat"][0] = {(torch.uint8, torch.float32): world}


def _absent(state, rank, stage):
    del state["flat"]


def _no_moment(state, rank, stage):
    for world in state["flat"][0].values():
        del world["exp_avg"]


def _more_groups(state, rank, stage):
    state["optimizer"]["optimizer"]["param_groups"] *= 2


LOST = {
    "a chain of 1 optimizer, other than": _chain,
    "as before February 2024": _old,
    "its buckets are not known": _longer,
    "are not those of the model": _turned,
    "a buffer of": _other_dtype,
    "distrib_optim.pt, which has the state of the distributed optimizer, is missing": _absent,
    "without a flat tensor exp_avg": _no_moment,
    "4 parameter groups": _more_groups,
}


@pytest.mark.parametrize("why", LOST)
def test_megatron_legacy_optimizer_that_cannot_be_joined_leaves_weights_readable(tmp_path, why):
    main, _ = _write_trained(tmp_path / "x", 2, 1, "distributed", change=LOST[why])
    snapshot = Snapshot(tmp_path / "x")
    found = snapshot.read_object("0/model")
    assert all(torch.equal(found[name], each.to(torch.bfloat16)) for name, each in main.items())
    with pytest.raises(UnsupportedFormatError, match=f"is not joined: .*{re.escape(why)}.*; exclude optim"):
        snapshot.read_object("0/optim/state/output_layer.weight/exp_avg")
    with pytest.raises(UnsupportedFormatError, match=re.escape(why)):
        snapshot.convert(tmp_path / "all")
    snapshot.convert(tmp_path / "weights.safetensors", select=["model/**"])
    snapshot.convert(tmp_path / "most", exclude=["optim/**"])
    live = nn.ParameterDict({"w": nn.Parameter(torch.zeros(WORDS, HIDDEN, dtype=torch.bfloat16))})
    snapshot.restore({"model": live}, rename={"model/output_layer.weight": "model/w"}, strict=False, unused="ignore")
    assert torch.equal(live["w"], main["output_layer.weight"].to(torch.bfloat16))


def test_megatron_legacy_optimizer_with_another_number_of_parameters_is_refused(tmp_path):
    def change(state, rank, stage):
        state["optimizer"]["optimizer"]["param_groups"][0]["params"].pop()

    _write_trained(tmp_path / "x", 1, 1, "half", change=change)
    with pytest.raises(UnsupportedFormatError, match=r"a group of .* parameters, where the model has"):
        Snapshot(tmp_path / "x").read_object("0/optim/state/output_layer.weight/exp_avg")


def test_megatron_legacy_factored_optimizer_state_is_refused(tmp_path):
    def change(state, rank, stage):
        for own in state["optimizer"]["optimizer"]["state"].values():
            own["rows"] = torch.zeros(3)

    _write_trained(tmp_path / "x", 2, 1, "half", change=change)
    with pytest.raises(UnsupportedFormatError, match=r"rows of .* has the shape \[3\], not"):
        Snapshot(tmp_path / "x").read_object("0/optim/state/output_layer.weight/exp_avg")


def test_megatron_legacy_restores_into_an_optimizer(tmp_path):
    main, moments = _write_trained(tmp_path / "x", 2, 2, "distributed")
    model = nn.Module()
    for name, each in main.items():
        *above, last = name.split(".")
        held = model
        for component in above:
            if not hasattr(held, component):
                held.add_module(component, nn.Module())
            held = getattr(held, component)
        held.register_parameter(last, nn.Parameter(torch.zeros_like(each)))
    named = dict(model.named_parameters())
    vectors = [each for name, each in named.items() if _is_vector(name, each)]
    others = [each for name, each in named.items() if not _is_vector(name, each)]
    optimizer = torch.optim.Adam([{"params": others}, {"params": vectors, "weight_decay": 0.0}])
    state = ModelState(model, optimizer)
    snapshot = Snapshot(tmp_path / "x")
    snapshot.restore({"train": state}, unused="ignore", options=RestoreOptions(cast="same_kind"))
    snapshot.restore({"main_params": model}, unused="ignore")
    names = dict(model.named_parameters())
    for name, each in main.items():
        assert torch.equal(names[name], each)
        assert torch.equal(optimizer.state[names[name]]["exp_avg_sq"], moments["exp_avg_sq"][name])
        assert float(optimizer.state[names[name]]["step"]) == 7
    assert optimizer.param_groups[0]["betas"] == (0.9, 0.95)
