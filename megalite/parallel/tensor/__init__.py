"""Tensor parallelism: one layer's matrices cut over the ranks of an axis.

Papers: Megatron-LM, Shoeybi et al., arXiv 1909.08053 (columns, rows, vocabulary); Korthikanti et al., arXiv
2205.05198 (sequence parallelism).

    [s/t,b,h] --all-gather--> [s,b,h] --A_i--> [s,b,f/t] --act--B_i--> partial [s,b,h] --reduce-scatter--> [s/t,b,h]
    norm, dropout, residual   column parallel              row parallel                      norm, dropout, residual

    Without sequence parallelism both messages become one all-reduce and every rank computes the outer parts.

Invariant: for every t the layers compute what t = 1 computes, forward and backward, up to the order of additions;
with t = 1 no process group is touched. Proof: `tests/distributed/parallel/tensor/` (fp64, 1e-12, losses and
every gradient).
"""

from megalite.parallel.tensor.adapters import LowRank, add_adapters
from megalite.parallel.tensor.context import LayerContext, new_parameter, parameter_of, weight_and_bias
from megalite.parallel.tensor.cross_entropy import VocabShard, fused_cross_entropy, token_losses
from megalite.parallel.tensor.delayed_scaling import ScaleTable, delayed_products
from megalite.parallel.tensor.embedding import VocabParallelEmbedding, lookup
from megalite.parallel.tensor.float8 import check_float8, gather_rounded
from megalite.parallel.tensor.int8 import Int8Products, dequantised, hold_in_8_bits, in_8_bits, place_of
from megalite.parallel.tensor.late_messages import LateMessage, Message, added_at_once, enter_parallel, leave_parallel
from megalite.parallel.tensor.linear import (
    ColumnParallelLinear,
    Linear,
    RowParallelLinear,
    column_linear,
    make_layer,
    row_linear,
    weight_gradients,
)
from megalite.parallel.tensor.loss_kernels import LossKernels
from megalite.parallel.tensor.products import Products, product_dtype
from megalite.parallel.tensor.replicated import ReplicatedLinear
