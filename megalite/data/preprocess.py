"""Many texts to one `.bin/.idx` pair per field, by several processes: what `tools/preprocess_data.py` runs.

The input is cut into units of a few megabytes (`file_chunks.py`); each worker tokenises one unit at a time and sends
back bare ids; this process writes them in the order of the input, so the output does not depend on how many there are.
"""

from __future__ import annotations

import itertools
import logging
import multiprocessing
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from typing import Any, ClassVar, cast

import numpy as np

from megalite.data.cache import digest_of
from megalite.data.file_chunks import REASONS, InputUnit, input_size, input_units, read_unit, unit_digest, utf8_length
from megalite.data.indexed import IndexedWriter
from megalite.data.kept_units import KeptUnits, UnitTokens
from megalite.data.tokenizer import Tokenizer, token_dtype, tokenizer_fingerprint
from megalite.data.written_by import note_tokenizer
from megalite.errors import DataError, RuntimeFailure
from megalite.progress import OnProgress, amount, no_progress

logger = logging.getLogger(__name__)

# A change of how text becomes tokens, beyond what the tokenizer's fingerprint says.
KEPT_VERSION = 1
# Units that may wait for their turn to be written, for each worker.
BACKLOG = 4


@dataclass
class Totals:
    """What was written, `prefixes`, and counts."""

    prefixes: tuple[str, ...]
    size: int  # of the input, in bytes; 0: not known
    done: int = 0  # of these
    text_bytes: int = 0  # of this process, in `seconds` so far
    documents: int = 0
    tokens: int = 0
    skipped: int = 0
    unanswered: int = 0  # conversations of which the loss counts nothing
    lost_calls: int = 0  # conversations whose calls of tools the template leaves out
    reasons: list[str] = field(default_factory=list)  # why the first lines were left out
    roles: set[str] = field(default_factory=set)  # of messages, beside the usual ones
    started: float = field(default_factory=time.monotonic)

    @property
    def seconds(self) -> float:
        return max(time.monotonic() - self.started, 1e-9)

    def counts(self) -> str:
        """`1,234 documents, 3,210,987 tokens`."""
        return f"{self.documents:,} document{'s' * (self.documents != 1)}, {self.tokens:,} tokens"

    def line(self) -> str:
        """`45.6 MB, 8.40 MB/s of text, 1,234 documents, 3,210,987 tokens`."""
        speed = amount(self.text_bytes / self.seconds, "B")
        return f"{amount(self.done, 'B')}, {speed}/s of text, {self.counts()}"


def preprocess(
    inputs: Sequence[str],
    output_prefix: str,
    tokenizer: Tokenizer,
    *,
    json_keys: Sequence[str] = ("text",),
    append_eod: bool = False,
    workers: int = 1,
    skip_bad_lines: bool = False,
    on_progress: OnProgress = no_progress,
) -> Totals:
    """Tokenise `inputs` into `PREFIX_KEY_document.bin/.idx` for every key.

    inputs: text, JSONL (plain, .gz, .zst) or parquet files, folders saved by `datasets`, or `hf:NAME`.
    append_eod: end every document with the end-of-document token.
    workers: processes that tokenise; 1: this one.
    skip_bad_lines: leave out lines that are not a JSON object with all keys, instead of an error.
    Raises DataError where an input is missing or broken, or nothing in it gives a token.
    """
    if append_eod and tokenizer.eod_id is None:
        raise DataError(
            f"`append_eod`: {tokenizer.kind} has no end-of-document token; drop it or use another tokenizer"
        )
    job = UnitJob(tokenizer, tuple(json_keys), append_eod, skip_bad_lines)
    totals = Totals(tuple(f"{output_prefix}_{key}_document" for key in json_keys), input_size(inputs))
    units = (unit for path in inputs for unit in input_units(path, json_keys))
    write_units(job, units, totals, source=" ".join(inputs), workers=workers, on_progress=on_progress)
    for prefix in totals.prefixes:
        note_tokenizer(prefix, tokenizer)
    return totals


def write_units(
    job: UnitJob,
    units: Iterator[InputUnit],
    totals: Totals,
    *,
    source: str = "",
    workers: int = 1,
    on_progress: OnProgress = no_progress,
) -> None:
    """Tokenise units into a pair for each of the job's columns, at `totals.prefixes`, and count them in `totals`.

    Continues after the units that an earlier call with the same arguments, which was killed, has kept.

    source: what `--input` names, if it does: 0 tokens are an error then.
    """
    with ExitStack() as stack:
        kept = stack.enter_context(
            KeptUnits(totals.prefixes, job.settings, skip_bad_lines=job.skip_bad_lines, advises=bool(source))
        )
        writers = [
            stack.enter_context(IndexedWriter(prefix, dtype=dtype, partial=True, marked=job.marked and not i))
            for i, (prefix, dtype) in enumerate(zip(totals.prefixes, job.dtypes, strict=True))
        ]
        for unit, result, written in _results(job, units, workers, kept, writers):
            for writer, ids, lengths in zip(writers, result.ids, result.lengths, strict=True):
                if written:
                    writer.tokens += ids.size
                else:
                    writer.write(ids)
                writer.extend(lengths, goes_on=unit.goes_on)
            if not written:
                kept.add(result, writers)
                totals.text_bytes += result.text_bytes
            totals.done += unit.input_bytes
            totals.skipped += result.skipped
            totals.reasons += result.reasons[: REASONS - len(totals.reasons)]
            totals.roles |= result.roles
            totals.lost_calls += result.lost_calls
            counted = writers[:1] if job.marked else writers
            totals.documents, totals.tokens = writers[0].documents, sum(writer.tokens for writer in counted)
            on_progress(totals.done, totals.size or None, totals.counts())
        for writer in writers:
            if source and not writer.tokens:
                raise DataError(f"`input`={source}: 0 tokens for {writer.prefix}; give a text that is not empty")


def _results(
    job: UnitJob, units: Iterator[InputUnit], workers: int, kept: KeptUnits, writers: Sequence[IndexedWriter]
) -> Iterator[tuple[InputUnit, UnitTokens, bool]]:
    """The units in order, and whether their tokens are in the writers' files already."""
    done = 0
    for unit in units:
        found = kept.find(unit, writers)
        if found is None:
            units = itertools.chain([unit], units)
            break
        yield unit, found, True
        done += unit.input_bytes
    if kept.tokens:
        logger.warning("continues after the first %s, which an earlier run has tokenised", amount(done, "B"))
    fresh = _in_processes(job, units, workers) if workers > 1 else ((unit, job.run(unit)) for unit in units)
    for unit, result in fresh:
        yield unit, result, False


@dataclass(frozen=True)
class UnitJob:
    """Everything that a worker needs to turn a unit into tokens."""

    tokenizer: Tokenizer
    json_keys: tuple[str, ...]
    append_eod: bool
    skip_bad_lines: bool

    marked: ClassVar[bool] = False  # the fields after the first are marks of its tokens

    @property
    def dtypes(self) -> list[np.dtype[np.integer]]:
        """On disk, of each field."""
        return [token_dtype(self.tokenizer.vocab_size)] * len(self.json_keys)

    @property
    def settings(self) -> str:
        """Digest of all that decides how text becomes tokens."""
        return digest_of(
            "preprocess", KEPT_VERSION, tokenizer_fingerprint(self.tokenizer), self.json_keys, self.append_eod
        )

    def run(self, unit: InputUnit) -> UnitTokens:
        texts, skipped, _ = read_unit(unit, self.json_keys, skip_bad_lines=self.skip_bad_lines)
        dtype = token_dtype(self.tokenizer.vocab_size)
        ids, lengths, total = [], [], 0
        for column in texts:
            arrays = [array.astype(dtype, copy=False) for array in self.tokenizer.encode_batch(column)]
            if self.append_eod:
                eod = np.array([self.tokenizer.eod_id], dtype)
                complete = len(arrays) - unit.goes_on
                arrays[:complete] = [np.append(array, eod) if len(array) else array for array in arrays[:complete]]
            ids.append(np.concatenate([np.empty(0, dtype), *arrays]))
            lengths.append(np.array([len(array) for array in arrays], np.int32))
            total += sum(map(utf8_length, column))
        reasons = tuple(skipped[:REASONS])
        return UnitTokens(ids, lengths, total, len(skipped), unit_digest(unit), reasons)


def _in_processes(job: UnitJob, units: Iterator[InputUnit], workers: int) -> Iterator[tuple[InputUnit, UnitTokens]]:
    """Results in the order of the units, from `workers` processes."""
    # A forked worker has the tokenizer already; where there is no fork it is sent over.
    context: Any = multiprocessing.get_context("fork" if "fork" in multiprocessing.get_all_start_methods() else "spawn")
    crew: list[_Worker] = []
    for _ in range(workers):
        crew.append(_Worker(context, job, [worker.pipe for worker in crew]))
    tasks = enumerate(units)
    finished: dict[int, tuple[InputUnit, UnitTokens | DataError]] = {}
    sent = written = 0
    try:
        while True:
            for worker in crew:
                if worker.task is None and sent - written < workers * BACKLOG and (task := next(tasks, None)):
                    worker.send(task)
                    sent += 1
            busy = {worker.pipe: worker for worker in crew if worker.task is not None}
            if not busy:
                return
            for pipe in wait(list(busy)):
                number, unit, answer = busy[cast(Connection, pipe)].receive()
                finished[number] = unit, answer
            while written in finished:
                unit, answer = finished.pop(written)
                if isinstance(answer, DataError):  # in its turn, so that the first broken line is the one that is named
                    raise answer
                yield unit, answer
                written += 1
    finally:
        for worker in crew:
            worker.stop()


class _Worker:
    """One process and the unit that it has, with its number. It never has two: while it sends a long answer it would
    not read the second, and the parent, which sends that, not the answer."""

    def __init__(self, context: Any, job: UnitJob, others: Sequence[Connection]) -> None:
        """others: our ends of the pipes of those that were started before, which a fork copies."""
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_work, args=(theirs, job, [*others, self.pipe]), daemon=True)
        self.process.start()
        theirs.close()
        self.task: tuple[int, InputUnit] | None = None

    def send(self, task: tuple[int, InputUnit]) -> None:
        self.task = task
        try:
            self.pipe.send(task[1])
        except OSError:
            raise self._ended(task[1]) from None

    def receive(self) -> tuple[int, InputUnit, UnitTokens | DataError]:
        assert self.task is not None
        (number, unit), self.task = self.task, None
        try:
            answer: UnitTokens | str = self.pipe.recv()
        except (EOFError, OSError):
            raise self._ended(unit) from None
        return number, unit, DataError(answer) if isinstance(answer, str) else answer

    def _ended(self, unit: InputUnit) -> RuntimeFailure:
        self.process.join(5)
        return RuntimeFailure(
            f"`workers`: a worker ended (exit status {self.process.exitcode}) at {unit.place}; "
            "out of memory? use fewer workers"
        )

    def stop(self) -> None:
        self.pipe.close()
        self.process.join(0.2)
        if self.process.is_alive():
            self.process.terminate()
            self.process.join()


def _work(pipe: Connection, job: UnitJob, theirs: Sequence[Connection]) -> None:
    """Body of a worker process: units in, tokens out, or what is wrong, until the pipe is closed.

    theirs: the parent's ends, closed here: while a worker held one, none would see that a killed parent is gone.
    """
    for end in theirs:
        end.close()
    try:
        while True:
            unit = pipe.recv()
            try:
                pipe.send(job.run(unit))
            except DataError as error:
                pipe.send(str(error))
    except (EOFError, OSError, KeyboardInterrupt):
        return
