"""QK-clip: the first update by the formula on dense scores, then every layout against one rank."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from equivalence.layouts import TINY, saved_tensors, train
from megalite.comm.world import World
from megalite.config import parse
from megalite.nn import Attention
from megalite.testing import run_single
from megalite.train.run import open_run

sys.path.append(str(Path(__file__).parents[1] / "unit" / "config"))
from config_arguments import argv as arguments  # noqa: E402
from config_arguments import problems_of  # noqa: E402

THRESHOLD, ALPHA = 0.005, 0.3
CLIP = ("--qk-clip", f"threshold={THRESHOLD}", f"alpha={ALPHA}")
MODEL = ("--num-layers", "2", "--num-query-groups", "2", "--add-qkv-bias")
GROUPS, HEADS, D = 2, 2, 8


def command(*more: str) -> list[str]:
    return [*TINY, *MODEL, "--micro-batch-size", "1", "--clip-grad", "0", *more]


def observed(world: World, argv: list[str]) -> dict[str, Tensor]:
    """One step; the largest score of each group of the batch, computed densely from what the projections return."""
    largest: dict[str, Tensor] = {}

    def watch(name: str, qkv: Tensor) -> None:
        s, b = qkv.shape[:2]
        q, k, _ = qkv.detach().view(s, b, GROUPS, HEADS + 2, D).split((HEADS, 1, 1), 3)
        scores = torch.einsum("sbgrd,tbgud->bgrst", q, k) / math.sqrt(D)
        seen = scores.masked_fill(torch.ones(s, s).triu(1).bool(), -math.inf).amax((0, 2, 3, 4))
        largest[name] = torch.maximum(largest.get(name, seen), seen)

    with open_run(parse(argv, world_size=1), world) as run:
        for stage in run.state.model.stages.values():
            for name, module in stage.modules[0].named_modules():
                if isinstance(module, Attention):
                    module.qkv.register_forward_hook(lambda m, i, out, name=name: watch(name, out))
        run.trainer.train_step(drain=True)
        run.state.save(run.trainer.progress)
    return largest


def test_the_first_update_is_the_formulas(tmp_path: Path) -> None:
    largest = run_single(observed, command("--save", str(tmp_path / "plain")))
    run_single(observed, command("--save", str(tmp_path / "clipped"), *CLIP))
    plain, clipped = (saved_tensors(tmp_path / name) for name in ("plain", "clipped"))
    assert len(largest) == 2
    etas = []
    for layer, seen in enumerate(largest.values()):
        eta = [min(1.0, THRESHOLD / float(most)) if most > 0 else 1.0 for most in seen]
        etas += eta
        rows = [[e**ALPHA] * HEADS * D + [e ** (1 - ALPHA)] * D + [1.0] * D for e in eta]
        factor = torch.tensor(rows, dtype=torch.float64).flatten()
        for kind, shape in (("weight", (-1, 1)), ("bias", (-1,))):
            name = f"layers.{layer}.attention.qkv.{kind}"
            wanted = plain.pop(name) * factor.view(shape)
            torch.testing.assert_close(clipped[name], wanted, rtol=1e-12, atol=1e-15, msg=name)
    assert min(etas) < 1.0, etas
    assert all(torch.equal(clipped[name], value) for name, value in plain.items()), "something else was scaled"


LAYOUTS = {
    "dp2 zero1": (2, "--zero-stage 1 --ddp-bucket-size 3000"),
    "dp2 zero3": (2, "--zero-stage 3"),
    "tp2": (2, "--tensor-model-parallel-size 2"),
    "tp4 shares keys": (4, "--tensor-model-parallel-size 4 --zero-stage 1"),
    "pp2": (2, "--pipeline-model-parallel-size 2 --pipeline-schedule zb-h1"),
    "cp2": (2, "--context-parallel-size 2"),
    "cp2 gathered": (2, "--context-parallel-size 2 --cp-comm-type all_gather"),
    "tp2 halves": (2, "--tensor-model-parallel-size 2 --tp-comm-overlap --micro-batch-size 2"),
    "recomputed": (1, "--recompute-granularity full --recompute-method uniform"),
    "muon": (2, "--zero-stage 1"),
}
OFTEN = ("dp2 zero1", "cp2")


@pytest.mark.parametrize("name", [n if n in OFTEN else pytest.param(n, marks=pytest.mark.full) for n in LAYOUTS])
def test_every_layout_clips_as_one_rank(name: str) -> None:
    world, flags = LAYOUTS[name]
    model = (*CLIP, "--window-size", "5", *(["--optimizer", "muon"] if name == "muon" else []))
    alone = train(command(*model), 1, 3)
    found = train(command(*model, *flags.split()), world, 3)
    for key, value in alone.tensors.items():
        torch.testing.assert_close(found.tensors[key], value, rtol=1e-9, atol=1e-12, msg=key)
    without = train(command("--window-size", "5", *(["--optimizer", "muon"] if name == "muon" else [])), 1, 3)
    assert any(not torch.equal(without.tensors[key], value) for key, value in alone.tensors.items())


@pytest.mark.full
def test_2bw_clips_as_2bw_on_one_rank() -> None:
    schedule = ("--pipeline-schedule", "2bw")
    alone = train(command(*CLIP, *schedule), 1, 3)
    for more in ("--pipeline-model-parallel-size 2", "--zero-stage 1"):
        found = train(command(*CLIP, *schedule, *more.split()), 2, 3)
        for key, value in alone.tensors.items():
            torch.testing.assert_close(found.tensors[key], value, rtol=1e-9, atol=1e-12, msg=key)


def test_a_threshold_that_is_never_reached_changes_no_bit() -> None:
    plain, clipped = (train(command(*more), 1, 2).tensors for more in ((), ("--qk-clip", "threshold=1e9")))
    assert all(torch.equal(clipped[name], value) for name, value in plain.items())


@pytest.mark.parametrize(
    "other",
    [
        "--qk-layernorm",
        "--attn-logit-softcapping 30",
        "--lora rank=2",
        "--compile",
        "--offload optimizer",
        "--offload params",
        "--delayed-parameter-update",
        "--bf16 --store-param-remainders",
        "--context-parallel-size 2 --cp-comm-type a2a",
        "--pipeline-model-parallel-size 2 --pipeline-schedule pipedream --untie-embeddings-and-output-weights "
        "--clip-grad 0 --global-batch-size 4",
    ],
)
def test_one_line_says_what_it_does_not_go_with(other: str) -> None:
    (line,) = problems_of(arguments(f"--qk-clip {other}"), 2)
    assert line.startswith("--qk-clip: not with --") and ("drop one" in line or "use " in line)


def test_megatrons_flags_are_its_spellings() -> None:
    given = parse(arguments("--qk-clip --qk-clip-threshold 50 --qk-clip-alpha 0.4")).model.clip
    assert (given.qk_clip, given.qk_clip_threshold, given.qk_clip_alpha) == (True, 50.0, 0.4)
