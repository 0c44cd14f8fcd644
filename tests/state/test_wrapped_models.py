"""A snapshot of a wrapped model restores into the plain one and the other way round, whatever the wrappers."""

import contextlib
import itertools
import tempfile
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.optim.swa_utils import AveragedModel

from snapshot import ModelState, RestoreError, Snapshot, StateDict

URL = "memory://wrappers"


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(3, 4)
        self.second = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 2))


@contextlib.contextmanager
def without_deprecations():
    """Ignore the warnings of torch.compile about itself."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        yield


@pytest.fixture(scope="module")
def group():
    with without_deprecations():
        torch.compile(nn.Linear(1, 1))  # the first one starts processes in torch 2.6, which stay
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", 1), rank=0, world_size=1)
        yield
        dist.destroy_process_group()


def _plain(net):
    return net


class FSDP1Names(nn.Module):
    """Names as FSDP1 gives them with `use_orig_params`, without an accelerator."""

    def __init__(self, net):
        super().__init__()
        self._fsdp_wrapped_module = net


WRAPPERS = {
    "plain": _plain,
    "ddp": nn.parallel.DistributedDataParallel,
    "dp": nn.DataParallel,
    "averaged": AveragedModel,
    "compiled": torch.compile,
    "fsdp1": FSDP1Names,
    "checkpointed": checkpoint_wrapper,
}
NESTED = [
    (outer, inner)
    for outer, inner in itertools.product(WRAPPERS, WRAPPERS)
    if (outer != "plain" or inner == "plain")
    and (outer, inner) not in (("compiled", "compiled"), ("averaged", "averaged"))  # the one makes a function, in torch
]


@pytest.fixture(autouse=True)
def quiet():
    with without_deprecations():
        yield


def wrapped(names, seed):
    torch.manual_seed(seed)
    net = Block()
    made = net
    for name in reversed(names):
        made = WRAPPERS[name](made)
    return made


def without(state):
    """A state dict without what wrappers add to names."""
    parts = ("module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
    return {".".join(part for part in name.split(".") if part not in parts): value for name, value in state.items()}


@pytest.mark.parametrize("there", NESTED, ids="-".join)
def test_wrapped_model_restores_into_every_nested_pair_of_wrappers(there, group):
    saved = wrapped(there, 1)
    Snapshot.take(URL, {"net": saved}, overwrite=True)
    expected = without(saved.state_dict())
    for here in NESTED:
        live = wrapped(here, 2)
        report = Snapshot(URL).restore({"net": live})
        more = here.count("averaged") > there.count("averaged")
        assert {line.path.rpartition(".")[2].rpartition("/")[2] for line in report.kept} == (
            {"n_averaged"} if more else set()
        )
        found = without(live.state_dict())
        for name, value in found.items():
            if name != "n_averaged":
                assert torch.equal(value, expected[name]), (there, here, name)
        if "averaged" not in there + here or there == here:
            assert len(report.renamed) == (0 if list(saved.state_dict()) == list(live.state_dict()) else 1)


def test_wrapped_model_report_names_the_removed_prefixes(group):
    Snapshot.take(URL, {"net": wrapped(["ddp", "compiled"], 1)}, overwrite=True)
    report = Snapshot(URL).restore({"net": wrapped(["plain"], 2)})
    assert [str(line) for line in report] == ["renamed    net: names matched without 'module.' and '_orig_mod.'"]


def test_wrapped_model_parts_are_matched():
    saved = Block()
    saved.second = torch.compile(saved.second)
    Snapshot.take(URL, {"net": saved}, overwrite=True)
    live = Block()
    live.first = nn.DataParallel(live.first)
    Snapshot(URL).restore({"net": live})
    assert torch.equal(live.first.module.weight, saved.first.weight)
    assert torch.equal(live.second[1].weight, saved.second._orig_mod[1].weight)


class Named(nn.Module):
    """A model with a submodule of its own that is called `module`."""

    def __init__(self, *, beside=True):
        super().__init__()
        self.module = nn.Linear(2, 2)
        if beside:
            self.weight = nn.Parameter(torch.randn(2, 2))
            self.bias = nn.Parameter(torch.randn(2))


def test_wrapped_model_prefix_is_not_a_submodule_named_module():
    saved = Named()
    Snapshot.take(URL, {"net": saved}, overwrite=True)
    plain = nn.Linear(2, 2)
    with pytest.raises(RestoreError) as caught:
        Snapshot(URL).restore({"net": plain})
    assert len(caught.value.mismatches) == 2
    Snapshot.take(URL, {"net": nn.DataParallel(saved)}, overwrite=True)
    live = Named()
    Snapshot(URL).restore({"net": live})
    assert torch.equal(live.module.weight, saved.module.weight)
    assert torch.equal(live.weight, saved.weight)


def test_wrapped_model_with_two_candidate_names_raises():
    state = {"module.w": torch.ones(2), "_orig_mod.w": torch.zeros(2)}
    Snapshot.take(URL, {"net": StateDict(state)}, overwrite=True)
    live = nn.Module()
    live.w = nn.Parameter(torch.full((2,), 7.0))
    for strict in (True, False):
        with pytest.raises(RestoreError, match=r"net/w: may be net/module.w or net/_orig_mod.w of the snapshot"):
            Snapshot(URL).restore({"net": live}, strict=strict)
    assert live.w.eq(7).all()
    Snapshot(URL).restore({"net": live}, rename={"net/module.w": "net/w"}, select=["net/w"])
    assert live.w.eq(1).all()


def test_rename_takes_precedence_over_wrapper_prefixes():
    saved = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    Snapshot.take(URL, {"net": nn.DataParallel(saved)}, overwrite=True)
    live = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    Snapshot(URL).restore({"net": live}, rename={"net/module.0": "net/module.1", "net/module.1": "net/module.0"})
    assert torch.equal(live[0].weight, saved[1].weight)
    assert torch.equal(live[1].weight, saved[0].weight)


def test_select_globs_match_the_names_in_the_application():
    saved = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    Snapshot.take(URL, {"net": nn.DataParallel(saved)}, overwrite=True)
    live = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    before = live[1].weight.detach().clone()
    Snapshot(URL).restore({"net": live}, select=["net/0.*"])
    assert torch.equal(live[0].weight, saved[0].weight)
    assert torch.equal(live[1].weight, before)


@pytest.mark.parametrize("flatten", [False, True])
@pytest.mark.parametrize(("there", "here"), list(itertools.permutations(["plain", "averaged", "dp"], 2)))
def test_wrapped_model_optimizer_of_model_state_is_renamed(there, here, flatten):
    from torch.distributed.checkpoint.state_dict import StateDictOptions

    def pair(name, seed):
        net = wrapped([name], seed)
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
        for parameter in net.parameters():
            parameter.grad = torch.randn(parameter.shape)
        optimizer.step()
        return net, optimizer

    options = StateDictOptions(flatten_optimizer_state_dict=flatten)
    saved, first = pair(there, 1)
    Snapshot.take(URL, {"all": ModelState(saved, first, options)}, overwrite=True)
    live, second = pair(here, 2)
    expecting = pytest.raises(RestoreError, match="n_averaged") if here == "averaged" else contextlib.nullcontext()
    with expecting:
        Snapshot(URL).restore({"all": ModelState(live, second, options)})
    if here == "averaged":
        return
    for a, b in zip(first.param_groups[0]["params"], second.param_groups[0]["params"], strict=True):
        assert torch.equal(a, b)
        assert torch.equal(first.state[a]["exp_avg"], second.state[b]["exp_avg"])
    second.step()
