"""A schedule of your own: written down, proved, drawn, priced and run.

python examples/custom_schedule.py
"""

import torch
from torch import nn

import megalite

# 1F1B whose last rank postpones weight gradients (B is a whole backward; I and W are its two halves).
MINE = """
name: late-weights
ranks: 2
stages: 0 1
microbatches: 3
rank 0: 0F0 0F1 0B0 0F2 0B1 0B2
rank 1: 1F0 1I0 1F1 1I1 1F2 1I2 1W0 1W1 1W2
"""
PROGRAM = megalite.parse_program(MINE)


def train(world: megalite.World) -> None:
    torch.manual_seed(0)
    layers = [nn.Linear(32, 32) for _ in range(4)]
    mesh = megalite.ParallelMesh.build(rank=world.rank, size=world.size, pp=2)
    pipe = megalite.Pipeline(
        layers,
        schedule=PROGRAM,
        mesh=mesh,
        example=torch.empty(8, 32),
        loss=nn.functional.mse_loss,
        device=world.device,
    )
    optimizer = megalite.ShardedOptimizer(pipe, "muon", lr=0.02)
    for step in range(20):
        x = torch.randn(3, 8, 32)
        loss = pipe.step(list(zip(x, x.flip(-1), strict=True)))
        optimizer.step()
        if step % 5 == 4 and world.is_first:
            print(f"step {step + 1}: loss {loss.item():.4f}")


if __name__ == "__main__":
    megalite.validate(PROGRAM)  # raises, and draws the broken rule, where it would hang or compute something else
    print(megalite.render_text(megalite.simulate(PROGRAM)))
    megalite.run(train, nprocs=2)
