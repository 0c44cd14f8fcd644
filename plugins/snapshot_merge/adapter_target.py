"""Folders of PEFT adapters that a conversion writes."""

from __future__ import annotations

from snapshot.errors import SnapshotError, StorageNotFoundError
from snapshot.formats import dcp_notice, hugging_face
from snapshot.io.loop import run
from snapshot.manifest import document
from snapshot.plan.layout import plan_exact_file
from snapshot.transform.export import Export, ExportPlan, ExportRequest
from snapshot_merge import peft
from snapshot_merge.options import PEFTOptions


def plan(export: Export, request: ExportRequest) -> ExportPlan:
    """Plan the folder of an adapter, with its configuration."""
    config = _read_config(request)
    made = ExportPlan(
        "peft", markers=(peft.CONFIG,), others=(document.METADATA, dcp_notice.METADATA, *hugging_face.NAMES)
    )
    tensors = list(export.named_tensors(made))
    saved = peft.choose_saved([name for name, *_ in tensors], config, export.source.url)
    made.left_out += [f"{path}: is not of the adapter" for name, path, *_ in tensors if name not in saved]
    own = [(saved[name], path, entry, dtype) for name, path, entry, dtype in tensors if name in saved]
    export.add_named(made, own)
    made.files.append((peft.WEIGHTS, plan_exact_file(made.leaves, range(len(made.leaves)))))
    made.last = lambda: [(peft.CONFIG, config)]
    return made


def _read_config(request: ExportRequest) -> bytes:
    """Return the configuration that a target names, or the one beside the source."""
    source, target, name = request.opened, request.target, peft.CONFIG
    storage = source.storage
    if target.format_options is not None:
        if not isinstance(target.format_options, PEFTOptions):
            raise TypeError(f"format_options must be PEFTOptions, got {target.format_options!r}")
        session, name = target.open_file(request.operation, target.format_options.adapter_config)
        storage = session.storage
    try:
        return run(storage.get(name, limit=source.settings.manifest_bytes))
    except StorageNotFoundError as error:
        where = storage.url.join(name)
        raise SnapshotError(f"{where}: is missing; pass format_options=PEFTOptions(adapter_config)") from error
