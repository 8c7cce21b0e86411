"""With the core dependencies alone everything works, or says in one line which extra it needs and what asked for it.

The optional packages are hidden from fresh processes here; scripts/fresh_machine.sh does it with an environment that
has none.
"""

from __future__ import annotations

import ast
import json
import os
import re
import runpy
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from megalite.comm.world import World
from megalite.convert.megatron_names import IMPLEMENTATIONS
from megalite.extras import EXTRA_OF
from megalite.testing import run_single
from tests.cli.core_only import hide_optional_packages
from tests.cli.typed import run_command
from tests.unit.inference.tiny_checkpoint import write_checkpoint

ROOT = Path(__file__).resolve().parents[2]
TOOLS = [
    path
    for path in [ROOT / "pretrain_gpt.py", *sorted(ROOT.glob("tools/*.py")), *sorted(ROOT.glob("benchmarks/*.py"))]
    if re.search(r"^if __name__", path.read_text(), re.M)
]
# It measures layers: nearly all of it is torch.
NEEDS_TORCH = {"profile_layers.py"}
TINY = (
    "--num-layers 2 --hidden-size 16 --ffn-hidden-size 32 --num-attention-heads 2 --seq-length 16 --micro-batch-size 2 "
    "--float32-matmul-precision highest"
)


def body_commands(world: World, folder: str, commands: list[str]) -> list[tuple[int, str]]:
    os.chdir(folder)
    hide_optional_packages()
    return [run_command(command) for command in commands]


def run_commands(folder: Path, commands: list[str]) -> list[tuple[int, str]]:
    """As `body_commands`, where README's paths mean something."""
    for name in ("README.md", "configs"):
        (folder / name).symlink_to(ROOT / name)
    results: list[tuple[int, str]] = run_single(body_commands, str(folder), commands, timeout=300)
    return results


def asks_for(extra: str, result: tuple[int, str], flag: str = "") -> bool:
    """Whether a command ended with the one line that it owes its user."""
    *before, line = result[1].splitlines()
    told = rf'error: {re.escape(flag)}.*: needs the package \w+; pip install (-e )?"[^"]*\[{extra}\]"'
    quiet = not any(word in "\n".join(before) for word in ("error", "Traceback"))
    return result[0] == 2 and quiet and re.fullmatch(told, line) is not None


def test_the_table_of_extras_is_that_of_pyproject() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    named = {
        requirement.partition(">=")[0]: extra
        for extra in sorted(set(EXTRA_OF.values()))
        for requirement in extras[extra]
    }
    assert named == EXTRA_OF
    assert extras["all"] == [f"megalite[{','.join(dict.fromkeys(EXTRA_OF.values()))}]"]


def test_no_module_imports_an_optional_package_at_its_top() -> None:
    problems = []
    apart = ROOT / "megalite/data/chat_renderer.py"  # a program of its own, started once its package has been found
    for path in {*ROOT.glob("megalite/**/*.py"), *TOOLS} - {apart}:
        for node in ast.parse(path.read_text()).body:
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            problems += [f"{path}:{node.lineno}: {name}" for name in names if name.partition(".")[0] in EXTRA_OF]
    assert not problems, "\n".join(problems)


@pytest.mark.landing
def test_every_tool_shows_its_help_and_but_one_without_torch(tmp_path: Path) -> None:
    """In one process that forks for each, so that it is fresh and costs what it imports."""
    program = Path(__file__).with_name("core_only.py")
    done = subprocess.run([sys.executable, program, *map(str, TOOLS)], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    shown = {Path(record["tool"]).name: record for record in map(json.loads, done.stdout.splitlines())}
    assert shown.keys() == {path.name for path in TOOLS} and len(shown) >= 20
    for name, record in shown.items():
        assert record["status"] == 0 and record["lines"] >= 3, record
        assert record["torch"] == (name in NEEDS_TORCH), f"{name} --help imports torch"


@pytest.mark.landing
def test_every_command_of_readme(tmp_path: Path) -> None:
    """With a tiny model; without the two plans, which only CI's trial waits for."""
    trials = runpy.run_path(str(ROOT / "scripts" / "readme_commands.py"))["trials"]()
    trials = [(extra, command) for extra, command in trials if "plan.py" not in command or extra != "-"]
    assert len(trials) >= 18
    text = (ROOT / "README.md").read_text().splitlines()
    (tmp_path / "corpus.jsonl").write_text("".join(json.dumps({"text": line}) + "\n" for line in text * 4))
    commands = []
    for _, command in trials:
        if "pretrain_gpt.py" in command:
            command += f" {TINY}" + ("" if "--data-path" in command else " --data-path README.md")
        commands.append(command)
    results = run_commands(tmp_path, commands)
    for (extra, _), command, result in zip(trials, commands, results, strict=True):
        assert asks_for(extra, result) if extra != "-" else result[0] == 0, f"{command}\n{result[1]}"


RUN = f"python pretrain_gpt.py --train-iters 1 --lr-warmup iters=0 {TINY} --config"
QUICKSTART = f"{RUN} configs/quickstart.yaml"
SENTENCEPIECE = "--tokenizer-type SentencePieceTokenizer"
PREPROCESS = "python tools/preprocess_data.py --output-prefix out --tokenizer-type ByteTokenizer --input"
TRAIN_TOKENIZER = "python tools/train_tokenizer.py --vocab-size 300 --output tokenizer"
CONVERT = "python tools/convert_checkpoint.py --from hf --to megalite --load no --save out"
PLAN = "python tools/plan.py --config configs/gpt2_345m.yaml --num-devices 2 --hardware h100 --what-if upgrades"
#: Extra, what the message begins with, command.
ASKING = [
    ("data", "--input=hf:wikitext", f"{PREPROCESS} hf:wikitext"),
    ("data", "--input=saved", f"{PREPROCESS} saved"),
    ("data", "--input=a.parquet", f"{PREPROCESS} a.parquet"),
    ("data", "--input=a.jsonl.zst", f"{PREPROCESS} a.jsonl.zst"),
    ("data", "--data-path=a.jsonl.zst", f"{QUICKSTART} --data-path a.jsonl.zst"),
    ("data", "--text-file=a.jsonl.zst", "python tools/evaluate.py --load run --text-file a.jsonl.zst --task lambada"),
    ("data", "--tokenizer-type=SentencePieceTokenizer", f"{QUICKSTART} {SENTENCEPIECE} --tokenizer-model m.model"),
    ("data", "--tokenizer-model=m.model", f"{RUN} no_tokenizer.yaml --tokenizer-model m.model"),
    ("data", "--model-type=sentencepiece", f"{TRAIN_TOKENIZER} --model-type sentencepiece"),
    ("hf", "--verify", f"{CONVERT} --verify"),
    ("hf", "--variants=transformers", "python benchmarks/single.py --models tiny --variants transformers"),
    ("plot", "--plot=a.png", f"{PLAN} --plot a.png"),
    ("eval", "--tasks=hellaswag", "python tools/evaluate_harness.py --load run --tasks hellaswag"),
]


def test_what_needs_more_says_which_extra_and_what_asked_for_it(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "run")
    (tmp_path / "saved").mkdir()
    (tmp_path / "saved" / "dataset_info.json").write_text("{}")
    for name in ("a.parquet", "a.jsonl.zst", "m.model"):
        (tmp_path / name).write_bytes(b"x")
    quickstart = (ROOT / "configs" / "quickstart.yaml").read_text()
    (tmp_path / "no_tokenizer.yaml").write_text(re.sub(r"data:\n +tokenizer_type.*\n", "", quickstart))
    trackers = [
        f"{QUICKSTART} --data-path README.md --eval-iters 0 --no-full-validation --tensorboard-dir tb",
        f"{QUICKSTART} --data-path README.md --eval-iters 0 --no-full-validation --wandb project=p",
    ]
    results = run_commands(tmp_path, [*trackers, *(command for *_, command in ASKING)])
    for flag, (status, output) in zip(("--tensorboard-dir=tb", "--wandb-project=p"), results[:2], strict=True):
        told = [line for line in output.splitlines() if "needs the package" in line]
        assert status == 0 and len(told) == 1, output
        assert f"training continues: {flag}: needs the package " in told[0]
        assert "; pip install " in told[0] and told[0].endswith('[track]"')
    for (extra, flag, command), result in zip(ASKING, results[2:], strict=True):
        assert asks_for(extra, result, flag), f"{command}\n{result}"


def test_the_converters_list_of_implementations_is_that_of_its_room() -> None:
    assert runpy.run_path(str(ROOT / "tools" / "convert_checkpoint.py"))["IMPLEMENTATIONS"] == IMPLEMENTATIONS


MODEL = "--mock-data --train-iters 1 --num-layers 1 --hidden-size 8 --num-attention-heads 1 --seq-length 8"
MODEL += " --vocab-size 9 --micro-batch-size 1 --lr 1"


@pytest.mark.parametrize(
    ("command", "lacks"),
    [
        ("pretrain_gpt.py", ["torch"]),
        ("pretrain_gpt.py", ["xxhash", "yaml"]),
        ("tools/plan.py", ["yaml"]),
        ("tools/preprocess_data.py", ["numpy", "safetensors", "tokenizers"]),
        ("tools/check_plan.py --quick", ["torch"]),
        ("tools/convert_checkpoint.py --from hf --to megalite --load no --save out", ["torch"]),
        ("tools/doctor.py", ["torch"]),
        ("tools/generate_text.py --load no --prompt a", ["torch"]),
        ("tools/inspect_checkpoint.py no", ["torch"]),
        ("tools/profile_layers.py --output no", ["torch"]),
        (f"tools/prove_layout.py {MODEL} --nprocs 2", ["torch"]),
    ],
)
def test_a_python_without_the_core_is_one_line(command: str, lacks: list[str], tmp_path: Path) -> None:
    script, *argv = command.split()
    code = (
        f"import runpy, sys; sys.modules.update(dict.fromkeys({lacks!r})); sys.argv = {[script, *argv]!r}; "
        f"sys.path[:0] = [{str(ROOT)!r}, {str(ROOT / 'tools')!r}]; "
        f"runpy.run_path({str(ROOT / script)!r}, run_name='__main__')"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    (line,) = done.stderr.splitlines()
    packages = ", ".join({"yaml": "pyyaml"}.get(name, name) for name in lacks)
    assert done.returncode == 2 and f"lacks {packages}; activate the environment" in line
