"""What a `save` record of metrics.jsonl says of a store: requests that were repeated, saves on their way."""

from __future__ import annotations

from megalite.checkpoint import Checkpointer
from megalite.observe import Hook, Record, TrainerView
from megalite.stores import StoreUrl


class UploadsHook(Hook):
    """Adds `store_retries` (since the record before) and `uploads_waiting` (this save included), of rank 0; nothing to
    a run that saves elsewhere."""

    def __init__(self, checkpointer: Checkpointer) -> None:
        self._checkpointer = checkpointer
        self._seen = 0

    def on_save(self, trainer: TrainerView, record: Record) -> None:
        where = self._checkpointer.directory
        if not isinstance(where, StoreUrl):
            return
        retries = where.store.retries
        record["store_retries"], record["uploads_waiting"] = retries - self._seen, len(self._checkpointer.pending)
        self._seen = retries
