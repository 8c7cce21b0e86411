"""A program for test_megatron.py: megatron.core itself loads a converted file, strictly, and computes its logits."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from megatron.core.transformer import TransformerConfig


def main(folder: Path) -> None:
    # what it does on a GPU only: asking for the device, and keeping a random generator for dropout
    torch.cuda.current_device = lambda: "cpu"
    get_cuda_rng_tracker().fork = contextlib.nullcontext
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    content = torch.load(folder / "there/release/mp_rank_00/model_optim_rng.pt", weights_only=False)
    args = content["args"]
    config = TransformerConfig(
        num_layers=args.num_layers,
        hidden_size=args.hidden_size,
        ffn_hidden_size=args.ffn_hidden_size,
        num_attention_heads=args.num_attention_heads,
        num_query_groups=args.num_query_groups if args.group_query_attention else None,
        kv_channels=args.kv_channels,
        normalization=args.normalization,
        layernorm_epsilon=args.norm_epsilon,
        add_bias_linear=args.add_bias_linear,
        add_qkv_bias=args.add_qkv_bias,
        gated_linear_unit=args.swiglu,
        activation_func=F.silu if args.swiglu else F.gelu,
        bias_activation_fusion=args.bias_gelu_fusion,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        use_cpu_initialization=True,
        params_dtype=args.params_dtype,
        apply_rope_fusion=False,
    )
    model = GPTModel(
        config=config,
        transformer_layer_spec=get_gpt_layer_local_spec(normalization=args.normalization),
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.max_position_embeddings,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type=args.position_embedding_type,
        rotary_percent=args.rotary_percent,
        rotary_base=args.rotary_base,
        seq_len_interpolation_factor=args.rotary_seq_len_interpolation_factor,
    ).to(args.params_dtype)
    model.load_state_dict(content["model"], strict=True)
    length = args.max_position_embeddings
    tokens = torch.randint(0, args.true_vocab_size, (2, length), generator=torch.Generator().manual_seed(0))
    positions = torch.arange(length).expand(2, length)
    mask = torch.ones(1, 1, length, length).triu(1).bool()
    with torch.no_grad():
        logits = model.eval()(tokens, positions, mask)
    torch.save(tokens, folder / "tokens.pt")
    torch.save(logits[..., : args.true_vocab_size], folder / "logits.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
