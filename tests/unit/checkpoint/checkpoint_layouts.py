"""Random layouts for checkpoint tests: what each of some ranks holds of a small model.

Tensor parallelism cuts one dimension (evenly or not), pipeline parallelism gives a tensor to some ranks only, data
parallelism either copies a rectangle (replica 0, 1, ...) or cuts the flat values into ranges, as ZeRO does.
"""

from __future__ import annotations

import random
from pathlib import Path

import torch
from torch import Tensor

from megalite.checkpoint.format import BLOCK_BYTES, Manifest
from megalite.checkpoint.loading import plan_reads, run_reads
from megalite.checkpoint.reading import read_manifest
from megalite.checkpoint.saving import SaveJob, describe, make_plan
from megalite.comm.rectangles import TensorShard, range_to_rectangles

Model = dict[str, Tensor]

SHAPES: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
    "embedding.word_embeddings.weight": ((37, 12), torch.float32),
    "layers.0.attention.qkv.weight": ((24, 12), torch.bfloat16),
    "layers.0.mlp.fc1.weight": ((2, 18, 12), torch.float64),
    "layers.0.mlp.fc1.bias": ((2, 18), torch.float32),
    "layers.0.input_norm.weight": ((12,), torch.float32),
    "optimizer/exp_avg/layers.0.mlp.fc1.weight": ((2, 18, 12), torch.float32),
    "optimizer/exp_avg_sq/embedding.word_embeddings.weight": ((37, 12), torch.float32),
    "optimizer/step/layers.0.mlp.fc1.weight": ((), torch.int64),
    "previous/layers.0.input_norm.weight": ((12,), torch.float16),
}


def make_model(seed: int) -> Model:
    """Every element is another value, so that an element in the wrong place shows."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randint(-(2**15), 2**15, shape, generator=generator).to(dtype)
        if shape
        else torch.tensor(7, dtype=dtype)
        for name, (shape, dtype) in SHAPES.items()
    }


def random_layout(model: Model, world: int, rng: random.Random, *, fill: bool) -> list[list[TensorShard]]:
    """What each of `world` ranks holds; zeros unless `fill`."""
    ranks: list[list[TensorShard]] = [[] for _ in range(world)]
    for name, whole in model.items():
        source = whole if fill else torch.zeros_like(whole)
        stage = sorted(rng.sample(range(world), rng.randint(1, world)))
        cuts = rng.choice([n for n in range(1, len(stage) + 1) if len(stage) % n == 0])
        copies = len(stage) // cuts
        dim = rng.randrange(whole.dim()) if whole.dim() else -1
        if dim < 0 or whole.shape[dim] < cuts:
            cuts, copies = 1, len(stage)
        flat = rng.random() < 0.5
        for part in range(cuts):
            block, offset = whole_or_cut(source, dim, part, cuts, rng)
            if flat:
                _deal_ranges(ranks, stage[part::cuts], name, whole, block, offset)
            else:
                for replica, rank in enumerate(stage[part::cuts][:copies]):
                    local = block.clone()
                    if rng.random() < 0.3 and local.dim() == 2:  # a view with other strides
                        local = local.t().contiguous().t()
                    ranks[rank].append(TensorShard(name, tuple(whole.shape), offset, local, replica))
    return ranks


def whole_or_cut(source: Tensor, dim: int, part: int, cuts: int, rng: random.Random) -> tuple[Tensor, tuple[int, ...]]:
    """Part `part` of `cuts` along `dim`, and its offset."""
    if cuts == 1:
        return source, (0,) * source.dim()
    bounds = [source.shape[dim] * i // cuts for i in range(cuts + 1)]
    offset = tuple(bounds[part] if d == dim else 0 for d in range(source.dim()))
    return source.narrow(dim, bounds[part], bounds[part + 1] - bounds[part]), offset


def _deal_ranges(
    ranks: list[list[TensorShard]], owners: list[int], name: str, whole: Tensor, block: Tensor, offset: tuple[int, ...]
) -> None:
    values = block.reshape(-1).clone()
    shape = tuple(block.shape)
    bounds = [values.numel() * i // len(owners) for i in range(len(owners) + 1)]
    for i, rank in enumerate(owners):
        at = bounds[i]
        for piece in range_to_rectangles(shape, bounds[i], bounds[i + 1]):
            place = tuple(a + b for a, b in zip(offset, piece.offset, strict=True))
            local = values[at : at + piece.numel].view(piece.shape)
            ranks[rank].append(TensorShard(name, tuple(whole.shape), place, local))
            at += piece.numel


def holds(model: Model, ranks: list[list[TensorShard]]) -> None:
    """Asserts that every shard holds exactly its rectangle of the model."""
    for shards in ranks:
        for shard in shards:
            place = tuple(slice(a, a + n) for a, n in zip(shard.offset, shard.local.shape, strict=True))
            assert torch.equal(shard.local, model[shard.name][place]), shard.name


def save_as_ranks(
    directory: Path, step: int, ranks: list[list[TensorShard]], *, block_bytes: int = BLOCK_BYTES, meta: object = None
) -> Path:
    """What `Checkpointer.save` does, all ranks one after the other in this process."""
    plan = make_plan([describe(shards) for shards in ranks])
    jobs = [
        SaveJob(
            directory,
            directory / f"iter_{step:07d}.tmp-test{step}",
            step,
            f"id{step}",
            rank,
            plan,
            SaveJob.parts_of(shards, plan.of(rank)),
            meta={"consumed_samples": step, "note": meta},
            files={"tokenizer.json": b'{"model": "bytes"}'},
            block_bytes=block_bytes,
        )
        for rank, shards in enumerate(ranks)
    ]
    jobs[0].staging.mkdir(parents=True)
    problem = jobs[0].try_commit([job.write_part() for job in jobs])
    assert problem is None, problem
    return jobs[0].final


def load_as_ranks(path: Path, ranks: list[list[TensorShard]], *, cast: bool = False) -> Manifest:
    """What `Checkpointer.load` does, all ranks one after the other in this process."""
    manifest = read_manifest(path)
    for shards in ranks:
        for _ in run_reads(path, manifest, plan_reads(manifest, shards, cast=cast, where=str(path))):
            pass
    return manifest
