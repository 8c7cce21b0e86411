"""What the public families need beyond GPT and Llama gives the same run on a 2 x 2 grid as on one rank."""

from __future__ import annotations

import pytest
import torch
from equivalence.layouts import TINY, train

NEOX = "--position-embedding-type rope --rotary-percent 0.5 --use-parallel-residual --normalization LayerNorm"
MISTRAL = "--model-type llama --num-query-groups 2 --window-size 5 --rope-scaling factor=4"
QWEN = "--model-type llama --num-query-groups 2 --kv-channels 12 --qk-layernorm --add-qkv-bias --window-size 7"


@pytest.mark.parametrize("model", [NEOX, MISTRAL, QWEN], ids=["neox", "mistral", "qwen"])
def test_two_by_two_is_one(model: str) -> None:
    shared = [*TINY, "--num-layers", "2", "--micro-batch-size", "4", *model.split()]
    grid = "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --sequence-parallel".split()
    one, four = train(shared, 1, 3), train([*shared, *grid], 4, 3)
    torch.testing.assert_close(torch.tensor(four.losses), torch.tensor(one.losses), rtol=1e-12, atol=0)
    for name, values in one.tensors.items():
        torch.testing.assert_close(four.tensors[name], values, rtol=0, atol=1e-9, msg=lambda m, n=name: f"{n}: {m}")
