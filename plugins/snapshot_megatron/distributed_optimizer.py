"""Megatron-core's distributed optimizer as tensors of the model.

Each rank of data parallelism owns runs of flattened parameters: of main parameters, and of what the inner optimizer
keeps for each. A run of a row-major tensor is a few boxes, and the model's sharded state dict says where a parameter
is in the checkpoint. So the boxes follow without a collective, and their memory is the rank's own, without a copy.

Nothing of Megatron is imported here. Versions are told apart by what their objects have.
"""

from __future__ import annotations

import inspect
import math
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import torch

from snapshot.errors import RestoreError, SnapshotError
from snapshot.state.sharded import LocalPiece, Shards
from snapshot.tensors import composite
from snapshot.tensors.geometry import Box, Shape, boxes_of_range, boxes_overlap, intersect, whole_box
from snapshot.text import with_article
from snapshot_megatron.boxes import MegatronBoxes, box_of, is_main, is_of

PREFIX = "optimizer."
"""Beginning of the names of everything that an optimizer adds to a checkpoint."""
STATE = f"{PREFIX}state."
"""Beginning of `optimizer.state.<param, exp_avg, ...>.<key of the model>`, as in Megatron's own directories."""
PARAM, STEP = "param", "step"
GROUP = f"{PREFIX}group."
"""Beginning of `optimizer.group.<key of the model>`: for each layer, the numbers of its group in `GROUP_NUMBERS`."""
GROUP_NUMBERS = ("wd_mult", "lr_mult", "is_decoupled_lr")
"""What another optimizer needs to know of the group of a parameter. NaN stands for a value that a group lacks."""
KNOWN = "written for megatron-core 0.15 to 0.20"
PROBED = 16
"""Elements of each run that are compared with the model's weights."""
_IDENTIFIERS = ("wd_mult", "lr_mult", "is_expert_parallel", "is_decoupled_lr")
"""What tells groups apart in versions that list no more."""
_NEEDED = ("gbuf_ranges", "model_param_group_index_map", "distributed_optimizer_instance_id", "optimizer")


@dataclass(frozen=True, slots=True)
class _Part:
    """A box of a rank's parameter that is a box of a tensor of the checkpoint."""

    key: str
    shape: Shape
    """Shape of the tensor of the checkpoint."""
    box: Box
    """The part in that tensor."""
    local: Box
    """The part in the parameter."""
    leading: int
    """The number of axes that the parameter lacks: those of layers and of experts."""
    replica: tuple[int, ...]
    flexible: bool
    """True if the stored tensor may be longer or shorter, such as a padded vocabulary."""


@dataclass(frozen=True, slots=True, eq=False)
class _Run:
    """A range of a flattened parameter that this rank owns."""

    parameter: torch.Tensor
    begin: int
    end: int
    main: torch.Tensor
    inner: Any
    """The inner optimizer, one of torch or of Transformer Engine."""
    group: dict[str, Any]
    instance: int
    """Number of the group of ranks that together have a whole optimizer. They are equal."""
    place: Any
    """The `ShardedTensor` or factory of the parameter."""
    is_shared: bool
    """True if the main parameter is a view of the model's own, as in float32."""


class RunBoxes(MegatronBoxes):
    """All boxes of one tensor of the optimizer on this rank. Each is a view of a run."""

    def __init__(self, key: str, shape: Shape, dtype: torch.dtype, flexible: bool) -> None:
        super().__init__(key)
        self.shape, self.flexible, self.dtype = shape, flexible, dtype
        self.views: list[tuple[Box, torch.Tensor, bool]] = []
        """Box, memory, and True for the copy that is stored."""

    def within(self, shape: Shape) -> RunBoxes:
        made = RunBoxes(self.key, shape, self.dtype, self.flexible)
        made.views = self.views
        return made

    def clear_outside(self, shape: Shape) -> None:
        for box, held, _ in self.views:
            common = intersect(box, whole_box(shape))
            for dim, full in enumerate(box.sizes):
                size = 0 if common is None else common.sizes[dim]
                if size < full:
                    held.narrow(dim, size, full - size).zero_()

    def __snapshot_shards__(self, path: str) -> Shards:
        pieces = []
        for box, held, main in self.views:
            common = intersect(box, whole_box(self.shape))
            if common is not None:
                view = held[tuple(slice(0, size) for size in common.sizes)] if common != box else held
                pieces.append(LocalPiece(common, view, None, 0 if main else 1))
        return Shards("ShardedTensor", self.dtype, self.shape, pieces, None, None, None, "", False)

    def __repr__(self) -> str:
        return f"RunBoxes({self.key!r}, {len(self.views)} of {list(self.shape)})"


@dataclass(slots=True)
class OptimizerState:
    """What one rank has of an optimizer, by the names of a checkpoint."""

    tensors: dict[str, RunBoxes]
    groups: dict[str, RunBoxes]
    """The numbers of the groups of parameters, which no restore into an optimizer of Megatron needs."""
    common: Any
    """Groups and scaler, as Megatron's `state_dict()` has them."""
    optimizers: list[Any]
    runs: list[_Run]
    pending: list[tuple[Any, torch.Tensor, dict[str, torch.Tensor]]]
    """(inner optimizer, main parameter, state) of parameters without a state. A restore puts it in."""
    steps: list[tuple[_Run, torch.Tensor]]
    """The steps of runs, where the inner optimizer has a step for all of a group."""
    weights: dict[str, str] = field(default_factory=dict)
    """Name of a main parameter that is the weight itself -> key of the weight, which is restored in its place."""


def read_optimizer(optimizer: Any, tree: Any, *, restoring: bool) -> OptimizerState:
    """Return what this rank has of an optimizer. No collective is called, and nothing is changed.

    Args:
        optimizer: Megatron-core's optimizer, or a chain of several.
        tree: The model's sharded state dict, before its factories have been built.
        restoring: The tensors are targets of a restore.

    Raises:
        SnapshotError: The optimizer is of a kind that is not supported, or its structure is not known.
    """
    places = _find_places(tree)
    optimizers = _list_optimizers(optimizer)
    runs = [run for each in optimizers for run in _find_runs(each, places)]
    if not restoring:
        _expect_weights(runs, SnapshotError)
    state = OptimizerState({}, {}, _common_of(optimizer, optimizers), optimizers, runs, [], [])
    layouts: dict[int, list[_Part]] = {}
    fresh: dict[int, Any] = {}
    for run in runs:
        if id(run.place) not in layouts:
            layouts[id(run.place)] = _split_parameter(run.place)
        values = _state_of(run, state, fresh)
        pieces = list(_pieces_of(run, layouts[id(run.place)]))
        for name, held in {PARAM: run.main.detach(), **values}.items():
            for part, box, at in pieces:
                key = f"{STATE}{name}.{part.key}"
                if name == PARAM and run.is_shared and restoring:
                    state.weights[key] = part.key
                    continue
                made = RunBoxes(key, part.shape, held.dtype, part.flexible)
                view = _view_piece(held.view(run.end - run.begin), part.leading, at)
                _add_view(state.tensors, made, (box, view), stored=_is_stored(run, part))
        _add_steps(state, run, pieces)
    return state


def load_optimizer(state: OptimizerState, common: Any, filled: set[str], *, all_filled: bool) -> None:
    """Give the optimizer its groups and steps, after its tensors have been filled.

    Args:
        state: The targets of the restore.
        common: The stored groups and scaler; None if they were not requested.
        filled: Names of the tensors that have been filled.
        all_filled: Weights and main parameters were all requested, so they must agree.
    """
    if any(name in filled for name in state.tensors):
        for inner, main, values in state.pending:
            inner.state[main] = values
    if common is not None:
        chosen = match_groups(state, common)
        for group, stored in chosen:
            step = stored.get(STEP)
            group.update({name: value for name, value in stored.items() if name not in ("params", STEP)})
            if step is not None and not any(name.startswith(f"{STATE}{STEP}.") for name in filled):
                _set_steps(state, group, step)
            if step is not None and not _has_own_steps(state, group):
                group[STEP] = int(step)
        _load_scalers(state.optimizers, common)
    for run, held in state.steps:
        if any(name.startswith(f"{STATE}{STEP}.") for name in filled):
            run.group[STEP] = int(held.item())
    if all_filled:
        _expect_weights(state.runs, RestoreError)


# Places of parameters in the checkpoint


def _find_places(tree: Any) -> dict[int, Any]:
    """Return the `ShardedTensor` or the factory of each parameter, by its id."""
    found: dict[int, Any] = {}
    pending = [tree]
    while pending:
        value = pending.pop()
        if isinstance(value, dict):
            pending += value.values()
        elif isinstance(value, list):
            pending += value
        elif is_of(value, "ShardedBase") and isinstance(getattr(value, "data", None), torch.nn.Parameter):
            found[id(value.data)] = value
    return found


def _split_parameter(place: Any) -> list[_Part]:
    """Return the parts of a parameter, each with its box in the checkpoint. A factory is built without memory."""
    shape = tuple(place.data.shape)
    if is_of(place, "ShardedTensor"):
        return [_make_part(place, whole_box(shape), shape)]
    meta = torch.empty(shape, dtype=place.data.dtype, device="meta")
    parts = []
    for made in _find_tensors(replace(place, data=meta).build()):
        view = made.data
        if view.untyped_storage() is not meta.untyped_storage() or view.stride() != meta.stride():
            raise SnapshotError(
                f"{place.key}: the distributed optimizer cannot be saved: a factory of its parameter copies or "
                "transposes it; only those that split a parameter are supported"
            )
        offset, offsets = int(view.storage_offset()), []
        for stride in meta.stride():
            offsets.append(offset // stride)
            offset %= stride
        parts.append(_make_part(made, Box(tuple(offsets), tuple(view.shape)), shape))
    boxes = [part.local for part in parts]
    if sum(box.numel for box in boxes) != meta.numel() or boxes_overlap(boxes):
        raise SnapshotError(
            f"{place.key}: the distributed optimizer cannot be saved: the parts that a factory makes of its "
            "parameter must form the whole of it"
        )
    return parts


def _find_tensors(tree: Any) -> list[Any]:
    if is_of(tree, "ShardedTensor"):
        return [tree]
    children = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list) else ()
    return [found for child in children for found in _find_tensors(child)]


def _make_part(sharded: Any, local: Box, shape: Shape) -> _Part:
    box, replica = box_of(sharded), sharded.replica_id
    if box.sizes != (1,) * sharded.prepend_axis_num + local.sizes:
        raise SnapshotError(
            f"{sharded.key}: a part of a parameter of shape {list(shape)} must be the box [{local}] of it, got the box "
            f"[{box}] of {list(sharded.global_shape)}"
        )
    if isinstance(replica, int) or len(replica) != 3:
        raise SnapshotError(
            f"{sharded.key}: replica_id must have the numbers of pipeline, tensor and data parallelism, got {replica}"
        )
    return _Part(
        sharded.key,
        tuple(map(int, sharded.global_shape)),
        box,
        local,
        int(sharded.prepend_axis_num),
        tuple(replica),
        bool(sharded.allow_shape_mismatch),
    )


# Runs of an optimizer


def _list_optimizers(optimizer: Any) -> list[Any]:
    """Return the distributed optimizers. Those without parameters on this rank are left out."""
    chained = getattr(optimizer, "chained_optimizers", None)
    each = [optimizer] if chained is None else list(chained)
    return [one for one in each if not getattr(one, "is_stub_optimizer", False)]


def _find_runs(optimizer: Any, places: Mapping[int, Any]) -> Iterator[_Run]:
    """Yield the runs of one distributed optimizer. Raise if it is not one, or of an unknown structure."""
    name = type(optimizer).__qualname__
    if getattr(getattr(optimizer, "ddp_config", None), "use_megatron_fsdp", False):
        raise SnapshotError(f"{name}: use_megatron_fsdp is not supported: its state is of DTensors")
    inner: Any = getattr(optimizer, "optimizer", None)
    kinds = {kind.__name__ for kind in type(inner).__mro__}
    if "HybridDeviceOptimizer" in kinds:
        raise SnapshotError(f"{name}: a HybridDeviceOptimizer (optimizer_cpu_offload) is not supported")
    if getattr(getattr(optimizer, "config", None), "use_precision_aware_optimizer", False):
        raise SnapshotError(f"{name}: use_precision_aware_optimizer is not supported")
    missing = [each for each in _NEEDED if not hasattr(optimizer, each)]
    missing += [f"optimizer.{each}" for each in ("param_groups", "state") if not hasattr(inner, each)]
    if missing:
        raise SnapshotError(f"{name} has no {', '.join(missing)}; MegatronState(optimizer=...) was {KNOWN}")
    instance = int(optimizer.distributed_optimizer_instance_id)
    for parameter, begin, end in _list_ranges(optimizer, name):
        place = places.get(id(parameter))
        if place is None:
            raise SnapshotError(
                f"{name}: a parameter of shape {list(parameter.shape)} is not in the sharded state dict; call "
                "sharded_state_dict() of each part of the model, which gives the parameters themselves"
            )
        try:
            number, index = optimizer.model_param_group_index_map[parameter]
            group = inner.param_groups[number]
            main = group["params"][index]
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise SnapshotError(f"{place.key}: {name} has no main parameter for it; it was {KNOWN}") from error
        _expect_flat(place.key, PARAM, main, end - begin)
        if composite.plain_subclass_name(parameter.detach()) is None:
            kind = with_article(type(parameter.data).__qualname__)
            raise SnapshotError(f"{place.key}: the parameter must be plain, got {kind}")
        shared = main.untyped_storage().data_ptr() == parameter.untyped_storage().data_ptr()
        yield _Run(parameter, begin, end, main, inner, group, instance, place, shared)


def _list_ranges(optimizer: Any, name: str) -> list[tuple[torch.Tensor, int, int]]:
    found, seen = [], set()
    try:
        for buffer in optimizer.gbuf_ranges:
            for buckets in buffer.values():
                for bucket in buckets:
                    for parameter, ranges in bucket["param_map"].items():
                        found.append((parameter, int(ranges["param"].start), int(ranges["param"].end)))
    except (AttributeError, KeyError, TypeError) as error:
        raise SnapshotError(f"{name}.gbuf_ranges has an unknown structure: {error}; it was {KNOWN}") from error
    for parameter, begin, end in found:
        if id(parameter) in seen or not 0 <= begin < end <= parameter.numel():
            raise SnapshotError(
                f"{name}.gbuf_ranges must have one range of each parameter, got {begin}:{end} of {parameter.numel()}; "
                f"it was {KNOWN}"
            )
        seen.add(id(parameter))
    return found


def _expect_flat(key: str, name: str, held: Any, length: int) -> None:
    """Raise unless this is a flat float32 tensor of a run."""
    is_flat = isinstance(held, torch.Tensor) and held.shape == (length,) and held.is_contiguous()
    if not is_flat or held.dtype is not torch.float32 or composite.plain_subclass_name(held.detach()) is None:
        shown = f"{held.dtype}{list(held.shape)}" if isinstance(held, torch.Tensor) else type(held).__qualname__
        raise SnapshotError(f"{STATE}{name}.{key} must be a flat float32 tensor of {length} elements, got {shown}")


def _state_of(run: _Run, state: OptimizerState, fresh: dict[int, Any]) -> dict[str, torch.Tensor]:
    """Return what the inner optimizer keeps of a run, without the step. What it has not made yet is zero."""
    held = run.inner.state.get(run.main) if run.main in run.inner.state else None
    if not held:
        held = _make_state(run, state.optimizers, fresh)
        state.pending.append((run.inner, run.main, held))
    values = {name: each for name, each in held.items() if name != STEP}
    for name, each in values.items():
        _expect_flat(run.place.key, name, each, run.end - run.begin)
    return values


def _make_state(run: _Run, optimizers: Sequence[Any], fresh: dict[int, Any]) -> dict[str, torch.Tensor]:
    """Return the state that Megatron itself would make for a main parameter before its first step."""
    if id(run.inner) not in fresh:
        owner = next(each for each in optimizers if each.optimizer is run.inner)
        init: Callable[..., object] | None = getattr(owner, "init_state_fn", None)
        if init is None:
            raise SnapshotError(
                f"{type(run.inner).__qualname__} has no state yet, and Megatron has no init_state_fn for it; make a "
                "step first"
            )
        stand_in = SimpleNamespace(param_groups=run.inner.param_groups, state=defaultdict(dict))
        more = [owner.config] if len(inspect.signature(init).parameters) > 1 else []
        init(stand_in, *more)
        fresh[id(run.inner)] = stand_in.state
    made: dict[str, torch.Tensor] = dict(fresh[id(run.inner)][run.main])
    if isinstance(run.inner, torch.optim.Adam):  # AdamW is one
        moves = run.group.get("capturable") or run.group.get("fused")
        made[STEP] = torch.zeros((), dtype=torch.float32, device=run.main.device if moves else "cpu")
    return made


def _pieces_of(run: _Run, parts: Sequence[_Part]) -> Iterator[tuple[_Part, Box, tuple[int, Box, Box]]]:
    """Yield (part, box in the checkpoint, where it is: begin and box of a range of the run, and the box in that)."""
    shape = tuple(run.parameter.shape)
    for begin, local in boxes_of_range(shape, run.begin, run.end):
        for part in parts:
            common = intersect(local, part.local)
            if common is not None:
                inside = common.relative_to(part.local.offsets)
                lead = part.box.offsets[: part.leading]
                moved = inside.moved_by(part.box.offsets[part.leading :])
                box = Box((*lead, *moved.offsets), ((1,) * part.leading) + moved.sizes)
                yield part, box, (begin - run.begin, local, common)


def _view_piece(flat: torch.Tensor, leading: int, at: tuple[int, Box, Box]) -> torch.Tensor:
    """Return a box of a run, with the axes that a parameter lacks."""
    begin, local, common = at
    view = flat[begin : begin + local.numel].view(local.sizes)[common.relative_to(local.offsets).slices()]
    return view[(None,) * leading]


def _add_view(tensors: dict[str, RunBoxes], boxes: RunBoxes, view: tuple[Box, torch.Tensor], *, stored: bool) -> None:
    """Add a view to the tensor of its name, for which `boxes` is used if there is none yet."""
    held = tensors.setdefault(boxes.key, boxes)
    if held.shape != boxes.shape:
        raise SnapshotError(
            f"{held.key}: all parts must have one shape, got {list(held.shape)} and {list(boxes.shape)}"
        )
    held.views.append((*view, stored))


def _is_stored(run: _Run, part: _Part) -> bool:
    """Return True for one of the equal copies of pipeline and tensor parallelism, and of instances."""
    return is_main((*part.replica[:2], run.instance))


# Steps and groups


def _add_steps(state: OptimizerState, run: _Run, pieces: Sequence[Any]) -> None:
    """Add the step of a run and the numbers of its group, for each layer. The rank with the first element stores them.

    So the values are the same in each split.
    """
    steps, numbers = _step_of(run, state), None
    seen: set[tuple[str, Shape]] = set()
    for part, box, _ in pieces:
        lead, rest = box.offsets[: part.leading], box.offsets[part.leading :]
        is_first = not any(rest)
        if not is_first and (part.key, lead) in seen:
            continue
        seen.add((part.key, lead))
        stored, ones, shape = is_first and _is_stored(run, part), (1,) * part.leading, part.shape[: part.leading]
        if steps is not None:
            made = RunBoxes(f"{STATE}{STEP}.{part.key}", shape, steps.dtype, False)
            _add_view(state.tensors, made, (Box(lead, ones), steps.view(ones)), stored=stored)
        if stored:
            if numbers is None:
                found = (run.group.get(name, run.group.get(f"pre_{name}")) for name in GROUP_NUMBERS)
                numbers = torch.tensor(
                    [math.nan if each is None else float(each) for each in found], dtype=torch.float64
                )
            made = RunBoxes(f"{GROUP}{part.key}", (*shape, len(numbers)), numbers.dtype, False)
            view = Box((*lead, 0), (*ones, len(numbers))), numbers.view((*ones, len(numbers)))
            _add_view(state.groups, made, view, stored=True)


def _step_of(run: _Run, state: OptimizerState) -> torch.Tensor | None:
    """Return the step of a run: the inner optimizer's own tensor, or a copy of the number of the group."""
    pending = next((held for _, main, held in state.pending if main is run.main), None)
    held = pending or run.inner.state[run.main]
    step = held.get(STEP)
    if isinstance(step, torch.Tensor):
        if step.shape != ():
            raise SnapshotError(f"{STATE}{STEP}.{run.place.key} must be one number, got shape {list(step.shape)}")
        return step.detach()
    if step is None and STEP not in run.group and not pending:
        return None
    made = torch.tensor(float(run.group.get(STEP, 0) if step is None else step))
    state.steps.append((run, made))
    return made


def _has_own_steps(state: OptimizerState, group: dict[str, Any]) -> bool:
    counted = {id(run.main) for run, _ in state.steps}
    return not any(run.group is group and id(run.main) in counted for run in state.runs)


def _set_steps(state: OptimizerState, group: dict[str, Any], step: Any) -> None:
    """Set the step of all parameters of a group, if the inner optimizer has one for each."""
    for run in state.runs:
        held = run.inner.state.get(run.main) if run.main in run.inner.state else None
        if run.group is group and held and isinstance(held.get(STEP), torch.Tensor):
            held[STEP].fill_(float(step))


def _identifiers() -> tuple[str, ...]:
    module = sys.modules.get("megatron.core.optimizer.optimizer")
    return tuple(getattr(module, "param_group_identifier_keys", _IDENTIFIERS))


def _identify(group: Mapping[str, Any], without: Sequence[str] = ()) -> dict[str, Any]:
    """Return what tells a group apart. NeMo has other names for two of the values."""
    names = [name for name in _identifiers() if name not in without]
    return {name: group.get(name, group.get(f"pre_{name}")) for name in names}


def match_groups(state: OptimizerState, common: Any) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Return each live group with the stored one. Raise RestoreError if there is none, or if several differ.

    Groups agree in all that Megatron tells them apart by; else in all but parallelism of experts, which a group may
    gain or lose; else in the multipliers alone, since a resumed job may have other rates.
    """
    stored = _stored_groups(common)
    found = []
    for each in state.optimizers:
        for group in each.optimizer.param_groups:
            found.append((group, _find_group(group, stored)))
    return found


def _find_group(group: Mapping[str, Any], stored: Sequence[dict[str, Any]]) -> dict[str, Any]:
    rates = [name for name in _identifiers() if name not in _IDENTIFIERS]
    ways: tuple[Sequence[str], ...] = ((), ("is_expert_parallel",), rates, [*rates, "is_expert_parallel"])
    for without in ways:
        fits = [each for each in stored if _identify(each, without) == _identify(group, without)]
        alike = [{n: v for n, v in each.items() if n not in ("params", "is_expert_parallel")} for each in fits]
        if fits and all(each == alike[0] for each in alike):
            return {name: value for name, value in fits[0].items() if name != "is_expert_parallel"}
        if fits:
            raise RestoreError(
                f"{PREFIX}param_groups: several stored groups fit the live group {_identify(group)}: "
                f"{[_identify(each) for each in fits]}",
                [f"{PREFIX}param_groups"],
            )
    raise RestoreError(
        f"{PREFIX}param_groups: no stored group fits the live group {_identify(group)}; the snapshot has "
        f"{[_identify(each) for each in stored]}",
        [f"{PREFIX}param_groups"],
    )


def _stored_groups(common: Any) -> list[dict[str, Any]]:
    """Return the stored groups of all optimizers of a chain."""
    if isinstance(common, list):
        return [group for each in common for group in _stored_groups(each)]
    if not isinstance(common, dict):
        return []
    groups = common.get("param_groups")
    if isinstance(groups, list):
        return [each for each in groups if isinstance(each, dict)]
    return [group for each in common.values() for group in _stored_groups(each)]


def _common_of(optimizer: Any, optimizers: Sequence[Any]) -> Any:
    """Return groups and scalers, in the form of Megatron's own `state_dict()`, which needs a first step."""
    each = [_common_of_one(one) for one in optimizers]
    chained = getattr(optimizer, "chained_optimizers", [optimizer])
    if len(chained) == 1:
        return each[0] if each else {}
    numbers = [number for number, one in enumerate(chained) if not getattr(one, "is_stub_optimizer", False)]
    return dict(zip(numbers, each, strict=True))


def _common_of_one(optimizer: Any) -> dict[str, Any]:
    inner = optimizer.optimizer
    steps = {float(held[STEP]) for held in inner.state.values() if isinstance(held.get(STEP), torch.Tensor)}
    if len(steps) > 1:
        raise SnapshotError(f"{STATE}{STEP}: all parameters must have made the same steps, got {sorted(steps)}")
    groups = []
    for group in inner.param_groups:
        made = {name: value for name, value in group.items() if name != "params"}
        groups.append({**made, STEP: steps.copy().pop() if steps else made.get(STEP, 0.0)})
    scaler = getattr(optimizer, "grad_scaler", None)
    found: dict[str, Any] = {"optimizer": {"param_groups": groups}}
    return {**found, "grad_scaler": scaler.state_dict()} if scaler else found


def _load_scalers(optimizers: Sequence[Any], common: Any) -> None:
    stored = common if isinstance(common, dict) and "optimizer" in common else None
    if stored is None:
        parts = common.values() if isinstance(common, dict) else common or []
        stored = next((each for each in parts if isinstance(each, dict) and "grad_scaler" in each), {})
    for each in optimizers:
        scaler = getattr(each, "grad_scaler", None)
        if scaler and "grad_scaler" in stored:
            scaler.load_state_dict(stored["grad_scaler"])


def _expect_weights(runs: Sequence[_Run], error: type[SnapshotError]) -> None:
    """Raise unless some elements of each run are those of the model's weights, which a changed order would not have.

    A rank's own run of the weights is always as new as its main parameters.
    """
    equal: list[torch.Tensor] = []
    for run in runs:
        size = run.end - run.begin
        some = torch.linspace(0, size - 1, min(PROBED, size), dtype=torch.float64, device="cpu").long()
        some = some.to(run.main.device)
        main = run.main.detach()[some].to(run.parameter.dtype)
        weights = run.parameter.detach().reshape(-1)[run.begin : run.end][some]
        equal.append(((main == weights) | (main.isnan() & weights.isnan())).all())
    agreed = torch.stack(equal).tolist() if equal else []
    differing = [run.place.key for run, fits in zip(runs, agreed, strict=True) if not fits]
    if not differing:
        return
    what = f"{differing[0]}: the main parameters of the distributed optimizer are not those of the model's weights"
    if error is RestoreError:
        raise RestoreError(
            f"{what}: the tensors were restored, and must not be used; the checkpoint is wrong, as fully_reshardable "
            "directories of megatron-core before 0.20 may be, or the order of this version's optimizer is not known",
            differing,
        )
    raise SnapshotError(
        f"{what}: the weights were changed without reload_model_params(), or the order of this version's optimizer is "
        f"not known; MegatronState(optimizer=...) was {KNOWN}"
    )
