"""GGUF files that tests write."""

import numpy as np
import torch

from snapshot_gguf.reader import BLOCK_BYTES, NewTensor, encode_header, quantise


def file_of(tensors, values=None, alignment=32):
    """The bytes of a file with tensors of float32, float16, bfloat16, or Q8_0 (a pair of the tensor and its type)."""
    given = {name: each if isinstance(each, tuple) else (each, None) for name, each in tensors.items()}
    news = [
        NewTensor(name, kind or str(each.dtype).removeprefix("torch."), tuple(each.shape))
        for name, (each, kind) in given.items()
    ]
    header, offsets = encode_header(values or {}, alignment, news)
    data = bytearray(header)
    for offset, new, (each, _) in zip(offsets, news, given.values(), strict=True):
        data += bytes(offset - len(data)) + (blocks_of(each) if new.kind == "Q8_0" else bytes_of(each))
    return bytes(data).replace(b"sp1it.", b"split.")  # a new file does not get these


def bytes_of(tensor):
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def blocks_of(tensor):
    blocks = torch.empty(tensor.numel() // 32, BLOCK_BYTES, dtype=torch.uint8)
    quantise(tensor.reshape(-1, 32), blocks)
    return bytes_of(blocks)


def rounded(tensor):
    """The values of Q8_0, as numpy computes them."""
    rows = tensor.reshape(-1, 32).numpy()
    factors = (np.abs(rows).max(1, keepdims=True) / np.float32(127)).astype(np.float32)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        scaled = rows * np.where(factors == 0, np.float32(0), np.float32(1) / factors)
        whole = np.nan_to_num(np.sign(scaled) * np.floor(np.abs(scaled) + np.float32(0.5)))
        made = whole.astype(np.int8).astype(np.float32) * factors.astype(np.float16).astype(np.float32)
    return torch.from_numpy(made).view(tensor.shape)
