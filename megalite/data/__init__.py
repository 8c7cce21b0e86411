"""The data room: from text to micro-batches, the same ones at every layout.

::

    text ──tokenizer──> .bin/.idx ──split, blend──> sample k ──sampler──> micro-batches of this data-parallel rank
         corpus.py       indexed.py  gpt_index.py              loader.py
                                     gpt_dataset.py, blend.py

What a run has read is one integer, `consumed_samples`: which samples a rank reads next is a pure function of it
(`sampler.py`), so a run resumes at another data-parallel size without losing or repeating a sample. Files and order
are Megatron's, bit for bit (Shoeybi et al., "Megatron-LM", 2019), so that its corpora can be used as they are.

Public names: `build_tokenizer`, `load_tokenizer`, `tokenizer_files`, `build_datasets`, `Loader`, `full_pass`,
`Tokenizer`. The loader is imported at its first use: nothing else here needs torch, so the tools for data start at
once. Proved by: `tests/unit/data/test_gpt_index.py` (order against a token-by-token walk), `test_indexed.py`
(bytes and hostile files), `test_loader.py` (every layout reads the same samples).
"""

from typing import TYPE_CHECKING, Any

from megalite.data.build import Datasets, build_datasets, build_tokenizer
from megalite.data.cache import cache_directory
from megalite.data.tokenizer import Tokenizer
from megalite.data.tokenizer_io import load_tokenizer, resolve_vocab_size, tokenizer_files

if TYPE_CHECKING:
    from megalite.data.loader import Loader, full_pass

__all__ = [
    "Datasets",
    "Loader",
    "Tokenizer",
    "build_datasets",
    "build_tokenizer",
    "cache_directory",
    "full_pass",
    "load_tokenizer",
    "resolve_vocab_size",
    "tokenizer_files",
]


def __getattr__(name: str) -> Any:
    if name in ("Loader", "full_pass"):
        from megalite.data import loader

        return getattr(loader, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
