"""Rules of partial backpropagation."""

from __future__ import annotations

from collections.abc import Iterator

from megalite.config.root import Config
from megalite.config.update_rules import OPTIMIZER_SPECS
from megalite.schedule import find_schedule


def partial_backprop(config: Config, world_size: int) -> Iterator[str]:
    """What needs the backward of every layer from every micro-batch."""
    model, parallel, training = config.model, config.parallel, config.training
    groups, offload = training.partial_backprop_groups, config.optimizer.offload
    if groups == 1:
        return
    flag = f"`partial_backprop_groups`={groups}"
    if groups > model.num_layers:
        yield f"{flag}: more than the {model.num_layers} layers; use {model.num_layers} at most"
    schedule = find_schedule(parallel.schedule)
    if parallel.zero_stage > 1 and schedule.splits_backward:
        yield (
            f"{flag}: not with `zero_stage`={parallel.zero_stage} and `pipeline_schedule`={parallel.schedule}, whose "
            "ranks would sum unlike micro-batches; use 1f1b"
        )
    reasons = {
        "model_module": (model.is_foreign, "whose layers are its own"),
        "stage_meshes": (parallel.stage_meshes, "whose stages have other replicas"),
        "num_experts": (model.experts.num_experts, "whose routers add a loss in every layer"),
        "mtp_num_layers": (model.further.mtp_num_layers, "whose blocks are not those of the model"),
        "lora_rank": (model.lora.lora_rank, "whose adapters are few"),
        "recompute_granularity": (model.recompute_granularity == "full", "which runs layers where no depth is known"),
        "tp_comm_overlap": (parallel.tp_comm_overlap, "which runs the parts of layers in turns"),
        "fp8_format": (training.float8.fp8_format, "whose scales look at every gradient"),
        "calculate_per_token_loss": (training.calculate_per_token_loss, "whose means are over tokens"),
        "rampup_batch_size": (len(config.batch_size_schedule(1).steps) > 1, "whose steps have other depths"),
        "cpu_offloading_num_layers": (model.cpu_offloading_num_layers, "which waits for every backward"),
        "device_memory_budget_gb": (parallel.hardware.device_memory_budget_gb, "which waits for every backward"),
        "param_offload": (offload.param_offload == "cpu", "which waits for every backward"),
        "embedding_offload": (offload.embedding_offload, "whose rows wait for every backward"),
        "optimizer": (OPTIMIZER_SPECS[config.optimizer.optimizer].taps, "whose factors are of all tokens"),
    }
    for name, (given, why) in reasons.items():
        if given:
            yield f"{flag}: not with `{name}`, {why}; drop one"
    if schedule.asynchronous:
        yield f"{flag}: not with `pipeline_schedule`={parallel.schedule}, whose gradients are late; use 1f1b"
