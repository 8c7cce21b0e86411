"""A model of transformers in a pipeline, and back: two pipeline ranks train it, transformers loads what they learnt.

python examples/huggingface_model.py       # a small GPT-2; for a real one: GPT2LMHeadModel.from_pretrained("gpt2")
"""

from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel

import megalite

TEXT = torch.tensor(list(Path(__file__).read_bytes()))
LENGTH, SAMPLES, MICRO_BATCHES = 32, 4, 4


def loss(logits: Tensor, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten())


def train(world: megalite.World) -> None:
    torch.manual_seed(0)
    model = GPT2LMHeadModel(
        GPT2Config(n_layer=4, n_embd=32, n_head=4, vocab_size=256, n_positions=LENGTH, bos_token_id=0, eos_token_id=0)
    )
    tokens = torch.empty(SAMPLES, LENGTH, dtype=torch.int64, device="meta")
    layers = megalite.layers_from_module(model, tokens)
    mesh = megalite.ParallelMesh.build(rank=world.rank, size=world.size, pp=2)
    pipe = megalite.Pipeline(
        layers, schedule="zb-h1", mesh=mesh, example=tokens, loss=loss, balance="parameters", device=world.device
    )
    optimizer = megalite.ShardedOptimizer(pipe, "adamw", lr=4e-3)
    draw = torch.Generator().manual_seed(mesh.coordinate("dp"))
    for step in range(40):
        starts = torch.randint(len(TEXT) - LENGTH, (MICRO_BATCHES, SAMPLES), generator=draw)
        samples = TEXT[starts[..., None] + torch.arange(LENGTH + 1)]
        total = pipe.step([(sample[:, :-1], sample[:, 1:]) for sample in samples])
        optimizer.step()
        if step % 10 == 9 and world.is_first:
            print(f"step {step + 1}: loss {total.item():.4f}")
    weights = optimizer.all_weights()  # the module's own state dict, from all ranks
    if world.is_first:
        fresh = GPT2LMHeadModel(model.config)
        fresh.load_state_dict(weights, strict=True)  # fresh.save_pretrained(...) writes it
        written = fresh.generate(TEXT[None, :16], max_new_tokens=16, do_sample=False, pad_token_id=0)[0, 16:]
        print(f"transformers continues: {bytes(written.tolist()).decode(errors='replace')!a}")


if __name__ == "__main__":
    megalite.run(train, nprocs=2)
