"""Expert parallelism: the experts of a block dealt out over ranks, tokens travel to them and back.

Papers: Shazeer et al., arXiv 1701.06538 (sparsely gated experts); GShard, Lepikhin et al., arXiv 2006.16668
(all-to-all); MegaBlocks, Gale et al., arXiv 2211.15841 (no token is dropped to make shapes even).

    tokens of a rank   t0 t1 t2     each takes k = 2 of E = 4 experts, two on each of two ranks
    choices            e0 e2 | e2 e3 | e0 e1
    sorted, sent       [e0: t0 t2 | e1: t2] -> rank 0        [e2: t0 t1 | e3: t1] -> rank 1
    products           rows of one expert after the other, each group times its own matrix
    back, added up     w0 y(e0, t0) + w1 y(e2, t0) ...       in the order of the token's choices

Invariant: outputs, gradients and norms are those of one process up to the order of additions, at every size, with every
distribution of tokens (all to one expert, none to some). Proof: `tests/unit/nn/test_expert_layers.py`,
`tests/equivalence/test_experts.py`, of another library `tests/equivalence/test_carried_experts.py`.
"""

from megalite.parallel.expert.carried import Carried, TokenLibrary, expert_axes
from megalite.parallel.expert.grouped import ElementwiseFunction, GroupedProduct
from megalite.parallel.expert.plan import Dispatched, RowCounts, plan_dispatch
