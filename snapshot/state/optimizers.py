"""Optimizers: the comparison of saved and live ones, and their restore."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from snapshot.errors import RestoreError
from snapshot.manifest.containers import DictEntry, ListEntry, OptimizerRecord, SubclassEntry
from snapshot.manifest.paths import encode_component
from snapshot.manifest.values import Entry, Scalar
from snapshot.saved import class_name
from snapshot.state.flatten import MISSING
from snapshot.state.sharded import shape_of_whole
from snapshot.state.stateful import RestoreAdapter
from snapshot.tensors.memory import BY_NAME, NAMES, address_of_tensor

# Comparison of saved and live optimizers: the state of each parameter, and the options.
#
# The names come from a table, since a fresh optimizer has no state yet, and a step would change the model.

_LIKE_PARAMETER = frozenset(
    {"acc_delta", "ax", "exp_avg", "exp_avg_sq", "exp_inf", "grad_avg", "max_exp_avg_sq", "momentum_buffer", "prev"}
    | {"square_avg", "step_size", "sum", "variance"}
)
"""State names of torch's optimizers with the parameter's shape."""
_LBFGS = "al d t old_dirs old_stps ro H_diag prev_flat_grad prev_loss"
_STATE: dict[str, tuple[frozenset[str], frozenset[str]]] = {
    name: (frozenset(always.split()), frozenset(sometimes.split()))
    for name, always, sometimes in (
        ("Adadelta", "step square_avg acc_delta", ""),
        ("Adafactor", "step", "row_var col_var variance"),
        ("Adagrad", "step sum", ""),
        ("Adam", "step exp_avg exp_avg_sq", "max_exp_avg_sq"),
        ("AdamW", "step exp_avg exp_avg_sq", "max_exp_avg_sq"),
        ("Adamax", "step exp_avg exp_inf", ""),
        ("ASGD", "step eta mu ax", ""),
        ("LBFGS", "func_evals n_iter", _LBFGS),
        ("Muon", "", "momentum_buffer"),
        ("NAdam", "step mu_product exp_avg exp_avg_sq", ""),
        ("RAdam", "step exp_avg exp_avg_sq", ""),
        ("RMSprop", "step square_avg", "momentum_buffer grad_avg"),
        ("Rprop", "step prev step_size", ""),
        ("SGD", "", "momentum_buffer"),
        ("SparseAdam", "step exp_avg exp_avg_sq", ""),
    )
}
"""For torch's optimizers: the names in each parameter's state, and those that depend on options."""
_ANY_OPTIMIZER = frozenset(
    {"params", "param_names", "lr", "weight_decay", "foreach", "fused", "capturable", "differentiable", "maximize"}
    | {"decoupled_weight_decay", "initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum"}
)
"""Options that do not identify the class: implementation choices, and those of learning rate schedulers."""


def _list_names(entry: Entry | None) -> list[str]:
    """Return the names in a dict; none for another entry."""
    return entry.components() if entry is not None and entry.is_keyed else []


@dataclass(frozen=True)
class SavedOptimizer:
    """An optimizer in a snapshot, without its tensors."""

    classes: tuple[str, ...]
    """Empty for a snapshot that does not record them."""
    state: Mapping[str, frozenset[str]]
    """Parameter -> the names in its state."""
    options: tuple[frozenset[str], ...]
    """The options of each parameter group."""
    groups: tuple[tuple[str, ...], ...]
    """The parameters of each group, by their names in `state`."""
    dtypes: Mapping[str, str]
    """The parameters' dtypes; empty for a snapshot that does not record them."""

    @staticmethod
    def from_entries(path: str, entries: Mapping[str, Any]) -> SavedOptimizer | None:
        """Return the optimizer below a path; None if the entries are not of an optimizer."""
        top, listed = entries.get(path), entries.get(f"{path}/param_groups")
        if not isinstance(top, DictEntry) or not isinstance(listed, ListEntry):
            return None
        options, groups = [], []
        for number in range(listed.length):
            base = f"{path}/param_groups/{number}"
            group, held = entries.get(base), entries.get(f"{base}/params")
            options.append(frozenset(_list_names(group)))
            indices = [entries.get(f"{base}/params/{at}") for at in range(getattr(held, "length", 0))]
            groups.append(
                tuple(encode_component(str(each.value())) if isinstance(each, Scalar) else "" for each in indices)
            )
        states = entries.get(f"{path}/state")
        found: dict[str, frozenset[str]] = {}
        alike: dict[str, frozenset[str]] = {}
        for name in _list_names(states):
            each = entries.get(f"{path}/state/{name}")
            if each is not None and each.is_keyed:
                text = repr(each.keys)
                if text not in alike:
                    alike[text] = frozenset(each.components())
                found[name] = alike[text]
        classes, dtypes = (top.optimizer.classes, top.optimizer.dtypes) if top.optimizer else ((), ())
        params = [name for group in groups for name in group]
        dtypes = dtypes * len(params) if len(dtypes) == 1 else dtypes
        known = dict(zip(params, dtypes, strict=True)) if len(dtypes) == len(params) else {}
        return SavedOptimizer(classes, found, tuple(options), tuple(groups), known)


def make_record(optimizers: Sequence[torch.optim.Optimizer], parameters: Iterable[Any]) -> OptimizerRecord:
    """Return the record of optimizers with these parameters."""
    dtypes = [NAMES.get(each.dtype, "") if isinstance(each, torch.Tensor) else "" for each in parameters]
    return OptimizerRecord(_list_class_names(optimizers), tuple(dtypes[:1] if len(set(dtypes)) == 1 else dtypes))


def _list_class_names(optimizers: Iterable[torch.optim.Optimizer]) -> tuple[str, ...]:
    return tuple(class_name(type(each)) for each in optimizers)


Owners = Mapping[str, torch.optim.Optimizer]
"""Parameter -> the optimizer that it belongs to."""


def describe_mismatch(saved: SavedOptimizer, optimizers: Sequence[torch.optim.Optimizer], owners: Owners) -> str | None:
    """Return the reason why the saved state does not fit these optimizers; None if it fits.

    Each optimizer is compared for its own parameters.
    """
    same = saved.classes == _list_class_names(optimizers)
    if same and len(optimizers) == 1:
        return None
    by = f"saved by {_shorten_classes(saved.classes)} with" if saved.classes else "saved with"
    known = {(id(owners[name]), kept): owners[name] for name, kept in saved.state.items() if kept and name in owners}
    for (_, kept), owner in known.items():
        always, sometimes = _find_state_names(owner) or _find_seen_names(
            owner, kept if same or not saved.classes else frozenset()
        )
        possible = always | sometimes
        if possible and not always <= kept <= possible:
            return f"{by} {_join_names(kept)}; {type(owner).__name__} has {_join_names(possible)}"
    met: dict[tuple[int, frozenset[str]], torch.optim.Optimizer] = {}
    for options, params in zip(saved.options, saved.groups, strict=True):
        met |= {(id(owners[name]), options): owners[name] for name in params if name in owners}
    for (_, options), owner in met.items():
        defaults = frozenset(owner.defaults)
        held = frozenset(name for group in owner.param_groups for name in group)
        theirs, ours = options - defaults - held - _ANY_OPTIMIZER, defaults - options - _ANY_OPTIMIZER
        if (theirs or ours) if saved.classes and not same else (theirs and ours):
            return (
                f"{by} the options {_join_names(options - _ANY_OPTIMIZER) or '(none)'}; "
                f"{type(owner).__name__} has {_join_names(defaults - _ANY_OPTIMIZER) or '(none)'}"
            )
    return None


def describe_class_change(saved: SavedOptimizer, optimizers: Sequence[torch.optim.Optimizer]) -> str | None:
    """Return a text for optimizers of another class than the saved ones; None if the classes are equal."""
    if not saved.classes or saved.classes == _list_class_names(optimizers):
        return None
    here = ", ".join(type(each).__name__ for each in optimizers)
    known = not saved.state or all(_find_state_names(each) or each.state for each in optimizers)
    what = (
        "the names of state and options are the same"
        if known
        else ("the names of the options are the same; which names its state has is not known before its first step")
    )
    return f"saved by {_shorten_classes(saved.classes)}, restored into {here}: {what}"


def describe_group_change(saved: SavedOptimizer, live: Sequence[Sequence[str]]) -> str | None:
    """Return a text if shared parameters are in other groups; None if they are not."""
    common = {name for group in live for name in group}.intersection(*[[n for g in saved.groups for n in g]])
    there, here = ({frozenset(group) & common for group in groups} - {frozenset()} for groups in (saved.groups, live))
    if there == here:
        return None
    sizes = [[len(group) for group in groups] for groups in (saved.groups, live)]
    return f"the parameters are in other groups: the snapshot has groups of {sizes[0]}, the application of {sizes[1]}"


def knows_shapes(optimizers: Sequence[torch.optim.Optimizer]) -> bool:
    """Return True if the shapes of all that these optimizers keep are known."""
    return all(_find_state_names(each) is not None for each in optimizers)


def find_expected_shape(name: str, shape: torch.Size) -> torch.Size | None:
    """Return the shape of a state tensor in torch's own optimizers; None if it is unknown."""
    if name in _LIKE_PARAMETER:
        return shape
    if name == "row_var" and shape:
        return torch.Size((*shape[:-1], 1))
    if name == "col_var" and len(shape) > 1:
        return torch.Size((*shape[:-2], 1, shape[-1]))
    return None


def _find_seen_names(optimizer: torch.optim.Optimizer, kept: frozenset[str]) -> tuple[frozenset[str], frozenset[str]]:
    """Return the names that an optimizer of another library has stored so far; `kept` if it has none."""
    held = frozenset(name for state in optimizer.state.values() if isinstance(state, dict) for name in state)
    return (kept, kept) if kept else (held, held)


def _find_state_names(optimizer: torch.optim.Optimizer) -> tuple[frozenset[str], frozenset[str]] | None:
    """Return the state names of each parameter, for an optimizer with torch's own `step`."""
    step = type(optimizer).step
    if not step.__module__.startswith("torch.optim."):
        return None
    return _STATE.get(step.__qualname__.partition(".")[0])


def _shorten_classes(classes: Iterable[str]) -> str:
    return ", ".join(each.rpartition(".")[2] for each in classes)


def _join_names(names: Iterable[str]) -> str:
    return ", ".join(sorted(names))


# Optimizers as statefuls: their parameters receive the saved state in its saved dtypes.
#
# If a parameter's dtype has changed, its state is cast as torch's own `load_state_dict` casts it. An optimizer
# without state is restored in the same way.


class StateOfParameters(RestoreAdapter):
    """A stateful that holds the state of an optimizer, parameter by parameter."""

    exact = True
    optimizer_at = ""
    """The path of the optimizer's state dict below the key."""

    def __init__(self, key: str, stateful: Any, state: Any = MISSING) -> None:
        super().__init__(key, stateful, state)
        self.base = f"{key}{self.optimizer_at}"
        """The path of the optimizer's state dict."""
        self._states = f"{self.base}/state/"
        self._cast: dict[str, torch.dtype] = {}
        """Parameters whose state is cast -> the new dtype."""
        self._saved: SavedOptimizer | None = None
        self._tensors: list[tuple[str, Any, str, str]] = []
        """Saved tensors of the state: path, entry, parameter and state name."""
        self._wrapped: tuple[str, ...] = ()
        """The paths of wrapped tensors' inner tensors."""
        self.untouched: set[str] = set()
        """Parameters whose state remains unchanged, since their shapes differ."""
        self.parameters: dict[str, Any] = {}
        """The live parameters, by their names in `state`."""
        self.owners: dict[str, torch.optim.Optimizer] = {}
        """The optimizers that they belong to."""
        self.groups: list[list[str]] = []
        """Their names, group by group."""
        self.filled: set[int] = set()
        """Addresses of options that the restore has filled: all optimizers of a restore have the same set."""

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        return [self.stateful]

    def describe_mismatch(self, entries: Mapping[str, Any]) -> str | None:
        """Return the reason why the saved state does not fit this optimizer; None if it fits."""
        self._saved = SavedOptimizer.from_entries(self.base, entries)
        self.untouched.clear()
        depth = self._states.count("/")
        self._tensors = []
        self._wrapped = tuple(f"{path}/" for path, entry in entries.items() if isinstance(entry, SubclassEntry))
        for path, entry in entries.items():
            if self._wrapped and path.startswith(self._wrapped):
                continue  # inner tensors have shapes and dtypes of their own
            if entry.is_tensor and path.startswith(self._states):
                parts = path.split("/", depth + 2)
                if len(parts) > depth + 1:
                    self._tensors.append((path, entry, parts[depth], parts[depth + 1]))
        why = describe_mismatch(self._saved, self.optimizers, self.owners) if self._saved is not None else None
        return f"{self.base}: {why}" if why else None

    def drop_optimizer(self, entries: dict[str, Any]) -> bool:
        """Exclude the optimizer from the restore; return True if nothing else is left."""
        return True

    def make_notes(self) -> Iterable[tuple[str, str, str]]:
        """Yield lines for the report: another class, and options that the snapshot lacks."""
        saved = self._saved
        if saved is None or not self.optimizers:
            return
        change = describe_class_change(saved, self.optimizers)
        if change:
            yield "changed", self.base, change
        groups = [group for optimizer in self.optimizers for group in optimizer.param_groups]
        live = {name: group for names, group in zip(self.groups, groups, strict=False) for name in names}
        for number, (options, params) in enumerate(zip(saved.options, saved.groups, strict=True)):
            for name in next((live[each] for each in params if each in live), {}):
                if name not in ("params", "param_names") and encode_component(str(name)) not in options:
                    yield (
                        "kept",
                        f"{self.base}/param_groups/{number}/{encode_component(str(name))}",
                        "the snapshot lacks it",
                    )

    def choose_dtypes(
        self, cast: str, allowed: Callable[[torch.dtype, torch.dtype], bool], beside: Callable[[Any], bool]
    ) -> list[str]:
        """Find the parameters with a changed dtype; return the changes that are not allowed.

        `beside` returns True for a parameter that is restored itself: only then does its state follow its dtype.
        """
        self._cast = {}
        refused: dict[str, int] = {}
        saved = self._saved
        for name in [name for group in saved.groups for name in group] if saved else ():
            parameter = self.parameters.get(name)
            if not isinstance(parameter, torch.Tensor) or not parameter.is_floating_point():
                continue
            recorded = saved.dtypes.get(name, "") if saved else ""
            was = BY_NAME.get(recorded)
            if was is parameter.dtype or (was is None and cast == "error") or not beside(parameter):
                continue
            if was is None or allowed(was, parameter.dtype):
                self._cast[name] = parameter.dtype
            else:
                text = f"the snapshot has parameters of {recorded}, the application of {NAMES.get(parameter.dtype)}"
                refused[text] = refused.get(text, 0) + 1
        hint = "; allow it with RestoreOptions(cast='same_kind'), or 'any'" if cast == "error" else ""
        return [f"{self.base}: {text} ({count} of them){hint}" for text, count in refused.items()]

    def _find_in_state(self, path: str) -> tuple[str, str] | None:
        """Return the parameter and the state name that a path in `state` belongs to."""
        if not path.startswith(self._states):
            return None
        name, slash, rest = path[len(self._states) :].partition("/")
        return (name, rest.partition("/")[0]) if slash else None

    def choose_state_dtype(self, path: str, entry: Any) -> torch.dtype | None:
        """Return the dtype to restore a saved tensor in; None if it is not optimizer state."""
        found = self._find_in_state(path)
        saved = BY_NAME.get(entry.dtype)
        if found is None or saved is None or (self._wrapped and path.startswith(self._wrapped)):
            return None
        name, what = found
        return self._cast[name] if name in self._cast and what != "step" and saved.is_floating_point else saved

    def find_places(self, entries: Mapping[str, Any], skipped: set[str]) -> dict[str, Any]:
        """Return the live leaves that can be filled in place; other state gets new tensors."""
        gone = []
        for path, entry, name, _ in self._tensors:
            held = self.live.get(path, MISSING)
            if held is MISSING or path in skipped:
                continue
            dtype = BY_NAME.get(entry.dtype) if name not in self._cast else self.choose_state_dtype(path, entry)
            if not (isinstance(held, torch.Tensor) and held.dtype is dtype and shape_of_whole(held) == entry.shape):
                gone.append(path)
        for path, held in self.live.items():
            if (
                isinstance(held, torch.Tensor)
                and path.startswith(self._states)
                and path in entries
                and entries[path].is_value
            ):
                gone.append(path)
        away = set(gone)
        return {path: held for path, held in self.live.items() if path not in away} if away else self.live

    def find_other_shapes(self, entries: Mapping[str, Any], unfit: set[int]) -> dict[str, str]:
        """Return the parameters whose saved state has another shape, and the difference.

        `unfit` holds the addresses of parameters that were left unchanged.
        """
        found: dict[str, str] = {}
        known = knows_shapes(self.optimizers)
        for path, entry, name, what in self._tensors:
            parameter = self.parameters.get(name)
            shape = shape_of_whole(parameter) if isinstance(parameter, torch.Tensor) else entry.shape
            if shape == entry.shape or name in found:
                continue
            wanted: Sequence[int] | None = find_expected_shape(what, torch.Size(shape)) if known else None
            if wanted is None:
                held = self.live.get(path)
                wanted = shape_of_whole(held) if isinstance(held, torch.Tensor) else entry.shape
            if tuple(wanted) != tuple(entry.shape):
                found[name] = f"the snapshot has {what} of {list(entry.shape)}, the application {list(wanted)}"
        for name in self.parameters if unfit else ():
            if address_of_tensor(self.parameters[name]) in unfit and f"{self._states}{name}" in entries:
                found.setdefault(name, "its parameter has another shape")
        return found

    def drop_state(self, name: str, entries: dict[str, Any]) -> str:
        """Leave the state of a parameter unchanged; return its path."""
        path = f"{self._states}{name}"
        self.untouched.add(name)
        self._tensors = [each for each in self._tensors if each[2] != name]
        for below in [each for each in entries if each == path or each.startswith(f"{path}/")]:
            del entries[below]
        states = entries[self._states[:-1]]
        entries[self._states[:-1]] = states.without_children(each == name for each in states.components())
        return path

    def find_like(self, path: str, shape: tuple[int, ...]) -> Any | None:
        found = self._find_in_state(path)
        parameter = self.parameters.get(found[0]) if found else None
        return parameter if parameter is not None and shape_of_whole(parameter) == shape and shape else None

    def choose_device(self, path: str, shape: tuple[int, ...]) -> torch.device | str:
        parameter = self.find_like(path, shape)
        return "cpu" if parameter is None else parameter.device


def restore_dtypes(cast: Any, saved: Any) -> Any:
    """Return an optimizer's state in the saved dtypes, on the devices that torch has chosen."""
    if isinstance(saved, torch.Tensor):
        if not isinstance(cast, torch.Tensor):
            return saved
        return cast if cast.dtype == saved.dtype else saved.to(cast.device)
    if isinstance(saved, dict) and isinstance(cast, dict):
        return type(cast)((key, restore_dtypes(cast.get(key), value)) for key, value in saved.items())
    if isinstance(saved, (list, tuple)) and isinstance(cast, (list, tuple)) and len(saved) == len(cast):
        return type(saved)(map(restore_dtypes, cast, saved))
    return cast


def add_live_options(saved: Any, live: Mapping[str, Any]) -> Any:
    """Return a saved parameter group, with the options that only the live one has."""
    if not isinstance(saved, dict):
        return saved
    return {**saved, **{name: value for name, value in live.items() if name not in saved and name != "param_names"}}


@contextmanager
def keep_option_tensors(optimizers: Sequence[torch.optim.Optimizer], filled: set[int]) -> Iterator[None]:
    """Let options that are tensors of an accelerator, such as a learning rate, keep their memory during a load.

    torch replaces them by copies of what was loaded. A captured CUDA graph reads their old memory, and a tensor of
    another device changes the arithmetic of the step. If no graph may contain the step, only the device is kept.

    `filled`: addresses of options that the restore has filled. Options that shared memory may have separate values now.
    """
    groups = [group for each in optimizers for group in each.param_groups]
    filled |= {address_of_tensor(each) for group in groups for each in group["params"]}
    before = [[dict(group) for group in each.param_groups] for each in optimizers]
    yield
    for optimizer, live_groups in zip(optimizers, before, strict=True):
        for live, group in zip(live_groups, optimizer.param_groups, strict=False):
            kept = filled if live.get("capturable", True) else None
            for name, value in group.items():
                if name not in ("params", "param_names") and name in live:
                    group[name] = _fill_option(live[name], value, kept)


def _fill_option(live: Any, value: Any, filled: set[int] | None) -> Any:
    """Return a loaded option, in the live tensors if possible; without `filled`, only on their devices."""
    if type(live) in (list, tuple) and type(live) is type(value) and len(live) == len(value):
        return type(value)(_fill_option(was, each, filled) for was, each in zip(live, value, strict=True))
    if not (isinstance(live, torch.Tensor) and isinstance(value, torch.Tensor)):
        return value
    value = value.to(live.device)
    alike = live.shape == value.shape and live.dtype == value.dtype and live.is_contiguous()
    if filled is None or live.is_cpu or not alike or live.is_inference():
        return value
    address = address_of_tensor(live)
    if address in filled:
        return live if torch.equal(live, value) else value
    filled.add(address)
    with torch.no_grad():
        return live.copy_(value)


def has_param_groups(optimizer: Any, state: Any) -> bool:
    """Return True if an optimizer's state is in the form of torch's optimizers.

    An optimizer around another one may keep its state in another form. It is restored like any other stateful.
    """
    return isinstance(state, Mapping) and "param_groups" in state and hasattr(optimizer, "param_groups")


class OptimizerAdapter(StateOfParameters):
    """One of torch's optimizers."""

    def __init__(self, key: str, stateful: torch.optim.Optimizer, state: Any = MISSING) -> None:
        super().__init__(key, stateful, state)
        parameters = [parameter for group in stateful.param_groups for parameter in group["params"]]
        numbers = [list(group["params"]) for group in self.state.get("param_groups", ())]
        self.groups = [list(map(str, group)) for group in numbers]
        indices = [index for group in numbers for index in group]
        self.needs = frozenset({f"{key}/param_groups"})
        self.parameters = dict(zip(map(str, indices), parameters, strict=False))
        self.owners = dict.fromkeys(self.parameters, stateful)
        self._numbers = {str(index): index for index in indices}
        # A fresh optimizer makes its state of its parameters' class; no path of an entry has an empty component.
        self.compounds |= {
            f"{key}//{name}": each for name, each in self.parameters.items() if is_traceable_wrapper_subclass(each)
        }
        groups = f"{key}/param_groups/"  # torch copies these, so they are not filled in place
        self.live = {path: value for path, value in self.live.items() if not path.startswith(groups)}

    def find_mismatches(self, entries: Mapping[str, Any]) -> list[str]:
        """Return differences between parameter groups: torch would detect them only after tensors were written."""
        groups = entries.get(f"{self.key}/param_groups")
        if not isinstance(groups, ListEntry):
            return [f"{self.key}: the snapshot holds no optimizer's parameter groups under this key"]
        here = isinstance(self.state.get("state"), dict) and f"{self.key}/state" not in self.live
        found = entries.get(f"{self.key}/state")  # DCP drops what is empty, as a fresh optimizer's state is
        if here and not isinstance(found, DictEntry) and (found is not None or self.state["state"]):
            return [f"{self.key}: the snapshot holds no optimizer's state under this key"]
        have = [len(group["params"]) for group in self.stateful.param_groups]
        saved = []
        for i in range(groups.length):
            params = entries.get(f"{self.key}/param_groups/{i}/params")
            saved.append(params.length if isinstance(params, ListEntry) else -1)
        if have == saved:
            return []
        return [f"{self.key}/param_groups: the snapshot has groups of {saved} parameters, and the optimizer of {have}"]

    def load_state(self, state: Any, strict: bool) -> list[str]:
        """Load the state; tensors that torch casts to their parameter's dtype get their chosen dtype back."""
        states = state.get("state")
        numbered: dict[Any, Any] = {}
        if isinstance(states, dict):  # DCP makes texts of the numbers, and torch would take those for no parameter's
            numbered = {self._numbers.get(key, key) if type(key) is str else key: each for key, each in states.items()}
        held = self.state.get("state")
        for name in self.untouched if isinstance(held, dict) else ():
            if self._numbers[name] in held:
                numbered[self._numbers[name]] = held[self._numbers[name]]
        groups = state.get("param_groups", ())
        pairs = zip(groups, self.stateful.param_groups, strict=False)
        state = {**state, "state": numbered, "param_groups": [add_live_options(*pair) for pair in pairs]}
        try:
            with keep_option_tensors(self.optimizers, self.filled):
                self.stateful.load_state_dict(state)
        except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
            raise RestoreError(f"{self.key}: the optimizer does not take this state: {error}", [self.key]) from error
        for index, saved in numbered.items():
            parameter = self.parameters.get(str(index))
            if parameter is None or not isinstance(saved, dict):
                continue
            live = self.stateful.state.get(parameter)
            if live is not None:
                live.update({name: restore_dtypes(live.get(name), value) for name, value in saved.items()})
        return []
