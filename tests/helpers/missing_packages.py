"""Stand-ins for packages that a trainer imports and its checkpointing does not use, so that it runs without them."""

import importlib.abc
import importlib.machinery
import sys
import types


class _Anything:
    """A function, a decorator, a module or a value: whatever is asked of it, it is another one."""

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return _named(name)

    def __getitem__(self, item):
        return self

    def __call__(self, *args, **kwargs):
        return args[0] if len(args) == 1 and callable(args[0]) and not kwargs else self


def _named(name):
    if name[0].isupper():  # a class, of which others may be made
        accepted = {"__init__": lambda self, *_, **__: None, "__class_getitem__": classmethod(lambda cls, item: cls)}
        return type(name, (), accepted)
    return _Anything()


class _Module(types.ModuleType):
    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return _named(name)


class StandIns(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the named packages, with all that is in them."""

    def __init__(self, *names):
        self.names = names

    def find_spec(self, fullname, path=None, target=None):
        if fullname.partition(".")[0] in self.names:
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec):
        return _Module(spec.name)

    def exec_module(self, module):
        pass


def stand_in_for(*names):
    """Let imports of these packages, which are not installed, find stand-ins."""
    sys.meta_path.append(StandIns(*names))
