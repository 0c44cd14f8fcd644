"""Snapshots of earlier versions, which every version reads bit for bit, and writes again byte for byte."""

import json
import re
import warnings

import pytest
import torch

from snapshot import RestoreOptions, Snapshot, SnapshotManager, StateDict
from snapshot.manifest.entries import AnyEntry
from tests.corpus import states
from tests.corpus.__main__ import CONTENTS, METADATA, SNAPSHOTS, SUMS, features, folders, sums
from tests.corpus.cases import CASES, SECRET
from tests.corpus.contents import describe
from tests.corpus.requirements import skip_if_older
from tests.helpers.versions import VERSION

NAMES = sorted(path.stem for path in CONTENTS.glob("*.json"))
RAN_PICKLES = {"pickles"}
LEFT_OUT = {"frozen/trainable": {"model"}, "weights/trainable": {"model"}}
"""Keys whose state is partly in the base only."""


def opened(folder, **options):
    return Snapshot(folder, allow_pickle=folder.relative_to(SNAPSHOTS).parts[0] in RAN_PICKLES, **options)


def snapshots(name):
    """Yield each snapshot of a case, with its contents by rank and key."""
    contents = json.loads((CONTENTS / f"{name}.json").read_text())
    for below, ranks in contents.items():
        yield SNAPSHOTS / name / below, ranks


def as_json(value):
    return json.loads(json.dumps(describe(value)))


def test_corpus_files_match_their_checksums():
    assert sums() == SUMS.read_text().splitlines()


@pytest.mark.parametrize("name", NAMES)
def test_corpus_snapshot_is_read_bit_for_bit(name):
    skip_if_older(name)
    for folder, ranks in snapshots(name):
        snapshot = opened(folder)
        for rank, keys in ranks.items():
            for key, expected in keys.items():
                if key in LEFT_OUT.get(folder.relative_to(SNAPSHOTS).as_posix(), ()):
                    continue
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # some types of tensors have a note of torch's
                    found = snapshot.read_object(f"{rank}/{key}")
                assert as_json(found) == expected, (folder, rank, key)


@pytest.mark.parametrize("name", NAMES)
def test_corpus_snapshot_verifies(name):
    for folder, _ in snapshots(name):
        report = opened(folder).verify()
        assert report.ok, report
        assert not report.unverifiable


def test_corpus_signed_snapshot_verifies_with_its_key():
    ed25519 = pytest.importorskip("cryptography.hazmat.primitives.asymmetric.ed25519")
    public = ed25519.Ed25519PrivateKey.from_private_bytes(SECRET).public_key()
    for folder, ranks in snapshots("signed"):
        assert opened(folder, key=public).verify().signer.endswith(public.public_bytes_raw().hex())
        found = opened(folder, key=public).get_state_dict_for_key("model")
        assert describe(found) == ranks["0"]["model"]


def test_corpus_snapshot_restores_into_a_live_model_and_optimizer():
    model = states.model_of()
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    with torch.no_grad():
        for each in model.parameters():
            each.zero_()
    progress = StateDict(step=0)
    live = {"model": model, "optimizer": optimizer, "progress": progress}
    live["scheduler"] = torch.optim.lr_scheduler.StepLR(optimizer, 10)
    opened(SNAPSHOTS / "training").restore(live)
    [(_, ranks)] = snapshots("training")
    assert describe(model.state_dict()) == ranks["0"]["model"]
    assert describe(optimizer.state_dict()["state"]) in [value for _, value in ranks["0"]["optimizer"][1]]
    assert progress["step"] == 3


def test_corpus_snapshot_restores_with_its_base():
    model = states.model_of(5)
    with torch.no_grad():
        for each in model.parameters():
            each.zero_()
    Snapshot(SNAPSHOTS / "frozen/trainable").restore(
        {"model": model}, options=RestoreOptions(base=SNAPSHOTS / "frozen/whole")
    )
    contents = json.loads((CONTENTS / "frozen.json").read_text())
    assert describe(model.state_dict()) == contents["trainable"]["0"]["model"]


def test_corpus_snapshot_restores_with_its_folder_of_weights():
    model = states.tuned_model()["model"]
    with torch.no_grad():
        for each in model.parameters():
            each.zero_()
    base = SNAPSHOTS / "weights/pretrained"
    Snapshot(SNAPSHOTS / "weights/trainable").restore({"model": model}, options=RestoreOptions(base=base))
    contents = json.loads((CONTENTS / "weights.json").read_text())
    assert describe(model.state_dict()) == contents["trainable"]["0"]["model"]


def test_corpus_run_restores_its_newest_step():
    with SnapshotManager(str(SNAPSHOTS / "run"), signals=()) as manager:
        assert manager.steps() == [10, 20]
        assert manager.best("loss", "min") == 20
        assert manager.pinned() == [10]
        live = {"progress": StateDict()}
        assert manager.restore_latest(live) == 20
        assert live["progress"]["step"] == 20


def test_corpus_pickles_find_the_classes_of_the_library():
    words = opened(SNAPSHOTS / "pickles").read_object("0/objects/library")
    assert type(words) is states.Words
    assert words[0]["state"]["step"] == 1


MARKS = {
    "two_ranks": pytest.mark.ranks,
    "parts": pytest.mark.ranks,
    "newest_parts": pytest.mark.ranks,
    "four_ranks": pytest.mark.ranks,
}


OTHER_BYTES = {
    "compressed", "newest_compressed", "signed",  # zstd's frames may differ between versions
    "near", "dcp", "indexed",  # names of attempts, DCP's order of items, and digests of names of files are random
}  # fmt: skip


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=MARKS.get(name, ())) for name in NAMES if name not in OTHER_BYTES]
)
def test_corpus_take_writes_the_same_bytes(name, tmp_path, request):
    """Only ids, times, versions, and what depends on them may differ."""
    skip_if_older(name)
    if VERSION != (2, 13):
        pytest.skip("the state dicts of this torch may differ")
    warnings.simplefilter("ignore")  # of pickles and shared memory
    pools = {2: "two", 4: "four"}
    CASES[name](tmp_path, lambda world: request.getfixturevalue(pools[world]))
    for folder, _ in snapshots(name):
        assert stored(tmp_path / folder.relative_to(SNAPSHOTS)) == stored(folder)


ENVIRONMENT = rb'"snapshot\.environment":\{(?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})*\}'
"""What a take records of its machine."""


def stored(folder):
    """Return the files of a snapshot by name, with everything replaced that is random or a time."""
    ids = {json.loads((folder / METADATA).read_bytes())["save_id"]}
    ids |= set(re.findall("data/([0-9a-f]{12})-", text_of(folder)))
    order = {id_: f"id{at}" for at, id_ in enumerate(sorted(ids, key=lambda each: text_of(folder).find(each)))}
    found = {}
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        data = path.read_bytes()
        name = path.relative_to(folder).as_posix()
        for id_, text in order.items():
            data, name = data.replace(id_.encode(), text.encode()), name.replace(id_, text)
        if name.endswith((METADATA, ".json")):
            data = re.sub(rb'"(created|version|url|structure|digest|size)":("[^"]*"|\d+)', rb'"\1":0', data)
            data = re.sub(rb"(?:,%b|%b,?)" % (ENVIRONMENT, ENVIRONMENT), b"", data)
            data = re.sub(rb',"writer":\{[^{}]*\}', b"", data)  # of managers: an id, a host and a time
        found[name] = b"a pickle" if folder.name == "pickles" and name.endswith(".bin") else data
    return found


def text_of(folder):
    return (folder / METADATA).read_text("utf-8", "surrogatepass")


def test_corpus_compressed_snapshot_can_have_format_snapshot_3():
    head = json.loads((SNAPSHOTS / "newest_compressed" / METADATA).read_bytes())
    assert head["format"] == "snapshot/3"
    assert any("packed" in file for file in head["files"].values())


def test_corpus_holds_every_entry_type_and_format():
    held = set().union(*map(features, folders().values()))
    types = {each.__struct_config__.tag for each in AnyEntry.__args__}
    assert {f"type {each}" for each in types} <= held
    assert {
        "snapshot/1",
        "snapshot/2",
        "snapshot/3",
        "a part of a manifest",
        "*.sha256",
        "*.signature",
        "*.metadata",
    } <= held
    serializers = {"bytes", "bytearray", "utf8", "BytesIO", "torch_save"}
    assert {f"serializer {each}" for each in serializers} <= held
    fields = {"file.packed", "file.origin", "file.age", "file.in_base", "file.name", "main.base", "DTensor.mesh"}
    fields |= {"extra.shares"}
    assert fields <= held
