"""Finding, removing and keeping checkpoints: a directory is listed, a tracker file is never trusted.

`latest_checkpointed_iteration.txt` is written for people's scripts and never read.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import stat
import uuid
from pathlib import Path

from megalite.checkpoint.format import COMMITTED, MANIFEST
from megalite.checkpoint.storage import fsync_directory
from megalite.errors import CheckpointError
from megalite.faults import fault_point

logger = logging.getLogger(__name__)

TRACKER = "latest_checkpointed_iteration.txt"
PICKLES = (".pt", ".pth", ".ckpt", ".pkl")
NO_PICKLES = (
    "it could execute code and is not read; save the model as a Hugging Face folder of safetensors, or in "
    "Megatron-LM's format torch, which tools/convert_checkpoint.py takes"
)
_NAME = re.compile(r"iter_(\d{7,12})", re.ASCII)
_STAGED = re.compile(r"iter_\d{7,12}\.tmp-[\w-]+", re.ASCII)


def directory_name(step: int) -> str:
    """`iter_0000100`."""
    return f"iter_{step:07d}"


def step_of(path: Path) -> int:
    """100 for `.../iter_0000100`. Raises CheckpointError for any other name."""
    match = _NAME.fullmatch(path.name)
    if not match:
        raise CheckpointError(f"{path}: not the name of a checkpoint (iter_0000100)")
    return int(match[1])


def committed(directory: Path | str) -> list[Path]:
    """The committed checkpoints of a directory, oldest first; empty where there is no such directory."""
    return [path for path in _named(directory) if os.path.isfile(path / COMMITTED)]


def uncommitted(directory: Path | str) -> list[Path]:
    """Directories named like a checkpoint that are none, oldest first: damaged, or made by another program."""
    return [path for path in _named(directory) if not os.path.isfile(path / COMMITTED)]


def _named(directory: Path | str) -> list[Path]:
    """Everything that is named like a checkpoint, oldest first."""
    return sorted((path for path in listing(directory) if _NAME.fullmatch(path.name)), key=step_of)


def listing(directory: Path | str) -> list[Path]:
    """What a directory holds, sorted; empty where there is none. Raises CheckpointError where it cannot be read."""
    try:
        return sorted(Path(directory).iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise CheckpointError(f"{directory}: cannot be read ({error.strerror})") from None


def interrupted(directory: Path | str) -> list[Path]:
    """Staging directories: saves that are in flight or were interrupted."""
    return [path for path in listing(directory) if _STAGED.fullmatch(path.name)]


def latest(directory: Path | str) -> Path | None:
    """The newest committed checkpoint of a directory, found by looking."""
    found = committed(directory)
    return found[-1] if found else None


def resolve_checkpoint(
    load: Path | str,
    ckpt_step: int | None = None,
    *,
    flag: str = "--load=",
    advice: str = "give a run's --save, or train without --load",
) -> Path:
    """The checkpoint that `--load` (a directory of checkpoints, or one checkpoint) and `--ckpt-step` mean.

    Raises CheckpointError. flag: what its message begins with. advice: what else could be given.
    """
    root = Path(load)
    try:
        is_folder = stat.S_ISDIR(os.stat(root).st_mode)
    except (FileNotFoundError, NotADirectoryError):
        raise CheckpointError(f"{flag}{load}: no such directory; {advice}") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{flag}{load}: cannot be read ({getattr(error, 'strerror', error)})") from None
    if not is_folder:
        raise CheckpointError(f"{flag}{load}: is a file{_what_file(root)}; {advice}")
    if os.path.isfile(root / COMMITTED):
        if ckpt_step is not None and _NAME.fullmatch(root.name) and step_of(root) != ckpt_step:
            raise CheckpointError(
                f"--ckpt-step={ckpt_step}: {flag}{load} is the checkpoint of another step; drop one of the two"
            )
        return root
    found = committed(root)
    if ckpt_step is not None:
        for path in found:
            if step_of(path) == ckpt_step:
                return path
        steps = ", ".join(str(step_of(path)) for path in found) or "none"
        raise CheckpointError(f"--ckpt-step={ckpt_step}: no committed checkpoint of that step in {load} (has: {steps})")
    if found:
        return found[-1]
    raise CheckpointError(f"{flag}{load}: no committed checkpoint{_what_else(root)}; {advice}")


def is_huggingface(root: Path | str) -> bool:
    """Whether a directory is a Hugging Face model: its config.json, and no checkpoint of ours."""
    root = Path(root)
    return os.path.isfile(root / "config.json") and not os.path.isfile(root / COMMITTED) and not committed(root)


def _what_file(path: Path) -> str:
    """What kind of file is given in place of a directory, as text."""
    try:
        with open(path, "rb") as file:
            head = file.read(9)
    except OSError as error:
        return f", and cannot be read ({error.strerror})"
    if path.suffix == ".safetensors" or head[8:] == b"{":
        return " (safetensors: name the folder of a Hugging Face model, which holds a config.json too)"
    if path.suffix in (*PICKLES, ".bin") or head[:2] == b"\x80\x02" or head[:4] == b"PK\x03\x04":
        return f" (a pickle, torch.save's? {NO_PICKLES})"
    return ""


def _what_else(root: Path) -> str:
    """The facts behind `no committed checkpoint`."""
    torn = interrupted(root)
    if torn:
        return f" (found {torn[-1].name}, interrupted)"
    if ".tmp-" in root.name:
        return " (an interrupted save)"
    if any(root.glob("mp_rank_*")) or any(root.glob("*/mp_rank_*")):
        return " (Megatron-LM's? tools/convert_checkpoint.py --from megatron --to megalite makes one of it)"
    inside = [*listing(root), *(child for path in listing(root)[:100] if path.is_dir() for child in listing(path))]
    if any(path.name == ".metadata" or path.suffix == ".distcp" for path in inside):
        return f" (torch's distributed format, or Megatron-LM's torch_dist? {NO_PICKLES})"
    if any(path.suffix in PICKLES or path.match("pytorch_model*.bin") for path in inside):
        return f" (pickles of torch.save? {NO_PICKLES})"
    if foreign := uncommitted(root):
        return f" ({foreign[-1].name} has no {COMMITTED} file: damaged, or written by another program)"
    if (root / MANIFEST).is_file():
        return f" (it has no {COMMITTED} file: damaged)"
    if is_huggingface(root):
        return " (a Hugging Face model? tools/convert_checkpoint.py --from hf --to megalite makes a checkpoint of it)"
    if any(path.suffix == ".safetensors" for path in inside):
        return " (safetensors without config.json, which says what model they are)"
    return "" if listing(root) else " (empty)"


def remove_interrupted(directory: Path | str) -> None:
    """Removes what interrupted saves and deletions left. Only for the holder of the run directory's lock."""
    for path in interrupted(directory):
        shutil.rmtree(path, ignore_errors=True)
        logger.info("removed %s, left by an interrupted save", path)


def remove(path: Path) -> None:
    """Deletes a checkpoint: it loses its name first, so that a kill half-way never leaves a torn one."""
    doomed = path.with_name(f"{path.name}.tmp-deleted-{uuid.uuid4().hex[:8]}")
    os.rename(path, doomed)
    fsync_directory(path.parent)
    fault_point("save.gc", rank=0, step=step_of(path))
    shutil.rmtree(doomed)


def retain(directory: Path | str, *, keep_last: int | None, retain_interval: int | None) -> None:
    """Deletes all but the newest `keep_last` and the milestones (every `retain_interval` steps).

    Called after a commit only, so at least one whole checkpoint remains at every instant. A deletion that fails is a
    warning: the save itself has succeeded.
    """
    for path in committed(directory)[: -max(1, keep_last)] if keep_last is not None else ():
        if retain_interval and step_of(path) % retain_interval == 0:
            continue
        try:
            remove(path)
        except OSError as error:
            logger.warning("could not delete the old checkpoint %s: %s", path, error.strerror)


def write_tracker(directory: Path, step: int) -> None:
    """Megatron's tracker file, for people's scripts. A failure is a warning: nothing depends on it."""
    temporary = directory / f".{TRACKER}.{uuid.uuid4().hex[:8]}"
    try:
        temporary.write_text(f"{step}\n")
        os.replace(temporary, directory / TRACKER)
    except OSError as error:
        logger.warning("could not write %s: %s", directory / TRACKER, error.strerror)
