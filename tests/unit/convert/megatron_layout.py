"""Megatron-LM's files, written by their published layout from a model of transformers, with no line of the product.

Rules: megatron/checkpointing.py (names of files and keys), tools/checkpoint/ (what is cut where), and the functions
that turn files of version 0 and 1 into those of version 2 (whose inverse is `mingled`).
"""

from __future__ import annotations

import argparse
import enum
import os
import random
import sys
import threading
import types
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from megalite.convert import megatron_unpickle

Weights = dict[str, Tensor]


@dataclass(frozen=True)
class Way:
    """How the files are laid out. names: `core`, `core-te`, `legacy`, or `2019`, the oldest ones."""

    tp: int = 1
    pp: int = 1
    vp: int = 1
    names: str = "core"
    version: float = 3.0
    divisible_by: int = 8


def mingled(q: list[Tensor], k: list[Tensor], v: list[Tensor], version: float) -> Tensor:
    """One rank's rows: q a list of heads, k and v lists of groups, each `[d, ...]`."""
    if version == 0:
        return torch.cat([*q, *k, *v])
    if version == 1:
        return torch.cat([torch.stack([q[h][i], k[h][i], v[h][i]]) for h in range(len(q)) for i in range(len(q[h]))])
    heads = len(q) // len(k)
    return torch.cat([t for g in range(len(k)) for t in (*q[g * heads : (g + 1) * heads], k[g], v[g])])


def rank_qkv(q: Tensor, k: Tensor, v: Tensor, heads: int, groups: int, way: Way, rank: int) -> Tensor:
    def mine(t: Tensor, count: int) -> list[Tensor]:
        each = count // way.tp
        return list(t.chunk(count))[rank * each : (rank + 1) * each]

    return mingled(mine(q, heads), mine(k, groups), mine(v, groups), way.version)


def rank_rows(t: Tensor, way: Way, rank: int) -> Tensor:
    return t[rank * len(t) // way.tp : (rank + 1) * len(t) // way.tp]


def rank_columns(t: Tensor, way: Way, rank: int) -> Tensor:
    return t[:, rank * t.shape[1] // way.tp : (rank + 1) * t.shape[1] // way.tp]


def vocabulary(t: Tensor, way: Way, rank: int) -> Tensor:
    multiple = way.divisible_by * way.tp
    padding = -len(t) % multiple
    return rank_rows(torch.cat([t, t[-1:].expand(padding, -1)]), way, rank)


def gpt2_layer(sd: Weights, i: int, config: Any, way: Way, rank: int) -> Weights:
    own = {name.removeprefix(f"transformer.h.{i}."): t for name, t in sd.items() if f".h.{i}." in name}
    h, a = config.n_embd, config.n_head
    found = {}
    for kind in ("weight", "bias"):
        qkv = own[f"attn.c_attn.{kind}"].t() if kind == "weight" else own[f"attn.c_attn.{kind}"]
        found[f"qkv.{kind}"] = rank_qkv(qkv[:h], qkv[h : 2 * h], qkv[2 * h :], a, a, way, rank)
        up = own[f"mlp.c_fc.{kind}"]
        found[f"fc1.{kind}"] = rank_rows(up.t() if kind == "weight" else up, way, rank)
        found[f"norm1.{kind}"], found[f"norm2.{kind}"] = own[f"ln_1.{kind}"], own[f"ln_2.{kind}"]
    found["proj.weight"] = rank_columns(own["attn.c_proj.weight"].t(), way, rank)
    found["fc2.weight"] = rank_columns(own["mlp.c_proj.weight"].t(), way, rank)
    return found | {"proj.bias": own["attn.c_proj.bias"], "fc2.bias": own["mlp.c_proj.bias"]}


def llama_layer(sd: Weights, i: int, config: Any, way: Way, rank: int) -> Weights:
    own = {name.removeprefix(f"model.layers.{i}."): t for name, t in sd.items() if f".layers.{i}." in name}
    q, k, v = (own[f"self_attn.{each}_proj.weight"] for each in "qkv")
    gate, up = own["mlp.gate_proj.weight"], own["mlp.up_proj.weight"]
    return {
        "norm1.weight": own["input_layernorm.weight"],
        "norm2.weight": own["post_attention_layernorm.weight"],
        "qkv.weight": rank_qkv(q, k, v, config.num_attention_heads, config.num_key_value_heads, way, rank),
        "proj.weight": rank_columns(own["self_attn.o_proj.weight"], way, rank),
        "fc1.weight": torch.cat([rank_rows(gate, way, rank), rank_rows(up, way, rank)]),
        "fc2.weight": rank_columns(own["mlp.down_proj.weight"], way, rank),
    }


LAYER_NAMES = {
    "core": {
        "norm1.": "input_layernorm.", "norm2.": "pre_mlp_layernorm.", "qkv.": "self_attention.linear_qkv.",
        "proj.": "self_attention.linear_proj.", "fc1.": "mlp.linear_fc1.", "fc2.": "mlp.linear_fc2.",
    },
    "legacy": {
        "norm1.": "input_norm.", "norm2.": "post_attention_norm.", "qkv.": "self_attention.query_key_value.",
        "proj.": "self_attention.dense.", "fc1.": "mlp.dense_h_to_4h.", "fc2.": "mlp.dense_4h_to_h.",
    },
}  # fmt: skip
LAYER_NAMES["core-te"] = LAYER_NAMES["core"] | {
    "norm1.": "self_attention.linear_qkv.layer_norm_",
    "norm2.": "mlp.linear_fc1.layer_norm_",
}
LAYER_NAMES["2019"] = LAYER_NAMES["legacy"] | {
    "norm1.": "input_layernorm.", "norm2.": "post_attention_layernorm.", "qkv.": "attention.query_key_value.",
    "proj.": "attention.dense.",
}  # fmt: skip


def stage_model(model: Any, way: Way, rank: int, stage: int, virtual: int) -> dict[str, Any]:
    """The entry `model` (or `model0`, ...) of one file."""
    sd, config = model.state_dict(), model.config
    gpt = config.model_type == "gpt2"
    per_chunk = config.num_hidden_layers // way.pp // way.vp
    start = (virtual * way.pp + stage) * per_chunk
    layers = {}
    for local in range(per_chunk):
        found = (gpt2_layer if gpt else llama_layer)(sd, start + local, config, way, rank)
        for short, t in found.items():
            key = next(key for key in LAYER_NAMES[way.names] if short.startswith(key))
            layers[f"layers.{local}.{LAYER_NAMES[way.names][key]}{short.removeprefix(key)}"] = t
    first = stage == 0 and virtual == 0
    last = stage == way.pp - 1 and virtual == way.vp - 1
    words = vocabulary(sd["transformer.wte.weight" if gpt else "model.embed_tokens.weight"], way, rank)
    positions = sd.get("transformer.wpe.weight")
    final = {n.rsplit(".", 1)[1]: t for n, t in sd.items() if n.startswith(("transformer.ln_f.", "model.norm."))}
    tied = config.tie_word_embeddings
    output = None if tied else vocabulary(sd["lm_head.weight"], way, rank)
    if way.names.startswith("core"):
        flat = {f"decoder.{name}": t for name, t in layers.items()}
        if first:
            flat["embedding.word_embeddings.weight"] = words
            if positions is not None:
                flat["embedding.position_embeddings.weight"] = positions
        if last:
            flat |= {f"decoder.final_layernorm.{kind}": t for kind, t in final.items()}
            if output is not None or not first:
                flat["output_layer.weight"] = words if output is None else output
            flat["output_layer._extra_state"] = None
        return flat
    oldest = way.names == "2019"
    language: dict[str, Any] = {"transformer" if oldest else "encoder": layers}
    if first:
        language["embedding"] = {"word_embeddings": {"weight": words}}
        if positions is not None:
            language["embedding"]["position_embeddings"] = {"weight": positions}
    whole: dict[str, Any] = {"language_model": language}
    if last:
        layers |= {f"{'final_layernorm' if oldest else 'final_norm'}.{kind}": t for kind, t in final.items()}
        if output is not None:
            language["output_layer"] = {"weight": output}
        elif not first:
            whole["word_embeddings_for_head"] = {"weight": words}
    return whole


def arguments(config: Any, way: Way, **changes: Any) -> argparse.Namespace:
    """What Megatron-LM's own parser would have left of such a run, and some that nobody here needs."""
    gpt = config.model_type == "gpt2"
    common = dict(
        num_layers=config.num_hidden_layers, hidden_size=config.hidden_size, seq_length=16,
        num_attention_heads=config.num_attention_heads, kv_channels=config.hidden_size // config.num_attention_heads,
        max_position_embeddings=config.max_position_embeddings, make_vocab_size_divisible_by=way.divisible_by,
        padded_vocab_size=-(-config.vocab_size // (way.divisible_by * way.tp)) * way.divisible_by * way.tp,
        tensor_model_parallel_size=way.tp, pipeline_model_parallel_size=way.pp,
        virtual_pipeline_model_parallel_size=way.vp if way.vp > 1 else None, params_dtype=torch.bfloat16,
        lr=1e-4, tokenizer_type="GPT2BPETokenizer", vocab_size=None, num_experts=None, onnx_safe=None,
        untie_embeddings_and_output_weights=not config.tie_word_embeddings, data_path=["0.5", "a", "0.5", "b"],
    )  # fmt: skip
    if gpt:
        common |= dict(
            ffn_hidden_size=4 * config.n_embd, layernorm_epsilon=config.layer_norm_epsilon, openai_gelu=False,
            bias_gelu_fusion=True, group_query_attention=False, num_query_groups=1, add_bias_linear=True,
            position_embedding_type="learned_absolute", normalization="LayerNorm", swiglu=False,
        )  # fmt: skip
    else:
        common |= dict(
            ffn_hidden_size=config.intermediate_size, norm_epsilon=config.rms_norm_eps, swiglu=True,
            group_query_attention=True, num_query_groups=config.num_key_value_heads, add_bias_linear=False,
            bias_gelu_fusion=False, position_embedding_type="rope", use_rotary_position_embeddings=True,
            add_position_embedding=False, rotary_percent=1.0, rotary_base=10000, normalization="RMSNorm",
            rotary_seq_len_interpolation_factor=None, window_size=None,
        )  # fmt: skip
    if way.names == "2019":
        for name in ("normalization", "swiglu", "position_embedding_type", "add_bias_linear", "ffn_hidden_size"):
            del common[name]
        del common["untie_embeddings_and_output_weights"], common["num_query_groups"], common["group_query_attention"]
    return argparse.Namespace(**(common | changes))


class HereInstead:
    """Takes the place of the process that opens pickles: the same program in a thread, which spares torch's import."""

    def __init__(self, *_: Any, **__: Any) -> None:
        (requests, self_in), (self_out, answers) = os.pipe(), os.pipe()
        self.stdin, self.stdout = os.fdopen(self_in, "wb"), os.fdopen(self_out, "rb")
        self.ends = os.fdopen(requests, "rb"), os.fdopen(answers, "wb")
        self.thread = threading.Thread(target=self.run, daemon=True)
        self.thread.start()

    def run(self) -> None:
        with self.ends[0], self.ends[1]:
            megatron_unpickle.serve(*self.ends)

    def wait(self, timeout: float | None = None) -> int:
        self.thread.join(timeout)
        return 0


def megatron_enum(patch: pytest.MonkeyPatch) -> Any:
    """An enum of a module that the reader has not: pickled by the name megatron.core.enums.ModelType."""
    member = enum.Enum("ModelType", ["encoder_or_decoder"], module="megatron.core.enums")
    modules = {name: types.ModuleType(name) for name in ("megatron", "megatron.core", "megatron.core.enums")}
    modules["megatron.core.enums"].ModelType = member  # type: ignore[attr-defined]
    for name, module in modules.items():
        patch.setitem(sys.modules, name, module)
    return member.encoder_or_decoder  # type: ignore[attr-defined]


def write_megatron_files(root: Path, model: Any, way: Way, *, zipped: bool = True, **changes: Any) -> Path:
    """A whole checkpoint directory, with what else such files hold: optimizer, random states, enums."""
    for rank in range(way.tp):
        for stage in range(way.pp):
            args = arguments(model.config, way, **changes)
            content: dict[str, Any] = {"args": args, "iteration": 100}
            if way.version:
                content["checkpoint_version"] = way.version
            models = [stage_model(model, way, rank, stage, virtual) for virtual in range(way.vp)]
            content |= {"model": models[0]} if way.vp == 1 else {f"model{i}": m for i, m in enumerate(models)}
            content["optimizer"] = {
                "optimizer": {"state": {0: {"exp_avg": torch.randn(5)}}, "param_groups": [{"lr": 1}]}
            }
            content["rng_state"] = [
                {"random_rng_state": random.getstate(), "np_rng_state": np.random.get_state(), "torch": torch.ones(4)}
            ]
            name = f"mp_rank_{rank:02d}" + (f"_{stage:03d}" if way.pp > 1 else "")
            folder = root / "iter_0000100" / name
            folder.mkdir(parents=True)
            with pytest.MonkeyPatch.context() as patch:
                args.model_type = megatron_enum(patch)
                torch.save(content, folder / "model_optim_rng.pt", _use_new_zipfile_serialization=zipped)
    (root / "latest_checkpointed_iteration.txt").write_text("100")
    return root
