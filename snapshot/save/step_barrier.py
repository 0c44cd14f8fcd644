"""The optimizer barrier: `step()` waits until pending snapshots have copied the tensors that it changes.

The wait is one global hook that torch calls before the hooks of any optimizer. Loading a state dict waits, too.
Resizing or sharing a storage waits for the part that is being copied. Torch has no hook for these, so their methods are
wrapped while an overlapped take is pending. The hook is removed with the first step after the last take, if it is the
only global hook. Otherwise it stays and does nothing.
"""

from __future__ import annotations

import functools
import itertools
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from itertools import chain
from typing import Any, TypeVar

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from snapshot.events import log
from snapshot.io.aio import Latch
from snapshot.io.loop import LIBRARY
from snapshot.io.system import PerProcess
from snapshot.state.changing import count_changes, find_storage_begin
from snapshot.tensors.buffers import wrap_memory
from snapshot.tensors.memory import find_local_tensor

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
        self._sizes = [each.untyped_storage().nbytes() for each in self._tensors]
        # An odd constant, so that the third sample is at another place in each take, and of each tensor.
        turn = next(SpotBytes._takes) * 0x9E3779B1
        self._spots = [
            (0, (turn * number >> 7) % last, last - 1) for number, last in enumerate(map(_count_spots, tensors))
        ]
        self._taken = self._take()

    def differ(self) -> bool:
        """Return True if the tensors have other bytes now, or none."""
        sizes = [each.untyped_storage().nbytes() for each in self._tensors]
        return sizes != self._sizes or self._take() != self._taken

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
        self._copying = threading.Lock()
        self._storages: frozenset[int] = frozenset()
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
        # Optimizers are compared by memory, too: another one may hold the same parameters, or views of them.
        bases = self._bases
        return any(
            find_storage_begin(find_local_tensor(each)) in bases for each in tensors if isinstance(each, torch.Tensor)
        )

    def protect(self, storages: Iterable[int]) -> threading.Lock:
        """Return a lock for a thread that copies from storages with these addresses: while held, none is moved."""
        self._storages = frozenset(storages)
        return self._copying

    def while_copied(self, begin: int) -> AbstractContextManager[object]:
        """Return the lock if a storage that begins at an address is one that is copied."""
        return self._copying if begin in self._storages else nullcontext()

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
        self._tensors, self._samples = (), SpotBytes(())  # the caller may keep this object for long


class _Barrier:
    """The pending copies of this process, and the hooks that torch calls for them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.pending: tuple[PendingCopy, ...] = ()
        self._hook: RemovableHandle | None = None
        self._wrapped: dict[tuple[Any, str], tuple[Callable[..., Any], Callable[..., Any]]] = {}
        """For each class and name: its method, and the wrapper in its place."""

    def add(self, copy: PendingCopy) -> None:
        with self._lock:
            if self._hook is None:
                self._hook = register_optimizer_step_pre_hook(self._before_step)
            for kind, name, wrap in _WRAPPED:
                method = getattr(kind, name)
                # If other code has wrapped ours since the last take, its wrapper is wrapped once more.
                if (kind, name) not in self._wrapped or method is not self._wrapped[kind, name][1]:
                    self._wrapped[kind, name] = method, wrap(method)
                    setattr(kind, name, self._wrapped[kind, name][1])
            self.pending = (*self.pending, copy)

    def discard(self, copy: PendingCopy) -> None:
        with self._lock:
            self.pending = tuple(each for each in self.pending if each is not copy)
            if not self.pending:
                self._unwrap()

    def _unwrap(self) -> None:
        for (kind, name), (original, wrapper) in list(self._wrapped.items()):
            if getattr(kind, name) is wrapper:  # otherwise other code has wrapped it again
                setattr(kind, name, original)
                del self._wrapped[kind, name]

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
                copy.wait()  # this also lets the step begin: the versions are checked before it changes anything

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


def _find_memory(owner: torch.Tensor | torch.UntypedStorage) -> int:
    """Return the address of a storage, also of an empty view; 0 for a tensor that has none of its own."""
    try:
        return (owner if isinstance(owner, torch.UntypedStorage) else owner.untyped_storage()).data_ptr()
    except (NotImplementedError, RuntimeError):
        return 0


def _between_parts(move: Callable[..., R]) -> Callable[..., R]:
    """Let a storage get another memory only while no thread copies from it. The next part then finds that it changed.

    Its own memory is freed then. `Tensor.share_memory_` and queues of processes share storages, which moves them.
    """

    @functools.wraps(move)
    def wrapper(owner: torch.Tensor | torch.UntypedStorage, *args: Any, **kwargs: Any) -> R:
        begin = _find_memory(owner)
        with ExitStack() as held:
            for copy in pending_copies():
                held.enter_context(copy.while_copied(begin))
            return move(owner, *args, **kwargs)

    return wrapper


_WRAPPED: tuple[tuple[Any, str, Callable[[Any], Any]], ...] = (
    (torch.nn.Module, "load_state_dict", _waiting),
    (torch.optim.Optimizer, "load_state_dict", _waiting),
    (torch.UntypedStorage, "resize_", _between_parts),
    (torch.UntypedStorage, "_share_fd_cpu_", _between_parts),
    (torch.UntypedStorage, "_share_filename_cpu_", _between_parts),
    (torch.Tensor, "resize_", _between_parts),
    (torch.Tensor, "resize_as_", _between_parts),
)
"""The methods that are wrapped while a copy is pending."""
