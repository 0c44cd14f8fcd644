"""The corpus: `python -m tests.corpus` lists its features, and `python -m tests.corpus add NAME` adds a snapshot.

The list is read from the files, without the library. A snapshot that is in the corpus is never taken again.
"""

import contextlib
import hashlib
import json
import sys
import tempfile
from collections import Counter
from pathlib import Path

HERE = Path(__file__).parent
SNAPSHOTS = HERE / "snapshots"
CONTENTS = HERE / "contents"
SUMS = HERE / "SHA256SUMS"
METADATA = ".snapshot_metadata"


def manifests(folder):
    """Yield the main document and the parts of a snapshot, as JSON."""
    yield json.loads((folder / METADATA).read_bytes())
    for path in sorted((folder / "data").glob("*.json")):
        yield json.loads(path.read_bytes())


def features(folder):
    """Return the features of a snapshot: formats, types of entries, dtypes, fields, files."""
    found = Counter()
    for document in manifests(folder):
        found[document.get("format", "a part of a manifest")] += 1
        for entry in [*document["manifest"].values(), *document.get("shared", {}).values()]:
            found.update(f"type {each}" for each in _values(entry, "type"))
            found.update(f"{entry['type']}.{field}" for field in entry if field != "type")
            found.update(f"dtype {dtype}" for dtype in _values(entry, "dtype"))
            found.update(f"serializer {each}" for each in _values(entry, "serializer"))
            found.update(f"kind {each}" for each in _values(entry, "kind"))
            found.update(f"extra.{field}" for extra in _values(entry, "extra") for field in json.loads(extra))
        for file in document.get("files", {}).values():
            found.update(f"file.{field}" for field in file)
        found.update(f"main.{field}" for field in document)
    found.update(f"*{path.suffix or path.name}" for path in folder.rglob("*") if path.is_file())
    return found


def _values(entry, field):
    """Yield the values of a field, at any depth of an entry."""
    if isinstance(entry, dict):
        for name, value in entry.items():
            if name == field:
                yield value if isinstance(value, str) else json.dumps(value)
            yield from _values(value, field)
    elif isinstance(entry, list):
        for each in entry:
            yield from _values(each, field)


def folders():
    """Return the folders of all snapshots, by name."""
    return {str(path.parent.relative_to(SNAPSHOTS)): path.parent for path in sorted(SNAPSHOTS.rglob(METADATA))}


def sums():
    """Return the line of each file, as `sha256sum` prints them."""
    paths = sorted(path for root in (SNAPSHOTS, CONTENTS) for path in root.rglob("*") if path.is_file())
    return [f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.relative_to(HERE).as_posix()}" for path in paths]


def add(name):
    """Take a snapshot into the corpus."""
    from tests.corpus.cases import CASES
    from tests.helpers.rank_pool import Pool

    if (CONTENTS / f"{name}.json").exists():
        sys.exit(f"{name} is in the corpus, and is never taken again")
    with contextlib.ExitStack() as stack, tempfile.TemporaryDirectory() as work:
        contents = CASES[name](Path(work), lambda world: stack.enter_context(Pool(world)))
        SNAPSHOTS.mkdir(exist_ok=True)
        CONTENTS.mkdir(exist_ok=True)
        (Path(work) / name).rename(SNAPSHOTS / name)
        (CONTENTS / f"{name}.json").write_text(json.dumps(contents, indent=0) + "\n")
    SUMS.write_text("\n".join(sums()) + "\n")


def main(arguments):
    match arguments:
        case ["add", *names]:
            for name in names:
                add(name)
        case []:
            total = Counter()
            for name, folder in folders().items():
                found = features(folder)
                total += found
                print(f"{name}: {', '.join(sorted(found))}")
            print(f"\nall {len(folders())} snapshots:")
            for feature, count in sorted(total.items()):
                print(f"{count:6} {feature}")
        case _:
            sys.exit(__doc__)


if __name__ == "__main__":
    main(sys.argv[1:])
