"""Host memory as buffers, without a copy, by address."""

from __future__ import annotations

import ctypes
import errno
import os
from functools import lru_cache

from snapshot.io.system import libc
from snapshot.text import counted

# `ctypes` arrays over an address are the cheapest buffer that Python can create for tensors of any dtype. They take
# half the time of `tensor.numpy()`, and support bfloat16 and `requires_grad`. They keep no reference: the caller must
# keep the tensor alive.

_Char = ctypes.c_char
_MEMMOVE: int = ctypes.cast(ctypes.memmove, ctypes.c_void_p).value or 0
_SIGNATURE = (None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)


@lru_cache(maxsize=4096)
def make_array_type(nbytes: int) -> type[ctypes.Array[ctypes.c_char]]:
    """Return the ctypes array type of a length. It is cached, since creating a type is slow."""
    return _Char * nbytes


def view_memory(address: int, nbytes: int) -> memoryview:
    """Return a writable memoryview of the bytes at an address."""
    return memoryview(make_array_type(nbytes).from_address(address)).cast("B") if nbytes else memoryview(b"")


def wrap_memory(address: int, nbytes: int) -> ctypes.Array[ctypes.c_char]:
    """Return a buffer of the bytes at an address, cheaper than `view_memory` if it is not sliced."""
    return make_array_type(nbytes).from_address(address)


def address_of(data: memoryview) -> int:
    """Return the address of a writable memoryview's bytes."""
    return ctypes.addressof(ctypes.c_char.from_buffer(data)) if len(data) else 0


def detach_view(data: memoryview) -> memoryview:
    """Return a view of the same bytes that shares nothing with other views.

    Views that are sliced from one another share a counter. CPython 3.14 changes it without a lock, also without the
    GIL. A lost change can release the memory while it is used.

    >>> whole = memoryview(bytearray(b"abcdef"))
    >>> bytes(detach_view(whole[2:4]))
    b'cd'
    """
    whole = memoryview(data.obj).cast("B")
    begin = address_of(data) - address_of(whole)
    return whole[begin : begin + len(data)]


copy_memory = ctypes.CFUNCTYPE(*_SIGNATURE)(_MEMMOVE)
"""`copy_memory(to, from, nbytes)` with the GIL released: for long copies."""

copy_memory_short = ctypes.PYFUNCTYPE(*_SIGNATURE)(_MEMMOVE)
"""`copy_memory` with the GIL held: releasing it costs more than a copy of some KiB."""

SHORT = 32 << 10
"""Length up to which `copy_memory_short` is faster."""

_POPULATE_WRITE = 23


def populate_pages(address: int, nbytes: int) -> bool:
    """Allocate the pages of a range at once; return False if the kernel does not support it.

    This is much faster than page faults during a copy. If memory is exhausted, it raises an error, while a page fault
    would end the process by a signal.
    """
    if libc.madvise is None:
        return False
    if libc.madvise(ctypes.c_void_p(address), ctypes.c_size_t(nbytes), _POPULATE_WRITE) == 0:
        return True
    if ctypes.get_errno() in (errno.ENOMEM, errno.EFAULT):
        raise MemoryError(f"out of memory for {counted(nbytes, 'byte')}: {os.strerror(ctypes.get_errno())}")
    return False  # before Linux 5.14
