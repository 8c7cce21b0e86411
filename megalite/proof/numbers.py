"""The comparison of numbers: those that ranks have computed now beside those that the run has logged and saved.

Where nothing is otherwise than in the run, numbers are equal in every digit, tensors in every bit. Where something is
that changes the order of additions, they are as close as rounding can bring them, and `Past.otherwise` says what.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megalite.checkpoint import committed, step_of
from megalite.comm import all_gather_json
from megalite.config import Config
from megalite.observe import Record
from megalite.proof.preflight import INTEGERS
from megalite.train import OpenRun

CLOSE = {"fp64": 1e-9, "fp32": 1e-4, "bf16": 2e-2, "fp16": 1e-2}
"""How far numbers may be from the run's, relative: another layout rounds at other places."""
AN_ITERATION, A_LINE = 100.0, 1000.0
"""How many times as far apart another layout's rounding may bring numbers in an iteration, and between two lines."""
TOLD = ("learning_rate", "loss_scale", "consumed_samples", "global_batch_size")
"""What a line says of its last iteration, and what nothing rounds."""
DECIDES = {
    "megalite_version": "megalite",
    "torch_version": "torch",
    "device": "device",
    "processor": "processor",
    "threads": "number of threads",
    "hosts": "number of hosts",
    "float32_matmul_precision": "mode of fp32 products",
}
"""Key of a start line -> what it is: these decide the last bits beside the configuration."""


class Numbers(NamedTuple):
    """Of one iteration. loss: None where nothing was computed. counts: whether an update was made, or else means leave
    it out. told: what else a line says of it."""

    loss: float | None
    norm: float | None
    counts: bool = True
    told: Mapping[str, float] = MappingProxyType({})


@dataclass(frozen=True)
class Apart:
    """A metric that is not the run's: `by` how much, relative, and whether that can be rounding. None stands for what
    is not there or not finite, as in metrics.jsonl. earlier: what a line says that a later one has replaced."""

    name: str
    iteration: int
    mine: float | None
    theirs: float | None
    by_rounding: bool
    earlier: Sequence[float | None] = field(default=())

    @property
    def by(self) -> float:
        if self.mine is None or self.theirs is None:
            return 0.0 if self.mine is self.theirs else math.inf
        return abs(self.mine - self.theirs) / max(1.0, abs(self.theirs))

    def __str__(self) -> str:
        digits = next((n for n in (9, 12) if _digits(self.mine, n) != _digits(self.theirs, n)), 17)
        text = f"{self.name} of iteration {self.iteration} is {_digits(self.mine, digits)}, "
        text += f"metrics.jsonl has {_digits(self.theirs, digits)}"
        if self.mine in self.earlier:
            text += (
                "; an earlier line of that iteration has this run's: two runs in one file, or a later start gone wrong"
            )
        return text


def _digits(number: float | None, digits: int) -> str:
    return "no finite number" if number is None else f"{number:.{digits}g}"


def numbers_apart(
    numbers: Mapping[int, Numbers], logged: Sequence[Record], close: float, *, otherwise: bool
) -> Apart | None:
    """The first metric that is not the run's in every digit; where something is otherwise, the first that no rounding
    explains, else the first that is not close."""
    found: Apart | None = None
    worst, last = 0.0, min(numbers)
    for record in logged:
        iteration = record["iteration"]
        if iteration not in numbers:
            continue
        bound = drift(iteration - last, worst, close) if otherwise else 0.0
        for name, mine, theirs in compared(numbers, record, exactly=not otherwise):
            one = Apart(name, iteration, mine, theirs, by_rounding=True)
            if not one.by <= bound:
                return replace(one, by_rounding=False)
            found = found or (one if one.by > close else None)
            worst = max(worst, one.by)
        last = iteration
    return found


def compared(
    numbers: Mapping[int, Numbers], record: Record, *, exactly: bool = False
) -> Iterator[tuple[str, float | None, float | None]]:
    """(name, mine, the run's) of what a line says and this replay has computed. exactly: also of what never rounds."""
    last, here = record["iteration"], numbers[record["iteration"]]
    whole = is_whole(numbers, record)
    if whole:
        yield "lm_loss", _finite(mean_loss(numbers, record)), _finite(record["lm_loss"])
    if here.norm is not None or record["grad_norm"] is not None:
        yield "grad_norm", _finite(here.norm if here.counts else None), _finite(record["grad_norm"])
    if not exactly:
        return
    for name in TOLD:
        if here.told is not None and name in record:
            yield name, here.told[name], record[name]
    if whole and "skipped_iterations" in record:
        skipped = sum(not numbers[last - i].counts for i in range(record["iterations"]))
        yield "skipped_iterations", skipped, record["skipped_iterations"]


def _finite(number: float | None) -> float | None:
    """As metrics.jsonl has it."""
    return number if number is not None and math.isfinite(number) else None


def drift(iterations: int, worst: float, close: float) -> float:
    """How far apart rounding can be so many iterations after numbers that were apart by `worst` at most."""
    return (1.0, AN_ITERATION, A_LINE)[min(iterations, 2)] * max(worst, close)


def is_whole(numbers: Mapping[int, Numbers], record: Record) -> bool:
    """Whether all iterations that a line is the mean of, which a resumed process has begun in the middle of an
    interval, were computed here."""
    last, count = record["iteration"], record.get("iterations")
    return type(count) is int and count > 0 and all(i in numbers for i in range(last - count + 1, last + 1))


def mean_loss(numbers: Mapping[int, Numbers], record: Record) -> float | None:
    """Of the iterations of a line, added up as the line was; None where there are none, or not all computed here."""
    if not is_whole(numbers, record):
        return None
    counted = (numbers[record["iteration"] - i] for i in reversed(range(record["iterations"])))
    losses = [one.loss for one in counted if one.counts and one.loss is not None]
    return math.fsum(losses) / len(losses) if losses else None


def not_logged(begin: int, lines: Sequence[Record], starts: Sequence[int]) -> list[tuple[int, int]]:
    """(first, last) iterations after `begin` that no line counts, though the log goes on. starts: where processes
    began; the one before may have been killed between two lines."""
    spans = [(line["iteration"] - line["iterations"], line["iteration"]) for line in lines if _counts(line)]
    ends = [(begin, begin), *spans]
    return [(a[1] + 1, b[0]) for a, b in pairwise(ends) if b[0] > a[1] and not {*starts} & {b[0]}]


def _counts(line: Record) -> bool:
    return type(line.get("iterations")) is int and line["iterations"] > 0


def unlike(config: Config, then: Sequence[Mapping[str, Any]], here: Mapping[str, Any]) -> list[str]:
    """Why the run's digits cannot be asked for, though its flags and its layout are the same.

    then: the start lines of the processes that computed the iterations. here: the same facts of this process.
    """
    found = []
    if config.training.compile:
        found.append("kernels that --compile builds anew")
    if here.get("device") != "cpu" and not config.parallel.hardware.deterministic_mode:
        found.append("kernels without --deterministic-mode")
    no_progress = [what for key, what in DECIDES.items() if not then or any(facts.get(key) is None for facts in then)]
    if no_progress:
        found.append(f"another {' or '.join(no_progress)}, of which metrics.jsonl does not tell,")
    for key, what in DECIDES.items():
        there = [facts[key] for facts in then if facts.get(key) is not None]
        if any(one != here.get(key) for one in there):
            other = next(one for one in there if one != here.get(key))
            found.append(f"another {what} ({_brief(other)}, here {_brief(here.get(key))})")
    return found


def _brief(value: Any) -> str:
    return ", ".join(map(str, value[:4])) if isinstance(value, list) else str(value)


def other_tensors(run: OpenRun, directory: Path, iteration: int, close: float) -> list[str]:
    """Tensors that are not those of the run's checkpoint of this iteration, by rank; nothing where it has none.
    close: 0 asks for every bit, of the optimizer's state too; else weights may be so far apart, of the largest one.
    Collective."""
    paths = [path for path in committed(directory) if step_of(path) == iteration]
    if not paths:
        return []
    own = [shard for shard in run.state.model.optimizer.shards() if not close or "/" not in shard.name]
    theirs = [replace(shard, local=torch.empty_like(shard.local)) for shard in own]
    run.state.checkpointer.load(paths[0], theirs)
    same = same_bits if not close else lambda a, b: is_close(a, b, close)
    found = [a.name for a, b in zip(own, theirs, strict=True) if not same(a.local, b.local)]
    everyone = all_gather_json(found, run.trainer.mesh.world)
    return [name for rank in everyone for name in rank]


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Of two tensors of one shape and dtype: what is not a number is the same as itself."""
    whole = INTEGERS.get(a.element_size())
    return torch.equal(a, b) if whole is None else torch.equal(*(x.contiguous().view(whole) for x in (a, b)))


def is_close(a: Tensor, b: Tensor, close: float) -> bool:
    """Whether no element is further apart than `close` times the largest one."""
    return not a.numel() or not float((a - b).abs().max()) > close * max(float(b.abs().max()), 1e-3)
