"""What is predicted of a `--model-module` is what autograd keeps, to the byte."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from equivalence import own_models
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from megalite.comm import Axis, ContextAxes
from megalite.config import Config, parse
from megalite.inventory import DEFAULT_PLAN, given_plan
from megalite.schedule import Program
from megalite.train.announcement import demands_of, judge
from megalite.train.foreign import ForeignModel
from megalite.train.planned import PlannedRun, saved_bytes
from megalite.train.programs import ProgramCache

BASE = (
    "--seq-length 32 --micro-batch-size 2 --global-batch-size 8 --train-iters 4 --mock-data --vocab-size 32 --lr 1e-3 "
    "--device cpu"
)


def kept_by_autograd(model: ForeignModel) -> int:
    """The layers on real tensors."""
    layers, tokens = model.parts.layers, torch.randint(32, (2, 32))
    known = {t.untyped_storage()._cdata for layer in layers for t in [*layer.parameters(), *layer.buffers()]}
    known.add(tokens.untyped_storage()._cdata)
    found: dict[int, Any] = {}

    def note(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage()._cdata not in known:
            found[tensor.untyped_storage()._cdata] = tensor.untyped_storage()
        return tensor

    x: Any = (tokens,)
    with saved_tensors_hooks(note, lambda tensor: tensor):
        for layer in layers:
            x = layer(*x, inputs=(tokens,))
            x = x if isinstance(x, tuple) else (x,)
    return sum(storage.nbytes() for storage in found.values())


def made(config: Config, program: Program) -> ForeignModel:
    return ForeignModel(
        config, Axis.single("tp"), program, torch.device("cpu"), torch.float32, ContextAxes(), probe=False
    )


@pytest.mark.parametrize(
    "name", ["untied", *(pytest.param(n, marks=pytest.mark.full) for n in ("mixer", "gpt2", "llama"))]
)
def test_activations_are_what_autograd_keeps(name: str) -> None:
    config = parse(f"{BASE} --model-module {Path(own_models.__file__)}:{name}".split())
    program = ProgramCache(config).full(1)
    model = made(config, program)
    found, again, _ = saved_bytes(model.parts, model.cuts[0], model.parts.given, model.ranges(0))
    assert again == 0
    assert found == kept_by_autograd(model)
    planned = PlannedRun.before(config, 1, program, DEFAULT_PLAN, model, on_cpu=True)
    memory = planned.memory
    assert memory is not None
    count = model.count(range(1))
    assert 4 * count <= memory[0].weights <= 4 * count + 8192 and memory[0].moments == 2 * memory[0].weights
    assert memory[0].activations == found
    pools: Any = [[(_pool(free=1), True)]]
    line = judge(planned, pools)
    assert line is not None and "1 rank needs" in line and line.endswith("continue by `ignore_memory_estimate`")
    states = demands_of(planned, pools)["here"]
    assert states.least < memory[0].model_states < states.predicted, "only what surely lasts refuses a run"


def test_recomputed_layers_keep_their_inputs_and_come_back_one_by_one() -> None:
    argv = f"{BASE} --model-module {Path(own_models.__file__)}:untied --recompute-granularity full".split()
    program = ProgramCache(parse(argv)).full(1)
    model = made(parse(argv), program)
    count = len(model.cuts[0])
    kept, again, _ = saved_bytes(model.parts, model.cuts[0], model.parts.given, model.ranges(0))
    everything, *_ = saved_bytes(model.parts, model.cuts[0], model.parts.given, [(0, count, False)])
    assert kept == 4 * 2 * 32 * 6 * (count - 1), "what enters all layers but the first, which reads tokens"
    assert kept < everything and everything / count < again < everything - kept
    planned = PlannedRun.before(parse(argv), 1, program, given_plan(parse(argv)), model, on_cpu=True)
    memory = planned.memory[0]
    assert memory.activations == kept and memory.logits >= again


def _pool(free: int) -> Any:
    from megalite.host_memory import Pool

    return Pool("here", "this host", free, 2**40)
