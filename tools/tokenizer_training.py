"""Make a tokenizer from text: byte-level BPE or sentencepiece, deterministic for the same text and version of the
package.

Sennrich et al., "Neural Machine Translation of Rare Words with Subword Units" (2016); Kudo, "Subword Regularization"
(2018).
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator

from megalite.data import HuggingFaceTokenizer, SentencePieceTokenizer
from megalite.errors import DataError
from megalite.extras import optional_package

MODEL_TYPES = ("bpe", "sentencepiece")
EOD = "<|endoftext|>"
# sentencepiece takes sentences, and passes over those that are longer than this many bytes.
MAX_SENTENCE = 16384


def train_bpe(texts: Iterable[str], vocab_size: int) -> HuggingFaceTokenizer:
    """Byte-level BPE with `<|endoftext|>` as id 0; every byte is a token, so every text can be written.

    Raises:
        DataError: `vocab_size` leaves no room for the 256 bytes, or there is no text.
    """
    if vocab_size < 257:
        raise DataError(
            f"--vocab-size={vocab_size}: byte-level BPE needs 257 ids for bytes and end of document; give more"
        )
    import tokenizers

    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[EOD],
        show_progress=False,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
    )
    backend.train_from_iterator(_not_empty(texts), trainer)
    return HuggingFaceTokenizer(backend.to_str(pretty=True).encode())


def train_sentencepiece(texts: Iterable[str], vocab_size: int) -> SentencePieceTokenizer:
    """Unigram sentencepiece with bytes for unknown characters; text round-trips exactly (no normalisation, no added
    space).

    Raises:
        DataError: the text does not give that many pieces, or there is none.
    """
    sentencepiece = optional_package("--model-type=sentencepiece", "sentencepiece")
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=_sentences(_not_empty(texts)),
            model_writer=model,
            vocab_size=vocab_size,
            model_type="unigram",
            byte_fallback=True,
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            add_dummy_prefix=False,
            split_digits=True,
            max_sentence_length=MAX_SENTENCE,
            # Newlines are separators to its trainer, so they come as a piece of their own.
            user_defined_symbols=["\n"],
            bos_id=-1,
            num_threads=1,
            minloglevel=2,
        )
    except DataError:
        raise
    except Exception as error:  # the package raises RuntimeError of many texts
        reason = str(error).strip().splitlines()[-1].split("] ")[-1][:160]
        raise DataError(f"--vocab-size={vocab_size}: sentencepiece cannot train on this text ({reason})") from None
    return SentencePieceTokenizer(model.getvalue())


def _not_empty(texts: Iterable[str]) -> Iterator[str]:
    found = False
    for text in texts:
        found = found or bool(text)
        yield text
    if not found:
        raise DataError("--input: holds no text (0 characters); give a file that does")


def _sentences(texts: Iterable[str]) -> Iterator[str]:
    for text in texts:
        for line in text.split("\n"):
            for start in range(0, len(line), MAX_SENTENCE // 4):
                yield line[start : start + MAX_SENTENCE // 4]
