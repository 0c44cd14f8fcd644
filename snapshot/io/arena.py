"""The arena: staging memory that is kept between snapshots, shared with the writer process or pinned."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import mmap
import os
import platform
import sys
import tempfile
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from snapshot.errors import system_limits
from snapshot.events import log
from snapshot.io.host_memory import total_memory
from snapshot.io.system import PerProcess, libc, map_memory
from snapshot.settings import Settings
from snapshot.tensors.buffers import address_of, populate_pages
from snapshot.text import counted

if TYPE_CHECKING:
    import torch

# Pinned memory: host memory that an accelerator's driver copies directly, near the accelerator.
#
# Memory is registered with the driver where the driver allows that. Torch's own pinned memory is rounded up to powers
# of two and never given back. It is used only for accelerators that cannot register memory.

PCI_DEVICES = Path("/sys/bus/pci/devices")
_PORTABLE_MAPPED = 1 | 2
"""Pinned for all devices of the process, which can also access it."""
_RELAXED = 2
"""A capture mode: this thread's calls do not disturb the graph that another thread captures."""
_CAPTURING = frozenset(range(900, 908))
"""Errors of the driver because a graph is captured: the next call may succeed."""
_PREFERRED = 1
"""A policy of mbind: take memory of the node while it has any."""
_MBIND = {"x86_64": 237, "aarch64": 235}


class Pinning(NamedTuple):
    """The pinned memory that an operation wants."""

    device: torch.device
    limit: int
    """The operation's memory budget. With this much memory pinned, further slots are not pinned."""
    total: int
    """The bytes that the operation copies."""


class PinningRefused(Exception):
    """The driver did not pin memory."""

    def __init__(self, reason: object, *, later: bool = False) -> None:
        super().__init__(reason)
        self.later = later
        """True if another attempt may succeed."""


def _runtime(device: torch.device) -> Any:
    """Return the driver's functions to register memory, or None."""
    import torch

    from snapshot.io.accelerators import side_stream

    make = getattr(torch.get_device_module(device), "cudart", None)
    runtime = make() if make is not None and side_stream(device) is not None else None
    return runtime if hasattr(runtime, "cudaHostRegister") else None


def can_register(device: torch.device) -> bool:
    """Return True if existing memory can be registered with the device's driver."""
    return _runtime(device) is not None


def register_memory(address: int, nbytes: int, device: torch.device) -> None:
    """Pin existing memory, or raise `PinningRefused`."""
    try:
        code = _call_driver(device, lambda: _runtime(device).cudaHostRegister(address, nbytes, _PORTABLE_MAPPED))
    except _Interrupted as interrupted:
        if not interrupted.code:
            unregister_memory(address, device)
        raise interrupted.error from None
    if code:
        raise PinningRefused(f"error {code} of the driver", later=code in _CAPTURING)


def unregister_memory(address: int, device: torch.device) -> bool:
    """Undo `register_memory`, after copies that use the memory. Return False if the memory stays registered."""
    try:
        return not _call_driver(device, lambda: _runtime(device).cudaHostUnregister(address))
    except _Interrupted as interrupted:
        if interrupted.code:
            return False
        raise interrupted.error from None


class _Interrupted(Exception):
    """A signal arrived during a call of the driver, which was finished nevertheless."""

    def __init__(self, error: BaseException, code: int) -> None:
        super().__init__(error)
        self.error = error
        self.code = code


def _call_driver(device: torch.device, call: Callable[[], Any]) -> int:
    """Return the error code of a driver's function, or 1 for an exception.

    A thread of its own calls it. The driver keeps the last error per thread, and torch would raise the error of a
    refusal in the application's next operation.
    """
    from snapshot.io.accelerators import on_stream, side_stream

    codes: list[int] = []
    done = threading.Event()

    def run() -> None:
        try:
            permit_capture()
            with on_stream(side_stream(device)):  # its device: otherwise the driver would start on device 0, too
                codes.append(int(call()))
        except RuntimeError:
            codes.append(1)
        finally:
            done.set()

    thread = threading.Thread(target=run, name="snapshot-io-pin", daemon=True)
    interrupt: BaseException | None = None
    try:
        thread.start()
    except RuntimeError:  # no further thread
        return 1
    except BaseException as error:  # noqa: BLE001 - raised below: memory must not be unmapped during the call
        interrupt = error
    while not done.is_set():
        try:
            if not done.wait(10) and thread.ident is None:
                break  # interrupted before it began
        except BaseException as error:  # noqa: BLE001 - as above
            interrupt = error
    code = codes[0] if codes else 1
    if interrupt is not None:
        raise _Interrupted(interrupt, code)
    return code


def permit_capture() -> None:
    """Permit calls of this thread while another one captures a graph, and captures during these calls."""
    for name in ("libcudart.so.13", "libcudart.so.12", "libcudart.so.11.0"):
        with contextlib.suppress(OSError, AttributeError):
            library = ctypes.CDLL(name, mode=getattr(os, "RTLD_NOLOAD", 0) | os.RTLD_NOW)
            library.cudaThreadExchangeStreamCaptureMode(ctypes.byref(ctypes.c_int(_RELAXED)))
            return


def allocate_pinned(nbytes: int) -> torch.Tensor | None:
    """Return memory of torch's pinned allocator, or None if the accelerator has none."""
    import torch

    try:
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    except (RuntimeError, NotImplementedError):
        return None


def find_numa_node(device: torch.device) -> int:
    """Return the NUMA node that is nearest to a device, or -1 if it is unknown."""
    import torch

    try:
        found = torch.get_device_module(device).get_device_properties(device)
        name = f"{getattr(found, 'pci_domain_id', 0):04x}:{found.pci_bus_id:02x}:{found.pci_device_id:02x}.0"
        return int((PCI_DEVICES / name / "numa_node").read_text())
    except (AttributeError, OSError, RuntimeError, TypeError, ValueError):
        return -1


def bind_to_node(address: int, nbytes: int, node: int) -> bool:
    """Prefer a NUMA node for pages that are not allocated yet; return False if the system does not support it."""
    number = _MBIND.get(platform.machine())
    if number is None or libc.syscall is None or not 0 <= node < 1024:
        return False
    mask = (ctypes.c_ulong * 16)()
    mask[node // 64] = 1 << node % 64
    done = libc.syscall(
        ctypes.c_long(number),
        ctypes.c_void_p(address),
        ctypes.c_ulong(nbytes),
        ctypes.c_long(_PREFERRED),
        mask,
        ctypes.c_ulong(1024),
        ctypes.c_ulong(0),
    )
    return bool(done == 0)


# Segments of staging memory: shared with the writer process, pinned for an accelerator, or both.
#
# Segments are few and long, but sparse: pages are allocated on first write and freed by punching holes. A shared
# segment has no file name, and is freed with the last process that maps it. A pinned segment is never sparse: it is
# allocated and registered with the accelerator's driver as a whole.

_NOEXEC_SEAL = 8
_HUGEPAGE, _WIPEONFORK = 14, 18
"""Advice to the kernel; `mmap` names the second one only in newer versions of Python."""
_KEEP_SIZE, _PUNCH_HOLE = 1, 2
_ALIGNED = 2 << 20  # a huge page
_POPULATED = 32 << 20
"""Minimum bytes whose pages one of several threads allocates."""
_numbers = itertools.count(1)
_never_unmapped: list[Any] = []
"""Memory that the driver still uses, because it refused to unregister it."""


class Segment:
    """A segment of memory, divided into grains. It is not thread-safe: its arena holds the lock.

    Args:
        device: The accelerator to pin it for. If that fails, `pinned` is False and `refusal` is the reason.
    """

    def __init__(self, size: int, grain: int, *, shared: bool, device: torch.device | None = None) -> None:
        self.number = next(_numbers)
        self.size = size
        self.shared = shared
        self.device = device
        self._grain = grain
        self.descriptor = -1
        self.closed = False
        self._process = os.getpid()
        """The process that pinned the memory: a forked child must not unpin it."""
        self.pinned = False
        self.refusal: PinningRefused | None = None
        self._torch: torch.Tensor | None = None
        if device is not None and not can_register(device):
            self._torch = None if shared else allocate_pinned(size)
        if self._torch is not None:
            self.memory: Any = self._torch.numpy()
            self.pinned = True
        else:
            self.memory = self._map_memory()
        self._address = address_of(memoryview(self.memory))
        self._used = bytearray(size // grain)
        self._warm = bytearray(size // grain)
        """Free grains whose pages are allocated."""
        if device is not None and self._torch is None and can_register(device):
            self._pin(device)
        if self.pinned:
            self._warm[:] = b"\1" * len(self._warm)

    def _map_memory(self) -> mmap.mmap:
        if self.shared:
            self.descriptor = _anonymous_file()
            os.ftruncate(self.descriptor, self.size)
            memory = mmap.mmap(self.descriptor, self.size)
        else:
            memory = map_memory(self.size)
        # A forked child would get a copy of each pinned page, which it does not need: it has an arena of its own. The
        # range stays mapped, since the child may free a segment that it inherited.
        for advice in [_HUGEPAGE] + ([] if self.shared else [_WIPEONFORK]):
            with contextlib.suppress(OSError, AttributeError):  # a system without it is only slower
                memory.madvise(advice)
        return memory

    def _pin(self, device: torch.device) -> None:
        node = find_numa_node(device)
        if node >= 0:
            bind_to_node(self._address, self.size, node)
        self.populate(0, self.size)
        try:
            register_memory(self._address, self.size, device)
            self.pinned = True
        except PinningRefused as refused:
            self.refusal = refused

    def find(self, count: int) -> int:
        """Return the first of `count` consecutive free grains, or -1."""
        return self._used.find(bytes(count))

    def find_warm(self, count: int) -> int:
        """Return the first of `count` consecutive free grains with allocated pages, or -1."""
        return self._warm.find(b"\1" * count)

    def take(self, first: int, count: int) -> int:
        """Mark grains as used. Return the number with allocated pages."""
        warm = self._warm.count(1, first, first + count)
        self._used[first : first + count] = b"\1" * count
        self._warm[first : first + count] = bytes(count)
        return warm

    def give(self, first: int, count: int, *, keep: bool) -> None:
        """Mark grains as free, and keep or free their pages. Pinned pages are always kept."""
        self._used[first : first + count] = bytes(count)
        if keep or self.pinned:
            self._warm[first : first + count] = b"\1" * count
        else:
            self._punch(first, count)

    def trim(self) -> int:
        """Free the pages of all free grains, unless they are pinned. Return their size in bytes."""
        if self.pinned:
            return 0
        freed = self.free
        first = self._warm.find(1)
        while first >= 0:
            end = self._warm.find(0, first)
            end = len(self._warm) if end < 0 else end
            self._warm[first:end] = bytes(end - first)
            self._punch(first, end - first)
            first = self._warm.find(1, end)
        return freed

    @property
    def is_unused(self) -> bool:
        """True if no grain is used, and no free grain keeps its pages, except pinned ones."""
        return 1 not in self._used and (self.pinned or 1 not in self._warm)

    @property
    def free(self) -> int:
        """The bytes of free grains whose pages are allocated."""
        return self._warm.count(1) * self._grain

    def populate(self, offset: int, nbytes: int) -> None:
        """Allocate the pages of a range at once.

        This is faster than page faults. Without memory it raises, instead of sending a signal during a copy. Several
        threads allocate a long range, since a core zeroes pages more slowly than an accelerator copies to them.
        """
        lanes = max(1, min(Settings.current().lane_count(), nbytes // _POPULATED))
        step = -(-nbytes // lanes // _ALIGNED) * _ALIGNED
        shares = [(begin, min(step, offset + nbytes - begin)) for begin in range(offset, offset + nbytes, step)]
        errors: list[BaseException] = []

        def populate_share(begin: int, length: int) -> None:
            try:
                if not populate_pages(self._address + begin, length) and self.shared:
                    os.posix_fallocate(self.descriptor, begin, length)
            except BaseException as error:  # noqa: BLE001 - raised below
                errors.append(error)

        threads = []
        for share in shares[1:]:
            thread = threading.Thread(target=populate_share, args=share, name="snapshot-io-populate", daemon=True)
            try:
                thread.start()
            except RuntimeError:  # no further thread
                populate_share(*share)
            else:
                threads.append(thread)
        populate_share(*shares[0])
        while any(thread.is_alive() for thread in threads):
            try:
                for thread in threads:
                    thread.join()
            except BaseException as error:  # noqa: BLE001 - raised below: memory must not be given back during the work
                errors.append(error)
        if errors:
            raise errors[0]

    def _punch(self, first: int, count: int) -> None:
        begin, length = ctypes.c_int64(first * self._grain), ctypes.c_int64(count * self._grain)
        libc.fallocate(self.descriptor, _PUNCH_HOLE | _KEEP_SIZE, begin, length)

    def close(self) -> None:
        """Unpin the memory and close the descriptor. The memory is freed when the last mapping ends."""
        if self.closed:
            return
        self.closed = True
        registered, self.pinned = self.pinned and self._torch is None and self._process == os.getpid(), False
        try:
            if registered and self.device is not None and not unregister_memory(self._address, self.device):
                _never_unmapped.append(self.memory)
        finally:
            if self.descriptor >= 0:
                os.close(self.descriptor)

    def __del__(self, finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        if not finalizing():  # the memory ends with the process
            self.close()

    def __repr__(self) -> str:
        return f"Segment({self.number}, {self.size:,} bytes{', pinned' if self.pinned else ''})"


def _anonymous_file() -> int:
    """Return an anonymous file in memory."""
    if hasattr(os, "memfd_create"):
        for flags in (os.MFD_CLOEXEC | _NOEXEC_SEAL, os.MFD_CLOEXEC):  # the first flag exists since Linux 6.3
            with contextlib.suppress(OSError):
                return os.memfd_create("snapshot", flags)
    descriptor, name = tempfile.mkstemp(dir="/dev/shm")
    os.unlink(name)
    return descriptor


# The arena: staging memory that is kept between snapshots.
#
# Page faults on fresh memory cost more than the copy itself. Memory that a writer process must see, and memory that
# is pinned for an accelerator, is cut from a few long segments. All other slots are mapped one by one.

GRAIN = 1 << 20
"""Slot sizes are multiples of this, so that parts of similar size can reuse each other's slots."""
SEGMENT = 256 << 20
"""The size of the first shared segment, and of most pinned ones."""
FIRST_PINNED = 64 << 20
"""The size of the first pinned segment: the call that needs it waits until it is pinned."""
SPARE = 64 << 20
"""The bytes that may be pinned beyond the budget, because slots of different sizes leave gaps between them."""


def arena_bytes(nbytes: int) -> int:
    """Return the budget that an arena slot of `nbytes` bytes takes."""
    return -(-nbytes // GRAIN) * GRAIN


class Slot:
    """Page-aligned host memory of its own, or a range of a segment."""

    __slots__ = ("_owner", "_tensor", "address", "offset", "pinned", "segment", "size", "view")

    def __init__(self, size: int, segment: Segment | None = None, offset: int = 0) -> None:
        self.size = size
        self.pinned = segment is not None and segment.pinned
        """True if accelerators copy it without waiting for the host."""
        self.segment = segment
        self.offset = offset
        """The offset in its segment."""
        self._owner: Any = None
        self._tensor: torch.Tensor | None = None
        if segment is not None:
            self.view = memoryview(segment.memory)[offset : offset + size]
        else:
            self._owner = map_memory(size)
            self.view = memoryview(self._owner)
            populate_pages(address_of(self.view), size)
            if hasattr(mmap, "MADV_HUGEPAGE"):  # asynchronous: searching for huge pages now may take seconds
                with contextlib.suppress(OSError):  # a kernel without huge pages is only slower
                    self._owner.madvise(mmap.MADV_HUGEPAGE)
        self.address = address_of(self.view)

    @property
    def tensor(self) -> torch.Tensor:
        """The same memory as a tensor of bytes. Reads of files have no use for it, and commands do without torch."""
        if self._tensor is None:
            import torch

            self._tensor = torch.frombuffer(self.view, dtype=torch.uint8)
        return self._tensor

    def __repr__(self) -> str:
        where = f" at {self.offset:,} of {self.segment}" if self.segment else ""
        return f"Slot({self.size:,} bytes{where})"


class Arena:
    """A cache of slots. The cached bytes are bounded; further slots are freed."""

    def __init__(self, keep: int) -> None:
        self._keep = keep
        self._kept = self._out = 0
        self._free: defaultdict[int, list[Slot]] = defaultdict(list)
        self._segments: list[Segment] = []
        self._refused: set[torch.device] = set()
        """Devices whose driver refused to pin memory."""
        self._stop_growing = threading.Event()
        self._lock = threading.Lock()
        self._pin_lock = threading.Lock()
        """Held while memory is pinned, which takes long. It is acquired before the other lock."""

    def take(self, nbytes: int, *, shared: bool = False, pinning: Pinning | None = None) -> Slot:
        """Return a slot of at least `nbytes` bytes, with arbitrary content.

        A `shared` slot can be mapped by another process. With `pinning`, the slot is pinned if possible.
        """
        size = max(GRAIN, arena_bytes(nbytes))
        with system_limits(f"cannot allocate {size:,} bytes of staging memory; use a smaller memory_budget_bytes"):
            if pinning is not None:
                slot = self._take_pinned(size, shared, pinning)
                if slot is not None:
                    return slot
            return self._take_shared(size) if shared else self._take_own(size)

    def _take_own(self, size: int) -> Slot:
        with self._lock:
            self._out += size
            free = self._free[size]
            if free:
                self._kept -= size
                return free.pop()
        try:
            return Slot(size)
        except BaseException:
            with self._lock:
                self._out -= size
            raise

    def _take_shared(self, size: int) -> Slot:
        with self._lock:
            segments = [segment for segment in self._segments if segment.shared and not segment.pinned]
            found = _find_room(segments, size)
            if found is None:
                held = sum(segment.size for segment in segments)  # each is as long as all before it, so there are few
                found = Segment(max(SEGMENT, held, size), GRAIN, shared=True), 0
                self._segments.append(found[0])
            warm = self._mark(*found, size)
        slot = Slot(size, *found)
        try:
            if warm < size:
                found[0].populate(slot.offset, size)
        except BaseException:
            self.give(slot)
            raise
        return slot

    def _mark(self, segment: Segment, offset: int, size: int) -> int:
        """Mark a range as used. Return its bytes that have pages."""
        warm = segment.take(offset // GRAIN, size // GRAIN) * GRAIN
        self._kept -= warm
        self._out += size
        return warm

    # Pinned memory

    def _take_pinned(self, size: int, shared: bool, pinning: Pinning) -> Slot | None:
        slot = self._cut_pinned(size, shared, pinning)
        if slot is None:
            with self._pin_lock:  # another thread may pin a segment at the moment
                slot = self._cut_pinned(size, shared, pinning)
                if slot is None and self._add_pinned(size, shared, pinning):
                    slot = self._cut_pinned(size, shared, pinning)
        return slot

    def _cut_pinned(self, size: int, shared: bool, pinning: Pinning) -> Slot | None:
        with self._lock:
            found = _find_room(self._pinned_segments(shared, pinning), size)
            if found is None:
                return None
            self._mark(*found, size)
        return Slot(size, *found)

    def _pinned_segments(self, shared: bool, pinning: Pinning) -> list[Segment]:
        kind = pinning.device.type
        return [
            each
            for each in self._segments
            if each.pinned and each.shared >= shared and each.device is not None and each.device.type == kind
        ]

    def _add_pinned(self, size: int, shared: bool, pinning: Pinning, *, ahead: bool = False) -> bool:
        """Pin one more segment with room for `size` bytes; return False if that is not possible."""
        if shared and not can_register(pinning.device):
            return False  # another process cannot see torch's own pinned memory
        with self._lock:
            if pinning.device in self._refused:
                return False
            pinned = sum(segment.size for segment in self._segments if segment.pinned)
            full = pinned + size > pinning.limit + SPARE
            usable = self._pinned_segments(shared, pinning)
            dropped = self._remove(lambda each: each.pinned and not (ahead and each in usable)) if full else []
            mine = sum(segment.size for segment in usable if segment not in dropped)
        pinned -= sum(segment.size for segment in dropped)
        _close(dropped)
        most = min(SEGMENT if pinned else FIRST_PINNED, pinning.limit, pinning.limit + SPARE - pinned)
        length = max(size, min(most, max(pinning.total - mine, 0)) // GRAIN * GRAIN)
        if pinned + length > pinning.limit + SPARE:
            return False
        segment = Segment(length, GRAIN, shared=shared, device=pinning.device)
        if not segment.pinned:
            self._note_refusal(segment, pinning.device)
            return False
        with self._lock:
            self._segments.append(segment)
            self._kept += segment.free
        return True

    def _note_refusal(self, segment: Segment, device: torch.device) -> None:
        segment.close()
        if segment.refusal is not None and segment.refusal.later:
            return
        log.warning("cannot pin memory for %s, so copies are slower: %s", device, segment.refusal or "it has none")
        with self._lock:
            self._refused.add(device)

    def pin_ahead(self, shared: bool, pinning: Pinning) -> Callable[[], object]:
        """Pin the memory that an operation will need in the background, while it uses the first of it.

        Return a function that ends this. Another call and `release` end it, too.
        """
        stop = threading.Event()

        def grow() -> None:
            while not stop.is_set():
                with self._pin_lock:
                    with self._lock:
                        pinned = sum(segment.size for segment in self._pinned_segments(shared, pinning))
                    if stop.is_set() or min(pinning.total, pinning.limit) - pinned < GRAIN:
                        return
                    try:
                        if not self._add_pinned(GRAIN, shared, pinning, ahead=True):
                            return
                    except (MemoryError, OSError, RuntimeError):
                        return  # the operation raises it, if it needs the memory

        with self._lock:
            self._stop_growing.set()
            self._stop_growing = stop
        with contextlib.suppress(RuntimeError):  # without a further thread, memory is pinned when it is needed
            threading.Thread(target=grow, name="snapshot-io-arena", daemon=True).start()
        return stop.set

    # Return

    def give(self, slot: Slot) -> None:
        """Return a slot to the cache."""
        segment = slot.segment
        dropped: list[Segment] = []
        with self._lock:
            if segment is not None and segment not in self._segments:
                return  # it belongs to the parent of this fork
            self._out -= slot.size
            keep = self._kept + slot.size <= self._keep
            if segment is None:
                if keep:
                    self._free[slot.size].append(slot)
            else:
                segment.give(slot.offset // GRAIN, slot.size // GRAIN, keep=keep)
            if keep or slot.pinned:
                self._kept += slot.size
            if not keep:
                dropped = self._remove(lambda segment: self._kept > self._keep or not segment.pinned)
        _close(dropped)

    def _remove(self, wanted: Callable[[Segment], bool]) -> list[Segment]:
        """Remove the unused segments that match a condition. The caller closes them without the lock."""
        removed = []
        for segment in list(self._segments):
            if segment.is_unused and wanted(segment):
                self._segments.remove(segment)
                self._kept -= segment.free
                removed.append(segment)
        return removed

    @property
    def kept(self) -> int:
        """Cached bytes that are not in use."""
        return self._kept

    def release(self) -> int:
        """Free the cached slots. Return their size in bytes."""
        self._stop_growing.set()
        with self._pin_lock, self._lock:
            before = self._kept
            self._refused.clear()
            self._kept -= sum(size * len(slots) for size, slots in self._free.items())
            self._free.clear()
            for segment in self._segments:
                self._kept -= segment.trim()
            dropped = self._remove(lambda segment: True)
            freed = before - self._kept
        _close(dropped)
        return freed

    def __repr__(self) -> str:
        segments = f", {counted(len(self._segments), 'segment')}" if self._segments else ""
        return f"Arena({self._kept:,} bytes kept, {self._out:,} in use{segments})"


def _close(segments: Sequence[Segment]) -> None:
    for segment in segments:
        segment.close()


def _find_room(segments: Sequence[Segment], size: int) -> tuple[Segment, int] | None:
    """Return a segment and an offset with room for `size` bytes, preferably with pages."""
    for find in (Segment.find_warm, Segment.find):
        for segment in segments:
            if (first := find(segment, size // GRAIN)) >= 0:
                return segment, first * GRAIN
    return None


def _make_arena() -> Arena:
    wanted = Settings.current().arena_bytes
    return Arena(total_memory() // 4 // Settings.processes() if wanted < 0 else wanted)


_arena = PerProcess(_make_arena)


def arena() -> Arena:
    """Return this process's arena."""
    return _arena.get()


def release_memory() -> int:
    """Free the unused staging memory that is kept for the next snapshot. Return its size in bytes.

    Pinned memory is given back to the system, too, in whole segments that no running operation uses.

    >>> from snapshot.io.arena import release_memory
    >>> release_memory() >= 0
    True
    """
    return arena().release()
