"""Measures that people compare models by: WikiText's word perplexity and LAMBADA's last-word accuracy.

    (context, continuation) pairs -> log-likelihood of the continuation, and whether greedy decoding gives it

Both read local files. `harness.py` offers the same scoring to lm-evaluation-harness.
"""

import itertools
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from megalite.comm import all_reduce_
from megalite.data import JSONL_SUFFIXES, read_jsonl, read_text
from megalite.errors import DataError
from megalite.generation import Sampling, pick_tokens
from megalite.inference.forwards import at_once, score_all
from megalite.inference.loaded_model import LoadedModel
from megalite.microbatch import Microbatch
from megalite.nn import Head
from megalite.observe import Record
from megalite.progress import OnProgress, no_progress


class Continuation(NamedTuple):
    """Log-likelihood of all its tokens together in nats, and whether each of them is the most likely in its place."""

    log_likelihood: float
    is_greedy: bool


def score_continuations(
    loaded: LoadedModel, pairs: Iterable[tuple[Sequence[int], Sequence[int]]], *, micro_batch_size: int = 16
) -> Iterator[Continuation]:
    """Score ids that follow a context, pair by pair; of a context that is too long the end is seen.

    Collective: the ranks share the pairs, and all of them get all scores. Raises DataError where a context is empty, or
    a continuation is empty or longer than the model's positions.
    """
    limit = loaded.config.model.text_positions
    replicas = loaded.mesh.size("stream")
    following = iter(pairs)
    while chosen := list(itertools.islice(following, micro_batch_size * replicas * at_once(loaded))):
        rows = []
        for context, continuation in chosen:
            if not context or not 0 < len(continuation) <= limit:
                raise DataError(
                    f"a context of {len(context)} and a continuation of {len(continuation)} tokens cannot be scored; "
                    f"the context needs at least 1 token, the continuation between 1 and {limit}"
                )
            rows.append(([*context, *continuation][-(limit + 1) :], len(continuation)))
        yield from _score_rows(loaded, rows, micro_batch_size)


def _score_rows(loaded: LoadedModel, rows: list[tuple[list[int], int]], size: int) -> list[Continuation]:
    """rows: (ids of context and continuation, length of the continuation)."""
    mesh = loaded.mesh
    replicas = mesh.size("stream")
    mine = range(mesh.coordinate("stream"), len(rows), replicas)
    count = -(-len(rows) // (size * replicas))  # the same on all replicas, which may hold each other's experts
    parts = [mine[first * size : (first + 1) * size] for first in range(count)]
    filled = [[rows[place] for place in part] or [([0, 0], 0)] for part in parts]
    found = score_all(loaded, [_padded(part, loaded.parts.unit) for part in filled], _likelihoods)
    table = torch.zeros(len(rows), 2, dtype=torch.float64, device=loaded.device)
    for number, scores in found.items() if mesh.coordinate("tp") == 0 else ():
        table[list(parts[number])] = scores[: len(parts[number])]
    all_reduce_(table, mesh.world)
    return [Continuation(likelihood, misses == 0) for likelihood, misses in table.tolist()]


def _padded(rows: list[tuple[list[int], int]], unit: int) -> Microbatch:
    """Padded behind, where no token looks; the loss mask says which labels are the continuation's."""
    length = -(-(max(len(ids) for ids, _ in rows) - 1) // unit) * unit
    text = torch.zeros(len(rows), length + 1, dtype=torch.int64)
    mask = torch.zeros(len(rows), length)
    for row, (ids, count) in enumerate(rows):
        text[row, : len(ids)] = torch.tensor(ids)
        mask[row, len(ids) - 1 - count : len(ids) - 1] = 1
    return Microbatch(
        tokens=text[:, :-1],
        labels=text[:, 1:],
        positions=torch.arange(length).expand(len(rows), -1),
        loss_mask=mask,
        sample_ids=torch.arange(len(rows)),
    )


def _likelihoods(head: Head, x: Tensor, microbatch: Microbatch) -> Tensor:
    """(log-likelihood, labels that are not the most likely one) of this rank's part of each row, fp64 `[b, 2]`."""
    wanted = microbatch.loss_mask.bool()
    result = torch.zeros(len(wanted), 2, dtype=torch.float64, device=x.device)
    labels = microbatch.labels[wanted]
    row = wanted.nonzero()[:, 0]
    if len(row):
        chosen = x.transpose(0, 1)[wanted][:, None]  # [n, 1, h]
        losses = head.token_losses(chosen, replace(microbatch, labels=labels[None]))[0].double()
        logits = head.local_logits(chosen)[:, 0]
        zeros = torch.zeros_like(row)
        greedy = Sampling(greedy=True)
        best = pick_tokens(logits, greedy, zeros, zeros, zeros, num_choices=head.vocab_size, axis=head.tp)
        result.index_add_(0, row, torch.stack((-losses, (best != labels).double()), 1))
    return result


def last_word_accuracy(loaded: LoadedModel, texts: Iterable[str], *, on_progress: OnProgress = no_progress) -> Record:
    """LAMBADA's measure (arXiv 1606.06031): how often greedy decoding gives the whole last word of a passage.

    Context and last word are tokenised apart, the word with the space before it, the context behind `loaded.front`. A
    passage of one word is left out.
    """
    encode = loaded.tokenizer.encode
    split = [text.strip().rsplit(None, 1) for text in texts]
    pairs = [([*loaded.front, *encode(parts[0])], encode(" " + parts[1])) for parts in split if len(parts) == 2]
    if not pairs:
        raise DataError("no passage with at least two words; give a JSONL file with a field 'text' in each line")
    results = []
    for result in score_continuations(loaded, pairs):
        results.append(result)
        on_progress(len(results), len(pairs), "")
    return {
        "accuracy": sum(result.is_greedy for result in results) / len(results),
        "last_word_ppl": math.exp(-math.fsum(result.log_likelihood for result in results) / len(results)),
        "num_passages": len(results),
    }


def read_passages(path: Path) -> list[str]:
    """Passages of a local file: field `text` of each JSONL line, or each line of plain text. Raises DataError."""
    if path.name.endswith(JSONL_SUFFIXES):
        return list(read_jsonl(str(path), "`text_file`"))
    return [line for line in read_text(str(path), str(path)).splitlines() if line.strip()]


#: How WikiText writes text apart, and the text it came from; applied in this order.
_WIKITEXT_RULES: tuple[tuple[str, str], ...] = (
    (r" @([-,.])@ ", r"\1"),  # 1 @,@ 000
    (r"(?<==) (?==)", ""),  # headings: = = title = =
    (r"\( ([^()]*?) \)", r"(\1)"),
    (r"\[ ([^\[\]]*?) \]", r"[\1]"),
    (r'" ([^"\n]*?) "', r'"\1"'),
    (r" ([,.;:!?])(?=\s|$)", r"\1"),
    (r" '(?=(?:s|t|re|ve|ll|d|m)\b)", "'"),
    (r"(?<=s) '(?= )", "'"),
    (r"(?<=\d) – (?=\d)", "–"),
    (r"(?<=\$) (?=\d)", ""),
)


def detokenize_wikitext(text: str) -> str:
    """Undo WikiText's spacing of punctuation, so that a model sees text as it was trained on.

    Word perplexity still divides by the words of the spaced text: that is what is compared across models.
    """
    for pattern, replacement in _WIKITEXT_RULES:
        text = re.sub(pattern, replacement, text)
    return text
