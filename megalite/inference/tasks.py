"""Measures that people compare models by: WikiText's word perplexity and LAMBADA's last-word accuracy.

    (context, continuation) pairs -> log-likelihood of the continuation, and whether greedy decoding gives it

Both read local files. `tools/lm_harness.py` offers the same scoring to lm-evaluation-harness.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch

from megalite.data import JSONL_SUFFIXES, read_jsonl
from megalite.errors import DataError
from megalite.inference.loaded_model import LoadedModel
from megalite.microbatch import Microbatch
from megalite.nn import Head
from megalite.observe import Record
from megalite.progress import OnProgress, untold


@dataclass(frozen=True)
class Continuation:
    """Log-likelihood of all its tokens together in nats, and whether each of them is the most likely in its place."""

    log_likelihood: float
    is_greedy: bool
    num_tokens: int


def score_continuations(
    loaded: LoadedModel, pairs: Iterable[tuple[Sequence[int], Sequence[int]]], *, micro_batch_size: int = 16
) -> Iterator[Continuation]:
    """Score ids that follow a context, pair by pair; of a context that is too long the end is seen.

    Raises DataError where a context is empty, or a continuation is empty or longer than the model's positions.
    """
    limit = loaded.config.model.max_positions
    following = iter(pairs)
    while chosen := list(itertools.islice(following, micro_batch_size)):
        rows = []
        for context, continuation in chosen:
            if not context or not 0 < len(continuation) <= limit:
                raise DataError(
                    f"a context of {len(context)} and a continuation of {len(continuation)} tokens cannot be scored; "
                    f"the context needs at least 1 token, the continuation between 1 and {limit}"
                )
            rows.append(([*context, *continuation][-(limit + 1) :], len(continuation)))
        yield from _score_padded(loaded, rows)


@torch.inference_mode()
def _score_padded(loaded: LoadedModel, rows: list[tuple[list[int], int]]) -> list[Continuation]:
    """rows: (ids of context and continuation, length of the continuation), padded behind, where no token looks."""
    length = max(len(ids) for ids, _ in rows) - 1
    text = torch.zeros(len(rows), length + 1, dtype=torch.int64)
    for row, (ids, _) in enumerate(rows):
        text[row, : len(ids)] = torch.tensor(ids)
    microbatch = Microbatch(
        tokens=text[:, :-1],
        labels=text[:, 1:],
        positions=torch.arange(length).expand(len(rows), -1),
        loss_mask=torch.ones(len(rows), length),
        sample_ids=torch.arange(len(rows)),
    ).to(loaded.device)
    x = loaded.model.body(None, microbatch)
    head = cast(Head, loaded.model.get_submodule("head"))
    results = []
    for row, (ids, count) in enumerate(rows):
        places = slice(len(ids) - 1 - count, len(ids) - 1)
        logits = head.logits(x[places, row : row + 1])[:, 0]
        labels = microbatch.labels[row, places]
        likelihoods = logits.double().log_softmax(-1).gather(1, labels[:, None])
        greedy = bool((logits.argmax(-1) == labels).all())
        results.append(Continuation(float(likelihoods.sum()), greedy, count))
    return results


def last_word_accuracy(loaded: LoadedModel, texts: Iterable[str], *, on_progress: OnProgress = untold) -> Record:
    """LAMBADA's measure (arXiv 1606.06031): how often greedy decoding gives the whole last word of a passage.

    Context and last word are tokenised apart, the word with the space before it. A passage of one word is left out.
    """
    encode = loaded.tokenizer.encode
    split = [text.strip().rsplit(None, 1) for text in texts]
    pairs = [(encode(parts[0]), encode(" " + parts[1])) for parts in split if len(parts) == 2]
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
        return list(read_jsonl(str(path), "--text-file"))
    return [line for line in read_text(path).splitlines() if line.strip()]


def read_text(path: Path) -> str:
    """A whole UTF-8 file, its line ends as they are. Raises DataError where it is missing or not UTF-8."""
    try:
        return path.read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: not UTF-8 text (byte {error.start}); convert it") from None
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from None


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
