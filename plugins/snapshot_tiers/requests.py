"""Requests between the hosts of a run: names of hosts, the files that they offer, and signatures.

A signature proves the knowledge of the run's secret. It has no time, since clocks of hosts differ: a repeated request
returns the same bytes of the same finished file.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import re

STATUS = "status"
"""Name of the description of a host: its steps, with the names and sizes of their files."""
SIGNATURE = "Snapshot-Signature"
"""Header with the signature of a request, and of an answer that has no digests of its own."""
_FILE = re.compile(
    r"/(step-(?:0|[1-9][0-9]{0,17}))/(data/[0-9a-f]{12}-[0-9]+(?:-[0-9]+\.(?:safetensors|bin|stats)|\.json)|\.snapshot_metadata)"
)


def parse_target(target: str) -> tuple[str, str] | None:
    """Return the step's folder and the file that a request names, or None if hosts do not offer that.

    >>> parse_target("/step-7/data/0123456789ab-0-1.safetensors")
    ('step-7', 'data/0123456789ab-0-1.safetensors')
    >>> parse_target("/step-7/../secret")
    """
    found = _FILE.fullmatch(target)
    return (found[1], found[2]) if found else None


def sign(secret: str, *texts: str | bytes) -> str:
    """Return the signature of some texts.

    >>> sign("a", "GET", "/status") == sign("b", "GET", "/status")
    False
    """
    made = hmac.new(secret.encode(), digestmod=hashlib.sha256)
    for text in texts:
        data = text.encode() if isinstance(text, str) else text
        made.update(len(data).to_bytes(8, "big"))
        made.update(data)
    return made.hexdigest()


def is_signed(signature: str | None, secret: str, *texts: str | bytes) -> bool:
    """Return True if a signature is right."""
    return signature is not None and hmac.compare_digest(signature.encode(), sign(secret, *texts).encode())


def host_of(folder: str) -> str:
    """Return a name of a folder that is the same for all processes that see it, and different on every host."""
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        boot = file.read().strip()
    found = os.stat(folder)
    return f"{boot}:{found.st_dev:x}:{found.st_ino:x}"
