"""Rows that are stepped when they are used equal a matrix that is stepped as a whole, in every bit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from megalite.config import OPTIMIZER_SPECS, OptimizerConfig
from megalite.optim import OPTIMIZERS
from megalite.parallel.rows import HostRows, RowRule
from megalite.parallel.rows.host_rows import Step

ROWS, TRAINED = 23, 21


def make_host(optimizer: str, dtype: torch.dtype, columns: int, **settings: Any) -> tuple[HostRows, OptimizerConfig]:
    made = OptimizerConfig(optimizer=optimizer, lr=1.0, **settings)
    rule = RowRule(
        lambda groups: OPTIMIZERS[optimizer](groups, made),
        columns=columns,
        decays=True,
        only_decays=OPTIMIZER_SPECS[optimizer].only_decays,
        dtype=dtype,
    )
    initial = torch.randn(ROWS, columns, dtype=dtype, generator=torch.Generator().manual_seed(1))
    return HostRows(initial, rule, trained=TRAINED), made


@pytest.mark.parametrize(
    ("optimizer", "dtype", "columns", "settings"),
    [
        ("adam", torch.float32, 40, {}),
        ("adam", torch.float64, 64, {}),
        ("adam", torch.float32, 64, {"exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "fp16"}),
        ("lion", torch.float32, 64, {}),
        ("sgd", torch.float32, 64, {}),
    ],
)
def test_replayed_steps_are_the_steps(optimizer: str, dtype: torch.dtype, columns: int, settings: Any) -> None:
    """Rows are missed for many steps, each with its own learning rate and weight decay; the other side is the same
    kernel over one flat tensor, every step."""
    host, made = make_host(optimizer, dtype, columns, **settings)
    flat = torch.zeros(ROWS, host.rule.width, dtype=dtype)
    flat[:, :columns] = host.weights
    dense = OPTIMIZERS[optimizer]([{"params": [flat], "decay": True, "whole": False}], made)
    rng = np.random.default_rng(3)
    late = 0
    for number in range(40):
        rows = np.sort(rng.choice(TRAINED, size=rng.integers(0, 6), replace=False))
        gradient = torch.from_numpy(rng.standard_normal((len(rows), columns))).to(dtype)
        lr, decay = 0.1 / (1 + number), 0.01 * (number % 5)
        host.step(rows, gradient, Step(lr, decay))
        flat.grad = torch.zeros_like(flat)
        flat.grad[torch.from_numpy(rows), :columns] = gradient
        for group in dense.param_groups:
            group["lr"], group["weight_decay"] = lr, decay
        dense.step()
        late += int(not torch.equal(host.weights[:TRAINED], flat[:TRAINED, :columns]))
        if number == 20:
            some = np.array([2, 3, 11])
            assert torch.equal(host.current(some), flat[torch.from_numpy(some), :columns])
    assert late > 30, "rows that are not used wait for their steps"
    host.settle()
    assert torch.equal(host.weights[:TRAINED], flat[:TRAINED, :columns])
    for name, kept in host.kept.items():
        assert torch.equal(kept[:TRAINED], dense.state[flat][name].view(ROWS, -1)[:TRAINED, :columns]), name
