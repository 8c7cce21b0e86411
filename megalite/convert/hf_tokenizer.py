"""A tokenizer in a Hugging Face folder, in and out, and what the folder says of special tokens and of sampling.

transformers 5 writes a `tokenizer_class` that 4.57 does not know; `PreTrainedTokenizerFast` loads in both.
"""

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megalite.convert.origin import SAMPLING, Origin
from megalite.data import ByteTokenizer, NullTokenizer, Tokenizer, as_hugging_face, byte_level_alphabet, make_tokenizer
from megalite.errors import DataError
from megalite.strangers import PROGRAMS

logger = logging.getLogger(__name__)

TOKENIZER, TOKENIZER_CONFIG, SPECIAL_MAP = "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"
FILES = {
    "HuggingFaceTokenizer": (TOKENIZER,),
    "GPT2BPETokenizer": ("vocab.json", "merges.txt"),
    "SentencePieceTokenizer": ("tokenizer.model",),
}
ANY_CLASS = "PreTrainedTokenizerFast"
BYTES_END = "<|endoftext|>"
#: Classes of transformers 5 alone.
NEW_CLASSES = ("TokenizersBackend", "PythonBackend", "SentencePieceBackend", "MistralCommonBackend")
KNOWN_CLASSES = {"GPT2BPETokenizer": "GPT2Tokenizer", "SentencePieceTokenizer": "LlamaTokenizer"}


def read_tokenizer(directory: Path, vocab_size: int) -> Tokenizer:
    """The first of `FILES` that is there, else plain numbers. Raises DataError where a file is not what it is named, or
    has more tokens than the model."""
    kind = next((kind for kind, files in FILES.items() if all((directory / name).is_file() for name in files)), None)
    if kind is None:
        logger.warning("%s: holds no tokenizer; the checkpoint takes token numbers for text", directory)
        fix = "it holds no tokenizer: copy the model's tokenizer.json there"
        return NullTokenizer(max(2, vocab_size), asked=f"`load`={directory}", fix=fix)
    tokenizer = make_tokenizer(kind, tokenizer_model=str(directory), flag=f"`load`={directory}")
    if tokenizer.vocab_size > vocab_size:
        raise DataError(f"{directory}: the tokenizer has {tokenizer.vocab_size} tokens, the model {vocab_size}")
    return tokenizer


def write_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Writes what transformers loads; a kind that it cannot load is left out with a warning. Raises OSError."""
    for name, content in huggingface_files(tokenizer).items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(content)


def huggingface_files(tokenizer: Tokenizer) -> dict[str, bytes]:
    """Name -> content of what `write_tokenizer` writes."""
    files = as_hugging_face(tokenizer.beside) | dict(tokenizer.files())
    if isinstance(tokenizer, ByteTokenizer):
        files = {TOKENIZER: json.dumps(_bytes_definition(), ensure_ascii=False).encode()}
    elif tokenizer.kind not in ("HuggingFaceTokenizer", *KNOWN_CLASSES):
        logger.warning("%s has no form that transformers loads: no tokenizer is written", tokenizer.kind)
        return {}
    config = _config_of(tokenizer, TOKENIZER_CONFIG)
    if config.pop(PROGRAMS, None) is not None or config.get("tokenizer_class") in NEW_CLASSES:
        config.pop("tokenizer_class", None)
    for key in ("backend", "is_local", "name_or_path"):
        config.pop(key, None)
    if tokenizer.kind == "ByteTokenizer":
        config = {"eos_token": BYTES_END}
    config.setdefault("tokenizer_class", KNOWN_CLASSES.get(tokenizer.kind, ANY_CLASS))
    return files | {TOKENIZER_CONFIG: (json.dumps(config, indent=2, ensure_ascii=False) + "\n").encode()}


def _config_of(tokenizer: Tokenizer, name: str) -> dict[str, Any]:
    """tokenizer_config.json or another object, empty where there is none. Raises DataError."""
    content = {**tokenizer.beside, **tokenizer.files()}.get(name, b"{}")
    try:
        found = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{name} of the tokenizer is not JSON ({str(error)[:80]}); repair it") from None
    if not isinstance(found, dict):
        raise DataError(f"{name} of the tokenizer is not a JSON object; repair it")
    return found


def special_tokens(origin: Origin, tokenizer: Tokenizer) -> dict[str, Any]:
    """`bos_token_id` and others for config.json: as the model came with them; else the tokenizer's."""
    if origin.model_type is not None and origin.has_tokens_of(tokenizer):
        return dict(origin.special_tokens)
    eod, config = tokenizer.eod_id, _config_of(tokenizer, SPECIAL_MAP) | _config_of(tokenizer, TOKENIZER_CONFIG)
    found = {"bos_token_id": eod, "eos_token_id": eod}
    if tokenizer.kind != "HuggingFaceTokenizer":
        return found
    # What other classes do not say is what their code says; these have none of their own.
    if "bos_token" in config or config.get("tokenizer_class") in (*NEW_CLASSES, ANY_CLASS):
        found["bos_token_id"] = _id_of(tokenizer, config.get("bos_token"))
    pad = _id_of(tokenizer, config.get("pad_token"))
    return found if pad is None else found | {"pad_token_id": pad}


def stop_tokens(origin: Origin, tokenizer: Tokenizer) -> tuple[int, ...]:
    """The end-of-document token, and what else ends a text of the model that it comes from."""
    found = {tokenizer.eod_id}
    if origin.has_tokens_of(tokenizer):
        named = (origin.generation or {}).get("eos_token_id") or origin.special_tokens.get("eos_token_id")
        found |= {each for each in (named if isinstance(named, list) else [named]) if type(each) is int}
    return tuple(sorted(each for each in found if each is not None))


def _id_of(tokenizer: Tokenizer, token: Any) -> int | None:
    content = token.get("content") if isinstance(token, Mapping) else token
    if not isinstance(content, str) or content.encode(errors="replace").decode() != content:  # half a character
        return None
    index: int | None = tokenizer.backend.token_to_id(content)  # type: ignore[attr-defined]  # HuggingFaceTokenizer
    return index


def generation_config(origin: Origin, tokenizer: Tokenizer) -> dict[str, Any]:
    """generation_config.json: as the model came with it; without its tokens where a run has chosen others."""
    if origin.generation is None:
        return {"_from_model_config": True, **special_tokens(origin, tokenizer)}
    if origin.has_tokens_of(tokenizer):
        return dict(origin.generation)
    kept = {name: value for name, value in origin.generation.items() if name in SAMPLING}
    return {**special_tokens(origin, tokenizer), **kept}


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
