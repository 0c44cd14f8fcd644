"""Parsing of Azure's XML responses."""

from __future__ import annotations

from urllib.parse import unquote
from xml.etree import ElementTree

from snapshot.errors import StorageError


def read_message(body: bytes) -> str:
    """Return the first line of an error message, without a detail that quotes the signed text."""
    try:
        found = ElementTree.fromstring(body)  # noqa: S314 - the store is trusted with the data anyway
    except ElementTree.ParseError:
        return ""
    message = (found.findtext("Message") or "").partition("\n")[0].strip()
    detail = (found.findtext("AuthenticationErrorDetail") or "").strip()
    return f"{message} {detail}".rstrip() if len(detail) < 200 and "signature found" not in detail else message


def read_name(entry: ElementTree.Element) -> str:
    """Return the name of a blob or folder in a listing."""
    name = entry.find("Name")
    if name is None:
        raise StorageError("the listing has no blob names; the server is not Azure Blob Storage")
    text = name.text or ""
    return unquote(text) if name.get("Encoded") == "true" else text


def is_folder(entry: ElementTree.Element) -> bool:
    """Return True if a blob in a listing stands for a folder."""
    folder = entry.findtext("Metadata/hdi_isfolder") or entry.findtext("Metadata/Hdi_isfolder")
    return folder == "true" or entry.findtext("Properties/ResourceType") == "directory"
