"""A model of your own in a pipeline: any list of modules, trained on two pipeline ranks by two replicas.

python examples/pipeline_my_model.py                          # four processes on this machine
torchrun --nproc-per-node 8 examples/pipeline_my_model.py     # or as many as a launcher starts
"""

import torch
from torch import Tensor, nn

import megalite

WIDTH, CLASSES, SAMPLES, MICRO_BATCHES = 64, 10, 16, 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.relu(self.up(self.norm(x)))
        return torch.add(x, self.down(hidden))


def train(world: megalite.World) -> None:
    torch.manual_seed(0)  # every rank makes the same layers and keeps those of its stages
    layers = [nn.Linear(8, WIDTH), *(Block() for _ in range(6)), nn.Linear(WIDTH, CLASSES)]
    mesh = megalite.ParallelMesh.build(rank=world.rank, size=world.size, pp=2)
    example = torch.empty(SAMPLES, 8, device="meta")
    pipe = megalite.Pipeline(
        layers, schedule="zb-h1", mesh=mesh, example=example, loss=nn.functional.cross_entropy, device=world.device
    )
    optimizer = megalite.ShardedOptimizer(pipe, "adamw", lr=3e-3, zero_stage=1)
    data = torch.Generator().manual_seed(mesh.coordinate("dp"))  # each replica reads samples of its own
    for step in range(40):
        x = torch.randn(MICRO_BATCHES, SAMPLES, 8, generator=data)
        classes = (x.sum(-1).abs() * 2).long().clamp(max=CLASSES - 1)
        loss = pipe.step(list(zip(x, classes, strict=True)))
        norm = optimizer.step()
        if step % 10 == 9 and world.is_first:
            print(f"step {step + 1}: loss {loss.item():.4f}, gradient norm {norm.item():.3f}")


if __name__ == "__main__":
    megalite.run(train, nprocs=4)
