"""The two trees of the checkout, for processes that tests start."""

import os
from pathlib import Path

ROOT = Path(__file__).parents[2]
PYTHONPATH = os.pathsep.join([str(ROOT), str(ROOT / "plugins")])
"""Both trees: with the first alone, a child would import the plugins of whichever checkout is installed."""
