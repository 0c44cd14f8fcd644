"""zstd, an optional dependency: the module, and a compressor for bytes of tensors."""

from __future__ import annotations

from typing import Any

from snapshot.errors import MissingExtraError

WINDOW_LOG = 17
HASH_LOG = 6
"""zstd's tables have few entries, so that a match is always near the end of the last one."""
SHORTEST_MATCH = 7


def load_zstd() -> Any:
    """Return the module `zstandard`."""
    try:
        import zstandard
    except ImportError as error:
        raise MissingExtraError("compression needs zstd; pip install 'snapshot-torch[zstd]'") from error
    return zstandard


def new_compressor() -> Any:
    """Return a compressor that is little more than an entropy coder: small tables, few matches."""
    zstd = load_zstd()
    return zstd.ZstdCompressor(
        compression_params=zstd.ZstdCompressionParameters(
            window_log=WINDOW_LOG,
            hash_log=HASH_LOG,
            chain_log=HASH_LOG,
            min_match=SHORTEST_MATCH,
            strategy=zstd.STRATEGY_FAST,
            target_length=0,
            write_content_size=True,
        )
    )
