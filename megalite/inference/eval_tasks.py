"""`--eval-tasks`: tasks of lm-evaluation-harness during a training, at whatever layout trains.

    files --TaskManager--> questions --MegaliteLM--> the stages of the run (train.ModelInUse) --> "task" records

All ranks ask the same questions and answer them together, as in `tools/evaluate_harness.py`. The training's bits do not
change: the harness draws from seeds of its own.
"""

from __future__ import annotations

import logging
import re
from contextlib import redirect_stderr
from io import StringIO
from pathlib import Path
from typing import Any

from megalite.comm import patiently
from megalite.errors import ConfigError
from megalite.extras import optional_package
from megalite.inference.harness import harness_model
from megalite.inference.loaded_model import LoadedModel
from megalite.observe import Record
from megalite.train import ModelInUse

TOKENS_AT_ONCE = 8192


class TaskEvaluator:
    """Measures the model of a run by the tasks of its files. Made and called by all ranks.

    Raises ConfigError where the package is missing, or a file holds no task that the harness can make.
    """

    def __init__(self, use: ModelInUse) -> None:
        self._use, self._settings, mesh = use, use.state.config.logging.eval_tasks, use.mesh
        files = self._settings.eval_task_files
        optional_package(f"`eval_task_files`={' '.join(files)}", "lm_eval")
        mesh.over("dp", "pp")  # communicators are made with the run
        self._names = {name_of(path): path for path in files}
        logging.getLogger("lm_eval").setLevel(logging.ERROR)
        first = patiently(self._made if mesh.world.is_first else None, mesh.world)  # it fills the caches of the data
        self._tasks = patiently(self._made if first is None else None, mesh.world) or first

    def _made(self) -> dict[str, Any]:
        """The harness's tasks by name."""
        tasks: Any = optional_package("`eval_task_files`", "lm_eval.tasks")
        folders = sorted({str(Path(path).resolve().parent) for path in self._names.values()})
        manager, made = tasks.TaskManager(include_path=folders, include_defaults=False), dict[str, Any]()
        for name, path in self._names.items():
            try:
                made |= tasks.get_task_dict([name], manager)
            except Exception as error:
                what = " ".join(f"{type(error).__name__}: {error}".split())[:300]
                raise ConfigError(f"`eval_task_files`={path}: lm_eval cannot make this task ({what})") from None
        return made

    def __call__(self, iteration: int) -> list[Record]:
        """A `"task"` record for each task: its name and its measures. Collective."""
        use, state, config = self._use, self._use.state, self._use.state.config
        engine = config, state.tokenizer, use.mesh, use.channel, state.model.placement, use.parts()
        place = Path(config.checkpoint.save or ".")
        loaded = LoadedModel(*engine, place, iteration, consumed_samples=0, origin=state.origin)
        size = max(config.training.micro_batch_size, TOKENS_AT_ONCE // config.model.seq_length)
        evaluate: Any = optional_package("`eval_task_files`", "lm_eval.evaluator").evaluate
        model, limit = harness_model(loaded, micro_batch_size=size), self._settings.eval_tasks_limit
        with use.whole_weights(), redirect_stderr(StringIO()):  # its bars are not the run's
            results = measures_of(evaluate(model, self._tasks, limit=limit, bootstrap_iters=0, log_samples=False))
        return [{"kind": "task", "iteration": iteration, "task": task, **results[task]} for task in sorted(results)]


def name_of(path: str) -> str:
    """The name of the task in a file of the harness. Raises ConfigError."""
    text = Path(path).read_text(encoding="utf-8", errors="replace")
    found = re.search(r"^task:[ \t]*[\"']?([^\s\"'#]+)", text, re.M)
    if found is None:
        raise ConfigError(f"`eval_task_files`={path}: has no line 'task: NAME'; give task files of lm_eval")
    return found[1]


def measures_of(found: Any) -> dict[str, dict[str, float]]:
    """Task -> measure -> value, of the harness's results. An unfiltered measure has its name alone: `acc`, not
    `acc,none`."""
    return {
        task: {
            name.removesuffix(",none"): value
            for name, value in measures.items()
            if isinstance(value, int | float) and name != "sample_len"
        }
        for task, measures in found["results"].items()
    }
