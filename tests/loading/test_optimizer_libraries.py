"""Optimizers of torch and of other libraries: what a take accepts restores into itself, bit for bit."""

import contextlib
import copy
import inspect
import warnings

import pytest
import torch

from snapshot import RestoreError, Snapshot, StateDict, TakeOptions
from snapshot.errors import UnsafeObjectError
from tests.helpers.states import expect_equal

pytestmark = pytest.mark.libraries

LIBRARIES = ("torch.optim", "torchao.optim", "pytorch_optimizer", "schedulefree")
NOT_BUILT = {
    "pytorch_optimizer.BSAM", "pytorch_optimizer.GSAM", "pytorch_optimizer.WSAM", "pytorch_optimizer.DeMo",
    "pytorch_optimizer.DistributedMuon", "torchao.optim.CPUOffloadOptimizer",
}  # fmt: skip
"""Those that need another package, a process group, an accelerator or a base of their own."""
PICKLED = {"pytorch_optimizer.Conda", "pytorch_optimizer.ScalableShampoo"}
"""Those whose state has objects of their own classes."""


def classes():
    """Yield each optimizer class that is installed."""
    for library in LIBRARIES:
        module = pytest.importorskip(library) if library == "torch.optim" else _imported(library)
        for name, kind in vars(module).items() if module else ():
            if inspect.isclass(kind) and issubclass(kind, torch.optim.Optimizer) and kind is not torch.optim.Optimizer:
                yield f"{library}.{name}", kind


def _imported(name):
    with warnings.catch_warnings(), contextlib.suppress(ImportError):
        warnings.simplefilter("ignore")
        return __import__(name, fromlist=["optim"])
    return None


def model_of():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.LayerNorm(8), torch.nn.Linear(8, 8, bias=False))


def optimizer_of(kind, model):
    """Return an optimizer, by the first signature that it accepts."""
    every = list(model.parameters())
    flat = [each for each in every if each.ndim == 2]
    rest = [each for each in every if each.ndim != 2]
    ways = (
        lambda: kind(every, lr=1e-3),
        lambda: kind(every),
        lambda: kind(flat, lr=1e-3),
        lambda: kind(model, lr=1e-3),
        lambda: kind(torch.optim.AdamW(every, lr=1e-3)),
        lambda: kind(every, torch.optim.AdamW),
        lambda: kind(every, num_iterations=10),
        lambda: kind([{"params": flat, "use_muon": True}, {"params": rest, "use_muon": False}]),
    )
    for way in ways:
        with contextlib.suppress(TypeError, ValueError, AttributeError, KeyError, RuntimeError):
            return way()
    pytest.skip("cannot be built alone")


def step(model, optimizer, seed):
    """Do a step; some optimizers need more than plain gradients, and keep the state that they have."""
    given = torch.randn(4, 8, generator=torch.Generator().manual_seed(seed))

    def closure():
        optimizer.zero_grad()
        loss = model(given).square().mean()
        loss.backward()
        return loss

    if hasattr(optimizer, "train"):
        optimizer.train()
    with contextlib.suppress(RuntimeError, NotImplementedError, ValueError, TypeError):
        closure()
        optimizer.step(closure)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("name", "kind"), [pytest.param(name, kind, id=name) for name, kind in classes() if name not in NOT_BUILT]
)
def test_optimizers_of_torch_and_other_libraries_restore_exactly(name, kind):
    model = model_of()
    optimizer = optimizer_of(kind, model)
    for seed in range(2):
        step(model, optimizer, seed)
    snapshot = Snapshot.take(f"memory://optimizers/{name}", {"model": model, "optimizer": optimizer}, overwrite=True)
    saved, weights = copy.deepcopy(optimizer.state_dict()), copy.deepcopy(model.state_dict())
    opened = Snapshot(snapshot.path, allow_pickle=name in PICKLED)
    if name in PICKLED:
        with pytest.raises(UnsafeObjectError):
            snapshot.restore({"model": model, "optimizer": optimizer})
    used = model_of()
    stepped = optimizer_of(kind, used)
    step(used, stepped, 9)
    fresh = model_of()
    for live, target in ((fresh, optimizer_of(kind, fresh)), (used, stepped), (model, optimizer)):
        opened.restore({"model": live, "optimizer": target})
        expect_equal(saved, target.state_dict())
        expect_equal(weights, live.state_dict())


class Around(torch.optim.Optimizer):
    """An optimizer around another one, with a state dict of its own form."""

    def __init__(self, inner):
        self.inner, self.slow = inner, torch.zeros(3)
        self.defaults = inner.defaults

    @property
    def param_groups(self):
        return self.inner.param_groups

    @property
    def state(self):
        return self.inner.state

    def state_dict(self):
        return {"slow": self.slow, "inner": self.inner.state_dict()}

    def load_state_dict(self, state):
        self.slow = state["slow"]
        self.inner.load_state_dict(state["inner"])


class Hidden(Around):
    """One that hides what torch's optimizers show."""

    param_groups = property()


@pytest.mark.parametrize("kind", [Around, Hidden])
@pytest.mark.parametrize("staging", ["blocking", "overlapped"])
def test_optimizer_without_param_groups_is_restored_unchanged(kind, staging):
    model = model_of()
    outer = kind(torch.optim.AdamW(model.parameters()))
    step(model, outer.inner, 1)
    outer.slow.fill_(5)
    expected = copy.deepcopy(outer.state_dict())
    app = {"model": model, "optimizer": outer}
    snapshot = Snapshot.async_take(
        "memory://optimizers/own", app, overwrite=True, options=TakeOptions(staging=staging)
    ).wait()
    other = model_of()
    target = kind(torch.optim.AdamW(other.parameters()))
    snapshot.restore({"model": other, "optimizer": target})
    expect_equal(expected, target.state_dict())
    snapshot.restore({"optimizer": target}, strict=False)
    expect_equal(expected, target.state_dict())


def test_optimizer_restore_from_another_kind_of_state_is_refused():
    snapshot = Snapshot.take("memory://optimizers/none", {"optimizer": StateDict(x=1)}, overwrite=True)
    with pytest.raises(RestoreError, match="no optimizer's parameter groups"):
        snapshot.restore({"optimizer": torch.optim.SGD(model_of().parameters())})
