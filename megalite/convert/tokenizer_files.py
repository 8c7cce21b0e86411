"""The tokenizer beside the weights, in the files of either side.

transformers 5 writes a `tokenizer_class` that 4.57 does not know; `PreTrainedTokenizerFast` loads in both.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path

from megalite.data import ByteTokenizer, NullTokenizer, Tokenizer, byte_level_alphabet, make_tokenizer
from megalite.errors import DataError

logger = logging.getLogger(__name__)

DEFINITION, CONFIG = "tokenizer.json", "tokenizer_config.json"
BYTES_END = "<|endoftext|>"


def read_tokenizer(directory: Path, vocab_size: int) -> Tokenizer:
    """tokenizer.json, else GPT-2's two files, else a sentencepiece model, else plain numbers.

    Raises DataError where a file is not what it is named, or has more tokens than the model.
    """
    if (directory / DEFINITION).is_file():
        tokenizer = make_tokenizer("HuggingFaceTokenizer", tokenizer_model=str(directory))
    elif (directory / "vocab.json").is_file() and (directory / "merges.txt").is_file():
        tokenizer = make_tokenizer("GPT2BPETokenizer", tokenizer_model=str(directory))
    elif (directory / "tokenizer.model").is_file():
        tokenizer = make_tokenizer("SentencePieceTokenizer", tokenizer_model=str(directory), flag=f"--load={directory}")
    else:
        logger.warning("%s: holds no tokenizer; the checkpoint takes token numbers for text", directory)
        return NullTokenizer(max(2, vocab_size))
    if tokenizer.vocab_size > vocab_size:
        raise DataError(f"{directory}: the tokenizer has {tokenizer.vocab_size} tokens, the model {vocab_size}")
    return tokenizer


def huggingface_files(tokenizer: Tokenizer) -> dict[str, bytes]:
    """Name -> content of what transformers loads; a kind that it cannot load is left out with a warning."""
    files = dict(tokenizer.files())
    if isinstance(tokenizer, ByteTokenizer):
        files = {DEFINITION: json.dumps(_bytes_definition(), ensure_ascii=False).encode()}
    elif tokenizer.kind not in ("HuggingFaceTokenizer", "GPT2BPETokenizer", "SentencePieceTokenizer"):
        logger.warning("%s has no form that transformers loads: no tokenizer is written", tokenizer.kind)
        return {}
    config = json.loads(files.get(CONFIG, b"{}"))
    for key in ("auto_map", "backend", "is_local"):
        config.pop(key, None)
    if tokenizer.kind == "ByteTokenizer":
        config = {"eos_token": BYTES_END}
    known = {"GPT2BPETokenizer": "GPT2Tokenizer", "SentencePieceTokenizer": "LlamaTokenizer"}
    config["tokenizer_class"] = known.get(tokenizer.kind, "PreTrainedTokenizerFast")
    return files | {CONFIG: (json.dumps(config, indent=2, ensure_ascii=False) + "\n").encode()}


def _bytes_definition() -> dict[str, object]:
    """ByteTokenizer as a tokenizer.json: byte-level BPE without merges, whose ids are the bytes."""
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    end = {"id": ByteTokenizer.eod_id, "content": BYTES_END, "special": True}
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return {
        "version": "1.0",
        "added_tokens": [end | plain],
        "pre_tokenizer": byte_level,
        "decoder": byte_level,
        "model": {"type": "BPE", "vocab": byte_level_alphabet() | {BYTES_END: ByteTokenizer.eod_id}, "merges": []},
    }
