"""URLs of storages: parsed once, joined with paths, and printed without their secrets."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote, unquote

_SECRET_WITH_SLASH = re.compile(r"[^/:@]+:(?!\d+(?:/|$))[^@]*@")
"""`name:secret@` where the secret has a `/`, which should be written `%2F`, but people paste keys as they are."""
_NAMES = {"abfs", "abfss", "sftp", "ssh", "ftp"}
"""Schemes where what stands before an `@` is a container or a user; elsewhere it may be a token."""
_ONE_SLASH = re.compile(r"[A-Za-z][A-Za-z0-9+.\-]+:/(?!/)")
_SCHEME = re.compile(r"^([A-Za-z][A-Za-z0-9+.\-]*(?:::[A-Za-z][A-Za-z0-9+.\-]*)*)://")


@dataclass(frozen=True, slots=True)
class URL:
    """Where something is stored. Its text hides passwords and query strings; `reveal()` gives all of it to a client."""

    scheme: str
    location: str
    """What follows `scheme://`, without the query; for `file` a path of the file system."""
    query: str = ""

    @classmethod
    def parse(cls, text: str) -> URL:
        """Read `scheme://location?query`; anything without a scheme is a path of the file system.

        >>> str(URL.parse("s3://key:secret@bucket/run?token=abc"))
        's3://key:***@bucket/run?***'
        """
        if not text:
            raise ValueError("an empty path; the current folder is '.'")
        found = _SCHEME.match(text)
        if not found:
            if _ONE_SLASH.match(text):
                scheme, _, rest = text.partition(":/")
                raise ValueError(
                    f"{scheme}:/...: a URL has two slashes behind its scheme, {scheme}://...; and a path of the file "
                    f"system that begins so is ./{scheme}:/..."
                )
            return cls("file", str(Path(os.path.expanduser(text)).absolute()))  # as in shells, ~nobody is a name
        scheme, rest = found[1].lower(), text[found.end() :]
        if scheme == "file":
            if not rest.startswith("/"):
                host, slash, path = rest.partition("/")
                if host != "localhost" or not slash:
                    raise ValueError(f"{text!r}: a file URL has three slashes, as in file:///absolute/path")
                rest = "/" + path
            return cls("file", unquote(rest))
        location, _, query = rest.partition("?")
        return cls(scheme, location.rstrip("/"), query)

    def join(self, path: str) -> URL:
        """Return the URL of a file below this one; the query stays behind the path."""
        return URL(self.scheme, f"{self.location.rstrip('/')}/{path}" if path else self.location, self.query)

    def reveal(self) -> str:
        """Return the whole text, secrets included: for a client's eyes only. Parsing it gives this URL again."""
        if self.scheme == "file":
            return f"file://{quote(self.location)}"
        return f"{self.scheme}://{self.location}" + (f"?{self.query}" if self.query else "")

    def apart(self) -> tuple[str, str]:
        """Return what stands before the `@` of a host or bucket, and all that follows it; an `@` in a path is of the
        path."""
        end = self.location.partition("/")[0].rfind("@")
        if end < 0 and (pasted := _SECRET_WITH_SLASH.match(self.location)):
            end = pasted.end() - 1
        return self.location[: max(end, 0)], self.location[end + 1 :]

    def __str__(self) -> str:
        if self.scheme == "file":
            return self.location
        user, rest = self.apart()
        if len(user) + len(rest) < len(self.location):
            rest = f"@{rest}"
        if user:
            name, colon, _ = user.partition(":")
            user = f"{name}:***" if colon else user if self.scheme in _NAMES else "***"
        return f"{self.scheme}://{user}{rest}" + ("?***" if self.query else "")

    def __repr__(self) -> str:
        return f"URL({str(self)!r})"
