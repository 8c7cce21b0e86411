"""Blocks as OLMo 2 and 3 and Gemma 3 have them equal one process at every layout."""

from __future__ import annotations

import random

import pytest

from equivalence.layouts import Layout, compare, draw

LLAMA = "--num-layers 4 --model-type llama --num-query-groups 2 --clip-grad 0.05"
KINDS = {
    "olmo2": f"{LLAMA} --norm-placement post --qk-layernorm --qk-layernorm-across-heads",
    "olmo3": f"{LLAMA} --norm-placement post --qk-layernorm --qk-layernorm-across-heads --window-size 5 --skip-freq "
    "window=2 --window-rotary-base 10000 --rope-scaling type=yarn factor=4 original_length=8 beta_fast=3 beta_slow=0.1",
    "gemma3": "--num-layers 4 --model-type llama --num-query-groups 2 --kv-channels 16 --clip-grad 0.05 --activation "
    "geglu-tanh --no-untie-embeddings-and-output-weights --norm-placement sandwich --apply-layernorm-1p --qk-layernorm "
    "--embedding-multiplier 5.656854249492381 --softmax-scale 0.4 --window-size 5 --skip-freq window=3 "
    "--window-rotary-base 300 --rotary-seq-len-interpolation-factor 8",
    "gpt-oss": f"{LLAMA} --add-bias-linear --softmax-type learnable --window-size 5 --skip-freq window=2 --quick-geglu "
    "--glu linear_offset=1 clamp_value=0.01 --rope-scaling type=yarn factor=4 original_length=8 beta_fast=3 "
    "beta_slow=0.1 round_to_int=false --num-experts 4 --moe-router bias --moe-z-loss-coeff 0.1",
}
MLA = "kv_lora_rank=8 qk_head_dim=6 qk_pos_emb_head_dim=4 v_head_dim=5"
KINDS |= {
    "latent": f"--num-layers 4 --model-type llama --clip-grad 0.05 --mla q_lora_rank=12 {MLA} --qk-layernorm "
    "--rope-scaling type=yarn factor=4 original_length=8 beta_fast=3 beta_slow=0.1 mscale=1 mscale_all_dim=1.5 "
    "--num-experts 8 --moe-layer-freq [0]+[1]*3 --moe-shared-expert-intermediate-size 16 --moe-router "
    "score_function=sigmoid expert_bias num_groups=4 group_topk=1 topk_scaling_factor=2.5",
    "latent plain": f"--num-layers 4 --model-type llama --clip-grad 0.05 --mla {MLA} --window-size 5 "
    "--skip-freq window=2 --softmax-type learnable",
}
KINDS["delta"] = (
    "--num-layers 4 --model-type llama --clip-grad 0.05 --apply-layernorm-1p --qk-layernorm "
    "--rotary-percent 0.5 --attention-output-gate --linear-attention variant=gdn freq=4 key_head_dim=4 "
    "value_head_dim=6 num_key_heads=4 num_value_heads=8 --num-experts 4 --moe-shared-expert-intermediate-size 16 "
    "--moe-shared-expert-gate --reset-position-ids --reset-attention-mask"
)
LAYOUTS = {
    "halves zero3": ("--tensor-model-parallel-size 2 --sequence-parallel --tp-comm-overlap --micro-batch-size 2 "
                     "--zero-stage 3", 4),
    "pp zero1": ("--pipeline-model-parallel-size 2 --zero-stage 1 --micro-batch-size 1", 4),
    "halves": ("--tensor-model-parallel-size 2 --tp-comm-overlap --micro-batch-size 2", 2),
    "zb-v cp": ("--pipeline-model-parallel-size 2 --pipeline-schedule zb-v --virtual-pipeline-model-parallel-size 2 "
                "--context-parallel-size 2 --micro-batch-size 1", 4),
    "recomputed": ("--tensor-model-parallel-size 2 --sequence-parallel --micro-batch-size 1 --recompute-granularity "
                   "full --recompute-method uniform", 2),
    "experts": ("--pipeline-model-parallel-size 2 --pipeline-schedule zb-h1 --expert-model-parallel-size 2 "
                "--zero-stage 2 --micro-batch-size 1", 4),
    "2bw tp": ("--pipeline-model-parallel-size 2 --pipeline-schedule 2bw --tensor-model-parallel-size 2 "
               "--micro-batch-size 1", 4),
    "a2a tp": ("--context-parallel-size 2 --cp-comm-type a2a --tensor-model-parallel-size 2 --sequence-parallel "
               "--micro-batch-size 1 --zero-stage 3", 4),
}  # fmt: skip
QUICK = {
    ("olmo2", "halves zero3"), ("gemma3", "recomputed"), ("latent plain", "halves"), ("latent", "zb-v cp"),
    ("delta", "zb-v cp"),
}  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "layout"),
    [
        pytest.param(kind, layout, marks=() if (kind, layout) in QUICK else pytest.mark.landing)
        for kind in KINDS
        for layout in LAYOUTS
        if layout != "experts" or "--num-experts" in KINDS[kind]
    ],
)
def test_every_layout_is_one_process(kind: str, layout: str) -> None:
    flags, world_size = LAYOUTS[layout]
    delay = int("2bw" in layout)
    groups = " --num-query-groups 4" if layout == "a2a tp" and "latent" not in kind else ""  # heads enough for both
    compare(Layout(tuple(f"{KINDS[kind]}{groups}".split()), tuple(flags.split()), world_size, delay=delay))


@pytest.mark.landing
@pytest.mark.parametrize("placement", ["post", "sandwich"])
def test_random_layouts(placement: str, full: bool, fresh: int) -> None:
    rng = random.Random(f"{placement} {fresh}")

    def wanted(case: Layout) -> bool:
        return "--use-parallel-residual" not in case.model and (full or case.world_size <= 4)

    for _ in range(10 if full else 1):
        compare(draw(rng, None, wanted, ("--norm-placement", placement)))
