"""The versions of other libraries that an adapter knows."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version

from snapshot.errors import MissingExtraError, SnapshotError


def expect_version(package: str, known: Sequence[str], adapter: str) -> str:
    """Return the version of an installed package.

    Args:
        package: Its name on the index.
        known: The beginnings of the versions that the adapter knows: `"0.19"` for 0.19 and 0.19.8.
        adapter: The name of the adapter, for the error.

    Raises:
        MissingExtraError: The package is not installed.
        SnapshotError: The adapter does not know this version.
    """
    try:
        found = version(package)
    except PackageNotFoundError as error:
        raise MissingExtraError(f"{adapter} needs {package} {' or '.join(known)}, which is not installed") from error
    if not any(found == each or found.startswith(f"{each}.") for each in known):
        raise SnapshotError(
            f"{adapter}: {package} must be of version {' or '.join(known)}, got {found}; install one of these, or a "
            "newer version of snapshot"
        )
    return found
