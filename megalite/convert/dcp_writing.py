"""Directories of torch.distributed.checkpoint, written by torch's own writer, rectangle by rectangle."""

import io
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from megalite.convert.dcp_files import Rectangle


def write_rectangles(folder: Path, parts: Sequence[Rectangle], objects: Mapping[str, Any]) -> None:
    """Writes `.metadata` and one file of all parts and objects (plain values). Memory: one part. Raises OSError."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that one process writes alone
        dcp.save({}, storage_writer=dcp.FileSystemWriter(folder), planner=_Planner(parts, objects))


class _Planner(dcp.DefaultSavePlanner):
    """Plans rectangles and objects; their values are read when they are written."""

    def __init__(self, parts: Sequence[Rectangle], objects: Mapping[str, Any]) -> None:
        super().__init__(flatten_state_dict=False)
        self.parts = {(part.name, part.offset): part for part in parts}
        self.objects = objects

    def create_local_plan(self) -> SavePlan:
        items = [WriteItem(MetadataIndex(name), WriteItemType.BYTE_IO) for name in self.objects]
        for part in self.parts.values():
            at, size = torch.Size(part.offset), torch.Size(part.shape)
            data = TensorWriteData(ChunkStorageMetadata(at, size), TensorProperties(part.dtype), torch.Size(part.whole))
            items.append(WriteItem(MetadataIndex(part.name, at), WriteItemType.SHARD, tensor_data=data))
        self.plan = SavePlan(items)
        return self.plan

    def resolve_data(self, write_item: WriteItem) -> Any:
        if write_item.type == WriteItemType.BYTE_IO:
            torch.save(self.objects[write_item.index.fqn], content := io.BytesIO())
            return content
        part = self.parts[write_item.index.fqn, tuple(write_item.index.offset or ())]
        return part.read().reshape(part.shape).contiguous()
