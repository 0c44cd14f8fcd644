"""A restore into something that is not quite what was saved: every difference is restored, reported or refused."""

import textwrap

import pytest
import torch
from torch import nn

from snapshot import ModelState, RestoreError, RestoreOptions, Snapshot, SnapshotExistsError, SnapshotManager, StateDict
from tests.helpers.arguments import for_restore

URL = "memory://changed"


def take(state):
    return Snapshot.take(URL, state, overwrite=True)


# Keys of a StateDict


def test_restore_state_dict_keeps_only_its_own_new_keys():
    take({"s": StateDict(step=3, nested={"a": 1})})
    live = StateDict(step=0, best=5, nested={"a": 0, "b": 2})
    data = live.state_dict()
    report = Snapshot(URL).restore({"s": live})
    assert live == {"step": 3, "best": 5, "nested": {"a": 1}}
    assert live.state_dict() is data
    assert [str(line) for line in report.kept] == ["kept       s/best: the snapshot lacks it"]


def test_restore_state_dict_adds_keys_that_only_the_snapshot_has():
    take({"s": StateDict(step=3, more=torch.ones(2))})
    live = StateDict(step=0)
    assert not Snapshot(URL).restore({"s": live}).kept
    assert live["more"].tolist() == [1, 1]


@pytest.mark.parametrize("exact", [True, False])
def test_restore_state_dict_keeps_or_drops_keys_that_are_not_strings(exact):
    take({"s": StateDict({1: "one", "1": "text"})})
    live = StateDict({2: "two", "1": "", 1: "", None: 0})
    Snapshot(URL).restore({"s": live}, options=RestoreOptions(exact=exact))
    assert live == {1: "one", "1": "text", **({} if exact else {2: "two", None: 0})}


def test_restore_exact_with_select_does_not_drop_other_keys():
    take({"s": StateDict(step=3)})
    live = StateDict(step=0, best=5)
    report = Snapshot(URL).restore({"s": live}, select=["s/step"], options=RestoreOptions(exact=True))
    assert live == {"step": 3, "best": 5}
    assert not report.kept


# Whole keys


def test_restore_strict_false_reports_a_key_missing_in_the_snapshot():
    net = nn.Linear(2, 2)
    take({"net": net})
    ema = nn.Linear(2, 2)
    before = ema.weight.detach().clone()
    with pytest.raises(RestoreError, match="ema: the snapshot has no such key; the names are net"):
        Snapshot(URL).restore({"net": net, "ema": ema})
    report = Snapshot(URL).restore({"net": net, "ema": ema}, strict=False)
    assert [str(line) for line in report] == ["missing    ema: the snapshot has no such key; left unchanged"]
    assert torch.equal(ema.weight, before)


@pytest.mark.parametrize("live", [{"other": StateDict(a=1)}, {"other": nn.Linear(2, 2)}, {"net": nn.Conv2d(1, 1, 1)}])
def test_restore_that_matches_nothing_raises_even_with_strict_false(live):
    take({"net": nn.Sequential(nn.Linear(2, 2)), "more": StateDict(x=1)})
    for strict in (True, False):
        with pytest.raises(RestoreError):
            Snapshot(URL).restore(live, strict=strict)
    with pytest.raises(RestoreError, match=r"the snapshot has nothing that the application requests; it has:\n"):
        Snapshot(URL).restore(live, strict=False)


def test_restore_error_lists_up_to_ten_names():
    take({f"key{i}": StateDict() for i in range(10)})
    with pytest.raises(RestoreError) as caught:
        Snapshot(URL).restore({"zzz": StateDict()})
    assert caught.value.mismatches[0].endswith(", ".join(f"key{i}" for i in range(10)))
    assert str(caught.value).endswith(
        "(to match other names: rename={...}; to restore only what matches: strict=False)"
    )
    take({f"key{i:02}": StateDict() for i in range(11)})
    with pytest.raises(RestoreError) as caught:
        Snapshot(URL).restore({"zzz": StateDict()})
    assert caught.value.mismatches[0].endswith("key09, …")


def test_restore_latest_with_strict_false_resumes_with_a_new_ema(tmp_path):
    net, progress = nn.Linear(2, 2), StateDict(step=1)
    with SnapshotManager(tmp_path) as manager:
        manager.take(1, {"net": net, "progress": progress})
        ema = nn.Linear(2, 2)
        progress["step"] = 0
        assert (
            manager.restore_latest({"net": net, "progress": progress, "ema": ema}, options=RestoreOptions(strict=False))
            == 1
        )
        assert progress["step"] == 1
        with pytest.raises(TypeError, match="strickt"):
            manager.restore_latest({"net": net}, strickt=False)


def _flip_in_only_file(folder, at=-1):
    (file,) = sorted((folder / "data").glob("*.safetensors"))
    data = bytearray(file.read_bytes())
    data[at] ^= 1
    file.write_bytes(data)


@pytest.mark.parametrize("kind", ["module", "StateDict"])
def test_restore_latest_after_a_corrupt_step_keeps_no_tensor_of_it(tmp_path, kind):
    """The newest step is corrupt and was read into a tensor that the older step does not have."""

    def holder():
        return StateDict(w=torch.zeros(300_000)) if kind == "StateDict" else nn.Linear(600, 500, bias=False)

    first, second = StateDict(step=1), holder()
    with SnapshotManager(tmp_path) as manager:
        manager.take(1, {"s": first} | ({"more": StateDict(z=1)} if kind == "StateDict" else {}))
        manager.take(2, {"s": first, "more": second})
        _flip_in_only_file(tmp_path / "step-2")
        with pytest.raises(RestoreError, match=r"more/w.*holds bytes of a damaged snapshot"):
            manager.restore_latest({"s": first, "more": holder()}, options=RestoreOptions(strict=False))
        live = holder()
        assert (
            manager.restore_latest({"s": first, "more": live}, options=RestoreOptions(strict=False, atomic=True)) == 1
        )  # not touched at all


def test_restore_latest_after_a_corrupt_step_restores_what_the_older_step_has(tmp_path):
    with SnapshotManager(tmp_path) as manager:
        for step in (1, 2):
            manager.take(step, {"s": StateDict(w=torch.full((300_000,), float(step)), step=step)})
        _flip_in_only_file(tmp_path / "step-2")
        live = StateDict(w=torch.zeros(300_000), step=0, new=5)
        assert manager.restore_latest({"s": live}) == 1
        assert live["w"].eq(1).all()
        assert live["new"] == 5


# Shapes


def pair(width, dtype=torch.float32):
    return nn.Sequential(nn.Linear(3, 3), nn.Linear(3, width)).to(dtype)


@pytest.mark.parametrize("wrap", [lambda net: net, ModelState], ids=["module", "ModelState"])
def test_mismatched_skip_leaves_a_new_head_unchanged(wrap):
    saved = pair(2)
    take({"net": wrap(saved)})
    live = pair(7)
    before = {name: value.clone() for name, value in live.state_dict().items()}
    for options in ({}, {"strict": False}):
        with pytest.raises(RestoreError, match=r"to leave tensors of another shape unchanged: .*mismatched='skip'"):
            Snapshot(URL).restore({"net": wrap(live)}, **for_restore(**options))
    assert all(torch.equal(value, before[name]) for name, value in live.state_dict().items())
    report = Snapshot(URL).restore({"net": wrap(live)}, strict=False, options=RestoreOptions(mismatched="skip"))
    base = "net/model" if wrap is ModelState else "net"
    assert [(line.path, line.detail) for line in report.skipped] == [
        (f"{base}/1.weight", "the snapshot has [2, 3], the application [7, 3]; left unchanged"),
        (f"{base}/1.bias", "the snapshot has [2], the application [7]; left unchanged"),
    ]
    assert torch.equal(live[0].weight, saved[0].weight)
    assert torch.equal(live[1].weight, before["1.weight"])


def test_mismatched_with_an_unknown_value_raises():
    with pytest.raises(ValueError, match="mismatched must be 'error' or 'skip', got 'ignore'"):
        Snapshot(take({"net": pair(2)}).path).restore({"net": pair(2)}, options=RestoreOptions(mismatched="ignore"))


def test_model_state_with_strict_false_reports_what_is_missing():
    saved = nn.Sequential(nn.Linear(3, 3))
    optimizer = torch.optim.AdamW(saved.parameters(), lr=0.5)
    take({"all": ModelState(saved, optimizer)})
    live = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    another = torch.optim.AdamW(live.parameters(), lr=0.1)
    with pytest.raises(RestoreError, match=r"all/model/1.weight: is in the application"):
        Snapshot(URL).restore({"all": ModelState(live, another)})
    report = Snapshot(URL).restore({"all": ModelState(live, another)}, strict=False)
    assert [line.path for line in report.missing] == ["all/model/1.bias", "all/model/1.weight"]
    assert torch.equal(live[0].weight, saved[0].weight)
    assert another.param_groups[0]["lr"] == 0.5
    live(torch.ones(1, 3)).sum().backward()
    another.step()


# Renames


def test_rename_prefix_moves_everything_below():
    class Old(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
            self.ab = nn.Linear(2, 2)

    class New(nn.Module):
        def __init__(self):
            super().__init__()
            self.enc = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
            self.ab = nn.Linear(2, 2)

    old, new = Old(), New()
    take({"model": old})
    Snapshot(URL).restore({"model": new}, rename={"model/a": "model/enc"})
    assert torch.equal(new.enc[1].weight, old.a[1].weight)
    assert torch.equal(new.ab.weight, old.ab.weight)


def test_rename_globs_capture_wildcards():
    take({"m": StateDict({f"layers.{i}.attn.{w}": torch.full((2,), float(i)) for i in range(12) for w in "qk"})})
    live = StateDict({f"h.{i}.att.{w}": torch.zeros(2) for i in range(12) for w in "qk"})
    Snapshot(URL).restore({"m": live}, rename={"m/layers.*.attn.*": "m/h.*.att.*"}, options=RestoreOptions(exact=True))
    assert set(live) == {f"h.{i}.att.{w}" for i in range(12) for w in "qk"}
    assert all(value.eq(int(name.split(".")[1])).all() for name, value in live.items())


@pytest.mark.parametrize(
    ("rename", "error", "text"),
    [
        ({"m/x": "m/y"}, RestoreError, "rename: m/x is not in the snapshot; did you mean 'm/w'"),
        ({"m/q*": "m/y*"}, RestoreError, r"rename: m/q\* is not in the snapshot"),
        ({"m/*": "m/y"}, ValueError, "must have the same wildcards as"),
        ({"m/w": 3}, TypeError, "rename must map str to str"),
        (["m/w"], TypeError, "rename must be a dict or a function, got list"),
        (lambda path: None, TypeError, "rename must return str, got None for"),
        ({"m/w": "m/v"}, RestoreError, "rename gives two entries the name 'm/v'"),
    ],
)
def test_rename_that_is_invalid_raises(rename, error, text):
    take({"m": StateDict(w=torch.ones(2), v=torch.ones(2))})
    live = StateDict(w=torch.zeros(2), v=torch.zeros(2))
    with pytest.raises(error, match=text):
        Snapshot(URL).restore({"m": live}, rename=rename)
    assert live["w"].eq(0).all()


def test_rename_of_a_model_in_model_state_renames_its_optimizer():
    saved = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    first = torch.optim.SGD(saved.parameters(), lr=0.1, momentum=0.9)
    saved(torch.ones(1, 2)).sum().backward()
    first.step()
    take({"all": ModelState(saved, first)})
    live = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)})
    second = torch.optim.SGD(live.parameters(), lr=0.1, momentum=0.9)
    Snapshot(URL).restore(
        {"all": ModelState(live, second)}, rename={"all/model/0": "all/model/a", "all/model/1": "all/model/b"}
    )
    assert torch.equal(live["b"].weight, saved[1].weight)
    expected = first.state[saved[1].weight]["momentum_buffer"]
    assert torch.equal(second.state[live["b"].weight]["momentum_buffer"], expected)


def test_rename_of_a_foreign_file_uses_the_paths_of_its_errors(tmp_path):
    from safetensors.torch import save_file

    save_file({"model.0.weight": torch.ones(2, 2), "model.0.bias": torch.ones(2)}, tmp_path / "model.safetensors")
    live = nn.Sequential(nn.Linear(2, 2))
    with pytest.raises(RestoreError, match=r"model/model.0.weight: is in the snapshot") as caught:
        Snapshot(tmp_path / "model.safetensors").restore({"model": live})
    named = [line.partition(":")[0] for line in caught.value.mismatches if "model.0" in line]
    rename = {path: path.replace("/model.", "/") for path in named}
    Snapshot(tmp_path / "model.safetensors").restore({"model": live}, rename=rename)
    assert live[0].weight.eq(1).all()
    with torch.no_grad():
        live[0].weight.zero_()
    Snapshot(tmp_path / "model.safetensors").restore(
        {"model": live}, rename={"model/model.*": "model/*"}, options=RestoreOptions(exclude=["model/0.bias"])
    )
    assert live[0].weight.eq(1).all()


# Read-only memory


@pytest.mark.parametrize("many", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_restore_into_a_read_only_memory_map_raises(tmp_path, warm, many, dtype):
    """In a process of its own: without the check, it dies."""
    script = f"""
        import mmap, warnings
        import torch
        from snapshot import RestoreError, RestoreOptions, Snapshot, StateDict

        path = {str(tmp_path / "w")!r}
        with open(path, "wb") as file:
            file.write(bytes(8 << 20))
        with open(path, "rb") as file:
            mapped = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
        warnings.simplefilter("ignore")
        live = torch.frombuffer(mapped, dtype=torch.float32)
        more = {{f"t{{i}}": torch.ones(4) for i in range(600 if {many} else 1)}}
        state = {{"net": StateDict(more, w=torch.ones(len(live), dtype={dtype}))}}
        Snapshot.take("memory://mapped", state)
        module = torch.nn.Module()
        module.w = torch.nn.Parameter(live, requires_grad=False)
        for name, value in more.items():
            module.register_buffer(name, value * 0)
        try:
            Snapshot("memory://mapped").restore({{"net": module}}, options=RestoreOptions(cast="same_kind"))
        except RestoreError as error:
            assert error.mismatches[0].startswith("net/w: its memory is read-only"), error
            assert not module.t0.any()
        else:
            raise AssertionError("restored")
        module.w = torch.nn.Parameter(live.clone(), requires_grad=False)
        Snapshot("memory://mapped").restore({{"net": module}}, options=RestoreOptions(cast="same_kind"))
        assert module.w.eq(1).all()
    """
    warm.run(textwrap.dedent(script))


def test_restore_reports_shared_memory_that_is_restored_separately():
    whole = torch.arange(10.0)
    snapshot = take({"s": StateDict(t=whole, view=whole[1:], tied=whole)})
    report = snapshot.restore({"s": (fresh := StateDict())})
    assert [str(line) for line in report.changed] == ["changed    s/view: shared memory with s/t, now has its own"]
    assert fresh["tied"].data_ptr() == fresh["t"].data_ptr()
    assert torch.equal(fresh["view"], whole[1:])
    live = torch.zeros(10)
    report = snapshot.restore({"s": StateDict(t=live, view=torch.zeros(9), tied=live)})
    assert not report.changed  # it is restored into what the application has
    assert snapshot.verify()


@pytest.mark.parametrize(
    ("rename", "text"),
    [
        (
            lambda path: {"m/1.weight": "m/0.bias/x"}.get(path, path),
            "rename moves it below m/0.bias, which holds a value",
        ),
        ({"m/0.weight": "zz/0.weight"}, "rename moves it to zz/0.weight, and the application has no key 'zz'"),
        (lambda path: "/m" if path == "m" else path, "rename must give it a valid path, got '/m'"),
        (lambda path: {}[path], "rename raised KeyError for '[lm]'"),
        ({"l/0": "l/5"}, "elements of a sequence cannot be moved"),
    ],
)
def test_restore_latest_with_a_wrong_rename_does_not_treat_a_step_as_damaged(tmp_path, rename, text):
    """Else a good step would be passed over, and the next take would write over it."""
    one, two = nn.Sequential(nn.Linear(4, 6)), nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 3))

    class Listed:
        def state_dict(self):
            return [1, 2]

        def load_state_dict(self, state):
            raise AssertionError("handed back")

    with SnapshotManager(tmp_path) as manager:
        manager.take(1, {"m": one, "l": Listed()})
        manager.take(2, {"m": two, "l": Listed()})
        with pytest.raises(RestoreError, match=text):
            manager.restore_latest({"m": two, "l": Listed()}, options=RestoreOptions(rename=rename, strict=False))
        with pytest.raises(SnapshotExistsError):
            manager.take(2, {"m": two, "l": Listed()})


def test_rename_prefix_to_the_level_above():
    saved = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    take({"m": nn.ModuleDict({"inner": saved})})
    live = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    Snapshot(URL).restore({"m": live}, rename={"m/inner": "m"})
    assert torch.equal(live[1].weight, saved[1].weight)


def test_model_state_without_an_optimizer_reports_the_saved_one_as_unused():
    saved = nn.Linear(2, 2)
    take({"m": ModelState(saved, torch.optim.AdamW(saved.parameters()))})
    live = nn.Linear(2, 2)
    report = Snapshot(URL).restore({"m": ModelState(live)})
    assert [line.path for line in report.unused] == ["m/optim"]
    report = Snapshot(URL).restore({"m": ModelState(live)}, unused="ignore")
    assert [line.path for line in report.unexpected] == ["m/optim"]
    assert torch.equal(live.weight, saved.weight)
