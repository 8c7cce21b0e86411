"""tools/generate_text.py and tools/evaluate.py as users call them."""

from __future__ import annotations

import importlib.util
import json
import math
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from megalite.convert import CheckpointSource, write_huggingface
from tests.unit.inference.tiny_checkpoint import TEXT, all_logits, write_checkpoint
from tools.command_line import run_tool
from tools.evaluate import show

ROOT = Path(__file__).resolve().parents[2]


@dataclass
class Result:
    """What a process of its own would have left."""

    returncode: int
    stdout: str
    stderr: str


Call = Callable[..., Result]


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str]) -> Call:
    """Runs a tool in this process: importing torch anew for each call would take longer than everything else."""

    def run(tool: str, *flags: str) -> Result:
        spec = importlib.util.spec_from_file_location(f"tool_{tool[:-3]}", ROOT / "tools" / tool)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        capsys.readouterr()
        status = run_tool(module.main, list(flags))
        return Result(status, *capsys.readouterr())

    return run


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("run")
    write_checkpoint(directory)
    return directory


GREEDY = ("--prompt", "Hi", "--max-new-tokens", "8", "--greedy")


def test_generation_prints_prompt_and_continuation(call: Call, run_dir: Path, tmp_path: Path) -> None:
    _, stack = write_checkpoint(tmp_path / "same")
    ids = list(b"Hi")
    for _ in range(8):
        ids.append(int(all_logits(stack, ids)[-1].argmax()))
    result = call("generate_text.py", "--load", str(run_dir), *GREEDY)
    assert result.returncode == 0, result.stderr
    end = ids.index(256) if 256 in ids else None
    assert result.stdout == bytes(ids[:end]).decode("utf-8", "replace") + "\n"


@pytest.mark.landing
def test_generation_from_any_folder(call: Call, run_dir: Path, tmp_path: Path) -> None:
    flags = ("--load", str(run_dir), *GREEDY)
    command = [sys.executable, str(ROOT / "tools" / "generate_text.py"), *flags]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
    assert (result.returncode, result.stdout) == (0, call("generate_text.py", *flags).stdout), result.stderr


def test_samples_differ_and_repeat(call: Call, run_dir: Path) -> None:
    flags = ("--load", str(run_dir), "--max_new_tokens=20", "--num-samples", "2", "--seed", "3")
    first, second = call("generate_text.py", *flags), call("generate_text.py", *flags)
    assert first.returncode == 0, first.stderr
    assert first.stdout == second.stdout
    one, other = first.stdout.split("\n---\n")
    assert one != other


def test_evaluation_as_json_and_as_text(call: Call, run_dir: Path, tmp_path: Path) -> None:
    file = tmp_path / "text.txt"
    file.write_text(TEXT, encoding="utf-8")
    result = call("evaluate.py", "--load", str(run_dir), "--text-file", str(file), "--json")
    assert result.returncode == 0, result.stderr
    record = json.loads(result.stdout)
    assert record["ppl"] == pytest.approx(math.exp(record["loss"]))
    assert record["bits_per_byte"] == pytest.approx(record["loss"] / math.log(2))
    assert record["iteration"] == 7
    by_path = ("--data-path", str(file), "--data-cache-path", str(tmp_path / "cache"))
    same = json.loads(call("evaluate.py", "--load", str(run_dir), *by_path, "--json").stdout)
    assert same["loss"] == pytest.approx(record["loss"], rel=1e-12)
    shown = call("evaluate.py", "--load", str(run_dir), "--text-file", str(file), "--overlap", "4").stdout
    assert "bits per byte" in shown and "iteration 7" in shown


def test_a_huge_perplexity_is_a_power_of_ten(capsys: pytest.CaptureFixture[str]) -> None:
    show({"loss": 24.2, "word_ppl": 32825001599.411, "ppl": 999.5, "num_tokens": 12_000_000})
    assert (
        capsys.readouterr().out.split() == "lm loss 24.200000 ppl 999.5000 word ppl 3.283e+10 tokens 12,000,000".split()
    )


def test_a_hugging_face_folder_is_like_the_checkpoint_that_it_was(call: Call, run_dir: Path, tmp_path: Path) -> None:
    export = str(write_huggingface(CheckpointSource(run_dir), tmp_path / "export"))
    file = tmp_path / "text.txt"
    file.write_text(TEXT, encoding="utf-8")
    flags = ("--text-file", str(file), "--json")
    ours, theirs = (call("evaluate.py", "--load", where, *flags) for where in (str(run_dir), export))
    assert theirs.returncode == 0, theirs.stderr
    ours, theirs = json.loads(ours.stdout), json.loads(theirs.stdout)
    assert theirs["loss"] == ours["loss"] and (ours["iteration"], theirs["iteration"]) == (7, None)
    said = call("evaluate.py", "--load", export, "--text-file", str(file)).stdout
    assert said.splitlines()[0] == f" {export}"
    by_path = ("--data-path", str(file), "--data-cache-path", str(tmp_path / "cache"))
    said = call("evaluate.py", "--load", export, *by_path, "--split", "train").stdout
    assert "; part train of split 969,30,1 (default; give --split A,B,C" in said.splitlines()[1]
    flags = ("--prompt", "Hi", "--max-new-tokens", "8", "--seed", "2")
    texts = [call("generate_text.py", "--load", where, *flags).stdout for where in (str(run_dir), export)]
    assert texts[0] == texts[1] and texts[0].startswith("Hi")
    line = f"error: --ckpt-step=7: {export} is a Hugging Face model and has no steps; drop it\n"
    assert call("generate_text.py", "--load", export, "--ckpt-step", "7").stderr == line


def test_lambada_from_jsonl(call: Call, run_dir: Path, tmp_path: Path) -> None:
    file = tmp_path / "lambada.jsonl"
    file.write_text('{"text": "the last word"}\n{"text": "of a passage"}\n')
    result = call("evaluate.py", "--load", str(run_dir), "--text-file", str(file), "--task", "lambada", "--json")
    assert json.loads(result.stdout)["num_passages"] == 2


@pytest.mark.parametrize(
    ("tool", "flags", "line"),
    [
        ("generate_text.py", [], "the following arguments are required: --load"),
        ("generate_text.py", ["--load", "{run}", "--promt", "x"], "unknown flag --promt; did you mean --prompt?"),
        (
            "generate_text.py",
            ["--load", "/nowhere"],
            "--load=/nowhere: no such directory; give a run's --save, one of its checkpoints, or a Hugging Face model",
        ),
        (
            "generate_text.py",
            ["--load", "{run}", "--max-new-tokens", "0"],
            "--max-new-tokens=0: must be >= 1 and <= 1,073,741,824",
        ),
        (
            "generate_text.py",
            ["--load", "{run}", "--temperature", "-1"],
            "--temperature=-1: must be >= 0 (0: the most likely token, as --greedy)",
        ),
        ("generate_text.py", ["--load", "{run}", "--top-k", "many"], "--top-k: invalid int value: 'many'"),
        ("evaluate.py", ["--load", "{run}"], "--data-path, --text-file: give one of the two"),
        (
            "evaluate.py",
            ["--load", "{run}", "--text-file", "/nowhere.txt"],
            "--text-file=/nowhere.txt: cannot be read (No such file or directory)",
        ),
        (
            "evaluate.py",
            ["--load", "{run}", "--text-file", "x", "--split", "valid"],
            "--split=valid: belongs to --data-path; drop it",
        ),
        (
            "evaluate.py",
            ["--load", "{run}", "--ckpt-step", "9", "--text-file", __file__],
            "--ckpt-step=9: no committed checkpoint of that step in {run} (has: 7)",
        ),
    ],
)
def test_bad_input_is_one_line_and_status_2(call: Call, run_dir: Path, tool: str, flags: list[str], line: str) -> None:
    result = call(tool, *(flag.format(run=run_dir) for flag in flags))
    assert result.stderr == f"error: {line.format(run=run_dir)}\n"
    assert (result.returncode, result.stdout) == (2, "")
