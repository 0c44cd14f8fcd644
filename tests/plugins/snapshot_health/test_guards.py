"""Guards: what a take says of a state that cannot be that of a healthy training, and what follows from it."""

import contextlib
import copy
import itertools
import math
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn

from snapshot import (
    CorruptSnapshotError,
    KeepBest,
    KeepLatest,
    ModelState,
    RNGState,
    Snapshot,
    SnapshotManager,
    StateDict,
    TakeOptions,
)
from snapshot.errors import SuspectStateError
from snapshot.events import add_handler, remove_handler
from snapshot.save import findings
from snapshot.state.stateful import map_modules
from snapshot.tensors.memory import find_local_tensor
from snapshot.testing import recording
from snapshot_health import guards, samples
from snapshot_health.parameter_roles import find_steps, list_counts, stores_live_steps
from snapshot_health.samples import SHARE, find_in_whole, find_nonfinite
from tests.helpers.arguments import for_take
from tests.helpers.faulty import FAULTY
from tests.helpers.noted import noted
from tests.helpers.trainings import TRAININGS, alarms

COUNT = itertools.count()
FLOATS = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


@pytest.fixture
def folder():
    return f"memory://guards-{next(COUNT)}/run"


@contextlib.contextmanager
def events():
    found = []

    def handler(event):
        if event.name == "guard":
            found.append((event.fields["guard"], event.fields["text"]))

    add_handler(handler)
    try:
        yield found
    finally:
        remove_handler(handler)


def layers(width=16):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(width), nn.Linear(width, 4))


def adam(parameters, **options):
    return torch.optim.AdamW(parameters, lr=1e-2, **options)


def step(model, optimizer, scale=1.0):
    width = next(model.parameters()).shape[-1]
    (model(torch.randn(8, width)) ** 2).mean().mul(scale).backward()
    optimizer.step()
    optimizer.zero_grad()


def takes(folder, app_state, between, times=4, **options):
    """The findings of some takes, with a step of training before each."""
    found = []
    for number in range(times):
        between(number)
        found.append(Snapshot.take(f"{folder}/step-{number}", app_state, **for_take(**options)).report.findings)
    return [[each.guard for each in some] for some in found]


# Faults


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", FLOATS)
def test_guard_nonfinite_finds_nan_or_infinity_in_a_parameter(folder, value, dtype):
    model = nn.Linear(700, 9).to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with torch.no_grad():
        model.weight.fill_(value)
    with events() as seen:
        report = Snapshot.take(folder, {"m": model, "o": optimizer}).report
    assert [each.guard for each in report.findings] == ["nonfinite"]
    assert "m/weight (6,300 of 6,300)" in str(report.findings[0])
    assert "m/weight" in str(report)
    assert seen == [("nonfinite", report.findings[0].text)]


def test_guard_nonfinite_finds_infinity_in_optimizer_state(folder):
    model = layers()
    optimizer = adam(model.parameters())
    step(model, optimizer)
    optimizer.state[model[2].weight]["exp_avg_sq"].fill_(math.inf)
    [finding] = Snapshot.take(folder, {"m": model, "o": optimizer}).report.findings
    assert "o/state/4/exp_avg_sq" in finding.text


@pytest.mark.parametrize("named", [False, True])
def test_guard_nonfinite_finds_one_nan_within_some_takes(folder, named):
    model = nn.Linear(512, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with torch.no_grad():
        model.weight[2, 77] = math.nan
    app = {"t": ModelState(model, optimizer)} if named else {"m": model, "o": optimizer}
    found = takes(folder, app, lambda number: None, times=2 * 512 * 4 // 16)
    assert ["nonfinite"] in found


def test_guard_nonfinite_samples_long_tensors_in_turn():
    tensor = torch.zeros(3 << 20)
    tensor[(1 << 20) + 5] = math.nan
    model = nn.Module()
    model.register_parameter("w", nn.Parameter(tensor))
    [leaf] = [each for each in flattened({"m": model}).leaves if each.path == "m/w"]
    assert any(find_nonfinite([leaf], turn) for turn in range(2 * SHARE))
    assert find_nonfinite([leaf], 0, everything=True) == [leaf]


def flattened(app):
    from snapshot.save.collect import collect_state

    return collect_state(map_modules(app), None, (), ())


@pytest.mark.parametrize(
    "tensor",
    [
        torch.full((64, 64), math.nan).t(),
        torch.full((64, 64), math.nan)[:, ::2],
        torch.full((1,), math.nan),
        torch.full((3,), math.nan, dtype=torch.complex64),
    ],
)
def test_guard_nonfinite_reads_any_layout(tensor):
    leaves = flattened({"s": StateDict(w=tensor)}).leaves
    assert find_nonfinite(leaves, 3) == leaves


@pytest.mark.parametrize("counts", [[1000] * 200, [3, 1000, 40, 1000] * 50])
def test_guard_nonfinite_tells_the_greatest_numbers_from_infinity_and_keeps_the_order(counts):
    for dtype in FLOATS:
        greatest = torch.finfo(dtype).max
        tensors = {f"{at:03}": torch.full((n,), greatest * (-1) ** at, dtype=dtype) for at, n in enumerate(counts)}
        leaves = flattened({"s": StateDict(tensors)}).leaves
        assert find_in_whole(leaves) == find_nonfinite(leaves, 0) == []
        bad = [leaves[at] for at in (2, 3, 77, 196, 199)]
        for leaf, value in zip(bad, [math.inf, -math.inf, math.nan, -math.nan, -math.inf], strict=True):
            leaf.tensor[-1] = value
        assert find_in_whole(leaves) == bad


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", ["first", "middle", "last"])
def test_guard_nonfinite_finds_one_element_of_any_dtype_anywhere_and_names_its_tensor(place, value):
    """Among tensors of several dtypes and lengths, empty ones, and ones that are not aligned or have strides."""
    tensors = {}
    for dtype in (*FLOATS, torch.complex64, torch.complex128):
        for count in (0, 1, 3, 1024, 70_000):
            tensors[f"{dtype}-{count}"] = torch.zeros(count, dtype=dtype)
        tensors[f"{dtype}-scalar"] = torch.zeros((), dtype=dtype)
        tensors[f"{dtype}-unaligned"] = torch.zeros(34, dtype=dtype)[1:]
        tensors[f"{dtype}-strided"] = torch.zeros(6, 10, dtype=dtype)[:, ::2]
    tensors["ints"] = torch.full((40,), 0x7F800000, dtype=torch.int32)  # the bits of infinity
    leaves = flattened({"s": StateDict(tensors)}).leaves
    plain = [leaf for leaf in leaves if leaf.plain]
    assert find_in_whole(leaves) == find_nonfinite(leaves, 0) == []
    for leaf in leaves:
        if leaf.path == "s/ints" or not leaf.nbytes:
            continue
        shape, count = leaf.tensor.shape, leaf.tensor.numel()
        at = {"first": 0, "middle": count // 2, "last": count - 1}[place]
        index = tuple(int(each) for each in torch.unravel_index(torch.tensor(at), shape)) if shape else ()
        leaf.tensor[index] = value
        found = [each.path for each in find_in_whole(leaves)]
        short = leaf.nbytes <= 64 and leaf.plain
        sampled = [each.path for each in find_nonfinite(leaves, 0)]
        leaf.tensor[index] = 0
        assert found == ([leaf.path] if leaf in plain else []), leaf.path
        assert sampled == [leaf.path] or not (short or not leaf.plain), leaf.path


def test_guard_unsaved_names_the_first_three_parameters_that_change(folder):
    model = nn.ParameterList([nn.Parameter(torch.zeros(4)) for _ in range(6)])

    def change(number):
        with torch.no_grad():
            for parameter in list(model)[1:]:
                parameter.add_(1)

    found = []
    for number in range(3):
        change(number)
        found = Snapshot.take(f"{folder}/step-{number}", {"m": model}).report.findings
    [finding] = found
    assert finding.text.startswith("m/1, m/2, m/3: changes from take to take")


def test_guard_stale_finds_weights_that_do_not_change_while_the_optimizer_steps(folder):
    model = layers()
    optimizer = adam(model.parameters())
    kept = copy.deepcopy(model.state_dict())

    def undo(number):
        step(model, optimizer)
        model.load_state_dict(kept)

    found = takes(folder, {"m": model, "o": optimizer}, undo, times=5)
    assert found[:2] == [[], []]
    assert found[2:] == [["stale"]] * 3


@pytest.mark.parametrize("named", [False, True])
def test_guard_stale_finds_momentum_that_changes_no_weights(folder, named):
    model = nn.Linear(32, 32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    kept = copy.deepcopy(model.state_dict())

    def undo(number):
        step(model, optimizer)
        model.load_state_dict(kept)

    app = {"t": ModelState(model, optimizer)} if named else {"m": model, "o": optimizer}
    assert takes(folder, app, undo)[-1] == ["stale"]


def test_guard_missing_finds_a_saved_copy_of_the_model(folder):
    model = layers()
    optimizer = adam(model.parameters())
    app = {"m": copy.deepcopy(model), "o": optimizer}
    found = takes(folder, app, lambda number: step(model, optimizer))
    assert found == [["missing"], ["missing"], ["missing", "stale"], ["missing", "stale"]]


def test_guard_finds_an_optimizer_of_a_replaced_model(folder):
    model = layers()
    optimizer = adam(model.parameters())
    model = layers()
    [finding] = Snapshot.take(folder, {"m": model, "o": optimizer}).report.findings
    assert "none of its 6 parameters is of a module" in finding.text


def test_guard_finds_a_stateful_missing_in_the_app_state(folder):
    model = layers()
    optimizer = adam(model.parameters())
    Snapshot.take(f"{folder}/step-1", {"m": model, "o": optimizer, "p": StateDict(epoch=1)})
    [finding] = Snapshot.take(f"{folder}/step-2", {"m": model, "p": StateDict(epoch=2)}).report.findings
    assert finding.text == "o: was in the app state of the take before"
    assert not Snapshot.take(f"{folder}/step-3", {"m": model, "p": StateDict(epoch=2)}).report.findings


def test_guard_finds_a_counter_that_decreases(folder):
    Snapshot.take(f"{folder}/step-1", {"p": StateDict(epoch=5, loss=1)})
    [finding] = Snapshot.take(
        f"{folder}/step-2", {"p": StateDict(epoch=4, loss=0)}, options=TakeOptions(guards="refuse")
    ).report.findings
    assert finding.text == "p/epoch is 4, and was 5 in the take before"
    assert not finding.acts


def test_guard_that_fails_does_not_fail_the_take(folder, caplog, monkeypatch):
    monkeypatch.setattr(guards, "find_nonfinite", lambda *arguments: 1 / 0)
    model = layers()
    report = Snapshot.take(folder, {"m": model, "o": adam(model.parameters())}).report
    assert not report.findings
    assert "a guard failed, and the take continues" in caplog.text
    assert Snapshot(folder).verify()


# What follows


def broken():
    model = layers()
    with torch.no_grad():
        model[0].weight.fill_(math.nan)
    return {"m": model, "o": adam(model.parameters())}


@pytest.mark.parametrize("asynchronous", [False, True])
def test_guards_refuse_raises_suspect_state_error_and_leaves_no_files(tmp_path, asynchronous):
    take = (lambda *a, **o: Snapshot.async_take(*a, **o).wait()) if asynchronous else Snapshot.take
    with pytest.raises(SuspectStateError, match=r"not committed.*\n.*NaN or infinity in m/0.weight") as raised:
        take(tmp_path / "s", broken(), options=TakeOptions(guards="refuse"))
    assert raised.value.findings
    assert not [each for each in tmp_path.rglob("*") if each.is_file()]


@pytest.mark.parametrize("asynchronous", [False, True])
def test_guards_suspect_marks_the_snapshot_and_it_restores(folder, asynchronous, caplog):
    take = (lambda **o: Snapshot.async_take(folder, broken(), **for_take(**o)).wait()) if asynchronous else None
    snapshot = (take or (lambda **o: Snapshot.take(folder, broken(), **for_take(**o))))(
        guards="suspect", metadata={"mine": 1}
    )
    held = Snapshot(folder).metadata.metadata
    assert held["mine"] == 1
    assert findings.suspicions(held) == tuple(map(str, snapshot.report.findings))
    assert "NaN or infinity" in caplog.text
    app = broken()
    Snapshot(folder).restore(app)
    assert app["m"][0].weight.isnan().all()


def test_guards_report_keeps_findings_in_log_and_metadata_without_a_mark(folder, caplog):
    report = Snapshot.take(
        f"{folder}/step-1", broken(), metadata={"mine": 1}, options=TakeOptions(guards="report")
    ).report
    held = Snapshot(f"{folder}/step-1").metadata.metadata
    assert noted(held) == {"mine": 1, findings.NOTED: [str(report.findings[0])]}
    assert findings.suspicions(held) == ()
    assert caplog.text.count("NaN or infinity") == 1


def test_guards_off_examines_nothing(folder, caplog):
    assert not Snapshot.take(folder, broken(), options=TakeOptions(guards="off")).report.findings
    assert caplog.text == ""
    assert noted(Snapshot(folder).metadata.metadata) == {}


def test_guard_findings_without_action_are_in_the_metadata_and_logged_once(folder, caplog):
    model = layers()
    optimizer = adam(model.parameters())
    for number in range(5):
        step(model, optimizer)
        Snapshot.take(f"{folder}/step-{number}", {"m": model})
    for number in (2, 3, 4):
        held = Snapshot(f"{folder}/step-{number}").metadata.metadata
        assert [each.partition(":")[0] for each in held[findings.NOTED]] == ["unsaved"]
        assert findings.KEY not in held
    assert caplog.text.count("the app state has no optimizer") == 1


def test_guards_refuses_an_unknown_value(folder):
    with pytest.raises(ValueError, match="guards must be 'suspect', 'report', 'refuse', 'off', got 'no'"):
        Snapshot.take(folder, broken(), options=TakeOptions(guards="no"))


def _run(root, keep, suspect=(3, 4)):
    """A manager of a run of four steps, some of which are suspect, after its removals."""
    model = layers()
    optimizer = adam(model.parameters())
    app = {"m": model, "o": optimizer}
    whole = copy.deepcopy(model.state_dict())
    chosen = TakeOptions(guards="suspect")
    with SnapshotManager(str(root), keep=keep, signals=()) as manager:
        for number in range(1, 5):
            step(model, optimizer)
            if number in suspect:
                with torch.no_grad():
                    model[0].weight.fill_(math.nan)
            manager.take(number, app, metrics={"loss": 1.0 / number}, options=chosen)
            if number in suspect:
                model.load_state_dict(whole)
    with SnapshotManager(str(root), keep=keep, signals=()) as manager:
        yield manager, app


def test_suspect_step_is_skipped_never_best_and_does_not_prune_good_steps(tmp_path, caplog):
    for manager, app in _run(tmp_path / "r", KeepLatest(1) | KeepBest("loss")):
        assert manager.steps() == [2, 4]
        assert manager.best() == 2
        assert manager.last_good() == 2
        assert "NaN or infinity" in manager.suspect(4)[0]
        assert manager.suspect(2) == ()
        assert manager.restore_latest(app) == 2
        assert "step-4: passed over, and step-2 was restored instead: is suspect" in caplog.text
        assert not app["m"][0].weight.isnan().any()
        assert manager.restore_latest(app, good=False) == 4
        assert app["m"][0].weight.isnan().all()
        assert manager.steps() == [2, 4]


def test_suspect_steps_are_pruned_by_the_policy_among_themselves(tmp_path):
    for manager, _ in _run(tmp_path / "r", 2, suspect=(2, 3, 4)):
        assert manager.steps() == [1, 3, 4]


def test_restore_latest_with_only_suspect_steps_names_good_false(tmp_path):
    for manager, app in _run(tmp_path / "r", None, suspect=(1, 2, 3, 4)):
        with pytest.raises(CorruptSnapshotError, match=r"step-4: is suspect .*; good=False restores it"):
            manager.restore_latest(app)
        assert manager.last_good() is None
        assert manager.restore_latest(app, good=False) == 4


@pytest.mark.parametrize("name", TRAININGS)
def test_guards_find_nothing_in_ordinary_trainings(folder, name):
    assert list(alarms(name, folder, 11)) == []


@pytest.mark.parametrize("make", FAULTY)
def test_guards_mark_a_faulty_training_as_suspect(folder, make):
    torch.manual_seed(0)
    app, between = make()
    for number in range(FAULTY[make] + 1):
        between(number)
        Snapshot.take(f"{folder}/step-{number}", app)
        assert bool(findings.suspicions(Snapshot(f"{folder}/step-{number}").metadata.metadata)) == (
            number == FAULTY[make]
        )


def _wrapped_by_fsdp(root, kind):
    """The findings that act in takes of an FSDP model: while it is healthy, and when one rank's shard has NaN."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
    if kind == "fsdp2":
        from torch.distributed.fsdp import fully_shard

        fully_shard(model)
    else:
        from torch.distributed.fsdp import FullyShardedDataParallel

        model = FullyShardedDataParallel(
            model, use_orig_params=kind == "fsdp1 with names", device_id=torch.device("cpu")
        )
    optimizer = adam(model.parameters())
    app = {"m": model, "o": optimizer}
    found = []
    for number in range(6):
        model(torch.randn(8, 16)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if number == 5 and dist.get_rank() == 0:
            with torch.no_grad():
                next(each for each in map(find_local_tensor, model.parameters()) if each.numel()).fill_(math.nan)
        Snapshot.take(f"{root}/step-{number}", app)
        found.append(findings.suspicions(Snapshot(f"{root}/step-{number}").metadata.metadata))
    return found


def _put_back(root, size, kind):
    """What makes takes suspect of a model under DDP, whose parameter is always put back."""
    torch.manual_seed(0)
    model = nn.Linear(size, size, bias=False)
    ddp = nn.parallel.DistributedDataParallel(model)
    optimizer = adam(model.parameters()) if kind == "adam" else torch.optim.SGD(model.parameters(), 1.0, momentum=0.9)
    kept = copy.deepcopy(model.state_dict())
    for number in range(3):
        ddp(torch.randn(8, size)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        model.load_state_dict(kept)
        Snapshot.take(f"{root}/step-{number}", {"m": ddp, "o": optimizer})
    return findings.suspicions(Snapshot(f"{root}/step-2").metadata.metadata)


@pytest.mark.parametrize("kind", ["adam", "momentum"])
def test_guard_stale_finds_a_parameter_whose_optimizer_state_is_of_another_rank(two, tmp_path, kind):
    for found in two.run(_put_back, str(tmp_path), 40, kind):
        assert "1 parameter did not change in three takes" in found[0]


def test_guard_does_not_read_freed_parameters_of_a_module_that_saves_copies(folder):
    """They begin at a low address if they are views into memory that was freed."""
    memory = torch.zeros(200_064)
    model = nn.Module()
    model.register_parameter("w", nn.Parameter(memory[200_000:]))
    model.state_dict = lambda **_: {"copy": torch.zeros(8)}
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    memory.untyped_storage().resize_(0)
    assert takes(folder, {"m": model, "o": optimizer}, lambda number: None, times=2) == [[], []]


@pytest.mark.parametrize("kind", ["fsdp1", "fsdp1 with names", "fsdp2"])
def test_guard_nonfinite_of_fsdp_models_finds_nan_in_a_shard(two, tmp_path, kind):
    for found in two.run(_wrapped_by_fsdp, str(tmp_path), kind):
        assert found[:5] == [()] * 5
        assert "NaN or infinity" in found[5][0]


def test_guard_nonfinite_examines_all_elements_of_short_tensors_within_few_takes(folder):
    """A row of infinities in each of 1,200 moments of 512 elements, alone, is found within five takes."""
    model = nn.ParameterList([torch.randn(8, 64) for _ in range(1200)])
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6, momentum=0.9)
    for each in model:
        each.grad = torch.zeros_like(each)
    optimizer.step()
    for chosen in (0, 511, 1199):
        moment = optimizer.state[model[chosen]]["momentum_buffer"]
        moment[5] = math.inf
        found = takes(f"{folder}/{chosen}", {"m": model, "o": optimizer}, lambda number: None, times=5)
        assert any("nonfinite" in each for each in found)
        moment[5] = 0.0


def test_manager_keeps_the_last_good_step_if_a_model_becomes_nan(tmp_path, caplog):
    model = layers()
    optimizer = adam(model.parameters())
    app = {"m": model, "o": optimizer}
    with SnapshotManager(str(tmp_path / "r"), keep=1, signals=()) as manager:
        step(model, optimizer)
        manager.take(1, app)
        good = copy.deepcopy(model.state_dict())
        with torch.no_grad():
            model[0].weight.fill_(math.nan)
        for number in (2, 3, 4):
            manager.async_take(number, app).wait()
    with SnapshotManager(str(tmp_path / "r"), keep=1, signals=()) as manager:
        assert manager.steps() == [1, 4]
        assert manager.last_good() == 1
        assert manager.restore_latest(app) == 1
    assert all(torch.equal(model.state_dict()[name], each) for name, each in good.items())
    for number in (2, 3, 4):
        assert f"step-{number}: suspect: nonfinite: NaN or infinity in m/0.weight" in caplog.text


def clamped():
    """A parameter at its bound, as CLIP's temperature."""
    model = nn.Linear(8, 8)
    model.scale = nn.Parameter(torch.full((3,), 4.6))
    optimizer = adam([{"params": model.scale}, {"params": [model.weight, model.bias]}])

    def between(number):
        (model.weight.sum().square() - model.scale.sum()).backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            model.scale.clamp_(0, 4.6)

    return {"m": model, "o": optimizer}, between


def test_guard_stale_ignores_a_parameter_at_its_bound(folder):
    app, between = clamped()
    assert not any(takes(folder, app, between, times=6))


@pytest.mark.parametrize("rate", [None, [0.1], "x"])
def test_guard_ignores_a_learning_rate_that_is_not_a_number(folder, rate):
    model = layers()
    optimizer = adam(model.parameters())
    step(model, optimizer)
    optimizer.param_groups[0]["lr"] = rate
    assert takes(folder, {"m": model, "o": optimizer}, lambda number: None) == [[], [], [], []]


def test_guard_nonfinite_ignores_a_mask_that_is_a_frozen_parameter(folder):
    model = nn.Linear(8, 8)
    model.mask = nn.Parameter(torch.full((8, 8), -math.inf).triu(1), requires_grad=False)
    assert not Snapshot.take(
        folder, {"m": model, "o": adam(model.parameters())}, options=TakeOptions(guards="refuse")
    ).report.findings


def test_guard_reports_float32_masters_only_if_they_differ(folder):
    model = nn.Linear(8, 8).to(torch.bfloat16)
    masters = [nn.Parameter(each.detach().float()) for each in model.parameters()]
    app = {"m": model, "o": adam(masters)}
    assert not Snapshot.take(f"{folder}/step-1", app, options=TakeOptions(guards="refuse")).report.findings
    with torch.no_grad():
        masters[0].add_(1.0)
    [finding] = Snapshot.take(f"{folder}/step-2", app, options=TakeOptions(guards="refuse")).report.findings
    assert (finding.guard, finding.acts) == ("elsewhere", False)


def test_guards_refuse_a_removed_stateful_once(folder):
    a, b = nn.Linear(2, 2), nn.Linear(2, 2)
    Snapshot.take(f"{folder}/step-1", {"a": a, "b": b}, options=TakeOptions(guards="refuse"))
    with pytest.raises(SuspectStateError, match="b: was in the app state"):
        Snapshot.take(f"{folder}/step-2", {"a": a}, options=TakeOptions(guards="refuse"))
    Snapshot.take(f"{folder}/step-3", {"a": a}, options=TakeOptions(guards="refuse"))
    Snapshot.take(f"{folder}/net-4", {"b": b}, options=TakeOptions(guards="refuse"))


class Cached:
    """A stateful that returns the same copy again and again."""

    def __init__(self, model):
        self.held = copy.deepcopy(model.state_dict())

    def state_dict(self):
        return self.held

    def load_state_dict(self, state):
        self.held = state


def test_guard_stale_finds_a_cached_copy_of_the_weights(folder):
    model = layers()
    optimizer = adam(model.parameters())
    found = takes(folder, {"m": Cached(model), "o": optimizer}, lambda number: step(model, optimizer))
    assert found == [[], [], ["stale"], ["stale"]]


def test_suspect_steps_are_replaced_by_a_run_that_continues_before_them(tmp_path):
    for manager, app in _run(tmp_path / "r", None):
        assert manager.restore_latest(app) == 2
        for number in (3, 4):
            manager.take(number, app)
        assert manager.last_good() == 4
        assert manager.suspect(3) == ()


# Norms, and what is not saved


def test_guard_norms_are_those_of_the_middle_of_each_tensor():
    state = StateDict(
        **{str(dtype): torch.randn(5, 9).mul(3).to(dtype) for dtype in FLOATS},
        strided=torch.randn(8, 6).t(), odd=torch.randn(40)[1:], one=torch.tensor([3.0]), none=torch.empty(0),
        ints=torch.arange(5), long=torch.randn(1 << 19),
    )  # fmt: skip
    leaves = flattened({"s": state}).leaves
    found = dict(zip((leaf.path for leaf in leaves), samples.measure_squares(leaves), strict=True))
    for leaf in leaves:
        flat = leaf.tensor.reshape(-1)
        wide = samples.LINE // (leaf.tensor.element_size() if leaf.path != "s/odd" else 1)
        begin = max(0, (flat.numel() - wide) // 2)
        expected = flat[begin : begin + wide].double().square().mean()
        if leaf.path in ("s/none", "s/ints", "s/strided"):
            assert math.isnan(found[leaf.path])
        else:
            assert found[leaf.path] == pytest.approx(float(expected)), leaf.path


def test_guard_norm_jump_is_reported_once_until_the_norm_changes_again(folder):
    model = layers()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def between(number):
        step(model, optimizer)
        if number in (8, 20):
            with torch.no_grad():
                model[0].weight.mul_(5.0)
                model[2].weight.mul_(5.0)

    found = takes(folder, {"m": model, "o": optimizer}, between, times=26)
    assert [number for number, some in enumerate(found) if "jump" in some] == [8, 20]


def test_guard_unsaved_reports_parameters_unless_another_object_may_save_them(folder):
    class Other:
        def state_dict(self):
            return {"x": torch.ones(3)}

        def load_state_dict(self, state):
            pass

    model = layers()
    optimizer = adam(model.parameters())
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    between = lambda number: (step(model, optimizer), scheduler.step())  # noqa: E731
    alone = takes(folder, {"m": model}, between, times=6)
    assert alone == [[], [], *[["unsaved"]] * 4]
    assert takes(f"{folder}/a", {"m": model, "o": optimizer}, between, times=4) == [[], [], ["unsaved"], ["unsaved"]]
    for name, more in {
        "b": {"o": optimizer, "s": scheduler},
        "c": {"o": StateDict(o=optimizer.state_dict()), "s": StateDict(s=scheduler.state_dict())},
        "d": {"x": Other()},
        "e": {"o": optimizer, "x": Other()},
    }.items():
        assert takes(f"{folder}/{name}", {"m": model, **more}, between, times=4) == [[]] * 4, name


# What reviewers found


def tied(kind):
    """A model whose embedding and head share a weight, as GPT-2 has it, in an app state of several forms."""
    model = nn.ModuleDict({"emb": nn.Embedding(10, 8), "mid": nn.Linear(8, 8), "head": nn.Linear(8, 10, bias=False)})
    model["head"].weight = model["emb"].weight
    optimizer = adam(model.parameters())
    if kind == "named":
        return model, {"t": ModelState(model, optimizer)}
    if kind == "twice":
        return model, {"a": StateDict(w=model.state_dict()), "m": model, "o": optimizer}
    if kind == "renamed":
        model.register_state_dict_post_hook(
            lambda module, state, prefix, meta: [state.update({f"x.{n}": state.pop(n)}) for n in list(state)] and None
        )
    return model, {"m": model, "o": optimizer}


@pytest.mark.parametrize("kind", ["plain", "named", "twice", "renamed"])
def test_guard_nonfinite_examines_parameters_with_several_or_other_names(folder, kind):
    model, app = tied(kind)
    assert Snapshot.take(f"{folder}/step-1", app).report.findings == []
    with torch.no_grad():
        model["emb"].weight.fill_(math.nan)
    with pytest.raises(SuspectStateError, match=r"nonfinite: NaN or infinity in .*\(80 of 80\)"):
        Snapshot.take(f"{folder}/step-2", app, options=TakeOptions(guards="refuse"))


def test_guard_stale_ignores_an_early_adam_step_below_the_resolution(folder):
    weight = nn.Parameter(torch.linspace(1.02, 1.15, 400).bfloat16())
    model = nn.ParameterDict({"w": weight})
    optimizer = torch.optim.AdamW([weight], lr=3.5e-3, weight_decay=0.0)

    def between(number):
        weight.grad = torch.randn(400).sign().bfloat16() if number % 2 else torch.ones(400).bfloat16()
        optimizer.step()

    found = takes(folder, {"m": model, "o": optimizer}, between, times=12)
    assert not [each for some in found for each in some if each == "stale"]


@pytest.mark.parametrize("bound", [lambda p: p.clamp_(-0.01, 0.01), lambda p: p.copy_(p.sign())])
def test_guard_stale_ignores_weights_at_the_bounds_of_a_clamp(folder, bound):
    model = nn.Linear(16, 4, bias=False)
    optimizer = adam(model.parameters())

    def between(number):
        model.weight.grad = -model.weight.detach().sign() + 0.01 * torch.randn(4, 16)
        optimizer.step()
        with torch.no_grad():
            bound(model.weight)

    found = takes(folder, {"m": model, "o": optimizer}, between, times=12)
    assert not [each for some in found for each in some if each == "stale"]


def test_guards_work_with_takes_of_weights_between_full_takes(folder):
    model = layers()
    optimizer = adam(model.parameters())
    whole, part = {"m": model, "o": optimizer, "p": StateDict(n=1)}, {"m": model}
    for number in range(8):
        step(model, optimizer)
        report = Snapshot.take(f"{folder}/step-{number}", part if number % 2 else whole).report
        assert [each.guard for each in report.findings] == (["missing"] if number == 1 else [])
    Snapshot.take(f"{folder}/trial-0/step-0", whole)
    assert Snapshot.take(f"{folder}/trial-1/step-0", {"m": model, "o": optimizer}).report.findings == []


def test_guard_reports_a_clone_of_the_policy_beside_a_target_network(folder):
    policy = layers()
    optimizer = adam(policy.parameters())
    app = {"policy": StateDict(sd={n: v.clone() for n, v in policy.state_dict().items()}), "target": layers()}
    report = Snapshot.take(f"{folder}/step-1", {**app, "o": optimizer}, options=TakeOptions(guards="refuse")).report
    assert [each.guard for each in report.findings] == ["elsewhere"]


def test_guard_unsaved_works_beside_grad_scalers_and_data_loaders(folder):
    model = layers()
    optimizer = adam(model.parameters())
    app = {"m": model, "scaler": torch.amp.GradScaler("cpu"), "rng": RNGState()}
    assert takes(folder, app, lambda number: step(model, optimizer))[2] == ["unsaved"]
    other = {**app, "m": copy.deepcopy(model), "o": optimizer}
    assert takes(f"{folder}/b", other, lambda number: step(model, optimizer), times=1) == [["missing"]]


def test_guard_nonfinite_examines_a_parameter_unfrozen_later(folder):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    model[0].requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    app = {"m": model, "o": optimizer}
    assert Snapshot.take(f"{folder}/step-1", app).report.findings == []
    model[0].requires_grad_(True)
    with torch.no_grad():
        model[0].weight.fill_(math.nan)
    assert [each.guard for each in Snapshot.take(f"{folder}/step-2", app).report.findings] == ["nonfinite"]


def test_take_drops_the_suspect_mark_of_given_metadata(folder):
    model = layers()
    held = {findings.KEY: ["nonfinite: x"], "mine": 1}
    snapshot = Snapshot.take(f"{folder}/step-1", {"m": model}, metadata=held)
    assert noted(snapshot.metadata.metadata) == {"mine": 1}


def test_guards_refuse_on_one_rank_writes_nothing(folder):
    model = layers()
    optimizer = adam(model.parameters())
    with torch.no_grad():
        model[0].weight.fill_(math.nan)
    with recording() as log, pytest.raises(SuspectStateError):
        Snapshot.take(f"recording+{folder}/s", {"m": model, "o": optimizer}, options=TakeOptions(guards="refuse"))
    assert log.nbytes("write") == 0


def moments(**more):
    return {"exp_avg": torch.tensor([2.0, -4.0]), "exp_avg_sq": torch.tensor([4.0, 16.0]), **more}


ADAM = {"lr": 0.5, "betas": (0.5, 0.75), "eps": 0.0}


@pytest.mark.parametrize(
    ("settings", "state", "expected"),
    [
        (ADAM, moments(step=1), [0.5 * 4 / 4, 0.5 * 8 / 8]),
        (ADAM, moments(step=torch.tensor(2.0)), [0.5 * (2 / 0.75) / (2 / 0.4375**0.5)] * 2),
        ({**ADAM, "step": 1}, moments(), [0.5, 0.5]),
        ({**ADAM, "eps": 4.0}, moments(step=1), [0.5 * 4 / 8, 0.5 * 8 / 12]),
        (ADAM, moments(step=1, max_exp_avg_sq=torch.tensor([16.0, 64.0])), [0.25, 0.25]),
        (ADAM, moments(step=0), None),
        (ADAM, moments(), None),
        ({**ADAM, "betas": (0.5,)}, moments(step=1), None),
        ({**ADAM, "betas": 0.5}, moments(step=1), None),
        ({**ADAM, "betas": (1.0, 0.75)}, moments(step=1), None),
        ({"lr": 0.5}, moments(step=1), None),
        ({"lr": 0.5}, {"momentum_buffer": torch.tensor([2.0, -4.0])}, [1.0, 2.0]),
        ({"lr": 0.5}, {"momentum_buffer": torch.tensor([2.0]), "square_avg": torch.tensor([1.0])}, None),
        ({"lr": 0.5}, {"exp_avg": torch.tensor([2.0])}, None),
        ({"lr": 0.5}, {}, None),
    ],
)
def test_guards_expect_the_next_update_of_known_optimizers(settings, state, expected):
    found = guards._expect_update(settings, state)
    if expected is None:
        assert found is None
    else:
        torch.testing.assert_close(found, torch.tensor(expected))


class Wrapped(torch.Tensor):
    pass


@pytest.mark.parametrize(
    ("tensor", "found"),
    [
        (torch.ones(2), True),
        (torch.ones(1), False),
        (torch.ones(2, device="meta"), False),
        (torch.eye(2).to_sparse(), False),
        (torch.ones(2).as_subclass(Wrapped), False),
    ],
)
def test_guards_look_at_parameters_with_plain_memory(tensor, found):
    leaf = guards._leaf_of("s/x", tensor)
    assert (leaf is not None) is found
    if leaf is not None:
        assert (leaf.path, leaf.dtype, leaf.shape, leaf.nbytes) == ("s/x", "float32", (2,), 8)
        assert (leaf.address, leaf.plain) == (tensor.data_ptr(), True)


@pytest.mark.parametrize(
    ("count", "total", "most", "text"),
    [
        (2, 0, 3, "t0, t1"),
        (3, 0, 3, "t0, t1, t2"),
        (4, 0, 3, "t0, t1, t2 and 1 more"),
        (2, 1500, 3, "t0, t1 and 1,498 more"),
        (3, 2, 1, "t0 and 2 more"),
    ],
)
def test_guards_name_some_of_many(count, total, most, text):
    assert guards._some_of([f"t{number}" for number in range(count)], total, most) == text


def test_stores_live_steps_compares_stored_numbers_of_steps_with_those_of_optimizers():
    def stores(*held):
        leaves = [SimpleNamespace(path=path, tensor=torch.tensor(value)) for path, value in held]
        steps = [leaves[number].tensor for number in find_steps(leaves)]
        return stores_live_steps(list_counts(map_modules({"optimizer": optimizer})), steps)

    model = nn.Linear(2, 1)
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(3):
        model(torch.ones(2)).sum().backward()
        optimizer.step()
    assert not stores()
    assert not stores(("a/weight", 3.0), ("a/step", [3.0, 3.0]), ("a/step", 2.0))
    assert stores(("a/step", 2.0), ("b/step", 3))
    assert stores(("a/step", 3.0), ("b/step", 2))
    assert stores(("a/step", 1.0), ("a/step", [3.0]))


def test_rotation_reads_short_tensors_up_to_a_share_of_all_bytes_in_a_take(monkeypatch):
    monkeypatch.setattr(samples, "WHOLE_BYTES", 100)
    monkeypatch.setattr(samples, "SHARE", 2)
    leaves = [guards._leaf_of(f"s/{number}", torch.zeros(10)) for number in range(10)]
    rotation = samples.Rotation(leaves, range(10))
    assert [len(rotation.choose_whole(leaves)) for _ in range(3)] == [7, 3, 7], "at most 100 + 400 / 2 bytes"
