"""The average of the masters at every layout, and means of checkpoints, against one process in plain Python."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from equivalence.layouts import TINY, Layout, compare, saved_tensors
from megalite.checkpoint import CheckpointReader, committed
from megalite.comm.world import World
from megalite.config import parse
from megalite.errors import MegaliteError
from megalite.inference import load_for_inference
from megalite.testing import run_ranks, run_single
from megalite.train.run import run_training

sys.path.append(str(Path(__file__).parents[2] / "tools"))
import convert_checkpoint  # noqa: E402
import merge_checkpoints  # noqa: E402

DECAY = "0.8"
LAYOUTS = {
    "alone": (1, ""),
    "zero3": (2, "--zero-stage 3 --ddp-bucket-size 3000"),
    "2bw": (2, "--pipeline-schedule 2bw --pipeline-model-parallel-size 2"),
    "host": (2, "--tensor-model-parallel-size 2 --offload optimizer --optimizer-offload-fraction 0.5"),
    "file": (1, "--offload path=FILES --ddp-bucket-size 3000"),
    "delayed": (2, "--delayed-parameter-update --offload optimizer --zero-stage 1"),
    "muon": (2, "--optimizer muon --zero-stage 1"),
}
SEEN = ("zero3", "2bw")
OFTEN = [name if name in SEEN else pytest.param(name, marks=pytest.mark.full) for name in LAYOUTS]


def run(world: World, argv: list[str]) -> int:
    return run_training(parse(argv, world_size=world.size), world)


def command(folder: Path, *more: str, steps: int = 4, evaluated: int = 0) -> list[str]:
    """Of a run in fp64, or in bf16. evaluated: batches of an evaluation."""
    (files := folder.parent / "files").mkdir(exist_ok=True)
    sizes = ["--num-layers", "2", "--micro-batch-size", "1", "--global-batch-size", "4", "--log-interval", "1"]
    tiny = [flag for flag in TINY if flag != "--fp64" or "--bf16" not in more]
    tiny[tiny.index("--train-iters") + 1] = str(steps)
    tiny[tiny.index("--eval-iters") + 1] = str(evaluated)
    return [*tiny, *sizes, "--save", str(folder), *(flag.replace("FILES", str(files)) for flag in more)]


@pytest.mark.parametrize("name", OFTEN)
def test_the_average_is_that_of_one_process(name: str, tmp_path: Path) -> None:
    world, flags = LAYOUTS[name]
    layout = (*flags.replace("FILES", str(tmp_path)).split(), "--micro-batch-size", "1")
    model = ("--num-layers", "2", "--ema-decay", DECAY, *(flag for flag in layout if flag in ("--optimizer", "muon")))
    layout = tuple(flag for flag in layout if flag not in ("--optimizer", "muon"))
    compare(Layout(model, layout, world, delay=int(name in ("2bw", "delayed"))), steps=4)


EVALUATED = {
    **LAYOUTS,
    "corrected": (2, "--pipeline-schedule 2bw --pipeline-model-parallel-size 2 --staleness-correction predict"),
    "remainders": (1, "--bf16 --store-param-remainders"),
    "bf16": (2, "--bf16 --zero-stage 1"),
}
SEEN_EVALUATED = ("corrected", "remainders")


@pytest.mark.parametrize(
    "name", [n if n in SEEN_EVALUATED else pytest.param(n, marks=pytest.mark.full) for n in EVALUATED]
)
def test_evaluation_reads_the_average_and_leaves_the_run_alone(name: str, tmp_path: Path) -> None:
    """An evaluation behind each step against none, and the loss of the average against that of a model which it is."""
    world, flags = EVALUATED[name]
    layout = (*flags.split(), "--split", "50,50,0")
    more = (*layout, "--ema-decay", DECAY)
    run_ranks(run, world, command(tmp_path / "seen", *more, "--eval-interval", "1", evaluated=2))
    # a pipeline that never drains does so for each evaluation: it is to save as often
    run_ranks(run, world, command(tmp_path / "unseen", *more, "--save-interval", "1"))
    seen, plain = (saved_tensors(tmp_path / folder) for folder in ("seen", "unseen"))
    assert seen.keys() == plain.keys() and any(key.startswith("optimizer/ema/") for key in seen)
    assert all(torch.equal(seen[key], value) for key, value in plain.items())
    merge_checkpoints.main(
        ["--load", str(tmp_path / "seen"), "--use-ema", "--no-load-optim", "--save", str(tmp_path / "average")]
    )
    asked = (*layout, "--skip-train", "--load", str(tmp_path / "average"), "--finetune")
    run_ranks(run, world, command(tmp_path / "evaluated", *asked, evaluated=2))
    (wanted,) = valid_records(tmp_path / "evaluated")
    found = valid_records(tmp_path / "seen")[-1]
    assert found["ema_lm_loss"] == pytest.approx(wanted["lm_loss"], rel=1e-12) and "ema_lm_loss" not in wanted
    assert found["ema_lm_loss"] != found["lm_loss"]


def valid_records(folder: Path) -> list[dict[str, Any]]:
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [record for record in lines if record["kind"] == "valid"]


def test_an_average_that_begins_late_begins_with_the_weights(tmp_path: Path) -> None:
    """After three steps without it, the fourth step is its first, and counts as the fourth."""
    run_single(run, command(tmp_path / "first", steps=3))
    later = ("--load", str(tmp_path / "first"), "--ema-decay", DECAY, "--override-opt-param-scheduler")
    run_single(run, command(tmp_path / "later", *later, steps=4))
    before, after = saved_tensors(tmp_path / "first"), saved_tensors(tmp_path / "later")
    decay = min(float(DECAY), 4 / 13)
    for name, value in before.items():
        if not name.startswith("optimizer/"):
            wanted = decay * value + (1 - decay) * after[name]
            torch.testing.assert_close(after[f"optimizer/ema/{name}"], wanted, rtol=1e-12, atol=1e-14)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of iterations 2 and 4 on two ranks."""
    folder = tmp_path_factory.mktemp("trained") / "run"
    flags = ("--tensor-model-parallel-size", "2", "--ema-decay", DECAY, "--save-interval", "2")
    run_ranks(run, 2, command(folder, *flags))
    return folder


def test_a_mean_is_that_of_one_process_and_is_a_run(trained: Path, tmp_path: Path) -> None:
    two, four = committed(trained)
    merge_checkpoints.main(["--load", str(two), str(four), "--weights", "1", "3", "--save", str(tmp_path / "mean")])
    found, first, last = (saved_tensors(path) for path in (tmp_path / "mean", two, four))
    assert found.keys() == last.keys()
    for name, value in last.items():
        wanted = value if name.startswith("optimizer/") else 0.25 * first[name] + 0.75 * value
        torch.testing.assert_close(found[name], wanted, rtol=1e-15, atol=1e-16)
    meta = CheckpointReader(committed(tmp_path / "mean")[-1]).manifest.meta
    assert [part["share"] for part in meta["merged"]] == [0.25, 0.75] and meta["progress"]["iteration"] == 4
    on = ("--load", str(tmp_path / "mean"), "--zero-stage", "2", "--override-opt-param-scheduler")
    run_ranks(run, 2, command(tmp_path / "on", *on, steps=5))
    assert committed(tmp_path / "on")[-1].name == "iter_0000005"


def test_tools_read_the_average(trained: Path, tmp_path: Path) -> None:
    averaged, plain = (load_for_inference(trained, use_ema=use_ema) for use_ema in (True, False))
    stored = saved_tensors(trained)
    for loaded, prefix in ((averaged, "optimizer/ema/"), (plain, "")):
        for name, parameter in loaded.model.logical_parameters():
            assert torch.equal(parameter, stored[prefix + name]), name


def test_an_export_holds_the_average(trained: Path, tmp_path: Path) -> None:
    flags = ["--from", "megalite", "--to", "hf", "--dtype", "fp32", "--load", str(trained), "--use-ema"]
    convert_checkpoint.main([*flags, "--save", str(tmp_path / "hf")])
    found, stored = load_file(tmp_path / "hf" / "model.safetensors"), saved_tensors(trained)
    names = {"ln_f.weight": "head.final_norm.weight", "ln_f.bias": "head.final_norm.bias"}
    names |= {f"h.{n}.mlp.c_fc.weight": f"layers.{n}.mlp.fc1.weight" for n in range(2)}
    for exported, ours in names.items():
        average, value = stored[f"optimizer/ema/{ours}"].float(), found[f"transformer.{exported}"]
        assert torch.equal(value if value.ndim == 1 else value.t(), average), exported
        assert not torch.equal(average, stored[ours].float())


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--load RUN --last 3", r"--last=3: .* holds 2 committed checkpoints"),
        ("--load RUN --last 2 --weights 1", r"--weights: 1 of them, for 2 checkpoints; give one for each"),
        ("--load RUN RUN --last 2", r"--last=2: of one run directory in --load"),
        ("--load RUN --weights -1", r"--weights=-1: not above 0; leave the checkpoint out"),
        ("--load RUN OTHER", r"iter_0000004 and .*iter_0000001: different models \(--num-layers=2 and 1\)"),
        ("--load OTHER --use-ema", r"--use-ema: .*iter_0000001 holds no average of weights"),
        ("--load RUN --save RUN", r"exists and is not empty"),
    ],
)
def test_one_line_says_what_cannot_be_merged(trained: Path, tmp_path: Path, flags: str, message: str) -> None:
    if "OTHER" in flags:
        run_single(run, command(tmp_path / "other", "--num-layers", "1", steps=1))
    named = flags.replace("RUN", str(trained)).replace("OTHER", str(tmp_path / "other")).split()
    with pytest.raises(MegaliteError, match=message):
        merge_checkpoints.main([*named, *([] if "--save" in flags else ["--save", str(tmp_path / "mean")])])
