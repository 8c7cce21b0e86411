"""Which samples a rank reads: a pure function of the samples consumed so far. Nothing is stored, nothing is sent.

Samples are walked in order. A micro-step of all data-parallel ranks takes `micro_batch_size * dp_size` of them, rank
r the r-th run of `micro_batch_size`; a global batch is as many micro-steps as fit in it. So the samples of a global
batch do not depend on the layout, and a run may resume with another data-parallel size without losing or repeating
one. Peers on other axes compute the same.
"""

from __future__ import annotations

from megalite.errors import DataError


def num_micro_batches(global_batch_size: int, micro_batch_size: int, dp_size: int) -> int:
    """Micro-batches of one rank in a global batch.

    Raises:
        DataError: the global batch is no whole number of micro-steps.
    """
    step = micro_batch_size * dp_size
    if global_batch_size <= 0 or global_batch_size % step:
        raise DataError(
            f"--global-batch-size={global_batch_size}: must be a multiple of micro-batch size x data-parallel size "
            f"({micro_batch_size} x {dp_size} = {step}); nearest {max(step, global_batch_size // step * step)} "
            f"or {(max(global_batch_size, 0) // step + 1) * step}"
        )
    return global_batch_size // step
