"""Docstrings, comments, messages and documentation follow the English rule in CONTRIBUTING.md."""

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MODULES = sorted(
    path.relative_to(ROOT)
    for folder in ("snapshot", "plugins")
    for path in (ROOT / folder).rglob("*.py")
    if (ROOT / "snapshot" / "plugins") not in path.parents
)
PAGES = sorted(
    path.relative_to(ROOT)
    for path in (*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"))
    if "_build" not in path.parts
)
MOST_WORDS = 25
NAMES = {"Lightning", "Python"}
"""Names with which a message may begin."""

WORDS = {
    r"whoever|whatever|whichever|whomever": "the actor or the thing",
    r"nobody|somebody|everybody|anybody": "the actor: caller, rank, thread, process",
    r"(?:stands?|stood|standing)(?!-| for| in for)": "is stored, exists, is",
    r"lies|lie|lain": "is stored, is at",
    r"goes|gone": "is deleted, is written, is sent",
    r"told": "sent, reported, given",
    r"(?<!there )(?:is|are|was|were) no(?! longer| more than)": "is not a",
    r"(?:of|by|for) (?:which|whom)": "two sentences",
    r"as they were|as it was|for ever": "unchanged, forever",
    r"so many|so much": "at most N, N bytes",
    r"ours|theirs": "the noun again",
    r"(?:is|are|was|were|be|been|being) made": "created, built, computed",
    r"anew|besides|alike|likewise|thereby|therein|thereof|whence|hence|lest": "a plainer word",
}
"""Patterns that plain English does without, with what to write instead."""

OPENINGS = re.compile(r"(?:What|Whether|Who|Where|How|That|Those|Whose)\b(?!.*\?$)|The same\b")
"""How a docstring must not begin: it names the thing, or says "Return True if"."""


def spoken(text: str) -> str:
    """The prose of a text: code counts as one word, a link as its text."""
    text = re.sub(r"``[^`]*``|`[^`]*`", "`x`", text, flags=re.DOTALL)
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1 ", text)
    return re.sub(r"https?://\S+|\bhref=\S+", "url", text)


def sentences(text: str) -> Iterator[str]:
    """The sentences of a text, its paragraphs and list items apart."""
    for block in re.split(r"\n\s*\n|\n\s*(?=[-*|] |\d+\. |\|)|\|", text):
        yield from (part for part in re.split(r"(?<=[.!?:;])[)\"*_]*\s+", " ".join(block.split())) if part)


def bad_words(text: str) -> Iterator[str]:
    text = " ".join(spoken(text).split())
    for pattern, instead in WORDS.items():
        for found in re.finditer(rf"\b(?:{pattern})\b", text, re.IGNORECASE):
            around = text[max(0, found.start() - 30) : found.end() + 30]
            yield f"{found[0]!r} in {around!r}: write {instead}"


def long_sentences(text: str) -> Iterator[str]:
    for sentence in sentences(spoken(text)):
        count = len(sentence.split())
        if count > MOST_WORDS:
            yield f"{count} words: {sentence[:70]!r}"


def text_of(node: ast.expr) -> str:
    """A string as its reader sees it, values of an f-string as one word."""
    if isinstance(node, ast.JoinedStr):
        return "".join(text_of(part) if isinstance(part, ast.Constant) else "`x`" for part in node.values)
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    return ""


def faults_of_module(path: Path) -> Iterator[str]:
    """Faults in the docstrings, comments and strings of a module."""
    source = (ROOT / path).read_text()
    tree = ast.parse(source)
    inside = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    documented = {
        id(node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
    }
    for node in ast.walk(tree):
        if not isinstance(node, ast.Constant | ast.JoinedStr) or id(node) in inside:
            continue
        text = text_of(node)
        if id(node) in documented:
            prose = re.sub(r"^ *(?:>>>|\.\.\.) .*$|^ {4,}\S.*\n(?=\n|\Z)", "", text, flags=re.MULTILINE)
            if OPENINGS.match(prose):
                yield f"{path}:{node.lineno}: begins with {prose.split()[0]!r}"
            yield from (f"{path}:{node.lineno}: {fault}" for fault in (*bad_words(prose), *long_sentences(prose)))
        elif len(text.split()) > 2:
            yield from (f"{path}:{node.lineno}: {fault}" for fault in bad_words(text))
    for line, comment in comments(source):
        yield from (f"{path}:{line}: {fault}" for fault in (*bad_words(comment), *long_sentences(comment)))
    yield from faults_of_messages(path, tree)


def faults_of_messages(path: Path, tree: ast.Module) -> Iterator[str]:
    """Faults in the form of the messages that a module raises: a capital at the beginning, a dot at the end."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and node.exc.args:
            text = text_of(node.exc.args[0])
            first = text.partition(" ")[0]
            if " " in text and re.fullmatch(r"[A-Z][a-z]+", first) and first not in NAMES:
                yield f"{path}:{node.lineno}: begins with a capital: {text[:40]!r}"
            if " " in text and re.search(r"(?<!\.\.)\.$", text):
                yield f"{path}:{node.lineno}: ends with a dot: {text[-40:]!r}"


def comments(source: str) -> Iterator[tuple[int, str]]:
    """Comments with the line that each begins in; those of consecutive lines are one."""
    begun, last, texts = 0, -1, list[str]()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT or re.match(r"#\s*(?:type:|noqa|pragma|:)", token.string):
            continue
        alone = not token.line[: token.start[1]].strip()
        if texts and not (alone and token.start[0] == last + 1):
            yield begun, "\n".join(texts)
            texts = []
        begun = begun if texts else token.start[0]
        last = token.start[0]
        texts.append(token.string.lstrip("# "))
    if texts:
        yield begun, "\n".join(texts)


def faults_of_page(path: Path) -> Iterator[str]:
    """Faults in the prose of a page: code blocks do not count, nor does what a directive shows."""
    text = (ROOT / path).read_text()
    text = re.sub(
        r"^(`{3,}|~{3,}).*?^\1", lambda found: "\n" * found[0].count("\n"), text, flags=re.DOTALL | re.MULTILINE
    )
    text = re.sub(r"^(?: {4,}|\t)(?![-*] |\d+\.).*$", "", text, flags=re.MULTILINE)
    line = 1
    for paragraph in re.split(r"(\n\s*\n)", text):
        begun = line + len(paragraph) - len(paragraph.lstrip("\n"))
        yield from (f"{path}:{begun}: {fault}" for fault in (*bad_words(paragraph), *long_sentences(paragraph)))
        line += paragraph.count("\n")


@pytest.mark.parametrize("path", MODULES, ids=str)
def test_module_is_in_plain_english(path: Path) -> None:
    assert list(faults_of_module(path)) == []


@pytest.mark.parametrize("path", PAGES, ids=str)
def test_page_is_in_plain_english(path: Path) -> None:
    assert list(faults_of_page(path)) == []


@pytest.mark.parametrize(
    "text",
    [
        "Files that stand here are read.",
        "This is no file.",
        "The rank by which it was written.",
        "It was told to stop, and nobody waits.",
    ],
)
def test_riddles_are_found(text: str) -> None:
    assert list(bad_words(text))


def test_code_and_ordinary_words_are_not_found() -> None:
    assert not list(bad_words("There is no file. It is no longer read. `whoever` stands for a name."))
    assert list(long_sentences("word " * 26 + "."))
    assert not list(long_sentences("word " * 25))
