"""What multi-token prediction reads and is asked for, token by token as its definition says it: what `train.further`
must equal for one process."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from megalite.microbatch import Microbatch


def plain_further(samples: Sequence[Microbatch], depth: int, *, per_token: bool) -> list[Microbatch]:
    """The samples of a batch, one each. per_token: every token has the same weight, not every sample."""
    if not depth:
        return list(samples)
    found = [_of_sample(sample, depth) for sample in samples]
    given = [float(sample.loss_mask.sum()) for sample in samples]
    counts = [[float(mask[0, k].sum()) for k in range(depth)] for _, _, mask in found]
    made = []
    for sample, main, own, (tokens, labels, mask) in zip(samples, given, counts, found, strict=True):
        wanted = [sum(column) for column in zip(*counts, strict=True)] if per_token else own
        for k in range(depth):
            mask[0, k] *= max(1.0, sum(given) if per_token else main) / max(1.0, wanted[k])
        made.append(replace(sample, further_tokens=tokens, further_labels=labels, further_weights=mask))
    return made


def _of_sample(sample: Microbatch, depth: int) -> tuple[Tensor, Tensor, Tensor]:
    line, s = [*sample.tokens[0].tolist(), int(sample.labels[0, -1])], sample.shape[1]
    starts = [0] * s if sample.document_starts is None else sample.document_starts[0].tolist()
    tokens, labels = torch.zeros(1, depth, s, dtype=torch.int64), torch.zeros(1, depth, s, dtype=torch.int64)
    mask = torch.zeros(1, depth, s, dtype=torch.float64)
    for k in range(1, depth + 1):
        for i in range(s):
            tokens[0, k - 1, i] = line[i + k] if i + k <= s else 0
            if i + k < s:
                labels[0, k - 1, i] = line[i + k + 1]
                mask[0, k - 1, i] = float(sample.loss_mask[0, i + k]) * (starts[i + k] == starts[i])
    return tokens, labels, mask
