"""Check the local links, images and anchors of built documentation: `python tests/helpers/links.py FOLDER`."""

import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit


class Page(HTMLParser):
    """The link targets and the anchors of one page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.targets: list[str] = []
        self.anchors: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name in {"href", "src"} and value and tag != "base":
                self.targets.append(value)
            elif name in {"id", "name"} and value:
                self.anchors.add(value)


def broken_links(folder: Path) -> list[str]:
    """Return a line for each local target that does not exist below a folder of HTML pages."""
    pages = {path: Page(path.read_text()) for path in sorted(folder.rglob("*.html"))}
    broken = []
    for path, page in pages.items():
        for target in page.targets:
            parts = urlsplit(target)
            if parts.scheme or parts.netloc:
                continue
            there = path if not parts.path else (path.parent / unquote(parts.path)).resolve()
            if not there.exists():
                broken.append(f"{path.relative_to(folder)}: {target} does not exist")
            elif parts.fragment and there in pages and unquote(parts.fragment) not in pages[there].anchors:
                broken.append(f"{path.relative_to(folder)}: {target} has no such anchor")
    return broken


def main() -> None:
    """Print the broken links of a folder, and fail if there are any."""
    faults = broken_links(Path(sys.argv[1]).resolve())
    print("\n".join(faults) or "Every local link leads to a page and an anchor")
    sys.exit(bool(faults))


if __name__ == "__main__":
    main()
