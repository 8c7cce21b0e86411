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

Where things are:

    options.py         what is sharded, what overlaps, how large a bucket is; what a pipeline stage adds to that
    rank_memory.py     `RankMemory`: scratch, the order of weights and the `Mover`, shared by all stages of a rank
    families.py        a stage's families (dense, experts): one `ParameterBuffers` each, always in the same order
    parameter_buffers.py   `ParameterBuffers`: the `weights` and `gradients` of one family, cut into buckets
    flat_weights.py    the family's parameters in flat memory
    unshard.py         gathers weights before their use and frees them afterwards (stage 3), or waits for them (1, 2)
    reducer.py         the family's gradients: which bucket is reduced when
    host_weights.py    weights that live on the host (`--param-offload`); parallel/tiers moves them
    host_exchange.py   sums and gathers of what lives on the host
    bucket.py          one bucket: its plan, weights and sinks; its gradient in stages 0 and 1
    streamed_gradient.py   its gradient in stages 2 and 3
    host_gradient.py   its gradient where weights live on the host
    plus_plus.py       what ZeRO++ sends in place of that
    frozen.py          weights that nothing trains, as rectangles to load
    sharded_optimizer.py   `ShardedOptimizer`: any update rule over the master weights that this rank owns
    master_shards.py   those master weights: flat tensors of one kind
    sub_optimizers.py  the update rule over masters and moments on the device
    host_optimizer.py  over those on the host, and over masters that share memory with the weights
    delayed_optimizer.py   the same step, of which the host's part runs behind the next batch
    param_groups.py    what an update rule gets to know about its tensors
    param_remainders.py    masters of bf16 weights in 16 bits
    host_memory.py     returns freed memory of a CPU rank to the system (stages 2 and 3)

Invariants: one master per element; every element is counted once in the norm and written by one rank; reductions start
in the order of the plan, never in the order of arrival; an update between a forward and its backward is an error.
Proof: `tests/distributed/parallel/zero/`: `test_zero_equality.py` (every stage equals plain torch in fp64, stage 1 is
stage 0 bit for bit at dp=2), `test_zero_optimizers.py` (every rule at every stage), `test_zero_contract.py`,
`test_zero_unshard.py`, `test_zero_memory.py` (bytes held equal the table; nothing grows), `test_parameter_families.py`
(experts' axes, fp32 inside bf16).
"""

from megalite.parallel.zero.delayed_optimizer import DelayedOptimizer
from megalite.parallel.zero.families import stage_buffers, where_not_finite
from megalite.parallel.zero.frozen import frozen_shards, release_frozen
from megalite.parallel.zero.options import StageOptions, ZeroOptions
from megalite.parallel.zero.param_groups import MakeOptimizer, ParamGroup
from megalite.parallel.zero.parameter_buffers import ParameterBuffers
from megalite.parallel.zero.rank_memory import RankMemory
from megalite.parallel.zero.sharded_optimizer import PendingNorm, ShardedOptimizer
from megalite.parallel.zero.unshard import Unsharder
