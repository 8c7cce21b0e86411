"""Context parallelism: every sequence cut over the ranks of an axis, so that none holds a long one whole.

Papers: Ring Attention, Liu et al., arXiv 2310.01889; Ulysses, Jacobs et al., arXiv 2309.14509; Llama 3, arXiv
2407.21783 (all-gather of keys and values, the zig-zag split); all three are the domain dimension of Gholami et al.,
arXiv 1712.04432.

    rank c of 4 holds chunks c and 7 - c of 8, so that causal attention is equal work for all:

    tokens    0 | 1 | 2 | 3 | 4 | 5 | 6 | 7
    rank      0   1   2   3   3   2   1   0

Everything but attention works token by token and never notices. Attention sees the other ranks' tokens by passing keys
and values round a ring or by gathering them (`ring.py`), or by trading tokens for heads; with two levels heads are
traded inside, keys and values passed round outside.

Invariant: losses, gradients and norms are those of one process up to the order of additions, at every size and kind,
and no checkpoint knows either. Proof: `tests/distributed/parallel/context/`, `tests/equivalence/`.
"""

from megalite.parallel.context.ring import (
    AttentionKernel,
    Gathering,
    Operands,
    empty_result,
    gathered_attention,
    ring_attention,
)
from megalite.parallel.context.sequence import (
    SequenceCut,
    sequence_order,
    trade_heads_for_tokens,
    trade_tokens_for_heads,
)
