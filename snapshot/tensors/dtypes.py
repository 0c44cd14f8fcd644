"""Sizes of dtypes by their names in a manifest, without torch, which listings do not need."""

from __future__ import annotations

from functools import lru_cache

_NAMES = {
    1: "bool int8 uint8 float8_e4m3fn float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz float8_e8m0fnu float4_e2m1fn_x2 "
    "bits8 bits1x8 bits2x4 bits4x2 int1 int2 int3 int4 int5 int6 int7 uint1 uint2 uint3 uint4 uint5 uint6 uint7",
    2: "int16 uint16 float16 bfloat16 bits16",
    4: "int32 uint32 float32 complex32",
    8: "int64 uint64 float64 complex64",
    16: "complex128",
}
SIZES: dict[str, int] = {name: size for size, names in _NAMES.items() for name in names.split()}
"""Bytes of an element, for the dtypes of torch 2.13. What reads tensors asks the torch that is here."""


@lru_cache(256)
def find_itemsize(name: str) -> int | None:
    """Return the bytes of an element; None if the torch that is here does not have the dtype."""
    from snapshot.tensors.memory import ITEMSIZE

    return ITEMSIZE.get(name)
