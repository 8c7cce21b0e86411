"""From where a run starts.

    --load DIR                 the newest committed checkpoint of DIR; none is an error ...
    --load DIR, --save DIR     ... unless DIR is --save itself (the requeue idiom): then a fresh start
    --load MODEL               a Hugging Face directory: its weights alone; never also --save
    --load DIR --trust-pickle  a run of Megatron-LM, or another in torch's distributed format; never also --save
    --auto-resume              the newest whole checkpoint of --save, if there is any; else as without the flag
    neither                    a fresh start; refused where --save holds checkpoints

Rank 0 decides for all (`Checkpointer.decide_start`).
"""

import logging
import os
from pathlib import Path

from megalite.checkpoint.run_dir import (
    MAKES_ONE,
    NOT_WHOLE,
    committed,
    interrupted,
    is_distributed,
    is_huggingface,
    is_megatron,
    resolve_checkpoint,
    step_of,
    torn_shards,
    uncommitted,
    warn_of_tracker,
)
from megalite.errors import CheckpointError
from megalite.stores import Place, place

logger = logging.getLogger(__name__)


def decide_start(
    *,
    save: str | None,
    load: str | None,
    auto_resume: bool = False,
    ckpt_step: int | None = None,
    trust_pickle: bool = False,
) -> tuple[Place, ...]:
    """Applies the rules above: checkpoints to load, best first; none: a fresh start. The log says why, and what has the
    name of a newer checkpoint and is none. trust_pickle: whether `load` may be in torch's distributed format. Raises
    CheckpointError, one line."""
    found, reason = _decide(
        save=save, load=load, auto_resume=auto_resume, ckpt_step=ckpt_step, trust_pickle=trust_pickle
    )
    newest = found[0] if found else None
    home = newest.parent if newest is not None and not (is_huggingface(newest) or is_distributed(newest)) else None
    if save is not None and (home is None or not _same(save, str(home))) and uncommitted(save):
        raise CheckpointError(
            f"`save`={save}: {uncommitted(save)[-1].name} is in the way and is not a checkpoint (no COMMITTED file: "
            "damaged, or written by another program); move it away, or choose a new directory"
        )
    if isinstance(home, Path) and newest is not None and ckpt_step is None:
        warn_of_tracker(home, newest)
    logger.info(reason)
    if home is None or newest is None or ckpt_step is not None or _same(str(load), str(newest)):
        return found
    for path in uncommitted(home):
        if step_of(path) > step_of(newest):
            seen = os.access(path, os.R_OK | os.X_OK)
            what = "it has no COMMITTED file" if seen else "this user cannot read it; it may be whole"
            logger.warning("passed over %s: newer, but %s", path, what)
    return found


def _decide(
    *, save: str | None, load: str | None, auto_resume: bool, ckpt_step: int | None, trust_pickle: bool
) -> tuple[tuple[Place, ...], str]:
    """What to load, and why: one line for the log."""
    held = committed(save) if save is not None else []
    if auto_resume and held:
        if ckpt_step is not None:
            chosen = resolve_checkpoint(str(save), ckpt_step)
            return (chosen,), f"`auto_resume`: step {ckpt_step} of {save}"
        return tuple(reversed(held)), f"`auto_resume`: {held[-1].name} is the newest checkpoint of {save}"
    if load is None:
        if ckpt_step is not None:
            raise CheckpointError(f"`ckpt_step`={ckpt_step}: of which run? add `load` DIR")
        if held:
            raise CheckpointError(
                f"`save`={save}: holds checkpoints already (newest {held[-1].name}); "
                f"add `auto_resume` or `load` {save} to continue with them, or choose a new directory"
            )
        return (), f"`auto_resume`: {save} is empty: a fresh start" if auto_resume else "a fresh start"
    distributed = trust_pickle and is_distributed(load)
    if trust_pickle and not distributed:
        if name := torn_shards(load):
            raise CheckpointError(f"`load`={load}: {name} {NOT_WHOLE}")
        found = is_megatron(load)
        fix = f"{MAKES_ONE} (its format torch has the weights alone)" if found else "drop it"
        raise CheckpointError(f"`trust_pickle`: `load`={load} is not in torch's distributed format; {fix}")
    foreign_model = distributed or is_huggingface(load)
    if foreign_model and not distributed and ckpt_step is not None:
        raise CheckpointError(f"`ckpt_step`={ckpt_step}: {load} is a Hugging Face model and has no steps; drop it")
    if save is not None and _same(save, load):
        if foreign_model:
            kind = "distributed checkpoint" if distributed else "Hugging Face model"
            raise CheckpointError(f"`save`={save}: is the {kind} of `load`; choose a new directory")
        if not held and ckpt_step is None and not uncommitted(load):
            torn = f" but {interrupted(load)[-1].name}, interrupted" if interrupted(load) else ""
            return (), f"`load`={load}: no committed checkpoint yet{torn}; it is also `save`: a fresh start"
    elif held and not _same(str(save), str(place(load).parent)):  # one checkpoint of --save is that run, too
        raise CheckpointError(
            f"`save`={save}: holds another run (newest {held[-1].name}); choose a new directory, or continue that run: "
            f"`auto_resume`, or `load` {save}"
        )
    if foreign_model:
        what = "the weights of a Hugging Face model; a run of its own begins"
        return (place(load),), f"`load`={load}: {'torch distributed checkpoint' if distributed else what}"
    path = resolve_checkpoint(load, ckpt_step)
    return (path,), f"`load`={load}: {path.name}"


def _same(first: str, second: str) -> bool:
    return place(first).resolve() == place(second).resolve()
