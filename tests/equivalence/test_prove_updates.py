"""The certificate on both sides of every `if` of the update: what is wrong on one of them alone is named."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

import prove_layout
from equivalence.layouts import TINY
from megalite.checkpoint import Checkpointer
from megalite.comm import World
from megalite.config import Config, parse
from megalite.engine import update
from megalite.engine.expert_bias import ExpertBias
from megalite.engine.update import Updater
from megalite.errors import ConfigError
from megalite.optim import Delay, DynamicLossScaler, LearningRateSchedule
from megalite.optim.rule import UpdateRule
from megalite.optim.staleness import ErrorFeedback
from megalite.parallel.zero.flat_weights import FlatWeights
from megalite.parallel.zero.sharded_optimizer import ShardedOptimizer
from megalite.parallel.zero.sub_optimizers import DeviceOptimizer
from megalite.proof import certificate, watch
from megalite.proof.branches import Branches, clips
from megalite.proof.shrink import Small, shrink
from megalite.train import run_state
from megalite.train.param_schedules import ParamSchedules
from megalite.train.trainer import TrainingProgress

MODEL = [*(word for word in TINY if word not in ("--fp64", "--lr-decay-style", "constant")), "--num-layers", "2"]
MODEL += ["--micro-batch-size", "1"]
FP64, SKIPS, FP16 = ["--fp64"], ["--bf16", "--nonfinite", "skip"], ["--fp16"]
PP2 = ["--pipeline-model-parallel-size", "2"]
LATE = [*PP2, "--pipeline-schedule", "2bw"]
UNCLIPPED = ["--clip-grad", "0"]
BIASED = "--num-experts 4 --moe-router score_function=sigmoid expert_bias".split()
RATES = "--lr-decay-style linear --lr-warmup iters=5 --lr-decay iters=30 --min-lr 1e-3".split()
STEPS = 5


def last_rank() -> bool:
    return torch.distributed.get_rank() == torch.distributed.get_world_size() - 1


def scale_with(coefficient: Callable[[Tensor], Tensor]) -> Any:
    """The factor of the gradients, with another clip coefficient on the last rank."""
    right = update._grad_scale

    def scale(norm: Tensor, found_inf: Tensor, numbers: update.Hyperparameters) -> Any:
        if not last_rank():
            return right(norm, found_inf, numbers)
        clip = coefficient(numbers.clip_grad / (norm + 1e-6))
        return torch.where(found_inf > 0, 1.0, clip / numbers.loss_scale)

    return patch.object(update, "_grad_scale", scale)


def no_clamp_on_one_rank() -> Any:
    return scale_with(lambda ratio: ratio)


def never_clipped_on_one_rank() -> Any:
    return scale_with(lambda ratio: torch.ones_like(ratio))


def loss_scale_left_in_clipped_gradients() -> Any:
    right = update._grad_scale
    return patch.object(
        update, "_grad_scale", lambda norm, inf, numbers: right(norm, inf, replace(numbers, loss_scale=1.0))
    )


def loss_scale_left_in_unclipped_gradients() -> Any:
    return loss_scale_left_in_clipped_gradients()


def skipped_update_taken_on_one_rank() -> Any:
    right = ShardedOptimizer.step

    def step(self: ShardedOptimizer, **numbers: Any) -> None:
        found = numbers["found_inf"]
        right(self, **(numbers | ({"found_inf": torch.zeros_like(found)} if last_rank() else {})))

    return patch.object(ShardedOptimizer, "step", step)


def one_finite_update_skipped_on_one_rank() -> Any:
    right = ShardedOptimizer.step

    def step(self: ShardedOptimizer, **numbers: Any) -> None:
        lost = last_rank() and numbers["version"] == 4
        right(self, **(numbers | ({"found_inf": torch.ones_like(numbers["found_inf"])} if lost else {})))

    return patch.object(ShardedOptimizer, "step", step)


def skipped_update_counted_by_the_rule() -> Any:
    return patch.object(UpdateRule, "count", lambda self, steps: steps.add_(1))


def skipped_update_advances_the_rate() -> Any:
    right = TrainingProgress.count_iteration
    return patch.object(TrainingProgress, "count_iteration", lambda self, n, skipped: right(self, n, False))


def scale_stays_after_a_skip() -> Any:
    right = DynamicLossScaler.update

    def after(self: DynamicLossScaler, *, found_non_finite: bool) -> None:
        kept = self.scale
        right(self, found_non_finite=found_non_finite)
        self.scale = kept if found_non_finite else self.scale

    return patch.object(DynamicLossScaler, "update", after)


def scale_never_grows() -> Any:
    right = DynamicLossScaler.update

    def after(self: DynamicLossScaler, *, found_non_finite: bool) -> None:
        kept = self.scale
        right(self, found_non_finite=found_non_finite)
        self.scale = min(kept, self.scale)

    return patch.object(DynamicLossScaler, "update", after)


def scale_of_this_update_in_2bw() -> Any:
    right = Updater.loss_scale
    return patch.object(Updater, "loss_scale", lambda self, previous: right(self, previous=False))


def matrices_not_decayed() -> Any:
    right = DeviceOptimizer.begin_step

    def begin_step(self: DeviceOptimizer, **numbers: Any) -> None:
        right(self, **(numbers | {"weight_decay": 0.0}))

    return patch.object(DeviceOptimizer, "begin_step", begin_step)


def rate_when(wrong: Callable[[LearningRateSchedule, int], float | None]) -> Any:
    right = LearningRateSchedule.__call__

    def rate(self: LearningRateSchedule, samples: int) -> float:
        found = wrong(self, samples)
        return right(self, samples) if found is None else found

    return patch.object(LearningRateSchedule, "__call__", rate)


def warm_up_in_one_step() -> Any:
    return rate_when(lambda own, n: own.lr if 0 < n <= own.warmup_samples else None)


def decay_goes_on_after_its_end() -> Any:
    def wrong(own: LearningRateSchedule, n: int) -> float | None:
        part = (n - own.warmup_samples) / (own.decay_samples - own.warmup_samples)
        return own.lr + part * (own.min_lr - own.lr) if n > own.decay_samples else None

    return rate_when(wrong)


def floor_of_the_rate_forgotten() -> Any:
    return rate_when(
        lambda own, n: own.lr * (own.warmup_samples / n) ** 0.5 if own.warmup_samples < n <= own.decay_samples else None
    )


def wsd_decays_at_once() -> Any:
    right = LearningRateSchedule._coefficient
    return patch.object(
        LearningRateSchedule,
        "_coefficient",
        lambda self, n: right(self, n) - 0.1 * (n <= self.decay_samples - self.wsd_decay_samples),
    )


def biases_move_in_a_skipped_update() -> Any:
    right = ExpertBias.step
    return patch.object(
        ExpertBias, "step", lambda self, wanted, inf, version: right(self, wanted, torch.zeros_like(inf), version)
    )


def biases_count_one_replica() -> Any:
    return patch("megalite.engine.versioned.all_reduce_", lambda x, axis, **_: None)


def biases_not_loaded() -> Any:
    def after_load(self: ExpertBias, version: int) -> None:
        for shard in self.shards(version):
            shard.local.zero_()

    return patch.object(ExpertBias, "after_load", after_load)


def older_weights_not_loaded() -> Any:
    return without("previous/")


def without(part: str) -> Any:
    right = Checkpointer.load

    def load(self: Checkpointer, path: Any, shards: Any, **more: Any) -> Any:
        return right(self, path, [s for s in shards if part not in s.name], **more)

    return patch.object(Checkpointer, "load", load)


def corrected_while_the_pipeline_drains() -> Any:
    return patch.object(Delay, "at", lambda self, iteration: self.updates)


def first_updates_not_corrected() -> Any:
    right = ErrorFeedback.step

    def step(self: ErrorFeedback) -> None:
        kept, self.delay.of_gradient = self.delay.of_gradient, self.delay.of_gradient * (self.steps > 2)
        right(self)
        self.delay.of_gradient = kept

    return patch.object(ErrorFeedback, "step", step)


def weights_not_gathered_in_one_step() -> Any:
    right = FlatWeights.gather
    return patch.object(FlatWeights, "gather", lambda self, v=0: None if v == 2 else right(self, v))


def samples_read_twice_after_a_resume() -> Any:
    from_meta = run_state.progress_from_meta

    def progress_from_meta(meta: Any) -> TrainingProgress:
        found = from_meta(meta)
        found.consumed_samples -= found.consumed_samples // 2
        return found

    return patch.object(run_state, "progress_from_meta", progress_from_meta)


STEP, SKIPPED = r"FAIL  the layout: iteration {}, step of \S+: ", r"FAIL  the layout: iteration 3, step of "
# mutation -> flags, ranks, what is said of it
MUTATIONS: dict[Callable[[], Any], tuple[list[str], int, str]] = {
    no_clamp_on_one_rank: ([*FP64, "--zero-stage", "1"], 2, STEP.format(r"\d")),
    never_clipped_on_one_rank: ([*FP64, "--zero-stage", "1"], 2, STEP.format(r"\d")),
    loss_scale_left_in_clipped_gradients: (FP16, 1, STEP.format(1)),
    loss_scale_left_in_unclipped_gradients: ([*FP16, *UNCLIPPED], 1, STEP.format(1)),
    skipped_update_taken_on_one_rank: ([*SKIPS, "--zero-stage", "1"], 2, SKIPPED),
    one_finite_update_skipped_on_one_rank: ([*SKIPS, "--zero-stage", "1"], 2, STEP.format(4)),
    skipped_update_counted_by_the_rule: (SKIPS, 1, STEP.format(4)),
    skipped_update_advances_the_rate: ([*SKIPS, *RATES], 1, STEP.format(4)),
    scale_stays_after_a_skip: (FP16, 1, r"iteration 4, backward of head: the weight of the loss .* is 2 times"),
    scale_never_grows: (FP16, 1, r"iteration 2, backward of head: the weight of the loss .* is 0.5 times"),
    scale_of_this_update_in_2bw: ([*FP16, *LATE], 2, r"iteration \d, backward of head: .* is (2|0.5) times"),
    matrices_not_decayed: (FP64, 1, STEP.format(1)),
    warm_up_in_one_step: ([*FP64, *RATES], 1, STEP.format(2)),
    decay_goes_on_after_its_end: ([*FP64, *RATES], 1, STEP.format(5)),
    floor_of_the_rate_forgotten: (
        [*FP64, *"--lr-decay-style inverse-square-root --lr-warmup iters=5 --min-lr 1e-3".split()], 1, STEP.format(5),
    ),
    wsd_decays_at_once: (
        [*FP64, *"--lr-decay-style WSD --lr-wsd-decay iters=10 --lr-warmup iters=5".split()], 1, STEP.format(r"\d"),
    ),
    biases_move_in_a_skipped_update: ([*SKIPS, *BIASED], 1, SKIPPED + r"\S+: \S+expert_bias"),
    biases_count_one_replica: ([*FP64, *BIASED], 2, STEP.format(1) + r"\S+expert_bias"),
    biases_not_loaded: (
        [*FP64, *BIASED], 2, r"FAIL  its checkpoint .*: iteration 2, checkpoint of \S+: \S+expert_bias",
    ),
    older_weights_not_loaded: (
        [*FP64, *LATE], 2, r"FAIL  its checkpoint .*: iteration 2, checkpoint of \S+: previous/",
    ),
    corrected_while_the_pipeline_drains: (
        [*FP64, *LATE, "--pipeline-flush-steps", "7", "--staleness-correction", "error-feedback"], 2, STEP.format(1),
    ),
    first_updates_not_corrected: (
        [*FP64, *LATE, "--staleness-correction", "error-feedback"], 2, STEP.format(1),
    ),
    weights_not_gathered_in_one_step: (
        [*FP64, "--zero-stage", "1"], 2, STEP.format(2) + r"the compute weight \S+ on rank \d",
    ),
    samples_read_twice_after_a_resume: (FP64, 1, r"FAIL  its checkpoint .*: iteration 2, checkpoint of the data: "),
}  # fmt: skip


def broken_body(world: World, config: str, reference: str, folder: str, steps: int, save_after: int, name: str) -> Any:
    with {m.__name__: m for m in MUTATIONS}[name]():
        return watch.train(world, config, reference, folder, steps, save_after)


def small_form(flags: list[str], ranks: int, steps: int = STEPS) -> Small:
    config, world_size = prove_layout.resolve([*MODEL, *flags], ranks)
    return shrink(config, world_size, steps=steps, most_ranks=8)


def account(name: str, flags: list[str], ranks: int, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    status = certificate.prove(small_form(flags, ranks), STEPS, print, rank=(broken_body, name))
    output = capsys.readouterr().out
    return status, next((line for line in output.splitlines() if line.startswith(("FAIL", "PASS"))), output)


@pytest.mark.landing
def test_a_wrong_side_of_an_if_is_named(full: bool, fresh: int, capsys: pytest.CaptureFixture[str]) -> None:
    for mutation in MUTATIONS if full else random.Random(fresh).sample([*MUTATIONS], 3):
        flags, ranks, expected = MUTATIONS[mutation]
        status, verdict = account(mutation.__name__, flags, ranks, capsys)
        assert status == 1 and re.search(expected, verdict), f"{mutation.__name__}: {verdict}"


def test_bounds_lie_between_norms() -> None:
    assert [*clips([2.0, 2.0])] == [*clips([])] == []
    assert [*clips([3.0, 1.0, 2.0])] == [1.41421, 2.44949], "the widest gap first"
    assert [*clips([1.0, 1.0 + 1e-9])] == [], "no bound of six digits lies between"


def test_what_flags_can_come_to_is_asked_for() -> None:
    assert small_form(FP64, 1).branches == small_form(["--bf16"], 1).branches == Branches()
    assert small_form(SKIPS, 1).branches == Branches(skipped=3)
    assert small_form(FP16, 1).branches == Branches(skipped=3, scaled=True)
    untied = ["--untie-embeddings-and-output-weights", *UNCLIPPED]
    assert small_form([*SKIPS, *PP2, "--pipeline-schedule", "pipedream", *untied], 2).branches == Branches()
    assert Branches(3, True).scales(5, late=False) == [1024, 2048, 4096, 2048, 4096]
    assert Branches(3, True).scales(5, late=True) == [1024, 1024, 2048, 4096, 2048]
    assert Branches(3).scales(2, late=False) == [1, 1]


def rates(config: Config, ranks: int, steps: int) -> list[float]:
    """Of the updates that are taken."""
    sizes, schedule = config.batch_size_schedule(ranks), ParamSchedules.of(config, ranks).learning_rate
    return [schedule(sizes.samples_after(i)) for i in range(steps)]


def test_few_steps_see_every_piece_of_the_rate() -> None:
    own = parse([*MODEL, *RATES]).optimizer
    first, second, third, fourth, fifth = rates(small_form([*FP64, *RATES], 1).config, 1, STEPS)
    assert first == own.lr / 2 < second < own.lr > third > fourth > fifth == own.min_lr
    held = [word.replace("iters=30", "iters=50") for word in RATES]  # to the end of the training
    assert rates(small_form([*FP64, *held], 1).config, 1, STEPS)[-1] > own.min_lr
    floored = "--lr-decay-style inverse-square-root --lr-warmup iters=5 --min-lr 1e-3".split()
    found = small_form([*FP64, *floored], 1).config
    *_, before, last = rates(found, 1, STEPS)
    assert before > last == found.optimizer.min_lr


def test_too_few_steps_for_a_delay_are_refused() -> None:
    for flags in (LATE, ["--delayed-parameter-update", "--offload", "optimizer", "--zero-stage", "1"]):
        with pytest.raises(ConfigError, match=r"--steps=3: the first late gradient is that of iteration 2.*--steps=4$"):
            small_form([*FP64, *flags], 2, steps=3)
        small_form([*FP64, *flags], 2, steps=4)
    small_form(FP64, 2, steps=3)
    flushed = small_form([*FP64, *LATE, "--pipeline-flush-steps", "1000"], 2, steps=4)
    assert flushed.config.parallel.pipeline_flush_steps == 1
    assert "--pipeline-flush-steps: 1000 -> 1" in flushed.changes
