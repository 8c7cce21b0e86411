"""What a search found, as a table for people and as JSON for programs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megalite.config import Config
from megalite.config.arithmetic import FLOPS_CONVENTION
from megalite.planner.hardware import Hardware
from megalite.planner.predict import Prediction
from megalite.planner.search import Found, pareto
from megalite.planner.space import layout_of

__all__ = ["as_json", "cost_of_training", "layout_text", "limit_of", "summary", "table"]

GIB = 2**30


def layout_text(config: Config, world_size: int) -> str:
    """`tp8 sp pp16 x 6 chunks dp8, interleaved, zero1, micro-batch 1, recompute full`."""
    layout = layout_of(config)
    dp = world_size // layout.tensor_model_parallel_size // layout.pipeline_model_parallel_size
    parts = [f"tp{layout.tensor_model_parallel_size}" + "+sp" * layout.sequence_parallel]
    parts.append(f"pp{layout.pipeline_model_parallel_size}")
    if layout.pipeline_model_parallel_size > 1:
        parts[-1] += f"x{layout.chunks}" if layout.chunks > 1 else ""
        parts[-1] += f" {layout.pipeline_schedule}"
    parts += [f"dp{dp}" + f" zero{layout.zero_stage}" * (layout.zero_stage > 0), f"mb{layout.micro_batch_size}"]
    parts += [f"recompute {layout.recompute_granularity}"] if layout.recompute_granularity else []
    return ", ".join(parts)


def limit_of(prediction: Prediction, hardware: Hardware) -> str:
    """What a faster run of this layout would need first."""
    bubble = prediction.bubble_over_ideal / (1 + prediction.bubble_over_ideal)
    step = prediction.step_time
    shares = {
        "pipeline bubble": bubble * prediction.parts["pipeline"] / step,
        "data-parallel messages": prediction.parts["data_parallel"] / step,
        "optimizer step": prediction.parts["optimizer"] / step,
        "sums of shared weights": prediction.parts["shared_weights"] / step,
    }
    worst = max(shares, key=lambda name: shares[name])
    text = f"{worst} {shares[worst]:.0%}" if shares[worst] >= 0.05 else "computation"
    full = prediction.memory_bytes / hardware.usable_bytes
    return text + (f"; memory {full:.0%} full" if full > 0.9 else "")


def as_json(prediction: Prediction, hardware: Hardware) -> dict[str, Any]:
    """One candidate."""
    return {
        "layout": layout_of(prediction.config).as_dict(prediction.world_size),
        "step_time_s": prediction.step_time,
        "tokens_per_s": prediction.tokens_per_s,
        "tflops_per_device": prediction.tflops_per_device,
        "hardware_tflops_per_device": prediction.hardware_tflops_per_device,
        "mfu": prediction.mfu,
        "memory_bytes_per_rank": prediction.memory[prediction.fullest].by_term(),
        "memory_bytes_of_pipeline_ranks": [memory.by_term() for memory in prediction.memory],
        "fullest_pipeline_rank": prediction.fullest,
        "bubble_over_ideal": prediction.bubble_over_ideal,
        "step_time_parts_s": prediction.parts,
        "limited_by": limit_of(prediction, hardware),
    }


def table(predictions: Sequence[Prediction], hardware: Hardware) -> str:
    """Ranked, one line each; `*` marks the Pareto front of time against memory."""
    front = {id(prediction) for prediction in pareto(predictions)}
    rows = [("", "layout", "step s", "tokens/s", "TFLOP/s", "MFU", "GiB", "bubble", "limited by")]
    for number, prediction in enumerate(predictions, 1):
        rows.append(
            (
                f"{number}{'*' if id(prediction) in front else ' '}",
                layout_text(prediction.config, prediction.world_size),
                f"{prediction.step_time:.4g}",
                f"{prediction.tokens_per_s:,.0f}",
                f"{prediction.tflops_per_device:.4g}",
                f"{prediction.mfu:.1%}",
                f"{prediction.memory_bytes / GIB:.1f}",
                f"{prediction.bubble_over_ideal:.1%}",
                limit_of(prediction, hardware),
            )
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [
            cell.ljust(width) if column in (1, 8) else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def summary(found: Found, world_size: int, hardware: Hardware, top: int) -> str:
    """The table with its legend."""
    shown = found.predictions[:top]
    best = shown[0]
    lines = [
        f"{world_size} x {hardware.name}, {hardware.devices_per_node} a node; {found.considered:,} layouts ranked, "
        f"{len(found.predictions)} that fit simulated",
        "",
        table(shown, hardware),
        "",
        f"* Pareto front of time against memory. {FLOPS_CONVENTION}. Memory: of the fullest rank, of "
        f"{hardware.usable_bytes / GIB:.1f} GiB that tensors may use.",
    ]
    memory = best.memory[best.fullest]
    terms = [f"{name} {value / GIB:.2f}" for name, value in memory.by_term().items() if value]
    lines.append(f"1: GiB on pipeline rank {best.fullest}: {', '.join(terms)}")
    lines.append(f"1: {cost_of_training(best, hardware)}")
    return "\n".join(lines)


def cost_of_training(prediction: Prediction, hardware: Hardware) -> str:
    """Time and energy of the whole training."""
    world = prediction.world_size
    iterations = prediction.config.train_iterations(world)
    seconds = iterations * prediction.step_time
    energy = seconds * world * hardware.power / 3.6e9
    tokens = prediction.config.total_train_samples(world) * prediction.config.model.seq_length
    return f"{tokens / 1e9:,.4g} G tokens take {seconds / 86400:,.3g} days and about {energy:,.3g} MWh"
