"""Torch's own warnings are for who writes programs: whoever looks at a checkpoint can do nothing about them."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def mute_torch_warnings() -> Iterator[None]:
    """Within, what torch itself warns of is not shown; what we do is."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"(?s).*(Triggered internally at|ComplexHalf support)")
        warnings.filterwarnings("ignore", module=r"torch\b")
        yield
