"""Rules of the sequence: what context parallelism must divide and goes together with, and a curriculum of lengths."""

from collections.abc import Iterator
from itertools import pairwise
from math import prod

from megalite.config.batch_size import LengthSchedule
from megalite.config.root import Config
from megalite.config.rules.text import CP, TP, divisors, listed, multiples_around
from megalite.config.values import show


def context_parallel(config: Config, world_size: int) -> Iterator[str]:
    """Sequence length, groups, the sizes of two levels."""
    given, model, tp = config.parallel.context, config.model, config.parallel.tensor_model_parallel_size
    size, kind, levels = given.context_parallel_size, given.cp_comm_type, given.hierarchical_context_parallel_sizes
    if levels is not None and kind != "a2a+p2p":
        yield f"`hierarchical_context_parallel_sizes`={show(levels)}: needs `cp_comm_type`=a2a+p2p; drop it"
        return
    if kind == "a2a+p2p" and (levels is None or len(levels) != 2 or prod(levels) != size):
        wrong = "`hierarchical_context_parallel_sizes`" + ("" if levels is None else f"={show(levels)}")
        yield (
            f"{wrong}: `cp_comm_type`=a2a+p2p with {CP}={size} needs two sizes whose product is {size}, ranks that "
            "trade tokens for heads first"
        )
        return
    if size == 1:
        return
    unit, parts = _sequence_unit(config)
    if model.seq_length % unit:
        near = multiples_around(model.seq_length, unit)
        yield f"`seq_length`={model.seq_length}: not divisible by {parts} = {unit}; try {near}"
    groups = max(1, model.query_groups // tp)
    if model.legal_tensor_size(tp) and groups % given.traders:
        yield (
            f"`cp_comm_type`={kind}: {given.traders} ranks cannot trade the {groups} key/value heads of a "
            f"tensor-parallel rank (`num_query_groups`={model.query_groups}, {TP}={tp}); legal: "
            f"{listed(divisors(groups))}, or `cp_comm_type`=p2p"
        )


def _sequence_unit(config: Config) -> tuple[int, str]:
    """What the length of a sequence must be a multiple of, and of what it is made."""
    given, tp = config.parallel.context, config.parallel.tensor_model_parallel_size
    size, split = given.context_parallel_size, tp if config.parallel.sequence_parallel else 1
    factors = [(2, "2")] if given.ring > 1 else []
    factors += [(size, f"{CP}={size}")] if size > 1 else []
    factors += [(split, f"{TP}={split} (`sequence_parallel`)")] if split > 1 else []
    return prod(factor for factor, _ in factors), " x ".join(text for _, text in factors)


def sequence_lengths(config: Config, world_size: int) -> Iterator[str]:
    """The curriculum of lengths: each must cut a sample evenly, and be cut evenly itself."""
    text, whole = config.given["seq_length_schedule"], config.model.seq_length
    flag = f"`seq_length_schedule`='{text}'"
    try:
        lengths = [length for _, length in LengthSchedule.parse(text, whole).steps]
    except ValueError as error:
        yield f"{flag}: {error}; write it like '0:4096 500B:32768'"
        return
    falls = next((pair for pair in pairwise(lengths) if pair[0] > pair[1]), None)
    if falls is not None:
        yield f"{flag}: {falls[1]} comes after {falls[0]}; shorter sequences come first, give the lengths as they rise"
        return
    if max(lengths) != whole:
        yield f"{flag}: the longest is {max(lengths)}, `seq_length` is {whole}; give `seq_length`={max(lengths)}"
        return
    unit, parts = _sequence_unit(config)
    for length in dict.fromkeys(lengths):
        if whole % length:
            legal = listed(d for d in reversed(divisors(whole)) if d % unit == 0)
            yield f"{flag}: {length} does not divide `seq_length`={whole}, whose samples are cut; legal: {legal}"
        elif length % unit and whole % unit == 0:
            yield f"{flag}: {length} is not divisible by {parts} = {unit}; use {multiples_around(length, unit)}"


def context_warnings(config: Config) -> Iterator[str]:
    """What is legal but has no effect, or carries more than it uses."""
    given, window = config.parallel.context, config.model.window_size
    if given.context_parallel_size == 1 and given.cp_comm_type != "p2p":
        yield f"`cp_comm_type`={given.cp_comm_type}: has no effect at {CP}=1; drop it"
    chunk = config.model.seq_length // (2 * given.context_parallel_size)
    if given.ring > 1 and window is not None and window <= chunk and config.model.window_attn_skip_freq is None:
        yield (
            f"`window_size`={window}: each rank is sent all {config.model.seq_length} keys, of which a token sees "
            f"{window}; `cp_comm_type`=a2a sends less"
        )
