"""Data parallelism with sharded state: ZeRO (Rajbhandari et al., arXiv 1910.02054), stages 0 to 3.

                 weights     gradient     master + moments        bytes a parameter (bf16, fp32 main gradients, N ranks)
    stage 0      all         all          all                     2 + 4 + 12         = 18
    stage 1      all         all          1/N                     2 + 4 + 12/N       = 6 + 12/N
    stage 2      all         1/N          1/N                     2 + (4 + 12)/N     = 2 + 16/N
    stage 3      1/N         1/N          1/N                     (2 + 4 + 12)/N     = 18/N

A batch, whatever the stage:

    buffers.begin_batch(m)       then m times forward and backward
    buffers.start_reduce()       tied parameters: tied_gradients(), summed over their stages, then start_tied_reduce()
    buffers.finish_reduce()
    optimizer.grad_norm()        optimizer.step(lr=..., weight_decay=..., grad_scale=..., version=...)

Public names: `ZeroOptions`, `ParameterBuffers` (flat memory and reduction of one stage), `ShardedOptimizer` (any
`torch.optim.Optimizer` over the owned slices), `ParamGroup`.

Invariants: one master per element; every element is counted once in the norm and written by one rank; reductions start
in the order of the plan, never in the order of arrival. Proof: `tests/distributed/test_zero_equality.py` (every stage
equals plain torch training in fp64, stage 1 equals stage 0 bit for bit at dp=2),
`tests/distributed/test_zero_memory.py` (bytes held equal the table).
"""

from megalite.parallel.zero.activation_offload import ActivationOffload
from megalite.parallel.zero.buckets import ParameterBuffers
from megalite.parallel.zero.options import ZeroOptions
from megalite.parallel.zero.parts import MakeOptimizer, ParamGroup
from megalite.parallel.zero.sharded_optimizer import ShardedOptimizer

__all__ = ["ActivationOffload", "MakeOptimizer", "ParamGroup", "ParameterBuffers", "ShardedOptimizer", "ZeroOptions"]
