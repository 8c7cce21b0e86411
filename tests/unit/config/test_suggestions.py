"""A name that nothing here resembles gets no suggestion; a misspelled or foreign one the right one."""

from __future__ import annotations

import pytest

from megalite.config.names import nearest
from megalite.config.reader import Reader

MEANT = {
    "weight_decy": "weight_decay",
    "lr_decay_stlye": "lr_decay_style",
    "trian_iters": "train_iters",
    "vocab_sze": "vocab_size",
    "qury_groups": "num_query_groups",
    "kv_chanels": "kv_channels",
    "microbatch_size": "micro_batch_size",
    "num_hidden_layers": "num_layers",
    "adam_beta_1": "adam_beta1",
    "warmup_fraction": "lr_warmup_fraction",
    "intermediate_size": "ffn_hidden_size",
    "rope_theta": "rotary_base",
    "rms_norm_eps": "norm_epsilon",
    "max_grad_norm": "clip_grad",
    "tensor_parallel_degree": "tensor_model_parallel_size",
    "per_device_train_batch_size": "micro_batch_size",
    "output_dir": "save",
    "max_seq_len": "seq_length",
    "gradient_checkpointing": "recompute_granularity",
    "logging_steps": "log_interval",
}
NOTHING = """mmap_bin_files no_mmap_bin_files deepspeed_config model_name_or_path num_train_epochs trust_remote_code
gradient_accumulation_steps save_total_limit push_to_hub report_to zero_optimization fsdp_transformer_layer_cls_to_wrap
attn_implementation dataset_name preprocessing_num_workers ddp_find_unused_parameters tokens_per_expert
wall_clock_breakdown elastic_training stop_words""".split()


@pytest.mark.parametrize(("typed", "meant"), [*MEANT.items(), *((name, None) for name in NOTHING)])
def test_a_suggestion_is_what_was_meant_or_none(typed: str, meant: str | None) -> None:
    assert nearest(typed, Reader().known | {"config"}) == meant
