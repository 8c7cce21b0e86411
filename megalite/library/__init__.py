"""megalite as a library: your own layers in its engine. What `import megalite` offers comes from here.

    losses = megalite.run(train, nprocs=4)      train(world) on every rank: here, or under torchrun or srun

    def train(world):
        mesh = megalite.ParallelMesh.build(rank=world.rank, size=world.size, pp=2)
        pipe = megalite.Pipeline(layers, schedule="zb-h1", mesh=mesh, example=x, loss=loss_fn)
        optimizer = megalite.ShardedOptimizer(pipe, "adamw", lr=3e-4, zero_stage=1)
        loss = pipe.step(micro_batches)
        optimizer.step()

    pipeline.py    `Pipeline`: any list of modules under any schedule; given.py: what is wrong with it
    parts.py       the layers of its stages
    agreement.py   do the ranks of a replica read the same samples
    optimizer.py   `ShardedOptimizer`: gradients summed over the replicas, update rules under ZeRO
    cutting.py     which layers a stage holds, and what crosses between stages
    names.py       what parameters are called at any layout, and which of them several stages share
    tracing.py     one module as a graph; linearise.py: where to cut it; traced_layer.py: `layers_from_module`
    sequences.py   attention of such a module by our core: documents, and ranks that share a sequence
    tables.py      do its embeddings have the rows that are looked up
    tensor_cut.py  linear layers of such a module over tensor-parallel ranks, by a table of names; tensor_check.py: is
                   what lies between them right on parts
    modules.py     a stage made of somebody's modules; their linear layers split the backward like ours
    timing.py      `time_layers`; what watches a step
    ranks.py       `run`: processes without a configuration, and what rank 0 returns
    factory.py     a module by its name, for `--model-module` (megalite/train/foreign.py)

Invariant: a step equals the same modules in one process on the whole batch, whatever the schedule and the layout.
Proof: `tests/equivalence/test_library.py`.
"""

from megalite.library.checkpoint import STATE_KEYS, read_weights, still_shards
from megalite.library.cutting import Boundary
from megalite.library.factory import module_of
from megalite.library.modules import Sample, StageModule
from megalite.library.optimizer import ShardedOptimizer
from megalite.library.parts import Parts
from megalite.library.pipeline import Pipeline
from megalite.library.ranks import run
from megalite.library.sequences import Sequences
from megalite.library.timing import LayerTime, time_layers
from megalite.library.traced_layer import TracedLayer, draws, layers_from_module, layers_over
from megalite.library.tracing import without_values
