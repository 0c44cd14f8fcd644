"""Several at one place: each ends as documented, and none in a wrong value. tests/soak does the same for longer."""

import pytest

from tests.faults.concurrent_jobs import Process, Threads
from tests.faults.concurrent_rounds import PAIRS, Place, between, forked, three, together

pytestmark = [pytest.mark.deadly, pytest.mark.usefixtures("one_thread")]


@pytest.fixture(scope="module", autouse=True)
def processes():
    """Who does the jobs; made first of all, since they stay for all tests."""
    made = [Process() for _ in range(4)]
    yield made
    for each in made:
        each.close()


@pytest.fixture
def crowd(request, where):
    """Processes for files; threads of this process for files and memory."""
    return request.getfixturevalue("processes") if where == "files" else [Threads() for _ in range(4)]


@pytest.fixture
def place(tmp_path, where):
    """Where they meet."""
    yield Place(f"memory://{tmp_path.name}" if where == "memory" else f"file://{tmp_path}/s")
    if where == "memory":
        Place(f"memory://{tmp_path.name}").prepare(None)


@pytest.mark.parametrize(("where", "every"), [("files", 4), ("threads", 6), ("memory", 6)])
@pytest.mark.parametrize("one", sorted({one for one, _, _ in PAIRS}))
def test_concurrent_take_delete_and_restore_between_two_steps_of_another_process(crowd, place, one, every):
    pairs = [pair for pair in PAIRS if pair[0] == one]
    rounds, faults = between(crowd, place, pairs, every=every)
    assert rounds >= len(pairs)
    assert not faults, "\n".join(faults)


@pytest.mark.parametrize("where", ["files", "memory"])
def test_concurrent_takes_while_a_third_process_cleans(crowd, place):
    _, faults = three(crowd, place, rounds=20, seed=1)
    assert not faults, "\n".join(faults)


@pytest.mark.parametrize(("where", "rounds"), [("files", 25), ("threads", 10), ("memory", 10)])
def test_concurrent_takes_restores_and_deletes_at_one_path(crowd, place, rounds):
    told, faults = together(crowd, place, rounds=rounds, seed=2)
    assert sum(told.values()) >= 2 * rounds
    assert not faults, "\n".join(faults)


@pytest.mark.parametrize("where", ["threads"])
def test_concurrent_threads_at_separate_paths_do_not_interfere(crowd, tmp_path):
    places = [Place(f"file://{tmp_path}/{number}") for number in range(len(crowd))]
    for place in places:
        place.prepare(None)
    for version in range(1, 8):
        for worker, place in zip(crowd, places, strict=True):
            worker.start("overwrite" if version % 2 else "overwrite in the background", place.url, version)
        told = [worker.result() for worker in crowd]
        assert [each["ended"] for each in told] == ["done"] * len(crowd), told
        assert [place.stands() for place in places] == [version] * len(crowd)


@pytest.mark.parametrize("where", ["files"])
@pytest.mark.parametrize("own", ["elsewhere", "there"])
def test_async_take_pending_during_a_fork(processes, place, own):
    place.prepare(5)
    told = forked(processes[0], place, own)
    assert told["child"] == 0, "the child failed"
    assert told["parent"] == ("done" if own == "elsewhere" else "SnapshotExistsError")
    assert told["steps"] == told["alone"], "the pending snapshot was written otherwise than without a child"
    assert place.stands() == (1 if own == "elsewhere" else 2)
    place.judge_files(place.stands())
