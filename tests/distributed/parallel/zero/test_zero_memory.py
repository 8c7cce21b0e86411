"""Bytes a rank holds equal the formulas (rulings 12), and nothing grows over the steps."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from megalite.comm.mesh import ParallelMesh
from megalite.comm.world import World
from megalite.config.cli import parse
from megalite.config.model import ModelConfig
from megalite.gradient import WeightGradQueue, sink_of
from megalite.microbatch import Microbatch
from megalite.models import build_stack, layer_specs
from megalite.nn.stack import LayerStack
from megalite.parallel.tensor.context import LayerContext
from megalite.parallel.zero import ParameterBuffers, RankMemory, ShardedOptimizer, ZeroOptions
from megalite.parallel.zero.streamed_gradient import ScratchPool
from megalite.parallel.zero.unshard import BucketWeights
from megalite.testing import run_ranks
from megalite.train.run import open_run
from tests.held_bytes import held_bytes

LAYERS = 6


def parameter_shapes(h: int) -> list[tuple[str, tuple[int, ...]]]:
    """A GPT of width h, vocabulary 12 h: 25 million parameters at h = 512."""
    shapes: list[tuple[str, tuple[int, ...]]] = [("embedding.word_embeddings.weight", (12 * h, h))]
    for i in range(LAYERS):
        for name, shape in [
            ("input_norm.weight", (h,)),
            ("attention.qkv.weight", (3 * h, h)),
            ("attention.qkv.bias", (3 * h,)),
            ("attention.proj.weight", (h, h)),
            ("mlp.fc1.weight", (4 * h, h)),
            ("mlp.fc1.bias", (4 * h,)),
            ("mlp.fc2.weight", (h, 4 * h)),
        ]:
            shapes.append((f"layers.{i}.{name}", shape))
    return [*shapes, ("head.output.weight", (12 * h, h))]


def live_bytes() -> int:
    """Bytes of all tensor storages that Python can reach."""
    gc.collect()
    storages = {}
    for thing in gc.get_objects():
        if isinstance(thing, torch.Tensor):
            storage = thing.untyped_storage()
            storages[storage._cdata] = storage.nbytes()
    return sum(storages.values())


def body_bytes(world: World, hidden: int, stage: int, dtype: torch.dtype, versions: int) -> dict[str, Any]:
    mesh = ParallelMesh.build(rank=world.rank, size=world.size)
    shapes = parameter_shapes(hidden)
    copies = [
        [(name, nn.Parameter(torch.zeros(shape, dtype=dtype))) for name, shape in shapes] for _ in range(versions)
    ]
    buffers = ParameterBuffers(copies, axes=mesh.family(), options=ZeroOptions(stage))
    optimizer = ShardedOptimizer(
        [buffers], make_optimizer=lambda g: torch.optim.AdamW(g, fused=True), norm_axis=mesh.world
    )
    after_step, scratch, pool = [], 0, buffers.rank_memory.scratch(buffers.gradient_dtype)
    gradient = torch.zeros(1, dtype=dtype)
    for _ in range(2):
        buffers.gradients.begin_batch(1)
        for _, parameter in reversed(copies[0]):
            sink = sink_of(parameter)
            assert sink is not None
            sink.add(gradient.expand(parameter.shape))
            scratch = max(scratch, pool._bytes)
        buffers.gradients.start_reduce()
        buffers.gradients.finish_reduce()
        optimizer.grad_norm()
        optimizer.step(lr=0.1, weight_decay=0.1)
        after_step.append(live_bytes())
    numel = sum(p.numel() for _, p in copies[0])
    held = held_bytes(buffers) | optimizer.memory()
    return {"held": held, "scratch": scratch, "numel": numel, "after_step": after_step}


FORMULAS = {
    (torch.bfloat16, 1): {0: (18, 0), 1: (6, 12), 2: (2, 16), 3: (0, 18)},
    (torch.float32, 1): {0: (16, 0), 1: (8, 8), 2: (4, 12), 3: (0, 16)},
    (torch.bfloat16, 2): {0: (20, 0), 1: (8, 12)},
}


@pytest.mark.in_turn
@pytest.mark.parametrize("hidden", [128, pytest.param(512, marks=pytest.mark.full)])
@pytest.mark.parametrize(
    ("dtype", "versions", "stage"),
    [(dtype, versions, stage) for (dtype, versions), table in FORMULAS.items() for stage in table],
    ids=str,
)
def test_bytes_per_parameter(dtype: torch.dtype, versions: int, stage: int, hidden: int) -> None:
    replicated, sharded = FORMULAS[dtype, versions][stage]
    for rank in run_ranks(body_bytes, 4, hidden, stage, dtype, versions):
        held, scratch = rank["held"], rank["scratch"]
        want = (replicated + sharded / 4) * rank["numel"]
        assert sum(held.values()) == pytest.approx(want, rel=0.02), held
        largest = 12 * hidden * hidden * 4
        assert scratch == 0 if stage < 2 else 0 < scratch <= 2 * 1.02 * largest
        assert rank["after_step"][-1] <= (want + scratch) * 1.02, "something is held beyond the formula"


def body_leak(world: World, stage: int, steps: int) -> list[int]:
    """Live bytes after each step of a small model that is really trained, two micro-batches a step."""
    mesh = ParallelMesh.build(rank=world.rank, size=world.size)
    layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(3))
    named = [(f"layers.{i}.{n}", p) for i, layer in enumerate(layers) for n, p in layer.named_parameters()]
    options = ZeroOptions(stage, overlap_grad_reduce=True, overlap_param_gather=True, bucket_size=1000)
    buffers = ParameterBuffers([named], axes=mesh.family(), options=options)
    buffers.weights.attach(list(layers))
    optimizer = ShardedOptimizer(
        [buffers], make_optimizer=lambda g: torch.optim.AdamW(g, fused=True), norm_axis=mesh.world
    )
    sizes = []
    for step in range(steps):
        buffers.gradients.begin_batch(2)
        for _ in range(2):
            x = torch.ones(4, 32)
            for layer in layers:
                x = layer(x).tanh()
            x.sum().backward()
            del x
        buffers.gradients.start_reduce()
        buffers.gradients.finish_reduce()
        optimizer.step(lr=0.1, weight_decay=0.1)
        if step % 20 == 0:
            sizes.append(live_bytes())
    return sizes


@pytest.mark.landing
@pytest.mark.parametrize("stage", [*(pytest.param(stage, marks=pytest.mark.full) for stage in range(3)), 3])
def test_nothing_grows_over_200_steps(stage: int) -> None:
    for sizes in run_ranks(body_leak, 2, stage, 200):
        assert len(set(sizes[1:])) == 1, f"live bytes change: {sorted(set(sizes[1:]))}"


# ---- what comes and goes ---------------------------------------------------------------------------------------------


class Watch:
    """Storages of scratch that are alive, whoever holds them, and layers of weights that are gathered."""

    def __init__(self, buffers: list[ParameterBuffers]) -> None:
        self.most_scratch = self.most_layers = 0
        self.pieces: list[StorageWeakRef] = []
        self.gathered: set[BucketWeights] = set()
        for pool in {b.rank_memory.scratch(b.gradient_dtype) for b in buffers}:
            self.count_pieces(pool)
        for weights in (bucket.weights[0] for b in buffers for bucket in b.buckets):
            self.count_gathers(weights)

    def count_pieces(self, pool: ScratchPool) -> None:
        take = pool.take

        def watched(numel: int) -> Tensor:
            piece = take(numel)
            storage = StorageWeakRef(piece.untyped_storage())
            self.pieces = [p for p in {p.cdata: p for p in [*self.pieces, storage]}.values() if not p.expired()]
            self.most_scratch = max(self.most_scratch, len(self.pieces))
            return piece

        pool.take = watched  # type: ignore[method-assign]

    def count_gathers(self, weights: BucketWeights) -> None:
        start = weights.start_gather

        def counted(*, async_op: bool) -> None:
            start(async_op=async_op)
            self.gathered = {w for w in (*self.gathered, weights) if w.resident}
            self.most_layers = max(self.most_layers, len(self.gathered))

        weights.start_gather = counted  # type: ignore[method-assign]


def chunk_of_gpt(begin: int, end: int, queue: WeightGradQueue) -> LayerStack:
    """Layers [begin, end) of [embedding, four blocks, head]."""
    config = ModelConfig(
        num_layers=4,
        hidden_size=128,
        num_attention_heads=2,
        seq_length=8,
        vocab_size=512,
        untie_embeddings_and_output_weights=True,
    )
    context = LayerContext(weight_grads=queue, dtype=torch.float64)
    return build_stack(config, layer_specs(config)[begin:end], context, init_seed=1)


def batch_of(rank: int, number: int) -> Microbatch:
    ids = torch.randint(0, 512, (1, 9), generator=torch.Generator().manual_seed(10 * rank + number))
    s = torch.arange(8)[None]
    return Microbatch(ids[:, :-1], ids[:, 1:], s, torch.ones(1, 8), torch.arange(1), None)


def body_scratch(
    world: World, stage: int, cuts: list[tuple[int, int]], delay: int | None
) -> tuple[int, int, list[Tensor]]:
    """Trains two batches of three micro-batches; the weight gradients of one are computed after the input gradients of
    `delay` more (None: backward is not split). Most pieces of scratch and most gathered layers at once; weights."""
    mesh = ParallelMesh.build(rank=world.rank, size=world.size)
    queues = [WeightGradQueue() for _ in cuts]
    chunks = [chunk_of_gpt(begin, end, queue) for (begin, end), queue in zip(cuts, queues, strict=True)]
    buffers: list[ParameterBuffers] = []
    options = ZeroOptions(stage, overlap_grad_reduce=True, overlap_param_gather=True)
    memory = RankMemory(torch.device("cpu"), options)
    for chunk in chunks:
        named = [chunk.logical_parameters()]
        buffers.append(ParameterBuffers(named, axes=mesh.family(), options=options, memory=memory))
        buffers[-1].weights.attach(chunk.ordered())
    optimizer = ShardedOptimizer(
        buffers, make_optimizer=lambda g: torch.optim.AdamW(g, eps=1e-5, fused=True), norm_axis=mesh.world
    )
    watch = Watch(buffers)
    for _ in range(2):
        for b in buffers:
            b.gradients.begin_batch(3)
        later: list[list[Callable[[], None]]] = []
        for number in range(3):
            x, batch = None, batch_of(world.rank, number)
            for chunk in chunks:
                x = chunk(x, batch)
            assert x is not None
            if delay is None:
                x.backward()
                continue
            collected = [queue.collect() for queue in queues]
            items = [held.__enter__() for held in collected]
            x.backward()
            for held in collected:
                held.__exit__(None, None, None)
            later.append([item for part in reversed(items) for item in part])
            if len(later) > delay:
                run_all(later.pop(0))
        for part in later:
            run_all(part)
        for b in buffers:
            b.gradients.start_reduce()
        for b in buffers:
            b.gradients.finish_reduce()
        optimizer.step(lr=0.01, weight_decay=0.1)
    most = watch.most_scratch, watch.most_layers
    for b in buffers:
        b.weights.unshard()
    return *most, [p.detach().clone() for c in chunks for p in c.parameters()]


def run_all(work: list[Callable[[], None]]) -> None:
    while work:
        work.pop(0)()


SHAPES: dict[str, tuple[list[tuple[int, int]], int | None]] = {
    "one chunk": ([(0, 6)], None),
    "two chunks": ([(0, 3), (3, 6)], None),
    "split backward": ([(0, 6)], 0),
    "split backward, one late": ([(0, 6)], 1),
    "two chunks, split backward, two late": ([(0, 2), (2, 6)], 2),
}


@pytest.mark.landing
@pytest.mark.parametrize("stage", [2, pytest.param(3, marks=pytest.mark.full)])
def test_two_pieces_of_scratch_and_three_layers_are_all_that_comes_and_goes(stage: int) -> None:
    """However the backward is cut: one bucket fills, one travels; a layer is used, one comes and one is going."""
    plain = run_ranks(body_scratch, 2, 0, *SHAPES["one chunk"])[0][2]
    for name, shape in SHAPES.items():
        for scratch, layers, weights in run_ranks(body_scratch, 2, stage, *shape):
            assert scratch <= 2, f"{name}: {scratch} pieces of scratch are alive at once"
            assert layers <= 3 or stage == 2, f"{name}: {layers} layers are gathered at once"
            for found, wanted in zip(weights, plain, strict=True):
                torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)


GPT = (
    "--num-layers 6 --hidden-size 192 --num-attention-heads 4 --seq-length 8 --vocab-size 1536 --micro-batch-size 1 "
    "--untie-embeddings-and-output-weights --train-iters 4 --lr 1e-3 --mock-data --tokenizer-type NullTokenizer "
    "--eval-iters 0 --num-workers 0 --no-exit-signal-handler --distributed-timeout-minutes 1"
)
PARAMETERS = 6 * (12 * 192 * 192 + 13 * 192) + (2 * 1536 + 8 + 2) * 192
LAYER = 12 * 192 * 192 + 13 * 192


def live_peak(work: Callable[[], None]) -> int:
    """The most bytes that `work` holds at once beyond what was there, by the allocator's own account."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        work()
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    held = most = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        held += event.nbytes()
        most = max(most, held)
    return most


def body_peak(world: World, flags: str) -> int:
    """Highest live bytes of a run: building, and two steps of two micro-batches."""

    def train() -> None:
        argv = f"{GPT} --global-batch-size {2 * world.size} {flags}".split()
        with open_run(parse(argv, world_size=world.size), world) as run:
            for _ in range(2):
                run.trainer.train_step(drain=True)

    return live_peak(train)


def test_the_peak_of_live_memory_falls_from_stage_to_stage() -> None:
    """3.3 million parameters and hardly an activation: what is left are the states, and what comes and goes."""
    peaks = [max(run_ranks(body_peak, 2, f"--zero-stage {stage}")) for stage in range(4)]
    assert peaks == sorted(peaks, reverse=True) and len(set(peaks)) == 4, peaks
    held = [16, 8 + 8 / 2, 4 + 12 / 2, 16 / 2]
    # gradients: one fills, one travels, half of one arrives; weights: two layers (three while one is going)
    come_and_go = [0, 4 * PARAMETERS / 2, 4 * 2.5 * LAYER, 4 * (2.5 + 3) * LAYER]
    activations = peaks[0] - held[0] * PARAMETERS
    assert 0 < activations < 0.1 * peaks[0]
    for stage, peak in enumerate(peaks):
        assert peak <= held[stage] * PARAMETERS + come_and_go[stage] + 1.1 * activations, f"stage {stage}: {peaks}"
    # stage 1 in small buckets (0.3 million elements and a matrix): halves of two arrive, not of all that are complete
    small = max(run_ranks(body_peak, 2, "--zero-stage 1 --ddp-bucket-size 300000"))
    assert small <= held[1] * PARAMETERS + 4 * (300_000 + 4 * 192 * 192) + 1.1 * activations, f"{small} of {peaks}"


def body_build(world: World, flags: str) -> int:
    """Highest live bytes while a run is built."""

    def build() -> None:
        with open_run(parse(f"{GPT} {flags}".split(), world_size=world.size), world):
            pass

    return live_peak(build)


def test_sharded_weights_are_never_whole_on_a_rank() -> None:
    """Four ranks build their quarters layer by layer; plain SGD keeps nothing that would hide the whole."""
    held = 8 / 4 * PARAMETERS
    peak = max(run_ranks(body_build, 4, "--zero-stage 3 --optimizer sgd --optimizer-args sgd_momentum=0"))
    assert held < peak <= held + 2 * 4 * LAYER, f"{peak} bytes at the highest, {held} to be held"
