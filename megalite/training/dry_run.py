"""`--dry-run`: everything that can be known before a rank starts, printed; nothing is trained or written."""

from __future__ import annotations

from collections.abc import Mapping

from megalite.config import Config
from megalite.config.saved import dump_yaml
from megalite.inventory.pipeline import stage_cuts
from megalite.schedule import simulate
from megalite.schedule.render_text import render_text
from megalite.training.build import Schedules
from megalite.training.dataflow import resolve_tokenizer
from megalite.training.startup import format_table, start_up_table

WIDEST = 200


def dry_run(config: Config, origins: Mapping[str, str], world_size: int) -> str:
    """The text that `--dry-run` prints. Raises MegaliteError."""
    config, tokenizer = resolve_tokenizer(config)
    program = Schedules(config).full(world_size)
    cuts = stage_cuts(config, program)
    table = start_up_table(config, world_size, program=program, cuts=cuts)
    parts = [dump_yaml(config, origins), format_table(table), f" tokenizer  {tokenizer.describe()}"]
    if program.num_ranks > 1:
        drawing = render_text(simulate(program, batches=2 if program.asynchronous else 1))
        parts += ["", "\n".join(line[:WIDEST] for line in drawing.splitlines())]
    return "\n".join(parts)
