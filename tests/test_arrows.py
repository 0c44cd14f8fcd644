"""Imports point one way: from the command down to errors and texts, without circles."""

import ast
import re
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
FLOORS = """
    decoding errors progress reports saved text
    events io options tensors
    distributed manifest maps plan state testing
    formats loading
    save signing transform worker
    pending snapshot tiers weights
    bench interop manager publish
    cli
"""
"""From the lowest to the highest. Those of one line may import each other, but for those in APART."""
FLOOR = {room: number for number, line in enumerate(FLOORS.strip().splitlines()) for room in line.split()}
APART = [{"transform", "worker"}]
"""Rooms that know nothing of each other."""
CORE = {"distributed", "io", "loading", "manifest", "plan", "save", "state", "tensors"}
OPTIONAL = {"bench", "cli", "interop", "manager", "publish", "signing", "testing", "tiers", "transform", "worker"}
"""Rooms that the core does not import. It names the module of a key in a string, as the registry names plugins."""
FACE = {"snapshot", "snapshot.__main__"}
"""What gathers the names for users, and starts the command."""


PLUGINS_USE = {"errors", "events", "io", "tensors"}
"""What plugins may import of the library."""


def modules(folder, *above):
    """The name and file of each module in a folder."""
    for path in sorted(folder.rglob("*.py")):
        parts = (*above, *path.relative_to(folder).with_suffix("").parts)
        if above[-1] == "plugins" or "plugins" not in parts:  # which are linked into the package
            yield ".".join(parts).removesuffix(".__init__"), path


def imports(path, known):
    """The modules of the library that a file imports: anywhere in it, also for types alone."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "snapshot":
            for name in node.names:
                below = f"{node.module}.{name.name}"
                yield below if below in known else node.module
        elif isinstance(node, ast.Import):
            yield from (name.name for name in node.names if name.name.split(".")[0] == "snapshot")


def room_of(module):
    return module.split(".")[1] if "." in module else "snapshot"


def graph(known):
    return {name: set(imports(path, known)) - {name} for name, path in known.items()}


def circles(edges):
    """What is left of a graph when all modules are gone that import none of the rest."""
    left = dict(edges)
    while free := [name for name, found in left.items() if not found & left.keys()]:
        for name in free:
            del left[name]
    return {name: sorted(found & left.keys()) for name, found in left.items()}


KNOWN = dict(modules(ROOT / "snapshot", "snapshot"))
PLUGINS = dict(modules(ROOT / "plugins", "snapshot", "plugins"))


@cache
def edges_of_library():
    return graph(KNOWN)


@cache
def edges_of_plugins():
    return graph(PLUGINS)


def test_imports_every_package_has_a_layer():
    assert {room_of(name) for name in KNOWN if name not in FACE} == set(FLOOR)


def test_imports_no_module_imports_a_plugin():
    assert [name for name, found in edges_of_library().items() if any(".plugins" in each for each in found)] == []


def test_imports_point_down():
    wrong = [
        f"{name} -> {other}"
        for name, found in edges_of_library().items()
        for other in found
        if name not in FACE
        and (FLOOR[room_of(other)] > FLOOR[room_of(name)] or {room_of(name), room_of(other)} in APART)
    ]
    assert wrong == []


def test_imports_of_the_core_are_not_optional():
    assert [
        (name, other)
        for name, found in edges_of_library().items()
        for other in found
        if room_of(name) in CORE and room_of(other) in OPTIONAL
    ] == []


def test_imports_have_no_cycles():
    assert circles({name: found for name, found in edges_of_library().items() if name not in FACE}) == {}
    assert circles(edges_of_plugins()) == {}


def test_imports_of_plugins_are_limited():
    outside = {room_of(other) for found in edges_of_plugins().values() for other in found} - {"plugins"}
    assert outside <= PLUGINS_USE


def test_modules_have_at_most_900_lines():
    """No module of the library, or of its plugins, is longer than 900 lines."""
    files = [*KNOWN.values(), *PLUGINS.values()]
    long = {str(path.relative_to(ROOT)): count for path in files if (count := len(path.read_text().splitlines())) > 900}
    assert long == {}


def test_design_md_places_exist():
    """A place such as `loading/open.py: expect_files` in docs/design.md is in that file."""
    text = (ROOT / "docs" / "design.md").read_text().partition("## The rooms")[0]
    places = re.findall(r"`([\w/]+\.py)(?:: ([\w.]+))?`", text)
    assert len(places) > 40
    for path, name in places:
        file = ROOT / path if path.startswith(("plugins/", "snapshot/", "tests/")) else ROOT / "snapshot" / path
        assert file.is_file(), path
        for part in name.split(".") if name else ():
            assert re.search(rf"(def|class) {part}\b", file.read_text()), f"{path}: {name}"
