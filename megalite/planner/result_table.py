"""What a search found, as a table for people and as JSON for programs."""

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from megalite.config import Config
from megalite.inventory import FLOPS_CONVENTION, MemoryPlan, given_plan
from megalite.planner.hardware import Hardware
from megalite.planner.host_states import efficiency, host_traffic
from megalite.planner.predict import Prediction, program_of
from megalite.planner.search import SearchResult, pareto
from megalite.planner.search_space import layout_of
from megalite.planner.startup_table import budget_rows
from megalite.progress import in_units

GB = 1e9
DOUBTFUL = 0.1  # part of a step that messages would add if computation did not hide them, from which on that is said


def layout_text(config: Config, world_size: int, plan: MemoryPlan | None = None) -> str:
    """`tp8+sp, pp16x6 interleaved, dp8 zero1, mb1, recompute full`; `stages_text` says how stages differ. plan: None:
    what flags say."""
    layout = layout_of(config)
    dp = config.data_parallel_size(world_size)
    tp = layout.tensor_model_parallel_size
    parts = [f"tp{tp}" + "+sp" * (layout.sequence_parallel and tp > 1)]
    parts += [f"cp{layout.context_parallel_size}"] if layout.context_parallel_size > 1 else []
    parts.append(f"pp{layout.pipeline_model_parallel_size}")
    if layout.pipeline_model_parallel_size > 1:
        parts[-1] += f"x{layout.chunks}" if layout.chunks > 1 else ""
        parts[-1] += f" {Path(config.parallel.pipeline_schedule_file or layout.pipeline_schedule).name}"
    ep, etp = layout.expert_model_parallel_size, layout.expert_tensor_size
    if config.model.experts.num_experts is not None:
        parts.append(f"ep{ep}" + f" etp{etp}" * (etp != layout.tensor_model_parallel_size))
    parts += [f"dp{dp}" + f" zero{layout.zero_stage}" * (layout.zero_stage > 0), f"mb{layout.micro_batch_size}"]
    listed = _recomputed(config, given_plan(config) if plan is None else plan)
    parts += [f"recompute {listed if len(listed) < 28 else 'by stage'}"] if listed else []
    parts += ["cut by cost"] if config.parallel.stage_layout.pipeline_model_parallel_layout is not None else []
    return ", ".join(parts)


def stages_text(prediction: Prediction) -> str:
    """How stages differ, in full: the recomputed layers of each, the cut; empty where they do not."""
    config, plan = prediction.config, prediction.plan
    cut = config.parallel.stage_layout.pipeline_model_parallel_layout
    parts = [f"recompute {_recomputed(config, plan)}"] if len(plan.recompute) > 1 else []
    return "; ".join([*parts, f"stages {cut}"] if cut is not None else parts)


def _recomputed(config: Config, plan: MemoryPlan) -> str:
    """`full`, `selective`, or the layers of every stage: `4,2,1,0x5 layers`."""
    if plan.recompute[0].method != "block":
        return _granularity(config, plan) or ""
    numbers = [each.number for each in plan.recompute]
    if len(numbers) == 1:
        return f"{numbers[0]} layer{'s' * (numbers[0] > 1)} a stage"
    runs = [(number, len(list(run))) for number, run in groupby(numbers)]
    return ",".join(f"{number}x{times}" if times > 1 else str(number) for number, times in runs) + " layers"


def _granularity(config: Config, plan: MemoryPlan) -> str | None:
    """By the name of the flag."""
    kind = config.model.recompute_granularity
    return "full" if plan.recompute[0].method else kind if kind == "selective" else None


def limit_of(prediction: Prediction, hardware: Hardware) -> str:
    """What a faster run of this layout would need first."""
    bubble = prediction.bubble_over_ideal / (1 + prediction.bubble_over_ideal)
    step = prediction.step_time
    hosted, ranks = prediction.plan.hosts_params, len(prediction.memory)
    waits = "pipeline bubble" if not hosted else "bubble and host link" if ranks > 1 else "host link"
    shares = {
        waits: bubble * prediction.breakdown["pipeline"] / step,
        "data-parallel messages": prediction.open_messages / step,
        "optimizer step": prediction.breakdown["optimizer"] / step,
        "sums of shared weights": prediction.breakdown["shared_weights"] / step,
    }
    worst = max(shares, key=lambda name: shares[name])
    text = f"{worst} {shares[worst]:.0%}" if shares[worst] >= 0.05 else "computation"
    full = prediction.memory_bytes / hardware.usable_bytes
    return text + (f"; memory {full:.0%} full" if full > 0.9 else "")


def as_json(prediction: Prediction, hardware: Hardware) -> dict[str, Any]:
    """One candidate. Its layout by the names of the flags, of which the last are there only where stages differ."""
    plan, cut = prediction.plan, prediction.config.parallel.stage_layout.pipeline_model_parallel_layout
    layout = layout_of(prediction.config).as_dict(prediction.world_size)
    layout["recompute_granularity"] = _granularity(prediction.config, plan)
    if plan.recompute[0].method == "block":
        layout |= {"recompute_method": "block", "recompute_num_layers": [each.number for each in plan.recompute]}
    layout |= {} if cut is None else {"pipeline_model_parallel_layout": cut}
    return {
        "layout": layout,
        "step_time_s": prediction.step_time,
        "tokens_per_s": prediction.tokens_per_s,
        "tflops_per_device": prediction.tflops_per_device,
        "hardware_tflops_per_device": prediction.hardware_tflops_per_device,
        "mfu": prediction.mfu,
        "memory_bytes_per_rank": prediction.memory[prediction.fullest].by_term(),
        "memory_bytes_of_pipeline_ranks": [memory.by_term() for memory in prediction.memory],
        "fullest_pipeline_rank": prediction.fullest,
        "bubble_over_ideal": prediction.bubble_over_ideal,
        "step_time_parts_s": prediction.breakdown,
        "limited_by": limit_of(prediction, hardware),
    }


def table(predictions: Sequence[Prediction], hardware: Hardware) -> str:
    """Ranked, one line each; `*` marks the Pareto front of time against memory."""
    front = {id(prediction) for prediction in pareto(predictions)}
    rows = [("", "layout", "step s", "tokens/s", "TFLOP/s", "MFU", "GB", "bubble", "limited by")]
    for number, prediction in enumerate(predictions, 1):
        rows.append(
            (
                f"{number}{'*' if id(prediction) in front else ' '}",
                layout_text(prediction.config, prediction.world_size, prediction.plan),
                f"{prediction.step_time:.4g}",
                f"{prediction.tokens_per_s:,.0f}",
                f"{prediction.tflops_per_device:.4g}",
                f"{prediction.mfu:.1%}",
                gb(prediction.memory_bytes),
                f"{max(prediction.bubble_over_ideal, 0.0):.1%}",  # rounding may leave less than nothing
                limit_of(prediction, hardware),
            )
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    form = "  ".join(f"{{:{'<' if column in (1, 8) else '>'}{width}}}" for column, width in enumerate(widths))
    return "\n".join(form.format(*row).rstrip() for row in rows)


def summary(found: SearchResult, world_size: int, hardware: Hardware, top: int, spared: str = "") -> str:
    """The table with its legend. spared: what is said of memory that no layout was to need."""
    shown = found.predictions[:top]
    best = shown[0]
    lines = [
        f"{world_size} x {hardware.name}, {hardware.devices_per_node} a node; {found.considered:,} layouts ranked, "
        f"{len(found.predictions)} that fit simulated",
        "",
        table(shown, hardware),
        "",
        f"* Pareto front of time against memory. {FLOPS_CONVENTION}. Memory: of the fullest rank, of "
        f"{gb(hardware.usable_bytes)} GB that tensors may use{spared}. Bubble: idle time over work. "
        "Limits: shares of the step.",
    ]
    memory = best.memory[best.fullest]
    terms = [f"{name} {gb(value)}" for name, value in memory.by_term().items() if value]
    lines.append(f"1: GB on pipeline rank {best.fullest}: {', '.join(terms)}")
    if best.messages:
        lines.append(f"1: {messages_text(best)}")
    days, energy = budget(best, hardware)
    tokens = best.config.total_train_samples(world_size) * best.config.model.seq_length
    lines.append(f"1: {in_units(tokens)} tokens take {time_text(days)} and about {energy_text(energy)}")
    lines += [f"{n}: {text}" for n, p in enumerate(shown, 1) if (text := stages_text(p))]
    for number, one in enumerate(shown, 1):
        rows = budget_rows(one.config, program_of(one.config, one.world_size, one.plan), one.memory, one.plan)
        lines += [f"{number}: {text}" for _, text in rows]
    return "\n".join(lines)


def messages_text(prediction: Prediction) -> str:
    """What data parallelism sends, and how much of it costs time: where that is little, more ranks change little."""
    shown, whole = prediction.open_messages, prediction.messages
    hidden = max(0.0, 1 - shown / whole)
    text = f"data-parallel messages take {whole:.3g} s a step, {hidden:.0%} of it behind computation"
    if whole - shown < DOUBTFUL * prediction.step_time:
        return text
    return f"{text}: an assumption; a step takes {prediction.step_time + whole - shown:.4g} s if nothing hides them"


def states_text(prediction: Prediction, hardware: Hardware) -> list[str]:
    """What moving optimizer states off the device leaves of the peak, where nothing is hidden; a line each tier."""
    config, world = prediction.config, prediction.world_size
    if not prediction.plan.fraction:
        return []
    owned = prediction.offloaded_elements
    traffic = host_traffic(config, owned, hardware, prediction.plan)
    peak = hardware.matrix_flops[config.training.precision.name]
    lines = []
    for name, (nbytes, bandwidth) in traffic.items():
        if nbytes and bandwidth:
            ait = prediction.model_flops / world / nbytes
            lines.append(
                f"optimizer states over {name}: {ait:,.0f} FLOP a byte, {bandwidth / 1e9:.3g} GB/s a device: "
                f"{efficiency(ait, bandwidth, peak):.1%} of the peak if nothing hides it (arXiv 2104.07857)"
            )
    nbytes, bandwidth = traffic["the disk"]
    if lines and nbytes and not bandwidth:
        lines.append(
            "optimizer states over the disk: its rate is not in the file of `hardware`, and not in the step "
            "(python tools/doctor.py --disk DIR measures it)"
        )
    return lines or [
        "optimizer states off the device: give host_link, host_copy, disk_read, disk_write in the file of "
        "`hardware` (python tools/doctor.py measures them)"
    ]


def gb(nbytes: float) -> str:
    """A column's number of GB (1e9 bytes): three digits, and no more than one behind the point of ten and above."""
    return f"{nbytes / GB:.1f}" if nbytes >= 10 * GB else f"{nbytes / GB:.3g}"


def time_text(days: float) -> str:
    """`22.2 days`, `3.1 hours`, `40 seconds`."""
    for unit, name in ((1.0, "days"), (1 / 24, "hours"), (1 / 1440, "minutes")):
        if days >= 1.5 * unit:
            return f"{_digits(days / unit)} {name}"
    return f"{_digits(days * 86400)} seconds"


def energy_text(megawatt_hours: float) -> str:
    """`355 MWh`, `12 kWh`, `0.2 Wh`."""
    unit, name = next(((u, n) for u, n in ((1.0, "MWh"), (1e-3, "kWh")) if megawatt_hours >= u), (1e-6, "Wh"))
    return f"{_digits(megawatt_hours / unit)} {name}"


def _digits(number: float) -> str:
    """Three digits, no exponent."""
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"


def budget(prediction: Prediction, hardware: Hardware) -> tuple[float, float]:
    """(Days, MWh) of the whole training."""
    seconds = prediction.config.train_iterations(prediction.world_size) * prediction.step_time
    return seconds / 86400, seconds * prediction.world_size * hardware.power / 3.6e9
