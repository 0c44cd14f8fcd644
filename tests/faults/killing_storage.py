"""A storage that kills its process, and that a writer process can import: the environment says whom, and when."""

import os

from snapshot.io.registry import open_storage
from snapshot.io.storage import URL
from snapshot.testing import TappedStorage
from tests.faults.killed_jobs import Kill

_taps = []  # of this process: all its operations count together


class KillingStorage(TappedStorage):
    """`KILLING` is who is to die (`parent` or `writer`), at which operation, and the parent's process id."""

    def __init__(self, url, options, context):
        who, nth, parent = os.environ["KILLING"].split()
        mine = (who == "parent") == (os.getpid() == int(parent))
        if not _taps:
            _taps.append(Kill(int(nth) if mine else 0))
        super().__init__(open_storage(URL.parse(url.reveal().partition("+")[2]), options, context), *_taps)
