"""Data parallelism with sharded state: ZeRO (Rajbhandari et al., arXiv 1910.02054), stages 0 to 3.

                 weights     gradient     master + moments        bytes a parameter (bf16, fp32 main gradients, N ranks)
    stage 0      all         all          all                     2 + 4 + 12         = 18
    stage 1      all         all          1/N                     2 + 4 + 12/N       = 6 + 12/N
    stage 2      all         1/N          1/N                     2 + (4 + 12)/N     = 2 + 16/N
    stage 3      1/N         1/N          1/N                     (2 + 4 + 12)/N     = 18/N

A batch, whatever the stage:

    gradients.begin_batch(m)       then m times forward and backward
    gradients.start_reduce()       tied parameters: `tied()`, summed over their stages, then start_tied_reduce()
    gradients.finish_reduce()
    optimizer.grad_norm()          optimizer.step(lr=..., weight_decay=..., grad_scale=..., version=...)

The life of a gradient, from a backward to the kernel of the optimizer:

    GradSink          a layer adds its weight gradient (the loss has already been divided, so sums are means)
    HeldGradient, StreamedGradient      the bucket is reduced over dp: all-reduce, or reduce-scatter
    finish_reduce     further sums: tied embeddings, shares of tensor-parallel ranks, replicas
    grad_norm         every element once, over all ranks
    DeviceOptimizer   one multiplication for clipping and loss scale, cast to the master's dtype, the update rule

Invariants: one master per element; every element is counted once in the norm and written by one rank; reductions start
in the order of the plan, never in the order of arrival; an update between a forward and its backward is an error.
Proof: `tests/distributed/parallel/zero/`: `test_zero_equality.py` (every stage equals plain torch in fp64, stage 1 is
stage 0 bit for bit at dp=2), `test_zero_optimizers.py` (every rule at every stage), `test_zero_contract.py`,
`test_zero_unshard.py`, `test_zero_memory.py` (bytes held equal the table; nothing grows), `test_parameter_families.py`
(experts' axes, fp32 inside bf16).
"""

from megalite.parallel.zero.delayed_optimizer import DelayedOptimizer
from megalite.parallel.zero.frozen import frozen_shards, release_frozen
from megalite.parallel.zero.master_shards import MakeOptimizer, ParamGroup
from megalite.parallel.zero.options import StageOptions, ZeroOptions
from megalite.parallel.zero.parameter_buffers import ParameterBuffers, stage_buffers, where_not_finite
from megalite.parallel.zero.rank_memory import RankMemory
from megalite.parallel.zero.sharded_optimizer import PendingNorm, ShardedOptimizer
from megalite.parallel.zero.unshard import Unsharder
