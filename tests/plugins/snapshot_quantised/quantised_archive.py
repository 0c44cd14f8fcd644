"""The archive of quantised weights."""

from pathlib import Path

ARCHIVE = Path(__file__).with_name("quantised_files.zip")
