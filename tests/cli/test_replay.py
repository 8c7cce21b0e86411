"""An iteration of the past again: a spike that was planted into the data is found at another layout than the run's."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
from cli.test_preflight import wrong_weight_gradient

import replay
from megalite.comm import World
from megalite.config import parse
from megalite.data import IndexedWriter
from megalite.errors import ConfigError
from megalite.launch import LaunchEnvironment
from megalite.observe import Record
from megalite.proof.history import History, legs_and_lines
from megalite.proof.numbers import Numbers, mean_loss, numbers_apart
from megalite.proof.replay import Replay
from megalite.proof.replay_config import again
from megalite.testing import RanksFailed, run_single
from megalite.train import run_training
from tests.cli.typed import run_warm

ROOT = Path(__file__).resolve().parents[2]
PLANTED = (25, 90, 155, 210)
MODEL = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --micro-batch-size 2 "
    "--global-batch-size 8 --train-iters 30 --lr 2e-2 --lr-decay-style constant --log-interval 1 --save-interval 6 "
    "--eval-iters 0 --fp64 --device cpu --tokenizer-type NullTokenizer --vocab-size 32 --split 1,0,0 --num-workers 0 "
    "--seed 3"
).split()


@pytest.fixture(scope="module")
def spiked(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int]:
    """A run on documents that count up, but for a few that are noise, and the iteration that read them."""
    folder = tmp_path_factory.mktemp("spike")
    noise = np.random.default_rng(1)
    with IndexedWriter(str(folder / "corpus"), dtype=np.dtype(np.uint16)) as writer:
        for document in range(240):
            begin = int(noise.integers(0, 31))
            ids = (begin + np.arange(17)) % 31
            writer.add_document((noise.integers(0, 31, 17) if document in PLANTED else ids).astype(np.uint16))
    flags = [
        "--data-path",
        str(folder / "corpus"),
        "--save",
        str(folder / "run"),
        "--data-cache-path",
        str(folder / "c"),
    ]
    done = run_warm("pretrain_gpt.py", *MODEL, *flags)
    assert done.returncode == 0, done.stderr
    records = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    losses = {one["iteration"]: one["lm_loss"] for one in records if one["kind"] == "train"}
    rise = {i: losses[i] - losses[i - 1] for i in losses if i > 8}
    return folder / "run", max(rise, key=lambda i: rise[i])


@pytest.mark.landing
def test_the_documents_of_a_spike_are_named_at_another_layout(spiked: tuple[Path, int]) -> None:
    directory, iteration = spiked
    layout = ["--nprocs", "2", "--pipeline-model-parallel-size", "2"]
    done = run_warm("tools/replay.py", "--load", str(directory), "--iteration", str(iteration), *layout)
    assert done.returncode == 0, done.stdout + done.stderr
    verdict = done.stdout.splitlines()[-1]
    assert verdict.startswith("verdict: data: ") and "the numbers are the run's" in verdict
    named = {int(word.rstrip(",;")) for word in verdict.split() if word.rstrip(",;").isdigit()}
    assert named and named <= set(PLANTED)
    before = (directory / "metrics.jsonl").read_text()
    (marked,) = [line for line in done.stdout.splitlines() if line.endswith(" <")]
    assert marked.split()[0] == str(iteration) and f"(<: iteration {iteration})" in done.stdout
    assert str(iteration) in done.stdout and before == (directory / "metrics.jsonl").read_text()


@pytest.mark.full
@pytest.mark.parametrize("schedule", ["2bw", "pipedream"])
def test_a_run_with_delay_is_replayed_with_its_delay(schedule: str, tmp_path: Path) -> None:
    """Two stages again, of two ranks each: older weights come out of the checkpoint, the loss is the logged one."""
    data = ["--mock-data", "--untie-embeddings-and-output-weights", "--clip-grad", "0"]
    layout = ["--nprocs", "2", "--pipeline-model-parallel-size", "2", "--pipeline-schedule", schedule]
    done = run_warm("pretrain_gpt.py", *MODEL, *data, *layout, "--save", str(tmp_path / "run"))
    assert done.returncode == 0, done.stderr
    wider = ["--nprocs", "4", "--pipeline-model-parallel-size", "2", "--tensor-model-parallel-size", "2"]
    done = run_warm("tools/replay.py", "--load", str(tmp_path / "run"), "--iteration", "15", *wider)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1].startswith("verdict: the numbers are the run's")


def replayed(world: World, directory: str, iteration: int, spoil: bool, verdict: str, flags: Sequence[str] = ()) -> str:
    """The verdict, in this process; to spoil is to make a second pass with a flipped bit in a weight gradient."""
    config, past = again(directory, iteration, [*flags], LaunchEnvironment())
    right, passes = Replay._pass, iter(range(2))

    def one_pass(self: Replay, *args: object, reads: bool) -> object:
        return right(self, *args, reads=reads) if not (spoil and next(passes)) else spoiled(self, *args)

    def spoiled(self: Replay, *args: object) -> object:
        with wrong_weight_gradient(bit=45):
            return right(self, *args, reads=False)

    with patch.object(Replay, "_pass", one_pass):
        Replay(past, 3, 1 + spoil, Path(verdict), print)(config, world)
    return Path(verdict).read_text()


def test_wrong_numbers_and_wrong_hardware_are_told_apart(spiked: tuple[Path, int], tmp_path: Path) -> None:
    directory, iteration = spiked
    verdict = run_single(replayed, str(directory), iteration, True, str(tmp_path / "verdict"))
    assert re.match(r"1 hardware: a second pass differs: (loss or|iteration 28, forward, stage 0)", verdict), verdict
    copy = shutil.copytree(directory, tmp_path / "run")
    log = (copy / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in log]
    for record in records:
        if record.get("iteration") == iteration and record["kind"] == "train":
            record["grad_norm"] *= 1.001
    (copy / "metrics.jsonl").write_text("\n".join(map(json.dumps, records)) + "\n")
    done = run_warm("tools/replay.py", "--load", str(copy), "--iteration", str(iteration), "--once", "--nprocs", "2")
    account = done.stdout + done.stderr
    assert done.returncode == 1 and not done.stderr, account
    assert re.match(
        rf"verdict: numbers: grad_norm of iteration {iteration} is .*, metrics.jsonl", account.splitlines()[-1]
    )


def as_if_it_had(run: Path, home: Path, **settings: object) -> Path:
    """A copy of a run that has saved nothing and whose config.yaml says something else."""
    shutil.copytree(run, home, ignore=shutil.ignore_patterns("iter_*"))
    text = (home / "config.yaml").read_text()
    for name, value in settings.items():
        text, count = re.subn(rf"(?m)^  {name}: .*", f"  {name}: {value}", text)
        assert count == 1, name
    (home / "config.yaml").write_text(text)
    return home


TWO_STAGES = {"pipeline_model_parallel_size": 2, "untie_embeddings_and_output_weights": "true", "clip_grad": 0.0}
BW = {**TWO_STAGES, "pipeline_schedule": "2bw"}


@pytest.mark.parametrize(
    ("settings", "flags", "line"),
    [
        ({}, "--pipeline-schedule 2bw", "updates by other rules than the run's 1f1b; give --pipeline-schedule 1f1b"),
        ({}, "--delayed-parameter-update", "--delayed-parameter-update: the run was without --delayed"),
        (
            {"delayed_parameter_update": "true"},
            "--no-delayed-parameter-update",
            "--no-delayed-parameter-update: the run was with --delayed-parameter-update, .*; drop it",
        ),
        (
            BW,
            "--pipeline-flush-steps 10",
            "--pipeline-flush-steps=10: the run had 0, .*; give --pipeline-flush-steps 0",
        ),
        (BW, "--staleness-correction none", "--staleness-correction=none: .* which had predict; give .* predict"),
        (BW, "--staleness-correction error-feedback", "--staleness-correction=error-feedback: .* had predict; give"),
        (BW, "--staleness-lookahead 1", "--staleness-lookahead=1: .*, which had 2; give --staleness-lookahead 2"),
        (
            {**TWO_STAGES, "pipeline_schedule": "pipedream", "staleness_correction": "predict"},
            "--nprocs 1 --pipeline-model-parallel-size 1",
            "--pipeline-model-parallel-size=1: the run had 2, .*; give --pipeline-model-parallel-size 2",
        ),
    ],
)
def test_updates_by_other_rules_are_refused(
    settings: dict[str, object], flags: str, line: str, spiked: tuple[Path, int], tmp_path: Path
) -> None:
    run = as_if_it_had(spiked[0], tmp_path / "run", **settings)
    with pytest.raises(ConfigError, match=line):
        again(str(run), 9, flags.split(), LaunchEnvironment())


@pytest.mark.parametrize(
    ("schedule", "flags", "line"),
    [
        ("1f1b", "--nprocs 2", None),
        ("1f1b", "--micro-batch-size 4", None),
        ("1f1b", "--global-batch-size 4", "--global-batch-size=4: the run's batches had 8 samples"),
        ("pipedream", "--micro-batch-size 1 --nprocs 2", None),
        ("pipedream", "--nprocs 2", "--micro-batch-size=2 on 2 replicas: an update of 4 samples, the run's pipedream"),
        ("pipedream", "--micro-batch-size 4", "--micro-batch-size=4 on 1 replica: an update of 4 samples"),
    ],
)
def test_updates_of_other_samples_are_refused(
    schedule: str, flags: str, line: str | None, spiked: tuple[Path, int], tmp_path: Path
) -> None:
    settings = {"pipeline_schedule": schedule} | ({"clip_grad": 0.0} if schedule == "pipedream" else {})
    run = as_if_it_had(spiked[0], tmp_path / "run", **settings)
    if line is None:
        again(str(run), 9, flags.split(), LaunchEnvironment())
        return
    with pytest.raises(ConfigError, match=re.escape(line)):
        again(str(run), 9, flags.split(), LaunchEnvironment())


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (["--load", "nowhere", "--iteration", "3"], "--load=nowhere: no config.yaml in it"),
        (["--load", ".", "--iteration", "0"], "--iteration=0: must be >= 1 and <= 1,000,000,000"),
        (["--iteration", "3"], "the following arguments are required: --load"),
    ],
)
def test_mistakes_get_one_line(flags: list[str], line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert replay.main(flags) == 2
    assert line in capsys.readouterr().err


def went_on(world: World, flags: list[str], more: list[str], spoil_log: str) -> None:
    """A run that stops after four iterations, and continues with more flags; its fourth line is lost."""
    run_training(parse([*flags, "--exit-interval", "4"]), world)
    log = Path(spoil_log)
    log.write_text("".join(line for line in log.read_text().splitlines(True) if '"train", "iteration": 4' not in line))
    run_training(parse([*flags, "--auto-resume", *more]), world)


def test_iterations_are_replayed_with_the_flags_that_they_had(spiked: tuple[Path, int], tmp_path: Path) -> None:
    """Lines of means over what a process has done of an interval, and another rate from the first checkpoint on."""
    flags = (" ".join(MODEL) + f" --data-path {spiked[0].parent / 'corpus'} --save {tmp_path / 'run'}").split()
    flags += "--train-iters 8 --log-interval 3 --save-interval 4 --data-cache-path".split() + [str(tmp_path / "c")]
    more = ["--lr", "1e-3", "--override-opt-param-scheduler"]
    run_single(went_on, flags, more, str(tmp_path / "run" / "metrics.jsonl"))
    for iteration in (2, 4, 5):
        verdict = run_single(replayed, str(tmp_path / "run"), iteration, False, str(tmp_path / "verdict"))
        assert verdict.startswith("0 the numbers are the run's"), verdict
    _, past = again(str(tmp_path / "run"), 4, [], LaunchEnvironment())
    assert past.end == 4  # not 6, the next line: from 4 on the rate is another
    means = {(2, 3): 3, (5, 6): 2}  # the line that an iteration is in -> how many iterations it is the mean of
    for (iteration, end), count in means.items():
        _, past = again(str(tmp_path / "run"), iteration, [], LaunchEnvironment())
        assert (past.end, past.lines[-1]["iteration"], past.lines[-1]["iterations"]) == (end, end, count)


def test_data_are_compared_before_the_first_checkpoint_too(spiked: tuple[Path, int], tmp_path: Path) -> None:
    with IndexedWriter(str(tmp_path / "other"), dtype=np.dtype(np.uint16)) as writer:
        for document in range(240):
            writer.add_document(((document + np.arange(17)) % 31).astype(np.uint16))
    directory, flags = str(spiked[0]), ["--data-path", str(tmp_path / "other")]
    line = r"DataError: --data-path=.*other: .* other tokens, .*: not the data that the run had at iteration 3"
    with pytest.raises(RanksFailed, match=line):
        run_single(replayed, directory, 3, False, str(tmp_path / "verdict"), flags)


@pytest.mark.parametrize(
    ("log", "saves", "iteration", "source"),
    [
        ("s0 1 2 3 4", [2, 4], 1, 2),
        ("s0 1 2 3 4", [2], 3, None),
        ("s0 1 2 s2:lr 3 4", [2, 4], 1, 2),
        ("s0 1 2 s2:lr 3 4", [2, 4], 3, 4),
        ("s0 1 2 s2:layout: 3 4", [4], 1, 4),
        ("s0 1 2 3 4 s2:lr 3 4 s6:lr 7 8", [2, 4, 8], 4, 4),
        ("s0 1 2 s2 3 4 s4:lr 5 6 7 8", [2, 8], 3, 2),  # 4, which began it, is gone
        ("s0 1 2 s2 3 4 s4:lr 5 6 7 8", [2, 8], 5, "from iteration 4 on the run had another lr, .* after 8"),
        ("s0 1 2 s2:lr 3 4 s4:lr 5 6 7 8", [2, 8], 3, "from iteration 4 on"),
        ("s0 1 2 s2:lr 3 4", [], 3, "from iteration 2 on the run had another lr, .* choose an iteration up to 2"),
    ],
)
def test_whose_flags_an_iteration_had(log: str, saves: list[int], iteration: int, source: int | str | None) -> None:
    records = []
    for word in log.split():
        begin, _, changed = word.removeprefix("s").partition(":")
        kind = {"kind": "start", "changed": {changed: []} if changed else {}} if word[0] == "s" else {"kind": "train"}
        records.append({**kind, "iteration": int(begin)})
    paths = [Path("run") / f"iter_{step:07d}" for step in saves]
    history = History(Path("run"), iteration, paths, *legs_and_lines(records))
    if isinstance(source, str):
        with pytest.raises(ConfigError, match=source):
            history.source()
    else:
        assert history.source() == (None if source is None else Path("run") / f"iter_{source:07d}")


def test_what_a_process_has_computed_again_holds() -> None:
    records = [
        {"kind": kind, "iteration": iteration, "of": number}
        for number, (begin, lines) in enumerate([(0, (5, 10, 15, 20)), (8, (12, 16))])
        for kind, iteration in [("start", begin), *(("train", line) for line in lines)]
    ]
    _, lines = legs_and_lines(records)
    assert [(line["iteration"], line["of"]) for line in lines] == [(5, 0), (12, 1), (16, 1), (20, 0)]


def logged(*lines: tuple[int, float, float]) -> list[Record]:
    return [{"iteration": at, "iterations": 1, "lm_loss": loss, "grad_norm": norm} for at, loss, norm in lines]


@pytest.mark.parametrize(
    ("mine", "otherwise", "found"),
    [
        ({1: 3.0, 2: 3.0}, True, None),
        ({1: 3.00001, 2: 3.00002}, True, None),
        ({1: 3.001, 2: 3.0}, True, (1, False)),  # weights are the checkpoint's: nothing has grown yet
        ({1: 3.0, 2: 3.003}, True, (2, True)),
        ({1: 3.0, 2: 3.003}, False, (2, False)),
        ({1: 3.0, 2: 3.3}, True, (2, False)),
        ({1: 3.0, 2: 3.003, 3: 3.3}, True, (2, True)),
        ({1: 3.0, 2: 3.0, 3: 3.003, 4: 9.0}, True, (4, False)),
        ({1: 3.0, 2: float("nan")}, True, (2, False)),
    ],
)
def test_rounding_grows_and_does_not_jump(
    mine: dict[int, float], otherwise: bool, found: tuple[int, bool] | None
) -> None:
    numbers = {at: Numbers(loss, 1.0) for at, loss in mine.items()}
    apart = numbers_apart(numbers, logged(*((at, 3.0, 1.0) for at in mine)), 1e-4, otherwise=otherwise)
    assert (None if apart is None else (apart.iteration, apart.by_rounding)) == found


def test_means_leave_out_what_was_skipped_or_not_computed() -> None:
    numbers = {at: Numbers(float(at), None, counts=at != 5) for at in range(3, 7)}
    assert mean_loss(numbers, {"iteration": 6, "iterations": 3}) == 5.0  # of 4 and 6
    assert mean_loss(numbers, {"iteration": 6, "iterations": 5}) is None
    assert mean_loss(numbers, {"iteration": 6}) is None


def test_another_layouts_rounding_has_a_verdict_of_its_own(spiked: tuple[Path, int], tmp_path: Path) -> None:
    """The log of a run whose norm is off by what rounding may have made of it, replayed at another micro-batch size."""
    shutil.copytree(spiked[0], tmp_path / "run")
    log = tmp_path / "run" / "metrics.jsonl"
    records = [json.loads(line) for line in log.read_text().splitlines()]
    for record in records:
        if record["kind"] == "train" and record["iteration"] == 9:
            record["grad_norm"] += 5e-8
    log.write_text("\n".join(map(json.dumps, records)) + "\n")
    told = ": apart by .*, which the rounding of another --micro-batch-size can do; replay as the run was laid out"
    for flags, pattern in (
        (
            ["--micro-batch-size", "4"],
            f"3 rounding: grad_norm of iteration 9 is .*{told}.*no document",
        ),  # of 90, noise, it read one token
        ([], "1 numbers: grad_norm of iteration 9 is "),
    ):
        verdict = run_single(replayed, str(tmp_path / "run"), 9, False, str(tmp_path / "verdict"), flags)
        assert re.match(pattern, verdict), verdict
