"""What people do with `torch.distributed.checkpoint`, done with torch's storage and with ours: the same comes of it, to
the bit, and so do the same errors."""

import collections
import io

import pytest
import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys

from tests.interop.dcp_states import Ours, Theirs, emptied, load, model, outcome, quiet, save, trained

USAGES = []


def usage(function):
    USAGES.append(function)
    return function


def both(state, system, where, into=None, **options):
    """Save a state, and load it into another of the same structure."""
    save(state, system.writer(where), **options)
    return load(emptied(state) if into is None else into, system.reader(where), **options)


@usage
def nested_state(system, where):
    made, optimizer = trained()
    return both({"model": made.state_dict(), "optim": optimizer.state_dict(), "step": 7, "name": "run"}, system, where)


@usage
def flat_state(system, where):
    return both(model().state_dict(), system, where)


@usage
def stateful_objects(system, where):
    made, optimizer = trained()
    save({"model": made, "optim": optimizer}, system.writer(where))
    other, fresh = trained(1)
    load({"model": other, "optim": fresh}, system.reader(where))
    return {"model": other.state_dict(), "optim": fresh.state_dict()}


@usage
def planners_that_do_not_flatten(system, where):
    state = {"model": dict(model().state_dict()), "step": 3, "tensor": torch.arange(4.0)}
    save(state, system.writer(where), planner=DefaultSavePlanner(flatten_state_dict=False))
    into = {"model": None, "step": None, "tensor": torch.zeros(4)}
    return load(into, system.reader(where), planner=DefaultLoadPlanner(flatten_state_dict=False))


@usage
def odd_names(system, where):
    state = {
        "a/b": {"c%d": torch.ones(2), "": torch.ones(1)},
        "é\u2028": {"x.y": torch.zeros(3)},
        "a": {"b/c": 1, "[0:1]": 2},
        "__metadata__": torch.ones(1),
        5: {7: torch.ones(2), "x": "y"},
        "%25": "%",
        "0": {"0": [torch.ones(1), {}]},
    }
    return both(state, system, where)


@usage
def odd_tensors(system, where):
    torch.manual_seed(0)
    names = ["float64", "float32", "float16", "bfloat16", "complex64", "complex128", "int64", "int32", "int16", "int8"]
    names += ["uint8", "uint16", "bool", "float8_e4m3fn", "float8_e5m2", "uint32", "uint64"]
    state = {name: (torch.randn(5, 3) * 9).to(getattr(torch, name)) for name in names}
    base = torch.arange(24.0).view(4, 6)
    state |= {"scalar": torch.tensor(3.5), "empty": torch.ones(0, 3), "transposed": base.t(), "strided": base[:, ::2]}
    state |= {"conj": torch.randn(3, dtype=torch.complex64).conj(), "neg": torch.randn(3, dtype=torch.complex64).imag}
    state |= {"channels_last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)}
    state |= {"expanded": torch.ones(1, 3).expand(4, 3), "parameter": torch.nn.Parameter(torch.ones(2))}
    into = emptied(state) | {"expanded": torch.zeros(4, 3), "neg": torch.zeros(3)}
    return both(state, system, where, into)


@usage
def targets_of_other_layouts_and_dtypes(system, where):
    state = {"a": torch.arange(12.0).view(3, 4), "b": torch.arange(6), "c": torch.arange(70_000.0).view(700, 100)}
    wide = torch.zeros(3, 8)
    into = {"a": wide[:, ::2], "b": torch.zeros(6, dtype=torch.float16), "c": torch.zeros(100, 700).t()}
    return [both(state, system, where, into), wide]


@usage
def tied_weights(system, where):
    weight = torch.arange(6.0)
    tied = torch.zeros(6)
    return both({"a": weight, "b": weight, "c": weight[:3]}, system, where, {"a": tied, "b": tied, "c": torch.zeros(3)})


@usage
def untied_weights_into_tied_ones(system, where):
    tied = torch.zeros(6)
    return both({"a": torch.arange(6.0), "b": torch.ones(6)}, system, where, {"a": tied, "b": tied})["a"].shape


@usage
def values_that_are_no_tensors(system, where):
    state = {
        "none": None,
        "tuple": (1, "a", (2.5, b"x")),
        "set": {1},
        "nan": float("nan"),
        "inf": -float("inf"),
        "big": 1 << 80,
        "bytes": b"\x00\xff" * 9_000,
        "text": "é" * 20_000,
        "list": [1, [2, [3]]],
        "empty list": [],
        "empty dict": {},
        "complex": 1 + 2j,
        "ordered": collections.OrderedDict(b=1, a=2),
        "size": torch.Size([1, 2]),
        "dtype": torch.bfloat16,
        "device": torch.device("cpu"),
        "flag": True,
        "mixed": [1, {"x": [2, 3]}, [4]],
        "tensors": [torch.ones(2), 5],
        "tuple of tensors": (torch.ones(2), torch.zeros(1)),
    }
    return both(state, system, where)


@usage
def a_missing_key(system, where):
    save({"model": model().state_dict()}, system.writer(where))
    return load({"model": {**model().state_dict(), "new": torch.zeros(1)}}, system.reader(where))


@usage
def a_missing_key_that_is_allowed(system, where):
    save({"model": model().state_dict()}, system.writer(where))
    into = {"model": {**emptied(model().state_dict()), "new": torch.full((2,), 5.0)}, "step": 9}
    return load(into, system.reader(where), planner=DefaultLoadPlanner(allow_partial_load=True))


@usage
def a_part_of_the_state(system, where):
    made, optimizer = trained()
    save({"model": made.state_dict(), "optim": optimizer.state_dict()}, system.writer(where))
    return load({"model": {"0.weight": torch.zeros(8, 6)}}, system.reader(where))


@usage
def another_shape(system, where):
    return both({"a": torch.ones(3, 4)}, system, where, {"a": torch.zeros(4, 3)})


@usage
def a_value_where_a_tensor_was(system, where):
    return both({"a": torch.ones(3)}, system, where, {"a": 5})


@usage
def a_tensor_where_a_value_was(system, where):
    return both({"a": 5}, system, where, {"a": torch.zeros(3)})


@usage
def nothing_there(system, where):
    return load({"a": torch.ones(1)}, system.reader(f"{where}/nowhere"))


@usage
def nothing_in_it(system, where):
    return both({}, system, where)


@usage
def no_overwriting(system, where):
    save({"a": torch.ones(1)}, system.writer(where))
    with pytest.raises(CheckpointException):
        save({"a": torch.zeros(1)}, system.writer(where, overwrite=False))
    return load({"a": torch.zeros(1)}, system.reader(where))


@usage
def overwriting(system, where):
    writer = system.writer(where)
    save({"a": torch.ones(1), "gone": 1}, writer)
    save({"a": torch.full((1,), 2.0)}, writer)
    return load({"a": torch.zeros(1)}, system.reader(where))


@usage
def a_place_for_each_save(system, where):
    writer, reader = system.writer(where), system.reader(where)
    for step in (1, 2):
        save({"step": step, "a": torch.full((2,), step)}, writer, checkpoint_id=f"{where}/{system.name}-{step}")
    found = [
        load({"step": 0, "a": torch.zeros(2)}, reader, checkpoint_id=f"{where}/{system.name}-{step}") for step in (2, 1)
    ]
    return found, str(writer.checkpoint_id).endswith("-2"), str(reader.checkpoint_id).endswith("-1")


@usage
def state_dict_helpers(system, where):
    made, optimizer = trained()
    save(
        {"model": get_model_state_dict(made), "optim": get_optimizer_state_dict(made, optimizer)}, system.writer(where)
    )
    other, fresh = trained(1)
    state = {"model": get_model_state_dict(other), "optim": get_optimizer_state_dict(other, fresh)}
    load(state, system.reader(where))
    set_model_state_dict(other, state["model"])
    set_optimizer_state_dict(other, fresh, state["optim"])
    return {"model": other.state_dict(), "optim": fresh.state_dict()}


@usage
def flattened_optimizers(system, where):
    options = StateDictOptions(flatten_optimizer_state_dict=True, full_state_dict=True, cpu_offload=True)
    made, optimizer = trained()
    state, optim = get_state_dict(made, optimizer, options=options)
    save({"model": state, "optim": optim}, system.writer(where))
    other, fresh = trained(1)
    state, optim = get_state_dict(other, fresh, options=options)
    both_ = {"model": state, "optim": optim}
    load(both_, system.reader(where))
    set_state_dict(other, fresh, model_state_dict=both_["model"], optim_state_dict=both_["optim"], options=options)
    return {"model": other.state_dict(), "optim": fresh.state_dict()}


@usage
def keys_without_a_state(system, where):
    made, optimizer = trained()
    save({"model": made.state_dict(), "optim": optimizer.state_dict(), "step": 3}, system.writer(where))
    with quiet():
        whole = _load_state_dict_from_keys(storage_reader=system.reader(where))
        some = _load_state_dict_from_keys({"optim.param_groups", "step"}, storage_reader=system.reader(where))
    return whole, some


class Halving(DefaultSavePlanner):
    """Makes what is saved only when it is asked for."""

    def transform_object(self, write_item, object):  # noqa: A002 - it is torch's name
        made = super().transform_object(write_item, object)
        return made.to(torch.bfloat16) if isinstance(made, torch.Tensor) and made.is_floating_point() else made


class Doubling(DefaultLoadPlanner):
    """Reads everything into one scratch tensor, and copies it from there."""

    scratch = torch.zeros(1000)

    def resolve_tensor(self, read_item):
        self.target = super().resolve_tensor(read_item)
        return self.scratch[: self.target.numel()].view(self.target.shape)

    def commit_tensor(self, read_item, tensor):
        super().resolve_tensor(read_item).copy_(tensor * 2)


@usage
def planners_that_make_tensors(system, where):
    state = {"model": model().state_dict(), "x": torch.rand(300), "step": 4, "size": torch.Size([3])}
    save(state, system.writer(where), planner=Halving())
    return load(emptied(state), system.reader(where), planner=Doubling())


class Bytes(DefaultSavePlanner):
    """Its bytes are not torch's."""

    def transform_object(self, write_item, object):  # noqa: A002 - as above
        return io.BytesIO(repr(object).encode()) if not isinstance(object, torch.Tensor) else object


class Words(DefaultLoadPlanner):
    def load_bytes(self, read_item, value):
        self.original_state_dict[read_item.dest_index.fqn] = value.read()


@usage
def planners_with_bytes_of_their_own(system, where):
    save({"a": 5, "b": [1], "c": torch.ones(2)}, system.writer(where), planner=Bytes())
    return load({"a": None, "b": None, "c": torch.zeros(2)}, system.reader(where), planner=Words())


@usage
def plans_that_are_kept(system, where):
    kind = type(f"Kept{system.name}{where}", (DefaultSavePlanner,), {})  # torch keeps plans by the class's name
    found = []
    for step, count in enumerate((3, 3, 3, 4, 4)):
        state = {"tensors": {str(i): torch.full((4,), float(step + i)) for i in range(count)}, "step": step}
        save(state, system.writer(where), planner=kind(enable_plan_caching=True))
        found.append(load(emptied(state), system.reader(where)))
    return found


@usage
def metadata(system, where):
    made, optimizer = trained()
    state = {"model": made.state_dict(), "optim": optimizer.state_dict(), "l": [1], "t": [torch.ones(2)]}
    saved = save(state, system.writer(where))
    found = []
    for each in (saved, system.reader(where).read_metadata()):
        kinds = {
            name: (
                type(one).__name__,
                getattr(one, "size", None),
                one.properties.dtype if hasattr(one, "size") else None,
            )
            for name, one in each.state_dict_metadata.items()
        }
        chunks = {name: one.chunks for name, one in each.state_dict_metadata.items() if hasattr(one, "chunks")}
        found.append([kinds, each.planner_data, str(chunks)])
    assert found[0] == found[1]
    return found


@pytest.mark.parametrize("work", USAGES, ids=lambda work: work.__name__)
def test_dcp_usages_equal_torch_s_own_storage(work, tmp_path):
    theirs = outcome(work, Theirs(), tmp_path)
    ours = outcome(work, Ours(), tmp_path)
    if ours[0] == "raised" and theirs[0] == "returned":
        work(Ours(), tmp_path)  # for its traceback
    assert str(ours).replace("SnapshotNotFoundError", "FileNotFoundError").replace(
        "SnapshotExistsError", "RuntimeError"
    ) == str(theirs)  # ours are of both classes, or say more
