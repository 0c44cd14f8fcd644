"""Collecting: the application's state, flattened, and which of its values are known to be replicated."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from msgspec.structs import replace

from snapshot.distributed.group import Ranks
from snapshot.errors import UnsafeObjectError
from snapshot.events import log, warn
from snapshot.io.system import PerProcess
from snapshot.manifest.entries import DictEntry, Extra
from snapshot.manifest.paths import encode_component
from snapshot.plan.names import find_unmatched, matcher
from snapshot.state.flatten import Flattened
from snapshot.state.leaves import Leaf, Prepare
from snapshot.state.model_state import ModelState
from snapshot.state.optimizers import has_param_groups, make_record
from snapshot.state.rng import RNGState
from snapshot.tensors.composite import find_stride_order
from snapshot.text import listed


def collect_state(
    app_state: Mapping[str, Any],
    prepare: Prepare | None,
    exclude: Sequence[str],
    replicated: Sequence[str],
    allow_pickle: str | bool = "warn",
) -> Flattened:
    """Call each `state_dict()` and flatten the result. The RNG state is captured first and restored last."""
    flat = Flattened(prepare, matcher(exclude) if exclude else None)
    rng = {key: value.state_dict() for key, value in app_state.items() if isinstance(value, RNGState)}
    try:
        for key in sorted(app_state):
            state = rng[key] if key in rng else app_state[key].state_dict()
            flat.add(encode_component(key), state)
            _record_optimizer(flat, encode_component(key), app_state[key], state)
    finally:
        for key, state in rng.items():
            app_state[key].load_state_dict(state)
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


_CURE = (
    "replace each by tensors, plain values or a dataclass, store its state_dict(), or leave it out with exclude=[...]"
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


class ReplicationRules:
    """Which paths are replicated across ranks, by the user's globs or by known wrappers."""

    def __init__(self, app_state: Mapping[str, Any], globs: Sequence[str], ranks: Ranks) -> None:
        self._globs: Callable[[str], bool] = matcher(globs) if globs else lambda path: False
        self._inferred: dict[str, bool] = {}
        for key, stateful in app_state.items():
            self._inferred |= _of_ddp(encode_component(key), stateful, ranks)
        self._any = bool(globs or self._inferred)
        self.own = tuple(encode_component(key) for key, stateful in app_state.items() if isinstance(stateful, RNGState))
        """Keys that are never shared: every rank has its own random state."""

    def among(self, paths: Iterable[str]) -> frozenset[str]:
        """Return the paths that count as replicated without comparing their bytes."""
        return frozenset(filter(self.forced, paths)) if self._any else frozenset()

    def private(self, path: str) -> bool:
        """Return True if a path is never shared."""
        return path.partition("/")[0] in self.own

    def said(self, path: str) -> bool:
        """Return True if a glob matches the path."""
        return self._globs(path)

    def forced(self, path: str) -> bool:
        """Return True if the path counts as replicated without comparing its bytes."""
        return path in self._inferred or self._globs(path)

    def leading(self, path: str) -> bool:
        """Return True if the leader's value is saved."""
        return self._inferred.get(path, False)


def _of_ddp(key: str, stateful: Any, ranks: Ranks) -> dict[str, bool]:
    """Return the names that `DistributedDataParallel` keeps equal on all ranks of this group.

    These are the parameters, and the buffers, which it broadcasts from its first rank before each forward pass. So the
    first rank's buffers are saved.
    """
    parallel = sys.modules.get("torch.nn.parallel.distributed")
    named = isinstance(stateful, ModelState)
    model = stateful.model if named else stateful
    if parallel is None or not isinstance(model, torch.nn.Module):
        return {}
    found: dict[str, bool] = {}
    below = f"{key}/model" if named else key
    for prefix, module in model.named_modules():
        if not isinstance(module, parallel.DistributedDataParallel):
            continue
        members = torch.distributed.get_process_group_ranks(module.process_group)
        if tuple(members) != ranks.members:
            continue  # several groups with their own models, or a group without some of the calling ranks
        start = f"{prefix}.module." if prefix else "module."
        if named:  # names belong to the wrapped model
            start = f"{prefix}." if prefix else ""
        ignored = set(module.parameters_to_ignore)
        for name, _ in module.module.named_parameters(remove_duplicate=False):
            if name not in ignored:
                found[f"{below}/{encode_component(start + name)}"] = False
        for name, _ in module.module.named_buffers(remove_duplicate=False):
            if module.broadcast_buffers and name not in ignored:
                found[f"{below}/{encode_component(start + name)}"] = True
    return found


def _record_optimizer(flat: Flattened, key: str, stateful: Any, state: Any) -> None:
    """Record which model's parameters an optimizer's state dict belongs to."""
    if isinstance(stateful, ModelState):
        optimizers, path = stateful.optimizers, f"{key}/optim"
        held = state["optim"] if optimizers else {}
        names = [name for group in held.get("param_groups", ()) for name in group["params"]]
        if "param_groups" not in held:  # flat
            flat_names = (name for name in held if isinstance(name, str) and name.startswith("param_groups."))
            names = list(dict.fromkeys(name.partition(".")[2].rpartition(".")[0] for name in flat_names))
        parameters = [state["model"].get(name) for name in names]
    elif isinstance(stateful, torch.optim.Optimizer) and has_param_groups(stateful, state):
        optimizers, path = [stateful], key
        parameters = [parameter for group in stateful.param_groups for parameter in group["params"]]
    else:
        return
    entry = flat.entries.get(path)
    if optimizers and isinstance(entry, DictEntry):
        flat.entries[path] = replace(entry, optimizer=make_record(optimizers, parameters))
