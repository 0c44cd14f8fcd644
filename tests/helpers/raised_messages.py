"""A lint: raised messages begin with no capital and end with no dot. `raised_messages.py DIR...` prints the others."""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

NAMES = {"Lightning", "Python"}
"""Names with which a message may begin."""


def shown_text(node: ast.expr) -> str:
    """Return a string as its reader sees it, with a word for each value of an f-string."""
    if isinstance(node, ast.JoinedStr):
        return "".join(shown_text(part) if isinstance(part, ast.Constant) else "`x`" for part in node.values)
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    return ""


def find_faults(path: Path) -> Iterator[str]:
    """Yield the messages of a module that have another form."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and node.exc.args:
            text = shown_text(node.exc.args[0])
            first = text.partition(" ")[0]
            if " " in text and re.fullmatch(r"[A-Z][a-z]+", first) and first not in NAMES:
                yield f"{path}:{node.lineno}: begins with a capital: {text[:40]!r}"
            if " " in text and re.search(r"(?<!\.\.)\.$", text):
                yield f"{path}:{node.lineno}: ends with a dot: {text[-40:]!r}"


if __name__ == "__main__":
    found = [fault for folder in sys.argv[1:] for path in Path(folder).rglob("*.py") for fault in find_faults(path)]
    print(*found, sep="\n")
    sys.exit(bool(found))
