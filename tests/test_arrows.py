"""Imports point one way: from the command down to errors and texts, without circles; and from plugins to the core."""

import ast
import importlib
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FLOORS = """
    decoding errors extensions progress report_html reports saved text
    events io options settings tensors
    distributed manifest maps plan state testing
    formats loading storages
    save transform
    pending runs snapshot weights
    interop manager
    cli
"""
"""From the lowest to the highest. Those of one line may import each other."""
FLOOR = {room: number for number, line in enumerate(FLOORS.strip().splitlines()) for room in line.split()}
CORE = {"distributed", "io", "loading", "manifest", "plan", "save", "state", "storages", "tensors"}
OPTIONAL = {"cli", "interop", "manager", "testing", "transform"}
"""Rooms that those of `CORE` do not import."""
FACE = {"snapshot", "snapshot.__main__"}
"""What gathers the names for users, and starts the command."""
STORAGES_USE = {"errors", "events", "io", "tensors"}
"""What storages may import of the core, those of plugins, too."""
STORAGES = ("snapshot.storages.", "snapshot_objectstore.", "snapshot_fsspec.")


def modules(folder, *above):
    """The name and file of each module in a folder."""
    for path in sorted(folder.rglob("*.py")):
        parts = (*above, *path.relative_to(folder).with_suffix("").parts)
        yield ".".join(parts).removesuffix(".__init__"), path


@cache
def parse(path):
    return ast.parse(path.read_text())


@cache
def nodes(path):
    return list(ast.walk(parse(path)))


def imports(path, known):
    """The modules of both trees that a file imports: anywhere in it, also for types alone."""
    for node in nodes(path):
        if isinstance(node, ast.ImportFrom) and node.module and is_own(node.module):
            for name in node.names:
                below = f"{node.module}.{name.name}"
                yield below if below in known else node.module
        elif isinstance(node, ast.Import):
            yield from (name.name for name in node.names if is_own(name.name))


def room_of(module):
    return module.split(".")[1] if "." in module else "snapshot"


def circles(edges):
    """What is left of a graph when all modules are gone that import none of the rest."""
    left = dict(edges)
    while free := [name for name, found in left.items() if not found & left.keys()]:
        for name in free:
            del left[name]
    return {name: sorted(found & left.keys()) for name, found in left.items()}


KNOWN = dict(modules(ROOT / "snapshot", "snapshot"))
PLUGINS = dict(modules(ROOT / "plugins"))
PACKAGES = {name.partition(".")[0] for name in PLUGINS}
NAMED = re.compile(r"\bsnapshot_\w+(?:\.\w+)*")


def strings(path):
    """The modules of plugins that a file names in strings, such as `"snapshot_x.y:Z"` or a part of an f-string."""
    comments = {id(each.value) for each in nodes(path) if isinstance(each, ast.Expr)}
    for node in nodes(path):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in comments:
            yield from (name for name in NAMED.findall(node.value) if name.partition(".")[0] in PACKAGES)


@cache
def edges():
    """All imports of both trees, and what strings name of plugins."""
    known = KNOWN | PLUGINS
    return {
        name: {*imports(path, known), *(each for each in strings(path) if each.split(".")[0] != name.split(".")[0])}
        - {name}
        for name, path in known.items()
    }


def edges_of_library():
    return {name: {other for other in edges()[name] if not is_plugin(other)} for name in KNOWN}


def is_own(module):
    return module.partition(".")[0] in {"snapshot", *PACKAGES}


def is_plugin(module):
    return module.partition(".")[0] in PACKAGES


DECLARED = {
    "snapshot_megatron.legacy -> snapshot_deepspeed.parts",
    "snapshot_trainers.torchft -> snapshot_tiers.peers",
    "snapshot_trainers.transformers -> snapshot_merge.peft",
}
"""Imports of one plugin by another. It may only shrink."""


def pairs(found):
    return {f"{name} -> {other}" for name, others in found.items() for other in others}


def test_imports_of_plugins_by_the_core_do_not_exist():
    """Nor do strings of the core name a module of a plugin, beside the tables of `extensions`."""
    names = KNOWN.keys() - {"snapshot.extensions"}  # its table of names tells which package is missing
    found = pairs({name: {each for each in edges()[name] if is_plugin(each)} for name in names})
    print(f"{len(found)} edges from the core to plugins")
    assert found == set()


IMPORTERS = {
    "snapshot": {"import_module"},
    "snapshot.cli.arguments": {"import_module"},
    "snapshot.cli.doctor": {"find_spec"},
    "snapshot.formats.registry": {"resolve_name"},
    "snapshot.io.system": {"import_module"},
    "snapshot.save.take": {"import_module"},
    "snapshot.tensors.device_digest": {"import_module"},
}
"""Modules of the core that import by a name: what is declared or installed, or a dependency. It may only shrink."""


def test_imports_by_names_are_made_in_few_modules_of_the_core():
    found = {}
    for name, path in KNOWN.items():
        called = {ast.unparse(each.func).rpartition(".")[2] for each in nodes(path) if isinstance(each, ast.Call)}
        if used := called & {"import_module", "resolve_name", "__import__", "exec", "eval", "find_spec"}:
            found[name] = used
    assert found == IMPORTERS


def test_names_of_plugins_are_not_put_together_in_the_core():
    """Nor are there relative imports, which the other tests do not follow."""
    begin = re.compile(r"(?<![\w.])snapshot_")
    tables = {"snapshot.extensions", "snapshot.events"}  # which have names of packages, and of metrics
    for name, path in KNOWN.items():
        comments = {id(each.value) for each in nodes(path) if isinstance(each, ast.Expr)}
        for node in nodes(path):
            assert not (isinstance(node, ast.ImportFrom) and node.level), f"{name} has a relative import"
            if isinstance(node, ast.Constant) and id(node) not in comments and name not in tables:
                text = node.value.decode("latin-1") if isinstance(node.value, bytes) else node.value
                assert not (isinstance(text, str) and begin.search(text)), f"{name}:{node.lineno}: {text!r}"


def test_imports_of_plugins_by_other_plugins_are_in_functions():
    at_once = {
        f"{name} -> {other}"
        for name, path in PLUGINS.items()
        for node in imported_at_once(parse(path), inside=False)
        for other in ([node.module] if isinstance(node, ast.ImportFrom) and node.module else [])
    }
    assert at_once & DECLARED == set()


def test_imports_of_plugins_by_other_plugins_are_declared():
    found = pairs(
        {
            name: {each for each in edges()[name] if is_plugin(each) and each.split(".")[0] != name.split(".")[0]}
            for name in PLUGINS
        }
    )
    assert found == DECLARED


def test_modules_of_the_core_that_plugins_import_are_listed():
    """tests/contract.txt is what a change of the core may break in plugins. It may only shrink."""
    listed = [line for line in (ROOT / "tests" / "contract.txt").read_text().splitlines() if not line.startswith("#")]
    assert sorted({other for name in PLUGINS for other in edges()[name] if not is_plugin(other)}) == listed


def test_imports_every_package_has_a_layer():
    assert {room_of(name) for name in KNOWN if name not in FACE} == set(FLOOR)


def test_imports_point_down():
    wrong = [
        f"{name} -> {other}"
        for name, found in edges_of_library().items()
        for other in found
        if name not in FACE and FLOOR[room_of(other)] > FLOOR[room_of(name)]
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
    every = KNOWN | PLUGINS
    known = {name: path for name, path in every.items() if name not in FACE}
    assert circles({name: {*imports(path, every)} - {name} for name, path in known.items()}) == {}


def test_imports_of_storages_are_limited():
    outside = {
        other for name, found in edges().items() if name.startswith(STORAGES) for other in found if not is_plugin(other)
    }
    assert {room_of(other) for other in outside} - {"storages"} <= STORAGES_USE


@pytest.mark.parametrize(
    "place",
    [
        "snapshot.manager.policies:KeepEvery",
        "snapshot.manager.policies:KeepLatest",
        "snapshot.manager.policies:Union",
        "snapshot.maps.names:NamePattern",
        "snapshot.maps.recipe:Recipe",
        "snapshot.maps.tensor_map:TensorMap",
        "snapshot.saved:SavedObject",
        "snapshot.state.rng:RNGState",
        "snapshot.state.stateful:StateDict",
    ],
)
def test_classes_that_users_have_pickled_stay_where_they_are(place):
    module, _, name = place.partition(":")
    found = getattr(importlib.import_module(module), name)
    assert (found.__module__, found.__qualname__) == (module, name)


SIZES = {
    ("snapshot.snapshot", False): 32_080,
    ("snapshot.snapshot", True): 44_050,
    ("snapshot.manager.manager", False): 36_860,
    ("snapshot.manager.manager", True): 48_230,
}
"""The most lines, but for comments, that a module imports, by its name, and by whether imports in functions count: a
budget that may only shrink."""


def imported_at_once(node, inside):
    """The statements of a module that run when it is imported, and those in functions if they count."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test):
            continue
        if inside or not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            yield child
            yield from imported_at_once(child, inside)


@cache
def imported_by(module, inside):
    """What a module imports, and the packages in which it is."""
    parts = module.split(".")
    found = {".".join(parts[:count]) for count in range(1, len(parts))}
    for node in imported_at_once(parse(KNOWN[module]), inside):
        if isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{each.name}" for each in node.names)}
        elif isinstance(node, ast.Import):
            found |= {each.name for each in node.names}
    return found & KNOWN.keys()


def count_lines(module):
    """The lines of a module without those that are comments: nobody leaves one out for the sake of a number."""
    return sum(not line.lstrip().startswith("#") for line in KNOWN[module].read_text().splitlines())


@pytest.mark.parametrize(("module", "inside"), SIZES)
def test_imports_of_the_main_modules_do_not_grow(module, inside):
    seen, left = set(), {module}
    while left:
        seen |= left
        left = set().union(*(imported_by(each, inside) for each in left)) - seen
    assert sum(map(count_lines, seen)) <= SIZES[module, inside]


def test_modules_have_at_most_900_lines():
    """No module of the library, or of its plugins, is longer than 900 lines."""
    files = [*KNOWN.values(), *PLUGINS.values()]
    long = {str(path.relative_to(ROOT)): count for path in files if (count := len(path.read_text().splitlines())) > 900}
    assert long == {}


def test_floors_in_the_docs_are_these():
    text = (ROOT / "docs" / "design.md").read_text()
    lines = [line.strip() for line in FLOORS.strip().splitlines()]
    assert "\n".join(f"    {line}" for line in ["plugins", *reversed(lines)]) in text


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


def test_functions_with_more_than_eight_parameters_are_these():
    """`self` and `cls` do not count. A longer list means arguments that belong together, as one value."""
    found = set()
    for tree in ("snapshot", "plugins"):
        for path in (ROOT / tree).rglob("*.py"):
            for node in ast.walk(parse(path)):
                if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                    given = node.args
                    names = [each.arg for each in (*given.posonlyargs, *given.args, *given.kwonlyargs)]
                    extra = [each for each in (given.vararg, given.kwarg) if each is not None]
                    if len([name for name in names if name not in ("self", "cls")]) + len(extra) > 8:
                        found.add(f"{path.relative_to(ROOT)}: {node.name}")
    assert found == {
        "snapshot/manager/manager.py: __init__",
        "snapshot/manager/manager.py: async_take",
        "snapshot/manager/manager.py: take",
        "snapshot/snapshot.py: async_take",
        "snapshot/snapshot.py: convert",
        "snapshot/snapshot.py: diff",
        "snapshot/snapshot.py: take",
        "snapshot/weights.py: load",
    }
