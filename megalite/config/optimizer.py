"""The optimizer section: update rule, learning-rate and weight-decay schedules, clipping."""

from __future__ import annotations

from dataclasses import dataclass

from megalite.config.schema import option, required

__all__ = ["OptimizerConfig"]


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """Schedules count samples inside, so that iterations of a growing batch weigh what they should."""

    optimizer: str = option(
        "adam",
        "adam is AdamW (decoupled weight decay); sgd has momentum; lion has one moment; muon makes the updates of "
        "matrices orthogonal and leaves the rest to AdamW; adafactor keeps a row and a column of second moments for a "
        "matrix and nothing else",
        choices=("adam", "sgd", "lion", "muon", "adafactor"),
    )
    lr: float = required("peak learning rate", gt=0, hint="3e-4 is common")
    min_lr: float = option(0.0, "learning rate after the decay", ge=0)
    lr_decay_style: str = option(
        "linear",
        "shape of the decay after warm-up",
        choices=("constant", "linear", "cosine", "inverse-square-root", "WSD"),
    )
    lr_decay_iters: int | None = option(None, "iterations until --min-lr; unset: the training length", ge=1)
    lr_decay_samples: int | None = option(None, "samples until --min-lr; unset: the training length", ge=1)
    lr_warmup_iters: int = option(0, "iterations of linear warm-up", ge=0)
    lr_warmup_samples: int = option(0, "samples of linear warm-up", ge=0)
    lr_warmup_fraction: float | None = option(None, "warm-up as a part of the decay length", ge=0, lt=1)
    lr_warmup_init: float = option(0.0, "learning rate of the first step of warm-up", ge=0)
    lr_wsd_decay_iters: int | None = option(None, "WSD: iterations of the final decay", ge=1)
    lr_wsd_decay_samples: int | None = option(None, "WSD: samples of the final decay", ge=1)
    lr_wsd_decay_style: str = option(
        "exponential",
        "WSD: shape of the final decay",
        choices=("exponential", "linear", "cosine", "minus_sqrt"),
    )
    weight_decay: float = option(0.01, "decoupled weight decay of matrices (never of norms and biases)", ge=0)
    start_weight_decay: float | None = option(None, "weight decay at the start; unset: --weight-decay", ge=0)
    end_weight_decay: float | None = option(None, "weight decay at the end; unset: --weight-decay", ge=0)
    weight_decay_incr_style: str = option(
        "constant", "way from the first to the second", choices=("constant", "linear", "cosine")
    )
    adam_beta1: float = option(0.9, "decay of Adam's first moment", ge=0, lt=1)
    adam_beta2: float = option(0.999, "decay of Adam's second moment", ge=0, lt=1)
    adam_eps: float = option(1e-8, "Adam's epsilon", gt=0)
    sgd_momentum: float = option(0.9, "momentum of sgd", ge=0, lt=1)
    lion_beta1: float = option(0.95, "Lion's weight of the moment in an update", ge=0, lt=1)
    lion_beta2: float = option(0.98, "decay of Lion's moment", ge=0, lt=1)
    muon_momentum: float = option(0.95, "momentum of muon", ge=0, lt=1)
    muon_scale_mode: str = option(
        "spectral",
        "size of an orthogonal update [rows, columns]: sqrt(max(rows, columns)), sqrt(max(1, rows / columns)) or "
        "sqrt(rows / columns)",
        choices=("spectral", "shape_scaling", "unit_rms_norm"),
    )
    muon_extra_scale_factor: float = option(
        0.2, "times this; 0.2 with spectral gives AdamW's usual size, so that its learning rate carries over", gt=0
    )
    adafactor_scale_parameter: bool = option(
        False, "adafactor's learning rate is relative to the root mean square of each parameter (its paper's default)"
    )
    exp_avg_dtype: str = option("fp32", "how the first moment is kept", choices=("fp32", "bf16", "fp16"))
    exp_avg_sq_dtype: str = option("fp32", "how Adam's second moment is kept", choices=("fp32", "bf16", "fp16"))
    optimizer_impl: str = option(
        "torch", "AdamW's kernel: torch's fused one or NVIDIA apex's", choices=("torch", "apex")
    )
    optimizer_cpu_offload: bool = option(False, "keep and update masters and moments in host memory")
    optimizer_offload_fraction: float = option(1.0, "part of them that goes there", gt=0, le=1, hint="1 is all of them")
    store_param_remainders: bool = option(
        False,
        "keep the masters of bf16 weights as the 16 bits that the weights lack: 2 bytes less each. Masters are exact; "
        "weights half-way between two bf16 numbers are rounded away from zero, not to even",
    )
    clip_grad: float = option(
        1.0, "global gradient norm above which gradients are scaled down", ge=0, hint="0 disables it"
    )
