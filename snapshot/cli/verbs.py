"""The verbs by name, each with what it does in one line: help lists them without importing any."""

VERBS = {
    "ls": "list what is in a snapshot, or the snapshots in a folder",
    "show": "show one object: what it is, its statistics, some of its values",
    "verify": "read every byte of a snapshot, and compare it with its digest",
    "diff": "what differs between two snapshots",
    "cp": "copy a snapshot from one storage to another",
    "convert": "write a checkpoint in another format: snapshot, safetensors, torch, dcp",
    "report": "draw a snapshot as an HTML page",
    "rm": "remove a snapshot, and what interrupted takes left",
    "prune": "remove the steps of a folder that a policy does not keep",
    "bench": "measure saving and restoring beside raw I/O and other libraries",
    "doctor": "find out what works at a place, how fast, and what would help",
    "completion": "print a script that completes the command's words in a shell",
}
