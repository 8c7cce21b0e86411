"""Loss by document: which texts an iteration has read, and what each of them cost."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from megalite.comm import all_gather_json
from megalite.microbatch import PIECE, Microbatch
from megalite.nn import Head
from megalite.proof.outliers import Sample, outliers
from megalite.train import OpenRun

SHOWN = 48
ONE_TOKEN, AT_LEAST = 0.9, 32
"""A document stands out, however cheap, if it has this many tokens and so much of it is one of them: no text is."""


@dataclass(frozen=True)
class DocumentLoss:
    """source: name of the data; document: its number there; loss: mean in nats over `tokens` tokens of the batch, its
    first one left out, which nothing foretells. same: which part of its tokens in a sample is the commonest one.
    """

    source: str
    document: int
    loss: float
    tokens: int
    text: str
    same: float = 0.0

    def __str__(self) -> str:
        return f"{self.source} document {self.document}"


class TokenLosses:
    """Notes the loss of every token that this rank's head computes."""

    def __init__(self, run: OpenRun) -> None:
        self._run = run
        self._sums: dict[tuple[str, int], list[float]] = {}
        self._text: dict[tuple[str, int], tuple[str, float]] = {}
        for stage in run.trainer.executor.stages.values():
            for module in stage.modules:
                if stage.is_last:
                    head = module.get_submodule("head")
                    head.register_forward_pre_hook(self._heard)

    def _heard(self, head: nn.Module, args: tuple[Tensor, Microbatch]) -> None:
        x, microbatch = args
        losses = cast(Head, head).token_losses(x.detach(), microbatch).double()
        if self._run.trainer.mesh.coordinate("tp"):
            return  # its peers hold the same
        weighed = microbatch.loss_mask.bool()
        if microbatch.places is not None:  # of a cut sequence: the other tokens weigh nothing here
            whole = losses.new_zeros(len(losses), len(microbatch.order if microbatch.order is not None else ()))
            losses = whole.index_copy(1, microbatch.places, losses)
            weighed = torch.zeros_like(whole, dtype=torch.bool).index_copy(1, microbatch.places, weighed)
        for sequence, row, mask in zip(microbatch.sample_ids.tolist(), losses.cpu(), weighed.cpu(), strict=True):
            sample, start = sequence % PIECE, sequence // PIECE * losses.shape[1]  # it may have been cut
            for key, begin, end, text, same in self._documents(sample):
                here = slice(max(0, begin - start), max(0, end - start))
                counted = mask[here]
                if bool(counted.any()):
                    entry = self._sums.setdefault(key, [0.0, 0.0])
                    entry[0] += float(row[here][counted].sum())
                    entry[1] += int(counted.sum())
                    self._text[key] = text, max(same, self._text.get(key, ("", 0.0))[1])

    def _documents(self, sample: int) -> Iterator[tuple[tuple[str, int], int, int, str, float]]:
        """(source and document, first and last label of it in the sample, how it begins, part that is one token)."""
        dataset = self._run.state.datasets.train
        assert dataset is not None
        cut = dataset.cut(sample)
        part, at = cut.part, 0
        for sequence, begin, end in cut.pieces():
            document = part.store.document_of(sequence)
            # label i is token i + 1; what a document begins with follows from nothing, and is not counted
            first, last = at if begin == 0 else max(0, at - 1), at + end - begin - 1
            if last > first:
                ids = part.store.get(sequence, 0, min(SHOWN, int(part.store.lengths[sequence])))
                text = self._run.state.tokenizer.decode(ids.tolist())
                same = part_of_one(part.store.get(sequence, begin, end))
                yield (part.store.name, document), first, last, " ".join(text.split())[:SHOWN], same
            at += end - begin

    def take(self) -> list[DocumentLoss]:
        """Of all ranks, dearest first: what was heard since the last time. Collective."""
        mine = [[*key, *sums, *self._text[key]] for key, sums in self._sums.items()]
        everyone = all_gather_json(mine, self._run.trainer.mesh.world)
        self._sums.clear()
        self._text.clear()
        return merged(one for rank in everyone for one in rank)


def part_of_one(ids: np.ndarray) -> float:
    """Which part of these tokens is the commonest one; 0 of few."""
    return float(np.unique(ids, return_counts=True)[1].max() / len(ids)) if len(ids) >= AT_LEAST else 0.0


def merged(entries: Iterable[Sequence[Any]]) -> list[DocumentLoss]:
    """Documents that several samples have read count once."""
    table: dict[tuple[str, int], list[Any]] = {}
    for source, document, total, tokens, text, same in entries:
        entry = table.setdefault((source, document), [0.0, 0, text, 0.0])
        entry[0] += total
        entry[1] += int(tokens)
        entry[3] = max(entry[3], same)
    found = [DocumentLoss(*key, total / tokens, tokens, *more) for key, (total, tokens, *more) in table.items()]
    return sorted(found, key=lambda one: one.loss, reverse=True)


def outstanding(documents: Sequence[DocumentLoss], beside: Mapping[int, Sequence[DocumentLoss]]) -> list[DocumentLoss]:
    """Those whose loss no document of their length has, and those that are one token over and over. beside: the
    documents of other iterations."""
    others = {iteration: [Sample(one.loss, one.tokens) for one in group] for iteration, group in beside.items()}
    dear = outliers([Sample(one.loss, one.tokens) for one in documents], others)
    return [one for place, one in enumerate(documents) if place in dear or one.same >= ONE_TOKEN]
