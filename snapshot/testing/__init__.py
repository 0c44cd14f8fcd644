"""Test tools for plugins and applications: the storage contract as tests, and storages with injected faults.

Requires pytest.
"""

import pytest

pytest.register_assert_rewrite("snapshot.testing.conformance")

from snapshot.io.loop import end_threads  # noqa: E402
from snapshot.testing.conformance import StorageTests  # noqa: E402 - its asserts are rewritten on import
from snapshot.testing.storages import (  # noqa: E402
    Damage,
    Fault,
    Log,
    Stall,
    StorageCall,
    Tap,
    TappedStorage,
    faulty,
    recording,
    stalling,
    tapped,
)

__all__ = [
    "StorageTests",
    "TappedStorage",
    "tapped",
    "recording",
    "faulty",
    "stalling",
    "Tap",
    "StorageCall",
    "Log",
    "Fault",
    "Damage",
    "Stall",
    "end_threads",
]
