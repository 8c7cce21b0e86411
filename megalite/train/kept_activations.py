"""What autograd keeps of a micro-batch, read from the blocks of a stage: they run once on tensors without values.

These are CPU tensors as torch takes them (`FakeTensorMode`), so kernels are those of this host: one that multiplies 16
bits itself keeps less than one that widens them first. Blocks that ask for values (routers of experts, documents) or
for what other ranks have (a ring), and those that loop over many pieces, are left to closed forms, which the search and
the start of a run use for all (`megalite.planner.activations`), as embedding and head are. What GPUs keep,
tools/rehearse.py says.
"""

from dataclasses import replace

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks

from megalite.config import Config
from megalite.inventory import blocks_of, first_alike
from megalite.microbatch import Microbatch
from megalite.models import layer_specs
from megalite.nn import LayerStack
from megalite.train.build import boundary_spec, build_module, layer_context
from megalite.train.make_mesh import mesh_on_meta
from megalite.train.planned import PlannedRun

TILE = 64  # queries that attention takes together at least
MOST_PIECES = 500  # more take seconds: torch looks at every operation


def with_kept(run: PlannedRun) -> PlannedRun:
    """The run with what the blocks of each stage keep of a micro-batch, if they can say it."""
    if not run.on_cpu or run.foreign is not None or not _speaks(run.config) or _pieces(run) > MOST_PIECES:
        return run
    known: dict[object, int] = {}
    kept = []
    for stage, items in enumerate(run.cuts):
        alike = first_alike(run.config.model, items), run.plan.recompute_of(stage)
        if alike not in known:
            known[alike] = _kept_in(run, stage)
        kept.append(known[alike])
    return replace(run, kept=tuple(kept))


def _speaks(config: Config) -> bool:
    """Whether nothing in the blocks depends on values, or on what comes from other ranks."""
    parallel, model = config.parallel, config.model
    alone = parallel.context.context_parallel_size == 1 and parallel.grid is None and not parallel.meshes
    seen = not config.data.reset_attention_mask and model.experts.num_experts is None
    return alone and seen and config.training.seq_length_schedule is None and not config.training.compile


def _pieces(run: PlannedRun) -> int:
    """Pieces over which the blocks of the longest stage loop, at most."""
    return max(map(len, run.cuts)) * -(-run.config.model.seq_length // TILE)


def _kept_in(run: PlannedRun, stage: int) -> int:
    """Bytes that the blocks of a stage keep beside what the stage receives."""
    config, device = run.config, torch.device("cpu")
    blocks = blocks_of(config.model, run.cuts[stage])
    if not blocks:
        return 0
    mesh = mesh_on_meta(config.parallel, run.world_size)
    context = layer_context(
        config, mesh, device, None, sequence_parallel=config.parallel.sequence_parallel, float8=config.training.float8
    )
    context = replace(context, deferred=False)
    specs = [layer_specs(config.model)[item] for item in blocks]
    with FakeTensorMode():
        stack = build_module(config, specs, context, run.plan.recompute_of(stage))
        spec = boundary_spec(config, device)
        x = torch.empty(spec.shape, dtype=spec.dtype).requires_grad_()
        microbatch = _microbatch(config)
        own = [*stack.parameters(), *stack.buffers(), *vars(microbatch).values()]
        own += [x] if stage else []  # behind an embedding the stage makes it
        return _saved(stack, x, microbatch, [each for each in own if isinstance(each, Tensor)])


def _microbatch(config: Config) -> Microbatch:
    length, samples = config.model.seq_length, config.training.micro_batch_size
    tokens = torch.zeros(samples, length, dtype=torch.int64)
    positions, mask = torch.arange(length).expand_as(tokens), torch.ones(tokens.shape)
    return Microbatch(tokens, tokens, positions, mask, sample_ids=torch.arange(samples))


def _saved(stack: LayerStack, x: Tensor, microbatch: Microbatch, own: list[Tensor]) -> int:
    """Bytes that the stack saves beside its `own` tensors."""
    seen = {tensor.untyped_storage()._cdata: tensor.untyped_storage() for tensor in own}
    kept = 0

    def note(tensor: Tensor) -> Tensor:
        nonlocal kept
        storage = tensor.untyped_storage()
        if storage._cdata not in seen and tensor.numel() > 1:
            seen[storage._cdata] = storage
            kept += storage.nbytes()
        return tensor

    with saved_tensors_hooks(note, lambda tensor: tensor):
        stack(x, microbatch)
    return kept
