"""A replay on its ranks: the way to the iteration, the iteration itself, the comparison with the run."""

import logging
import math
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

import torch

from megalite import __version__
from megalite.checkpoint import read_manifest
from megalite.comm import Axis, World, all_gather_json
from megalite.config import Config, LoggingConfig
from megalite.data import survey_differences
from megalite.errors import CheckpointError, DataError, MegaliteError
from megalite.launch import LaunchEnvironment, launch, log_to_stdout, print_error, read_environment
from megalite.observe import StepStats
from megalite.planner import describe_layout
from megalite.proof.documents import ONE_TOKEN, DocumentLoss, TokenLosses, outstanding
from megalite.proof.history import Past
from megalite.proof.numbers import (
    CLOSE,
    Apart,
    Numbers,
    compared,
    is_whole,
    not_logged,
    numbers_apart,
    other_tensors,
    unlike,
)
from megalite.proof.preflight import Digests, Seen
from megalite.proof.replay_config import again
from megalite.train import MODES, OpenRun, open_run

BESIDE, AFTER = 7, 3
"""Iterations before it whose documents are read beside those of the one that is looked at; where there are fewer than
AFTER, some behind it."""
MOST_THREADS = 1024
"""More than any processor has: a start line that says so was not written by a run."""
NUMBERS, ROUNDING = 1, 3
"""Exit statuses: what the run did not compute, and what rounding may have made of it."""


@dataclass(frozen=True)
class Pass:
    """What one pass has found: loss and norm by iteration, digests and documents of the one that is looked at, those
    of the iterations beside it, and the tensors that are not those of the run's own checkpoint, if it has one there.
    otherwise: what is not as in the run and may round otherwise; where it is empty, every digit is the run's.
    """

    numbers: dict[int, Numbers]
    seen: list[Seen]
    documents: list[DocumentLoss]
    beside: dict[int, list[DocumentLoss]]
    tensors: list[str]
    ranks: Axis
    otherwise: list[str]


@dataclass(frozen=True)
class Replay:
    """What every rank runs. verdict: the file that the first rank writes the verdict to, with the exit status that goes
    with it before it; say: the first rank hands the account to it."""

    past: Past
    documents: int
    passes: int
    verdict: Path
    say: Callable[[str], None]

    def __call__(self, config: Config, world: World) -> int:
        log_to_stdout(logging.WARNING)
        config = replace(config, logging=LoggingConfig())
        if world.device.type == "cuda":
            torch.use_deterministic_algorithms(True, warn_only=True)
        config, past = self._as_it_computed(config, world), self.past
        found = [self._pass(config, world, reads=number == 0) for number in range(self.passes)]
        trouble = self._hardware(found)
        close = CLOSE[config.training.precision.name]
        apart = numbers_apart(found[0].numbers, past.lines, close, otherwise=bool(found[0].otherwise))
        if apart is not None:
            apart = replace(apart, earlier=past.replaced_values(apart.iteration, apart.name))
        if trouble is None and apart is not None and not apart.by_rounding:
            trouble = f"numbers: {apart}"
        if trouble is None and found[0].tensors:
            trouble = f"numbers: {found[0].tensors[0]} is not what the run's checkpoint of iteration {past.end} holds"
        if world.is_first:
            self.say("\n".join(self._account(found[0], config, world)))
            status = NUMBERS if trouble is not None else ROUNDING if apart is not None else 0
            text = f"{status} {trouble or self._verdict(found[0], apart)}"
            self.verdict.write_text(text, encoding="utf-8", errors="backslashreplace")
        return 0

    def _as_it_computed(self, config: Config, world: World) -> Config:
        """Threads and products of fp32 as the run had them, on whatever machine it was."""
        facts = self.past.legs[0].start if self.past.legs else {}
        threads = facts.get("threads")
        if isinstance(threads, list):
            threads = threads[world.rank] if len(threads) == world.size else None
        if world.device.type == "cpu" and type(threads) is int and 1 <= threads <= MOST_THREADS:
            torch.set_num_threads(threads)
        mode = facts.get("float32_matmul_precision")
        if facts.get("device") == world.device.type and mode in MODES:
            auto = config.training.float32_matmul_precision == "auto"
            mode = mode if auto else config.training.float32_matmul_precision
            return replace(config, training=replace(config.training, float32_matmul_precision=mode))
        return config

    def _pass(self, config: Config, world: World, *, reads: bool = True) -> Pass:
        """reads: the documents too."""
        past = self.past
        numbers: dict[int, Numbers] = {}
        seen: list[Seen] = []
        beside: dict[int, list[DocumentLoss]] = {}
        with open_run(config, world) as run:
            trainer, losses = run.trainer, None
            self._check_start(run)
            while trainer.iteration < past.end:
                number = trainer.iteration + 1
                watch = Digests(run) if number == past.iteration else None
                if reads and losses is None and number >= past.iteration - BESIDE:
                    losses = TokenLosses(run)
                # a pipeline that never drains must not begin the batch before it is watched
                stats = trainer.train_step(drain=number in (past.end, past.iteration - 1, past.iteration))
                numbers[number] = numbers_of(stats)
                if losses is not None:
                    beside[number] = losses.take()
                if watch is not None:
                    watch.after_step(number, numbers[number].norm)
                    seen = list(watch.seen)
            here = {"megalite_version": __version__, "torch_version": torch.__version__, **run.arithmetic}
            otherwise = [f"another {name}" for name in past.otherwise]
            otherwise += unlike(config, [leg.start for leg in past.legs], {"device": world.device.type, **here})
            # of a gradient that is nearly 0 an optimizer can make a whole step, and of its rounding another one
            told = not otherwise or config.training.precision.name == "fp64"
            close = CLOSE[config.training.precision.name] if otherwise else 0.0
            tensors = other_tensors(run, past.run, past.end, close) if told else []
            healthy = all(one.loss is None or math.isfinite(one.loss) for one in numbers.values())
            while losses is not None and healthy and len(beside) <= AFTER and trainer.iteration < trainer.train_iters:
                trainer.train_step(drain=True)  # few iterations were on the way: those behind it tell as well
                beside[trainer.iteration] = losses.take()
        return Pass(numbers, seen, beside.pop(past.iteration, []), beside, tensors, trainer.mesh.world, otherwise)

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
        lines.append(f"{'':>9}  {'replayed':<22}   in metrics.jsonl")
        lines.append(
            f"{'iteration':>9}" + 2 * f"  {'lm_loss':>10}  {'grad_norm':>10}" + f"   (<: iteration {past.iteration})"
        )
        for iteration, (loss, norm, *_) in list(one.numbers.items())[-8:]:
            record = by_iteration.get(iteration)
            theirs = " " * 22 if record is None else f"{shown(record['lm_loss'])}  {shown(record['grad_norm'])}"
            mark = " <" if iteration == past.iteration else ""
            if record is not None and (count := record.get("iterations", 1)) > 1:
                mark += f"   (lm_loss: the mean of {count} iterations)"
            lines.append(f"{iteration:>9}  {shown(loss)}  {shown(norm)}  {theirs}{mark}")
        middle = median(document.loss for document in one.documents) if one.documents else math.nan
        documents = "1 document" if len(one.documents) == 1 else f"{len(one.documents)} documents"
        lines.append(f"{documents}, median loss {middle:.4f}; the dearest:")
        lines += [
            f"  {document.loss:8.4f}  {document.tokens:>6} tokens  {document}  {document.text!r}"
            for document in one.documents[: self.documents]
        ]
        return lines

    def _verdict(self, one: Pass, apart: Apart | None) -> str:
        dear = outstanding(one.documents, one.beside)
        same = self._sameness(one)
        if apart is not None:
            same = (
                f"{apart}: apart by {apart.by:.1g} from there on, which the rounding of {' and '.join(one.otherwise)} "
                "can do; replay as the run was laid out to tell"
            )
        twice = ", a second pass computed the same bits" if self.passes > 1 else ""
        if not dear:
            return f"{'rounding: ' if apart is not None else ''}{same}{twice}; no document stands out"
        by_source: dict[str, list[str]] = {}
        for document in dear[: self.documents]:
            over = f" (one token for {100 * document.same:.0f} % of it)" if document.same >= ONE_TOKEN else ""
            by_source.setdefault(document.source, []).append(f"{document.document}{over}")
        names = " and ".join(f"{', '.join(numbers)} of {source}" for source, numbers in by_source.items())
        count = "document" if len(dear) == 1 else "documents"
        return f"data: {count} {names} {'stands' if len(dear) == 1 else 'stand'} out; {same}{twice}"

    def _sameness(self, one: Pass) -> str:
        """What was compared, and how strictly."""
        past = self.past
        here = [record for record in past.lines if record["iteration"] in one.numbers]
        said = "the numbers are the run's in every digit"
        if one.otherwise:
            said = f"the numbers are the run's as far as the rounding of {' and '.join(one.otherwise)} lets one tell"
        if not any(True for record in here for _ in compared(one.numbers, record)):
            said = "metrics.jsonl has no number to compare with"
        partly = [record["iteration"] for record in here if not is_whole(one.numbers, record)]
        if partly:
            said += f"; the mean loss of line {partly[0]} is also of iterations that were not computed here"
        for first, last in not_logged(past.begin, here, [leg.begin for leg in past.legs]):
            said += f"; metrics.jsonl lacks the line of iterations {first} to {last}"
        return said


def run_replay(
    run: str, iteration: int, flags: list[str], say: Callable[[str], None], *, documents: int, passes: int
) -> int:
    """Starts the ranks as pretrain_gpt.py would, or is one of them, and says the verdict; the exit status.

    flags: of the training, in place of what the run had; documents: how many are shown.
    """
    place = LaunchEnvironment()
    try:
        place = read_environment()
        config, past = again(run, iteration, flags, place)
    except MegaliteError as error:
        if place.rank == 0:
            print_error(error)
        return error.exit_code
    with tempfile.TemporaryDirectory(prefix="megalite-replay-") as folder:
        verdict = Path(folder) / "verdict"
        status = launch(config, Replay(past, documents, passes, verdict, say), place)
        if status == 0 and verdict.is_file():
            code, _, text = verdict.read_text(encoding="utf-8").partition(" ")
            say(f"verdict: {text}")
            return int(code)
    return status


def numbers_of(stats: StepStats) -> Numbers:
    """What a step tells, read from the device."""
    norm = None if stats.grad_norm is None else float(stats.grad_norm)
    loss = None if stats.lm_loss is None else float(stats.lm_loss)
    told = {
        "learning_rate": stats.learning_rate,
        "loss_scale": float(stats.loss_scale),
        "consumed_samples": stats.consumed_samples,
        "global_batch_size": stats.global_batch_size,
    }
    return Numbers(loss, norm, loss is not None and not bool(stats.skipped), told)


def shown(number: float | None) -> str:
    return f"{'-':>10}" if number is None else f"{number:10.5f}"
