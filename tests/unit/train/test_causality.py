"""A module that reads later tokens is told from one that does not, where asking is cheap."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from equivalence import own_models
from torch import nn

from megalite.train import foreign
from megalite.train.foreign import reads_ahead, small_copy


def asked(module: nn.Module, shape: tuple[int, int] = (2, 8)) -> str | None:
    copy = small_copy(module, shape)
    return None if copy is None else reads_ahead(copy, shape, 32)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_later_tokens_are_seen(dtype: torch.dtype, monkeypatch: Any) -> None:
    torch.manual_seed(0)
    looks = own_models.averaging(32).to(dtype)
    assert asked(looks) and asked(looks, (1, 4096))
    for name in ("mixer", "dropping", "untied"):
        assert asked(getattr(own_models, name)(32).to(dtype)) is None
    monkeypatch.setattr(foreign, "MOST_PRODUCTS", 100)
    assert asked(looks) is None, "large"


def test_what_is_asked_stays_as_it_is() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words = nn.Embedding(32, 32)
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            out: torch.Tensor = self.words(tokens)
            return out + torch.rand(())

    module, before = Counting().train(), torch.get_rng_state()
    assert asked(module) is None, "the same draws both times"
    assert float(module.calls) == 0 and module.training and torch.equal(torch.get_rng_state(), before)
    assert small_copy(Counting().to("meta"), (2, 8)) is None and asked(nn.Linear(2, 2)) is None
