"""torchft's own test of transports, and its real Manager, whose replica is killed: `python on_torchft.py`."""

import importlib.util
import re
import subprocess
import sys
import unittest
import warnings
from pathlib import Path

from tests.helpers.missing_packages import stand_in_for

stand_in_for("opentelemetry", "parameterized")
warnings.simplefilter("ignore")

import pytest  # noqa: E402
import torch  # noqa: E402
from torchft.checkpointing.transport import CheckpointTransport  # noqa: E402
from torchft.checkpointing.transport_test import run_multi_recovery_test  # noqa: E402
from torchft.coordination import LighthouseServer  # noqa: E402

from snapshot import SnapshotError  # noqa: E402
from snapshot_trainers.torchft import METHODS, SnapshotTransport  # noqa: E402


class Test(unittest.TestCase):
    def test_torchft_s_own_test_of_transports_passes(self):
        run_multi_recovery_test(self, lambda rank, world: SnapshotTransport(host="127.0.0.1"), torch.device("cpu"))

    def test_torchft_checkpoint_transport_has_no_other_abstract_methods(self):
        assert CheckpointTransport.__abstractmethods__ <= METHODS.keys()

    def test_torchft_killed_replica_restarts_with_the_weights_of_the_other(self):
        lighthouse = LighthouseServer(
            bind="127.0.0.1:0", min_replicas=1, join_timeout_ms=500, heartbeat_timeout_ms=1000
        )
        first, second = (Replica(number, lighthouse.address()) for number in range(2))
        try:
            first.read_until(lambda step, replicas: step >= 20 and replicas == 2)
            second.kill()
            first.read_until(lambda step, replicas: replicas == 1)
            second = Replica(1, lighthouse.address())
            step = second.read_until(lambda step, replicas: replicas == 2)
            assert step > 20, "it does not begin again"
            last = second.read_until(lambda now, replicas: now >= step + 20)
            first.read_until(lambda now, replicas: now >= last)
            shared = [each for each in second.weights if each in first.weights]
            assert len(shared) >= 20
            assert [first.weights[each] for each in shared] == [second.weights[each] for each in shared]
        finally:
            first.kill()
            second.kill()
            lighthouse.shutdown()


class Replica:
    """A process with `examples/torchft_training.py`, and the weights that it shows for each step."""

    def __init__(self, number, address):
        command = [sys.executable, __file__, str(number), address]
        self.weights = {}
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)

    def read_until(self, enough):
        """Read lines until a step is enough, and return it."""
        for line in self._process.stdout:
            found = re.fullmatch(r"step (\d+) of (\d+): weights (\S+)", line.strip())
            if found:
                self.weights[int(found[1])] = found[3]
                if enough(int(found[1]), int(found[2])):
                    return int(found[1])
        raise AssertionError("the replica has ended")

    def kill(self):
        self._process.kill()
        self._process.wait()
        self._process.stdout.close()


class Contract(unittest.TestCase):
    def test_torchft_unknown_version_is_refused(self):
        before, CheckpointTransport.recv_checkpoint = CheckpointTransport.recv_checkpoint, lambda self, src, step: None
        try:
            with pytest.raises(SnapshotError, match=r"recv_checkpoint must have the parameters .*use torchft 0.2"):
                SnapshotTransport()
        finally:
            CheckpointTransport.recv_checkpoint = before


def train(number, address):
    path = Path(__file__).parents[3] / "examples" / "torchft_training.py"
    spec = importlib.util.spec_from_file_location("torchft_training", path)
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    example.main(number, steps=1_000_000, address=address)


if __name__ == "__main__":
    if len(sys.argv) > 2:
        train(int(sys.argv[1]), sys.argv[2])
    else:
        unittest.main()
