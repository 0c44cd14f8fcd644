"""Suppression of torch's own warnings, which users of the command cannot act on."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def mute_torch_warnings() -> Iterator[None]:
    """Hide the warnings of torch, but not those of this library."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"(?s).*(Triggered internally at|ComplexHalf support)")
        warnings.filterwarnings("ignore", module=r"torch\b")
        yield
