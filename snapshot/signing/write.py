"""Storing a signature: first the leaves, then the signature."""

from __future__ import annotations

from collections.abc import Mapping

from snapshot.aio import in_thread
from snapshot.signing.keys import Signer
from snapshot.signing.statement import Root, encode_signature
from snapshot.signing.tree import FileTree, join_leaves, signature_path, tree_of
from snapshot.storage import Storage


def expect_signable(storage: Storage, signer: Signer, *, leads: bool) -> None:
    """Raise `ValueError` if a take with this storage cannot be signed, or if its leader has no private key."""
    if storage.host:
        raise ValueError(
            "sign cannot be combined with near folders, whose files the uploader may compress: sign the uploaded step "
            "with `snapshot sign`, or take without near="
        )
    if leads and not signer.can_sign:
        raise ValueError("sign must be a private key on rank 0, got a public one")


async def put_leaves(storage: Storage, trees: Mapping[str, FileTree]) -> None:
    """Store the leaves of files. The same files always have the same leaves, so they may replace existing ones."""
    for path, leaves in join_leaves(trees).items():
        await storage.put(path, leaves)


async def put_signature(
    storage: Storage, signer: Signer, save_id: str, manifest: bytes, files: Mapping[str, Root]
) -> None:
    """Sign a manifest and its files, whose leaves are stored."""

    def sign() -> bytes:  # in a thread: the key may be on another machine
        return encode_signature(signer, save_id, tree_of(manifest), files)

    await storage.put(signature_path(save_id), await in_thread(sign))
