"""`--embedding-offload`: weights, moments and losses are those of a run without it, bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from equivalence.layouts import RAMPS, TINY, Layout, compare, saved_tensors, train
from megalite.comm.world import World
from megalite.config import parse
from megalite.planner.model_states import state_bytes
from megalite.testing import run_ranks
from megalite.train.run import open_run
from tests.held_bytes import held_bytes

MODEL = ("--num-layers", "2", "--micro-batch-size", "1", "--untie-embeddings-and-output-weights")
SMALL = ("--offload", "embedding", "cache_rows=16")
"""As many rows as a micro-batch has tokens, of a vocabulary of 61: rows come and go all the time."""

PP = "--pipeline-model-parallel-size 2"
BITWISE = {
    "fp32": ("--no-fp64", 1),
    "dp, ramps": (f"--no-fp64 --hidden-dropout 0.1 --zero-stage 1 {RAMPS[0]}", 2),
    "1f1b": (PP, 2),
    "tp": ("--tensor-model-parallel-size 2 --sequence-parallel", 2),
    "halves": ("--tensor-model-parallel-size 2 --micro-batch-size 2 --tp-comm-overlap", 2),
    "cp": ("--context-parallel-size 2", 2),
    "bf16": ("--no-fp64 --bf16 --grad-reduce-in-bf16", 1),
    "16 bits": ("--no-fp64 --optimizer-state exp_avg_dtype=bf16 exp_avg_sq_dtype=fp16 --num-workers 2", 1),
    "skips": ("--no-fp64 --fp16 --loss-scaling initial=8388608 hysteresis=1", 1),
    "sgd": ("--optimizer sgd", 1),
    "lion": ("--optimizer lion --lr 1e-3", 1),
    "muon": ("--optimizer muon --offload optimizer", 1),
    "soap": ("--optimizer soap --optimizer-args soap_eps=1e-5", 1),
    "zb-v": (f"--num-layers 4 {PP} --pipeline-schedule zb-v", 2),
    "chimera": (f"{PP} --pipeline-schedule chimera", 2),
    "dualpipe-v": (f"--num-layers 4 {PP} --pipeline-schedule dualpipe-v", 2),
    "shifted-critical-path": (f"{PP} --pipeline-schedule shifted-critical-path", 2),
    "breadth-first": (f"--num-layers 4 {PP} --pipeline-schedule breadth-first", 2),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name == "dp, ramps" else pytest.mark.full) for name in BITWISE]
)
def test_not_a_bit_differs(name: str) -> None:
    """Where nothing is clipped; the norm itself is added up in another order."""
    layout, ranks = BITWISE[name]
    argv = [*TINY, *MODEL, "--clip-grad", "0", *layout.split()]
    small = [*SMALL[:2], "cache_rows=32"] if name == "halves" else SMALL
    expected, found = train(argv, ranks, 4), train([*argv, *small], ranks, 4)
    assert found.losses == expected.losses and found.tensors.keys() == expected.tensors.keys()
    tolerance = 1e-6 if "--no-fp64" in layout else 1e-12
    for one, other in zip(found.norms, expected.norms, strict=True):
        assert one == other or one == pytest.approx(other, rel=tolerance)
    assert (None in found.norms) == (name == "skips") and found.norms[-1] is not None
    for key, value in expected.tensors.items():
        assert torch.equal(found.tensors[key], value), key


@pytest.mark.parametrize(
    ("layout", "ranks"),
    [
        pytest.param("--zero-stage 2", 2, marks=pytest.mark.full),
        pytest.param("--zero-stage 3", 2, marks=pytest.mark.full),
        pytest.param(f"--tensor-model-parallel-size 2 {PP} --zero-stage 2", 8, marks=pytest.mark.full),
        pytest.param("--zero-stage 1 --num-distributed-optimizer-instances 2", 4, marks=pytest.mark.full),
    ],
)
def test_clipped_it_is_what_one_process_computes(layout: str, ranks: int) -> None:
    model = ("--num-layers", "2", "--untie-embeddings-and-output-weights", "--clip-grad", "0.1")
    compare(Layout(model, ("--micro-batch-size", "1", *layout.split(), *SMALL), ranks), steps=3)


def evaluated_body(world: World, argv: list[str], steps: int) -> list[object]:
    """Losses of training and validation, and samples after every second iteration; the state is saved at the end."""
    seen: list[object] = []
    with open_run(parse(argv, world_size=world.size), world) as run:
        for step in range(run.trainer.iteration + 1, run.trainer.iteration + steps + 1):
            seen.append(float(run.trainer.train_step(drain=True).lm_loss))
            if step % 2 == 0:
                assert run.trainer.sample is not None
                seen += [record["lm_loss"] for record in run.trainer.evaluate(step, False)]
                seen += [record["text"] for record in run.trainer.sample(step)]
        run.state.save(run.trainer.progress)
    return seen


@pytest.mark.landing
def test_runs_with_and_without_it_continue_each_other(tmp_path: Path) -> None:
    """Evaluations and samples in between use rows past the cache; what is saved is as ever."""
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("ab\nthe\n")
    text = " ".join(TINY).replace("--mock-data --tokenizer-type NullTokenizer --vocab-size 61", "")
    base = [*text.split(), *MODEL, "--clip-grad", "0", "--eval-iters", "1", "--tokenizer-type", "ByteTokenizer"]
    base += ["--data-cache-path", str(tmp_path / "cache"), "--sample", "interval=2", "tokens=3"]
    base += ["--sample", f"prompts={prompts}", "--auto-resume"]
    offload = ["--offload", "embedding"]
    plain = run_ranks(evaluated_body, 1, [*base, "--save", str(tmp_path / "plain")], 4)[0]
    mixed = []
    for steps, flags in ((1, []), (2, [*offload, "--offload", "lookahead=0"]), (1, [])):
        mixed += run_ranks(evaluated_body, 1, [*base, "--save", str(tmp_path / "mixed"), *flags], steps)[0]
    assert plain == mixed
    one, other = saved_tensors(tmp_path / "plain"), saved_tensors(tmp_path / "mixed")
    assert one.keys() == other.keys() and all(torch.equal(value, other[name]) for name, value in one.items())


def held_body(world: World, argv: list[str]) -> dict[str, int]:
    """Bytes that a run holds between two steps."""
    with open_run(parse(argv, world_size=world.size), world) as run:
        model = run.state.model
        assert model.rows is not None
        buffers = [held_bytes(made) for stage in model.buffers.values() for made in stage]
        rows = {"weights": model.rows.weight.nbytes, "gradients": model.rows.gradient.nbytes}
        held = {name: sum(each[name] for each in buffers) + rows[name] for name in rows}
        return held | {"host": model.optimizer.memory()["offloaded"]}


def test_the_plan_counts_it_to_the_byte() -> None:
    argv = [
        *TINY,
        *MODEL,
        "--no-fp64",
        "--bf16",
        "--optimizer-state",
        "exp_avg_dtype=bf16",
        *SMALL,
        "--hidden-size",
        "40",
    ]
    config = parse(argv)
    found = state_bytes(config, 1, range(4), num_stages=1, versions=1, num_gradients=1, on_cpu=True)
    expected = run_ranks(held_body, 1, argv)[0]
    assert {name: getattr(found, name) for name in expected} == expected
