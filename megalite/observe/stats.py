"""Measurements of a step, and the record that a log interval makes of them.

    Trainer --StepStats--> IntervalStats --record (a dict, one line of metrics.jsonl)--> hooks

A `StepStats` may carry tensors that still live on the device. They are read only when an interval is closed, in one
transfer, so between log lines the host never waits for the device.
"""

import math
import resource
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megalite.config import Config
from megalite.inventory import flops_per_iteration
from megalite.planner import peak_flops

#: One line of metrics.jsonl: plain numbers, texts, and None where a number does not exist.
Record = dict[str, Any]

#: Numbers by name, some of them scalars on the device.
Scalars = dict[str, Tensor | float | None]

#: Most loads of experts in a record; of larger models it has every nth block.
MOST_LOADS = 2048

#: Fields of `ExpertStats` whose means over an interval are in its record.
EXPERT_SCALARS = ("load_balancing_loss", "z_loss", "fullest_expert", "dropped_fraction")


@dataclass(frozen=True, kw_only=True)
class ExpertStats:
    """Measurements of routers in one iteration: scalars that may live on the device; None where there is none.

    load_balancing_loss, z_loss: mean over sparse blocks and micro-batches, without their coefficients; the former is 1
        for experts that are evenly loaded.
    fullest_expert: tokens of the fullest expert of any block, as a multiple of their mean.
    dropped_fraction: of the choices, those beyond the capacity of an expert.
    expert_load: `[sparse blocks, E]`, tokens of each expert; layers: the blocks' numbers.
    """

    load_balancing_loss: Tensor | float | None = None
    z_loss: Tensor | float | None = None
    fullest_expert: Tensor | float | None = None
    dropped_fraction: Tensor | float | None = None
    expert_load: Tensor | None = None
    layers: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class StepStats:
    """Measurements of one iteration, the same on all ranks but for the times.

    iteration: number of the iteration just done, counted from 1.
    consumed_samples, consumed_tokens: totals after it, skipped ones included.
    global_batch_size: samples of this iteration.
    seq_length: tokens of its sequences.
    lm_loss: mean loss per token in nats, a scalar that may live on the device; None where nothing was computed
        (`--iterations-to-skip`).
    counted_tokens: 0 where no label counted, and the loss is that of nothing; may live on the device, too.
    grad_norm: global norm before clipping; None where the optimizer has none to give. It, `loss_scale` and `skipped`
        may live on the device, too.
    learning_rate: the one this step used.
    loss_scale: factor of the loss in fp16 training, else 1.
    skipped: the update was left out (fp16 overflow, a non-finite value, or the iteration was to be skipped).
    experts: of a model with experts, asked for when the interval is closed: sums of all ranks are on their way.
    by_part: names of the parts of a blend (`--loss-by-part`), and `[2, P]`, their summed losses and tokens that count.
    further: mean losses of the tokens beyond the next one, by depth.
    iteration_time_s: seconds on this rank's clock.
    wait_time_s, data_time_s: parts of it spent waiting for other ranks, and for the next batch.
    """

    iteration: int
    consumed_samples: int
    consumed_tokens: int
    global_batch_size: int
    seq_length: int
    lm_loss: Tensor | float | None = None
    counted_tokens: Tensor | float | None = None
    grad_norm: Tensor | float | None = None
    learning_rate: float = 0.0
    loss_scale: Tensor | float = 1.0
    skipped: Tensor | bool = False
    experts: Callable[[], ExpertStats] | None = None
    by_part: tuple[Sequence[str], Tensor] | None = None
    further: tuple[Tensor, ...] = ()
    iteration_time_s: float
    wait_time_s: float = 0.0
    data_time_s: float = 0.0


_READ = ("lm_loss", "counted_tokens", "grad_norm", "loss_scale", "skipped")


class IntervalStats:
    """Collects the steps since the last log line and turns them into one record.

    Args:
        config: gives the length of a sample, its FLOPs and the precision.
        world_size: devices that share the work.
        device: where the tensors of the steps live; its memory is what `peak_memory_bytes` reports.
        flops_per_sample: of a model that is not ours.
    """

    def __init__(
        self,
        config: Config,
        *,
        world_size: int,
        device: torch.device,
        flops_per_sample: float | None = None,
    ) -> None:
        self._tokens_per_sample = config.model.seq_length
        tp = config.parallel.tensor_model_parallel_size
        phases = {length: config.at_length(length).model for length in config.length_schedule.lengths}
        self._flops_per_sample = {
            length: flops_per_iteration(model, config.model.seq_length // length, tp)
            if flops_per_sample is None
            else flops_per_sample
            for length, model in phases.items()
        }
        self._world_size = world_size
        self._device = device
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
        self._peak_flops = peak_flops(name, config.training.precision.name)
        self._steps: list[StepStats] = []

    def __len__(self) -> int:
        """Steps collected since the last record."""
        return len(self._steps)

    def add(self, stats: StepStats) -> None:
        """Take note of a step; reads nothing from the device."""
        self._steps.append(stats)

    def record(self) -> Record:
        """Close the interval: one `"train"` record of its steps (at least one).

        `lm_loss` is the mean over the steps that were not skipped, None if there were none. Steps of which no label
        counts are no part of it where others are; `uncounted_iterations` says how many there are. `grad_norm` is that
        of the last step. Numbers about experts are means over the steps. The time in which the host waits here for the
        device belongs to the steps and is added to theirs.
        """
        steps, self._steps = self._steps, []
        assert steps, "an interval without a step has no record"
        last = steps[-1]
        began = time.perf_counter()
        routed = [None if step.experts is None else step.experts() for step in steps]
        scalars: list[Scalars] = []
        for step, experts in zip(steps, routed, strict=True):
            values: Scalars = {name: getattr(step, name) for name in _READ}
            values |= {f"mtp_{depth}_loss": loss for depth, loss in enumerate(step.further, 1)}
            scalars.append(values | {name: getattr(experts, name, None) for name in EXPERT_SCALARS})
        measured = _on_host(scalars)
        seconds = sum(step.iteration_time_s for step in steps) + time.perf_counter() - began
        losses = [values["lm_loss"] for values in measured]
        counted = [values["counted_tokens"] != 0 for values in measured]
        skips = [bool(values["skipped"]) for values in measured]
        computed = zip(losses, counted, skips, strict=True)
        taken = [(loss, counts) for loss, counts, skipped in computed if loss is not None and not skipped]
        uncounted = sum(not counts for _, counts in taken)
        record: Record = {
            "kind": "train",
            "iteration": last.iteration,
            "consumed_samples": last.consumed_samples,
            "consumed_tokens": last.consumed_tokens,
            "global_batch_size": last.global_batch_size,
            **({"seq_length": last.seq_length} if len(self._flops_per_sample) > 1 else {}),
            "lm_loss": _mean([loss for loss, counts in taken if counts or uncounted == len(taken)]),
            "grad_norm": None if skips[-1] else measured[-1]["grad_norm"],
            "learning_rate": last.learning_rate,
            "loss_scale": measured[-1]["loss_scale"],
            "skipped_iterations": sum(skips),
            "nan_iterations": sum(loss is not None and not math.isfinite(loss) for loss in losses),
        }
        record |= {"uncounted_iterations": uncounted} if uncounted else {}
        if steps[0].iteration == 1 < len(steps) and losses[0] is not None and counted[0]:
            record["first_lm_loss"] = losses[0]  # where a curve begins: the mean of an interval has fallen by then
        for name in EXPERT_SCALARS:
            mean = _mean([values.get(name) for values in measured])
            record |= {} if mean is None else {name: mean}
        for depth in range(1, 1 + len(last.further)):
            name = f"mtp_{depth}_loss"
            record[name] = _mean([values.get(name) for values, skip in zip(measured, skips, strict=True) if not skip])
        kept = [step.by_part for step, skipped in zip(steps, skips, strict=True) if step.by_part and not skipped]
        return (
            record
            | losses_by_part(kept)
            | expert_loads([each for each in routed if each])
            | self._rates(steps, seconds)
        )

    def _rates(self, steps: list[StepStats], seconds: float) -> Record:
        computed = [step for step in steps if step.lm_loss is not None]
        per_second = 1 / seconds if seconds > 0 else 0.0
        work = sum(step.global_batch_size * self._flops_per_sample[step.seq_length] for step in computed)
        flops = work * per_second / self._world_size
        samples = sum(step.global_batch_size for step in computed)
        return {
            "iterations": len(steps),
            "iteration_time_ms": 1e3 * seconds / len(steps),
            "data_time_ms": 1e3 * sum(step.data_time_s for step in steps) / len(steps),
            "wait_time_ms": 1e3 * sum(step.wait_time_s for step in steps) / len(steps),
            "tokens_per_second": samples * per_second * self._tokens_per_sample,
            "tflops_per_device": flops / 1e12,
            "mfu": flops / self._peak_flops if self._peak_flops else None,
            "peak_memory_bytes": peak_memory_bytes(self._device),
        }


def losses_by_part(kept: Sequence[tuple[Sequence[str], Tensor]]) -> Record:
    """`lm_loss_by_part`: name -> mean loss per token over all steps; without the parts of which no token counted."""
    if not kept:
        return {}
    sums, tokens = torch.stack([losses for _, losses in kept]).sum(0).tolist()
    named = zip(kept[0][0], sums, tokens, strict=True)
    return {"lm_loss_by_part": {name: total / count for name, total, count in named if count}}


def expert_loads(routed: Sequence[ExpertStats]) -> Record:
    """Loads of experts over all steps: `expert_load`, block -> percent of the mean for each of its experts, and
    `load_entropy` of the block whose loads are least even, 1 where all are (entropy over log E)."""
    tables = [stats.expert_load for stats in routed if stats.expert_load is not None]
    if not tables:
        return {}
    shares = torch.stack(tables).sum(0).cpu().double()
    shares = shares / shares.sum(1, keepdim=True).clamp_min(1)
    blocks, number = shares.shape
    entropy = torch.special.entr(shares).sum(1).min().item() / math.log(number)
    every = math.ceil(blocks * number / MOST_LOADS)
    percent = (100 * number * shares).round().int().tolist()
    named = dict(zip(map(str, routed[0].layers), percent, strict=True))
    return {"load_entropy": entropy, "expert_load": dict(list(named.items())[::every])}


def evaluation_record(
    kind: str, iteration: int, *, loss_sum: float, num_tokens: float, num_bytes: int | None = None, **more: Any
) -> Record:
    """One `"valid"` or `"test"` record from a summed loss in nats over `num_tokens` predicted tokens.

    With `num_bytes`, the length of the text that these tokens spell, the record also has `bits_per_byte`: the loss per
    byte of text in bits, which unlike `lm_loss` and `ppl` can be compared across tokenizers.
    """
    loss = loss_sum / num_tokens
    record: Record = {"kind": kind, "iteration": iteration, "lm_loss": loss, "ppl": perplexity(loss)}
    if num_bytes:
        record["bits_per_byte"] = loss_sum / math.log(2) / num_bytes
    return record | {"num_tokens": int(num_tokens)} | more


def perplexity(loss: float) -> float:
    """exp of a loss in nats per token; as in Megatron-LM a loss above 20 counts as 20, so that it stays printable."""
    return math.exp(min(20.0, loss))


def peak_memory_bytes(device: torch.device) -> int:
    """The most memory used so far: allocated on a GPU, resident in the process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _on_host(steps: Sequence[Scalars]) -> list[dict[str, float | None]]:
    """Copies the scalars of all steps to the host with a single wait for the device."""
    found = [value for values in steps for value in values.values() if isinstance(value, Tensor)]
    numbers = iter(torch.stack([value.detach().reshape(()).double() for value in found]).tolist() if found else [])
    return [{n: next(numbers) if isinstance(v, Tensor) else v for n, v in values.items()} for values in steps]


def _mean(numbers: Sequence[float | None]) -> float | None:
    """Of those that there are."""
    found = [number for number in numbers if number is not None]
    return math.fsum(found) / len(found) if found else None
