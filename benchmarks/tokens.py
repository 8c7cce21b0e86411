"""From text to batches: tokenising, the sample index and the loader, beside what one would use without megalite.

    python benchmarks/tokens.py                                   # 8 MB of text, an index of 1,000,000 documents
    python benchmarks/tokens.py --quick --check                   # compared with baseline.json

Text is that of the Python standard library, the vocabulary a BPE of 8,192. Peers: the `tokenizers` package in as many
processes, `datasets.map` over it, a search with NumPy, and torch's DataLoader over a memory-mapped array.
"""

from __future__ import annotations

import argparse
import functools
import json
import multiprocessing
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # a clone works without being installed

import numpy as np

from benchmarks.harness import Benchmark, Flag
from benchmarks.turns import Case, Place, Variant, folder_of

PIECE, SEQ_LENGTH, SAMPLES = 20_000, 1024, 32
VARIANTS = ("megalite", "tokenizers", "datasets", "numpy", "torch")
FLAGS = {
    "megabytes": Flag("of text to tokenise", 8.0, 1.0),
    "workers": Flag("numbers of processes that tokenise", [1, 2], [1, 2]),
    "documents": Flag("of the sample index, a thousand tokens each", 1_000_000, 200_000),
}


def cases(args: argparse.Namespace) -> list[Case]:
    size = sum(len(text.encode()) for text in corpus(args.megabytes)) / 1e6
    kinds = ("megalite", "tokenizers", "datasets")
    forms = [f"{count} process{'es' if count > 1 else ''}" for count in args.workers]
    names = tuple(f"{kind}, {form}" for form in forms for kind in kinds)
    pairs = tuple((f"megalite, {form}", f"{kind}, {form}") for form in forms for kind in kinds[1:])
    settings = {"what": "tokenise", "megabytes": args.megabytes, "torch": False}
    index = {"what": "index", "documents": args.documents, "torch": False}
    rows = args.documents * 1000 // SEQ_LENGTH
    return [
        Case(f"tokenise {args.megabytes:g} MB", names, pairs, settings, size, "MB"),
        Case(f"index of {args.documents:,} documents", ("megalite", "numpy"), (("megalite", "numpy"),), index, rows,
             "samples"),
        Case(f"batches of {SAMPLES}", ("megalite", "torch"), (("megalite", "torch"),), {"what": "read"},
             SAMPLES * SEQ_LENGTH, "tokens", inner=10),
    ]  # fmt: skip


def build(name: str, case: Case, place: Place) -> Variant:
    makers: dict[str, Callable[[str, Case, Place], Variant]] = {"tokenise": tokenise, "index": index, "read": read}
    return makers[case.settings["what"]](name, case, place)


@functools.cache
def corpus(megabytes: float) -> list[str]:
    """Documents of at most 20,000 characters."""
    from megalite.data import stdlib_corpus

    documents: list[str] = []
    for text in stdlib_corpus().documents(None, "train"):
        documents += [text[at : at + PIECE] for at in range(0, len(text), PIECE)]
        if sum(map(len, documents)) > megabytes * 1e6:
            break
    return documents


@functools.cache
def files(megabytes: float, folder: Path) -> tuple[Path, Path]:
    """tokenizer.json and corpus.jsonl."""
    from tokenizer_training import train_bpe

    documents = corpus(megabytes)
    tokenizer, text = folder / "tokenizer.json", folder / "corpus.jsonl"
    tokenizer.write_bytes(train_bpe(documents, 8192).files()["tokenizer.json"])
    text.write_text("".join(json.dumps({"text": document}) + "\n" for document in documents))
    return tokenizer, text


def tokenise(name: str, case: Case, place: Place) -> Variant:
    """The whole job: from the file or the documents to ids on the disk."""
    kind, count = name.split(", ")[0], int(name.split()[1])
    folder = folder_of(place, "text")
    documents = corpus(case.settings["megabytes"])
    tokenizer, text = files(case.settings["megabytes"], folder)
    if kind == "megalite":
        from megalite.data import HuggingFaceTokenizer, preprocess

        def tokenise() -> object:
            ours = HuggingFaceTokenizer.from_path(tokenizer)
            return preprocess([str(text)], str(folder / "ours"), ours, append_eod=True, workers=count)

        def remove_output() -> None:
            for path in folder.glob("ours*"):
                path.unlink()

        return Variant(tokenise, before=remove_output)
    if kind == "tokenizers":
        return Variant(lambda: in_processes(str(tokenizer), documents, count, folder))
    return Variant(lambda: dataset_map(str(tokenizer), documents, count))


def in_processes(tokenizer: str, documents: list[str], workers: int, folder: Path) -> None:
    """`tokenizers` in as many processes."""
    context = multiprocessing.get_context("fork")
    jobs = [(tokenizer, documents[n::workers], str(folder / f"library{n}.bin")) for n in range(workers)]
    crew = [context.Process(target=library_alone, args=job) for job in jobs]
    for process in crew:
        process.start()
    for process in crew:
        process.join()


def library_alone(path: str, documents: list[str], out: str) -> None:
    """One of them: 64 documents at a time, ids to a file."""
    import tokenizers

    tokenizer = tokenizers.Tokenizer.from_file(path)
    with open(out, "wb") as file:
        for start in range(0, len(documents), 64):
            for encoding in tokenizer.encode_batch_fast(documents[start : start + 64]):
                file.write(np.asarray(encoding.ids, np.uint16).data)


def dataset_map(path: str, documents: list[str], workers: int) -> None:
    """`datasets.map`, which writes nothing but its cache."""
    import datasets
    import tokenizers

    datasets.disable_progress_bars()
    datasets.disable_caching()
    tokenizer = tokenizers.Tokenizer.from_file(path)

    def ids(batch: dict[str, list[str]]) -> dict[str, Any]:
        return {"ids": [encoding.ids for encoding in tokenizer.encode_batch_fast(batch["text"])]}

    dataset = datasets.Dataset.from_dict({"text": documents})
    processes = workers if workers > 1 else None
    dataset.map(ids, batched=True, batch_size=64, remove_columns=["text"], num_proc=processes)


def index(name: str, case: Case, place: Place) -> Variant:
    """Sample index of shuffled documents with lognormal lengths."""
    from megalite.data import build_sample_index

    random = np.random.default_rng(0)
    count = case.settings["documents"]
    weights = random.lognormal(0, 1.2, count)
    sizes = np.maximum(1, weights / weights.sum() * count * 1000).astype(np.int32)
    order = random.permutation(count).astype(np.int32)
    total = int(sizes.sum(dtype=np.int64))
    if name == "megalite":
        return Variant(lambda: build_sample_index(sizes, order, SEQ_LENGTH, total=total))

    def search() -> Any:
        ends = np.cumsum(sizes[order], dtype=np.int64)
        starts = np.arange((int(ends[-1]) - 1) // SEQ_LENGTH + 1, dtype=np.int64) * SEQ_LENGTH
        document = np.searchsorted(ends, starts, side="right")
        return np.stack([document, starts - np.where(document > 0, ends[document - 1], 0)], axis=1)

    return Variant(search)


def read(name: str, case: Case, place: Place) -> Variant:
    """Batches in shuffled order, from documents of megalite's mock store in a file."""
    from megalite.data import BatchLoader, GPTDataset, IndexedDataset, IndexedWriter, MockStore

    folder = folder_of(place, name)
    mock = MockStore(seed=0, vocab_size=50257, eod_id=0, documents=2000)
    if name == "megalite":
        with IndexedWriter(folder / "documents", vocab_size=50257) as writer:
            for document in range(2000):
                writer.add_document(mock.get(document))
        store = IndexedDataset(folder / "documents")
        dataset = GPTDataset(store, 0, len(store), seq_length=SEQ_LENGTH, requests=[SAMPLES * 10_000], seed=0)
        loader = BatchLoader(dataset, consumed_samples=0, micro_batch_size=8, dp_rank=0, dp_size=1, num_workers=1)
        return Variant(lambda: loader.next_batch(SAMPLES))
    import torch

    np.concatenate([mock.get(document) for document in range(2000)]).astype(np.uint16).tofile(folder / "tokens.bin")
    tokens = np.memmap(folder / "tokens.bin", np.uint16, "r")
    windows: Any = Windows(tokens, np.random.default_rng(0).integers(0, len(tokens) - SEQ_LENGTH - 1, SAMPLES * 10_000))
    batches = iter(torch.utils.data.DataLoader(windows, SAMPLES, num_workers=1))
    return Variant(lambda: next(batches))


class Windows:
    """What a training script reads: a window of an array of tokens, and its labels."""

    def __init__(self, tokens: Any, starts: Any) -> None:
        self.tokens, self.starts = tokens, starts

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, number: int) -> Any:
        start = self.starts[number]
        window = self.tokens[start : start + SEQ_LENGTH + 1].astype(np.int64)
        return window[:-1], window[1:]


PACKAGES = {"datasets": "datasets"}
BENCHMARK = Benchmark("tokens", __doc__, FLAGS, cases, build, VARIANTS, PACKAGES)

if __name__ == "__main__":
    sys.exit(BENCHMARK.main())
