"""muP and CompleteP: each parameter has the numbers of the papers' tables, the model is one whose factors could
stand in its weights, every layout is one process, and activations do not grow with the width."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from equivalence.layouts import TINY, Layout, compare
from megalite.comm.world import World
from megalite.config import Config, parse, rates_of
from megalite.inventory import model_layers, placement_of
from megalite.microbatch import Microbatch
from megalite.models import build_stack, layer_specs
from megalite.nn import LayerStack
from megalite.parallel.tensor import LayerContext
from megalite.testing import run_single

sys.path.append(str(Path(__file__).parents[2] / "tools"))
import coordinate_check  # noqa: E402

sys.path.append(str(Path(__file__).parents[1] / "unit" / "config"))
from config_arguments import argv as arguments  # noqa: E402
from config_arguments import problems_of  # noqa: E402

M, L = 4, 2
MUP = ("--use-mup", "--mup-base-hidden-size", "8")
COMPLETE = (*MUP, "--mup-base-num-layers", "2")
MODEL = "--num-layers 4 --model-type llama --num-query-groups 2 --clip-grad 0.05"
EVERYTHING = (
    "--num-experts 4 --moe-shared-expert-intermediate-size 16 --moe-shared-expert-gate "
    "--linear-attention variant=gdn freq=2 key_head_dim=4 value_head_dim=8 num_key_heads=2 num_value_heads=4 "
    "--mtp num_layers=1 --position-embedding-type rope --qk-layernorm"
)


def config_of(*flags: str) -> Config:
    return parse([*TINY, "--micro-batch-size", "1", "--num-layers", "4", *flags], world_size=1)


def test_rates_and_deviations_are_the_tables() -> None:
    """Rows: what Megatron-LM's muP has of a parameter, and table 1 of CompleteP: deviation, (lr, decay, epsilon)."""
    std, hidden = 0.02, 0.02 / math.sqrt(M)
    plain, matrix = (1.0, 1.0, 1.0), (1 / M, 1.0, 1 / M)
    end, vector, deep = (1.0, 1.0, 1 / M), (1.0, 1.0, 1 / (M * L)), (1 / M, float(M), 1 / (M * L))
    out = hidden / math.sqrt(2 * 4), hidden / math.sqrt(2 * 2)
    rows: dict[str, tuple[float | None, tuple[float, ...], float | None, tuple[float, ...]]] = {
        "embedding.word_embeddings.weight": (std, plain, std, end),
        "head.final_norm.weight": (None, plain, None, end),
        "layers.1.attention.qkv.weight": (hidden, matrix, hidden, deep),
        "layers.1.attention.q_norm.weight": (None, plain, None, vector),
        "layers.1.attention.proj.weight": (out[0], matrix, out[1], deep),
        "layers.0.attention.conv": (std, plain, std, vector),
        "layers.0.attention.qkvz.weight": (hidden, matrix, hidden, deep),
        "layers.0.attention.out.weight": (out[0], matrix, out[1], deep),
        "layers.0.mlp.router.weight": (hidden, matrix, hidden, deep),
        "layers.0.mlp.experts.fc1.weight": (hidden, matrix, hidden, deep),
        "layers.0.mlp.experts.fc2.weight": (out[0], matrix, out[1], deep),
        "layers.0.mlp.shared_gate.weight": (hidden, matrix, hidden, deep),
        "layers.0.mlp.experts.fc2.bias": (None, plain, None, vector),
        "head.mtp.layers.0.proj.weight": (hidden, matrix, hidden, deep),
        "head.mtp.layers.0.h_norm.weight": (None, plain, None, vector),
    }
    for column, flags in ((0, MUP), (2, COMPLETE)):
        config = config_of(*EVERYTHING.split(), *flags)
        rates = rates_of(config)
        stack = build_stack(config.model, layer_specs(config.model), LayerContext(dtype=torch.float64))
        built = {name: placement_of(p) for name, p in stack.logical_parameters()}
        counted = {f"{layer.name}.{p.name}": p for layer in named_layers(config) for p in layer.parameters}
        for name, row in rows.items():
            place = built[name]
            assert (place.init_std or 0.0) == pytest.approx(row[column] or 0.0, rel=1e-15), name
            assert name.startswith("head.mtp") or counted[name].init_std == place.init_std, name
            assert rates(name, place.decay)[1:] == pytest.approx(row[column + 1], rel=1e-15), name
    assert config_of(*MUP).model.query_multiplier == 8**-0.5  # 1 / d, where kernels have 1 / sqrt(d)
    assert config_of(*MUP, "--mup-base-head-dim", "8").model.query_multiplier is None


def named_layers(config: Config) -> Sequence:
    from types import SimpleNamespace

    layers = model_layers(config.model)
    names = ["embedding", *(f"layers.{i}" for i in range(len(layers) - 2)), "head"]
    return [SimpleNamespace(name=n, parameters=layer.parameters) for n, layer in zip(names, layers, strict=True)]


def test_orthogonal_updates_have_no_other_rate() -> None:
    """Megatron-LM 3715: scaling by sqrt(rows / columns) is the rule of the width already."""
    muon = ("--optimizer", "muon", "--optimizer-args", "muon_scale_mode=unit_rms_norm")
    rates = rates_of(config_of(*MUP, *muon))
    assert rates("layers.0.mlp.fc1.weight", True) == (False, 1.0, 1.0, 1.0)
    assert rates("head.mtp.layers.0.block.mlp.fc1.weight", True).lr == 1 / M  # AdamW's


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        ("--mup-base-hidden-size 32", "--mup-base-hidden-size=32: needs --use-mup"),
        (
            "--mup base_num_layers=1 --softmax-scale 0.1",
            "--softmax-scale=0.1: not with --mup, whose scores are / d; use --mup-base-head-dim",
        ),
        ("--use-mup --lora rank=4", "--lora rank=4: not with --use-mup, which has no rule for it; drop one of them"),
        (
            "--use-mup --optimizer soap",
            "--optimizer=soap: not with --use-mup, which has no rule for it; use one of adam, lion, muon",
        ),
        (
            "--use-mup --optimizer muon",
            "--muon-scale-mode=spectral: under --use-mup updates of any width have one effect; use unit_rms_norm, "
            "sqrt(rows / columns)",
        ),
        (
            "--use-mup --optimizer-impl apex",
            "--optimizer-impl=apex: not with --use-mup, where epsilon is a parameter's own; use torch",
        ),
    ],
)
def test_what_has_no_rule_is_refused(flags: str, line: str) -> None:
    assert problems_of(arguments(flags)) == [line]


@pytest.mark.parametrize("flags", [MUP, (*COMPLETE, "--mup-base-head-dim", "2")], ids=["muP", "CompleteP"])
@pytest.mark.parametrize(
    "model",
    [
        "--add-qkv-bias --num-query-groups 2 --model-type llama",
        "--qk-layernorm --use-parallel-residual",
        "--norm-placement sandwich",
    ],
)
def test_the_factors_could_stand_in_the_weights(flags: tuple[str, ...], model: str) -> None:
    """A plain model whose final norm, queries and branches have them computes the same."""
    config, plain = (config_of(*model.split(), *more) for more in (flags, ()))
    stacks = []
    for each in (config, plain):
        context = LayerContext(dtype=torch.float64, seed=1)
        stacks.append(build_stack(each.model, layer_specs(each.model), context, init_seed=1))
    ours, theirs = stacks
    theirs.load_state_dict(ours.state_dict())
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, dtype=torch.float64, generator=seeded())
        ours.load_state_dict(theirs.state_dict())
        fold(theirs, config)
    tokens = torch.randint(0, 61, (2, 17), generator=seeded())
    microbatch = Microbatch(
        tokens=tokens[:, :-1],
        labels=tokens[:, 1:],
        positions=torch.arange(16).expand(2, 16),
        loss_mask=torch.ones(2, 16, dtype=torch.float64),
        sample_ids=torch.arange(2),
    )
    found, wanted = (stack(None, microbatch).detach() for stack in stacks)
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=0.0)


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(3)


def fold(stack: LayerStack, config: Config) -> None:
    d = config.model.head_dim
    scores = (config.model.mup.mup_base_head_dim or 1) ** 0.5 / d * d**0.5
    branch = 1 / L if config.model.mup.mup_base_num_layers else 1.0
    for name, p in stack.named_parameters():
        if name.startswith("head.final_norm"):
            p /= M
        rows: Tensor
        if config.model.qk_layernorm and ".q_norm." in name:
            p *= scores
        elif ".qkv." in name and not config.model.qk_layernorm:
            rows = p.view(config.model.query_groups, -1, d, *p.shape[1:])
            rows[:, :-2] *= scores
        placed = config.model.norm_placement != "pre"
        ends = ("post_attention_norm", "post_mlp_norm") if placed else (".proj.", ".fc2.")
        if any(end in name for end in ends):
            p *= branch


LAYOUTS = {
    "tp": ("--tensor-model-parallel-size 2 --sequence-parallel --micro-batch-size 1 --zero-stage 1", 4, MUP),
    "zero3": ("--zero-stage 3 --micro-batch-size 2 --offload optimizer", 2, COMPLETE),
    "rows": ("--micro-batch-size 2 --offload embedding --zero-stage 1", 2, COMPLETE),
    "2bw": ("--pipeline-model-parallel-size 2 --pipeline-schedule 2bw --micro-batch-size 1", 2, COMPLETE),
    "zb-v cp": ("--pipeline-model-parallel-size 2 --pipeline-schedule zb-v --virtual-pipeline-model-parallel-size 2 "
                "--context-parallel-size 2 --micro-batch-size 1", 4, COMPLETE),
}  # fmt: skip
QUICK = ("tp", "rows")


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in QUICK else pytest.mark.landing) for n in LAYOUTS])
def test_every_layout_is_one_process(name: str) -> None:
    """With the default epsilon, which its factors move, and the rows of the word embedding on the host."""
    flags, world_size, mup = LAYOUTS[name]
    compare(Layout((*MODEL.split(), *mup), tuple(flags.split()), world_size, delay=int(name == "2bw")))


WIDTHS = (32, 64, 128)
CHECKED = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 2 --seq-length 16 --micro-batch-size 8 "
    "--global-batch-size 8 --train-iters 10 --lr 5e-3 --lr-decay-style constant --mock-data --tokenizer-type "
    "NullTokenizer --vocab-size 61 --eval-iters 0 --model-type llama"
).split()


def slopes(world: World) -> dict[tuple[str, ...], dict[str, float]]:
    found = {}
    for flags in ((), ("--mup",), ("--mup", "base_num_layers=1")):
        base = parse([*CHECKED, *flags], world_size=1)
        configs = [coordinate_check.widened(base, width) for width in WIDTHS]
        assert {c.model.num_attention_heads * 16 for c in configs} == set(WIDTHS)
        measured = [coordinate_check.activations(config, world, 4) for config in configs]
        assert list(measured[0]) == ["embedding", "layers.0", "layers.1", "logits", "loss"]
        found[flags] = {n: coordinate_check.slope(WIDTHS, [m[n] for m in measured]) for n in measured[0] if n != "loss"}
    return found


def test_activations_do_not_grow_with_the_width() -> None:
    standard, *scaled = run_single(slopes).values()
    assert all(rise < 0.1 for found in scaled for rise in found.values()), scaled
    assert all(standard[name] > 0.5 for name in ("layers.1", "logits")), standard


@pytest.mark.parametrize("factor", ["nn.head.width_ratio", "nn.block.depth_ratio", "config.mup.width_ratio"])
def test_a_factor_that_is_left_out_is_seen(factor: str) -> None:
    """That of the logits, of branches, of deviations and rates."""
    with patch(f"megalite.{factor}", lambda model: 1.0), pytest.raises(AssertionError):
        if "config" in factor:
            test_rates_and_deviations_are_the_tables()
        test_the_factors_could_stand_in_the_weights(
            (*COMPLETE, "--mup-base-head-dim", "2"), "--norm-placement sandwich"
        )
