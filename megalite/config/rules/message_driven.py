"""Rules of message-driven execution."""

from __future__ import annotations

from collections.abc import Iterator

from megalite.config.root import Config
from megalite.schedule import find_schedule


def message_driven(config: Config, world_size: int) -> Iterator[str]:
    """What asks for the order of a rank's actions before the run, or for another library than gloo."""
    parallel, offload = config.parallel, config.optimizer.offload
    if not find_schedule(parallel.schedule).takes_arrivals or parallel.pipeline_model_parallel_size == 1:
        return
    flag = f"`pipeline_schedule`={parallel.schedule}"
    experts, hardware = parallel.experts.expert_model_parallel_size, parallel.hardware
    reasons = {
        "device_memory_budget_gb": (hardware.device_memory_budget_gb, "which plans what moves when"),
        "param_offload": (offload.param_offload == "cpu", "which plans what moves when"),
        "embedding_offload": (offload.embedding_offload, "whose rows are fetched ahead"),
        "expert_model_parallel_size": (experts > 1, "whose ranks are in several pipelines"),
    }
    for name, (given, why) in reasons.items():
        if given:
            yield f"{flag}: not with `{name}`, {why}; use 1f1b"
    nccl = hardware.distributed_backend == "nccl" or (hardware.device == "cuda" and not hardware.distributed_backend)
    if nccl:
        yield f"{flag}: is told by gloo what has arrived, not by NCCL; use `distributed_backend`=gloo, or eager-1f1b"
