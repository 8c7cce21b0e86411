"""The rules of a run directory (`--save`): from where a run starts, what is refused, when it is complete.

    --load DIR                 the newest committed checkpoint of DIR; none is an error ...
    --load DIR, --save DIR     ... unless DIR is --save itself (the requeue idiom): then a fresh start
    --load MODEL               a Hugging Face directory: its weights alone; never also --save
    --auto-resume              the newest whole checkpoint of --save, if there is any; else as without the flag
    neither                    a fresh start; refused where --save holds checkpoints

The decision looks at the disk, so rank 0 takes it for all (`Checkpointer.decide_start`).
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from megalite.checkpoint.discovery import (
    TRACKER,
    committed,
    interrupted,
    is_huggingface,
    resolve_checkpoint,
    step_of,
    uncommitted,
)
from megalite.errors import CheckpointError

COMPLETED = "COMPLETED"


@dataclass(frozen=True)
class StartDecision:
    """What a run begins with.

    candidates: checkpoints to load, best first; empty: a fresh start.
    reason: one line for the log.
    passed_over: what has the name of a newer checkpoint and is none.
    """

    candidates: tuple[Path, ...]
    reason: str
    passed_over: tuple[Path, ...] = ()


def decide_start(
    *, save: str | None, load: str | None, auto_resume: bool = False, ckpt_step: int | None = None
) -> StartDecision:
    """Applies the rules above. Raises CheckpointError, one line."""
    start = _decide(save=save, load=load, auto_resume=auto_resume, ckpt_step=ckpt_step)
    newest = start.candidates[0] if start.candidates else None
    home = newest.parent if newest is not None and not is_huggingface(newest) else None
    if save is not None and (home is None or not _same(save, str(home))) and uncommitted(save):
        raise CheckpointError(
            f"--save={save}: {uncommitted(save)[-1].name} is in the way and is not a checkpoint (no COMMITTED file: "
            "damaged, or written by another program); move it away, or choose a new directory"
        )
    if home is None or newest is None or ckpt_step is not None or _same(str(load), str(newest)):
        return start
    return replace(start, passed_over=tuple(p for p in uncommitted(home) if step_of(p) > step_of(newest)))


def _decide(*, save: str | None, load: str | None, auto_resume: bool, ckpt_step: int | None) -> StartDecision:
    held = committed(save) if save is not None else []
    if auto_resume and held:
        if ckpt_step is not None:
            chosen = resolve_checkpoint(str(save), ckpt_step)
            return StartDecision((chosen,), f"--auto-resume: step {ckpt_step} of {save}")
        reason = f"--auto-resume: {held[-1].name} is the newest checkpoint of {save}"
        return StartDecision(tuple(reversed(held)), reason)
    if load is None:
        if ckpt_step is not None:
            raise CheckpointError(f"--ckpt-step={ckpt_step}: of which run? add --load DIR")
        if held:
            raise CheckpointError(
                f"--save={save}: holds checkpoints already (newest {held[-1].name}); "
                f"add --auto-resume or --load {save} to continue with them, or choose a new directory"
            )
        return StartDecision((), f"--auto-resume: {save} is empty: a fresh start" if auto_resume else "a fresh start")
    foreign_model = is_huggingface(load)
    if foreign_model and ckpt_step is not None:
        raise CheckpointError(f"--ckpt-step={ckpt_step}: {load} is a Hugging Face model and has no steps; drop it")
    if save is not None and _same(save, load):
        if foreign_model:
            raise CheckpointError(f"--save={save}: is the Hugging Face model of --load; choose a new directory")
        if not held and ckpt_step is None and not uncommitted(load):
            torn = f" but {interrupted(load)[-1].name}, interrupted" if interrupted(load) else ""
            reason = f"--load={load}: no committed checkpoint yet{torn}; it is also --save: a fresh start"
            return StartDecision((), reason)
    elif held and not _same(str(save), str(Path(load).parent)):  # one checkpoint of --save is that run, too
        raise CheckpointError(
            f"--save={save}: holds another run (newest {held[-1].name}); choose a new directory, or --load {save}"
        )
    if foreign_model:
        reason = f"--load={load}: the weights of a Hugging Face model; a run of its own begins"
        return StartDecision((Path(load),), reason)
    path = resolve_checkpoint(load, ckpt_step)
    return StartDecision((path,), f"--load={load}: {path.name}")


def _same(first: str, second: str) -> bool:
    return Path(first).resolve() == Path(second).resolve()


def set_aside_newer(save: Path | str, step: int) -> list[Path]:
    """Renames what is named as a checkpoint newer than `step`, whole or damaged: a run from `step` on will reach it.

    Nothing is deleted; the new names are not taken for checkpoints. Returns the new paths.
    """
    moved = []
    for paths, why in ((committed(save), "aside"), (uncommitted(save), "damaged")):
        for path in paths:
            if step_of(path) > step:
                aside = path.with_name(f"{path.name}.{why}-{uuid.uuid4().hex[:8]}")
                os.rename(path, aside)
                moved.append(aside)
    return moved


def in_the_way(save: Path | str, files: Sequence[str]) -> str | None:
    """What is in the way of the files that a run will write into its directory; None if nothing is."""
    for name in (*files, COMPLETED, TRACKER):
        path = Path(save) / name
        if path.is_dir() and not path.is_symlink():
            return f"--save={save}: {name} is a directory, and a run writes a file of that name; move it away"
        if path.is_symlink():
            return f"--save={save}: {name} is a link, and a run would write where it leads; move it away"
        if path.exists() and not path.is_file():
            return f"--save={save}: {name} is a pipe or a device, and a run writes a file of that name; move it away"
    return None


def mark_completed(save: Path | str, step: int) -> None:
    """Writes COMPLETED: training has done all it was asked for (a requeue loop may stop)."""
    (Path(save) / COMPLETED).write_text(f"{step}\n")


def clear_completed(save: Path | str) -> None:
    """Removes COMPLETED: training continues."""
    (Path(save) / COMPLETED).unlink(missing_ok=True)
