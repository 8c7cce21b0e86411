"""The training section: batch, length, precision, evaluation, when to stop."""

from megalite.config.batch_size import BatchSizeSchedule
from megalite.config.schema import OneOf, Section, Spelled, option, required

USUAL_EVAL_ITERS = 100  # Megatron-LM's


class BatchRamp(OneOf):
    """A global batch that grows."""

    rampup_batch_size: tuple[int, ...] | None = option(
        None,
        "START INCREMENT SAMPLES: from START by INCREMENT to `global_batch_size`, evenly over SAMPLES samples",
        metavar="N",
        ge=1,
    )
    step_batch_size_schedule: str | None = option(
        None,
        "sizes from given token counts on, instead of `global_batch_size`: '0:768 250B:1536' (K, M, B, T)",
        metavar="STEPS",
        words=True,
    )

    def sizes(self, full: int, seq_length: int) -> BatchSizeSchedule:
        """Global batch size by samples consumed; `full` is --global-batch-size. ValueError for malformed ones."""
        if self.step_batch_size_schedule is not None:
            return BatchSizeSchedule.parse(self.step_batch_size_schedule, seq_length)
        if self.rampup_batch_size is not None:
            start, increment, samples = self.rampup_batch_size
            return BatchSizeSchedule.ramp(start, increment, samples, full)
        return BatchSizeSchedule.constant(full)


class TrainingLength(OneOf):
    """Length of the whole training."""

    train_iters: int | None = option(None, "in iterations", ge=1, le=10**9, hint="to only evaluate use `skip_train`")
    train_samples: int | None = option(None, "in samples", ge=1, le=10**12, units=True)
    train_tokens: int | None = option(None, "in tokens, such as 300e9 or 15T", ge=1, le=10**17, units=True)

    def iterations(self, sizes: BatchSizeSchedule, seq_length: int) -> int:
        """The same in iterations of batches of these sizes (0: no length is given)."""
        if self.train_iters is not None:
            return self.train_iters
        tokens = self.train_tokens or 0
        return sizes.iterations_for(self.train_samples or -(-tokens // seq_length))


class Precision(OneOf):
    """Number format, fp32 where unset."""

    bf16: bool = option(False, "parameters and activations in bf16, master weights and gradients in fp32")
    fp16: bool = option(False, "parameters and activations in fp16 with loss scaling, the rest in fp32")
    fp64: bool = option(False, "everything in fp64 (tests)")

    @property
    def name(self) -> str:
        """Of parameters and activations."""
        return next((name for name, on in vars(self).items() if on), "fp32")

    @property
    def half(self) -> bool:
        """Whether they are 16 bits wide."""
        return self.bf16 or self.fp16


class Float8(Spelled, flag="fp8", only_with="fp8_format"):
    """products of linear layers inside of blocks in 8 bits"""

    fp8_format: str | None = option(
        None,
        "multiply in float8 inside of blocks: e4m3 for all, or hybrid, e5m2 for gradients; on a CPU it is emulated",
        choices=("e4m3", "hybrid"),
    )
    fp8_recipe: str = option(
        "tensorwise",
        "what shares a scale: a tensor, a row, a block of 128 (of weights 128 x 128), or of 32 (mxfp8, emulated only); "
        "delayed: a tensor, by what it was in updates before",
        choices=("tensorwise", "rowwise", "blockwise", "mxfp8", "delayed"),
    )
    fp8_amax_history_len: int = option(1024, "updates that a delayed scale is the largest of", ge=1)
    fp8_param_gather: bool = option(
        False, "`zero_stage` 3 gathers the weights of these layers in float8: half the bytes"
    )


class LossScaling(Spelled, flag="loss_scaling", only_with="fp16"):
    """the dynamic loss scale of `fp16`, and how many updates may be skipped"""

    loss_scale: float | None = option(
        None, "constant scale; unset: dynamic", gt=0, needs="fp16", only_with=None, flag=None
    )
    initial_loss_scale: float = option(2.0**32, "first dynamic scale", gt=0, arg="initial")
    min_loss_scale: float = option(1.0, "smallest dynamic scale", gt=0, arg="min")
    loss_scale_window: int = option(1000, "good iterations before the dynamic scale doubles", ge=1, arg="window")
    hysteresis: int = option(2, "overflows before the dynamic scale halves", ge=1)
    max_skipped_updates: int = option(
        50,
        "updates skipped in a row, at a scale that cannot fall, that end the run",
        ge=1,
        only_with=None,
        arg="max_skipped",
    )


class Spikes(Spelled, flag="spikes", prefix="spike_"):
    """updates whose gradient norm is far above those before"""

    on_spike: str | None = option(
        None,
        "an update whose gradient norm is far above those before it: log it, skip it (at most `max_skipped_updates` in "
        "a row), stop before it, or go back to a checkpoint and pass over the samples around it",
        choices=("log", "skip", "stop", "rollback"),
        arg="action",
    )
    spike_sigma: float = option(
        6.0, "how many standard deviations above the mean of the window is far", gt=0, only_with="on_spike"
    )
    spike_window: int = option(
        128, "latest updates that are compared with; nothing is a spike before half of them", ge=2, only_with="on_spike"
    )
    rollback_iters: int = option(
        100, "rollback: how many iterations before a spike the samples begin that are passed over", ge=1, arg="back"
    )
    rollback_skip_iters: int = option(200, "rollback: how many iterations are passed over", ge=1, arg="pass_over")
    rollback_limit: int = option(
        3, "rollback: how many times the samples passed over may grow before the run ends instead", ge=1, arg="times"
    )


class TrainingConfig(Section):
    """One iteration consumes one global batch = micro-batch x data-parallel size x micro-batches."""

    micro_batch_size: int = required("samples of one forward pass of one replica", ge=1)
    global_batch_size: int | None = option(
        None, "samples of one iteration; unset: micro-batch x data-parallel size", ge=1
    )
    batch_ramp: BatchRamp = BatchRamp()
    seq_length_schedule: str | None = option(
        None,
        "shorter sequences first, cut out of the samples, so that a batch keeps its tokens: '0:4096 500B:32768' is "
        "4,096 until 500 billion tokens are consumed (K, M, B, T), then `seq_length`, the longest",
        metavar="STEPS",
        words=True,
    )
    length: TrainingLength = TrainingLength()
    seed: int = option(1234, "seed of initial weights, dropout and data order", ge=0, le=2**32 - 1)

    precision: Precision = Precision()
    float8: Float8 = Float8()
    loss_scaling: LossScaling = LossScaling()
    float32_matmul_precision: str = option(
        "highest",
        "fp32 matrix products; auto times and checks the faster modes on this model's shapes at start",
        choices=("highest", "high", "medium", "auto"),
    )
    compile: bool = option(False, "compile each transformer layer with torch.compile")
    calculate_per_token_loss: bool = option(
        False, "divide the summed loss by the tokens of the global batch, not micro-batch by micro-batch"
    )
    spikes: Spikes = Spikes()
    partial_backprop_groups: int = option(
        1,
        "micro-batches back-propagate through the top 1 to k of k groups of layers in turn, and a layer's gradient "
        "is the mean over those that reach it: another optimisation, (k+1)/2k of the backward",
        ge=1,
    )
    nonfinite: str = option(
        "stop",
        "a non-finite loss or gradient (fp16 overflow apart): stop before the update, or skip the update",
        choices=("stop", "skip"),
    )

    eval_interval: int | None = option(None, "iterations between evaluations; unset: only at the end", ge=1)
    eval_iters: int | None = option(
        None,
        "global batches of one evaluation, always the same ones; 0: never evaluate; unset: 100, or the whole split "
        "once where that is fewer",
        ge=0,
    )
    full_validation: bool = option(False, "evaluate on the whole split, without overlap, not on `eval_iters` batches")

    exit_interval: int | None = option(None, "stop (and save) when the iteration is a multiple of this", ge=1)
    exit_duration_in_mins: float | None = option(None, "stop (and save) after this many minutes", gt=0)
    exit_signal_handler: bool = option(True, "on SIGTERM, SIGUSR1, SIGHUP or Ctrl-C: save, exit with 0 (Ctrl-C: 130)")
    iterations_to_skip: tuple[int, ...] = option(
        (), "iterations whose data is passed over without a step", metavar="N", ge=1
    )
    skip_train: bool = option(False, "only evaluate")
    dry_run: bool = option(False, "check everything, print what it comes to, and exit", saved=False)
    dry_run_all: bool = option(False, "print every setting, not only those that are not defaults", saved=False)

    @property
    def evaluates(self) -> bool:
        """Whether there is any evaluation."""
        return self.eval_iters != 0

    @property
    def most_eval_iters(self) -> int:
        """Global batches of an evaluation that is not of a whole split."""
        return USUAL_EVAL_ITERS if self.eval_iters is None else self.eval_iters

    def batch_size(self, data_parallel_size: int) -> int:
        """Samples of a full global batch (after any ramp-up)."""
        if self.global_batch_size is not None:
            return self.global_batch_size
        return self.micro_batch_size * data_parallel_size
