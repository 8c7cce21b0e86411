"""megalite's variants for a peer benchmark that lives outside of this repository and calls each as `FUNC(ctx)`.

ctx holds the sizes `cfg` (L layers, h hidden, heads, s tokens, V symbols), the batch `x`, `y`, and where it runs; what
comes back is `step()`, the same work as that of the others: forward, backward, clipping where the bench clips, fused
AdamW on all parameters. torch.distributed is initialised when a function is called.

    b_single.py --extra megalite=benchmarks.shared_lab:single --extra compiled=benchmarks.shared_lab:single_compiled
    b_tp.py     --extra megalite=benchmarks.shared_lab:tp --extra megalite-sp=benchmarks.shared_lab:tp_sequence
    b_dp.py     --extra zero0=benchmarks.shared_lab:dp --extra zero1=benchmarks.shared_lab:zero1
    b_pipe.py   --extra megalite-2bw=benchmarks.shared_lab:two_buffered_weights
    b_index.py  --extra megalite=benchmarks.shared_lab:index
    b_token.py  --extra megalite=benchmarks.shared_lab:tokenise

with the repository's root on PYTHONPATH.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from benchmarks.megalite_step import Layout, TrainingStep, Update
from benchmarks.turns import Place
from megalite.config import ModelConfig
from megalite.data import HuggingFaceTokenizer, build_sample_index, preprocess

Step = Callable[[], object]


def model_config(cfg: dict[str, int], *, tied: bool, activation: str) -> ModelConfig:
    """The bench's sizes in our terms."""
    return ModelConfig(
        num_layers=cfg["L"],
        hidden_size=cfg["h"],
        num_attention_heads=cfg["heads"],
        seq_length=cfg["s"],
        vocab_size=cfg["V"],
        activation=activation,
        untie_embeddings_and_output_weights=not tied,
    )


def single(ctx: dict[str, Any], *, compile: bool = False) -> Step:
    """One process, tied and with exact GELU, as nanoGPT; `prec` may differ from variant to variant."""
    model = model_config(ctx["cfg"], tied=True, activation="gelu")
    update = Update(ctx["lr"], weight_decay=0.1, clip_grad=ctx["clip"])
    layout = Layout(bf16=ctx["prec"] == "bf16", compile=compile)
    training = TrainingStep(model, layout, update, Place(), ctx["x"], ctx["y"])

    def step() -> torch.Tensor:
        torch.set_float32_matmul_precision("medium" if ctx["prec"] == "fp32dnn" else "highest")
        return training.step()[0]

    return step


def parallel(ctx: dict[str, Any], layout: Layout, *, ranks: int | None = None, weight_decay: float = 0.0) -> Step:
    """A layout over all ranks, untied and with tanh GELU, without clipping."""
    model = model_config(ctx["cfg"], tied=False, activation="gelu-tanh")
    place = Place(ctx["rank"], ctx["world"]) if ranks is None else Place()
    update = Update(ctx["lr"], weight_decay=weight_decay)
    training = TrainingStep(model, layout, update, place, ctx["x"], ctx["y"])

    def step() -> object:
        return training.step()

    step.batches_per_call = training.batches  # type: ignore[attr-defined]  # how the bench learns it
    return step


def tensor(ctx: dict[str, Any], *, sequence: bool) -> Step:
    layout = Layout(tp=ctx["world"], sequence_parallel=sequence, bf16=ctx["prec"] == "bf16")
    return parallel(ctx, layout, weight_decay=0.01)


def tp_one(ctx: dict[str, Any]) -> Step:
    """The same model on one process: what tensor parallelism is to be compared with."""
    return parallel(ctx, Layout(bf16=ctx["prec"] == "bf16"), ranks=1, weight_decay=0.01)


def data(ctx: dict[str, Any], *, stage: int) -> Step:
    return parallel(ctx, Layout(zero_stage=stage))


def pipeline(ctx: dict[str, Any], *, schedule: str) -> Step:
    layout = Layout(
        pp=ctx["world"],
        schedule=schedule,
        num_microbatches=ctx["m"],
        batches=ctx.get("batches", 1),
        bf16=ctx["prec"] == "bf16",
    )
    return parallel(ctx, layout, weight_decay=0.01)


def index(ctx: dict[str, Any]) -> Any:
    """Sample index `[n + 1, 2]` of shuffled documents."""
    return build_sample_index(ctx["sizes"], ctx["doc_idx"], ctx["seq"], total=ctx["total"])


def tokenise(ctx: dict[str, Any]) -> None:
    """The whole job of tools/preprocess_data.py: read JSONL, tokenise, write `.bin/.idx`."""
    tokenizer = HuggingFaceTokenizer.from_path(ctx["tokenizer_json"])
    preprocess([ctx["jsonl"]], ctx["out"], tokenizer, append_eod=True, workers=ctx["workers"])


single_compiled = partial(single, compile=True)
tp, tp_sequence = partial(tensor, sequence=False), partial(tensor, sequence=True)
dp, zero1 = partial(data, stage=0), partial(data, stage=1)
zero2, zero3 = partial(data, stage=2), partial(data, stage=3)
two_buffered_weights = partial(pipeline, schedule="2bw")
one_f_one_b = partial(pipeline, schedule="1f1b")
gpipe = partial(pipeline, schedule="gpipe")
interleaved = partial(pipeline, schedule="interleaved")
zb_h1 = partial(pipeline, schedule="zb-h1")
zb_v = partial(pipeline, schedule="zb-v")
