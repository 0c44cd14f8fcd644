"""The facts of a run: what follows from them, and how they are stored in the far root and on hosts."""

import asyncio
import os
import secrets
from dataclasses import replace

import pytest

from snapshot import Snapshot, StateDict
from snapshot.errors import (
    CorruptSnapshotError,
    RunDeletedError,
    RunForkedError,
    SnapshotError,
    StorageError,
    StorageNotFoundError,
)
from snapshot.io.loop import run
from snapshot.io.registry import open_storage
from snapshot.io.session import Session
from snapshot.io.storage import Context
from snapshot.io.url import URL
from snapshot.runs import facts as module
from snapshot.runs.facts import RECORD, bury, bury_step, delete_checkpoint, is_buried, path_of, read_facts, tombstone
from snapshot.runs.timeline import (
    KEY,
    NO_ORIGIN,
    Attempt,
    Facts,
    FactsCopy,
    Origin,
    Parent,
    RolledBackError,
    RunLine,
    Settled,
    Standing,
    attempt_of,
    decode_attempt,
    decode_facts,
    decode_record,
    encode_attempt,
    encode_facts,
    note_of,
    origin_of,
    settle_run,
)
from snapshot_tiers.facts import (
    KEPT,
    choose_attempt,
    copy_in,
    find_left,
    limited,
    mark_used,
    mend_facts,
    publish,
    publish_if_writable,
    publish_pending,
    read_copies,
    read_copy,
    store_copy,
    sync_facts,
)

RUN = "c" * 12


def attempt(letter, number, parent=None, step=None, *, run=RUN, save_id="", far=""):
    """Return an attempt whose name repeats a letter."""
    return Attempt(letter * 12, run, number, parent and Parent(parent.name, step, save_id), "", far)


A = attempt("a", 1)
B = attempt("b", 2, A, 10)
C = attempt("e", 3, B, 20, save_id="chosen")
OTHER = attempt("d", 2, A, 5)
AB = Facts(2, (A, B))


@pytest.fixture
def root():
    """Return an empty far root in memory."""
    return open_storage(URL.parse(f"memory://facts-{secrets.token_hex(4)}"), None, Context())


def put_facts(storage, *every):
    for each in every:
        run(storage.put(path_of(each.number), encode_facts(each)))


def numbers_in(storage):
    return [int(path.removeprefix(".run/").removesuffix(".json")) for path in sorted(run(storage.list(".run/")))]


def names(attempts):
    return [each.name[0] for each in attempts]


# What follows from facts


@pytest.mark.parametrize(
    ("known", "last", "conflicts", "next_number"),
    [
        (Facts(), None, [], 1),
        (Facts(1, (A,)), A, [], 2),
        (Facts(1, (A,), (B,)), B, [], 3),
        (Facts(2, (A, B), (OTHER,)), B, [OTHER], 3),  # another one was published with its number
        (Facts(1, (A,), (B, OTHER)), OTHER, [B, OTHER], 3),
        (Facts(0, (), (A, B)), B, [], 3),
        (Facts(7, (A, B)), B, [], 8),
    ],
)
def test_facts_last_conflicts_and_next_attempt(known, last, conflicts, next_number):
    assert known.last == last
    assert known.conflicts() == conflicts
    made = known.next_attempt(RUN, Parent("x", 3), host="h", far="f")
    assert (made.number, made.run, made.parent, made.host, made.far) == (next_number, RUN, Parent("x", 3), "h", "f")
    if not conflicts:
        known.expect_no_fork()
        return
    with pytest.raises(RunForkedError, match=conflicts[0].name) as caught:
        known.expect_no_fork()
    assert (conflicts[1] if len(conflicts) > 1 else known.tip).name in str(caught.value)


def test_facts_find_has_and_tip_of_published_and_pending():
    known = Facts(1, (A,), (B,))
    assert (known.find(A.name), known.find(B.name), known.find(C.name)) == (A, B, None)
    assert (known.has(A.name), known.has(B.name)) == (True, False)
    assert (known.tip, Facts(0, (), (A,)).tip) == (A, None)


def test_facts_unite_and_with_pending_keep_the_newest_and_all_pending():
    early, late = Facts(1, (A,), (B, C)), Facts(2, (A, B), (OTHER,))
    assert early.unite(late) == late.unite(early) == Facts(2, (A, B), (OTHER, C))
    rolled = Facts(1, (OTHER,))  # only the lower number has it
    assert rolled.unite(AB) == Facts(2, (A, B), (OTHER,))
    assert Facts(1, (A,)).unite(Facts(1, ())) == Facts(1, (A,))
    assert Facts(1, (A,)).with_pending([C, A, B, OTHER]) == Facts(1, (A,), (B, OTHER, C))


def test_facts_with_published_moves_attempts_from_pending():
    assert Facts(1, (A,), (B, OTHER)).with_published(B) == Facts(2, (A, B), (OTHER,))
    assert Facts(1, (A,), (B,)).with_published() == Facts(2, (A,), (B,))


@pytest.mark.parametrize(
    ("given", "found"), [("", ""), ("a", ""), ("b", "b"), ("e", "be"), ("ed", "bde"), ("x", ""), ("bb", "b")]
)
def test_facts_with_ancestors_are_pending_ones_by_number(given, found):
    known = Facts(1, (A,), (B, OTHER, C))
    assert names(known.with_ancestors([letter * 12 for letter in given])) == list(found)


@pytest.mark.parametrize(
    ("known", "stepped", "kept"),
    [
        (Facts(1, (A,), (B, OTHER)), "d", "d"),  # one of a fork has steps
        (Facts(1, (A,), (B, OTHER)), "", "b"),
        (Facts(1, (A,), (B, OTHER)), "bd", "bd"),
        (Facts(2, (A, OTHER), (B, C)), "", ""),  # its number was published
        (Facts(2, (A, OTHER), (B, C)), "e", "be"),
        (Facts(1, (A,), (C,)), "", ""),  # its parent is unknown
        (Facts(0, (), (A, B)), "", "ab"),
    ],
)
def test_facts_without_vain_drops_conflicts_without_steps(known, stepped, kept):
    found = known.without_vain([letter * 12 for letter in stepped])
    assert names(found.pending) == list(kept)
    assert (found.number, found.published) == (known.number, known.published)


@pytest.mark.parametrize(
    ("root", "seen", "left", "lacks", "rolled"),
    [
        (Facts(), Facts(), False, False, False),
        (AB, Facts(1, (A,)), False, False, False),
        (AB, AB, False, False, False),
        (Facts(1, (A,)), AB, False, True, True),
        (Facts(), AB, False, True, False),  # the run was deleted
        (Facts(), AB, True, True, True),
        (Facts(1, (OTHER,)), AB, False, True, False),
        (AB, Facts(0, (), (C,)), True, False, False),
    ],
)
def test_facts_expect_no_rollback_compares_with_copies(root, seen, left, lacks, rolled):
    copy = FactsCopy(RUN, seen, left=left)
    assert root.lacks(seen) == lacks
    assert root.was_rolled_back(copy) == rolled
    if not rolled:
        root.expect_no_rollback([copy], "far")
        return
    with pytest.raises(RolledBackError, match="far: the root was rolled back") as caught:
        root.expect_no_rollback([FactsCopy("", Facts()), copy], "far")
    assert seen.tip.name in str(caught.value)
    assert (root.tip.name if root.tip else "the root has none") in str(caught.value)


def test_facts_with_copies_leaves_out_a_deleted_run():
    gone = attempt("f", 1, run="f" * 12)
    copies = [
        FactsCopy(RUN, Facts(1, (A,), (OTHER,))),
        FactsCopy(gone.run, Facts(1, (gone,), (attempt("9", 2, gone, 1),))),  # the root lacks it
        FactsCopy(RUN, Facts(3, (A, B, C), ())),  # the root was rolled back
    ]
    assert Facts(2, (A, B)).with_copies(copies) == Facts(2, (A, B), (OTHER, C))


# The line


def origin(each, order=1, *, replaces=False):
    return Origin(each.run, each.number, each.name, order, replaces)


LINE = RunLine(Facts(3, (A, OTHER, B, C), (attempt("f", 9),)))


@pytest.mark.parametrize(
    ("step", "save_id", "of", "standing"),
    [
        (9, "", A, Standing.ON),
        (10, "", A, Standing.ON),
        (11, "", A, Standing.OFF),
        (19, "any", B, Standing.ON),
        (20, "chosen", B, Standing.ON),
        (20, "another", B, Standing.OFF),
        (21, "chosen", B, Standing.OFF),
        (1000, "", C, Standing.ON),
        (1, "", OTHER, Standing.OFF),
        (1, "", attempt("f", 9), Standing.UNDECIDED),
        (1, "", attempt("7", 1, run="7" * 12), Standing.FOREIGN),
    ],
)
def test_line_standing_of_steps_around_the_cuts(step, save_id, of, standing):
    assert LINE.standing(step, save_id, origin(of)) == standing
    assert LINE.counts(step, save_id, origin(of)) == (standing in (Standing.ON, Standing.FOREIGN))


def test_line_cuts_follow_the_lowest_restored_step():
    back = attempt("f", 4, C, 15)
    line = RunLine(Facts(4, (A, B, C, back)))
    assert {name[0]: (cut.step, cut.save_id, cut.age) for name, cut in line.cuts.items()} == {
        "f": (None, "", 0),
        "e": (15, "", -1),
        "b": (15, "", -2),
        "a": (10, "", -3),
    }
    every = RunLine(Facts(2, (A, attempt("8", 2, A, None))))  # it began without a restore
    assert every.standing(10**6, "", origin(A)) == Standing.ON
    assert RunLine(Facts()).standing(1, "", NO_ORIGIN) == Standing.ON
    assert RunLine(Facts(3, (A, B, C)), B).cuts.keys() == {A.name, B.name}


def test_line_age_is_greater_for_a_later_take():
    ages = [origin(OTHER, 9), origin(A, 1), origin(A, 2), origin(B, 1), origin(C, 1)]
    found = [LINE.age(each) for each in ages]
    assert found == sorted(set(found))
    assert found[0][0] == -4


@pytest.mark.parametrize(
    ("one", "other", "newer"),
    [
        (origin(C), origin(OTHER), True),  # the other one is off the line
        (origin(C), origin(B), False),  # not on purpose
        (origin(C, replaces=True), origin(B), True),
        (origin(B, replaces=True), origin(C), False),
        (origin(C, 1, replaces=True), origin(C, 1), False),
        (origin(C, 2, replaces=True), origin(C, 1), True),
        (origin(B, replaces=True), NO_ORIGIN, True),  # of a manager without near folders
        (origin(B), NO_ORIGIN, False),
        (origin(B, replaces=True), origin(attempt("7", 1, run="7" * 12)), True),
    ],
)
def test_line_is_newer_only_on_purpose_or_off_the_line(one, other, newer):
    assert LINE.is_newer(5, ("x", one), ("y", other)) == newer


# The run of a job


def test_settle_run_without_the_root_takes_the_run_used_last():
    old, new = attempt("1", 1, run="1" * 12), attempt("2", 1, run="2" * 12)
    assert settle_run(None, [[], []], "far") == Settled("", Facts())
    hosts = [
        [FactsCopy(old.run, Facts(1, (old,)), used=1), FactsCopy(new.run, Facts(1, (new,)), used=2)],
        [FactsCopy(new.run, Facts(1, (new,), (attempt("3", 2, new, 4, run=new.run),)), frozenset(["3" * 12]))],
        [FactsCopy(old.run, Facts(1, (old,)), used=9)],
    ]
    found = settle_run(None, hosts, "far")
    assert (found.run, names(found.facts.published), names(found.facts.pending)) == (new.run, ["2"], ["3"])
    both = FactsCopy(RUN, Facts(1, (A,), (B, OTHER)), frozenset([B.name, OTHER.name]))
    with pytest.raises(RunForkedError, match=B.name):
        settle_run(None, [[both]], "far")
    assert settle_run(None, [[both._replace(stepped=frozenset([B.name]))]], "far").facts == Facts(1, (A,), (B,))


def test_settle_run_with_the_root_publishes_attempts_that_have_steps():
    here = attempt("b", 2, A, 10, far="far")
    first = attempt("a", 1, far="elsewhere")
    assert settle_run(Facts(), [[]], "far") == Settled("", Facts())
    assert settle_run(Facts(1, (first,)), [[]], "far") == Settled("", Facts(1, (first,)))  # the root is a copy
    assert settle_run(Facts(1, (first,)), [[]], "elsewhere").run == RUN
    assert settle_run(Facts(1, (attempt("a", 1),)), [[]], "far").run == RUN
    copy = FactsCopy(RUN, Facts(1, (A,), (here, OTHER)), frozenset([here.name]))
    assert settle_run(Facts(1, (A,)), [[copy]], "far") == Settled(RUN, Facts(1, (A,), (here,)))
    with pytest.raises(RunForkedError, match=here.name):
        settle_run(Facts(2, (A, OTHER)), [[copy]], "far")
    with pytest.raises(RolledBackError, match="far"):
        settle_run(Facts(1, (A,)), [[FactsCopy(RUN, AB)]], "far")
    deleted = FactsCopy("f" * 12, Facts(1, (attempt("f", 1, run="f" * 12),), ()), frozenset(["f" * 12]))
    assert settle_run(Facts(1, (A,)), [[deleted]], "far") == Settled(RUN, Facts(1, (A,)))


def test_copy_far_is_that_of_its_last_attempt_of_the_run():
    stranger = attempt("9", 3, run="9" * 12, far="strange")
    known = Facts(1, (attempt("a", 1, far="old"),), (attempt("b", 2, far="new"), stranger))
    assert FactsCopy(RUN, known).far == "new"
    assert FactsCopy(RUN, Facts(1, (attempt("a", 1, far="old"),))).far == "old"
    assert FactsCopy(RUN, Facts()).far == ""


# Files


def test_fact_files_are_decoded_as_encoded_and_verified():
    known = Facts(3, (A, B, C), (OTHER,))
    data = encode_facts(known)
    assert decode_facts(data, "x") == Facts(3, (A, B, C))  # pending ones are in files of their own
    assert decode_attempt(encode_attempt(C), "x") == C
    for at in (1, len(data) // 2, len(data) - 3):
        wrong = bytearray(data)
        wrong[at] ^= 1
        with pytest.raises(CorruptSnapshotError, match="here: not a fact of a run"):
            decode_facts(bytes(wrong), "here")
    for wrong in (Attempt("../up", RUN, 1), Attempt("a" * 12, "A" * 12, 1), Attempt("a" * 13, RUN, 1)):
        with pytest.raises(CorruptSnapshotError, match="it has the id"):
            decode_attempt(encode_attempt(wrong), "x")


def test_origin_and_attempt_of_metadata_are_those_of_the_note():
    note = note_of(C, 7, replaces=True)
    assert origin_of(note) == Origin(RUN, 3, C.name, 7, True)
    assert attempt_of(note) == C
    note[KEY]["attempt"] = A.name  # of another attempt
    assert attempt_of(note) is None
    assert attempt_of({KEY: {"began": {"name": "x", "run": RUN, "number": 1}, "attempt": "x"}}) is None
    assert [attempt_of(wrong) for wrong in ({}, {KEY: 3}, {KEY: {}})] == [None] * 3


def test_record_of_an_earlier_version_is_a_chain_of_attempts():
    text = '{"run": "%s", "attempts": [[2, "%s", 10], [1, "%s", null]], "far": "f", "published": %s}'
    first, second = attempt("a", 1, far="f"), attempt("b", 2, A, 10, far="f")
    of = text % (RUN, B.name, A.name, "true")
    assert decode_record(of.encode(), "x") == Facts(2, (first, second))
    assert decode_record(of.replace("true", "false").encode(), "x") == Facts(0, (), (first, second))
    birth = decode_record(b'{"run": "%s"}' % RUN.encode(), "x")
    assert birth == Facts(0, (), (Attempt(RUN, RUN, 1),))
    with pytest.raises(CorruptSnapshotError, match="x"):
        decode_record(b"{", "x")


# The far root


def test_read_facts_returns_the_last_file_or_the_record_or_none(root):
    assert run(read_facts(root)) == Facts()
    run(root.put(RECORD, b'{"run": "%s", "attempts": [[4, "%s", null]]}' % (RUN.encode(), A.name.encode())))
    old = attempt("a", 4)
    assert run(read_facts(root)) == Facts(4, (old,))
    put_facts(root, Facts(1, (A,)), AB)
    run(root.put(".run/999.json", b"not a fact"))
    run(root.put(".run/00000009.json.tmp", b"not a fact"))
    assert run(read_facts(root)) == AB
    run(root.put(path_of(3), b"damaged"))
    with pytest.raises(CorruptSnapshotError, match="00000003"):
        run(read_facts(root))


def test_read_facts_lists_again_if_a_file_was_deleted_meanwhile(root, monkeypatch):
    put_facts(root, AB)
    found, listed = iter([[1], [1, 2]]), []

    async def numbers(storage):
        listed.append(storage)
        return next(found, [1])

    monkeypatch.setattr(module, "_list_numbers", numbers)
    assert run(read_facts(root)) == AB
    assert len(listed) == 2
    with pytest.raises(StorageError, match=f"changed {module.TRIES} times"):
        run(read_facts(root))
    assert len(listed) == 2 + module.TRIES


def test_publish_adds_a_fact_and_deletes_old_files(root):
    known = run(publish(root, Facts(), A))
    assert known == Facts(1, (A,))
    assert run(publish(root, known, A)) == Facts(2, (A, A))
    known = run(publish(root, Facts(2, (A,), (OTHER,)), B))
    assert known == Facts(3, (A, B), (OTHER,))
    for number in range(4, KEPT + 3):
        known = run(publish(root, known))
        assert known.number == number
    assert numbers_in(root) == list(range(3, KEPT + 3))  # 16 files
    assert run(read_facts(root)) == Facts(KEPT + 2, (A, B))


def test_publish_of_a_number_that_another_attempt_has_is_a_fork(root):
    put_facts(root, Facts(1, (A,)), Facts(2, (A, OTHER)))
    with pytest.raises(RunForkedError, match=B.name) as caught:
        run(publish(root, Facts(1, (A,)), B))
    assert OTHER.name in str(caught.value)
    assert run(read_facts(root)) == Facts(2, (A, OTHER))


def test_publish_twice_with_a_lost_answer_is_no_fork(root):
    put_facts(root, Facts(1, (A,)), AB)
    assert run(publish(root, Facts(1, (A,)), B)) == AB


def test_publish_to_a_root_that_lost_its_facts_is_withdrawn(root):
    with pytest.raises(RunDeletedError, match="deleted"):
        run(publish(root, Facts(1, (A,)), B))
    assert numbers_in(root) == []
    run(root.put(RECORD, b"{}"))  # the facts before it are in a record
    assert run(publish(root, Facts(1, (A,)), B)) == AB


@pytest.mark.parametrize("taken", [False, True])
def test_publish_without_conditional_puts_looks_first(root, taken, monkeypatch, caplog):
    monkeypatch.setattr(root, "capabilities", replace(root.capabilities, conditional_put=False))
    put_facts(root, Facts(1, (A,)), *([Facts(2, (A, OTHER))] if taken else []))
    if taken:
        with pytest.raises(RunForkedError, match=OTHER.name):
            run(publish(root, Facts(1, (A,)), B))
    else:
        assert run(publish(root, Facts(1, (A,)), B)) == AB
    assert "has no conditional writes" in caplog.text


@pytest.mark.parametrize(
    ("there", "pending", "names", "found"),
    [
        (Facts(1, (A,)), (B, C), [B.name], Facts(2, (A, B), (C,))),
        (Facts(1, (A,)), (B, C), [C.name], Facts(3, (A, B, C))),
        (Facts(1, (A,)), (B,), [], Facts(1, (A,), (B,))),
        (Facts(), (A,), [A.name], Facts(1, (A,))),
        (Facts(), (attempt("a", 4),), [A.name], Facts(4, (attempt("a", 4),))),  # numbers are used up
        (Facts(2, (A, OTHER)), (B,), [B.name], None),
        (Facts(1, (A,)), (attempt("8", 2),), ["8" * 12], None),  # it did not see the published one
        (Facts(1, (A,)), (C,), [C.name], None),  # its parent is not published
    ],
)
def test_publish_pending_publishes_ancestors_first(root, there, pending, names, found):
    put_facts(root, *([there] if there.number else []))
    known = there.with_pending(pending)
    if found is None:
        with pytest.raises(RunForkedError, match=names[0]):
            run(publish_pending(root, known, names))
        return
    assert run(publish_pending(root, known, names)) == found
    assert run(read_facts(root)) == Facts(found.number, found.published)


def test_publish_if_writable_keeps_attempts_pending_in_a_read_only_root(root, monkeypatch):
    put_facts(root, Facts(1, (A,)))
    known = Facts(1, (A,), (B, OTHER))
    assert run(publish_if_writable(root, Facts(1, (A,), (B,)), [B.name])) == AB

    async def refuse(*_, **__):
        raise StorageError("read-only")

    monkeypatch.setattr(root, "put", refuse)
    assert run(publish_if_writable(root, known, [OTHER.name])) == Facts(1, (A,), (OTHER,))
    with pytest.raises(RunForkedError, match=B.name):
        run(publish_if_writable(root, known, [B.name, OTHER.name]))


def test_sync_facts_reads_publishes_and_returns_forks(root):
    put_facts(root, Facts(1, (A,)))
    assert run(sync_facts(root, Facts(1, (A,), (B,)), [])) == (Facts(1, (A,), (B,)), None)
    assert run(sync_facts(root, Facts(1, (A,), (B,)), [B.name])) == (AB, None)
    found, fork = run(sync_facts(root, Facts(1, (A,), (OTHER,)), [OTHER.name]))
    assert found == Facts(2, (A, B), (OTHER,))
    assert isinstance(fork, RunForkedError)
    with pytest.raises(RolledBackError, match="rolled back"):
        run(sync_facts(root, Facts(3, (A, B, C)), []))
    with pytest.raises(RunDeletedError, match="deleted"):
        run(sync_facts(root, Facts(1, (attempt("f", 1),)), []))


def spoil(storage, path, *, keep_digest=False, keep_text=False):
    text, digest = run(storage.get(path)).splitlines()
    lines = [text if keep_text else b"{spoiled", digest if keep_digest else b"spoiled"]
    run(storage.put(path, b"\n".join(lines) + b"\n"))


@pytest.mark.parametrize(
    ("damage", "before", "copies", "mended"),
    [
        ({"keep_digest": True}, None, [AB], AB),
        ({"keep_text": True}, None, [AB], AB),
        ({}, None, [AB], None),  # it may be of a run that was deleted there
        ({}, Facts(1, (A,)), [AB], AB),
        ({}, Facts(1, (attempt("f", 1),)), [AB], None),
        ({}, Facts(1), [AB], None),
        ({"keep_digest": True}, None, [Facts(2, (A, OTHER))], None),
        ({"keep_digest": True}, None, [Facts(3, (A, B)), Facts(2, (), (A,)), AB], AB),
        ({}, Facts(1, (A,)), [Facts(3, (A, B, C))], None),  # of another number
        ({}, Facts(1, (A,)), [], None),
    ],
)
def test_mend_facts_writes_a_damaged_fact_again_from_a_copy_of_its_run(root, damage, before, copies, mended):
    put_facts(root, AB, *([before] if before else []))
    held = [FactsCopy(RUN, each) for each in copies]
    assert run(mend_facts(root, held)) == AB
    spoil(root, path_of(2), **damage)
    if mended is None:
        with pytest.raises(CorruptSnapshotError, match="no host has a copy"):
            run(mend_facts(root, held))
        return
    assert run(mend_facts(root, held)) == mended
    assert run(read_facts(root)) == mended


def test_mend_facts_of_a_damaged_record_names_it(root):
    run(root.put(RECORD, b"{"))
    with pytest.raises(CorruptSnapshotError, match=r"run\.json.*no host has a copy"):
        run(mend_facts(root, [FactsCopy(RUN, AB)]))


def take(folder, step, of, order=1):
    Snapshot.take(f"{folder}/step-{step}", {"s": StateDict(x=step)}, metadata=note_of(of, order, replaces=False))


def test_find_left_marks_runs_with_steps_in_a_root_without_facts(tmp_path):
    far = tmp_path / "far"
    copies = [FactsCopy(RUN, AB), FactsCopy("9" * 12, Facts(1, (attempt("9", 1, run="9" * 12),)))]
    with Session(URL.parse(str(far)), None) as session:
        storage = session.storage
        assert run(find_left(storage, Facts(), copies)) == copies
        take(far, 10, A)
        take(far, 20, attempt("8", 1, run="8" * 12))
        (far / "step-30").mkdir()
        (far / "step-40").mkdir()
        (far / "step-40/.snapshot_metadata").write_bytes(b"of another library")
        (far / "step-50").mkdir()
        (far / "step-50/.snapshot_metadata").write_bytes((far / "step-10/.snapshot_metadata").read_bytes() + b" ")
        assert run(find_left(storage, AB, copies)) == copies  # the root has facts
        pending = [FactsCopy(RUN, Facts(0, (), (A,)))]
        assert run(find_left(storage, Facts(), pending)) == pending
        assert [each.left for each in run(find_left(storage, Facts(), copies))] == [True, False]
        assert [each.left for each in run(find_left(storage, Facts(), copies[:1]))] == [True]


def test_choose_attempt_publishes_all_pending_ones_and_the_choice_last(root):
    put_facts(root, Facts(2, (A, B)))
    copies = [FactsCopy(RUN, Facts(1, (A,), (OTHER,))), FactsCopy(RUN, Facts(2, (A, B), (C,)))]
    with pytest.raises(SnapshotError, match=f"must be one of {A.name}, {B.name}, {OTHER.name}, {C.name}, got x"):
        run(choose_attempt(root, copies, "x", "host", "far"))
    found = run(choose_attempt(root, copies, OTHER.name, "host", "far"))
    assert found.number == 3
    assert found.published[:-1] == (A, B, OTHER, C)
    choice = found.tip
    assert (choice.run, choice.number, choice.parent) == (RUN, 3, Parent(OTHER.name, None))
    assert (choice.host, choice.far) == ("host", "far")
    assert RunLine(found).cuts.keys() == {choice.name, OTHER.name, A.name}
    assert run(read_facts(root)) == found


def test_choose_attempt_in_a_rolled_back_root_uses_up_the_numbers_that_hosts_know(root):
    put_facts(root, Facts(1, (A,)))
    found = run(choose_attempt(root, [FactsCopy(RUN, Facts(3, (A, B, C)))], C.name, "host", "far"))
    assert (found.number, found.tip.number, found.published[:-1]) == (4, 4, (A, B, C))


def test_choose_attempt_without_any_is_an_error(root):
    with pytest.raises(SnapshotError, match="must be one of none, got x"):
        run(choose_attempt(root, [], "x", "host", "far"))


def test_limited_raises_storage_error_after_some_seconds():
    async def value():
        return 3

    assert run(limited(value(), None)) == 3
    with pytest.raises(StorageError, match=r"within 0\.001 s"):
        run(limited(asyncio.sleep(60), 0.001))


# Copies on hosts


def files_in(folder):
    return sorted(os.listdir(f"{folder}/.run"))


def test_store_copy_keeps_two_files_and_the_pending_attempts(tmp_path):
    assert read_copy(str(tmp_path)) == Facts()
    store_copy(str(tmp_path), Facts(0, (), (A, OTHER)))
    assert files_in(tmp_path) == [f"{A.name}.json", f"{OTHER.name}.json"]
    assert read_copy(str(tmp_path)) == Facts(0, (), (A, OTHER))
    store_copy(str(tmp_path), Facts(1, (A,), (B,)))
    assert files_in(tmp_path) == ["00000001.json", f"{B.name}.json", f"{OTHER.name}.json"]
    assert read_copy(str(tmp_path)) == Facts(1, (A,), (B, OTHER))
    for known in (Facts(2, (A, B)), Facts(3, (A, B)), Facts(4, (A, B, C))):
        store_copy(str(tmp_path), known)
    assert files_in(tmp_path) == ["00000003.json", "00000004.json", f"{OTHER.name}.json"]
    store_copy(str(tmp_path), Facts(3, (A, B), (C,)))  # of a party that knows less
    assert read_copy(str(tmp_path)) == Facts(4, (A, B, C), (OTHER,))


def test_store_copy_writes_a_damaged_file_again(tmp_path):
    store_copy(str(tmp_path), AB)
    path = tmp_path / ".run/00000002.json"
    path.write_bytes(b"damaged")
    assert read_copy(str(tmp_path)) == Facts()
    store_copy(str(tmp_path), AB)
    assert read_copy(str(tmp_path)) == AB
    (tmp_path / "file").write_bytes(b"")
    store_copy(str(tmp_path / "file"), AB)  # is logged


def test_read_copy_reads_the_record_only_without_facts(tmp_path):
    (tmp_path / ".run.json").write_bytes(b'{"run": "%s", "published": true}' % RUN.encode())
    birth = Attempt(RUN, RUN, 1)
    assert read_copy(str(tmp_path)) == Facts(1, (birth,))
    store_copy(str(tmp_path), AB)
    assert read_copy(str(tmp_path)) == AB


def test_mark_used_counts_over_all_runs(tmp_path):
    for name in ("1" * 12, "2" * 12):
        store_copy(str(tmp_path / name), Facts(1, (attempt("a", 1, run=name),)))
    (tmp_path / "file").write_bytes(b"")
    found = []
    for name in ("1", "2", "2", "1"):
        mark_used(str(tmp_path), name * 12)
        found.append(sorted((each.run[0], each.used) for each in read_copies(str(tmp_path))))
    assert found == [[("1", 1), ("2", 0)], [("1", 1), ("2", 2)], [("1", 1), ("2", 3)], [("1", 4), ("2", 3)]]
    assert files_in(tmp_path / ("1" * 12)) == ["00000001.json", "used-4"]


def test_copy_in_reads_attempts_from_the_steps_if_their_facts_are_lost(tmp_path):
    folder = tmp_path / RUN
    take(folder, 10, A)
    take(folder, 20, B)
    take(folder, 30, attempt("7", 1, run="7" * 12))
    store_copy(str(folder), Facts(1, (A,)))
    found = copy_in(str(folder))
    assert found == FactsCopy(RUN, Facts(1, (A,), (B,)), frozenset([A.name, B.name]), 0)
    (tmp_path / "link").symlink_to(folder)
    (tmp_path / "empty").mkdir()
    assert read_copies(str(tmp_path)) == [found]


# Tombstones


def test_bury_step_puts_a_tombstone_if_the_root_has_facts(tmp_path):
    far = tmp_path / "far"
    save_ids = {}
    for step in (10, 20):
        take(far, step, A)
    with Session(URL.parse(str(far)), None) as session:
        storage = session.storage
        for step in (10, 20):
            with Session(URL.parse(str(far / f"step-{step}")), None) as each:
                save_ids[step] = run(module.committed_save_id(each.storage))
                run(bury_step(each))
        assert not run(is_buried(storage, save_ids[10]))  # most roots have no uploads
        put_facts(storage, Facts(1, (A,)))
        with Session(URL.parse(str(far / "step-10")), None) as each:
            delete_checkpoint(each)
        assert run(is_buried(storage, save_ids[10]))
        assert not run(is_buried(storage, save_ids[20]))
        assert not (far / "step-10/.snapshot_metadata").exists()
        with Session(URL.parse(str(far / "step-10")), None) as each:
            run(bury(storage, each.storage))  # nothing is committed there
        run(storage.put(path_of(1), b"damaged"))
        with Session(URL.parse(str(far / "step-20")), None) as each:
            run(bury(storage, each.storage))
        assert run(is_buried(storage, save_ids[20]))
        assert run(storage.list(".pruned/")) == sorted(map(tombstone, save_ids.values()))


def test_bury_deletes_old_tombstones_if_there_are_many(root, monkeypatch):
    monkeypatch.setattr(module, "MANY", 3)
    monkeypatch.setattr(module, "SELDOM", 1)
    put_facts(root, Facts(1, (A,)))
    step = open_storage(URL.parse(f"memory://facts-{secrets.token_hex(4)}"), None, Context())

    async def save_id(_):
        return "buried"

    monkeypatch.setattr(module, "committed_save_id", save_id)
    for name in "ab":
        run(root.put(tombstone(name), b""))
    monkeypatch.setattr(module, "LASTS", -1.0)
    run(bury(root, step))
    assert len(run(root.list(".pruned/"))) == 3
    monkeypatch.setattr(module, "LASTS", 3600.0)
    run(root.put(tombstone("c"), b""))
    run(bury(root, step))
    assert len(run(root.list(".pruned/"))) == 4
    monkeypatch.setattr(module, "LASTS", -1.0)
    run(bury(root, step))
    assert len(run(root.list(".pruned/"))) == 1


def test_is_buried_raises_if_the_root_cannot_be_read(root, monkeypatch):
    async def fail(_):
        raise StorageError("down")

    assert run(is_buried(root, "x")) is False
    run(root.put(tombstone("x"), b""))
    assert run(is_buried(root, "x")) is True
    monkeypatch.setattr(root, "stat", fail)
    with pytest.raises(StorageError, match="down") as caught:
        run(is_buried(root, "x"))
    assert not isinstance(caught.value, StorageNotFoundError)
