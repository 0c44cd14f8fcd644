"""GPT models of Megatron-core with its distributed optimizer on CPU ranks, in any split; and the directories that
Megatron itself writes of them.

    python -m tests.plugins.snapshot_megatron.megatron_models OUT --world 4 --tensor 2 --bucket 3000

Buffers, buckets, reduce-scatter, `step()`, all-gather and `sharded_state_dict` are Megatron's own. Only gradients are
not: they are functions of the names in the checkpoint, so that each split has the same, and so that an AdamW of torch
over whole tensors gives the same bits. `truth` has those, without Megatron.
"""

import argparse
import contextlib
import dataclasses
import functools
import json
import tempfile
import zlib
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch.optim.adamw import adamw

from tests.helpers.forked_ranks import fork_ranks
from tests.helpers.megatron_dirs import save
from tests.plugins.snapshot_megatron.megatron_on_cpu import import_megatron

WORDS, ROWS, HIDDEN, INNER, EXPERTS = 37, 64, 24, 40, 4
"""`WORDS` of the rows of a vocabulary are used. The others are padding, up to a length that the split decides."""
RATE, DECAY, BETAS, EPSILON = 1e-3, 0.1, (0.9, 0.95), 1e-8
STEPS = 3
STATES = ("param", "exp_avg", "exp_avg_sq")
KINDS = ("dp_reshardable", "fully_reshardable")


@dataclasses.dataclass(frozen=True)
class Layout:
    """How the ranks of the default process group split a model. What they have left over is data parallelism."""

    tensor: int = 1
    pipeline: int = 1
    virtual: int | None = None
    """The number of virtual stages of each rank."""
    expert: int = 1
    experts: bool = False
    """A mixture of experts, without biases."""
    bucket: int | None = None
    """The number of elements that closes a bucket. All are in one bucket by default."""
    tied: bool = False
    """The output layer has the weights of the embedding."""
    bf16: bool = True
    instances: int = 1
    layers: int = 4
    shared: bool = False
    """In Megatron's own directories, the ranks of data parallelism share the writing of weights."""
    hidden: int = HIDDEN
    inner: int = INNER
    frozen: bool = False
    """Embedding and the first half of the layers are not trained. Each layer has tensors of its own."""
    llama: bool = False
    """Root mean squares in place of LayerNorm, no biases, and rotary positions, as the models of Hugging Face have."""
    fused: bool = False
    """The inner optimizer counts steps in its groups, as those of Transformer Engine and Apex do."""


def whole(key, what, shape):
    """Return a tensor of the model in one piece. It is exact in bf16, and the same in each length of a vocabulary."""
    generator = torch.Generator().manual_seed(zlib.crc32(f"{key}|{what}".encode()))
    is_padded = "word_embeddings" in key or "output_layer" in key
    rows = (ROWS, *shape[1:]) if is_padded else tuple(shape)
    tensor = torch.randint(-127, 128, rows, generator=generator).float() / 256
    if is_padded:
        tensor[WORDS:] = 0
    return tensor[: shape[0]] if shape else tensor


@functools.cache
def truth(key, shape, dims, steps):
    """Return what AdamW makes of a whole tensor in some steps: `STATES` and `step`.

    Args:
        key: The name in the checkpoint.
        shape: The shape there, with the axes of layers and experts.
        dims: The number of dimensions of a layer's own parameter. Vectors are not decayed.
        steps: The number of steps.
    """
    parameter = torch.nn.Parameter(whole(key, "init", shape).clone())
    decay = 0.0 if dims == 1 or key.endswith(".bias") else DECAY
    adam = torch.optim.AdamW([parameter], lr=RATE, weight_decay=decay, betas=BETAS, eps=EPSILON)
    for step in range(steps):
        parameter.grad = whole(key, f"grad{step}", shape)
        adam.step()
    state = adam.state[parameter]
    return {"param": parameter.detach(), **{name: state[name] for name in STATES[1:]}, "step": state["step"].item()}


def _modules_of(model):
    while hasattr(model, "module"):
        model = model.module
    return model


class Job:
    """The part of a training that one rank has: chunks of the model, optimizer and scheduler."""

    def __init__(self, layout, chunks, optimizer, scheduler):
        self.layout, self.chunks, self.optimizer, self.scheduler = layout, chunks, optimizer, scheduler
        self.sharded = self.find_sharded()
        """The id of each parameter -> the `ShardedTensor` or the factory that places it in the checkpoint."""

    def optimizers(self):
        """Return the distributed optimizers. A rank without parameters of a kind has a stub in their place."""
        found = getattr(self.optimizer, "chained_optimizers", [self.optimizer])
        return [each for each in found if not getattr(each, "is_stub_optimizer", False)]

    def model_state(self, kind=KINDS[0]):
        """Return the sharded state dicts of the chunks by name, as Megatron's trainer names them."""
        from megatron.core import parallel_state

        metadata, state = describe(kind) | {"non_homogeneous_layers": self.layout.frozen}, {}
        for number, chunk in enumerate(self.chunks):
            if len(self.chunks) > 1:
                parallel_state.set_virtual_pipeline_model_parallel_rank(number)
            name = f"model{number}" if len(self.chunks) > 1 else "model"
            state[name] = _modules_of(chunk).sharded_state_dict(metadata=metadata)
        return state

    def find_sharded(self):
        from megatron.core.dist_checkpointing.dict_utils import nested_values
        from megatron.core.dist_checkpointing.mapping import ShardedBase

        values = nested_values(self.model_state())
        return {
            id(each.data): each
            for each in values
            if isinstance(each, ShardedBase) and isinstance(each.data, torch.nn.Parameter)
        }

    def parameters(self):
        """Return the trained parameters that the checkpoint has, with what places them."""
        every = [each for chunk in self.chunks for each in chunk.parameters() if each.requires_grad]
        return [(each, self.sharded[id(each)]) for each in every if id(each) in self.sharded]

    def local(self, sharded, made):
        """Return this rank's parameter, filled from `made(key, shape, dims)`, which returns a whole tensor."""
        tensor = torch.zeros(sharded.data.shape)
        for part in parts_of(sharded, tensor):
            source = made(part.key, tuple(part.global_shape), tensor.dim())
            part.data.copy_(source[slices(part)].reshape(part.data.shape))
        return tensor

    def start(self):
        """Set all parameters to the values before the first step."""
        with torch.no_grad():
            for parameter, sharded in self.parameters():
                parameter.copy_(self.local(sharded, lambda key, shape, _: whole(key, "init", shape)))
        self.optimizer.reload_model_params()

    def train(self, steps=STEPS, first=0):
        """Make some steps, with the gradients of the step numbers from `first` on."""
        for step in range(first, first + steps):
            for chunk in self.chunks:
                chunk.zero_grad_buffer()
            for parameter, sharded in self.parameters():
                gradient = self.local(sharded, lambda key, shape, _: whole(key, f"grad{step}", shape))  # noqa: B023
                # each rank of an expert's smaller group stands for several: Megatron divides by the whole
                scale = self.layout.expert if ".experts." in sharded.key else 1
                parameter.main_grad.copy_(gradient * scale)
            self.optimizer.zero_grad()
            for chunk in self.chunks:
                if chunk.ddp_config.overlap_grad_reduce:
                    chunk.start_grad_sync()
                chunk.finish_grad_sync()
            self.optimizer.step()
            self.scheduler.step(1)

    def runs(self):
        """Yield this rank's runs of flattened parameters: the parameter, begin, end, main parameter, its state."""
        for optimizer in self.optimizers():
            for buffer in optimizer.gbuf_ranges:
                for bucket in (each for buckets in buffer.values() for each in buckets):
                    for parameter, ranges in bucket["param_map"].items():
                        group, number = optimizer.model_param_group_index_map[parameter]
                        main = optimizer.optimizer.param_groups[group]["params"][number]
                        run = ranges["param"]
                        yield parameter, run.start, run.end, main, optimizer.optimizer.state.get(main, {})

    def group_of(self, main):
        """Return the group of a main parameter."""
        groups = (group for each in self.optimizers() for group in each.optimizer.param_groups)
        return next(group for group in groups if any(each is main for each in group["params"]))

    def expect(self, steps):
        """Raise if main parameters, moments, steps or weights differ in one bit from `truth`."""
        count = 0
        for parameter, begin, end, main, state in self.runs():
            sharded = self.sharded[id(parameter)]
            held = {"param": main, "step": self.group_of(main).get("step"), **state}
            for name in STATES:
                expected = self.local(sharded, lambda *at: truth(*at, steps)[name])  # noqa: B023
                found = held[name].detach().flatten()
                assert torch.equal(found, expected.flatten()[begin:end]), f"{sharded.key}: {name} differs"
            assert float(held["step"]) == steps, f"{sharded.key}: {held['step']} steps"
            count += 1
        for parameter, sharded in self.parameters():
            expected = self.local(sharded, lambda *at: truth(*at, steps)["param"]).to(parameter.dtype)
            assert torch.equal(parameter.detach(), expected), f"{sharded.key}: the weights differ"
        return count

    def shapes(self):
        """Return key -> (shape in the checkpoint, dimensions of the layer's own parameter), of this rank."""
        found = {}
        for parameter, sharded in self.parameters():
            for part in parts_of(sharded, torch.zeros(parameter.shape)):
                found[part.key] = (tuple(part.global_shape), parameter.dim())
        return found

    def state(self, kind, *, loading=False, steps=STEPS):
        """Return what Megatron's trainer gives to its own `save` or `load`."""
        model = self.model_state(kind)
        given = model if len(self.chunks) > 1 else model["model"]
        optimizer = self.optimizer.sharded_state_dict(given, is_loading=loading, metadata=describe(kind))
        common = {"checkpoint_version": 3.0, "iteration": steps}
        return {**common, **model, "optimizer": optimizer, "opt_param_scheduler": self.scheduler.state_dict()}


def describe(kind):
    """Return the metadata that Megatron's trainer makes of its options."""
    return {
        "distrib_optim_sharding_type": kind, "distrib_optim_fully_reshardable_mem_efficient": False,
        "chained_optim_avoid_prefix": True, "singleton_local_shards": False,
    }  # fmt: skip


def parts_of(sharded, tensor):
    """Return the `ShardedTensor`s that have `tensor` in the place of a parameter: one, or those of its factory."""
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedTensor

    if isinstance(sharded, ShardedTensor):
        return [dataclasses.replace(sharded, data=tensor, dtype=tensor.dtype)]
    built = dataclasses.replace(sharded, data=tensor).build()
    return [built] if isinstance(built, ShardedTensor) else list(nested_values(built))


def slices(part):
    sizes = (1,) * part.prepend_axis_num + tuple(part.local_shape)
    return tuple(slice(begin, begin + size) for begin, size in zip(part.global_offset, sizes, strict=True))


class FusedAdam(torch.optim.Optimizer):
    """AdamW with the structure of Transformer Engine's and Apex's: a step for each group that has parameters."""

    def __init__(self, params, lr, weight_decay, betas, eps, adam_w_mode=True, **_):
        assert adam_w_mode
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "betas": betas, "eps": eps})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            if not group["params"]:
                continue
            group["step"] = group.get("step", 0) + 1
            held = [each for each in group["params"] if each.grad is not None]
            states = [self.state[each] for each in held]
            for each, state in zip(held, states, strict=True):
                for name in STATES[1:]:
                    state.setdefault(name, torch.zeros_like(each))
            moments = [[state[name] for state in states] for name in STATES[1:]]
            steps = [torch.tensor(group["step"] - 1.0) for _ in held]
            adamw(
                held, [each.grad for each in held], *moments, [], steps, foreach=False, amsgrad=False,
                beta1=group["betas"][0], beta2=group["betas"][1], lr=group["lr"],
                weight_decay=group["weight_decay"], eps=group["eps"], maximize=False,
            )  # fmt: skip


@contextlib.contextmanager
def _inner_optimizer(kind):
    """Let Megatron make inner optimizers of a class, as if Transformer Engine had it."""
    from megatron.core import optimizer
    from megatron.core.optimizer import distrib_optimizer

    with contextlib.ExitStack() as changes:
        for module in (optimizer, distrib_optimizer) if kind is not None else ():
            changes.enter_context(mock.patch.object(module, "Adam", kind))
            changes.enter_context(mock.patch.object(module, "USING_PYTORCH_OPTIMIZER", False, create=True))
        yield


def _destroy_groups():
    """Destroy the groups of the last job, which Megatron leaves behind. Each has threads and sockets."""
    for group in list(dist.distributed_c10d._world.pg_map):
        if group is not dist.group.WORLD:
            dist.destroy_process_group(group)


def build(layout=Layout()):
    """Return a `Job` on each rank of the default process group, in the place of the last one."""
    import_megatron()
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.module import Float16Module

    parallel_state.destroy_model_parallel()
    _destroy_groups()
    virtual = {"virtual_pipeline_model_parallel_size": layout.virtual} if layout.virtual else {}
    parallel_state.initialize_model_parallel(
        layout.tensor, layout.pipeline, expert_model_parallel_size=layout.expert,
        num_distributed_optimizer_instances=layout.instances, **virtual,
    )  # fmt: skip
    torch.manual_seed(0)
    model_parallel_cuda_manual_seed(0)
    dtype = torch.bfloat16 if layout.bf16 else torch.float32
    mixture = {
        "num_moe_experts": EXPERTS, "moe_router_topk": 2, "moe_grouped_gemm": False,
        "moe_ffn_hidden_size": layout.inner, "moe_token_dispatcher_type": "alltoall",
    }  # fmt: skip
    config = TransformerConfig(
        num_layers=layout.layers, hidden_size=layout.hidden, num_attention_heads=4, num_query_groups=2,
        ffn_hidden_size=layout.inner, use_cpu_initialization=True, bf16=layout.bf16, params_dtype=dtype,
        pipeline_dtype=dtype, gated_linear_unit=True, activation_func=torch.nn.functional.silu,
        add_bias_linear=not layout.experts and not layout.llama,
        normalization="RMSNorm" if layout.llama else "LayerNorm", tensor_model_parallel_size=layout.tensor,
        pipeline_model_parallel_size=layout.pipeline, expert_model_parallel_size=layout.expert,
        gradient_accumulation_fusion=False, bias_dropout_fusion=False, masked_softmax_fusion=False,
        bias_activation_fusion=False, hidden_dropout=0.0, attention_dropout=0.0,
        sequence_parallel=layout.tensor > 1 and layout.experts, **virtual, **(mixture if layout.experts else {}),
    )  # fmt: skip
    spec = get_gpt_layer_local_spec(
        normalization=config.normalization,
        **({"num_experts": EXPERTS, "moe_grouped_gemm": False} if layout.experts else {}),
    )
    buckets = DistributedDataParallelConfig(
        use_distributed_optimizer=True, grad_reduce_in_fp32=True, overlap_grad_reduce=layout.bucket is not None,
        bucket_size=layout.bucket, num_distributed_optimizer_instances=layout.instances,
    )  # fmt: skip
    chunks = []
    for number in range(layout.virtual or 1):
        stage = {"vp_stage": number, "ignore_virtual": False} if layout.virtual else {}
        model = GPTModel(
            config=config, transformer_layer_spec=spec, max_sequence_length=8,
            vocab_size=-(-WORDS // (8 * layout.tensor)) * 8 * layout.tensor,
            pre_process=parallel_state.is_pipeline_first_stage(**stage),
            post_process=parallel_state.is_pipeline_last_stage(**stage),
            share_embeddings_and_output_weights=layout.tied,
            position_embedding_type="rope" if layout.llama else "learned_absolute",
            **({"vp_stage": number} if layout.virtual else {}),
        )  # fmt: skip
        held = Float16Module(config, model) if layout.bf16 else model
        if layout.frozen:
            layers = [each for each in model.decoder.layers if each.layer_number <= layout.layers // 2]
            for module in (*layers, *([model.embedding] if model.pre_process else ())):
                module.requires_grad_(False)
        chunks.append(DistributedDataParallel(config=config, ddp_config=buckets, module=held))
    with _inner_optimizer(FusedAdam if layout.fused else None):
        optimizer = get_megatron_optimizer(
            OptimizerConfig(
                optimizer="adam", lr=RATE, bf16=layout.bf16, params_dtype=dtype, use_distributed_optimizer=True,
                weight_decay=DECAY, adam_beta1=BETAS[0], adam_beta2=BETAS[1], adam_eps=EPSILON, clip_grad=0.0,
            ),
            chunks,
        )  # fmt: skip
    scheduler = OptimizerParamScheduler(
        optimizer, init_lr=0.0, max_lr=RATE, min_lr=RATE, lr_warmup_steps=0, lr_decay_steps=10,
        lr_decay_style="constant", start_wd=DECAY, end_wd=DECAY, wd_incr_steps=0, wd_incr_style="constant",
        use_checkpoint_opt_param_scheduler=True, override_opt_param_scheduler=False,
    )  # fmt: skip
    return Job(layout, chunks, optimizer, scheduler)


def write(job, folder, kind):
    """Write Megatron's own directory. Its writer forks: snapshots must not have been taken in this process."""
    options = {}
    if job.layout.shared:
        from megatron.core import parallel_state
        from megatron.core.dist_checkpointing.serialization import get_default_save_sharded_strategy
        from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper

        group = parallel_state.get_data_parallel_group(with_context_parallel=True)
        options["sharded_strategy"] = FullyParallelSaveStrategyWrapper(get_default_save_sharded_strategy(), group)
    save(job.state(kind), folder, content_metadata=describe(kind), **options)
    dist.barrier()


def _write_all(folder, layout, kinds):
    job = build(layout)
    job.start()
    job.train()
    job.expect(STEPS)
    for kind in kinds:
        write(job, folder / kind / f"iter_{STEPS:07d}", kind)
    return job.shapes()


def write_directories(folder, world, layout=Layout(), kinds=KINDS):
    """Write Megatron's own directories in forks of this process, and `truth.safetensors` beside them.

    The names there are `param/<key>`, `exp_avg/<key>` and `exp_avg_sq/<key>`. The metadata has `layout` and `steps`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    import_megatron()
    with tempfile.TemporaryDirectory() as stores:
        ranks = fork_ranks(world, Path(stores), _write_all, folder, layout, kinds)
    found = {}
    for key, (shape, dims) in (item for each in ranks for item in each.items()):
        values = truth(key, shape, dims, STEPS)
        found |= {f"{name}/{key}": values[name].contiguous() for name in STATES}
    about = {"world": world, **dataclasses.asdict(layout)}
    save_file(found, folder / "truth.safetensors", {"layout": json.dumps(about), "steps": str(STEPS)})


def main():
    options = argparse.ArgumentParser(description="Write directories of Megatron's distributed optimizer.")
    options.add_argument("folder", type=Path)
    options.add_argument("--world", type=int, default=2)
    options.add_argument("--kinds", nargs="*", default=KINDS, choices=KINDS)
    for field in dataclasses.fields(Layout):
        name = f"--{field.name}"
        if isinstance(field.default, bool):
            options.add_argument(name, action=argparse.BooleanOptionalAction, default=field.default)
        else:
            options.add_argument(name, type=int, default=field.default)
    given = vars(options.parse_args())
    folder, world, kinds = given.pop("folder"), given.pop("world"), tuple(given.pop("kinds"))
    write_directories(folder, world, Layout(**given), kinds)


if __name__ == "__main__":
    main()
