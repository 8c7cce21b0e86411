"""The proof itself: reference, ranks, checkpoint at another layout, the user's number format, verdict.

reference   one process, fp64                           reference.py
ranks       the layout, all iterations, a checkpoint    watch.py, forked from a warm process
elsewhere   another layout continues from the checkpoint
format      the layout against one process (PipeDream: its stages alone), both in the user's bf16, fp16 or fp32
"""

import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, replace
from io import StringIO
from pathlib import Path
from typing import Any

from megalite.config import Config, dump_yaml
from megalite.proof.branches import FIRST_SCALE
from megalite.proof.elsewhere import elsewhere, plain
from megalite.proof.number_format import CLOSE, Allowed, Trained, apart, losses
from megalite.proof.reference import Reference, record
from megalite.proof.shrink import Small
from megalite.proof.verdict import Difference, first_difference
from megalite.proof.watch import train
from megalite.testing import CaseResult, run_single, try_ranks

Say = Callable[[str], None]
"""What a line of the account is handed to."""

PATIENCE_SECONDS = 1800.0


@dataclass(frozen=True)
class Part:
    """One run of ranks. `difference`: the first one; `died`: what a rank died of, as the harness tells it."""

    name: str
    ranks: int
    worst: dict[str, float]
    difference: Difference | None
    died: str
    seconds: float


def prove(small: Small, steps: int, say: Say, *, keep: str | None = None, rank: Sequence[Any] = (train,)) -> int:
    """Says the certificate, or the first difference; returns 0 or 1. rank: what a rank runs, with more arguments."""
    with tempfile.TemporaryDirectory(prefix="megalite-proof-") as name:
        folder = Path(name)
        try:
            return _certify(small, steps, folder, rank, say)
        finally:
            if keep is not None:
                shutil.copytree(folder, keep, dirs_exist_ok=True)


def _certify(small: Small, steps: int, folder: Path, rank: Sequence[Any], say: Say) -> int:
    for line in small.changes:
        say(f"  {line}")
    began = time.monotonic()
    small = _recorded(small, steps, folder, say)
    parts = []
    for part in _parts(small, steps, folder, rank):
        parts.append(part)
        worst = ", ".join(f"{kind} {value:.1e}" for kind, value in part.worst.items())
        say(f"  {part.name} ({part.ranks} ranks, {part.seconds:.0f} s): {worst}")
        if part.difference is not None or part.died:
            say(f"FAIL  {part.name}: {part.difference or part.died}")
            if part.difference is not None and part.died:
                say(f"      after that: {part.died}")
            return 1
    own = _in_own_format(small, steps, folder)
    if own:
        say(own)
        if own.startswith("FAIL"):
            return 1
    most = max((value for part in parts for value in part.worst.values()), default=0.0)
    say(
        f"PASS  {small.world_size} ranks compute what one process computes: {steps} iterations, largest relative "
        f"difference {most:.2g}, in fp64; {time.monotonic() - began:.0f} s"
    )
    return 0


def _recorded(small: Small, steps: int, folder: Path, say: Say) -> Small:
    """With the bound of the norm at which the one process, whose numbers are in `folder` from now on, clips some
    updates and not others."""
    given, asked = _written(folder, "asked.yaml", small.config), small.branches
    with redirect_stdout(StringIO()):
        bound, clipped, updates = run_single(
            record, given, small.world_size, steps, str(folder), asked, timeout=PATIENCE_SECONDS
        )
    if asked.skipped:
        say(f"  iteration {asked.skipped}: the gradient of its last sample is made not finite: a skipped update")
    if asked.scaled:
        say(f"  the loss has a scale in fp64, too: {FIRST_SCALE:g} at first, twice as large after each update")
    if not bound:
        return small
    say(f"  --clip-grad: {small.config.optimizer.clip_grad:g} -> {bound:g}, which clips {clipped} of {updates} updates")
    own = None if small.own is None else _clipped(small.own, bound)
    return replace(small, config=_clipped(small.config, bound), own=own)


def _clipped(config: Config, bound: float) -> Config:
    return replace(config, optimizer=replace(config.optimizer, clip_grad=bound))


def _parts(small: Small, steps: int, folder: Path, rank: Sequence[Any]) -> Any:
    """The layout, then the checkpoint at another one."""
    save_after = steps // 2
    config = replace(small.config, checkpoint=replace(small.config.checkpoint, save=str(folder / "run")))
    here = _written(folder, "here.yaml", config)
    reference = Reference(folder)
    whole = range(1, steps + 1)
    yield _part("the layout", rank, small.world_size, here, folder / "a", reference, whole, (steps, save_after))
    other, ranks = elsewhere(small)
    newest = sorted((folder / "run").glob("iter_*"))[0]
    moved = replace(other.checkpoint, load=str(newest.parent), ckpt_step=save_after)
    there = _written(folder, "there.yaml", replace(other, checkpoint=moved))
    rest = range(save_after + 1, steps + 1)
    name = f"its checkpoint at {_describe(other, ranks)}"
    yield _part(name, rank, ranks, there, folder / "b", reference, rest, (steps, 0))


def _part(
    name: str, rank: Sequence[Any], ranks: int, config: str, folder: Path, reference: Reference, iterations: range,
    ends: tuple[int, int],
) -> Part:  # fmt: skip
    folder.mkdir()
    began = time.monotonic()
    case = _run(rank[0], ranks, config, str(folder.parent), str(folder), *ends, *rank[1:])
    died = _death(case)
    results = [result for result in case.results if result is not None]
    seen = [seen for _, seen in results] if len(results) == ranks else []
    difference = first_difference(folder, reference, seen, iterations, loaded=iterations.start > 1)
    worst: dict[str, float] = {}
    for found, _ in results:
        worst = {kind: max(found.get(kind, 0.0), worst.get(kind, 0.0)) for kind in [*found, *worst]}
    return Part(name, ranks, worst, difference, died, time.monotonic() - began)


def _death(case: CaseResult) -> str:
    """What the rank that failed first was doing, and why it ended; empty where none did."""
    culprit = case.outcome.culprit
    if culprit is None:
        return ""
    account = case.describe()
    if culprit.error is not None and "modified by an inplace operation" in culprit.error.text:
        account = "its weights were overwritten between the micro-batch's forward and backward\n" + account
    return f"{culprit.phase}, rank {culprit.rank}: {account}"


def _run(body: Callable[..., Any], ranks: int, *args: Any) -> CaseResult:
    """The ranks share the cores, however many they are."""
    with redirect_stdout(StringIO()):
        return try_ranks(body, ranks, *args, timeout=PATIENCE_SECONDS)


def _written(folder: Path, name: str, config: Config) -> str:
    """The path of the configuration's file."""
    config = replace(config, data=replace(config.data, data_cache_path=str(folder / "cache")))
    (folder / name).write_text(dump_yaml(config), encoding="utf-8")
    return str(folder / name)


def _describe(config: Config, ranks: int, *, zero: bool = True) -> str:
    parallel = config.parallel
    sizes = {
        "tp": parallel.tensor_model_parallel_size,
        "pp": parallel.pipeline_model_parallel_size,
        "dp": ranks // parallel.model_parallel_size,
    }
    grid = " x ".join(f"{name}{size}" for name, size in sizes.items() if size > 1) or "one rank"
    return f"{grid}, ZeRO-{parallel.zero_stage}" if zero else grid


def _in_own_format(small: Small, steps: int, folder: Path) -> str:
    """The layout against the plainest one, both in the user's format: a line, or nothing to say. PipeDream at stages
    alone is that already, and its losses are compared with those of the fp64 reference."""
    if small.own is None:
        return ""
    name, reference = small.own.training.precision.name, Reference(folder)
    other, ranks = plain(small, small.own)
    alone = small.by_microbatch and ranks == small.world_size

    def trained(file: str, config: Config, size: int, *seed: int) -> Trained:
        case = _run(losses, size, _written(folder, file, config), steps, *seed)
        if case.outcome.culprit is not None:
            raise _Died(_death(case))
        result: Trained = case.results[0]
        return result

    try:
        found = trained("own.yaml", small.own, small.world_size)
        if alone:
            wide = [step["loss"] for step in reference.steps], [None for _ in reference.steps]
            return apart(name, found, wide, "one process in fp64", Allowed.close(CLOSE["bf16"]))
        expected = trained("plain.yaml", other, ranks)
        allowed = Allowed.of(small.own, expected, lambda seed: trained("plain.yaml", other, ranks, seed))
        return apart(name, found, expected, f"{_describe(other, ranks, zero=False)} in {name}", allowed)
    except _Died as death:
        return f"FAIL  in {name}: {death}"


class _Died(Exception):
    """A rank of a run in the user's format."""
