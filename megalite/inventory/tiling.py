"""How work is cut into pieces: chunks of logits, blocks of queries, layers that are recomputed together.

Layers compute in these pieces, and the planner counts their memory.
"""

from collections.abc import Sequence

from megalite.inventory.memory_plan import Recompute

# Logits of one chunk, as elements on one rank: 16 MiB of fp32 stay near a CPU's cache. On a GPU the product that adds
# n tokens to the gradient of the weight moves 8 bytes an element of it, for 2 n operations: with few it waits for
# memory. Compiled kernels have 4 bytes a logit at once, eager ones 10: about a gigabyte of either.
CHUNK_ELEMENTS_CPU, CHUNK_ELEMENTS_CUDA, CHUNK_ELEMENTS_COMPILED = 1 << 22, 1 << 27, 1 << 28

# Lengths at which products over blocks of queries beat the library's CPU kernel (measured on one core in fp32: even at
# 128 tokens, 1.2 x at 256, 1.5 x at 512, 1.3 x at 1024).
BLOCKED_FROM, BLOCKED_UP_TO = 128, 1024

GRAPH_WARM_UP = 3
"""Micro-batches that run before blocks are CUDA graphs: libraries make their handles, and the compiler its kernels."""

STEP_PIECE = 1 << 22
"""Elements of a long tensor that an optimizer steps at once: 16 MB in fp32 for each temporary tensor."""


def chunk_length(tokens: int, columns: int, *, on_cpu: bool, compiled: bool = False) -> int:
    """Tokens whose logits, `columns` each, exist at a time; on a GPU whole tiles of its products."""
    elements = CHUNK_ELEMENTS_COMPILED if compiled else CHUNK_ELEMENTS_CUDA
    most = (CHUNK_ELEMENTS_CPU if on_cpu else elements) // max(1, columns)
    return max(1, min(tokens, most if on_cpu or most < 128 else most // 128 * 128))


def query_blocks(length: int) -> list[tuple[int, int]]:
    """(begin, end) of the blocks of queries of blocked attention."""
    size = 64 if length < 512 else 128
    return [(begin, min(begin + size, length)) for begin in range(0, length, size)]


def block_area(length: int) -> int:
    """Weights of one head: every block of queries against the keys up to its own end."""
    return sum((end - begin) * end for begin, end in query_blocks(length))


def recompute_ranges(count: int, blocks: Sequence[int], how: Recompute) -> list[tuple[int, int, bool]]:
    """Cuts `count` layers, of which the indices `blocks` are transformer blocks, into (begin, end, recompute)."""
    if not how.method or not blocks:
        return [(0, count, False)]
    first, last = blocks[0], blocks[-1] + 1
    ranges = [(0, first, False)] if first else []
    ranges += recomputed_layers(first, last, *how)
    return ranges + ([(last, count, False)] if last < count else [])


def recomputed_layers(first: int, last: int, method: str, number: int) -> list[tuple[int, int, bool]]:
    """Cuts the layers `first` to `last` (excluded) into (begin, end, recompute).

    method: 'block': the first `number` layers, each from its own input; else ('uniform') every chunk of `number`.
    """
    if method != "block":
        return [(i, min(i + number, last), True) for i in range(first, last, number)]
    kept = min(first + number, last)
    return [*((i, i + 1, True) for i in range(first, kept)), *([(kept, last, False)] if kept < last else [])]
