"""`--embedding-offload`: the word embedding of a run, its part in the optimizer's step, and what the log says of it."""

from collections.abc import Callable, Sequence
from dataclasses import astuple
from typing import Any

import torch
from torch import Tensor, nn

from megalite.comm import Axis, ParallelMesh, TensorShard, all_reduce_
from megalite.config import OPTIMIZER_SPECS, Config, rates_of
from megalite.data import BatchLoader
from megalite.engine import rule_maker
from megalite.inventory import WORD_EMBEDDINGS, computations, placement_of, vocabulary
from megalite.microbatch import Microbatch
from megalite.nn import fill
from megalite.observe import Hook, Record, TrainerView
from megalite.parallel.pipeline import replica_axes
from megalite.parallel.rows import Access, CachedRows, HostEmbedding, HostRows, RowRule, Traffic
from megalite.parallel.tensor import LayerContext, parameter_of
from megalite.parallel.tiers import Mover
from megalite.parallel.zero import ShardedOptimizer
from megalite.schedule import FORWARD, GRADIENT_KINDS, RECOMPUTE, StageKey, StagePlacement
from megalite.train.run_data import RunData


def make_rows(
    config: Config, mesh: ParallelMesh, placed: StagePlacement, dtype: torch.dtype, norm_axis: Axis, mover: Mover
) -> CachedRows | None:
    """The rows of this rank; None where other ranks have them. Collective. dtype: of parameters."""
    meta = mover.device.type == "meta"
    model, ctx = config.model, LayerContext(tp=mesh["tp"], dtype=dtype, device=torch.device("meta" if meta else "cpu"))
    family, copies = mesh.family("dense"), replica_axes(mesh, placed)
    replica = first_stage(placed.stages_of(mesh.coordinate("pp")))
    if replica is None:
        return None
    initial = parameter_of(vocabulary(WORD_EMBEDDINGS, model), ctx)
    if not meta:
        fill(WORD_EMBEDDINGS, initial, seed=config.training.seed)
    placement = placement_of(initial)
    rule = RowRule(
        rule_maker(config.optimizer, config.staleness),
        columns=model.hidden_size,
        decays=placement.decay,
        only_decays=OPTIMIZER_SPECS[config.optimizer.optimizer].only_decays,
        rates=rates_of(config)(WORD_EMBEDDINGS, placement.decay),
        dtype=ctx.wide_dtype,
    )
    alike = family.alike(placement.sharded, everywhere=True)
    number = 0
    for axis in alike:
        number = number * axis.size + axis.rank
    first = all(axis.is_first for axis in alike if set(axis.ranks) <= set(norm_axis.ranks))
    return CachedRows(
        HostRows(initial.detach(), rule, trained=placement.valid_shape(tuple(initial.shape))[0]),
        name=WORD_EMBEDDINGS,
        placement=placement,
        slots=config.cached_rows,
        dtype=ctx.dtype,
        gradient_dtype=torch.bfloat16 if config.parallel.grad_reduce_in_bf16 else ctx.wide_dtype,
        mover=mover,
        lookahead=config.optimizer.offload.embedding_lookahead,
        calls=2 if config.parallel.tp_comm_overlap else 1,
        sum_over=[family.shard, family.replicate, *([copies[0]] if 0 in copies else [])],
        counts=first and not replica,
        replica=number + replica,
    )


def first_stage(keys: Sequence[StageKey]) -> int | None:
    """Which replica of the first stage is among these; None: none."""
    return next((replica for stage, replica in keys if stage == 0), None)


def layer_of(rows: CachedRows) -> Callable[[LayerContext], nn.Module]:
    """What `LayerContext.host_embedding` wants."""
    return lambda ctx: HostEmbedding(rows, ctx.tp, ctx.weight_grads, sequence_parallel=ctx.sequence_parallel)


class RowsOptimizer(ShardedOptimizer):
    """A `ShardedOptimizer` that also steps rows on the host.

    rows: their gradients take part in the norm, and are clipped, skipped and counted with all others.
    """

    def __init__(self, *args: Any, rows: CachedRows, **settings: Any) -> None:
        self.rows = rows
        super().__init__(*args, **settings)

    def memory(self) -> dict[str, int]:
        held = super().memory()
        return held | {"offloaded": held["offloaded"] + self.rows.host.nbytes}

    def squares(self, device: torch.device) -> Tensor:
        return super().squares(device) + self.rows.reduce()

    def step(self, *, version: int = 0, decoupled_lr: float | None = None, **numbers: Any) -> None:
        super().step(**numbers, decoupled_lr=decoupled_lr, version=version)  # a device is at work meanwhile
        self.rows.step(**numbers if decoupled_lr is None else numbers | {"lr": decoupled_lr})

    def shards(self) -> list[TensorShard]:
        return [*self.rows.shards(), *super().shards()]

    def after_load(self, version: int = 0) -> None:
        super().after_load(version)
        self.rows.after_load(int(self.step_count))


Watch = Callable[[int, Sequence[Microbatch], BatchLoader], None]
"""Of (the number of a batch's first micro-batch, its micro-batches in host memory, the loader)."""


def watch_of(data: RunData, rows: CachedRows | None, keys: Sequence[StageKey]) -> Watch | None:
    """What tells the rows of a rank with stages `keys`, when a batch has been read, what is used next."""
    config, rank = data.config, data.mesh.coordinate("pp")
    if rows is None:
        return None
    held, key = rows, (0, first_stage(keys))

    def watch(first: int, microbatches: Sequence[Microbatch], loader: BatchLoader) -> None:
        known = [*microbatches, *map(data.cut, loader.peek(config.optimizer.offload.embedding_lookahead))]
        ids = [held.own(mb.tokens.numpy()) for mb in known]
        size, forwards = len(microbatches), {FORWARD, RECOMPUTE}
        program = computations(config, size)
        uses = [  # of the rows in this batch, in the order of the rank's program
            Access(part.microbatch, part.kind in forwards)
            for action in program.order(rank, program.batch(0, start=0, size=size))
            for part in action.computations()
            if part.stage_key == key and part.kind in forwards | GRADIENT_KINDS
        ]
        held.announce(uses, size, first, ids)

    return watch


class TrafficHook(Hook):
    """Adds to a log line how many of the rows that forwards read were in the cache by then, and the bytes of rows and
    gradients that moved in an iteration, of all ranks together."""

    def __init__(self, rows: CachedRows | None) -> None:
        self._rows = rows

    def on_log(self, trainer: TrainerView, record: Record) -> None:
        mine = Traffic()
        if self._rows is not None:
            mine, self._rows.traffic = self._rows.traffic, Traffic()
        total = torch.tensor(astuple(mine), dtype=torch.float64, device=trainer.device)
        all_reduce_(total, trainer.mesh.world)
        uses, hits, up, down = total.tolist()
        record["embedding_hit_rate"] = hits / uses if uses else None
        record["embedding_bytes_up"], record["embedding_bytes_down"] = (n / record["iterations"] for n in (up, down))
