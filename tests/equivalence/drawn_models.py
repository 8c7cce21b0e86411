"""What the models of random layouts consist of."""

from __future__ import annotations

import random
from collections.abc import Sequence

MIXERS = [
    "--linear-attention variant=gdn freq=2 key_head_dim=4 value_head_dim=6 num_key_heads=4 num_value_heads=8",
    "--linear-attention variant=gdn freq=4 key_head_dim=6 value_head_dim=4 num_key_heads=4 num_value_heads=4 "
    "conv_kernel_dim=2 --attention-output-gate",
    "--linear-attention variant=gdn key_head_dim=4 value_head_dim=4 num_key_heads=1 num_value_heads=2",
]
FURTHER = ["--mtp num_layers=1 loss_scaling_factor=0.7", "--mtp num_layers=2 loss_scaling_factor=2"]
GATES = ["--quick-geglu --glu linear_offset=1 clamp_value=0.01", "--activation geglu-tanh", "--attention-output-gate"]


def draw_experts(rng: random.Random) -> tuple[list[str], list[str]]:
    """(What the model is, how experts are spread.)"""
    pick = rng.choice
    model = ["--num-experts", "4"]
    model += pick(
        [
            [],
            ["--moe-router-topk", "1", "--moe-router", "pre_softmax"],
            ["--moe-router-topk", "4", "--moe-layer-freq", "2"],
            ["--moe-router", "score_function=sigmoid", "topk_scaling_factor=2.5"],
            ["--moe-router", "score_function=sigmoid", "expert_bias"],
            ["--moe-router", "num_groups=2", "group_topk=1"],
        ]
    )
    model += pick([[], ["--moe-ffn-hidden-size", "24"], ["--moe-shared-expert-intermediate-size", "16"]])
    model += pick([[], ["--moe-expert-capacity-factor", "1.0"]])
    losses = ["--moe-aux-loss-coeff", "0.5", "--moe-z-loss-coeff", "0.1"]
    # over a micro-batch the loss would depend on which samples are together
    model += pick([[], [*losses, "--moe-router-load-balancing-type", "seq_aux_loss"]])
    layout = ["--expert-model-parallel-size", pick(["1", "2", "4"])]
    return model, layout + pick([[], ["--expert-tensor-parallel-size", "1"]])


UNUSUAL = [
    flags.split()
    for flags in (
        "--use-parallel-residual",
        "--hidden-dropout 0.1",
        "--attention-dropout 0.1",
        "--kv-channels 4",
        "--add-qkv-bias",
        "--norm-placement post",
        "--norm-placement sandwich",
    )
]


def draw_model(rng: random.Random, optimizer: str) -> list[str]:
    pick = rng.choice
    layers = pick([4, 6])
    model = ["--num-layers", str(layers)]
    family = pick(
        [[], ["--swiglu"], ["--model-type", "llama"], ["--model-type", "llama"]]
    )  # swiglu: biases of two rows
    # Without RoPE the softmax does not see a bias of the keys: its gradient is rounding alone, of which some rules take
    # the sign, or what is left of its size.
    bound = optimizer.split()[0] in ("lion", "adafactor")
    if "--model-type" not in family:
        family += ["--position-embedding-type", "rope"] if bound or rng.random() < 0.3 else []
        family += pick([[], ["--normalization", "RMSNorm"]])
    family += pick([[], [], ["--qk-layernorm"], ["--qk-layernorm", "--qk-layernorm-across-heads"]])
    family += pick([[], [], ["--num-query-groups", "2"], ["--num-query-groups", "1"]])  # ranks of tp may share them
    family += pick([[], [], [], *UNUSUAL])
    model += family
    model += pick([[], ["--untie-embeddings-and-output-weights"], ["--no-untie-embeddings-and-output-weights"]])
    model += pick(
        [[], ["--clip-grad", "0"], ["--calculate-per-token-loss"], ["--eod-mask-loss", "--calculate-per-token-loss"]]
    )
    model += pick([[], [], ["--reset-position-ids", "--reset-attention-mask"]])
    unlike = ["--window-size", "5", "--skip-freq", "window=2"]
    unlike += ["--skip-freq", "rope=2"] if not bound and ("rope" in family or "llama" in family) else []
    model += pick([[], [], unlike])
    sinks = ["--softmax-type", "learnable"]
    capped = [*sinks, "--attn-logit-softcapping", "0.5"]
    unlike = ["--skip-freq", "softmax_type=2", "--attn-logit-softcapping-skip-freq", f"[0]+[1]*{layers - 1}"]
    # values of rank 8 in 12 channels a head leave SOAP's basis open, as adapters do
    if rng.random() < 0.15 and not bound and optimizer != "soap":
        model += ["--mla", *pick([[], ["q_lora_rank=12"]]), "kv_lora_rank=8", "qk_head_dim=6", "qk_pos_emb_head_dim=4"]
        model += [pick(["v_head_dim=5", "v_head_dim=12"])]
    return model + pick([[], [], [], [], sinks, [*capped, *pick([[], unlike])]])


ADAPTERS = {
    "bottleneck": "",
    "bottleneck int8": "--lora int8",
    "prefix": "--max-position-embeddings 19",  # those of the text begin behind it
    "int8": "--lora int8",
}


def other_adapters(model: Sequence[str], seed: str) -> list[tuple[str, ...]]:
    """The flags of a model with `--lora`, half of the time, with layers behind matrices or keys in front of the text in
    place of products beside matrices, or with a base in 8 bits: in the order in which they are to be tried."""
    coin = random.Random(seed)
    if "--lora" not in model or coin.random() < 0.5:
        return []
    flags = [word.split() for word in " ".join(model).replace(" --", "\n--").splitlines()]
    kept = [word for flag in flags for word in flag if not flag[0].startswith("--lora")]
    found = []
    for kind in coin.sample([*ADAPTERS], len(ADAPTERS)):
        if kind != "prefix" or "--attention-dropout" not in model:  # without which the oracle writes its scores out
            own = model if kind == "int8" else [*kept, "--lora", "rank=3", f"kind={kind.split()[0]}"]
            found.append((*own, *ADAPTERS[kind].split()))
    return found
