"""A chat model as transformers 5 saves it: a template in a file of its own, several stop tokens, sampling defaults."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

END, STOP = "<|im_end|>", "<|endoftext|>"
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TALK = [{"role": "user", "content": "Who are you?"}, {"role": "assistant", "content": "A small model, é."}]
SAMPLING: dict[str, Any] = dict(do_sample=True, temperature=0.6, top_p=0.9, top_k=20, repetition_penalty=1.05)


def save_tokenizer(folder: Path, template: Any = TEMPLATE, **names: Any) -> Any:
    """Byte-level BPE, 301 ids, of which 297 and 298 end texts."""
    import transformers
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=297, initial_alphabet=alphabet, show_progress=False)
    words = "assistant user system a small model and so on who are you the quick brown fox jumps over lazy dogs"
    backend.train_from_iterator([words] * 9, trainer)
    assert backend.get_vocab_size() == 297
    backend.add_special_tokens([END, STOP, "<|im_start|>", "<|begin|>"])
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, **{"eos_token": END, "pad_token": STOP, "bos_token": "<|begin|>", **names}
    )
    fast.chat_template = template
    fast.save_pretrained(folder)
    return fast


def save_model(folder: Path, *, sampling: dict[str, Any] | None = None, dtype: str = "float32", **changes: Any) -> Any:
    """Llama of four layers with wide weights, whose greatest logit is no tie."""
    import transformers

    torch.manual_seed(3)
    shape = dict(
        vocab_size=304, hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128, tie_word_embeddings=False,
    )  # fmt: skip
    ids = dict(bos_token_id=None, eos_token_id=297, pad_token_id=298)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**shape | ids | changes))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    settings = dict(eos_token_id=[298, 297], pad_token_id=298) | (SAMPLING if sampling is None else sampling)
    model.generation_config = transformers.GenerationConfig(**settings)
    model.to(getattr(torch, dtype)).save_pretrained(folder)
    return model
