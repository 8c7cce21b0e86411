"""Tokenizers made to harm: each is refused in one line, in little time and memory, or does no harm."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from megalite.data import make_tokenizer
from megalite.data.subword import GPT2BPETokenizer, HuggingFaceTokenizer
from megalite.data.tokenizer import CharTokenizer
from megalite.errors import DataError

tokenizers = pytest.importorskip("tokenizers")
TEXTS = ["hello é world aaaa", "a" * 28 + "b", "ab" * 20 + "!"]


def split(pattern: str) -> Any:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


def replace(pattern: str, content: str, kind: str = "String") -> Any:
    return {"type": "Replace", "pattern": {kind: pattern}, "content": content}


def token(index: int) -> Any:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": index, "content": "zz", "special": True, **flags}


def base() -> dict[str, Any]:
    """Every byte is a token."""
    alphabet = {char: i for i, char in enumerate(sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()))}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(alphabet, []))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    return json.loads(backend.to_str())  # type: ignore[no-any-return]


def doubling(part: str, name: str) -> dict[str, Any]:
    return {part: {"type": "Sequence", name: [replace("a", "aa")] * 30}}


def model(kind: str, **fields: Any) -> dict[str, Any]:
    return {"model": {"type": kind, **fields}, "pre_tokenizer": None, "decoder": None}


FAILS = "fails on plain text"
NONE = "not a tokenizer.json"
#: Changes of a definition, and what is said; None: no harm.
BOMBS: dict[str, tuple[dict[str, Any], str | None]] = {
    "an id of a billion": ({"vocab": {"zz": 10**9}}, "has the id 1,000,000,000; 16,777,216 ids are the most"),
    "the largest id of all": ({"vocab": {"zz": 2**32 - 1}}, "has the id 4,294,967,295"),
    "an id that is no id": ({"vocab": {"zz": 2**40}}, NONE),
    "a negative id": ({"vocab": {"zz": -1}}, NONE),
    "an id twice": ({"vocab": {"zz": 5}}, None),
    "an added token of a billion": ({"added_tokens": [token(10**9)]}, None),  # the package numbers it anew
    "a merge of what is not there": ({"merges": [["qqq", "www"]]}, NONE),
    "a merge into what is not there": ({"merges": [["z", "z"]]}, NONE),
    "tries every cut": ({"pre_tokenizer": split("(a+)+$")}, FAILS),
    "tries every cut of spaces": ({"pre_tokenizer": split(r"(\s*)*$x|(\s+)+[^\s]\b")}, FAILS),
    "tries every cut to normalize": ({"normalizer": replace("(a+)+$", "b", "Regex")}, FAILS),
    "is no pattern": ({"pre_tokenizer": split("((((")}, NONE),
    "a pattern of many levels": ({"pre_tokenizer": split("(" * 100_000 + "a" + ")" * 100_000)}, NONE),
    "a pattern of large counts": ({"pre_tokenizer": split("(((a{1,1000}){1,1000}){1,1000})")}, None),
    "an empty pattern": ({"pre_tokenizer": split("")}, None),
    "doubles thirty times": (doubling("normalizer", "normalizers"), "its normalizer makes more than 1,000"),
    "doubles what it decodes": (doubling("decoder", "decoders"), "its decoder makes more than 1,000"),
    "grows in turns": (
        {"normalizer": {"type": "Sequence", "normalizers": [replace("a", "bb"), replace("b", "aa")] * 9}},
        "its normalizer makes more than 1,000",
    ),
    "writes much before": ({"normalizer": {"type": "Prepend", "prepend": "x" * 10**6}}, "makes more than 1,000"),
    "fills every gap": ({"normalizer": replace("(?:)", "x" * 1000, "Regex")}, FAILS),
    "a table that is none": ({"normalizer": {"type": "Precompiled", "precompiled_charsmap": "////fwAA"}}, NONE),
    "a table that ends early": ({"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAAAA=="}}, FAILS),
    "pieces of no length": ({"pre_tokenizer": {"type": "FixedLength", "length": 0}}, FAILS),
    "strips more than there is": (
        {"decoder": {"type": "Strip", "content": "a", "start": 2**62, "stop": 2**62}}, FAILS,
    ),
    "pads to a trillion": (
        {"padding": {"strategy": {"Fixed": 10**12}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0,
                     "pad_type_id": 0, "pad_token": "x"}}, None,
    ),
    "no id for what is unknown": (
        model("Unigram", unk_id=None, vocab=[["a", -1.0]]), "fails on a text (Encountered an unknown token",
    ),
    "an unknown token that is not there": (
        model("WordLevel", unk_token="[UNK]", vocab={"a": 0}), "fails on a text (WordLevel error",
    ),
    "a prefix longer than its tokens": (
        model("BPE", continuing_subword_prefix="ééé", vocab={"a": 0, "b": 1, "éééb": 2}, merges=["a b"]), NONE,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BOMBS)
def test_a_definition_made_to_harm(name: str) -> None:
    changes, says = BOMBS[name]
    definition = base()
    definition["model"]["vocab"] |= changes.pop("vocab", {}) if isinstance(definition["model"]["vocab"], dict) else {}
    definition["model"]["merges"] += changes.pop("merges", [])
    begin = time.process_time()
    try:
        tokenizer = HuggingFaceTokenizer(json.dumps(definition | changes).encode(), origin="it")
        tokenizer.encode_batch(TEXTS)
        tokenizer.token_bytes()
        tokenizer.decode(tokenizer.encode(TEXTS[0]))
        said = None
    except DataError as error:
        said = str(error)
        assert said.startswith("--tokenizer-model=it: ") and "\n" not in said
    assert (said is None) == (says is None) and (says or "") in (said or ""), said
    assert time.process_time() - begin < 20


@pytest.mark.parametrize(
    "content",
    [b"", b"null", b"[]", b"[" * 10**5, b'{"a":' * 10**5, b"\xff\xfe", b'{"version": "\\ud800"}', b"0" * 10**6],
)
def test_what_is_no_definition(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(DataError, match=NONE):
        make_tokenizer("HuggingFaceTokenizer", tokenizer_model=str(tmp_path))
    with pytest.raises(DataError, match="not a character vocabulary"):
        CharTokenizer.from_json(content, "it")
    with pytest.raises(DataError, match="not a JSON object of token to id|does not fit the vocabulary"):
        GPT2BPETokenizer(content, b"a b")


@pytest.mark.parametrize("config", [b"[" * 10**5, b'{"eos_token": "\\ud800"}', b"[]", b"\xff"])
def test_what_is_no_configuration_beside_it(config: bytes) -> None:
    with pytest.raises(DataError, match="tokenizer_config.json beside it"):
        HuggingFaceTokenizer(json.dumps(base()).encode(), config, origin="it")


def test_a_file_without_end_and_one_that_is_too_large(tmp_path: Path) -> None:
    """Neither is read whole."""
    with pytest.raises(DataError, match="--tokenizer-model=/dev/zero: is not a file"):
        make_tokenizer("HuggingFaceTokenizer", tokenizer_model="/dev/zero")
    with (tmp_path / "tokenizer.json").open("wb") as file:
        file.truncate(2 << 30)
    with pytest.raises(DataError, match="larger than 128 MiB"):
        make_tokenizer("HuggingFaceTokenizer", tokenizer_model=str(tmp_path))


@pytest.mark.parametrize(
    ("vocab", "says"),
    [
        ({"a": 10**9}, "has the id 1,000,000,000"),
        ({"a": -1}, "does not fit the vocabulary"),
        ({"a": 1e400}, "not a JSON object of token to id"),
        ({"a": "x"}, "not a JSON object of token to id"),
        ({"\ud800": 0}, "does not fit the vocabulary"),
    ],
)
def test_a_vocabulary_made_to_harm(vocab: Any, says: str) -> None:
    with pytest.raises(DataError, match=says):
        GPT2BPETokenizer(json.dumps(vocab).encode(), b"")


def test_half_a_character_in_a_vocabulary_of_characters() -> None:
    with pytest.raises(DataError, match="not a character vocabulary"):
        CharTokenizer.from_json(b'{"characters": "a\\ud800"}', "it")
