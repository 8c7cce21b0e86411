"""What is not dense, on a device: several ranks over NCCL where there is a GPU for each, else over gloo on one GPU."""

from __future__ import annotations

import pytest
from equivalence.layouts import TINY, assert_same_tensors
from gpu.devices import DEVICES, NUM_GPUS
from gpu.test_ranks import trained

from megalite.testing.oracle import reference

WINGS = {
    "experts dealt out": (2, "--num-experts 4 --moe-router-topk 2", "--expert-model-parallel-size 2"),
    "ring": (2, "", "--context-parallel-size 2"),
    "ring of documents": (2, "--reset-attention-mask --reset-position-ids", "--context-parallel-size 2"),
    "heads for tokens": (2, "", "--context-parallel-size 2 --cp-comm-type a2a"),
    "keys and values gathered": (2, "--window-size 5", "--context-parallel-size 2 --cp-comm-type all_gather"),
    "optimizer on the host": (1, "", "--offload optimizer"),
    "weights on the host": (2, "", "--offload params --zero-stage 3"),
    "gradients on the host": (2, "", "--offload params --zero-stage 1"),
    "a step behind the next batch": (1, "", "--offload optimizer --delayed-parameter-update"),
    "latent attention": (
        2,
        "--mla kv_lora_rank=8 qk_head_dim=6 qk_pos_emb_head_dim=4",
        "--tensor-model-parallel-size 2",
    ),
    "muon": (2, "--optimizer muon", "--zero-stage 1"),
}
"""Ranks, the model, the layout: each in fp64, where the device must compute what one process of a CPU does."""


@pytest.mark.parametrize("name", WINGS)
@pytest.mark.parametrize("device", [pytest.param("cpu", marks=pytest.mark.full), *DEVICES[1:]])
def test_a_wing_is_the_oracle(name: str, device: str) -> None:
    ranks, model, layout = WINGS[name]
    shared = ["--distributed-backend", "gloo"] if ranks > NUM_GPUS > 0 and device == "cuda" else []
    found = trained(device, ranks, *model.split(), *layout.split(), *shared)
    argv = (*TINY, "--micro-batch-size", "1", "--num-layers", "4", *model.split())
    expected = reference(argv, 3, delay=int("--delayed-parameter-update" in layout))
    assert_same_tensors(found, expected, 1e-10 * expected.magnified)
