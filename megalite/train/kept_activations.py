"""What autograd keeps of a micro-batch, read from the layers of a stage: they run once on tensors without values.

These are CPU tensors as torch takes them (`FakeTensorMode`), so kernels are those of this host: one that multiplies 16
bits itself keeps less than one that widens them first. Layers that ask for values (routers of experts, documents) or
for what other ranks have (a ring), and those that loop over many pieces, are left to closed forms, which the search and
the start of a run use for all (`megalite.planner.activations`). What GPUs keep, tools/rehearse.py says.
"""

from dataclasses import replace

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks

from megalite.comm import World
from megalite.config import Config
from megalite.inventory import chunk_length, first_alike, micro_tokens
from megalite.microbatch import Microbatch
from megalite.models import layer_specs
from megalite.nn import Block, LayerStack
from megalite.train.build import boundary_spec, build_module, layer_context
from megalite.train.make_mesh import make_mesh
from megalite.train.planned import PlannedRun

TILE = 64  # queries that attention takes together at least
MOST_PIECES = 1000  # more take seconds: torch looks at every operation


def with_kept(run: PlannedRun) -> PlannedRun:
    """The run with what each stage keeps of a micro-batch, if its layers can say it."""
    if not run.on_cpu or run.foreign is not None or not _speaks(run.config) or _pieces(run) > MOST_PIECES:
        return run
    known: dict[object, tuple[int, int]] = {}
    kept = []
    for stage, items in enumerate(run.cuts):
        alike = first_alike(run.config.model, items), run.plan.recompute_of(stage)
        if alike not in known:
            known[alike] = _kept_in(run, stage)
        kept.append(known[alike])
    return replace(run, kept=tuple(kept))


def _speaks(config: Config) -> bool:
    """Whether nothing in the layers depends on values, or on what comes from other ranks."""
    parallel, model = config.parallel, config.model
    alone = parallel.context.context_parallel_size == 1 and parallel.grid is None and not parallel.meshes
    seen = not config.data.reset_attention_mask and model.experts.num_experts is None and not model.further.depth
    once = config.training.seq_length_schedule is None and not config.training.compile
    return alone and seen and once and config.optimizer.offload.embedding_offload is None


def _pieces(run: PlannedRun) -> int:
    """Pieces over which the layers of the longest stage and the loss loop, at most."""
    model, tokens = run.config.model, micro_tokens(run.config)
    columns = -(-run.config.padded_vocab_size() // run.config.parallel.tensor_model_parallel_size)
    chunks = -(-tokens // chunk_length(tokens, columns, on_cpu=True))
    return chunks + max(map(len, run.cuts)) * -(-model.seq_length // TILE)


def _kept_in(run: PlannedRun, stage: int) -> tuple[int, int]:
    """(Bytes that the blocks of a stage keep beside its input, bytes that its other layers keep)."""
    config, device = run.config, torch.device("cpu")
    world = World(0, run.world_size, torch.device("meta"), local_size=run.world_size)
    mesh = make_mesh(config.parallel, world)
    context = layer_context(
        config, mesh, device, None, sequence_parallel=config.parallel.sequence_parallel, float8=config.training.float8
    )
    specs = [layer_specs(config.model)[item] for item in run.cuts[stage]]
    with FakeTensorMode():
        stack = build_module(config, specs, replace(context, deferred=False), run.plan.recompute_of(stage))
        spec = boundary_spec(config, device)
        x = torch.empty(spec.shape, dtype=spec.dtype).requires_grad_() if stage else None
        microbatch = _microbatch(config)
        given = [stack.parameters(), stack.buffers(), vars(microbatch).values(), [x]]
        return _saved(stack, x, microbatch, [each for some in given for each in some if isinstance(each, Tensor)])


def _microbatch(config: Config) -> Microbatch:
    length, samples = config.model.seq_length, config.training.micro_batch_size
    tokens = torch.zeros(samples, length, dtype=torch.int64)
    positions, mask = torch.arange(length).expand_as(tokens), torch.ones(tokens.shape)
    return Microbatch(tokens, tokens, positions, mask, sample_ids=torch.arange(samples))


def _saved(stack: LayerStack, x: Tensor | None, microbatch: Microbatch, given: list[Tensor]) -> tuple[int, int]:
    seen = {tensor.untyped_storage()._cdata: tensor.untyped_storage() for tensor in given}
    blocks = others = 0
    inside: list[nn.Module] = []  # the embedding or the head, while it runs

    def note(tensor: Tensor) -> Tensor:
        nonlocal blocks, others
        storage = tensor.untyped_storage()
        if storage._cdata not in seen and tensor.numel() > 1:
            seen[storage._cdata] = storage
            blocks += 0 if inside else storage.nbytes()
            others += storage.nbytes() if inside else 0
        return tensor

    for layer in stack.ordered():
        if not isinstance(layer, Block):
            layer.register_forward_pre_hook(lambda layer, _: inside.append(layer))
            layer.register_forward_hook(lambda *_: inside.clear())
    with saved_tensors_hooks(note, lambda tensor: tensor):
        stack(x, microbatch)
    return blocks, others
