"""Verbs by name, each with a summary, so that help can list them without importing any."""

VERBS = {
    "ls": "list the contents of a snapshot, or the snapshots in a folder",
    "show": "show one object: its description, statistics and some of its values",
    "verify": "read every byte of a snapshot, and compare it with its digest",
    "sign": "sign a snapshot, or create a key for that",
    "diff": "show the differences between two snapshots",
    "cp": "copy a snapshot from one storage to another",
    "convert": "write a checkpoint in another format: snapshot, safetensors, torch, dcp",
    "merge": "average checkpoints, or add them with weights",
    "report": "draw a snapshot as an HTML page",
    "ui": "show the steps of a run in a browser: metrics, differences, health of tensors",
    "rm": "remove a snapshot, and leftovers of interrupted takes",
    "prune": "remove the steps of a folder that a policy does not keep",
    "upload": "upload near steps of a run, as its trainer's uploader does",
    "attempts": "show the attempts of a run with near folders, and choose one after a fork",
    "publish": "publish a checkpoint as the next version of weights for inference engines",
    "pull": "bring a published version of weights into a local folder",
    "bench": "measure saving and restoring, compared with raw I/O and other libraries",
    "doctor": "test which operations work at a URL, how fast, and what would help",
    "completion": "print a script that completes the command's words in a shell",
}
