"""WebDAV by webdav4, with safe replacements for its rename, read and remove."""

from __future__ import annotations

import errno
import secrets
from typing import Any
from urllib.parse import quote


def move_file(fs: Any, source: str, path: str) -> None:
    """Rename a file in one step; webdav4's `mv` copies and removes it."""
    fs.client.move(source, path, overwrite=True)


def read_range(fs: Any, path: str, start: int | None, end: int | None) -> bytes:
    """Read a range in one GET; webdav4's own read needs three requests, and does not quote the name."""
    headers = {"Accept-Encoding": "identity"}
    if start is not None and end is not None:
        headers["Range"] = f"bytes={start}-{end - 1}"
    with fs.client.http.stream("GET", fs.client.join_url(path), headers=headers, follow_redirects=True) as answer:
        answer.raise_for_status()
        at = start or 0 if answer.status_code == 206 else 0  # a server without ranges sends the whole file
        found = bytearray()
        for chunk in answer.iter_bytes():
            found += chunk[max((start or 0) - at, 0) :]
            at += len(chunk)
            if end is not None and at >= end:
                break
        return bytes(found if end is None else found[: end - (start or 0)])


def remove_file(fs: Any, path: str) -> None:
    """Remove a file, but never a folder: DELETE would remove its contents, too."""
    if fs.info(path)["type"] == "directory":
        raise IsADirectoryError(errno.EISDIR, "Is a directory")
    fs.rm_file(path)


def remove_folder(fs: Any, path: str) -> None:
    """Remove an empty folder. Rename it first: DELETE would also remove a file that is added after the check."""
    if fs.ls(path, detail=False):
        raise OSError(errno.ENOTEMPTY, "Directory not empty")
    folder, _, name = path.rpartition("/")
    aside = f"{folder}{'/' if folder else ''}.{name}.{secrets.token_hex(8)}.tmp"
    fs.client.move(path, aside)  # from here on no process adds a file
    late = fs.ls(aside, detail=False)
    if late:
        fs.makedirs(path, exist_ok=True)
        for each in late:
            name = quote(each.rstrip("/").rpartition("/")[2])
            fs.client.move(f"{aside}/{name}", f"{path}/{name}")
    fs.rm_file(aside)
