"""The ranks' side of tools/replay.py: the way to the iteration, the iteration itself, the comparison with the run."""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import torch

from megalite.checkpoint import committed, read_manifest, step_of
from megalite.comm import Axis, World, all_gather_json
from megalite.config import Config, LoggingConfig
from megalite.data import survey_differences
from megalite.errors import CheckpointError, DataError
from megalite.observe import Record
from megalite.planner import describe_layout
from megalite.train import OpenRun, open_run
from preflight import Digests, Seen
from replay_documents import DocumentLoss, TokenLosses, middle_of, outstanding
from replay_history import Past

CLOSE = {"fp64": 1e-9, "fp32": 1e-4, "bf16": 2e-2, "fp16": 1e-2}
"""How far numbers may be from the run's, relative: another layout rounds at other places."""
AN_ITERATION, A_LINE = 100.0, 1000.0
"""How many times as far apart another layout's rounding may bring numbers in an iteration, and between two lines."""
NUMBERS, ROUNDING = 1, 3
"""Exit statuses: what the run did not compute, and what rounding may have made of it."""


class Numbers(NamedTuple):
    """Of one iteration. loss: None where nothing was computed. counts: whether an update was made, or else means leave
    it out."""

    loss: float | None
    norm: float | None
    counts: bool = True


@dataclass(frozen=True)
class Pass:
    """What one pass has found: loss and norm by iteration, digests and documents of the one that is looked at, and the
    tensors that are not those of the run's own checkpoint, if it has one there."""

    numbers: dict[int, Numbers]
    seen: list[Seen]
    documents: list[DocumentLoss]
    tensors: list[str]
    ranks: Axis


@dataclass(frozen=True)
class Replay:
    """What every rank runs. verdict: the file that the first rank writes the verdict to, with the exit status that goes
    with it before it."""

    past: Past
    documents: int
    passes: int
    verdict: Path

    def __call__(self, config: Config, world: World) -> int:
        logging.basicConfig(level=logging.WARNING, format=" %(message)s", stream=sys.stdout, force=True)
        config = replace(config, logging=LoggingConfig())
        if world.device.type == "cuda":
            torch.use_deterministic_algorithms(True, warn_only=True)
        past = self.past
        found = [self._pass(config, world) for _ in range(self.passes)]
        trouble = self._hardware(found)
        close = CLOSE[config.training.precision.name]
        apart = numbers_apart(found[0].numbers, past.lines, close, otherwise=bool(past.otherwise))
        if trouble is None and apart is not None and not apart.by_rounding:
            trouble = f"numbers: {apart}"
        if trouble is None and found[0].tensors:
            trouble = f"numbers: {found[0].tensors[0]} is not what the run's checkpoint of iteration {past.end} holds"
        if world.is_first:
            print("\n".join(self._account(found[0], config, world)), flush=True)
            status = NUMBERS if trouble is not None else ROUNDING if apart is not None else 0
            self.verdict.write_text(f"{status} {trouble or self._verdict(found[0], apart)}")
        return 0

    def _pass(self, config: Config, world: World) -> Pass:
        past = self.past
        numbers: dict[int, Numbers] = {}
        seen: list[Seen] = []
        documents: list[DocumentLoss] = []
        with open_run(config, world) as run:
            trainer = run.trainer
            self._check_start(run)
            while trainer.iteration < past.end:
                looked_at = trainer.iteration + 1 == past.iteration
                watch, losses = (Digests(run), TokenLosses(run)) if looked_at else (None, None)
                # a pipeline that never drains must not begin the batch before it is watched
                stats = trainer.train_step(
                    drain=trainer.iteration + 1 in (past.end, past.iteration - 1, past.iteration)
                )
                norm = None if stats.grad_norm is None else float(stats.grad_norm)
                loss = None if stats.lm_loss is None else float(stats.lm_loss)
                numbers[stats.iteration] = Numbers(loss, norm, loss is not None and not bool(stats.skipped))
                if watch is not None and losses is not None:
                    watch.after_step(stats.iteration, norm)
                    seen, documents = list(watch.seen), losses.gather()
            # of a gradient that is nearly 0 an optimizer can make a whole step, and of its rounding another one
            told = not past.otherwise or config.training.precision.name == "fp64"
            tensors = other_tensors(run, past.run, past.end, CLOSE[config.training.precision.name]) if told else []
        return Pass(numbers, seen, documents, tensors, trainer.mesh.world)

    def _check_start(self, run: OpenRun) -> None:
        """Raises DataError where the data are not the run's, CheckpointError where it begins too late."""
        past, begin = self.past, run.trainer.iteration
        if begin >= past.iteration:
            load = run.state.config.checkpoint.load
            raise CheckpointError(f"--iteration={past.iteration}: --load={load} is at iteration {begin} by now")
        if past.witness is None:
            return
        found = survey_differences(read_manifest(past.witness).meta.get("data", {}), run.state.datasets.surveys)
        if found:
            raise DataError(
                f"{'; '.join(found)}: not the data that the run had at iteration {past.iteration}; give it those"
            )

    def _hardware(self, found: Sequence[Pass]) -> str | None:
        """The first thing that a rank computed otherwise the second time. Collective."""
        if len(found) < 2:
            return None
        first, second = found[0].numbers, found[1].numbers
        # as texts: what is not a number is not equal to itself
        early = next((i for i in first if i < self.past.iteration and str(first[i]) != str(second[i])), None)
        if early is not None:
            return f"hardware: a second pass differs: loss or gradient norm of iteration {early}, on the way"
        pairs = zip(found[0].seen, found[1].seen, strict=True)
        mine = next((list(one) for one, other in pairs if one != other), None)
        everyone = all_gather_json(mine, found[0].ranks)
        odd = [(rank, Seen(*one)) for rank, one in enumerate(everyone) if one is not None]
        if not odd:
            return None
        rank, one = odd[0]
        ranks = f"rank {rank}" + (f" (and {len(odd) - 1} more)" if len(odd) > 1 else "")
        return f"hardware: a second pass differs: iteration {one.step}, {one.action}, {one.what}, on {ranks}"

    def _account(self, one: Pass, config: Config, world: World) -> list[str]:
        past, begin = self.past, min(one.numbers) - 1
        lines = [f"iteration {past.iteration} of {past.run} again, from iteration {begin}, on "
                 f"{describe_layout(config, world.size)}"]  # fmt: skip
        by_iteration = {record["iteration"]: record for record in past.lines}
        lines.append(f"{'iteration':>9}  {'lm_loss':>10}  {'grad_norm':>10}   metrics.jsonl")
        for iteration, (loss, norm, _) in list(one.numbers.items())[-8:]:
            record = by_iteration.get(iteration)
            theirs = "" if record is None else f"{shown(record['lm_loss'])}  {shown(record['grad_norm'])}"
            mark = " <" if iteration == past.iteration else ""
            lines.append(f"{iteration:>9}  {shown(loss)}  {shown(norm)}   {theirs}{mark}")
        middle = middle_of(one.documents)
        documents = "1 document" if len(one.documents) == 1 else f"{len(one.documents)} documents"
        lines.append(f"{documents}, median loss {middle:.4f}; the dearest:")
        lines += [
            f"  {document.loss:8.4f}  {document.tokens:>6} tokens  {document}  {document.text!r}"
            for document in one.documents[: self.documents]
        ]
        return lines

    def _verdict(self, one: Pass, apart: Apart | None) -> str:
        dear = outstanding(one.documents)
        same = "the numbers are the run's" if self.past.lines else "metrics.jsonl has no line to compare with"
        if apart is not None:
            same = (
                f"{apart}: apart by {apart.by:.1g} from there on, which the rounding of another "
                f"{' and another '.join(self.past.otherwise)} can do; replay as the run was laid out to tell"
            )
        twice = ", a second pass computed the same bits" if self.passes > 1 else ""
        if not dear:
            return f"{'rounding: ' if apart is not None else ''}{same}{twice}; no document stands out"
        by_source: dict[str, list[str]] = {}
        for document in dear[: self.documents]:
            by_source.setdefault(document.source, []).append(str(document.document))
        names = " and ".join(f"{', '.join(numbers)} of {source}" for source, numbers in by_source.items())
        count = "document" if len(dear) == 1 else "documents"
        return f"data: {count} {names} {'stands' if len(dear) == 1 else 'stand'} out; {same}{twice}"


def shown(number: float | None) -> str:
    return f"{'-':>10}" if number is None else f"{number:10.5f}"


@dataclass(frozen=True)
class Apart:
    """A metric that is not the run's: `by` how much, relative, and whether that can be rounding."""

    name: str
    iteration: int
    mine: float
    theirs: float
    by_rounding: bool

    @property
    def by(self) -> float:
        return abs(self.mine - self.theirs) / max(1.0, abs(self.theirs))

    def __str__(self) -> str:
        return f"{self.name} of iteration {self.iteration} is {self.mine:.9g}, metrics.jsonl has {self.theirs:.9g}"


def numbers_apart(
    numbers: Mapping[int, Numbers], logged: Sequence[Record], close: float, *, otherwise: bool
) -> Apart | None:
    """The first metric that is not the run's; where the layout is not, the first that no rounding explains, else the
    first."""
    found: Apart | None = None
    worst, last = 0.0, min(numbers)
    for record in logged:
        iteration = record["iteration"]
        if iteration not in numbers:
            continue
        bound = drift(iteration - last, worst, close) if otherwise else close
        for name, mine in (("lm_loss", mean_loss(numbers, record)), ("grad_norm", numbers[iteration].norm)):
            theirs = record[name]
            if mine is None or theirs is None:
                continue
            one = Apart(name, iteration, mine, theirs, by_rounding=True)
            if not one.by <= bound:
                return replace(one, by_rounding=False)
            found = found or (one if one.by > close else None)
            worst = max(worst, one.by)
        last = iteration
    return found


def drift(iterations: int, worst: float, close: float) -> float:
    """How far apart rounding can be so many iterations after numbers that were apart by `worst` at most."""
    return (1.0, AN_ITERATION, A_LINE)[min(iterations, 2)] * max(worst, close)


def mean_loss(numbers: Mapping[int, Numbers], record: Record) -> float | None:
    """Of the iterations that a line is the mean of, which a resumed process has begun in the middle of an interval;
    None where some of them were not computed here."""
    last, count = record["iteration"], record.get("iterations")
    if type(count) is not int or not all(i in numbers for i in range(last - count + 1, last + 1)):
        return None
    losses = [one.loss for one in (numbers[last - i] for i in range(count)) if one.counts and one.loss is not None]
    return sum(losses) / len(losses) if losses else None


def other_tensors(run: OpenRun, directory: Path, iteration: int, close: float) -> list[str]:
    """Tensors that are not those of the run's checkpoint of this iteration, by rank; nothing where it has none.
    Collective."""
    paths = [path for path in committed(directory) if step_of(path) == iteration]
    if not paths:
        return []
    own = [shard for shard in run.state.model.optimizer.shards() if "/" not in shard.name]
    theirs = [replace(shard, local=torch.empty_like(shard.local)) for shard in own]
    run.state.checkpointer.load(paths[0], theirs)
    found = [
        a.name
        for a, b in zip(own, theirs, strict=True)
        if a.local.numel() and float((a.local - b.local).abs().max()) > close * max(float(b.local.abs().max()), 1e-3)
    ]
    everyone = all_gather_json(found, run.trainer.mesh.world)
    return [name for rank in everyone for name in rank]
