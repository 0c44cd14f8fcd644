"""How the documentation is built: `python -m sphinx -W -b html docs docs/_build`."""

import re
import tomllib
from importlib import metadata  # and not `version` from it: Sphinx takes that name for a setting
from pathlib import Path

from docutils import nodes
from sphinx import addnodes
from sphinx.transforms import SphinxTransform
from sphinx.util import logging

project = "snapshot"
author = "the snapshot authors"
copyright = "the snapshot authors"
try:
    release = metadata.version("snapshot-torch")
except metadata.PackageNotFoundError:  # built from a checkout that was never installed
    release = "unreleased"

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build"]
default_role = "code"  # docstrings mark code with single backticks, as Markdown does

html_theme = "furo"
html_title = "snapshot"
html_static_path = ["_static"]
html_css_files = ["custom.css"]
html_search_scorer = str(Path(__file__).with_name("scorer.js"))

myst_heading_anchors = 3

autodoc_member_order = "bysource"
autodoc_preserve_defaults = True  # not the repr, which has all fields of an options object
autodoc_typehints = "both"
autodoc_typehints_description_target = "documented"
autodoc_default_options = {"members": True, "undoc-members": False}
python_maximum_signature_line_length = 100
napoleon_numpy_docstring = False

COLON = "\ue000"


def hide_colons(app, what, name, obj, options, lines):
    """Hide colons from Napoleon, which takes the text before a colon in an attribute's docstring for its type."""
    if what in ("attribute", "data", "property"):
        lines[:] = [line.replace(":", COLON) for line in lines]


def show_colons(app, what, name, obj, options, lines):
    lines[:] = [line.replace(COLON, ":") for line in lines]


def adapt_signatures(app, what, name, obj, options, signature, returned):
    """Show no constructor of a class that only the library creates, and no names of constants."""
    if name in ("snapshot.PendingSnapshot", "snapshot.plan.layout.SavePlan"):
        return "", None
    if signature and "TAKE_OPTIONS" in signature:
        return signature.replace("TAKE_OPTIONS", "TakeOptions()"), returned
    return None


PHRASES = Path(__file__).with_name("search.toml")
SEARCHED = tomllib.loads(PHRASES.read_text())
"""Phrases by which each page is found, beside the words on it."""


class AddPhrases(SphinxTransform):
    """Add the phrases of a page to the index, and their words to the search."""

    default_priority = 800  # before Sphinx collects the entries of the index

    def apply(self):
        """Add a node for the index, and one for the search."""
        self.env.note_dependency(str(PHRASES))
        phrases = SEARCHED.get(self.env.docname)
        if phrases:
            [anchor, *_] = next(iter(self.document.findall(nodes.section)))["ids"]
            entries = [("single", phrase, anchor, "main", None) for phrase in phrases]
            self.document.insert(0, addnodes.index(entries=entries))
            words = ", ".join(re.findall(r"\w+", " ".join(phrases)))  # a keyword of several words is never found
            self.document.insert(0, nodes.meta("", name="keywords", content=words))


def expect_pages(app, env):
    """Warn if phrases are for a page that does not exist."""
    for page in sorted(SEARCHED.keys() - env.found_docs):
        logging.getLogger(__name__).warning("search.toml has phrases for %s, which does not exist", page)


FORMER = {
    "start": "",
    "guides": "",
    "integrations": "",
    "migrate": "",
    "reference/cli": "cli/",
    "internals/decisions": "decisions/",
}
"""Folders of pages, and where these pages were."""
FORMER_PAGES = {
    "storage/index": "storage",
    "storage/plugins": "plugins",
    "reference/settings": "reference/options",
    "reference/security": "security",
    "reference/reliability": "reliability",
}
"""Other pages, and where they were."""


def forward_old_addresses(app, exception):
    """Let the address that a page had lead to it, with the section that a link names."""
    if exception is not None or app.builder.format != "html":
        return
    for page in app.env.found_docs:
        folder, _, name = page.rpartition("/")
        former = FORMER_PAGES.get(page, FORMER[folder] + name if folder in FORMER else None)
        if former is None:
            continue
        to = "../" * former.count("/") + page + ".html"
        stub = (app.outdir / former).with_suffix(".html")
        stub.parent.mkdir(exist_ok=True)
        stub.write_text(
            f'<!doctype html><meta charset="utf-8"><title>Moved</title><link rel="canonical" href="{to}">'
            f'<script>location.replace("{to}" + location.hash)</script><p>This page is <a href="{to}">here</a> now.</p>'
        )


def setup(app):
    app.add_transform(AddPhrases)
    app.connect("env-updated", expect_pages)
    app.connect("build-finished", forward_old_addresses)
    app.connect("autodoc-process-signature", adapt_signatures)
    app.connect("autodoc-process-docstring", hide_colons, priority=400)  # napoleon is at 500
    app.connect("autodoc-process-docstring", show_colons, priority=600)
