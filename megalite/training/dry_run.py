"""`--dry-run`: everything that can be known before a rank starts, printed; nothing is trained or written."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

from megalite.checkpoint.meta import Meta
from megalite.comm.launch import check_devices
from megalite.comm.mesh import Axis
from megalite.config import Config
from megalite.config.saved import dump_yaml
from megalite.inventory.pipeline import stage_cuts
from megalite.schedule import simulate
from megalite.schedule.render_text import render_text
from megalite.training.build import Schedules
from megalite.training.dataflow import open_datasets, resolve_tokenizer
from megalite.training.directory import RunDirectory
from megalite.training.param_schedules import settle
from megalite.training.run import changed_data
from megalite.training.startup import format_table, start_up_table

WIDEST = 200
HOST = 8  # a world of so many ranks may be meant for this host, a larger one than its cores is not


def dry_run(config: Config, origins: Mapping[str, str], world_size: int) -> str:
    """The text that `--dry-run` prints. Raises MegaliteError."""
    config, tokenizer = resolve_tokenizer(config)
    here = world_size <= max(HOST, os.cpu_count() or 1)
    if here:
        check_devices(config.parallel, world_size)
    directory = RunDirectory(config, Axis.single("world"))
    start = directory.start()
    config = settle(directory.config, world_size, start).config
    goes_on = start.meta if start is not None and not start.weights_only else {}
    began_with = Meta(goes_on, str(start.path) if start is not None else "").integers("train_requests")
    with tempfile.TemporaryDirectory(prefix="megalite-") as cache:  # nothing is kept
        datasets = open_datasets(config, world_size, tokenizer, began_with=began_with, cache=Path(cache))
    changed_data(goes_on.get("data", {}), datasets.surveys, config)
    program = Schedules(config).full(world_size)
    cuts = stage_cuts(config, program)
    table = start_up_table(config, world_size, program=program, cuts=cuts)
    parts = [dump_yaml(config, origins), format_table(table), f" tokenizer  {tokenizer.describe()}"]
    if not here:
        parts.append(f" not checked: devices ({world_size} ranks are not meant for this host)")
    if program.num_ranks > 1:
        drawing = render_text(simulate(program, batches=2 if program.asynchronous else 1))
        parts += ["", "\n".join(line[:WIDEST] for line in drawing.splitlines())]
    return "\n".join(parts)
