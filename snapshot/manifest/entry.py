"""Base class of all manifest entries."""

from __future__ import annotations

import msgspec


class Entry(msgspec.Struct, tag_field="type", omit_defaults=True, gc=False, forbid_unknown_fields=True):
    """One line of a manifest."""

    replicated = False
    """True if all ranks share the entry. Kinds that several ranks may share have a field of this name."""

    @property
    def type(self) -> str:
        """Kind of the entry in the manifest: `Tensor`, `dict`, `int`, `object`, ...

        >>> from snapshot.manifest.scalars import IntEntry
        >>> IntEntry("3").type
        'int'
        """
        return str(self.__struct_config__.tag)

    @property
    def nbytes(self) -> int:
        """Number of bytes in data files."""
        return 0
