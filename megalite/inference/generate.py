"""Text from a model, one token after the other, with a key-value cache.

    prompt [n] -> one forward fills the cache -> logits of the last position -> sample -> forward of one token -> ...

Sampling happens on the CPU from a generator of its own, so a seed gives the same text on every device that computes
the same logits. When the cache reaches the longest sequence the model can represent, generation continues from the
newer half of the text.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from megalite.errors import CheckpointError, ConfigError
from megalite.microbatch import Microbatch
from megalite.nn import Head, KeyValueCache, LayerStack


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How the next token is chosen; field names are the flags of tools/generate_text.py.

    greedy: the most likely token, always.
    temperature: divides the logits; 0 is greedy.
    top_k: only the k most likely tokens, 0 for all.
    top_p: only the most likely tokens that together reach probability p (nucleus sampling, arXiv 1904.09751).
    Raises ConfigError where a value is out of its range, or `greedy` comes with one that it makes meaningless.
    """

    greedy: bool = False
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 1234

    def __post_init__(self) -> None:
        problems = []
        if not self.temperature >= 0:
            problems.append(f"--temperature={self.temperature:g}: must be >= 0 (0: the most likely token, as --greedy)")
        if self.top_k < 0:
            problems.append(f"--top-k={self.top_k}: must be >= 0 (0: all tokens)")
        if not 0 < self.top_p <= 1:
            problems.append(f"--top-p={self.top_p:g}: must be above 0 and at most 1 (1: all tokens)")
        if not -(2**63) <= self.seed < 2**64:
            problems.append(f"--seed={self.seed}: must be below 2^64; choose a smaller one")
        if self.greedy and (self.temperature not in (0.0, 1.0) or (self.top_k, self.top_p) != (0, 1.0)):
            problems.append("--greedy: leaves no choice to --temperature, --top-k and --top-p; drop one or the other")
        if problems:
            raise ConfigError(problems)


def generate(
    model: LayerStack,
    prompt: Sequence[int],
    sampling: Sampling,
    *,
    max_new_tokens: int,
    eod_id: int | None,
    num_choices: int | None = None,
) -> Iterator[int]:
    """Yield the ids that follow `prompt`, until `max_new_tokens` or the end-of-document token (which is not yielded).

    prompt: ids, at least one; of a prompt longer than the model's positions only the end is seen.
    num_choices: ids from here on are never chosen (a vocabulary larger than its tokenizer).
    """
    assert prompt, "a model continues a text, so there is at least one token"
    generator = torch.Generator().manual_seed(sampling.seed)
    limit = model.config.max_positions
    text = list(prompt)
    layers = model.config.num_layers
    cache, pending = KeyValueCache(layers, limit), text[-limit:]
    for _ in range(max_new_tokens):
        if cache.length + len(pending) > limit:
            cache, pending = KeyValueCache(layers, limit), text[-max(1, limit // 2) :]
        logits = next_logits(model, pending, cache)[:num_choices]
        token = pick_token(logits, sampling, generator)
        if token == eod_id:
            return
        yield token
        text.append(token)
        pending = [token]


@torch.inference_mode()
def next_logits(model: LayerStack, tokens: Sequence[int], cache: KeyValueCache) -> Tensor:
    """Logits `[V]` on the CPU of what follows `tokens`, which follow what `cache` holds and are added to it."""
    device = next(model.parameters()).device
    ids = torch.tensor([tokens], dtype=torch.int64, device=device)
    start = cache.length
    microbatch = Microbatch(
        tokens=ids,
        labels=ids,
        positions=torch.arange(start, start + len(tokens), device=device)[None],
        loss_mask=torch.ones(ids.shape, device=device),
        sample_ids=torch.zeros(1, dtype=torch.int64, device=device),
    )
    x = model.body(None, microbatch, cache)
    return cast(Head, model.get_submodule("head")).logits(x[-1:])[0, 0].cpu()


def pick_token(logits: Tensor, sampling: Sampling, generator: torch.Generator) -> int:
    """Choose one id from logits `[V]`: temperature first, then top-k, then top-p, then a draw.

    Raises CheckpointError where they are not numbers.
    """
    if logits.isnan().any():
        raise CheckpointError("--load: the model's logits are not numbers (its training diverged?); load an older one")
    if sampling.greedy or sampling.temperature == 0:
        return int(logits.argmax())
    # From the largest one down and in fp64: no temperature is so low that the quotient is no number.
    logits = ((logits.double() - logits.max().double()) / sampling.temperature).to(logits.dtype)
    if 0 < sampling.top_k < logits.numel():
        kth = logits.topk(sampling.top_k).values[-1]
        logits = logits.masked_fill(logits < kth, -torch.inf)
    probabilities = logits.softmax(0)
    if sampling.top_p < 1:
        ordered, order = probabilities.sort(descending=True, stable=True)
        # A token stays if those before it do not reach p yet, so the most likely one always stays.
        dropped = order[ordered.cumsum(0) - ordered >= sampling.top_p]
        probabilities = probabilities.index_fill(0, dropped, 0.0)
    return int(torch.multinomial(probabilities, 1, generator=generator))
