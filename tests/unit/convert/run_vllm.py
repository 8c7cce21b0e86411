"""A program for test_vllm.py: vLLM loads an exported directory, continues prompts, tells how likely each token is."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

# vLLM's own settings: one process, little memory, nothing from the network
os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_CPU_KVCACHE_SPACE="1", HF_HUB_OFFLINE="1")

from vllm import LLM, SamplingParams


def main(folder: Path) -> None:
    prompts = json.loads((folder / "prompts.json").read_text())
    model = LLM(
        model=str(folder / "back"), skip_tokenizer_init=True, dtype="float32", enforce_eager=True, max_model_len=64
    )
    wanted = SamplingParams(
        max_tokens=8, temperature=0, prompt_logprobs=1, logprobs=1, detokenize=False, ignore_eos=True
    )
    rows = []
    for prompt, answer in zip(
        prompts, model.generate([{"prompt_token_ids": prompt} for prompt in prompts], wanted), strict=True
    ):
        new = answer.outputs[0]
        tokens = [*prompt, *new.token_ids]
        every = [*answer.prompt_logprobs, *new.logprobs]
        rows.append([tokens, [every[i][token].logprob for i, token in enumerate(tokens) if i]])
    (folder / "answers.json").write_text(json.dumps(rows))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
