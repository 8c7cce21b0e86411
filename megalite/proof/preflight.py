"""Preflight: the first steps of a run at full size, every replica on the same samples: all must agree bit for bit.

    forward     output of each stage, micro-batch by micro-batch
    backward    gradient of each parameter before it is reduced
    step        weights after the update
    norm        of the whole gradient

A rank that computes wrong numbers differs from its replicas, and is named with its host (of three replicas or more the
odd one; of two both). Nothing is written: no checkpoint, no metrics.
"""

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megalite.comm import World, all_gather_json
from megalite.config import CheckpointConfig, Config, LoggingConfig, parse
from megalite.data import BatchLoader
from megalite.errors import ConfigError, MegaliteError, RuntimeFailure, rank_name
from megalite.launch import LaunchEnvironment, launch, log_to_stdout, print_error, read_environment
from megalite.proof.gradient_taps import tap_gradients
from megalite.train import OpenRun, open_run

ORDER = ("forward", "backward", "norm", "step")
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

CUTS = ("tp", "cp", "pp", "etp", "ep")
"""Axes along which ranks hold different parts of the weights, or of a sequence."""


class Seen(NamedTuple):
    """One number of a rank: which iteration, action and thing it belongs to, and its digest."""

    step: int
    action: str
    place: int
    what: str
    digest: tuple[int, ...]


@dataclass(frozen=True)
class Preflight:
    """What every rank runs. say: the first rank hands the account to it, line by line."""

    steps: int
    say: Callable[[str], None]

    def __call__(self, config: Config, world: World) -> int:
        log_to_stdout(logging.WARNING)
        if world.device.type == "cuda":
            torch.use_deterministic_algorithms(True, warn_only=True)
        with open_run(config, world) as run:
            mesh = run.trainer.mesh
            sparse = config.model.experts.num_experts is not None
            replicas = max(config.parallel.workers, default=mesh.size("dp"))
            if replicas < 2 or (sparse and mesh.size("edp") < 2 and not mesh.takes_turns):
                raise ConfigError("--preflight: compares replicas, and this layout has one; give it more ranks")
            # Every replica reads the same samples; where they take turns, all of a round get those of its first.
            reader, together = run.trainer.batch_reader, run.state.model.placement.round
            assert isinstance(reader.loader, BatchLoader)
            reader.loader.dp_rank, get = 0, reader.get
            reader.get = lambda microbatch: get(microbatch // together * together)  # type: ignore[method-assign]  # its own
            watch = Digests(run)
            numbers = {}
            for _ in range(self.steps):
                stats = run.trainer.train_step(drain=True)
                watch.after_step(stats.iteration, stats.grad_norm)
                numbers[stats.iteration] = float(stats.lm_loss or 0.0), stats.grad_norm
            account = compare(watch.seen, run, world)
        if account:
            raise RuntimeFailure(account)
        if world.is_first:
            for step, (loss, norm) in numbers.items():
                self.say(f"  iteration {step}: loss {loss:.6f}" + (f", gradient norm {norm:.6f}" if norm else ""))
            self.say(f"PASS  {world.size} ranks, {replicas} replicas: {self.steps} iterations agree bit for bit")
        return 0


def run_preflight(argv: list[str], steps: int, say: Callable[[str], None]) -> int:
    """Starts the ranks as pretrain_gpt.py would, or is one of them; the exit status."""
    place = LaunchEnvironment()
    try:
        place = read_environment()
        config = parse(argv, world_size=place.size if place.launcher else None)
    except MegaliteError as error:
        if place.rank == 0:
            print_error(error)
        return error.exit_code
    training = replace(config.training, eval_iters=0, iterations_to_skip=(), skip_train=False)
    loads = replace(CheckpointConfig(), **{n: getattr(config.checkpoint, n) for n in ("load", "ckpt_step", "finetune")})
    quiet = replace(config, training=training, checkpoint=loads, logging=LoggingConfig())
    return launch(quiet, Preflight(steps, say), place)


class Digests:
    """Digests of what this rank computes, in the order in which it does."""

    def __init__(self, run: OpenRun) -> None:
        self.seen: list[Seen] = []
        self._run = run
        self._counts: Counter[tuple[str, int]] = Counter()
        for (number, _), stage in run.trainer.executor.stages.items():
            for module in stage.modules:
                module.register_forward_hook(lambda _, __, out, number=number: self._forward(number, out))
        for families in run.state.model.buffers.values():
            for family in families:
                tap_gradients(family, self._gradients)

    @property
    def _step(self) -> int:
        return self._run.trainer.iteration + 1

    def _forward(self, stage: int, out: Tensor) -> None:
        place = self._counts["forward", stage]
        self._counts["forward", stage] += 1
        self.seen.append(Seen(self._step, "forward", stage, f"stage {stage}, its micro-batch {place}", digest(out)))

    def _gradients(self, bucket: Any) -> None:
        for name, values in parts(bucket.plan, bucket.gradient.full):
            self.seen.append(Seen(self._step, "backward", 0, f"the gradient of {name}", digest(values)))

    def after_step(self, step: int, norm: Tensor | float | None) -> None:
        """The norm, and the weights that the step has made."""
        if norm is not None:
            self.seen.append(Seen(step, "norm", 0, "the gradient norm", digest(torch.tensor(float(norm)).double())))
        version = self._run.trainer.updater.newest_version()
        for families in self._run.state.model.buffers.values():
            for family in families:
                family.weights.wait()
                for bucket in family.buckets:
                    weights = bucket.weights_of(version)
                    if family.options.stage < 3:
                        for name, values in parts(bucket.plan, weights.full):
                            self.seen.append(Seen(step, "step", 0, name, digest(values)))


def parts(plan: Any, flat: Tensor) -> Iterator[tuple[str, Tensor]]:
    """(name, values) of every parameter of a bucket."""
    for range_ in plan.ranges:
        yield range_.entry.name, flat[range_.start - plan.start : range_.stop - plan.start]


def digest(x: Tensor) -> tuple[int, ...]:
    """Sums of the bits of all elements, of every second and of every third: one flipped bit changes the first."""
    bits = x.detach().contiguous().view(-1).view(INTEGERS[x.element_size()])
    sums = [bits.sum(dtype=torch.int64), bits[::2].sum(dtype=torch.int64), bits[::3].sum(dtype=torch.int64)]
    return tuple(torch.stack(sums).tolist())


def compare(seen: Sequence[Seen], run: OpenRun, world: World) -> str:
    """What the replicas disagree about first, and which rank it was; empty where they agree. Collective."""
    mesh = run.trainer.mesh
    whole = sum(sum(one.digest) * (i + 1) for i, one in enumerate(seen)) % (1 << 61)
    place = [mesh.coordinate(axis) for axis in CUTS]
    place[CUTS.index("pp")] = run.state.model.placement.stages_of(mesh.coordinate("pp"))[0][0]  # of replicas the same
    everyone = all_gather_json({"place": place, "whole": whole, "host": world.host}, mesh.world)
    groups: dict[tuple[int, ...], list[int]] = {}
    for rank, one in enumerate(everyone):
        groups.setdefault(tuple(one["place"]), []).append(rank)
    if all(len({everyone[rank]["whole"] for rank in ranks}) == 1 for ranks in groups.values()):
        return ""
    detail = [[Seen(*one) for one in ranks] for ranks in all_gather_json([list(one) for one in seen], mesh.world)]
    found = [one for ranks in groups.values() for one in disagreement(ranks, detail)]
    first = min(found, key=lambda one: one[0])
    odd = sorted({rank for key, ranks, _ in found if key == first[0] for rank in ranks})
    named = ", ".join(rank_name(rank, everyone[rank]["host"]) for rank in odd)
    step, action, what = first[2].step, first[2].action, first[2].what
    return f"iteration {step}, {action}, {what}: {named} computed other bits than the replicas of the same samples"


def disagreement(
    ranks: Sequence[int], detail: Sequence[Sequence[Seen]]
) -> Iterator[tuple[tuple[int, int, int], list[int], Seen]]:
    """The first thing that these replicas disagree about: ((iteration, action, place), who, what)."""
    for numbers in zip(*(detail[rank] for rank in ranks), strict=False):
        counts = Counter(tuple(one.digest) for one in numbers)
        if len(counts) == 1:
            continue
        usual, times = counts.most_common(1)[0]
        alone = times > 1
        odd = [rank for rank, one in zip(ranks, numbers, strict=True) if not alone or tuple(one.digest) != usual]
        one = numbers[0]
        yield (one.step, ORDER.index(one.action), one.place), odd, one
        return
