"""Bytes of one micro-batch: what a layer keeps from its forward to its backward, and what crosses to the next stage.

What autograd keeps of a block (T = s*b tokens, e bytes an element, r bytes of the residual stream, t tensor-parallel
ranks, o = t under sequence parallelism and else 1, q and k widths of queries and keys, f of the MLP)::

    two norms            inputs 2 r T h/o, outputs 2 e T h/o, statistics in fp32 (of what attention and MLP return:
                         inputs 2 e T h/o, and 2 r T h/o more where they read the stream itself)
    attention            qkv e T (q + 2k)/t, rotated or rearranged queries and keys, context e T q/t, log-sums 4 T a/t
    MLP                  fc1 e T f/t (gated: gate and value, 2 e T f/t); the activation is computed again, but where
                         it is compiled (not that of experts), which keeps its result, e T f/t
    experts              k times that, their rows e T k h, both times `WORST_IMBALANCE` where ranks share the experts;
                         what comes back e T k h, logits and probabilities 8 T E

Fused attention keeps nothing of size s x s, nor do tiles (documents, windows and dropout on a CPU); blocked attention
(a CPU with 128 to 1,024 tokens) keeps half of the weights. The head computes its gradients in the forward and keeps
them: e T h for its input and the wide gradient of its matrix, unless that is frozen. Assumed: a CPU widens 16-bit
operands of products to fp32 (few have instructions for them), and the CUDA kernels are the library's fused ones.
"""

from __future__ import annotations

from math import prod
from typing import NamedTuple

from megalite.config import Config, ModelConfig
from megalite.inventory.layers import Layer, model_layers
from megalite.inventory.mixers import CHUNK
from megalite.inventory.tiling import BLOCKED_FROM, BLOCKED_UP_TO, block_area

#: Rows of the fullest of the ranks that share the experts of a block, as a multiple of their mean: what a balanced run
#: has on average, for times; what memory is counted for. A capacity factor below it bounds both, and so does ep.
MEAN_IMBALANCE, WORST_IMBALANCE = 1.1, 1.5
NARROW = 16
"""Channels of values of which nothing is wanted (`nn.attention.masked`)."""


class ElementBytes(NamedTuple):
    """Bytes of an element: compute weights and activations, masters and losses, accumulated gradients."""

    compute: int
    wide: int
    gradient: int

    @classmethod
    def of(cls, config: Config) -> ElementBytes:
        chosen = config.training.precision
        compute, wide = (8, 8) if chosen.fp64 else (2, 4) if chosen.half else (4, 4)
        return cls(compute, wide, 2 if chosen.bf16 and config.parallel.grad_reduce_in_bf16 else wide)


def micro_tokens(config: Config) -> int:
    """Tokens of a micro-batch on one rank."""
    return config.model.seq_length // config.parallel.context.context_parallel_size * config.training.micro_batch_size


def _residual_bytes(config: Config) -> int:
    size = ElementBytes.of(config)
    return size.wide if config.model.fp32_residual_connection else size.compute


def boundary_shape(config: Config) -> tuple[int, int, int]:
    """What crosses between stages: `[s, b, h]` of the tokens of a rank, `[s/t, b, h]` under sequence parallelism, in a
    grid of X x Y x Z ranks `[s, b/Z, h/XY]`."""
    parallel, model = config.parallel, config.model
    if parallel.grid is not None:
        x, y, z = parallel.grid
        return model.seq_length, config.training.micro_batch_size // z, model.hidden_size // (x * y)
    split = parallel.tensor_model_parallel_size if parallel.sequence_parallel else 1
    split *= parallel.context.context_parallel_size
    return model.seq_length // split, config.training.micro_batch_size, model.hidden_size


def boundary_bytes(config: Config) -> float:
    """Of `boundary_shape`, in the dtype of the residual stream."""
    return float(prod(boundary_shape(config)) * _residual_bytes(config))


def _norm_bytes(config: Config, model: ModelConfig, on_cpu: bool) -> float:
    """Of one norm: input, statistics, output (which the linear layer behind it keeps)."""
    output = prod(boundary_shape(config)) * ElementBytes.of(config).compute
    return _input_and_statistics(config, model, on_cpu, _residual_bytes(config)) + output


def _input_and_statistics(config: Config, model: ModelConfig, on_cpu: bool, element: int) -> float:
    """What a norm keeps of an input with `element` bytes a number."""
    length, samples, h = boundary_shape(config)
    tokens, wide = length * samples, ElementBytes.of(config).wide
    element = wide if model.apply_layernorm_1p and config.parallel.grid is None else element
    kept = float(tokens * (h * element + _statistics(ElementBytes.of(config), model, on_cpu, element)))
    if model.normalization == "LayerNorm":
        return kept
    # The CPU has no kernel of its own: it keeps the normalised input too, and widens 16 bits before.
    widened = tokens * h * (wide - element) if element < wide else 0.0
    return kept + (tokens * h * wide + widened if on_cpu else 0.0)


def _statistics(size: ElementBytes, model: ModelConfig, on_cpu: bool, element: int) -> int:
    """Bytes of what a norm knows of a token: mean and deviation, or the deviation."""
    if model.normalization == "LayerNorm":
        return 2 * (element if on_cpu else size.wide)
    return size.wide


def keeps_entrance(config: Config, layer: Layer) -> bool:
    """Whether a layer keeps what it receives; else what it casts that to."""
    size, here, post = ElementBytes.of(config), _residual_bytes(config), layer.model.norm_placement == "post"
    read = size.compute if post else size.wide if layer.model.apply_layernorm_1p else here
    return not layer.is_block or read == here


def _norms_bytes(config: Config, model: ModelConfig, on_cpu: bool) -> float:
    """Of all norms of a block; without those in front, the linear layers keep the residual stream as they read it."""
    size = ElementBytes.of(config)
    if model.norm_placement == "pre":
        return 2 * _norm_bytes(config, model, on_cpu)
    behind = 2 * _input_and_statistics(config, model, on_cpu, size.compute)
    if model.norm_placement == "sandwich":
        return behind + 2 * _norm_bytes(config, model, on_cpu)
    return behind + prod(boundary_shape(config)) * 2 * size.compute  # what is read, or its cast


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
    beside = 0.0
    if config.parallel.context.traders > 1:
        beside += at.context  # as it comes back from the ranks that had these heads
    if model.attention_dropout > 0:
        beside += 8.0 * per_head  # what keys each query's dropout
        alone = not on_cpu and config.parallel.context.ring == 1  # log-sums without it are those of narrow values
        beside += (row_sums + NARROW * at.e * per_head) * alone
    if model.softmax_type != "vanilla":
        beside += row_sums  # the sinks
    if at.normed:
        both, norms = at.tokens * (at.q + at.kv), 2 if at.across else at.heads + at.kv / model.head_dim
        beside += at.tokens * norms * _statistics(size, model, on_cpu, at.e)
        beside += both * size.wide * (on_cpu and model.normalization == "RMSNorm")
        if at.across and not at.one:  # side by side; over ranks wide copies, and what is scaled by their sum
            beside += both * (size.wide + at.e if tp > 1 else at.e)
        elif at.across and tp > 1:
            beside += both * (size.wide * (size.wide != at.e) + at.e)
    return beside + (_attended_on_cpu if on_cpu else _attended_on_gpu)(config, model, at, row_sums)


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
        kept = held + 3 * at.context if at.rotated or at.normed else at.projected + 2 * at.context
    else:  # values (and queries, keys) are views of what was projected
        turned = at.rotated or at.normed
        kept = at.projected + e * at.tokens * (q + kv if turned else q * (at.grouped and fused))
    scales = model.attention_dropout > 0 or model.softmax_type != "vanilla"
    return kept + at.context * (1 + (scales and cp.context_parallel_size == 1)) + row_sums  # and as it was before


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


class ContextBytes(NamedTuple):
    """What a rank sends of one block and micro-batch so that attention sees whole sequences. traded: tokens for heads,
    as much forward as backward. forward, backward: passed round the ring, or gathered and scattered."""

    traded: float
    forward: float
    backward: float


def context_bytes(config: Config, layer: Layer) -> ContextBytes:
    """Per rank, t tensor-parallel ranks, A that trade, P in the ring, T tokens here, e and w bytes (wide)::

    traded      e T (2 q + 2 k) / t * (A - 1) / A            queries, keys, values there, results back
    ring        2 e T k / t * (P - 1)                        backward again, and 2 w T k / t * (P - 1) of gradients
    gathered    2 e T k / t * (P - 1)                        backward twice that: again, and scattered
    states      x (A - 1) traded, x A (P - 1) gathered       x: what two pieces do to states, inputs at their ends
    """
    given, size, model = config.parallel.context, ElementBytes.of(config), layer.model
    tokens, tp = micro_tokens(config), config.parallel.tensor_model_parallel_size
    q, kv = model.query_size / tp, model.local_kv_size(tp)
    traders, ring = given.traders, given.ring
    if model.mixer == "delta":
        # what a piece of a sequence does to states, and the inputs that the convolution behind it wants
        delta, pieces = model.delta, 2 * given.context_parallel_size
        keys, reach = delta.linear_key_head_dim, min(delta.linear_conv_kernel_dim - 1, model.seq_length // pieces)
        affine = size.wide * keys * (keys * delta.linear_num_value_heads + delta.value_size)
        affine += size.compute * reach * delta.linear_num_key_heads * delta.mixed
        own = 2 * config.training.micro_batch_size * affine / tp
        return ContextBytes(own * (traders - 1), own * traders * (ring - 1), own * traders * (ring - 1))
    traded = size.compute * tokens * 2 * (q + kv) * (traders - 1) / traders
    if ring == 1:
        return ContextBytes(traded, 0.0, 0.0)
    once = 2 * size.compute * tokens * kv * (ring - 1)
    if given.cp_comm_type == "all_gather":
        return ContextBytes(traded, once, 2 * once)
    return ContextBytes(traded, once, once + 2 * size.wide * tokens * kv * (ring - 1))


def kept_bytes(config: Config, layer: Layer, *, on_cpu: bool = False) -> float:
    """Everything that a layer keeps of a micro-batch, a block's input included, a head's normalised input not."""
    model, tokens, size = layer.model, micro_tokens(config), ElementBytes.of(config)
    length, samples, h = boundary_shape(config)
    if layer.is_block:
        dropout = 2 * length * samples * h if model.hidden_dropout > 0 else 0.0
        norms = _norms_bytes(config, model, on_cpu)
        worst = imbalance(config, WORST_IMBALANCE)
        between = size.compute * tokens * layer.mlp_width(config.parallel, worst) + _expert_bytes(config, layer)
        gate = 2.0 * size.compute * tokens * model.query_size / config.parallel.tensor_model_parallel_size
        gates = gate * (model.attention_output_gate and model.mixer == "attention")
        between += compiled_bytes(config, layer)
        return norms + MIXER_BYTES[model.mixer](config, model, on_cpu) + gates + between + dropout
    if not layer.products:
        return 0.0
    computed = tokens * h * size.compute * (1 + model.further.depth) + _output_bytes(config, layer)
    kept = computed + (_norm_bytes(config, model, on_cpu) - length * samples * h * size.compute)
    if not model.further.depth:
        return kept
    # each further prediction: three norms, what its matrix reads, a block
    own = 3 * _norm_bytes(config, model, on_cpu) + 2 * length * samples * h * size.compute
    return kept + model.further.depth * (own + kept_bytes(config, model_layers(config.model)[-2], on_cpu=on_cpu))


def compiled_bytes(config: Config, layer: Layer) -> float:
    """What a block keeps beside the rest because it is compiled: the inputs of the second matrix of its MLP, or of its
    shared expert, which the others compute again."""
    if not config.training.compile:
        return 0.0
    made = [p for p in layer.products if p.name.endswith("fc2") and not p.name.startswith("experts.")]
    inputs = sum(p.local(p.shards(config.parallel))[1] for p in made)
    return float(ElementBytes.of(config).compute * micro_tokens(config) * inputs)


def imbalance(config: Config, factor: float) -> float:
    """`factor` as this layout can have it: 1 where every rank has all experts."""
    capacity = config.model.experts.moe_expert_capacity_factor
    most = float(config.parallel.experts.expert_model_parallel_size)
    return max(1.0, min(factor, most, most if capacity is None else capacity))


def expert_rows(config: Config, layer: Layer, factor: float = 1.0) -> float:
    """Rows that the experts of a rank compute for a micro-batch: the mean of the ranks that share them, or that times
    `factor` (`MEAN_IMBALANCE`, `WORST_IMBALANCE`) where more than one does."""
    parallel = config.parallel
    shared = parallel.tensor_model_parallel_size // parallel.expert_tensor_size  # ranks with tokens of their own
    return micro_tokens(config) / shared * layer.model.experts.moe_router_topk * imbalance(config, factor)


def _expert_bytes(config: Config, layer: Layer) -> float:
    """Of a block with experts, beside what is between their matrices: a token's rows before and after its k experts,
    logits and probabilities in fp32."""
    if not layer.is_sparse:
        return 0.0
    size, model, given = ElementBytes.of(config), layer.model, layer.model.experts
    rows = (expert_rows(config, layer, WORST_IMBALANCE) + expert_rows(config, layer)) * model.hidden_size * size.compute
    if size.wide != size.compute:  # the router has its input widened, and a shared expert as it is
        alone = given.moe_shared_expert_intermediate_size is None
        rows += prod(boundary_shape(config)) * (size.wide - size.compute * alone)
    return rows + micro_tokens(config) * 2.0 * (given.num_experts or 1) * size.wide


def weight_only_bytes(config: Config, layer: Layer) -> float:
    """What a layer keeps after I until W of a split backward: inputs and output gradients of its matrices (whole
    sequences: the gather of sequence parallelism has been done). A head has computed its gradient, and adds it."""
    tp, size = config.parallel.tensor_model_parallel_size, ElementBytes.of(config)
    matrices = [p.local(tp) for p in layer.products if not p.core and not p.name.endswith("output")]
    kept = float(size.compute * micro_tokens(config) * sum(n + k for n, k in matrices))
    return kept if layer.is_block else _output_bytes(config, layer) + kept


def _output_bytes(config: Config, layer: Layer) -> float:
    """Gradients of an output layer, one each time that it is used; beside adapters it has none."""
    if config.model.lora.lora_rank is not None:
        return 0.0
    tp, halves = config.parallel.tensor_model_parallel_size, 2 if config.parallel.tp_comm_overlap else 1
    matrices = [product.local(tp) for product in layer.products if product.name.endswith("output")]
    return float(halves * ElementBytes.of(config).wide * sum(n * k for n, k in matrices))
