"""`python -m snapshot_tiers FOLDER DESCRIPTORS`: the uploader of a host, as a manager starts it.

It is no verb of the command, so it needs no entry point: the process imports the trees that its parent imported.
"""

import logging
import sys

from snapshot.cli import as_command, report_errors
from snapshot.events import log
from snapshot_tiers.uploader_process import serve


def main(folder: str, descriptors: str) -> int:
    """Serve a near folder until no trainer and no step is left. The descriptors are those of its lock and sockets."""
    with as_command():
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
        log.handlers[:] = [handler]
        log.setLevel(logging.INFO)
        serve(folder, [int(each) for each in descriptors.split(",")])
    return 0


if __name__ == "__main__":
    sys.exit(report_errors(lambda: main(*sys.argv[1:])))
