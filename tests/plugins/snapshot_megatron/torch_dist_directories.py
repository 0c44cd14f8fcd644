"""Directories as Megatron-core's `torch_dist` writes them, written by torch alone: tensors in any pieces, objects, and
`common.pt`."""

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType


class Pieces:
    """A tensor in pieces, as the ranks of a job have it, for `torch.distributed.checkpoint`."""

    def __init__(self, shape, pieces):
        """`pieces`: offsets -> the tensor there."""
        self.shape, self.pieces = torch.Size(shape), {torch.Size(at): piece for at, piece in pieces.items()}

    def __create_write_items__(self, name, _):
        return [
            WriteItem(
                MetadataIndex(name, at), WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    ChunkStorageMetadata(at, piece.shape), TensorProperties.create_from_tensor(piece), self.shape
                ),
            )
            for at, piece in self.pieces.items()
        ]  # fmt: skip


class Planner(dcp.DefaultSavePlanner):
    def lookup_object(self, index):
        held = self.state_dict[index.fqn]
        return held.pieces[index.offset] if isinstance(held, Pieces) else super().lookup_object(index)


def by_layers(tensor, axes=1, parts=1):
    """Return a tensor with a piece for each index of its first axes, each cut in parts on the next one."""
    pieces = {}
    for index in torch.cartesian_prod(*(torch.arange(size) for size in tensor.shape[:axes])).view(-1, axes).tolist():
        rest = tensor[tuple(slice(at, at + 1) for at in index)]
        begin = 0
        for part in rest.chunk(parts, axes):
            pieces[*index, begin, *(0,) * (tensor.dim() - axes - 1)] = part.contiguous()
            begin += part.shape[axes]
    return Pieces(tensor.shape, pieces)


def write_directory(folder, state, common=None):
    """Write tensors, `Pieces` and objects by name, in their order, and common state."""
    planner = Planner(flatten_state_dict=False, flatten_sharded_tensors=False)
    dcp.save(state, storage_writer=dcp.FileSystemWriter(folder, thread_count=1), planner=planner, no_dist=True)
    torch.save({"iteration": 3, **(common or {})}, folder / "common.pt")
