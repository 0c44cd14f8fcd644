"""What applications pass for an app state by mistake, and what to pass instead: the texts of errors."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch
from torch.utils.data import DataLoader

from snapshot.text import with_article


def describe_wrong(app_state: object) -> str:
    """Return the error for an app state that is not a dict."""
    text = f"app_state must be a dict of stateful objects, got {with_article(type(app_state).__name__)}"
    if isinstance(app_state, (str, os.PathLike)):
        return f"{text}; the path comes first: take(path, app_state)"
    if hasattr(app_state, "load_state_dict"):
        return f"{text}; give it a name, as in {{'model': model}}"
    return text


def describe_wrong_value(key: str, value: object) -> str:
    """Return the error for a value of an app state that is not stateful."""
    what = f"the class {value.__name__}" if isinstance(value, type) else f"of type {type(value).__qualname__}"
    return f"app_state[{key!r}] is {what}, which has no state_dict() and load_state_dict(); {_advise(key, value)}"


def _advise(key: str, value: object) -> str:
    if isinstance(value, type):
        return f"pass an object of it: {value.__name__}(...)"
    if isinstance(value, DataLoader):
        return "pass torchdata's StatefulDataLoader, or LoaderState(loader): see docs/guides/data-order.md"
    name = key if key.isidentifier() else "value"
    if isinstance(value, torch.Generator):
        return f"wrap it: StateDict({name}=...), or pass RNGState() for the default generators"
    if isinstance(value, Mapping):
        return _advise_on_dict(value)
    if value is None or isinstance(value, (bool, int, float, str, bytes, list, tuple, set, torch.Tensor)):
        return f"wrap plain values: StateDict({name}=...)"
    return f"give the class both methods, or wrap its values: StateDict({name}=...)"


def _advise_on_dict(value: Mapping[Any, Any]) -> str:
    if set(value) == {"state", "param_groups"}:
        return "pass the optimizer itself, not its state_dict()"
    if hasattr(value, "_metadata"):
        return "pass the module itself, not its state_dict()"
    also = ""
    if value and all(isinstance(each, torch.Tensor) for each in value.values()):
        also = "; if it is the state_dict() of a module, pass the module itself"
    return f"wrap the dict: StateDict(the_dict){also}"
