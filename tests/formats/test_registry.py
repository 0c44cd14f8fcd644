"""Formats of other packages: recognised, read, written, and found after those of this library."""

import logging

import pytest
import torch

import snapshot
from snapshot import RestoreOptions, Snapshot, StateDict, Target, extensions
from snapshot.cli import main
from snapshot.errors import CorruptSnapshotError, MissingExtraError, SnapshotError, SnapshotNotFoundError
from snapshot.formats import registry
from snapshot.formats.registry import Format

MODULE = """
import struct
from snapshot.formats.foreign import make_document
from snapshot.formats.registry import Format
from snapshot.manifest.document import ForeignFile
from snapshot.manifest.entries import TensorEntry
from snapshot.plan.layout import Extent, FilePlan
from snapshot.transform.export import ExportPlan

async def describe_file(storage, name, size, limit):
    count = (size - 4) // 4
    entry = TensorEntry(name, (4, size), "float32", (count,))
    files = {name: ForeignFile(size)}
    return make_document("mine", "1", storage.url, b"MINE", manifest={"0/x": entry}, files=files)

async def describe_folder(folder):
    names = [name for name in await folder.names() if name.endswith(".mine")]
    size = (await folder.storage.stat(names[0])).size
    return await describe_file(folder.storage, names[0], size, folder.limit)

MINE = Format("mine", 85, "tiny:describe_folder", r".*\\.mine", "tiny:describe_file", (b"MINE",))
DCP = Format("dcp", 1, "tiny:describe_folder")
NUMBER = 7

def plan(export, request):
    made = ExportPlan("mine")
    tensors = list(export.named_tensors(made))
    export.add_named(made, tensors)
    end = 4
    extents = []
    for number, leaf in enumerate(made.leaves):
        extents.append(Extent(number, end, end + leaf.nbytes))
        end += leaf.nbytes
    made.files.append((request.name, FilePlan(b"MINE", tuple(extents), end)))
    return made

WRITTEN = Format(
    "mine", 85, "tiny:describe_folder", r".*\\.mine", "tiny:describe_file", (b"MINE",),
    writes="mine", plan="tiny:plan", one_file=True, suffixes=(".mine",),
)
def plan_badly(export, request):
    made = plan(export, request)
    name, file = made.files[0]
    extent = file.extents[0]
    by = Moved.by
    extents = (Extent(0, extent.begin + by, extent.end + by),)
    made.files[0] = (name, FilePlan(b"MINE", extents, file.size + by + Moved.more))
    return made

class Moved:
    by, more = 0, 0

BADLY = Format(
    "mine", 85, "tiny:describe_folder", r".*\\.mine", "tiny:describe_file", (b"MINE",),
    writes="mine", plan="tiny:plan_badly", one_file=True, suffixes=(".mine",),
)
TORCH = Format("first", 0, writes="torch", plan="tiny:plan")
SUFFIX = Format("second", 0, writes="second", plan="tiny:plan", suffixes=(".pth",))
METHOD = Format("third", 0, view="tiny:view", methods=("gptq",))
GGUF = Format("fourth", 0, writes="gguf", plan="tiny:plan")
"""


def test_formats_are_asked_in_one_order():
    order = [
        ("dcp", 10), ("torch_checkpointing", 20), ("hugging_face", 30), ("deepspeed_run", 40), ("megatron", 50),
        ("deepspeed", 55), ("rank_files", 60), ("orbax", 70), ("gguf", 80),
    ]  # fmt: skip
    found = [(each.name, each.order) for each in registry.formats() if each.folder]
    assert [each for each in found if each in order] == order
    assert len({number for _, number in found}) == len(found), "two formats have one number"


@pytest.mark.parametrize(
    ("names", "asked"),
    [
        ([], []),
        (["step-1/", "step-2/", "log.txt"], []),
        ([".metadata", "__0_0.distcp"], ["dcp"]),
        (["metadata.pkl"], ["torch_checkpointing"]),
        (["model.safetensors"], ["hugging_face"]),
        (["pytorch_model.bin.index.json"], ["hugging_face"]),
        (["adapter\n_model.bin"], ["hugging_face", "rank_files"]),
        (["latest", "global_step1/"], ["deepspeed_run"]),
        (["mp_rank_00/"], ["megatron"]),
        (["mp_rank_00_model_states.pt"], ["deepspeed", "rank_files"]),
        (["zero_pp_rank_0_mp_rank_00_model_states.pt"], ["deepspeed", "rank_files"]),
        (["model_world_size_1_rank_0.pt"], ["rank_files"]),
        (["_CHECKPOINT_METADATA"], ["orbax"]),
        (["a.gguf", "b.txt"], ["gguf"]),
        (None, ["dcp", "hugging_face"]),
    ],
)
def test_formats_of_a_folder_are_asked_by_its_names(monkeypatch, names, asked):
    told = []

    def resolve(place):
        async def describe(folder):
            told.append(next(each.name for each in registry.formats() if each.folder == place))

        return describe

    class Storage:
        capabilities = type("Listing", (), {"list": names is not None})

        async def list(self, recursive):
            return names

    monkeypatch.setattr(registry, "resolve_name", resolve)
    from snapshot.io.loop import run

    assert run(registry.describe_folder(registry.SearchedFolder(None, Storage(), None, 100))) is None
    assert told == asked


def test_format_of_another_package_is_read(install, tmp_path):
    install("snapshot.formats", "mine = tiny:MINE", module=MODULE)
    (tmp_path / "f").mkdir()
    (tmp_path / "f" / "a.mine").write_bytes(b"MINE" + torch.arange(3.0).numpy().tobytes())
    for path in (tmp_path / "f", tmp_path / "f" / "a.mine"):
        assert snapshot.load(path)["x"].tolist() == [0, 1, 2]


def test_format_of_another_package_cannot_replace_one_of_this_library(install, tmp_path, caplog):
    install("snapshot.formats", "dcp = tiny:DCP", "number = tiny:NUMBER", "gone = tiny:GONE", module=MODULE)
    with caplog.at_level(logging.WARNING, "snapshot"):
        found = registry.find_format("dcp")
    assert found is not None
    assert found.folder == "snapshot.formats.dcp:describe_folder"
    assert "the format number: tiny:NUMBER must be a Format, got int" in caplog.text
    assert "the format gone" in caplog.text


def test_format_of_another_package_is_written_by_its_name_and_its_suffix(install, tmp_path):
    install("snapshot.formats", "mine = tiny:WRITTEN", module=MODULE)
    taken = Snapshot.take(tmp_path / "s", {"s": StateDict(x=torch.arange(3.0))})
    taken.convert(tmp_path / "a.mine")
    taken.convert(Target(tmp_path / "b", "mine"))
    assert main(["convert", str(tmp_path / "s"), str(tmp_path / "c"), "--to", "mine"]) == 0
    for name in ("a.mine", "b", "c"):
        assert (tmp_path / name).read_bytes() == b"MINE" + torch.arange(3.0).numpy().tobytes()
        assert snapshot.load(tmp_path / name)["x"].tolist() == [0, 1, 2]
    with pytest.raises(ValueError, match=r"the suffix must be one of .*\.mine, \.pt, .*, got '\.yours'"):
        taken.convert(tmp_path / "d.yours")


@pytest.mark.parametrize(
    ("by", "more", "error"),
    [(4, 0, "must begin at 4, where the one before ends, got 8"), (0, 3, "the size must be 16, got 19")],
)
def test_format_of_another_package_that_plans_gaps_is_an_error(install, tmp_path, by, more, error):
    """What was in memory before would be in the gaps."""
    install("snapshot.formats", "mine = tiny:BADLY", module=MODULE)
    taken = Snapshot.take(tmp_path / "s", {"s": StateDict(x=torch.arange(3.0))})
    import tiny

    tiny.Moved.by, tiny.Moved.more = by, more
    with pytest.raises(SnapshotError, match=f"the format mine: a.mine: .*{error}"):
        taken.convert(tmp_path / "a.mine")
    assert not (tmp_path / "a.mine").exists()


def test_format_of_another_package_that_plans_unaligned_elements_is_an_error(install, tmp_path):
    install("snapshot.formats", "mine = tiny:WRITTEN", module=MODULE)
    taken = Snapshot.take(tmp_path / "s", {"s": StateDict(x=torch.arange(3.0, dtype=torch.float64))})
    with pytest.raises(SnapshotError, match="the extent of x must begin at a multiple of 8, got 4"):
        taken.convert(tmp_path / "a.mine")


def test_format_of_another_package_has_nothing_that_a_format_of_this_library_has(install, tmp_path, caplog):
    points = ("first = tiny:TORCH", "second = tiny:SUFFIX", "third = tiny:METHOD", "fourth = tiny:GGUF")
    install("snapshot.formats", *points, module=MODULE)
    with caplog.at_level(logging.WARNING, "snapshot"):
        assert registry.find_writer("torch").name == "torch_save"
    for what in ("to='torch', as torch_save", "the suffix '.pth', as torch_save", "dequantise='gptq', as quantised"):
        assert f"it declares {what} does" in caplog.text
    assert registry.find_suffix(".pth").name == "torch_save"
    assert registry.find_writer("gguf").name == "gguf"


def test_format_of_another_package_never_replaces_one_that_is_not_installed(install, monkeypatch, caplog):
    install("snapshot.formats", "fourth = tiny:GGUF", "peft = tiny:MINE", module=MODULE)
    monkeypatch.setattr(extensions, "own_points", dict)
    with caplog.at_level(logging.WARNING, "snapshot"):
        assert registry.find_format("mine") is not None, "only what it declares counts"
    assert "the format fourth of tiny 1.2 is left out: it declares to='gguf', as snapshot_gguf does" in caplog.text
    for to in ("gguf", "peft"):
        with pytest.raises(MissingExtraError, match=f"to='{to}': snapshot_.* of snapshot-torch is not installed"):
            registry.find_writer(to)
    with pytest.raises(MissingExtraError, match=r"the suffix '\.gguf': snapshot_gguf of snapshot-torch"):
        registry.find_suffix(".gguf")
    with pytest.raises(MissingExtraError, match="dequantise='gptq': snapshot_quantised"):
        registry.find_view("gptq")
    for suffix in (".peft", ".torch_checkpointing", ".quantised"):
        assert registry.find_suffix(suffix) is None
    with pytest.raises(MissingExtraError, match="snapshot_gguf"):
        Snapshot("memory://nothing").convert("x.gguf")


WRONG = """
from snapshot.formats.registry import Format

class Options:
    to = "mine"

    @classmethod
    def add_flags(cls, parser):
        parser.add_argument("--dtype")

LOST = Format("lost", folder="no_module_x:describe")
RAISING = Format("raising", folder="tiny:describe", heads=(b"PK", b"MINE"), file="tiny:describe")
OPTIONS = Format("options", writes="mine", plan="tiny:plan", options="tiny:Options")

async def describe(*given):
    raise RuntimeError("no device")
"""


@pytest.mark.parametrize(
    "field", ["order='x'", "suffixes=None", "writes=['x']", "heads='GGUF'", "heads=(b'',)", "writes=5"]
)
def test_format_with_a_field_of_another_type_is_left_out_and_named(install, tmp_path, caplog, field):
    install("snapshot.formats", "wrong = tiny:WRONG", module=f"{WRONG}\nWRONG = Format('wrong', {field})")
    Snapshot.take(tmp_path / "s", {"s": StateDict(x=torch.ones(3))}).convert(tmp_path / "t.pt")
    assert snapshot.load(tmp_path / "t.pt")["x"].tolist() == [1, 1, 1]
    assert "wrong = tiny:WRONG of tiny 1.2, which raised TypeError" in caplog.text
    with pytest.raises(SnapshotError, match=r"of tiny 1\.2"):
        Target("x", "wrong").format and registry.find_writer("wrong")


def test_formats_of_another_package_that_fail_leave_ours_usable_and_are_named(install, tmp_path, caplog, capsys):
    install("snapshot.formats", "lost = tiny:LOST", "raising = tiny:RAISING", "options = tiny:OPTIONS", module=WRONG)
    torch.save({"x": torch.ones(3)}, tmp_path / "t.pt")
    assert snapshot.load(tmp_path / "t.pt")["x"].tolist() == [1, 1, 1], "torch.save's files are ours"
    with pytest.raises(SnapshotNotFoundError):
        Snapshot(tmp_path / "none").get_manifest()
    assert "the format lost of tiny 1.2 cannot import no_module_x:describe" in caplog.text
    assert "the format raising of tiny 1.2 failed: RuntimeError('no device')" in caplog.text
    assert main(["convert", str(tmp_path / "t.pt"), str(tmp_path / "s"), "--dtype", "float32"]) == 0
    assert "the format options of tiny 1.2: cannot add its options" in caplog.text


def test_format_of_another_package_says_that_its_checkpoint_is_damaged(install, tmp_path):
    module = f"{WRONG}\nfrom snapshot.errors import CorruptSnapshotError\n"
    module += "async def damaged(folder): raise CorruptSnapshotError('its index is cut off')\n"
    module += "DAMAGED = Format('damaged', folder='tiny:damaged', names='index.mine')\n"
    install("snapshot.formats", "any = tiny:DAMAGED", module=module)
    (tmp_path / "f").mkdir()
    (tmp_path / "f" / "index.mine").touch()
    with pytest.raises(CorruptSnapshotError, match="its index is cut off"):
        snapshot.load(tmp_path / "f")


def test_format_of_another_package_is_named_by_its_entry_point(install, tmp_path, caplog):
    install("snapshot.formats", "entry = tiny:LOST", module=WRONG)
    with pytest.raises(SnapshotNotFoundError):
        Snapshot(tmp_path / "none").get_manifest()
    assert "the format lost of tiny 1.2 cannot import no_module_x:describe" in caplog.text


CLOSER = """
import msgspec
from snapshot.errors import CorruptSnapshotError
from snapshot.formats.foreign import make_dict
from snapshot.formats.registry import Format
from snapshot.manifest.document import DerivedFile

FIRST = Format("first", 10, refines="dcp", refine="tiny:add_sum")
SECOND = Format("second", 20, refines="dcp", refine="tiny:guard_sum")
NOTHING = Format("nothing", 30, refines="dcp", refine="tiny:look")
RAISING = Format("raising", 40, refines="dcp", refine="tiny:fail")
TEXT = Format("text", 50, refines="dcp", refine="tiny:answer")
LOST = Format("lost", 60, refines="dcp", refine="no_module_x:look")
DAMAGED = Format("damaged", 70, refines="dcp", refine="tiny:complain")

class Copy:
    sources = ("__0_0.distcp",)

    async def read(self, storage, offset, views, memory, token):
        await storage.read_into(self.sources[0], offset, views, token=token)

class Expected:
    asked = []

    async def find_faults(self, opened, *, whole):
        assert opened.document.conditions
        self.asked.append(whole)
        return ["x again must not be used"] if self.asked[0] is None else []

async def add_sum(folder, found):
    assert ".metadata" in await folder.names()
    again = msgspec.structs.replace(found.manifest["0/x"], location="a copy")
    document = msgspec.structs.replace(found, manifest={**found.manifest, "0/again": again})
    document.files = {**found.files, "a copy": DerivedFile(found.files["__0_0.distcp"].size)}
    document.derivations = {"a copy": Copy()}
    document.root = make_dict(["x", "again"])
    return document

async def guard_sum(folder, found):
    found.conditions = {"a copy": Expected()}
    return found

async def look(folder, found):
    assert "0/again" in found.manifest

async def fail(folder, found):
    found.manifest.clear()
    found.files.clear()
    raise RuntimeError("no device")

async def answer(folder, found):
    return "a text"

async def complain(folder, found):
    raise CorruptSnapshotError("its index is cut off")
"""


def _save_dcp(folder):
    import torch.distributed.checkpoint as dcp

    dcp.save({"x": torch.arange(3.0)}, checkpoint_id=folder, no_dist=True)


def test_formats_refine_one_after_the_other_what_another_format_opens(install, tmp_path):
    _save_dcp(tmp_path / "d")
    install("snapshot.formats", "first = tiny:FIRST", "second = tiny:SECOND", "nothing = tiny:NOTHING", module=CLOSER)
    opened = Snapshot(tmp_path / "d")
    assert opened.read_object("again").tolist() == [0, 1, 2]
    import tiny

    assert tiny.Expected.asked == [False]
    assert opened.read_object("x").tolist() == [0, 1, 2]
    assert opened.read_object("again", box=[slice(1, 3)]).tolist() == [1, 2]
    assert tiny.Expected.asked == [False, False]  # for what is read of that file alone
    assert opened.verify().ok
    assert tiny.Expected.asked == [False, False, True]


def test_formats_refine_by_conditions_that_are_looked_at_before_anything_is_written(install, tmp_path, capsys):
    _save_dcp(tmp_path / "d")
    install("snapshot.formats", "first = tiny:FIRST", "second = tiny:SECOND", module=CLOSER)
    opened = Snapshot(tmp_path / "d")
    assert opened.read_object("x").tolist() == [0, 1, 2]
    import tiny

    tiny.Expected.asked.insert(0, None)
    for call in (
        lambda: opened.read_object("again"),
        lambda: opened.read_object("again", box=[slice(1, 3)]),
        lambda: snapshot.load(tmp_path / "d"),
        lambda: opened.convert(tmp_path / "a.pt"),
        lambda: Snapshot.diff(tmp_path / "d", tmp_path / "d"),
    ):
        with pytest.raises(CorruptSnapshotError, match="x again must not be used") as caught:
            call()
        assert caught.value.faults == ("x again must not be used",)
    live = StateDict(x=torch.zeros(3), again=torch.zeros(3))
    with pytest.raises(CorruptSnapshotError, match="x again must not be used") as caught:
        opened.restore({"s": live})
    assert not caught.value.touched
    assert live["x"].tolist() == live["again"].tolist() == [0, 0, 0]
    report = opened.restore({"s": live}, options=RestoreOptions(exclude=["s/again"]))
    assert report.restored == 1
    assert live["x"].tolist() == [0, 1, 2]
    assert snapshot.load(tmp_path / "d", exclude=["again"])["x"].tolist() == [0, 1, 2]
    assert opened.verify().faults == ("x again must not be used",)
    assert opened.verify(quick=True).ok
    assert main(["ls", str(tmp_path / "d")]) == 0
    assert "again" in capsys.readouterr().out
    opened.copy(tmp_path / "copy")  # of the files
    assert (tmp_path / "copy" / "__0_0.distcp").read_bytes() == (tmp_path / "d" / "__0_0.distcp").read_bytes()


def test_formats_refine_nothing_if_they_fail_and_are_named(install, tmp_path, caplog):
    _save_dcp(tmp_path / "d")
    install("snapshot.formats", "raising = tiny:RAISING", "text = tiny:TEXT", "lost = tiny:LOST", module=CLOSER)
    assert snapshot.load(tmp_path / "d")["x"].tolist() == [0, 1, 2]
    assert "the format raising of tiny 1.2 failed: RuntimeError('no device')" in caplog.text
    assert 'the format text of tiny 1.2 failed: TypeError("tiny:answer must return a document or None' in caplog.text
    assert "the format lost of tiny 1.2 cannot import no_module_x:look" in caplog.text


@pytest.mark.parametrize("field", ["refines='dcp'", "refine='tiny:look'", "refines='wrong', refine='tiny:look'"])
def test_format_that_refines_without_a_function_or_itself_is_left_out_and_named(install, tmp_path, caplog, field):
    install("snapshot.formats", "wrong = tiny:WRONG", module=f"{WRONG}\nWRONG = Format('wrong', {field})")
    with caplog.at_level(logging.WARNING, "snapshot"):
        assert registry.find_format("wrong") is None
    assert "wrong = tiny:WRONG of tiny 1.2, which raised TypeError: refines and refine must name" in caplog.text


def test_format_that_refines_says_that_a_checkpoint_is_damaged(install, tmp_path):
    _save_dcp(tmp_path / "d")
    install("snapshot.formats", "damaged = tiny:DAMAGED", module=CLOSER)
    with pytest.raises(CorruptSnapshotError, match="its index is cut off"):
        snapshot.load(tmp_path / "d")


def test_options_of_a_format_that_has_others_are_refused(tmp_path):
    class Options:
        to = "torch"

    for to in ("torch", "safetensors", "snapshot"):
        Options.to = to
        with pytest.raises(TypeError, match=f"format_options must be None, since to='{to}' has no options, got"):
            Target(tmp_path / "x", format_options=Options())
    with pytest.raises(ValueError, match=r"to must be one of .*, got \[\]"):
        Target("x", to=[])


def test_what_no_installed_format_writes_or_takes_back_names_the_package(monkeypatch, tmp_path):
    own = tuple(each for each in registry.formats() if not (each.writes or each.view) or each in registry._BUILT_IN)
    points = extensions.own_points()
    monkeypatch.setattr(registry, "formats", lambda: own)
    monkeypatch.setattr(
        extensions, "own_points", lambda: {k: v for k, v in points.items() if k[0] != "snapshot.formats"}
    )
    Snapshot.take(tmp_path / "s", {"s": StateDict(x=torch.ones(3))})
    for to, package in [("peft", "snapshot_merge"), ("torch_checkpointing", "snapshot_torch_checkpointing")]:
        with pytest.raises(MissingExtraError, match=f"to='{to}': {package} of snapshot-torch is not installed"):
            Snapshot(tmp_path / "s").convert(Target(tmp_path / "out", to))
    with pytest.raises(MissingExtraError, match="dequantise='gptq': snapshot_quantised"):
        registry.find_view("gptq")
    with pytest.raises(ValueError, match="to must be one of"):
        Target("x", "unknown")


def test_format_is_a_value():
    assert Format("a") == Format("a", 90)
