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
from dataclasses import dataclass
from pathlib import Path

from megalite.checkpoint.discovery import committed, interrupted, is_huggingface, latest, listing, resolve, step_of
from megalite.errors import CheckpointError

COMPLETED = "COMPLETED"


@dataclass(frozen=True)
class Start:
    """candidates: checkpoints to load, best first; empty: a fresh start. reason: one line for the log."""

    candidates: tuple[Path, ...]
    reason: str


def decide_start(
    *, save: str | None, load: str | None, auto_resume: bool = False, ckpt_step: int | None = None
) -> Start:
    """Applies the rules above. Raises CheckpointError, one line."""
    held = committed(save) if save is not None else []
    if auto_resume and held:
        if ckpt_step is not None:
            return Start((resolve(str(save), ckpt_step),), f"--auto-resume: step {ckpt_step} of {save}")
        return Start(tuple(reversed(held)), f"--auto-resume: {held[-1].name} is the newest checkpoint of {save}")
    if load is None:
        if ckpt_step is not None:
            raise CheckpointError(f"--ckpt-step={ckpt_step}: of which run? add --load DIR")
        if held:
            raise CheckpointError(
                f"--save={save}: holds checkpoints already (newest {held[-1].name}); "
                f"add --auto-resume or --load {save} to go on with them, or choose a new directory"
            )
        return Start((), f"--auto-resume: {save} is empty: a fresh start" if auto_resume else "a fresh start")
    foreign_model = is_huggingface(load)
    if foreign_model and ckpt_step is not None:
        raise CheckpointError(f"--ckpt-step={ckpt_step}: {load} is a Hugging Face model and has no steps; drop it")
    if save is not None and _same(save, load):
        if foreign_model:
            raise CheckpointError(f"--save={save}: is the Hugging Face model of --load; choose a new directory")
        if not held and ckpt_step is None and not _foreign(Path(load)):
            torn = f" but {interrupted(load)[-1].name}, interrupted" if interrupted(load) else ""
            return Start((), f"--load={load}: no committed checkpoint yet{torn}; it is also --save: a fresh start")
    elif held and not _same(str(save), str(Path(load).parent)):  # one checkpoint of --save is that run, too
        raise CheckpointError(
            f"--save={save}: holds another run (newest {held[-1].name}); choose a new directory, or --load {save}"
        )
    if foreign_model:
        return Start((Path(load),), f"--load={load}: the weights of a Hugging Face model; a run of its own begins")
    path = resolve(load, ckpt_step)
    return Start((path,), f"--load={load}: {path.name}")


def _same(first: str, second: str) -> bool:
    return Path(first).resolve() == Path(second).resolve()


def _foreign(root: Path) -> bool:
    """Whether checkpoint names are taken by directories that we did not commit."""
    return any(p.name.startswith("iter_") and ".tmp-" not in p.name for p in listing(root) if p.is_dir())


def set_aside_newer(save: Path | str, step: int) -> list[Path]:
    """Renames checkpoints of `save` newer than `step`, for a run that goes back to `step` and will come by again.

    Nothing is deleted; the new names are not taken for checkpoints. Returns the new paths.
    """
    moved = []
    for path in committed(save):
        if step_of(path) > step:
            aside = path.with_name(f"{path.name}.aside-{uuid.uuid4().hex[:8]}")
            os.rename(path, aside)
            moved.append(aside)
    return moved


def mark_completed(save: Path | str, step: int) -> None:
    """Writes COMPLETED: training has done all it was asked for (a requeue loop may stop)."""
    (Path(save) / COMPLETED).write_text(f"{step}\n")


def clear_completed(save: Path | str) -> None:
    """Removes COMPLETED: training goes on."""
    (Path(save) / COMPLETED).unlink(missing_ok=True)


def is_completed(save: Path | str) -> bool:
    """Whether the run in `save` has done all it was asked for."""
    return (Path(save) / COMPLETED).is_file() and latest(save) is not None
