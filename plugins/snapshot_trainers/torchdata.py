"""The place of a data loader in its data, in snapshots that another number of ranks restores.

torch's `DataLoader` has no state. Its order and its place are those of its samplers (`data_order.py`). The state of
torchdata's `StatefulDataLoader` counts what one replica has seen. So it means nothing on another number of replicas.
`LoaderState` saves that number with it, and redistributes the state where this is exact. Loaders of Grain and litData
keep their place themselves (`streams.py`). Nothing of these libraries is imported here.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, IterableDataset
from torch.utils.data.distributed import DistributedSampler

from snapshot_trainers.data_order import DataOrder, order_of
from snapshot_trainers.prepared import is_prepared
from snapshot_trainers.sampler_states import is_strided
from snapshot_trainers.streams import LitDataLoader, stream_of

if TYPE_CHECKING:
    from snapshot_trainers.samples import SamplesReport

VERSION, ORDER, STREAM = 1, 2, 3
"""Versions of the states of torchdata's loaders, of torch's, and of those that keep their place themselves."""
REMAINDERS = ("raise", "repeat", "skip")
EACH_STEP = "the loader must save its state at each step: snapshot_every_n_steps=1, its default"
_YIELDED = "yielded"
_SAMPLED = ("_index_sampler_state", "_sampler_iter_state", "_sampler_iter_yielded")
_SAMPLER = ("seed", "shuffle", "length")
"""Properties that the order of a sampler's samples depends on."""
State = Mapping[str, Any]


class LoaderState:
    """The place of a data loader in its data, for an app state: `{"loader": LoaderState(loader)}`.

    **Any `DataLoader` of torch** goes on with the next batch of the epoch, in the same order: with `shuffle=True`, with
    samplers and batch samplers of any class, with workers or without. The loop over the loader stays as it is. After a
    restore, the first loop has the rest of the epoch, and the following ones have the epochs after it. The random
    numbers of the application are those that it would have drawn; for that, the app state must have an `RNGState`. With
    a `DistributedSampler`, another number of replicas, or another batch size, has what is left of the epoch, and each
    sample once. An iterable dataset is read again up to the place. A restore compares the samples that it leaves out
    with those that were seen. If a sampler gives others, the loop raises `SnapshotError`. Make the `LoaderState`
    before the first loop.

    **A loader that accelerate has prepared** goes on in the same way, of any of its kinds. On another number of ranks,
    accelerate shares out what is left; loaders that it dispatches cannot go on there.

    **A `StatefulDataLoader` of torchdata** continues on the same number of replicas, too. The number of workers may
    change if the dataset is map-style. With another number of ranks and of replicas, it depends on the data:

    - A map-style dataset with a `StatefulDistributedSampler` or `DistributedSampler` continues after the samples that
      the replicas have seen together. The batch size and the number of workers may change, too. A subclass with an
      order of its own cannot continue.
    - An iterable dataset continues if it has a method `reshard_state_dict(states, rank, world)`. This gets the states
      of all shards, and returns the state of one. Each worker of a replica is a shard, in order, replica after replica.
    - Anything else raises before the restore touches anything, such as Hugging Face's `IterableDataset`.

    **An iterator of Grain, and a `StreamingDataLoader` of litData**, continue on the same number of replicas. On
    another one, those of Grain's `ElasticIterator` and of litData's `StreamingDataset` continue, too.

    A restore also sets the epoch of a distributed sampler.

    Args:
        loader: The loader.
        replica: The number of this replica, among those that read different data. The default is that of the loader's
            sampler, or the rank.
        replicas: The number of replicas. There are fewer than ranks if some ranks read the same data, such as those of
            a tensor-parallel group.
        remainder: The action if the new replicas cannot share the samples that were seen equally. `"repeat"`: fewer
            than `replicas` samples are seen again. `"skip"`: fewer than `replicas` samples are left out.
    """

    def __init__(
        self,
        loader: Any,
        *,
        replica: int | None = None,
        replicas: int | None = None,
        remainder: Literal["raise", "repeat", "skip"] = "raise",
    ) -> None:
        if (replica is None) != (replicas is None):
            raise ValueError("replica and replicas must be passed together")
        if replica is not None and replicas is not None and not 0 <= replica < replicas:
            raise ValueError(f"replica must be from 0 to {replicas - 1}, got {replica}")
        if remainder not in REMAINDERS:
            raise ValueError(f"remainder must be one of {', '.join(map(repr, REMAINDERS))}, got {remainder!r}")
        prepared = is_prepared(loader)
        self._stream = None if prepared else stream_of(loader)
        if self._stream is None and not hasattr(loader, "state_dict") and not isinstance(loader, DataLoader):
            raise TypeError(
                "loader must be a DataLoader, a StatefulDataLoader, or an iterator of Grain, such as iter(loader), got "
                f"{type(loader).__name__}"
            )
        if replica is not None and isinstance(self._stream, LitDataLoader):
            raise ValueError("litData divides the data between all ranks itself; leave replica and replicas out")
        self.loader = loader
        owns = not prepared and (self._stream is not None or hasattr(loader, "state_dict"))
        self._order: DataOrder | None = None if owns else order_of(loader)
        self._kind = None if self._stream is None else self._stream.kind
        self._version = ORDER if self._order is not None else VERSION if self._stream is None else STREAM
        self._given = None
        self._remainder = remainder
        sampler = self._sampler()
        if replica is not None and replicas is not None:
            if sampler is not None and (sampler.rank, sampler.num_replicas) != (replica, replicas):
                raise ValueError(
                    f"replica and replicas must be those of the sampler, {sampler.rank} and {sampler.num_replicas}, "
                    f"got {replica} and {replicas}; pass them to the sampler, too"
                )
            self._given = replica, replicas

    @property
    def order(self) -> DataOrder:
        """The order of a `DataLoader` of torch. A `StatefulDataLoader` has a state of its own."""
        if self._order is None:
            raise AttributeError(f"{type(self.loader).__name__} has a state of its own, and no order here")
        return self._order

    def state_dict(self) -> dict[str, Any]:
        """Return the loader's state, with what it depends on."""
        if self._order is not None:
            replica, replicas = self._place()
            return {"version": ORDER, "replica": replica, "replicas": replicas, "order": self._order.state_dict()}
        if self._stream is not None:
            return self._streamed(self._stream.state_dict())
        loader = self.loader.state_dict()
        if self._sampler() is not None:
            loader = _with_true_place(loader, finished=bool(loader["_iterator_finished"]))
        return {**self._describe(), "loader": loader}

    def count_samples(self, count: int | None = None, *, ids: Iterable[Any] | None = None) -> SamplesReport:
        """Say of each epoch how many samples all replicas have seen, lost and seen twice. Call it on all ranks.

        Args:
            count: The number of samples of an epoch, whose ids are 0 to `count - 1`.
            ids: The ids of the samples of an epoch, if they are others. Without `count` and `ids`, the finished epochs
                are compared with each other.
        """
        from snapshot_trainers.samples import report_on  # it reads snapshots, for the command

        state = {"replica": self._place()[0], "order": self.order.state_dict()}
        states: list[Any] = [state]
        if dist.is_available() and dist.is_initialized():
            states = [None] * dist.get_world_size()
            dist.all_gather_object(states, state)
        return report_on(states, count, ids)

    def load_state_dict(self, state: State) -> None:
        """Load a state of this replica."""
        _expect_ours(state, self._version, self._kind)
        place = state["replica"], state["replicas"]
        if place != self._place():
            raise ValueError(
                f"the state is that of replica {place[0]} of {place[1]}, and this is replica {self._place()[0]} of "
                f"{self._place()[1]}; as long as the number of ranks is the same, that of replicas must be, too"
            )
        if self._order is not None:
            self._order.load_state_dict(state["order"])
            return
        if self._stream is not None:
            self._stream.load_state_dict(state["stream"], state["replicas"])
            return
        self.loader.load_state_dict(self._fit_workers(state))
        sampler = self._sampler()
        if sampler is not None and state["sampler"] is not None:
            sampler.set_epoch(state["sampler"]["epoch"])

    def reshard_state_dict(self, states: Sequence[Any], rank: int, world: int) -> dict[str, Any]:
        """Return the state of this replica, from the states of all ranks."""
        replica, replicas = self._place()
        found = _by_replica(states, self._version, self._kind)
        if len(found) == replicas:
            return dict(found[replica])
        if self._order is not None:
            order = self._order.reshard([each["order"] for each in found], replica, replicas)
            return {"version": ORDER, "replica": replica, "replicas": replicas, "order": order}
        if self._stream is not None:
            return self._streamed(self._stream.reshard([each["stream"] for each in found], replicas))
        sampler = found[0]["sampler"]
        if self._describe()["sampler"] is not None and sampler is not None:
            loaded = self._divide(found, replicas)
        elif isinstance(self.loader.dataset, IterableDataset) and hasattr(self.loader.dataset, "reshard_state_dict"):
            loaded = self._reshard_dataset(found, replica, replicas)
        else:
            raise ValueError(
                f"the data of {len(found)} replicas cannot be redistributed over {replicas}: use a map-style dataset "
                "with StatefulDistributedSampler, or give the iterable dataset a method reshard_state_dict(states, "
                f"rank, world); or restore with {len(found)} replicas, or exclude the loader to begin a new epoch"
            )
        return {**self._describe(), "sampler": sampler, "loader": loaded}

    def _streamed(self, state: Any) -> dict[str, Any]:
        """Return the state of a loader that keeps its place itself, with what it depends on."""
        replica, replicas = self._place()
        return {
            "version": STREAM,
            "kind": self._kind,
            "replica": replica,
            "replicas": replicas,
            "stream": state,
        }

    def _fit_workers(self, state: State) -> State:
        """Return the loader's state for as many workers as it has now."""
        loader = state["loader"]
        saved = len(list(_shards_of(loader))) if "_snapshot" in loader else 0
        now = self.loader.num_workers
        if saved == now:
            return loader  # type: ignore[no-any-return]
        main, steps = _main(loader)
        if steps:
            raise ValueError(EACH_STEP)
        if isinstance(self.loader.dataset, IterableDataset):
            if state["replicas"] > 1 or not hasattr(self.loader.dataset, "reshard_state_dict"):
                raise ValueError(
                    f"the state is that of {saved} workers, and the loader has {now}: the data of an iterable dataset "
                    "is redistributed over other workers only if it has a method reshard_state_dict(states, rank, "
                    f"world), and the number of replicas changes or is 1; pass num_workers={saved}"
                )
            return self._reshard_dataset([state], 0, 1)
        if _is_finished(state) and not self._has_known_samplers():
            raise ValueError(
                f"the state is that of an epoch that ended with {saved} workers, and the loader has {now}: with a "
                f"sampler of another library, samples of the next epoch could be lost; pass num_workers={saved}"
            )
        shards = [(self._common_dataset_state([state]), None)] * max(1, now)
        return self._build({name: main[name] for name in _SAMPLED}, shards, [state], finished=_is_finished(state))

    def _has_known_samplers(self) -> bool:
        used = [each for each in (self.loader.batch_sampler, self.loader.sampler) if each is not None]
        return all(type(each).__module__.startswith(("torch.", "torchdata.")) for each in used)

    # The loader of this replica

    def _place(self) -> tuple[int, int]:
        """Return the number of this replica, and the number of all."""
        if self._given is not None:
            return self._given
        if self._order is not None and self._order.place is not None:
            return self._order.place
        sampler = self._sampler()
        if sampler is not None:
            return sampler.rank, sampler.num_replicas
        return (dist.get_rank(), dist.get_world_size()) if dist.is_available() and dist.is_initialized() else (0, 1)

    def _sampler(self) -> DistributedSampler[Any] | None:
        if self._order is not None:
            return self._order.sampler
        found = None if self._stream is not None else self.loader.sampler
        return found if isinstance(found, DistributedSampler) else None

    def _describe(self) -> dict[str, Any]:
        """Return all of the state but the loader's own."""
        replica, replicas = self._place()
        sampler, described = self._sampler(), None
        if sampler is not None and is_strided(sampler):
            described = {"epoch": sampler.epoch, "seed": sampler.seed, "shuffle": sampler.shuffle}
            described["length"] = len(sampler.dataset)  # type: ignore[arg-type]
        return {
            "version": VERSION,
            "replica": replica,
            "replicas": replicas,
            "batch_size": self.loader.batch_size,
            "sampler": described,
        }

    # Map-style datasets

    def _divide(self, found: Sequence[State], replicas: int) -> dict[str, Any]:
        """Return the state of a loader after the samples that all replicas have seen together."""
        sampler, saved, now = self._sampler(), found[0]["sampler"], self._describe()["sampler"]
        assert sampler is not None
        changed = [f"{name} was {saved[name]}, now {now[name]}" for name in _SAMPLER if saved[name] != now[name]]
        if changed:
            raise ValueError(f"the order of the samples has changed: the sampler's {'; its '.join(changed)}")
        seen = [_count_seen(each) for each in found]
        if len(set(seen)) > 1:
            raise ValueError(
                f"the replicas must have seen equally many samples, got {sorted(set(seen))}; take the snapshot when "
                "all ranks are at the same step"
            )
        total = seen[0] * len(found)
        mine, left = divmod(total, replicas)
        finished = all(_is_finished(each) for each in found)
        if total >= saved["length"] or finished:
            mine, left = sampler.num_samples, 0
        if left and self._remainder == "raise":
            raise ValueError(
                f"{total:,} samples were seen, which {replicas} replicas cannot share equally; pass "
                "remainder='repeat' or remainder='skip' to LoaderState, or take the snapshot at another step"
            )
        mine = min(mine + (left > 0 and self._remainder == "skip"), sampler.num_samples)
        dataset = self._common_dataset_state(found)
        batch = self.loader.batch_size or 1
        own = {_YIELDED: 0 if finished else mine} if hasattr(sampler, "state_dict") else None
        iterator = {"samples_yielded": mine} | ({"sampler_state": own} if own is not None else {})
        sampled = {
            "_index_sampler_state": own if self.loader.batch_size is None else None,
            "_sampler_iter_state": iterator if self.loader.batch_size is not None else None,
            "_sampler_iter_yielded": -(-mine // batch),
        }
        shards = [(dataset, None)] * max(1, self.loader.num_workers)
        return self._build(sampled, shards, found, finished=finished)

    def _common_dataset_state(self, found: Sequence[State]) -> Any:
        """Return the state of a map-style dataset, which must be the same everywhere."""
        states = [dataset for each in found for dataset, _ in _shards_of(each["loader"])]
        if not all(_are_equal(state, states[0]) for state in states):
            raise ValueError("the dataset has different states in replicas or workers, and cannot redistribute them")
        return states[0]

    # Iterable datasets

    def _reshard_dataset(self, found: Sequence[State], replica: int, replicas: int) -> dict[str, Any]:
        """Return the state of a loader whose dataset redistributes its state."""
        if any(each["loader"].get("_steps_since_snapshot") for each in found):
            raise ValueError(EACH_STEP)
        shards = [shard for each in found for shard in _shards_of(each["loader"])]
        iterators = [(fetcher or {}).get("dataset_iter_state") for _, fetcher in shards]
        in_iterator = any(state is not None for state in iterators)
        states = iterators if in_iterator else [dataset for dataset, _ in shards]
        if in_iterator and any(dataset is not None for dataset, _ in shards):
            raise ValueError("the dataset and its iterator both have a state, and only one can be redistributed")
        if any(state is None for state in states):
            raise ValueError("the dataset, or its iterator, must have state_dict() and load_state_dict()")
        workers = max(1, self.loader.num_workers)
        ended = all(_is_finished(each) for each in found)
        fresh: list[tuple[Any, Any]] = []
        for number in range(replica * workers, (replica + 1) * workers):
            state = self.loader.dataset.reshard_state_dict(states, number, replicas * workers)
            fetcher = {"dataset_iter_state": state if in_iterator else None, "fetcher_ended": ended}
            fresh.append((None if in_iterator else state, fetcher))
        batches = max(_count_batches(each["loader"]) for each in found)
        seen = batches * (self.loader.batch_size or 1)
        sampled = {
            "_index_sampler_state": None,
            "_sampler_iter_state": {"samples_yielded": seen} if self.loader.batch_size is not None else None,
            "_sampler_iter_yielded": batches,
        }
        return self._build(sampled, fresh, found, finished=ended)

    def _build(
        self, sampled: dict[str, Any], shards: Sequence[tuple[Any, Any]], found: Sequence[State], *, finished: bool
    ) -> dict[str, Any]:
        """Return the state of a loader: of its sampler, and of the dataset and the fetcher of each worker."""
        batches = sampled["_sampler_iter_yielded"]
        sampled |= {"_IterableDataset_len_called": None, "_shared_seed": None}
        if not self.loader.num_workers:
            ((dataset, fetcher),) = shards
            held = {"_num_yielded": batches, "fetcher_state": fetcher, "dataset_state": dataset}
            return {**sampled, **held, "_iterator_finished": finished}
        replica = self._place()[0]
        seed = torch.initial_seed() % (1 << 62) + replica
        sampled["_base_seed"] = _main(found[replica % len(found)]["loader"])[0].get("_base_seed", seed)
        return {
            "_snapshot": {
                "_snapshot_step": batches,
                "_last_yielded_worker_id": len(shards) - 1,
                "_main_snapshot": {"_num_workers": len(shards), **sampled},
                "_worker_snapshots": {
                    f"worker_{number}": {"worker_id": number, "dataset_state": dataset, "fetcher_state": fetcher}
                    for number, (dataset, fetcher) in enumerate(shards)
                },
            },
            "_steps_since_snapshot": 0,
            "_iterator_finished": finished,
        }


# States that were saved


def _expect_ours(state: Any, version: int, kind: str | None = None) -> None:
    found = state.get("version") if isinstance(state, Mapping) else None
    kinds = {VERSION: "a StatefulDataLoader", ORDER: "a DataLoader", STREAM: "an iterator of Grain"}
    if found in kinds and (found != version or state.get("kind") != kind):
        raise ValueError(
            f"the state is that of {state.get('kind') or kinds[found]}, and the loader is {kind or kinds[version]}; "
            "restore with a loader of the same class, or exclude it to begin a new epoch"
        )
    if found != version:
        raise ValueError(
            "the state must be one of LoaderState, which has the number of replicas; restore another one into the "
            "loader itself, on as many ranks as saved it"
        )


def _by_replica(states: Sequence[Any], version: int, kind: str | None) -> list[State]:
    """Return the state of each replica. Ranks that read the same data have the same one."""
    found: dict[int, State] = {}
    for rank, state in enumerate(states):
        if state is None:
            continue
        _expect_ours(state, version, kind)
        known = found.setdefault(state["replica"], state)
        if _place_of(known) != _place_of(state):
            raise ValueError(
                f"rank {rank} was at another step than other ranks with replica {state['replica']}; ranks that read "
                "different data must have different replicas"
            )
    numbers = {state["replicas"] for state in found.values()}
    if len(numbers) != 1 or sorted(found) != list(range(*numbers)):
        raise ValueError(f"the snapshot must have the states of all replicas, got those of {sorted(found)}")
    return [found[number] for number in sorted(found)]


def _place_of(state: State) -> tuple[Any, ...]:
    """Return what grows with each batch."""
    if "stream" in state:
        return (state["stream"],)
    if "order" in state:
        return state["order"]["epoch"], state["order"]["batches"]
    return (_count_batches(state["loader"]),)


def _main(loader: State) -> tuple[State, int]:
    """Return the state of the loader's main process, and the steps after it."""
    if "_snapshot" in loader:
        return loader["_snapshot"]["_main_snapshot"], loader["_steps_since_snapshot"]
    return loader, 0


def _with_true_place(loader: State, *, finished: bool) -> dict[str, Any]:
    """Return a loader's state with the true place of its sampler, which it does not tell before the first batch.

    After the end of an epoch this is the start: in the next epoch, torchdata would skip as many samples as were seen.
    """
    if "_snapshot" in loader:
        main = _with_true_place(loader["_snapshot"]["_main_snapshot"], finished=finished)
        return {**loader, "_snapshot": {**loader["_snapshot"], "_main_snapshot": main}}
    made = dict(loader)
    iterator, index = loader.get("_sampler_iter_state"), loader.get("_index_sampler_state")
    if isinstance(iterator, Mapping) and _YIELDED in (iterator.get("sampler_state") or {}):
        true = {**iterator["sampler_state"], _YIELDED: 0 if finished else iterator["samples_yielded"]}
        made["_sampler_iter_state"] = {**iterator, "sampler_state": true}
    if isinstance(index, Mapping) and _YIELDED in index:
        made["_index_sampler_state"] = {**index, _YIELDED: 0 if finished else loader["_sampler_iter_yielded"]}
    return made


def _count_batches(loader: State) -> int:
    """Return the number of batches that a loader has yielded in the epoch."""
    if "_snapshot" in loader:
        return int(loader["_snapshot"]["_snapshot_step"] + loader["_steps_since_snapshot"])
    return int(loader["_num_yielded"])


def _count_seen(state: State) -> int:
    """Return the number of samples that a replica has seen in the epoch."""
    main, steps = _main(state["loader"])
    if state["batch_size"] is None:  # each sample by itself
        return int(main["_sampler_iter_yielded"]) + steps
    return int(main["_sampler_iter_state"]["samples_yielded"]) + steps * int(state["batch_size"])


def _are_equal(a: Any, b: Any) -> bool:
    try:
        return bool(a == b)
    except (RuntimeError, ValueError):  # they hold tensors or arrays
        return False


def _is_finished(state: State) -> bool:
    return bool(state["loader"]["_iterator_finished"])


def _shards_of(loader: State) -> Iterator[tuple[Any, Any]]:
    """Yield the states of the dataset and of the fetcher of each worker."""
    if "_snapshot" not in loader:
        yield loader["dataset_state"], loader["fetcher_state"]
        return
    workers = loader["_snapshot"]["_worker_snapshots"]
    for number in range(len(workers)):
        held = workers[f"worker_{number}"]
        yield held["dataset_state"], held["fetcher_state"]
