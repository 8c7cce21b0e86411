"""Train a tokenizer on your text: byte-level BPE (as GPT-2's) or sentencepiece.

python tools/train_tokenizer.py --input corpus.txt --vocab-size 8192 --output tokenizer/
    train with --tokenizer-type HuggingFaceTokenizer --tokenizer-model tokenizer/tokenizer.json
python tools/train_tokenizer.py --input corpus.jsonl --model-type sentencepiece --vocab-size 8192 --output tokenizer/
    train with --tokenizer-type SentencePieceTokenizer --tokenizer-model tokenizer/tokenizer.model

Without --input it reads the default corpus: the Python standard library's own sources.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # a clone works without being installed

from command_line import ToolParser, run_tool
from megalite.data import input_units, read_unit, stdlib_corpus
from megalite.errors import ConfigError
from tokenizer_training import MODEL_TYPES, train_bpe, train_sentencepiece

MOST_IDS = 10_000_000


def parse(argv: list[str]) -> argparse.Namespace:
    """Read the flags. Raises ConfigError."""
    parser = ToolParser("Train a tokenizer on your text.")
    parser.add_argument(
        "--input", nargs="+", metavar="PATH", help="as of preprocess_data.py; unset: the default corpus"
    )
    parser.add_argument("--output", required=True, metavar="DIR", help="folder for the tokenizer's files")
    parser.add_argument("--vocab-size", type=int, required=True, help="number of ids, special ones included")
    parser.add_argument("--model-type", choices=MODEL_TYPES, default="bpe", help="bpe: byte-level, as GPT-2's")
    parser.add_argument("--json-keys", nargs="+", default=["text"], metavar="KEY", help="fields of JSONL and parquet")
    parser.add_argument(
        "--skip-bad-lines", action="store_true", help="leave out broken JSONL lines instead of stopping"
    )
    args = parser.parse_args(argv)
    if args.vocab_size < 2:
        raise ConfigError(f"--vocab-size={args.vocab_size}: must be at least 2")
    if args.vocab_size > MOST_IDS:
        raise ConfigError(f"--vocab-size={args.vocab_size}: at most {MOST_IDS:,}")
    return args


def texts_of(args: argparse.Namespace) -> Iterator[str]:
    """Documents of the input. Raises DataError."""
    if args.input is None:
        yield from stdlib_corpus().documents(None, "train")
        return
    for path in args.input:
        for unit in input_units(path, args.json_keys):
            for column in read_unit(unit, args.json_keys, skip_bad_lines=args.skip_bad_lines)[0]:
                yield from column


def main(argv: list[str]) -> None:
    """Raises MegaliteError."""
    args = parse(argv)
    train = train_bpe if args.model_type == "bpe" else train_sentencepiece
    tokenizer = train(texts_of(args), args.vocab_size)
    folder, name = Path(args.output), next(iter(tokenizer.files()))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        before = (folder / name).read_bytes() if (folder / name).exists() else None
        for each, content in tokenizer.files().items():
            (folder / each).write_bytes(content)
    except OSError as error:
        raise ConfigError(f"--output={folder}: cannot be written ({error.strerror}); choose another") from error
    if before not in (None, tokenizer.files()[name]):
        print(f"replaced another {folder / name}; the runs that were trained with it have it in their checkpoints")
    print(tokenizer.describe())
    if tokenizer.vocab_size < args.vocab_size:
        print(f"{tokenizer.vocab_size:,} ids of {args.vocab_size:,}: the text has no more pieces")
    print(f"wrote {folder / name}; use it with --tokenizer-type {tokenizer.kind} --tokenizer-model {folder / name}")


if __name__ == "__main__":
    sys.exit(run_tool(main))
