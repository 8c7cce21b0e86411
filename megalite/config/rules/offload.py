"""Rules of what lives in host memory: weights and gradients, the rows of a word embedding."""

from __future__ import annotations

from collections.abc import Iterator

from megalite.config.root import Config
from megalite.config.update_rules import OPTIMIZER_SPECS
from megalite.schedule import find_schedule


def param_offload(config: Config, world_size: int) -> Iterator[str]:
    """Weights and gradients that come and go: what reads them otherwise than layer by layer, or keeps two of them."""
    flag, parallel, optimizer = "`param_offload`=cpu", config.parallel, config.optimizer
    if optimizer.offload.param_offload != "cpu":
        return
    schedule = find_schedule(parallel.schedule)
    if schedule.asynchronous and parallel.pipeline_schedule_file is None:
        yield f"{flag}: not with `pipeline_schedule`={schedule.name}, which keeps two versions of the weights; use 1f1b"
    if optimizer.offload.delayed_parameter_update:
        yield f"{flag}: not with `delayed_parameter_update`, which keeps two versions of the weights; drop one"
    if parallel.zero_stage == 3 and schedule.gathers_once and parallel.pipeline_schedule_file is None:
        yield (
            f"{flag}: not with `zero_stage`=3 and `pipeline_schedule`={schedule.name}, which keeps a stage's weights "
            "on the device; use `zero_stage`=2, or `pipeline_schedule`=1f1b"
        )
    if optimizer.store_param_remainders:
        yield f"`store_param_remainders`: excludes {flag}; give one of them"
    if optimizer.offload.embedding_offload is not None:
        yield f"{flag}: not with `embedding_offload`, whose rows are on the host already; drop one"
    if config.training.compile:
        yield f"{flag}: not with `compile`, whose code reads weights where they were; drop one"
    if config.model.is_foreign:
        yield f"{flag}: not with `model_module`, whose layers have no plan; use `zero_stage`=3"


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


def cache_problem(config: Config) -> str | None:
    """Why the cache that is asked for is too small; None where it is not, or the vocabulary is not known yet."""
    rows, needed = config.optimizer.offload.embedding_cache_rows, config.rows_at_once
    if not config.model.vocab_size or rows is None or rows >= needed:
        return None
    return (
        f"`embedding_cache_rows`={rows}: a micro-batch may use {needed:,} rows at once; use {needed} or more, or a "
        "smaller `micro_batch_size`"
    )
