"""What all entries of a manifest have in common."""

from __future__ import annotations

import msgspec


class Entry(msgspec.Struct, tag_field="type", omit_defaults=True, gc=False, forbid_unknown_fields=True):
    """One line of a manifest."""

    @property
    def type(self) -> str:
        """The kind of entry, as the manifest has it: `Tensor`, `dict`, `int`, `object`, ...

        >>> from snapshot.manifest.scalars import IntEntry
        >>> IntEntry("3").type
        'int'
        """
        return str(self.__struct_config__.tag)

    @property
    def nbytes(self) -> int:
        """How many bytes of the data files it takes."""
        return 0
