"""The real DistributedCheckpointer of torchtune, over snapshots.

python on_torchtune.py FOLDER
"""

import sys
import warnings

from tests.helpers.missing_packages import stand_in_for

stand_in_for("datasets", "torchao", "torchvision", "sentencepiece", "tiktoken", "blobfile", "omegaconf", "PIL")
stand_in_for("kagglehub", "tokenizers", "torchdata", "tyro")
warnings.simplefilter("ignore")

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torchtune.training.checkpointing._checkpointer import DistributedCheckpointer  # noqa: E402

from snapshot import Snapshot  # noqa: E402
from snapshot_trainers.torchtune import use_snapshots  # noqa: E402


def main(folder):
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", 1), rank=0, world_size=1)
    use_snapshots()
    checkpointer = DistributedCheckpointer(folder, f"{folder}/out")
    (checkpointer._output_dir).mkdir()
    for epoch in range(3):
        state = {"model": {"w": torch.full((1000,), float(epoch))}, "epoch": epoch}
        checkpointer.save_checkpoint(state, epoch, save_async=epoch == 1)
    if checkpointer._checkpoint_future is not None:
        checkpointer._checkpoint_future.result()
    live = {"model": {"w": torch.zeros(1000)}, "epoch": -1}
    assert Snapshot(f"{folder}/out/dist_epoch_2").verify()
    loaded = DistributedCheckpointer(folder, f"{folder}/out").load_checkpoint(live)
    assert loaded["epoch"] == 2, loaded["epoch"]
    assert loaded["model"]["w"].eq(2).all()
    Snapshot(f"{folder}/out/dist_epoch_2").delete()  # with the notice that it was found by
    loaded = DistributedCheckpointer(folder, f"{folder}/out").load_checkpoint(live)
    assert loaded["epoch"] == 1, loaded["epoch"]


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
