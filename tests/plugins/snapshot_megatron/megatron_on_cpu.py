"""Megatron-core on ranks without an accelerator: what it asks of CUDA and NCCL is answered by the host and gloo.

The changes are of the whole process, and stay. Call `import_megatron` on ranks of a pool or in forks, never in the
tests' own process."""

import contextlib
import functools
import os
import sys
import types
import warnings

import torch
import torch.distributed as dist

from tests.helpers.missing_packages import StandIns

HOST = torch.device("cpu")
FACTORIES = ("empty", "zeros", "ones", "tensor", "full", "arange", "rand", "randn", "as_tensor", "randint", "linspace")
"""Functions of torch that make a tensor on a device."""


class Triton(StandIns):
    """Finds a stand-in for triton, which Megatron imports since 0.17, and calls only for what runs on a GPU."""

    def create_module(self, spec):
        module = super().create_module(spec)
        module.__version__ = "0"
        return module


class Stream:
    """Stands for streams and for events: nothing runs beside the caller, so nothing is waited for."""

    def __init__(self, *_, **__):
        pass

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *_, **__: self


@functools.cache
def import_megatron():
    """Change torch for this process, and import what the models need. Return the package."""
    os.environ |= {"CUDA_DEVICE_MAX_CONNECTIONS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    _replace_cuda()
    _redirect_devices()
    _replace_groups()
    compiled, triton = torch.compile, Triton("triton")
    # it hands fused kernels to the compiler, whose own import takes longer than all tests together
    torch.compile = lambda function=None, *_, **__: function or (lambda each: each)
    sys.meta_path.append(triton)  # after the finders of what is installed
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import megatron.core
            import megatron.core.models.gpt
            import megatron.core.optimizer
            import megatron.core.tensor_parallel.random as numbers
    finally:
        torch.compile = compiled
        sys.meta_path.remove(triton)
        for name in [name for name, each in sys.modules.items() if getattr(each, "__loader__", None) is triton]:
            del sys.modules[name]  # torch would take it for the real one
    numbers._set_cuda_rng_state = lambda state, *_, **__: torch.set_rng_state(state)
    numbers._get_cuda_rng_state = lambda *_, **__: torch.get_rng_state()
    return megatron.core


def _replace_cuda():
    cuda = torch.cuda
    for name in ("set_device", "synchronize", "empty_cache", "manual_seed", "manual_seed_all", "set_stream"):
        setattr(cuda, name, lambda *_, **__: None)
    for name in ("max_memory_allocated", "memory_allocated", "memory_reserved"):
        setattr(cuda, name, lambda *_, **__: 0)
    cuda.current_device, cuda.device_count = lambda: HOST, lambda: 8
    cuda.get_rng_state = cuda.random.get_rng_state = lambda *_, **__: torch.get_rng_state()
    cuda.set_rng_state = lambda state, *_, **__: torch.set_rng_state(state)
    cuda.Stream = cuda.Event = Stream
    cuda.current_stream = cuda.default_stream = Stream
    cuda.stream = lambda *_: contextlib.nullcontext()
    cuda.get_device_capability = lambda *_: (8, 0)
    cuda.get_device_properties = lambda *_: types.SimpleNamespace(
        multi_processor_count=1, major=8, minor=0, total_memory=1 << 30, name="host"
    )
    cuda._lazy_init, cuda._lazy_call = lambda: None, lambda function, **__: function()
    torch.Tensor.cuda = torch.nn.Module.cuda = lambda self, *_, **__: self


def _is_cuda(device):
    return isinstance(device, str | torch.device) and str(device).startswith("cuda")


def _redirect_devices():
    def on_host(function):
        @functools.wraps(function)
        def call(*args, **options):
            args = [HOST if _is_cuda(each) else each for each in args]
            return function(*args, **{**options, **({"device": HOST} if _is_cuda(options.get("device")) else {})})

        return call

    for name in FACTORIES:
        setattr(torch, name, on_host(getattr(torch, name)))
    torch.Tensor.to = on_host(torch.Tensor.to)
    type_of = torch.Tensor.type

    def named(self, *args, **options):
        found = type_of(self, *args, **options)
        return found.replace("torch.", "torch.cuda.") if isinstance(found, str) else found

    torch.Tensor.type = named  # the optimizer sorts its parameters by this name


def _replace_groups():
    def without(function, *unknown, **known):
        @functools.wraps(function)
        def call(*args, **options):
            kept = {name: value for name, value in options.items() if name not in unknown}
            return function(*args, **{**kept, **known})

        return call

    groups = dist.distributed_c10d
    dist.new_group = groups.new_group = without(dist.new_group, "pg_options", "device_id", backend="gloo")
    dist.barrier = groups.barrier = without(dist.barrier, "device_ids")
