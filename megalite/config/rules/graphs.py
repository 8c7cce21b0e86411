"""Rules of `--cuda-graph-impl`: what a graph, which does the same with the same memory each time, cannot do."""

from __future__ import annotations

from collections.abc import Iterator

from megalite.config.root import Config
from megalite.config.update_rules import OPTIMIZER_SPECS
from megalite.schedule import find_schedule


def cuda_graphs(config: Config, world_size: int) -> Iterator[str]:
    """What the blocks of a run must not have for their kernels to be the same each time."""
    model, parallel, training = config.model, config.parallel, config.training
    if parallel.hardware.cuda_graph_impl == "none":
        return
    flag, offload, schedule = "`cuda_graph_impl`=local", config.optimizer.offload, find_schedule(parallel.schedule)
    tp, cp, zero = (
        parallel.tensor_model_parallel_size,
        parallel.context.context_parallel_size,
        parallel.zero_stage,
    )
    if parallel.hardware.device == "cpu":
        yield f"{flag}: a CPU has none; leave it out"
    if zero == 3:
        yield f"{flag}: not with `zero_stage`=3, whose weights are elsewhere each time; use 0, 1 or 2"
    reasons = {
        "model_module": (model.is_foreign, "whose layers are its own"),
        "num_experts": (model.experts.num_experts, "which get another number of tokens each time"),
        "multi_latent_attention": (model.mixer == "latent", "which was never captured"),
        "experimental_attention_variant": (model.delta.experimental_attention_variant, "which was never captured"),
        "tensor_model_parallel_size": (tp > 1, "whose messages are inside of blocks"),
        "stage_meshes": (parallel.stage_meshes, "whose messages are inside of blocks"),
        "pipeline_schedule_file": (parallel.pipeline_schedule_file, "which may run blocks twice"),
        "context_parallel_size": (cp > 1, "whose messages are inside of blocks"),
        "window_size": (model.window_size is not None, "whose mask is made anew each time"),
        "reset_attention_mask": (config.data.reset_attention_mask, "whose documents have other lengths each time"),
        "seq_length_schedule": (training.seq_length_schedule, "whose samples have other lengths"),
        "attn_logit_softcapping": (model.attn_logit_softcapping is not None, "whose kernel is compiled"),
        "softmax_type": (model.softmax_type != "vanilla", "whose kernel is compiled"),
        "attention_dropout": (model.attention_dropout > 0, "whose tiles are chosen by the host"),
        "recompute_granularity": (model.recompute_granularity == "full", "which runs blocks twice"),
        "lora_rank": (model.lora.lora_rank is not None, "whose matrices were never captured"),
        "fp8_format": (training.float8.fp8_format, "whose scales the host keeps"),
        "qk_clip": (model.clip.qk_clip, "which looks at the scores of each micro-batch"),
        "partial_backprop_groups": (training.partial_backprop_groups > 1, "whose backward has other depths"),
        "optimizer": (OPTIMIZER_SPECS[config.optimizer.optimizer].taps, "which looks at the operands of products"),
        "cpu_offloading_num_layers": (model.cpu_offloading_num_layers, "whose activations move"),
        "device_memory_budget_gb": (parallel.hardware.device_memory_budget_gb, "whose activations may move"),
        "optimizer_cpu_offload": (offload.optimizer_cpu_offload, "which was never captured"),
        "optimizer_offload_path": (offload.optimizer_offload_path, "which was never captured"),
        "param_offload": (offload.param_offload == "cpu", "whose weights move"),
        "embedding_offload": (offload.embedding_offload, "which was never captured"),
    }
    for name, (given, why) in reasons.items():
        if given:
            yield f"{flag}: not with `{name}`, {why}; drop one"
    if schedule.asynchronous:
        yield f"{flag}: not with `pipeline_schedule`={schedule.name}, which keeps several versions of weights; use 1f1b"
