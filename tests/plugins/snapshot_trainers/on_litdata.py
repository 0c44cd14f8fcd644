"""`LoaderState` with the real litData, on ranks that are forks. `test_frameworks.py` runs this in its own process."""

import itertools
from collections import Counter

import pytest
from litdata import CombinedStreamingDataset, StreamingDataLoader, StreamingDataset
from litdata.streaming.writer import BinaryWriter

from snapshot import Snapshot
from snapshot_trainers.torchdata import LoaderState
from tests.helpers.forked_ranks import fork_ranks

LENGTH = 96


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    writer = BinaryWriter(str(folder), chunk_size=5)
    for number in range(LENGTH):
        writer[number] = number
    writer.done()
    writer.merge()
    return folder


def streamed(data, **options):
    return StreamingDataLoader(
        StreamingDataset(str(data), shuffle=True, seed=3), **{"batch_size": 4, "drop_last": False, **options}
    )


def combined(data, **options):
    parts = [StreamingDataset(str(data), shuffle=True, seed=seed) for seed in (3, 4)]
    return StreamingDataLoader(CombinedStreamingDataset(parts, iterate_over_all=True), **{"batch_size": 4, **options})


def rest_of(batches):
    return [batch.tolist() for batch in batches]


def read(make, source, target, batches, again=False):
    """On each rank: go on from a snapshot, read some batches, and save another one. `again`: and the next epoch."""
    loader = make()
    state = {"loader": LoaderState(loader)}
    if source:
        Snapshot(source).restore(state)
    iterator = iter(loader)
    found = rest_of(itertools.islice(iterator, batches))
    if target:
        Snapshot.take(target, state)
    return (found, rest_of(iterator), rest_of(loader)) if again else found


def flat(found):
    return list(itertools.chain(*itertools.chain(*found)))


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("batches", [3, 12])
def test_litdata_loader_on_the_same_ranks_goes_on_with_the_next_batch(tmp_path, data, workers, batches):
    def make():
        return streamed(data, num_workers=workers)

    whole = fork_ranks(2, tmp_path, read, make, None, tmp_path / "s", batches, True)
    resumed = fork_ranks(2, tmp_path, read, make, tmp_path / "s", None, LENGTH, True)
    for (_, rest, epoch), (first, _, second) in zip(whole, resumed, strict=True):
        if rest:
            assert (first, second) == (rest, epoch)
        else:
            assert first == epoch  # the next epoch begins


# ranks and batches, of one job after the other; the last one reads all that is left
CHAINS = [
    ((2, 3), (1, 4), (1, 3), (1, LENGTH)),
    ((2, 2), (4, 2), (4, 1), (2, LENGTH)),
    ((1, 4), (2, 2), (2, 2), (1, LENGTH)),
]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("chain", CHAINS)
def test_litdata_loader_on_other_ranks_yields_each_sample_once(tmp_path, data, chain, workers):
    source, found = None, []
    for number, (ranks, batches) in enumerate(chain):
        target = tmp_path / f"{number}"
        found += flat(
            fork_ranks(ranks, tmp_path, read, lambda: streamed(data, num_workers=workers), source, target, batches)
        )
        source = target
    assert sorted(found) == list(range(LENGTH))


def test_litdata_loader_on_other_ranks_at_the_end_begins_the_next_epoch(tmp_path, data):
    fork_ranks(2, tmp_path, read, lambda: streamed(data), None, tmp_path / "s", 12)
    (found,) = fork_ranks(1, tmp_path, read, lambda: streamed(data), tmp_path / "s", None, LENGTH)
    assert sorted(flat([found])) == list(range(LENGTH))


def _logged(data, source):
    import logging

    held = []
    handler = logging.Handler()
    handler.emit = lambda record: held.append(record.getMessage())
    logging.getLogger("snapshot").addHandler(handler)
    return read(lambda: streamed(data), source, None, LENGTH), held


def test_litdata_loader_logs_the_samples_that_it_reads_again(tmp_path, data):
    seen = flat(fork_ranks(1, tmp_path, read, lambda: streamed(data), None, tmp_path / "s", 5))
    resumed = fork_ranks(2, tmp_path, _logged, data, tmp_path / "s")
    counts = Counter(seen + flat([batches for batches, _ in resumed]))
    assert sorted(counts) == list(range(LENGTH))
    assert sorted(counts.values()) == [1] * (LENGTH - 4) + [2] * 4
    for _, held in resumed:
        (line,) = [each for each in held if "litData" in each]
        assert "4 samples that were seen are read again" in line
        assert "a number of samples that 8 divides" in line


def _refused(make, source):
    try:
        read(make, source, None, 1)
    except ValueError as error:
        return str(error)
    return None


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda data: streamed(data, drop_last=None), "drop_last was True, now False: "),
        (combined, "litData's CombinedStreamingDataset cannot go on with 1 replicas instead of 2: "),
    ],
)
def test_litdata_loader_that_other_ranks_cannot_go_on_with_is_refused(tmp_path, data, make, message):
    fork_ranks(2, tmp_path, read, lambda: make(data), None, tmp_path / "s", 3)
    (found,) = fork_ranks(1, tmp_path, _refused, lambda: make(data), tmp_path / "s")
    assert found is not None
    assert message in found


def test_litdata_loader_with_a_window_shuffle_on_other_ranks_is_refused(tmp_path, data, monkeypatch):
    monkeypatch.setenv("LITDATA_POSIX_FAST", "1")  # as on NFS; litData would leave out 3 samples of a chunk
    fork_ranks(1, tmp_path, read, lambda: streamed(data), None, tmp_path / "s", 3)
    found = fork_ranks(2, tmp_path, _refused, lambda: streamed(data), tmp_path / "s")
    assert all("whole chunks only" in each and "LITDATA_POSIX_FAST=0" in each for each in found)
    fork_ranks(1, tmp_path, read, lambda: streamed(data), tmp_path / "s", None, 1)


def test_litdata_loader_has_the_replicas_of_litdata(data):
    with pytest.raises(ValueError, match="litData divides the data between all ranks itself"):
        LoaderState(streamed(data), replica=0, replicas=2)
