"""Optimizer barrier: `step()` waits until pending snapshots have copied the tensors that it changes.

The wait is one global hook that torch calls before the hooks of any optimizer. Loading a state dict waits, too. Torch
has no hook for that, so two methods are wrapped while an overlapped take is pending. The hook is removed with the first
step after the last take, if it is the only global hook. Otherwise it stays and does nothing.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from operator import attrgetter
from typing import Any, TypeVar

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from snapshot.events import log
from snapshot.per_process import PerProcess
from snapshot.runtime.latch import Latch
from snapshot.runtime.loop import LIBRARY
from snapshot.state.overlap_eligible import find_local_tensor, find_storage_begin

R = TypeVar("R")
_version = attrgetter("_version")


class PendingCopy:
    """Tensors that still have to be copied, and the optimizers that may change them.

    After the copy, the version counters are checked once more, by the first caller that permits changes. Torch counts
    an operation when it ends, so one that began before the copy would be missed otherwise.
    """

    def __init__(self, optimizers: Iterable[torch.optim.Optimizer], tensors: Sequence[torch.Tensor]) -> None:
        self._optimizers = frozenset(map(id, optimizers))
        self._tensors = tensors
        self.versions = list(map(_version, tensors))
        self._over = Latch()
        self._lock = threading.Lock()
        self._let_go = False
        self.changed = False
        """True if the tensors were changed before a change was permitted."""

    @functools.cached_property
    def _bases(self) -> frozenset[int]:
        return frozenset(find_storage_begin(find_local_tensor(each)) for each in self._tensors)

    def concerns(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return True if an optimizer's parameters or state share memory with these tensors."""
        if id(optimizer) in self._optimizers:
            return True
        states = (state.values() for state in optimizer.state.values())
        tensors = chain(*(group["params"] for group in optimizer.param_groups), *states)
        bases = self._bases
        return any(
            find_storage_begin(find_local_tensor(each)) in bases for each in tensors if isinstance(each, torch.Tensor)
        )

    def begin(self) -> None:
        """Make optimizer steps and `load_state_dict` calls wait from now on."""
        _barrier.get().add(self)

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until all is copied, or the take failed. Return True if so: then the tensors may change."""
        over = self._over.wait(timeout)
        if over:
            self.let_go()
        return over

    def let_go(self) -> None:
        """Check the version counters for the last time."""
        with self._lock:
            if not self._let_go:
                self.changed = list(map(_version, self._tensors)) != self.versions
                self._let_go = True
        self._drop()

    def copied(self) -> None:
        """Release all waiting threads: everything is copied."""
        self._over.open()

    def end(self) -> None:
        """Stop: nothing has to be copied any more, and the tensors are not checked again."""
        with self._lock:
            self._let_go = True
        self._drop()
        self._over.open()

    def _drop(self) -> None:
        _barrier.get().discard(self)
        self._tensors = ()


class _Barrier:
    """The pending copies of this process, and the hooks that torch calls for them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.pending: tuple[PendingCopy, ...] = ()
        self._hook: RemovableHandle | None = None
        self._loads: dict[Any, tuple[Callable[..., Any], Callable[..., Any]]] = {}
        """For each class: its `load_state_dict`, and the wrapper in its place."""

    def add(self, copy: PendingCopy) -> None:
        with self._lock:
            if self._hook is None:
                self._hook = register_optimizer_step_pre_hook(self._before_step)
            for kind in (torch.nn.Module, torch.optim.Optimizer):
                if kind not in self._loads or kind.load_state_dict is not self._loads[kind][1]:
                    self._loads[kind] = kind.load_state_dict, _waiting(kind.load_state_dict)
                    kind.load_state_dict = self._loads[kind][1]  # type: ignore[method-assign]
            self.pending = (*self.pending, copy)

    def discard(self, copy: PendingCopy) -> None:
        with self._lock:
            self.pending = tuple(each for each in self.pending if each is not copy)
            if not self.pending:
                self._unwrap()

    def _unwrap(self) -> None:
        for kind, (original, wrapper) in list(self._loads.items()):
            if kind.load_state_dict is wrapper:  # otherwise other code has wrapped it again
                kind.load_state_dict = original
                del self._loads[kind]

    def _unhook(self) -> None:
        """Remove the step hook from within it.

        This is safe only if it is the only hook. Otherwise torch would iterate over a changed dict.
        """
        with self._lock:
            if self._hook is not None and not self.pending:
                hooks = self._hook.hooks_dict_ref()
                if hooks is not None and list(hooks) == [self._hook.id]:
                    self._hook.remove()
                    self._hook = None

    def _before_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if not self.pending:
            self._unhook()
            return
        if _in_library("an optimizer's step"):
            return
        for copy in self.pending:
            try:
                concerned = copy.concerns(optimizer)
            except Exception:  # noqa: BLE001 - an optimizer that is none of torch's may hold anything
                log.exception("cannot inspect an optimizer's tensors; its step waits for the pending snapshot")
                concerned = True
            if concerned:
                copy.wait()

    def forked(self) -> _Barrier:
        """Return a barrier without copies for a forked child: the parent's copies read the parent's memory."""
        self._lock = threading.Lock()
        self.pending = ()
        self._unwrap()
        return self


_barrier = PerProcess(_Barrier, _Barrier.forked)


def pending_copies() -> tuple[PendingCopy, ...]:
    """Return the pending copies of this process."""
    return _barrier.get().pending


def wait_for_copies() -> None:
    """Wait until no pending snapshot has anything left to copy."""
    pending = pending_copies()
    if not pending or _in_library("loading a state"):
        return
    for copy in pending:
        copy.wait()


def _in_library(what: str) -> bool:
    """Return True in a library thread. Other threads may wait for it, so it must not wait for a copy."""
    if not threading.current_thread().name.startswith(LIBRARY):
        return False
    log.error("%s in a snapshot's callback does not wait for pending copies", what)
    return True


def _waiting(load: Callable[..., R]) -> Callable[..., R]:
    @functools.wraps(load)
    def load_state_dict(*args: Any, **kwargs: Any) -> R:
        wait_for_copies()
        return load(*args, **kwargs)

    return load_state_dict
