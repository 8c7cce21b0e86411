"""Evaluation inside a training run: the summed loss of a split, through the same pipeline and with the newest
weights."""

import logging
from dataclasses import dataclass

import torch
from torch import Tensor

from megalite.comm import all_reduce_
from megalite.data import Dataset
from megalite.engine import Updater, run_forwards
from megalite.microbatch import Microbatch
from megalite.observe import Record, evaluation_record
from megalite.parallel.pipeline import Executor, ForwardOnly
from megalite.progress import LINES, ProgressBar
from megalite.schedule import forward_program
from megalite.train.build import Model
from megalite.train.exits import ExitPolicy
from megalite.train.run_data import RunData
from megalite.train.trainer import TrainingProgress

logger = logging.getLogger(__name__)

LOSSES = ("lm_loss", "ppl", "bits_per_byte")
"""Of a record, those that it holds of the average of the weights, too: `ema_lm_loss` and so on."""


@dataclass(eq=False)
class Validator:
    """Evaluates splits, with the newest weight version."""

    data: RunData
    model: Model
    executor: Executor
    updater: Updater
    progress: TrainingProgress
    exits: ExitPolicy

    def __post_init__(self) -> None:
        self._mesh, self._device = self.data.mesh, self.data.device
        self._token_bytes = self.data.token_bytes()

    def __call__(self, iteration: int, final: bool) -> list[Record] | None:
        """Records of the validation split, at the end also of the test split; None where it was interrupted.
        Collective over the world."""
        length, records = self.data.evaluation_length(self.progress.consumed_samples), []
        data = self.data.datasets
        splits = [("valid", None, data.valid), *(("valid", name, part) for name, part in data.valid_sets.items())]
        for kind, name, dataset in [*splits, ("test", None, data.test if final else None)]:
            if dataset is None or not self.data.config.training.evaluates:
                continue
            record = self._evaluate(kind, iteration, dataset, length)
            if record and self.data.config.optimizer.ema_decay is not None:
                with self.model.averages_as_weights(self.updater.newest_version()):
                    averaged = self._evaluate(kind, iteration, dataset, length)
                record = averaged and record | {f"ema_{key}": averaged[key] for key in LOSSES if key in averaged}
            if record is None:
                return None
            scheduled = self.data.config.training.seq_length_schedule is not None
            named = {} if name is None else {"set": name}
            records.append(record | named | ({"seq_length": length} if scheduled else {}))
        return records

    def _evaluate(self, kind: str, iteration: int, dataset: Dataset, length: int) -> Record | None:
        """A `"valid"` or `"test"` record of all batches, None where it was interrupted."""
        # Equally many on all replicas; a sample that is not there has a loss mask of zeros.
        batches, num_batches = self.data.evaluation(dataset, length)
        # summed loss, tokens that count, bytes that these tokens spell
        total = torch.zeros(3, dtype=torch.float64, device=self._device)
        self._train(False)
        bar = ProgressBar(f"evaluating {kind}", "batches", lines=LINES if self._mesh.world.is_first else 0)
        try:
            with self.model.optimizer.masters_as_weights(self.updater.newest_version()):
                for number, microbatches in enumerate(batches):
                    if self.exits.interrupted():
                        self.exits.last_answer()
                        return None
                    bar(number, num_batches)
                    local = [self.data.cut(mb.to(self._device)) for mb in microbatches]
                    losses = self._losses(local)
                    if self._mesh.coordinate("tp") == 0 and losses:
                        summed = torch.stack(list(losses.values())).double().sum()
                        total += torch.stack([summed, *self._sizes([local[number] for number in losses])])
                self.exits.last_answer()
        finally:
            bar.close()
            self._train(True)
        all_reduce_(total, self._mesh.world)
        loss_sum, tokens, num_bytes = total.tolist()
        return evaluation_record(
            kind, iteration, loss_sum=loss_sum, num_tokens=tokens, num_bytes=round(num_bytes) if num_bytes else None
        )

    def _sizes(self, microbatches: list[Microbatch]) -> list[Tensor]:
        tokens = torch.stack([mb.loss_mask.double().sum() for mb in microbatches]).sum()
        if self._token_bytes is None:
            return [tokens, torch.zeros_like(tokens)]
        spelled = [(self._token_bytes[mb.labels].double() * mb.loss_mask.double()).sum() for mb in microbatches]
        return [tokens, torch.stack(spelled).sum()]

    def _losses(self, microbatches: list[Microbatch]) -> dict[int, Tensor]:
        """Summed losses of the micro-batches that end on this rank, by number."""
        program = forward_program(self.model.placement, len(microbatches))
        version = self.updater.newest_version()
        stages = {key: ForwardOnly(stage, version) for key, stage in self.model.stages.items() if key[1] == 0}
        return run_forwards(program, self._mesh.coordinate("pp"), stages, self.executor.channel, microbatches)

    def _train(self, mode: bool) -> None:
        for stage in self.model.stages.values():
            for module in stage.modules:
                module.train(mode)
