"""The names of a take's files: each is known as its own, and no other file is."""

import pytest

from snapshot.save.commit import leader_part_path, own_part_path
from snapshot.save.transaction import belongs_to, save_id_of

ID = "0123456789ab"


@pytest.mark.parametrize("path", [own_part_path(ID, 3), leader_part_path(ID, 3), f"data/{ID}-3-0.safetensors"])
def test_take_file_names_belong_to_their_save_id_and_rank(path):
    assert save_id_of(path) == ID
    assert belongs_to(path, ID, 3)
    assert belongs_to(path, ID, None)
    assert not belongs_to(path, ID, 33)
    assert not belongs_to(path, "ba9876543210", 3)


@pytest.mark.parametrize(
    "path", ["data/notes.txt", ".take-notes", f"data/{ID}-x-0.bin", f"more/data/{ID}-0-0.bin", f"data/{ID}-0-0.bin.bak"]
)
def test_save_id_of_foreign_files_is_none(path):
    assert save_id_of(path) is None
