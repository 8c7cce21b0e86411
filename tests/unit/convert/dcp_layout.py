"""Checkpoints of torch.distributed.checkpoint, written by torch's own writer in rectangles; Megatron-LM's `torch_dist`
among them, with no line of the product."""

from __future__ import annotations

import io
import pickle
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from tests.unit.convert.megatron_layout import Way, arguments, megatron_enum, stage_model

# torchtitan's names of what a Llama of transformers has, by what stands before `.weight`, behind the number of a layer.
TITAN = {
    "model.embed_tokens": "tok_embeddings", "model.norm": "norm", "lm_head": "output",
    "self_attn.q_proj": "attention.wq",
    "self_attn.k_proj": "attention.wk", "self_attn.v_proj": "attention.wv", "self_attn.o_proj": "attention.wo",
    "mlp.gate_proj": "feed_forward.w1", "mlp.down_proj": "feed_forward.w2", "mlp.up_proj": "feed_forward.w3",
    "input_layernorm": "attention_norm", "post_attention_layernorm": "ffn_norm",
}  # fmt: skip
Cuts = dict[str, list[tuple[tuple[int, ...], tuple[int, ...]]]]


class Rectangles(DefaultSavePlanner):
    """Writes each tensor in the rectangles (offset, shape) of `cuts`, whole where there are none; objects pickled."""

    def __init__(self, cuts: Cuts) -> None:
        super().__init__(flatten_state_dict=False)
        self.cuts = cuts

    def create_local_plan(self) -> SavePlan:
        items = []
        for name, value in self.state_dict.items():
            if not isinstance(value, Tensor):
                items.append(WriteItem(MetadataIndex(name), WriteItemType.BYTE_IO))
                continue
            for offset, shape in self.cuts.get(name, [((0,) * value.dim(), tuple(value.shape))]):
                at, chunk = torch.Size(offset), ChunkStorageMetadata(torch.Size(offset), torch.Size(shape))
                data = TensorWriteData(chunk, TensorProperties.create_from_tensor(value), value.shape)
                items.append(WriteItem(MetadataIndex(name, at), WriteItemType.SHARD, tensor_data=data))
        self.plan = SavePlan(items)
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> Any:
        value = self.state_dict[index.fqn]
        if not isinstance(value, Tensor):
            return value
        shape = dict(self.cuts.get(index.fqn, [])).get(tuple(index.offset), value.shape)
        return value[tuple(slice(a, a + n) for a, n in zip(index.offset, shape, strict=True))].clone()

    def transform_object(self, write_item: WriteItem, object: Any) -> Any:
        if write_item.type == WriteItemType.BYTE_IO:
            torch.save(object, content := io.BytesIO())
            return content
        return object


def titan_name(name: str) -> str:
    """torchtitan's name of a tensor of such a Llama."""
    _, layers, inside = name.partition("model.layers.")
    index, _, inside = inside.partition(".") if layers else ("", "", name)
    layer, _, kind = inside.rpartition(".")
    return f"{f'layers.{index}.' if layers else ''}{TITAN[layer]}.{kind}"


def write_dcp(directory: Path, state: dict[str, Any], cuts: Cuts | None = None) -> None:
    writer = dcp.FileSystemWriter(directory, thread_count=2)
    dcp.save(state, storage_writer=writer, planner=Rectangles(cuts or {}), no_dist=True)


def random_cuts(state: dict[str, Any], seed: int) -> Cuts:
    """Every tensor of several dimensions cut once along each of the first two, as layers and tensor parallelism cut."""
    draw, cuts = random.Random(seed), {}
    for name, value in state.items():
        if isinstance(value, Tensor) and value.dim() > 1:
            rows, columns = draw.randint(1, value.shape[0]), draw.randint(1, value.shape[1])
            cuts[name] = [
                ((a, b, *[0] * (value.dim() - 2)), (m, n, *value.shape[2:]))
                for a, m in ((0, rows), (rows, value.shape[0] - rows)) if m
                for b, n in ((0, columns), (columns, value.shape[1] - columns)) if n
            ]  # fmt: skip
    return cuts


def stacked(model: Any, *, mixed: bool = False) -> dict[str, Tensor]:
    """Megatron's tensors of a model of transformers: layers on top of one another, or (mixed) one by one."""
    flat = {n: t for n, t in stage_model(model, Way(names="core-te"), 0, 0, 0).items() if isinstance(t, Tensor)}
    if mixed:
        return flat
    layers = model.config.num_hidden_layers
    found = {name: t for name, t in flat.items() if ".layers." not in name}
    for name in flat:
        if ".layers.0." in name:
            each = [flat[name.replace(".layers.0.", f".layers.{i}.")] for i in range(layers)]
            found[name.replace(".layers.0.", ".layers.")] = torch.stack(each)
    return found


def made_torch_dist(
    root: Path,
    model: Any,
    *,
    mixed: bool = False,
    seed: int = 0,
    as_object: bool = False,
    more: dict[str, Any] | None = None,
    common: dict[str, Any] | None = None,
    **changes: Any,
) -> Path:
    """A run's directory with what else such files hold: states that nobody reads, enums. Returns its iteration's."""
    directory = root / "iter_0000100"
    directory.mkdir(parents=True)
    state: dict[str, Any] = stacked(model, mixed=mixed)
    state |= {"decoder.layers.mlp.linear_fc1._extra_state/shard_0_2": [None], "rng_state/shard_0_1": [torch.ones(4)]}
    state |= more or {}
    args = arguments(model.config, Way(), **changes)
    common = {"args": args, "checkpoint_version": 3.0, "iteration": 100, **(common or {})}
    with pytest.MonkeyPatch.context() as patch:
        args.model_type = megatron_enum(patch)
        if as_object:
            state["common_state/shard_0_1"] = [common]
        else:
            torch.save(common, directory / "common.pt")
        write_dcp(directory, state, random_cuts(state, seed))
    (root / "latest_checkpointed_iteration.txt").write_text("100")
    return directory


def change_metadata(directory: Path, apply: Callable[[Any], None]) -> None:
    """Rewrites the metadata of a checkpoint, changed in place."""
    metadata = pickle.loads((directory / ".metadata").read_bytes())
    apply(metadata)
    (directory / ".metadata").write_bytes(pickle.dumps(metadata))
