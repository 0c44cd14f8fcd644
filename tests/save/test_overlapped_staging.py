"""staging="overlapped": the snapshot is of the moment of the call, though much of it is copied later; training waits
where it must, and nowhere else."""

import contextlib
import gc
import itertools
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
import torch
from torch import nn
from torch.optim import optimizer as torch_optimizer

from snapshot import ModelState, Snapshot, SnapshotError, StateDict, StorageError, TakeOptions
from snapshot.io.arena import arena
from snapshot.save import staging
from snapshot.save.staging import Stager
from snapshot.save.step_barrier import SpotBytes
from snapshot.tensors.buffers import view_memory
from snapshot.testing import faulty, stalling
from tests.helpers.arguments import for_take
from tests.helpers.states import equal

KiB = 1 << 10
SMALL_BUDGET = 2 << 20
"""With which one part is staged at a time: so a write that stalls holds up what comes after it."""


@pytest.fixture(autouse=True)
def all_memory_is_given_back():
    yield
    assert " 0 in use" in repr(arena())


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.one = nn.Linear(512, 512)
        self.norm = nn.BatchNorm1d(512)
        self.two = nn.Linear(512, 512)

    def forward(self, x):
        return self.two(self.norm(self.one(x)).relu())


def backward(model, scale=1.0):
    (model(torch.ones(4, 512) * scale + torch.arange(4)[:, None]) ** 2).mean().backward()


def trained(model, optimizer):
    backward(model)
    optimizer.step()
    optimizer.zero_grad()
    return {"model": model, "optim": optimizer}


def contents(url, app):
    """All that a snapshot holds of what the app state has now."""
    return {key: Snapshot(url).get_state_dict_for_key(key) for key in app}


@contextmanager
def held_up(app, **options):
    """A pending snapshot that cannot go on, as long as the writes of its storage stall; checked at the end."""
    Snapshot.take("memory://expected", app, overwrite=True)
    expected = contents("memory://expected", app)
    options = {"memory_budget_bytes": SMALL_BUDGET, "staging": "overlapped", "overwrite": True} | options
    with stalling(on="write", times=None) as stall:
        pending = Snapshot.async_take("stalling+memory://overlapped", app, **for_take(**options))
        try:
            yield pending, stall
        finally:
            stall.release()
    pending.wait(30)
    assert pending.staged()
    assert equal(contents("memory://overlapped", app), expected)


@contextmanager
def released_soon(stall):
    """Release it while something waits; what is done inside ends after that."""
    released = threading.Event()

    def release():
        released.set()
        stall.release()

    timer = threading.Timer(0.2, release)
    timer.start()
    try:
        yield
        assert released.is_set(), "it did not wait"
    finally:
        timer.join()


OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adam": lambda p: torch.optim.Adam(p, foreach=False),
    "foreach": lambda p: torch.optim.Adam(p, foreach=True),
    "fused": lambda p: torch.optim.AdamW(p, fused=True),
    "amsgrad": lambda p: torch.optim.Adam(p, amsgrad=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, centered=True, momentum=0.5),
    "adagrad": torch.optim.Adagrad,
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_overlapped_staging_makes_the_optimizer_step_wait_for_the_copies(name):
    model = Net()
    app = trained(model, OPTIMIZERS[name](model.parameters()))
    with held_up(app) as (pending, stall):
        assert not pending.staged()
        backward(model)  # changes the buffers of the norm, which were copied by the call
        app["optim"].zero_grad(set_to_none=True)
        backward(model, 2.0)
        with released_soon(stall):
            app["optim"].step()
        assert pending.staged()
        for _ in range(3):
            backward(model)
            app["optim"].step()


def test_overlapped_staging_of_model_state_with_several_optimizers():
    model = Net()
    halves = [torch.optim.Adam(half.parameters()) for half in (model.one, model.two)]
    backward(model)
    for half in halves:
        half.step()
    app = {"all": ModelState(model, halves)}
    with held_up(app) as (pending, stall):
        assert not pending.staged()
        backward(model)
        with released_soon(stall):
            halves[1].step()
        halves[0].step()


def test_overlapped_staging_ignores_accumulated_and_clipped_gradients():
    model = Net()
    app = trained(model, torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.01)))
    with held_up(app) as (pending, stall):
        for micro in range(3):
            backward(model, 1.0 + micro)
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        assert not pending.staged()
        with released_soon(stall):
            app["optim"].step()


def test_overlapped_staging_with_a_scheduler_and_a_tensor_learning_rate():
    model = Net()
    optimizer = torch.optim.Adam(model.parameters(), lr=torch.tensor(0.1), foreach=False)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)  # which wraps the optimizer's step
    app = trained(model, optimizer) | {"scheduler": scheduler}
    scheduler.step()
    with held_up(app) as (_, stall):
        optimizer.param_groups[0]["lr"].mul_(7)
        backward(model)
        with released_soon(stall):
            optimizer.step()
        scheduler.step()


def test_overlapped_staging_with_an_optimizer_that_is_not_in_the_app_state():
    model, other = Net(), Net()
    known, unknown = torch.optim.Adam(model.parameters()), torch.optim.SGD([model.two.weight], lr=0.1)
    unrelated = torch.optim.SGD(other.parameters(), lr=0.1, momentum=0.9)
    app = trained(model, known)
    with held_up(app) as (pending, stall):
        backward(other)
        unrelated.step()  # it shares nothing with the snapshot, so it does not wait
        assert not pending.staged()
        backward(model)
        with released_soon(stall):
            unknown.step()  # its parameters are the known one's, too
        known.step()


def test_overlapped_staging_with_an_averaged_model():
    model = Net()
    optimizer = torch.optim.Adam(model.parameters())
    average = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9))
    handle = optimizer.register_step_post_hook(lambda *_: average.update_parameters(model))
    app = trained(model, optimizer) | {"average": average}
    with held_up(app, memory_budget_bytes=12 << 20) as (pending, stall):  # the average is copied by the call
        assert not pending.staged()
        average.update_parameters(model)  # at any time: it belongs to no optimizer
        backward(model)
        with released_soon(stall):
            optimizer.step()
        backward(model)
        optimizer.step()
    handle.remove()


@pytest.mark.filterwarnings("ignore:Converting a tensor with requires_grad")  # LBFGS of torch 2.8
def test_overlapped_staging_with_lbfgs_and_a_closure():
    model = nn.Sequential(nn.Linear(512, 512), nn.Linear(512, 1))
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)

    def closure():
        optimizer.zero_grad()
        loss = (model(torch.ones(2, 512)) ** 2).mean()
        loss.backward()
        return loss

    optimizer.step(closure)
    app = {"model": model, "optim": optimizer}
    with held_up(app) as (pending, stall):
        assert not pending.staged()
        with released_soon(stall):
            optimizer.step(closure)
        optimizer.step(closure)


def test_overlapped_staging_with_a_grad_scaler():
    model = Net()
    optimizer, scaler = torch.optim.Adam(model.parameters(), fused=True), torch.amp.GradScaler("cpu")
    app = trained(model, optimizer) | {"scaler": scaler}
    with held_up(app) as (_, stall):
        scaler.scale((model(torch.ones(4, 512)) ** 2).mean()).backward()
        scaler.unscale_(optimizer)
        with released_soon(stall):
            scaler.step(optimizer)
        scaler.update()


@pytest.mark.parametrize("target", ["model", "inner", "optim", "restore"])
def test_overlapped_staging_makes_load_state_dict_and_restore_wait(target):
    model = Net()
    app = trained(model, torch.optim.Adam(model.parameters()))
    Snapshot.take("memory://other", trained(Net(), torch.optim.SGD(Net().parameters(), lr=0.1)), overwrite=True)
    loaded = {key: value * 2 for key, value in model.two.state_dict().items()}
    saved = {key: value * 2 for key, value in model.state_dict().items()}
    state = app["optim"].state_dict()
    with held_up(app) as (pending, stall):
        assert not pending.staged()
        with released_soon(stall):
            if target == "model":
                model.load_state_dict(saved)
            elif target == "inner":
                model.two.load_state_dict(loaded)
            elif target == "optim":
                app["optim"].load_state_dict(state)
            else:
                Snapshot("memory://other").restore({"model": model})
        if target != "optim":
            model.two.weight.data.fill_(3)


def all_is_copied_at_once(app, **options):
    with stalling(on="commit") as stall:
        pending = Snapshot.async_take(
            "stalling+memory://late", app, **for_take(overwrite=True, staging="overlapped", **options)
        )
        was_staged, held = pending.staged(), pending._held
        stall.release()
        pending.wait(30)
    assert was_staged or held is not None
    return held is None


def test_overlapped_staging_copies_state_of_no_optimizer_in_the_call():
    model = Net()
    optimizer = torch.optim.Adam(model.parameters())
    app = trained(model, optimizer)
    assert not all_is_copied_at_once(app)
    assert all_is_copied_at_once({"model": model})
    assert all_is_copied_at_once({"model": StateDict(model.state_dict()), "s": StateDict(x=torch.ones(1000))})
    assert all_is_copied_at_once(app, _custom_tensor_prepare_func=lambda path, tensor, tracing: tensor)
    optimizer.param_groups[0]["capturable"] = True
    assert all_is_copied_at_once(app)
    optimizer.param_groups[0]["capturable"] = False
    assert not all_is_copied_at_once(app)
    optimizer.step = lambda: None
    assert all_is_copied_at_once(app)
    del optimizer.step


def test_overlapped_staging_copies_embedding_weights_with_max_norm_in_the_call():
    model = nn.Sequential(nn.Embedding(2000, 64, max_norm=1.0), nn.Linear(64, 2000))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with torch.no_grad():
        model[0].weight.mul_(100)
    Snapshot.take("memory://expected", {"model": model}, overwrite=True)
    expected = contents("memory://expected", {"model": model})
    with stalling(on="write", times=None) as stall:
        pending = Snapshot.async_take(
            "stalling+memory://renormed",
            {"model": model, "optim": optimizer},
            overwrite=True,
            options=TakeOptions(staging="overlapped"),
        )
        model(torch.arange(2000))  # changes the embedding
        assert not torch.equal(model[0].weight, expected["model"]["0.weight"])
        stall.release()
    pending.wait(30)
    assert equal(contents("memory://renormed", {"model": model}), expected)


def test_overlapped_staging_copies_shared_storages_in_the_call():
    flat = torch.arange(4 * 300_000, dtype=torch.float32)
    model = nn.Module()
    model.a, model.b = nn.Parameter(flat[:300_000]), nn.Parameter(flat[300_000:600_000])
    model.alone = nn.Parameter(torch.ones(300_000))
    model.register_buffer("count", flat[600_000:900_000])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    app = {"model": model, "optim": optimizer}
    Snapshot.take("memory://expected", app, overwrite=True)
    expected = contents("memory://expected", app)
    with stalling(on="write", times=None) as stall:
        pending = Snapshot.async_take(
            "stalling+memory://flat", app, overwrite=True, options=TakeOptions(staging="overlapped")
        )
        model.count.add_(1)  # which torch counts as a change of the parameters that are seen through the same tensor
        flat.add_(1)
        stall.release()
    pending.wait(30)
    assert equal(contents("memory://flat", app), expected)


def _data(model, app):
    app["z"] = StateDict(w=model.two.weight.data)
    return lambda: app["z"]["w"].mul_(2)


def _data_first(model, app):
    app["a"] = StateDict(w=model.two.weight.data)
    return lambda: app["a"]["w"].mul_(2)


def _data_first_clamped(model, app):
    app["a"] = StateDict(w=model.two.weight.data)
    return lambda: model.two.weight.detach().clamp_(-0.001, 0.001)


def _array(model, app):
    app["z"] = StateDict(w=model.two.weight.detach().numpy())
    return lambda: app["z"]["w"].fill(2)


def _slice(model, app):
    app["z"] = StateDict(w=model.two.weight.detach().numpy()[10:])
    return lambda: app["z"]["w"].fill(2)


def _from_array(model, app):
    array = model.two.weight.detach().numpy().copy()
    model.two.weight = nn.Parameter(torch.from_numpy(array))
    app["optim"].add_param_group({"params": [model.two.weight]})
    app["z"] = StateDict(w=array[10:])
    return lambda: array.fill(2)


def _buffer(model, app):
    model.register_buffer("alias", model.two.weight.data)
    return lambda: model.alias.mul_(2)


def _part_of_a_buffer(model, app):
    model.register_buffer("alias", model.two.weight.detach()[:10])
    return lambda: model.alias.mul_(2)


@pytest.mark.parametrize(
    "make", [_data, _data_first, _data_first_clamped, _array, _slice, _from_array, _buffer, _part_of_a_buffer]
)
def test_overlapped_staging_copies_aliased_memory_in_the_call(make):
    model = Net()
    app = trained(model, torch.optim.Adam(model.parameters()))
    change = make(model, app)
    with held_up(app, memory_budget_bytes=12 << 20) as (pending, _):
        assert not pending.staged()
        change()


def test_overlapped_staging_copies_parameters_that_no_step_changes_in_the_call():
    """As those of an averaged copy of a model, that stands in the model and is handed to the optimizer, too."""
    model = Net()
    for parameter in model.two.parameters():
        parameter.requires_grad_(False)
    app = trained(model, torch.optim.Adam(model.parameters()))
    with held_up(app, memory_budget_bytes=12 << 20) as (pending, _):
        assert not pending.staged()
        model.two.weight.data.mul_(0.9)


def test_overlapped_staging_detects_a_change_that_torch_counts_late(tmp_path):
    """An operation is counted when it has ended: here the copy ends before."""
    model = Net()
    app = trained(model, torch.optim.Adam(model.parameters()))
    with stalling(on="finish", times=None) as stall:
        pending = Snapshot.async_take(f"stalling+file://{tmp_path}/s", app, options=TakeOptions(staging="overlapped"))
        assert pending._held._over.wait(30)
        model.two.weight.detach().mul_(2)
        stall.release()
        with pytest.raises(SnapshotError, match="changed outside an optimizer's step"):
            pending.wait(30)
    assert not (tmp_path / "s").exists()


@pytest.mark.parametrize("tell", ["staged", "wait_staged", "step"])
def test_overlapped_staging_allows_changes_after_staged_wait_staged_or_step(tmp_path, tell):
    model = Net()
    app = trained(model, torch.optim.Adam(model.parameters()))
    weight = model.two.weight.detach().clone()
    backward(model)
    with stalling(on="finish") as stall:
        pending = Snapshot.async_take(f"stalling+file://{tmp_path}/s", app, options=TakeOptions(staging="overlapped"))
        assert pending._held._over.wait(30)
        assert app["optim"].step() is None if tell == "step" else getattr(pending, tell)() in (True, None)
        model.two.weight.detach().mul_(2)
        stall.release()
        assert torch.equal(pending.wait(30).read_object("0/model/two.weight"), weight)


@pytest.mark.parametrize("end", ["committed", "failed", "cancelled"])
def test_overlapped_staging_holds_no_tensors_after_its_end(end):
    model = Net()
    app = trained(model, torch.optim.Adam(model.parameters()))
    with stalling(on="finish", times=None) as stall:
        pending = Snapshot.async_take(
            "stalling+memory://over", app, overwrite=True, options=TakeOptions(staging="overlapped")
        )
        if end == "failed":
            assert pending._held._over.wait(30)
            model.two.weight.detach().mul_(2)
        stall.release() if end != "cancelled" else pending.cancel()
        with contextlib.suppress(SnapshotError):
            pending.wait(30)
    counted = torch._C._storage_Use_Count(model.two.weight.untyped_storage()._cdata)
    assert counted <= 3  # the parameter's, and that of the question
    assert repr(pending)


def test_overlapped_staging_refuses_callbacks_that_would_wait_for_themselves():
    model = Net()
    app = trained(model, torch.optim.Adam(model.parameters()))
    Snapshot.take("memory://mine", app, overwrite=True)
    raised, loaded = [], []

    def progress(_):
        try:
            Snapshot("memory://mine").restore({"model": model})
        except RuntimeError as error:
            raised.append(error)
        loaded.append(nn.Linear(1, 1).load_state_dict(nn.Linear(1, 1).state_dict()))

    Snapshot.async_take(
        "memory://called",
        app,
        progress=progress,
        overwrite=True,
        options=TakeOptions(staging="overlapped", memory_budget_bytes=SMALL_BUDGET),
    ).wait(30)
    assert raised
    assert loaded


def test_overlapped_staging_fails_if_a_tensor_changes_outside_a_step(tmp_path):
    model = Net()
    app = trained(model, torch.optim.Adam(model.parameters()))
    with stalling(on="write", times=None) as stall:
        pending = Snapshot.async_take(
            f"stalling+file://{tmp_path}/s",
            app,
            options=TakeOptions(staging="overlapped", memory_budget_bytes=SMALL_BUDGET),
        )
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0.5)
        stall.release()
        with pytest.raises(SnapshotError, match=r"(model|optim)/\S+: changed outside.*wait_staged"):
            pending.wait(30)
    assert pending.staged()
    assert not (tmp_path / "s").exists()
    backward(model)
    app["optim"].step()


def test_overlapped_staging_keeps_memory_that_is_replaced():
    model = Net()
    app = trained(model, torch.optim.Adam(model.parameters()))
    with held_up(app):
        model.double()
        model.one.weight.data.zero_()


def test_wait_staged_allows_changes_that_no_hook_sees():
    model = Net()
    app = trained(model, torch.optim.Adam(model.parameters()))
    with held_up(app) as (pending, stall):
        with pytest.raises(TimeoutError, match=r"not staged after 0\.01 s"):
            pending.wait_staged(0.01)
        with released_soon(stall):
            pending.wait_staged(30)
        model.one.weight.data.clamp_(-0.01, 0.01)


def test_overlapped_staging_removes_its_hooks_when_nothing_is_pending():
    model = Net()
    app = trained(model, torch.optim.Adam(model.parameters()))
    app["optim"].step()  # ends what an earlier test left: the hook goes with the next step
    hooks = torch_optimizer._global_optimizer_pre_hooks
    before = dict(hooks), nn.Module.load_state_dict, torch.optim.Optimizer.load_state_dict
    assert not before[0]
    for _ in range(3):
        pending = Snapshot.async_take("memory://hook", app, overwrite=True, options=TakeOptions(staging="overlapped"))
        assert len(hooks) == 1
        pending.wait(30)
        assert (nn.Module.load_state_dict, torch.optim.Optimizer.load_state_dict) == before[1:]
        app["optim"].step()
        assert not hooks


def test_overlapped_staging_hook_coexists_with_other_optimizer_hooks():
    model = Net()
    app = trained(model, torch.optim.Adam(model.parameters()))
    called = []
    Snapshot.async_take("memory://hooks", app, overwrite=True, options=TakeOptions(staging="overlapped")).wait(30)
    other = torch_optimizer.register_optimizer_step_pre_hook(lambda *_: called.append(1))
    try:
        app["optim"].step()
        app["optim"].step()
        assert called == [1, 1]
    finally:
        other.remove()
    app["optim"].step()
    assert not torch_optimizer._global_optimizer_pre_hooks


def test_overlapped_staging_failure_is_not_raised_by_the_optimizer_step(tmp_path):
    model = Net()
    app = trained(model, torch.optim.Adam(model.parameters()))
    with faulty(on="write", nth=3, error=StorageError("broken")):
        pending = Snapshot.async_take(
            f"faulty+file://{tmp_path}/s",
            app,
            options=TakeOptions(staging="overlapped", memory_budget_bytes=SMALL_BUDGET),
        )
        backward(model)
        app["optim"].step()
        with pytest.raises(StorageError, match="broken"):
            pending.wait(30)
    assert not (tmp_path / "s").exists()


def test_overlapped_staging_cancelled_does_not_block_the_step(tmp_path):
    model = Net()
    app = trained(model, torch.optim.Adam(model.parameters()))
    with stalling(on="write", times=None):
        pending = Snapshot.async_take(
            f"stalling+file://{tmp_path}/s",
            app,
            options=TakeOptions(staging="overlapped", memory_budget_bytes=SMALL_BUDGET),
        )
        assert not pending.staged()
        assert pending.cancel()
        backward(model)
        app["optim"].step()
        pending.wait_staged(30)
    assert not (tmp_path / "s").exists()


@pytest.mark.parametrize("where", ["step", "wait_staged", "wait"])
def test_overlapped_staging_interrupted_wait_changes_nothing(where):
    model = Net()
    app = trained(model, torch.optim.Adam(model.parameters()))
    backward(model)

    def interrupt(*_):
        raise KeyboardInterrupt

    before = {key: value.clone() for key, value in model.state_dict().items()}
    with held_up(app) as (pending, _):
        old = signal.signal(signal.SIGALRM, interrupt)
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        try:
            with pytest.raises(KeyboardInterrupt):
                app["optim"].step() if where == "step" else getattr(pending, where)()
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, old)
        assert not pending.staged()
        assert equal(dict(model.state_dict()), before)


def test_overlapped_staging_several_at_once_save_their_own_moment(tmp_path):
    model = Net()
    app = trained(model, torch.optim.Adam(model.parameters()))
    pending, expected = [], []
    for i in range(6):
        expected.append({key: value.clone() for key, value in model.state_dict().items()})
        pending.append(
            Snapshot.async_take(tmp_path / str(i), app, options=TakeOptions(staging="overlapped", durable=False))
        )
        backward(model)
        app["optim"].step()
    for each, values in zip(pending, expected, strict=True):
        assert equal(dict(each.wait(60).get_state_dict_for_key("model")), values)


def test_overlapped_staging_in_several_threads(tmp_path):
    errors = []

    def work(name):
        try:
            model = nn.Linear(300, 300)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for i in range(4):
                weight = model.weight.detach().clone()
                pending = Snapshot.async_take(
                    tmp_path / f"{name}-{i}",
                    {"m": model, "o": optimizer},
                    options=TakeOptions(staging="overlapped", durable=False),
                )
                model(torch.ones(2, 300)).sum().backward()
                optimizer.step()
                assert torch.equal(pending.wait(60).read_object("0/m/weight"), weight)
        except BaseException as error:  # noqa: BLE001 - shown by the main thread
            errors.append(error)

    threads = [threading.Thread(target=work, args=(name,)) for name in "abc"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not errors


SCRIPT = """
import os, sys, torch
from snapshot import Snapshot, StateDict, TakeOptions
from snapshot.testing import stalling
torch.set_num_threads(1)
model = torch.nn.Sequential(*(torch.nn.Linear(500, 500) for _ in range(8)))
optimizer = torch.optim.Adam(model.parameters())
model(torch.ones(2, 500)).sum().backward()
optimizer.step()
torch.save(model.state_dict(), sys.argv[2])
app = {"model": model, "optim": optimizer}
OVERLAPPED = TakeOptions(staging="overlapped", memory_budget_bytes=4 << 20)
"""


def test_overlapped_staging_without_wait_is_finished_at_exit(tmp_path, warm):
    script = SCRIPT + "Snapshot.async_take(sys.argv[1], app, options=OVERLAPPED)"
    warm.run(script, tmp_path / "s", tmp_path / "p")
    assert Snapshot(tmp_path / "s").verify()
    assert equal(dict(Snapshot(tmp_path / "s").get_state_dict_for_key("model")), dict(torch.load(tmp_path / "p")))


def test_overlapped_staging_of_the_parent_does_not_block_a_forked_child(tmp_path, warm):
    script = (
        SCRIPT
        + """
with stalling(on="write", times=None) as stall:
    pending = Snapshot.async_take(
        "stalling+file://" + sys.argv[1], app, options=OVERLAPPED
    )
    child = os.fork()
    if child == 0:
        optimizer.step()
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    stall.release()
optimizer.step()
pending.wait()
"""
    )
    warm.run(script, tmp_path / "s", tmp_path / "p")
    assert equal(dict(Snapshot(tmp_path / "s").get_state_dict_for_key("model")), dict(torch.load(tmp_path / "p")))


@pytest.mark.slow
@pytest.mark.parametrize("budget", [64, 16])
def test_overlapped_staging_memory_stays_within_memory_budget_bytes(tmp_path, warm, budget):
    """Also where one tensor is larger than it."""
    script = f"""
import os, sys, threading, torch
from snapshot import Snapshot, StateDict, TakeOptions
torch.set_num_threads(1)
model = torch.nn.Module()
model.one = torch.nn.Parameter(torch.ones(32 << 20))
model.many = torch.nn.ParameterList(torch.ones(1 << 20) for _ in range(16))
app = {{"model": model, "optim": torch.optim.SGD(model.parameters(), lr=0.1)}}
def resident():
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * 4096
Snapshot.async_take(sys.argv[1] + "-warm", {{"s": StateDict(x=torch.ones(10))}}).wait()
over, most, before = threading.Event(), [0], resident()
def watch():
    while not over.wait(0.01):
        most[0] = max(most[0], resident())
thread = threading.Thread(target=watch)
thread.start()
for staging in ("blocking", "overlapped"):
    pending = Snapshot.async_take(
        f"{{sys.argv[1]}}-{{staging}}",
        app,
        options=TakeOptions(staging=staging, memory_budget_bytes={budget} << 20, durable=False),
    )
    pending.wait()
over.set()
thread.join()
print(most[0] - before)
"""
    assert int(warm.run(script, tmp_path / "s")) <= (budget + 64) << 20
    assert Snapshot(tmp_path / "s-overlapped").verify()


def test_overlapped_staging_abandoned_releases_its_memory_after_the_wait(monkeypatch):
    """The part that is being copied then is copied to its end."""
    copying, go_on, real = threading.Event(), threading.Event(), Stager.begin_part

    def slow(self, *arguments):
        if threading.current_thread().name == "snapshot-io-stage":
            copying.set()
            go_on.wait(30)
        return real(self, *arguments)

    monkeypatch.setattr(Stager, "begin_part", slow)
    model = Net()
    app = trained(model, torch.optim.Adam(model.parameters()))
    pending = Snapshot.async_take("memory://given-up", app, overwrite=True, options=TakeOptions(staging="overlapped"))
    assert copying.wait(30)
    threading.Timer(0.2, go_on.set).start()
    assert pending.cancel()
    assert go_on.is_set()
    assert " 0 in use" in repr(arena())


def _replaced_data(tensor):
    tensor.data = torch.zeros_like(tensor)


def _set(tensor):
    with torch.no_grad():
        tensor.set_(torch.zeros(3))


def _freed(tensor):
    tensor.untyped_storage().resize_(0)


def _moved(tensor):
    tensor.untyped_storage().resize_(tensor.nbytes * 2)


REPLACED = [
    *itertools.product([_replaced_data, _set, _freed, _moved], ["moment"]),
    # with new data, a parameter's memory is the snapshot's: test_overlapped_staging_keeps_memory_that_is_replaced
    *itertools.product([_set, _freed, _moved], ["parameter"]),
]


@pytest.mark.parametrize(("replace", "whose"), REPLACED)
def test_overlapped_staging_does_not_read_memory_replaced_before_its_copy(replace, whose):
    model, url = Net(), f"{replace.__name__}-{whose}"
    app = trained(model, torch.optim.Adam(model.parameters()))
    tensors = [
        parameter if whose == "parameter" else app["optim"].state[parameter]["exp_avg"]
        for parameter in model.parameters()
    ]
    with stalling(on="write", times=None) as stall:
        pending = Snapshot.async_take(
            f"stalling+memory://replaced/{url}",
            app,
            options=TakeOptions(staging="overlapped", memory_budget_bytes=SMALL_BUDGET),
        )
        assert not pending.staged()
        for tensor in tensors:
            replace(tensor)
        stall.release()
        with pytest.raises(SnapshotError, match=r"(model|optim)/\S+: changed outside.*wait_staged"):
            pending.wait(30)
    assert not Snapshot(f"memory://replaced/{url}").exists()


def while_copied(monkeypatch, act):
    """Call a function once, with the address and length, before a late part's bytes are copied by their address."""
    calls = iter([act])
    copy = staging.copy_memory

    def copy_memory(to, begin, nbytes):
        if threading.current_thread().name == "snapshot-io-stage":
            for each in calls:
                each(begin, nbytes)
        copy(to, begin, nbytes)

    monkeypatch.setattr(staging, "copy_memory", copy_memory)


def test_overlapped_staging_keeps_memory_replaced_during_its_copy(monkeypatch):
    """Here a moment gets other memory, and new tensors would take the old memory, if that were free."""
    model = Net()
    app = trained(model, torch.optim.Adam(model.parameters()))
    moments = [app["optim"].state[each]["exp_avg"] for each in model.parameters()]
    before = {each.data_ptr(): each.clone() for each in moments}
    read = []

    def act(begin, nbytes):
        for each in moments:
            _replaced_data(each)
        held = [torch.full((nbytes,), 7, dtype=torch.uint8) for _ in range(20)]
        if begin in before:
            read.append(bytes(view_memory(begin, nbytes)) == before[begin].numpy().tobytes()[:nbytes])
        del held

    for each in model.parameters():  # so that the first late copy is that of a moment
        each.requires_grad_(False)
    while_copied(monkeypatch, act)
    with pytest.raises(SnapshotError, match=r"optim/\S+: changed outside"):
        Snapshot.async_take("memory://replaced", app, overwrite=True, options=TakeOptions(staging="overlapped")).wait(
            30
        )
    assert read == [True]


def _grown(tensor):
    tensor.detach().resize_(2 * tensor.numel())


def _grown_by_an_empty_view(tensor):
    tensor.detach().view(-1)[:0].resize_as_(torch.empty(2 * tensor.numel()))


def _shared(tensor):
    tensor.share_memory_()


@pytest.mark.parametrize("move", [_freed, _moved, _grown, _grown_by_an_empty_view, _shared])
def test_overlapped_staging_memory_is_not_freed_during_its_copy(monkeypatch, move):
    def methods():
        storage = torch.UntypedStorage
        return storage.resize_, storage._share_fd_cpu_, storage._share_filename_cpu_, torch.Tensor.resize_

    before = methods()
    model = Net()
    app = trained(model, torch.optim.Adam(model.parameters()))
    threads = []

    def act(begin, nbytes):
        def free():
            for each in model.parameters():
                move(each)

        threads.append(threading.Thread(target=free))
        threads[0].start()
        threads[0].join(0.2)
        blocked.append(threads[0].is_alive())

    def ended(self, *arguments):
        if threads:  # the memory is freed between the copy and its check
            threads[0].join(30)
        return end(self, *arguments)

    end, blocked = Stager.end_part, []
    monkeypatch.setattr(Stager, "end_part", ended)
    while_copied(monkeypatch, act)
    with pytest.raises(SnapshotError, match=r"(model|optim)/\S+: changed outside"):
        Snapshot.async_take("memory://freed", app, overwrite=True, options=TakeOptions(staging="overlapped")).wait(30)
    assert blocked == [True]
    assert methods() == before
    model = app = None
    threads.clear()
    gc.collect()  # shared memory has a descriptor


def test_overlapped_staging_detects_a_change_during_a_copy(monkeypatch):
    model = Net()
    app = trained(model, torch.optim.Adam(model.parameters()))

    def act(begin, nbytes):
        for parameter in model.parameters():
            parameter.detach().mul_(2)
            app["optim"].state[parameter]["exp_avg"].mul_(2)

    ends = []
    end = Stager.end_part

    def noted(self, *arguments):
        try:
            return end(self, *arguments)
        except SnapshotError as error:
            ends.append(str(error))
            raise

    monkeypatch.setattr(Stager, "end_part", noted)
    while_copied(monkeypatch, act)
    with pytest.raises(SnapshotError, match=r"(model|optim)/\S+: changed outside"):
        Snapshot.async_take("memory://during", app, overwrite=True, options=TakeOptions(staging="overlapped")).wait(30)
    assert len(ends) == 1


def test_spot_bytes_of_freed_memory_differ():
    tensor = torch.ones(1000)
    samples = SpotBytes([tensor, torch.ones(10)])
    assert not samples.differ()
    tensor.untyped_storage().resize_(0)
    assert samples.differ()


def test_take_reads_the_memory_it_began_with_if_tensors_are_replaced():
    state = StateDict(**{f"t{number}": torch.full((1 << 18,), float(number)) for number in range(8)})
    with stalling(on="write") as stall, ThreadPoolExecutor(1) as pool:
        taken = pool.submit(Snapshot.take, "stalling+memory://in-the-call", {"s": state}, overwrite=True)
        stall.wait_reached()
        for tensor in state.values():
            tensor.data = torch.full((1 << 18,), -1.0)
        held = [torch.full((1 << 18,), -2.0) for _ in range(16)]
        stall.release()
        taken.result(30)
        del held
    for number in range(8):
        assert Snapshot("memory://in-the-call").read_object(f"0/s/t{number}").eq(number).all()


def test_take_raises_if_another_state_dict_replaces_memory():
    class Offloading:
        def __init__(self, tensor):
            self.tensor = tensor

        def state_dict(self):
            self.tensor.data = torch.zeros(3)
            return {}

        def load_state_dict(self, state):
            raise NotImplementedError

    tensor = torch.ones(1 << 18)
    with pytest.raises(SnapshotError, match="a/t: its memory was replaced"):
        Snapshot.take("memory://collected", {"a": StateDict(t=tensor), "b": Offloading(tensor)}, overwrite=True)
