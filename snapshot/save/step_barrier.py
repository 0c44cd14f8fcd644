"""The optimizer barrier: `step()` waits until pending snapshots have copied the tensors that it changes.

The wait is one global hook that torch calls before the hooks of any optimizer. Loading a state dict waits, too.
Torch has no hook for that, so two methods are wrapped while an overlapped take is pending. The hook is removed with
the first step after the last take, if it is the only global hook. Otherwise it stays and does nothing.
"""

from __future__ import annotations

import functools
import itertools
import threading
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import Any, TypeVar

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from snapshot.events import log
from snapshot.io.aio import Latch
from snapshot.io.loop import LIBRARY
from snapshot.io.system import PerProcess
from snapshot.state.model_state import count_changes, find_local_tensor, find_storage_begin
from snapshot.tensors.memory import wrap_memory

R = TypeVar("R")
SPOT = 64
"""Bytes of a sample. A tensor has three of them."""


class SpotBytes:
    """A few bytes of each of some tensors: the first, the last, and others that differ from take to take.

    `torch._foreach_*` changes a `DTensor` without counting it. Such a change affects most elements, so samples show it.
    """

    _takes = itertools.count(1)

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._tensors = [each.detach() for each in tensors]
        turn = next(SpotBytes._takes) * 0x9E3779B1
        self._spots = [
            (0, (turn * number >> 7) % last, last - 1) for number, last in enumerate(map(_count_spots, tensors))
        ]
        self._taken = self._take()

    def differ(self) -> bool:
        """Return True if the tensors have other bytes now."""
        return self._take() != self._taken

    def _take(self) -> list[bytes]:
        found: list[bytes] = []
        elsewhere: dict[torch.device, list[torch.Tensor]] = {}
        for tensor, spots in zip(self._tensors, self._spots, strict=True):
            for begin, end in ((SPOT * spot, min(SPOT * (spot + 1), tensor.nbytes)) for spot in spots):
                if tensor.is_cpu:
                    found.append(bytes(wrap_memory(tensor.data_ptr() + begin, end - begin)))
                else:
                    elsewhere.setdefault(tensor.device, []).append(tensor.view(-1).view(torch.uint8)[begin:end])
        return found + [bytes(torch.cat(each).cpu().numpy()) for each in elsewhere.values()]


def _count_spots(tensor: torch.Tensor) -> int:
    return max(1, tensor.nbytes // SPOT)


class PendingCopy:
    """Tensors that still have to be copied, and the optimizers that may change them.

    After the copy, the version counters are checked once more, by the first caller that permits changes. Torch counts
    an operation when it ends, so one that began before the copy would be missed otherwise.
    """

    def __init__(
        self,
        optimizers: Iterable[torch.optim.Optimizer],
        tensors: Sequence[torch.Tensor],
        uncounted: Sequence[torch.Tensor] = (),
    ) -> None:
        """Begin to watch tensors. `uncounted`: the local tensors of `DTensor`s, whose bytes are compared as well."""
        self._optimizers = frozenset(map(id, optimizers))
        self._tensors = tensors
        self.versions = list(map(count_changes, tensors))
        self._samples = SpotBytes(uncounted)
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
                self.changed = list(map(count_changes, self._tensors)) != self.versions or self._samples.differ()
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
        self._tensors, self._samples = (), SpotBytes(())


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
