"""Names that users type: aliases, flags of Megatron-LM that are not needed here, the nearest to a misspelled one."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Any

#: Another name -> the field that takes its value.
RENAMED: Mapping[str, str] = {
    "num_virtual_stages_per_pipeline_rank": "virtual_pipeline_model_parallel_size",
    "keep_last": "keep_last_n",
}

#: A flag without a value (in YAML: true) -> the field and the value it stands for.
CONSTANT_FLAGS: Mapping[str, tuple[str, Any]] = {
    "use_distributed_optimizer": ("zero_stage", 1),
    "disable_bias_linear": ("add_bias_linear", False),
    "swiglu": ("activation", "swiglu"),
    "squared_relu": ("activation", "squared-relu"),
    "recompute_activations": ("recompute_granularity", "selective"),
    "use_rotary_position_embeddings": ("position_embedding_type", "rope"),
}

#: Names that are no field but are worked out into fields when all is read -> whether they take a value.
EXTRA_OPTIONS: Mapping[str, bool] = {
    "num_layers_per_virtual_pipeline_stage": True,
    "group_query_attention": False,
}

#: Megatron-LM's flags that this parser refuses, each with its reason (prefix `no_` included where that is the flag).
NOT_NEEDED: Mapping[str, str] = {
    "use_flash_attn": "not needed, drop it: torch's attention picks flash where the device has it",
    "attention_backend": "not needed, drop it: torch's attention picks the fastest backend the device has",
    "transformer_impl": "not needed, drop it: there is one implementation, in PyTorch",
    "use_mcore_models": "not needed, drop it: there is one implementation",
    "use_legacy_models": "not needed, drop it: there is one implementation",
    "no_gradient_accumulation_fusion": "not needed, drop it: no compiled extension is involved",
    "no_masked_softmax_fusion": "not needed, drop it: no compiled extension is involved",
    "no_bias_gelu_fusion": "not needed, drop it: use `compile` for fused element-wise kernels",
    "no_bias_swiglu_fusion": "not needed, drop it: use `compile` for fused element-wise kernels",
    "no_bias_dropout_fusion": "not needed, drop it: use `compile` for fused element-wise kernels",
    "no_rope_fusion": "not needed, drop it: use `compile` for fused element-wise kernels",
    "no_persist_layer_norm": "not needed, drop it: torch's own normalisation kernels are used",
    "accumulate_allreduce_grads_in_fp32": "not needed, drop it: always so, unless `grad_reduce_in_bf16` is given",
    "use_cpu_initialization": "not needed, drop it: initial weights never depend on layout or device",
    "no_async_tensor_model_parallel_allreduce": "not needed, drop it: backward overlaps where it can",
    "ckpt_format": "not needed, drop it: one format, which loads at any layout",
    "auto_detect_ckpt_format": "not needed, drop it: one format, which loads at any layout",
    "use_dist_ckpt": "not needed, drop it: one format, which loads at any layout",
    "dist_ckpt_optim_fully_reshardable": "not needed, drop it: every checkpoint loads at any layout",
    "ckpt_fully_parallel_save": "not needed, drop it: always so",
    "exit_on_missing_checkpoint": "not needed, drop it: a `load` that finds nothing is always an error",
    "log_throughput": "not needed, drop it: always logged",
    "log_timers_to_tensorboard": "not needed, drop it: times are always logged",
    "log_validation_ppl_to_tensorboard": "not needed, drop it: always logged",
    "log_memory_to_tensorboard": "not needed, drop it: always logged",
    "log_params_norm": "is not logged here; metrics.jsonl has the gradient norm",
    "log_num_zeros_in_grad": "is not logged here; metrics.jsonl has the gradient norm",
    "use_precision_aware_optimizer": "not needed, drop it: `exp_avg_dtype` and `exp_avg_sq_dtype` suffice",
    "use_pytorch_profiler": "not needed, drop it: `profile` uses it",
    "check_for_nan_in_loss_and_grad": "not needed, drop it: always checked; see `nonfinite` {stop,skip}",
    "no_check_for_nan_in_loss_and_grad": "cannot be switched off: see `nonfinite` {stop,skip}",
    "dataloader_type": "not needed, drop it: sample order is a pure function of seed and position",
    "overlap_p2p_communication": "not needed, drop it: the schedule decides",
    "no_overlap_p2p_communication": "not needed, drop it: the schedule decides",
    "exit_signal": "not needed, drop it: SIGTERM, SIGUSR1 and SIGHUP save and end the run",
    "yaml_cfg": "is `config` FILE here",
    "use_torch_fsdp2": "is `zero_stage` 3 here",
    "openai_gelu": "is `activation` gelu-tanh here",
    "data_parallel_size": "follows from the number of ranks: all / (tensor x pipeline x context parallel size)",
    "world_size": "is the number of ranks that are started: `nprocs` N here, or torchrun, SLURM, mpirun",
    "local_rank": "not needed, drop it: ranks are read from the launcher's environment; start them by torchrun",
    "padded_vocab_size": "is derived from `vocab_size` and `make_vocab_size_divisible_by`",
    "moe_grouped_gemm": "not needed, drop it: the experts of a rank are multiplied one after the other",
    "moe_token_dispatcher_type": "not needed, drop it: tokens travel by all-to-all",
    "moe_router_dtype": "not needed, drop it: the router is in fp32, or wider",
    "moe_token_drop_policy": "not needed, drop it: the last tokens of a sequence are dropped",
}

#: What people call things elsewhere -> what to suggest.
_SHORT_FORMS = {
    "tensor_model_parallel_size": ("tp", "tp_size", "tp_degree", "tensor_parallel_size", "tensor_parallel_degree"),
    "pipeline_model_parallel_size": (
        "pp",
        "pp_size",
        "pp_degree",
        "pipeline_parallel_size",
        "pipeline_parallel_degree",
    ),
    "virtual_pipeline_model_parallel_size": ("vpp",),
    "zero_stage": ("zero",),
    "num_layers": ("layers", "n_layer"),
    "num_attention_heads": ("heads", "n_head", "num_heads"),
    "num_query_groups": ("kv_heads", "num_key_value_heads"),
    "hidden_size": ("hidden", "hiden", "n_embd", "d_model"),
    "ffn_hidden_size": ("intermediate_size",),
    "rotary_base": ("rope_theta",),
    "norm_epsilon": ("rms_norm_eps", "layer_norm_epsilon"),
    "seq_length": ("seq", "seq_len", "max_seq_len", "context_length", "block_size"),
    "hidden_dropout": ("dropout",),
    "micro_batch_size": ("batch_size", "mbs", "per_device_train_batch_size"),
    "global_batch_size": ("gbs",),
    "train_iters": ("steps", "max_steps", "max_iters", "iters"),
    "lr": ("learning_rate",),
    "lr_warmup_iters": ("warmup", "warmup_iters", "warmup_steps"),
    "clip_grad": ("clip", "grad_clip", "max_grad_norm"),
    "bf16": ("dtype", "torch_dtype"),
    "pipeline_schedule": ("schedule",),
    "distributed_backend": ("backend",),
    "nprocs": ("nproc",),
    "data_path": ("data",),
    "tokenizer_type": ("tokenizer",),
    "auto_resume": ("resume",),
    "save": ("output_dir", "save_dir", "out_dir"),
    "log_interval": ("logging_steps",),
    "save_interval": ("save_steps",),
    "eval_interval": ("eval_steps",),
    "recompute_granularity": ("gradient_checkpointing", "activation_checkpointing"),
}
SHORT_FORMS: Mapping[str, str] = {short: name for name, shorts in _SHORT_FORMS.items() for short in shorts}


def nearest(name: str, known: Iterable[str]) -> str | None:
    """Find the known name (with underscores) that a misspelled or foreign one most likely means."""
    names = sorted(known)
    short = SHORT_FORMS.get(name)
    if short in names:
        return short
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.7)
    if close:
        return close[0]
    # Half a name, or its words in part: `warmup_fraction`, `query_groups`.
    containing = [candidate for candidate in names if len(name) >= 4 and name in candidate]
    return min(containing, key=len) if containing else None
