"""The ranks' side of tools/replay.py: the way to the iteration, the iteration itself, the comparison with the run."""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from megalite.checkpoint import committed, step_of
from megalite.comm import Axis, World, all_gather_json
from megalite.config import Config, LoggingConfig
from megalite.observe import METRICS_FILE, Record, read_metrics
from megalite.planner import describe_layout
from megalite.train import OpenRun, open_run
from preflight import Digests, Seen
from replay_documents import DocumentLoss, TokenLosses, middle_of, outstanding

CLOSE = {"fp64": 1e-9, "fp32": 1e-4, "bf16": 2e-2, "fp16": 1e-2}
"""How far numbers may be from the run's, relative: another layout rounds at other places."""

Numbers = tuple[float, float | None]


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
    """What every rank runs. begin: iterations of the checkpoint that it continues from. verdict: the file that the
    first rank writes the verdict to, with the exit status that goes with it before it."""

    run: Path
    iteration: int
    begin: int
    documents: int
    passes: int
    verdict: Path

    def __call__(self, config: Config, world: World) -> int:
        logging.basicConfig(level=logging.WARNING, format=" %(message)s", stream=sys.stdout, force=True)
        config = replace(config, logging=LoggingConfig())
        if world.device.type == "cuda":
            torch.use_deterministic_algorithms(True, warn_only=True)
        logged = read_log(self.run)
        end = next((one["iteration"] for one in logged if one["iteration"] >= self.iteration), self.iteration)
        found = [self._pass(config, world, end) for _ in range(self.passes)]
        trouble = self._hardware(found)
        if trouble is None:
            trouble = numbers_apart(found[0].numbers, logged, self.begin, CLOSE[config.training.precision.name])
        if trouble is None and found[0].tensors:
            trouble = f"numbers: {found[0].tensors[0]} is not what the run's checkpoint of iteration {end} holds"
        if world.is_first:
            print("\n".join(self._account(found[0], config, world, logged)), flush=True)
            self.verdict.write_text(f"1 {trouble}" if trouble is not None else f"0 {self._verdict(found[0], logged)}")
        return 0

    def _pass(self, config: Config, world: World, end: int) -> Pass:
        numbers: dict[int, Numbers] = {}
        seen: list[Seen] = []
        documents: list[DocumentLoss] = []
        with open_run(config, world) as run:
            trainer = run.trainer
            while trainer.iteration < end:
                looked_at = trainer.iteration + 1 == self.iteration
                watch, losses = (Digests(run), TokenLosses(run)) if looked_at else (None, None)
                # a pipeline that never drains must not begin the batch before it is watched
                stats = trainer.train_step(drain=trainer.iteration + 1 in (end, self.iteration - 1, self.iteration))
                norm = None if stats.grad_norm is None else float(stats.grad_norm)
                if stats.lm_loss is not None:
                    numbers[stats.iteration] = float(stats.lm_loss), norm
                if watch is not None and losses is not None:
                    watch.after_step(stats.iteration, norm)
                    seen, documents = list(watch.seen), losses.gather()
            tensors = other_tensors(run, self.run, end, CLOSE[config.training.precision.name])
        return Pass(numbers, seen, documents, tensors, trainer.mesh.world)

    def _hardware(self, found: Sequence[Pass]) -> str | None:
        """The first thing that a rank computed otherwise the second time. Collective."""
        if len(found) < 2:
            return None
        first, second = found[0].numbers, found[1].numbers
        early = next((i for i in first if i < self.iteration and first[i] != second[i]), None)
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

    def _account(self, one: Pass, config: Config, world: World, logged: Sequence[Record]) -> list[str]:
        lines = [f"iteration {self.iteration} of {self.run} again, from iteration {self.begin}, on "
                 f"{describe_layout(config, world.size)}"]  # fmt: skip
        by_iteration = {record["iteration"]: record for record in logged}
        lines.append(f"{'iteration':>9}  {'lm_loss':>10}  {'grad_norm':>10}   metrics.jsonl")
        for iteration, (loss, norm) in list(one.numbers.items())[-8:]:
            record = by_iteration.get(iteration)
            theirs = "" if record is None else f"{shown(record['lm_loss'])}  {shown(record['grad_norm'])}"
            mark = " <" if iteration == self.iteration else ""
            lines.append(f"{iteration:>9}  {shown(loss)}  {shown(norm)}   {theirs}{mark}")
        middle = middle_of(one.documents)
        documents = "1 document" if len(one.documents) == 1 else f"{len(one.documents)} documents"
        lines.append(f"{documents}, median loss {middle:.4f}; the dearest:")
        lines += [
            f"  {document.loss:8.4f}  {document.tokens:>6} tokens  {document}  {document.text!r}"
            for document in one.documents[: self.documents]
        ]
        return lines

    def _verdict(self, one: Pass, logged: Sequence[Record]) -> str:
        dear = outstanding(one.documents)
        same = "the numbers are the run's" if logged else "metrics.jsonl has no line to compare with"
        twice = ", a second pass computed the same bits" if self.passes > 1 else ""
        if not dear:
            return f"{same}{twice}; no document stands out"
        by_source: dict[str, list[str]] = {}
        for document in dear[: self.documents]:
            by_source.setdefault(document.source, []).append(str(document.document))
        names = " and ".join(f"{', '.join(numbers)} of {source}" for source, numbers in by_source.items())
        count = "document" if len(dear) == 1 else "documents"
        return f"data: {count} {names} {'stands' if len(dear) == 1 else 'stand'} out; {same}{twice}"


def shown(number: float | None) -> str:
    return f"{'-':>10}" if number is None else f"{number:10.5f}"


def read_log(run: Path) -> list[Record]:
    """The training lines of the run's metrics, by iteration; empty where it has none."""
    path = run / METRICS_FILE
    records = read_metrics(path) if path.is_file() else []
    return sorted((one for one in records if one.get("kind") == "train"), key=lambda one: one["iteration"])


def numbers_apart(numbers: Mapping[int, Numbers], logged: Sequence[Record], begin: int, close: float) -> str | None:
    """The first metric that is not the run's. A line holds the mean loss since the one before."""
    last = 0
    for record in logged:
        iteration = record["iteration"]
        if iteration <= begin:
            last = iteration
            continue
        losses = [numbers[i][0] for i in range(last + 1, iteration + 1) if i in numbers]
        whole = len(losses) == iteration - last
        last = iteration
        if iteration not in numbers:
            break
        mean = sum(losses) / len(losses) if whole and losses else None
        for name, mine in (("lm_loss", mean), ("grad_norm", numbers[iteration][1])):
            theirs = record.get(name)
            if mine is None or theirs is None:
                continue
            if not abs(mine - theirs) <= close * max(1.0, abs(theirs)):
                return f"numbers: {name} of iteration {iteration} is {mine:.7g}, metrics.jsonl has {theirs:.7g}"
    return None


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
