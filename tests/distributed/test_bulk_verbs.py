"""Verbs whose work several ranks share: the result is that of one process, and each byte is read by one rank."""

import itertools
import json
import re
from collections import defaultdict
from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from snapshot import (
    CorruptSnapshotError,
    RankError,
    Snapshot,
    SnapshotError,
    SnapshotExistsError,
    StateDict,
    TakeOptions,
    Target,
    load,
)
from snapshot.distributed.exchange import solo_exchange
from snapshot.manifest.document import METADATA
from snapshot.transform.call import share_runs, share_whole
from tests.distributed import bulk_verbs as ranks
from tests.helpers.rank_pool import Died

MiB = 1 << 20


@pytest.fixture
def source(four, folder):
    four.run(ranks.save, f"{folder}/source")
    return f"{folder}/source"


def files(path):
    return sorted(str(each.relative_to(path)) for each in Path(path).rglob("*") if each.is_file())


def contents(path):
    """The files of a snapshot by name, without its save id, and its manifest without the id and its own digest."""
    save_id = Snapshot(path).metadata.save_id
    held = {name.replace(save_id, ""): (Path(path) / name).read_bytes() for name in files(path)}
    manifest = held.pop(METADATA).replace(save_id.encode(), b"")
    return held, re.sub(rb',"digest":"[^"]*"}$', b"", manifest)


def expect_each_range_once(reads, path=None):
    """No byte was read twice. With `path`, all bytes of its data files were read."""
    ranges = defaultdict(list)
    for own in reads:
        for name, begin, size in own:
            ranges[name].append((begin, begin + size))
    for name, found in ranges.items():
        found.sort()
        assert all(a[1] <= b[0] for a, b in itertools.pairwise(found)), (name, found)
    if path is not None:
        data = [name for name in files(path) if name.endswith((".safetensors", ".bin"))]
        sizes = {name: (Path(path) / name).stat().st_size for name in data}
        assert {name: sum(end - begin for begin, end in found) for name, found in ranges.items()} == sizes


def expect_balance(loads, largest):
    assert max(loads) <= sum(loads) / len(loads) + largest, loads


def expect_other_ranks_name(outcomes, which, cause):
    for rank, outcome in enumerate(outcomes):
        if rank != which:
            assert isinstance(outcome, RankError), repr(outcome)
            assert outcome.rank == which
            assert cause in str(outcome)


@given(st.lists(st.integers(0, 1000), max_size=60), st.integers(1, 9))
def test_share_gives_no_rank_more_than_its_share_and_one_item(sizes, world):
    exchange = solo_exchange("verify")
    exchange.world = world
    for share in (share_whole, share_runs):
        shares = share(exchange, range(len(sizes)), sizes)
        assert sorted(item for each in shares for item in each) == list(range(len(sizes)))
        loads = [sum(sizes[item] for item in each) for each in shares]
        assert len(loads) == world
        expect_balance(loads, max(sizes, default=0))


# Copies


def test_copy_by_many_ranks_equals_the_copy_by_one(two, source, folder):
    made = two.run(ranks.call, "copy", f"tapped+file://{source}", f"tapped+file://{folder}/two")
    reports = [report for report, *_ in made]
    alone = Snapshot(source).copy(f"{folder}/one")
    assert contents(f"{folder}/two") == contents(f"{folder}/one")
    for report in reports:
        assert (report.files, report.nbytes, report.entries) == (alone.files, alone.nbytes, alone.entries)
    expect_each_range_once([reads for _, reads, _ in made], source)
    written = [nbytes for *_, nbytes in made]
    assert sum(written) == alone.nbytes
    expect_balance(written, max((Path(source) / name).stat().st_size for name in files(source)))
    assert Snapshot(f"{folder}/two").verify()


@pytest.mark.parametrize("kind", ["compressed", "incremental", "of many parts"])
def test_copy_by_ranks_of_compressed_incremental_and_large_manifest_snapshots(two, folder, kind):
    two.run(ranks.save, f"{folder}/a")
    if kind == "compressed":
        two.run(partial(ranks.save, compression="zstd"), f"{folder}/source")
    elif kind == "of many parts":
        two.run(partial(ranks.save, most=3), f"{folder}/source")
        assert any(name.endswith(("-0.json", "-1.json")) for name in files(f"{folder}/source"))
    else:
        two.run(partial(ranks.save, base=f"{folder}/a"), f"{folder}/source")
    made = two.run(ranks.call, "copy", f"tapped+file://{folder}/source", f"{folder}/two")
    expect_each_range_once([reads for _, reads, _ in made], f"{folder}/source")
    Snapshot(f"{folder}/source").copy(f"{folder}/one")
    if kind == "of many parts":  # which have digests of their own
        held = [contents(f"{folder}/{name}")[0] for name in ("one", "two")]
        assert held[0].keys() == held[1].keys()
        assert all(held[0][name] == data for name, data in held[1].items() if not name.endswith(".json"))
    else:
        assert contents(f"{folder}/two") == contents(f"{folder}/one")
    assert Snapshot.diff(f"{folder}/source", f"{folder}/two").same
    report = two.run(ranks.call, "verify", f"{folder}/two")[0][0]
    assert report.ok
    assert not report.in_base


@pytest.mark.parametrize(
    "options",
    [{"select": ["s", "more"]}, {"compression": "zstd"}, {"exclude": ["s/long", "s/tied"], "compression": "zstd"}],
    ids=str,
)
def test_copy_of_a_selection_is_written_by_all_ranks(two, source, folder, options):
    made = two.run(partial(ranks.call, "copy", **options), f"tapped+file://{source}", f"{folder}/two")
    alone = ranks._copy(source, f"{folder}/one", **options)
    assert Snapshot.diff(f"{folder}/one", f"{folder}/two").same
    assert Snapshot(f"{folder}/two").verify()
    assert {report.entries for report, *_ in made} == {alone.entries}
    assert Snapshot(f"{folder}/two").metadata.world_size == 4
    shares = defaultdict(int)
    for name in files(f"{folder}/two"):
        if name.endswith(".safetensors"):
            shares[name.split("-")[1]] += (Path(folder) / "two" / name).stat().st_size
    assert len(shares) == 2
    if "compression" not in options:
        expect_balance(list(shares.values()), MiB)


def test_copy_by_ranks_of_another_format_is_shared_by_files(two, source, folder):
    Snapshot(source).convert(
        Target(f"{folder}/hf", "safetensors", shard_bytes=3 * MiB), select=["s"], exclude=["s/words"]
    )
    made = two.run(ranks.call, "copy", f"{folder}/hf", f"tapped+file://{folder}/two")
    assert {report.format for report, *_ in made} == {"safetensors"}
    assert files(f"{folder}/two") == files(f"{folder}/hf")
    for name in files(f"{folder}/hf"):
        assert (Path(folder) / "two" / name).read_bytes() == (Path(folder) / "hf" / name).read_bytes()


def test_copy_by_ranks_to_an_existing_snapshot_raises_on_all(two, source):
    outcomes = two.outcomes(ranks.call, "copy", source, f"{source}-2")
    assert not any(isinstance(each, BaseException) for each in outcomes), outcomes
    outcomes = two.outcomes(ranks.call, "copy", source, f"{source}-2")
    assert all(isinstance(each, SnapshotExistsError) for each in outcomes), outcomes
    assert two.run(partial(ranks.call, "copy", overwrite=True), source, f"{source}-2")
    assert Snapshot(f"{source}-2").verify()


def test_copy_and_verify_with_different_arguments_per_rank_are_refused(two, source, folder):
    for verb, one, other in (
        ("copy", (source, f"{folder}/a"), (source, f"{folder}/b")),
        ("verify", (source,), (f"{folder}/other",)),
    ):
        outcomes = two.outcomes(ranks.call_apart, verb, [one, other])
        for outcome in outcomes:
            assert isinstance(outcome, SnapshotError)
            assert "same arguments" in str(outcome)
            assert other[-1] in str(outcome)
    assert not Path(f"{folder}/a").exists()
    for outcome in two.outcomes(ranks.convert_with_maps, source, f"{folder}/a"):
        assert isinstance(outcome, SnapshotError)
        assert "map: TensorMap" in str(outcome)
        assert "h w -> w h" in str(outcome)


@pytest.mark.parametrize("verb", ["copy", "verify", "convert"])
def test_copy_verify_and_convert_raise_if_the_source_is_replaced_while_ranks_open_it(two, four, source, folder, verb):
    four.run(ranks.save, f"{folder}/other")
    for path in Path(folder, "other", "data").iterdir():
        path.rename(f"{source}/data/{path.name}")
    replaced = partial(
        ranks.call_while_replaced, path=f"{source}/{METADATA}", manifest=f"{folder}/other/{METADATA}", which=1
    )
    url = f"tapped+file://{source}"
    outcomes = two.outcomes(replaced, verb, *([url] if verb == "verify" else [url, f"{folder}/copy"]))
    expect_other_ranks_name(outcomes, 1, "was replaced while the ranks opened it")
    assert isinstance(outcomes[1], SnapshotError)
    assert not Path(f"{folder}/copy").exists()
    assert two.run(ranks.call, "verify", source)[0][0].ok


@pytest.mark.parametrize(("which", "at"), [(0, "read_into"), (1, "read_into"), (1, "stat")])
@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("verb", ["copy", "convert", "merge", "diff"])
def test_copy_convert_merge_and_diff_raise_if_foreign_files_change_while_ranks_read(
    two, tmp_path, verb, in_place, which, at
):
    folder = tmp_path
    names = [f"model-{n}.safetensors" for n in range(1, 5)]
    for value, place in enumerate((folder / "source", folder / "new", folder / "same")):
        place.mkdir()
        for name in names:
            save_file({name: torch.full((1_500_000,), float(value % 2))}, place / name)
        index = {"metadata": {}, "weight_map": {name: name for name in names}}
        (place / "model.safetensors.index.json").write_text(json.dumps(index))
    changes = {str(folder / "source" / name): (str(folder / "new" / name), in_place) for name in names}
    url, target = f"tapped+file://{folder}/source", f"{folder}/made"
    arguments = {
        "copy": (url, target), "convert": (url, target), "merge": ([url, f"{folder}/same"], target),
        "diff": (url, f"{folder}/same"),
    }[verb]  # fmt: skip
    outcomes = two.outcomes(partial(ranks.call_while_swapped, changes=changes, which=which, at=at), verb, *arguments)
    assert all(isinstance(each, SnapshotError) and "was replaced" in str(each) for each in outcomes), outcomes
    assert not Path(target).exists() or files(target) == []
    assert two.run(ranks.call, verb, *arguments)


@pytest.mark.parametrize(("verb", "to"), [("copy", ""), ("convert", "snapshot"), ("convert", "safetensors")])
def test_copy_and_convert_to_a_destination_not_shared_by_ranks_raise(two, source, verb, to):
    options = {"to": to, "shard_bytes": 3 * MiB, "select": ["s"]} if to else {}
    outcomes = two.outcomes(partial(ranks.call, verb, **options), source, f"memory://bulk/{verb}-{to}")
    for outcome in outcomes:
        assert isinstance(outcome, SnapshotError), outcome
        assert "all ranks must share one storage" in str(outcome)
    outcomes = two.outcomes(partial(ranks.call, verb, **options), source, "near:///tmp/near")
    for outcome in outcomes:
        assert isinstance(outcome, SnapshotError), outcome
        assert "must be a storage that all ranks share" in str(outcome)


@pytest.mark.parametrize("verb", ["convert", "diff"])
def test_rename_functions_that_differ_between_ranks_are_refused(two, source, folder, verb):
    two.run(ranks.save, f"{folder}/other", 2.0)
    arguments = (source, f"{folder}/other" if verb == "diff" else f"{folder}/made")
    options = {"values": True} if verb == "diff" else {}
    outcomes = two.outcomes(partial(ranks.call, verb, rename=ranks.rename_apart, **options), *arguments)
    for outcome in outcomes:
        assert isinstance(outcome, SnapshotError), outcome
        assert "got another plan on rank 1" in str(outcome)
    assert not Path(f"{folder}/made").exists()


def test_copy_and_verify_on_one_rank_alone_wait_for_no_other(two, source, folder):
    copied, _ = two.run(partial(ranks.call_alone, which=0), "copy", source, f"{folder}/copy")
    assert copied.format == "snapshot"
    assert two.run(partial(ranks.call_alone, which=1), "verify", f"{folder}/copy")[1].ok


# Faults


@pytest.mark.parametrize("which", [0, 1])
def test_copy_with_a_full_disk_on_one_rank_fails_on_all_and_leaves_no_files(two, source, folder, which):
    fault = {"on": "write", "path": "data/*", "error": OSError(28, "No space left on device")}
    target = f"tapped+file://{folder}/copy"
    outcomes = two.outcomes(partial(ranks.call_with_fault, which=which, fault=fault), "copy", source, target)
    assert "No space left" in str(outcomes[which])
    expect_other_ranks_name(outcomes, which, "No space left")
    assert not Path(f"{folder}/copy").exists() or files(f"{folder}/copy") == []
    two.run(ranks.call, "copy", source, target)
    assert contents(f"{folder}/copy")[0].keys() == contents(source)[0].keys()


@pytest.mark.parametrize("which", [0, 1])
def test_copy_fails_on_all_ranks_if_one_finds_damage(two, source, folder, which):
    fault = {"on": "read_into", "path": "data/*", "flip": 9000, "times": None}
    outcomes = two.outcomes(
        partial(ranks.call_with_fault, which=which, fault=fault), "copy", f"tapped+file://{source}", f"{folder}/copy"
    )
    assert isinstance(outcomes[which], CorruptSnapshotError)
    expect_other_ranks_name(outcomes, which, "digest must be")
    assert not Path(f"{folder}/copy").exists() or files(f"{folder}/copy") == []


def test_copy_by_ranks_reads_again_bytes_damaged_once_in_transfer(two, source, folder):
    fault = {"on": "read_into", "path": "data/*", "flip": 9000}
    two.run(partial(ranks.call_with_fault, which=1, fault=fault), "copy", f"tapped+file://{source}", f"{folder}/copy")
    assert Snapshot(f"{folder}/copy").verify()


@pytest.mark.parametrize(
    ("verb", "which", "on"),
    [
        ("copy", 1, "write"),
        ("copy", 0, "write"),
        ("copy", 0, "commit"),
        ("convert", 1, "write"),
        ("verify", 1, "read_into"),
    ],
)
def test_bulk_verbs_name_a_killed_rank_and_the_next_call_works(fresh_pool, source, folder, verb, which, on):
    url, target = f"tapped+file://{source}", f"tapped+file://{folder}/made"
    arguments = (url,) if verb == "verify" else (url, target)
    with fresh_pool(3) as pool:
        die = partial(ranks.call_and_die, which=which, on=on, path="data/*" if on != "commit" else "*")
        outcomes = pool.outcomes(die, verb, *arguments)
        assert isinstance(outcomes[which], Died)
        expect_other_ranks_name(outcomes, which, f"rank {which}")
        if verb != "verify":
            assert not Path(f"{folder}/made/{METADATA}").exists()
            if which != 0:  # of a dead leader, the next call deletes the files
                assert files(f"{folder}/made") == []
    with fresh_pool(2) as pool:
        pool.run(ranks.call, verb, *arguments)
    if verb != "verify":
        assert Snapshot(f"{folder}/made").verify()
        save_id = Snapshot(f"{folder}/made").metadata.save_id
        assert all(save_id in name for name in files(f"{folder}/made") if name != METADATA)


@pytest.mark.parametrize("verb", ["copy", "convert", "verify"])
def test_memory_budget_bytes_limits_each_rank_in_copy_convert_and_verify(two, source, folder, verb):
    arguments = (source,) if verb == "verify" else (source, f"{folder}/made")
    peaks = two.run(partial(ranks.peak_budget, verb, memory_budget_bytes=4 * MiB), *arguments)
    assert all(peak <= 4 * MiB for peak in peaks), peaks


# Verification


def test_verify_by_ranks_reads_each_range_once_and_reports_the_same(two, four, source):
    alone = Snapshot(source).verify()
    for pool in (two, four):
        made = pool.run(ranks.call, "verify", f"tapped+file://{source}")
        expect_each_range_once([reads for _, reads, _ in made], source)
        loads = [sum(size for *_, size in reads) for _, reads, _ in made]
        expect_balance(loads, 12 * MiB)
        for report, *_ in made:
            assert report.ok
            assert (report.entries, report.files, report.bytes_read) == (alone.entries, alone.files, alone.bytes_read)


@pytest.mark.parametrize("form", ["torch", "dcp", "safetensors"])
def test_verify_by_ranks_of_other_formats_reports_the_bytes_of_one_process(two, tmp_path, form):
    state = {f"w{n}": torch.randn(100_000 * (n + 1)) for n in range(9)}
    Snapshot.take(
        tmp_path / "from", {"m": StateDict(**state, words=[b"x" * 400_000])}, options=TakeOptions(durable=False)
    )
    origin = tmp_path / ("made.pt" if form == "torch" else "made")
    Snapshot(tmp_path / "from").convert(Target(origin, form), exclude=["m/words"] * (form == "safetensors"))
    alone = Snapshot(origin).verify()
    for report, *_ in two.run(ranks.call, "verify", str(origin)):
        assert report.ok
        assert report.bytes_read == alone.bytes_read


def test_verify_by_ranks_splits_a_large_range_and_names_damage_in_it(two, folder):
    Snapshot.take(
        f"{folder}/one",
        {"m": StateDict(w=torch.randn(4_000_000), b=torch.randn(1000))},
        options=TakeOptions(durable=False),
    )
    made = two.run(ranks.verify_in_pieces, f"tapped+file://{folder}/one")
    assert all(report.ok for report, *_ in made)
    data = [[each for each in reads if each[0].endswith(".safetensors")] for _, reads, _ in made]
    expect_each_range_once(data)
    expect_balance([sum(size for *_, size in reads) for reads in data], 3 * MiB)
    assert sum(size for reads in data for *_, size in reads) == sum(
        each.stat().st_size for each in Path(folder, "one", "data").glob("*.safetensors")
    )
    (path,) = Path(folder, "one", "data").glob("*.safetensors")
    held = bytearray(path.read_bytes())
    held[9_000_000] ^= 1
    path.write_bytes(held)
    reports = [report for report, *_ in two.run(ranks.verify_in_pieces, f"{folder}/one")]
    assert reports[0].faults == reports[1].faults
    assert [line.partition(":")[0] for line in reports[0].faults] == ["0/m/w"]


@pytest.mark.parametrize("quick", [False, True])
def test_verify_by_ranks_reports_the_faults_of_one_process(two, source, quick):
    data = sorted((each for each in Path(source, "data").iterdir() if each.suffix == ".safetensors"), key=str)
    for number, path in enumerate(data):
        held = bytearray(path.read_bytes())
        if number == 0:
            path.unlink()
        else:
            held[len(held) // 2] ^= 1
            held[-5] ^= 1
            path.write_bytes(held[:-1] if number == 1 else held)
    alone = Snapshot(source).verify(quick=quick)
    assert len(alone.faults) >= 2
    for report, *_ in two.run(partial(ranks.call, "verify", quick=quick), source):
        assert not report.ok
        assert report.faults == alone.faults
        assert report.quick == quick


def test_verify_resume_cannot_be_shared_by_ranks(two, source, folder):
    outcomes = two.outcomes(partial(ranks.call, "verify", resume=f"{folder}/journal"), source)
    assert all(isinstance(each, ValueError) and "resume must be None" in str(each) for each in outcomes)


# Conversions


@pytest.mark.parametrize("to", ["snapshot", "safetensors", "dcp", "torch"])
def test_convert_by_ranks_has_the_values_of_one_process(two, folder, to):
    source = f"{folder}/source"
    two.run(partial(ranks.save, more=5_000_000), source)
    options = {"select": ["s"], "exclude": ["s/words"], "shard_bytes": 3 * MiB}
    if to != "dcp":  # which has few files unless they are long
        options["dtype"] = torch.bfloat16
    name = "made.pt" if to == "torch" else "made"
    made = two.run(partial(ranks.call, "convert", to=to, **options), f"tapped+file://{source}", f"{folder}/two-{name}")
    alone = ranks._convert(source, f"{folder}/one-{name}", to, **options)
    for report, *_ in made:
        assert (report.tensors, report.left_out, report.changed) == (alone.tensors, alone.left_out, alone.changed)
    for report, where in ((made[0][0], "two"), (made[1][0], "two"), (alone, "one")):
        written = Path(folder) / f"{where}-{name}"
        held = [written] if written.is_file() else [each for each in written.rglob("*") if each.is_file()]
        data = [each for each in held if each.name[0] != "." and not each.name.endswith((".json", ".bin"))]
        assert report.nbytes == sum(each.stat().st_size for each in data)
    assert Snapshot.diff(f"{folder}/one-{name}", f"{folder}/two-{name}").same
    if to == "safetensors":
        assert len(alone.files) > 3
        for file in alone.files:
            assert (Path(folder) / "one-made" / file).read_bytes() == (Path(folder) / "two-made" / file).read_bytes()
    if to == "dcp":
        assert len(files(f"{folder}/two-made")) > 2
    said = "so 1 rank has nothing to write" in two.output(0)
    assert said == (to == "torch")


@pytest.mark.parametrize("form", ["dcp", "torch", "safetensors"])
@pytest.mark.parametrize("mapped", [False, True])
def test_convert_by_ranks_of_other_formats_to_a_snapshot(two, source, folder, form, mapped):
    origin = f"{folder}/from.pt" if form == "torch" else f"{folder}/from"
    Snapshot(source).convert(Target(origin, form), select=["s"], exclude=["s/words", "s/step"])
    two.run(partial(ranks.call, "convert", mapped=mapped), origin, f"{folder}/two")
    ranks._convert(origin, f"{folder}/one", mapped=mapped)
    assert Snapshot(f"{folder}/two").verify()
    one, other = (load(f"{folder}/{name}") for name in ("one", "two"))
    assert one.keys() == other.keys()
    assert all(one[name].equal(other[name]) for name in one)


def test_convert_by_ranks_that_fails_leaves_no_files(two, source, folder):
    fault = {"on": "write", "path": "*", "error": OSError(28, "No space left on device")}
    outcomes = two.outcomes(
        partial(ranks.call_with_fault, which=1, fault=fault, to="safetensors", shard_bytes=3 * MiB, select=["s"]),
        "convert", source, f"tapped+file://{folder}/hf",
    )  # fmt: skip
    expect_other_ranks_name(outcomes, 1, "No space left")
    assert not Path(f"{folder}/hf").exists() or files(f"{folder}/hf") == []


# Merges and differences


@pytest.mark.parametrize("to", ["snapshot", "safetensors"])
def test_merge_by_ranks_equals_the_merge_by_one(two, folder, to):
    two.run(ranks.save, f"{folder}/a")
    two.run(ranks.save, f"{folder}/b", 3.0)
    options = {"exclude": ["own", "more", "s/words"], "shard_bytes": 3 * MiB}
    sources = [f"{folder}/a", f"{folder}/b"]
    made = two.run(partial(ranks.call, "merge", to=to, **options), sources, f"{folder}/two")
    alone = ranks._merge(sources, f"{folder}/one", to, **options)
    assert {report.tensors for report, *_ in made} == {alone.tensors}
    assert len({report.nbytes for report, *_ in made}) == 1  # of the files, whose headers differ from those of one
    assert Snapshot.diff(f"{folder}/one", f"{folder}/two").same
    assert load(f"{folder}/two", select=["**/w1"]).popitem()[1].equal(ranks.tensors()["w1"] * 2)


def test_diff_by_ranks_finds_the_differences_of_one_process(two, folder):
    two.run(ranks.save, f"{folder}/a")
    two.run(ranks.save, f"{folder}/b", 3.0)
    alone = Snapshot.diff(f"{folder}/a", f"{folder}/b", values=True)
    made = two.run(partial(ranks.call, "diff", values=True), f"tapped+file://{folder}/a", f"tapped+file://{folder}/b")
    for report, *_ in made:
        assert list(map(str, report)) == list(map(str, alone))
        assert (report.equal, report.entries_read) == (alone.equal, alone.entries_read)
        assert report.bytes_read <= alone.bytes_read  # fewer parts end within a block, which is then read twice
    loads = [sum(size for *_, size in reads) for _, reads, _ in made]
    expect_balance(loads, 2 * 12 * MiB)
