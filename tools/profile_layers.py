"""Time the layers of a model on the device at hand, for `tools/plan.py --profile`.

    python tools/profile_layers.py <flags of pretrain_gpt.py> --output profile.json [--micro-batches 1,2,4] [--quick]
    OMP_NUM_THREADS=1 python tools/profile_layers.py <flags> --output profile.json --num-processes 2

Embedding, blocks and head are built as a run builds them (flat buffers, gradients straight into them) and timed as
forward, input gradient, weight gradient and whole backward, at every tensor-parallel size that the processes allow;
then the optimizer step, what a step costs besides its actions, and the links between the processes. Processes that
share a machine share its memory and its clock: all of them compute at the same moments, and the slowest counts. Turns
in which other programs used more than 0.3 of a core are made again, three times at most; --beside-others counts them.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megalite.extras import require_core

require_core()

import torch
from torch import Tensor

from command_line import ToolParser, check_numbers, name_ignored, run_tool
from megalite.comm import (
    Axis,
    Channel,
    FamilyAxes,
    MessageLabel,
    ParallelMesh,
    TensorSpec,
    World,
    all_gather_into,
    all_reduce_,
    reduce_scatter_into,
    share_axis,
)
from megalite.config import VOCABULARIES, BatchRamp, Config, TrainingLength, ids_of_files, read_unjudged
from megalite.engine import rule_maker
from megalite.errors import ConfigError
from megalite.gradient import WeightGradQueue
from megalite.launch import launch
from megalite.microbatch import Microbatch
from megalite.models import build_stack, layer_specs
from megalite.parallel.pipeline import Stage
from megalite.parallel.tensor import LayerContext
from megalite.parallel.zero import ParameterBuffers, ShardedOptimizer
from megalite.planner import measured_model
from megalite.progress import ProgressBar, no_progress
from megalite.train import open_run, parameter_dtype, wide_dtype, zero_options
from quiet_turns import Bench, Tally, Work

#: Blocks of the stage that is timed: with one alone a CPU would have its weights in the cache.
BLOCKS_CPU, BLOCKS_CUDA = 4, 1


def parser() -> argparse.ArgumentParser:
    """The tool's own flags; everything else is the training's."""
    p = ToolParser(__doc__ or "")
    p.formatter_class = argparse.RawDescriptionHelpFormatter
    p.add_argument("--output", required=True, metavar="FILE", help="JSON to write")
    p.add_argument("--num-processes", type=int, default=1, metavar="N", help="that compute side by side (default 1)")
    p.add_argument("--micro-batches", default="1,2,4", metavar="B,...", help="sizes to time (default 1,2,4)")
    p.add_argument("--repeats", type=int, default=15, metavar="N", help="of each measurement, whose median counts")
    p.add_argument("--quick", action="store_true", help="three repeats")
    p.add_argument("--beside-others", action="store_true", help="do not wait until other programs are quiet")
    return p


def profile_point(bench: Bench, tp: Axis, *, sequence_parallel: bool) -> dict[str, list[float]]:
    """Layer kind -> [F, I, W, I + W - B] in seconds, for the configuration's micro-batch."""
    layers = bench.config.model.num_layers
    blocks = min(layers, BLOCKS_CPU if bench.device.type == "cpu" else BLOCKS_CUDA)
    items = {"embedding": range(0, 1), "block": range(1, 1 + blocks), "head": range(layers + 1, layers + 2)}
    point = {}
    for kind, indices in items.items():
        stage, buffers = build_stage(bench.config, indices, bench.device, tp, sequence_parallel=sequence_parallel)
        times = bench.medians(_turn_of_layers(stage, buffers, bench))
        times = {name: value / len(indices) for name, value in times.items()}
        hidden = times["I"] + times["W"] - times["B"]
        point[kind] = [times["F"], times["I"], times["W"], hidden]
    return point


def build_stage(
    config: Config, items: range, device: torch.device, tp: Axis | None = None, *, sequence_parallel: bool = False
) -> tuple[Stage, ParameterBuffers]:
    """One stage as a run without data parallelism builds it. items: indices into [embedding, block 0, ..., head]."""
    single = Axis.single
    tp = single("tp") if tp is None else tp
    queue = WeightGradQueue()
    context = LayerContext(
        tp=tp,
        sequence_parallel=sequence_parallel,
        dtype=parameter_dtype(config),
        device=device,
        seed=config.training.seed,
        weight_grads=queue,
        float8=config.training.float8,
        keeps_float8=config.keeps_float8,
    )
    specs = layer_specs(config.model)
    module = build_stack(config.model, [specs[i] for i in items], context, init_seed=1)
    if config.training.compile:
        module.compile_blocks(on_device=device.type != "cpu")
    buffers = ParameterBuffers(
        [module.logical_parameters()],
        axes=FamilyAxes("dense", (tp,), single("dp_shard"), single("dp_replicate")),
        options=replace(zero_options(config), stage=0),
    )
    model = config.model
    length = model.seq_length // tp.size if sequence_parallel else model.seq_length
    shape = (length, config.training.micro_batch_size, model.hidden_size)
    dtype = wide_dtype(config) if model.fp32_residual_connection else parameter_dtype(config)
    first, last = items[0] == 0, items[-1] == model.num_layers + 1
    return Stage([module], queue, spec=TensorSpec(shape, dtype, device), is_first=first, is_last=last), buffers


def _microbatch(config: Config, device: torch.device) -> Microbatch:
    samples, length = config.training.micro_batch_size, config.model.seq_length
    ids = torch.randint(0, config.model.vocab_size, (samples, length), generator=torch.Generator().manual_seed(1))
    return Microbatch(
        tokens=ids.to(device),
        labels=ids.to(device),
        positions=torch.arange(length, device=device).expand(samples, length),
        loss_mask=torch.ones(samples, length, device=device),
        document_starts=None,
        sample_ids=torch.arange(samples, device=device),
    )


def _turn_of_layers(stage: Stage, buffers: ParameterBuffers, bench: Bench) -> Work:
    """Two micro-batches in flight, as in a pipeline: what the first left is not in the cache when its turn comes."""
    microbatch, spec = _microbatch(bench.config, bench.device), stage.spec
    x = None if stage.is_first else torch.randn(spec.shape, device=bench.device).to(spec.dtype)
    dy = None if stage.is_last else torch.randn(spec.shape, device=bench.device).to(spec.dtype)
    factor = torch.ones((), device=bench.device)

    def forward(number: int) -> float:
        return bench.clock(lambda: stage.forward(number, x, microbatch, factor, version=0))

    def turn() -> dict[str, float]:
        buffers.gradients.begin_batch()
        forwards = [forward(0), forward(1)]
        # The first backward after `begin_batch` writes gradients, the others add to them.
        stage.backward(0, dy)
        forwards.append(forward(2))
        found = {"B": bench.clock(lambda: stage.backward(1, dy))}
        found["I"] = bench.clock(lambda: stage.backward_input(2, dy))
        found["W"] = bench.clock(lambda: stage.backward_weight(2))
        return found | {"F": statistics.median(forwards)}

    return turn


def update_seconds(bench: Bench, optimizer: ShardedOptimizer) -> dict[str, float]:
    """One update as a run makes it: the norm, then the step with what clipping leaves."""

    def update() -> None:
        norm = float(optimizer.grad_norm())
        optimizer.step(lr=1e-3, weight_decay=0.1, grad_scale=min(1.0, 1.0 / (norm + 1e-6)))

    return {"step": bench.clock(update)}


def optimizer_seconds(bench: Bench) -> list[float]:
    """[Fixed seconds of an update, and seconds per owned element, for] norm, clipping and step."""
    points = []
    most = min(bench.config.model.num_layers, 2 * BLOCKS_CPU if bench.device.type == "cpu" else 2 * BLOCKS_CUDA)
    single = Axis.single
    for blocks in sorted({1, most}):
        _, buffers = build_stage(bench.config, range(1, 1 + blocks), bench.device)
        optimizer = ShardedOptimizer(
            [buffers],
            make_optimizer=rule_maker(bench.config.optimizer, bench.config.staleness),
            norm_axis=single("model"),
        )

        seconds = bench.medians(partial(update_seconds, bench, optimizer))["step"]
        points.append((sum(bucket.numel for bucket in buffers.buckets), seconds))
    (small, less), (large, more) = points[0], points[-1]
    rate = max(0.0, (more - less) / (large - small)) if large > small else more / large
    return [max(0.0, more - rate * large), rate]


def step_seconds(bench: Bench, world: World) -> list[float]:
    """[Seconds of a step besides its actions (losses, bookkeeping), seconds of data per sample of this rank]."""
    samples = 2 * bench.config.training.micro_batch_size
    model = replace(bench.config.model, num_layers=1)
    training = replace(
        bench.config.training,
        global_batch_size=samples * world.size,
        length=TrainingLength(train_iters=10_000),
        batch_ramp=BatchRamp(),
        seq_length_schedule=None,
    )
    checkpoint = replace(bench.config.checkpoint, save=None, load=None)
    config = replace(bench.config, model=model, training=training, checkpoint=checkpoint)
    with open_run(config, world) as run:
        executor = run.trainer.executor

        def step() -> dict[str, float]:
            executor.trace = []
            stats = run.trainer.train_step(drain=False)
            actions = sum(span.end - span.start for span in executor.trace)
            return {"beside": stats.iteration_time_s - actions, "data": stats.data_time_s}

        found = bench.medians(step)
    return [found["beside"], found["data"] / samples]


LINK_BYTES = (1 << 16, 1 << 23)


def link_seconds(bench: Bench, world: World) -> dict[str, list[float]]:
    """Operation -> [latency in s, bytes per s] between the processes, as `communication.Group` counts bytes."""
    if world.size == 1:
        return {}
    dp = ParallelMesh.build(rank=world.rank, size=world.size)["dp"]
    line = ParallelMesh.build(rank=world.rank, size=world.size, pp=world.size)
    channel = Channel(line.over("pp", apart="down"), line.over("pp", apart="up"), [(0, 1)])
    points: dict[str, list[float]] = {"all_reduce": [], "gather": [], "send": []}
    for nbytes in LINK_BYTES:
        whole = torch.zeros(nbytes // 4 // world.size * world.size, device=bench.device)
        part = torch.zeros(whole.numel() // world.size, device=bench.device)

        def collectives(whole: Tensor = whole, part: Tensor = part) -> dict[str, float]:
            both = bench.clock(lambda: reduce_scatter_into(part, whole, dp))
            both += bench.clock(lambda: all_gather_into(whole, part, dp))
            return {"all_reduce": bench.clock(lambda: all_reduce_(whole, dp)), "gather": both / 2}

        def there_and_back(whole: Tensor = whole) -> dict[str, float]:
            return {"send": bench.clock(lambda: _there_and_back(channel, whole, line.coordinate("pp"))) / 2}

        for name, seconds in (bench.medians(collectives) | bench.medians(there_and_back)).items():
            points[name].append(seconds)
    share = (world.size - 1) / world.size
    moved = {"all_reduce": 2 * share, "gather": share, "send": 1.0}
    small, large = LINK_BYTES
    links = {}
    for name, (less, more) in points.items():
        rate = (large - small) * moved[name] / max(1e-9, more - less)
        links[name] = [max(0.0, less - small * moved[name] / rate), rate]
    return links


def _there_and_back(channel: Channel, x: Tensor, rank: int) -> None:
    """Ranks 0 and 1 pass a message to each other once; the others rest."""
    spec = TensorSpec(tuple(x.shape), x.dtype, x.device)
    if rank == 0:
        back = channel.post_recv(spec, peer=1, label=MessageLabel("B", 0, 0))
        channel.send(x, peer=1, label=MessageLabel("F", 1, 0))
        back.wait()
    elif rank == 1:
        channel.post_recv(spec, peer=0, label=MessageLabel("F", 1, 0)).wait()
        channel.send(x, peer=0, label=MessageLabel("B", 0, 0))
    channel.flush()


def tensor_sizes(config: Config, processes: int) -> list[tuple[int, bool]]:
    """(Tensor-parallel size, whether the sequence is split as well) of what is timed."""
    model = config.model
    divided = (model.num_attention_heads, model.query_groups, model.ffn_size, processes)
    sizes = [tp for tp in range(1, processes + 1) if not any(number % tp for number in divided)]
    return [
        (tp, split) for tp in sizes for split in (False, True) if not split or (tp > 1 and not model.seq_length % tp)
    ]


def measurements(config: Config, processes: int, micro_batches: Sequence[int]) -> int:
    """How many `measure` makes: three a point, the optimizer at two sizes, a step, two a message between processes."""
    points = len(tensor_sizes(config, processes)) * len(micro_batches)
    return 3 * points + min(config.model.num_layers, 2) + 1 + 2 * len(LINK_BYTES) * (processes > 1)


def measure(bench: Bench, world: World, micro_batches: Sequence[int]) -> dict[str, Any]:
    """The content of a profile file. Collective."""
    config, points = bench.config, []
    for tp, split in tensor_sizes(config, world.size):
        axis = ParallelMesh.build(rank=world.rank, size=world.size, tp=tp)["tp"]
        if world.device.type == "cpu":
            axis = share_axis(axis, timeout=600.0)
        for micro in micro_batches:
            sized = replace(config, training=replace(config.training, micro_batch_size=micro))
            point: dict[str, object] = {"tensor_model_parallel_size": tp, "sequence_parallel": split}
            point["micro_batch_size"] = micro
            points.append(point | profile_point(replace(bench, config=sized), axis, sequence_parallel=split))
    sized = replace(config, training=replace(config.training, micro_batch_size=micro_batches[0]))
    return {
        "device": torch.cuda.get_device_name(world.device) if world.device.type == "cuda" else "cpu",
        "threads": torch.get_num_threads(),
        "processes": world.size,
        "model": measured_model(config),
        "points": points,
        "optimizer": optimizer_seconds(bench),
        "step": step_seconds(replace(bench, config=sized), world),
        "links": link_seconds(bench, world),
    }


def main(argv: list[str]) -> int:
    """Runs the tool; the exit status."""
    return run_tool(_run, argv)


def settings(argv: list[str]) -> tuple[argparse.Namespace, Config, list[int]]:
    """The tool's flags, the training's, and the micro-batches to time. Raises ConfigError."""
    args, rest = parser().parse_known_args(argv)
    sizes = args.micro_batches.split(",")
    if not all(size.isdecimal() and 0 < int(size) <= 1 << 20 for size in sizes):
        raise ConfigError(f"--micro-batches={args.micro_batches}: sizes above 0 and commas between them, such as 1,2,4")
    check_numbers(args, num_processes=(1, 1 << 16), repeats=(1, 10**6))
    folder = Path(args.output).absolute().parent
    if Path(args.output).is_dir() or not folder.is_dir():
        raise ConfigError(f"--output={args.output}: cannot be written; name a file in a folder that exists")
    config, _ = read_unjudged(rest, optional=["micro_batch_size", "lr"])
    name_ignored(rest)
    if config.model.vocab_size == 0:
        size = ids_of_files(config.data) or VOCABULARIES.get(config.data.tokenizer_type or "")
        if size is None:
            raise ConfigError("--vocab-size: not given, and no tokenizer.json is named; give the number of its tokens")
        config = replace(config, model=replace(config.model, vocab_size=size))
    if config.model.is_foreign:
        name = config.model.module.model_module
        raise ConfigError(f"--model-module={name}: megalite.time_layers times layers of your own (docs/library.md)")
    return args, config, [int(size) for size in sizes]


def _run(argv: list[str]) -> int:
    args, config, sizes = settings(argv)
    parallel = replace(
        config.parallel,
        nprocs=args.num_processes,
        tensor_model_parallel_size=1,
        pipeline_model_parallel_size=1,
        sequence_parallel=False,
        pipeline_schedule=None,
        virtual_pipeline_model_parallel_size=None,
    )
    repeats = 3 if args.quick else args.repeats

    def body(alone: Config, world: World) -> int:
        tally = Tally(measurements(alone, world.size, sizes))
        everybody = ParallelMesh.build(rank=world.rank, size=world.size).world
        bench = Bench(alone, everybody, world.device, repeats, tally, args.beside_others)
        with ProgressBar("measuring", "measurements") as bar:
            tally.on_progress = bar if world.is_first else no_progress
            found = measure(bench, world, sizes)
        if world.is_first:
            Path(args.output).write_text(json.dumps(found, indent=1))
            print(f"{args.output}: {len(found['points'])} points on {found['device']}")
            for line in tally.remarks():
                print(line, file=sys.stderr)
        return 0

    return launch(replace(config, parallel=parallel), body)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
