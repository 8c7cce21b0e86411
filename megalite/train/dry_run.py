"""`--dry-run`: everything that can be known and checked before a process or a tensor exists."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from megalite.checkpoint import in_the_way
from megalite.comm import Axis
from megalite.config import Config, dump_yaml
from megalite.data import Tokenizer, build_datasets, is_indexed
from megalite.errors import CheckpointError
from megalite.inventory import stage_layer_ranges
from megalite.launch import check_devices
from megalite.observe import METRICS_FILE, format_table, start_up_table
from megalite.schedule import render_text, simulate
from megalite.train.build import ProgramCache
from megalite.train.param_schedules import resolve_schedules
from megalite.train.run import changed_data
from megalite.train.run_data import resolve_tokenizer
from megalite.train.run_directory import CONFIG_FILE, RunDirectory

WIDEST = 200
HOST = 8
"""A world of so many ranks may be meant for this host; one that is larger, and has more ranks than cores, is not."""
LONGEST_TEXT = 1 << 26
"""Bytes of raw text that are tokenised to check them; the start does it for more."""


def dry_run(config: Config, origins: Mapping[str, str], world_size: int) -> str:
    """The text that `--dry-run` prints. Nothing is written. Raises MegaliteError."""
    config, tokenizer = resolve_tokenizer(config)
    notes = []
    if world_size <= max(HOST, os.cpu_count() or 1):
        config, checked = check_start(config, world_size, tokenizer)
        notes += [] if checked else [" not checked: raw text, which is tokenised at the start"]
    else:
        notes.append(f" not checked: devices, data, --load and --save ({world_size} ranks are not meant for this host)")
    program = ProgramCache(config).full(world_size)
    cuts = stage_layer_ranges(config, program)
    table = start_up_table(config, world_size, program=program, cuts=cuts)
    parts = [dump_yaml(config, origins), format_table(table), f" tokenizer  {tokenizer.describe()}", *notes]
    if program.num_ranks > 1:
        drawing = render_text(simulate(program, batches=2 if program.asynchronous else 1))
        parts += ["", "\n".join(line[:WIDEST] for line in drawing.splitlines())]
    return "\n".join(parts)


def check_start(config: Config, world_size: int, tokenizer: Tokenizer) -> tuple[Config, bool]:
    """What the start of a run checks. Returns the configuration as the start settles it, and whether data were read."""
    check_devices(config.parallel, config.parallel.nprocs or 1)
    if config.checkpoint.save is not None and not config.training.skip_train:
        check_writable(config.checkpoint.save)
    directory = RunDirectory(config, Axis.single("world"))
    start = directory.start()
    config = resolve_schedules(directory.config, world_size, start).config
    if any(path.stat().st_size > LONGEST_TEXT for path in raw_texts(config)):
        return config, False
    training = config.training
    one = int(training.eval_iters > 0)
    with tempfile.TemporaryDirectory(prefix="megalite-") as cache:  # the order of one sample; nothing is kept
        datasets = build_datasets(
            config.data,
            seq_length=config.model.seq_length,
            train_samples=0 if training.skip_train else 1,
            valid_samples=one,
            test_samples=one,
            seed=training.seed,
            tokenizer=tokenizer,
            cache_dir=Path(cache),
            vocab_size=config.model.vocab_size,
        )
    goes_on = start.meta if start is not None and not start.weights_only else {}
    changed_data(goes_on.get("data", {}), datasets.surveys, config)
    return config, True


def raw_texts(config: Config) -> Iterator[Path]:
    """Files named as data that are no .bin/.idx pairs."""
    data = config.data
    for words in (data.data_path, data.train_data_path, data.valid_data_path, data.test_data_path):
        for word in words or ():
            if os.path.isfile(word) and not word.endswith((".bin", ".idx")) and not is_indexed(word):
                yield Path(word)


def check_writable(save: str) -> None:
    """Raises CheckpointError where a run could not write its directory."""
    existing = Path(save).absolute()
    while not os.path.lexists(existing):
        existing = existing.parent
    if not existing.is_dir():
        raise CheckpointError(f"--save={save}: {existing} is a file; choose another --save")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise CheckpointError(f"--save={save}: no permission to write in {existing}; choose another --save")
    problem = in_the_way(save, (CONFIG_FILE, METRICS_FILE))
    if problem:
        raise CheckpointError(problem)
