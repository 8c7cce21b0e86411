"""A program for test_megatron_dist.py: megatron.core itself makes, loads and saves `torch_dist`, on a CPU.

    run_megatron_dist.py FOLDER RANK '{"kind": "llama", "load": null, "train": 2, "save": "a", "tp": 1, "pp": 1, ...}'

What it has on a GPU alone (devices of tensors, types of parameters, the generator for dropout) is replaced here.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.serialization import (
    get_default_load_sharded_strategy,
    get_default_save_sharded_strategy,
)
from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.moe import moe_utils
from torch.overrides import TorchFunctionMode

L, H, S, V, ROWS = 2, 32, 16, 100, 128
LLAMA: dict[str, Any] = dict(
    normalization="RMSNorm", add_bias_linear=False, swiglu=True, num_query_groups=2, group_query_attention=True,
    untie_embeddings_and_output_weights=True, position_embedding_type="rope", bias_gelu_fusion=False,
    ffn_hidden_size=48,
)  # fmt: skip
KINDS: dict[str, dict[str, Any]] = {
    "gpt": dict(bf16=True),
    "llama": LLAMA,
    "experts": LLAMA | dict(num_experts=4, moe_router_topk=2, moe_layer_freq=1, moe_ffn_hidden_size=24),
    "sinks": LLAMA | dict(softmax_type="learnable"),
    "mixed": LLAMA | dict(num_experts=4, moe_router_topk=2, moe_layer_freq=[0, 1], moe_ffn_hidden_size=24, bf16=True),
}  # fmt: skip


class OnCpu(TorchFunctionMode):
    """Tensors that are to be on a GPU are on the CPU, and call themselves what they are there."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            return func(*args).replace("torch.", "torch.cuda.")
        if str(kwargs.get("device")).startswith("cuda"):
            kwargs["device"] = "cpu"
        return func(*args, **kwargs)


def arguments(kind: str, tp: int, pp: int) -> argparse.Namespace:
    """The settings of a run of Megatron-LM, under its names."""
    args = dict(
        num_layers=L, hidden_size=H, num_attention_heads=4, ffn_hidden_size=4 * H, max_position_embeddings=S,
        seq_length=S, normalization="LayerNorm", norm_epsilon=1e-5, add_bias_linear=True, swiglu=False,
        group_query_attention=False, num_query_groups=1, untie_embeddings_and_output_weights=False,
        position_embedding_type="learned_absolute", bias_gelu_fusion=True, num_experts=None, moe_layer_freq=1,
        moe_router_load_balancing_type="none", moe_router_pre_softmax=True, bf16=False, kv_channels=H // 4,
        tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp, padded_vocab_size=ROWS, optimizer="adam",
        add_position_embedding=True, adam_beta1=0.9, adam_beta2=0.999, adam_eps=1e-8, lr=1e-2, weight_decay=0.0,
        micro_batch_size=4, global_batch_size=4, train_iters=10, seed=77, softmax_type="vanilla",
    )  # fmt: skip
    return argparse.Namespace(**args | KINDS[kind])


def transformer_config(args: argparse.Namespace, dtype: torch.dtype) -> TransformerConfig:
    experts = {name: getattr(args, name) for name in ("moe_layer_freq", "moe_router_load_balancing_type")}
    if args.num_experts is not None:
        names = ("moe_router_topk", "moe_ffn_hidden_size", "moe_router_pre_softmax")
        experts |= {name: getattr(args, name) for name in names} | {"num_moe_experts": args.num_experts}
    return TransformerConfig(
        num_layers=L, hidden_size=H, ffn_hidden_size=args.ffn_hidden_size, num_attention_heads=4,
        num_query_groups=args.num_query_groups if args.group_query_attention else None,
        normalization=args.normalization, add_bias_linear=args.add_bias_linear, gated_linear_unit=args.swiglu,
        activation_func=F.silu if args.swiglu else F.gelu, bias_activation_fusion=args.bias_gelu_fusion,
        hidden_dropout=0.0, attention_dropout=0.0, use_cpu_initialization=True, params_dtype=dtype,
        bf16=dtype == torch.bfloat16, pipeline_dtype=dtype, apply_rope_fusion=False, init_method_std=0.3,
        tensor_model_parallel_size=args.tensor_model_parallel_size,
        pipeline_model_parallel_size=args.pipeline_model_parallel_size, softmax_type=args.softmax_type, **experts,
        expert_model_parallel_size=parallel_state.get_expert_model_parallel_world_size(),
    )  # fmt: skip


def gpt_model(args: argparse.Namespace, dtype: torch.dtype) -> GPTModel:
    config = transformer_config(args, dtype)
    spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization=args.normalization)
    return GPTModel(
        config=config, transformer_layer_spec=spec, vocab_size=ROWS, max_sequence_length=S,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type=args.position_embedding_type,
        pre_process=parallel_state.is_pipeline_first_stage(), post_process=parallel_state.is_pipeline_last_stage(),
    ).to(dtype)  # fmt: skip


def logits_of(model: GPTModel, tokens: torch.Tensor) -> torch.Tensor:
    mask = torch.ones(1, 1, S, S).triu(1).bool()
    return model(tokens, torch.arange(S).expand(len(tokens), S), mask)


def main(folder: Path, rank: int, job: dict[str, Any]) -> None:
    tp, pp, kind = job.get("tp", 1), job.get("pp", 1), job["kind"]
    torch.cuda.current_device = lambda: torch.device("cpu")
    torch.cuda.synchronize = lambda *_: None
    get_cuda_rng_tracker().fork = contextlib.nullcontext
    set_states = DistributedOptimizer._set_main_param_and_optimizer_states
    get_states = DistributedOptimizer._get_main_param_and_optimizer_states
    DistributedOptimizer._set_main_param_and_optimizer_states = lambda self, parameter, tensors: set_states(
        self,
        parameter,
        {"step": get_states(self, parameter)["step"], **tensors},  # 0.16.1 forgets that of torch's Adam
    )
    moe_utils.te_general_gemm = None  # 0.16.1 forgets it where Transformer Engine is not installed
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous-{job['name']}", rank=rank, world_size=job.get("world", tp * pp)
    )
    parallel_state.initialize_model_parallel(tp, pp, expert_model_parallel_size=job.get("ep", 1))
    torch.manual_seed(7)
    args = arguments(kind, tp, pp)
    dtype = torch.bfloat16 if args.bf16 else torch.float32
    model = gpt_model(args, dtype)
    with torch.no_grad():  # zeros and ones would hide what is not read
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape))
    ddp = DistributedDataParallel(
        model.config, DistributedDataParallelConfig(use_distributed_optimizer=job.get("sharded", True)), model
    )
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam", lr=1e-2, bf16=args.bf16, params_dtype=dtype, clip_grad=0.0, weight_decay=0.0,
            use_distributed_optimizer=job.get("sharded", True),
        ),
        [ddp],
    )  # fmt: skip
    metadata = {
        "distrib_optim_sharding_type": job.get("sharding", "fully_reshardable"), "chained_optim_avoid_prefix": True,
        "distrib_optim_fully_reshardable_mem_efficient": False, "singleton_local_shards": job.get("single", False),
    }  # fmt: skip
    iteration = 0
    if job.get("weights"):
        path = str(folder / job["weights"])
        state = {"model": model.sharded_state_dict(metadata=metadata)}
        found = dist_checkpointing.load(state, path, get_default_load_sharded_strategy(path))
        model.load_state_dict(found["model"])
    if job.get("load"):
        for inner in optimizer.chained_optimizers if job.get("sharded", True) else []:
            inner._init_optimizer_states_with_dummy_values()  # Adam of torch has none before its first step
        state = sharded(model, optimizer, metadata, loading=True)
        path = str(folder / job["load"])
        found = dist_checkpointing.load(state, path, get_default_load_sharded_strategy(path))
        model.load_state_dict(found["model"])
        optimizer.load_state_dict(found["optimizer"])
        for inner in getattr(optimizer, "chained_optimizers", [optimizer]):
            for state in inner.optimizer.state.values():
                state["step"] = state["step"].clone()  # one tensor for all of them is counted up by each
        iteration = found["iteration"]
    # a text that repeats itself: every sample of it is the same, in whatever order
    tokens = torch.randint(0, V, (S,), generator=torch.Generator().manual_seed(0)).expand(4, S)
    labels = tokens.roll(-1, 1)
    for _ in range(job.get("train", 0)):
        ddp.zero_grad_buffer()
        optimizer.zero_grad()
        logits = logits_of(ddp, tokens).float()[..., : job.get("vocabulary", V)]
        F.cross_entropy(logits.flatten(0, 1), labels.flatten()).backward()
        ddp.finish_grad_sync()
        optimizer.step()
        iteration += 1
    if job.get("save"):
        scheduler = {
            "max_lr": 1e-2, "lr_warmup_steps": 0, "num_steps": 4 * iteration, "lr_decay_style": "constant",
            "lr_decay_steps": 40, "min_lr": 0.0, "start_wd": 0.0, "end_wd": 0.0, "wd_incr_style": "constant",
            "wd_incr_steps": 40,
        }  # fmt: skip
        args.consumed_train_samples = 4 * iteration
        common = {"args": args, "checkpoint_version": 3.0, "iteration": iteration, "opt_param_scheduler": scheduler}
        path = folder / job["save"] / f"iter_{iteration:07d}"
        if rank == 0:
            path.mkdir(parents=True)
            (folder / job["save"] / "latest_checkpointed_iteration.txt").write_text(str(iteration))
        torch.distributed.barrier()
        strategy = get_default_save_sharded_strategy("torch_dist", 1)
        if job.get("parallel"):
            strategy = FullyParallelSaveStrategyWrapper(strategy)
        dist_checkpointing.save(common | sharded(model, optimizer, metadata), str(path), strategy)
    if tp == pp == 1:
        wide = gpt_model(args, torch.float32)
        wide.load_state_dict(model.state_dict())
        with torch.no_grad():
            logits = logits_of(wide.eval(), tokens)[..., :V]
        found = {"tokens": tokens, "logits": logits, "iteration": iteration, "weights": whole(model)}
        torch.save(found | {"state": whole_state(optimizer, model)}, folder / f"{job['name']}.pt")


def sharded(model: GPTModel, optimizer: Any, metadata: dict[str, Any], *, loading: bool = False) -> dict[str, Any]:
    found = {"model": model.sharded_state_dict(metadata=metadata)}
    found["optimizer"] = optimizer.sharded_state_dict(found["model"], is_loading=loading, metadata=metadata)
    return found


def whole(model: GPTModel) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def whole_state(optimizer: Any, model: GPTModel) -> dict[str, dict[str, torch.Tensor]]:
    """Name of a parameter -> its master and moments, as one process has them."""
    found = {}
    for inner in getattr(optimizer, "chained_optimizers", [optimizer]):
        for name, parameter in model.named_parameters():
            if hasattr(inner, "model_param_group_index_map") and parameter in inner.model_param_group_index_map:
                state = inner._get_main_param_and_optimizer_states(parameter)
                found[name] = {k: v.detach().clone().view(parameter.shape) for k, v in state.items() if k != "step"}
    return found


if __name__ == "__main__":
    with OnCpu():
        main(Path(sys.argv[1]), int(sys.argv[2]), json.loads(sys.argv[3]))
