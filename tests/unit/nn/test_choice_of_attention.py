"""Which kernel is chosen for what is needed: written down here once more, by hand."""

from __future__ import annotations

from dataclasses import replace
from unittest.mock import patch

import pytest
import torch

from megalite.nn.attention import choose as choosing
from megalite.nn.attention.choose import Need, choose

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
PLAIN = Need(CPU, torch.float32, queries=512, keys=512, channels=64, hides=False, rewrites=False)


@pytest.mark.parametrize(
    ("changes", "kernel"),
    [
        ({}, "blocked"),
        ({"keeps_weights": False}, "fused"),
        ({"queries": 4096, "keys": 4096}, "fused"),
        ({"queries": 1}, "fused"),  # a token of a generation
        ({"queries": 7}, "tiled"),  # a part of a prompt
        ({"hides": True}, "tiled"),
        ({"rewrites": True}, "tiled"),
        ({"in_parts": True}, "flash"),
        ({"in_parts": True, "channels": 60}, "tiled"),
        ({"in_parts": True, "channels": 264}, "tiled"),
        ({"in_parts": True, "hides": True}, "tiled"),
        ({"in_parts": True, "rewrites": True}, "tiled"),
        ({"device": GPU}, "fused"),
        ({"device": GPU, "hides": True}, "varlen"),
        ({"device": GPU, "hides": True, "dtype": torch.float64}, "flex"),
        ({"device": GPU, "hides": True, "queries": 7}, "tiled"),
        ({"device": GPU, "hides": True, "rewrites": True}, "tiled"),
    ],
)
def test_the_first_kernel_that_can_and_works(changes: dict[str, object], kernel: str) -> None:
    def tried(name: str, device: torch.device, dtype: torch.dtype) -> bool:
        return name == "flex" or dtype == torch.float32  # as if varlen had failed in fp64

    table = tuple(
        row._replace(works=lambda *place, name=row.name: tried(name, *place)) if row.works else row
        for row in choosing.KERNELS
    )
    with patch.object(choosing, "KERNELS", table):
        assert choose(replace(PLAIN, **changes)) == kernel  # type: ignore[arg-type]


def test_a_kernel_that_is_wrong_is_not_chosen() -> None:
    """Of a kernel whose results are off by a tenth the probe says no."""
    place = torch.device("cpu"), torch.float32
    right = choosing.tiled_attention
    with patch.dict(choosing.MASKED, {"varlen": lambda *given: right(*given) * 1.1, "flex": right}):
        assert not choosing.masked_works.__wrapped__("varlen", *place)
        assert choosing.masked_works.__wrapped__("flex", *place)
    assert choosing.flash_works(*place) and not choosing.flash_works(torch.device("cpu"), torch.int32)
