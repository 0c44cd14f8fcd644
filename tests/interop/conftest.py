"""The modules of this folder, for its tests to import."""

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

# collecting what is no test would import it a second time, under another name
collect_ignore = [file.name for file in HERE.glob("*.py") if not file.name.startswith("test_")]
