"""Tensors that a pending snapshot has still to copy are kept from changing: an optimizer's `step()` waits.

The wait is one hook for the process, which torch calls before those of any optimizer; it is installed once, and kept,
since a hook that goes away while hooks run breaks the step of whoever runs them. Loading a state dict waits, too: torch
has no hook for that which reaches all modules, so the two methods are wrapped, once.
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from operator import attrgetter
from typing import Any, TypeVar

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from snapshot.events import log
from snapshot.runtime.latch import Latch
from snapshot.runtime.loop import LIBRARY
from snapshot.state.overlap_eligible import base_of, local

R = TypeVar("R")
_version = attrgetter("_version")
_held: tuple[PendingCopy, ...] = ()
_lock = threading.Lock()
_installed = False


class PendingCopy:
    """Tensors that are still to be copied, and the optimizers that may change them.

    Also when all is copied they are looked at once more, by whoever first says that they may change from now on: torch
    counts an operation when it has ended, and one that had begun before the copy would go unseen.
    """

    def __init__(self, optimizers: Iterable[torch.optim.Optimizer], tensors: Sequence[torch.Tensor]) -> None:
        self._optimizers = frozenset(map(id, optimizers))
        self._tensors = tensors
        self.versions = list(map(_version, tensors))
        self._over = Latch()
        self._lock = threading.Lock()
        self._let_go = False
        self.changed = False
        """Whether something changed them before anybody said so."""

    @functools.cached_property
    def _bases(self) -> frozenset[int]:
        return frozenset(base_of(local(each)) for each in self._tensors)

    def concerns(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether an optimizer's parameters, or its state, lie in the same memory."""
        if id(optimizer) in self._optimizers:
            return True
        states = (state.values() for state in optimizer.state.values())
        tensors = chain(*(group["params"] for group in optimizer.param_groups), *states)
        bases = self._bases
        return any(base_of(local(each)) in bases for each in tensors if isinstance(each, torch.Tensor))

    def begin(self) -> None:
        """From now on whoever would change these tensors by an optimizer's step, or by loading a state, waits."""
        global _held  # noqa: PLW0603 - one hook a process, and one list for it
        with _lock:
            _install()
            _held = (*_held, self)

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until all is copied, or given up; whether it is. Then the tensors may change."""
        over = self._over.wait(timeout)
        if over:
            self.let_go()
        return over

    def let_go(self) -> None:
        """Look at the tensors for the last time."""
        with self._lock:
            if not self._let_go:
                self.changed = list(map(_version, self._tensors)) != self.versions
                self._let_go = True
        self._drop()

    def copied(self) -> None:
        """All is copied: let all go on that wait."""
        self._over.open()

    def end(self) -> None:
        """Nothing is to be copied any more; nobody looks at the tensors again."""
        with self._lock:
            self._let_go = True
        self._drop()
        self._over.open()

    def _drop(self) -> None:
        global _held  # noqa: PLW0603 - as above
        with _lock:
            _held = tuple(each for each in _held if each is not self)
        self._tensors = ()


def _install() -> None:
    global _installed  # noqa: PLW0603 - as above
    if not _installed:
        register_optimizer_step_pre_hook(_before_step)
        for kind in (torch.nn.Module, torch.optim.Optimizer):
            kind.load_state_dict = _waiting(kind.load_state_dict)  # type: ignore[method-assign]
        _installed = True


def wait_for_copies() -> None:
    """Wait until no pending snapshot has anything left to copy."""
    if not _held or _in_library("loading a state"):
        return
    for held in _held:
        held.wait()


def _in_library(what: str) -> bool:
    """Whether this is a thread of the library's, which others may be waiting for: it cannot wait for them."""
    if not threading.current_thread().name.startswith(LIBRARY):
        return False
    log.error("%s in a callback of a snapshot does not wait for what is still being copied", what)
    return True


def _before_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    if not _held or _in_library("an optimizer's step"):
        return
    for held in _held:
        try:
            concerned = held.concerns(optimizer)
        except Exception:  # noqa: BLE001 - an optimizer that is none of torch's may hold anything
            log.exception("an optimizer's tensors cannot be looked at: its step waits for a pending snapshot")
            concerned = True
        if concerned:
            held.wait()


def _waiting(load: Callable[..., R]) -> Callable[..., R]:
    @functools.wraps(load)
    def load_state_dict(*args: Any, **kwargs: Any) -> R:
        wait_for_copies()
        return load(*args, **kwargs)

    return load_state_dict


def _after_fork() -> None:
    """What the parent has still to copy, it copies from memory of its own."""
    global _held, _lock
    _held, _lock = (), threading.Lock()


os.register_at_fork(after_in_child=_after_fork)
