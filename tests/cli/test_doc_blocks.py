"""What README and docs/ print to be typed runs: every command, and every Python block as it is printed.

A page is a session: its commands run in their order in a folder where the names of the docs mean something, and its
Python blocks are the cells of one notebook. `SHORTER` makes them small, `NOT_RUN` says which stay out, and why.
README's commands run in test_core_only.py, by the rules of scripts/readme_commands.py.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

import plan
import profile_layers
from megalite.comm import World
from megalite.config import parse
from megalite.testing import run_single
from tests.cli.typed import ROOT, body_command

pytest.importorskip("transformers", reason="transformers is not installed")

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
SMALL = (
    "--lr-warmup iters=0 --num-layers 2 --hidden-size 16 --ffn-hidden-size 32 --num-attention-heads 2 "
    "--seq-length 16 --micro-batch-size 2 --float32-matmul-precision highest --no-full-validation --eval-iters 1"
)
TINY = f"--train-iters 2 {SMALL} --data-path README.md"
SEARCH = "which only CI's trial of README (scripts/fresh_machine.sh) and tests/cli/test_plan.py wait for"
#: What a command that is not run begins with or holds: why it is not.
NOT_RUN = {
    r"^(pip install|python3 -m venv|source) ": "needs a network: scripts/fresh_machine.sh makes an environment",
    r"s3://": "needs a store: tests/faults/test_store_faults.py trains with one",
    r"^sbatch": "needs SLURM: tests/cli/test_scripts.py runs scripts/slurm.sbatch with DRY_RUN=1",
    r"pretrain_gpt_multinode": "needs nodes: tests/cli/test_scripts.py runs it with DRY_RUN=1",
    r"--eval-tasks": "needs lm_eval: tests/equivalence/test_eval_tasks.py",
    r"evaluate_harness": "needs a network: tests/cli/test_generate_evaluate.py asks it with tasks of its own",
    r"benchmarks/": "measures for minutes: tests/cli/test_benchmarks.py",
    r"runs/(char|quick)\b": "trains for minutes: tests/equivalence/test_weight_averages.py",
    r"study_staleness": "trains for days: tests/unit/tools/test_study_staleness.py",
    r"profile_layers": "measures for minutes: tests/cli/test_plan.py",
    r"--sweep expanded_gb": "searches for 10 s: tests/unit/tools/test_plan_sweep.py",
    r"gpt3_175b|--what-if|frontier_1t": f"searches layouts for minutes, {SEARCH}",
}
LONG = ("conversion.md", "experts.md", "finetuning.md", "library.md", "memory.md", "planning.md", "proving.md")
#: What is printed, and what is tried of it. The first lines are names that stand for the reader's own.
SHORTER = (
    (r'"\$\{YOUR_ARGS\[@\]\}"', "--config configs/quickstart.yaml"),
    (r'from_pretrained\("gpt2"\)', 'from_pretrained("models/gpt2")'),
    (r'"exports/adapter"', '"made/adapter"'),
    (r"hidden_size=256", "hidden_size=16"),
    (r"configs/llama_7b.yaml(?= --seq-length)", f"configs/quickstart.yaml {TINY}"),
    (r"--seq-length 32768 --global-batch-size 128 --seq-length-schedule '0:4096 500B:32768'", 
     "--seq-length 32 --global-batch-size 4 --seq-length-schedule '0:8 64:32'"),
    (r"--nnodes .* 6000", "--standalone --nproc-per-node 2"),
    (r"(quickstart(_experts)?\.yaml)(?!.*--(dry-run|mock-data))(?! --config story)", rf"\1 {TINY}"),
    (r"(quickstart_experts\.yaml)(?=.*--mock-data)", rf"\1 {SMALL}"),
    (r"(?<=story\.yaml)(?!.*--dry-run)", f" {SMALL}"),
    (r"--train-iters 300(?! --dry-run)", "--train-iters 4"),
    (r"--train-iters 450", "--train-iters 6"),
    (r"--train-iters (8|100|500)\b", "--train-iters 2 --lr-warmup iters=0 --eval-iters 0"),
    (r"--train-iters 200", "--train-iters 4 --eval-iters 0"),
    (r"interval=50 prompts=prompts.jsonl tokens=64", "interval=2 prompts=prompts.jsonl tokens=4"),
    (r"--seq-length (512|256)", "--seq-length 32"),
    (r"(?<=--grad-reduce-in-bf16) --dry-run", " --ignore-memory-estimate --dry-run"),
    (r"--global-batch-size 64 ", "--global-batch-size 8 "),
    (r"--max-new-tokens \d+", "--max-new-tokens 4"),
    (r"max_new_tokens=100", "max_new_tokens=4"),
    (r"--vocab-size (4096|2048)", "--vocab-size 300"),
    (r"--iteration 1730", "--iteration 3"),
    (r"--num-devices 64$", "--num-devices 2"),
    (r"--partial-backprop-groups 4", "--partial-backprop-groups 2"),
    (r" --profile profile.json", ""),
    (r"--nprocs 8$", "--nprocs 2"),
    # else after two iterations nothing is left to do, or what is loaded has no schedules
    (r"--save runs/continued( --override-opt-param-scheduler)?", "--finetune --save runs/continued"),
    (r"--overlap 992", "--overlap 8"),
    (r"(shakespeare_char\.yaml) --data-path input\.txt", rf"\1 {TINY}"),
    (r"(?<=generate_text\.py --load )(models/chat|exports/merged)", "models/llama"),
    (r"runs/chat --chat --prompts talks\.jsonl", "made/lora --chat --prompts prompts.jsonl"),
)  # fmt: skip
TRAIN = f"python pretrain_gpt.py --config configs/quickstart.yaml {TINY} --train-iters 4 --save-interval 2"
CONVERT = "python tools/convert_checkpoint.py --from megalite --load runs/a"
DIFFER = "--diff runs/b"  # exit status 1, as its page says
#: What a page reads, and the command that makes it.
MADE = {
    "corpus_text_document": "python tools/preprocess_data.py --input corpus.jsonl --output-prefix corpus "
    "--append-eod --tokenizer-type ByteTokenizer",
    "runs/a": f"{TRAIN} --save runs/a --log-interval 1",
    "runs/b": f"{TRAIN} --save runs/b --seed 2",
    "made/lora": "python pretrain_gpt.py --load models/llama --use-checkpoint-args --seq-length 32 --lora rank=2 "
    "--data-path corpus.jsonl --split 1,0,0 --eval-iters 0 --micro-batch-size 1 --train-iters 1 --lr 1 "
    "--save made/lora",
    "made/adapter": "python tools/convert_checkpoint.py --from megalite --to peft --load made/lora --save made/adapter",
    "megatron/run": f"{CONVERT} --to megatron --ckpt-format torch_dist --no-load-optim --save megatron/run",
}
MINE = """
model: {num_layers: 4, hidden_size: 64, num_attention_heads: 4, seq_length: 64, vocab_size: 256}
training: {micro_batch_size: 1, global_batch_size: 16, train_iters: 10}
optimizer: {lr: 1.0e-3}
data: {mock_data: true}
"""
TALKS = [[("user", "1 + 1"), ("assistant", "2")], [("user", "and so "), ("assistant", "on, and so on " * 9)]]


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", page.read_text(), re.M | re.S)


def commands(page: Path) -> list[str]:
    """The commands of a page, one a line, without comments."""
    lines = "\n".join(blocks(page, "bash")).replace("\\\n", " ").splitlines()
    return [re.sub(r"\s+(#.*)?$|^#.*", "", re.sub(r" +", " ", line)) for line in lines if not re.match(r"#|\s*$", line)]


def shorter(text: str) -> str:
    for pattern, replacement in SHORTER:
        text = re.sub(pattern, replacement, text, flags=re.M)
    return text


def reason(command: str) -> str:
    """Why a command is not run; empty: it is."""
    return next((why for pattern, why in NOT_RUN.items() if re.search(pattern, command)), "")


def body_models(world: World, folder: str) -> None:
    """What a reader has from elsewhere: a Llama with a chat template and a GPT-2, of random weights."""
    from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

    from tests.unit.data.test_chat import CHATML, tokenizer_with

    sizes: Any = {"vocab_size": 300, "bos_token_id": 0, "eos_token_id": 1}
    llama = LlamaConfig(
        hidden_size=16, intermediate_size=32, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=4,
        max_position_embeddings=64, **sizes,
    )  # fmt: skip
    LlamaForCausalLM(llama).save_pretrained(f"{folder}/models/llama")
    tokenizer_with(CHATML, Path(folder) / "models/llama")
    GPT2LMHeadModel(GPT2Config(n_embd=16, n_layer=2, n_head=2, n_positions=64, **sizes)).save_pretrained(
        f"{folder}/models/gpt2"
    )


def body_cells(world: World, folder: str, cells: list[str]) -> str:
    """The blocks of a page as cells of one notebook."""
    os.chdir(folder)
    names: dict[str, Any] = {"__name__": "__main__"}
    for number, cell in enumerate(cells):
        exec(compile(cell, f"block {number}", "exec"), names)  # noqa: S102 (the project's own pages)
    sys.stdout.flush()
    return "done"


@pytest.fixture(scope="module")
def readers_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("reader")
    for name in ("README.md", "configs", "examples"):
        (folder / name).symlink_to(ROOT / name)
    lines = (ROOT / "README.md").read_text().splitlines()
    (folder / "corpus.jsonl").write_text("".join(json.dumps({"text": line}) + "\n" for line in lines * 2))
    talks = [{"messages": [{"role": role, "content": text} for role, text in talk]} for talk in TALKS * 20]
    (folder / "talks.jsonl").write_text("".join(json.dumps(talk) + "\n" for talk in talks))
    (folder / "story.txt").write_text((ROOT / "README.md").read_text() * 2)
    (folder / "prompts.jsonl").write_text('{"prompt": "def "}\n{"prompt": "class "}\n')
    (folder / "wiki.valid.tokens").write_text(" = A page = \n\n Some words , and more of them .\n" * 9)
    (folder / "lambada_test.jsonl").write_text('{"text": "one two three one two three"}\n' * 3)
    for name in ("mine.yaml", "my_model.yaml"):
        (folder / name).write_text(MINE)
    (folder / "run.yaml").write_text(re.sub(r"data:.*|, vocab_size: 256", "", MINE) + "tokenizer_type: ByteTokenizer\n")
    (folder / "jobs.yaml").write_text(blocks(ROOT / "docs" / "planning.md", "yaml")[-1])
    lists = {"web.txt": "README.md", "anneal.txt": "0.3 README.md 0.7 corpus.jsonl", "held_out.txt": lines[0] * 99}
    for name, words in lists.items():
        (folder / name).write_text(words)
    return folder


def typed(folder: Path, command: str) -> None:
    status, output = run_single(body_command, str(folder), command, timeout=300)
    assert status == (1 if DIFFER in command else 0), f"{command}\n{output}"


def make_what_is_read(text: str, folder: Path) -> None:
    """Of `MADE` and of other people's models what a text names."""
    if "models/" in text and not (folder / "models").exists():
        run_single(body_models, str(folder))
    needed = [name for name in MADE if name in text or any(name in MADE[other] for other in MADE if other in text)]
    for name in needed:
        if not list(folder.glob(f"{name}*")):
            typed(folder, MADE[name])


def cases(found: list[Path]) -> list[Any]:
    """Those that take long run with a landing."""
    return [pytest.param(p, id=p.name, marks=pytest.mark.landing if p.name in LONG else ()) for p in found]


@pytest.mark.in_turn
@pytest.mark.parametrize("page", cases([page for page in PAGES[1:] if not all(map(reason, commands(page)))]))
def test_every_command(page: Path, readers_folder: Path, tmp_path: Path) -> None:
    lines = [shorter(line) for line in commands(page) if not reason(line)]
    make_what_is_read("\n".join(lines), readers_folder)
    folder = tmp_path / "here"
    shutil.copytree(readers_folder, folder, symlinks=True)
    for block in blocks(page, "python") + blocks(page, "yaml"):
        if named := re.match(r"# (\w+\.(py|yaml))\n", block):
            (folder / named[1]).write_text(shorter(block))
    for line in lines:
        typed(folder, line)


def read_flags(words: list[str]) -> None:
    """Reads the flags of a command as its program does, and does nothing. Raises ConfigError."""
    program, argv = next((name, words[at + 1 :]) for at, name in enumerate(words) if name.endswith(".py"))
    if program == "tools/plan.py":
        args, rest = plan.parser().parse_known_args(argv)
        plan.resolve(rest, args.free, args.num_devices)
    elif program == "tools/profile_layers.py":
        profile_layers.settings(argv)
    elif program == "pretrain_gpt.py":
        parse(argv, world_size=8 if "torchrun" in words else None, check_files=False)


@pytest.mark.parametrize("page", [page for page in PAGES[1:] if any(map(reason, commands(page)))], ids=lambda p: p.name)
def test_what_is_not_run_has_flags_that_are_read(page: Path, readers_folder: Path, monkeypatch: Any) -> None:
    """Commands that take minutes, a cluster or a network: at least nothing in them is refused."""
    monkeypatch.chdir(readers_folder)
    for line in filter(reason, commands(page)):
        words = shlex.split(line.replace("TOKENIZER", "tokenizer.json"))
        if any(word.endswith(".py") for word in words):
            read_flags(words)


@pytest.mark.parametrize("page", cases([page for page in PAGES if blocks(page, "python")]))
def test_every_python_block(page: Path, readers_folder: Path, tmp_path: Path) -> None:
    cells = [shorter(block) for block in blocks(page, "python")]
    make_what_is_read("\n".join(cells), readers_folder)
    assert run_single(body_cells, str(readers_folder), cells, timeout=300) == "done"


def test_no_command_hides_in_another_block() -> None:
    """What is to be typed is marked as bash or Python, so that it is run."""
    for page in PAGES:
        if page.name == "rooms.md":  # docstrings
            continue
        text = re.sub(r"^```(bash|python)\n.*?^```$", "", page.read_text(), flags=re.M | re.S)
        hidden = re.findall(
            r"^ *\$? *(?:(?:python3?|torchrun) [^`\n]*\.py|pip install|(?:scripts|benchmarks)/\S+ ).*$", text, re.M
        )
        assert not hidden, f"{page.name}: {hidden}"


def test_reasons_and_abbreviations_are_needed() -> None:
    """Each fits something that is printed; a command that is run is a program of ours."""
    every = [line for page in PAGES[1:] for line in commands(page)]
    text = "\n".join([*every, *(block for page in PAGES for block in blocks(page, "python"))])
    for pattern in (*NOT_RUN, *(pattern for pattern, _ in SHORTER)):
        assert re.search(pattern, text, re.M), f"nothing is printed that {pattern!r} fits"
    for line in every:
        words = shlex.split(line)
        assert reason(line) or any(word.endswith(".py") and (ROOT / word).exists() for word in words), line
