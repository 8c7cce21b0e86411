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
from megalite.inventory.element_bytes import ElementBytes, micro_tokens, statistics
from megalite.inventory.layers import Layer, model_layers
from megalite.inventory.mixer_bytes import MIXER_BYTES

#: Rows of the fullest of the ranks that share the experts of a block, as a multiple of their mean: what a balanced run
#: has on average, for times; what memory is counted for. A capacity factor below it bounds both, and so does ep.
MEAN_IMBALANCE, WORST_IMBALANCE = 1.1, 1.5


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
    kept = float(tokens * (h * element + statistics(ElementBytes.of(config), model, on_cpu, element)))
    if model.normalization == "LayerNorm":
        return kept
    # The CPU has no kernel of its own: it keeps the normalised input too, and widens 16 bits before.
    widened = tokens * h * (wide - element) if element < wide else 0.0
    return kept + (tokens * h * wide + widened if on_cpu else 0.0)


def keeps_entrance(config: Config, layer: Layer) -> bool:
    """Whether a layer keeps what it receives; else what it casts that to."""
    size, here, post = ElementBytes.of(config), _residual_bytes(config), layer.model.norm_placement == "post"
    read = size.compute if post else size.wide if layer.model.apply_layernorm_1p else here
    return not layer.is_block or read == here


def _norms_bytes(config: Config, model: ModelConfig, on_cpu: bool) -> float:
    """Of all norms of a block; without those in front, the linear layers keep the residual stream as they read it."""
    size = ElementBytes.of(config)
    twice = model.use_parallel_residual and not model.apply_layernorm_1p  # one input is that of two norms
    before = 2 * _norm_bytes(config, model, on_cpu) - twice * boundary_bytes(config)
    if model.norm_placement == "pre":
        return before
    behind = 2 * _input_and_statistics(config, model, on_cpu, size.compute)
    if model.norm_placement == "sandwich":
        return behind + before
    return behind + prod(boundary_shape(config)) * 2 * size.compute  # what is read, or its cast


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
    bound = most if capacity is None else capacity
    return max(min(1.0, bound), min(factor, most, bound))


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
    rows += prod(boundary_shape(config)) * size.compute * given.moe_shared_expert_gate  # what it scales
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
