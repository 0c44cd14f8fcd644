"""A folder of NumPy arrays, one `.npy` file for each tensor: how it is read, and how it is written."""

import io
from urllib.parse import quote, unquote

import numpy as np

from snapshot.errors import CorruptSnapshotError, UnsupportedFormatError
from snapshot.formats.foreign import make_document
from snapshot.manifest.document import ForeignFile
from snapshot.manifest.entries import TensorEntry
from snapshot.manifest.paths import encode_component
from snapshot.plan.layout import Extent, FilePlan
from snapshot.transform.export import ExportPlan

DTYPES = {np.dtype(code).name for code in "?bBhHiIlLefdFD"}
"""The dtypes that NumPy and torch have."""
HEADER = 4096
"""More bytes than the header of an array has."""


async def describe_folder(folder):
    """Describe all arrays of a folder, or return None if it has none."""
    names = [name for name in await folder.names() if name.endswith(".npy")]
    if not names:
        return None
    sizes = [(await folder.storage.stat(name)).size for name in names]
    return await _describe(folder.storage, dict(zip(names, sizes, strict=True)))


async def describe_file(storage, name, size, limit):
    """Describe a single array."""
    return await _describe(storage, {name: size})


async def _describe(storage, sizes):
    manifest, heads = {}, b""
    for name, size in sizes.items():
        head = bytearray(min(size, HEADER))
        await storage.read_into(name, 0, [memoryview(head)])
        path = encode_component(unquote(name.removesuffix(".npy")))
        manifest[f"0/{path}"] = _entry(storage.url.join(name), name, bytes(head), size)
        heads += bytes(head)
    files = {name: ForeignFile(size) for name, size in sizes.items()}
    return make_document("npy", "1", storage.url, heads, manifest=manifest, files=files)


def _entry(where, name, head, size):
    """Return the place, dtype and shape of an array."""
    file = io.BytesIO(head)
    try:
        version = np.lib.format.read_magic(file)
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, by_column, dtype = read(file)
    except ValueError as error:
        raise CorruptSnapshotError(f"{where}: {error}") from error
    if by_column or dtype.byteorder == ">" or dtype.kind not in "buifc":
        raise UnsupportedFormatError(f"{where}: the array must be in C order, of numbers in this machine's byte order")
    begin, nbytes = file.tell(), int(np.prod(shape, dtype=object)) * dtype.itemsize
    if begin + nbytes != size:
        raise CorruptSnapshotError(f"{where}: the file must have {begin + nbytes} bytes, got {size}")
    return TensorEntry(name, (begin, size), dtype.name, tuple(shape))


def plan(export, request):
    """Plan one file for each tensor. The library reads, casts and writes the bytes."""
    made = ExportPlan("npy")
    export.add_named(made, list(export.named_tensors(made)), DTYPES)
    for number, leaf in enumerate(made.leaves):
        header = io.BytesIO()
        dtype = np.lib.format.dtype_to_descr(np.dtype(leaf.dtype))
        described = {"descr": dtype, "fortran_order": False, "shape": leaf.shape}
        np.lib.format.write_array_header_1_0(header, described)
        begin = len(header.getvalue())
        end = begin + leaf.nbytes
        extents = (Extent(number, begin, end),) if leaf.nbytes else ()
        made.files.append((f"{quote(leaf.path, safe='')}.npy", FilePlan(header.getvalue(), extents, end)))
    made.markers = tuple(name for name, _ in made.files[:1])  # the checkpoint is there when this file is
    made.more = r".*\.npy"
    return made
