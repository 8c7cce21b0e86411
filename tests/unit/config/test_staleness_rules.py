"""`--staleness-correction`: where it is refused, and what a run says it does."""

from __future__ import annotations

import pytest

from megalite.config import parse
from megalite.errors import ConfigError
from megalite.planner import describe_layout
from pretrain_gpt import main

BASE = (
    "--num-layers 4 --hidden-size 16 --num-attention-heads 4 --seq-length 16 --micro-batch-size 1 "
    "--global-batch-size 4 --lr 1e-3 --train-iters 4 --mock-data --vocab-size 64 --eval-iters 0 --device cpu"
)
TWO = "--pipeline-schedule 2bw"
REFUSED = [
    ("predict", "", "1f1b has no delay to correct; drop it, or use --pipeline-schedule=2bw"),
    (
        "predict",
        "--pipeline-schedule pipedream",
        "pipedream on one rank has no delay to correct; drop it, or use --pipeline-schedule=2bw",
    ),
    (
        "nesterov",
        f"{TWO} --optimizer muon",
        "not with --optimizer=muon: its momentum is Nesterov's already; use predict",
    ),
    (
        "nesterov",
        f"{TWO} --optimizer lion",
        "not with --optimizer=lion: its update weighs the newest gradient by itself; use predict",
    ),
    ("nesterov", f"{TWO} --optimizer adafactor", "not with --optimizer=adafactor: it has no momentum; use predict"),
    (
        "nesterov",
        f"{TWO} --optimizer sgd --sgd-momentum 0",
        "not with --optimizer=sgd: its momentum is 0; use predict",
    ),
    (
        "error-feedback",
        f"{TWO} --optimizer-impl apex",
        "not with --optimizer-impl=apex, whose step is closed; drop one of them",
    ),
]


@pytest.mark.parametrize(("method", "flags", "reason"), REFUSED)
def test_what_does_not_exist_is_refused_in_one_line(method: str, flags: str, reason: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse([*BASE.split(), "--staleness-correction", method, *flags.split()])
    assert caught.value.problems == [f"--staleness-correction={method}: {reason}"]


@pytest.mark.parametrize("flags", [f"{TWO} --staleness-correction error-feedback", ""])
def test_a_lookahead_is_of_a_prediction(flags: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse([*BASE.split(), "--staleness-lookahead", "2", *flags.split()])
    line = "--staleness-lookahead=2: needs --staleness-correction=predict and a schedule with delay"
    assert caught.value.problems == [line]


@pytest.mark.parametrize("flags", ["--staleness-lookahead 1 2", "--optimizer muon --staleness-lookahead 1 2 3"])
def test_two_lookaheads_are_of_two_rules(flags: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse([*BASE.split(), *TWO.split(), *flags.split()])
    given = flags.partition("--staleness-lookahead ")[2]
    give = "one or two" if "muon" in flags else "one"
    why = f"a second number is of what Muon, SOAP and Shampoo leave to AdamW; give {give}"
    line = f"--staleness-lookahead={given}: {why}"
    assert caught.value.problems == [line]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (
            "--staleness-correction predict --staleness-lookahead 2",
            "predict (weights 2 updates ahead for each update of delay)",
        ),
        ("--staleness-correction error-feedback", "error-feedback"),
        ("--staleness-correction none", "none"),
        # The defaults are those of docs/asynchronous.md.
        ("", "predict (weights 2 updates ahead for each update of delay)"),
        (
            "--optimizer muon",
            "predict (weights 1 update ahead for each update of delay, 2 for tensors that AdamW updates)",
        ),
        (
            "--optimizer soap --staleness-lookahead 3 1",
            "predict (weights 3 updates ahead for each update of delay, 1 for tensors that AdamW updates)",
        ),
        ("--optimizer soap --staleness-lookahead 3", "predict (weights 3 updates ahead for each update of delay)"),
        ("--optimizer lion", "predict (weights 1 update ahead for each update of delay)"),
        ("--optimizer sgd", "predict (weights 1 update ahead for each update of delay)"),
        ("--optimizer sgd --sgd-momentum 0", "none"),
        ("--optimizer adafactor", "none"),
    ],
)
def test_a_dry_run_says_what_is_done(flags: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*BASE.split(), *TWO.split(), *flags.split(), "--dry-run"]) == 0
    assert f"staleness correction {said}, on 1 x CPU" in capsys.readouterr().out


def test_a_schedule_without_delay_has_none() -> None:
    assert parse(BASE.split()).staleness.method == "none"


DELAYED = [
    ("--pipeline-schedule 2bw", "not with --pipeline-schedule=2bw, whose gradients are late already; drop one"),
    (
        "--bf16 --store-param-remainders",
        "excludes --store-param-remainders, whose masters share memory with the weights; drop one",
    ),
    (
        "--zero-stage 3 --pipeline-schedule breadth-first --pipeline-model-parallel-size 2",
        "not with --zero-stage=3 and --pipeline-schedule=breadth-first, which would gather both weight versions at "
        "once; use --zero-stage=2, or --pipeline-schedule=1f1b",
    ),
    (
        "--zero-stage 3 --lora-rank 2 --lora-alpha 4",
        "not with --zero-stage=3 and --lora-rank, whose frozen weights have one version; use stage 2",
    ),
]


@pytest.mark.parametrize(("flags", "reason"), DELAYED)
def test_where_updates_cannot_be_delayed_is_refused_in_one_line(flags: str, reason: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse([*BASE.split(), "--delayed-parameter-update", *flags.split()], world_size=2 if "zero" in flags else 1)
    assert caught.value.problems == [f"--delayed-parameter-update: {reason}"]


def test_delayed_updates_are_corrected_and_may_begin_later() -> None:
    config = parse([*BASE.split(), "--delayed-parameter-update", "--pipeline-flush-steps", "2"])
    assert str(config.staleness) == "predict (weights 2 updates ahead for each update of delay)"


@pytest.mark.parametrize(
    ("flags", "steps"),
    [
        ("--pipeline-schedule 2bw --train-iters 330", 66),
        ("--pipeline-schedule 2bw --train-iters 5000", 200),
        ("--pipeline-schedule 2bw --train-iters 99", 0),
        ("--pipeline-schedule 2bw --train-iters 330 --pipeline-flush-steps 0", 0),
        ("--pipeline-schedule 2bw --train-iters 330 --pipeline-flush-steps 7", 7),
        ("--pipeline-schedule 1f1b --train-iters 330", 0),
        ("--pipeline-schedule pipedream --train-iters 330 --clip-grad 0", 0),
    ],
)
def test_2bw_begins_with_a_fifth_without_delay(flags: str, steps: int) -> None:
    """Of a training; a trial is as it was asked for, and a number that is given counts. The start says so."""
    config = parse([*BASE.split(), *flags.split()])
    assert config.parallel.pipeline_flush_steps == steps
    said = f"the first {steps} iterations without delay (`pipeline_flush_steps`)"
    assert (said in describe_layout(config, 1)) == (steps > 0)
