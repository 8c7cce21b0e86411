"""Rules of a word embedding whose rows are on the host."""

from __future__ import annotations

from collections.abc import Iterator

from megalite.config.embedding_cache import cache_problem
from megalite.config.root import Config
from megalite.config.update_rules import OPTIMIZER_SPECS
from megalite.schedule import find_schedule


def embedding_offload(config: Config, world_size: int) -> Iterator[str]:
    """What it goes with, and how small its cache may be."""
    optimizer, model, given = config.optimizer, config.model, config.optimizer.offload
    schedule, flag = find_schedule(config.parallel.schedule), f"`embedding_offload`={given.embedding_offload}"
    if given.embedding_offload is None:
        return
    if model.further.depth:
        yield f"{flag}: not with `mtp_num_layers`, which reads other rows, too; drop one of them"
    elif not model.untie_embeddings_and_output_weights:
        yield f"{flag}: a tied output layer reads every row; needs `untie_embeddings_and_output_weights`"
    if model.lora.lora_rank is not None:
        yield f"{flag}: not with `lora_rank`={model.lora.lora_rank}, beside which no embedding is trained; drop it"
    if OPTIMIZER_SPECS[optimizer.optimizer].statistics:
        yield f"{flag}: not with `optimizer`={optimizer.optimizer}, whose step of a row depends on all; use adam"
    if optimizer.optimizer_impl == "apex":
        yield f"{flag}: not with `optimizer_impl`=apex, which steps on GPUs alone; use torch"
    if given.delayed_parameter_update:
        yield f"{flag}: not with `delayed_parameter_update`, which reads older weights; drop one"
    elif schedule.asynchronous and config.parallel.pipeline_schedule_file is None:
        yield f"{flag}: not with `pipeline_schedule`={schedule.name}, which keeps older weights; use 1f1b"
    problem = cache_problem(config)
    if problem is not None:
        yield problem
