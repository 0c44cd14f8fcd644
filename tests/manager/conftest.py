"""A server for the tests of this folder."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "storage"))
from servers import moto  # noqa: F401 - it is found from here on
