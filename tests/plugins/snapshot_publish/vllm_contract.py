"""The contract of vLLM's weight transfer (0.33), written for these tests: `import vllm` finds it. A worker is real: its
model loads tensors on the CPU, and fuses some of them, as vLLM's models do."""

import contextlib
import dataclasses
import json
import sys
import types
from abc import ABC, abstractmethod
from functools import cached_property
from typing import Any, ClassVar, Generic, TypeVar

import torch
from torch import nn

Init, Update = TypeVar("Init"), TypeVar("Update")


class WeightTransferInitInfo:
    pass


class WeightTransferUpdateInfo:
    pass


@dataclasses.dataclass
class TrainerInitInfo:
    backend: ClassVar[str]
    rank: int = dataclasses.field(kw_only=True)

    def __init_subclass__(cls):
        assert cls.backend

    @property
    def is_sender(self):
        return self.rank == 0


@dataclasses.dataclass(frozen=True)
class Replicate:
    pass


@dataclasses.dataclass(frozen=True)
class Shard:
    dim: int


@dataclasses.dataclass(frozen=True)
class ParamMeta:
    name: str
    dtype: torch.dtype
    shape: tuple
    owners: Any = dataclasses.field(default=None, kw_only=True)
    mesh_shape: Any = dataclasses.field(default=None, kw_only=True)
    placements: Any = dataclasses.field(default=None, kw_only=True)


class WeightTransferEngine(ABC, Generic[Init, Update]):
    supports_draft_weight_update = True

    def __init__(self, config, vllm_config, device, model):
        self.config, self.vllm_config, self.device, self.model = config, vllm_config, device, model
        self.model_config = "configuration"

    def parse_init_info(self, given):
        return self.init_info_cls(**given)

    def parse_update_info(self, given):
        return self.update_info_cls(**given)

    @abstractmethod
    def init_transfer_engine(self, init_info): ...

    @abstractmethod
    def start_weight_update(self): ...

    @abstractmethod
    def finish_weight_update(self): ...

    def update_weights(self, update_info):
        self.receive_weights(self.parse_update_info(update_info))

    @abstractmethod
    def receive_weights(self, update_info): ...

    @abstractmethod
    def shutdown(self): ...


class TrainerWeightTransferEngine(ABC, Generic[Init]):
    def __init__(self, *, client, source=None, is_sender=True, rank=0):
        self.client, self.source, self.is_sender, self.rank = client, source, is_sender, rank

    @classmethod
    @abstractmethod
    def trainer_init(cls, init_info, *, client, source=None): ...

    @abstractmethod
    def send_weights(self): ...


class ModuleSource:
    """The parameters of a module: whole, or this rank's pieces."""

    def __init__(self, module, local=True):
        self.module, self.local = module, local

    @cached_property
    def metadata(self):
        metas = []
        for name, each in self.module.named_parameters():
            mesh = getattr(each, "device_mesh", None)
            layout = {}
            if mesh is not None:
                placements = tuple(Shard(p.dim) if p.is_shard() else Replicate() for p in each.placements)
                owners = tuple(mesh.mesh.flatten().tolist())
                layout = {"owners": owners, "mesh_shape": tuple(mesh.mesh.shape), "placements": placements}
            metas.append(ParamMeta(name, each.dtype, tuple(each.shape), **layout))
        return metas

    def implements_iter_local(self):
        return self.local

    def implements_iter_full(self):
        return True

    def iter_full(self):
        buffer = torch.empty(max(each.numel() for each in self.module.parameters()))
        for name, each in self.module.named_parameters():
            whole = each.full_tensor() if hasattr(each, "full_tensor") else each
            yield name, buffer[: whole.numel()].view(whole.shape).copy_(whole)  # the memory is used again

    def iter_local(self):
        for name, each in self.module.named_parameters():
            yield name, each.to_local() if hasattr(each, "to_local") else each


class Factory:
    def __init__(self):
        self.registry = {}

    def register_engine(self, name, module, class_name):
        if name in self.registry:
            raise ValueError(f"{name} is already registered")
        self.registry[name] = module, class_name

    def find(self, name):
        module, class_name = self.registry[name]
        return getattr(__import__(module, fromlist=[class_name]), class_name)

    def create_engine(self, config, vllm_config, device, model):
        return self.find(config.backend)(config, vllm_config, device, model)

    def trainer_init(self, init_info, *, client, source=None):
        return self.find(init_info.backend).trainer_init(init_info, client=client, source=source)


workers, trainers = Factory(), Factory()


def initialize_layerwise_reload(model):
    assert not model.reloading
    model.reloading = True


def finalize_layerwise_reload(model, model_config):
    assert model_config == "configuration"
    assert model.reloading
    model.reloading = False


class Served(nn.Module):
    """A model that is served: two projections are one parameter."""

    def __init__(self):
        super().__init__()
        self.reloading, self.fail_after = False, None
        self.fused = nn.Parameter(torch.zeros(16, 8), requires_grad=False)
        self.out = nn.Parameter(torch.zeros(8, 16), requires_grad=False)

    def load_weights(self, weights):
        assert self.reloading
        places = {"q.weight": self.fused[:8], "k.weight": self.fused[8:], "out.weight": self.out}
        loaded = set()
        for name, tensor in weights:
            places[name].copy_(tensor)
            loaded.add(name)
        assert loaded == places.keys()

    def shows(self, trained):
        return self.fused.equal(torch.cat([trained.q.weight, trained.k.weight])) and self.out.equal(trained.out.weight)


class Worker:
    """One process of the engine, as vLLM's worker drives it."""

    def __init__(self):
        self.model, self.active = Served(), False
        config = types.SimpleNamespace(backend="snapshot")
        self.engine = workers.create_engine(config, None, torch.device("cpu"), self.model)

    def init_weight_transfer_engine(self, init_info):
        self.engine.init_transfer_engine(self.engine.parse_init_info(init_info))

    def start_weight_update(self):
        assert not self.active
        self.engine.start_weight_update()
        self.active = True

    def update_weights(self, update_info):
        assert self.active
        try:
            self.engine.update_weights(update_info)
        except BaseException:
            self.active = False
            raise

    def finish_weight_update(self):
        assert self.active
        self.active = False
        self.engine.finish_weight_update()


class Client:
    """Calls all workers, with what JSON keeps. An error of one is that of the call, and the others do not know it."""

    def __init__(self, *targets):
        self.targets, self.version, self.before = targets, None, lambda method, given: None

    def _call(self, method, *given):
        given = json.loads(json.dumps(given))
        self.before(method, given)
        errors = []
        for each in self.targets:
            try:
                getattr(each, method)(*given)
            except Exception as error:  # noqa: BLE001 - it is raised below
                errors.append(error)
        if errors:
            raise errors[0]

    def init_weight_transfer_engine(self, init_info):
        self._call("init_weight_transfer_engine", init_info)

    def start_weight_update(self):
        self._call("start_weight_update")

    def update_weights(self, update_info):
        self._call("update_weights", update_info)

    def finish_weight_update(self, weight_version=None):
        self._call("finish_weight_update")
        self.version = weight_version


def install():
    """Let imports of vLLM find this."""

    def module(name, **content):
        made = sys.modules[name] = types.ModuleType(name)
        made.__path__ = []
        vars(made).update(content)

    for name in ("vllm", "vllm.distributed", "vllm.model_executor", "vllm.model_executor.model_loader"):
        module(name)
    base = (
        WeightTransferInitInfo, WeightTransferUpdateInfo, TrainerInitInfo, Shard, WeightTransferEngine,
        TrainerWeightTransferEngine,
    )  # fmt: skip
    module("vllm.distributed.weight_transfer", ModuleSource=ModuleSource, WeightTransferTrainerFactory=trainers)
    module("vllm.distributed.weight_transfer.base", **{each.__name__: each for each in base})
    module(
        "vllm.distributed.weight_transfer.factory",
        WeightTransferEngineFactory=workers, WeightTransferTrainerFactory=trainers,
    )  # fmt: skip
    module("vllm.model_executor.model_loader.mtp_validation", disable_mtp_completeness_check=contextlib.nullcontext)
    module(
        "vllm.model_executor.model_loader.reload",
        initialize_layerwise_reload=initialize_layerwise_reload, finalize_layerwise_reload=finalize_layerwise_reload,
    )  # fmt: skip
