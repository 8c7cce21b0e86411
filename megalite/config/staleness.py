"""What is done about the delay of asynchronous pipelines' gradients: the flags, and what a run without them does."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from megalite.config.schema import Spelled, option
from megalite.config.update_rules import OPTIMIZER_SPECS
from megalite.schedule import find_schedule

if TYPE_CHECKING:
    from megalite.config.optimizer import OptimizerConfig
    from megalite.config.root import Config


class StalenessCorrection(Spelled):
    """Corrections of gradients that are late. As the user gives it; `completed` fills in what is left open."""

    staleness_correction: str | None = option(
        None,
        "what is done about the delay of gradients in 2bw, in pipedream and with `delayed_parameter_update`: predict "
        "computes on weights that are ahead by the steps that are missing, error-feedback makes up for each step when "
        "a fresher gradient is known, nesterov counts the newest gradient once more beside the moment; unset: the best "
        "of docs/asynchronous.md, for pipedream none",
        choices=("none", "predict", "error-feedback", "nesterov"),
    )
    staleness_lookahead: tuple[float, ...] | None = option(
        None,
        "steps that predict looks ahead for each step of delay; a second number is of what Muon, SOAP and Shampoo "
        "leave to AdamW; unset: the best for the optimizer",
        gt=0,
        hint="use 1",
    )


@dataclass(frozen=True)
class Correction:
    """What a run does. lookahead: of predict, of the optimizer's own tensors and of those that it leaves to AdamW.
    keeps_step: of which tensors the last step is kept, in the master's dtype: 'none', 'whole' (those that must lie in
    one piece) or 'all'."""

    method: str = "none"
    lookahead: tuple[float, float] = (0.0, 0.0)
    keeps_step: str = "none"

    def __str__(self) -> str:
        if self.method != "predict":
            return self.method
        own, rest = self.lookahead
        beside = "" if rest == own else f", {rest:g} for tensors that AdamW updates"
        return f"predict (weights {own:g} {'update' if own == 1 else 'updates'} ahead for each update of delay{beside})"


def has_delay(config: Config) -> bool:
    """Whether some stage computes gradients on weights that lack updates."""
    schedule = find_schedule(config.parallel.schedule)
    if config.optimizer.offload.delayed_parameter_update:
        return True
    if config.parallel.pipeline_schedule_file is not None:
        return False
    alone = schedule.update_per_microbatch and config.parallel.pipeline_model_parallel_size == 1
    return schedule.asynchronous and not alone


def flushed_start(config: Config, world_size: int) -> int:
    """Iterations that 2BW runs without delay unless told otherwise: the first fifth, 200 at most. That is what the runs
    of docs/asynchronous.md gain by; one of fewer than 100 iterations tries something, and is as it was asked for."""
    iterations, parallel = config.train_iterations(world_size), config.parallel
    waits = parallel.pipeline_schedule_file is None and find_schedule(parallel.schedule).flush_schedule is not None
    return min(iterations // 5, 200) if waits and iterations >= 100 else 0


def completed(optimizer: OptimizerConfig, *, each_microbatch: bool) -> Correction:
    """What `optimizer` does about late gradients, the defaults filled in. each_microbatch: PipeDream's updates."""
    given, rule = optimizer.staleness, OPTIMIZER_SPECS[optimizer.optimizer]
    method, foreseen = given.staleness_correction, bool(rule.moments(optimizer))
    if method is None:
        best = not each_microbatch and optimizer.optimizer_impl == "torch"
        method = rule.correction if best and foreseen else "none"
    if method == "predict":
        keeps = "all" if not foreseen else "whole" if rule.whole is not None else "none"
        ahead = given.staleness_lookahead or (rule.lookahead, rule.lookahead_of_rest or rule.lookahead)
        return Correction(method, (ahead[0], ahead[-1]), keeps)
    return Correction(method, keeps_step="all" if method == "error-feedback" else "none")
