"""Test tools for plugins and applications: the storage contract as tests, and storages and HTTP with injected faults.

Requires pytest.
"""

import pytest

pytest.register_assert_rewrite(
    "snapshot.testing.bulk", "snapshot.testing.conformance", "snapshot.testing.opened", "snapshot.testing.small"
)

from snapshot.runtime.loop import end_threads  # noqa: E402
from snapshot.testing.conformance import StorageTests  # noqa: E402 - its asserts are rewritten on import
from snapshot.testing.proxy import FaultProxy  # noqa: E402
from snapshot.testing.storages import TappedStorage, faulty, recording, stalling, tapped  # noqa: E402
from snapshot.testing.taps import Damage, Fault, Log, Operation, Stall, Tap  # noqa: E402
from snapshot.testing.traffic import HTTPFault, Mishap, Passed  # noqa: E402

__all__ = [
    "StorageTests",
    "TappedStorage",
    "tapped",
    "recording",
    "faulty",
    "stalling",
    "Tap",
    "Operation",
    "Log",
    "Fault",
    "Damage",
    "Stall",
    "end_threads",
    "FaultProxy",
    "HTTPFault",
    "Mishap",
    "Passed",
]
