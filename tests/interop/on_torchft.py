"""torchft's own test of transports, and its Manager's check of the class: `python on_torchft.py`."""

import unittest
import warnings

from tests.interop.missing_packages import stand_in_for

stand_in_for("opentelemetry", "parameterized")
warnings.simplefilter("ignore")

import pytest  # noqa: E402
import torch  # noqa: E402
import torchft  # noqa: E402
from torchft.checkpointing.transport import CheckpointTransport  # noqa: E402
from torchft.checkpointing.transport_test import run_multi_recovery_test  # noqa: E402

from snapshot import SnapshotError  # noqa: E402
from snapshot.interop.torchft import METHODS, SnapshotTransport  # noqa: E402


class Test(unittest.TestCase):
    def test_torchft_s_own_test_of_transports_passes(self):
        run_multi_recovery_test(self, lambda rank, world: SnapshotTransport(host="127.0.0.1"), torch.device("cpu"))

    def test_the_manager_calls_the_methods_of_the_contract(self):
        assert torchft.Manager is not None
        assert CheckpointTransport.__abstractmethods__ <= METHODS.keys()

    def test_an_unknown_version_is_an_error_by_name(self):
        before, CheckpointTransport.recv_checkpoint = CheckpointTransport.recv_checkpoint, lambda self, src, step: None
        try:
            with pytest.raises(SnapshotError, match=r"recv_checkpoint must have the parameters .*use torchft 0.2"):
                SnapshotTransport()
        finally:
            CheckpointTransport.recv_checkpoint = before


if __name__ == "__main__":
    unittest.main()
