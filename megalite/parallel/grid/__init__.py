"""Tensor parallelism over a grid: ranks share the tokens of a micro-batch, the inputs and the outputs of each matrix.

Papers: SUMMA (van de Geijn and Watts, 1997); 2D, Xu and You, arXiv 2104.05343; 2.5D, Wang et al., arXiv 2105.14500;
3D, Bian et al., arXiv 2105.14450; AxoNN's four dimensions, Singh et al., arXiv 2305.13525.

    rank (x, y, z) of X x Y x Z      a matrix [out, in], column layer              its row layer

    activations  [s, b/Z, in/XY]     -- gather over Y -->  [s, b/Z, in/X]          -- gather over X --> [s, b/Z, in/Y]
    weight       [out/YZ, in/X]      -- gather over Z -->  [out/Y, in/X]           -- gather over Z --> [out/X, in/Y]
    result       [s, b/Z, out/Y]     -- sum over X     -->  [s, b/Z, out/XY]       -- sum over Y    --> [s, b/Z, out/XY]

    2d: 1 x q x q      2.5d: 1 x q x dq      3d: q x q x q      4d: X x Y x Z as it is given, times data parallelism

The broadcasts of SUMMA's q steps are one gather; where X is 1, the row layer is its form with the left matrix in place.

Invariant: every rank keeps 1/P of each matrix, of its gradient and of the activations between products, and the
numbers are those of one process. Proof: `tests/equivalence/test_grids.py` (fp64, 1e-12), and what is kept and sent,
counted: `tests/distributed/parallel/grid/`.
"""

from megalite.parallel.grid.exchange import Grid, features_to_tokens, gather_parameter, sum_to_features
from megalite.parallel.grid.layers import Sides, grid_norm, grid_product
