"""Sampling: choosing the next token, on ranks that share the vocabulary.

    greedy          the largest logit: each rank's largest, then the largest of these
    draw            the largest of logit / temperature + Gumbel noise, which is a draw from the softmax (Gumbel-max;
                    Maddison et al., arXiv 1411.0030): nothing is normalised, so nothing is gathered
    top-k, top-p    the k-th largest logit of all (and the last of the nucleus) is a bound, below which tokens are out;
                    ranks exchange their k largest values, for top-p without top-k all of them

The noise of a token is a hash of (seed, number of the prompt, position in the text, id): the same at every layout,
whatever is generated beside it and whatever came before. Sums and logarithms are in fp64.
"""

import torch
from torch import Tensor

from megalite.comm import Axis, all_gather
from megalite.config import Sampling
from megalite.nn import combine, site_key

NO_NUMBER = -1
"""In place of a token where logits are not numbers."""


def pick_tokens(
    logits: Tensor,
    sampling: Sampling,
    seeds: Tensor,
    numbers: Tensor,
    positions: Tensor,
    *,
    num_choices: int,
    axis: Axis | None = None,
) -> Tensor:
    """Choose one id a row, int64 `[b]`; `NO_NUMBER` where a logit is not a number. Collective over `axis`.

    logits: `[b, V/t]`, rank r's from id r * V/t on. seeds, numbers, positions: int64 `[b]`, what keys a row's noise:
        added to the seed, the number of its prompt, the position in the text of the token that is chosen.
    num_choices: ids from here on are never chosen. axis: the ranks that share the vocabulary; None: this one alone.
    """
    axis = axis or Axis.single("tp")
    ids = torch.arange(logits.shape[1], device=logits.device) + axis.rank * logits.shape[1]
    out = ids >= num_choices
    scores = logits.double().masked_fill(out, -torch.inf)
    broken = scores.isnan().any(1)
    if not sampling.greedy and sampling.temperature > 0:
        top = all_gather(scores.amax(1)[None], axis).amax(0)
        scores = ((scores - top[:, None]) / sampling.temperature).masked_fill(out, -torch.inf)
        if sampling.top_k or sampling.top_p < 1:
            scores = scores.masked_fill(scores < least_allowed(scores, sampling, axis)[:, None], -torch.inf)
        scores = scores + gumbel_noise(sampling.seed, seeds, numbers, positions, ids)
    best = scores.amax(1)
    first = ids.expand_as(scores).masked_fill(scores < best[:, None], torch.iinfo(torch.int64).max).amin(1)
    own = torch.stack((best, first.double(), broken.double()))
    bests, firsts, breaks = all_gather(own[None], axis).unbind(1)  # [t, b] each
    chosen = firsts.masked_fill(bests < bests.amax(0), torch.inf).amin(0)
    return chosen.masked_fill(breaks.amax(0) > 0, NO_NUMBER).long()


def least_allowed(scores: Tensor, sampling: Sampling, axis: Axis) -> Tensor:
    """The smallest score, `[b]`, that top-k and then top-p leave in, of scores `[b, V/t]`. Collective."""
    count = sampling.top_k or scores.shape[1] * axis.size
    values = scores.topk(min(count, scores.shape[1]), 1).values
    everyone = all_gather(values.t().contiguous(), axis).t()
    values = everyone.sort(1, descending=True).values[:, :count]
    if sampling.top_p == 1:
        return values[:, -1]
    weights = (values - values[:, :1]).exp()
    before = weights.cumsum(1) - weights
    # A token stays if those before it do not reach p yet, so the most likely one always stays.
    stay = before < sampling.top_p * weights.sum(1, keepdim=True)
    return values.masked_fill(~stay, torch.inf).amin(1)


def gumbel_noise(seed: int, seeds: Tensor, numbers: Tensor, positions: Tensor, ids: Tensor) -> Tensor:
    """-log(-log(u)), fp64 `[b, V]`, with u in (0, 1) a hash of 53 bits of what keys the row, and of the id."""
    rows = torch.stack([site_key(seed + more, "sampling") for more in seeds.tolist()]).to(ids.device)
    rows = combine(combine(rows, numbers), positions)[:, None]
    high, low = combine(rows, ids), combine(rows ^ 0x5BD1E995, ids)
    uniform = ((high << 21 | low >> 11).double() + 0.5) * 2.0**-53
    return -torch.log(-torch.log(uniform))
