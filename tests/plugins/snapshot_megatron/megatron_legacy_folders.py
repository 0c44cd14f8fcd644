"""Legacy folders of Megatron that tests write."""

import argparse

import torch

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


def _moments(whole):
    torch.manual_seed(1)
    return {key: {name: torch.randn_like(each) for name, each in whole.items()} for key in ("exp_avg", "exp_avg_sq")}


def _is_vector(name, tensor):
    return tensor.ndim == 1 or name.endswith(".bias")


def _buffer(tensors, bucket):
    """A buffer of the distributed optimizer, without the padding of its buckets."""
    place, begin, unpadded, buckets = 0, 0, {}, 0
    for name, tensor in reversed(tensors.items()):
        place = -(-place // 64) * 64
        unpadded[name] = buckets + place - begin
        place += tensor.numel()
        if bucket is not None and place - begin >= bucket:
            buckets += place - begin
            begin = place = -(-place // 128) * 128
    made = torch.zeros(buckets + place - begin)
    for name, tensor in tensors.items():
        made[unpadded[name] : unpadded[name] + tensor.numel()] = tensor.flatten()
    return made


def _write_trained(folder, width, stages, kind, *, virtual=1, dtype=torch.bfloat16, bucket=None, groups=2, change=None):
    """Write parts with the state of an optimizer. Return the float32 values and the moments of the whole model."""
    whole = {name: each for name, each in _whole().items() if "position" not in name}
    if bucket is not None:  # the buckets do not matter if all parameters end at multiples of 64
        whole = {name: torch.randn(128, *each.shape[1:]).repeat_interleave(64, -1) for name, each in whole.items()}
    moments = _moments(whole)
    main = {name: each.clone() for name, each in whole.items()}
    sources = {"param": main, **moments}
    own = LAYERS // stages // virtual

    def name_in_part(name, first):
        if not name.startswith("decoder.layers."):
            return name
        layer, rest = name.removeprefix("decoder.layers.").split(".", 1)
        return f"decoder.layers.{int(layer) - first}.{rest}"

    def change_part(state, rank, stage):
        chunks = [state["model"]] if virtual == 1 else [state[f"model{number}"] for number in range(virtual)]
        parts = []
        for number, model in enumerate(chunks):
            first = (number * stages + stage) * own
            back = {name_in_part(name, first): name for name in whole}
            parts.append({(number, name): back[name] for name in model})
            for name in model:
                model[name] = model[name].to(dtype)
        everything = {key: name for part in parts for key, name in part.items()}
        cut = {
            source: {key: _cut(name, each[name], rank, width, True) for key, name in everything.items()}
            for source, each in sources.items()
        }
        vectors = [key for key, name in everything.items() if _is_vector(name, whole[name])]
        order = [[key for key in everything if key not in vectors], vectors] if groups == 2 else [list(everything)]
        fused = {"lr": 0.1, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1, "bias_correction": True}
        listed = [{**fused, "wd_mult": 1.0 - number, "lr_mult": 1.0} for number in range(groups)]
        if kind == "distributed":
            for group in listed:
                group["step"] = 7
            state["optimizer"] = {"optimizer": {"param_groups": listed}, "grad_scaler": {"scale": 2.0}}
            buffers = {"buckets_coalesced": True}
            for number in range(virtual):
                world = {}
                for source in sources:
                    mine = {key: each for key, each in cut[source].items() if key[0] == number}
                    world[source] = _buffer(mine, bucket)
                world["numel_unpadded"] = len(world["param"])
                buffers[number] = {(dtype, torch.float32): world}
            state["flat"] = buffers
        else:
            numbers = {key: number for number, key in enumerate(key for own_ in order for key in own_)}
            for group, own_ in zip(listed, order, strict=True):
                group["params"] = [numbers[key] for key in own_]
            states = {
                number: {"step": torch.tensor(7.0), **{source: cut[source][key] for source in moments}}
                for key, number in numbers.items()
            }
            inner = {"state": states, "param_groups": listed}
            if kind == "float32":
                state["optimizer"] = inner
            else:
                state["optimizer"] = {
                    "optimizer": inner,
                    "fp32_from_fp16_params": [[cut["param"][key] for key in own_] for own_ in order],
                }
        if change is not None:
            change(state, rank, stage)

    _write(folder, whole, width, stages, virtual=virtual, change=change_part)
    for file in folder.rglob("model_optim_rng.pt"):
        state = torch.load(file, weights_only=False)
        if "flat" in state:
            torch.save(state.pop("flat"), file.with_name("distrib_optim.pt"))
            torch.save(state, file)
    return main, moments
