"""Where the host may wait for the device within a step (a blocking read): one row for each reason.

Anywhere else a wait is a fault. The rehearsal reports it and names the line; the table in docs/gpus.md has these rows.

Adding a read: keep the value on the device where you can; else queue its copy with `LateReading` and read it when it
has long arrived; else add a row here and in docs/gpus.md. `tests/unit/rehearsal/test_host_waits.py` rehearses a run for
each row, and fails where a row has no wait any more.
"""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class HostWait:
    """Reads that may make the host wait. name: for tests. reads, why: its row in docs/gpus.md.

    places: regular expression for the lines that wait, as a rehearsal names them: `file:line function < caller`.
    """

    name: str
    reads: str
    why: str
    places: str


HOST_WAITS = (
    HostWait(
        "late",
        "the gradient norm of the update before, whether that update was skipped, whether a signal came, in the "
        "library whether all ranks gave as many micro-batches",
        "they were copied an iteration ago and have arrived, so that the host is at most one update ahead",
        r"late_reading\.py:\d+ read < (engine/update\.py:\d+ resolve_pending|train/exits\.py|library/agreement\.py)",
    ),
    HostWait(
        "experts",
        "rows of each expert, where experts lie on several ranks, `moe_expert_capacity_factor` drops some, or the "
        "device has no kernel for all products at once",
        "the sizes of messages and products are arguments of the host's call: one small copy a layer; the host waits "
        "for it, but not for work queued after it. Elsewhere products take the sizes from the device",
        r"late_reading\.py:\d+ read < expert/(plan|row_counts)\.py",
    ),
    HostWait(
        "tiles",
        "where documents begin, and positions of a sequence that ranks share, where attention is computed in tiles, "
        "because no kernel of a library computes it",
        "the host leaves out tiles that nobody sees",
        r"attention/tiles\.py",
    ),
    HostWait(
        "offload",
        "the gradients and their norm, with `offload` optimizer or params",
        "the update is computed by the host",
        r"zero/(host_(optimizer|gradient|exchange|weights)|delayed_optimizer)\.py"
        r"|zero/sharded_optimizer\.py:\d+ squares"
        r"|zero/sub_optimizers\.py:\d+ _gradient"
        r"|optim/adafactor\.py:\d+ all_reduce_on_axis|tiers/mover\.py:\d+ run$",
    ),
    HostWait(
        "embedding",
        "the gradients of a batch's rows, their norm and the decision to skip, with `offload` embedding",
        "the update of rows is computed by the host; a row with a gradient that leaves the cache early, too",
        r"rows/cached_rows\.py",
    ),
    HostWait(
        "apex",
        "the decision to skip an update, with `optimizer_args` impl=apex",
        "its kernel cannot leave one out by itself",
        r"zero/sub_optimizers\.py:\d+ takes_step",
    ),
    HostWait(
        "eigenvectors",
        "SOAP's first update, each of Shampoo's that makes roots",
        "the solver for eigenvectors tells the host whether it has converged; SOAP's later bases are orthogonalised "
        "without",
        r"optim/(soap|shampoo)\.py",
    ),
    HostWait(
        "headers",
        "a header, with `check_pipeline_messages`",
        "it is compared",
        r"comm/p2p\.py:\d+ _check",
    ),
)


def allowed_wait(place: str) -> HostWait | None:
    """The row that allows a wait at `place`; None: it is a fault."""
    return next((row for row in HOST_WAITS if re.search(row.places, place)), None)
