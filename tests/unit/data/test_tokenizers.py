"""Ids, text and bytes of every tokenizer; fast paths against the libraries themselves."""

from __future__ import annotations

import io
import json
import random
from pathlib import Path

import numpy as np
import pytest
from data_inputs import config, shared_file

from megalite.data.subword import GPT2BPETokenizer, HuggingFaceTokenizer, SentencePieceTokenizer
from megalite.data.tokenizer import (
    ByteTokenizer,
    CharTokenizer,
    NullTokenizer,
    Tokenizer,
    token_dtype,
    tokenizer_fingerprint,
)
from megalite.data.tokenizer_io import load_tokenizer, resolve_vocab_size, tokenizer_files, tokenizer_from_config
from megalite.errors import DataError
from tokenizer_training import train_bpe, train_sentencepiece

TEXTS = [
    "Hello, world!\n\nIt's 2 o'clock; we'll see.",
    "  indented\n\t\ttabs and   spaces \n \n",
    "naïve café – “quotes”, 北京, ½ ² Ⅷ, e\u0301, \U0001f600, \u00a0\u2003x",
    "def f(x):\n    return x ** 2  # 'comment'\n",
    "",
]


@pytest.fixture(scope="module")
def bpe() -> HuggingFaceTokenizer:
    corpus = [Path(__file__).read_text(), Path(random.__file__).read_text(), *TEXTS]
    return train_bpe(corpus, 600)


def round_trips(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    assert all(0 <= i < tokenizer.vocab_size for i in ids)
    assert tokenizer.decode(ids) == text
    table = tokenizer.token_bytes()
    assert table is not None and table.shape == (tokenizer.vocab_size,)
    assert int(table[ids].sum()) == len(text.encode())
    assert tokenizer.encode_batch([text, text])[1].tolist() == ids


def test_bytes_are_ids_and_the_last_one_ends_a_document() -> None:
    tokenizer = ByteTokenizer()
    assert tokenizer.encode("aé") == [97, 195, 169]
    assert tokenizer.decode([97, 256, 98]) == "ab"
    for text in TEXTS:
        round_trips(tokenizer, text)


def test_characters_are_sorted_and_unknown_ones_are_refused() -> None:
    tokenizer = CharTokenizer.from_texts(["banana", "Zoë"])
    assert tokenizer.characters == "Zabnoë" and tokenizer.eod_id is None
    assert tokenizer.encode("Zoë") == [0, 4, 5]
    round_trips(tokenizer, "banana")
    with pytest.raises(
        DataError, match=r"--tokenizer-type=CharTokenizer: character 'x' \(position 1\) is not among the 6"
    ):
        tokenizer.encode("bx")
    with pytest.raises(DataError, match="'北'"):
        tokenizer.encode("a北")


def test_numbers_are_their_own_ids() -> None:
    tokenizer = NullTokenizer(10)
    assert tokenizer.encode("1 2 8") == [1, 2, 8] and tokenizer.eod_id == 9
    assert tokenizer.decode([1, 2, 9]) == "1 2" and tokenizer.token_bytes() is None
    with pytest.raises(DataError, match="--vocab-size=10: id 10 of the text"):
        tokenizer.encode("10")
    with pytest.raises(DataError, match="text must be numbers"):
        tokenizer.encode("one")


def test_gpt2_ids_equal_those_of_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("tokenizers")
    vocab, merges = shared_file("gpt2/vocab.json"), shared_file("gpt2/merges.txt")
    ours = GPT2BPETokenizer(vocab.read_bytes(), merges.read_bytes())
    theirs = transformers.GPT2Tokenizer(str(vocab), str(merges))
    assert (ours.vocab_size, ours.eod_id) == (50257, 50256)
    wikitext, plays = shared_file("wikitext-2/valid.txt"), shared_file("tinyshakespeare/input.txt")
    texts = [*TEXTS, wikitext.read_text()[:100_000], plays.read_text()[:50_000], "a<|endoftext|>b <|endoftext|>"]
    for text, batched in zip(texts, ours.encode_batch(texts), strict=True):
        expected = theirs(text)["input_ids"]
        assert ours.encode(text) == expected
        assert batched.tolist() == expected
    round_trips(ours, texts[-2])


def test_word_table_gives_the_ids_of_the_library(bpe: HuggingFaceTokenizer) -> None:
    draw = random.Random(20)
    alphabet = [chr(c) for c in (*range(9, 14), *range(28, 127), *range(160, 600), *range(0x2000, 0x2030), 0x85, 0x660)]
    alphabet += ["\u4e00", "\uac00", "\u3000", "\u0301", "\u2167", "\u180e", "\U0001f600", "<|endoftext|>", "\ufeff"]
    texts = []
    for _ in range(1500):
        words = [draw.choice(alphabet) if draw.random() < 0.4 else draw.choice(" \n'sdmtlverea1!A ") for _ in range(40)]
        texts.append("".join(words[: draw.randrange(41)]))
    for text, ids in zip(texts, bpe.encode_batch(texts), strict=True):
        assert ids.tolist() == bpe.encode(text), repr(text)


def test_hugging_face_reads_a_file_or_a_folder(bpe: HuggingFaceTokenizer, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes(bpe.files()["tokenizer.json"])
    assert HuggingFaceTokenizer.from_path(tmp_path / "tokenizer.json").eod_id == 0
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "a"}}))
    folder = HuggingFaceTokenizer.from_path(tmp_path)
    assert folder.eod_id == bpe.backend.token_to_id("a") != 0
    for text in TEXTS:
        round_trips(bpe, text)


def test_sentencepiece_round_trips() -> None:
    pytest.importorskip("sentencepiece")
    source = Path(random.__file__).read_text()
    tokenizer = train_sentencepiece([source], 400)
    assert tokenizer.vocab_size == 400 and tokenizer.eod_id is not None
    round_trips(tokenizer, source[:2000])
    round_trips(tokenizer, TEXTS[2])


def test_ids_that_do_not_spell_the_text_do_not_count_its_bytes() -> None:
    """sentencepiece's own defaults: NFKC, spaces in a row become one, one id for whatever is unknown."""
    sentencepiece = pytest.importorskip("sentencepiece")
    for settings in ({}, {"normalization_rule_name": "identity", "remove_extra_whitespaces": False}):
        model = io.BytesIO()
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(["the quick brown fox jumps over the lazy dog"] * 30), model_writer=model,
            vocab_size=40, hard_vocab_limit=False, minloglevel=2, **settings,
        )  # fmt: skip
        tokenizer = SentencePieceTokenizer(model.getvalue())
        assert tokenizer.decode(tokenizer.encode("the  \uff26ox")) != "the  \uff26ox"
        assert tokenizer.token_bytes() is None
    lower = json.loads(train_bpe(["some text"] * 9, 300).backend.to_str()) | {"normalizer": {"type": "Lowercase"}}
    assert HuggingFaceTokenizer(json.dumps(lower).encode()).token_bytes() is None


def test_a_checkpoint_folder_gives_the_tokenizer_back(bpe: HuggingFaceTokenizer, tmp_path: Path) -> None:
    for number, tokenizer in enumerate([ByteTokenizer(), CharTokenizer("abc"), NullTokenizer(77), bpe]):
        folder = tmp_path / str(number)
        folder.mkdir()
        for name, content in tokenizer_files(tokenizer).items():
            (folder / name).write_bytes(content)
        again = load_tokenizer(folder)
        assert type(again) is type(tokenizer) and tokenizer_fingerprint(again) == tokenizer_fingerprint(tokenizer)
    with pytest.raises(DataError, match="holds no tokenizer"):
        load_tokenizer(tmp_path)


def test_fingerprints_tell_tokenizers_apart() -> None:
    different = [ByteTokenizer(), NullTokenizer(257), NullTokenizer(258), CharTokenizer("ab"), CharTokenizer("ac")]
    assert len({tokenizer_fingerprint(tokenizer) for tokenizer in different}) == len(different)


def test_the_type_on_disk_is_megatrons() -> None:
    assert token_dtype(65499) == np.uint16 and token_dtype(65500) == np.int32


@pytest.mark.parametrize(
    ("fields", "line"),
    [
        (
            {"tokenizer_type": "HuggingFaceTokenizer", "tokenizer_model": "tok.json"},
            "--tokenizer-model=tok.json: no such file",
        ),
        ({"tokenizer_model": "m.model"}, "--tokenizer-model=m.model: no such file"),
        (
            {"vocab_file": "v.json"},
            "--tokenizer-type=GPT2BPETokenizer: needs vocab.json and merges.txt; give --merge-file",
        ),
        (
            {"tokenizer_type": "SentencePieceTokenizer"},
            "--tokenizer-type=SentencePieceTokenizer: no file given; name a sentencepiece .model file by "
            "--tokenizer-model",
        ),
        (
            {"tokenizer_type": "NullTokenizer"},
            "--tokenizer-type=NullTokenizer: the number of ids is not known; give --vocab-size",
        ),
    ],
)
def test_missing_files_are_one_line(
    fields: dict[str, str], line: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError) as caught:
        tokenizer_from_config(config(**fields))
    assert str(caught.value) == line


def test_damaged_files_are_one_line(tmp_path: Path) -> None:
    (tmp_path / "bad.json").write_text("{}")
    with pytest.raises(DataError, match=r"bad.json: not a tokenizer.json \("):
        HuggingFaceTokenizer.from_path(tmp_path / "bad.json")
    (tmp_path / "bad.model").write_bytes(b"nonsense")
    with pytest.raises(DataError, match="bad.model: not a sentencepiece model"):
        tokenizer_from_config(config(tokenizer_model=str(tmp_path / "bad.model")))
    (tmp_path / "tokenizer.json").write_text('{"model": {}}')
    for path in (tmp_path / "tokenizer.json", tmp_path):  # the file, and a folder that holds no other tokenizer
        with pytest.raises(DataError, match="a tokenizer.json, not .*; add --tokenizer-type=HuggingFaceTokenizer"):
            SentencePieceTokenizer.from_path(path)
    with pytest.raises(DataError, match="--merge-file=merges.txt: does not fit the vocabulary"):
        GPT2BPETokenizer(b'{"a": 0}', b"a b\n")
    with pytest.raises(DataError, match="--vocab-file=vocab.json: not a JSON object"):
        GPT2BPETokenizer(b"[1]", b"")


def test_vocabulary_may_only_grow() -> None:
    assert resolve_vocab_size(ByteTokenizer(), None) == 257
    assert resolve_vocab_size(ByteTokenizer(), 512) == 512
    with pytest.raises(DataError, match="--vocab-size=200: ByteTokenizer has 257 tokens"):
        resolve_vocab_size(ByteTokenizer(), 200)
