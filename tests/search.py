"""The questions of tests/search.txt, asked of the search of built documentation in Chromium.

    python -m sphinx -b html docs FOLDER
    python -m tests.search FOLDER

It prints each question whose first result is another page. The status is 1 if there are more than `TOLERATED`. Without
Chromium, nothing is asked: that is an error if `CI` is set.
"""

import argparse
import os
import shutil
import sys
import tempfile
from pathlib import Path
from urllib.parse import quote

from tests.helpers.browser import open_browser

QUESTIONS = Path(__file__).with_name("search.txt")
TOLERATED = 4
"""Questions that may have another first result. Each of them is one too many."""
FIRST = """
    const link = document.querySelector("#search-results ul.search > li a");
    const status = document.querySelector("#search-results > p.search-summary");
    if (link) return link.getAttribute("href");
    return status && /did not match/.test(status.textContent) ? "nothing" : null;
"""
"""The target of the first result, once there is one."""


def read_questions():
    """Return the pages that answer each question."""
    lines = [line for line in QUESTIONS.read_text().splitlines() if line and not line.startswith("#")]
    pairs = [line.split(" -> ") for line in lines]
    return {question: pages.split(", ") for question, pages in pairs}


def ask(window, html, question):
    """Return the page that is the first result of a search, by its path without a suffix."""
    window.open(f"{(html / 'search.html').as_uri()}?q={quote(question)}")
    return window.until(FIRST).partition("#")[0].partition("?")[0].removesuffix(".html")


def main():
    """Ask all questions, and print what failed."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path, help="the built HTML")
    html = parser.parse_args().folder.resolve()
    programs = [shutil.which(name) for name in ("chromedriver", "chromium")]
    if None in programs:
        print("The search was not asked: there is no chromium, or no chromedriver; .ci/install docs installs them")
        sys.exit(bool(os.environ.get("CI")))
    questions = read_questions()
    with tempfile.TemporaryDirectory() as folder, open_browser(*programs, Path(folder)) as window:
        found = {question: ask(window, html, question) for question in questions}
    misses = {question: page for question, page in found.items() if page not in questions[question]}
    for question, page in misses.items():
        print(f'"{question}" finds {page}, not {" or ".join(questions[question])}')
    print(f"{len(questions) - len(misses)} of {len(questions)} questions find their page first")
    sys.exit(len(misses) > TOLERATED)


if __name__ == "__main__":
    main()
