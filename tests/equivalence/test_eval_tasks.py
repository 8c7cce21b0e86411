"""`--eval-tasks`: the same answers at every layout and as from the checkpoint, and a training that does not notice.

With `eval_tasks_interval` and `eval_tasks_limit`.

The harness is a stand-in that asks its questions as the harness does; where the package is, the real one is tried too.
"""

from __future__ import annotations

import importlib.util
import json
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch

from equivalence.layouts import saved_tensors
from megalite.comm.world import World
from megalite.config.cli import parse
from megalite.inference import TaskEvaluator, load_for_inference
from megalite.inference.harness import HarnessScorer
from megalite.testing import run_ranks
from megalite.train.run import run_training
from tools.report import read_run

RUN = (
    "--hidden-size 32 --num-attention-heads 4 --num-layers 4 --seq-length 16 --global-batch-size 8 --train-iters 3 "
    "--lr 1e-2 --fp64 --make-vocab-size-divisible-by 8 --eval-iters 0 --num-workers 0 --no-exit-signal-handler "
    "--log-interval 1 --staleness-correction none --save-interval 2 --tokenizer-type ByteTokenizer --mock-data"
).split()
QUESTIONS = [("a b", " c"), ("so", " it goes"), ("one two three", " four"), ("x", "y"), ("all the", " rest")]
LAYOUTS = {
    "one process": (1, "--micro-batch-size", "2"),
    "tp2, sequence parallel": (
        2,
        "--micro-batch-size",
        "1",
        "--tensor-model-parallel-size",
        "2",
        "--sequence-parallel",
    ),
    "zero3": (2, "--micro-batch-size", "1", "--zero-stage", "3"),
    "2bw": (2, "--micro-batch-size", "1", "--pipeline-model-parallel-size", "2", "--pipeline-schedule", "2bw"),
    "cp2": (2, "--micro-batch-size", "1", "--context-parallel-size", "2"),
}


class Request:
    def __init__(self, *args: Any) -> None:
        self.args = args


class Manager:
    def __init__(self, include_path: list[str], include_defaults: bool) -> None:
        assert not include_defaults, "none of the thousands of tasks that the package brings"
        self.known = {
            json.loads(file.read_text().split("# ")[1])["name"] for f in include_path for file in Path(f).glob("*.yaml")
        }


def evaluate(model: Any, tasks: dict[str, Any], *, limit: int | None, bootstrap_iters: int, log_samples: bool) -> dict:
    print("a bar", file=sys.stderr)
    asked = QUESTIONS[:limit]
    scores = model.loglikelihood([Request(*pair) for pair in asked])
    texts = model.generate_until([Request(context, {"until": [], "max_gen_toks": 3}) for context, _ in asked])
    total = sum(score for score, _ in scores)
    measures = {"alias": "x", "sample_len": len(asked), "total,none": total, "length,strict": sum(map(len, texts))}
    return {"results": {name: measures for name in tasks}}


def stand_in() -> None:
    package, model, tasks, evaluator = map(types.ModuleType, ("lm_eval", "lm_eval.api.model", "lm_eval.tasks", "e"))

    def get_task_dict(names: list[str], manager: Manager) -> dict[str, object]:
        if not set(names) <= manager.known or "broken" in names:
            raise ValueError("no such\n data")
        return {name: object() for name in names}

    model.LM = type("LM", (), {})  # type: ignore[attr-defined]
    tasks.TaskManager, tasks.get_task_dict = Manager, get_task_dict  # type: ignore[attr-defined]
    evaluator.evaluate = evaluate  # type: ignore[attr-defined]
    sys.modules |= {"lm_eval": package, "lm_eval.api": types.ModuleType("api"), "lm_eval.api.model": model}
    sys.modules |= {"lm_eval.tasks": tasks, "lm_eval.evaluator": evaluator}


def measured(world: World, argv: list[str]) -> int:
    stand_in()
    return run_training(parse(argv, world_size=world.size), world, TaskEvaluator)


def plain(world: World, argv: list[str]) -> int:
    return run_training(parse(argv, world_size=world.size), world)


def task_file(folder: Path, name: str = "mine") -> str:
    path = folder / f"{name}.yaml"
    path.write_text(f'task: {name}  # {{"name": "{name}"}}\n')
    return str(path)


def arguments(folder: Path, save: str, *layout: str) -> list[str]:
    return [*RUN, "--save", str(folder / save), "--data-cache-path", str(folder / "cache"), *layout]


@pytest.mark.in_turn
@pytest.mark.parametrize("name", LAYOUTS)
def test_answers_are_those_of_the_checkpoint_and_cost_no_bit(name: str, tmp_path: Path) -> None:
    ranks, *layout = LAYOUTS[name]
    flags = ["--eval-tasks", f"files={task_file(tmp_path)}", "interval=2", "limit=4"]
    run_ranks(measured, ranks, [*arguments(tmp_path, "run", *layout), *flags])
    run_ranks(plain, ranks, arguments(tmp_path, "plain", *layout))
    expected = saved_tensors(tmp_path / "plain")
    found = saved_tensors(tmp_path / "run")
    assert all(torch.equal(found[tensor], value) for tensor, value in expected.items())
    records = [record for record in read_run(str(tmp_path / "run")) if record["kind"] == "task"]
    assert [(record["iteration"], record["task"]) for record in records] == [(2, "mine"), (3, "mine")]
    for record in records:
        scorer = HarnessScorer(load_for_inference(tmp_path / "run", ckpt_step=record["iteration"], device="cpu"))
        total = sum(score for score, _ in scorer.loglikelihood(QUESTIONS[:4]))
        assert record["total"] == pytest.approx(total, abs=1e-11)
        texts = scorer.generate_until([(context, {"max_gen_toks": 3}) for context, _ in QUESTIONS[:4]])
        assert record["length,strict"] == sum(map(len, texts)) and "sample_len" not in record


def refused(world: World, argv: list[str]) -> str:
    stand_in()
    try:
        run_training(parse(argv, world_size=world.size), world, TaskEvaluator)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def test_what_cannot_be_asked_is_one_line_at_the_start(tmp_path: Path) -> None:
    broken, empty = task_file(tmp_path, "broken"), tmp_path / "empty.yaml"
    empty.write_text('group: x  # {"name": "x"}\n')
    cases = {broken: "lm_eval cannot make this task (ValueError: no such data)", str(empty): "has no line 'task: NAME'"}
    for path, problem in cases.items():
        argv = arguments(tmp_path, "run", "--micro-batch-size", "1", "--eval-tasks", f"files={path}")
        for told in run_ranks(refused, 2, argv):
            assert told.partition(": ")[2].startswith(f"--eval-task-files={path}: {problem}"), told


@pytest.mark.skipif(importlib.util.find_spec("lm_eval") is None, reason="lm_eval is not installed")
@pytest.mark.landing
def test_the_real_harness_asks_a_task_of_a_local_file(tmp_path: Path) -> None:
    rows = [{"question": f"alpha {n}", "choices": ["beta", "gamma"], "answer": n % 2} for n in range(6)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    path = tmp_path / "mine.yaml"
    path.write_text(
        "task: mine\ndataset_path: json\ndataset_kwargs:\n  data_files:\n"
        f"    test: {tmp_path}/rows.jsonl\n  cache_dir: {tmp_path}/hf\n"
        "output_type: multiple_choice\ntest_split: test\ndoc_to_text: '{{question}}'\ndoc_to_choice: '{{choices}}'\n"
        "doc_to_target: answer\nmetric_list:\n  - metric: acc\n    aggregation: mean\n    higher_is_better: true\n"
    )
    argv = [*arguments(tmp_path, "run", "--micro-batch-size", "1"), "--eval-tasks", f"files={path}"]
    run_ranks(really_measured, 2, argv, timeout=200)
    (record,) = [record for record in read_run(str(tmp_path / "run")) if record["kind"] == "task"]
    scorer = HarnessScorer(load_for_inference(tmp_path / "run", device="cpu"))
    right = 0
    for row in rows:
        scores = scorer.loglikelihood([(row["question"], f" {choice}") for choice in row["choices"]])
        right += max((score, -n) for n, (score, _) in enumerate(scores))[1] == -row["answer"]
    assert record["acc"] == pytest.approx(right / len(rows))


def really_measured(world: World, argv: list[str]) -> int:
    return run_training(parse(argv, world_size=world.size), world, TaskEvaluator)
