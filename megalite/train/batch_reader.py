"""BatchReader: gives the pipeline its micro-batches by global number, and the factor of each one's loss.

What is read is a pure function of (consumed samples, data-parallel rank), so every tensor- and pipeline-parallel peer
reads the same samples itself and nothing is broadcast.

The factor of a micro-batch turns its summed loss into its share of the mean loss of an update, so that gradients need
only be summed. n: micro-batches of an update, the m of the batch; in PipeDream, which steps after each, one:

    default                         loss_scale / (tokens of the micro-batch * n * dp)    mean of micro-batch means
    --calculate-per-token-loss      loss_scale / (tokens of the n over all replicas)     mean over tokens

A token counts where the loss mask is 1. Losses that layers add by themselves (experts) are means over the micro-batches
of an update, whatever the masks say: loss_scale / (n * dp), `Microbatch.share`. What is logged is the mean over the
batch, however many updates it makes.
"""

import time
from collections.abc import Callable, Sized
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from megalite.comm import all_reduce_
from megalite.data import BatchLoader
from megalite.microbatch import Microbatch
from megalite.train.build import wide_dtype
from megalite.train.further import Further
from megalite.train.host_embedding import Watch
from megalite.train.run_data import RunData

LossScale = Callable[[int], float | Tensor]


@dataclass(frozen=True)
class GlobalBatch:
    """This replica's part of one global batch."""

    number: int
    first: int  # number of its first micro-batch
    samples: int  # over all replicas
    loss_scale: float | Tensor
    microbatches: list[Microbatch]
    factors: list[Tensor]  # of the micro-batches' losses
    parts: Tensor  # of each micro-batch's update in the batch's mean loss, `[m]`; ones where it is one update
    counted: Tensor  # tokens


class BatchReader:
    """Fetches batches on demand and forgets them when asked to.

    loader: None in a run that only evaluates. together: micro-batches of an update (PipeDream); None: all of the batch.
    scale: number of a batch -> its loss scale; called when the batch is begun.
    watch: called when a batch has been read; tokens of its micro-batches stay in host memory.
    """

    def __init__(
        self, data: RunData, loader: BatchLoader | None, together: int | None, scale: LossScale, watch: Watch | None
    ) -> None:
        config, mesh = data.config, data.mesh
        self.loader, self._device, self._watch = loader, data.device, watch
        # `cut` takes this rank's part of a sequence, after its tokens were counted.
        self._dp_size, self._cut, self._of_update = mesh.size("stream"), data.cut, together
        # Tokens are counted over it, so that each has the same weight; None: each micro-batch has.
        self._tokens_over = mesh["stream"] if config.training.calculate_per_token_loss else None
        self.loss_dtype, depth = wide_dtype(config), config.model.further.depth
        self._further = Further(depth, self._tokens_over, self.loss_dtype) if depth else None
        self.part_names = () if loader is None or loader.parts is None else loader.parts.names
        self._seconds = 0.0
        self._loss_scale = scale
        self._plan: dict[int, tuple[int, int]] = {}
        self._batches: dict[int, GlobalBatch] = {}

    def plan(self, number: int, *, first: int, samples: int) -> None:
        """Announces batch `number` of `samples` samples over all replicas, micro-batches numbered from `first`."""
        self._plan[number] = (first, samples)

    def get(self, microbatch: int) -> tuple[Microbatch, Tensor]:
        """The micro-batch with this global number and the factor of its summed loss."""
        batch = self.batch(self.number_of(microbatch))
        index = microbatch - batch.first
        return batch.microbatches[index], batch.factors[index]

    def number_of(self, microbatch: int) -> int:
        """The batch that the micro-batch belongs to."""
        return max(number for number, (first, _) in self._plan.items() if first <= microbatch)

    def share_of_loss(self, microbatch: int) -> tuple[int, Tensor]:
        """(Number of the batch, factor from the micro-batch's summed loss to its share of the batch's mean loss)."""
        batch = self.batch(self.number_of(microbatch))
        index, scale = microbatch - batch.first, batch.loss_scale
        factor, part = batch.factors[index], batch.parts[index]
        return batch.number, factor * part / (scale.to(factor.dtype) if isinstance(scale, Tensor) else scale)

    @property
    def more(self) -> int:
        """How many numbers `more_sums` gives."""
        return 2 * len(self.part_names) + (0 if self._further is None else self._further.depth)

    def more_sums(self, microbatch: int, share: Tensor) -> Tensor:
        """Of this rank's tokens of the micro-batch, in fp64: by part of the blend the summed loss and how many count,
        `[2 P]`; the mean loss of each further token, `[D]`, by the micro-batch's share of the batch's."""
        own, _ = self.get(microbatch)
        further = share.new_zeros(0) if own.further_losses is None else own.further_losses * share
        if not self.part_names:
            return further.double()
        assert own.token_losses is not None and own.blend_parts is not None
        sums = torch.stack((own.token_losses * own.loss_mask, own.loss_mask)).sum(2, dtype=torch.float64)
        by_part = sums.new_zeros(2, len(self.part_names)).index_add_(1, own.blend_parts, sums)
        return torch.cat((by_part.flatten(), further.double()))

    def named(self, sums: Tensor) -> dict[str, Any]:
        """The same of all ranks, as fields of `StepStats`."""
        parts, further = sums.split((2 * len(self.part_names), self.more - 2 * len(self.part_names)))
        found = {"by_part": (self.part_names, parts.view(2, -1))} if self.part_names else {}
        return found | {"further": tuple(further.unbind())}

    def batch(self, number: int) -> GlobalBatch:
        """The batch with this number, fetched in order."""
        if number not in self._batches:
            first, samples = self._plan[number]
            began = time.perf_counter()
            assert self.loader is not None, "a run that only evaluates reads no training data"
            read = self.loader.next_batch(samples)
            local = [mb.to(self._device, non_blocking=True) for mb in read]
            self._seconds += time.perf_counter() - began
            local = local if self._further is None else self._further(local)
            scale = self._loss_scale(number)
            part = scale / (self._together(local) * self._dp_size)
            share = (
                part.to(self.loss_dtype)
                if isinstance(part, Tensor)
                else torch.full((), part, dtype=self.loss_dtype, device=self._device)
            )
            own, tokens = [replace(self._cut(mb), share=share) for mb in local], self._tokens(local)
            if self.part_names:
                own = [replace(mb, token_losses=torch.empty_like(mb.loss_mask, dtype=self.loss_dtype)) for mb in own]
            if self._further is not None:
                own = [replace(mb, further_losses=share.new_zeros(self._further.depth)) for mb in own]
            if self._watch is not None:
                read = [self._cut(mb) for mb in read]
                own = [replace(mb, host_tokens=on_host.tokens) for mb, on_host in zip(own, read, strict=True)]
                self._watch(first, read, self.loader)
            self._batches[number] = GlobalBatch(
                *(number, first, samples, scale, own, self._factors(tokens, scale), self._parts(tokens)),
                tokens.sum(dtype=torch.float64),
            )
        return self._batches[number]

    def pass_over(self, samples: int) -> None:
        """Skips a global batch."""
        if self.loader is not None:
            self.loader.skip(samples)

    def restart(self, loader: BatchLoader) -> None:
        """Reads from `loader` from now on; batches are numbered anew."""
        if self.loader is not None:
            self.loader.close()
        self.loader = loader
        self.forget(max(self._plan, default=0))

    def take_seconds(self) -> float:
        """Seconds spent waiting for data since the last call."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    def forget(self, number: int) -> None:
        """Releases everything up to batch `number`."""
        for old in [n for n in self._plan if n <= number]:
            self._plan.pop(old)
            self._batches.pop(old, None)

    def _together(self, of_batch: Sized) -> int:
        """Micro-batches of an update."""
        return len(of_batch) if self._of_update is None else self._of_update

    def _tokens(self, microbatches: list[Microbatch]) -> Tensor:
        """Tokens that count, of each micro-batch, `[m]`; over all replicas where each has the same weight."""
        tokens = torch.stack([mb.loss_mask.to(self.loss_dtype).sum() for mb in microbatches])
        if self._tokens_over is not None:
            all_reduce_(tokens, self._tokens_over)
        return tokens

    def _factors(self, tokens: Tensor, scale: float | Tensor) -> list[Tensor]:
        if self._tokens_over is not None:
            weights = torch.ones_like(tokens) / self._of_updates(tokens).clamp(min=1)
        else:
            weights = 1.0 / (tokens.clamp(min=1) * (self._together(tokens) * self._dp_size))
        return list((weights * scale).unbind())

    def _parts(self, tokens: Tensor) -> Tensor:
        if self._of_update is None:
            return torch.ones_like(tokens)
        if self._tokens_over is not None:
            return self._of_updates(tokens) / tokens.sum().clamp(min=1)
        return torch.full_like(tokens, self._of_update / len(tokens))

    def _of_updates(self, tokens: Tensor) -> Tensor:
        """Tokens of the update that each micro-batch belongs to, `[m]`; 0-dim where it is the batch."""
        if self._of_update is None:
            return tokens.sum()
        return tokens.view(-1, self._of_update).sum(1).repeat_interleave(self._of_update)
