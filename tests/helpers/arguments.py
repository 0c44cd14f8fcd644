"""Options by name, as arguments of a take or a restore: those that the call has, and the others in `options`."""

import inspect

from snapshot import RestoreOptions, Snapshot, TakeOptions


def for_take(**given):
    """Return the arguments of `Snapshot.take` or `async_take` for options by name."""
    return _split(Snapshot.take, TakeOptions, given)


def for_restore(**given):
    """Return the arguments of `Snapshot.restore` for options by name."""
    return _split(Snapshot.restore, RestoreOptions, given)


def _split(call, kind, given):
    own = inspect.signature(call).parameters
    options = {name: value for name, value in given.items() if name not in own}
    return {name: given[name] for name in given if name in own} | ({"options": kind(**options)} if options else {})
