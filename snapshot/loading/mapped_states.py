"""An optimizer's states under a tensor map: the map of a tensor is also that of what an optimizer keeps of it.

Only states of single elements can be mapped: those with the shape of their tensor, and steps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from snapshot.errors import RestoreError
from snapshot.loading.choose import Receiver
from snapshot.manifest import entries as e
from snapshot.manifest.containers import ListEntry
from snapshot.manifest.paths import encode_component
from snapshot.manifest.rank_view import RankView, rename_view
from snapshot.maps.recipe import RecipePart, RecipeTarget, Spec
from snapshot.maps.states import State
from snapshot.maps.tensor_map import MapPlan, TensorMap
from snapshot.state.model_state import ModelState
from snapshot.tensors.geometry import Grid
from snapshot.text import listed

MODEL, OPTIMIZER = "model", "optim"
"""Keys of mapped tensors and of their states: those of a `ModelState`."""
STEP = "step"
_Planned = tuple[dict[str, str], dict[str, RecipeTarget]]


def plan_states(
    own: Mapping[str, e.AnyTensor], states: Mapping[str, State], plan: MapPlan, tensor_map: TensorMap
) -> dict[str, RecipeTarget]:
    """Return the states that a map makes, by their paths. The sources of their parts are the names of states.

    Args:
        own: All tensors of a level, by name.
        states: Those that are states.
        plan: What the map makes of the other ones.
        tensor_map: The map.

    Raises:
        RestoreError: States do not fit their tensors, or the rules.
    """
    kinds: dict[tuple[str, str], dict[str, str]] = {}
    for name, state in states.items():
        if state.rule.path is not None:
            kinds.setdefault((state.rule.path, state.kind), {})[state.of] = name
    made: dict[str, RecipeTarget] = {}
    wrong: list[str] = []
    for (path, kind), names in kinds.items():
        whole: dict[str, Spec] = {}
        steps: dict[str, str] = {}
        for of, name in names.items():
            shape, tensor = tuple(own[name].shape), own.get(of)
            if tensor is None or tuple(tensor.shape) == shape:
                whole[of] = Spec(own[name].dtype, shape)
            elif kind == STEP and tuple(tensor.shape)[: len(shape)] == shape:
                steps[of] = name
            else:
                wrong.append(f"{name}: a state must have the shape of {of}, {list(tensor.shape)}, got {list(shape)}")
        found = _pick_steps(own, plan, steps, wrong)
        if whole:
            planned = tensor_map.plan(whole)
            targets = {**planned.targets, **{name: planned.targets[owner] for name, owner in planned.ties.items()}}
            found |= {name: _name_sources(target, names, own) for name, target in targets.items()}
        for name, target in found.items():
            filled = {"{name}": encode_component(name), "{state}": encode_component(kind)}
            made["/".join(filled.get(each, each) for each in path.split("/"))] = target
    if wrong:
        raise RestoreError(f"the tensor map does not fit the states of the optimizer:{listed(wrong, 20)}", wrong)
    return made


def _name_sources(target: RecipeTarget, names: Mapping[str, str], own: Mapping[str, e.AnyTensor]) -> RecipeTarget:
    """Return a target of states, which are not cast."""
    parts = tuple(RecipePart(names[part.source], part.grid) for part in target.parts)
    return RecipeTarget(own[parts[0].source].dtype if parts else target.dtype, target.shape, parts)


def _pick_steps(
    own: Mapping[str, e.AnyTensor], plan: MapPlan, names: Mapping[str, str], wrong: list[str]
) -> dict[str, RecipeTarget]:
    """Return the step of each new tensor, out of those of the layers or experts of an old one."""
    made = {}
    for target, recipe in plan.targets.items():
        places = set()
        for part in recipe.parts:
            name = names.get(part.source)
            if name is not None:
                count, cover = len(own[name].shape), part.grid.cover("source")
                places.add((name, cover.offsets[:count] if set(cover.sizes[:count]) <= {1} else None))
        if len(places) > 1 or any(at is None for _, at in places):
            wrong.append(f"{target}: is made of tensors with steps of their own")
        for name, at in places if len(places) == 1 else ():
            if at is not None:
                made[target] = RecipeTarget(own[name].dtype, (), (RecipePart(name, Grid(at, (), ())),))
    return made | {name: made[owner] for name, owner in plan.ties.items() if owner in made}


def separate_keys(view: RankView, base: str) -> RankView:
    """Return a view in which what is below a key, such as `model` and `optim`, has keys of its own."""
    optim, prefix = f"{base}/{OPTIMIZER}".lstrip("/"), f"{base}/"
    for path in [path for path in view.elsewhere if path.startswith(f"{optim}/")]:
        view.entries[path] = view.elsewhere.pop(path)  # a new optimizer would not ask for it
    view.entries[f"{optim}/param_groups"] = ListEntry(0)  # the live options stay
    if not base or "/" in base:
        return rename_view(view, str)
    known = dict.fromkeys((*view.entries, *view.elsewhere))
    moved = {path[len(prefix) :].partition("/")[0] for path in known if path.startswith(prefix)}
    taken = sorted(moved & ({path.partition("/")[0] for path in known} - {base}))
    if taken:
        raise RestoreError(f"{prefix}{taken[0]} would become the key {taken[0]}, which exists already", taken)
    del view.entries[base]
    return rename_view(view, lambda path: path.removeprefix(prefix))


def below_model_state(view: RankView, receivers: Sequence[Receiver]) -> RankView:
    """Put the keys `model` and `optim` below that of the application's only `ModelState`, if that is missing."""
    keys = {path.partition("/")[0] for path in (*view.entries, *view.elsewhere)}
    owners = [each.key for each in receivers if isinstance(each.stateful, ModelState)]
    taken = {each.key for each in receivers} & {MODEL, OPTIMIZER}
    if len(owners) != 1 or owners[0] in keys or taken or not {MODEL, OPTIMIZER} <= keys:
        return view
    return rename_view(
        view, lambda path: f"{owners[0]}/{path}" if path.partition("/")[0] in (MODEL, OPTIMIZER) else path
    )
