"""A machine with GPUs in one table: training steps of one device by megalite and its peers, attention and loss alone,
a sparse block, every kind of attention, and megalite on 1 to all devices. What says most comes first.

    python benchmarks/gpu.py --json gpu.json          # every GPU there is: about 20 minutes
    python benchmarks/gpu.py --json gpu.json --resume # ... what a lent machine left open
    python benchmarks/gpu.py --quick                  # smaller models; on a machine without a GPU this is what runs

One variant at a time: nothing else is in the device's memory. Each row tells milliseconds, tokens/s, peak memory and
MFU (model FLOPs, causal attention halved, over the device's bf16 peak). `titan` is torchtitan's Llama of the same
sizes, where torchtitan is installed, as it trains on one device: blocks and loss compiled, autocast.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # a clone works without being installed

from benchmarks import attention, experts, single
from benchmarks.harness import MODELS, Benchmark, Flag, model_named
from benchmarks.turns import Case, Place, Variant
from megalite.config import ModelConfig
from megalite.inventory import flops_per_iteration

STEPS = (
    *("megalite", "megalite-compiled", "plain", "plain-compiled", "transformers"),
    *("megalite-graphs", "megalite-fp8", "megalite-fp8-delayed", "megalite-muon"),
)
MASKS = ("megalite-documents", "megalite-window", "megalite-cap")
SPARSE = ("megalite-sparse", "megalite-dense")
LOSSES = ("megalite-loss", "megalite-loss-compiled", "torch-loss", "torch-loss-compiled")
LAYOUTS = {
    "megalite-dp": {"zero_stage": 1},
    "megalite-tp": {"tp": 0, "sequence_parallel": True},
    "megalite-pp": {"pp": 0},
    "megalite-cp": {"cp": 0},
}
LLAMA, LLAMA_STEPS = "llama3-8b-layers", ("megalite", "megalite-compiled", "megalite-fp8", "titan", "titan-compiled")
VOCABULARIES = (50257, 50304)
HEADS = {"heads": 16, "channels": 128}
FLAGS = {
    "models": Flag("GPTs", ["1b", "8b-layers", LLAMA, "gpt2"], ["tiny"], (*MODELS, LLAMA)),
    "tokens": Flag("in a micro-batch of a device, at least one sequence", 16384, 64),
    "micro": Flag("micro-batches of a step", 4, 2),
    "lengths": Flag("tokens of a sequence, of attention alone", [2048, 8192], [16]),
    "devices": Flag("most GPUs to use; 0: all", 0, 2),
    "threads": Flag("CPU threads", 1, 1),
}


def cases(args: argparse.Namespace) -> list[Case]:
    found = []
    shared = {"bf16": True, "threads": args.threads, "compile": False}
    for name in args.models:
        for vocabulary in VOCABULARIES if name == "gpt2" else (None,):
            found += steps_of(name, vocabulary, args, shared)
    found += [
        Case(f"attention, {length:,} tokens", ("megalite-attention", "sdpa", *MASKS), (("megalite-attention", "sdpa"),),
             {**shared, "length": length, "tokens": args.tokens, **HEADS}, base="megalite-attention", inner=5)
        for length in args.lengths
    ]  # fmt: skip
    sparse = {**shared, "tokens": args.tokens, **(dict.fromkeys(("hidden", "width"), 2048) if not args.quick else {})}
    found.append(Case("8 experts, top 2, beside a dense MLP of equal products", SPARSE, (SPARSE,), sparse, inner=3))
    model = llama3_layers() if args.models[0] == LLAMA else model_named(args.models[0])
    batch = max(1, args.tokens // model.seq_length)
    for ranks in powers_up_to(args.devices or count_gpus()):
        for name, layout in LAYOUTS.items():
            sizes = {key: value or ranks for key, value in layout.items()}
            micro = 2 * ranks if name == "megalite-pp" else 1
            sequences = batch * (ranks if name not in ("megalite-tp", "megalite-cp") else 1)
            sequences = -(-sequences // micro) * micro
            settings = {**shared, "model": model, "batch_size": sequences, "layout": sizes, "microbatches": micro}
            work, flops = sequences * model.seq_length, float(flops_per_iteration(model, sequences, 1))
            title = f"{ranks} devices, {args.models[0]}"
            found.append(Case(title, (name,), (), settings, work=work, unit="tokens", ranks=ranks, flops=flops))
    return found


def steps_of(name: str, vocabulary: int | None, args: argparse.Namespace, shared: dict[str, Any]) -> list[Case]:
    """A step of a model, and its loss alone. vocabulary: another than the model's own."""
    llama = name == LLAMA
    model = llama3_layers() if llama else replace(model_named(name), untie_embeddings_and_output_weights=False)
    model = model if vocabulary is None else replace(model, vocab_size=vocabulary)
    batch = 1 if llama else max(1, args.tokens // model.seq_length)
    sequences, work = batch * args.micro, batch * args.micro * model.seq_length
    settings = {**shared, "model": model, "batch_size": sequences, "microbatches": args.micro}
    pairs = (
        *(("megalite", "plain"), ("megalite-compiled", "plain-compiled"), ("megalite", "transformers")),
        *(("megalite", "titan"), ("megalite-compiled", "titan-compiled")),
        *((f"megalite-{how}", "megalite-compiled") for how in ("graphs", "fp8", "fp8-delayed", "muon")),
        ("megalite-graphs", "plain-compiled"),
    )
    flops, rows = float(flops_per_iteration(model, sequences, 1)), model.vocab_size or 0
    size = f"{name}, vocabulary of {rows:,}"
    steps = LLAMA_STEPS if llama else STEPS
    step = Case(f"one device, {size}", steps, pairs, settings, work=work, unit="tokens", flops=flops)
    sizes = {**shared, "tokens": batch * model.seq_length, "hidden": model.hidden_size, "rows": rows}
    beside = tuple(zip(LOSSES[:2], LOSSES[2:], strict=True))
    return [step, Case(f"loss of {size}", LOSSES, beside, sizes, inner=3)]


def llama3_layers() -> ModelConfig:
    """Six layers of Llama 3 8B (arXiv 2407.21783) with its vocabulary."""
    return ModelConfig(
        num_layers=6, hidden_size=4096, num_attention_heads=32, num_query_groups=8, ffn_hidden_size=14336,
        seq_length=8192, vocab_size=128256, activation="swiglu", normalization="RMSNorm", add_bias_linear=False,
        position_embedding_type="rope", rotary_base=500000, untie_embeddings_and_output_weights=True,
    )  # fmt: skip


def count_gpus() -> int:
    """0 where there is none."""
    import torch

    return torch.cuda.device_count()


def powers_up_to(most: int) -> list[int]:
    """2, 4, 8 ..."""
    return [2**n for n in range(1, most.bit_length()) if 2**n <= most]


def build(name: str, case: Case, place: Place) -> Variant:
    kind, _, how = name.partition("-")
    if name in LOSSES:
        return loss(kind, case, place, compiled=name.endswith("compiled"))
    if name in MASKS or name in ("megalite-attention", "sdpa"):
        return attention.build("megalite" if name == "megalite-attention" else name, case, place)
    if name in SPARSE:
        return experts.build("dense" if name == "megalite-dense" else "megalite", case, place)
    if name in LAYOUTS:
        return spread_out(case, place)
    if kind == "titan":
        return titan(case, place, compiled=how == "compiled")
    settings = {
        **case.settings,
        "compile": how == "compiled" or (how != "" and place.device.type == "cuda"),
    }
    settings["fp8"] = {"fp8": "tensorwise", "fp8-delayed": "delayed"}.get(how)
    settings["optimizer"] = "muon" if how == "muon" else "adam"
    settings["graphs"] = how == "graphs" and place.device.type == "cuda"
    return single.build(kind, replace(case, settings=settings), place)


def spread_out(case: Case, place: Place) -> Variant:
    """A step of megalite on several devices; data-parallel ranks take their own part of the batch."""
    from benchmarks.megalite_step import Layout, TrainingStep, Update
    from benchmarks.plain_gpt import batch

    sizes, micro = case.settings["layout"], case.settings["microbatches"]
    replicas = place.ranks // (sizes.get("tp", 1) * sizes.get("pp", 1) * sizes.get("cp", 1))
    tokens, labels = batch(case.settings["model"], case.settings["batch_size"] // replicas, place.device, place.rank)
    compiled = place.device.type == "cuda"
    layout = Layout(bf16=True, compile=compiled, num_microbatches=micro, **sizes)
    update = Update(lr=3e-4, clip_grad=1.0)
    return TrainingStep(case.settings["model"], layout, update, place, tokens, labels).variant()


def loss(kind: str, case: Case, place: Place, *, compiled: bool) -> Variant:
    """Output layer and cross entropy, forward and backward: ours chunk by chunk, the peer's over whole logits."""
    import torch
    from torch.nn import functional as F

    from megalite.comm import Axis
    from megalite.gradient import WeightGradQueue
    from megalite.parallel.tensor import LossKernels, VocabShard, fused_cross_entropy

    tokens, hidden, rows = (case.settings[key] for key in ("tokens", "hidden", "rows"))
    padded = -(-rows // 128) * 128 if kind == "megalite" else rows
    x, weight = (
        torch.randn(n, hidden, dtype=torch.bfloat16, device=place.device).mul_(0.02).requires_grad_()
        for n in (tokens, padded)
    )
    labels = torch.randint(0, rows, (tokens,), device=place.device)
    mask = torch.ones(tokens, device=place.device)
    shard = VocabShard(Axis.single("tp"), 0, rows, LossKernels.compiled() if compiled else None)

    def ours() -> Any:
        total = fused_cross_entropy(
            x, weight, labels, mask, shard=shard, sequence_parallel=False, queue=WeightGradQueue()
        )
        return torch.autograd.grad(total, (x, weight))

    def plain() -> Any:
        return F.cross_entropy((x @ weight.t()).float(), labels)

    forward = torch.compile(plain) if compiled else plain
    return Variant(ours if kind == "megalite" else lambda: torch.autograd.grad(forward(), (x, weight)))


def titan(case: Case, place: Place, *, compiled: bool) -> Variant:
    """torchtitan's Llama in the sizes of `llama3_layers`."""
    import torch

    from benchmarks.plain_gpt import adamw, batch, loss_of, plain_step

    llama: Any = importlib.import_module("torchtitan.models.llama3.model.model")
    model = case.settings["model"]
    sizes = {"dim": model.hidden_size, "n_layers": model.num_layers, "n_heads": model.num_attention_heads}
    sizes |= {"n_kv_heads": model.num_query_groups, "multiple_of": 1024, "rope_theta": model.rotary_base}
    sizes |= {"vocab_size": model.vocab_size, "max_seq_len": model.seq_length}
    with place.device:
        peer = llama.Transformer(llama.TransformerModelArgs(**sizes, ffn_dim_multiplier=1.3))
        peer.init_weights()
    tokens, labels = batch(model, case.settings["batch_size"], place.device)
    for block in peer.layers.values() if compiled else ():
        block.compile(fullgraph=True)
    how = {"clip": peer.parameters(), "bf16": True, "num_microbatches": case.settings["microbatches"]}
    loss = torch.compile(loss_of) if compiled else loss_of
    return Variant(plain_step(peer, adamw(peer.parameters()), tokens, labels, loss=loss, **how))


PEERS = {"transformers": "transformers"}  # torchtitan is tried: it is on no list of extras
VARIANTS = (*STEPS, *LLAMA_STEPS[3:], *LOSSES, "megalite-attention", "sdpa", *MASKS, *SPARSE, *LAYOUTS)
BENCHMARK = Benchmark("gpu", __doc__, FLAGS, cases, build, VARIANTS, PEERS)

if __name__ == "__main__":
    sys.exit(BENCHMARK.main())
