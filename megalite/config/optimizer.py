"""The optimizer section: update rule, learning-rate and weight-decay schedules, clipping."""

from megalite.config.schema import OneOf, Option, Section, Spelled, option, required
from megalite.config.staleness import StalenessCorrection
from megalite.config.update_rules import OPTIMIZER_SPECS


class Decay(OneOf, flag="lr_decay"):
    """length of the decay to `min_lr`; without it that of the training"""

    lr_decay_iters: int | None = option(None, "in iterations", ge=1)
    lr_decay_samples: int | None = option(None, "in samples", ge=1)

    def samples(self, batch_size: int, whole: int) -> int:
        """The same in samples. batch_size: of an iteration; whole: samples of the training."""
        return self.lr_decay_samples or (self.lr_decay_iters or 0) * batch_size or whole


class Warmup(OneOf, flag="lr_warmup"):
    """linear warm-up of the learning rate, its length in one of three units"""

    lr_warmup_iters: int = option(0, "in iterations", ge=0)
    lr_warmup_samples: int = option(0, "in samples", ge=0)
    lr_warmup_fraction: float | None = option(None, "as a part of the decay", ge=0, lt=1)
    lr_warmup_init: float = option(0.0, "with each: learning rate of the first step", ge=0, way=None)

    def samples(self, batch_size: int, decay: int) -> int:
        """The same in samples. batch_size: of an iteration; decay: samples of the decay."""
        if self.lr_warmup_fraction is not None:
            return int(self.lr_warmup_fraction * decay)
        return self.lr_warmup_samples or self.lr_warmup_iters * batch_size


class FinalDecay(OneOf, flag="lr_wsd_decay"):
    """final decay of WSD, its length in one of two units"""

    lr_wsd_decay_iters: int | None = option(None, "in iterations", ge=1)
    lr_wsd_decay_samples: int | None = option(None, "in samples", ge=1)
    lr_wsd_decay_style: str = option(
        "exponential", "with each: its shape", choices=("exponential", "linear", "cosine", "minus_sqrt"), way=None
    )

    def samples(self, batch_size: int) -> int:
        """Its length in samples. batch_size: of an iteration."""
        return self.lr_wsd_decay_samples or (self.lr_wsd_decay_iters or 0) * batch_size


class WeightDecayRamp(Spelled, flag="weight_decay_ramp"):
    """weight decay that changes over the training"""

    start_weight_decay: float | None = option(None, "at the start; unset: `weight_decay`", ge=0, arg="start")
    end_weight_decay: float | None = option(None, "at the end; unset: `weight_decay`", ge=0, arg="end")
    weight_decay_incr_style: str = option(
        "constant", "way between", choices=("constant", "linear", "cosine"), arg="style"
    )


class OptimizerArgs(Spelled):
    """Settings of single optimizers; all of them also by --optimizer-args."""

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
    soap_beta1: float = option(0.95, "decay of soap's first moment", ge=0, lt=1)
    soap_beta2: float = option(0.95, "decay of soap's second moment and of its preconditioners", ge=0, lt=1)
    soap_eps: float = option(1e-8, "soap's epsilon", gt=0)
    soap_precondition_frequency: int = option(10, "steps between two changes of soap's bases", ge=1)
    soap_max_precond_dim: int = option(
        10000, "a side of a matrix that is longer keeps its own coordinates under soap", ge=0
    )
    shampoo_beta1: float = option(0.95, "decay of shampoo's first moment", ge=0, lt=1)
    shampoo_beta2: float = option(0.95, "decay of shampoo's second moment and of its preconditioners", ge=0, lt=1)
    shampoo_eps: float = option(1e-8, "epsilon of the Adam step whose length shampoo takes", gt=0)
    shampoo_matrix_eps: float = option(1e-6, "added to shampoo's eigenvalues, relative to the largest", gt=0, le=1)
    shampoo_precondition_frequency: int = option(10, "steps between two roots of shampoo's preconditioners", ge=1)
    shampoo_max_precond_dim: int = option(
        1024, "a side of a matrix that is longer has blocks of this size under shampoo", ge=1
    )
    kfac_momentum: float = option(0.9, "momentum of kfac", ge=0, lt=1)
    kfac_decay: float = option(0.95, "decay of kfac's factors", ge=0, lt=1)
    kfac_damping: float = option(1e-2, "added to the product of kfac's factors, by halves", gt=0)
    kfac_kl_clip: float = option(
        1e-3, "bound of a matrix's lr^2 <step, gradient>, beyond which kfac shortens the step", gt=0
    )
    kfac_scale: float = option(0.3, "kfac's learning rate of matrices, times `lr`", gt=0)
    kfac_inverse_frequency: int = option(10, "steps between two inverses of kfac's factors", ge=1)
    kfac_factors: str = option(
        "all",
        "kfac's factors are of all tokens, summed over replicas, or of the own ones of the rank that owns a matrix",
        choices=("all", "own"),
    )
    adafactor_scale_parameter: bool = option(
        False,
        "adafactor's learning rate, and with it weight decay, is relative to the root mean square of each parameter "
        "(its paper's default)",
    )


def readers_of(number: Option) -> tuple[str, ...] | None:
    """The choices of `--optimizer` that read it, which its name begins with; None: it is none of `OptimizerArgs`."""
    if number.name not in OptimizerArgs.__annotations__:
        return None
    reader = number.name.partition("_")[0]
    left_to_adam = ("muon", "soap", "shampoo", "kfac")  # what is no matrix
    return (reader, *left_to_adam) if reader == "adam" else (reader,)


class HostOffload(Spelled):
    """What lives in host memory or in files, and when it is stepped there."""

    optimizer_cpu_offload: bool = option(False, "keep and update them there")
    optimizer_offload_fraction: float = option(
        1.0, "part of them that goes there", gt=0, le=1, hint="1 is all of them", needs="optimizer_cpu_offload"
    )

    optimizer_offload_path: str | None = option(
        None,
        "keep them in memory-mapped files in this folder, a file a rank, and stream them bucket by bucket "
        "(ZeRO-Infinity); a fast local disk",
        metavar="DIR",
    )
    delayed_parameter_update: bool = option(
        False,
        "a batch computes its gradients on weights that lack the update of the batch before, whose step runs meanwhile "
        "(ZeRO-Offload); steps on the host run in a thread. `pipeline_flush_steps` first iterations wait for it",
    )
    embedding_offload: str | None = option(
        None,
        "keep the rows of the word embedding and their moments in host memory and update them there; the device has a "
        "cache of rows (Bagpipe)",
        choices=("cpu",),
        alone="cpu",
    )
    embedding_lookahead: int = option(
        2, "micro-batches whose rows come into the cache before they are used", ge=0, needs="embedding_offload"
    )
    embedding_cache_rows: int | None = option(
        None,
        "rows of the cache; unset: those of `embedding_lookahead` micro-batches and one more, at most the vocabulary",
        ge=1,
        needs="embedding_offload",
    )

    param_offload: str = option(
        "auto",
        "keep weights and gradients in host memory, and masters and moments there or in files: those of a layer "
        "are on the device while it uses them. auto: where `device_memory_budget_gb` needs it",
        choices=("none", "cpu", "auto"),
        alone="cpu",
    )


class OptimizerConfig(Section):
    """Schedules count samples inside, so that iterations of a growing batch weigh what they should."""

    optimizer: str = option(
        "adam",
        "adam is AdamW (decoupled weight decay); sgd has momentum; lion has one moment; muon makes the updates of "
        "matrices orthogonal, soap runs Adam in the eigenbasis of Shampoo's preconditioner of a matrix, shampoo "
        "multiplies a matrix's update by that preconditioner and gives it the length of Adam's, kfac by the "
        "inverses of the covariances of a layer's inputs and output gradients; all four leave the rest to AdamW; "
        "adafactor keeps a row and a column of second moments for a matrix and nothing else",
        choices=tuple(OPTIMIZER_SPECS),
    )
    lr: float = required("peak learning rate, of one update", gt=0, hint="3e-4 is common")
    min_lr: float = option(0.0, "learning rate after the decay", ge=0)
    decoupled_lr: float | None = option(
        None, "peak learning rate of the word embedding and the output layer; unset: `lr`. Its course is the same", gt=0
    )
    decoupled_min_lr: float | None = option(
        None, "their learning rate after the decay; unset: `min_lr`", ge=0, needs="decoupled_lr"
    )
    lr_decay_style: str = option(
        "linear",
        "shape of the decay after warm-up",
        choices=("constant", "linear", "cosine", "inverse-square-root", "WSD"),
    )
    lr_decay: Decay = Decay()
    lr_warmup: Warmup = Warmup()
    lr_wsd_decay: FinalDecay = FinalDecay()
    weight_decay: float = option(0.01, "decoupled weight decay of matrices (never of norms and biases)", ge=0)
    weight_decay_ramp: WeightDecayRamp = WeightDecayRamp()
    args: OptimizerArgs = OptimizerArgs()
    exp_avg_dtype: str = option("fp32", "how the first moment is kept", choices=("fp32", "bf16", "fp16"))
    exp_avg_sq_dtype: str = option("fp32", "how Adam's second moment is kept", choices=("fp32", "bf16", "fp16"))
    optimizer_impl: str = option(
        "torch", "AdamW's kernel: torch's fused one or NVIDIA apex's", choices=("torch", "apex")
    )
    offload: HostOffload = HostOffload()
    store_param_remainders: bool = option(
        False,
        "keep the masters of bf16 weights as the 16 bits that the weights lack: 2 bytes less each. Masters are exact; "
        "weights half-way between two bf16 numbers are rounded away from zero, not to even",
    )
    ema_decay: float | None = option(
        None,
        "average the master weights: the average keeps this part of itself at each update, less in the first "
        "10 / (1 - decay); evaluated beside the weights and saved with them",
        gt=0,
        lt=1,
        hint="0.999 looks back over about 1,000 updates",
    )
    staleness: StalenessCorrection = StalenessCorrection()
    clip_grad: float = option(
        1.0, "global gradient norm above which gradients are scaled down", ge=0, hint="0 disables it"
    )

    @property
    def ends_min_lr(self) -> float:
        """What the learning rate of `--decoupled-lr` ends at."""
        return self.min_lr if self.decoupled_min_lr is None else self.decoupled_min_lr
