"""Any optimizer of the table under any stage, with and without tensor parallelism, equals one process (fp64)."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from megalite.comm.layout import Placement
from megalite.comm.mesh import Axis, ParallelMesh
from megalite.comm.world import World
from megalite.gradient import sink_of
from megalite.optim import OPTIMIZERS, Hyperparameters
from megalite.parallel.zero import ParameterBuffers, ShardedOptimizer, ZeroOptions
from megalite.testing import run_ranks, run_single

# name, global shape, the dimension that tensor parallelism cuts
SHAPES: list[tuple[str, tuple[int, ...], int | None]] = [
    ("embedding.word_embeddings.weight", (16, 8), 0),
    ("layers.0.attention.qkv.weight", (24, 8), 0),
    ("layers.0.attention.proj.weight", (8, 8), 1),
    ("layers.0.input_norm.weight", (8,), None),
    ("layers.0.mlp.fc1.weight", (2, 12, 8), 1),
    ("layers.0.mlp.fc2.weight", (8, 12), 1),
    ("layers.1.attention.qkv.weight", (24, 8), 0),
    ("layers.1.mlp.fc1.bias", (12,), 0),
]


def values_of(name: str, shape: tuple[int, ...], draw: int) -> Tensor:
    seed = 100 * draw + [n for n, _, _ in SHAPES].index(name)
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def local_part(whole: Tensor, dim: int | None, tp: Axis) -> Tensor:
    return whole if dim is None else whole.chunk(tp.size, dim)[tp.rank].contiguous()


def make_parameters(tp: Axis) -> list[tuple[str, nn.Parameter]]:
    parameters = []
    for name, shape, dim in SHAPES:
        p = nn.Parameter(local_part(values_of(name, shape, 0), dim, tp))
        offset = tuple(tp.rank * p.shape[d] if d == dim else 0 for d in range(len(shape)))
        place = Placement(shape, offset, tp_replicated=dim is None, decay=name.endswith("weight") and len(shape) > 1)
        p.placement = place  # type: ignore[attr-defined]
        parameters.append((name, p))
    return parameters


def body_train(world: World, name: str, stage: int, tp_size: int) -> list[tuple[str, tuple[int, ...], Tensor]]:
    """Three steps on given gradients; this rank's masters and moments as (name, offset, values)."""
    mesh = ParallelMesh.build(rank=world.rank, size=world.size, tp=tp_size)
    row = OPTIMIZERS[name]
    settings = Hyperparameters(adam_eps=1e-5, tp=mesh.tp)
    parameters = make_parameters(mesh.tp)
    buffers = ParameterBuffers(
        [parameters],
        dp_shard=mesh.dp_shard,
        dp_replicate=mesh.dp_replicate,
        tp=mesh.tp,
        options=ZeroOptions(stage),
        whole=row.whole,
    )
    optimizer = ShardedOptimizer([buffers], make_optimizer=lambda g: row(g, settings), model_axis=mesh.model)
    for step in range(1, 4):
        buffers.begin_batch(1)
        for (label, p), (_, shape, dim) in zip(reversed(parameters), reversed(SHAPES), strict=True):
            sink = sink_of(p)
            assert sink is not None
            sink.add(local_part(values_of(label, shape, step), dim, mesh.tp) / mesh.dp.size)
        buffers.start_reduce()
        buffers.finish_reduce()
        optimizer.step(lr=0.01, weight_decay=0.1)
    with buffers.unsharded():
        for label, p in parameters:
            masters = [s for s in optimizer.shards() if s.name == label]
            for shard in masters:  # what is saved is what computes
                begin = [a - b for a, b in zip(shard.offset, p.placement.offset, strict=True)]  # type: ignore[attr-defined]
                region = tuple(slice(a, a + n) for a, n in zip(begin, shard.local.shape, strict=True))
                assert torch.equal(p.detach()[region], shard.local)
    return [(s.name, s.offset, s.local) for s in optimizer.shards() if s.name != "optimizer/step"]


def assembled(results: list[list[tuple[str, tuple[int, ...], Tensor]]]) -> dict[str, Tensor]:
    shapes = {name: shape for name, shape, _ in SHAPES}
    whole: dict[str, Tensor] = {}
    for shards in results:
        for name, offset, values in shards:
            logical = name.split("/")[-1]
            target = whole.setdefault(name, torch.full(shapes[logical], torch.nan, dtype=torch.float64))
            target[tuple(slice(a, a + n) for a, n in zip(offset, values.shape, strict=True))] = values
    return whole


@pytest.mark.parametrize("name", ["adam", "sgd", "lion", "muon"])
@pytest.mark.parametrize(("size", "tp"), [(2, 1), (4, 1), (4, 2)])
def test_any_optimizer_at_any_stage(name: str, size: int, tp: int) -> None:
    want = assembled([run_single(body_train, name, 0, 1)])
    for stage in range(4):
        got = assembled(run_ranks(body_train, size, name, stage, tp))
        assert got.keys() == want.keys()
        for label in want:
            error = float((got[label] - want[label]).abs().max())
            assert error < 1e-12, f"stage {stage}: {label} is off by {error}"
