"""What autograd keeps of a micro-batch, read from the blocks of a stage: they run once on tensors without values.

On a CPU these are tensors as torch takes them there (`FakeTensorMode`), so kernels are those of this host: one that
multiplies 16 bits itself keeps less than one that widens them first. A GPU is one that the caller has
(`megalite.rehearsal`). Blocks that ask for values (routers of experts, documents) or for what other ranks have (a
ring), and those that loop over many pieces, are left to closed forms, which the search uses for all
(`megalite.planner.activations`), as embedding and head are, and the start of a run on GPUs.
"""

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks

from megalite.config import Config
from megalite.inventory import blocks_of, first_alike, model_layers
from megalite.microbatch import Microbatch
from megalite.models import layer_specs
from megalite.nn import LayerStack
from megalite.parallel.context import SequenceCut
from megalite.train.build import boundary_spec, build_module, layer_context
from megalite.train.make_mesh import mesh_on_meta
from megalite.train.planned import PlannedRun

Gpu = Callable[[int], AbstractContextManager[object]]
"""While it is open, this process is a rank of a world of that size, and has a GPU whose tensors have no values."""

logger = logging.getLogger(__name__)

TILE = 64  # queries that attention takes together at least
MOST_PIECES = 150  # more take seconds: torch looks at every operation


def with_kept(run: PlannedRun, gpu: Gpu | None = None) -> PlannedRun:
    """The run with what the blocks of each stage keep of a micro-batch, if they can say it."""
    if run.foreign is not None or not _speaks(run.config, on_gpu=not run.on_cpu):
        return run
    if run.on_cpu:
        if _pieces(run) > MOST_PIECES:
            return run
        place: AbstractContextManager[object] = FakeTensorMode()
    elif gpu is not None:
        place = gpu(run.world_size)
    else:
        return run
    try:
        with place:
            return replace(run, kept=_kept(run, torch.device("cpu" if run.on_cpu else "cuda")))
    except (NotImplementedError, RuntimeError) as error:  # torch has no kernel without values for something
        why = str(error).partition("\n")[0][:120]
        logger.warning("activations are worked out: blocks without values fail (%s)", why)
        return run


def _kept(run: PlannedRun, device: torch.device) -> tuple[int, ...]:
    """Of each stage."""
    known: dict[object, int] = {}
    kept = []
    for stage, items in enumerate(run.cuts):
        alike = first_alike(run.config.model, items), run.plan.recompute_of(stage)
        if alike not in known:
            known[alike] = _kept_in(run, stage, device)
        kept.append(known[alike])
    return tuple(kept)


def _speaks(config: Config, *, on_gpu: bool) -> bool:
    """Whether nothing in the blocks depends on values, or on what comes from other ranks, and all stays that they keep
    and nothing else."""
    parallel, model = config.parallel, config.model
    stays = model.cpu_offloading_num_layers == 0 and parallel.hardware.cuda_graph_impl == "none"
    alone = (on_gpu or parallel.context.ring == 1) and parallel.grid is None and not parallel.meshes
    seen = not config.data.reset_attention_mask and model.experts.num_experts is None
    return stays and alone and seen and config.training.seq_length_schedule is None and not config.training.compile


def _pieces(run: PlannedRun) -> int:
    """Pieces over which the blocks of the longest stage loop, at most."""
    return max(_number(run, stage) for stage in range(len(run.cuts))) * -(-run.config.model.seq_length // TILE)


def _kept_in(run: PlannedRun, stage: int, device: torch.device) -> int:
    """Bytes that the blocks of a stage keep beside what the stage receives."""
    config = run.config
    blocks = blocks_of(config.model, run.cuts[stage])
    if not blocks:
        return 0
    mesh = mesh_on_meta(config.parallel, run.world_size)
    context = layer_context(
        config, mesh, device, None, sequence_parallel=config.parallel.sequence_parallel, float8=config.training.float8
    )
    context = replace(context, deferred=False)
    every = layer_specs(config.model)  # which share what rotates
    specs = [every[item] for item in blocks[: _number(run, stage)]]
    stack = build_module(config, specs, context, run.plan.recompute_of(stage))
    spec = boundary_spec(config, device)
    learns = 0 not in run.cuts[stage] or not model_layers(config.model)[0].is_frozen
    x = torch.empty(spec.shape, dtype=spec.dtype, device=device).requires_grad_(learns)
    microbatch = _microbatch(config, device)
    own = [*stack.parameters(), *stack.buffers(), *vars(microbatch).values()]
    own += [x] if stage else []  # behind an embedding the stage makes it
    kept = _saved(stack, x, microbatch, [each for each in own if isinstance(each, Tensor)])
    return kept[-1] + (kept[-1] - kept[-2] if len(kept) > 1 else 0) * (len(blocks) - len(kept))


def _number(run: PlannedRun, stage: int) -> int:
    """Blocks of a stage that run: two of many that are alike, of which a third keeps what the second does."""
    model, blocks = run.config.model, blocks_of(run.config.model, run.cuts[stage])
    alike = len({model_layers(model)[item] for item in blocks}) == 1 and not run.plan.recompute_of(stage).method
    return min(2, len(blocks)) if alike else len(blocks)


def _microbatch(config: Config, device: torch.device) -> Microbatch:
    length, samples = config.model.seq_length, config.training.micro_batch_size
    tokens = torch.zeros(samples, length, dtype=torch.int64, device=device)
    positions = torch.arange(length, device=device).expand_as(tokens)
    numbers, mask = torch.arange(samples, device=device), torch.ones(tokens.shape, device=device)
    cut = SequenceCut(0, config.parallel.context.context_parallel_size, config.parallel.context.ring)
    return cut(Microbatch(tokens, tokens, positions, mask, sample_ids=numbers))


def _saved(stack: LayerStack, x: Tensor, microbatch: Microbatch, own: list[Tensor]) -> list[int]:
    """Bytes that the stack has saved beside its `own` tensors when each of its blocks has run."""
    seen = {tensor.untyped_storage()._cdata: tensor.untyped_storage() for tensor in own}
    kept, after = 0, []

    def note(tensor: Tensor) -> Tensor:
        nonlocal kept
        storage = tensor.untyped_storage()
        if storage._cdata not in seen and tensor.numel() > 1:
            seen[storage._cdata] = storage
            kept += storage.nbytes()
        return tensor

    for block in stack.ordered():
        block.register_forward_hook(lambda *_: after.append(kept))
    with saved_tensors_hooks(note, lambda tensor: tensor):
        stack(x, microbatch)
    return after
