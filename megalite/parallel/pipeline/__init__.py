"""Pipeline parallelism: runs one rank's list of actions.

    program (megalite.schedule) ──> executor.py ──F──> stage.py: consecutive layers ──SEND──> the next stage's rank
                                         └──REDUCE, NORM, STEP──> handed to megalite.engine's `Updater`

    executor.py         one interpreter of actions for every schedule
    message_driven.py   one that runs what has arrived
    stage.py            consecutive layers, run forward and backward one micro-batch at a time
    recomputed.py       a stage whose forward runs again ahead of its backward
    offloaded.py        a stage whose activations may wait on the host (`parallel/tiers` moves them)
    shared_params.py    tied embeddings: one logical tensor, several copies, one gradient
    trace.py            timelines of the pipeline as it ran, in the forms of planned ones
    shared_rows.py  the same between stages that are cut differently

Invariant: the executor knows no schedule by name; the order that was validated and simulated is the order that runs.
Proof: `tests/equivalence` (every schedule against one process), `tests/distributed/parallel/pipeline/` (peaks).
"""

from megalite.parallel.pipeline.executor import Events, Executor
from megalite.parallel.pipeline.message_driven import executor_of
from megalite.parallel.pipeline.offloaded import OffloadedStage, stage_type
from megalite.parallel.pipeline.recomputed import repeated
from megalite.parallel.pipeline.shared_params import holders, replica_axes, start_shared_sum
from megalite.parallel.pipeline.shared_rows import SharedRows
from megalite.parallel.pipeline.stage import ForwardOnly, Stage
from megalite.parallel.pipeline.trace import PipelineTracer
