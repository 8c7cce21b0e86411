"""Where the host may wait for the device within a step (a blocking read). What is read there and why it has to be: the
rows of the same names in docs/gpus.md.

Anywhere else a wait is a fault: the rehearsal reports it and names the line.

Adding a read: keep the value on the device where you can; else queue its copy with `LateReading` and read it when it
has long arrived; else add a row here and in docs/gpus.md. `tests/unit/rehearsal/test_host_waits.py` rehearses a run for
each row, and fails where a row has no wait any more.
"""

import re
from collections.abc import Mapping
from types import MappingProxyType

HOST_WAITS: Mapping[str, str] = MappingProxyType({
    "late":
        r"late_reading\.py:\d+ read < (engine/update\.py:\d+ resolve_pending|train/exits\.py|library/agreement\.py)",
    "experts": r"late_reading\.py:\d+ read < expert/(plan|row_counts)\.py",
    "tiles": r"attention/tiles\.py",
    "offload":
        r"zero/(host_(optimizer|gradient|exchange|weights)|delayed_optimizer)\.py"
        r"|zero/sharded_optimizer\.py:\d+ squares"
        r"|zero/sub_optimizers\.py:\d+ _gradient"
        r"|optim/adafactor\.py:\d+ all_reduce_on_axis|tiers/mover\.py:\d+ run$",
    "embedding": r"rows/cached_rows\.py",
    "apex": r"zero/sub_optimizers\.py:\d+ takes_step",
    "eigenvectors": r"optim/(soap|shampoo)\.py",
    "headers": r"comm/p2p\.py:\d+ _check",
})  # fmt: skip
"""Row -> regular expression for the lines that wait, as a rehearsal names them: `file:line function < caller`."""


def allowed_wait(place: str) -> str | None:
    """The row that allows a wait at `place`; None: it is a fault."""
    return next((name for name, places in HOST_WAITS.items() if re.search(places, place)), None)
