"""Bytes that one micro-batch leaves behind between its forward and its backward, layer by layer.

What autograd keeps of a block (T = s*b tokens, e bytes an element, r bytes of the residual stream, t tensor-parallel
ranks, o = t under sequence parallelism and else 1, q and k widths of queries and keys, f of the MLP)::

    two norms            inputs 2 r T h/o, outputs 2 e T h/o, statistics in fp32
    attention            qkv e T (q + 2k)/t, rotated or rearranged queries and keys, context e T q/t, log-sums 4 T a/t
    MLP                  fc1 e T f/t (gated: gate and value, 2 e T f/t); the activation is computed again

Fused attention keeps nothing of size s x s; the plain path (attention dropout) keeps the weights, and blocked
attention (a CPU with 128 to 1,024 tokens) half of them. With full recomputation a segment keeps its input. The head
computes its gradients in the forward and keeps them: e T h for its input and the wide gradient of its matrix. Assumed:
a CPU widens 16-bit operands of products to fp32 (few have instructions for them), and the CUDA kernels are the
library's fused ones.
"""

from __future__ import annotations

from dataclasses import dataclass

from megalite.config import Config
from megalite.planner.states import Precision
from megalite.schedule import find

__all__ = ["Kept", "block_bytes", "recompute_cost_layers", "stage_activations", "workspace_bytes"]

LOGIT_CHUNK_CPU, LOGIT_CHUNK_CUDA = 1 << 22, 1 << 26


@dataclass(frozen=True)
class Kept:
    """Bytes of one micro-batch in one stage.

    full: from forward to backward, without the next two. boundary: the stage's input. head: what the output layer
    keeps. weight_only: after I until W of a split backward; weight_only_block: the share of one block.
    """

    full: float
    boundary: float
    head: float
    weight_only: float
    weight_only_block: float

    @property
    def total(self) -> float:
        return self.full + self.boundary + self.head


def _tokens(config: Config) -> int:
    return config.model.seq_length * config.training.micro_batch_size


def _outer(config: Config) -> int:
    parallel = config.parallel
    return parallel.tensor_model_parallel_size if parallel.sequence_parallel else 1


def _residual_bytes(config: Config) -> int:
    size = Precision.of(config)
    return size.wide if config.model.fp32_residual_connection else size.compute


def _norm_bytes(config: Config, on_cpu: bool) -> float:
    """Of one norm: input, statistics, output (which the linear layer behind it keeps)."""
    tokens, h, size = _tokens(config) / _outer(config), config.model.hidden_size, Precision.of(config)
    residual = _residual_bytes(config)
    kept = tokens * h * (residual + size.compute)
    if config.model.normalization == "LayerNorm":
        return kept + tokens * 2 * residual
    # The CPU has no kernel of its own: it keeps the normalised input too, and widens 16 bits before.
    widened = tokens * h * (size.wide - residual) if residual < size.wide else 0.0
    return kept + tokens * size.wide + (tokens * h * size.wide + widened if on_cpu else 0.0)


def _attention_bytes(config: Config, on_cpu: bool) -> float:
    model, tp, size = config.model, config.parallel.tensor_model_parallel_size, Precision.of(config)
    e, tokens = size.compute, _tokens(config)
    q, kv, heads = model.query_size / tp, model.kv_size / tp, model.num_attention_heads / tp
    grouped = model.query_groups != model.num_attention_heads
    product = size.wide if on_cpu else e  # a CPU widens the operands of its products
    widened = product != e
    context = e * tokens * q
    if model.attention_dropout > 0:
        scores = size.wide if model.attention_softmax_in_fp32 else product
        matrix = heads * model.seq_length * tokens
        kept = 0.0 if model.recompute_granularity == "selective" else matrix * scores
        kept += matrix * (product + 1) if kept else 0.0
        return kept + scores * tokens * (q + 2 * kv) + context * (2 if kept else 1)
    log_sums = tokens * heads * max(4, size.wide)
    if model.qk_layernorm:
        log_sums += 2 * tokens * (heads + kv / model.head_dim) * e  # the statistics of the norms of queries and keys
        if on_cpu and model.normalization == "RMSNorm":
            log_sums += tokens * (q + kv) * size.wide
    if on_cpu and _blocked(config):
        kept = product * tokens * (q + 2 * kv) + model.qk_layernorm * e * tokens * (q + 2 * kv)
        kept += product * tokens * q + context * widened
        return kept + product * heads * config.training.micro_batch_size * _block_area(model.seq_length)
    if on_cpu and (grouped or widened):  # queries, and keys and values of every head, are copies
        operands = product * tokens * (3 * q if grouped else q + 2 * kv)
        return operands + product * tokens * q + context * widened + log_sums
    kept = e * tokens * (q + 2 * kv)  # the projection; values (and queries, keys) are views of it
    if model.position_embedding_type == "rope":
        kept += e * tokens * (q + kv)
    elif grouped or model.qk_layernorm:
        kept += e * tokens * (q + kv * model.qk_layernorm)
    return kept + context * (2 if config.training.micro_batch_size > 1 and not on_cpu else 1) + log_sums


def _blocked(config: Config) -> bool:
    """Whether a CPU attends over blocks of queries (`nn.attention_blocked`), which keeps half of the weights."""
    model = config.model
    whole = not config.data.reset_attention_mask and (
        model.window_size is None or model.window_size >= model.seq_length
    )
    return 128 <= model.seq_length <= 1024 and whole and model.recompute_granularity != "selective"


def _block_area(length: int) -> int:
    """Scores of one head: every block of queries against the keys up to its own end."""
    size = 64 if length < 512 else 128
    return sum((min(begin + size, length) - begin) * min(begin + size, length) for begin in range(0, length, size))


def _mlp_bytes(config: Config) -> float:
    model, tp = config.model, config.parallel.tensor_model_parallel_size
    widths = 2 if model.gated else 1
    return Precision.of(config).compute * _tokens(config) * widths * model.ffn_size / tp


def block_bytes(config: Config, *, on_cpu: bool = False) -> float:
    """Everything one block keeps, its input included."""
    model, tokens = config.model, _tokens(config)
    dropout = 2 * tokens / _outer(config) * model.hidden_size if model.hidden_dropout > 0 else 0.0
    return 2 * _norm_bytes(config, on_cpu) + _attention_bytes(config, on_cpu) + _mlp_bytes(config) + dropout


def _segments(config: Config, blocks: int) -> tuple[int, int, int]:
    """(Blocks kept whole, segments that keep their input only, blocks that recomputing brings back beside the rest).

    The first blocks of a stage are recomputed last: whole blocks behind them have gone by then, and one takes their
    place; where the backward is split, their W keeps most of them.
    """
    model = config.model
    if model.recompute_granularity != "full" or not blocks:
        return blocks, 0, 0
    number = min(blocks, model.recomputed_layers)
    if model.recompute_method == "block":
        split = find(config.parallel.schedule).splits_backward
        return blocks - number, number, 1 if number == blocks or (number and split) else 0
    return 0, -(-blocks // number), number


def recompute_cost_layers(config: Config, blocks: int) -> int:
    """Blocks of a stage of `blocks` whose forward runs again in backward. config: as the stage has it (`for_stage`)."""
    kept, _, _ = _segments(config, blocks)
    return blocks - kept


def stage_activations(config: Config, items: range, *, on_cpu: bool = False) -> Kept:
    """What one micro-batch keeps in a stage. config: as the stage has it (`for_stage`). items: indices into [embedding,
    block 0, ..., head]."""
    model, size, tokens = config.model, Precision.of(config), _tokens(config)
    blocks = sum(0 < item <= model.num_layers for item in items)
    kept, segments, _ = _segments(config, blocks)
    entrance = tokens / _outer(config) * model.hidden_size * _residual_bytes(config)
    full = kept * block_bytes(config, on_cpu=on_cpu) + segments * entrance
    if blocks and model.position_embedding_type == "rope":
        full += size.compute * tokens * model.rotary_dim  # sines and cosines, shared by the blocks
    head = 0.0
    if model.num_layers + 1 in items:
        rows = config.padded_vocab_size() / config.parallel.tensor_model_parallel_size
        head = tokens * model.hidden_size * size.compute + rows * model.hidden_size * size.wide
        head += _norm_bytes(config, on_cpu) - tokens / _outer(config) * model.hidden_size * size.compute
    boundary = 0.0 if 0 in items else entrance
    if boundary and blocks:
        full -= entrance  # the first block's input is the received tensor
    elif boundary:
        head -= entrance
    block = _weight_only_block(config)
    late = blocks * block + _weight_only_head(config, items)
    return Kept(max(full, 0.0), boundary, max(head, 0.0), late, block)


def _weight_only_block(config: Config) -> float:
    """Inputs and output gradients of a block's matrices: what W needs."""
    model, tp = config.model, config.parallel.tensor_model_parallel_size
    h, q, kv = model.hidden_size, model.query_size / tp, model.kv_size / tp
    f = model.ffn_size / tp
    inputs = 2 * h + q + f  # whole sequences: the gather of sequence parallelism has been done
    gradients = (q + 2 * kv) + h + (2 if model.gated else 1) * f + h
    return Precision.of(config).compute * _tokens(config) * (inputs + gradients)


def _weight_only_head(config: Config, items: range) -> float:
    """The gradient that the head has computed in its forward, until it is added."""
    if config.model.num_layers + 1 not in items:
        return 0.0
    rows = config.padded_vocab_size() / config.parallel.tensor_model_parallel_size
    return rows * config.model.hidden_size * Precision.of(config).wide


def workspace_bytes(config: Config, items: range, *, on_cpu: bool = False) -> tuple[float, float]:
    """(Logits of one chunk and their gradient, tensors that come and go in a block's backward) in bytes."""
    model, tp, size, tokens = config.model, config.parallel.tensor_model_parallel_size, Precision.of(config), 0
    tokens = _tokens(config)
    blocks = sum(0 < item <= model.num_layers for item in items)
    logits = 0.0
    if model.num_layers + 1 in items:
        rows = min(config.padded_vocab_size() // tp, max(1, model.vocab_size))
        chunk = LOGIT_CHUNK_CPU if on_cpu else LOGIT_CHUNK_CUDA
        step = max(1, min(tokens, chunk // rows))
        logits = float(step * rows * (2 * size.wide + (size.compute if size.compute != size.wide else 0)))
    block = 0.0
    if blocks:
        again = width = (2 if model.gated else 1) * model.ffn_size / tp  # gated: silu(gate) and the product
        _, _, longest = _segments(config, blocks)
        block = size.compute * tokens * (model.hidden_size + again + 2 * width)
        if longest:  # made again, and let go as the backward goes through it; its input is there already
            entrance = tokens / _outer(config) * model.hidden_size * _residual_bytes(config)
            block += longest * block_bytes(config, on_cpu=on_cpu) - entrance
    return logits, block
