"""From the loop to the kernel that updates the weights it is a short way, for whoever reads or debugs it."""

from __future__ import annotations

import traceback
from pathlib import Path
from typing import Any
from unittest.mock import patch

import megalite
from megalite.comm.world import World
from megalite.config.cli import parse
from megalite.optim import adamw
from megalite.testing import run_single
from megalite.train.run import open_run

PRODUCT = Path(megalite.__file__).parent
FLAGS = (
    "--num-layers 1 --hidden-size 16 --num-attention-heads 2 --seq-length 8 --vocab-size 61 --micro-batch-size 1 "
    "--train-iters 1 --lr 1e-3 --mock-data --tokenizer-type NullTokenizer --eval-iters 0 --num-workers 0 "
    "--no-exit-signal-handler"
)


def body_way(world: World) -> list[tuple[str, str]]:
    """(file, function) of our calls from `train_step` to torch's Adam."""
    ways: list[list[tuple[str, str]]] = []
    kernel = adamw.adamw_kernel

    def seen(*tensors: Any, **settings: Any) -> None:
        stack = [(Path(frame.filename), frame.name) for frame in traceback.extract_stack()]
        ways.append([(str(path), name) for path, name in stack if path.is_relative_to(PRODUCT)])
        kernel(*tensors, **settings)

    with open_run(parse(FLAGS.split(), world_size=1), world) as run, patch.object(adamw, "adamw_kernel", seen):
        run.trainer.train_step(drain=True)
    way = ways[0]
    return way[[name for _, name in way].index("train_step") :]


def test_from_the_loop_to_the_kernel_are_eight_calls_in_four_files() -> None:
    way = run_single(body_way)
    assert way[-1][0].endswith("optim/adamw.py"), way
    assert len(way) <= 8 and len({file for file, _ in way}) <= 4, "\n".join(f"{file}: {name}" for file, name in way)
