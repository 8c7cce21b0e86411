"""A resumed run: whose schedules hold, whose architecture, what is told, and that fp32 products stay as they were."""

from __future__ import annotations

import json
import math
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megalite.checkpoint.lock import RunLock
from megalite.config import parse
from megalite.config.yaml_file import read_yaml
from megalite.observe.observers import read_metrics
from megalite.planner import checkpoint_bytes
from megalite.train import matmul_precision
from megalite.train.resume_report import changes
from pretrain_gpt import main

BASE = (
    "--num-layers 2 --hidden-size 16 --num-attention-heads 2 --seq-length 8 --micro-batch-size 2 "
    "--global-batch-size 4 --lr 1e-2 --train-iters 6 --mock-data --vocab-size 64 --eval-iters 0 "
    "--log-interval 1 --device cpu --num-workers 0 --no-exit-signal-handler"
).split()
SHAPE = ("--num-layers", "--hidden-size", "--num-attention-heads", "--seq-length", "--vocab-size")
OVERRIDE, ADOPT = "--override-opt-param-scheduler", "--use-checkpoint-opt-param-scheduler"
FIX = f"{OVERRIDE} takes the flags' schedules, {ADOPT} the checkpoint's"


def without(*names: str) -> list[str]:
    return [token for at, token in enumerate(BASE) if token not in names and (at == 0 or BASE[at - 1] not in names)]


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 6 iterations that stopped after 2."""
    run = tmp_path_factory.mktemp("original") / "run"
    assert main([*BASE, "--save", str(run), "--exit-interval", "2"]) == 0
    return run


@pytest.fixture
def stopped(original: Path, tmp_path: Path) -> Path:
    """A copy of it."""
    return Path(shutil.copytree(original, tmp_path / "run"))


def go_on(run: Path, *more: str) -> list[str]:
    return [*BASE, "--load", str(run), "--save", str(run), *more]


def rates(run: Path) -> list[float]:
    return [line["learning_rate"] for line in read_metrics(run / "metrics.jsonl") if line["kind"] == "train"]


def test_unequal_schedules_are_refused_value_by_value(stopped: Path, capsys: Any) -> None:
    capsys.readouterr()
    flags = "--lr 2e-2 --lr-decay-style cosine --lr-warmup-iters 3 --weight-decay 0.1 --train-iters 9".split()
    assert main(go_on(stopped, *flags)) == 2
    assert capsys.readouterr().err.splitlines() == [
        f"error: --lr=0.02: the checkpoint's run has 0.01; {FIX}",
        f"error: --lr-decay-style=cosine: the checkpoint's run has linear; {FIX}",
        f"error: --lr-warmup-iters=3: the learning rate warms up over 12 samples, in the checkpoint's run 0; {FIX}",
        f"error: --train-iters=9: the learning rate decays over 36 samples, in the checkpoint's run 24; {FIX}",
        f"error: --weight-decay=0.1: the checkpoint's run has 0.01; {FIX}",
    ]


def test_another_batch_size_is_named_as_the_reason(stopped: Path, capsys: Any) -> None:
    capsys.readouterr()
    assert main(go_on(stopped, "--global-batch-size", "8")) == 2
    assert capsys.readouterr().err == (
        "error: --train-iters=6: the learning rate decays over 48 samples, in the checkpoint's run 24 (batches of 8, "
        f"there 4); {FIX}\n"
    )


def test_override_takes_the_flags_and_the_next_resume_knows_it(stopped: Path, capsys: Any) -> None:
    changed = go_on(stopped, "--lr", "2e-2", "--lr-decay-iters", "4", "--min-lr", "1e-3")
    assert main([*changed, OVERRIDE, "--exit-interval", "4"]) == 0
    out = capsys.readouterr().out
    assert f"schedules of learning rate and weight decay ({OVERRIDE})" in out
    assert "--lr 0.01 -> 0.02" in out
    assert main(changed) == 0, "the schedules are now the checkpoint's"
    whole = lambda k: 1e-2 * (1 - k / 6)  # noqa: E731
    part = lambda k: 1e-3 + (1 - k / 4) * (2e-2 - 1e-3)  # noqa: E731
    assert rates(stopped) == pytest.approx([whole(0), whole(1), part(2), part(3), part(4), 1e-3])


def test_the_checkpoints_schedules_are_adopted(stopped: Path, capsys: Any) -> None:
    capsys.readouterr()
    assert main(go_on(stopped, "--lr", "2e-2", "--train-iters", "8", ADOPT)) == 0
    assert f"schedules of learning rate and weight decay ({ADOPT})" in capsys.readouterr().out
    assert rates(stopped) == pytest.approx([1e-2 * max(0.0, 1 - k / 6) for k in range(8)])
    written = {entry.name: entry.scalars for entry in read_yaml(str(stopped / "config.yaml"), [])}
    assert float(written["lr"][0].text) == 1e-2 and written["lr_decay_samples"][0].text == "24"
    # what was written down is what the next run needs
    assert main(["--config", str(stopped / "config.yaml"), "--load", str(stopped), "--train-iters", "9"]) == 0
    assert len(rates(stopped)) == 9


def test_what_has_no_effect_is_not_compared(tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert main([*BASE, "--lr-decay-style", "constant", "--save", str(run), "--exit-interval", "2"]) == 0
    assert main(go_on(run, "--lr-decay-style", "constant", "--train-iters", "4", "--min-lr", "1e-3")) == 0
    assert rates(run) == [1e-2] * 4


def test_older_checkpoints_tell_their_schedules_by_their_flags(stopped: Path, monkeypatch: Any, capsys: Any) -> None:
    from megalite.train import starting_point
    from megalite.train.param_schedules import META

    real = starting_point.read_manifest

    def older(path: Path) -> Any:
        manifest = real(path)
        meta = {name: value for name, value in manifest.meta.items() if name != META}
        return replace(manifest, meta=meta)

    monkeypatch.setattr(starting_point, "read_manifest", older)
    assert main(go_on(stopped, "--lr", "2e-2")) == 2
    assert "--lr=0.02: the checkpoint's run has 0.01" in capsys.readouterr().err
    assert main(go_on(stopped)) == 0


def test_architecture_comes_from_the_checkpoint(stopped: Path, tmp_path: Path, capsys: Any) -> None:
    other = [*without(*SHAPE), "--load", str(stopped), "--save", str(tmp_path / "next"), "--use-checkpoint-args"]
    assert main([*other, "--exit-interval", "3"]) == 0
    assert main([*other, "--save", str(tmp_path / "new"), "--dry-run"]) == 0
    printed = capsys.readouterr().out
    assert "hidden_size: 16" in printed and f"# {stopped}/iter_0000002" in printed
    assert main([*other, "--hidden-size", "32", "--swiglu"]) == 2
    where = stopped / "iter_0000002"
    assert capsys.readouterr().err.splitlines() == [
        f"error: --hidden-size=32: {where} has 16; drop the flag, or --use-checkpoint-args",
        f"error: --swiglu: {where} has gelu; drop the flag, or --use-checkpoint-args",
    ]


def test_a_requeued_job_may_ask_for_the_architecture_of_a_checkpoint_that_is_not_there_yet(
    tmp_path: Path, capsys: Any
) -> None:
    run = tmp_path / "run"
    assert main([*go_on(run), "--use-checkpoint-args", "--exit-interval", "2"]) == 0
    assert main([*go_on(run), "--use-checkpoint-args"]) == 0
    capsys.readouterr()
    (tmp_path / "empty").mkdir()
    assert main([*without(*SHAPE), "--load", str(tmp_path / "empty"), "--use-checkpoint-args"]) == 2
    assert capsys.readouterr().err == (
        f"error: --load={tmp_path / 'empty'}: no committed checkpoint; --use-checkpoint-args needs one\n"
    )


def test_the_report_tells_what_came_from_where(stopped: Path, capsys: Any) -> None:
    capsys.readouterr()
    more = ("--global-batch-size", "8", "--bf16", "--no-load-optim", "--seed", "7", "--train-iters", "3")
    assert main(go_on(stopped, *more)) == 0
    lines = capsys.readouterr().out.splitlines()
    first = next(number for number, line in enumerate(lines) if "resumed from" in line)
    assert [line.strip() for line in lines[first : first + 4]] == [
        f"resumed from  {stopped / 'iter_0000002'} (saved by 1 rank)",
        "checkpoint    iteration 2, 8 samples consumed, weights, seed 1234",
        "flags         optimizer state is new (--no-load-optim), schedules of learning rate and weight decay",
        "changed       --global-batch-size 4 -> 8; --train-iters 6 -> 3; --bf16 false -> true",
    ]
    starts = [line for line in read_metrics(stopped / "metrics.jsonl") if line["kind"] == "start"]
    assert "changed" not in starts[0]
    assert starts[1]["changed"]["--global-batch-size"] == ["4", "8"]


def test_a_default_said_aloud_is_no_change(stopped: Path, capsys: Any) -> None:
    capsys.readouterr()
    assert main(go_on(stopped, "--kv-channels", "8", "--ffn-hidden-size", "64", "--exit-interval", "3")) == 0
    assert "changed       nothing" in capsys.readouterr().out


def test_another_spelling_of_a_field_is_told_as_the_user_wrote_it(stopped: Path, capsys: Any) -> None:
    capsys.readouterr()
    again = [*without("--train-iters"), "--load", str(stopped), "--save", str(stopped)]
    assert main([*again, "--train-samples", "24", "--exit-interval", "3"]) == 0
    assert "changed       --train-iters 6 -> --train-samples 24\n" in capsys.readouterr().out


def test_a_correction_is_told_as_what_it_amounts_to() -> None:
    base = [*BASE, "--delayed-parameter-update", "--optimizer-cpu-offload"]
    unset, aloud, none = (
        parse([*base, *more])
        for more in ((), ("--staleness-correction", "predict"), ("--staleness-correction", "none"))
    )
    assert not changes(unset, 1, aloud, 1)
    told = changes(unset, 1, none, 1)
    assert [*told] == ["layout:"]
    assert told["layout:"][0].endswith("correction predict (weights 2 updates ahead for each update of delay)")
    assert told["layout:"][1].endswith("correction none")


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ("--optimizer lion", "--optimizer=lion (checkpoint adam)"),
        ("--exp-avg-sq-dtype bf16", "--exp-avg-sq-dtype=bf16 (checkpoint fp32)"),
        ("--fp64", "--fp64=true (checkpoint false)"),
    ],
)
def test_state_of_another_kind_is_refused_with_the_way_out(flags: str, named: str, stopped: Path, capsys: Any) -> None:
    capsys.readouterr()
    assert main(go_on(stopped, *flags.split())) == 2
    assert capsys.readouterr().err == (
        f"error: --load={stopped / 'iter_0000002'}: its optimizer state differs: {named}; use the checkpoint's "
        "values, or start with fresh optimizer state (--no-load-optim)\n"
    )
    assert main(go_on(stopped, *flags.split(), "--no-load-optim", "--exit-interval", "3")) == 0
    assert "optimizer state is new" in capsys.readouterr().out


def test_a_run_may_go_on_in_fp16(stopped: Path) -> None:
    """A checkpoint of another precision holds no loss scale: that begins anew, all else continues."""
    assert main(go_on(stopped, "--fp16", "--initial-loss-scale", "1024", "--exit-interval", "3")) == 0
    last = [line for line in read_metrics(stopped / "metrics.jsonl") if line["kind"] == "train"][-1]
    assert (last["iteration"], last["loss_scale"]) == (3, 1024.0)


def test_a_longer_training_says_what_becomes_of_the_data(stopped: Path, capsys: Any) -> None:
    capsys.readouterr()
    assert main(go_on(stopped, "--train-iters", "8", OVERRIDE)) == 0
    assert "the order of the first 24 samples is kept, 8 are appended" in capsys.readouterr().out


def test_products_stay_as_they_were_measured(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    measured = iter(["medium", "highest", "high"])
    used: list[str] = []
    monkeypatch.setattr(matmul_precision, "_measure", lambda *_: next(measured))
    monkeypatch.setattr(torch, "set_float32_matmul_precision", used.append)
    run = tmp_path / "run"
    auto = ("--float32-matmul-precision", "auto")
    assert main([*BASE, *auto, "--save", str(run), "--exit-interval", "2"]) == 0
    assert main(go_on(run, *auto, "--exit-interval", "4")) == 0
    assert used == ["medium", "medium"], "kept, though a new measurement would choose another"
    assert "products of fp32 in mode 'medium', as measured then" in capsys.readouterr().out
    manifest = json.loads((run / "iter_0000004" / "manifest.json").read_text())
    assert manifest["meta"]["float32_matmul_precision"] == {"mode": "medium", "device": "cpu"}
    assert main(go_on(run, "--float32-matmul-precision", "highest", "--exit-interval", "5")) == 0
    assert used[-1] == "highest", "a flag that names a mode has the last word"
    assert main([*BASE, *auto, "--load", str(run), "--finetune", "--train-iters", "1"]) == 0
    assert used[-1] == "highest" and next(measured) == "high", "another run measures anew"


def test_a_dry_run_refuses_what_the_start_refuses(stopped: Path, tmp_path: Path, capsys: Any) -> None:
    """A used --save, a checkpoint of another width, data without a split, a device that is not there."""
    files = sorted(tmp_path.rglob("*"))
    wide = ["--hidden-size", "32", "--load", str(stopped), "--save", str(stopped)]
    for more, line in (
        (["--save", str(stopped)], "holds checkpoints already"),
        (wide, "--hidden-size=32 (checkpoint 16)"),
        (["--split", "0,1,0"], "the train split is empty"),
    ):
        capsys.readouterr()
        assert main([*BASE, *more, "--dry-run"]) == 2
        assert line in capsys.readouterr().err
    assert main(go_on(stopped, "--dry-run")) == 0
    if not torch.cuda.is_available():
        assert main([*BASE, "--device", "cuda", "--dry-run"]) == 2
        assert "torch sees no GPU" in capsys.readouterr().err
        assert main([*BASE, "--device", "cuda", "--dry-run", "--nprocs", "1024", "--global-batch-size", "2048"]) == 0
        assert "not checked: devices" in capsys.readouterr().out
    assert sorted(tmp_path.rglob("*")) == files


def test_a_dry_run_looks_at_lock_space_and_shards_as_the_start_does(
    stopped: Path, tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    (shard,) = stopped.glob("iter_*/rank_*.safetensors")
    whole = shard.read_bytes()
    files = sorted(tmp_path.rglob("*"))

    def lines_of(*more: str) -> list[str]:
        capsys.readouterr()
        assert main([*BASE, *more]) == 2
        told = capsys.readouterr().err.splitlines()
        assert sorted(tmp_path.rglob("*")) == files
        return [line.replace(str(shard), "SHARD") for line in told]

    with RunLock(stopped):
        files.append(stopped / "run.lock")
        files.sort()
        (line,) = lines_of("--load", str(stopped), "--save", str(stopped), "--dry-run")
        assert "in use by another run" in line
    files.remove(stopped / "run.lock")
    (tmp_path / "taken" / "run.lock").mkdir(parents=True)
    files = sorted(tmp_path.rglob("*"))
    taken = ("--save", str(tmp_path / "taken"))
    assert lines_of(*taken, "--dry-run") == lines_of(*taken), "a directory in the lock's place"
    free = checkpoint_bytes(parse(BASE)) - 1
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=free))
    capsys.readouterr()
    assert main([*BASE, "--save", str(tmp_path / "new"), "--dry-run"]) == 0  # the cluster's disk may be another
    told = capsys.readouterr()
    assert "a checkpoint needs ~" in told.out + told.err
    free += 1
    assert main([*BASE, "--save", str(tmp_path / "new"), "--dry-run"]) == 0
    monkeypatch.undo()
    for at, cut in ((len(whole) // 2, None), (-1, None), (0, -5)):
        damaged = bytearray(whole[:cut])
        damaged[at] ^= 1 if cut is None else 0
        shard.write_bytes(damaged)
        (dry,) = lines_of("--load", str(stopped), "--dry-run")
        assert dry.startswith("error: SHARD") and lines_of("--load", str(stopped)) == [dry]
    monkeypatch.setattr(sys.modules["megalite.train.dry_run"], "LARGEST_CHECKPOINT", 10)
    assert lines_of("--load", str(stopped), "--dry-run") == [dry], "a file that is cut off is seen without reading it"
    shard.write_bytes(whole)
    capsys.readouterr()
    assert main([*BASE, "--load", str(stopped), "--dry-run"]) == 0
    assert "not checked: the contents of" in capsys.readouterr().out


def test_a_dry_run_reads_what_the_start_loads(stopped: Path, monkeypatch: Any) -> None:
    """Damage in optimizer state is nothing to a run that takes the weights alone."""
    (shard,) = stopped.glob("iter_*/rank_*.safetensors")
    begin = next(
        8 + int.from_bytes(shard.read_bytes()[:8], "little") + entry["data_offsets"][0]
        for name, entry in json.loads(
            shard.read_bytes()[8:][: int.from_bytes(shard.read_bytes()[:8], "little")]
        ).items()
        if name.startswith("optimizer/exp_avg")
    )
    content = bytearray(shard.read_bytes())
    content[begin] ^= 1
    shard.write_bytes(content)
    for more, status in ((["--finetune"], 0), (["--no-load-optim"], 0), ([], 2)):
        command = [*BASE, "--load", str(stopped), *more]
        assert main([*command, "--dry-run"]) == main(command) == status


@pytest.mark.in_turn
@pytest.mark.parametrize("optimizer", ["adam", "adam --ema-decay 0.9", "sgd", "lion", "muon", "adafactor"])
def test_a_checkpoint_is_as_large_as_predicted(optimizer: str, tmp_path: Path) -> None:
    more = ["--optimizer", *optimizer.split(), "--train-iters", "1", "--vocab-size", "61"]
    assert main([*BASE, *more, "--save", str(tmp_path)]) == 0
    manifest = json.loads((tmp_path / "iter_0000001" / "manifest.json").read_text())
    sizes = {"F32": 4, "BF16": 2}
    written = sum(sizes[t["dtype"]] * math.prod(t["shape"]) for t in manifest["tensors"].values())
    assert checkpoint_bytes(parse([*BASE, *more])) == written - 4  # the step count
