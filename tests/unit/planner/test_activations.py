"""Predicted activations against what autograd really keeps, and the peak of a schedule against a walk through it."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from megalite.comm.mesh import Axis
from megalite.config.cli import parse
from megalite.gradient import WeightGradQueue
from megalite.inventory import given_plan
from megalite.microbatch import Microbatch
from megalite.models import build_stack, layer_specs
from megalite.parallel.tensor.context import LayerContext
from megalite.planner.activations import stage_activations
from megalite.planner.memory import (
    PlannedStages,
    rank_memory,
)
from megalite.schedule import build_program, lower
from megalite.train.build import parameter_dtype, wide_dtype

BASE = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --train-iters 2 --lr 1e-3 --mock-data "
    "--tokenizer-type NullTokenizer --vocab-size 300 --make-vocab-size-divisible-by 8"
).split()


LATENT = "--mla kv_lora_rank=24 qk_head_dim=20 qk_pos_emb_head_dim=12 v_head_dim=24"


def _kept_by_autograd(flags: str, samples: int, items: range, frozen: bool = False) -> tuple[int, float]:
    """(Bytes of the storages that autograd saved, weights apart; the prediction)."""
    config = parse([*BASE, "--micro-batch-size", str(samples), *flags.split()])
    model = config.model
    context = LayerContext(
        tp=Axis.single("tp"),
        sequence_parallel=False,
        dtype=parameter_dtype(config),
        device=torch.device("cpu"),
        seed=1,
        weight_grads=WeightGradQueue(),
    )
    stack = build_stack(model, [layer_specs(model)[i] for i in items], context, init_seed=1)
    stack.requires_grad_(not frozen)
    ids = torch.randint(0, 300, (samples, model.seq_length))
    positions = torch.arange(model.seq_length).expand_as(ids)
    mask = torch.ones(ids.shape)
    batch = Microbatch(tokens=ids, labels=ids, positions=positions, loss_mask=mask, sample_ids=torch.arange(samples))
    outside = {t.untyped_storage()._cdata for t in [*stack.parameters(), ids, positions, mask]}
    dtype = wide_dtype(config) if model.fp32_residual_connection else parameter_dtype(config)
    x = None if 0 in items else torch.randn(model.seq_length, samples, model.hidden_size, dtype=dtype).requires_grad_()
    kept: dict[int, torch.Tensor] = {}
    if x is not None:
        kept[x.untyped_storage()._cdata] = x

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage()._cdata not in outside and tensor.numel() > 1:
            kept[tensor.untyped_storage()._cdata] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = stack(x, batch)
    assert output.requires_grad
    found = sum(tensor.untyped_storage().nbytes() for tensor in kept.values())
    return found, stage_activations(config, items, on_cpu=True).total


@pytest.mark.parametrize("items", [range(0, 6), range(0, 3), range(1, 4), range(3, 6)])
@pytest.mark.parametrize("samples", [1, 2])
@pytest.mark.parametrize(
    "flags",
    [
        "",
        "--fp64",
        "--model-type llama",
        "--model-type llama --num-query-groups 2 --bf16",
        "--bf16 --fp32-residual-connection",
        "--hidden-dropout 0.1",
        "--attention-dropout 0.1",
        "--attention-dropout 0.1 --recompute-granularity selective",
        "--activation squared-relu --qk-layernorm",
        "--seq-length 192",
        "--seq-length 192 --model-type llama --num-query-groups 2 --bf16",
        "--seq-length 192 --qk-layernorm",
        "--seq-length 192 --model-type llama --num-query-groups 2",
        "--window-size 20",
        "--window-size 20 --model-type llama --num-query-groups 2",
        "--window-size 20 --model-type llama --num-query-groups 2 --bf16",
        "--model-type llama --norm-placement post",
        "--norm-placement post --bf16 --fp32-residual-connection",
        "--model-type llama --norm-placement sandwich",
        "--norm-placement sandwich --hidden-dropout 0.1",
        "--model-type llama --apply-layernorm-1p --softmax-scale 0.5 --embedding-multiplier 8",
        "--model-type llama --mla q_lora_rank=40 kv_lora_rank=24 qk_head_dim=20 qk_pos_emb_head_dim=12 v_head_dim=32",
        f"--model-type llama {LATENT} --qk-layernorm",
        f"--model-type llama {LATENT} --qk-layernorm --seq-length 192",
        f"{LATENT} --window-size 20",
        "--model-type llama --linear-attention variant=gdn num_key_heads=2 num_value_heads=4 key_head_dim=16 "
        "value_head_dim=32",
        "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
        "--recompute-granularity full --recompute-method block --recompute-num-layers 1",
    ],
)
def test_activations_are_within_five_per_cent(flags: str, samples: int, items: range) -> None:
    if "bf16" in flags and torch.ops.mkldnn._is_mkldnn_bf16_supported():
        pytest.skip("this CPU multiplies bf16 itself; the prediction is for those that widen it")
    found, predicted = _kept_by_autograd(flags, samples, items)
    assert predicted == pytest.approx(found, rel=0.05)


def test_a_head_beside_adapters_keeps_no_gradient_of_its_matrix() -> None:
    """--load stands for a run that has none: nothing is read here."""
    found, predicted = _kept_by_autograd("--lora rank=2 --load . --finetune", 1, range(5, 6), frozen=True)
    assert predicted == pytest.approx(found, rel=0.05)
    trained, _ = _kept_by_autograd("", 1, range(5, 6))
    assert trained > 2 * found


def test_early_stages_hold_more_micro_batches() -> None:
    config = parse(
        [*BASE, "--micro-batch-size", "1", "--global-batch-size", "8", "--pipeline-model-parallel-size", "4"],
        world_size=4,
    )
    program = lower(build_program("1f1b", 4, 8))
    cuts = [range(0, 2), range(2, 3), range(3, 4), range(4, 6)]
    run = PlannedStages(config, 4, program, cuts, given_plan(config), on_cpu=True)
    ranks = [rank_memory(run, rank) for rank in range(4)]
    block = stage_activations(config, range(2, 3), on_cpu=True)
    assert ranks[1].activations == pytest.approx(3 * block.full)
    assert ranks[2].activations == pytest.approx(2 * block.full)
    assert ranks[0].activations == pytest.approx(4 * stage_activations(config, range(0, 2), on_cpu=True).full)


def test_recomputation_and_fewer_micro_batches_in_flight_save_memory() -> None:
    config = parse([*BASE, "--micro-batch-size", "1", "--global-batch-size", "8"])
    cuts = [range(0, 6)]
    recomputed = dataclasses.replace(
        config,
        model=dataclasses.replace(config.model, recompute_granularity="full", recompute_method="uniform"),
    )
    plain, less, all_at_once = (
        rank_memory(PlannedStages(c, 1, lower(build_program(name, 1, 8)), cuts, given_plan(c)), 0).activations
        for c, name in ((config, "1f1b"), (recomputed, "1f1b"), (config, "gpipe"))
    )
    assert less < plain / 4
    assert all_at_once == pytest.approx(8 * plain)
