"""Rules of `--optimizer kfac`: whose factors are what, and where nobody hands them over."""

from __future__ import annotations

from collections.abc import Iterator

from megalite.config.root import Config
from megalite.config.update_rules import OPTIMIZER_SPECS
from megalite.schedule import find_schedule


def tapped_products(config: Config, world_size: int) -> Iterator[str]:
    """What an optimizer that looks at the operands of weight gradients does not go with."""
    model, optimizer, parallel, training = config.model, config.optimizer, config.parallel, config.training
    if not OPTIMIZER_SPECS[optimizer.optimizer].taps:
        return
    flag, schedule, offload = f"`optimizer`={optimizer.optimizer}", find_schedule(parallel.schedule), optimizer.offload
    reasons = {
        "model_module": (model.module.model_module, "whose layers hand over nothing"),
        "num_experts": (model.experts.num_experts, "whose layers see other tokens each"),
        "multi_latent_attention": (model.mixer == "latent", "whose projections hand over nothing"),
        "experimental_attention_variant": (
            model.delta.experimental_attention_variant,
            "whose layers have other matrices",
        ),
        "mtp_num_layers": (model.further.mtp_num_layers, "whose blocks are not those of the model"),
        "lora_rank": (model.lora.lora_rank, "whose matrices are frozen"),
        "fp8_format": (training.float8.fp8_format, "whose products are of other numbers"),
        "fp16": (training.precision.fp16, "whose scaled gradients overflow when they are squared"),
        "calculate_per_token_loss": (training.calculate_per_token_loss, "which scales gradients after the backward"),
        "compile": (training.compile, "whose code hands over nothing"),
        "optimizer_cpu_offload": (offload.optimizer_cpu_offload, "whose steps do not wait for all of a rank"),
        "optimizer_offload_path": (offload.optimizer_offload_path, "whose steps do not wait for all of a rank"),
        "param_offload": (offload.param_offload == "cpu", "whose gradients are on the host"),
        "delayed_parameter_update": (offload.delayed_parameter_update, "whose step overlaps the next batch"),
        "embedding_offload": (offload.embedding_offload, "whose rows have an optimizer of their own"),
    }
    for name, (given, why) in reasons.items():
        if given:
            yield f"{flag}: not with `{name}`, {why}; drop one, or use `optimizer`=shampoo"
    if schedule.asynchronous or schedule.paired:
        why = "keeps factors of several updates" if schedule.asynchronous else "has copies of a stage on several ranks"
        yield f"{flag}: not with `pipeline_schedule`={schedule.name}, which {why}; use 1f1b"
    if optimizer.args.kfac_factors == "own" and parallel.zero_stage == 0:
        yield "`kfac_factors`=own: with `zero_stage`=0 every rank owns all matrices; use `zero_stage`=1 or more, or all"
