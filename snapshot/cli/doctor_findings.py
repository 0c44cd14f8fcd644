"""Findings of `snapshot doctor`, in order."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from snapshot.url import URL

MiB = 1 << 20


@dataclass
class Findings:
    """Findings, in order."""

    checks: list[dict[str, Any]] = field(default_factory=list)
    speeds: list[dict[str, Any]] = field(default_factory=list)
    advice: list[str] = field(default_factory=list)
    settings: list[str] = field(default_factory=list)

    def note(self, name: str, text: str, ok: bool | None = True) -> None:
        """Add a finding: good, bad, or (None) neither."""
        self.checks.append({"check": name, "ok": ok, "text": text})

    @property
    def ok(self) -> bool:
        return all(check["ok"] is not False for check in self.checks)


def existing_folder(url: URL) -> Path:
    """Return the folder at a URL, or its nearest existing parent."""
    folder = Path(url.location)
    while not folder.exists():
        folder = folder.parent
    return folder
