"""States for DCP, and what it takes to say that two results of it are the same to the bit."""

import contextlib
import warnings

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.tensor import DTensor

from snapshot.interop.dcp import SnapshotReader, SnapshotWriter


class Theirs:
    """Torch's own storage."""

    name = "torch"

    def writer(self, where, **options):
        return dcp.FileSystemWriter(f"{where}/torch", **options)

    def reader(self, where, **options):
        return dcp.FileSystemReader(f"{where}/torch")


class Ours:
    """The library's."""

    name = "ours"

    def writer(self, where, **options):
        return SnapshotWriter(f"{where}/ours", **options)

    def reader(self, where, **options):
        return SnapshotReader(f"{where}/ours", **options)


@contextlib.contextmanager
def quiet():
    """Without torch's words about what a test does on purpose."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is (disabled|unavailable)")
        warnings.filterwarnings("ignore", message="Detected an existing checkpoint")
        warnings.filterwarnings("ignore", message="Casting complex values to real")
        warnings.filterwarnings("ignore", message="TypedStorage is deprecated")
        warnings.filterwarnings("ignore", message="Please use DTensor instead", category=FutureWarning)
        yield


def save(state, writer, **options):
    with quiet():
        return dcp.save(state, storage_writer=writer, **options)


def load(state, reader, **options):
    with quiet():
        dcp.load(state, storage_reader=reader, **options)
    return state


def told(value):
    """A value with its types, its tensors' dtypes, shapes and bytes: equal only if all of that is."""
    if isinstance(value, DTensor):
        return "DTensor", str(value.placements), told(value.to_local())
    if isinstance(value, torch.Tensor):
        held = value.detach().cpu().contiguous().resolve_conj().resolve_neg()
        data = held.reshape(-1).view(torch.uint8).numpy().tobytes() if held.numel() else b""
        return type(value).__name__, str(value.dtype), tuple(value.shape), value.requires_grad, data
    if isinstance(value, dict):
        return type(value).__name__, [(type(key).__name__, key, told(each)) for key, each in value.items()]
    if isinstance(value, (list, tuple)):
        return type(value).__name__, list(map(told, value))
    if isinstance(value, float):
        return "float", value.hex()
    return type(value).__name__, repr(value)


def outcome(work, *args):
    """What it returned, or of which classes the errors are that it raised, rank by rank."""
    try:
        return "returned", told(work(*args))
    except CheckpointException as error:
        return "raised", sorted((rank, type(wrapped[0]).__name__) for rank, wrapped in error.failures.items())
    except Exception as error:  # noqa: BLE001 - whatever it is, it is compared
        return "raised", type(error).__name__


def emptied(state):
    """The same structure, with other values: what a load has to bring back."""
    if isinstance(state, torch.Tensor):
        return torch.zeros_like(state)
    if isinstance(state, dict):
        return {key: emptied(each) for key, each in state.items()}
    if type(state) is list:
        return [emptied(each) for each in state]
    return None


def model(seed=0):
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.LayerNorm(8), torch.nn.Linear(8, 5, bias=False))


def trained(seed=0):
    """A model and an optimizer that has state."""
    made = model(seed)
    optimizer = torch.optim.AdamW(made.parameters(), lr=0.1 + seed)
    made(torch.ones(2, 6)).sum().backward()
    optimizer.step()
    return made, optimizer
