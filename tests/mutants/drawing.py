"""The places where code can be changed, and the changes: comparisons, conditions, numbers, statements, arguments."""

from __future__ import annotations

import ast
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

_COMPARED: dict[type[ast.cmpop], tuple[type[ast.cmpop], ...]] = {
    ast.Lt: (ast.LtE, ast.GtE),
    ast.LtE: (ast.Lt, ast.Gt),
    ast.Gt: (ast.GtE, ast.LtE),
    ast.GtE: (ast.Gt, ast.Lt),
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
    ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,),
    ast.In: (ast.NotIn,),
    ast.NotIn: (ast.In,),
}
_COUNTED: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
}
_CALLS = {"min": "max", "max": "min", "any": "all", "all": "any"}
_SPOKEN = ("log", "warn", "emit")
"""Calls whose loss changes no result. Their arguments are texts."""


@dataclass(frozen=True)
class Mutant:
    """A change of one place in a module."""

    path: str
    line: int
    what: str
    begin: tuple[int, int]
    end: tuple[int, int]
    """Line and column, in bytes of UTF-8, between which the source is replaced."""
    new: str

    def apply(self, source: str) -> str:
        """Return the source of the module with the change."""
        lines = source.encode().splitlines(keepends=True)
        (first, left), (last, right) = self.begin, self.end
        before = b"".join(lines[: first - 1]) + lines[first - 1][:left]
        after = lines[last - 1][right:] + b"".join(lines[last:])
        return (before + self.new.encode() + after).decode()

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.what}"


def find_mutants(path: str, source: str) -> list[Mutant]:
    """Return all mutants of a module. Some need not compile.

    >>> [str(each) for each in find_mutants("a.py", "def f(x):\\n    return x < 3\\n")]
    ['a.py:2: return x < 3 -> return None', 'a.py:2: x < 3 -> x <= 3', 'a.py:2: x < 3 -> x >= 3', 'a.py:2: 3 -> 4']
    """
    data = source.encode().splitlines(keepends=True)
    found = []
    for node in _walk(ast.parse(source)):
        for new, place in _changes(node):
            assert place.end_lineno is not None
            assert place.end_col_offset is not None
            begin, end = (place.lineno, place.col_offset), (place.end_lineno, place.end_col_offset)
            old = b"".join(data[begin[0] - 1 : end[0]])[begin[1] : end[1] if begin[0] == end[0] else None].decode()
            if old != new:
                found.append(Mutant(path, place.lineno, f"{_short(old)} -> {_short(new)}", begin, end, new))
    return found


def compiles(mutant: Mutant, source: str) -> bool:
    """Return True if a module is still Python with a change."""
    try:
        compile(mutant.apply(source), mutant.path, "exec")
    except (SyntaxError, ValueError):
        return False
    return True


def draw_mutants(root: Path, modules: Sequence[str], count: int, seed: int) -> list[Mutant]:
    """Return random mutants: a module is drawn as often as it has places."""
    sources = {path: (root / path).read_text() for path in modules}
    places: dict[tuple[str, tuple[int, int], tuple[int, int]], list[Mutant]] = {}
    for path, source in sources.items():
        for each in find_mutants(path, source):
            places.setdefault((each.path, each.begin, each.end), []).append(each)
    chance, found = random.Random(seed), list[Mutant]()
    for place in chance.sample(sorted(places), len(places)):
        if len(found) == count:
            break
        drawn = chance.choice(places[place])
        if compiles(drawn, sources[drawn.path]):
            found.append(drawn)
    return found


def _walk(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes of functions, and of what modules and classes compute. Annotations and texts are left out."""
    pending: list[ast.AST] = [tree]
    while pending:
        node = pending.pop(0)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        yield node
        for name, value in ast.iter_fields(node):
            if name in ("annotation", "returns", "decorator_list", "type_comment"):
                continue
            if isinstance(node, ast.Raise) and name in ("exc", "cause"):
                continue  # messages
            if isinstance(value, ast.AST):
                pending.append(value)
            elif isinstance(value, list):
                pending += [each for each in value if isinstance(each, ast.AST)]


def _changes(node: ast.AST) -> Iterator[tuple[str, ast.expr | ast.stmt]]:
    """Yield the new texts for a node, each with the node that it replaces."""
    if isinstance(node, ast.stmt):
        yield from _changed_statements(node)
    elif isinstance(node, ast.expr):
        yield from _changed_operators(node)
        yield from _changed_values(node)
    if isinstance(node, (ast.If, ast.While, ast.IfExp)) and not isinstance(node.test, (ast.Compare, ast.BoolOp)):
        yield f"(not ({ast.unparse(node.test)}))", node.test


def _changed_operators(node: ast.expr) -> Iterator[tuple[str, ast.expr]]:
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        for other in _COMPARED[type(node.ops[0])]:
            yield ast.unparse(ast.Compare(node.left, [other()], node.comparators)), node
    elif isinstance(node, ast.BoolOp):
        other_op = ast.Or() if isinstance(node.op, ast.And) else ast.And()
        yield f"({ast.unparse(ast.BoolOp(other_op, node.values))})", node
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield f"({ast.unparse(node.operand)})", node
    elif isinstance(node, ast.BinOp) and type(node.op) in _COUNTED and not isinstance(node.left, ast.JoinedStr):
        yield f"({ast.unparse(ast.BinOp(node.left, _COUNTED[type(node.op)](), node.right))})", node


def _changed_values(node: ast.expr) -> Iterator[tuple[str, ast.expr]]:
    if isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield str(not node.value), node
    elif isinstance(node, ast.Constant) and isinstance(node.value, int):
        yield str(node.value + 1), node
    elif isinstance(node, ast.Await):
        yield f"({ast.unparse(node.value)})", node
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in _CALLS:
        yield _CALLS[node.func.id], node.func
    elif isinstance(node, ast.Call) and len(node.args) == 2 and not node.keywords:
        first, second = node.args
        if not any(isinstance(each, ast.Starred) for each in node.args) and ast.dump(first) != ast.dump(second):
            yield ast.unparse(ast.Call(node.func, [second, first], [])), node


def _changed_statements(node: ast.stmt) -> Iterator[tuple[str, ast.stmt]]:
    if isinstance(node, ast.Return) and node.value is not None and ast.unparse(node.value) != "None":
        yield "return None", node
    elif isinstance(node, ast.Raise):
        yield "pass", node
    elif isinstance(node, ast.Break):
        yield "continue", node
    elif isinstance(node, ast.Continue):
        yield "break", node
    elif isinstance(node, ast.Expr) and isinstance(node.value, (ast.Call, ast.Await)):
        if not ast.unparse(node).removeprefix("await ").startswith(_SPOKEN):
            yield "pass", node
    elif isinstance(node, (ast.Assign, ast.AugAssign)):
        target = node.targets[0] if isinstance(node, ast.Assign) else node.target
        if isinstance(target, (ast.Attribute, ast.Subscript)):
            yield "pass", node


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= 60 else f"{line[:57]}..."
