"""How the tests are laid out: what several modules need is in a module without tests."""

import ast
from pathlib import Path

HERE = Path(__file__).parent


def imported(path):
    """Yield the full name of each module, or member of a module, that a file imports."""
    package = ["tests", *path.relative_to(HERE).parts[:-1]]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (each.name for each in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) + 1 - node.level] if node.level else []
            yield from (".".join([*above, *filter(None, [node.module]), each.name]) for each in node.names)


def is_in_test_module(name):
    """Return whether a name is that of a test module, or of a member of one."""
    parts = name.split(".")
    files = (HERE.parent.joinpath(*parts[:length]).with_suffix(".py") for length in range(1, len(parts) + 1))
    return any(file.name.startswith("test_") and file.is_file() for file in files)


def test_no_module_imports_a_test_module():
    found = [
        f"{path.relative_to(HERE)} imports {name}"
        for path in sorted(HERE.rglob("*.py"))
        for name in imported(path)
        if is_in_test_module(name)
    ]
    assert not found, "move what they share to a module without tests"


def test_imports_of_test_modules_are_found():
    assert is_in_test_module("tests.test_layout")
    assert is_in_test_module("tests.test_layout.imported")
    assert not is_in_test_module("tests.helpers.processes.test_of")
    assert not is_in_test_module("tests.helpers")
