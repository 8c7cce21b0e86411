"""Rules of context parallelism: what it must divide, and what goes together."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

from megalite.config.root import Config
from megalite.config.rules.text import CP, TP, divisors, listed, multiples_around
from megalite.config.values import show


def context_parallel(config: Config, world_size: int) -> Iterator[str]:
    """Sequence length, groups, the sizes of two levels."""
    given, model, tp = config.parallel.context, config.model, config.parallel.tensor_model_parallel_size
    size, kind, levels = given.context_parallel_size, given.cp_comm_type, given.hierarchical_context_parallel_sizes
    if levels is not None and kind != "a2a+p2p":
        yield f"--hierarchical-context-parallel-sizes={show(levels)}: needs --cp-comm-type=a2a+p2p; drop it"
        return
    if kind == "a2a+p2p" and (levels is None or len(levels) != 2 or prod(levels) != size):
        wrong = "--hierarchical-context-parallel-sizes" + ("" if levels is None else f"={show(levels)}")
        yield (
            f"{wrong}: --cp-comm-type=a2a+p2p with {CP}={size} needs two sizes whose product is {size}, ranks that "
            "trade tokens for heads first"
        )
        return
    if size == 1:
        return
    split = tp if config.parallel.sequence_parallel else 1
    unit = size * split * (2 if given.ring > 1 else 1)
    if model.seq_length % unit:
        halves = "2 x " if given.ring > 1 else ""
        parts = f"{halves}{CP}={size}" + (f" x {TP}={tp} (--sequence-parallel)" if split > 1 else "")
        near = multiples_around(model.seq_length, unit)
        yield f"--seq-length={model.seq_length}: not divisible by {parts} = {unit}; try {near}"
    groups = model.query_groups // tp
    if model.query_groups % tp == 0 and groups % given.traders:
        yield (
            f"--cp-comm-type={kind}: {given.traders} ranks cannot trade the {groups} key/value heads of a "
            f"tensor-parallel rank (--num-query-groups={model.query_groups}, {TP}={tp}); legal: "
            f"{listed(divisors(groups))}, or --cp-comm-type=p2p"
        )


def context_warnings(config: Config) -> Iterator[str]:
    """What is legal but has no effect, or carries more than it uses."""
    given, window = config.parallel.context, config.model.window_size
    if given.context_parallel_size == 1 and given.cp_comm_type != "p2p":
        yield f"--cp-comm-type={given.cp_comm_type}: has no effect at {CP}=1; drop it"
    chunk = config.model.seq_length // (2 * given.context_parallel_size)
    if given.ring > 1 and window is not None and window <= chunk:
        yield (
            f"--window-size={window}: each rank is sent all {config.model.seq_length} keys, of which a token sees "
            f"{window}; --cp-comm-type=a2a sends less"
        )
