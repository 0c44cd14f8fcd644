"""Plugins import the contract, errors and events of the library, and each other without circles."""

import ast
from pathlib import Path

PLUGINS = Path(__file__).parents[2] / "plugins"
ALLOWED = {"aio", "errors", "events", "per_process", "storage", "tensors", "url"}


def modules():
    for path in sorted(PLUGINS.rglob("*.py")):
        parts = ("snapshot", "plugins", *path.relative_to(PLUGINS).with_suffix("").parts)
        yield ".".join(parts).removesuffix(".__init__"), path


KNOWN = dict(modules())


def imports(path):
    """The modules of the library that a file imports: anywhere in it, also for types alone."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("snapshot."):
            for name in node.names:
                below = f"{node.module}.{name.name}"
                yield below if below in KNOWN else node.module


GRAPH = {name: set(imports(path)) - {name} for name, path in KNOWN.items()}


def test_plugins_know_little_of_the_library():
    outside = {other.split(".")[1] for found in GRAPH.values() for other in found} - {"plugins"}
    assert outside <= ALLOWED


def test_there_are_no_circles():
    left = {name: found & KNOWN.keys() for name, found in GRAPH.items()}
    while free := [name for name, found in left.items() if not found & left.keys()]:
        for name in free:
            del left[name]
    assert left == {}
