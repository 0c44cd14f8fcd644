"""The modules of other folders that the tests of this one import, and servers."""

import sys
from pathlib import Path

TESTS = Path(__file__).parent.parent
for folder in ("storage", "trust", "interop"):
    sys.path.append(str(TESTS / folder))
from servers import moto, nginx  # noqa: E402, F401 - they are found from here on
