"""Inputs that the tests of the data room share."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from megalite.config.data import DataConfig
from megalite.data.gpt_dataset import SampleSource
from megalite.data.indexed import IndexedWriter

SHARED = Path(__file__).resolve().parents[4] / "shared" / "data"


def shared_file(name: str) -> Path:
    """A file of the folder of real texts beside the checkout; skips where it is absent."""
    path = SHARED / name
    if not path.is_file():
        pytest.skip(f"{name} is not in ../shared/data")
    return path


def config(**fields: object) -> DataConfig:
    """A data section with these fields set."""
    return DataConfig(**fields)  # type: ignore[arg-type]


def tokens_of(source: SampleSource, sample: int) -> list[int]:
    """The S + 1 tokens of one sample."""
    out = np.empty(source.seq_length + 1, np.int64)
    source.read(sample, out)
    return out.tolist()


def write_documents(prefix: Path, documents: list[list[int]], vocab_size: int = 300) -> str:
    """A `.bin/.idx` pair of these documents; returns the prefix."""
    with IndexedWriter(prefix, vocab_size=vocab_size) as writer:
        for document in documents:
            writer.add_document(np.array(document, np.int64))
    return str(prefix)
