"""What a run has left in `torch_dist` beside its weights: masters, Adam's moments, how far it has got. Read from there,
and written of a run of ours.

    optimizer.state.param.KEY, or fp32_param.KEY      the master of the weight KEY; a run in fp32 may have none
    optimizer.state.exp_avg.KEY, exp_avg_sq.KEY       its moments
    common: args, iteration, optimizer (steps done, scale of the loss), opt_param_scheduler (lengths in samples)

They are there if the run was saved with `dist_ckpt_optim_fully_reshardable`, or had no distributed optimizer. Its other
forms (optimizer.distributed...) are buffers of one layout's ranks, and are refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

import torch
from torch import Tensor

from megalite.checkpoint import CheckpointReader, Meta
from megalite.config import Config, OptimizerConfig, build_section, effective, flat, from_dict
from megalite.convert.dcp_files import STATE
from megalite.convert.dcp_model import DcpSource, DcpState
from megalite.convert.fields import Fields
from megalite.convert.megalite_files import CheckpointSource
from megalite.convert.megatron_dist import OPTIMIZER, MegatronDistSource
from megalite.convert.megatron_names import Parts
from megalite.convert.registry import config_around
from megalite.convert.source import MOMENTS, WEIGHTS_ALONE, AdamRun, ModelSource
from megalite.errors import CheckpointError
from megalite.inventory import parameter_shapes
from megalite.optim import LearningRateSchedule, WeightDecaySchedule

MASTERS = ("param", "fp32_param")
KINDS = (MASTERS[0], *MOMENTS)
"""What is written of every parameter."""
TRACKERS = {"good_steps": "growth_tracker", "tolerance": "hysteresis_tracker"}  # of the loss scale: ours -> theirs
DROPOUTS = ("hidden_dropout", "attention_dropout")
COUNTS = ("seed", "global_batch_size", "micro_batch_size", "train_iters")
ADAM = ("adam_beta1", "adam_beta2", "adam_eps")
# Megatron's Adam is torch's or Transformer Engine's; each wants its own settings in a group and ignores the others'.
GROUP: Mapping[str, Any] = {
    "lr_mult": 1.0, "is_expert_parallel": False, "is_decoupled_lr": False, "default_config": True, "amsgrad": False,
    "maximize": False, "foreach": None, "capturable": False, "differentiable": False, "fused": None,
    "decoupled_weight_decay": True, "bias_correction": True,
}  # fmt: skip
# Settings of ours that have the same names there.
OF_OPTIMIZER = (
    "optimizer", "lr", "min_lr", "lr_decay_style", "lr_decay_iters", "lr_decay_samples", "lr_warmup_iters",
    "lr_warmup_samples", "lr_warmup_fraction", "weight_decay", "clip_grad", "adam_beta1", "adam_beta2", "adam_eps",
    "decoupled_lr", "decoupled_min_lr",
)  # fmt: skip


def state_of(source: ModelSource) -> MegatronState | DcpState | None:
    """The run that a checkpoint in torch's distributed format holds; None where it was saved without, or of any other
    source. Raises CheckpointError where its form is not supported, or a part is missing."""
    if isinstance(source, DcpSource):
        return DcpState(source) if any(name.startswith(OPTIMIZER) for name in source.files.names) else None
    if not isinstance(source, MegatronDistSource):
        return None
    there = any(name.startswith(OPTIMIZER) or ".optimizer." in name for name in source.files.tensors)
    return MegatronState(source) if there else None


class MegatronState(AdamRun):
    """A `TrainedRun`. Raises CheckpointError where a tensor of it is missing or has not its weight's shape."""

    def __init__(self, source: MegatronDistSource) -> None:
        self._source, self.model, self.where = source, source.model, str(source.directory)
        names = [name for name in source.files.tensors if name.startswith(STATE)]
        if not any(name.startswith(f"{STATE}{MOMENTS[0]}.") for name in names):
            raise CheckpointError(
                f"{self.where}: its optimizer state belongs to one number of ranks (dp_reshardable); save it with "
                f"`dist_ckpt_optim_fully_reshardable` there, or {WEIGHTS_ALONE}"
            )
        self._args = Fields(source.common["args"], f"{self.where}: args")
        usual = OptimizerConfig.optimizer  # the default on both sides
        if (kind := self._args.get("optimizer", usual)) != usual:
            raise CheckpointError(
                f"{self.where}: optimizer {str(kind)[:40]!r} not supported ({usual}); {WEIGHTS_ALONE}"
            )
        masters = [kind for kind in MASTERS if any(name.startswith(f"{STATE}{kind}.") for name in names)]
        self._parts = {kind: self._checked(kind) for kind in (*masters[:1], *MOMENTS)}
        self._master = masters[0] if masters else ""
        self._common = Fields(source.common, self.where)
        self.iteration = self._common.integer("iteration")
        self.steps = self._steps()

    def _checked(self, kind: str) -> Mapping[str, Parts]:
        parts = self._source.parts_of(f"{STATE}{kind}.")
        for name, shape in parameter_shapes(self.model).items():
            if name not in parts:
                raise CheckpointError(f"{self.where}: {kind} of {name} is missing; {WEIGHTS_ALONE}")
            if self._source.shape_of(parts[name]) != shape:
                what = f"shape {list(parts[name].first.entry[1])}, its weight's part of {list(shape)}"
                raise CheckpointError(f"{self.where}: {parts[name].first.name}: {what}; {WEIGHTS_ALONE}")
        return parts

    def part(self, kind: str, name: str) -> Tensor:
        parts = self._parts.get(kind or self._master, {})
        return self._source.join(parts[name]) if name in parts else self._source.read(name)

    def _steps(self) -> int:
        """Steps of the optimizer: iterations but for those that were skipped."""
        for one in self._optimizers:
            inner = one.section("optimizer") if "optimizer" in one.raw else one
            groups = inner.get("param_groups", [])
            found = [group["step"] for group in groups if isinstance(group, dict) and group.get("step") is not None]
            found += [step for step in [inner.section("state").get("common_step")] if step is not None]
            if found and type(found[0]) in (int, float) and 0 <= found[0] <= self.iteration:
                return int(found[0])
        raise CheckpointError(f"{self.where}: does not say how many steps its optimizer has done; {WEIGHTS_ALONE}")

    @property
    def _optimizers(self) -> list[Fields]:
        """One, or those of dense weights and of experts, which step together."""
        optimizer = self._common.section("optimizer")
        return [optimizer, *(optimizer.section(key) for key in optimizer.raw if key.isdecimal())]

    @property
    def config(self) -> Config:
        """The run's configuration as far as it matters to one that goes on: seed, batch, precision, learning rate."""
        args = self._args
        training: dict[str, Any] = {name: True for name in ("bf16", "fp16") if args.flag(name, False)}
        training |= {name: args.integer(name) for name in COUNTS if args.get(name) is not None}
        schedules = self._schedules()
        rate, decay = schedules["learning_rate"], schedules["weight_decay"]
        numbers = (*ADAM, "clip_grad", "decoupled_lr", "decoupled_min_lr")
        optimizer = {
            "lr": rate["lr"], "min_lr": rate["min_lr"], "lr_decay_style": rate["style"], "weight_decay": decay["end"],
            "weight_decay_incr_style": decay["style"],
            **{name: args.number(name) for name in numbers if args.get(name)},
            **self._lengths(training.get("train_iters")),
        }  # fmt: skip
        if decay["style"] != "constant":
            optimizer |= {"start_weight_decay": decay["start"], "end_weight_decay": decay["end"]}
        dropouts: dict[str, Any] = {name: args.number(name) for name in DROPOUTS if args.get(name)}
        if wrong := next((name for name, value in dropouts.items() if value >= 1), None):
            raise args.wrong(wrong, dropouts[wrong], "is not below 1")
        model = replace(self.model, **dropouts)
        found = config_around(model, build_section(OptimizerConfig, optimizer), **training)
        split = args.get("split")
        return replace(found, data=replace(found.data, split=split)) if isinstance(split, str) else found

    def _lengths(self, train_iters: int | None) -> dict[str, Any]:
        """The flags of decay and warm-up that its `args` hold. A decay as long as the training is none there either."""
        found: dict[str, Any] = {}
        for unit in ("iters", "samples"):
            if (length := _count(self._args, f"lr_decay_{unit}")) and length != train_iters:
                found = found or {f"lr_decay_{unit}": length}
        if self._args.get("lr_warmup_fraction"):
            return found | {"lr_warmup_fraction": self._args.number("lr_warmup_fraction")}
        lengths = {f"lr_warmup_{unit}": _count(self._args, f"lr_warmup_{unit}") for unit in ("iters", "samples")}
        return found | dict([pair for pair in lengths.items() if pair[1]][:1])

    @property
    def told(self) -> frozenset[str]:
        """The settings that its `args` and schedules hold: of all others `config` has our defaults."""
        always = {"lr", "min_lr", "lr_decay_style", "weight_decay", "weight_decay_incr_style", "bf16", "fp16"}
        found = {n for n in (*COUNTS, "clip_grad", "split", *DROPOUTS) if self._args.get(n) is not None}
        found |= {name for name in ADAM if self._args.get(name)}
        return frozenset(always | found | effective(self.model).keys())

    @property
    def meta(self) -> Mapping[str, Any]:
        """How far the run has got, and its schedules, as a checkpoint of ours says it."""
        samples = _count(self._args, "consumed_train_samples")
        skipped = self.iteration - self.steps
        seen = _count(self._common.section("opt_param_scheduler"), "num_steps", samples)
        progress = {
            "iteration": self.iteration, "consumed_samples": samples, "updates": self.iteration,
            "microbatches": self.iteration, "skipped_iterations": skipped, "schedule_samples": seen,
        }  # fmt: skip
        return {"progress": progress, "opt_param_scheduler": self._schedules(), "loss_scaler": self._loss_scaler()}

    def _schedules(self) -> dict[str, Any]:
        """Lengths in samples, on both sides."""
        state, args = self._common.section("opt_param_scheduler"), self._args
        batch = _count(args, "global_batch_size", 1)
        final = _count(args, "lr_wsd_decay_samples", _count(args, "lr_wsd_decay_iters", 0) * batch)
        rate = LearningRateSchedule(
            lr=_number(state, "max_lr", args.number("lr", 1e-5)),
            min_lr=_number(state, "min_lr", 0.0),
            style=state.get("lr_decay_style", "constant"),
            decay_samples=_count(state, "lr_decay_steps", 1),
            warmup_samples=_count(state, "lr_warmup_steps", 0),
            warmup_init=_number(args, "lr_warmup_init", 0.0),
            wsd_style=args.get("lr_wsd_decay_style", "exponential"),
            wsd_decay_samples=final,
        )
        end = _number(state, "end_wd", _number(args, "weight_decay", 0.01))
        decay = WeightDecaySchedule(
            start=_number(state, "start_wd", end),
            end=end,
            style=state.get("wd_incr_style", "constant"),
            ramp_samples=_count(state, "wd_incr_steps", 0),
        )
        found = {"learning_rate": asdict(rate), "weight_decay": asdict(decay)}
        if args.get("decoupled_lr"):
            own = {"lr": args.number("decoupled_lr"), "min_lr": _number(args, "decoupled_min_lr", rate.min_lr)}
            found["decoupled"] = found["learning_rate"] | own
        return found

    def _loss_scaler(self) -> dict[str, Any]:
        """Of a run in fp16; empty for others."""
        names = {"scale": "scale", **TRACKERS}
        found = [one.section("grad_scaler") for one in self._optimizers if "grad_scaler" in one.raw][:1]
        return {ours: state.get(theirs) for state in found for ours, theirs in names.items() if "scale" in state.raw}


def _count(fields: Fields, key: str, default: int = 0) -> int:
    value = fields.get(key, default)
    if type(value) not in (int, float) or not 0 <= value < 2**62:
        raise CheckpointError(f"{fields.where}: {key} {str(value)[:40]!r} is not a number of samples")
    return int(value)


def _number(fields: Fields, key: str, default: float) -> float:
    value = fields.get(key, default)
    if type(value) not in (int, float):
        raise CheckpointError(f"{fields.where}: {key} {str(value)[:40]!r} is not a number")
    return float(value)


class KeptState:
    """Of a checkpoint of ours, in that form: masters, moments, schedules and progress. Raises CheckpointError for what
    has no form there.

    experts_apart: ranks of Megatron's share the experts, which then have an optimizer of their own there.
    """

    def __init__(self, reader: CheckpointReader, experts_apart: bool) -> None:
        self._reader, self._apart, where = reader, experts_apart, str(reader.path)
        self._meta = Meta(reader.manifest.meta, where)
        self.config, self.iteration = from_dict(self._meta.raw["config"], where), reader.manifest.step
        precision = self.config.training.precision  # dtype: of the weights that the run computed with
        self.dtype = torch.bfloat16 if precision.bf16 else torch.float16 if precision.fp16 else torch.float32
        if (kind := self.config.optimizer.optimizer) != OptimizerConfig.optimizer:
            raise CheckpointError(f"{where}: the state of {kind} has no form in torch_dist; {WEIGHTS_ALONE}")

    @classmethod
    def of(cls, source: CheckpointSource, experts_apart: bool = False) -> KeptState | None:
        """None where a checkpoint was converted or saved without."""
        reader = CheckpointReader(source.path)
        if not any(name.startswith("optimizer/") for name in reader.names):
            return None
        if "progress" not in reader.manifest.meta:  # of torchtitan's or DeepSpeed's
            raise CheckpointError(f"{source.path}: its schedules are not known before it trains here; {WEIGHTS_ALONE}")
        return cls(reader, experts_apart)

    def read(self, kind: str, name: str) -> Tensor:
        """One of `KINDS` of a parameter, in fp32."""
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
        form: dict[str, Any] = {"param_state_sharding_type": "fully_reshardable"}
        if (scaler := self._meta.section("loss_scaler")).raw:  # of a run in fp16
            state = {theirs: scaler.integer(ours, low=-(2**62)) for ours, theirs in TRACKERS.items()}
            form["grad_scaler"] = {"scale": torch.tensor([scaler.number("scale")]), **state}
        optimizer: dict[Any, Any] = {"optimizer": {"param_groups": groups}, **form}
        if self._apart:
            experts = [{**each, "is_expert_parallel": True} for each in groups]
            optimizer = {0: optimizer, 1: {"optimizer": {"param_groups": experts}, **form}}
        return {"iteration": self.iteration, "optimizer": optimizer, "opt_param_scheduler": self._scheduler()}

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
        world = self._reader.manifest.world_size
        rate = self._meta.section("opt_param_scheduler").section("learning_rate")
        numbers = flat(settings)
        return {
            **{name: numbers[name] for name in OF_OPTIMIZER},
            **{name: getattr(self.config.model, name) for name in DROPOUTS},
            "iteration": self.iteration, "no_save_optim": False, "seed": training.seed,
            "consumed_train_samples": self._meta.integer("consumed_samples"), "split": self.config.data.split,
            "global_batch_size": self.config.global_batch_size(world), "micro_batch_size": training.micro_batch_size,
            "train_iters": self.config.train_iterations(world), "use_distributed_optimizer": True,
            "dist_ckpt_optim_fully_reshardable": True, "lr_warmup_init": rate.number("warmup_init"),
            "lr_wsd_decay_style": rate.raw["wsd_style"], "lr_wsd_decay_samples": rate.integer("wsd_decay_samples"),
        }  # fmt: skip
