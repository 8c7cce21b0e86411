"""Both sides of every `if` of the update within a few iterations: what is chosen so that each is taken.

    clipping          a bound between the norms of the first steps: some updates are clipped, others are not
    skipped updates   one gradient is not finite: of the last sample of the first iteration after the checkpoint, so on
                      one replica alone
    loss scale        in fp64, too: twice as large after every update, half after the skipped one
    learning rate     before, in and after the warm-up; before and after the end of the decay; above and at the floor of
                      an inverse square root

As far as the user's flags can come to them: updates are skipped and losses scaled with --fp16 (or --nonfinite=skip),
rates are seen after the end of the decay where it ends before the training.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from megalite.config import Config, Decay, Warmup
from megalite.schedule import find_schedule

FIRST_SCALE = 2.0**10
"""Powers of two change no digit."""


@dataclass(frozen=True)
class Branches:
    """What a reference is asked for.

    skipped: the iteration (from 1) whose update is skipped; 0: none. scaled: whether the loss has a scale.
    """

    skipped: int = 0
    scaled: bool = False

    @classmethod
    def of(cls, config: Config, steps: int) -> Branches:
        """Those that a run of the user's can come to. PipeDream's stages each skip by themselves."""
        fp16 = config.training.precision.fp16
        alone = find_schedule(config.parallel.schedule).update_per_microbatch
        skips = (fp16 or config.training.nonfinite == "skip") and not alone
        return cls(steps // 2 + 1 if skips else 0, fp16)

    def scales(self, steps: int, *, late: bool) -> list[float]:
        """The loss scale of every iteration: twice as large after an update that is taken, half after another.

        late: a stage may begin a batch before the update ahead of it, so what that says counts one batch later.
        """
        if not self.scaled:
            return [1.0] * steps
        after = [FIRST_SCALE]
        for iteration in range(1, steps + 1):
            after.append(after[-1] * (0.5 if iteration == self.skipped else 2.0))
        return [after[max(0, i - late)] for i in range(steps)]


def clips(norms: Sequence[float]) -> Iterator[float]:
    """Bounds that clip some of the norms and leave others, the one with the most room first."""
    ordered = sorted(set(norms))
    gaps = sorted(zip(ordered, ordered[1:], strict=False), key=lambda pair: pair[0] / pair[1])
    for low, high in gaps:
        bound = float(f"{math.sqrt(low * high):.6g}")
        if low < bound < high:
            yield bound


def is_delayed(config: Config) -> bool:
    """Whether gradients are those of older weights."""
    schedule = find_schedule(config.parallel.schedule)
    return schedule.asynchronous or config.optimizer.offload.delayed_parameter_update


def with_schedules(small: Config, own: Config, world_size: int, ranks: int, branches: Branches, steps: int) -> Config:
    """Learning rates of which the few steps see every piece.

    own, world_size: the user's. ranks: of `small`. A skipped update does not advance the schedules.
    """
    sizes = small.batch_size_schedule(ranks)
    seen = [sizes.samples_after(i) for i in range(steps - bool(branches.skipped))]

    def between(index: int) -> int:
        """Samples between a step and the one before it."""
        return (seen[index - 1] + seen[index]) // 2

    given, theirs = small.optimizer, own.optimizer
    whole, final = own.total_train_samples(world_size), own.batch_size_schedule(world_size).final
    decay = theirs.lr_decay.samples(final, whole)
    if theirs.lr_warmup.samples(final, decay):
        warmup = Warmup(lr_warmup_samples=max(1, between(min(2, len(seen) - 1))), lr_warmup_init=given.lr / 2)
        given = replace(given, lr_warmup=warmup)
    end, last = small.total_train_samples(ranks), 0
    if decay < whole and len(seen) > 3:
        end, last = between(-1), 1
        given = replace(given, lr_decay=Decay(lr_decay_samples=end))
    if given.lr_decay_style == "WSD":
        wsd = replace(given.lr_wsd_decay, lr_wsd_decay_iters=None, lr_wsd_decay_samples=end - between(-1 - last))
        given = replace(given, lr_wsd_decay=wsd)
    if given.lr_decay_style == "inverse-square-root" and given.min_lr and len(seen) > 2:
        earlier, later = seen[-2 - last : len(seen) - last]
        begun = max(1, given.lr_warmup.lr_warmup_samples)
        floor = given.lr * math.sqrt(begun / math.sqrt(max(earlier, begun) * later))
        given = replace(given, min_lr=floor)  # between the rates of two steps
    return replace(small, optimizer=given)
