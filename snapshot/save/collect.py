"""Collecting: each `state_dict()` is called, and its result flattened."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from operator import attrgetter
from typing import Any

import torch
from msgspec.structs import replace

from snapshot.errors import UnsafeObjectError
from snapshot.events import log, warn
from snapshot.io.system import PerProcess
from snapshot.manifest.containers import DictEntry
from snapshot.manifest.entries import Extra
from snapshot.manifest.paths import encode_component, encode_key
from snapshot.plan.names import find_unmatched, matcher
from snapshot.state.flatten import Flattened
from snapshot.state.foreign_parts import read_state
from snapshot.state.leaves import Leaf, Prepare
from snapshot.state.model_state import ModuleMap
from snapshot.state.optimizers import has_param_groups, make_record
from snapshot.state.rng import RNGState
from snapshot.tensors.composite import find_stride_order
from snapshot.text import listed


def collect_state(
    statefuls: Sequence[ModuleMap],
    prepare: Prepare | None,
    exclude: Sequence[str],
    replicated: Sequence[str],
    allow_pickle: str | bool = "warn",
) -> Flattened:
    """Call each `state_dict()` and flatten the result. The RNG state is captured first and restored last."""
    flat = Flattened(
        prepare, matcher(exclude) if exclude else None, fits_tree=None if exclude else partial(_fits_tree, replicated)
    )
    rng = {each.key: each.stateful.state_dict() for each in statefuls if isinstance(each.stateful, RNGState)}
    try:
        for each in sorted(statefuls, key=attrgetter("key")):
            state = rng[each.key] if each.key in rng else read_state(each)
            flat.add(each.path, state)
            _record_optimizer(flat, each, state)
    finally:
        for each in statefuls:
            if each.key in rng:
                each.stateful.load_state_dict(rng[each.key])
    for glob in find_unmatched(replicated, flat.entries) if replicated else ():
        warn(f"replicated: the glob {glob!r} matches nothing in the app state")
    for glob in find_unmatched(exclude, [*flat.entries, *flat.excluded]) if exclude else ():
        warn(f"exclude: the glob {glob!r} matches nothing in the app state")
    report_pickles(flat.pickled, flat.lossy, allow_pickle)
    apart = find_overlaps(flat.leaves)
    for leaf, owner in apart:
        leaf.extra = replace(leaf.extra or Extra(), shares=owner.path)
    lines = [f"{leaf.path} shares memory with {owner.path}" for leaf, owner in apart]
    logged = _logged.get()
    if lines and (text := listed(lines)) not in logged:
        logged.add(text)
        log.warning("stored separately; if they are restored as new tensors, they do not share memory:%s", text)
    return flat


def _fits_tree(replicated: Sequence[str], path: str, value: Any) -> bool:
    """Return True if a tree of plain values may be one object: no glob matches only values in it."""
    if not replicated:
        return True
    below, matches = path, matcher(replicated)
    while type(value) in (list, dict) and value:
        name, value = next(iter(value.items() if type(value) is dict else enumerate(value)))
        text = encode_key(name)
        below += f"/{text if text is None else encode_component(str(text))}"
    return matches(path) == matches(below)


_CURE = (
    "replace each by tensors, plain values or a dataclass, store its state_dict(), or leave it out with "
    "TakeOptions(exclude=[...])"
)


def report_pickles(pickled: Sequence[str], lossy: Sequence[str], allow_pickle: str | bool = "warn") -> None:
    """Warn about values that were pickled, or refuse them. Warn about values that lost attributes."""
    if pickled and allow_pickle == "error":
        raise UnsafeObjectError(
            f"only a pickle can hold these objects, and nothing was written; {_CURE}:{listed(pickled)}"
        )
    if pickled and allow_pickle == "warn":
        warn(
            "stored as pickles, since no other format can hold them; reading them may need allow_pickle=True; "
            f"{_CURE}:{listed(pickled)}"
        )
    if lossy:
        warn(f"stored without Python attributes; only data and class are restored:{listed(lossy)}")


_logged: PerProcess[set[str]] = PerProcess(set)
"""Messages about shared memory that were already logged: a run logs each one only once."""


def find_overlaps(leaves: Sequence[Leaf]) -> list[tuple[Leaf, Leaf]]:
    """Return pairs of tensors: one that begins within the memory of another, and the other one, which has no gaps."""
    found: list[tuple[Leaf, Leaf]] = []
    order = sorted(range(len(leaves)), key=[leaf.address for leaf in leaves].__getitem__)
    reach = 0
    owner: Leaf | None = None
    for leaf in map(leaves.__getitem__, order):
        if owner is not None and leaf.address < reach and leaf.tensor.device == owner.tensor.device:
            found.append((leaf, owner))
        if leaf.address and leaf.address + leaf.nbytes > reach and (leaf.plain or _is_dense(leaf.tensor)):
            reach, owner = leaf.address + leaf.nbytes, leaf
    return found


def _is_dense(tensor: torch.Tensor) -> bool:
    return find_stride_order(tensor) is not None


def _record_optimizer(flat: Flattened, of: ModuleMap, state: Any) -> None:
    """Record which model's parameters an optimizer's state dict belongs to."""
    path = of.path
    if of.joined and of.optimizers:
        path, held = f"{of.path}/optim", state["optim"]
        names = [name for group in held.get("param_groups", ()) for name in group["params"]]
        if "param_groups" not in held:  # flat
            flat_names = (name for name in held if isinstance(name, str) and name.startswith("param_groups."))
            names = list(dict.fromkeys(name.partition(".")[2].rpartition(".")[0] for name in flat_names))
        parameters = [state["model"].get(name) for name in names]
    elif isinstance(of.stateful, torch.optim.Optimizer) and has_param_groups(of.stateful, state):
        parameters = [parameter for group in of.stateful.param_groups for parameter in group["params"]]
    else:
        return
    entry = flat.entries.get(path)
    if isinstance(entry, DictEntry):
        flat.entries[path] = replace(entry, optimizer=make_record(of.optimizers, parameters))
