"""What a checkpoint of ours holds beside the weights, in the form in which Megatron-LM's `torch_dist` has it.

The inverse of `megatron_state.py`: masters and moments under `optimizer.state`, two groups of parameters (with and
without weight decay), schedules in samples.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from megalite.checkpoint import CheckpointReader, Meta
from megalite.config import OptimizerConfig, from_dict
from megalite.convert.megalite_files import CheckpointSource
from megalite.convert.megatron_state import DROPOUTS, MASTERS, TRACKERS
from megalite.convert.source import MOMENTS, WEIGHTS_ALONE
from megalite.errors import CheckpointError

# Megatron's Adam is torch's or Transformer Engine's; each wants its own settings in a group and ignores the others'.
GROUP: Mapping[str, Any] = {
    "lr_mult": 1.0, "is_expert_parallel": False, "is_decoupled_lr": False, "default_config": True, "amsgrad": False,
    "maximize": False, "foreach": None, "capturable": False, "differentiable": False, "fused": None,
    "decoupled_weight_decay": True, "bias_correction": True,
}  # fmt: skip


class KeptState:
    """Masters, moments, schedules and progress of a checkpoint. Raises CheckpointError for what has no form there.

    experts_apart: ranks of Megatron's share the experts, which then have an optimizer of their own there.
    """

    def __init__(self, source: CheckpointSource, experts_apart: bool = False) -> None:
        self._apart = experts_apart
        self._reader = CheckpointReader(source.path)
        self._meta = Meta(self._reader.manifest.meta, str(source.path))
        self.config = from_dict(self._meta.raw["config"], str(source.path))
        self.iteration, self._where = self._reader.manifest.step, str(source.path)
        if self.config.optimizer.optimizer != OptimizerConfig.optimizer:
            what = f"the state of {self.config.optimizer.optimizer} has no form in torch_dist"
            raise CheckpointError(f"{self._where}: {what}; {WEIGHTS_ALONE}")

    @classmethod
    def of(cls, source: CheckpointSource, experts_apart: bool = False) -> KeptState | None:
        """None where a checkpoint was converted or saved without."""
        reader = CheckpointReader(source.path)
        if not any(name.startswith("optimizer/") for name in reader.names):
            return None
        if "progress" not in reader.manifest.meta:  # of torchtitan's or DeepSpeed's
            raise CheckpointError(f"{source.path}: its schedules are not known before it trains here; {WEIGHTS_ALONE}")
        return cls(source, experts_apart)

    @property
    def dtype(self) -> torch.dtype:
        """Of the weights that the run computed with."""
        precision = self.config.training.precision
        return torch.bfloat16 if precision.bf16 else torch.float16 if precision.fp16 else torch.float32

    @property
    def kinds(self) -> tuple[str, ...]:
        """What is kept of every parameter, by Megatron's names."""
        return MASTERS[0], *MOMENTS

    def read(self, kind: str, name: str) -> Tensor:
        """One of `kinds` of a parameter, in fp32."""
        return self._reader.read(name if kind in MASTERS else f"optimizer/{kind}/{name}").float()

    @property
    def common(self) -> dict[str, Any]:
        """The entries of common.pt besides args."""
        settings = self.config.optimizer
        numbers, steps = settings.args, float(self._reader.read("optimizer/step"))
        group = {
            **GROUP, "lr": settings.lr, "max_lr": settings.lr, "min_lr": settings.min_lr, "step": steps,
            "betas": (numbers.adam_beta1, numbers.adam_beta2), "eps": numbers.adam_eps,
            "weight_decay": settings.weight_decay,
        }  # fmt: skip
        groups = [{**group, "wd_mult": 1.0}, {**group, "wd_mult": 0.0, "weight_decay": 0.0}]
        if settings.decoupled_lr is not None:
            own = {"max_lr": settings.decoupled_lr, "min_lr": settings.ends_min_lr, "default_config": False}
            groups.append({**groups[0], **own, "lr": settings.decoupled_lr})
        form = {"param_state_sharding_type": "fully_reshardable", **self._grad_scaler()}
        state: dict[Any, Any] = {"optimizer": {"param_groups": groups}, **form}
        if self._apart:
            experts = [{**each, "is_expert_parallel": True} for each in groups]
            state = {0: state, 1: {"optimizer": {"param_groups": experts}, **form}}
        return {"iteration": self.iteration, "optimizer": state, "opt_param_scheduler": self._scheduler()}

    def _grad_scaler(self) -> dict[str, Any]:
        """The dynamic loss scale of a run in fp16; others have none."""
        scaler = self._meta.section("loss_scaler")
        if not scaler.raw:
            return {}
        state = {theirs: scaler.integer(ours, low=-(2**62)) for ours, theirs in TRACKERS.items()}
        return {"grad_scaler": {"scale": torch.tensor([scaler.number("scale")]), **state}}

    def _scheduler(self) -> dict[str, Any]:
        schedules = self._meta.section("opt_param_scheduler")
        rate, decay = schedules.section("learning_rate"), schedules.section("weight_decay")
        return {
            "max_lr": rate.number("lr"), "min_lr": rate.number("min_lr"), "lr_decay_style": rate.raw["style"],
            "lr_warmup_steps": rate.integer("warmup_samples"), "lr_decay_steps": rate.integer("decay_samples"),
            "num_steps": self._meta.section("progress").integer("schedule_samples"),
            "start_wd": decay.number("start"), "end_wd": decay.number("end"), "wd_incr_style": decay.raw["style"],
            "wd_incr_steps": decay.integer("ramp_samples"),
        }  # fmt: skip

    @property
    def args(self) -> dict[str, Any]:
        """The entries of args that are the run's."""
        settings, training = self.config.optimizer, self.config.training
        decay, warmup, world = settings.lr_decay, settings.lr_warmup, self._reader.manifest.world_size
        rate = self._meta.section("opt_param_scheduler").section("learning_rate")
        return {
            "iteration": self.iteration, "no_save_optim": False, "optimizer": settings.optimizer, "lr": settings.lr,
            "consumed_train_samples": self._meta.integer("consumed_samples"), "seed": training.seed,
            "global_batch_size": self.config.global_batch_size(world),
            "train_iters": self.config.train_iterations(world), "split": self.config.data.split,
            "min_lr": settings.min_lr, "lr_decay_style": settings.lr_decay_style,
            "lr_decay_iters": decay.lr_decay_iters, "lr_decay_samples": decay.lr_decay_samples,
            "lr_warmup_iters": warmup.lr_warmup_iters,
            "lr_warmup_samples": warmup.lr_warmup_samples, "lr_warmup_fraction": warmup.lr_warmup_fraction,
            "micro_batch_size": training.micro_batch_size, "weight_decay": settings.weight_decay,
            "clip_grad": settings.clip_grad, **{name: getattr(self.config.model, name) for name in DROPOUTS},
            "adam_beta1": settings.args.adam_beta1, "adam_beta2": settings.args.adam_beta2,
            "adam_eps": settings.args.adam_eps, "use_distributed_optimizer": True,
            "dist_ckpt_optim_fully_reshardable": True, "lr_warmup_init": rate.number("warmup_init"),
            "lr_wsd_decay_style": rate.raw["wsd_style"], "lr_wsd_decay_samples": rate.integer("wsd_decay_samples"),
            "decoupled_lr": settings.decoupled_lr, "decoupled_min_lr": settings.decoupled_min_lr,
        }  # fmt: skip
