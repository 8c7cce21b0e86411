"""Pipeline parallelism: runs one rank's list of actions.

    program (megalite.schedule) ──> executor.py ──F──> stage.py: consecutive layers ──SEND──> the next stage's rank
                                         └──REDUCE, NORM, STEP──> handed to megalite.engine's `Updater`

Invariant: the executor knows no schedule by name; the order that was validated and simulated is the order that runs.
Proof: `tests/equivalence` (every schedule against one process), `tests/distributed/parallel/pipeline/` (peaks).
"""

from megalite.parallel.pipeline.executor import Events, Executor
from megalite.parallel.pipeline.message_driven import executor_of
from megalite.parallel.pipeline.offloaded_stage import OffloadedStage
from megalite.parallel.pipeline.shared_params import holders, replica_axes, start_shared_sum
from megalite.parallel.pipeline.shared_rows import SharedRows
from megalite.parallel.pipeline.stage import ForwardOnly, Stage
from megalite.parallel.pipeline.stage_types import repeated, stage_type
from megalite.parallel.pipeline.trace import PipelineTracer
