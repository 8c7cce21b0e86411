"""Full verification: every byte of a checkpoint against its checksum, nothing kept in memory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from megalite.checkpoint.format import Manifest
from megalite.checkpoint.storage import ShardReader, read_extra, read_manifest
from megalite.errors import CheckpointError
from megalite.progress import OnProgress, no_progress

# Names of tensors that belong to a run rather than to the model: fine-tuning and generation do not ask for them.
STATE_PREFIXES = ("optimizer/", "previous/")


def verify_checkpoint(
    path: Path | str,
    *,
    share: int = 0,
    shares: int = 1,
    with_state: bool = True,
    contents: bool = True,
    on_progress: OnProgress = no_progress,
) -> list[str]:
    """What is wrong with a checkpoint: one line a damaged file, empty if it is whole.

    With `shares` ranks at work each verifies every `shares`-th file; `share` 0 also the small files. with_state: else
    the weights alone. contents: else only whether the files are there, as long as they were, with their headers.
    """
    root = Path(path)
    try:
        manifest = read_manifest(root)
    except CheckpointError as error:
        return [str(error)]
    problems = []
    names = sorted(manifest.files)[share::shares]
    done, total = 0, sum(manifest.files[name].nbytes for name in names)

    def read(nbytes: int) -> None:
        nonlocal done
        done += nbytes
        on_progress(done, total, "")

    for name in names:
        try:
            _verify_file(root, manifest, name, read, with_state=with_state, contents=contents)
        except CheckpointError as error:
            problems.append(str(error))
        except OSError as error:
            problems.append(f"{root / name}: cannot be read ({error.strerror})")
    for name in manifest.extra_files if share == 0 else ():
        try:
            read_extra(root, manifest, name)
        except CheckpointError as error:
            problems.append(str(error))
    return problems


def _verify_file(
    root: Path, manifest: Manifest, name: str, on_read: Callable[[int], None], *, with_state: bool, contents: bool
) -> None:
    stored = manifest.files[name]
    buffer = memoryview(bytearray(manifest.block_bytes))
    with ShardReader(root / name, stored, manifest.block_bytes) as reader:
        for shard in stored.shards if contents else ():
            if not with_state and shard.tensor.startswith(STATE_PREFIXES):
                continue
            nbytes = shard.box.numel * manifest.tensors[shard.tensor].torch_dtype.itemsize
            for index in range(len(shard.checksums)):
                size = min(manifest.block_bytes, nbytes - index * manifest.block_bytes)
                reader.read_block(shard, index, buffer[:size])
                on_read(size)
