"""A profile names every action of the program, and nothing is marked without one."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import torch
from equivalence.layouts import TINY

from megalite.observe.hooks import Hooks
from megalite.observe.observers import ProfileHook
from megalite.parallel.pipeline import Events, Executor
from megalite.schedule import Action, BatchRange, build_program, lower
from tests.cli.typed import run_warm
from tests.unit.observe.fake_trainer import FakeTrainer, tiny_config

RUN = "--nprocs 2 --pipeline-model-parallel-size 2 --num-layers 2 --micro-batch-size 2 --lr-warmup-iters 0"
NAMES = {"F": "forward", "B": "backward", "SEND_F": "send forward", "RECV_F": "receive forward"}
NAMES |= {"SEND_B": "send backward", "RECV_B": "receive backward", "REDUCE": "reduce", "NORM": "norm", "STEP": "step"}


def test_the_trace_of_a_pipeline_names_every_action_of_the_program(tmp_path: Path) -> None:
    """Iterations 2 and 3 of 1F1B over two ranks with four micro-batches: spans of the trace against the program."""
    tiny = [*TINY]
    tiny[tiny.index("--train-iters") + 1] = "3"
    profile = ["--profile", "step_start=2", "step_end=4", "ranks=0", "1", "--save", str(tmp_path)]
    done = run_warm("pretrain_gpt.py", *tiny, *RUN.split(), *profile)
    assert done.returncode == 0, done.stderr
    assert done.stderr == "" and "profiler_start" not in done.stdout
    program = lower(build_program("1f1b", 2, 4))
    for rank in range(2):
        trace = json.loads((tmp_path / "profile" / f"trace_rank{rank}_iterations_2-3.json").read_text())
        names = [event["name"] for event in trace["traceEvents"] if event.get("cat") == "user_annotation"]
        found = Counter(name for name in names if name.startswith(tuple(NAMES.values())))
        expected: Counter[str] = Counter()
        for iteration in (1, 2):
            for action in program.actions_for_batch(rank, BatchRange(iteration, 4 * iteration, 4, 0, True)):
                number = "update " if action.kind in ("REDUCE", "NORM", "STEP") else "mb"
                peer = f" {'to' if 'SEND' in action.kind else 'from'} pp{1 - rank}" if "_" in action.kind else ""
                expected[f"{NAMES[action.kind]} s{action.stage} {number}{action.microbatch}{peer}"] += 1
        assert f"forward s{rank} mb7" in expected
        assert found == expected


def test_without_a_profile_nothing_is_marked(tmp_path: Path) -> None:
    """The hook marks the executor's actions while its window is open, and not before and after."""
    executor = Executor(0, {}, build_program("1f1b", 1, 1).placement, None, Events())  # type: ignore[arg-type]  # no messages
    trainer = FakeTrainer(tiny_config(profile_step_start=2, profile_step_end=3))
    hooks, seen = Hooks([ProfileHook(tmp_path, executor)]), []
    hooks.on_start(trainer)
    for _ in range(3):
        seen.append(executor.mark)
        list(executor.run([Action("STEP", 0, trainer.iteration)], None))  # type: ignore[arg-type]  # no micro-batches
        hooks.after_step(trainer, trainer.step())
    assert seen == [None, torch.profiler.record_function, None]
    trace = json.loads((tmp_path / "trace_rank0_iterations_2-2.json").read_text())
    names = [event["name"] for event in trace["traceEvents"] if event.get("cat") == "user_annotation"]
    assert [name for name in names if name.startswith("step")] == ["step s0 update 1"]
