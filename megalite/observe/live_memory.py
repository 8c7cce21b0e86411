"""The measured peak next to the predicted one, after the first steps of a run.

On a GPU the measured number is the allocator's (`torch.cuda.max_memory_allocated`). A CPU has no such counter, and the
resident memory of a process is mostly libraries; so the storages of all tensors are counted there, operator by
operator, while the first steps run: what is alive before them is found once, what an operator returns is added, what
dies is taken off, and a storage that is resized (weights that come and go) counts as what it is then. Scratch inside
one operator is not seen, nor what another thread makes (a delayed step on the host: the prediction has it).
"""

from __future__ import annotations

import gc
import logging
import weakref
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megalite.comm import all_gather_json
from megalite.config import BatchRamp
from megalite.observe.hooks import Hook, TrainerView
from megalite.observe.stats import Record, StepStats
from megalite.planner import RankMemory
from megalite.progress import in_units

logger = logging.getLogger(__name__)

#: Iterations that are watched: an asynchronous pipeline is full in the third.
WATCHED = 3

#: A run that has fewer to go is not watched on a CPU, where counting takes time.
LEAST_ITERATIONS = 10


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of CPU tensors that are alive while it is entered; `peak` is the most.

    A storage counts once, however many tensors look at it.
    """

    def __init__(self) -> None:
        TorchDispatchMode.__init__(self)
        self._alive: dict[int, tuple[weakref.ref[Any], int]] = {}
        self.now = 0
        self.peak = 0
        self._resizes = ExitStack()

    def __enter__(self) -> LiveBytes:
        """Also listens to `UntypedStorage.resize_`, which is no operator."""
        resize = torch.UntypedStorage.resize_

        def resized(storage: torch.UntypedStorage, size: int) -> Any:
            result = resize(storage, size)
            self._count(storage)
            return result

        entered: LiveBytes = super().__enter__()  # type: ignore[no-untyped-call]  # torch's has no types
        setattr(torch.UntypedStorage, "resize_", resized)  # noqa: B010  an assignment mypy refuses
        self._resizes.callback(setattr, torch.UntypedStorage, "resize_", resize)
        return entered

    def __exit__(self, *raised: Any) -> None:
        self._resizes.close()
        super().__exit__(*raised)  # type: ignore[no-untyped-call]  # torch's has no types

    def add_everything(self) -> None:
        """Takes note of the tensors that exist already, as far as Python knows them."""
        gc.collect()
        # `type` and not `isinstance`: asking some modules' objects for their class imports half a library
        everything = [o for o in gc.get_objects() if issubclass(type(o), torch.Tensor)]
        # masks of flex attention are made by vmap, whose tensors have no memory of their own
        self._note(tensor for tensor in everything if not torch._C._functorch.is_batchedtensor(tensor))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self._note(leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor))
        return result

    def _note(self, tensors: Iterable[torch.Tensor]) -> None:
        for tensor in tensors:
            if tensor.device.type == "cpu" and tensor.layout == torch.strided:
                self._count(tensor.untyped_storage())

    def _count(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        known = self._alive.get(key)
        if storage.device.type != "cpu" or (known is not None and known[1] == size):
            return
        if known is None:
            known = (weakref.ref(storage, partial(self._forget, key)), 0)
        self._alive[key] = (known[0], size)  # a resized storage is the same one
        self.now += size - known[1]
        self.peak = max(self.peak, self.now)

    def _forget(self, key: int, _: weakref.ref[Any]) -> None:
        self.now -= self._alive.pop(key)[1]


class MemoryCheckHook(Hook):
    """After the first steps: `memory: predicted ..., measured peak ... (error ...)`, and the numbers in the record.

    The record of the log line that follows gets, on world rank 0, `predicted_memory_bytes`, `measured_memory_bytes` (of
    the rank that measured most) and `memory_error` (predicted over measured, minus 1). Every rank takes part.
    """

    def __init__(self, predicted: Sequence[RankMemory] = ()) -> None:
        """predicted: of the ranks at each pipeline coordinate, which rank 0 alone has to know."""
        self._predicted = predicted
        self._counter: LiveBytes | None = None
        self._watching = ExitStack()
        self._until = 0
        self._measured: float | None = None

    def on_start(self, trainer: TrainerView) -> None:
        to_go = trainer.train_iters - trainer.iteration
        on_cpu = trainer.device.type == "cpu"
        training = trainer.config.training
        least = LEAST_ITERATIONS if on_cpu else WATCHED
        if training.batch_ramp != BatchRamp() or training.seq_length_schedule is not None or to_go < least:
            return  # the first batches are not the ones that the prediction is about
        self._until = trainer.iteration + WATCHED
        if on_cpu:
            self._counter = LiveBytes()
            self._counter.add_everything()
            self._watching.enter_context(self._counter)
        else:
            torch.cuda.reset_peak_memory_stats(trainer.device)

    def after_step(self, trainer: TrainerView, stats: StepStats) -> None:
        if self._until and self._measured is None and stats.iteration >= self._until:
            counter, device = self._counter, trainer.device
            self._measured = torch.cuda.max_memory_allocated(device) if counter is None else counter.peak
            self._stop()

    def on_log(self, trainer: TrainerView, record: Record) -> None:
        if self._measured is None or not self._until:
            return
        self._until = 0
        rows = all_gather_json([self._measured, trainer.mesh.coordinate("pp")], trainer.mesh.world)
        if trainer.mesh.world.is_first and self._predicted:
            measured, coordinate = max(rows)
            self._tell(record, self._predicted[int(coordinate)], measured, on_cpu=trainer.device.type == "cpu")

    def _tell(self, record: Record, planned: RankMemory, measured: float, *, on_cpu: bool) -> None:
        # On a CPU the "device" memory and that of the host are one, and a file that is mapped counts as alive.
        elsewhere = planned.host + planned.file if on_cpu else 0.0
        # What the allocator keeps beside CUDA graphs is reserved, and what is measured is allocated.
        predicted = planned.total - planned.warm_up + elsewhere
        record["predicted_memory_bytes"], record["measured_memory_bytes"] = round(predicted), round(measured)
        record["memory_error"] = predicted / measured - 1
        logger.info(
            "memory: predicted %s, measured peak %s %s on the fullest rank (error %+.1f%%)",
            in_units(predicted, "B"), in_units(measured, "B"), "of live tensors" if on_cpu else "allocated on the GPU",
            100 * record["memory_error"],
        )  # fmt: skip

    def on_end(self, trainer: TrainerView, summary: Record) -> None:
        self._stop()

    def _stop(self) -> None:
        self._watching.close()
        self._counter = None
