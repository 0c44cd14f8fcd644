"""The bytes of data that a snapshot holds."""

import json
from pathlib import Path


def written(path):
    files = json.loads(Path(path, ".snapshot_metadata").read_bytes())["files"]
    return sum(each["size"] - each.get("header", 0) for each in files.values())
