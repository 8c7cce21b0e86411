"""Measure how well a checkpoint predicts text.

python tools/evaluate.py --load DIR --text-file FILE                    loss, ppl, bits per byte, word ppl
python tools/evaluate.py --load DIR --data-path PREFIX --split valid    a .bin/.idx pair, a text or JSONL file
python tools/evaluate.py --load DIR --text-file wiki.valid.tokens --task wikitext --overlap 32
python tools/evaluate.py --load DIR --text-file lambada.jsonl --task lambada

`--nprocs` and sizes of parallel axes, as in training, spread the model and the samples over ranks.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # a clone works without being installed

from command_line import MOST, ToolParser, check_file, check_numbers, run_tool
from layout_flags import add_layout_flags, add_model_flags, loaded_model, run_on_ranks, tell_front
from megalite.errors import ConfigError, in_flags
from megalite.progress import LINES, OnProgress, ProgressBar, no_progress

if TYPE_CHECKING:
    from megalite.comm import World
    from megalite.config import Config
    from megalite.inference import LoadedModel
    from megalite.observe import Record

#: Names and formats of what is printed, in this order.
SHOWN = (
    ("loss", "lm loss", ".6f"),
    ("ppl", "ppl", ".4f"),
    ("bits_per_byte", "bits per byte", ".4f"),
    ("word_ppl", "word ppl", ".6g"),
    ("accuracy", "last-word accuracy", ".4f"),
    ("last_word_ppl", "last-word ppl", ".4f"),
    ("num_tokens", "tokens", ",d"),
    ("num_passages", "passages", ",d"),
)
#: Of documents in a window, as in training.
MASKS = {
    "reset-attention-mask": "a token sees only its own document",
    "reset-position-ids": "positions begin again at 0 after an end of document",
    "eod-mask-loss": "no loss at positions whose input is an end of document",
}
LONGEST = 1e6  # longer numbers are printed as powers of ten


def parse(argv: list[str]) -> argparse.Namespace:
    """Read the flags. Raises ConfigError."""
    parser = ToolParser("Measure how well a checkpoint predicts text.")
    add_model_flags(parser)
    parser.add_argument("--data-path", metavar="PATH", help=".bin/.idx prefix, text file or JSONL file")
    parser.add_argument("--text-file", metavar="FILE", help="text, scored as one document; JSONL: as --data-path")
    parser.add_argument(
        "--split",
        help="of --data-path: train, valid or test by the run's own weights, or weights A,B,C of which the second "
        "part is scored; unset: the whole file",
    )
    parser.add_argument("--seq-length", type=int, metavar="N", help="tokens of a window; unset: the model's own")
    for name, meaning in MASKS.items():
        parser.add_argument(
            f"--{name}", action=argparse.BooleanOptionalAction, help=f"of --data-path: {meaning}; unset: as trained"
        )
    parser.add_argument("--data-cache-path", metavar="DIR", help="where a tokenised --data-path is kept")
    parser.add_argument(
        "--task",
        choices=("text", "wikitext", "lambada"),
        default="text",
        help="of --text-file: wikitext undoes the spacing of WikiText; lambada takes a passage from each line (or "
        "field 'text' of JSONL) and asks for its last word",
    )
    parser.add_argument("--overlap", type=int, default=0, help="tokens of context that windows of --text-file share")
    parser.add_argument("--micro-batch-size", type=int, help="sequences scored at once; unset: about 8,192 tokens")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    add_layout_flags(parser)
    flags = parser.parse_args(argv)
    check_numbers(flags, micro_batch_size=(1, 1 << 20), seq_length=(1, MOST), overlap=(0, MOST), ckpt_step=(0, MOST))
    problems = problems_of(flags)
    if problems:
        raise ConfigError(problems)
    check_file("--text-file", flags.text_file)
    if flags.task == "text" and is_jsonl(flags.text_file):
        flags.data_path, flags.text_file = flags.text_file, None
    return flags


def is_jsonl(path: str | None) -> bool:
    """Whether each line of a text file is a document of its own, as training takes it."""
    from megalite.data import JSONL_SUFFIXES

    return path is not None and path.endswith(JSONL_SUFFIXES)


def problems_of(flags: argparse.Namespace) -> list[str]:
    """What flags cannot be together."""
    problems = []
    if (flags.data_path is None) == (flags.text_file is None):
        problems.append("--data-path, --text-file: give one of the two")
    if flags.text_file is not None and flags.split is not None:
        problems.append(f"--split={flags.split}: belongs to --data-path; drop it")
    if flags.text_file is not None:
        problems += [f"{flag}: belongs to --data-path; drop it" for flag in asked_masks(flags).values()]
    if flags.data_path is not None and flags.task != "text":
        problems.append(f"--task={flags.task}: reads a text file; give it by --text-file")
    if flags.task == "wikitext" and is_jsonl(flags.text_file):
        problems.append(f"--text-file={flags.text_file}: --task=wikitext reads running text, not JSONL; drop --task")
    if flags.overlap and (flags.data_path is not None or flags.task == "lambada" or is_jsonl(flags.text_file)):
        problems.append(f"--overlap={flags.overlap}: belongs to --text-file as running text; drop it")
    return problems


def asked_masks(flags: argparse.Namespace) -> dict[str, str]:
    """Those of MASKS that are given -> the flag as it was typed."""
    values = {name.replace("-", "_"): (name, getattr(flags, name.replace("-", "_"))) for name in MASKS}
    return {key: f"--{'' if on else 'no-'}{name}" for key, (name, on) in values.items() if on is not None}


def changed_by(flags: argparse.Namespace) -> Callable[[Config], Config]:
    """What the flags make of the configuration of a model."""
    from megalite.inference import as_measured

    masks = {name: getattr(flags, name) for name in asked_masks(flags)}
    return partial(as_measured, seq_length=flags.seq_length, masks=masks)


def main(argv: list[str]) -> int:
    """Start the ranks."""
    return run_on_ranks(evaluate_and_print, parse(argv))


def evaluate_and_print(flags: argparse.Namespace, world: World) -> None:
    """Every rank: load, evaluate; the first prints."""
    from megalite.config import new_positions

    world.report_phase("loading")
    loaded = loaded_model(flags, world, changed_by(flags))
    if flags.seq_length is not None and world.is_first:
        for line in new_positions(None, loaded.config.model):
            print(f"note: {in_flags(line)}", file=sys.stderr, flush=True)
    if world.is_first and (seen := seen_in_training(flags, loaded.config)):
        print(f"note: {seen}", file=sys.stderr, flush=True)
    if flags.text_file is not None:
        tell_front(loaded, world)
    world.report_phase("evaluating")
    unit = "passages" if flags.task == "lambada" else "samples"
    with ProgressBar("evaluating", unit, lines=LINES if world.is_first else 0) as bar:
        record = evaluate(loaded, flags, bar)
    trained = not loaded.is_folder
    record |= {"iteration": loaded.iteration if trained else None, "checkpoint": str(loaded.path)}
    if not world.is_first:
        return
    if flags.json:
        print(json.dumps(record))
        return
    print(f" {loaded.path}, iteration {loaded.iteration}" if trained else f" {loaded.path}")
    show(record)


def seen_in_training(flags: argparse.Namespace, config: Config) -> str | None:
    """What is said of a whole text that the run was trained on, by the paths in its configuration."""
    if flags.split is not None:
        return None
    path = flags.text_file or flags.data_path
    known = (*config.data.data_path, *config.data.train_data_path)
    if os.path.realpath(path) not in {os.path.realpath(word) for word in known}:
        return None
    held_out = f"; --data-path {path} --split valid scores what was held out" * bool(config.data.data_path)
    return f"{path}: this model was trained on it, so the score says less of other texts{held_out}"


def show(record: Record) -> None:
    """Prints how it was measured, and what."""
    if "window" in record:
        print(f" {'scored':<18} {manner(record)}{of_split(record)}")
    for key, name, form in SHOWN:
        if key in record:
            huge = form != ",d" and record[key] >= LONGEST  # of a model that has learnt little: digits say nothing
            print(f" {name:<18} {format(record[key], '.3e' if huge else form)}")


def manner(record: Record) -> str:
    """How samples were cut and what they see, in words."""
    said = f"in windows of {record['window']:,} tokens"
    if "num_conversations" in record:
        cut = f"; {record['cut']:,} are longer and cut" if record["cut"] else ""
        return f"{record['num_conversations']:,} conversations, each apart from the others, {said}{cut}"
    if "apart" not in record:
        return said
    begin = ", positions of each from 0" * record["reset_position_ids"]
    ends = ", no loss behind the end of one" * record["eod_mask_loss"]
    return f"{said}, documents {'apart' if record['apart'] else 'of a window see each other'}{begin}{ends}"


def of_split(record: Record) -> str:
    """Which part of the data was scored, where it was one."""
    if "split" not in record:
        return ""
    default = " (default; give --split A,B,C, whose second part is scored)" if record["default_split"] else ""
    return f"; part {record['part']} of split {record['split']}{default}"


def evaluate(loaded: LoadedModel, flags: argparse.Namespace, on_progress: OnProgress = no_progress) -> Record:
    """Do what the flags ask for. Raises MegaliteError."""
    from megalite.data import Conversations, read_text
    from megalite.inference import (
        detokenize_wikitext,
        how_scored,
        last_word_accuracy,
        open_data_path,
        read_passages,
        score_source,
        score_text,
    )

    if flags.data_path is not None:
        source = open_data_path(loaded, flags.data_path, split=flags.split, cache_path=flags.data_cache_path)
        if isinstance(source, Conversations) and (given := asked_masks(flags)):
            raise ConfigError([f"{flag}: conversations are scored each apart; drop it" for flag in given.values()])
        size = flags.micro_batch_size
        score = score_source(loaded, source, micro_batch_size=size, on_progress=on_progress)
        return score.record() | how_scored(loaded, source, flags.split)
    path = Path(flags.text_file)
    if flags.task == "lambada":
        return last_word_accuracy(loaded, read_passages(path), on_progress=on_progress)
    text = read_text(str(path), str(path))
    words = len(text.split())
    if flags.task == "wikitext":
        text = detokenize_wikitext(text)
    score = score_text(
        loaded,
        text,
        num_words=words,
        overlap=flags.overlap,
        micro_batch_size=flags.micro_batch_size,
        on_progress=on_progress,
    )
    return score.record() | how_scored(loaded, None)


if __name__ == "__main__":
    sys.exit(run_tool(main))
