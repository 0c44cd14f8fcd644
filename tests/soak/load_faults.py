"""What goes wrong with a storage: errors, damage and delays, drawn at random."""

from snapshot.testing import Fault, Stall, Tap

WRITES = [
    "create", "write", "finish", "put", "commit", "settle", "list", "delete", "stat", "get", "close", "sweep", "*",
]  # fmt: skip
READS = ["get", "stat", "read_into", "*"]


class Switch(Tap):
    """A tap that does what it is told, of one place in a round."""

    def __init__(self):
        self.taps = []

    async def before(self, operation):
        damage = None
        for tap in self.taps:
            damage = await tap.before(operation) or damage
        return damage

    @property
    def hits(self):
        return sum(tap.hits for tap in self.taps)


def drawn(chance, names, *, reads=False):
    """Something that happens to one operation, or to several."""
    on, nth = chance.choice(names), chance.randrange(1, 7)
    kind = chance.random()
    if kind < 0.15:
        return Stall(on, nth=nth, times=chance.randrange(1, 9), seconds=0.02)
    if kind < 0.35:
        on = chance.choice(["read_into", "get"] if reads else ["write", "finish", "write", "commit"])
        return Fault(on, nth=nth, flip=chance.randrange(1 << 24))
    error = chance.choice([OSError(28, "full"), OSError(5, "broken"), ConnectionResetError(104, "gone")])
    return Fault(on, nth=nth, times=chance.choice([1, 1, 1, 3, None]), error=error)


def of_deletes(chance):
    """What keeps a snapshot from being deleted, half of the times."""
    on, nth = chance.choice(["delete", "list", "get", "*"]), chance.randrange(1, 6)
    return [] if chance.random() < 0.5 else [Fault(on, nth=nth, error=OSError(5, "broken"))]
