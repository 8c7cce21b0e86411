"""Messages of rooms below, which name the flags of a command, in the words of the library."""

from __future__ import annotations

import re

_ARGUMENTS = {
    "pipeline-schedule-file": "program",
    "pipeline-schedule": "schedule",
    "pipeline-model-parallel-size": "pp",
    "virtual-pipeline-model-parallel-size": "chunks",
    "num-layers": "layers",
    "num-distributed-optimizer-instances": "dp_replicate",
    "global-batch-size": "the number of micro-batches",
}


def in_words(text: str) -> str:
    """`--pipeline-schedule=x` as `schedule=x`."""
    return re.sub(r"--([a-z][a-z0-9-]+)", lambda m: _ARGUMENTS.get(m[1], m[1].replace("-", "_")), text)
