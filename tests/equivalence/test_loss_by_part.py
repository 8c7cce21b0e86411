"""The loss of each part of a blend (`--loss-by-part`) at any layout, against samples whose losses one process computes
one by one; the part of a sample is read off its tokens."""

from __future__ import annotations

from collections import deque
from contextlib import nullcontext
from datetime import datetime
from pathlib import Path

import numpy as np
import pytest
import torch

from equivalence.layouts import TINY, saved_tensors
from equivalence.test_no_host_reads import late, no_reads
from megalite.comm.world import World
from megalite.config.cli import parse
from megalite.data.indexed import IndexedWriter
from megalite.observe.alerts import PrometheusHook
from megalite.observe.loggers import tags, train_line
from megalite.observe.stats import losses_by_part
from megalite.testing import run_ranks
from megalite.testing.oracle import Pupil
from megalite.train.run import open_run, run_training
from pretrain_gpt import main
from tests.unit.observe.fake_trainer import FakeTrainer, tiny_config
from tools.report import read_run
from tools.report_page import render_report

EOD = 60
SMALL = [flag for flag in TINY if flag != "--mock-data"]
SMALL += ["--num-layers", "2", "--split", "1", "--eod-mask-loss", "--calculate-per-token-loss"]
SMALL += ["--log-interval", "2"]
PARTS = ("web", "code")
LAYOUTS = {
    "dp2 zero1": (2, "--micro-batch-size 2 --zero-stage 1"),
    "tp2 pp2": (
        *(4, "--micro-batch-size 1 --tensor-model-parallel-size 2 --sequence-parallel"),
        *("--pipeline-model-parallel-size 2",),
    ),
    "cp2": (2, "--micro-batch-size 4 --context-parallel-size 2"),
    "2bw": (2, "--micro-batch-size 2 --pipeline-model-parallel-size 2 --pipeline-schedule 2bw"),
}
MORE = {
    "zero3": (2, "--micro-batch-size 2 --zero-stage 3"),
    "zb-h1": (2, "--micro-batch-size 1 --pipeline-model-parallel-size 2 --pipeline-schedule zb-h1"),
    "halves": (2, "--micro-batch-size 2 --tensor-model-parallel-size 2 --tp-comm-overlap"),
    "recomputed": (1, "--micro-batch-size 4 --recompute-granularity full"),
    "two tokens ahead": (2, "--micro-batch-size 2 --mtp-num-layers 1 --position-embedding-type rope"),
    "short sequences": (2, "--micro-batch-size 2 --seq-length-schedule 0:4,1K:16"),
    "z-loss": (1, "--micro-batch-size 2 --z-loss-coeff 1e-2"),
}


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """web holds the ids 0 to 29, code 30 to 59."""
    for part, first in zip(PARTS, (0, 30), strict=True):
        with IndexedWriter(tmp_path / part, vocab_size=61) as writer:
            for number in range(30):
                writer.add_document([*(first + np.arange(number, number + 7 + number % 5) % 30), EOD])
    return tmp_path


def flags(files: Path, *more: str) -> list[str]:
    blend = ["0.3", f"{files}/web", "0.7", f"{files}/code"]
    return [*SMALL, "--loss-by-part", "--data-path", *blend, "--data-cache-path", str(files / "cache"), *more]


def losses_body(world: World, argv: list[str], steps: int) -> list[list[list[float]]]:
    """Summed losses and tokens of the parts, step by step, between which nothing is read from a device."""
    with late(), open_run(parse(argv, world_size=world.size), world) as run:
        stats, asks = [], "--context-parallel-size" in argv  # a CPU's attention over a ring asks where it is
        for step in range(steps):
            with no_reads() if 0 < step < steps - 1 and not asks else nullcontext():
                stats.append(run.trainer.train_step(drain=step == steps - 1))
        assert all(one.by_part is not None and one.by_part[0] == PARTS for one in stats)
        return [one.by_part[1].tolist() for one in stats if one.by_part is not None]


def one_by_one(argv: list[str], steps: int, delay: int) -> list[list[list[float]]]:
    """The same of a plain loop that computes each sample on its own."""
    pupil, found = Pupil((*argv, "--micro-batch-size", "1")), []
    versions = deque([pupil.weights()] * (delay + 1), maxlen=delay + 1)
    with pupil.data.train_loader(0) as loader:
        for step in range(steps):
            batch, sums = loader.next_batch(8), [[0.0, 0.0], [0.0, 0.0]]
            for sample in batch:
                mean, _ = pupil.gradients(versions[0], [sample])
                code, tokens = int(((sample.tokens > 29) & (sample.tokens < EOD)).any()), float(sample.loss_mask.sum())
                sums[0][code] += mean * tokens
                sums[1][code] += tokens
            _, gradients = pupil.gradients(versions[0], batch)
            pupil.update(gradients, step * 8)
            versions.append(pupil.weights())
            found.append(sums)
    return found


@pytest.mark.parametrize("name", [*LAYOUTS, *(pytest.param(name, marks=pytest.mark.full) for name in MORE)])
def test_each_part_has_the_loss_of_its_samples(name: str, files: Path) -> None:
    ranks, *layout = (LAYOUTS | MORE)[name]
    given = [word.replace(",", " ") for word in " ".join(layout).split()]
    model: list[str] = []
    for flag in ("--mtp-num-layers", "--position-embedding-type", "--z-loss-coeff", "--seq-length-schedule"):
        model += given[given.index(flag) : given.index(flag) + 2] if flag in given else []
    found = run_ranks(losses_body, ranks, flags(files, *given), 4)
    assert all(one == found[0] for one in found)
    expected = one_by_one(flags(files, *model), 4, delay=int("2bw" in given))
    got, right = (torch.tensor(numbers, dtype=torch.float64) for numbers in (found[0], expected))
    torch.testing.assert_close(got, right, rtol=1e-12, atol=1e-12)


def run_body(world: World, argv: list[str]) -> int:
    return run_training(parse(argv, world_size=world.size), world)


def test_a_run_shows_them_and_is_the_run_without(files: Path, tmp_path: Path) -> None:
    """In metrics.jsonl, the log, trackers, Prometheus and the report; the weights are those of a run without, bit for
    bit."""
    argv = [*flags(files, "--micro-batch-size", "2"), "--train-iters", "4"]
    without = [word for word in argv if word != "--loss-by-part"]
    run_ranks(run_body, 2, [*argv, "--save", f"{tmp_path}/with", "--tensorboard-dir", f"{tmp_path}/events"])
    run_ranks(run_body, 2, [*without, "--save", f"{tmp_path}/without"])
    others = saved_tensors(f"{tmp_path}/without")
    assert all(torch.equal(value, others[name]) for name, value in saved_tensors(f"{tmp_path}/with").items())
    steps = one_by_one(argv, 4, delay=0)
    records = [record for record in read_run(f"{tmp_path}/with") if record["kind"] == "train"]
    for record, both in zip(records, (steps[:2], steps[2:]), strict=True):
        sums, tokens = torch.tensor(both, dtype=torch.float64).sum(0)
        assert record["lm_loss_by_part"] == pytest.approx(dict(zip(PARTS, (sums / tokens).tolist(), strict=True)))
    page = render_report("run", [("run", read_run(f"{tmp_path}/with"))])
    assert all(f"training loss of a part (nats per token): {name}</figcaption>" in page for name in PARTS)
    assert not any("lm_loss_by_part" in record for record in read_run(f"{tmp_path}/without"))


def test_lines_tags_and_numbers_name_the_part() -> None:
    steps = [(PARTS + ("unread",), torch.tensor([[6.0, n, 0], [3, 1 + n, 0]])) for n in range(2)]
    by_part = losses_by_part(steps)
    assert by_part == {"lm_loss_by_part": {"web": 2.0, "code": pytest.approx(1 / 3)}}
    record = {"kind": "train", "iteration": 7, "iteration_time_ms": 1.0, **by_part}
    assert "| lm loss of web: 2.000000E+00 | lm loss of code: 3.333333E-01 |" in train_line(record, 9, datetime.now())
    assert tags(record)["lm loss of code"] == pytest.approx(1 / 3)
    prometheus_client, hook = pytest.importorskip("prometheus_client"), PrometheusHook("run", None, None)
    hook.on_start(FakeTrainer(tiny_config()))
    hook.on_losses(FakeTrainer(tiny_config()), record)
    shown = prometheus_client.generate_latest(hook.registry).decode().splitlines()
    assert 'megalite_lm_loss_by_part{part="web",run="run"} 2.0' in shown
    assert losses_by_part([]) == {}


def test_what_has_no_parts_is_refused(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = [*SMALL, "--loss-by-part", "--micro-batch-size", "1", "--data-path", f"{files}/web", "--dry-run"]
    assert main(argv) == 2
    told = capsys.readouterr().err
    assert told == f"error: --loss-by-part: all training data are {files}/web; name more than one, or drop it\n"
