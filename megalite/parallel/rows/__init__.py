"""Rows of a word embedding in host memory, and a cache of them on the device (Bagpipe, arXiv 2202.12429).

A micro-batch uses few rows of a large vocabulary. What is read next is known: the data's order is a pure function.

    host      rows, moments [V, h] in the master's dtype        steps of every row: those of batches that used it,
                 |  up to date            ^  gradient of a row   and, when it is next needed, those that it missed
    device    cache [R, h]: weights in the compute dtype, gradients in the main dtype
                 F reads                  B, W add

    batch t                                             | update t                       | batch t + 1
    F0  F1  B0  F2  B1 ...  rows of the next            | gradients down, sum over       |
    micro-batches come, those whose next use is the     | replicas, norm, step of the    |
    farthest leave (Belady), gradients with them        | rows that were used; cache out |

AdamW changes a row that no batch used, too: its moments decay and move it, and weight decay shrinks it. Such steps
(gradient 0, each with its own learning rate, weight decay and bias correction) are replayed in order when the row is
next needed: by a micro-batch, an evaluation or a checkpoint. So every row takes every step, bit for bit as in flat
memory; and because every update changes every row, nothing in the cache outlives an update.

Invariant: what F reads of a row has taken as many steps as there were updates. Proof: `tests/unit/parallel/rows/`,
`tests/equivalence/test_embedding_offload.py` (every step's loss, weights and moments equal those of a run without it).
"""

from megalite.parallel.rows.cached_rows import CachedRows, HostEmbedding, Traffic
from megalite.parallel.rows.host_rows import HostRows, RowRule
from megalite.parallel.rows.slots import Access
