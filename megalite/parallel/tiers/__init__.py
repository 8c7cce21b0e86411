"""Memory in tiers: what is on the device for a while, and on the host or in a file the rest of the time.

    device    [ layer in use | next layer ]  [ activations of few micro-batches ]  [ cached rows ]
                 |            ^                  | EVICT       ^ PREFETCH              |      ^
                 v  `Mover`   |                  v             |                       v      |
    host      [ weights, gradients, masters, moments | activations | rows of the embedding ]
    file      [ masters and moments ]

What moves, and who says so:

    mover.py           `Mover`: makes every copy, with the one rule of how long both ends live and who waits for what
    saved_tensors.py   `SavedTensors`: activations, which the program moves (EVICT, PREFETCH), or the first layers
                       (`ActivationOffload`)
    meta_mover.py      `MetaMover`: of a rank on `meta`, whose bytes are counted before it exists
    state_file.py      `StateFile`: masters and moments in a file (ZeRO-Infinity, arXiv 2104.07857)

The objects themselves belong to other rooms, which call the mover: weights and gradients
(`zero/host_weights.py`, `zero/host_gradient.py`), the optimizer's states (`zero/host_optimizer.py`,
`zero/delayed_optimizer.py`), rows of the embedding (`rows/cached_rows.py`).

Adding one: a file in the room that owns the tensors, which asks `Mover.to_host` and `Mover.to_device`; the program's
EVICT and PREFETCH, or a plan of the chunks, say when. Its bytes belong to `MemoryPlan` (`megalite/inventory`).

Invariant: no other file starts a copy on a stream of its own. Proof: `tests/unit/parallel/tiers/test_mover.py` (streams
that keep clocks: a wait that is left out is a race), `tests/equivalence/test_tiers.py` (copies run beside
computations), `test_memory_places.py`, `test_param_offload.py`, `test_embedding_offload.py` (no bit changes).
"""

from megalite.parallel.tiers.meta_mover import MetaMover
from megalite.parallel.tiers.mover import Arrival, Mover, Pairs, TieredMemory
from megalite.parallel.tiers.saved_tensors import ActivationOffload, SavedForward, SavedTensors
from megalite.parallel.tiers.state_file import StateFile
