"""The parallel section: how the model and the batch are spread over ranks, and by which pipeline schedule."""

import math
from collections.abc import Mapping
from typing import Any

from megalite import schedule as schedules
from megalite.config.schema import OneOf, Section, Spelled, option
from megalite.config.stage_meshes import StageMesh, parse_meshes

SCHEDULES = tuple(schedules.SCHEDULES)
SCHEDULE_ALIASES: Mapping[str, str] = schedules.ALIASES


class StageLayout(OneOf):
    """Layers of each pipeline stage, balanced where unset."""

    decoder_first_pipeline_num_layers: int | None = option(
        None, "layers of the first stage; the others share the rest evenly", ge=0, way="ends"
    )
    decoder_last_pipeline_num_layers: int | None = option(
        None, "layers of the last stage; the others share the rest evenly", ge=0, way="ends"
    )
    pipeline_model_parallel_layout: str | None = option(
        None, "stages written out, e.g. 'Et*3|(tt|)*14tL': E embedding, t layer, L loss, | next stage"
    )


CP_COMM_TYPES = ("p2p", "a2a", "all_gather", "a2a+p2p")


class ContextParallelism(Spelled):
    """Context parallelism: ranks that share each sequence, and how attention sees the whole of it."""

    context_parallel_size: int = option(1, "ranks that share each sequence", ge=1)
    cp_comm_type: str = option(
        "p2p",
        "how attention sees a sequence that ranks share: p2p passes keys and values round a ring, a2a trades tokens "
        "for heads, all_gather gathers keys and values, a2a+p2p trades inside of groups and passes round between them",
        choices=CP_COMM_TYPES,
    )
    hierarchical_context_parallel_sizes: tuple[int, ...] | None = option(
        None, "of a2a+p2p: ranks that trade tokens for heads, then ranks of the ring", ge=1
    )

    @property
    def traders(self) -> int:
        """Ranks that trade tokens for heads."""
        if self.cp_comm_type == "a2a+p2p":
            sizes = self.hierarchical_context_parallel_sizes
            return sizes[0] if sizes else 1
        return self.context_parallel_size if self.cp_comm_type == "a2a" else 1

    @property
    def ring(self) -> int:
        """Ranks round which keys and values are passed, or over which they are gathered."""
        return self.context_parallel_size // self.traders


class ExpertParallelism(Spelled):
    """Expert parallelism: how the ranks of a pipeline stage share the experts."""

    expert_model_parallel_size: int = option(1, "ranks over which experts are dealt out", ge=1)
    expert_tensor_parallel_size: int | None = option(
        None, "ranks that share each expert: 1 or `tensor_model_parallel_size`; unset: the latter", ge=1
    )
    moe_token_dispatcher_type: str = option(
        "alltoall",
        "how tokens travel to their experts: by messages of torch's (alltoall), or carried by the package deep_ep "
        "(flex; in bf16; no GPU has run it yet)",
        choices=("alltoall", "flex"),
    )


class DeviceOptions(Spelled):
    """Devices, their memory, and the library by which ranks talk."""

    device: str = option("auto", "auto: cuda where torch sees a GPU", choices=("auto", "cpu", "cuda"))
    distributed_backend: str | None = option(None, "unset: nccl on cuda, gloo on cpu", choices=("nccl", "gloo"))
    deterministic_mode: bool = option(
        False,
        "kernels with a fixed order of additions alone, so that a run on GPUs repeats and resumes bit for bit; slower, "
        "and an error where there is none",
    )
    cuda_graph_impl: str = option(
        "none",
        "local: the blocks of a dense model run by CUDA graphs in training, `zero_stage` 0 to 2; what a schedule has "
        "in flight keeps its memory",
        choices=("none", "local"),
    )
    device_memory_budget_gb: float | None = option(
        None,
        "GB (1e9 bytes) of a device that a run may take: layers are recomputed, if that is enough "
        "(`recompute_granularity` none: never); masters and moments, then activations, go to the host as far as they "
        "must",
        gt=0,
    )
    host_memory_budget_gb: float | None = option(
        None,
        "GB of its host's memory that a rank may take for what `device_memory_budget_gb` puts there; masters and "
        "moments beyond that go into files of `optimizer_offload_path`",
        gt=0,
        needs="device_memory_budget_gb",
    )
    ignore_memory_estimate: bool = option(
        False, "start although the predicted memory is more than the hosts or GPUs have free", saved=False
    )


GridShape = tuple[int, int, int]


class TensorGrid(Spelled):
    """How `tensor_model_parallel_size` ranks share a layer."""

    tensor_parallel_mode: str = option(
        "1d",
        "1d: each matrix is cut along one side; else ranks form a grid of inner x outer x token sides: 2d 1 x q x q, "
        "2.5d 1 x q x dq, 3d q x q x q, 4d as `tensor_parallel_grid` says",
        choices=("1d", "2d", "2.5d", "3d", "4d"),
    )
    tensor_parallel_grid: tuple[int, ...] | None = option(
        None, "of 4d: ranks that share the inputs, the outputs and the tokens of a layer", ge=1
    )

    def shape(self, ranks: int) -> GridShape | None:
        """X, Y, Z of so many ranks; None where they make no such grid, or none is asked for."""
        found, given = grids_of(self.tensor_parallel_mode, ranks), self.tensor_parallel_grid or ()
        if self.tensor_parallel_mode == "4d" and len(given) == 3:
            found = [(given[0], given[1], given[2])]
        return next((shape for shape in found if math.prod(shape) == ranks), None)


def grids_of(mode: str, most: int) -> list[GridShape]:
    """The grids of a mode with at most so many ranks, those with the largest q first; of 2.5d 1 < d <= q."""
    sides = range(int(most**0.5) + 1, 1, -1)
    shapes: dict[str, list[GridShape]] = {
        "2d": [(1, q, q) for q in sides],
        "2.5d": [(1, q, d * q) for q in sides for d in range(2, q + 1)],
        "3d": [(q, q, q) for q in sides],
    }
    return [shape for shape in shapes.get(mode, []) if math.prod(shape) <= most]


class ZeroPlusPlus(Spelled, flag="zero_plus_plus", prefix="zero_quantized_"):
    """ZeRO-3 that sends less (ZeRO++), in 8 or 4 bits, and between nodes above all

    arXiv 2306.10209.
    """

    zero_quantized_weights: bool = option(
        False, "weights travel in 8 bits, blocks of 64 between their least and largest: what computes is rounded"
    )
    zero_quantized_gradients: bool = option(
        False, "gradients travel in 4 bits, blocks of 64 by their largest: within a partition, then between partitions"
    )
    zero_hpz_partition_size: int = option(
        1,
        "neighbours among the ranks that ZeRO shards over (those of a node) that keep all weights from a step's "
        "first gather on, so that later ones stay among them",
        ge=1,
        arg="partition",
    )

    def __str__(self) -> str:
        """As the table of a start has it: `weights in 8 bits, partitions of 8`."""
        parts = {
            "weights in 8 bits": self.zero_quantized_weights,
            "gradients in 4 bits": self.zero_quantized_gradients,
            f"partitions of {self.zero_hpz_partition_size}": self.zero_hpz_partition_size > 1,
        }
        return ", ".join(part for part, on in parts.items() if on)

    @property
    def rounds(self) -> bool:
        """Whether numbers are other ones than those of plain ZeRO-3."""
        return self.zero_quantized_weights or self.zero_quantized_gradients

    @property
    def changes_gathers(self) -> bool:
        """Whether weights are gathered otherwise."""
        return self.zero_quantized_weights or self.zero_hpz_partition_size > 1

    @property
    def on(self) -> bool:
        """Whether any of it is asked for."""
        return self != ZeroPlusPlus()


class Restarts(Spelled, saved=False):
    """Failures: restarts, spare ranks and a test of the hosts. None of it changes what is trained, so checkpoints do
    not keep it."""

    max_restarts: int = option(
        0,
        "start the ranks of `nprocs` so often again after a failure, from the newest checkpoint; not after status 2",
        ge=0,
    )
    elastic: int | None = option(
        None,
        "train with as many data-parallel ranks as the started ones are enough for, but at least with N; the others "
        "wait as spares until a failed rank is replaced",
        metavar="N",
        ge=1,
    )
    check_hosts: bool = option(
        False,
        "before the ranks meet, one rank a host tests its devices by products that are known; a host that fails is "
        "left out, and listed in `save`",
    )


class ParallelConfig(Section):
    """World = tensor x context x data x pipeline, or what `stage_meshes` says; tensor-parallel ranks are neighbours,
    then those that share a sequence, then data-parallel ones, then the pipeline's."""

    tensor_model_parallel_size: int = option(1, "ranks that share each layer", ge=1)
    tensor_grid: TensorGrid = TensorGrid()
    pipeline_model_parallel_size: int = option(1, "pipeline ranks p", ge=1)
    stage_meshes: str | None = option(
        None,
        "tp x replicas of each pipeline stage, e.g. '4x1,2x2': replicas of a stage take micro-batches in turn",
        metavar="TPxDP,...",
    )
    virtual_pipeline_model_parallel_size: int | None = option(
        None, "model chunks per pipeline rank; unset: what the schedule asks for", ge=1
    )
    sequence_parallel: bool = option(
        False, "split norms, dropout and residuals along the sequence over the tensor-parallel ranks"
    )
    tp_comm_overlap: bool = option(
        False,
        "two halves of each micro-batch take turns, so that what one sends to tensor-parallel ranks or to experts "
        "travels while the other computes; an even `micro_batch_size`",
    )
    context: ContextParallelism = ContextParallelism()
    experts: ExpertParallelism = ExpertParallelism()
    pipeline_schedule: str | None = option(
        None,
        "order of forwards, backwards and steps; unset: interleaved with several chunks per rank, else 1f1b",
        choices=SCHEDULES,
    )
    pipeline_schedule_file: str | None = option(
        None, "text file with a schedule of your own (see tools/show_schedule.py)", metavar="FILE"
    )
    pipedream_vertical_sync: bool = option(
        False, "a micro-batch of pipedream uses on every stage the weight version that it met on the first"
    )
    chimera_pairs: int = option(1, "pairs f of opposite pipelines in chimera: 2f copies of the weights", ge=1)
    pipeline_max_in_flight: int | None = option(
        None, "micro-batches that message-driven has in the pipeline at most; unset: 2p - 1", ge=1
    )
    pipeline_flush_steps: int = option(
        0,
        "first iterations without delay: of 2bw as 1f1b (unset: a fifth of 100 iterations or more, 200 at most), of "
        "`delayed_parameter_update` with their updates",
        ge=0,
    )
    check_pipeline_messages: bool = option(
        False, "send a header with every message between stages and check it: names what two ranks disagree about"
    )
    stage_layout: StageLayout = StageLayout()
    zero_stage: int = option(
        0,
        "sharded over data-parallel ranks: 1 optimizer state and master weights, 2 gradients too, 3 weights too",
        ge=0,
        le=3,
    )
    zero_plus_plus: ZeroPlusPlus = ZeroPlusPlus()
    num_distributed_optimizer_instances: int = option(
        1, "groups of data-parallel ranks; ZeRO shards inside a group and replicates across groups", ge=1
    )
    overlap_grad_reduce: bool = option(True, "reduce gradients while the rest of backward runs")
    overlap_param_gather: bool = option(True, "gather updated weights (ZeRO) while forward runs")
    ddp_bucket_size: int | None = option(
        None, "elements of one gradient bucket; unset: chosen by model size and data-parallel size", ge=1
    )
    grad_reduce_in_bf16: bool = option(False, "accumulate and reduce gradients of a bf16 model in bf16, not fp32")
    nprocs: int | None = option(
        None, "ranks, started here unless torchrun, SLURM or mpirun started as many; unset: one, or theirs", ge=1
    )
    restarts: Restarts = Restarts()
    hardware: DeviceOptions = DeviceOptions()
    distributed_timeout_minutes: float = option(
        10.0, "a collective that waits longer ends the run (fractions allowed)", gt=0
    )

    @property
    def meshes(self) -> tuple[StageMesh, ...]:
        """tp and replicas of each stage where stages differ; empty where they are alike."""
        given = parse_meshes(self.stage_meshes) if self.stage_meshes else ()
        return given if len(set(given)) > 1 else ()

    @property
    def workers(self) -> tuple[int, ...]:
        """Replicas of each stage that take its micro-batches in turn; empty where stages are alike."""
        return tuple(mesh.dp for mesh in self.meshes)

    @property
    def grid(self) -> GridShape | None:
        """Sides X, Y, Z of the grid of tensor-parallel ranks; None where each layer is cut along one side, or the ranks
        make no such grid."""
        return self.tensor_grid.shape(self.tensor_model_parallel_size)

    @property
    def model_parallel_size(self) -> int:
        """Ranks that hold one replica of the model; where stages differ, all of them."""
        if self.meshes:
            return sum(mesh.size for mesh in self.meshes)
        return self.ranks_together * self.pipeline_model_parallel_size

    @property
    def ranks_together(self) -> int:
        """Ranks that share a layer or a sequence, and stay on one host where that has room for them."""
        return self.tensor_model_parallel_size * self.context.context_parallel_size

    @property
    def expert_tensor_size(self) -> int:
        """Ranks that share each expert."""
        given = self.experts.expert_tensor_parallel_size
        return self.tensor_model_parallel_size if given is None else given

    @property
    def schedule(self) -> str:
        """Name of the schedule with the default and aliases applied."""
        if self.pipeline_schedule is None:
            return schedules.default_schedule(self.virtual_pipeline_model_parallel_size)
        return SCHEDULE_ALIASES.get(self.pipeline_schedule, self.pipeline_schedule)

    @property
    def num_chunks(self) -> int:
        """Model chunks per pipeline rank."""
        return schedules.resolve_chunks(self.schedule, self.virtual_pipeline_model_parallel_size)

    def data_parallel_size(self, world_size: int) -> int:
        """Replicas, each with micro-batches of its own, in a world of `world_size` ranks (which `model_parallel_size`
        must divide); 1 where stages differ, whose replicas share one stream."""
        return world_size // self.model_parallel_size

    def schedule_problems(self, num_microbatches: int) -> list[str]:
        """Why the schedule cannot run with this layout and so many micro-batches of a batch; empty where it can."""
        ranks, chunks = self.pipeline_model_parallel_size, self.virtual_pipeline_model_parallel_size
        return schedules.schedule_problems(self.schedule, ranks, num_microbatches, chunks, **self.pipeline_shape)

    @property
    def pipeline_shape(self) -> dict[str, Any]:
        """What a program's shape has beside ranks, micro-batches and chunks, by the names of `build_program`."""
        return {
            "num_pairs": self.chimera_pairs,
            "workers": self.workers,
            "vertical_sync": self.pipedream_vertical_sync,
            "max_in_flight": self.pipeline_max_in_flight,
        }
