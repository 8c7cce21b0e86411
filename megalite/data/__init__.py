"""Data: from text to micro-batches, the same ones at every layout.

::

    text ──tokenizer──> .bin/.idx ──split, blend──> sample k ──loader──> micro-batches of this data-parallel rank
         corpus.py       indexed.py  gpt_index.py              loader.py
                                     gpt_dataset.py, blend.py

What a run has read is one integer, `consumed_samples`: which samples a rank reads next is a pure function of it
(`loader.py`), so a run resumes at another data-parallel size without losing or repeating a sample. Files and order
are Megatron's, bit for bit (Shoeybi et al., "Megatron-LM", 2019), so that its corpora can be used as they are.

Public names: `build_tokenizer`, `load_tokenizer`, `tokenizer_files`, `build_datasets`, `BatchLoader`, `Tokenizer`.
The loader is imported at its first use: nothing else here needs torch, so the tools for data start at once. Proved by:
`tests/unit/data/test_gpt_index.py` (order against a token-by-token walk), `test_indexed.py` (bytes and hostile files),
`test_loader.py` (every layout reads the same samples).
"""

from typing import TYPE_CHECKING, Any

from megalite.data.beside import as_hugging_face
from megalite.data.build import Dataset, Datasets, build_datasets, build_tokenizer
from megalite.data.cache import cache_directory
from megalite.data.chat import ChatTemplate, Messages, parse_messages, preprocess_chat
from megalite.data.corpus import JSONL_SUFFIXES, open_text, parse_json, read_jsonl, read_text, stdlib_corpus
from megalite.data.file_chunks import input_units, read_unit, utf8_length
from megalite.data.gpt_dataset import Conversations, GPTDataset, SampleSource
from megalite.data.gpt_index import build_sample_index
from megalite.data.indexed import MARKS, IndexedDataset, IndexedWriter, is_indexed, strip_suffix
from megalite.data.preprocess import preprocess
from megalite.data.splits import UnusableSplit
from megalite.data.subword import HuggingFaceTokenizer, SentencePieceTokenizer, byte_level_alphabet
from megalite.data.survey import begun_phases, phase_differences, survey_differences, surveys_to_meta
from megalite.data.token_store import MockStore
from megalite.data.tokenizer import ByteTokenizer, NullTokenizer, Tokenizer
from megalite.data.tokenizer_io import (
    DESCRIPTION_FILE,
    load_tokenizer,
    make_tokenizer,
    read_description,
    resolve_vocab_size,
    tokenizer_files,
)
from megalite.data.written_by import check_joined, note_joined, same_ids

if TYPE_CHECKING:
    from megalite.data.loader import BatchLoader, DocumentMasks


def __getattr__(name: str) -> Any:
    if name in ("BatchLoader", "DocumentMasks"):
        from megalite.data import loader

        return getattr(loader, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
