"""QK-clip (Kimi K2, arXiv 2507.20534; Megatron-LM's `--qk-clip`): no score of attention stays above a threshold.

    STEP, then for each key/value head:   eta = min(1, threshold / largest score of its query heads)
                                          W_q *= eta^alpha,  W_k *= eta^(1 - alpha)            (biases, too)

Scores are those of the update's forwards, their maximum is over batch, sequence and replicas. Query heads that share a
key share eta, as their largest score decides. A maximum that is not above 0, or not finite, clips nothing; nor does an
update that is skipped. What is scaled are the masters, whose new values are written into the weights of the version
that STEP has made; older versions of 2BW stay. An average of the weights takes the masters in before they are scaled.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from typing import cast

import torch
from torch import Tensor

from megalite.comm import Axis, all_reduce_
from megalite.config import QKClip
from megalite.engine.versioned import VersionedState
from megalite.microbatch import Microbatch
from megalite.microbatch_notes import MicrobatchNotes
from megalite.nn import Attention, largest_scores
from megalite.parallel.pipeline import Stage
from megalite.schedule import StageKey


class ScoreMaxima(MicrobatchNotes[str]):
    """By micro-batch and name of an attention: the largest score of each of its heads here, `[g, r]`."""

    def note(self, name: str, attention: Attention, q: Tensor, k: Tensor, microbatch: Microbatch) -> None:
        """Of one forward; of the halves of a micro-batch the larger counts."""
        if self._microbatch is None:
            return
        found = largest_scores(q, k, microbatch, attention.cp, attention.core.window)
        before = self._noted.get(self._microbatch, {}).get(name)
        self._keep(name, found if before is None else torch.maximum(before, found))

    def take(self, wanted: Callable[[int], bool]) -> dict[str, Tensor]:
        """The largest over the micro-batches that are wanted, which are forgotten."""
        found: dict[str, Tensor] = {}
        for number in [number for number in self._noted if wanted(number)]:
            for name, value in self._noted.pop(number).items():
                found[name] = torch.maximum(found[name], value) if name in found else value
        return found


class QueryKeyClip(VersionedState):
    """A `VersionedState` without values of its own: scales the projections of this rank's attentions after STEP. axis:
    the ranks of a stage that hold the same heads."""

    def __init__(
        self, stages: Mapping[StageKey, Stage], settings: QKClip, axis: Axis, replicas: Mapping[int, Axis]
    ) -> None:
        super().__init__(stages, axis, replicas)
        self._settings = settings
        self._attentions: dict[StageKey, dict[str, Attention]] = {}
        self._maxima: dict[StageKey, ScoreMaxima] = {}
        for key, stage in sorted(stages.items()):
            notes = self._maxima[key] = ScoreMaxima()
            stage.note(notes)
            for module in stage.modules:
                for name in cast("tuple[str, ...]", module.names):
                    found = [m for m in module.get_submodule(name).modules() if isinstance(m, Attention)]
                    for attention in found:
                        attention.scores = lambda a, q, k, mb, to=notes, name=name: to.note(name, a, q, k, mb)
                        self._attentions.setdefault(key, {})[name] = attention

    @torch.no_grad()
    def step(self, wanted: Callable[[int], bool], found_inf: Tensor, version: int) -> None:
        """Scales the masters, and writes them into the weights of `version`."""
        factors: dict[str, Tensor] = {}
        for key, attentions in self._attentions.items():
            maxima = self._maxima[key].take(wanted)
            names = list(attentions)
            like = next(iter(attentions.values()))
            largest = torch.stack([maxima[name].amax(1) for name in names]).nan_to_num_(nan=math.inf)  # [layers, g]
            all_reduce_(largest, like.sharers, op="max")
            self._over_ranks(key, largest, op="max")
            clips = (largest > self._settings.qk_clip_threshold) & largest.isfinite() & (found_inf == 0)
            eta = torch.where(clips, self._settings.qk_clip_threshold / largest, 1.0)
            alpha = self._settings.qk_clip_alpha
            queries = [eta**alpha] * (like.r * like.sharers.size)
            of_head = [*queries, eta ** (1 - alpha), torch.ones_like(eta)]  # rows: queries, key, value
            rows = torch.stack(of_head, -1).repeat_interleave(like.d, -1).flatten(1)  # [layers, g (r + 2) d]
            rows = rows.chunk(like.sharers.size, 1)[like.sharers.rank]
            factors |= {f"{name}.attention.qkv": row for name, row in zip(names, rows, strict=True)}
        self.optimizer.wait_for_weights()
        for values, factor in self._parts(factors):
            values.mul_(factor)
        self.optimizer.write_weights(version)

    def _parts(self, factors: Mapping[str, Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
        """(A flat part of a master, the factor of each of its elements) for the projections of this rank."""
        for master in self.optimizer.masters:
            flat = master.tensor.view(-1)
            for range_, inside, here in master.pieces():
                layer, _, kind = range_.entry.name.rpartition(".")
                if layer in factors and kind in ("weight", "bias"):
                    columns = range_.entry.shape[-1] if kind == "weight" else 1
                    whole = factors[layer].to(flat.dtype).repeat_interleave(columns)
                    yield flat[here], whole[inside]
