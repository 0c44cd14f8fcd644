"""`snapshot largest`: the largest tensors of a checkpoint."""

import json

from snapshot import Snapshot
from snapshot.cli.arguments import add_json, add_storage, options_of

DESCRIPTION = "Show the largest tensors of a checkpoint, of this library or of another one."
EXAMPLES = [
    ("largest run/step-100", "the ten largest tensors"),
    ("largest model.safetensors --count 3 --json", "three, for a program"),
]


def add(parser):
    parser.add_argument("path", help="anything that Snapshot(path) opens")
    parser.add_argument("--count", type=int, default=10, metavar="N", help="number of tensors (default: 10)")
    add_json(parser)
    add_storage(parser)


def run(arguments):
    manifest = Snapshot(arguments.path, storage_options=options_of(arguments)).get_manifest()
    sizes = {name: entry.nbytes for name, entry in manifest.items() if entry.is_tensor}
    largest = sorted(sizes.items(), key=lambda each: (-each[1], each[0]))[: arguments.count]
    if arguments.json:
        print(json.dumps(dict(largest)))
    else:
        for name, nbytes in largest:
            print(f"{nbytes:>15,}  {name}")
    return 0
