"""Megatron-core's distributed optimizer as tensors of the model.

Each rank of data parallelism owns runs of flattened parameters: of main parameters, and of what the inner optimizer
keeps for each. A run of a row-major tensor is a few boxes, and the model's sharded state dict says where a parameter
is in the checkpoint. So the boxes follow without a collective, and their memory is the rank's own, without a copy.

Nothing of Megatron is imported here. Versions are told apart by what their objects have.
"""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import torch

from snapshot.errors import RestoreError, SnapshotError
from snapshot.events import log
from snapshot.state.sharded import LocalPiece, Shards
from snapshot.tensors import composite
from snapshot.tensors.geometry import Box, Shape, boxes_of_range, boxes_overlap, intersect, whole_box
from snapshot.text import with_article
from snapshot_megatron.boxes import MegatronBoxes, box_of, is_main, is_of
from snapshot_megatron.optimizer_groups import (
    GROUP_NUMBERS,
    STEP,
    choose_options,
    describe_misfit,
    find_group,
    list_groups,
    load_scalers,
    read_common,
    read_numbers,
)

PREFIX = "optimizer."
"""Beginning of the names of everything that an optimizer adds to a checkpoint."""
STATE = f"{PREFIX}state."
"""Beginning of `optimizer.state.<param, exp_avg, ...>.<key of the model>`, as in Megatron's own directories."""
PARAM = "param"
GROUP = f"{PREFIX}group."
"""Beginning of `optimizer.group.<key of the model>`: for each layer, the numbers of its group in `GROUP_NUMBERS`."""
KNOWN = "written for megatron-core 0.15 to 0.20"
PROBED = 16
"""Elements of each run that are compared with the model's weights."""
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
    """The numbers of the groups of parameters."""
    common: Any
    """Groups and scaler, as Megatron's `state_dict()` has them."""
    optimizers: list[Any]
    runs: list[_Run]
    pending: list[tuple[Any, torch.Tensor, dict[str, torch.Tensor]]]
    """(inner optimizer, main parameter, state) of parameters without a state. A restore puts it in."""
    steps: list[tuple[_Run, torch.Tensor]]
    """The steps of runs, where the inner optimizer has a step for all of a group."""
    numbered: list[tuple[_Run, str, Box]] = field(default_factory=list)
    """The runs, with the name and the box of their numbers."""
    keys: dict[int, set[str]] = field(default_factory=dict)
    """Id of a run's place -> the keys of its weight."""
    chosen: list[tuple[dict[str, Any], dict[str, Any]]] | None = None
    """Live groups with the stored options that they take, once that is known."""
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
    state = OptimizerState({}, {}, read_common(optimizer, optimizers), optimizers, runs, [], [])
    layouts: dict[int, list[_Part]] = {}
    fresh: dict[int, Any] = {}
    numbers: dict[int, torch.Tensor] = {}
    for run in runs:
        if id(run.place) not in layouts:
            layouts[id(run.place)] = _split_parameter(run.place)
            state.keys[id(run.place)] = {part.key for part in layouts[id(run.place)]}
        values = _state_of(run, state, fresh)
        pieces = list(_pieces_of(run, layouts[id(run.place)]))
        for name, held in {PARAM: run.main.detach(), **values}.items():
            for piece in pieces:
                part = piece.part
                key = f"{STATE}{name}.{part.key}"
                if name == PARAM and run.is_shared and restoring:
                    state.weights[key] = part.key
                else:
                    _add_view(state.tensors, key, part, piece.box, piece.view(held), stored=piece.stored)
        _add_steps(state, run, pieces, numbers, restoring=restoring)
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
    by_name = any(name.startswith(f"{STATE}{STEP}.") for name in filled)
    if common is not None:
        for group, stored in match_groups(state, common) if state.chosen is None else state.chosen:
            step = stored.get(STEP)
            group.update({name: value for name, value in stored.items() if name != STEP})
            if step is not None and not by_name:
                _set_steps(state, group, step)
        load_scalers(state.optimizers, common)
    for run, held in state.steps if by_name else ():
        _set_group_step(run.group, held.item())
    if all_filled:
        _expect_weights(state.runs, RestoreError)
    else:
        _follow_weights(state, filled)


def _follow_weights(state: OptimizerState, filled: set[str]) -> None:
    """Give weights that were restored without their main parameters new ones: the next step would undo them otherwise.

    Others keep all bits of their main parameters.
    """
    followed = set()
    for run in state.runs:
        keys = state.keys[id(run.place)]
        if not run.is_shared and keys <= filled and not any(f"{STATE}{PARAM}.{key}" in filled for key in keys):
            with torch.no_grad():
                run.main.copy_(run.parameter.detach().reshape(-1)[run.begin : run.end])
            followed |= keys
    if followed:
        log.info("%d weights were restored without main parameters, which now have their values", len(followed))


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
        raise SnapshotError(
            f"{STATE}{name}.{key} must be a flat float32 tensor of {length} elements, got {shown}; parameters of "
            "several dtypes in one model are not supported"
        )


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


@dataclass(frozen=True, slots=True, eq=False)
class _Piece:
    """A box of a run."""

    part: _Part
    box: Box
    """The box in the checkpoint."""
    begin: int
    end: int
    """The range of the run that has it."""
    sizes: Shape
    """The sizes of that range."""
    slices: tuple[slice, ...] | None
    """The box in it, if that is not all."""
    stored: bool
    """True for one of the equal copies of pipeline and tensor parallelism, and of instances."""

    def view(self, flat: torch.Tensor) -> torch.Tensor:
        """Return the piece of a tensor of the run, with the axes that a parameter lacks."""
        found = flat[self.begin : self.end].view((1,) * self.part.leading + self.sizes)
        return found if self.slices is None else found[self.slices]


def _pieces_of(run: _Run, parts: Sequence[_Part]) -> Iterator[_Piece]:
    """Yield the boxes of a run."""
    stored = {id(part): is_main((*part.replica[:2], run.instance)) for part in parts}
    for begin, local in boxes_of_range(tuple(run.parameter.shape), run.begin, run.end):
        first = begin - run.begin
        for part in parts:
            common = intersect(local, part.local)
            if common is not None:
                count = part.leading
                lead, moved = part.box.offsets[:count], common.relative_to(part.local.offsets)
                moved = moved.moved_by(part.box.offsets[count:])
                box = Box((*lead, *moved.offsets), ((1,) * count) + moved.sizes)
                slices = None if common == local else common.relative_to(local.offsets).slices()
                whole = None if slices is None else (slice(None),) * count + tuple(slices)
                end = first + local.numel
                yield _Piece(part, box, first, end, local.sizes, whole, stored[id(part)])


def _add_view(
    tensors: dict[str, RunBoxes],
    key: str,
    part: _Part,
    box: Box,
    view: torch.Tensor,
    *,
    stored: bool,
    shape: Shape | None = None,
) -> None:
    """Add a view to the tensor of a name, which has the shape of the parameter by default."""
    whole = part.shape if shape is None else shape
    held = tensors.get(key)
    if held is None:
        held = tensors[key] = RunBoxes(key, whole, view.dtype, part.flexible and shape is None)
    elif held.shape != whole:
        raise SnapshotError(f"{key}: all parts must have one shape, got {list(held.shape)} and {list(whole)}")
    held.views.append((box, view, stored))


# Steps and groups


def _add_steps(
    state: OptimizerState,
    run: _Run,
    pieces: Sequence[_Piece],
    numbers: dict[int, torch.Tensor],
    *,
    restoring: bool,
) -> None:
    """Add the step of a run and the numbers of its group, for each layer. The rank with the first element stores them.

    So the values are the same in each split. `numbers` has those of groups by their ids; a restore fills copies.
    """
    steps, count = _step_of(run, state), len(GROUP_NUMBERS)
    seen: set[tuple[str, Shape]] = set()
    for piece in pieces:
        part, offsets = piece.part, piece.box.offsets
        lead = offsets[: part.leading]
        is_first = not any(offsets[part.leading :])
        if not is_first and (part.key, lead) in seen:
            continue
        seen.add((part.key, lead))
        stored, ones, shape = is_first and piece.stored, (1,) * part.leading, part.shape[: part.leading]
        if steps is not None:
            key = f"{STATE}{STEP}.{part.key}"
            _add_view(state.tensors, key, part, Box(lead, ones), steps.view(ones), stored=stored, shape=shape)
        if stored or restoring:
            if id(run.group) not in numbers:
                numbers[id(run.group)] = read_numbers(run.group)
            held = numbers[id(run.group)].clone() if restoring else numbers[id(run.group)]
            key, at = f"{GROUP}{part.key}", Box((*lead, 0), (*ones, count))
            _add_view(state.groups, key, part, at, held.view(at.sizes), stored=stored, shape=(*shape, count))
            state.numbered.append((run, key, at))


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


def _set_steps(state: OptimizerState, group: dict[str, Any], step: Any) -> None:
    """Set the step of all parameters of a group, or that of the group if the inner optimizer has no other."""
    for run in state.runs:
        held = run.inner.state.get(run.main) if run.main in run.inner.state else None
        if run.group is group and held and isinstance(held.get(STEP), torch.Tensor):
            held[STEP].fill_(float(step))
    if any(run.group is group for run, _ in state.steps):
        _set_group_step(group, step)


def _set_group_step(group: dict[str, Any], step: Any) -> None:
    held = group.get(STEP)
    if isinstance(held, torch.Tensor):  # of an optimizer whose step may be in a graph
        held.fill_(step)
    else:
        group[STEP] = int(step)


ReadNumbers = Callable[[Sequence[tuple[str, Box]]], list[torch.Tensor]]
"""Returns the stored numbers of parameters' groups, given by name and box. Empty if the checkpoint has none."""


def match_groups(
    state: OptimizerState, common: Any, read: ReadNumbers = lambda _: []
) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Return each live group with the stored options that it takes.

    Groups without parameters on this rank, which the checkpoint lacks, keep theirs.

    Raises:
        RestoreError: No stored group fits a live one, or several differ.
    """
    stored = list_groups(common)
    found = []
    for group in list_unmatched(state, common):
        places = [(name, box) for run, name, box in state.numbered if run.group is group]
        options = choose_options(group, read(places)) if places else {}
        if options is None:
            raise describe_misfit(group, stored)
        found.append((group, options))
    unmatched = {id(group) for group, _ in found}
    for group in _list_live_groups(state):
        options = None if id(group) in unmatched else find_group(group, stored)
        if options is not None:
            found.append((group, options))
    return found


def list_unmatched(state: OptimizerState, common: Any) -> list[dict[str, Any]]:
    """Return the live groups that no group in a common state fits."""
    stored = list_groups(common)
    return [group for group in _list_live_groups(state) if find_group(group, stored) is None]


def _list_live_groups(state: OptimizerState) -> list[dict[str, Any]]:
    return [group for each in state.optimizers for group in each.optimizer.param_groups]


def _expect_weights(runs: Sequence[_Run], error: type[SnapshotError]) -> None:
    """Raise unless some elements of each run are those of the model's weights, which a changed order would not have.

    A rank's own run of the weights is always as new as its main parameters.
    """
    alike: dict[tuple[torch.dtype, torch.device], list[tuple[_Run, torch.Tensor, torch.Tensor]]] = defaultdict(list)
    chosen: dict[tuple[int, torch.device], torch.Tensor] = {}
    for run in runs:
        size, device = run.end - run.begin, run.main.device
        if (size, device) not in chosen:
            made = torch.linspace(0, size - 1, min(PROBED, size), dtype=torch.float64, device="cpu").long()
            chosen[size, device] = made.to(device)
        some = chosen[size, device]
        weights = run.parameter.detach().reshape(-1)[run.begin : run.end]
        alike[weights.dtype, device].append((run, run.main.detach()[some], weights[some]))
    differing = []
    for (dtype, _), held in alike.items():  # one comparison, and one copy from the device
        main, weight = torch.cat([each[1] for each in held]).to(dtype), torch.cat([each[2] for each in held])
        fits = ((main == weight) | (main.isnan() & weight.isnan())).cpu()
        parts = torch.split(fits, [len(each[1]) for each in held])
        differing += [run.place.key for (run, _, _), part in zip(held, parts, strict=True) if not part.all()]
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
