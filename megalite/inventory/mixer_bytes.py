"""Bytes that attention, or what is in its place, keeps of a micro-batch from its forward to its backward."""

from __future__ import annotations

from typing import NamedTuple

from megalite.config import Config, ModelConfig
from megalite.inventory.element_bytes import ElementBytes, micro_tokens, statistics
from megalite.inventory.mixers import CHUNK
from megalite.inventory.tiling import BLOCKED_FROM, BLOCKED_UP_TO, block_area

NARROW = 16
"""Channels of values of which nothing is wanted (`nn.attention.masked`)."""


class _Heads(NamedTuple):
    """Attention of a rank: bytes of an element, tokens, widths of queries and keys, heads; what of it is copied."""

    e: int
    tokens: int
    q: float
    kv: float
    heads: float
    grouped: bool
    rotated: bool
    normed: bool
    across: bool  # norms over all heads, which flatten what they read, but where keys are of one head
    one: bool

    @classmethod
    def of(cls, config: Config, model: ModelConfig) -> _Heads:
        tp, e = config.parallel.tensor_model_parallel_size, ElementBytes.of(config).compute
        q, kv = model.query_size / tp, model.local_kv_size(tp)
        rotated, across = model.position_embedding_type == "rope", model.qk_layernorm_across_heads
        how = (q != kv, rotated, model.qk_layernorm, model.qk_layernorm and across, kv <= model.head_dim)
        return cls(e, micro_tokens(config), q, kv, model.num_attention_heads / tp, *how)

    @property
    def projected(self) -> float:
        return self.e * self.tokens * (self.q + 2 * self.kv)

    @property
    def context(self) -> float:
        return self.e * self.tokens * self.q


def _attention_bytes(config: Config, model: ModelConfig, on_cpu: bool) -> float:
    tp, size, at = config.parallel.tensor_model_parallel_size, ElementBytes.of(config), _Heads.of(config, model)
    per_head = at.tokens * at.heads
    row_sums = per_head * max(4, size.wide)  # the softmax's log-sums
    beside = _bent_bytes(config, model, at.context, row_sums, on_cpu)
    if config.parallel.context.traders > 1:
        beside += at.context  # as it comes back from the ranks that had these heads
    if at.normed:
        both, norms = at.tokens * (at.q + at.kv), 2 if at.across else at.heads + at.kv / model.head_dim
        beside += at.tokens * norms * statistics(size, model, on_cpu, at.e)
        beside += both * size.wide * (on_cpu and model.normalization == "RMSNorm")
        if at.across and not at.one:  # side by side; over ranks wide copies, and what is scaled by their sum
            beside += both * (size.wide + at.e if tp > 1 else at.e)
        elif at.across and tp > 1:
            beside += both * (size.wide * (size.wide != at.e) + at.e)
    return beside + (_attended_on_cpu if on_cpu else _attended_on_gpu)(config, model, at, row_sums)


def _bent_bytes(config: Config, model: ModelConfig, result: float, row_sums: float, on_cpu: bool) -> float:
    """Of dropout and sinks. result: of the kernel, which is kept as it was before, too."""
    tp, cp = config.parallel.tensor_model_parallel_size, config.parallel.context
    per_head = micro_tokens(config) * model.num_attention_heads / tp
    drops, sinks = model.attention_dropout > 0, model.softmax_type != "vanilla"
    kept = 8.0 * per_head * drops + row_sums * sinks  # what keys each query's dropout; the sinks
    if drops and not on_cpu and cp.ring == 1:  # log-sums without it are those of narrow values
        kept += row_sums + NARROW * ElementBytes.of(config).compute * per_head
    return kept + result * ((drops or sinks) and not on_cpu and cp.context_parallel_size == 1)


def _attended_on_gpu(config: Config, model: ModelConfig, at: _Heads, row_sums: float) -> float:
    """What kernels of a GPU keep; they write results in the order in which they read queries."""
    e, q, kv, cp = at.e, at.q, at.kv, config.parallel.context
    bent, hidden = cp.ring > 1 or model.attention_dropout > 0 or model.reshapes_softmax, _hides(config, model)
    fused, varlen = not (hidden or bent), hidden and not bent and e == 2 and config.training.micro_batch_size > 1
    held = at.projected * (
        at.normed and (not at.across or (at.one and config.parallel.tensor_model_parallel_size == 1))
    )
    expanded = fused and at.grouped and e > 2 and kv > model.head_dim * cp.traders  # keys and values of every head
    if fused and e == 8:  # no kernel: scaled queries and keys, and all weights
        kept = held * expanded + e * at.tokens * (3 * q if expanded else 3 * q + 2 * kv)
        return kept + e * at.tokens * at.heads * model.seq_length + at.context * (cp.traders == 1)
    if cp.traders > 1 or varlen:  # as heads were traded, or documents follow one another
        kept = held + at.projected + e * at.tokens * 2 * q * expanded
    elif expanded:
        kept = held + 3 * at.context
    else:  # values (and queries, keys) are views of what was projected
        copied = 2 * q * (at.grouped and fused and not at.one)  # queries, head by head, and so the result
        turned = q + kv if at.rotated or at.normed else q if model.query_multiplier is not None else copied
        kept = at.projected + e * at.tokens * turned
    return kept + at.context + row_sums


def _attended_on_cpu(config: Config, model: ModelConfig, at: _Heads, row_sums: float) -> float:
    """What a CPU keeps, which widens the operands of its products."""
    q, kv, tokens, product = at.q, at.kv, at.tokens, ElementBytes.of(config).wide
    widened, result = product != at.e, product * at.tokens * at.q
    bent = config.parallel.context.ring > 1 or model.attention_dropout > 0 or model.reshapes_softmax
    if bent or _hides(config, model):  # tiles
        kept = 0.0 if widened and not at.normed else at.projected
        if widened or at.rotated or at.normed:
            kept += product * tokens * (q + (2 if widened else 1) * kv)
        return kept + at.context + result * widened + row_sums
    if _blocked(config, model):
        weights = product * at.heads * config.training.micro_batch_size * block_area(model.seq_length)
        operands = product * tokens * (q + 2 * kv) + at.projected * at.normed
        return operands + result + at.context * widened + weights
    if at.grouped or widened:  # queries, and keys and values of every head, are copies
        operands = product * tokens * (3 * q if at.grouped else q + 2 * kv)
        return operands + result + at.context * widened + row_sums
    return at.projected + at.e * tokens * (q + kv) * (at.rotated or at.normed) + at.context + row_sums


def _hides(config: Config, model: ModelConfig) -> bool:
    """Whether documents or a window hide what is before a token."""
    window = model.window_size is not None and model.window_size < model.seq_length
    return config.data.reset_attention_mask or window


def _blocked(config: Config, model: ModelConfig) -> bool:
    """Whether a CPU attends over blocks of queries (`nn.attention.blocked`), which keeps half of the weights."""
    return BLOCKED_FROM <= model.seq_length <= BLOCKED_UP_TO and model.recompute_granularity != "selective"


def _latent_bytes(config: Config, model: ModelConfig, on_cpu: bool) -> float:
    """Of latent attention: the small vectors before and behind their norms, and of all tokens; queries, keys and values
    of the heads as they come and as kernels take them; results."""
    parallel, size, tokens, given = config.parallel, ElementBytes.of(config), micro_tokens(config), model.latent
    tp, e = parallel.tensor_model_parallel_size, size.compute
    product = size.wide if on_cpu else e
    here, heads = tokens / (tp if parallel.sequence_parallel else 1), model.num_attention_heads / tp
    made = given.q_lora_rank or 0
    kept: float = e * tokens * ((made or model.hidden_size) + given.compressed)
    if model.qk_layernorm:
        normed = made + given.kv_lora_rank
        of_rms = (size.wide if on_cpu else 0) + (size.wide - e if on_cpu else 0)
        kept += here * (
            e * (made + given.compressed) + 2 * size.wide + (model.normalization == "RMSNorm") * of_rms * normed
        )
    width, values = tokens * heads * model.kernel_dim, tokens * model.value_size / tp
    plain = not _hides(config, model) and not model.reshapes_softmax and config.parallel.context.ring == 1
    blocked = on_cpu and plain and _blocked(config, model)
    if blocked:
        kept += product * heads * config.training.micro_batch_size * block_area(model.seq_length)
    kept += 3 * product * width
    if plain and e == 8 and not on_cpu:  # no kernel: all weights
        kept += e * (tokens * heads * model.seq_length + width)
    kept += _bent_bytes(config, model, e * width * (width == values), tokens * heads * max(4, size.wide), on_cpu)
    result = values if blocked else width  # with the padding of values
    kept += e * values + (product * result if result != values or product != e else 0)
    kept += e * values * (config.parallel.context.traders > 1 and width == values)  # as it comes back
    return kept + tokens * heads * max(4, size.wide)


def _delta_bytes(config: Config, model: ModelConfig, on_cpu: bool) -> float:
    """Of a state in attention's place, in fp32 where narrower: the projection, the convolution's results, what solves
    each chunk, what reads the state and what is written to it, a state for each chunk; where ranks share a sequence for
    a state's columns, too, the results with these and what the ranks' pieces do to states. Gates, and the norm."""
    size, tokens, given = ElementBytes.of(config), micro_tokens(config), model.delta
    samples, cp = config.training.micro_batch_size, config.parallel.context
    e, wide, values = size.compute, size.wide, given.linear_num_value_heads
    dk, dv, of_values = given.linear_key_head_dim, given.linear_value_head_dim, given.value_size
    shared = cp.context_parallel_size > 1
    columns, pieces = dv + dk * shared, 2 if cp.ring > 1 else 1
    mixed = given.linear_num_key_heads * given.mixed
    widened, own = e != wide, shared and pieces > 1  # a rank's own pieces are a copy
    kept: float = e * (mixed * (1 + (own and not widened)) + of_values * (4 - (own and widened)))
    kept += wide * (mixed + of_values * (1 + widened + on_cpu) + values * dk * (1 + columns / CHUNK))
    kept += on_cpu * (wide - e) * of_values
    kept += wide * values * ((2 + shared) * columns - dv + min(CHUNK, model.seq_length) + 5)
    states = pieces * columns + shared * pieces * (cp.context_parallel_size * (columns + dv) + dv)
    tp = config.parallel.tensor_model_parallel_size
    whole = model.hidden_size * e * (tp - 1) * config.parallel.sequence_parallel  # what both projections read
    return (tokens * (kept + whole) + samples * wide * values * dk * states) / tp


MIXER_BYTES = {"attention": _attention_bytes, "latent": _latent_bytes, "delta": _delta_bytes}
