"""Flags that take several settings of one thing by name: `--wandb project=lm entity=us`, `--offload optimizer params`.

The command line has the flag `--NAME ARGUMENT=VALUE ...` (commas do, too); a file has `NAME: {ARGUMENT: VALUE}` or a
list of such words. Each argument sets a field, whose own name (often Megatron-LM's flag) is an accepted spelling of it.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields

from megalite.config.optimizer import OptimizerArgs
from megalite.errors import flag_of


@dataclass(frozen=True)
class ArgumentFlag:
    """One such flag.

    help: what the arguments are about.
    fields: argument -> the field that it sets.
    switch: the switch that the flag turns on.
    alone: argument -> its value where none is written; a switch is on then.
    apart: fields that have a flag of their own in `--help`, too.
    """

    help: str
    fields: Mapping[str, str]
    switch: str | None = None
    alone: Mapping[str, str] = field(default_factory=dict)
    apart: tuple[str, ...] = ()


class Prefixed(dict[str, str]):
    """Arguments, and fields whose names are `prefix` and the argument."""

    def __init__(self, prefix: str, *arguments: str) -> None:
        super().__init__({argument: prefix + argument for argument in arguments})


ARGUMENT_FLAGS: Mapping[str, ArgumentFlag] = {
    "rope_scaling": ArgumentFlag(
        "scaling of RoPE, to read further than it was trained",
        {
            **Prefixed("rope_scaling_", "type", "factor", "original_length"),
            **Prefixed("yarn_", "beta_fast", "beta_slow"),
            "round_to_int": "yarn_correction_range_round_to_int",
            **Prefixed("", "mscale", "mscale_all_dim"),
        },
        switch="use_rope_scaling",
    ),
    "mla": ArgumentFlag(
        "latent attention: keys and values of all heads are made of one small vector a token",
        {
            **Prefixed("", "q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim"),
            "norm_epsilon": "latent_norm_epsilon",
        },
        switch="multi_latent_attention",
    ),
    "linear_attention": ArgumentFlag(
        "layers whose tokens meet in a state: Gated DeltaNet",
        {
            "variant": "experimental_attention_variant",
            "freq": "linear_attention_freq",
            **Prefixed("linear_", "key_head_dim", "value_head_dim", "num_key_heads", "num_value_heads"),
            **Prefixed("linear_", "conv_kernel_dim"),
        },
    ),
    "skip_freq": ArgumentFlag(
        "layers that do without something: N, every N-th, or a list",
        {
            "window": "window_attn_skip_freq",
            "rope": "no_rope_freq",
            "softmax_type": "softmax_type_skip_freq",
            "softcapping": "attn_logit_softcapping_skip_freq",
        },
    ),
    "softcapping": ArgumentFlag(
        "soft caps c: x becomes c tanh(x / c) (Gemma 2)",
        {"attention": "attn_logit_softcapping", "final": "final_logit_softcapping"},
    ),
    "mtp": ArgumentFlag(
        "multi-token prediction: tokens beyond the next one",
        Prefixed("mtp_", "num_layers", "loss_scaling_factor"),
    ),
    "glu": ArgumentFlag(
        "what is done to gate and value of a gated MLP before they are multiplied",
        {"linear_offset": "glu_linear_offset", "clamp_value": "activation_func_clamp_value"},
    ),
    "moe_router": ArgumentFlag(
        "how the router chooses and weighs experts, and what carries tokens to them",
        {
            **Prefixed("moe_router_", "score_function", "pre_softmax", "num_groups", "group_topk"),
            **Prefixed("moe_router_", "topk_scaling_factor", "bias"),
            "expert_bias": "moe_router_enable_expert_bias",
            "bias_update_rate": "moe_router_bias_update_rate",
            "dispatcher": "moe_token_dispatcher_type",
        },
    ),
    "lora": ArgumentFlag(
        "adapters (LoRA and others), which are trained in place of the model; they are saved apart",
        {
            "rank": "lora_rank",
            "kind": "adapter_kind",
            "alpha": "lora_alpha",
            "targets": "lora_targets",
            "shared_a": "lora_shared_a",
            "int8": "frozen_weights_int8",
        },
        alone={"shared_a": "true", "int8": "true"},
    ),
    "mup": ArgumentFlag(
        "muP and CompleteP: what was tuned for a small model holds for a wide and a deep one",
        Prefixed("mup_", "base_hidden_size", "base_num_layers", "base_head_dim"),
        switch="use_mup",
    ),
    "qk_clip": ArgumentFlag(
        "scores of attention, bounded by scaling the projections of queries and keys after an update",
        Prefixed("qk_clip_", "threshold", "alpha"),
        switch="qk_clip",
    ),
    "fp8": ArgumentFlag(
        "products of linear layers inside of blocks in 8 bits",
        Prefixed("fp8_", "format", "recipe", "amax_history_len", "param_gather"),
    ),
    "zero_plus_plus": ArgumentFlag(
        "ZeRO-3 that sends less (ZeRO++), in 8 or 4 bits, and between nodes above all",
        {**Prefixed("zero_quantized_", "weights", "gradients"), "partition": "zero_hpz_partition_size"},
    ),
    "loss_scaling": ArgumentFlag(
        "the dynamic loss scale of `fp16`, and how many updates may be skipped",
        {
            "initial": "initial_loss_scale",
            "min": "min_loss_scale",
            "window": "loss_scale_window",
            "hysteresis": "hysteresis",
            "max_skipped": "max_skipped_updates",
        },
    ),
    "spikes": ArgumentFlag(
        "updates whose gradient norm is far above those before",
        {
            "action": "on_spike",
            "sigma": "spike_sigma",
            "window": "spike_window",
            "back": "rollback_iters",
            "pass_over": "rollback_skip_iters",
            "times": "rollback_limit",
        },
    ),
    "lr_decay": ArgumentFlag(
        "length of the decay to `min_lr`; without it that of the training",
        Prefixed("lr_decay_", "iters", "samples"),
    ),
    "lr_warmup": ArgumentFlag(
        "linear warm-up of the learning rate, its length in one of three units",
        Prefixed("lr_warmup_", "iters", "samples", "fraction", "init"),
    ),
    "lr_wsd_decay": ArgumentFlag(
        "final decay of WSD, its length in one of two units",
        Prefixed("lr_wsd_decay_", "iters", "samples", "style"),
    ),
    "weight_decay_ramp": ArgumentFlag(
        "weight decay that changes over the training",
        {"start": "start_weight_decay", "end": "end_weight_decay", "style": "weight_decay_incr_style"},
    ),
    "optimizer_args": ArgumentFlag(
        "numbers of single optimizers",
        {**Prefixed("", *(field.name for field in fields(OptimizerArgs))), "impl": "optimizer_impl"},
        apart=("adam_beta1", "adam_beta2", "adam_eps"),
    ),
    "optimizer_state": ArgumentFlag(
        "how moments and masters are kept",
        {**Prefixed("", "exp_avg_dtype", "exp_avg_sq_dtype"), "param_remainders": "store_param_remainders"},
    ),
    "offload": ArgumentFlag(
        "what lives in host memory or in files, to make room on the device",
        {
            "optimizer": "optimizer_cpu_offload",
            "fraction": "optimizer_offload_fraction",
            "path": "optimizer_offload_path",
            "params": "param_offload",
            "activations": "cpu_offloading_num_layers",
            "embedding": "embedding_offload",
            "lookahead": "embedding_lookahead",
            "cache_rows": "embedding_cache_rows",
        },
        alone={"params": "cpu", "embedding": "cpu"},
    ),
    "wandb": ArgumentFlag(
        "Weights & Biases",
        Prefixed("wandb_", "project", "exp_name", "entity", "save_dir"),
    ),
    "profile": ArgumentFlag(
        "write a Chrome trace of some iterations with torch's profiler",
        Prefixed("profile_", "step_start", "step_end", "ranks"),
        switch="profile",
    ),
    "dry_run": ArgumentFlag(
        "check everything, print the settings that are not defaults, sizes, memory and schedule, and exit",
        {"all": "dry_run_all"},
        switch="dry_run",
    ),
    "sample": ArgumentFlag(
        "texts that the model writes during the training",
        Prefixed("sample_", "prompts", "interval", "tokens"),
    ),
    "prometheus": ArgumentFlag(
        "the newest numbers of the run in Prometheus' format",
        Prefixed("prometheus_", "port", "file"),
    ),
    "eval_tasks": ArgumentFlag(
        "tasks of lm-evaluation-harness that measure the model during the training",
        {"files": "eval_task_files", "interval": "eval_tasks_interval", "limit": "eval_tasks_limit"},
    ),
}


@functools.cache
def places() -> Mapping[str, tuple[str, str]]:
    """Field -> its flag and argument; no argument where it is the switch of the flag."""
    found = {made.switch: (flag, "") for flag, made in ARGUMENT_FLAGS.items() if made.switch is not None}
    for flag, made in ARGUMENT_FLAGS.items():
        found |= {name: (flag, argument) for argument, name in made.fields.items() if name not in made.apart}
    return found


def shown_flag(name: str) -> str:
    """A field as `--help` spells it: `--wandb entity`."""
    flag, argument = places().get(name, (name, ""))
    return f"{flag_of(flag)} {argument}".rstrip()


def argument_words(flag: str, texts: list[str]) -> Iterator[tuple[str, str | None]]:
    """(Argument, text of its value or None) of `a=1,b c=2`; what begins with no argument belongs to the value before
    it, as the `2` of `ranks=0,2` does."""
    known, word = ARGUMENT_FLAGS[flag].fields, ""
    for text in texts:
        for separator, part in re.findall(r"([,\s]*)([^,\s]+)", text):
            name = part.partition("=")[0].replace("-", "_")
            begins = name in known or (name != part and name.isidentifier())
            if word and (begins or "=" not in word):
                yield _argument(word)
                word = ""
            word += (separator or " ") + part if word else part
    if word:
        yield _argument(word)


def _argument(word: str) -> tuple[str, str | None]:
    name, equals, text = word.partition("=")
    return name.replace("-", "_"), text if equals else None
