"""Measure the data room on this machine: tokenising, the sample index, and reading batches.

python tools/benchmark_data.py [--megabytes 8] [--workers 1 2] [--documents 1000000 --tokens 1000000000] [--rounds 5]

Text is the Python standard library's; each figure is the median of interleaved rounds, beside what a user would do
without megalite (the `tokenizers` package in as many processes; a search with plain numpy).
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # a clone works without being installed

import numpy as np
from numpy.typing import NDArray

from command_line import ToolParser, run_tool
from megalite.data import (
    GPTDataset,
    HuggingFaceTokenizer,
    IndexedDataset,
    IndexedWriter,
    MockStore,
    build_sample_index,
    preprocess,
    stdlib_corpus,
)
from tokenizer_training import train_bpe

PIECE = 20_000
SEQ_LENGTH = 1024


def measure(variants: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Median seconds of each variant; they take turns, so that a busy machine slows all alike."""
    samples: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(rounds):
        for name, run in variants.items():
            started = time.perf_counter()
            run()
            samples[name].append(time.perf_counter() - started)
    return {name: statistics.median(times) for name, times in samples.items()}


def library_alone(path: str, documents: list[str], out: str) -> None:
    """One process of the comparison: `tokenizers`, 64 documents at a time, ids to a file."""
    import tokenizers

    tokenizer = tokenizers.Tokenizer.from_file(path)
    with open(out, "wb") as file:
        for start in range(0, len(documents), 64):
            for encoding in tokenizer.encode_batch_fast(documents[start : start + 64]):
                file.write(np.asarray(encoding.ids, np.uint16).data)


def in_processes(path: str, documents: list[str], workers: int, folder: Path) -> None:
    """The comparison with `workers` processes."""
    context = multiprocessing.get_context("fork")
    jobs = [(path, documents[n::workers], str(folder / f"library{n}.bin")) for n in range(workers)]
    crew = [context.Process(target=library_alone, args=job) for job in jobs]
    for process in crew:
        process.start()
    for process in crew:
        process.join()


def tokenising(megabytes: float, workers: list[int], rounds: int) -> None:
    """Prints MB/s of text."""
    documents: list[str] = []
    for text in stdlib_corpus().documents(None, "train"):
        documents += [text[at : at + PIECE] for at in range(0, len(text), PIECE)]
        if sum(map(len, documents)) > megabytes * 1e6:
            break
    size = sum(len(text.encode()) for text in documents) / 1e6
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tokenizer_file, corpus = folder / "tokenizer.json", folder / "corpus.jsonl"
        tokenizer_file.write_bytes(train_bpe(documents, 8192).files()["tokenizer.json"])
        corpus.write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))

        def ours(count: int) -> None:
            tokenizer = HuggingFaceTokenizer.from_path(tokenizer_file)
            preprocess([str(corpus)], str(folder / "ours"), tokenizer, append_eod=True, workers=count)

        variants: dict[str, Callable[[], object]] = {}
        for count in workers:
            variants[f"megalite, {count} workers"] = lambda count=count: ours(count)  # type: ignore[misc]
            variants[f"tokenizers, {count} processes"] = lambda count=count: in_processes(  # type: ignore[misc]
                str(tokenizer_file), documents, count, folder
            )
        for variant, seconds in measure(variants, rounds).items():
            print(f"tokenise {size:.1f} MB   {variant:28s} {size / seconds:8.2f} MB/s")


def plain_search(sizes: NDArray[np.int32], order: NDArray[np.int32]) -> NDArray[np.int64]:
    """The sample index by `numpy.searchsorted`."""
    ends = np.cumsum(sizes[order], dtype=np.int64)
    starts = np.arange((int(ends[-1]) - 1) // SEQ_LENGTH + 1, dtype=np.int64) * SEQ_LENGTH
    document = np.searchsorted(ends, starts, side="right")
    return np.stack([document, starts - np.where(document > 0, ends[document - 1], 0)], axis=1)


def index(documents: int, tokens: int, rounds: int) -> None:
    """Prints milliseconds."""
    random = np.random.default_rng(0)
    weights = random.lognormal(0, 1.2, documents)
    sizes = np.maximum(1, weights / weights.sum() * tokens).astype(np.int32)
    order = random.permutation(documents).astype(np.int32)
    total = int(sizes.sum(dtype=np.int64))
    variants: dict[str, Callable[[], object]] = {
        "megalite": lambda: build_sample_index(sizes, order, SEQ_LENGTH, total=total),
        "plain numpy": lambda: plain_search(sizes, order),
    }
    for variant, seconds in measure(variants, rounds).items():
        print(f"index {documents:,} documents   {variant:28s} {seconds * 1e3:8.2f} ms")


def reading(workers: list[int], rounds: int) -> None:
    """Prints tokens/s of batches of 32 samples."""
    with tempfile.TemporaryDirectory() as name:
        with IndexedWriter(Path(name) / "documents", vocab_size=50257) as writer:
            mock = MockStore(seed=0, vocab_size=50257, eod_id=0, documents=2000)
            for document in range(2000):
                writer.add_document(mock.get(document))
        store = IndexedDataset(Path(name) / "documents")
        dataset = GPTDataset(store, 0, len(store), seq_length=SEQ_LENGTH, requests=[32 * 4 * rounds], seed=0)
        read_batches(dataset, workers, rounds)


def read_batches(dataset: GPTDataset, workers: list[int], rounds: int) -> None:
    """Prints tokens/s of each number of threads."""
    from megalite.data import BatchLoader  # torch comes with it

    for count in [0, *workers]:
        with BatchLoader(
            dataset, consumed_samples=0, micro_batch_size=8, dp_rank=0, dp_size=1, num_workers=count
        ) as loader:
            seconds = measure({"read": lambda loader=loader: loader.next_batch(32)}, 4 * rounds)["read"]  # type: ignore[misc]
        print(f"read batches   {f'{count} threads':28s} {32 * SEQ_LENGTH / seconds / 1e6:8.2f} million tokens/s")


def main(argv: list[str]) -> None:
    """Raises MegaliteError."""
    parser = ToolParser("Measure the data room on this machine.")
    parser.add_argument("--megabytes", type=float, default=8.0, help="text to tokenise")
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2], help="numbers of processes and threads")
    parser.add_argument("--documents", type=int, default=1_000_000, help="of the index")
    parser.add_argument("--tokens", type=int, default=1_000_000_000, help="of the index")
    parser.add_argument("--rounds", type=int, default=5, help="of each measurement")
    args: argparse.Namespace = parser.parse_args(argv)
    index(args.documents, args.tokens, args.rounds)
    reading(args.workers, args.rounds)
    tokenising(args.megabytes, args.workers, args.rounds)


if __name__ == "__main__":
    sys.exit(run_tool(main))
