"""What an update launches on a device does not grow with the buckets whose tensors it steps."""

from __future__ import annotations

from collections import Counter
from typing import Any
from unittest.mock import patch

import pytest
import torch
from equivalence.layouts import TINY

from megalite.config.optimizer import OptimizerConfig
from megalite.optim import OPTIMIZERS
from megalite.rehearsal import rehearse_run, rehearsed
from megalite.rehearsal.order import Ledger

GROUPS = 2  # decayed or not
KERNELS = ("_fused_adamw_", "_foreach_add_", "_foreach_sub_")
"""The update, and the number of steps, which counts only those that are taken."""


def launched(flags: str, steps: int) -> Counter[str]:
    """Kernels by name of a rank of two."""
    found, work = Counter[str](), Ledger.work

    def counting(ledger: Ledger, line: Any, op: str, *args: Any, **named: Any) -> None:
        found[op] += line is not ledger.host
        work(ledger, line, op, *args, **named)

    argv = [*TINY, *"--no-fp64 --bf16 --num-layers 4 --micro-batch-size 1".split(), *flags.split()]
    with patch.object(Ledger, "work", counting):
        report = rehearse_run(rehearsed(argv, 2, steps=steps), [0])
    assert [str(fault) for fault in report.faults] == [] and report.records[0].problem is None
    return found


@pytest.mark.parametrize(
    "flags", ["--zero-stage 1", "--zero-stage 1 --ddp-bucket-size 1000", "--optimizer muon --ddp-bucket-size 1000"]
)
def test_a_step_is_one_launch_for_all_tensors_of_a_group(flags: str) -> None:
    one, two = launched(flags, 1), launched(flags, 2)
    more = {name: two[name] - one[name] for name in KERNELS}
    assert more["_fused_adamw_"] <= GROUPS and sum(more.values()) <= 3 * GROUPS, more


def test_tensors_that_are_stepped_together_get_the_bits_of_each_alone() -> None:
    """Some have no gradient in some steps, and fall behind."""
    generator = torch.Generator().manual_seed(5)
    starts = [torch.randn(n, generator=generator) for n in (7, 64, 1, 1000)]
    together, alone = ([x.clone() for x in starts] for _ in range(2))
    settings = OptimizerConfig(lr=1.0)
    rules = [OPTIMIZERS["adam"]([{"params": together}], settings)]
    rules += [OPTIMIZERS["adam"]([{"params": [x]}], settings) for x in alone]
    for step in range(4):
        grads = [torch.randn(x.shape, generator=generator) for x in starts]
        for tensors in (together, alone):
            for number, (x, grad) in enumerate(zip(tensors, grads, strict=True)):
                x.grad = None if number == step else grad.clone()
        for rule in rules:
            rule.param_groups[0].update(lr=0.1, weight_decay=0.3)
            rule.found_inf = torch.tensor(float(step == 2))
            rule.step()
    assert all(torch.equal(a, b) for a, b in zip(together, alone, strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(together, starts, strict=True))
    counted = [float(rules[0].state[x]["step"]) for x in together]
    assert counted == [float(rule.state[x]["step"]) for rule, x in zip(rules[1:], alone, strict=True)] == [2, 2, 3, 2]
