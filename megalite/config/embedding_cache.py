"""How many rows of the word embedding a rank has, needs at once and caches, with `--embedding-offload`."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megalite.config.root import Config


def own_rows(config: Config) -> int:
    """Rows of the word embedding on a rank of the first stage, with padding; 0 while the vocabulary is not known."""
    tp = config.parallel.tensor_model_parallel_size
    return config.model.padded_vocab_size(tp) // tp if config.model.vocab_size else 0


def rows_at_once(config: Config) -> int:
    """The most rows that one micro-batch can use on a rank: a row for each of its tokens."""
    tokens = config.training.micro_batch_size * config.model.seq_length
    tokens //= config.parallel.context.context_parallel_size
    return min(tokens, own_rows(config) or tokens)


def cache_problem(config: Config) -> str | None:
    """Why the cache that is asked for is too small; None where it is not, or the vocabulary is not known yet."""
    rows, needed = config.optimizer.offload.embedding_cache_rows, rows_at_once(config)
    if not config.model.vocab_size or rows is None or rows >= needed:
        return None
    return (
        f"`embedding_cache_rows`={rows}: a micro-batch may use {needed:,} rows at once; use {needed} or more, or a "
        "smaller `micro_batch_size`"
    )


def cache_rows(config: Config) -> int:
    """Rows of the cache."""
    given = config.optimizer.offload
    wanted = given.embedding_cache_rows or (given.embedding_lookahead + 1) * rows_at_once(config)
    return min(wanted, own_rows(config) or wanted)
