"""One device: a training step of one GPT by megalite, by a plain model of PyTorch's modules, and by transformers.

    python benchmarks/single.py                                       # CPU: small and medium, all precisions
    python benchmarks/single.py --models 1b --precisions bf16         # a GPU
    python benchmarks/single.py --quick --check                       # compared with baseline.json

All train the same tied GPT on the same tokens: forward, backward, clipping by the global norm, fused AdamW. In bf16
megalite keeps bf16 weights with fp32 main gradients and masters; the peers use autocast over fp32 weights, as their own
training scripts do. transformers runs eager only. `fp32-onednn` lets a CPU's products use bf16 with fp32 sums
(--float32-matmul-precision medium).
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # a clone works without being installed

from benchmarks.harness import MODELS, Benchmark, Flag, model_named
from benchmarks.turns import Case, Place, Variant
from megalite.config import ModelConfig

PRECISIONS = ("fp32", "fp32-onednn", "bf16")
VARIANTS = ("megalite", "plain", "transformers")
FLAGS = {
    "models": Flag("GPTs", ["small", "medium"], ["small"], MODELS),
    "precisions": Flag("of products and weights", ["fp32", "fp32-onednn", "bf16"], ["fp32", "bf16"], PRECISIONS),
    "tokens": Flag("in a batch, at least one sequence", 2048, 1024),
    "compile": Flag("eager, compiled", ["no", "yes"], ["no"], ("no", "yes")),
    "threads": Flag("CPU threads", 1, 1),
}


def cases(args: argparse.Namespace) -> list[Case]:
    found = []
    for name in args.models:
        model = replace(model_named(name), untie_embeddings_and_output_weights=False)
        batch_size = max(1, args.tokens // model.seq_length)
        for precision in args.precisions:
            for compiled in args.compile:
                settings = {
                    "model": model,
                    "batch_size": batch_size,
                    "bf16": precision == "bf16",
                    "compile": compiled == "yes",
                    "threads": args.threads,
                    "matmul": "medium" if precision == "fp32-onednn" else "highest",
                }
                title = f"{name}, {precision}{', compiled' if compiled == 'yes' else ''}"
                variants = VARIANTS if compiled == "no" else VARIANTS[:2]
                pairs = tuple(("megalite", peer) for peer in variants[1:])
                tokens = batch_size * model.seq_length
                found.append(Case(title, variants, pairs, settings, work=tokens, unit="tokens"))
    return found


def build(name: str, case: Case, place: Place) -> Variant:
    import torch

    from benchmarks.megalite_step import Layout, TrainingStep, Update
    from benchmarks.plain_gpt import PlainGPT, adamw, batch, loss_of, plain_step

    model, compiled, bf16 = (case.settings[key] for key in ("model", "compile", "bf16"))
    micro = case.settings.get("microbatches", 1)
    tokens, labels = batch(model, case.settings["batch_size"], place.device)
    if name == "megalite":
        update = Update(lr=3e-4, clip_grad=1.0, optimizer=case.settings.get("optimizer", "adam"))
        more = {name: case.settings[name] for name in ("fp8", "graphs") if name in case.settings}
        layout = Layout(bf16=bf16, compile=compiled, num_microbatches=micro, **more)
        return TrainingStep(model, layout, update, place, tokens, labels).variant()
    with place.device:  # on which a generator of numbers is as fast as the device
        peer = PlainGPT(model) if name == "plain" else transformers_gpt(model)
    run, loss = (torch.compile(peer), torch.compile(loss_of)) if compiled else (peer, loss_of)
    forward = run if name == "plain" else lambda ids: run(input_ids=ids).logits
    optimizer = adamw(peer.parameters(), lr=3e-4)
    how = {"clip": peer.parameters(), "loss": loss, "bf16": bf16, "num_microbatches": micro}
    return Variant(plain_step(forward, optimizer, tokens, labels, **how))


def transformers_gpt(model: ModelConfig) -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"n_embd": model.hidden_size, "n_layer": model.num_layers, "n_head": model.num_attention_heads}
    sizes |= {"vocab_size": model.vocab_size, "n_positions": model.seq_length, "bos_token_id": 0, "eos_token_id": 0}
    none = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "use_cache": False}
    settings: dict[str, Any] = {**sizes, **none, "attn_implementation": "sdpa"}
    return GPT2LMHeadModel(GPT2Config(**settings))


BENCHMARK = Benchmark("single", __doc__, FLAGS, cases, build, VARIANTS, {"transformers": "transformers"})

if __name__ == "__main__":
    sys.exit(BENCHMARK.main())
