"""The transformer as a textbook: every layer is `forward(x, microbatch) -> x`, and a model is an ordered list of them.

    embedding -> block 0 -> ... -> block L-1 -> head

Letters of all shapes in this project: b samples of a micro-batch, s sequence, h hidden, a query heads, g key/value
heads (groups), r = a/g, d channels of a head, f MLP width, V vocabulary, P positions, t tensor-parallel size, L
layers. Activations are `[s, b, h]` (`[s/t, b, h]` under sequence parallelism); tokens, labels and masks are `[b, s]`;
only embedding and head transpose.

    init.py                logical names; initial values from (seed, name)
    embedding.py, block.py (attention/layer.py, mlp.py, norm.py), head.py       the layers
    experts.py, router.py       the MLP of a block with experts
    attention/             the layer, which kernel computes it, and the kernels
    delta.py, delta_rule.py     a state in attention's place (Gated DeltaNet), and its recurrence in chunks
    mtp.py                 further predictions behind the last block
    rope.py, activation.py, dropout.py       what these are made of
    stack.py               a stage's layers and recomputation
    graphs.py              CUDA graphs of a stage's blocks
    segment.py, halves.py  pieces of a block between messages; a stage in which two half-batches take turns at them
    grid.py                layers whose tensor-parallel ranks form a grid
    kv_cache.py            keys and values of generation

A layer gets everything about the run from its `LayerContext` (`parallel.tensor`), calls collectives only through it,
and computes the same at every layout. Proof: `tests/unit/nn`, `tests/distributed/parallel/tensor/`.
"""

from megalite.nn.attention.choose import NARROWEST_HEAD
from megalite.nn.attention.context import context_attention
from megalite.nn.attention.core import AttentionCore
from megalite.nn.attention.largest import largest_scores
from megalite.nn.attention.layer import Attention
from megalite.nn.attention.trials import use_newer_kernel
from megalite.nn.block import Block
from megalite.nn.dropout import combine, site_key
from megalite.nn.embedding import Embedding
from megalite.nn.graphs import BlockGraphs
from megalite.nn.grid import grid_layers, on_grid
from megalite.nn.halves import HalvedBlock, HalvedStack
from megalite.nn.head import Head
from megalite.nn.init import fill, initialize
from megalite.nn.kv_cache import LayerCache
from megalite.nn.mtp import FurtherPredictions
from megalite.nn.rope import Rotary
from megalite.nn.router import NamedBias, expert_biases
from megalite.nn.stack import LayerStack
from megalite.nn.uncompiled import Uncompiled
