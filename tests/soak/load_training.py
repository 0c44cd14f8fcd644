"""A training loop that saves and restores all the time, while storages fail: one rank of it.

Run as a process: `python -m tests.soak.load_training RANK WORLD FOLDER SECONDS SEED`. All ranks draw from one seed what
they do together, and each from another what is its own.
"""

import contextlib
import faulthandler
import json
import os
import random
import sys
import time
import warnings
from collections import Counter
from pathlib import Path

import torch
import torch.distributed as dist

from snapshot import CommitUnknown, Snapshot, SnapshotError, TakeOptions
from snapshot.testing import Fault, tapped
from snapshot_worker.client import writer_process
from tests.helpers.arguments import for_restore, for_take
from tests.soak.load_app import App, differs, frozen, target
from tests.soak.load_checks import came_back, expected, foreign, look, notes, tensors, told_committed, untouched
from tests.soak.load_faults import READS, WRITES, Switch, drawn, of_deletes
from tests.soak.load_leaks import Leaks, files_of

PATIENCE = 120
"""Seconds after which a round hangs: all stacks are told, and the process ends."""
SLOTS = 5


class Slot:
    """A path, and what should be there."""

    def __init__(self, path):
        self.path = path
        self.saved = None
        self.save_id = None
        self.widths = ()
        self.damaged = False
        """Whether a fault damaged what was stored: then only errors and right values may come out."""

    def fill(self):
        """What is there is not ours."""
        (self.path / "data").mkdir(parents=True)
        (self.path / "keep.txt").write_text("not ours")
        (self.path / "data" / "keep.bin").write_text("nor this")


class Pending:
    """An asynchronous take under way."""

    def __init__(self, slot, saved, widths, switch, scheme):
        self.slot, self.saved, self.widths, self.switch, self.scheme = slot, saved, widths, switch, scheme
        self.pending = self.error = None


class Training:
    def __init__(self, rank, world, folder, seconds, seed):
        self.rank, self.world, self.seconds = rank, world, seconds
        self.shared, self.mine = random.Random(seed), random.Random(f"{seed}/{rank}")
        self.app = App(self.shared, random.Random(f"{seed}/app/{rank}"))
        self.did = Counter()
        self.pending = []
        self.switches = {f"load{n}": Switch() for n in range(4)}
        self.free = list(self.switches)
        self.slots = [Slot(folder / f"slot-{n}") for n in range(SLOTS)]
        for slot in self.slots if rank == 0 else ():
            slot.fill()
        self.together(None)
        self.leaks = Leaks(world)

    def together(self, value):
        """What each rank says."""
        if self.world == 1:
            return [value]
        found = [None] * self.world
        dist.all_gather_object(found, value)
        return found

    def run(self):
        began, rounds = time.monotonic(), 0
        acts = [self.take] * 5 + [self.begin] * 6 + [self.end] * 2 + [self.restore] * 2 + [self.read, self.delete]
        while self.together(time.monotonic() - began < self.seconds)[0]:
            faulthandler.dump_traceback_later(PATIENCE, exit=True)
            self.did["structure changes"] += self.app.change()
            for _ in range(self.shared.randrange(3)):
                self.app.train()
            self.shared.choice(acts)()
            rounds += 1
            if rounds % 100 == 0:
                self.drain()
                self.leaks.look(self.held())
                self.together(None)
        faulthandler.dump_traceback_later(PATIENCE, exit=True)
        self.drain()
        self.leaks.look(self.held())
        self.finish()
        faulthandler.cancel_dump_traceback_later()
        self.leaks.judge()
        return {"rounds": rounds, **dict(sorted(self.did.items())), **self.leaks.figures()}

    def trouble(self, names, *, reads=False):
        """Taps for this rank in this round: mostly none, on all ranks or on one alone."""
        chance, victim = self.shared.random(), self.shared.randrange(self.world)
        if chance < 0.5 or (chance < 0.8 and victim != self.rank):
            return []
        return [drawn(self.mine, names, reads=reads)]

    def options(self, slot):
        """How a take is made."""
        made = {"overwrite": True} if slot.saved is not None or self.shared.random() < 0.5 else {}
        made |= {"memory_budget_bytes": self.shared.choice([None, None, 1, 300_000, 1 << 20, 8 << 20])}
        made |= {"durable": self.shared.random() < 0.05, "timeout": 60}
        if self.shared.random() < 0.5:
            made |= {"replicated": ["model/**", "optim/**", "alike/**"][: self.shared.randrange(1, 4)]}
            made["check_replicated"] = self.shared.random() < 0.3
        if self.shared.random() < 0.3:
            # the name is the same on all ranks: a glob that matches nothing is told
            made["exclude"] = [f"alike/{name}" for name in sorted(self.app.alike)[::3]]
        return made

    def wanted(self, options):
        """What a take with these options has to bring back."""
        saved = frozen(self.app.state())
        for glob in options.get("exclude", ()):
            del saved["alike"][glob.partition("/")[2]]
        return saved

    def slot(self):
        """A path at which nothing is under way."""
        busy = {each.slot for each in self.pending}
        return self.shared.choice([slot for slot in self.slots if slot not in busy])

    # What is done

    def take(self):
        slot = self.slot()
        options = self.options(slot)
        saved, widths = self.wanted(options), self.app.widths
        scheme = self.free[-1]
        switch = self.switches[scheme]
        switch.taps = self.trouble(WRITES)
        error = self.tried(Snapshot.take, f"{scheme}+file://{slot.path}", self.app.state(), **for_take(**options))
        self.settle("take", slot, saved, widths, error, switch)

    def begin(self):
        """Begin an asynchronous take; sometimes more than may be under way."""
        if len(self.pending) >= 3:
            self.end()
        slot = self.slot()
        options = self.options(slot)
        saved = self.wanted(options)
        scheme = self.free.pop()
        made = Pending(slot, saved, self.app.widths, self.switches[scheme], scheme)
        self.pending.append(made)
        if self.shared.random() < 0.15:
            options["worker"], url = "process", f"file://{slot.path}"
            self.did["takes by a writer process"] += 1
        else:
            url = f"{scheme}+file://{slot.path}"
            made.switch.taps = self.trouble(WRITES)
        options["staging"] = self.shared.choice(["blocking", "overlapped"])

        def call(*args, **kwargs):
            made.pending = Snapshot.async_take(*args, **kwargs)

        made.error = self.tried(call, url, self.app.state(), **for_take(**options))
        if self.shared.random() < 0.1 and "worker" in options and self.mine.random() < 0.5 and made.pending:
            os.kill(writer_process().pid, 9)
            self.did["writer processes killed"] += 1
        if any(self.together(made.error is not None)):
            self.end(made)

    def end(self, made=None):
        """Wait for a take that is under way, or cancel it."""
        if not self.pending:
            return
        made = made or self.shared.choice(self.pending)
        self.pending.remove(made)
        self.free.append(made.scheme)
        cancelled = None
        if self.shared.random() < 0.15 and self.mine.random() < 0.7 and made.pending:
            cancelled = made.pending.cancel()
            self.did["cancels"] += 1
        if made.pending:
            made.error = self.tried(made.pending.wait, PATIENCE / 2)
            assert made.pending.done()
            assert made.pending.staged()
            assert not cancelled or made.error is not None, "it was cancelled, and is there"
        self.settle("async_take", made.slot, made.saved, made.widths, made.error, made.switch)

    def tried(self, call, *args, **kwargs):
        """The error that a call raised: it must be one of ours."""
        try:
            call(*args, **kwargs)
        except SnapshotError as error:
            return error
        return None

    def settle(self, verb, slot, saved, widths, error, switch):
        """A take has ended: what is at its path is what should be there, and comes back exactly."""
        hits, taps, switch.taps = switch.hits, switch.taps, []
        self.did[f"{verb}: {'failed' if error else 'done'}"] += 1
        self.did["faults hit"] += hits
        ended = self.together(error and type(error).__name__)
        faulted = any(self.together(bool(hits)))
        maybe = any(self.together(isinstance(error, CommitUnknown) or told_committed(error)))
        assert maybe or len({each is None for each in ended}) == 1, f"ended differently: {ended}: {error}"
        spoilt = any(self.together(any(isinstance(t, Fault) and t.error is None and t.hits for t in taps)))
        new = ended[0] is None
        if self.rank == 0:
            foreign(slot)
            found, ok = look(slot)
            if maybe:
                new = found != slot.save_id
            if new:
                assert found != slot.save_id or spoilt, "the take returned, and the old snapshot is there"
                assert ok or spoilt, "a take that was not disturbed does not verify"
            else:
                assert found == slot.save_id, f"{error!r} {notes(error)} {taps}: {found}, not {slot.save_id}"
                assert ok or slot.damaged or slot.saved is None, f"{error}: the old snapshot is damaged"
            if new and not faulted:
                left = files_of(slot.path) - expected(slot.path)
                assert not left, f"leftovers: {left}"
            outcome = (new, found, not ok)
        else:
            outcome = None
        new, found, damaged = self.together(outcome)[0]
        if new:
            slot.saved, slot.save_id, slot.widths, slot.damaged = saved, found, widths, damaged
            self.did["damaged snapshots found"] += damaged
            self.did["bytes"] += sum(t.nbytes for t in tensors(saved))
        if new or self.shared.random() < 0.3:
            self.restore(slot)

    def restore(self, slot=None):
        slot = slot or self.slot()
        self.did["restores"] += 1
        scheme = self.free[-1]
        switch = self.switches[scheme]
        switch.taps = self.trouble(READS, reads=True)
        options = {
            "memory_budget_bytes": self.shared.choice([None, None, 1, 300_000, 8 << 20]),
            "read_once": self.shared.choice(["auto", True, False]), "atomic": self.shared.random() < 0.3,
            "strict": self.shared.random() < 0.7, "timeout": 60,
        }  # fmt: skip
        part = self.shared.choice([None, None, None, "select", "exclude"])
        live = target(slot.saved, slot.widths, self.mine) if slot.saved else dict(self.app.state())
        if part and slot.saved:
            options[part] = ["extra" if part == "select" else "model"]
        before = frozen(live)
        error = self.tried(
            Snapshot(f"{scheme}+file://{slot.path}", allow_pickle=True).restore, live, **for_restore(**options)
        )  # fmt: skip
        hits, switch.taps = switch.hits, []
        self.did["faults hit"] += hits
        self.did["restores: failed"] += error is not None
        ended = self.together(error and type(error).__name__)
        assert len({each is None for each in ended}) == 1, f"ended differently: {ended}: {error}"
        disturbed = any(self.together(bool(hits))) or slot.damaged or slot.saved is None
        assert disturbed or error is None, f"nothing disturbed it: {error!r}"
        if error is None:
            came_back(slot, live, before, options)
        else:
            untouched(live, before, error, options)

    def read(self):
        """Objects by themselves, and all of a key."""
        slot = self.slot()
        if slot.saved is None or slot.damaged:
            return
        here = Snapshot(slot.path, allow_pickle=True)
        self.did["reads"] += 1
        for name in self.mine.sample(sorted(slot.saved["extra"]), min(3, len(slot.saved["extra"]))):
            found = differs(slot.saved["extra"][name], here.read_object(f"{self.rank}/extra/{name}"), name)
            assert not found, found
        found = differs(slot.saved["extra"], here.get_state_dict_for_key("extra"), "extra")
        assert not found, found
        self.together(None)

    def delete(self):
        """Rank 0 deletes a snapshot; a fault may leave it."""
        slot = self.slot()
        self.did["deletes"] += 1
        if self.rank == 0 and slot.saved is not None:
            scheme = self.free[-1]
            switch = self.switches[scheme]
            switch.taps = of_deletes(self.mine)
            error = self.tried(Snapshot(f"{scheme}+file://{slot.path}").delete)
            self.did["faults hit"] += switch.hits
            assert error is None or switch.hits, error
            switch.taps = []
            found, ok = look(slot)
            if error is None:
                assert found is None
            assert found in (None, slot.save_id)
            assert found is None or ok or slot.damaged, "half deleted, and still there"
            foreign(slot)
        else:
            found = None
        found = self.together(found)[0]
        if found is None:
            slot.saved = slot.save_id = None
            slot.damaged = False

    def held(self):
        """Bytes of tensors that this test holds: as many as chance has it."""
        found = [slot.saved for slot in self.slots] + [self.app.extra.data, self.app.alike.data]
        return sum({each.untyped_storage().data_ptr(): each.nbytes for each in tensors(found)}.values())

    def drain(self):
        while self.pending:
            self.end()
        self.together(None)

    def finish(self):
        """One more take of each path cleans whatever was left; deleted, nothing is left of ours."""
        for slot in self.slots:
            saved = frozen(self.app.state())
            Snapshot.take(slot.path, self.app.state(), overwrite=True, timeout=60, options=TakeOptions(durable=False))
            self.together(None)
            if self.rank == 0:
                left = files_of(slot.path) - expected(slot.path)
                assert not left, f"leftovers: {left}"
                slot.save_id = Snapshot(slot.path).metadata.save_id
                assert Snapshot(slot.path).verify().ok
            slot.saved, slot.widths, slot.damaged = saved, self.app.widths, False
            self.restore(slot)
            self.together(None)
            if self.rank == 0:
                Snapshot(slot.path).delete()
                assert files_of(slot.path) == {"keep.txt", "data/keep.bin"}, files_of(slot.path)


def main():
    rank, world, folder, seconds, seed = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), *map(int, sys.argv[4:6])
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # that something is pickled, or that a glob matches nothing
    torch.manual_seed(seed + rank)
    if world > 1:
        store = dist.FileStore(str(folder / "store"), world)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    training = Training(rank, world, folder, seconds, seed)
    with contextlib.ExitStack() as stack:
        for scheme, switch in training.switches.items():
            stack.enter_context(tapped(scheme, switch))
        figures = training.run()
    print(json.dumps(figures), flush=True)
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
