"""Time the layers of a model on the device at hand, for `tools/plan.py --profile`.

    python tools/profile_layers.py <flags of pretrain_gpt.py> --output profile.json [--micro-batches 1,2,4] [--quick]

One process, one device: the embedding, a block and the head are built as a run builds them (flat buffers, gradients
straight into them) and timed as forward, input gradient, weight gradient and whole backward; then the optimizer step.
Tensor parallelism is not timed: the planner adds its messages from the hardware file.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from torch import Tensor

from megalite.comm.mesh import Axis
from megalite.comm.p2p import TensorSpec
from megalite.config import Config
from megalite.config.cli import read_unjudged
from megalite.errors import ConfigError, MegaliteError
from megalite.gradient import WeightGradQueue
from megalite.microbatch import Microbatch
from megalite.models import build_stack, layer_specs
from megalite.nn.context import LayerContext
from megalite.parallel.pipeline.stage import Stage
from megalite.parallel.zero import ParameterBuffers, ShardedOptimizer
from megalite.training.build import optimizer_factory, parameter_dtype, wide_dtype, zero_options


def parser() -> argparse.ArgumentParser:
    """The tool's own flags; everything else is the training's."""
    p = argparse.ArgumentParser(prog="profile_layers.py", description=__doc__, allow_abbrev=False)
    p.add_argument("--output", required=True, metavar="FILE", help="JSON to write")
    p.add_argument("--micro-batches", default="1,2,4", metavar="B,...", help="sizes to time (default 1,2,4)")
    p.add_argument("--repeats", type=int, default=15, metavar="N", help="of each measurement, whose median counts")
    p.add_argument("--quick", action="store_true", help="three repeats")
    return p


def profile_point(config: Config, device: torch.device, repeats: int) -> dict[str, list[float]]:
    """Layer kind -> [F, I, W, I + W - B] in seconds, for the configuration's micro-batch."""
    layers = config.model.num_layers
    items = {"embedding": range(0, 1), "block": range(1, 2), "head": range(layers + 1, layers + 2)}
    point = {}
    for kind, indices in items.items():
        stage, _ = build_stage(config, indices, device)
        point[kind] = _times(stage, config, device, repeats)
    return point


def build_stage(config: Config, items: range, device: torch.device) -> tuple[Stage, ParameterBuffers]:
    """One stage as a run without parallelism builds it. items: indices into [embedding, block 0, ..., head]."""
    single = Axis.single
    queue = WeightGradQueue()
    context = LayerContext(
        tp=single("tp"),
        sequence_parallel=False,
        dtype=parameter_dtype(config),
        device=device,
        seed=config.training.seed,
        weight_grads=queue,
        autograd_only=False,
    )
    specs = layer_specs(config.model)
    module = build_stack(config.model, [specs[i] for i in items], context, init_seed=1)
    buffers = ParameterBuffers(
        [module.logical_parameters()],
        dp_shard=single("dp"),
        dp_replicate=single("dp_replicate"),
        tp=single("tp"),
        options=replace(zero_options(config), stage=0),
    )
    model = config.model
    shape = (model.seq_length, config.training.micro_batch_size, model.hidden_size)
    dtype = wide_dtype(config) if model.fp32_residual_connection else parameter_dtype(config)
    first, last = items[0] == 0, items[-1] == model.num_layers + 1
    return Stage([module], queue, spec=TensorSpec(shape, dtype, device), is_first=first, is_last=last), buffers


def _batch(config: Config, device: torch.device) -> Microbatch:
    samples, length = config.training.micro_batch_size, config.model.seq_length
    ids = torch.randint(0, config.model.vocab_size, (samples, length), generator=torch.Generator().manual_seed(1))
    return Microbatch(
        tokens=ids.to(device),
        labels=ids.to(device),
        positions=torch.arange(length, device=device).expand(samples, length),
        loss_mask=torch.ones(samples, length, device=device),
        document_ids=None,
        sample_ids=torch.arange(samples, device=device),
    )


def _times(stage: Stage, config: Config, device: torch.device, repeats: int) -> list[float]:
    batch, spec = _batch(config, device), stage.spec
    x = None if stage.is_first else torch.randn(spec.shape, device=device).to(spec.dtype)
    dy = None if stage.is_last else torch.randn(spec.shape, device=device).to(spec.dtype)
    factor = torch.ones((), device=device)
    seconds: dict[str, list[float]] = {"F": [], "I": [], "W": [], "B": []}
    for turn in range(repeats + 2):
        found = {"F": _clock(device, lambda: stage.forward(0, x, batch, factor, version=0))}
        found["I"] = _clock(device, lambda: stage.backward_input(0, dy))
        found["W"] = _clock(device, lambda: stage.backward_weight(0))
        stage.forward(0, x, batch, factor, version=0)
        found["B"] = _clock(device, lambda: stage.backward(0, dy))
        if turn >= 2:  # the first two warm caches and the allocator
            for name, value in found.items():
                seconds[name].append(value)
    median = {name: statistics.median(values) for name, values in seconds.items()}
    return [median["F"], median["I"], median["W"], median["I"] + median["W"] - median["B"]]


def _clock(device: torch.device, run: Callable[[], Tensor | None]) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    begin = time.perf_counter()
    run()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - begin


def optimizer_seconds(config: Config, device: torch.device, repeats: int) -> float:
    """Seconds per owned element of norm, clipping and step, over two blocks."""
    _, buffers = build_stage(config, range(1, min(3, config.model.num_layers + 1)), device)
    single = Axis.single
    optimizer = ShardedOptimizer(
        [buffers], make_optimizer=optimizer_factory(config, single("tp")), model_axis=single("model")
    )
    seconds = []
    for _ in range(repeats + 1):
        begin = time.perf_counter()
        norm = float(optimizer.grad_norm())
        optimizer.step(lr=1e-3, weight_decay=0.1, grad_scale=min(1.0, 1.0 / (norm + 1e-6)))
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - begin)
    return statistics.median(seconds[1:]) / buffers.numel


def measure(config: Config, micro_batches: list[int], repeats: int) -> dict[str, object]:
    """The content of a profile file."""
    device = torch.device("cuda" if torch.cuda.is_available() and config.parallel.device != "cpu" else "cpu")
    points = []
    for micro in micro_batches:
        sized = replace(config, training=replace(config.training, micro_batch_size=micro))
        point: dict[str, object] = {"tensor_model_parallel_size": 1, "micro_batch_size": micro}
        points.append(point | profile_point(sized, device, repeats))
    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "threads": torch.get_num_threads(),
        "points": points,
        "optimizer_seconds_per_element": optimizer_seconds(config, device, repeats),
    }


def main(argv: list[str]) -> int:
    """Runs the tool; the exit status."""
    args, rest = parser().parse_known_args(argv)
    try:
        config, _ = read_unjudged(rest, optional=["micro_batch_size"])
        sizes = args.micro_batches.split(",")
        if config.model.vocab_size == 0 or not all(size.isdigit() and int(size) > 0 for size in sizes):
            raise ConfigError(f"--micro-batches={args.micro_batches}: sizes; and --vocab-size must be given")
        found = measure(config, [int(size) for size in sizes], 3 if args.quick else args.repeats)
    except MegaliteError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    Path(args.output).write_text(json.dumps(found, indent=1))
    print(f"{args.output}: {len(found['points'])} points on {found['device']}")  # type: ignore[arg-type]
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
