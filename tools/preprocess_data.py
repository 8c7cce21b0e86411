"""Tokenise a corpus into Megatron's `.bin/.idx` files.

python tools/preprocess_data.py --input corpus.jsonl --output-prefix data/corpus \\
    --tokenizer-type GPT2BPETokenizer --vocab-file vocab.json --merge-file merges.txt --append-eod --workers 8

writes data/corpus_text_document.bin and .idx, which `--data-path data/corpus_text_document` trains on. Inputs: text
files (one document each), JSONL (also .gz, .zst), parquet, a folder saved by `datasets`, or hf:NAME[:CONFIG][@SPLIT]
for what `datasets` can load by name. Was it killed? The same command continues where it was.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # a clone works without being installed

from command_line import MOST, ToolParser, check_file, check_numbers, run_tool
from megalite.config import TOKENIZER_ALIASES, TOKENIZERS, TOKENIZERS_ELSEWHERE
from megalite.data import (
    ChatTemplate,
    Tokenizer,
    input_units,
    make_tokenizer,
    preprocess,
    preprocess_chat,
    read_unit,
    resolve_vocab_size,
)
from megalite.errors import ConfigError, in_flags
from megalite.progress import LINES, ProgressBar

MOST_WORKERS = 64
"""Of a machine with few cores; with many, four for each."""
IDLE = {
    "--keep-newlines": 0,
    "--lang": 1,
    "--partitions": 1,
    "--keep-sequential-samples": 0,
}
"""Flags of Megatron-LM's tool that change nothing here -> how many values they take."""
REFUSED = {
    "--split-sentences": "a document is not cut into sentences, which GPT has no use for; drop it",
    "--find-optimal-num-workers": "give --workers; all cores are used without it",
    "--workers-to-check": "give --workers; all cores are used without it",
    "--max-documents": "give --workers; all cores are used without it",
}


def tokenizer_kind(text: str) -> str:
    """A kind of tokenizer, of which Megatron-LM has other names. Raises ArgumentTypeError for one that is not here."""
    if (why := TOKENIZERS_ELSEWHERE.get(text.lower())) is not None:
        raise argparse.ArgumentTypeError(in_flags(f"{text} {why}"))
    return TOKENIZER_ALIASES.get(text.lower(), text)


def parsed(parser: ToolParser, argv: list[str]) -> argparse.Namespace:
    """The flags, Megatron-LM's among them. Raises ConfigError with what is wrong of either."""
    words, problems = without_megatrons(argv)
    try:
        args = parser.parse_args(words)
    except ConfigError as error:
        raise ConfigError(problems + error.problems) from None
    if problems:
        raise ConfigError(problems)
    return args


def without_megatrons(argv: list[str]) -> tuple[list[str], list[str]]:
    """The words without the flags of Megatron-LM's tool that change nothing, which are named on standard error; and
    what is wrong with others of its flags."""
    kept: list[str] = []
    problems: list[str] = []
    idle: list[str] = []
    words = list(argv)
    while words:
        word = words.pop(0)
        name, equals, value = word.partition("=")
        name = name.replace("_", "-")
        values = 0
        while values < len(words) and not words[values].startswith("--"):
            values += 1
        if name in IDLE:
            del words[: 0 if equals else min(values, IDLE[name])]
            idle.append(name)
        elif name == "--dataset-impl":
            value = value if equals else words.pop(0) if values else ""
            idle.append(name)
            problems += (
                [] if value == "mmap" else [f"--dataset-impl={value}: .bin and .idx are written, mmap's; drop it"]
            )
        elif name in REFUSED:
            del words[:values]
            problems.append(f"{name}: {REFUSED[name]}")
        else:
            kept.append(word)
    if idle:
        print(f"Megatron-LM flags without effect here: {', '.join(idle)}", file=sys.stderr, flush=True)
    return kept, problems


def parse(argv: list[str]) -> argparse.Namespace:
    """Read the flags. Raises ConfigError."""
    # The cores that this process may use; not every system can say.
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    parser = ToolParser("Tokenise a corpus into .bin/.idx files.")
    parser.add_argument("--input", nargs="+", required=True, metavar="PATH", help="files, folders or hf:NAME")
    parser.add_argument(
        "--output-prefix", required=True, metavar="PREFIX", help="writes PREFIX_KEY_document.bin and .idx"
    )
    parser.add_argument(
        "--data-format", choices=("text", "chat"), default="text",
        help="chat: JSONL of conversations (field messages: role and content) by the tokenizer's own template; the "
        "loss counts the assistant's answers only",
    )  # fmt: skip
    parser.add_argument(
        "--json-keys", nargs="+", metavar="KEY", help="fields to tokenise, one output each (unset: text, or messages)"
    )
    parser.add_argument(
        "--tokenizer-type",
        type=tokenizer_kind,
        choices=TOKENIZERS,
        default="ByteTokenizer",
        help="how text becomes ids",
    )
    parser.add_argument(
        "--tokenizer-model", metavar="PATH", help="tokenizer.json, its directory, or a sentencepiece model"
    )
    parser.add_argument("--vocab-file", metavar="FILE", help="vocab.json of GPT2BPETokenizer")
    parser.add_argument("--merge-file", metavar="FILE", help="merges.txt of GPT2BPETokenizer")
    parser.add_argument("--vocab-size", type=int, help="ids of NullTokenizer")
    parser.add_argument("--append-eod", action="store_true", help="end every document with the end-of-document token")
    parser.add_argument("--workers", type=int, default=cpus, help="processes that tokenise")
    parser.add_argument(
        "--skip-bad-lines", action="store_true", help="leave out broken JSONL lines instead of stopping"
    )
    parser.add_argument(
        "--log-interval", type=float, default=LINES, help="seconds between progress lines in a log; 0: none, and no bar"
    )
    args = parsed(parser, argv)
    chat = args.data_format == "chat"
    args.json_keys = args.json_keys or (["messages"] if chat else ["text"])
    if chat and args.append_eod:
        raise ConfigError("--append-eod: not with --data-format=chat, whose template ends a conversation; drop it")
    if chat and len(args.json_keys) > 1:
        raise ConfigError(f"--json-keys={' '.join(args.json_keys)}: one field holds the messages; name that")
    most = max(MOST_WORKERS, 4 * cpus)
    if not 1 <= args.workers <= most:
        raise ConfigError(f"--workers={args.workers}: must be >= 1 and <= {most}; {cpus} cores can be used here")
    check_numbers(args, vocab_size=(2, 2**31), log_interval=(0, MOST))
    for path in args.input:
        if os.path.exists(path) and not os.path.isdir(path):
            check_file("--input", path)
    if len(set(args.json_keys)) < len(args.json_keys):
        raise ConfigError(f"--json-keys={' '.join(args.json_keys)}: a field is named twice; name each once")
    return args


def tokenizer_of(args: argparse.Namespace) -> Tokenizer:
    """The tokenizer that the flags name; CharTokenizer reads the whole input for its vocabulary and saves it
    beside the output.
    """

    def texts() -> list[str]:
        units = (unit for path in args.input for unit in input_units(path, args.json_keys))
        return [
            text
            for unit in units
            for column in read_unit(unit, args.json_keys, skip_bad_lines=args.skip_bad_lines)[0]
            for text in column
        ]

    tokenizer = make_tokenizer(
        args.tokenizer_type,
        tokenizer_model=args.tokenizer_model,
        vocab_file=args.vocab_file,
        merge_file=args.merge_file,
        vocab_size=args.vocab_size,
        texts=texts,
    )
    resolve_vocab_size(tokenizer, args.vocab_size)
    if args.vocab_size not in (None, tokenizer.vocab_size):
        own = f"no effect with {tokenizer.kind}, which has {tokenizer.vocab_size:,} ids"
        print(f"note: --vocab-size={args.vocab_size}: {own}; give it to a training whose model has more", flush=True)
    if tokenizer.kind == "CharTokenizer" and args.tokenizer_model is None:
        for name, content in tokenizer.files().items():
            file = Path(f"{args.output_prefix}_{name}")
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(content)
            print(f"vocabulary of CharTokenizer: {file}; train with --tokenizer-model {file}")
    return tokenizer


def main(argv: list[str]) -> None:
    """Raises MegaliteError."""
    args = parse(argv)
    tokenizer = tokenizer_of(args)
    print(f"{tokenizer.describe()}, {args.workers} workers", flush=True)
    chat = args.data_format == "chat"
    with ProgressBar("tokenising", "B", lines=args.log_interval) as bar:
        more: dict[str, Any] = dict(workers=args.workers, skip_bad_lines=args.skip_bad_lines, on_progress=bar)
        if chat:
            template = ChatTemplate(tokenizer, args.tokenizer_model)
            key = args.json_keys[0]
            summary = preprocess_chat(args.input, args.output_prefix, tokenizer, template, key=key, **more)
        else:
            keys = args.json_keys
            summary = preprocess(
                args.input, args.output_prefix, tokenizer, json_keys=keys, append_eod=args.append_eod, **more
            )
    print(summary.line())
    if summary.skipped:
        count, reasons = summary.skipped, summary.reasons
        print(f"left out {count:,} broken line{'s' * (count != 1)}{':' * bool(reasons)}")
        for reason in reasons:
            print(f"  {in_flags(reason.partition('; ')[0])}")
        if reasons and count > len(reasons):
            print(f"  and {count - len(reasons):,} more")
    if summary.roles:
        named = ", ".join(repr(role[:40]) for role in sorted(summary.roles)[:8])
        print(
            f"note: other roles than system, user and assistant, of which the template decides what is learnt: {named}"
        )
    if summary.lost_calls:
        count, of = summary.lost_calls, summary.documents
        print(f"note: conversations with tool_calls that the template leaves out: {count:,} of {of:,}")
    if summary.unanswered:
        count, of = summary.unanswered, summary.documents
        print(
            f"note: conversations without an answer of the assistant, of which nothing is learnt: {count:,} of {of:,}"
        )
    if tokenizer.eod_id is not None and not args.append_eod and not chat:
        print("note: documents have no end-of-document token; --append-eod adds it")
    for prefix in summary.prefixes:
        print(f"wrote {prefix}.bin and .idx; train with --data-path {prefix}")


if __name__ == "__main__":
    sys.exit(run_tool(main))
