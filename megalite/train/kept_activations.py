"""What autograd keeps of a micro-batch, read from the blocks of a stage: they run once on tensors without values.

On a CPU these are tensors as torch takes them there (`FakeTensorMode`), so kernels are those of this host: one that
multiplies 16 bits itself keeps less than one that widens them first. A GPU is one that the caller has
(`megalite.rehearsal`). Only whole numbers that follow from positions have values, and of how many rows experts get the
host reads what plans take for the worst. Left to closed forms (`megalite.planner.activations`), which the search uses
for all: embedding and head, what a compiler keeps beside, and blocks that would loop over many pieces.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megalite.config import Config
from megalite.inventory import WORST_IMBALANCE, blocks_of, expert_rows, first_alike, model_layers
from megalite.microbatch import Microbatch
from megalite.models import layer_specs
from megalite.nn import LayerStack, on_grid
from megalite.parallel.context import SequenceCut
from megalite.parallel.tensor import LayerContext
from megalite.train.build import boundary_spec, build_module, layer_context
from megalite.train.built_states import plain
from megalite.train.make_mesh import mesh_on_meta
from megalite.train.planned import PlannedRun

UnseenGpu = Callable[[int], AbstractContextManager[object]]
"""While it is open, this process is a rank of a world of that size, and has a GPU whose tensors have no values."""

TILE = 64  # queries that attention takes together at least
MOST_PIECES = 150  # more take seconds: torch looks at every operation, a GPU's at larger ones
MOST_ON_GPU = 3000


def with_kept(run: PlannedRun, gpu: UnseenGpu | None = None) -> PlannedRun:
    """The run with what the blocks of each stage keep of a micro-batch, if they can say it."""
    if run.foreign is not None or not (run.on_cpu or gpu):
        return run
    config = run.config
    phases = config.phases(run.world_size) if config.training.seq_length_schedule else [(config.model.seq_length, 0)]
    runs = {length: replace(run, config=plain(config.at_length(length))) for length, _ in phases}
    tiled = run.on_cpu or config.training.precision.fp64
    if max(_pieces(each, tiled=tiled) for each in runs.values()) > (MOST_PIECES if tiled else MOST_ON_GPU):
        return run
    place = _cpu() if run.on_cpu or gpu is None else gpu(run.world_size)
    with torch.inference_mode(False), torch.enable_grad(), place:
        return replace(run, kept={length: _kept(each) for length, each in runs.items()})


def _kept(run: PlannedRun) -> list[list[int]]:
    """Of each stage."""
    known: dict[object, list[int]] = {}
    kept = []
    for stage, items in enumerate(run.cuts):
        config, size = run.config.of_stage(stage, run.world_size)
        alike = first_alike(config.model, items), run.plan.recompute_of(stage), config.parallel
        if alike not in known:
            with _Dealt(config):
                known[alike] = _kept_in(replace(run, config=config, world_size=size), stage)
        kept.append(known[alike])
    return kept


def _pieces(run: PlannedRun, *, tiled: bool) -> int:
    """Pieces over which the blocks of the longest stage that run loop, at most. tiled: attention and experts do, not
    only a state."""
    model, most = run.config.model, 0
    queries = -(-model.seq_length // TILE)
    each = max(queries, model.experts.num_experts or 0) if tiled else 0
    for stage, items in enumerate(run.cuts):
        layers = [model_layers(model)[item] for item in blocks_of(model, items)]
        loops = [queries if layers[place].model.mixer == "delta" else each for place in _ran(run, stage)]
        most = max(most, sum(loops))
    return most


def _kept_in(run: PlannedRun, stage: int) -> list[int]:
    """Bytes that each block of a stage keeps beside what the stage receives."""
    config, device = run.config, torch.device("cpu" if run.on_cpu else "cuda")
    blocks = blocks_of(config.model, run.cuts[stage])
    if not blocks:
        return []
    every = layer_specs(config.model)  # which share what rotates
    ran = _ran(run, stage)
    specs = [every[blocks[place]] for place in ran]
    stack = build_module(config, specs, _context(config, run.world_size, device), run.plan.recompute_of(stage))
    spec = boundary_spec(config, device)
    learns = 0 not in run.cuts[stage] or not model_layers(config.model)[0].is_frozen
    x = torch.empty(spec.shape, dtype=spec.dtype, device=device).requires_grad_(learns)
    microbatch = _microbatch(config, device)
    own = [*stack.parameters(), *stack.buffers(), *vars(microbatch).values()]
    own += [x] if stage else []  # behind an embedding the stage makes it
    kept = dict(zip(ran, _saved(stack, x, microbatch, [each for each in own if isinstance(each, Tensor)]), strict=True))
    layers = [model_layers(config.model)[item] for item in blocks]
    last = {layers[place]: each for place, each in kept.items()}
    return [kept.get(place, last[layer]) for place, layer in enumerate(layers)]


def _context(config: Config, size: int, device: torch.device) -> LayerContext:
    mesh, parallel = mesh_on_meta(config.parallel, size), config.parallel
    how = {"sequence_parallel": parallel.sequence_parallel, "float8": config.training.float8}
    context = replace(layer_context(config, mesh, device, None, **how), deferred=False)
    return context if parallel.grid is None else on_grid(context, mesh, parallel.grid)


def _ran(run: PlannedRun, stage: int) -> Sequence[int]:
    """Which blocks of a stage run: of those that are alike two, of which a third keeps what the second does; all where
    some run again."""
    model = run.config.model
    layers = [model_layers(model)[item] for item in blocks_of(model, run.cuts[stage])]
    if run.plan.recompute_of(stage).method:
        return range(len(layers))
    return [place for place, layer in enumerate(layers) if layers[:place].count(layer) < 2]


def _microbatch(config: Config, device: torch.device) -> Microbatch:
    length, samples = config.model.seq_length, config.training.micro_batch_size
    tokens = torch.zeros(samples, length, dtype=torch.int64, device=device)
    positions = torch.arange(length, device=device).expand_as(tokens)
    numbers, mask = torch.arange(samples, device=device), torch.ones(tokens.shape, device=device)
    starts = torch.zeros_like(positions) if config.data.reset_attention_mask else None
    cut = SequenceCut(0, config.parallel.context.context_parallel_size, config.parallel.context.ring)
    return cut(Microbatch(tokens, tokens, positions, mask, numbers, document_starts=starts))


def _saved(stack: LayerStack, x: Tensor, microbatch: Microbatch, own: list[Tensor]) -> list[int]:
    """Bytes that each block of the stack has saved beside the stack's `own` tensors."""
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
    return [each - before for before, each in zip([0, *after], after, strict=False)]


# ---- places ----------------------------------------------------------------------------------------------------------


@contextmanager
def _cpu() -> Iterator[None]:
    with FakeTensorMode(allow_non_fake_inputs=True), _Known():  # type: ignore[no-untyped-call]  # torch's has no types
        yield


class _Known(TorchDispatchMode):
    """Whole numbers that come from nothing without values are computed: of where documents begin shapes are made."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        unknown = any(isinstance(x, FakeTensor) or x.is_floating_point() for x in given)
        if unknown or not (given or function._overloadpacket is torch.ops.aten.arange):
            return function(*args, **(kwargs or {}))
        with unset_fake_temporarily():
            return function(*args, **(kwargs or {}))


class _Dealt(TorchFunctionMode):
    """Where the host reads how many rows go from which rank to which expert, this rank's experts get as many as plans
    take for the worst, all as many."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        layer = model_layers(config.model)[-1]  # all layers choose as many experts
        self._rows, self._worst = (round(expert_rows(config, layer, factor)) for factor in (1.0, WORST_IMBALANCE))

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function == Tensor.numpy:
            return self._table(*args[0].shape)
        return function(*args, **(kwargs or {}))

    def _table(self, ranks: int, _: int, experts: int) -> NDArray[np.int64]:
        here = self._worst // ranks
        of_ranks = [here, *_parts(self._rows - here, ranks - 1)]
        return np.array([[_parts(rows, experts) for rows in of_ranks]] * ranks)


def _parts(number: int, count: int) -> Sequence[int]:
    """A number in so many parts, as alike as can be."""
    return [(number + place) // count for place in range(count)]
