"""What arguments of several verbs are read by."""

from __future__ import annotations

import argparse
import json
from typing import Any


def add_options(
    parser: argparse.ArgumentParser, purpose: str = "storage_options of the URL", name: str = "--options"
) -> None:
    """`--options`: what the storage plugin should know."""
    parser.add_argument(name, type=_object, default={}, metavar="JSON", help=purpose)


def _object(text: str) -> dict[str, Any]:
    """A JSON object. What it is not is never shown: there are secrets in it."""
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError("is not a JSON object")
    return value
