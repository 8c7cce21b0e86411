"""megalite as a library: your own layers in its engine. What `import megalite` offers comes from here.

    losses = megalite.run(train, nprocs=4)      train(world) on every rank: here, or under torchrun or srun

    def train(world):
        mesh = megalite.ParallelMesh.build(rank=world.rank, size=world.size, pp=2)
        pipe = megalite.Pipeline(layers, schedule="zb-h1", mesh=mesh, example=x, loss=loss_fn)
        optimizer = megalite.ShardedOptimizer(pipe, "adamw", lr=3e-4, zero_stage=1)
        loss = pipe.step(micro_batches)
        optimizer.step()

Invariant: a step equals the same modules in one process on the whole batch, whatever the schedule and the layout.
Proof: `tests/equivalence/test_library.py`.
"""

from megalite.library.checkpoint import STATE_KEYS, read_weights, still_shards
from megalite.library.cutting import Boundary, Ranges
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
