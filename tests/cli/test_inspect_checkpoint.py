"""tools/inspect_checkpoint.py: what it shows, and its exit statuses."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from megalite.checkpoint import Checkpointer
from megalite.comm.mesh import Axis
from megalite.comm.rectangles import TensorShard

sys.path.append(str(Path(__file__).parents[2] / "tools"))
import inspect_checkpoint  # noqa: E402

Tensors = dict[str, torch.Tensor]


def save(directory: Path, step: int, tensors: Tensors, meta: dict[str, Any]) -> Path:
    shards = [TensorShard(name, tuple(t.shape), (0,) * t.dim(), t) for name, t in tensors.items()]
    return Checkpointer(directory, world=Axis.single("world")).save(step, shards, meta, {"tokenizer.json": b"{}"})


def model() -> Tensors:
    weight = torch.linspace(-1, 2, 12).view(3, 4)
    return {"w": weight, "optimizer/exp_avg/w": weight.double() * 2, "optimizer/exp_avg_sq/w": weight.square()}


def run(capsys: pytest.CaptureFixture[str], *argv: object) -> tuple[int, str, str]:
    status = inspect_checkpoint.main([str(word) for word in argv])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def test_a_run_and_its_newest_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save(tmp_path, 10, model(), {})
    save(tmp_path, 20, model(), {"consumed_samples": 640})
    (tmp_path / "iter_0000030.tmp-ab").mkdir()
    status, out, _ = run(capsys, tmp_path)
    assert status == 0
    for text in (
        "iter_0000010",
        "iter_0000030.tmp-ab (interrupted",
        "step 20",
        "consumed_samples: 640",
        "tokenizer.json",
    ):
        assert text in out
    rows = {line.split()[0]: line.split()[1:] for line in out.splitlines() if "elements" in line}
    assert rows["optimizer/exp_avg"][:5] == ["1", "tensors", "12", "elements", "96"]
    assert rows["weights"][-1] == "F32"
    status, out, _ = run(capsys, "--load", tmp_path, "--ckpt-step", 10, "--json")
    report = json.loads(out)
    assert (status, report["checkpoint"]["step"]) == (0, 10)
    assert [row["step"] for row in report["run"]["checkpoints"]] == [10, 20]


def test_each_file_names_the_layers_in_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Which rank of a pipeline held what."""
    rows = [f"decoder.layers.{number}.mlp.weight" for number in (0, 1, 2, 7, 11, 12)]
    save(tmp_path, 1, {"w": torch.zeros(2)} | {name: torch.zeros(2) for name in rows}, {})
    out = run(capsys, tmp_path)[1]
    assert next(line for line in out.splitlines() if "rank_00000" in line).endswith("layers 0-2, 7, 11-12")


def test_statistics(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tensors = model()
    tensors["bad"] = torch.tensor([1.0, math.nan, math.inf, 3.0])
    path = save(tmp_path, 1, tensors, {})
    _, out, _ = run(capsys, path, "--tensors", "--json")
    rows = json.loads(out)["tensors"]
    w = tensors["w"].double()
    for key, value in {"min": w.min(), "max": w.max(), "mean": w.mean(), "std": w.std(correction=0)}.items():
        assert rows["w"][key] == pytest.approx(value.item(), abs=1e-12)
    assert (rows["bad"]["not_finite"], rows["bad"]["mean"]) == (2, 2.0)
    assert "2 NOT FINITE" in run(capsys, path, "--tensors")[1]


def test_verify_names_every_damaged_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = save(tmp_path, 1, model(), {})
    assert run(capsys, path, "--verify")[0] == 0
    (path / "tokenizer.json").write_bytes(b"[]")
    data = bytearray((path / "rank_00000.safetensors").read_bytes())
    data[-3] ^= 4
    (path / "rank_00000.safetensors").write_bytes(data)
    status, out, _ = run(capsys, path, "--verify")
    assert status == 2 and out.count("DAMAGED") == 2
    assert "rank_00000.safetensors: damaged at " in out and "tokenizer.json: damaged" in out


def test_differences(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = save(tmp_path / "a", 1, model() | {"gone": torch.ones(2), "form": torch.ones(2)}, {"lr": {"now": 1e-3}})
    changed = model() | {"new": torch.ones(2), "form": torch.ones(3)}
    changed["w"] = changed["w"].clone()
    changed["w"][1, 2] += 0.5
    second = save(tmp_path / "b", 1, changed, {"lr": {"now": 2e-3}})
    assert run(capsys, first, "--diff", tmp_path / "a")[0] == 0
    status, out, _ = run(capsys, first, "--diff", second, "--json")
    diff = json.loads(out)["diff"]
    assert status == 1
    assert (diff["only_first"], diff["only_second"], diff["equal_tensors"]) == (["gone"], ["new"], 2)
    assert diff["shapes"] == {"form": ["F32 [2]", "F32 [3]"]}
    assert diff["values"]["w"]["elements"] == 1 and diff["values"]["w"]["max_abs"] == pytest.approx(0.5)
    assert diff["meta"] == {"lr.now": [1e-3, 2e-3]}
    assert "w: 1 elements differ, by at most 0.5" in run(capsys, first, "--diff", second)[1]


def test_a_run_repeated_elsewhere_is_no_difference(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, two, other = (
        save(tmp_path / name, 1, model(), {"config": {"checkpoint": {"save": name}, "training": {"seed": seed}}})
        for name, seed in (("a", 1), ("b", 1), ("c", 2))
    )
    status, out, _ = run(capsys, one, "--diff", two)
    assert status == 0 and "config.checkpoint.save: 'a' / 'b'" in out
    assert run(capsys, one, "--diff", other)[0] == 1


def test_the_step_of_another_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = save(tmp_path / "a", 1, model(), {})
    message = f"error: --ckpt-step=2: {path} is the checkpoint of another step; drop one of the two\n"
    assert run(capsys, path, "--ckpt-step", "2") == (2, "", message)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["{}/no"], "error: {}/no: no such directory; give a run's --save, or one of its checkpoints\n"),
        (["{}"], "error: {}: no committed checkpoint (empty); give a run's --save, or one of its checkpoints\n"),
        (["{}", "--verfy"], "error: unknown flag --verfy; did you mean --verify?\n"),
    ],
)
def test_bad_input_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], argv: list[str], message: str
) -> None:
    status, _, err = run(capsys, *(word.format(tmp_path) for word in argv))
    assert (status, err) == (2, message.format(tmp_path))
