"""No two accesses of a run race on a GPU: whole runs on a GPU of bookkeeping (`megalite.rehearsal`), with logs,
evaluation and checkpoints. The losses are those of the same run without it."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from equivalence.layouts import TINY
from megalite.comm import World
from megalite.config import parse
from megalite.parallel.tiers import Arrival, Mover
from megalite.parallel.zero import host_exchange
from megalite.rehearsal import DEVICE, watched_gpu
from megalite.testing import run_ranks
from megalite.train.run import run_training

BRIEF = (
    "--num-layers 2 --global-batch-size 4 --micro-batch-size 1 --train-iters 3 --log-interval 2 --eval-iters 1 "
    "--eval-interval 2 --save-interval 2 --num-workers 1"
).split()
ZERO_3, ZERO_1 = (
    "--offload params --zero-stage 3",
    "--offload params --zero-stage 1 --model-type llama --ddp-bucket-size 500",
)


@contextmanager
def gather_that_nobody_waits_for() -> Iterator[None]:
    """Weights from the host, of which a layer waited for the collective's handle alone: a synchronous one has none."""
    right = Mover.to_device

    def to_device(mover: Mover, pairs: Any, *, after: Any = None, start: Any = None) -> Arrival:
        if start is None:
            return right(mover, pairs, after=after)
        stream = mover._streams[True]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            mover.move(pairs)
            return Arrival(started=start())

    with patch.object(Mover, "to_device", to_device):
        yield


@contextmanager
def rows_that_have_not_arrived() -> Iterator[None]:
    """Gradients on the host, packed for the exchange while copies to them are on their way."""
    with patch.object(Mover, "settle", lambda mover: None), patch.object(host_exchange, "PIECE", 512):
        yield


PLANTED = {
    "gather": (
        ZERO_3,
        gather_that_nobody_waits_for,
        "embedding on the compute stream",
        "on the stream that tiers/mover.py",
    ),
    "rows": (
        ZERO_1,
        rows_that_have_not_arrived,
        "READ BEFORE WRITTEN: copy_ on the host at tiers/mover.py",
        "to_host < zero/host_gradient.py",
    ),
}


def body(world: World, argv: list[str], watched: bool, planted: str | None) -> tuple[list[float], list[str]]:
    """The losses that were logged, and the races."""
    with PLANTED[planted][1]() if planted else nullcontext():
        if not watched:
            run_training(parse(argv, world_size=world.size), world)
            races = []
        else:
            with watched_gpu() as gpu:
                run_training(parse(argv, world_size=world.size), replace(world, device=DEVICE))
            assert gpu.ledger.launches > 1000
            races = gpu.races
    folder = Path(argv[argv.index("--save") + 1])
    records = [json.loads(line) for path in sorted(folder.rglob("metrics.jsonl")) for line in path.open()]
    return [record["lm_loss"] for record in records if record.get("lm_loss") is not None], races


def train(layout: str, ranks: int, *, watched: bool = True, planted: str | None = None) -> tuple[list[float], set[str]]:
    given = layout.split()
    base = [word for word in TINY if word != "--fp64" or "--bf16" not in given]
    with tempfile.TemporaryDirectory() as folder:
        cache = ["--save", folder, "--data-cache-path", str(Path(folder).parent / "megalite-test-cache")]
        results = run_ranks(body, ranks, [*base, *BRIEF, *given, *cache], watched, planted)
    return results[0][0], {race for _, races in results for race in races}


EXPERTS = "--num-experts 4 --moe-router-topk 2 --expert-model-parallel-size 2 --zero-stage 1 --moe-aux-loss-coeff 0.01"
LATER = [pytest.param(layout, marks=pytest.mark.landing) for layout in (
    EXPERTS, f"{EXPERTS} --moe-expert-capacity-factor 1.0", "--num-experts 4 --tensor-model-parallel-size 2",
    "--zero-stage 2", "--context-parallel-size 2", "--pipeline-model-parallel-size 2 --pipeline-schedule 2bw",
    "--pipeline-model-parallel-size 2 --pipeline-schedule chimera",
)]  # fmt: skip


PP, TP, CP = ("--pipeline-model-parallel-size 2", "--tensor-model-parallel-size 2", "--context-parallel-size 2")
UNTIED = "--untie-embeddings-and-output-weights"
MATRIX = [
    "--offload optimizer --zero-stage 1",
    "--offload optimizer --zero-stage 3",
    "--offload optimizer fraction=0.5 --delayed-parameter-update",
    "--offload optimizer --delayed-parameter-update --zero-stage 1",
    "--offload activations=1",
    "--offload activations=2 params --zero-stage 2",
    f"--offload embedding {UNTIED}",
    f"--offload embedding {UNTIED} --zero-stage 1 {PP}",
    "--zero-stage 0",
    "--zero-stage 1 --overlap-param-gather --bf16",
    "--zero-stage 3 --bf16 --grad-reduce-in-bf16",
    "--zero-stage 2 --no-overlap-grad-reduce",
    "--zero-stage 1 --store-param-remainders --bf16",
    "--zero-stage 1 --clip-grad 0 --async-save",
    "--zero-stage 1 --spikes action=skip window=4",
    "--zero-stage 1 --optimizer soap",
    "--zero-stage 2 --optimizer adafactor",
    f"{TP} --sequence-parallel --tp-comm-overlap --micro-batch-size 2",
    f"{TP} --sequence-parallel --tp-comm-overlap --micro-batch-size 2 --num-experts 4",
    "--num-experts 4 --expert-model-parallel-size 2 --tp-comm-overlap --micro-batch-size 2",
    f"{TP} --bf16 --fp8-format hybrid",
    "--zero-stage 1 --bf16 --fp8-format hybrid --fp8-recipe delayed",
    "--zero-stage 3 --bf16 --fp8-format hybrid --fp8-param-gather",
    f"{CP} --bf16",
    f"{CP} --cp-comm-type a2a",
    f"{CP} --cp-comm-type all_gather",
    f"{PP} --pipeline-schedule zb-h1 --zero-stage 1",
    f"{PP} --pipeline-schedule zb-v --num-layers 4",
    f"{PP} --pipeline-schedule pipedream {UNTIED} --clip-grad 0",
    f"{PP} --pipeline-schedule 2bw --staleness-correction predict",
    f"{PP} --recompute-granularity full",
    "--hidden-dropout 0.1 --attention-dropout 0.1",
    "--reset-position-ids --reset-attention-mask",
]


@pytest.mark.full
@pytest.mark.parametrize("layout", MATRIX)
def test_no_path_of_the_matrix_has_a_race(layout: str) -> None:
    assert train(layout, 2)[1] == set()


@pytest.mark.full
@pytest.mark.parametrize("layout", [
    "--num-distributed-optimizer-instances 2 --zero-stage 1 --ddp-bucket-size 4000",
    "--num-distributed-optimizer-instances 2 --zero-stage 3",
    f"{PP} --pipeline-schedule zb-h1 --zero-stage 1 --ddp-bucket-size 4000",
    f"{TP} {PP} --sequence-parallel --pipeline-schedule zb-v --num-layers 4",
])  # fmt: skip
def test_four_ranks_have_no_race(layout: str) -> None:
    assert train(layout, 4)[1] == set()


@pytest.mark.parametrize("layout", [ZERO_3, pytest.param(ZERO_1, marks=pytest.mark.landing), *LATER])
def test_a_run_has_no_race(layout: str) -> None:
    losses, races = train(layout, 2)
    assert races == set()
    # Kernels that a device has and a CPU has not add in another order, which Adam magnifies where gradients are tiny.
    rel = 1e-12 if "--offload" in layout else 1e-9
    assert losses == pytest.approx(train(layout, 2, watched=False)[0], rel=rel) and len(losses) >= 4


@pytest.mark.landing
@pytest.mark.in_turn
@pytest.mark.parametrize("layout", ["--zero-stage 1 --overlap-param-gather", "--zero-stage 3", ZERO_1])
def test_owners_of_unequal_slices_have_no_race(layout: str) -> None:
    muon = f"{layout} --optimizer muon --ddp-bucket-size 500"
    losses, races = train(muon, 2)
    assert races == set()
    # On a GPU Newton-Schulz runs in bf16.
    assert losses == pytest.approx(train(muon, 2, watched=False)[0], rel=1e-3) and len(losses) >= 4


@pytest.mark.parametrize("name", PLANTED)
def test_what_was_once_wrong_is_found(name: str) -> None:
    layout, _, what, where = PLANTED[name]
    _, races = train(layout, 2, planted=name)
    assert any(what in race and where in race for race in races), races
