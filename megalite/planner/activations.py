"""Bytes that one micro-batch leaves behind in a stage between its forward and its backward.

Layer by layer as `megalite.inventory.activation_bytes` lists them; with full recomputation a segment keeps its input
only.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from operator import add

from megalite.config import Config
from megalite.inventory import (
    GRAPH_WARM_UP,
    ElementBytes,
    Layer,
    Recompute,
    add_up,
    blocks_of,
    boundary_bytes,
    chunk_length,
    compiled_bytes,
    given_recompute,
    keeps_entrance,
    kept_bytes,
    micro_tokens,
    model_layers,
    recompute_ranges,
    weight_only_bytes,
)
from megalite.schedule import find_schedule


@dataclass(frozen=True)
class StageActivations:
    """Bytes of one micro-batch in one stage."""

    full: float  # from forward to backward, without the next two
    boundary: float  # the stage's input
    head: float  # what the output layer keeps
    weight_only: float  # after I until W of a split backward
    weight_only_block: float  # the least share of a block
    moved: float = 0.0  # what waits on the host (`--offload activations`)

    @property
    def total(self) -> float:
        return self.full + self.boundary + self.head


def _segments(config: Config, blocks: int, how: Recompute) -> tuple[int, int, int]:
    """(Blocks kept whole, segments that keep their input only, blocks that recomputing brings back beside the rest).

    The first blocks of a stage are recomputed last: whole blocks behind them have gone by then, and one takes their
    place; where the backward is split, their W keeps most of them.
    """
    again = [end - begin for begin, end, twice in recompute_ranges(blocks, range(blocks), how) if twice]
    kept, split = blocks - sum(again), find_schedule(config.parallel.schedule).splits_backward
    return kept, len(again), max(again, default=0) if split or not kept else 0


def recomputed(config: Config, items: range, how: Recompute) -> range:
    """Blocks of a stage whose forward runs again in backward."""
    blocks = blocks_of(config.model, items)
    kept, _, _ = _segments(config, len(blocks), how)
    return blocks[: len(blocks) - kept]


def stage_activations(
    config: Config,
    items: range,
    how: Recompute | None = None,
    *,
    on_cpu: bool = False,
    ran: Sequence[float] | None = None,
) -> StageActivations:
    """What one micro-batch keeps in a stage. items: indices into [embedding, block 0, ..., head]. how: its blocks are
    recomputed; None: as flags say it of the first stage. ran: what each block keeps beside what the stage receives, if
    that was read from them."""
    how = given_recompute(config.model)[0] if how is None else how
    size, tokens, entrance = ElementBytes.of(config), micro_tokens(config), boundary_bytes(config)
    here = model_layers(config.model)[items.start : items.stop]
    blocks = [layer for layer in here if layer.is_block]
    kept, segments, _ = _segments(config, len(blocks), how)
    # on a CPU the first blocks' activations that wait on the host are where they were
    stays = max(len(blocks) - kept, 0 if on_cpu else config.model.cpu_offloading_num_layers)
    full = add_up(blocks[stays:], lambda layer: kept_bytes(config, layer, on_cpu=on_cpu)) + segments * entrance
    moved = add_up(blocks[len(blocks) - kept : stays], lambda layer: kept_bytes(config, layer))
    # sines and cosines, shared by the blocks
    rotary = [layer.model.rotary_dim for layer in blocks if layer.model.position_embedding_type == "rope"]
    full += size.compute * tokens * max(rotary, default=0) * (kept > 0)
    head = sum(kept_bytes(config, layer, on_cpu=on_cpu) for layer in here if not layer.is_block)
    boundary = 0.0 if 0 in items else entrance
    if boundary and blocks:
        received = entrance * (segments > 0 or keeps_entrance(config, blocks[0]))
        full -= received * (stays <= len(blocks) - kept)  # but where it has moved
    elif boundary:
        head -= entrance
    if ran is not None:
        whole = len(blocks) - kept
        beside = [compiled_bytes(config, layer) * (place >= whole) for place, layer in enumerate(blocks)]
        ran = list(map(add, ran, beside))
        moved = sum(ran[whole:stays])
        full = sum(ran) - moved
        first = whole == 0 < stays and keeps_entrance(config, blocks[0])
        moved += boundary * first  # what the stage received
    waiting = {layer: weight_only_bytes(config, layer) for layer in here}
    least = min((waiting[layer] for layer in blocks), default=0.0)
    later = add_up(here, waiting.__getitem__)
    found = StageActivations(max(full, 0.0), boundary, max(head, 0.0), later, least, moved)
    if config.parallel.hardware.cuda_graph_impl == "none" or not blocks:
        return found
    # What the CUDA graphs of a micro-batch hold (`nn.graphs`): of each block what its products' weight gradients are
    # made of, its result and its input's gradient, or what it keeps from forward to backward where that is more; copies
    # of the stage's input and of its result's gradient; what comes and goes in a backward, which is of each pool anew.
    if ran is None:
        held = add_up(blocks, lambda layer: max(kept_bytes(config, layer), waiting[layer] + 2 * entrance))
    else:
        held = sum(max(own, waiting[layer] + 2 * entrance) for own, layer in zip(ran, blocks, strict=True))
    lane = held + 2 * entrance + _block_workspace(config, blocks, how)
    late = found.weight_only - add_up(blocks, waiting.__getitem__)
    return replace(found, full=lane, weight_only=lane + late, weight_only_block=0.0)


#: What cuBLAS takes of a Hopper GPU: 32 MiB for each thread that multiplies, that of forwards and autograd's.
PRODUCT_WORKSPACE = 2 * 2**25


def workspace_bytes(config: Config, items: range, how: Recompute, *, on_cpu: bool = False) -> tuple[float, float]:
    """(Logits of one chunk and their gradient, tensors that come and go in a block's backward) in bytes."""
    model, tp, size = config.model, config.parallel.tensor_model_parallel_size, ElementBytes.of(config)
    tokens, here = micro_tokens(config), model_layers(model)[items.start : items.stop]
    blocks = [layer for layer in here if layer.is_block]
    logits = 0.0
    if model.num_layers + 1 in items:
        rows = min(config.padded_vocab_size() // tp, max(1, model.vocab_size))
        compiled = config.training.compile and not on_cpu
        step = chunk_length(tokens, rows, on_cpu=on_cpu, compiled=compiled)
        logits = float(step * rows * (2 * size.wide + (size.compute if size.compute != size.wide else 0)))
        if compiled:  # products and their gradient, and nothing wider
            logits = float(step * rows * 2 * size.compute)
        if on_cpu:  # the softmax is taken in place, of products of what is widened before
            logits = float(size.wide * rows * (step + (model.hidden_size if size.compute != size.wide else 0)))
    graphs = config.parallel.hardware.cuda_graph_impl != "none"  # whose pools have it
    return logits, 0.0 if graphs or not blocks else _block_workspace(config, blocks, how, on_cpu=on_cpu)


def warm_up_bytes(
    config: Config,
    cuts: Sequence[range],
    how: Mapping[int, Recompute],
    kept: Mapping[int, StageActivations],
    most: float,
    ran: Mapping[int, Sequence[float]],
) -> float:
    """What micro-batches before the first CUDA graph had and torch's allocator keeps, for everything but graphs: their
    activations, and what came and went in a block's backward. Whatever comes and goes later finds its place there.

    how, kept, ran: of the stages of a rank (`stage_activations`). most: activations that it has with graphs, at most.
    """
    if config.parallel.hardware.cuda_graph_impl == "none":
        return 0.0
    hardware = replace(config.parallel.hardware, cuda_graph_impl="none")
    eager = replace(config, parallel=replace(config.parallel, hardware=hardware))
    in_flight = -(-most // sum(each.full for each in kept.values()))  # of each stage
    count = min(GRAPH_WARM_UP, in_flight)
    each = [stage_activations(eager, cuts[stage], again, ran=ran.get(stage)) for stage, again in how.items()]
    activations = sum(count * one.full for one in each)
    return activations + max(workspace_bytes(eager, cuts[stage], each)[1] for stage, each in how.items())


def _block_workspace(config: Config, blocks: list[Layer], how: Recompute, *, on_cpu: bool = False) -> float:
    """Tensors that come and go in the backward of a block of a stage."""
    tokens, width = micro_tokens(config), max(layer.mlp_width(config.parallel) for layer in set(blocks))
    # gated: silu(gate) and the product
    block = ElementBytes.of(config).compute * tokens * (config.model.hidden_size + 3.0 * width)
    _, _, longest = _segments(config, len(blocks), how)
    if longest:  # made again, and let go as the backward goes through it; its input is there already
        again = max(kept_bytes(config, layer, on_cpu=on_cpu) for layer in set(blocks))
        block += longest * again - boundary_bytes(config)
    # A block whose backward runs is on the device, and the one before it on its way; blocks that stayed have gone.
    moved = 0 if on_cpu else config.model.cpu_offloading_num_layers
    largest = max(kept_bytes(config, layer, on_cpu=on_cpu) for layer in set(blocks)) if moved else 0.0
    return block + max(0, min(2, moved) - len(blocks[moved:])) * largest
