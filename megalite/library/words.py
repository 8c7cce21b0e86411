"""Messages of rooms below in the words of a Python program."""

from __future__ import annotations

from megalite.errors import spelled

_ARGUMENTS = {
    "pipeline_schedule_file": "program",
    "pipeline_schedule": "schedule",
    "pipeline_model_parallel_size": "pp",
    "virtual_pipeline_model_parallel_size": "chunks",
    "num_layers": "layers",
    "num_distributed_optimizer_instances": "dp_replicate",
    "global_batch_size": "the number of micro-batches",
}


def in_arguments(text: str) -> str:
    """The text with every setting by the name of its argument."""
    return spelled(text, lambda name: _ARGUMENTS.get(name, name))
