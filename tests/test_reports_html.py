"""Reports in a notebook: `_repr_html_` shows what the text does, with everything escaped."""

from html.parser import HTMLParser

import pytest
import torch

from snapshot import RestoreOptions, Snapshot, StateDict
from snapshot.reports import Diff, Line, RestoreReport


class Page(HTMLParser):
    """The texts of a page and its tags, which must be closed in order."""

    def __init__(self, source):
        super().__init__()
        self.open, self.tags, self.texts = [], [], []
        self.feed(source)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.open.append(tag)
        self.tags.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append(data)


@pytest.fixture
def two_snapshots(tmp_path):
    one = Snapshot.take(tmp_path / "one", {"m": StateDict({"a": torch.zeros(3), "gone": 1, "<b>&": 1})})
    two = Snapshot.take(tmp_path / "two", {"m": StateDict({"a": torch.ones(3), "new": 1, "<b>&": 2})})
    return one, two


def test_report_html_shows_the_summary_and_each_detail(two_snapshots):
    one, two = two_snapshots
    live = StateDict({"a": torch.zeros(3, dtype=torch.float64), "kept": 1})
    report = two.restore({"m": live}, strict=False, options=RestoreOptions(cast="same_kind"))
    assert len(report.lines) > 1
    page = Page(report._repr_html_())
    assert page.texts[0] == report.summary
    for line in report:
        assert {line.kind, line.path, line.detail} - {""} <= set(page.texts)
    for made in (one.verify(), one.report):
        assert Page(made._repr_html_()).texts == [made.summary]


def test_diff_html_has_a_coloured_row_for_each_change_and_escapes_names(two_snapshots):
    one, two = two_snapshots
    found = Snapshot.diff(one, two)
    source = found._repr_html_()
    page = Page(source)
    assert set(page.tags) == {"div", "strong", "table", "tr", "td", "code"}
    assert page.tags.count("tr") == len(found)
    assert source.count("color:") == len(found)
    for change in found:
        assert change.kind in page.texts
        assert change.path in page.texts
    assert any("<b>" in text for text in page.texts)


def test_html_of_a_long_report_ends_like_its_text():
    lines = tuple(Line("missing", f"m/{number}") for number in range(80))
    page = Page(RestoreReport(0, 0, 0, {}, lines)._repr_html_())
    assert page.texts[-1] == "... 30 more"
    assert page.tags.count("tr") == 51


def test_html_of_equal_snapshots_has_no_table():
    assert "table" not in Diff("a", "b", (), 3)._repr_html_()
