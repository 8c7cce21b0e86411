"""Questions about a cluster: the smallest for a model, the largest model for one, time and energy of a token budget,
and which upgrade pays.

    smallest-cluster    N, N/2, ... until the model does not fit, then between the last two
    largest-model       wider and deeper, or less so, until one fits and the next does not; with the memory of the
                        hosts, states are kept there
    token-budget        the training's tokens on N/4 to 4N devices
    upgrades            memory, links, rates of the device, one at a time

Each answer is a sweep of whole searches: a table, and a picture of it (`plan_plot.py`).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from megalite.config import OPTIMIZER_SPECS, Config, ModelConfig
from megalite.errors import ConfigError
from megalite.inventory import ElementBytes, count_parameters
from megalite.planner import (
    Hardware,
    Link,
    Prediction,
    Roofline,
    budget,
    chunk_capacity,
    energy_text,
    gb,
    layout_text,
    search,
    time_text,
)
from megalite.progress import OnProgress, in_units, no_progress
from plan_fit import shortage

BAR = 24
GB = 1e9
MOST_MODELS = 32
"""Sizes that `largest-model` tries."""

#: Searches between the last cluster on which a model fits and the first on which it does not.
REFINED = 3


@dataclass(frozen=True)
class Row:
    """One search. value: its position on the sweep's axis. why: what prevents it, if nothing was found. shape: of its
    model, where that changes."""

    name: str
    value: float
    found: Prediction | None
    why: str = ""
    shape: str = ""


@dataclass(frozen=True)
class Sweep:
    """The answer to a question. axis: what the rows' values are; empty where they have no order."""

    question: str
    title: str
    axis: str
    hardware: Hardware
    rows: tuple[Row, ...]
    note: str = ""


Try = Callable[[str, float, Config, int, Hardware, Roofline], Row]


def sweep(
    question: str,
    config: Config,
    world_size: int,
    hardware: Hardware,
    source: Roofline,
    given: frozenset[str],
    *,
    stale: bool = False,
    on_progress: OnProgress = no_progress,
) -> Sweep:
    """The answer to one of `QUESTIONS`."""
    tried = itertools.count()

    def attempt(name: str, value: float, changed: Config, devices: int, machine: Hardware, times: Roofline) -> Row:
        on_progress(next(tried), None, name)
        found = search(changed, devices, machine, times, given=given, stale=stale, top=1)
        if found.predictions:
            return Row(name, value, found.predictions[0])
        why = shortage(found.rejected[0], machine) if found.rejected else "".join(found.problems[:1])
        return Row(name, value, None, why or "no layout for that many devices is legal")

    return QUESTIONS[question](config, world_size, hardware, source, attempt)


def _smallest_cluster(config: Config, world_size: int, hardware: Hardware, source: Roofline, attempt: Try) -> Sweep:
    def on(devices: int) -> Row:
        name = f"{devices:,} device{'s' * (devices > 1)}"
        return attempt(name, devices, config, devices, hardware, source)

    rows = [on(world_size)]
    while rows[-1].found and rows[-1].value > 1:
        rows.append(on(int(rows[-1].value) // 2))
    if rows[-1].found is None and len(rows) > 1:
        enough, little = int(rows[-2].value), int(rows[-1].value)
        for _ in range(REFINED):
            unit = hardware.devices_per_node if enough - little >= 2 * hardware.devices_per_node else 1
            middle = (enough + little) // 2 // unit * unit
            if middle <= little:
                break
            rows.append(on(middle))
            enough, little = (middle, little) if rows[-1].found else (enough, middle)
    rows.sort(key=lambda row: -row.value)
    return Sweep("smallest-cluster", "smallest cluster that holds the model", "devices", hardware, tuple(rows))


def _largest_model(config: Config, world_size: int, hardware: Hardware, source: Roofline, attempt: Try) -> Sweep:
    """Width and depth grow together, as model families do. With the memory of the hosts masters and moments are there,
    as many as they hold where weights are there too; beside it stands what PatrickStar's bound is."""
    rows: list[Row] = []
    room, chunks = hardware.host_memory_bytes, 0.0
    if room and not hardware.on_cpu:
        offload = replace(config.optimizer.offload, optimizer_cpu_offload=True)
        config = replace(config, optimizer=replace(config.optimizer, offload=offload))

    def of(model: ModelConfig) -> Row:
        size, grown = count_parameters(model), replace(config, model=model)
        row = attempt(f"{in_units(size)} parameters", float(size), grown, world_size, hardware, source)
        rows.append(_within(row, hardware))
        for _ in range(REFINED):  # the others of the masters and moments stay on the device
            fewer = _fewer_on_host(row, hardware) if rows[-1].found is None else None
            if fewer is None:
                break
            row = attempt(row.name, row.value, fewer, world_size, hardware, source)
            rows[-1] = _within(row, hardware)
        rows[-1] = replace(rows[-1], shape=_shape(model))
        return rows[-1]

    tried = [config.model]
    fits_at_once = bool(of(config.model).found)
    step = _wider if fits_at_once else _narrower
    while len(tried) < MOST_MODELS and bool(rows[-1].found) is fits_at_once:
        model = step(tried[-1])
        if model == tried[-1]:
            break
        tried.append(model)
        of(model)
    bracketed = len(tried) > 1 and bool(rows[-1].found) is not fits_at_once
    title, note = f"largest model on {world_size:,} device{'s' * (world_size > 1)}", ""
    if room:
        if bracketed:
            fits, larger = tried[-2:] if fits_at_once else tried[:-3:-1]
            few, many = math.ceil(fits.num_layers * (fits.hidden_size / larger.hidden_size) ** 2), larger.num_layers
            for _ in range(REFINED):
                middle = (few + many) // 2
                found = few < middle < many and of(replace(larger, num_layers=middle)).found
                few, many = (middle, many) if found else (few, middle)
        model, capacity = config.model, math.inf
        while capacity > count_parameters(model):
            capacity = chunk_capacity(replace(config, model=model), world_size, hardware)
            if capacity > count_parameters(model):
                chunks, model = capacity, _wider(model)
        title += f" with {room / GB:,.0f} GB on each host"
        note = f"in chunks over devices and hosts (PatrickStar, 14 bytes a parameter): {in_units(chunks)} parameters"
    rows.sort(key=lambda row: row.value)
    notes = [note, *_read_it_so(config, world_size, hardware, tried, rows)]
    return Sweep("largest-model", title, "parameters", hardware, tuple(rows), "\n  ".join(filter(None, notes)))


def _read_it_so(
    config: Config, world_size: int, hardware: Hardware, tried: Sequence[ModelConfig], rows: Sequence[Row]
) -> list[str]:
    """What the times are of, whether that is a usual number of tokens, and why the table ends."""
    lines = []
    if len(tried) == MOST_MODELS and all(row.found for row in rows):
        lines.append(f"the table ends after {MOST_MODELS} sizes; larger models may fit: begin with a larger one")
    if iterations := config.train_iterations(world_size):
        tokens = config.total_train_samples(world_size) * config.model.seq_length
        lines.append(f"times are of {iterations:,} iterations, {in_units(tokens)} tokens")
        if fits := max((row.value for row in rows if row.found), default=0.0):
            lines[-1] += f": {in_units(tokens / fits)} a parameter of the largest (20 are usual: Hoffmann et al. 2022)"
    if hardware.on_cpu:
        lines.append(f"{hardware.name}: from a file, not this machine")
    return lines


def _wider(model: ModelConfig) -> ModelConfig:
    """A quarter wider and deeper."""
    heads = model.num_attention_heads * 5 // 4 // 8 * 8 or model.num_attention_heads * 2
    scale = max(heads, model.num_attention_heads + 1)
    return _scaled(model, max(model.num_layers * 5 // 4 // 4 * 4, model.num_layers + 1), scale)


def _narrower(model: ModelConfig) -> ModelConfig:
    """A fifth narrower and shallower, few heads or layers by half; the same where it has one layer of one head."""
    layers, heads = (
        n * 4 // 5 // m * m or max(1, n // 2) for n, m in ((model.num_layers, 4), (model.num_attention_heads, 8))
    )
    return model if (layers, heads) == (model.num_layers, model.num_attention_heads) else _scaled(model, layers, heads)


def _scaled(model: ModelConfig, layers: int, heads: int) -> ModelConfig:
    """So many layers, and heads of the model's own size."""
    ungrouped = model.query_groups == model.num_attention_heads
    return replace(
        model,
        num_layers=layers,
        num_attention_heads=heads,
        hidden_size=model.head_dim * heads,
        num_query_groups=None if ungrouped else math.gcd(model.query_groups, heads),
        ffn_hidden_size=None if model.ffn_hidden_size is None else model.ffn_size * heads // model.num_attention_heads,
    )


def _shape(model: ModelConfig) -> str:
    """What a configuration of that size would say."""
    heads = f"{model.num_attention_heads} head{'s' * (model.num_attention_heads > 1)}"
    layers = f"{model.num_layers} layer{'s' * (model.num_layers > 1)}"
    return f"; {layers}, hidden size {model.hidden_size:,}, {heads}, ffn {model.ffn_size:,}"


def _within(row: Row, hardware: Hardware) -> Row:
    """A layout whose states do not fit into its hosts does not fit."""
    if row.found is None or not hardware.host_memory_bytes:
        return row
    ranks = min(hardware.devices_per_node, row.found.world_size)
    over = ranks * max(memory.host for memory in row.found.memory) - hardware.host_memory_bytes
    if over <= 0:
        return row
    return replace(row, found=None, why=f"does not fit: {over / GB:,.1f} GB too much on each host, all of it states")


def _fewer_on_host(row: Row, hardware: Hardware) -> Config | None:
    """The same with as many masters and moments on the hosts as have room beside weights and gradients."""
    if row.found is None or not row.found.offloaded_elements:
        return None
    config, found = row.found.config, row.found
    if not found.plan.hosts_params or found.plan.file_fraction:
        return None
    rule, wide = OPTIMIZER_SPECS[config.optimizer.optimizer], ElementBytes.of(config).wide
    away = found.plan.fraction
    states = wide * (1 + rule.most_moments(config.optimizer)) * found.offloaded_elements / away
    ranks = min(hardware.devices_per_node, found.world_size)
    over = max(memory.host for memory in found.memory) - hardware.host_memory_bytes / ranks
    fraction = math.floor(100 * (away - over / states) - 1) / 100  # whole buckets move: a little less than that
    if over <= 0 or fraction <= 0:
        return None
    offload = replace(
        config.optimizer.offload, param_offload="cpu", optimizer_cpu_offload=True, optimizer_offload_fraction=fraction
    )
    return replace(config, optimizer=replace(config.optimizer, offload=offload))


def _token_budget(config: Config, world_size: int, hardware: Hardware, source: Roofline, attempt: Try) -> Sweep:
    if not config.train_iterations(world_size):
        raise ConfigError("--what-if=token-budget: how long is the training? give --train-tokens")
    rows = []
    for devices in (world_size // 4, world_size // 2, world_size, 2 * world_size, 4 * world_size):
        if devices:
            rows.append(attempt(f"{devices:,} devices", devices, config, devices, hardware, source))
    tokens = config.total_train_samples(world_size) * config.model.seq_length
    return Sweep("token-budget", f"{in_units(tokens)} tokens", "devices", hardware, tuple(rows))


def _upgrades(config: Config, world_size: int, hardware: Hardware, source: Roofline, attempt: Try) -> Sweep:
    def wider(link: Link) -> Link:
        return replace(link, bandwidth=2 * link.bandwidth)

    machines = {
        "as it is": hardware,
        "memory x 1.5": replace(hardware, memory_bytes=1.5 * hardware.memory_bytes),
        "memory bandwidth x 2": replace(hardware, memory_bandwidth=2 * hardware.memory_bandwidth),
        "links inside a node x 2": replace(hardware, intra_node=wider(hardware.intra_node)),
        "links between nodes x 2": replace(hardware, inter_node=wider(hardware.inter_node)),
        "matrix rate x 2": replace(
            hardware, matrix_flops={name: 2 * rate for name, rate in hardware.matrix_flops.items()}
        ),
    }
    rows = [
        attempt(name, float(turn), config, world_size, machine, Roofline(machine))
        for turn, (name, machine) in enumerate(machines.items())
    ]
    return Sweep("upgrades", f"which upgrade of {world_size:,} devices pays", "", hardware, tuple(rows))


def refuse_if_nothing_fits(answer: Sweep) -> None:
    """Raises ConfigError where no search of the sweep has found a layout."""
    if not any(row.found for row in answer.rows):
        raise ConfigError(f"--what-if={answer.question}: nothing fits; {answer.rows[0].name}: {answer.rows[0].why}")


def table(answer: Sweep) -> str:
    """One line a row: rate, MFU, days and energy of the whole training, memory, the layout, and a bar of the rate."""
    fits = [row.found for row in answer.rows if row.found]
    most = max((found.tokens_per_s for found in fits), default=1.0)
    lines = [f"{answer.title} ({answer.hardware.name})"]
    head = f"{'tokens/s':>12}  {'MFU':>6}  {'time':>13}  {'energy':>9}  {'GB':>6}"
    width = max(len(row.name) for row in answer.rows)
    lines.append(f"  {'':<{width}}  {head}")
    for row in answer.rows:
        if row.found is None:
            lines.append(f"  {row.name:<{width}}  {row.why}{row.shape}")
            continue
        days, energy = budget(row.found, answer.hardware)
        bar = "#" * max(1, round(BAR * row.found.tokens_per_s / most))
        lines.append(
            f"  {row.name:<{width}}  {row.found.tokens_per_s:>12,.0f}  {row.found.mfu:>6.1%}  {time_text(days):>13}  "
            f"{energy_text(energy):>9}  {gb(row.found.memory_bytes):>6}  {bar:<{BAR}}  "
            f"{layout_text(row.found.config, row.found.world_size, row.found.plan)}{row.shape}"
        )
    lines += [f"  {answer.note}"] if answer.note else []
    return "\n".join(lines)


Question = Callable[[Config, int, Hardware, Roofline, Try], Sweep]

QUESTIONS: Mapping[str, Question] = MappingProxyType(
    {
        "smallest-cluster": _smallest_cluster,
        "largest-model": _largest_model,
        "token-budget": _token_budget,
        "upgrades": _upgrades,
    }
)
