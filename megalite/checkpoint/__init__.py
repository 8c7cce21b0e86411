"""Checkpoints: named rectangles of logical tensors on disk, which load at any layout and cannot be torn.

    iter_0000100.tmp-3f9c/            staged ...
      rank_00000.safetensors            every rank streams the rectangles that it has to write
      tokenizer.json, ...               files that travel with the weights
      manifest.json                     rank 0, last: step, save id, every tensor, every rectangle, place and checksums
      COMMITTED                         checksum and size of manifest.json; present in every committed checkpoint
    iter_0000100/                     ... and renamed: committed

Names: weights are stored under their logical name, optimizer state as `optimizer/<state>/<logical name>`, the older
weights of 2BW and PipeDream as `previous/<logical name>` (one update ago) and `previous/N/<logical name>`; scalars live
in `meta` (JSON; `train/run_state.py` lists what a run keeps). There is no generator state: randomness is keyed by seed
and sample.

Invariants: a directory without `.tmp-` in its name is whole; every byte loaded was checksummed; nothing that is read is
executed; any layout loads what any other saved. Proved by tests/unit/checkpoint, tests/distributed/checkpoint
and tests/faults/test_checkpoint_faults.py.
"""

from megalite.checkpoint.background import sweep_staging
from megalite.checkpoint.checkpointer import Checkpointer
from megalite.checkpoint.format import COMMITTED, Manifest, StoredTensor, check_file_name, parse_json, tiling_problem
from megalite.checkpoint.hosts import LocalSettings
from megalite.checkpoint.lease import lock_of
from megalite.checkpoint.loading import AVERAGES, CheckpointReader, verify_checkpoint
from megalite.checkpoint.local import LocalSaves
from megalite.checkpoint.meta import Meta, check_model, check_state, check_tensors
from megalite.checkpoint.reading import copy_extras, read_extra, read_manifest, read_small
from megalite.checkpoint.remote import send_along, take_up
from megalite.checkpoint.run_dir import (
    COMPLETED_FILE,
    NOT_WHOLE,
    TRACKER,
    check_names,
    committed,
    directory_name,
    interrupted,
    is_distributed,
    is_file,
    is_huggingface,
    latest,
    resolve_checkpoint,
    set_aside_newer,
    step_of,
    torn_shards,
    write_small,
    write_tracker,
)
from megalite.checkpoint.saving import check_space, first_problem, without_gc, write_whole
from megalite.checkpoint.storage import flat_bytes, fsync_directory
