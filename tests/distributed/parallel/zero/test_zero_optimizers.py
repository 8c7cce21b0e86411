"""Any optimizer of the table under any stage, with and without tensor parallelism, equals one process (fp64)."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from megalite.comm.mesh import Axis, ParallelMesh
from megalite.comm.world import World
from megalite.config.optimizer import OptimizerArgs, OptimizerConfig
from megalite.config.update_rules import OPTIMIZER_SPECS
from megalite.gradient import sink_of
from megalite.inventory.parameter_placement import ParameterPlacement
from megalite.optim import OPTIMIZERS
from megalite.parallel.zero import ParameterBuffers, ShardedOptimizer, StageOptions, ZeroOptions
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


def make_parameters(tp: Axis, dtype: torch.dtype) -> list[tuple[str, nn.Parameter]]:
    parameters = []
    for name, shape, dim in SHAPES:
        p = nn.Parameter(local_part(values_of(name, shape, 0), dim, tp).to(dtype))
        offset = tuple(tp.rank * p.shape[d] if d == dim else 0 for d in range(len(shape)))
        cut = frozenset() if dim is None else tp.names
        place = ParameterPlacement(shape, offset, cut, decay=name.endswith("weight") and len(shape) > 1)
        p.placement = place  # type: ignore[attr-defined]
        parameters.append((name, p))
    return parameters


State = list[tuple[str, tuple[int, ...], tuple[int, ...], Tensor]]


def body_train(
    world: World,
    name: str,
    stage: int,
    tp_size: int,
    replicate: int = 1,
    offload: float = 0.0,
    path: str | None = None,
    bucket_size: int | None = None,
    dtype: torch.dtype = torch.float64,
    decay: float = 0.1,
) -> State:
    """Three steps on given gradients; this rank's masters and moments as (name, whole shape, offset, values)."""
    mesh = ParallelMesh.build(rank=world.rank, size=world.size, tp=tp_size, dp_replicate=replicate)
    row = OPTIMIZERS[name.removesuffix("*")]
    settings = OptimizerConfig(lr=1.0, args=OptimizerArgs(adam_eps=1e-5, adafactor_scale_parameter=name.endswith("*")))
    parameters = make_parameters(mesh["tp"], dtype)
    buffers = ParameterBuffers(
        [parameters],
        axes=mesh.family(),
        options=ZeroOptions(stage, bucket_size=200 if offload else bucket_size),
        pipeline_stage=StageOptions(whole=OPTIMIZER_SPECS[name.removesuffix("*")].whole),
    )
    optimizer = ShardedOptimizer(
        [buffers],
        make_optimizer=lambda g: row(g, settings),
        norm_axis=mesh.world,
        offload_fraction=offload,
        offload_path=path,
    )
    for step in range(1, 4):
        buffers.gradients.begin_batch(1)
        for (label, p), (_, shape, dim) in zip(reversed(parameters), reversed(SHAPES), strict=True):
            sink = sink_of(p)
            assert sink is not None
            sink.add(local_part(values_of(label, shape, step), dim, mesh["tp"]).to(dtype) / mesh.size("dp"))
        buffers.gradients.start_reduce()
        buffers.gradients.finish_reduce()
        optimizer.step(lr=0.01, weight_decay=decay)
    buffers.weights.unshard()
    for label, p in parameters:
        masters = [s for s in optimizer.shards() if s.name == label]
        for shard in masters:  # what is saved is what computes
            begin = [a - b for a, b in zip(shard.offset, p.placement.offset, strict=True)]  # type: ignore[attr-defined]
            region = tuple(slice(a, a + n) for a, n in zip(begin, shard.local.shape, strict=True))
            assert torch.equal(p.detach()[region], shard.local)
    return [(s.name, s.global_shape, s.offset, s.local) for s in optimizer.shards() if s.name != "optimizer/step"]


def assembled(results: list[State]) -> dict[str, Tensor]:
    whole: dict[str, Tensor] = {}
    for shards in results:
        for name, shape, offset, values in shards:
            target = whole.setdefault(name, torch.full(shape, torch.nan, dtype=torch.float64))
            target[tuple(slice(a, a + n) for a, n in zip(offset, values.shape, strict=True))] = values
    return whole


def assert_same(got: dict[str, Tensor], want: dict[str, Tensor], what: str) -> None:
    assert got.keys() == want.keys()
    for label in want:
        error = float((got[label] - want[label]).abs().max())
        assert error < 1e-12, f"{what}: {label} is off by {error}"


@pytest.mark.in_turn
@pytest.mark.parametrize("name", ["adam", "sgd", "lion", "muon", "soap", "shampoo", "adafactor", "adafactor*"])
@pytest.mark.parametrize(("size", "tp"), [*(pytest.param(size, 1, marks=pytest.mark.full) for size in (2, 4)), (4, 2)])
def test_any_optimizer_at_any_stage(name: str, size: int, tp: int) -> None:
    want = assembled([run_single(body_train, name, 0, 1)])
    for stage in range(4):
        assert_same(assembled(run_ranks(body_train, size, name, stage, tp)), want, f"stage {stage}")


def test_adafactor_with_parts_on_the_host_and_with_replicas_of_shards() -> None:
    want = assembled([run_single(body_train, "adafactor", 0, 1)])
    assert_same(assembled(run_ranks(body_train, 2, "adafactor", 1, 1, 1, 0.5)), want, "offloaded")
    assert_same(assembled(run_ranks(body_train, 4, "adafactor", 2, 1, 2)), want, "hybrid")


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-6)])
@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize("scale_parameter", [False, True])
def test_adafactor_is_that_of_transformers(
    scale_parameter: bool, decay: float, dtype: torch.dtype, tolerance: float
) -> None:
    """Sharded over two ranks, against the public implementation, whose decay takes the rate of the step: relative with
    `scale_parameter`."""
    optimization = pytest.importorskip("transformers.optimization")
    parameters = [(n, nn.Parameter(values_of(n, shape, 0).to(dtype))) for n, shape, _ in SHAPES]
    matrices = [p for n, p in parameters if n.endswith("weight") and p.dim() > 1]
    others = [p for _, p in parameters if not any(p is matrix for matrix in matrices)]
    groups = [{"params": matrices, "weight_decay": decay}, {"params": others, "weight_decay": 0.0}]
    rule = optimization.Adafactor(
        groups, lr=0.01, scale_parameter=scale_parameter, relative_step=False, warmup_init=False
    )
    for step in range(1, 4):
        for n, p in parameters:
            p.grad = values_of(n, tuple(p.shape), step).to(dtype)
        rule.step()
    name = "adafactor*" if scale_parameter else "adafactor"
    found = assembled(run_ranks(body_train, 2, name, 1, 1, dtype=dtype, decay=decay))
    for n, p in parameters:
        assert float((found[n] - p.detach()).abs().max()) < tolerance, n
        state = {label: value for label, value in rule.state[p].items() if label.startswith("exp_avg_sq")}
        assert state
        for label, value in state.items():
            away = (found[f"optimizer/{label}/{n}"] - value).abs() / value.abs().clamp(min=1.0)
            assert float(away.max()) < tolerance, (label, n)


@pytest.mark.parametrize(
    "name", [n if n in ("adam", "soap") else pytest.param(n, marks=pytest.mark.full) for n in OPTIMIZERS if n != "kfac"]
)
def test_a_file_changes_no_bit(name: str, tmp_path: Path, full: bool) -> None:
    for stage, tp in [(1, 1), (2, 2), (3, 1)] if full else [(2, 1)]:
        plain = assembled(run_ranks(body_train, 2 * tp, name, stage, tp, bucket_size=200))
        moved = assembled(run_ranks(body_train, 2 * tp, name, stage, tp, 1, 1.0, str(tmp_path)))
        assert plain.keys() == moved.keys()
        for label, value in plain.items():
            assert torch.equal(moved[label], value), f"stage {stage}, tp {tp}: {label}"
    assert not any(tmp_path.iterdir()), "the files are removed at the end"
