"""A curriculum of lengths equals steps of one process whose samples were cut by hand, at any layout; killed, resumed
and taken to another layout in any phase."""

from __future__ import annotations

import json
import random
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from equivalence.layouts import TINY, assert_close, assert_same_tensors, saved_tensors, train, train_body
from megalite.comm.world import World
from megalite.config.batch_size import LengthSchedule
from megalite.config.cli import parse
from megalite.microbatch import Microbatch
from megalite.proof.documents import TokenLosses
from megalite.testing import run_ranks, try_ranks
from megalite.testing.oracle import Pupil, Trajectory
from megalite.train.run import open_run, run_training

SCHEDULE = ("--seq-length-schedule", "0:4 200:8 500:16")
LENGTHS = (4, 4, 8, 8, 16)  # 8 samples of 16 tokens a step: the second length holds from sample 13, the third from 32
DOCUMENTS = ("--reset-attention-mask", "--reset-position-ids", "--eod-mask-loss", "--calculate-per-token-loss")
DROPOUT = ("--attention-dropout", "0.2", "--hidden-dropout", "0.1")
LLAMA = ("--num-layers", "2", "--model-type", "llama", "--num-query-groups", "2")
GPT = ("--num-layers", "2")
FOUR = ("--num-layers", "4")


def by_hand(sample: Microbatch, length: int, eod: int, *, resets_mask: bool, resets_positions: bool) -> Microbatch:
    """Each row as sequences of `length`, with positions and documents counted token by token."""
    rows = [row for text in sample.tokens.tolist() for row in _chunks(text, length)]
    positions, starts = [], []
    for row in rows:
        begin, here = 0, []
        for place, _ in enumerate(row):
            if place and row[place - 1] == eod:
                begin = place
            here.append(begin)
        starts.append(here)
        positions.append([place - (begin if resets_positions else 0) for place, begin in enumerate(here)])
    cut = sample.tokens.shape[1] // length
    ids = [int(number) + piece * 2**40 for number in sample.sample_ids for piece in range(cut)]
    labels = [row for text in sample.labels.tolist() for row in _chunks(text, length)]
    mask = [row for weights in sample.loss_mask.tolist() for row in _chunks(weights, length)]
    return Microbatch(
        tokens=torch.tensor(rows),
        labels=torch.tensor(labels),
        positions=torch.tensor(positions),
        loss_mask=torch.tensor(mask),
        sample_ids=torch.tensor(ids),
        document_starts=torch.tensor(starts) if resets_mask else None,
    )


def _chunks(row: list, length: int) -> list[list]:
    return [row[begin : begin + length] for begin in range(0, len(row), length)]


@cache
def pasted(model: tuple[str, ...], lengths: tuple[int, ...], delay: int = 0) -> Trajectory:
    """Steps of fixed lengths, one after the other: the samples of a run that knows of no schedule, cut by hand."""
    pupil = Pupil((*TINY, "--micro-batch-size", "1", *model))
    eod, resets = pupil.data.tokenizer.eod_id, "--reset-attention-mask" in model
    assert eod is not None
    versions = deque([pupil.weights()] * (delay + 1), maxlen=delay + 1)
    losses, norms = [], []
    with pupil.data.train_loader(0) as loader:
        for step, length in enumerate(lengths):
            batch = [
                by_hand(sample, length, eod, resets_mask=resets, resets_positions="--reset-position-ids" in model)
                for sample in loader.next_batch(pupil.samples)
            ]
            loss, gradients = pupil.gradients(versions[0], batch)
            losses.append(loss)
            norms.append(pupil.update(gradients, step * pupil.samples))
            versions.append(pupil.weights())
    return Trajectory(losses, norms, pupil.tensors(), pupil.rule.unsettled, pupil.rule.magnified)


PP2 = ("--pipeline-model-parallel-size", "2", "--pipeline-schedule")
TP2 = ("--tensor-model-parallel-size", "2")
CP2 = ("--context-parallel-size", "2")
CASES = {
    "one process": ((*GPT, *DROPOUT), ("--micro-batch-size", "2"), 1),
    "2bw, messages checked": (GPT, ("--micro-batch-size", "1", *PP2, "2bw", "--check-pipeline-messages"), 2),
    "zb-v, recomputed": (
        (*LLAMA, *FOUR, *DOCUMENTS),
        ("--micro-batch-size", "1", *PP2, "zb-v", "--recompute-granularity", "full"),
        2,
    ),
    "zero3": ((*LLAMA, *DOCUMENTS), ("--micro-batch-size", "2", "--zero-stage", "3"), 2),
    "ring": ((*LLAMA, *DOCUMENTS, *DROPOUT), ("--micro-batch-size", "2", *CP2), 2),
    "tp, sequence parallel, 1f1b": (
        (*GPT, "--window-size", "3"),
        ("--micro-batch-size", "2", *TP2, "--sequence-parallel", *PP2, "1f1b"),
        4,
    ),
    "all-to-all, interleaved": (
        FOUR,
        (
            "--micro-batch-size", "1", *CP2, "--cp-comm-type", "a2a", *PP2, "interleaved",
            "--virtual-pipeline-model-parallel-size", "2",
        ),
        4,
    ),
}  # fmt: skip


BY_DEFAULT = ("one process", "2bw, messages checked", "zb-v, recomputed", "ring")


@pytest.mark.in_turn
@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n in BY_DEFAULT else pytest.mark.full) for n in CASES])
def test_a_curriculum_is_fixed_lengths_one_after_the_other(name: str) -> None:
    model, layout, ranks = CASES[name]
    expected = pasted(model, LENGTHS, delay=int("2bw" in layout))
    found = train([*TINY, *model, *layout, *SCHEDULE], ranks, len(LENGTHS))
    assert_close(found.losses, expected.losses, 1e-12, "loss")
    assert_close(found.norms, expected.norms, 1e-12, "gradient norm")
    assert_same_tensors(found.tensors, expected, 1e-11)


@pytest.mark.full
def test_a_curriculum_at_random_layouts() -> None:
    rng = random.Random(16)
    for _ in range(24):
        tp, cp, pp = rng.choice(
            [(1, 1, 1), (2, 1, 1), (1, 2, 1), (1, 1, 2), (2, 2, 1), (1, 2, 2), (2, 1, 2), (1, 4, 1)]
        )
        dp = rng.choice([1, 2])
        layout = ["--micro-batch-size", rng.choice(["1", "2"]), "--tensor-model-parallel-size", str(tp)]
        layout += ["--context-parallel-size", str(cp), "--pipeline-model-parallel-size", str(pp)]
        schedule = rng.choice(["1f1b", "gpipe", "zb-h1", "zb-v", "2bw"]) if pp > 1 else "1f1b"
        zero = rng.choice("01" if schedule == "2bw" else "0123")
        layout += ["--pipeline-schedule", schedule, "--zero-stage", zero]
        layout += ["--sequence-parallel"] if tp > 1 and rng.random() < 0.5 else []
        steps = "0:8 500:16" if cp * (tp if "--sequence-parallel" in layout else 1) > 2 else "0:4 200:8 500:16"
        model = (*rng.choice([GPT, LLAMA]), *rng.choice([(), DOCUMENTS, DROPOUT]))
        lengths = tuple(LengthSchedule.parse(steps, 16).at(8 * step) for step in range(5))
        argv = [*TINY, *model, *layout, "--seq-length-schedule", steps]
        try:
            parse(argv, world_size=tp * cp * pp * dp)
        except Exception:
            continue
        expected = pasted(model, lengths, delay=int(schedule == "2bw"))
        found = train(argv, tp * cp * pp * dp, 5)
        assert_close(found.losses, expected.losses, 1e-12, f"{' '.join(argv)}: loss")
        assert_same_tensors(found.tensors, expected, 1e-11)


# ---- which tokens, in which order ------------------------------------------------------------------------------------


def read_body(world: World, argv: list[str], steps: int) -> list[tuple[int, list[int], list[int]]]:
    """(Sequences, their tokens, their labels) of every step."""
    config, seen = parse(argv, world_size=world.size), []
    with open_run(config, world) as run:
        loader = run.trainer.batch_reader.loader
        assert loader is not None
        for _ in range(steps):
            batch = loader.next_batch(run.trainer.batch_sizes.at(loader.consumed_samples))
            tokens = [row for microbatch in batch for row in microbatch.tokens.tolist()]
            labels = [row for microbatch in batch for row in microbatch.labels.tolist()]
            seen.append((len(tokens), sum(tokens, []), sum(labels, [])))
    return seen


def test_the_tokens_of_every_step_are_those_without_a_schedule() -> None:
    """Also while the batch grows; the number of sequences shrinks as they get longer."""
    argv = [*TINY, *GPT, "--micro-batch-size", "2", "--rampup-batch-size", "4", "4", "16"]
    plain, cut = (run_ranks(read_body, 1, [*argv, *more], 7)[0] for more in ((), SCHEDULE))
    assert [step[1:] for step in plain] == [step[1:] for step in cut]
    assert [count for count, _, _ in plain] == [4, 4, 4, 4, 8, 8, 8]
    assert [count for count, _, _ in cut] == [16, 16, 16, 16, 16, 16, 8]


def test_lengths_by_consumed_tokens() -> None:
    schedule = LengthSchedule.parse("0:4096 1M:8192 500B:32768", 32768)
    assert schedule.lengths == (4096, 8192, 32768)
    million, billions = -(-(10**6) // 32768), -(-500 * 10**9 // 32768)
    for samples, length in ((0, 4096), (million - 1, 4096), (million, 8192), (billions - 1, 8192), (billions, 32768)):
        assert schedule.at(samples) == length


def test_phases_of_a_run_in_iterations() -> None:
    argv = [*TINY, *GPT, "--micro-batch-size", "1", "--seq-length-schedule", "0:4 200:8 500:16"]
    assert parse(argv).phases(1) == [(4, 2), (8, 2), (16, 46)]
    short = [flag if flag != "50" else "3" for flag in argv]
    assert parse(short).phases(1) == [(4, 2), (8, 1)]


# ---- stopped and taken up --------------------------------------------------------------------------------------------


def part_body(world: World, argv: list[str], steps: int) -> list[float]:
    config = parse(argv, world_size=world.size)
    with open_run(config, world) as run:
        losses = [float(run.trainer.train_step(drain=step == steps - 1).lm_loss) for step in range(steps)]
        run.state.save(run.trainer.progress)
    return losses


@pytest.mark.in_turn
@pytest.mark.parametrize("stopped", [1, 2, 3])
def test_taken_up_inside_any_phase_and_at_another_layout(stopped: int, tmp_path: Path) -> None:
    """At the same layout bit for bit, at another to 1e-12."""
    model = (*LLAMA, *DROPOUT, *SCHEDULE)
    here, there = ("--micro-batch-size", "1", *PP2, "2bw"), ("--micro-batch-size", "2", *CP2)
    if stopped != 2:
        here = ("--micro-batch-size", "1", *TP2)
    cache = ("--data-cache-path", str(tmp_path / "cache"))
    whole = run_ranks(train_body, 2, [*TINY, *model, *here, *cache, "--save", str(tmp_path / "whole")], 5)[0][0]
    argv = [*TINY, *model, *cache, "--save", str(tmp_path / "part")]
    first = run_ranks(part_body, 2, [*argv, *here], stopped)[0]
    again = run_ranks(part_body, 2, [*argv, *here, "--auto-resume"], 5 - stopped)[0]
    assert first + again == whole
    expected, found = saved_tensors(tmp_path / "whole"), saved_tensors(tmp_path / "part")
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    if stopped != 2:  # 2BW's gradients are older ones
        run_ranks(part_body, 2, [*argv[:-1], str(tmp_path / "other"), *here], stopped)
        moved = run_ranks(part_body, 2, [*argv[:-1], str(tmp_path / "other"), *there, "--auto-resume"], 5 - stopped)[0]
        assert_close(moved, whole[stopped:], 1e-12, "loss")


def whole_run(world: World, argv: list[str]) -> int:
    return run_training(parse(argv, world_size=world.size), world)


@pytest.mark.landing
def test_killed_at_a_switch(tmp_path: Path) -> None:
    argv = [*TINY, *FOUR, *SCHEDULE, "--micro-batch-size", "1", *PP2, "zb-v", "--save-interval", "1"]
    argv[argv.index("--train-iters") + 1] = "5"
    whole, killed = ([*argv, "--save", str(tmp_path / name)] for name in ("whole", "killed"))
    run_ranks(whole_run, 2, whole)
    try_ranks(whole_run, 2, killed, faults=["kill@iteration:rank=1:after=3"])
    run_ranks(whole_run, 2, [*killed, "--auto-resume"])
    expected, found = saved_tensors(tmp_path / "whole"), saved_tensors(tmp_path / "killed")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], value) for name, value in expected.items())


# ---- what is told ----------------------------------------------------------------------------------------------------


def test_tokens_flops_and_evaluations_follow_the_length(tmp_path: Path) -> None:
    argv = [*TINY, *GPT, *SCHEDULE, "--micro-batch-size", "2", "--log-interval", "1", "--save", str(tmp_path)]
    for flag, value in (("--train-iters", "5"), ("--eval-iters", "2")):
        argv[argv.index(flag) + 1] = value
    run_ranks(whole_run, 1, [*argv, "--eval-interval", "1"])
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    trained = [line for line in lines if line["kind"] == "train"]
    assert [line["seq_length"] for line in trained] == list(LENGTHS)
    assert [line["consumed_tokens"] for line in trained] == [128 * step for step in range(1, 6)]
    layers, h, vocabulary = 2, 32, 64
    for line, s in zip(trained, LENGTHS, strict=True):
        per_token = 6 * (layers * (4 * h * h + 8 * h * h) + h * vocabulary) + 6 * s * h * layers
        assert line["tflops_per_device"] * 1e12 == pytest.approx(line["tokens_per_second"] * per_token)
    checked = [line for line in lines if line["kind"] == "valid"]
    assert [line["seq_length"] for line in checked] == list(LENGTHS)
    assert {line["num_tokens"] for line in checked} == {2 * 8 * 16}
    pupil = Pupil((*TINY, *GPT, "--micro-batch-size", "1", "--eval-iters", "2"))
    pupil.masters.update({name: value for name, value in saved_tensors(tmp_path).items() if name in pupil.masters})
    batches = [sample for batch in pupil.data.evaluation(pupil.data.datasets.valid, 16)[0] for sample in batch]
    with torch.no_grad():
        losses = [torch.func.functional_call(pupil.model, by_path(pupil), (None, sample)) for sample in batches]
    assert checked[-1]["lm_loss"] == pytest.approx(float(sum(losses)) / (2 * 8 * 16), rel=1e-12)


def by_path(pupil: Pupil) -> dict[str, torch.Tensor]:
    return {pupil.paths[name]: weight for name, weight in pupil.weights().items()}


def documents_body(world: World, argv: list[str]) -> list[tuple[str, int, int]]:
    config = parse(argv, world_size=world.size)
    with open_run(config, world) as run:
        losses = TokenLosses(run)
        run.trainer.train_step(drain=True)
        return sorted((one.source, one.document, one.tokens) for one in losses.take())


def test_a_replay_names_the_same_documents() -> None:
    argv = [*TINY, *GPT, "--micro-batch-size", "2", *CP2]
    whole, cut = (run_ranks(documents_body, 2, [*argv, *more])[0] for more in ((), SCHEDULE))
    assert whole == cut and sum(tokens for _, _, tokens in cut) > 100


# ---- ways to be quietly wrong ----------------------------------------------------------------------------------------


def positions_go_on():
    right = Microbatch.in_pieces

    def cut(self: Microbatch, count: int) -> Microbatch:
        return replace(right(self, count), positions=self.positions.reshape(-1, self.shape[1] // count))

    return patch.object(Microbatch, "in_pieces", cut)


def documents_are_forgotten():
    right = Microbatch.in_pieces

    def cut(self: Microbatch, count: int) -> Microbatch:
        done = right(self, count)
        assert done.document_starts is not None
        return replace(done, document_starts=torch.zeros_like(done.document_starts))

    return patch.object(Microbatch, "in_pieces", cut)


def one_mask_for_all_pieces():
    right = Microbatch.in_pieces

    def cut(self: Microbatch, count: int) -> Microbatch:
        return replace(right(self, count), sample_ids=self.sample_ids.repeat_interleave(count))

    return patch.object(Microbatch, "in_pieces", cut)


def one_iteration_late():
    right = LengthSchedule.at
    return patch.object(LengthSchedule, "at", lambda self, consumed: right(self, max(0, consumed - 8)))


MUTATIONS = [positions_go_on, documents_are_forgotten, one_mask_for_all_pieces, one_iteration_late]
MUTATED = (*GPT, *DOCUMENTS, *DROPOUT)


def losses_body(world: World, argv: list[str], name: str) -> list[float]:
    (mutation,) = [m for m in MUTATIONS if m.__name__ == name]
    with mutation():
        return train_body(world, argv, 3)[0]


@pytest.mark.landing
@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda m: m.__name__)
def test_mutation_is_seen(mutation: Callable) -> None:
    argv = [*TINY, *MUTATED, "--micro-batch-size", "1", *SCHEDULE]
    expected = pasted(MUTATED, LENGTHS[:3]).losses
    losses = run_ranks(losses_body, 1, argv, mutation.__name__)[0]
    assert max(abs(a - b) for a, b in zip(losses, expected, strict=True)) > 1e-9, f"{mutation.__name__} went unseen"
