"""Checkpoints: named rectangles of logical tensors on disk, which load at any layout and cannot be torn.

    iter_0000100.tmp-3f9c/            staged ...
      rank_00000.safetensors            every rank streams what it has to write
      manifest.json, COMMITTED          checksums of everything; rank 0, last
    iter_0000100/                     ... and renamed: committed

    format.py       the manifest and its validation; checksums
    storage.py      streaming writes, verified block reads, the commit protocol
    reshard.py      rectangles: intersections, who writes what (pure)
    discovery.py    newest committed checkpoint, sweeping, retention
    saving.py       one save seen from one rank
    loading.py      cutting what is wanted out of what is stored
    background.py   asynchronous saving
    verify.py       every byte against its checksum
    run_dir.py      from where a run starts, what is refused, when it is complete
    compatibility.py  is it a checkpoint of this model
    lock.py         one run, one directory
    checkpointer.py Checkpointer: the collective interface to all of it

Public: `Checkpointer`, `CheckpointReader`, `RunLock`, `latest`, `committed`, `resolve_checkpoint`, `verify_checkpoint`.

Names: weights are stored under their logical name, optimizer state as `optimizer/<state>/<logical name>`, the older
weights of 2BW and PipeDream as `previous/<logical name>` (one update ago) and `previous/N/<logical name>`; scalars live
in `meta` (JSON; `train/run_state.py` lists what a run keeps). There is no generator state: randomness is keyed by seed
and sample.

Invariants: a directory without `.tmp-` in its name is whole; every byte loaded was checksummed; nothing that is read is
executed; any layout loads what any other saved. Proved by tests/unit/checkpoint, tests/distributed/checkpoint
and tests/faults/test_checkpoint_faults.py.
"""

from megalite.checkpoint.checkpointer import Checkpointer
from megalite.checkpoint.compatibility import check_model, check_state, check_tensors
from megalite.checkpoint.discovery import (
    TRACKER,
    committed,
    directory_name,
    interrupted,
    is_huggingface,
    latest,
    resolve_checkpoint,
    step_of,
    write_tracker,
)
from megalite.checkpoint.format import (
    BLOCK_BYTES,
    COMMITTED,
    DTYPE_NAMES,
    ExtraFile,
    Manifest,
    StoredFile,
    StoredTensor,
    check_file_name,
    parse_json,
)
from megalite.checkpoint.loading import CheckpointReader
from megalite.checkpoint.lock import RunLock
from megalite.checkpoint.meta import Meta
from megalite.checkpoint.reshard import Box
from megalite.checkpoint.run_dir import clear_completed, in_the_way, mark_completed, set_aside_newer
from megalite.checkpoint.saving import bytes_text, check_space, first_problem
from megalite.checkpoint.storage import (
    TensorPart,
    copy_extras,
    flat_bytes,
    fsync_directory,
    read_extra,
    read_manifest,
    read_small,
    write_file,
    write_proof,
    write_shard_file,
)
from megalite.checkpoint.verify import verify_checkpoint
