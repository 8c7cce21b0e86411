"""Pretrains a GPT: `python pretrain_gpt.py --config configs/quickstart.yaml [--flag value ...]`.

One process, `--nprocs N` local ranks, or whatever torchrun, SLURM or mpirun has started.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
from contextlib import AbstractContextManager, nullcontext
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from megalite.extras import require_core

require_core()

from megalite.config import Config, Parsed, ignored_line, meant_for_this_host, parse_with_origins
from megalite.errors import MegaliteError, in_flags
from megalite.events import EventHandler, share_facts
from megalite.launch import (
    INTERRUPTED,
    EndAtOnce,
    LaunchEnvironment,
    advise_threads,
    end_launcher,
    launch,
    log_to_stdout,
    print_error,
    print_interrupted,
    read_environment,
    replace_handlers,
)
from megalite.streams import keep_streams

if TYPE_CHECKING:
    from megalite.comm import World
    from megalite.config import Offer


def main(argv: list[str]) -> int:
    """Parses, launches, trains; returns the exit status."""
    place = LaunchEnvironment()
    try:
        place = read_environment()
        started = place.size if place.launcher else None
        parsed = parse_with_origins(argv, world_size=started, local_size=place.local_size, read_offer=read_offer)
    except MegaliteError as error:
        if place.rank == 0:
            print_error(error)
        if place.local_rank == 0:
            end_launcher(place)
        return error.exit_code
    if not parsed.config.training.exit_signal_handler:
        replace_handlers(signal.SIG_DFL)
    configure_logging(place.rank)
    if (line := ignored_line(parsed.ignored)) is not None:
        logging.getLogger("megalite").info(line)
    for warning in parsed.warnings if place.rank == 0 else ():
        logging.getLogger("megalite").warning(warning)
    here = not parsed.config.training.dry_run or meant_for_this_host(parsed.ranks)
    if place.rank == 0 and here and (advice := advise_threads(parsed.config, place)) is not None:
        logging.getLogger("megalite").warning(advice)
    if parsed.config.training.dry_run:
        return print_dry_run(parsed, place)
    left_out = Path(parsed.config.checkpoint.run_folder or ".") / "left_out.txt"
    command, save = parsed.config.logging.on_event, parsed.config.checkpoint.save
    with nullcontext() if command is None else EventHandler(command, {"save": save}):
        saves = save is not None
        return launch(parsed.config, train, place, ranks=parsed.ranks, left_out=left_out, saves=saves)


def read_offer(load: str, ckpt_step: int | None, trust_pickle: bool, vocab_size: int | None) -> Offer | None:
    """What the checkpoint at `--load` says about model and tokenizer: values for flags that are not given. The parser
    asks only if flags or the directory call for it."""
    from megalite.train import offer_of  # torch comes with it

    return offer_of(load, ckpt_step, trust_pickle, vocab_size)


def print_dry_run(parsed: Parsed, place: LaunchEnvironment) -> int:
    """`--dry-run`: prints what would be run."""
    from megalite.train import dry_run

    try:
        text = dry_run(parsed.config, parsed.origins, parsed.ranks, unseen_gpu)
    except MegaliteError as error:
        print_error(error)
        return error.exit_code
    if place.rank == 0:
        print(in_flags(text))
    return 0


def train(config: Config, world: World) -> int:
    """One rank's whole run."""
    from megalite.train import run_training  # torch comes with it: not before the configuration is known to be right

    configure_logging(world.rank)
    share_facts(rank=world.rank, world_size=world.size)
    measures = import_module("megalite.inference").TaskEvaluator if config.logging.eval_tasks.eval_task_files else None
    return run_training(config, world, measures, unseen_gpu)


def unseen_gpu(size: int) -> AbstractContextManager[object]:
    """A GPU without values, on which blocks say what they keep."""
    gpu: AbstractContextManager[object] = import_module("megalite.rehearsal").unseen(size)
    return gpu


def configure_logging(rank: int) -> None:
    """Rank 0 logs what happens, other ranks warnings and errors only; one line a message."""
    if rank == 0:
        log_to_stdout(logging.INFO)
    else:
        log_to_stdout(logging.WARNING, f" rank {rank}: ")


def exit_now(status: int) -> NoReturn:
    """Ends the process without the interpreter's clean-up, which takes a torch process a second of CPU time (a minute
    on a starved machine). Whatever must be kept is on disk by now."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(status)


if __name__ == "__main__":
    keep_streams(quiet=not {"-h", "--help"}.isdisjoint(sys.argv))
    EndAtOnce().install()
    try:
        exit_now(main(sys.argv[1:]))
    except KeyboardInterrupt:
        print_interrupted()
        exit_now(INTERRUPTED)
