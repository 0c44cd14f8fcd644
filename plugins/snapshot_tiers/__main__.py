"""`python -m snapshot_tiers FOLDER DESCRIPTORS`: the uploader of a host, as a manager starts it.

It is not a verb of the command, so it needs no entry point: the process imports the trees that its parent imported.
"""

import logging
import sys

from snapshot.events import log
from snapshot.io.system import unwind_on_signals
from snapshot_tiers.uploader_process import serve


def main(folder: str, descriptors: str) -> None:
    """Serve a near folder until no trainer and no step is left. The descriptors are those of its lock and sockets."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    log.handlers[:] = [handler]
    log.setLevel(logging.INFO)
    with unwind_on_signals():
        serve(folder, [int(each) for each in descriptors.split(",")])


if __name__ == "__main__":
    main(*sys.argv[1:])
