"""The certificate where gradients are late, and in the user's own number format."""

from __future__ import annotations

import random
import re
from itertools import product
from unittest.mock import patch

import pytest
import torch

import prove_layout
from equivalence.layouts import TINY
from megalite.checkpoint import Checkpointer
from megalite.comm import World
from megalite.config import OPTIMIZER_SPECS
from megalite.errors import ConfigError
from megalite.optim import Delay
from megalite.optim.staleness import Nesterov, Predict
from megalite.parallel.zero.sharded_optimizer import PendingNorm
from megalite.proof import certificate, number_format, watch
from megalite.proof.elsewhere import elsewhere, plain
from megalite.proof.number_format import Allowed, apart
from megalite.proof.shrink import Small, shrink

MODEL = [*(word for word in TINY if word != "--fp64"), "--num-layers", "2", "--micro-batch-size", "1"]
PP2 = ["--pipeline-model-parallel-size", "2"]
LATE = [*PP2, "--pipeline-schedule", "2bw"]
UNTIED = ["--untie-embeddings-and-output-weights", "--clip-grad", "0"]
PIPEDREAM = [*PP2, "--pipeline-schedule", "pipedream", *UNTIED]
STEPS = 4


def small_form(flags: list[str], ranks: int, most_ranks: int = 8) -> Small:
    config, world_size = prove_layout.resolve([*MODEL, *flags], ranks)
    return shrink(config, world_size, steps=STEPS, most_ranks=most_ranks)


def certify(flags: list[str], ranks: int) -> None:
    assert certificate.prove(small_form(flags, ranks), STEPS, print) == 0, f"{' '.join(flags)} on {ranks} ranks"


def no_prediction_on_more_ranks_than_one():
    right = Predict.write_compute_weights

    def wrong(self: Predict, master, target) -> None:
        if torch.distributed.get_world_size() > 1:
            target.copy_(master)
        else:
            right(self, master, target)

    return patch.object(Predict, "write_compute_weights", wrong)


def every_delay_counted_twice():
    right = Delay.at
    return patch.object(Delay, "at", lambda self, iteration: 2 * right(self, iteration))


def last_steps_not_loaded():
    right = Checkpointer.load

    def load(self: Checkpointer, path, shards, **more):
        return right(self, path, [s for s in shards if not s.name.startswith("optimizer/last_step/")], **more)

    return patch.object(Checkpointer, "load", load)


def no_nesterov():
    return patch.object(Nesterov, "step", lambda self: self._step_inside())


MISTAKES = {
    "no_prediction_on_more_ranks_than_one": (
        [*LATE, "--staleness-correction", "predict"], r"iteration 1, step of \S+: the compute weight \S+ on rank \d",
    ),
    "every_delay_counted_twice": (
        [*PIPEDREAM, "--staleness-correction", "predict"],
        r"iteration 1, step of embedding: the compute weight \S+ on rank 0",
    ),
    "last_steps_not_loaded": (
        [*LATE, "--staleness-correction", "error-feedback"], r"FAIL  its checkpoint at .*: optimizer/last_step/",
    ),
    "no_nesterov": (
        [*LATE, "--staleness-correction", "nesterov"], r"FAIL  the layout: iteration 1, step of ",
    ),
}  # fmt: skip


def broken_body(world: World, config: str, reference: str, folder: str, steps: int, save_after: int, name: str):
    with globals()[name]():
        return watch.train(world, config, reference, folder, steps, save_after)


def test_a_correction_that_is_wrong_is_named(full: bool, fresh: int, capsys: pytest.CaptureFixture[str]) -> None:
    for name in MISTAKES if full else [random.Random(fresh).choice([*MISTAKES])]:
        flags, account = MISTAKES[name]
        status = certificate.prove(small_form(["--fp64", *flags], 2), STEPS, print, rank=(broken_body, name))
        output = capsys.readouterr().out
        verdict = next((line for line in output.splitlines() if line.startswith(("FAIL", "PASS"))), "nothing")
        assert status == 1 and re.search(account, verdict), f"{name}: {output}"


CORRECTED = [
    (optimizer, method, late)
    for optimizer, method, late in product(
        OPTIMIZER_SPECS, ("predict", "error-feedback", "nesterov"), ("2bw", "pipedream", "update")
    )
    if (method != "nesterov" or OPTIMIZER_SPECS[optimizer].nesterov is None) and not OPTIMIZER_SPECS[optimizer].taps
]
LATENESS = {
    "2bw": LATE,
    "pipedream": PIPEDREAM,
    "update": ["--delayed-parameter-update", "--offload", "optimizer", "--zero-stage", "1"],
}


def test_every_correction_of_every_optimizer_passes(full: bool, fresh: int) -> None:
    for optimizer, method, late in CORRECTED if full else [random.Random(fresh).choice(CORRECTED)]:
        rate = ["--lr", "1e-3"] if OPTIMIZER_SPECS[optimizer].high_lr is None else []
        flags = ["--fp64", *rate, *LATENESS[late], "--optimizer", optimizer, "--staleness-correction", method]
        certify(flags, 2)


def test_what_the_schedule_corrects_by_itself_is_proved() -> None:
    small = small_form([*LATE, "--optimizer", "muon", "--bf16"], 2).config
    assert small.optimizer.staleness.staleness_correction == "none", "TINY asks for none"
    words = [word for word in MODEL if word not in ("--staleness-correction", "none")]
    config, ranks = prove_layout.resolve([*words, *LATE, "--optimizer", "muon", "--bf16"], 2)
    found = shrink(config, ranks, steps=STEPS, most_ranks=2)
    assert (found.config.staleness, str(found.config.training.precision.name)) == (config.staleness, "fp64")
    assert found.config.staleness.method == "predict"


@pytest.mark.full
@pytest.mark.parametrize("layout", [["--tensor-model-parallel-size", "2"], []], ids=["tp2", "dp2"])
@pytest.mark.parametrize("optimizer", ["soap", "adafactor"])
def test_rules_that_magnify_a_rounding_pass_in_fp32(optimizer: str, layout: list[str]) -> None:
    certify(["--optimizer", optimizer, *layout], 2)


def test_a_format_is_compared_at_what_its_rounding_allows() -> None:
    own = small_form([], 1).own
    assert own is not None
    plain, asked = ([4.0, 4.0], [1.0, 1.0]), []

    def permuted(seed: int) -> tuple[list[float], list[float]]:
        asked.append(seed)
        return [4.0, 4.0 + 4e-6 * seed], [1.0, 1.0]

    def told(losses: list[float], norms: list[float | None]) -> str:
        return apart("fp32", (losses, norms), plain, "one rank", Allowed.of(own, plain, permuted))

    assert told([4.0, 4.0], [1.0, 1.0 + 9e-7]).endswith("against one rank: losses and norms within 9.0e-07")
    assert not asked, "1e-6 is enough"
    assert told([4.0, 4.0], [1.0 + 1e-5, 1.0]).startswith("FAIL  in fp32: iteration 1, gradient norm: 1.00001 instead")
    assert told([4.0, 4.0], [1.0, 1.0 + 1e-5]).startswith("FAIL  in fp32: iteration 2, gradient norm: 1.00001 instead")
    assert told([4.0, 4.0 + 3e-5], [1.0, 1.0]).endswith("losses and norms within 7.5e-06"), "of 2e-6 four times"
    assert told([4.0, 4.0 + 4e-5], [1.0, 1.0]).endswith("1.0e-05 apart, rounding allows 8.0e-06")
    assert "iteration 1 was skipped by one of" in told([4.0, 4.0], [None, 1.0])
    without = ([4.0, 4.01], [None, None])
    assert apart("bf16", without, without, "two ranks", Allowed.close(0.0)).endswith("two ranks: losses within 0.0e+00")


def off_by(world: World, config_file: str, steps: int, *seed: int) -> number_format.Trained:
    """A norm that is 1e-5 too large on more ranks than one."""
    right = PendingNorm.wait
    with patch.object(PendingNorm, "wait", lambda self: right(self) * (1 + 1e-5 * (world.size > 1))):
        return number_format.losses(world, config_file, steps, *seed)


@pytest.mark.landing
def test_a_norm_off_by_a_hundred_thousandth_is_seen_in_fp32(capsys: pytest.CaptureFixture[str]) -> None:
    with patch.object(certificate, "losses", off_by):
        assert certificate.prove(small_form([], 2), STEPS, print) == 1
    assert "FAIL  in fp32: iteration 1, gradient norm: " in capsys.readouterr().out


def test_pipedream_is_compared_with_its_stages_alone() -> None:
    grid = [*PIPEDREAM, "--num-layers", "3", "--decoder-first-pipeline-num-layers", "2"]
    small = small_form([*grid, "--tensor-model-parallel-size", "2"], 8)
    assert small.own is not None
    other, ranks = plain(small, small.own)
    parallel, given = other.parallel, small.own.training
    assert (ranks, parallel.pipeline_model_parallel_size, parallel.tensor_model_parallel_size) == (2, 2, 1)
    assert parallel.stage_layout == small.config.parallel.stage_layout == elsewhere(small)[0].parallel.stage_layout
    assert other.training.micro_batch_size == 2 * given.micro_batch_size, "an update is of both replicas"
    masked = small_form([*grid, "--eod-mask-loss", "--tensor-model-parallel-size", "2"], 8)
    assert masked.own is not None
    other, ranks = plain(masked, masked.own)
    assert (ranks, other.training.micro_batch_size) == (4, given.micro_batch_size), "means of unlike numbers of tokens"


@pytest.mark.full
def test_pipedream_runs_in_the_users_format(capsys: pytest.CaptureFixture[str]) -> None:
    """On its stages alone as well, where only one process in fp64 is left to compare with."""
    flags = [*PIPEDREAM, "--staleness-correction", "predict", "--bf16"]
    with patch.object(certificate, "losses", dies):
        assert certificate.prove(small_form(flags, 2), STEPS, print) == 1
    assert "FAIL  in bf16: " in capsys.readouterr().out


def dies(world: World, config_file: str, steps: int) -> None:
    raise RuntimeError("no such kernel in bf16")


@pytest.mark.parametrize(
    ("flags", "ranks", "most", "fix"),
    [
        ([], 2, 0, "give --max-ranks=2"),
        ([], 2, 1, "give --max-ranks=2"),
        (PP2, 2, 1, "give --max-ranks=2"),  # one stage has two replicas on these ranks
        (PP2, 4, 3, "give --max-ranks=4, or prove a layout with a smaller --pipeline-model-parallel-size"),
        (["--tensor-model-parallel-size", "4", *PP2], 8, 5,
         "give --max-ranks=8, or prove a layout with a smaller --tensor-model-parallel-size"),
    ],
)  # fmt: skip
def test_too_few_ranks_are_refused_with_what_helps(flags: list[str], ranks: int, most: int, fix: str) -> None:
    with pytest.raises(ConfigError) as refused:
        small_form(flags, ranks, most)
    assert str(refused.value).endswith(f" ranks; {fix}"), refused.value
