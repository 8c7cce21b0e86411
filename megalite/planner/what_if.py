"""Questions about a cluster: the smallest one for a model, the largest model for one, which upgrade pays.

Each answer is a sweep of whole searches, printed as a table with bars.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from megalite.config import Config
from megalite.config.arithmetic import count_parameters
from megalite.planner.cost import Roofline, TimeSource
from megalite.planner.hardware import Hardware, Link
from megalite.planner.predict import Prediction
from megalite.planner.report import layout_text
from megalite.planner.search import search

__all__ = ["QUESTIONS", "answer"]

BAR = 30


def answer(
    question: str,
    config: Config,
    world_size: int,
    hardware: Hardware,
    source: TimeSource,
    given: frozenset[str],
    *,
    stale: bool = False,
) -> str:
    """The table that answers one of `QUESTIONS`."""

    def best(changed: Config, devices: int, machine: Hardware, times: TimeSource) -> Prediction | None:
        found = search(changed, devices, machine, times, given=given, stale=stale, top=1)
        return found.predictions[0] if found.predictions else None

    return QUESTIONS[question](config, world_size, hardware, source, best)


Best = Callable[[Config, int, Hardware, TimeSource], Prediction | None]


def _smallest_cluster(config: Config, world_size: int, hardware: Hardware, source: TimeSource, best: Best) -> str:
    rows = []
    devices = world_size
    while devices >= 1:
        found = best(config, devices, hardware, source)
        rows.append((f"{devices:,} devices", found))
        if found is None:
            break
        devices //= 2
    return _table("smallest cluster (halved until the model does not fit)", rows)


def _largest_model(config: Config, world_size: int, hardware: Hardware, source: TimeSource, best: Best) -> str:
    """Width and depth grow together, as model families do."""
    rows = []
    model = config.model
    for _ in range(12):
        found = best(replace(config, model=model), world_size, hardware, source)
        rows.append((f"{count_parameters(model) / 1e9:,.3g} G parameters", found))
        if found is None:
            break
        heads = model.num_attention_heads * 5 // 4 // 8 * 8 or model.num_attention_heads * 2
        scale = max(heads, model.num_attention_heads + 1)
        model = replace(
            model,
            num_layers=model.num_layers * 5 // 4 // 4 * 4 or model.num_layers + 1,
            num_attention_heads=scale,
            hidden_size=model.head_dim * scale,
            num_query_groups=None if model.query_groups == model.num_attention_heads else model.num_query_groups,
            ffn_hidden_size=None
            if model.ffn_hidden_size is None
            else model.ffn_size * scale // model.num_attention_heads,
        )
    return _table("largest model (wider and deeper until it does not fit)", rows)


def _upgrades(config: Config, world_size: int, hardware: Hardware, source: TimeSource, best: Best) -> str:
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
    rows = [(name, best(config, world_size, machine, Roofline(machine))) for name, machine in machines.items()]
    return _table("which upgrade pays", rows)


def _table(title: str, rows: Sequence[tuple[str, Prediction | None]]) -> str:
    most = max((found.tokens_per_s for _, found in rows if found), default=1.0)
    width = max(len(name) for name, _ in rows)
    lines = [title]
    for name, found in rows:
        if found is None:
            lines.append(f"  {name:<{width}}  does not fit")
            continue
        bar = "#" * max(1, round(BAR * found.tokens_per_s / most))
        lines.append(
            f"  {name:<{width}}  {found.tokens_per_s:>14,.0f} tokens/s  {found.mfu:>6.1%} MFU  {bar:<{BAR}}  "
            f"{layout_text(found.config, found.world_size)}"
        )
    return "\n".join(lines)


Question = Callable[[Config, int, Hardware, TimeSource, Best], str]

QUESTIONS: Mapping[str, Question] = MappingProxyType(
    {"smallest-cluster": _smallest_cluster, "largest-model": _largest_model, "upgrades": _upgrades}
)
