"""tools/plan.py as people run it: a table, JSON, a configuration that runs, one-line errors."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from megalite.config import DataConfig, ids_of_files
from megalite.config.cli import read_unjudged
from megalite.data import make_tokenizer
from megalite.errors import ConfigError
from megalite.planner.cost import Roofline
from megalite.planner.hardware import load_hardware
from megalite.testing import run_single
from tests.cli.typed import body_command, run_warm
from tools.plan import main, resolve
from tools.plan_plot import check, draw
from tools.what_if import sweep, table

ROOT = Path(__file__).resolve().parents[2]
SMALL = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --vocab-size 100 --train-iters 4 "
    "--lr 1e-3 --tokenizer-type NullTokenizer --mock-data --global-batch-size 8"
).split()


def _plan(*argv: str) -> subprocess.CompletedProcess[str]:
    return run_warm("tools/plan.py", *argv)


def test_json_has_the_promised_keys() -> None:
    done = _plan(*SMALL, "--num-devices", "4", "--hardware", "cpu-2core", "--devices-per-node", "4", "--json")
    assert done.returncode == 0 and "without effect here" not in done.stderr, done.stderr
    found = json.loads(done.stdout)
    assert len(found["candidates"]) == 10
    times = [candidate["step_time_s"] for candidate in found["candidates"]]
    assert all(after > 0.998 * before for before, after in itertools.pairwise(times))
    for candidate in found["candidates"]:
        keys = {
            "layout",
            "step_time_s",
            "tokens_per_s",
            "tflops_per_device",
            "hardware_tflops_per_device",
            "mfu",
            "memory_bytes_per_rank",
            "bubble_over_ideal",
        }
        assert keys <= candidate.keys()
        memory = candidate["memory_bytes_per_rank"]
        assert abs(sum(memory.values()) - 2 * memory["total"]) <= len(memory)
        assert round(candidate["tokens_per_s"] * candidate["step_time_s"], 6) == 8 * 32
        assert candidate["hardware_tflops_per_device"] >= candidate["tflops_per_device"]


def test_the_written_configuration_passes_a_dry_run(tmp_path: Path) -> None:
    """On devices so small that the first stage must recompute and the second need not."""
    path, hardware = tmp_path / "plan.yaml", tmp_path / "small.yaml"
    text = (ROOT / "megalite" / "planner" / "hardware" / "cpu-2core.yaml").read_text()
    hardware.write_text(text.replace("memory_bytes: 4.0e9", "memory_bytes: 2.7e6").replace("0.4e9", "0"))
    fixed = "--pipeline-model-parallel-size 2 --pipeline-schedule 1f1b --micro-batch-size 2 --zero-stage 0".split()
    flags = [*fixed, "--hardware", str(hardware), "--write-config", str(path)]
    done = _plan(*SMALL, "--num-devices", "2", *flags)
    assert done.returncode == 0 and not done.stderr
    assert "Pareto front" in done.stdout and "limited by" in done.stdout
    assert "recompute_num_layers: [1, 0]" in path.read_text()
    run = run_warm("pretrain_gpt.py", "--config", str(path), "--dry-run")
    assert run.returncode == 0, run.stderr
    assert "pipeline_model_parallel_size: 2" in run.stdout


def test_the_written_configuration_runs(tmp_path: Path) -> None:
    """As it is, on as many ranks as were planned for. (Under a launcher: tests/distributed/launch/test_launch.py.)"""
    for command in (
        f"python tools/plan.py {' '.join(SMALL)} --num-devices 2 --hardware cpu-2core --write-config plan.yaml",
        "python pretrain_gpt.py --config plan.yaml --eval-iters 0 --lr-warmup iters=0",
    ):
        status, output = run_single(body_command, str(tmp_path), command, timeout=300)
        assert status == 0, output
    assert "completed at iteration 4" in output and " \n" not in output, "no line is blank"


def test_errors_are_one_line_with_status_two() -> None:
    cases = {
        "--hardware=tpu: no such hardware": ["--hardware", "tpu"],
        "unknown flag --num-layerz": ["--num-layerz", "3"],
        "--free=lr: not searched": ["--free", "lr"],
        "--profile=pyproject.toml: not a profile": ["--profile", "pyproject.toml"],
        "--tensor-model-parallel-size=3": ["--tensor-model-parallel-size", "3"],
        "--plot=a.svg: draws a sweep": ["--plot", "a.svg"],
        "--write-config=none/a.yaml: no such folder": ["--write-config", "none/a.yaml"],
        "--num-devices=1000000000: at most 1,000,000": ["--num-devices", "1000000000"],
        "--top: invalid int value": ["--top", "many"],
        "--profile=a.json: no such file": ["--profile", "a.json"],
        "--plot=a.gif: not a kind of picture": ["--plot", "a.gif", "--what-if", "upgrades"],
        "--profile=x: measured times know one width; leave it out of --what-if largest-model; for your own machine": [
            "--profile",
            "x",
            "--what-if",
            "largest-model",
        ],
    }
    for message, flags in cases.items():
        done = _plan(*SMALL, "--num-devices", "2", *flags)
        assert done.returncode == 2 and message in done.stderr, (message, done.stderr)
        assert all(line.startswith("error: ") for line in done.stderr.splitlines()), done.stderr
    done = _plan("--config", "configs/gpt3_175b.yaml", "--num-devices", "8")  # laid out for 128 and more
    line = (
        "--num-devices=8: no layout of 8 devices has --tensor-model-parallel-size=8, --pipeline-model-parallel-size=16"
    )
    assert done.returncode == 2 and line in done.stderr
    assert "plan for 128 devices, or --free all searches other sizes too" in done.stderr
    assert "world size" not in done.stderr and done.stderr.count("\n") == 1
    done = _plan("--config", "none.yaml", "--num-devices", "2")  # what it lacks may stand in the file
    assert done.returncode == 2 and done.stderr.startswith("error: --config=none.yaml: no such file")
    assert done.stderr.count("\n") == 1


def test_the_planner_needs_yaml_alone() -> None:
    """Arrays, weights and tokenizers are what others need: `--help` and a plan where nothing else is installed."""
    hidden = "torch numpy safetensors tokenizers xxhash".split()
    code = (
        f"import sys, runpy; sys.modules |= dict.fromkeys({hidden}); sys.argv = sys.argv[1:]; "
        f"sys.path.insert(0, {str(ROOT / 'tools')!r}); sys.path.insert(0, {str(ROOT)!r}); "
        "import importlib.util as u; find = u.find_spec; "
        f"u.find_spec = lambda name, *rest: None if name in {hidden} else find(name, *rest); "
        "runpy.run_path(sys.argv[0], run_name='__main__')"
    )
    for words, says in (
        (["plan.py", "--help"], "usage: plan.py"),
        (["plan.py", *SMALL, "--num-devices", "2", "--hardware", "cpu-2core"], "layouts ranked"),
        (["show_schedule.py", "--help"], "usage: show_schedule.py"),
        (["report.py", "--help"], "lacks numpy, safetensors, tokenizers, xxhash"),
    ):
        command = [sys.executable, "-c", code, str(ROOT / "tools" / words[0]), *words[1:]]
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
        assert says in done.stdout + done.stderr, (words, done.stderr)


@pytest.mark.parametrize(
    ("name", "content", "size"),
    [
        ("tokenizer.json", {"model": {"vocab": {"a": 0, "b": 1}}, "added_tokens": []}, 2),
        ("tokenizer.json", {"model": {"vocab": {"a": 0, "b": 1}}, "added_tokens": [{"id": 1}, {"id": 7}]}, 8),
        ("tokenizer.json", {"model": {"vocab": [["a", 0.0], ["b", -1.0], ["c", -2.0]]}, "added_tokens": None}, 3),
        ("vocab.json", {"a": 0, "b": 4}, 5),
        ("tokenizer.json", {"model": {}}, "no tokenizer's vocabulary is in it"),
        ("tokenizer.json", [], "no tokenizer's vocabulary is in it"),
        ("tokenizer.json", {"model": {"vocab": {"a": "b"}}}, "no tokenizer's vocabulary is in it"),
        ("tokenizer.json", None, "no tokenizer's vocabulary is in it"),
        ("tokenizer.model", {}, None),
    ],
)
def test_tokens_are_counted_without_a_tokenizer(name: str, content: Any, size: Any, tmp_path: Path) -> None:
    (tmp_path / name).write_text(json.dumps(content))
    for named in (tmp_path, tmp_path / name):
        data = DataConfig(tokenizer_model=str(named))
        if isinstance(size, str):
            with pytest.raises(ConfigError, match=size):
                ids_of_files(data)
        else:
            assert ids_of_files(data) == size, named
    assert ids_of_files(DataConfig(tokenizer_model=str(tmp_path / "none"))) is None


def test_counted_tokens_are_those_of_the_tokenizer(tmp_path: Path) -> None:
    """Against the package's own count, special tokens added behind the others included."""
    from tokenizers import AddedToken, Tokenizer, models

    made = Tokenizer(models.BPE({"a": 0, "b": 1, "ab": 2}, [("a", "b")]))
    for extra in range(3):
        made.add_special_tokens([AddedToken(f"<{extra}>")])
        made.save(str(tmp_path / "tokenizer.json"))
        expected = make_tokenizer("HuggingFaceTokenizer", tokenizer_model=str(tmp_path)).vocab_size
        assert ids_of_files(DataConfig(tokenizer_model=str(tmp_path))) == expected == 4 + extra


def test_a_margin_of_memory_is_kept_where_anything_leaves_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """80 GB of an H100 are for tensors: nothing that is offered needs more than 72 of them, as long as anything else
    fits. The configuration has its vocabulary, and names no tokenizer's file."""
    fixed = f"--config {ROOT}/configs/llama_7b.yaml --tensor-model-parallel-size 1 --pipeline-model-parallel-size 1 "
    fixed += "--micro-batch-size 2 --num-devices 512 --hardware h100 --no-compile"
    path = tmp_path / "plan.yaml"
    for more, text in (
        ("--free zero-stage", "of 80.0 GB that tensors may use, 10% of them kept free (--memory-margin). "),
        ("--free zero-stage --memory-margin 0", "of 80.0 GB that tensors may use. "),
        ("--zero-stage 1", "of 80.0 GB that tensors may use; nothing leaves 10% of them free (--memory-margin). "),
    ):
        assert main([*fixed.split(), *more.split(), "--write-config", str(path)]) == 0
        told = capsys.readouterr().out
        assert text in told and ("95% full" in told) == (more != "--free zero-stage")
        assert "2 T tokens take " in told
        assert "% of it behind computation: an assumption; a step takes " in told
    # the tokenizer's file is asked for by the run, not by its memory
    command = [sys.executable, str(ROOT / "pretrain_gpt.py"), "--config", str(path), "--dry-run"]
    run = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=300)
    assert run.returncode == 0, run.stderr
    assert " not here    --tokenizer-type=SentencePieceTokenizer: needs --tokenizer-model" in run.stdout
    assert " room        GB that tensors may use: A100-80GB 81, B200 186, H100 80," in run.stdout


def test_a_schedule_file_is_priced_for_its_own_micro_batches_only(tmp_path: Path) -> None:
    path = tmp_path / "own.txt"
    path.write_text("ranks: 2\nstages: 0 1\nmicrobatches: 2\nrank 0: 0F0 0F1 0B0 0B1\nrank 1: 1F0 1B0 1F1 1B1\n")
    flags = ["--num-devices", "2", "--hardware", "cpu-2core", "--pipeline-schedule-file", str(path)]
    priced = _plan(*SMALL, *flags, "--micro-batch-size", "4")
    assert priced.returncode == 0 and "pp2 own.txt" in priced.stdout
    done = _plan(*SMALL, *flags, "--micro-batch-size", "2", "--pipeline-model-parallel-size", "2")
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert "is written for 2 micro-batches per batch, not 4; use --global-batch-size=4" in done.stderr


def test_a_model_that_cannot_fit_is_explained() -> None:
    done = _plan("--config", "configs/gpt3_175b.yaml", "--num-devices", "128", "--hardware", "v100")
    assert done.returncode == 2
    assert "GB more than" in done.stderr and "largest term is" in done.stderr
    assert "smallest change that fits: --" in done.stderr


def test_what_if_sweeps_give_a_table_and_a_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "upgrades.svg"
    flags = ["--num-devices", "4", "--hardware", "cpu-2core", "--what-if", "upgrades", "--plot", str(path)]
    done = _plan(*SMALL, *flags)
    assert done.returncode == 0, done.stderr
    assert "links between nodes x 2" in done.stdout and "#" in done.stdout
    texts = "".join(ElementTree.parse(path).getroot().itertext())
    assert "which upgrade of 4 devices pays, CPU, 2 cores" in texts and "links between nodes x 2" in texts


@pytest.mark.parametrize("question", ["smallest-cluster", "largest-model", "token-budget"])
def test_every_sweep_is_drawn(question: str, tmp_path: Path) -> None:
    """In this process: a process for each would only start Python again."""
    pytest.importorskip("matplotlib")
    config, _ = read_unjudged(SMALL, optional=["micro_batch_size"])
    hardware = replace(load_hardware("cpu-2core"), memory_bytes=3e6, reserved_bytes=0.0)
    answer = sweep(question, config, 4, hardware, Roofline(hardware), frozenset())
    assert any(row.found is None and "does not fit: " in row.why for row in answer.rows) or question == "token-budget"
    text = table(answer)
    assert all(row.name in text for row in answer.rows)
    draw(answer, str(tmp_path / "picture.png"))
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")


def test_the_largest_model_may_be_smaller_than_the_one_that_is_given() -> None:
    """The given one does not fit: the search goes down until one does, and ends there."""
    config, _ = read_unjudged(SMALL, optional=["micro_batch_size"])
    hardware = replace(load_hardware("cpu-2core"), memory_bytes=2e6, reserved_bytes=0.0)
    rows = sweep("largest-model", config, 1, hardware, Roofline(hardware), frozenset()).rows
    assert [bool(row.found) for row in rows] == [True] + [False] * (len(rows) - 1) and len(rows) > 1
    assert rows[-1].shape == "; 4 layers, hidden size 64, 4 heads, ffn 256"
    assert [row.value for row in rows] == sorted({row.value for row in rows})


def test_no_model_at_all_is_status_2() -> None:
    small = ["--device-memory-budget-gb", "0.00001", "--what-if", "largest-model"]
    done = _plan(*SMALL, "--num-devices", "1", "--hardware", "cpu-2core", *small)
    assert done.returncode == 2 and "does not fit" in done.stdout
    assert done.stderr.splitlines()[-1].startswith("error: --what-if=largest-model: nothing fits; ")


def test_the_largest_model_is_read_without_a_guess() -> None:
    """From the configuration of the first run alone: the batch is that of one device; what the times are of is said."""
    quickstart = ["--config", str(ROOT / "configs" / "quickstart.yaml")]
    config, _ = resolve(quickstart, "", 1)
    assert config.training.global_batch_size == config.training.micro_batch_size == 16
    with pytest.raises(ConfigError, match="--global-batch-size: not given; say how many samples a step takes"):
        resolve(quickstart, "", 2)
    with pytest.raises(ConfigError, match="--vocab-size: not given, and no tokenizer.json is named"):
        resolve([*quickstart, "--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", "t.json"], "", 1)
    hardware = load_hardware("cpu-2core")
    text = table(sweep("largest-model", config, 1, hardware, Roofline(hardware), frozenset()))
    assert "1.82 M parameters" in text and "; 4 layers, hidden size 192, 4 heads, ffn 512\n" in text
    assert "the table ends" not in text and "does not fit: " in text
    assert "times are of 330 iterations, 676 k tokens: 0.00254 a parameter of the largest (20 are usual" in text
    assert "CPU, 2 cores: from a file, not this machine" in text


def test_a_picture_without_matplotlib_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ConfigError, match=r'--plot=picture.svg: needs the package matplotlib; pip install .*\[plot\]"'):
        check("picture.svg")


@pytest.mark.landing
def test_a_profile_of_this_machine_replaces_the_roofline(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    flags = ["--quick", "--micro-batches", "1,2", "--output", str(path)]
    done = run_warm("tools/profile_layers.py", *SMALL, *flags)
    assert done.returncode == 0, done.stderr
    profile = json.loads(path.read_text())
    assert [point["micro_batch_size"] for point in profile["points"]] == [1, 2]
    fixed = ["--micro-batch-size", "2", "--recompute-granularity", "full", "--hardware", "cpu-2core", "--json"]
    plans = {
        name: json.loads(_plan(*SMALL, "--num-devices", "1", *fixed, *more).stdout)["candidates"][0]
        for name, more in (("roofline", []), ("profile", ["--profile", str(path)]))
    }
    [_, point] = profile["points"]
    # four micro-batches through four blocks, each computed forward twice, an embedding and a head
    block = 2 * point["block"][0] + sum(point["block"][1:3]) - point["block"][3]
    ends = sum(sum(point[kind][:3]) - point[kind][3] for kind in ("embedding", "head"))
    overhead = 4 * 2 * 200e-6
    expected = 4 * (4 * block + ends) + overhead
    assert abs(plans["profile"]["step_time_parts_s"]["pipeline"] / expected - 1) < 0.3
    assert plans["profile"]["step_time_s"] != plans["roofline"]["step_time_s"]


def test_a_bare_profile_is_the_switch_of_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Scripts for pretrain_gpt.py give it without a file; the configuration that is written keeps it."""
    path = tmp_path / "plan.yaml"
    of_tool = ["--num-devices", "1", "--hardware", "cpu-2core", "--write-config", str(path)]
    for words in (["--profile", "--profile-step-start", "1"], ["--profile-step-end", "3", "--profile"]):
        assert main([*SMALL, *words, *of_tool]) == 0, capsys.readouterr().err
        assert "  profile: true\n" in path.read_text()
        path.unlink()
    assert main([*SMALL, *of_tool, "--profile", str(tmp_path / "none.json")]) == 2
    assert "none.json" in capsys.readouterr().err
