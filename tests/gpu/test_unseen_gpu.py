"""What blocks keep on a GPU without values, beside what autograd holds on a real one."""

from __future__ import annotations

import dataclasses

import pytest
from gpu.devices import needs_cuda

from megalite.comm.world import World
from megalite.testing import run_single
from tests.unit.train.test_kept_activations import LARGER, planned, read_from, really_kept


def kept_unseen(world: World, flags: str) -> int:
    [kept] = read_from(dataclasses.replace(planned(flags, 1), on_cpu=False))
    return kept


@needs_cuda
@pytest.mark.parametrize(
    "flags",
    [
        "",
        "--model-type llama --num-query-groups 2",
        "--qk-layernorm --hidden-dropout 0.1",
        "--fp8-format hybrid",
        "--recompute-granularity full --recompute-method block --recompute-num-layers 1",
    ],
)
def test_what_a_gpu_without_values_keeps_a_real_one_does(flags: str) -> None:
    found = run_single(kept_unseen, LARGER + flags)
    assert found == pytest.approx(run_single(really_kept, LARGER + flags, 0, "cuda"), rel=0.002)
