"""Run tasks of lm-evaluation-harness on a checkpoint: `pip install ".[eval]"` first.

python tools/evaluate_harness.py --load DIR --tasks lambada_openai,hellaswag --limit 100
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # a clone works without being installed

from command_line import MOST, ToolParser, check_numbers, run_tool
from layout_flags import add_layout_flags, add_model_flags, loaded_model, run_on_ranks
from megalite.errors import ConfigError
from megalite.extras import optional_package

if TYPE_CHECKING:
    from megalite.comm import World


def parse(argv: list[str]) -> argparse.Namespace:
    """Read the flags. Raises ConfigError."""
    parser = ToolParser("Run tasks of lm-evaluation-harness on a checkpoint.")
    add_model_flags(parser)
    parser.add_argument("--tasks", required=True, help="names of tasks, comma between them")
    parser.add_argument(
        "--include-path", metavar="DIR", help="folder with task files of your own; lm_eval runs programs that they name"
    )
    parser.add_argument("--num-fewshot", type=int, help="examples in front of each question; unset: the task's own")
    parser.add_argument("--limit", type=int, help="questions of each task; unset: all")
    parser.add_argument("--micro-batch-size", type=int, default=16, help="questions scored at once")
    add_layout_flags(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    flags = parser.parse_args(argv)
    check_numbers(flags, num_fewshot=(0, MOST), limit=(1, MOST), micro_batch_size=(1, 1 << 20), ckpt_step=(0, MOST))
    return flags


def main(argv: list[str]) -> int:
    """Start the ranks."""
    flags = parse(argv)
    optional_package(f"--tasks={flags.tasks}", "lm_eval")  # before the model is read
    return run_on_ranks(evaluate_and_print, flags)


def evaluate_and_print(flags: argparse.Namespace, world: World) -> None:
    """Every rank asks the same questions, and all of them answer together; the first prints each task's measures."""
    from megalite.inference import harness_model

    loaded = loaded_model(flags, world)
    model = harness_model(loaded, micro_batch_size=flags.micro_batch_size)
    results = measure(model, flags)
    if not world.is_first:
        return
    if flags.json:
        print(json.dumps(results))
        return
    for task, measures in results.items():
        for name, value in measures.items():
            print(f" {task}  {name}  {value}")


def measure(model: Any, flags: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Task -> measure -> value."""
    import lm_eval
    from lm_eval.tasks import TaskManager

    from megalite.inference import measures_of

    manager, tasks = TaskManager(include_path=flags.include_path), flags.tasks.split(",")
    unknown = [task for task in tasks if not manager.match_tasks([task])]
    if unknown:
        raise ConfigError(
            f"--tasks={flags.tasks}: lm_eval knows no {', '.join(unknown)}; `lm_eval ls tasks` lists them, "
            "--include-path adds your own"
        )
    found = lm_eval.simple_evaluate(
        model=model, tasks=tasks, num_fewshot=flags.num_fewshot, limit=flags.limit, task_manager=manager
    )
    return measures_of(found)


if __name__ == "__main__":
    sys.exit(run_tool(main))
