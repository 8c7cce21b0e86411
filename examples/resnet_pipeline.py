"""A residual network of one piece, cut by megalite: two pipeline ranks, two replicas.

python examples/resnet_pipeline.py
"""

import torch
from torch import Tensor, nn

import megalite

CHANNELS, CLASSES, SAMPLES, MICRO_BATCHES = 8, 4, 8, 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = (nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1, bias=False) for _ in range(2))
        self.norm, self.end = nn.BatchNorm2d(CHANNELS), nn.BatchNorm2d(CHANNELS)

    def forward(self, x: Tensor) -> Tensor:
        return (x + self.end(self.two(self.norm(self.one(x)).relu()))).relu()


class ResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.blocks = nn.Conv2d(1, CHANNELS, 3, padding=1), nn.Sequential(*(Block() for _ in range(6)))
        self.head = nn.Linear(CHANNELS * 4, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        y = self.blocks(self.stem(images))
        return self.head(nn.functional.adaptive_avg_pool2d(y, 2).flatten(1))


def train(world: megalite.World) -> None:
    torch.manual_seed(0)
    images = torch.empty(SAMPLES, 1, 8, 8, device="meta")
    layers = megalite.layers_from_module(ResNet(), images)
    mesh = megalite.ParallelMesh.build(rank=world.rank, size=world.size, pp=2)
    loss = nn.functional.cross_entropy
    pipe = megalite.Pipeline(layers, schedule="1f1b", mesh=mesh, example=images, loss=loss, device=world.device)
    optimizer = megalite.ShardedOptimizer(pipe, "adamw", lr=2e-3)
    data = torch.Generator().manual_seed(mesh.coordinate("dp"))  # each replica reads samples of its own
    for step in range(40):
        classes = torch.randint(CLASSES, (MICRO_BATCHES, SAMPLES), generator=data)
        x = torch.randn(MICRO_BATCHES, SAMPLES, 1, 2, 2, generator=data).flatten(-2)
        x = (x + 2 * nn.functional.one_hot(classes, 4)[:, :, None]).unflatten(-1, (2, 2))  # one quarter is brighter
        batch = list(zip(x.repeat_interleave(4, -1).repeat_interleave(4, -2), classes, strict=True))
        total = pipe.step(batch)
        optimizer.step()
        if step % 10 == 9 and world.is_first:
            print(f"step {step + 1}: loss {total.item():.4f}")


if __name__ == "__main__":
    megalite.run(train, nprocs=4)
