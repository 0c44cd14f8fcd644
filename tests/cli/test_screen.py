"""Tables fit the terminal, and nothing that a name holds can move its cursor."""

import json
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from snapshot.cli.screen import NARROWEST, Column, ScreenTable, as_json, ask, cells, coloured, fit, paint, printable

TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)


@given(TEXTS)
def test_printable_text_is_printable(text):
    shown = printable(text)
    assert shown.isprintable()
    assert shown == text or not text.isprintable()


@given(TEXTS.map(printable), st.integers(3, 50))
def test_fit_cuts_text_in_the_middle_to_the_given_cells(text, most):
    cut = fit(text, most)
    assert cells(cut) <= most
    assert cut == text or (cells(text) > most and ("…" in cut or "~" in cut))


def test_cells_counts_wide_and_combining_characters():
    assert [cells(text) for text in ("abc", "日本", "e\u0301", "")] == [3, 4, 1, 0]
    assert unicodedata.east_asian_width("日") == "W"


@given(st.lists(st.tuples(TEXTS, st.integers(0, 10**12), TEXTS), min_size=1, max_size=8))
def test_screen_table_in_a_pipe_is_complete_and_aligned(rows):
    table = ScreenTable([Column("name", shrinks=True), Column("size", right=True), Column("note", optional=True)])
    for name, number, note in rows:
        table.add(name, str(number), note)
    lines = str(table).split("\n")
    assert len(lines) == len(rows) + 1
    widest = max(cells(printable(name)) for name, _, _ in rows)
    for line, (name, number, note) in zip(lines[1:], rows, strict=True):
        assert line.startswith(printable(name))
        assert str(number) in line
        assert line.rstrip().endswith(printable(note).rstrip()) or not note.strip()
        assert cells(line) >= min(widest, cells(printable(name)))


@pytest.mark.parametrize("columns", [20, 40, 41, 60, 80, 200])
def test_screen_table_is_no_wider_than_the_terminal(columns, terminal):
    terminal(columns)
    table = ScreenTable(
        [
            Column("name", shrinks=True),
            Column("kind", optional=True),
            Column("size", right=True),
            Column("note", optional=True),
        ]
    )
    table.add("model/layers.0.attention/weight" * 3, "Tensor", "1.0 MiB", "shares the bytes of something")
    table.add("b", "Tensor", "12 B", "")
    lines = list(table.lines())
    assert max(map(cells, lines)) <= max(columns, NARROWEST + 2 + len("1.0 MiB"))
    assert all("1.0 MiB" in line or "12 B" in line for line in lines[1:])
    assert ("Tensor" in lines[1]) == (columns >= 40)
    assert ("shares" in lines[1]) == (columns >= 60)


def test_paint_uses_colours_on_a_terminal_or_with_force_color(terminal, monkeypatch, capsys):
    assert paint("x", "red") == "x"
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert coloured()
    terminal(80, colours=True)
    assert paint("x", "red") == "\x1b[31mx\x1b[0m"
    monkeypatch.setenv("TERM", "dumb")
    assert not coloured()
    monkeypatch.setenv("NO_COLOR", "1")
    assert paint("x", "red") == "x"


def test_as_json_holds_only_valid_json():
    value = {"a": [float("nan"), -float("inf"), 1.5, None, True], 3: (1, {"b": complex(1, 2)})}
    assert json.loads(as_json(value)) == {"a": ["nan", "-inf", 1.5, None, True], "3": [1, {"b": "(1+2j)"}]}


def test_ask_answers_no_without_a_terminal(monkeypatch):
    monkeypatch.setattr("sys.stdin", None)
    assert not ask("remove it?")
    monkeypatch.undo()
    assert not ask("remove it?")
