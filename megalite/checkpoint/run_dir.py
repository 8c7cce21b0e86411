"""The run directory (`--save`): its checkpoints, what is removed, when it is complete.

A directory is listed; the tracker file `latest_checkpointed_iteration.txt` is written for people's scripts and never
read.
"""

import logging
import os
import re
import shutil
import stat
import uuid
from collections.abc import Sequence
from pathlib import Path

from megalite.checkpoint.format import COMMITTED, MANIFEST
from megalite.checkpoint.remote import committed_urls, remove_url, set_aside_url, sweep
from megalite.checkpoint.storage import fsync_directory
from megalite.config import as_it_is_there
from megalite.errors import CheckpointError
from megalite.faults import fault_point
from megalite.files import hub_advice
from megalite.stores import Place, StoreUrl, place

logger = logging.getLogger(__name__)

TRACKER = "latest_checkpointed_iteration.txt"
MAKES_ONE = "tools/convert_checkpoint.py --from megatron --to megalite --trust-pickle makes one of it"
NOT_WHOLE = "holds .distcp files but no .metadata, which is written last: that save is not whole; take an older one"
COMPLETED_FILE = "COMPLETED"  # training has done all it was asked for: a requeue loop may stop
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


def step_of(path: Place) -> int:
    """100 for `.../iter_0000100`. Raises CheckpointError for any other name."""
    match = _NAME.fullmatch(path.name)
    if not match:
        raise CheckpointError(f"{path}: not the name of a checkpoint (iter_0000100)")
    return int(match[1])


def committed(directory: Place | str) -> list[Place]:
    """The committed checkpoints of a directory, oldest first; empty where there is no such directory."""
    where = place(directory)
    if isinstance(where, StoreUrl):
        return [*committed_urls(where, TRACKER)]
    return [path for path in _named(where) if os.path.isfile(path / COMMITTED)]


def uncommitted(directory: Place | str) -> list[Path]:
    """Directories named like a checkpoint that are none, oldest first: damaged, or made by another program."""
    return [path for path in _named(directory) if not os.path.isfile(path / COMMITTED)]


def _named(directory: Place | str) -> list[Path]:
    """Lists everything that is named like a checkpoint, oldest first."""
    return sorted((path for path in listing(directory) if _NAME.fullmatch(path.name)), key=step_of)


def listing(directory: Place | str) -> list[Path]:
    """Lists a directory, sorted; empty where there is none. Raises CheckpointError where it cannot be read. Empty also
    for a store, where what has no COMMITTED has no name of a checkpoint either."""
    where = place(directory)
    if isinstance(where, StoreUrl):
        return []
    try:
        return sorted(where.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise CheckpointError(f"{directory}: cannot be read ({error.strerror})") from None


def interrupted(directory: Place | str) -> list[Path]:
    """Staging directories: saves that are in flight or were interrupted."""
    return [path for path in listing(directory) if _STAGED.fullmatch(path.name)]


def latest(directory: Place | str) -> Place | None:
    """The newest committed checkpoint of a directory, found by looking."""
    found = committed(directory)
    return found[-1] if found else None


def resolve_checkpoint(
    load: Place | str,
    ckpt_step: int | None = None,
    *,
    flag: str = "`load`=",
    advice: str = "give a run's `save`, or train without `load`",
) -> Place:
    """The checkpoint that `--load` (a directory of checkpoints, or one checkpoint) and `--ckpt-step` mean. Raises
    CheckpointError. flag: what its message begins with. advice: what else could be given."""
    root = place(load)
    if isinstance(root, Path):
        _check_folder(root, load, flag, advice)
    if is_file(root / COMMITTED):
        if ckpt_step is not None and _NAME.fullmatch(root.name) and step_of(root) != ckpt_step:
            raise CheckpointError(
                f"`ckpt_step`={ckpt_step}: {flag}{load} is the checkpoint of another step; drop one of the two"
            )
        return root
    found = committed(root)
    if ckpt_step is not None:
        for path in found:
            if step_of(path) == ckpt_step:
                return path
        steps = ", ".join(str(step_of(path)) for path in found) or "none"
        raise CheckpointError(f"`ckpt_step`={ckpt_step}: no committed checkpoint of that step in {load} (has: {steps})")
    if found:
        return found[-1]
    raise CheckpointError(f"{flag}{load}: no committed checkpoint{_what_else(root)}; {advice}")


def is_file(path: Place) -> bool:
    """Whether there is such a file or object (`Path.is_file` raises where a name is too long)."""
    return path.is_file() if isinstance(path, StoreUrl) else os.path.isfile(path)


def _check_folder(root: Path, load: Place | str, flag: str, advice: str) -> None:
    """Raises CheckpointError where there is no such folder."""
    try:
        is_folder = stat.S_ISDIR(os.stat(root).st_mode)
    except (FileNotFoundError, NotADirectoryError):
        near = as_it_is_there(str(root))
        what = f"did you mean {near}?" if near else hub_advice(str(load)) or advice
        raise CheckpointError(f"{flag}{load}: no such directory; {what}") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{flag}{load}: cannot be read ({getattr(error, 'strerror', error)})") from None
    if not is_folder and (is_huggingface(root.parent) or (root.parent / COMMITTED).is_file()):
        raise CheckpointError(f"{flag}{load}: is a file; give its folder, {root.parent}")
    if not is_folder:
        raise CheckpointError(f"{flag}{load}: is a file{_what_file(root)}; {advice}")


def is_huggingface(root: Place | str) -> bool:
    """Whether a directory is a Hugging Face model: its config.json, and no checkpoint of ours."""
    root = Path(str(root))  # in a store there is none: a model of that form is copied to a disk first
    return os.path.isfile(root / "config.json") and not os.path.isfile(root / COMMITTED) and not committed(root)


def is_distributed(root: Place | str) -> bool:
    """Whether a directory is a checkpoint in torch's distributed format, or a run of Megatron-LM's with such ones."""
    root = place(root)
    if isinstance(root, StoreUrl) or (root / COMMITTED).is_file() or committed(root):
        return False
    return (root / ".metadata").is_file() or any(root.glob("*/.metadata")) or is_deepspeed(root)


def is_deepspeed(root: Path) -> bool:
    """Whether a directory is a universal checkpoint of DeepSpeed's."""
    return (root / "zero").is_dir() and any(root.glob("*model_states.pt"))


def _what_file(path: Path) -> str:
    """Describes a file that is given in place of a directory."""
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


def torn_shards(root: Place | str) -> str | None:
    """The name of the newest folder of `.distcp` files that a save has not finished (`.metadata` is written last)."""
    where = place(root)
    if isinstance(where, StoreUrl):
        return None
    folders = sorted({path.parent for inside in ("", "*/") for path in where.glob(f"{inside}*.distcp")})
    torn = [folder.name for folder in folders if not (folder / ".metadata").is_file()]
    return torn[-1] if torn else None


def is_megatron(root: Place | str) -> bool:
    """Whether a directory looks like a run of Megatron-LM, or one of its checkpoints, in its format `torch`."""
    where = place(root)
    return isinstance(where, Path) and any(any(where.glob(f"{inside}mp_rank_*")) for inside in ("", "*/"))


def _what_else(root: Place) -> str:
    """The facts behind `no committed checkpoint`."""
    if isinstance(root, StoreUrl):
        return "" if root.iterdir() else " (empty)"
    if torn := interrupted(root):
        return f" (found {torn[-1].name}, interrupted)"
    if ".tmp-" in root.name:
        return " (an interrupted save)"
    if is_megatron(root):
        return f" (Megatron-LM's? {MAKES_ONE})"
    if not is_distributed(root) and (name := torn_shards(root)):
        return f" ({name} {NOT_WHOLE})"
    inside = [*listing(root), *(child for path in listing(root)[:100] if path.is_dir() for child in listing(path))]
    if any(path.name == ".metadata" for path in inside):
        return (
            " (Megatron-LM's torch_dist? Training takes it with `trust_pickle`, and tools/convert_checkpoint.py --from "
            f"megatron --to megalite makes one of it; or another in torch's distributed format? {NO_PICKLES})"
        )
    if is_deepspeed(root):
        return (
            " (DeepSpeed's universal checkpoint? Training takes it with `trust_pickle` and the model's config.json in "
            "it, and tools/convert_checkpoint.py --from deepspeed --to megalite makes one of it)"
        )
    if any(path.suffix in PICKLES or path.match("pytorch_model*.bin") for path in inside):
        return f" (pickles of torch.save? {NO_PICKLES})"
    if foreign := uncommitted(root):
        return f" ({foreign[-1].name} has no {COMMITTED} file: damaged, or written by another program)"
    if (root / MANIFEST).is_file():
        return f" (it has no {COMMITTED} file: damaged)"
    if is_huggingface(root):
        return " (a Hugging Face model? tools/convert_checkpoint.py --from hf --to megalite makes a checkpoint of it)"
    if (root / "adapter_config.json").is_file():
        return (
            " (adapters of peft: tools/generate_text.py and tools/evaluate.py take them with `base`; else name the run "
            "that trained them, or a merged model)"
        )
    if any(path.suffix == ".safetensors" for path in inside):
        return " (safetensors without config.json, which says what model they are)"
    return "" if listing(root) else " (empty)"


def remove_interrupted(directory: Place | str) -> None:
    """Removes what interrupted saves and deletions left. Only for the holder of the run directory's lock."""
    where = place(directory)
    if isinstance(where, StoreUrl):
        sweep(where)
        return
    for path in interrupted(directory):
        shutil.rmtree(path, ignore_errors=True)
        logger.info("removed %s, left by an interrupted save", path)


def remove(path: Place) -> None:
    """Deletes a checkpoint: it loses its name first, so that a kill half-way never leaves a torn one."""
    if isinstance(path, StoreUrl):
        remove_url(path)
        return
    doomed = path.with_name(f"{path.name}.tmp-deleted-{uuid.uuid4().hex[:8]}")
    os.rename(path, doomed)
    fsync_directory(path.parent)
    fault_point("save.gc", rank=0, step=step_of(path))
    shutil.rmtree(doomed)


def retain(directory: Place | str, *, keep_last: int | None, retain_interval: int | None) -> None:
    """Deletes all but the newest `keep_last` and the milestones (every `retain_interval` steps), after a commit. A
    deletion that fails is a warning: the save itself has succeeded."""
    held = [] if keep_last is None else committed(directory)
    for path in held[: -max(1, keep_last or 1)]:
        if retain_interval and step_of(path) % retain_interval == 0:
            continue
        try:
            remove(path)
        except (OSError, CheckpointError) as error:
            logger.warning("could not delete the old checkpoint %s: %s", path, getattr(error, "strerror", error))


def write_tracker(directory: Place, step: int) -> None:
    """Megatron's tracker file, for people's scripts. A failure is a warning: nothing depends on it."""
    try:
        write_small(directory / TRACKER, f"{step}\n".encode())
    except (OSError, CheckpointError) as error:
        logger.warning("could not write %s: %s", directory / TRACKER, getattr(error, "strerror", error))


def warn_of_tracker(directory: Path, newest: Place) -> None:
    """Says that the tracker file is not read where somebody has written another checkpoint into it since the newest
    one: in Megatron-LM a run goes back by that."""
    try:
        named = (directory / TRACKER).read_text()[:20].strip()
        later = (directory / TRACKER).stat().st_mtime > (Path(str(newest)) / COMMITTED).stat().st_mtime
    except (OSError, ValueError):
        return
    if later and named.isdigit() and int(named) != step_of(newest):
        logger.warning(
            "%s says %s and is not read: the run starts from %s, the newest; `ckpt_step` %s goes back",
            directory / TRACKER, named, newest.name, named,
        )  # fmt: skip


def write_small(path: Place, data: bytes) -> None:
    """Writes a small file whole or not at all. Raises OSError or CheckpointError."""
    if isinstance(path, StoreUrl):
        path.write_bytes(data)
        return
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}")
    temporary.write_bytes(data)
    os.replace(temporary, path)


def set_aside_newer(save: Place | str, step: int) -> list[Place]:
    """Renames what is named as a checkpoint newer than `step`, whole or damaged: a run from `step` on will reach it.
    The new names are not taken for checkpoints. Returns the new paths."""
    where = place(save)
    if isinstance(where, StoreUrl):
        moved: list[Place] = [set_aside_url(p) for p in committed_urls(where, TRACKER) if step_of(p) > step]
        if moved:
            write_tracker(where, step)
        return moved
    moved = []
    for paths, why in ((committed(where), "aside"), (uncommitted(where), "damaged")):
        for path in paths:
            assert isinstance(path, Path)
            if step_of(path) > step:
                aside = path.with_name(f"{path.name}.{why}-{uuid.uuid4().hex[:8]}")
                os.rename(path, aside)
                moved.append(aside)
    return moved


def check_names(save: Place | str, files: Sequence[str]) -> None:
    """Raises CheckpointError where a directory, a link or a device has the name of a file that a run will write."""
    where = place(save)
    if isinstance(where, StoreUrl):
        return
    for name in (*files, COMPLETED_FILE, TRACKER):
        path = where / name
        does = "a run writes a file of that name"
        if path.is_symlink():
            kind, does = "a link", "a run would write where it leads"
        elif path.is_dir():
            kind = "a directory"
        elif path.exists() and not path.is_file():
            kind = "a pipe or a device"
        else:
            continue
        raise CheckpointError(f"`save`={save}: {name} is {kind}, and {does}; move it away")
