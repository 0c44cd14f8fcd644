"""The reader of docs/reader.py, imported."""

import importlib.util
from pathlib import Path

PATH = Path(__file__).parents[2] / "docs/reader.py"
spec = importlib.util.spec_from_file_location("reader", PATH)
reader = importlib.util.module_from_spec(spec)
spec.loader.exec_module(reader)
