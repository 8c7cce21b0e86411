"""Predict training runs that others have published, and print the error of each.

    python tools/compare_published.py              all of them (about half a minute)
    python tools/compare_published.py --source C E

Nothing is fitted to them: the numbers are those of the hardware files; what a source leaves open the search chooses.

A run is the flags of what its source tells; what the source leaves open (micro-batch, chunks, recomputation) the search
chooses, but for source D, whose own figures tell the micro-batch. Rates are turned into seconds by the FLOPs that
their source counts::

    model         ours: 6 per multiply-add of forward and backward, causal attention halved
    attention     the same with the whole square of attention (Megatron-LM until 2025, arXiv 2205.05198)
    recomputed    that and the forward of every layer once more (arXiv 2104.04473)
    6ND           6 per parameter and token
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import correlation, mean, median

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from command_line import ToolParser, run_tool
from megalite.config import Config, read_unjudged
from megalite.inventory import count_parameters, flops_per_iteration, model_layers
from megalite.planner import (
    DEEPSPEED_2021,
    LLAMA_2024,
    MEGATRON_2021,
    MEGATRON_2022,
    MEGATRON_2024,
    SEARCHED,
    TORCH_2023,
    Prediction,
    Roofline,
    Software,
    layout_text,
    load_hardware,
    predict,
    search,
)
from megalite.schedule import default_schedule

SOURCES = {
    "A": "NVIDIA/Megatron-LM, images/cases_april2021.png of April 2021; arXiv 2104.04473, table 1",
    "B": "NVIDIA/Megatron-LM, README of 2021 to 2023, 'GPT-3 Example'",
    "C": "arXiv 2205.05198, table 5; full: all recomputed, sel: sequence parallel, attention recomputed",
    "D": "arXiv 2201.11990, section 2.4",
    "E": "NVIDIA/Megatron-LM, images/model_table.png of July 2024 (Megatron-Core 0.8)",
    "F": "arXiv 2407.21783, table 4 (8,192 tokens)",
    "G": "mosaicml/llm-foundry, scripts/train/benchmarking/README.md (PyTorch FSDP)",
}
#: The program that each source ran.
PROGRAMS: dict[str, Software] = {
    "A": MEGATRON_2021,
    "B": MEGATRON_2021,
    "C": MEGATRON_2022,
    "D": DEEPSPEED_2021,
    "E": MEGATRON_2024,
    "F": LLAMA_2024,
    "G": TORCH_2023,
}


@dataclass(frozen=True)
class PublishedRun:
    """One measured run. source: key of SOURCES. schedules: what may have run it. rate: TFLOP/s of a device by the
    FLOPs that `counts` names, or tokens/s of a device where `counts` is "tokens"; seconds: of a step, where the source
    says so."""

    name: str
    source: str
    hardware: str
    devices: int
    flags: str
    rate: float | None = None
    counts: str = "attention"
    seconds: float | None = None
    schedules: tuple[str, ...] = ("1f1b",)


@dataclass(frozen=True)
class Compared:
    """A run and its prediction. fits: whether the planner thinks that it does."""

    run: PublishedRun
    published: float
    prediction: Prediction
    fits: bool

    @property
    def error(self) -> float:
        """Predicted over published seconds, less one."""
        return self.prediction.step_time / self.published - 1


BASE = "--lr 1e-4 --train-iters 1 --tokenizer-type NullTokenizer --mock-data --bf16"
EXPOSED = "--no-overlap-grad-reduce --no-overlap-param-gather"
FULL = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
PIPELINED = ("1f1b", "interleaved")


def _gpt(layers: int, hidden: int, heads: int, tp: int, pp: int, batch: int, more: str) -> str:
    return (
        f"--num-layers {layers} --hidden-size {hidden} --num-attention-heads {heads} --global-batch-size {batch} "
        f"--tensor-model-parallel-size {tp} --pipeline-model-parallel-size {pp} {more}"
    )


def _a100_table() -> Iterable[PublishedRun]:
    more = f"--vocab-size 51200 --seq-length 2048 --zero-stage 0 --no-sequence-parallel {FULL} {EXPOSED}"
    for size, layers, hidden, heads, model_parallel, devices, batch, rate in (
        ("1.7B", 24, 2304, 24, 1, 32, 512, 137.0),
        ("3.6B", 30, 3072, 32, 2, 64, 512, 138.0),
        ("7.5B", 36, 4096, 32, 4, 128, 512, 142.0),
        ("18B", 40, 6144, 48, 8, 256, 1024, 135.0),
        ("39B", 48, 8192, 64, 16, 512, 1536, 138.0),
        ("76B", 60, 10240, 80, 32, 1024, 1792, 140.0),
        ("145B", 80, 12288, 96, 64, 1536, 2304, 148.0),
        ("310B", 96, 16384, 128, 128, 1920, 2160, 155.0),
        ("530B", 105, 20480, 128, 280, 2520, 2520, 163.0),
        ("1T", 128, 25600, 160, 512, 3072, 3072, 163.0),
    ):
        tp = min(8, model_parallel)
        flags = _gpt(layers, hidden, heads, tp, model_parallel // tp, batch, more)
        yield PublishedRun(f"GPT {size}", "A", "a100-80gb", devices, flags, rate, "recomputed", schedules=PIPELINED)
    flags = _gpt(96, 12288, 96, 8, 16, 1536, f"{more} --micro-batch-size 1")
    yield PublishedRun("GPT-3 175B", "B", "a100-80gb", 1024, flags, seconds=32.0)


def _recomputation_table() -> Iterable[PublishedRun]:
    whole = f"--no-sequence-parallel {FULL}"
    part = "--sequence-parallel --recompute-granularity selective --attention-dropout 0.1 --hidden-dropout 0.1"
    more = f"--vocab-size 51200 --seq-length 2048 --zero-stage 0 {EXPOSED}"
    for size, layers, hidden, heads, pp, chunks, batch, micro, full, selective in (
        ("22B", 48, 6144, 64, 1, 1, 4, 4, 1.42, 1.10),
        ("175B", 96, 12288, 96, 8, 3, 64, 1, 18.13, 13.75),
        ("530B", 105, 20480, 128, 35, 3, 280, 1, 49.05, 37.83),
        ("1T", 128, 25600, 160, 64, 1, 512, 1, 94.42, 71.49),
    ):
        given = f"{more} --micro-batch-size {micro}"
        given += f" --virtual-pipeline-model-parallel-size {chunks}" if chunks > 1 else ""
        kinds = (default_schedule(chunks),)
        for name, flags, seconds in (("full", whole, full), ("sel", part, selective)):
            text = _gpt(layers, hidden, heads, 8, pp, batch, f"{given} {flags}")
            yield PublishedRun(f"{size} {name}", "C", "a100-80gb", 8 * pp, text, seconds=seconds, schedules=kinds)


def _mt_nlg() -> Iterable[PublishedRun]:
    """The source does not tell the micro-batch, but its three steps do: they lie on a line of 0.196 s a sample and 13 s
    beside, and 34 micro-batches of a bubble take 13 s where each has two samples."""
    more = "--vocab-size 50257 --seq-length 2048 --zero-stage 0 --no-sequence-parallel --micro-batch-size 2"
    more += f" {FULL} {EXPOSED}"
    for nodes, seconds in ((280, 60.1), (350, 50.2), (420, 44.4)):
        flags = _gpt(105, 20480, 128, 8, 35, 1920, more)
        yield PublishedRun("MT-NLG 530B", "D", "a100-80gb", 8 * nodes, flags, seconds=seconds)


def _h100_table() -> Iterable[PublishedRun]:
    more = "--vocab-size 131072 --seq-length 4096 --zero-stage 1"
    for size, layers, hidden, heads, tp, pp, batch, rate in (
        ("1.7B", 24, 2048, 16, 1, 1, 192, 408.8),
        ("7.1B", 30, 4096, 32, 2, 1, 192, 465.9),
        ("16B", 32, 6144, 48, 4, 1, 192, 489.1),
        ("32B", 48, 7168, 56, 8, 1, 192, 459.6),
        ("70B", 84, 8192, 64, 8, 2, 384, 419.7),
        ("119B", 92, 10240, 80, 8, 4, 768, 420.5),
        ("177B", 96, 12288, 96, 8, 6, 1152, 432.8),
        ("314B", 96, 16384, 128, 8, 8, 1536, 474.4),
        ("462B", 112, 18432, 144, 8, 16, 3072, 459.9),
    ):
        flags = _gpt(layers, hidden, heads, tp, pp, batch, f"{more} --sequence-parallel" if tp > 1 else more)
        yield PublishedRun(f"GPT {size}", "E", "h100", 48 * tp * pp, flags, rate, schedules=PIPELINED)


def _llama() -> Iterable[PublishedRun]:
    flags = (
        "--model-type llama --num-layers 126 --hidden-size 16384 --ffn-hidden-size 53248 --num-attention-heads 128 "
        "--num-query-groups 8 --seq-length 8192 --vocab-size 128256 --tensor-model-parallel-size 8 --sequence-parallel "
        "--pipeline-model-parallel-size 16 --global-batch-size 2048 --micro-batch-size 1"
    )
    for devices, rate in ((8192, 430.0), (16384, 400.0)):
        yield PublishedRun("Llama 3 405B", "F", "h100", devices, flags, rate, "6ND", schedules=PIPELINED)


def _fsdp() -> Iterable[PublishedRun]:
    shapes = {
        "1b": (24, 2048, 16),
        "3b": (32, 2560, 32),
        "7b": (32, 4096, 32),
        "13b": (40, 5120, 40),
        "30b": (48, 7168, 56),
        "70b": (80, 8192, 64),
    }
    for size, hardware, devices, micro, batch, again, rate in (
        ("1b", "a100-80gb", 8, 14, 448, False, 20513),
        ("3b", "a100-80gb", 8, 10, 160, False, 10811),
        ("7b", "a100-80gb", 8, 6, 96, False, 4641),
        ("13b", "a100-80gb", 8, 2, 48, False, 2262),
        ("30b", "a100-80gb", 8, 3, 504, True, 916),
        ("70b", "a100-80gb", 64, 8, 2048, True, 410),
        ("1b", "h100", 8, 14, 112, False, 45455),
        ("3b", "h100", 64, 6, 1152, False, 22525),
        ("7b", "h100", 8, 6, 48, False, 10643),
        ("13b", "h100", 64, 2, 128, False, 4800),
        ("30b", "h100", 32, 14, 1344, True, 2308),
        ("70b", "h100", 64, 8, 2048, True, 1039),
    ):
        more = f"--vocab-size 50368 --seq-length 2048 --zero-stage 3 --micro-batch-size {micro} {FULL if again else ''}"
        flags = _gpt(*shapes[size], 1, 1, batch, more)
        yield PublishedRun(f"MPT {size}", "G", hardware, devices, flags, float(rate), "tokens")


def published_runs() -> list[PublishedRun]:
    """All of them, by source."""
    tables = (_a100_table, _recomputation_table, _mt_nlg, _h100_table, _llama, _fsdp)
    return [run for runs in tables for run in runs()]


def published_flops(config: Config, counts: str) -> float:
    """FLOPs of a step by the convention that `counts` names."""
    model, batch = config.model, config.training.global_batch_size
    assert batch is not None
    tp = config.parallel.tensor_model_parallel_size
    tokens = 3.0 * batch * model.seq_length  # forward and backward
    half = tokens * sum(layer.flops(core=True) for layer in model_layers(model))
    whole = flops_per_iteration(model, batch, tp) + half
    logits = tokens * model_layers(model)[-1].flops(tp)
    return {
        "model": whole - half,
        "attention": whole,
        "recomputed": (whole - logits) * 4 / 3 + logits,
        "6ND": 6.0 * count_parameters(model) * batch * model.seq_length,
    }[counts]


def configured(run: PublishedRun) -> tuple[Config, frozenset[str]]:
    """(The run's configuration, the fields of the layout that its source gives)."""
    config, origins = read_unjudged([*BASE.split(), *run.flags.split()], optional=["micro_batch_size"])
    return config, frozenset(name for name in SEARCHED if name in origins)


def compare(runs: Iterable[PublishedRun]) -> list[Compared]:
    """What the planner predicts for each, by the rooflines of the hardware files."""
    return [_compare(run) for run in runs]


def _compare(run: PublishedRun) -> Compared:
    config, given = configured(run)
    published = run.seconds
    if published is None:
        assert run.rate is not None and config.training.global_batch_size is not None
        tokens = config.training.global_batch_size * config.model.seq_length
        work = tokens if run.counts == "tokens" else published_flops(config, run.counts) / 1e12
        published = work / (run.devices * run.rate)
    hardware = load_hardware(run.hardware)
    times = Roofline(hardware, PROGRAMS[run.source])
    best: tuple[Prediction, bool] | None = None
    for schedule in run.schedules:
        parallel = replace(config.parallel, pipeline_schedule=schedule)
        tried = replace(config, parallel=parallel)
        fixed = given | {"pipeline_schedule"}
        found = search(tried, run.devices, hardware, times, given=fixed, top=1, even=True)
        fits = bool(found.predictions)
        if not fits and not found.rejected:
            continue
        prediction = found.predictions[0] if fits else predict(found.rejected[0].config, run.devices, hardware, times)
        if best is None or (not fits, prediction.step_time) < (not best[1], best[0].step_time):
            best = (prediction, fits)
    assert best is not None, f"{run.name}: no layout is legal"
    return Compared(run, published, *best)


def by_table(compared: Sequence[Compared]) -> dict[str, tuple[float, float | None]]:
    """Mean error of each source's runs, and Spearman's correlation of published and predicted TFLOP/s (of three runs
    and more)."""
    found = {}
    for key in sorted({entry.run.source for entry in compared}):
        mine = [entry for entry in compared if entry.run.source == key]
        rates = [entry.prediction.tflops_per_device for entry in mine]
        published = [
            rate * entry.prediction.step_time / entry.published for rate, entry in zip(rates, mine, strict=True)
        ]
        order = correlation(_ranks(published), _ranks(rates)) if len(mine) > 2 else None
        found[key] = (mean(abs(entry.error) for entry in mine), order)
    return found


def _ranks(values: Sequence[float]) -> list[float]:
    return [sum(other < value for other in values) + sum(other == value for other in values) / 2 for value in values]


def table(compared: Sequence[Compared]) -> str:
    """One line a run, the median error, and the sources."""
    lines = [f"{'run':<16} {'devices':>7}  {'published s':>11}  {'predicted s':>11}  {'error':>6}  {'MFU':>5}  layout"]
    for entry in compared:
        lines.append(
            f"{entry.run.source} {entry.run.name:<14} {entry.run.devices:>7,}  {entry.published:>11.3g}  "
            f"{entry.prediction.step_time:>11.3g}  {entry.error:>+6.0%}  {entry.prediction.mfu:>5.0%}  "
            f"{layout_text(entry.prediction.config, entry.run.devices)}{'' if entry.fits else '; predicted not to fit'}"
        )
    for key, text in SOURCES.items():
        errors = [entry.error for entry in compared if entry.run.source == key]
        if errors:
            lines.append(f"{key}: {min(errors):+.0%} to {max(errors):+.0%}; {text}")
    for key, (error, order) in by_table(compared).items():
        told = "" if order is None else f", rank correlation of TFLOP/s {order:+.2f}"
        lines.append(f"{key}: mean error {error:.1%}{told}")
    sizes = [abs(entry.error) for entry in compared]
    within = sum(size <= 0.25 for size in sizes)
    lines.append(f"median error {median(sizes):.0%}, {within} of {len(sizes)} within 25 %, largest {max(sizes):.0%}")
    return "\n".join(lines)


def main(argv: list[str]) -> int:
    """Runs the tool; the exit status."""
    return run_tool(_run, argv)


def _run(argv: list[str]) -> None:
    parser = ToolParser(__doc__ or "")
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--source", nargs="+", choices=sorted(SOURCES), help="only the runs of these sources")
    args = parser.parse_args(argv)
    print(table(compare(run for run in published_runs() if args.source is None or run.source in args.source)))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
