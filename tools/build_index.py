"""Tokenise and index the data of a run before it is launched, so that no rank of a large job waits for another.

python tools/build_index.py --config FILE.yaml [--flag value ...] --world-size N

takes every flag of pretrain_gpt.py and builds what a run of N ranks with these flags reads from `--data-cache-path`.
A folder that all nodes see must be named there (or by `--save`).
"""

from __future__ import annotations

import logging
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # a clone works without being installed

from command_line import run_tool
from megalite.config import parse
from megalite.data import cache_directory
from megalite.errors import ConfigError
from megalite.launch import log_to_stdout

WORLD_SIZE = ("--world-size", "--world_size")


def world_size_of(argv: list[str]) -> tuple[int, list[str]]:
    """Value of `--world-size` (1 if it is not there) and the other flags. Raises ConfigError."""
    rest, value = [], "1"
    words = iter(argv)
    for word in words:
        name, equals, given = word.partition("=")
        if name in WORLD_SIZE:
            value = given if equals else next(words, "")
        else:
            rest.append(word)
    if not value.isdigit() or int(value) < 1:
        raise ConfigError(f"--world-size={value}: must be the number of ranks of the run, 1 or more")
    return int(value), rest


def main(argv: list[str]) -> None:
    """Raises MegaliteError."""
    if not argv or "-h" in argv or "--help" in argv:
        print(__doc__)
        return
    world, flags = world_size_of(argv)
    from megalite.train import offer_of, open_datasets, resolve_tokenizer  # torch comes with it

    log_to_stdout(logging.INFO, "")
    config = parse(flags, world_size=world, read_offer=offer_of)
    started = time.monotonic()
    config, tokenizer = resolve_tokenizer(config)
    datasets = open_datasets(config, world, tokenizer)
    print(tokenizer.describe())
    named: list[tuple[str, Any]] = [(f"valid ({name})", part) for name, part in datasets.valid_sets.items()]
    valid = named or [("valid", datasets.valid)]
    for name, dataset in (("train", datasets.train), *valid, ("test", datasets.test)):
        print(f"{name}: {len(dataset):,} samples" if dataset is not None else f"{name}: not used")
    where = cache_directory(config.data.data_cache_path, config.checkpoint.run_folder)
    print(f"built in {time.monotonic() - started:.1f} s; kept in {where}")


if __name__ == "__main__":
    sys.exit(run_tool(main))
