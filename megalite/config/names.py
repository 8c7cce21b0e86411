"""Names that users type: aliases, and the nearest to a misspelled one."""

import difflib
from collections.abc import Iterable, Mapping
from typing import Any

#: Another name -> the field that takes its value.
RENAMED: Mapping[str, str] = {
    "num_virtual_stages_per_pipeline_rank": "virtual_pipeline_model_parallel_size",
    "keep_last": "keep_last_n",
    "persistent_save_interval": "save_interval",
    "mup_embedding_mult": "embedding_multiplier",
}

#: A flag without a value (in YAML: true) -> the field and the value it stands for.
CONSTANT_FLAGS: Mapping[str, tuple[str, Any]] = {
    "use_distributed_optimizer": ("zero_stage", 1),
    "disable_bias_linear": ("add_bias_linear", False),
    "check_for_spiky_loss": ("on_spike", "log"),
    "swiglu": ("activation", "swiglu"),
    "squared_relu": ("activation", "squared-relu"),
    "enable_cuda_graph": ("cuda_graph_impl", "local"),
    "quick_geglu": ("activation", "quick-geglu"),
    "openai_gelu": ("activation", "gelu-tanh"),
    "recompute_activations": ("recompute_granularity", "selective"),
    "use_rotary_position_embeddings": ("position_embedding_type", "rope"),
}

#: Names that are no field but are worked out into fields when all is read (`worked_out`) -> the type of their value,
#: None for a switch, and what stands for them now.
EXTRA_OPTIONS: Mapping[str, tuple[type | None, str]] = {
    "num_layers_per_virtual_pipeline_stage": (int, "`virtual_pipeline_model_parallel_size`"),
    "group_query_attention": (None, "`num_query_groups` 1"),
    "no_position_embedding": (None, "`position_embedding_type` rope"),
    "use_torch_fsdp2": (None, "`zero_stage` 3"),
    "use_megatron_fsdp": (None, "`zero_stage` 3"),
    "data_parallel_sharding_strategy": (str, "`zero_stage`"),
    "rotary_scaling_factor": (float, "`rope_scaling_factor`, type yarn"),
    "rope_type": (str, "`rope_scaling_type`"),
    "exit_on_missing_checkpoint": (None, ""),
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
    "lora_rank": ("r",),
    "lora_targets": ("target_modules",),
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
