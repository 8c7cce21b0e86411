"""A language model of your own through pretrain_gpt.py: this file has the model, the command does the rest.

python pretrain_gpt.py --model-module examples/model_module.py:small --seq-length 64 --micro-batch-size 2 \
    --global-batch-size 8 --train-iters 40 --lr 1e-2 --nprocs 2 --pipeline-model-parallel-size 2 --save runs/mine
python examples/model_module.py runs/mine       # what it has learnt, in plain torch
"""

import sys
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

WIDTH, HEADS = 32, 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)])
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        heads = self.qkv(self.norms[0](x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(*heads.unbind(), is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norms[1](x))


class Small(nn.Module):
    def __init__(self, vocab_size: int, seq_length: int) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(vocab_size, WIDTH), nn.Embedding(seq_length, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(4)))
        self.head = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, vocab_size))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.blocks(self.words(tokens) + self.places.weight[: tokens.shape[1]]))


def small(vocab_size: int, seq_length: int) -> nn.Module:
    return Small(vocab_size, seq_length)


if __name__ == "__main__":
    import megalite

    model = small(vocab_size=257, seq_length=64)
    model.load_state_dict(megalite.read_weights(Path(sys.argv[1])))
    text = torch.tensor(list(b"def "))[None]
    for _ in range(40):
        text = torch.cat([text, model(text)[:, -1:].argmax(-1)], 1)
    print(bytes(text[0].clamp(max=255).tolist()).decode(errors="replace"))
