"""Record of an optimizer in a manifest, in addition to its state."""

from __future__ import annotations

import msgspec


class OptimizerRecord(msgspec.Struct, omit_defaults=True, gc=False, forbid_unknown_fields=True):
    """The class of an optimizer, or of several with one state dict, and the dtypes of their parameters."""

    classes: tuple[str, ...]
    """Module and name, such as `torch.optim.adamw.AdamW`. Never imported: only compared and shown."""
    dtypes: tuple[str, ...] = ()
    """Dtypes in the order of the parameters in `param_groups`; a single one if all are equal."""
