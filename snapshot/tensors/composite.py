"""Tensors with more state than their bytes: memory order, subclasses, sparse layouts, generators."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from snapshot.errors import CorruptSnapshotError
from snapshot.saved import GENERATOR, SavedObject, class_name
from snapshot.tensors.memory import prefer_huge_pages
from snapshot.text import counted

_PARAMETER = "torch.nn.parameter.Parameter"
_COMPRESSED: dict[torch.layout, tuple[str, str, str]] = {
    torch.sparse_csr: ("sparse_csr", "crow_indices", "col_indices"),
    torch.sparse_csc: ("sparse_csc", "ccol_indices", "row_indices"),
    torch.sparse_bsr: ("sparse_bsr", "crow_indices", "col_indices"),
    torch.sparse_bsc: ("sparse_bsc", "ccol_indices", "row_indices"),
}
_LAYOUTS = {kind: layout for layout, (kind, _, _) in _COMPRESSED.items()}


def find_stride_order(tensor: torch.Tensor) -> tuple[int, ...] | None:
    """Return the order of a tensor's dimensions in memory if it is dense but not in C order; else None."""
    if tensor.is_contiguous() or tensor.numel() == 0:
        return None
    strides, shape = tensor.stride(), tensor.shape
    order = tuple(sorted(range(tensor.dim()), key=lambda axis: (-strides[axis], axis)))
    expected = 1
    for axis in reversed(order):
        if shape[axis] != 1:
            if strides[axis] != expected:
                return None
            expected *= shape[axis]
    return order


def allocate_tensor(
    shape: tuple[int, ...],
    dtype: torch.dtype,
    order: tuple[int, ...] | None = None,
    device: torch.device | str = "cpu",
) -> torch.Tensor:
    """Return a new tensor with its dimensions in memory in the given order."""
    made = torch.empty(shape if order is None else [shape[axis] for axis in order], dtype=dtype, device=device)
    if made.is_cpu:
        prefer_huge_pages(made)
    if order is None:
        return made
    back = [order.index(axis) for axis in range(len(shape))]
    return made.permute(back)


def is_same_view(twin: torch.Tensor, tensor: torch.Tensor) -> bool:
    """Return True if two tensors that begin at one address are the same tensor."""
    return (
        twin.dtype == tensor.dtype
        and twin.shape == tensor.shape
        and twin.stride() == tensor.stride()
        and twin.device == tensor.device
        and twin.is_conj() == tensor.is_conj()
        and twin.is_neg() == tensor.is_neg()
        and type(twin) is type(tensor)
        and twin.requires_grad == tensor.requires_grad
    )


def is_freed(tensor: torch.Tensor) -> bool:
    """Return True if a tensor with elements has no memory, as when a sharded module has freed it."""
    return tensor.untyped_storage().nbytes() == 0 or tensor._is_zerotensor()


def _is_plain(kind: type[torch.Tensor]) -> bool:
    return kind.__torch_dispatch__ is torch.Tensor.__torch_dispatch__


def plain_subclass_name(tensor: torch.Tensor) -> str | None:
    """Return the name of a tensor's class if its data is its whole state; None otherwise."""
    kind = type(tensor)
    if not _is_plain(kind):
        return None
    return class_name(kind)


def restore_class(path: str, tensor: torch.Tensor, subclass: str | None, requires_grad: bool) -> torch.Tensor:
    """Give a plain tensor the class and `requires_grad` that it was saved with.

    A class other than Parameter must have been imported already: a snapshot cannot make this process import anything.
    """
    if requires_grad and not (tensor.is_floating_point() or tensor.is_complex()):
        raise CorruptSnapshotError(f"{path}: requires_grad must be False for {tensor.dtype}, got True")
    if subclass == _PARAMETER:
        return torch.nn.Parameter(tensor, requires_grad)
    if subclass is not None:
        module, _, name = subclass.rpartition(".")
        # read `__dict__`, since `getattr` could run a module's code
        kind = getattr(sys.modules.get(module), "__dict__", {}).get(name)
        if isinstance(kind, type) and issubclass(kind, torch.Tensor) and _is_plain(kind):
            with torch.no_grad():
                tensor = tensor.as_subclass(kind)
        else:
            warnings.warn(
                f"{path}: saved as {subclass}, which is not imported here; restored as a plain tensor",
                stacklevel=2,
            )
    return tensor.requires_grad_() if requires_grad else tensor


_INTEGERS = {"qint8": torch.qint8, "quint8": torch.quint8, "qint32": torch.qint32}
_FORMATS = {(0, 2, 3, 1): torch.channels_last, (0, 2, 3, 4, 1): torch.channels_last_3d}
"""The only orders that torch supports for tensors quantised by channel."""

Decomposed = tuple[str, dict[str, torch.Tensor], dict[str, Any]]


def decompose_tensor(tensor: torch.Tensor) -> Decomposed | None:
    """Return (kind, parts, parameters) of a tensor composed of tensors; None for an unknown one."""
    tensor = tensor.detach()
    if tensor.layout is torch.sparse_coo:
        parts = {"indices": tensor._indices(), "values": tensor._values()}
        return "sparse_coo", parts, {"shape": list(tensor.shape), "coalesced": tensor.is_coalesced()}
    if tensor.layout in _COMPRESSED:
        kind, outer, inner = _COMPRESSED[tensor.layout]
        parts = {outer: getattr(tensor, outer)(), inner: getattr(tensor, inner)(), "values": tensor.values()}
        return kind, parts, {"shape": list(tensor.shape)}
    if tensor.layout is torch.strided and tensor.is_quantized:
        return _decompose_quantised(tensor)
    return None


def _decompose_quantised(tensor: torch.Tensor) -> Decomposed | None:
    dtype = str(tensor.dtype).removeprefix("torch.")
    if dtype not in _INTEGERS:  # several values per byte
        return None
    scheme, order = tensor.qscheme(), find_stride_order(tensor)
    if scheme in (torch.per_tensor_affine, torch.per_tensor_symmetric):
        params = {"dtype": dtype, "scale": float(tensor.q_scale()).hex(), "zero_point": int(tensor.q_zero_point())}
        params |= {"order": list(order)} if order is not None else {}
        return "quantized_per_tensor", {"integers": tensor.int_repr()}, params
    if scheme in (torch.per_channel_affine, torch.per_channel_symmetric):
        parts = {
            "integers": tensor.int_repr(),
            "scales": tensor.q_per_channel_scales(),
            "zero_points": tensor.q_per_channel_zero_points(),
        }
        params = {"dtype": dtype, "axis": int(tensor.q_per_channel_axis())}
        params |= {"order": list(order)} if order in _FORMATS else {}
        return "quantized_per_channel", parts, params
    return None


Parts = Mapping[str, torch.Tensor]


def compose_tensor(path: str, kind: str, parts: Parts, params: Mapping[str, Any]) -> torch.Tensor:
    """Return the tensor that `decompose_tensor` has decomposed."""
    build = _BUILDERS.get(kind)
    if build is None:
        raise CorruptSnapshotError(f"{path}: unknown kind of tensor {kind!r}")
    try:
        with torch.no_grad():
            made = build(parts, params)
    except Exception as error:  # torch raises many kinds of errors for invalid parts
        raise CorruptSnapshotError(f"{path}: cannot build a {kind} tensor from its parts: {error}") from error
    return restore_class(path, made, params.get("subclass"), bool(params.get("requires_grad")))


@contextmanager
def _without_notes() -> Iterator[None]:
    """Hide torch's notes on sparse tensors. One of torch 2.11 asks for the argument that we pass."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*beta state.*|Sparse invariant checks")
        yield


def _build_sparse_coo(parts: Parts, params: Mapping[str, Any]) -> torch.Tensor:
    values = parts["values"]
    with _without_notes():
        made = torch.sparse_coo_tensor(
            parts["indices"], values, params["shape"], device=values.device, check_invariants=True
        )
    return made._coalesced_(bool(params["coalesced"]))


def _make_compressed_builder(kind: str) -> Callable[[Parts, Mapping[str, Any]], torch.Tensor]:
    _, outer, inner = _COMPRESSED[_LAYOUTS[kind]]

    def build(parts: Parts, params: Mapping[str, Any]) -> torch.Tensor:
        with _without_notes():
            return torch.sparse_compressed_tensor(
                parts[outer],
                parts[inner],
                parts["values"],
                params["shape"],
                layout=_LAYOUTS[kind],
                device=parts["values"].device,
                check_invariants=True,
            )

    return build


def _order_integers(integers: torch.Tensor, params: Mapping[str, Any]) -> tuple[torch.Tensor, list[int]]:
    """Return the integers in their memory order, and the order of the dimensions."""
    order = params.get("order") or list(range(integers.dim()))
    if sorted(order) != list(range(integers.dim())):
        raise ValueError(f"invalid order {order} of {counted(integers.dim(), 'dimension')}")
    return integers.permute(order).contiguous(), order


def _check_zero_points(zero_points: Any, integers: torch.Tensor) -> None:
    """Raise if a zero point is out of range. torch accepts it, and fails on access."""
    known = torch.iinfo(integers.dtype)
    if not bool(((zero_points >= known.min) & (zero_points <= known.max)).all()):
        raise ValueError(f"zero points must be in the range of {integers.dtype}")


def _build_per_tensor(parts: Parts, params: Mapping[str, Any]) -> torch.Tensor:
    integers, order = _order_integers(parts["integers"], params)
    _check_zero_points(torch.tensor(params["zero_point"], device="cpu"), integers)
    made = torch._empty_affine_quantized(
        integers.shape,
        scale=float.fromhex(params["scale"]),
        zero_point=params["zero_point"],
        dtype=_INTEGERS[params["dtype"]],
        device="cpu",
    )
    made.untyped_storage().copy_(integers.untyped_storage()[: integers.nbytes])
    return made.permute([order.index(axis) for axis in range(len(order))]) if "order" in params else made


def _build_per_channel(parts: Parts, params: Mapping[str, Any]) -> torch.Tensor:
    integers, order = _order_integers(parts["integers"], params)
    _check_zero_points(parts["zero_points"], integers)
    made = torch._empty_per_channel_affine_quantized(
        parts["integers"].shape,
        scales=parts["scales"],
        zero_points=parts["zero_points"],
        axis=params["axis"],
        dtype=_INTEGERS[params["dtype"]],
        device="cpu",
        memory_format=_FORMATS[tuple(order)] if "order" in params else torch.contiguous_format,
    )
    made.untyped_storage().copy_(integers.untyped_storage()[: integers.nbytes])
    return made


_BUILDERS: dict[str, Callable[[Parts, Mapping[str, Any]], torch.Tensor]] = {
    "sparse_coo": _build_sparse_coo,
    **{kind: _make_compressed_builder(kind) for kind in _LAYOUTS},
    "quantized_per_tensor": _build_per_tensor,
    "quantized_per_channel": _build_per_channel,
}


# States of torch's random number generators, as tensors of bytes.

KIND = GENERATOR


def read_device(path: str, params: Mapping[str, Any]) -> torch.device:
    """Return the device of a saved generator."""
    name = params.get("device")
    try:
        if isinstance(name, str):
            return torch.device(name)
    except RuntimeError:
        pass
    raise CorruptSnapshotError(f"{path}: invalid device of a generator: {str(name)[:80]!r}")


def make_generator(path: str, params: Mapping[str, Any], state: torch.Tensor) -> Any:
    """Return a generator in this state, or its device and state if this machine lacks the device."""
    device = read_device(path, params)
    try:
        generator = torch.Generator(device)
    except (RuntimeError, AssertionError):
        return SavedObject(KIND, "torch.Generator", {"device": device, "state": state})
    return fill_generator(path, generator, state)


def fill_generator(path: str, generator: torch.Generator, state: torch.Tensor) -> torch.Generator:
    """Set a generator's state."""
    try:
        generator.set_state(state.cpu())
    except (RuntimeError, TypeError) as error:
        raise CorruptSnapshotError(f"{path}: invalid state of a generator on {generator.device}: {error}") from error
    return generator
